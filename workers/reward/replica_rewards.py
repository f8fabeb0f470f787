"""Rewards of groups that their replica has scored already: no process is needed for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlsys.contracts import GroupScores
from rlsys.errors import RunAborted
from rlsys.types import Busy, Group, Task


class ReplicaRewards:
    """Implements `Rewards` for `reward.workers: 0`."""

    async def ready(self) -> None:
        """Return: there is nothing to set up."""

    async def close(self) -> None:
        """Return: there is nothing to end."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        """Return the scores of the group. Raises `RunAborted` for one that was rolled out where no replica scores."""
        if group.scores is None:
            raise RunAborted(f"group {group.group_id} has no scores of its replica: set reward.workers to 1 or more")
        now = time.monotonic()
        return GroupScores(group.scores, Busy(group.replica, now, now))

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Return: there is no worker."""
