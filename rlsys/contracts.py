"""Interfaces of all workers for the driver.

`workers/` implements these on Ray, `rlsys.testing` implements them as fakes, and one contract suite runs against both.
Every method may raise `WorkerDied` or `DeadlineExceeded`; other errors are documented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar

from rlsys.algorithm import Column, TrajectoryAdvantage
from rlsys.batch.packing import BatchPlan
from rlsys.errors import WorkerError
from rlsys.types import (
    Assignment,
    Busy,
    Group,
    PolicyVersion,
    Ref,
    ReplicaLoad,
    Score,
    Task,
    VersionSpan,
)
from rlsys.util.any_paths import AnyPath
from rlsys.util.hashed_files import SavedFile

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Files: TypeAlias = Mapping[str, SavedFile]
"""Sizes and hashes of the files that workers report as written, by their paths in the folder that they were given."""


class Saving(Protocol[T_co]):
    """Copy of a state to disk in two parts, so that training waits for the first one alone.

    Each part is awaited once, in order. One that fails leaves nothing to clean up.
    """

    async def take_copy(self) -> None:
        """Return once the state is copied: it may change then."""

    async def write_copy(self) -> T_co:
        """Return what was written, once it is on disk."""


@dataclass(frozen=True)
class Published:
    """Receipt of one publish: the actor goes on, and the bytes are on their way to the relays. See `Arrival`."""

    version: PolicyVersion
    num_bytes: int
    stall_s: float
    """Seconds for which the publish blocked training."""


@dataclass(frozen=True)
class TrainStats:
    """Report of one step of the actor or the critic. Keys of `metrics` are full metric names, e.g.
    `optim/grad_norm`."""

    metrics: Mapping[str, float]
    train_s: float
    """Seconds of compute on the slowest rank."""


@dataclass(frozen=True)
class GroupScores:
    """One score per episode of a group, in order."""

    scores: tuple[Score, ...]
    busy: Busy


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replacement of one episode of a group by an episode of another group of the same task."""

    group: Group
    episode: int
    donor: Group
    donor_episode: int

    def build_group(self, payload: Ref, versions: tuple[VersionSpan, ...]) -> Group:
        """Return the group with the replaced episode, whose origin is then `stored`.

        `payload` refers to the episodes composed by `with_episode`; `versions` are those of the group's own episodes.
        The donated episode keeps its reward. Columns are removed, because they belong to the old episodes.
        """
        stored = replace(self.donor.episodes[self.donor_episode], origin="stored")
        episodes = tuple(episode.without_order() for episode in with_episode(self.group.episodes, self.episode, stored))
        held = {span.version for span in versions}
        weights = tuple(a for a in self.group.weights if a.version in held)
        return replace(self.group, episodes=episodes, versions=versions, weights=weights, payload=payload, columns={})


def with_episode(episodes: Sequence[T], index: int, episode: T) -> tuple[T, ...]:
    """Return the episodes, or their metadata, with `episode` at `index`."""
    return (*episodes[:index], episode, *episodes[index + 1 :])


class Rollouts(Protocol):
    """The pool of rollout replicas."""

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        """Roll out one group on weights no older than `assignment.version`.

        Returns the view of each trained policy on the group, without scores, in the order of the policies; only one in
        a run of a single policy. The first view has the report.

        Raises `WorkflowError` (an error of the workflow before any reply), `TaskTooLong`, `WeightsMismatch`.
        """

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead replica in the background; return once any replica can serve.

        The replacement pulls from its relay before it runs any group. `on_recovery` receives the dead replica's name
        and the seconds until the replacement was ready, once for any number of calls.
        """

    async def loads(self) -> Sequence[ReplicaLoad]:
        """Return the load of each live replica; a replica that is dead, or does not answer, is left out. Changes no
        state."""

    async def drain(self, source: str, to: str) -> int:
        """Let `to` hold the weights of all groups of `source`, and go on with its requests from their last tokens.

        Returns the number of groups moved: 0 if `to` has other weights, or soon changes them.
        """

    def placements(self) -> Mapping[int, str]:
        """Return the worker that plays each group being rolled out, by group id."""


class PinnedRollouts(Rollouts, Protocol):
    """Pool of rollout replicas that keeps one version: for evaluation during training."""

    async def pin(self, version: PolicyVersion) -> None:
        """Pin the pool to `version`, which must be among the newest published.

        From then on `run` samples from exactly `version` until the next `pin`, also on replaced replicas and after
        further publishes. Raises `WeightsMismatch` if the version is no longer available.
        """


class Rewards(Protocol):
    """Pool of reward workers."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        """Score each episode. A reward function that raises or hangs gives a Score without a value. Raises
        `PayloadLost`."""

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead reward worker in the background; see `Rollouts.restart`."""


class Composer(Protocol):
    """Pool of workers that change the payload of a group."""

    async def replace_episode(self, replacement: Replacement) -> Group:
        """Return the group with the donated episode, see `Replacement.build_group`. Raises `PayloadLost` with the id of
        the lost group."""

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead worker in the background; see `Rollouts.restart`."""


class Reference(Protocol):
    """Worker with a frozen model that adds one extra column to groups as they arrive."""

    async def annotate(self, groups: Sequence[Group], column: Column) -> list[Group]:
        """Return the groups with a reference to the new column in `columns[column]`. Raises `PayloadLost`."""

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace the worker if its process is the one called `worker`; return once it can serve.

        `on_recovery` receives that name and the seconds until the replacement was ready, once for any number of calls.
        """


class StepAnnotator(Protocol):
    """Worker that computes one extra column for a complete step: the critic, or a `Reference`."""

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        """Return one reference per rank, to the columns of its micro-batches, updates in order. Each column is one
        array of floats, one per trained token. Raises `PayloadLost`."""


@dataclass(frozen=True, slots=True)
class MarkerReply:
    """Answer of a rank to the marker that the driver wrote where checkpoints go, see `rlsys.loop.shared_place`."""

    worker: str
    node: str
    problem: str
    """Reason for which the rank did not read that marker or write its own; empty if it did."""


class TrainedModel(Protocol):
    """Model in training, over all its ranks."""

    async def answer_marker(self, folder: AnyPath) -> Sequence[MarkerReply]:
        """Let every rank read the driver's marker in `folder`, and write one of its name."""

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        """Fetch the data of the next step to every rank. Raises `PayloadLost` before any rank is stepped."""

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        """Train one step on the fetched data: every update of the plan, in order.

        `columns[column][r]` is the result of `StepAnnotator.annotate_step` for rank r. Raises `TrainingError` on NaN
        before the failed update is stepped; never `PayloadLost`.
        """

    def save(self, folder: AnyPath) -> Saving[Files]:
        """Save weights and optimizer into `folder`; the files are those of all ranks. Both parts raise
        `CheckpointError`."""

    async def find_damage(self, checkpoint: AnyPath, files: Files) -> str | None:
        """Let each rank read a share of these files; return the first difference from what was saved, None if there is
        none. Raises `CheckpointError` if they cannot be read now."""

    async def watch(self, on_progress: Callable[[], None]) -> None:
        """Return never. Raises `WorkerDied` soon after a rank died, and `DeadlineExceeded` for one that is frozen.

        `on_progress` is called while ranks begin one micro-batch after the other.
        """

    async def end(self) -> None:
        """End all ranks; `restart` starts others."""

    async def restart(self) -> None:
        """End all ranks, start others, and return once they are set up: with the initial model and a new optimizer."""


class Critic(TrainedModel, StepAnnotator, Protocol):
    """Model that estimates the return of every state, over as many ranks as the actor has. `annotate_step` works on the
    fetched data too."""

    async def load(self, folder: AnyPath) -> None:
        """Restore the files of `save`, onto any number of ranks."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One group of a trained step, or of an evaluation, to be recorded."""

    place: int
    """Its index in the step, or in the evaluation."""
    task: Task
    group: Group
    assigned: Sequence[TrajectoryAdvantage]
    """Advantages that it was trained with; empty for a group of an evaluation."""


class Actor(TrainedModel, Protocol):
    """Policy in training."""

    @property
    def pair_cost(self) -> float:
        """Cost of the attention of one token to one other, over that of the rest of the model for one token. It may be
        0 where nothing is balanced."""

    async def publish(self, version: PolicyVersion) -> Published:
        """Publish the weights to the relays; return once the bytes have left the actor."""

    async def announce_again(self, version: PolicyVersion) -> None:
        """Announce `version` to the relays again, because those that had it may have died. Returns once a relay has it.

        Does nothing if a newer version was published. Raises the error that kept `version` from the relays.
        """

    async def load(self, folder: AnyPath) -> int:
        """Restore the files of `save`, onto any number of ranks.

        Returns the number of further policy steps that the stabilizer needs without staleness: all it needs if `folder`
        has no state of it, and 0 without a stabilizer.
        """

    def record(self, path: Path, step: int, trained: Sequence[TrainedGroup]) -> Saving[None]:
        """Write these groups of the last trained step, for people and for `rlsys replay`. The file contains prompts,
        completions, scores and advantages.

        The second part raises `PayloadLost`, `CheckpointError`, or another `RlsysError` if the writer fails.
        """

    async def record_evaluated(self, path: Path, version: PolicyVersion, evaluated: Sequence[TrainedGroup]) -> None:
        """Write scored groups of an evaluation of `version`, which have no advantages, in the form of `record`. May run
        beside a step.

        Raises `PayloadLost`, `CheckpointError`, or another `RlsysError` if the writer fails.
        """

    async def save_groups(self, path: AnyPath, groups: Sequence[Group]) -> SavedFile:
        """Write finished groups with their payloads, for `load_groups`; return the size and hash of the file.

        Raises `PayloadLost` before writing. May run beside a step.
        """

    async def load_groups(self, path: AnyPath) -> list[Group]:
        """Read the file of `save_groups`; payloads go back into the object store."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of a version at the relay tier: rollouts can pull it."""

    version: PolicyVersion
    hash: str
    """Content hash over names, shapes, dtypes and bytes of all tensors."""
    num_bytes: int
    num_sent: int
    """Bytes that were sent to a relay which had the previous version: deltas, and new buckets without one."""
    seconds: float
    """Seconds from the end of the publish until the first relay has all of it."""


class Relays(Protocol):
    """Interface of the relay tier for the driver."""

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """Return once a relay has `version` complete, as the actor published it."""

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """Replace relays that die and refill them from their neighbours, for ever.

        Waits for a relay to die; no other loop waits for this one. `on_failure` receives each death. `on_recovery`
        receives the relay's name and the seconds until it had the newest version again.
        """


class Tenant(Protocol):
    """Workers of one role that share their devices with those of other roles, in turns."""

    async def sleep(self) -> None:
        """Give the devices away: nothing computes on them until `wake`, and what was there is kept elsewhere.

        Does nothing for workers that are asleep. A replica that dies or freezes is replaced once all wake. Raises
        `WorkerDied` or `DeadlineExceeded` for a rank, which may still hold its device.
        """

    async def wake(self) -> None:
        """Take the devices back; does nothing for workers that are awake. Raises as `sleep`."""


@dataclass(frozen=True)
class Workers:
    """All workers of a run."""

    rollouts: Rollouts
    rewards: Rewards
    actor: Actor
    relays: Relays
    annotators: Mapping[Column, Reference] = field(default_factory=dict)
    """Workers for the columns made on single groups as they arrive."""
    evaluation: PinnedRollouts | None = None
    """Replicas of the evaluation lane; None in a run without evaluation."""
    step_annotators: Mapping[Column, StepAnnotator] = field(default_factory=dict)
    """Workers for the columns made on complete steps; for `Column.VALUES` it is the critic."""
    critic: Critic | None = None
    """None if the algorithm needs no values."""
    composer: Composer | None = None
    """None if no episode is replaced."""
    reference: Reference | None = None
    """The worker behind the columns of a frozen model; None if the algorithm needs none."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Workers that share devices in turns, by role: see `rlsys.loop.device_leases`. The actor is awake first."""

    @property
    def models(self) -> dict[Literal["actor", "critic"], TrainedModel]:
        """Trained models by the name that their ranks' names begin with, in the order of their training."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}
