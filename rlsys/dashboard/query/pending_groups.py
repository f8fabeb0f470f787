"""Pending groups, with their workers and ages."""

from __future__ import annotations

from collections import Counter
from statistics import median

from rlsys.dashboard.index.groups import PENDING, GroupFacts, Groups
from rlsys.dashboard.responses import LedgerAnswer, PendingRow

_LEAST_OVERDUE_S = 60.0
_OVERDUE = 10
"""A group is overdue after this multiple of the typical time."""


def ledger(groups: Groups, now_s: float) -> LedgerAnswer:
    """Every pending group as of `now_s`, oldest first, and counts of the others."""
    typical_s = median(groups.took_s) if groups.took_s else None
    known = [facts for group_id, facts in groups.by_group_id.items() if group_id not in groups.forgotten]
    pending = sorted(groups.pending, key=lambda facts: facts.issued_s)
    return LedgerAnswer(
        pending=[_row(facts, now_s, typical_s) for facts in pending],
        num_issued=len(known),
        num_trained=sum(facts.step is not None for facts in known),
        dropped=Counter(facts.reason for facts in known if facts.state == "dropped"),
        num_reissued=groups.num_reissued,
        typical_s=typical_s,
    )


def _row(facts: GroupFacts, now_s: float, typical_s: float | None) -> PendingRow:
    age_s = max(0.0, now_s - facts.issued_s)
    most_s = max(_LEAST_OVERDUE_S, _OVERDUE * (typical_s or 0.0))
    return PendingRow(
        group_id=facts.group_id,
        task_id=facts.task_id,
        state=PENDING[facts.state],
        worker=facts.where if facts.state == "is rolled out" else "",
        age_s=age_s,
        state_s=max(0.0, now_s - facts.since_s),
        num_attempts=facts.num_attempts,
        last_reason=facts.reason,
        is_overdue=age_s > most_s and facts.state != "waits to be trained",
    )
