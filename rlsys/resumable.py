"""The parts of a run that survive it: saved together into a checkpoint, and restored from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.checkpoint import Checkpoints, DriverState, read_state
from rlsys.contracts import Actor
from rlsys.errors import CheckpointError, PayloadLost
from rlsys.ledger import Ledger
from rlsys.queue import StreamingQueue
from rlsys.table import Row
from rlsys.types import PolicyVersion
from rlsys.weights import WeightSync


@dataclass(frozen=True, slots=True)
class Resumable:
    """Weights and optimizer, groups that are finished and not trained, what is issued, hashes of published weights."""

    actor: Actor
    queue: StreamingQueue
    ledger: Ledger
    weights: WeightSync
    checkpoints: Checkpoints

    async def save(self, step: int, on_loss: Callable[[PayloadLost, Sequence[Row]], list[Row]]) -> Path:
        """Write the checkpoint of `step`; returns its folder. Raises `CheckpointError`; those before it stay.

        Finished groups whose payload is gone are left out: `on_loss` is told, and returns the others.
        """
        finished = self.queue.finished  # the hashes of all their versions have arrived: they were verified
        state = DriverState(step, dict(self.weights.published), self.ledger.state())

        async def write(folder: Path) -> None:
            await self.actor.save(folder / "actor")
            if not _has_files(folder / "actor"):
                unseen = f"the ranks wrote to {folder}, but not where the driver sees it: share run.folder"
                raise CheckpointError(unseen)
            await self._save_groups(folder / "groups.jsonl", finished, on_loss)

        return await self.checkpoints.save(step, state, write)

    async def _save_groups(
        self, path: Path, rows: Sequence[Row], on_loss: Callable[[PayloadLost, Sequence[Row]], list[Row]]
    ) -> None:
        try:
            await self.actor.save_groups(path, [row.group for row in rows])
        except PayloadLost as error:
            await self._save_groups(path, on_loss(error, rows), on_loss)

    async def restore(self, checkpoint: Path, steps: int) -> PolicyVersion:
        """Load a checkpoint into all parts, for a run of `steps` in all; returns its version.

        Finished groups that a smaller queue or a shorter run has no room for are rolled out again when their turn
        comes. Raises `CheckpointError`, or `DataError` if the tasks have changed since.
        """
        state = read_state(checkpoint)
        await self.actor.load(checkpoint / "actor")
        num_groups = max(0, steps - state.version) * self.queue.groups_per_step
        fitting = [e.serial for e in state.ledger.pending[: min(self.queue.capacity, num_groups)]]
        groups = await self.actor.load_groups(checkpoint / "groups.jsonl")
        finished = [group for group in groups if group.serial in fitting]
        self.weights.published |= state.published
        self.ledger.restore(state.ledger, {group.serial for group in finished})
        self.queue.restore(state.version, num_groups, finished, fitting)
        self.checkpoints.last_saved = state.version
        return state.version


def _has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))
