"""Stream a replica's tokens into the partial response pool, and read back those of a group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from rlsys.errors import WorkerError
from rlsys.types import Acknowledged, PolicyVersion
from workers.engines.engine import Completion, Engine, Request
from workers.rollout.occupancy import EngineStay, Occupancy, Ticket
from workers.rollout.partial_responses import Fits, Note, Partial, Partials, usable


class PartialStream:
    """Connection of one replica to the pool. Without the pool, reissued groups start from scratch."""

    def __init__(self, store: Partials, period_s: float = 1.0) -> None:
        """`period_s`: seconds between two rounds. Groups that end within one period are not recorded."""
        self._store, self._period_s = store, period_s

    async def run(self, engine: Engine, here: Occupancy, weights: Mapping[PolicyVersion, Acknowledged]) -> None:
        """Record the tokens of groups on `engine`, forever.

        Consumes tokens, produces notes. Waits for the period; nothing else unblocks it: an engine announces no token.
        """
        while True:
            await asyncio.sleep(self._period_s)
            with suppress(WorkerError):  # the pool or the engine has died; the next round sends everything again
                await self.note(engine, here, weights)

    async def note(self, engine: Engine, here: Occupancy, weights: Mapping[PolicyVersion, Acknowledged]) -> None:
        """Send one round: all new tokens of groups that are older than the period.

        `weights` are the replica's acknowledgements. Tokens of other versions are left for a later round.
        """
        stays = [stay for stay in here if self.is_due(stay.since_s)]
        progress = await engine.progress() if any(stay.running for stay in stays) else {}
        notes = [(stay, done, note) for stay in stays for done, note in _notes(stay, progress, weights)]
        if not notes:
            return
        unknown = set(await self._store.record([note for _, _, note in notes]))
        for stay, done, note in notes:
            if (note.ticket.group_id, note.seed) in unknown:
                stay.noted.pop(note.seed, None)
                continue
            stay.noted[note.seed] = len(done.output_ids)
            stay.finished = [(request, other) for request, other in stay.finished if other is not done]

    async def recall(
        self, group_id: int, weights: Mapping[PolicyVersion, Acknowledged], versions: Fits
    ) -> dict[int, Partial]:
        """Tokens with which a reissued group can begin, by the seed of each request; see `usable`."""
        try:
            return usable(await self._store.recall(group_id), weights, versions)
        except WorkerError:
            return {}

    async def forget(self, ticket: Ticket) -> None:
        """Drop the tokens of an attempt that has ended."""
        with suppress(WorkerError):
            await self._store.forget(ticket)

    def is_due(self, since_s: float) -> bool:
        """True if a group with this start (monotonic clock) is old enough to be recorded."""
        return time.monotonic() - since_s >= self._period_s


def _notes(
    stay: EngineStay, progress: Mapping[str, Completion], weights: Mapping[PolicyVersion, Acknowledged]
) -> list[tuple[Completion, Note]]:
    """New tokens of one group: each completion so far, and its note."""
    going_on = [(request, progress[i]) for i, request in stay.running.items() if i in progress]
    return [
        (done, _note(stay, request, done, weights))
        for request, done in [*stay.finished, *going_on]
        if done.finish or len(done.output_ids) > stay.noted.get(request.seed, 0)
        if all(span.version in weights for span in done.versions)
    ]


def _note(stay: EngineStay, request: Request, done: Completion, weights: Mapping[PolicyVersion, Acknowledged]) -> Note:
    num_before = stay.noted.get(request.seed, 0)
    return Note(
        ticket=stay.ticket,
        seed=request.seed,
        prompt_ids=() if num_before else request.prompt_ids,
        num_before=num_before,
        more=done.since(num_before),
        weights=tuple(weights[span.version] for span in done.versions),
    )
