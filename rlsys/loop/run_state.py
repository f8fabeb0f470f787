"""State of a run that is saved into one checkpoint, and restored from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rlsys.algorithm import Algorithm, version_after
from rlsys.contracts import Workers
from rlsys.errors import CheckpointError, PayloadLost
from rlsys.loop.checkpoint import Checkpoints, DriverState, check_written, read_state
from rlsys.loop.failed_step import ACTOR, CRITIC, GROUPS
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.in_flight_group import InFlightGroup
from rlsys.weight_sync.sync import WeightSync

OnLoss: TypeAlias = Callable[[PayloadLost, Sequence[InFlightGroup]], list[InFlightGroup]]
"""Called with lost groups among the given ones; returns the others."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Weights, optimizers, finished untrained groups, pending groups, hashes of published weights, last metrics."""

    workers: Workers
    algorithm: Algorithm
    queue: GroupQueue
    weights: WeightSync
    checkpoints: Checkpoints

    async def save(self, step: int, past: Mapping[str, float], on_loss: OnLoss) -> Path:
        """Write the checkpoint of `step`, whose metrics are `past`; return its folder.

        Finished groups whose payload is lost are passed to `on_loss`, and left out. Raises `CheckpointError`; earlier
        checkpoints stay.
        """
        finished = self.queue.finished  # the hashes of all their versions have arrived: they were verified
        state = DriverState(step, dict(self.weights.published), self.queue.ledger.state(), dict(past))

        async def write(folder: Path) -> None:
            await save_models(self.workers, folder)
            await self._save_groups(folder / GROUPS, finished, on_loss)

        return await self.checkpoints.save(step, state, write)

    async def _save_groups(self, path: Path, finished: Sequence[InFlightGroup], on_loss: OnLoss) -> None:
        try:
            await self.workers.actor.save_groups(path, [each.group for each in finished])
        except PayloadLost as error:
            await self._save_groups(path, on_loss(error, finished), on_loss)

    async def restore(self, checkpoint: Path, steps: int) -> DriverState:
        """Load a checkpoint into all parts, for a run of `steps` steps in total; return its driver state.

        Finished groups are rolled out again if they do not fit a smaller queue or shorter run, or would be too stale at
        their turn. Steps are synchronous as long as the restored stabilizer needs it. Raises `CheckpointError`, or
        `DataError` if the tasks have changed.
        """
        state = read_state(checkpoint)
        queue, version = self.queue, state.version
        num_synchronous = await self._load(checkpoint)
        queue.synchronous_until = version_after(self.algorithm, num_synchronous, start=version, end=steps)
        num_groups = max(0, steps - version) * queue.groups_per_step
        room = min(queue.permits_at(version), num_groups)
        places = {entry.group_id: place for place, entry in enumerate(state.ledger.pending[:room])}
        groups = await self.workers.actor.load_groups(checkpoint / GROUPS)
        finished = [group for group in groups if group.group_id in places]
        finished = [group for group in finished if queue.is_in_time(group, places[group.group_id], version)]
        self.weights.published |= state.published
        queue.restore(state.ledger, version, num_groups, finished)
        self.checkpoints.last_saved = version
        return state

    async def _load(self, checkpoint: Path) -> int:
        """Restore the models; return the number of further steps that the stabilizer needs without staleness."""
        critic, folder = self.workers.critic, checkpoint / CRITIC
        if critic is not None and not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint} holds no critic, and the algorithm needs one: resume with the algorithm that saved it, "
                "or start a new run from its weights, as `rlsys export` writes them"
            )
        num_synchronous = await self.workers.actor.load(checkpoint / ACTOR)
        if critic is not None:
            await critic.load(folder)
        return num_synchronous


async def save_models(workers: Workers, folder: Path) -> None:
    """Write actor, and critic if there is one, into `folder`. Raises `CheckpointError`."""
    await workers.actor.save(folder / ACTOR)
    check_written(folder / ACTOR)
    if workers.critic is not None:
        await workers.critic.save(folder / CRITIC)
        check_written(folder / CRITIC)
