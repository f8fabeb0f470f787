"""The partial response pool: what groups that are not done have sampled, so that it survives the replica they were on.

As in Laminar (arXiv:2510.12633, section 5): tokens are streamed here while they are sampled, and a group that is issued
again begins with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlsys.types import Acknowledged, PolicyVersion
from rlsys.util.deadlines import remote
from workers.engines.engine import Completion
from workers.rollout.occupancy import Ticket

ENDED_KEPT = 10_000
"""Attempts that ended last, of which nothing is noted any more: a note may be slower than the word that its group
ended."""


@dataclass(frozen=True, slots=True)
class Note:
    """What one request has sampled since the note before."""

    ticket: Ticket
    seed: int
    """Of the request; tells those of a group apart."""
    prompt_ids: tuple[int, ...]
    """Empty where a note before told them."""
    num_before: int
    """Tokens that the notes before told of; 0 begins anew."""
    more: Completion
    """What followed; its `finish` is None if the request still runs."""
    weights: tuple[Acknowledged, ...]
    """The replica's acknowledgement of every version in `more`."""


@dataclass(frozen=True, slots=True)
class Partial:
    """All that is known of one request."""

    prompt_ids: tuple[int, ...]
    done: Completion
    weights: tuple[Acknowledged, ...]


class Partials:
    """Tokens that groups which are not done have sampled. From another process every method may raise `WorkerError`."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, Partial]] = {}
        self._ended: dict[Ticket, None] = {}

    @remote("keeping what was sampled")
    async def record(self, notes: Sequence[Note]) -> list[tuple[int, int]]:
        """Keep `notes`. Returns (group_id, seed) of those that do not follow what is kept: those begin anew."""
        return [(note.ticket.group_id, note.seed) for note in notes if not self._keep(note)]

    def _keep(self, note: Note) -> bool:
        if note.ticket in self._ended:
            return True
        requests = self._kept.setdefault(note.ticket.group_id, {})
        if note.num_before == 0:
            requests[note.seed] = Partial(note.prompt_ids, note.more, note.weights)
            return True
        known = requests.get(note.seed)
        if known is None or len(known.done.output_ids) != note.num_before:
            return False
        weights = tuple(dict.fromkeys([*known.weights, *note.weights]))
        requests[note.seed] = replace(known, done=known.done.then(note.more), weights=weights)
        return True

    @remote("recalling a group")
    async def recall(self, group_id: int) -> Mapping[int, Partial]:
        """What is kept of a group, by the seed of each request."""
        return dict(self._kept.get(group_id, {}))

    @remote("recalling a group's version")
    async def version(self, group_id: int) -> PolicyVersion | None:
        """The newest version of what is kept of a group; None if that is nothing."""
        spans = [span for partial in self._kept.get(group_id, {}).values() for span in partial.done.versions]
        return max((span.version for span in spans), default=None)

    @remote("forgetting a group")
    async def forget(self, ticket: Ticket) -> None:
        """A group has ended with this attempt. It may be issued again all the same, if it is lost later."""
        self._kept.pop(ticket.group_id, None)
        self._ended[ticket] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]


@dataclass(frozen=True, slots=True)
class Fits:
    """Versions that a group may have tokens of."""

    oldest: PolicyVersion
    newest: PolicyVersion | None = None
    """None: any from `oldest` on."""

    def __contains__(self, version: PolicyVersion) -> bool:
        return version >= self.oldest and (self.newest is None or version <= self.newest)


def usable(
    partials: Mapping[int, Partial], own: Mapping[PolicyVersion, Acknowledged], versions: Fits
) -> dict[int, Partial]:
    """Those of `partials` that a replica which acknowledges `own` can go on with.

    None that was sampled from weights with another hash than its own of that version, and none with a token of a
    version that is not among `versions`.
    """

    def fits(partial: Partial) -> bool:
        others = [a for a in partial.weights if a.version in own and own[a.version].hash != a.hash]
        return not others and all(span.version in versions for span in partial.done.versions)

    return {seed: partial for seed, partial in partials.items() if fits(partial)}


def acknowledged_by(partials: Iterable[Partial]) -> dict[PolicyVersion, Acknowledged]:
    """The acknowledgements that came with `partials`, by version."""
    return {a.version: a for partial in partials for a in partial.weights}
