"""The partial response pool: tokens of unfinished groups, kept outside the replica so that they survive its death.

As in Laminar (arXiv:2510.12633, section 5): tokens are streamed here while they are sampled, and a group that is
reissued begins with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rlsys.errors import WorkerError
from rlsys.types import Acknowledged, PolicyVersion
from rlsys.util.deadlines import remote
from workers.engines.engine import Completion, Engine
from workers.rollout.group_route import EngineStay, Ticket

ENDED_KEPT = 10_000
"""Number of recently ended attempts to remember. Their late notes are ignored: a note may arrive after `forget`."""


@dataclass(frozen=True, slots=True)
class Note:
    """Tokens that one request has sampled since the previous note."""

    ticket: Ticket
    seed: int
    """Seed of the request; unique within a group."""
    num_before: int
    """Number of tokens in earlier notes; 0 starts the request again."""
    more: Partial
    """The new tokens. The prompt is empty if an earlier note contains it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens of one request so far."""

    prompt_ids: tuple[int, ...]
    done: Completion
    """`finish` is None while the request runs."""
    weights: tuple[Acknowledged, ...]
    """The replica's acknowledgement of every version in `done`."""


class Partials:
    """Tokens sampled by unfinished groups. Called from another process, every method may raise `WorkerError`."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, Partial]] = {}
        self._ended: dict[Ticket, None] = {}

    @remote("keeping what was sampled")
    async def record(self, notes: Sequence[Note]) -> list[tuple[int, int]]:
        """Keep `notes`. Returns (group id, seed) of notes that do not follow the kept tokens: they must start again."""
        return [(note.ticket.group_id, note.seed) for note in notes if not self._keep(note)]

    def _keep(self, note: Note) -> bool:
        if note.ticket in self._ended:
            return True
        requests = self._kept.setdefault(note.ticket.group_id, {})
        if note.num_before == 0:
            requests[note.seed] = note.more
            return True
        known = requests.get(note.seed)
        if known is None or len(known.done.output_ids) != note.num_before:
            return False
        weights = tuple(dict.fromkeys([*known.weights, *note.more.weights]))
        requests[note.seed] = replace(known, done=known.done.then(note.more.done), weights=weights)
        return True

    @remote("recalling a group")
    async def recall(self, group_id: int) -> Mapping[int, Partial]:
        """The kept tokens of a group, by the seed of each request."""
        return dict(self._kept.get(group_id, {}))

    @remote("recalling a group's version")
    async def version(self, group_id: int) -> PolicyVersion | None:
        """The newest version in the kept tokens of a group; None if there are none."""
        spans = [span for partial in self._kept.get(group_id, {}).values() for span in partial.done.versions]
        return max((span.version for span in spans), default=None)

    @remote("forgetting a group")
    async def forget(self, ticket: Ticket) -> None:
        """Drop the tokens of an attempt that has ended. The group may still be reissued if it is lost later."""
        self._kept.pop(ticket.group_id, None)
        self._ended[ticket] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]


def usable(
    partials: Mapping[int, Partial],
    own: Mapping[PolicyVersion, Acknowledged],
    oldest: PolicyVersion,
    newest: PolicyVersion | None = None,
) -> dict[int, Partial]:
    """Select the `partials` that a replica with the acknowledgements `own` can continue.

    Drops partials with a version whose hash differs from that in `own`, and partials with a token older than `oldest`
    or newer than `newest`, if given.
    """

    def fits(partial: Partial) -> bool:
        others = [a for a in partial.weights if a.version in own and own[a.version].hash != a.hash]
        versions = [span.version for span in partial.done.versions]
        return not others and all(v >= oldest and (newest is None or v <= newest) for v in versions)

    return {seed: partial for seed, partial in partials.items() if fits(partial)}


class PartialStream:
    """Connection of one replica to the pool. Without the pool, reissued groups start from scratch."""

    def __init__(self, store: Partials, period_s: float = 1.0) -> None:
        """`period_s`: seconds between two rounds. Groups that end within one period are not recorded."""
        self.store, self._period_s = store, period_s

    async def run(
        self, engine: Engine, stays: Mapping[Ticket, EngineStay], weights: Mapping[PolicyVersion, Acknowledged]
    ) -> None:
        """Record the tokens of the groups on `engine`, forever.

        Consumes tokens, produces notes. Waits for the period; nothing else unblocks it: an engine announces no token.
        """
        while True:
            await asyncio.sleep(self._period_s)
            with suppress(WorkerError):  # the pool or the engine has died; the next round sends everything again
                await self.note(engine, stays.values(), weights)

    async def note(
        self, engine: Engine, here: Iterable[EngineStay], weights: Mapping[PolicyVersion, Acknowledged]
    ) -> None:
        """Send one round: all new tokens of groups that are older than the period.

        `weights` are the replica's acknowledgements. Tokens of other versions are left for a later round.
        """
        stays = [stay for stay in here if self.is_due(stay.since_s)]
        progress = await engine.progress() if any(stay.running for stay in stays) else {}
        notes = [(stay, done, note) for stay in stays for done, note in _notes(stay, progress, weights)]
        if not notes:
            return
        unknown = set(await self.store.record([note for _, _, note in notes]))
        for stay, done, note in notes:
            if (note.ticket.group_id, note.seed) in unknown:
                stay.noted.pop(note.seed, None)
                continue
            stay.noted[note.seed] = len(done.output_ids)
            stay.finished = [(request, other) for request, other in stay.finished if other is not done]

    def is_due(self, since_s: float) -> bool:
        """True if a group with this start (monotonic clock) is old enough to be recorded."""
        return time.monotonic() - since_s >= self._period_s


def _notes(
    stay: EngineStay, progress: Mapping[str, Completion], weights: Mapping[PolicyVersion, Acknowledged]
) -> list[tuple[Completion, Note]]:
    """New tokens of one group: each completion so far, and its note."""
    notes = []
    going_on = [(request, progress[i]) for i, request in stay.running.items() if i in progress]
    for request, done in [*stay.finished, *going_on]:
        num_before = stay.noted.get(request.seed, 0)
        is_known = all(span.version in weights for span in done.versions)
        if is_known and (done.finish or len(done.output_ids) > num_before):
            held = tuple(weights[span.version] for span in done.versions)
            more = Partial(() if num_before else request.prompt_ids, done.since(num_before), held)
            notes.append((done, Note(stay.ticket, request.seed, num_before, more)))
    return notes
