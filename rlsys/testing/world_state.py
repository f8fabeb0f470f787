"""What the workers of a fake cluster share."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.errors import PayloadLost
from rlsys.types import (
    POLICY,
    Assignment,
    Episode,
    Group,
    PolicyVersion,
    Ref,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)
from rlsys.util.any_paths import AnyPath

Spans = tuple[VersionSpan, ...]
JUDGE_RAISED = "the judge raised"


class Fault(Enum):
    """Fault of one call of a fake worker."""

    DIES = "dies"
    """The worker dies; calls fail until it is restarted."""
    HANGS = "hangs"
    """The call does not return within its deadline."""
    WRONG_WEIGHTS = "wrong weights"
    """The rollout acknowledges a hash that was never published."""
    FAILS = "fails"
    """The reward function raises on every episode of the group."""


def fixed_trajectory(policy: str, group_id: int, episode: int, spans: Spans, text: str) -> Trajectory:
    """Return three tokens of a policy, the same for the same group and episode."""
    turn = Turn((7, group_id % 97), (group_id % 97, episode, 1), (-0.5, -1.0, -0.25), spans, "stop", text)
    return Trajectory(policy, (turn,), policy=policy)


async def three_tokens(assignment: Assignment, index: int, spans: Spans, worker: str) -> Episode:
    """Return an episode of one turn, the same for the same group and index."""
    return Episode((fixed_trajectory(POLICY, assignment.group_id, index, spans, f"{assignment.group_id}/{index}"),))


@dataclass
class WorldState:
    """State that the workers of one fake cluster share, its settings and its records for tests."""

    num_replicas: int = 2
    rollout_s: Callable[[int], float] = lambda group_id: 1.0
    """Seconds to roll out a group."""
    reward_s: Callable[[int], float] = lambda group_id: 0.1
    annotate_s: Callable[[int], float] = lambda group_id: 0.1
    """Seconds to add a column to one group."""
    train_s: Callable[[int], float] = lambda version: 1.0
    """Seconds of the step that starts from a version."""
    progress_s: float = inf
    """Seconds between two micro-batches of a step, each of which is reported as progress."""
    critic_s: Callable[[int], float] = lambda step: 0.0
    """Seconds of the critic's step, numbered from 0."""
    num_bytes: int = 4
    """Size of one version."""
    publish_s: float = 0.1
    save_s: float = 0.0
    """Seconds to write a checkpoint, beside the next steps."""
    broadcast_s: float = 0.0
    """Seconds from the end of a publish to its arrival at the relay."""
    relay_deaths_s: Sequence[float] = ()
    """Times of the event loop at which a relay dies. Other relays keep its version, so no worker waits for it."""
    restart_s: float = 1.0
    group_s: float = 100.0
    weight_change: str = "between"
    reward: Callable[[int, int], float | None] = lambda group_id, episode: float((group_id + episode) % 2)
    """Reward of an episode; None fails it."""
    judge: Callable[[Task, Group], Iterable[Score]] | None = None
    """Scores of a group, instead of `reward`."""
    play: Callable[[Assignment, int, Spans, str], Awaitable[Episode]] = three_tokens
    """Produces an episode of a group from its index, its versions and the name of its replica."""
    steer: Callable[[PolicyVersion, int, float], Mapping[str, float]] = lambda version, num_updates, staleness: {}
    """Metrics of the stabilizer in the step from a version, with that many updates."""
    rollout_faults: Mapping[int, Fault] = field(default_factory=dict)
    """Fault of the n-th rollout call, from 0, over all replicas."""
    reward_faults: Mapping[int, Fault] = field(default_factory=dict)
    payload_losses: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Lost payloads, by call (`score`, `replace`, `annotate`, `fetch`, `fetch_critic`, `annotate_step`, `save_groups`):
    the indices, from 0, of the calls that lose the payload of every second of their groups. All later calls miss it,
    too."""
    notice_s: Callable[[int], float] = lambda number: 0.0
    """Seconds until the n-th fetch of a lost payload raises, counted from 0 over all calls."""
    training_deaths: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Deaths of training workers, by worker and call (`actor-0 train_step`, `critic-0 fetch`, `reference annotate`):
    the indices, from 0, of the calls in which it dies."""
    together: Collection[str] = ()
    """Roles that share one device in turns."""
    move_s: float = 0.05
    """Seconds in which a role gives the device away, or takes it back."""
    num_eval_replicas: int = 1
    """Replicas of the evaluation lane."""
    eval_s: Callable[[int], float] = lambda group_id: 1.0
    """Seconds to roll out a group of an evaluation."""
    eval_faults: Mapping[int, Fault] = field(default_factory=dict)
    """Fault of the n-th rollout call of the evaluation lane."""
    disk_is_full_at: str | None = None
    """Name of the checkpoint at which the disk is full."""
    nan_at: PolicyVersion | None = None
    """Version whose training step raises for values that are not finite."""
    synchronous_steps: int = 0
    """Policy steps that the actor's stabilizer must see without staleness; 0: there is no stabilizer."""
    trains_policy: Callable[[PolicyVersion], bool] = lambda version: True
    """True if the step that starts from this version trains the policy."""

    def __post_init__(self) -> None:
        self.weights = 0
        """Hash chain over all trained groups, in order: equal chains mean equal training."""
        self.consumed: Counter[str] = Counter()
        """Number of times each task was trained, by task id."""
        self.trained: list[tuple[PolicyVersion, Group]] = []
        """Trained groups, in order, each with the version at the start of its step."""
        self.columns: dict[Column, tuple[BatchPlan, list[Ref]]] = {}
        """Newest data of each column, and its plan."""
        self.relay: PolicyVersion = -1
        self._arrived = asyncio.Event()
        self._num_fetches: Counter[str] = Counter()
        self.gone: dict[int, Ref] = {}
        """Lost payloads, by their `id`; kept so that no other payload reuses the `id`."""
        self.awake = {"actor"} & set(self.together)
        """Roles of `together` that have the device: one, or none."""
        self._num_given_up = 0
        self.num_calls: Counter[str] = Counter()

    @property
    def trained_group_ids(self) -> list[int]:
        """Ids of the trained groups, in order."""
        return [group.group_id for _, group in self.trained]

    @property
    def staleness(self) -> list[int]:
        """Staleness of every trained token span."""
        return [version - span.version for version, group in self.trained for span in group.versions]

    @property
    def staleness_by_version(self) -> dict[PolicyVersion, int]:
        """Largest staleness of each step, by the version at its start."""
        behind = [(version, version - span.version) for version, group in self.trained for span in group.versions]
        return dict(sorted(behind))

    # --------------------------------------------------------------------------------------------- what workers ask

    def step_s(self, version: PolicyVersion, groups: Sequence[Group]) -> float:
        """Return the seconds of the actor's step on these groups."""
        return self.train_s(version)

    def scores(self, task: Task, group: Group) -> tuple[Score, ...]:
        """Score each episode, by `judge` if given, else by `reward`."""
        if self.judge is not None:
            return tuple(self.judge(task, group))
        values = [self.reward(group.group_id, e) for e in range(len(group.episodes))]
        return tuple(Score(v) if v is not None else Score(None, JUDGE_RAISED) for v in values)

    def send(self, version: PolicyVersion) -> None:
        """Send a version to the relay, where it arrives after `broadcast_s`."""
        asyncio.get_running_loop().call_later(self.broadcast_s, self.arrive, version)

    async def fetch(self, call: str, groups: Sequence[Group]) -> None:
        """Raise `PayloadLost` if this call is in `payload_losses`, or a payload was lost before."""
        number = self._num_fetches[call]
        self._num_fetches[call] += 1
        if number in self.payload_losses.get(call, ()):
            self.gone |= {id(group.payload): group.payload for group in groups[::2]}
        if gone := tuple(group.group_id for group in groups if id(group.payload) in self.gone):
            self._num_given_up += 1
            await asyncio.sleep(self.notice_s(self._num_given_up - 1))
            raise PayloadLost(gone)

    async def move(self, role: str, *, is_awake: bool) -> None:
        """Give the shared device to the workers of a role, or take it away. Fails if another role has it."""
        await asyncio.sleep(self.move_s)
        if is_awake:
            assert self.awake <= {role}, f"{role} wakes, and {self.awake} has the device"
            self.awake.add(role)
        else:
            self.awake.discard(role)

    def check_device(self, role: str) -> None:
        """Fail if the workers of a role compute on a device that they do not have."""
        assert role not in self.together or role in self.awake, f"{role} computes, and {self.awake} has the device"

    def dies(self, worker: str, call: str) -> bool:
        """Count a call of a training worker; return True if it dies in it."""
        key = f"{worker} {call}"
        self.num_calls[key] += 1
        return self.num_calls[key] - 1 in self.training_deaths.get(key, ())

    def check_disk(self, folder: AnyPath) -> None:
        """Raise `OSError` if the disk is full at this folder."""
        if self.disk_is_full_at is not None and self.disk_is_full_at in str(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hash(self, version: PolicyVersion) -> str:
        return f"hash-of-{version}"

    async def wait_for_version(self, at_least: PolicyVersion) -> PolicyVersion:
        """Return the relay's newest version, once it is no older than `at_least`."""
        while self.relay < at_least:
            self._arrived.clear()
            await self._arrived.wait()
        return self.relay

    def arrive(self, version: PolicyVersion) -> None:
        self.relay = max(self.relay, version)
        self._arrived.set()
