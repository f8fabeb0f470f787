"""Freshness of weights: seconds from the end of a publish to the last replica's open gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.types import PolicyVersion, Pull

RECENT = 8
"""A replica counts while it has changed to one of so many versions before; another one is gone, or has no work."""


@dataclass
class Freshness:
    """Times of the publishes and of the weight changes that follow them, on one clock."""

    lag: int
    """Versions after which the groups of a version have reported the changes that they met: the staleness bound."""
    _published_s: dict[PolicyVersion, float] = field(default_factory=dict, init=False)
    _changed_s: dict[str, list[tuple[PolicyVersion, float]]] = field(default_factory=dict, init=False)
    """By replica: the versions that it changed to, and when its gate was open, as reported: a long group reports an
    older change after a newer one."""

    def note_publish(self, version: PolicyVersion, at_s: float) -> float | None:
        """Note the end of a publish; return the seconds that version `version - lag - 1` took, or None if a replica
        that counts has not changed to it or to a newer one."""
        self._published_s[version] = at_s
        settled = version - self.lag - 1
        began_s = self._published_s.pop(settled, None)
        newest = {replica: max(changes)[0] for replica, changes in self._changed_s.items()}
        for gone in [replica for replica, reached in newest.items() if reached < settled - RECENT]:
            del self._changed_s[gone]
        ends = [min((at for v, at in changes if v >= settled), default=None) for changes in self._changed_s.values()]
        for replica, changes in self._changed_s.items():
            self._changed_s[replica] = [change for change in changes if change[0] >= settled] or [max(changes)]
        if began_s is None or not ends or None in ends:
            return None
        return max(end for end in ends if end is not None) - began_s

    def note_pulls(self, pulls: Sequence[Pull], ahead_s: float) -> None:
        """Note weight changes, whose clock is `ahead_s` behind that of the publishes."""
        for pull in pulls:
            self._changed_s.setdefault(pull.worker, []).append((pull.version, pull.end_s + ahead_s))
