"""The simulated trainer and judges: `rlsys.contracts.Actor` and `Rewards` whose work takes the time a profile says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.algorithm import Algorithm, Assigned, Signal
from rlsys.batch.plan import BatchPlan
from rlsys.contracts import Busy, Judged, Published, TrainStats
from rlsys.curation import Graft
from rlsys.simulate.profile import Profile
from rlsys.simulate.relays import SimRelays
from rlsys.types import Group, PolicyVersion, Ref, Score, Task


@dataclass(frozen=True, kw_only=True)
class Simulated(Algorithm):
    """Every trajectory is trained; what it learns is nobody's business here."""

    @property
    def max_safe_staleness(self) -> int | None:
        return None

    def advantages(self, group: Group) -> Iterator[Assigned]:
        for (e, t), _ in group.trajectories():
            yield Assigned(e, t, 1.0)


class SimActor:
    """A trainer: `train` says how long a step takes, `relays` take its weights."""

    def __init__(self, profile: Profile, relays: SimRelays) -> None:
        self._profile, self._relays = profile, relays
        self.version: PolicyVersion = 0
        self._fetched: Sequence[Group] = ()
        self.trained: list[Group] = []
        """All groups, in the order they were trained."""
        self.staleness: list[Counter[int]] = []
        """Per step, trained tokens by the versions they were behind."""
        self.train_s: list[float] = []
        self.stall_s: list[float] = []
        """Per publish."""

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        self._fetched = groups

    async def train_step(self, plan: BatchPlan, columns: Mapping[Signal, Sequence[Ref]]) -> TrainStats:
        groups, train = self._fetched, self._profile.train
        num_tokens = sum(group.num_trained for group in groups)
        seconds = train.fixed_s + num_tokens / (train.tokens_per_s * self._profile.train_gpus)
        await asyncio.sleep(seconds + (self._profile.switch_s if self._profile.colocated else 0.0))
        behind: Counter[int] = Counter()
        for group in groups:
            for span in group.versions:
                behind[self.version - span.version] += span.num_tokens
        self.staleness.append(behind)
        self.train_s.append(seconds)
        self.trained += groups
        return TrainStats({}, seconds)

    async def publish(self, version: PolicyVersion) -> Published:
        began = asyncio.get_running_loop().time()
        weights = self._profile.weights
        await asyncio.sleep(weights.num_bytes / weights.push_bytes_per_s)
        self.version = version
        self._relays.publish(version)
        self.stall_s.append(asyncio.get_running_loop().time() - began)
        return Published(version, weights.num_bytes, self.stall_s[-1])

    async def announce_again(self, version: PolicyVersion) -> None:
        """Relays lose nothing here."""

    async def save(self, folder: Path) -> None:
        _write(folder, self.version)

    async def load(self, folder: Path) -> int:
        self.version = _read(folder)
        return 0

    async def record(
        self,
        path: Path,
        step: int,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        assigned: Sequence[Sequence[Assigned]],
    ) -> None:
        """Nothing: there is no text."""

    async def save_groups(self, path: Path, groups: Sequence[Group]) -> None:
        """Nothing: a simulation is not resumed."""

    async def load_groups(self, path: Path) -> list[Group]:
        return []


def _write(folder: Path, version: PolicyVersion) -> None:
    folder.mkdir(parents=True)
    (folder / "version").write_text(str(version))


def _read(folder: Path) -> PolicyVersion:
    return int((folder / "version").read_text())


class SimRewards:
    """Judges of whom there are always enough."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, task: Task, group: Group) -> Judged:
        start_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self._seconds)
        scores = tuple(Score(float((group.serial + e) % 2)) for e in range(len(group.episodes)))
        return Judged(scores, Busy("reward", start_s, start_s + self._seconds))

    async def graft(self, graft: Graft) -> Group:
        raise AssertionError("nothing is curated here, so no success is stored")

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Nobody dies here."""
