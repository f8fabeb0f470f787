"""The partial response pool: tokens of unfinished groups, kept outside the replica so that they survive its death.

As in Laminar (arXiv:2510.12633, section 5): tokens are streamed here while they are sampled, and a group that is
reissued begins with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlsys.errors import WorkerError
from rlsys.types import Acknowledged, PolicyVersion
from rlsys.util.deadlines import remote
from rlsys.weight_sync.relay import Relay
from workers.engines.engine import Completion, Engine, joined_spans
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


class _Pieces:
    """The notes of one request, which `whole` joins: the cost of keeping one grows with what is new alone."""

    def __init__(self, first: Partial) -> None:
        self._parts = [first]
        self.num_tokens = len(first.done.output_ids)

    def add(self, more: Partial) -> None:
        self._parts.append(more)
        self.num_tokens += len(more.done.output_ids)

    @property
    def newest_version(self) -> PolicyVersion | None:
        return max((span.version for part in self._parts for span in part.done.versions), default=None)

    def whole(self) -> Partial:
        first, last = self._parts[0], self._parts[-1].done
        parts = [part.done for part in self._parts]
        done = Completion(
            tuple(token for part in parts for token in part.output_ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            joined_spans(span for part in parts for span in part.versions),
            last.finish,
            tuple(place for part in parts for place in part.routing),
            last.cache,
        )
        return Partial(first.prompt_ids, done, tuple(dict.fromkeys(a for part in self._parts for a in part.weights)))


class Partials:
    """Tokens sampled by unfinished groups. Called from another process, every method may raise `WorkerError`."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, _Pieces]] = {}
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
            requests[note.seed] = _Pieces(note.more)
            return True
        known = requests.get(note.seed)
        if known is None or known.num_tokens != note.num_before:
            return False
        known.add(note.more)
        return True

    @remote("recalling a group")
    async def recall(self, group_id: int) -> Mapping[int, Partial]:
        """The kept tokens of a group, by the seed of each request."""
        return {seed: kept.whole() for seed, kept in self._kept.get(group_id, {}).items()}

    @remote("recalling a group's version")
    async def version(self, group_id: int) -> PolicyVersion | None:
        """The newest version in the kept tokens of a group; None if there are none."""
        newest = (kept.newest_version for kept in self._kept.get(group_id, {}).values())
        return max((version for version in newest if version is not None), default=None)

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


class PartialsRelay(Relay):
    """A relay whose process also keeps partial responses."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401  (those of a relay)
        super().__init__(*args, **named)
        self.partials = Partials()


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
        known = {i: stay.noted.get(request.seed, 0) for stay in stays for i, request in stay.running.items()}
        progress = await engine.progress(known) if known else {}
        notes = [(stay, note) for stay in stays for note in _notes(stay, progress, weights)]
        if not notes:
            return
        unknown = set(await self.store.record([note for _, note in notes]))
        for stay, note in notes:
            if (note.ticket.group_id, note.seed) in unknown:
                stay.noted.pop(note.seed, None)
                continue
            stay.noted[note.seed] = note.num_before + len(note.more.done.output_ids)
            if note.more.done.finish:
                stay.finished = [(request, done) for request, done in stay.finished if request.seed != note.seed]

    def is_due(self, since_s: float) -> bool:
        """True if a group with this start (monotonic clock) is old enough to be recorded."""
        return time.monotonic() - since_s >= self._period_s


def _notes(
    stay: EngineStay, progress: Mapping[str, Completion], weights: Mapping[PolicyVersion, Acknowledged]
) -> list[Note]:
    """New tokens of one group."""
    notes = []
    ended = [(request, done.since(stay.noted.get(request.seed, 0))) for request, done in stay.finished]
    going_on = [(request, progress[i]) for i, request in stay.running.items() if i in progress]
    for request, done in [*ended, *going_on]:
        num_before = stay.noted.get(request.seed, 0)
        if all(span.version in weights for span in done.versions):
            held = tuple(weights[span.version] for span in done.versions)
            more = Partial(() if num_before else request.prompt_ids, done, held)
            notes.append(Note(stay.ticket, request.seed, num_before, more))
    return notes
