"""What the driver needs of each kind of worker, and nothing else.

`workers/` implements these on Ray, `rlsys.testing` implements them as fakes, and one contract suite runs against
both. Every method may raise `WorkerDied` or `DeadlineExceeded`; what else it may raise is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from rlsys.algorithm import Signal, TrajectoryAdvantage
from rlsys.batch.packing import BatchPlan
from rlsys.errors import WorkerError
from rlsys.types import (
    Acknowledged,
    Assignment,
    EngineStats,
    Group,
    PolicyVersion,
    Ref,
    ReplicaLoad,
    Score,
    Task,
    VersionSpan,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """Receipt of one publish: the actor goes on, and relays are about to hold these bytes. See `Arrival`."""

    version: PolicyVersion
    num_bytes: int
    stall_s: float
    """Seconds the actor could not train because of it."""


@dataclass(frozen=True)
class TrainStats:
    """What one step of the actor or the critic reports. Keys of `metrics` are full metric names, e.g.
    `optim/grad_norm`."""

    metrics: Mapping[str, float]
    train_s: float
    """Seconds of compute on the slowest rank."""


@dataclass(frozen=True)
class Busy:
    """When one worker worked on one thing: seconds of that machine's monotonic clock, comparable per worker only."""

    worker: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RolledOut:
    """A rolled-out group, not scored yet."""

    group: Group
    busy: Busy
    stats: EngineStats | None = None
    """The engine of the replica when it was done; None if it does not tell."""
    waited_s: float = 0.0
    """Seconds between the assignment's arrival at the replica and its start: for weights, and for room to change
    them."""
    others: tuple[Group, ...] = ()
    """In a run of several policies: the same group as each further one that is trained sees it."""
    pulls: tuple[Busy, ...] = ()
    """When the replica took in weights, as far as it has not said so yet; on the clock of `busy`."""


@dataclass(frozen=True)
class GroupScores:
    """One score per episode of a group, in order."""

    scores: tuple[Score, ...]
    busy: Busy


@dataclass(frozen=True, slots=True)
class Graft:
    """One episode of a group gives its place to one of another group of the same task."""

    group: Group
    episode: int
    donor: Group
    donor_episode: int

    def applied(self, payload: Ref, versions: tuple[VersionSpan, ...]) -> Group:
        """The group as it is then; `payload` refers to the episodes that `with_episode` composed, `versions` are
        theirs. What the donor's episode was rewarded with, sampled from and acknowledged by stays its own; columns
        were made of other episodes, and are gone."""
        episodes = with_episode(self.group.episodes, self.episode, self.donor.episodes[self.donor_episode])
        held = {span.version for span in versions}
        weights = dict.fromkeys(a for a in (*self.group.weights, *self.donor.weights) if a.version in held)
        return replace(
            self.group, episodes=episodes, versions=versions, weights=tuple(weights), payload=payload, columns={}
        )


def with_episode(episodes: Sequence[T], index: int, episode: T) -> tuple[T, ...]:
    """The same episodes, or what is known of them, with `episode` in the place of number `index`."""
    return (*episodes[:index], episode, *episodes[index + 1 :])


class Rollouts(Protocol):
    """The pool of rollout replicas."""

    async def run(self, assignment: Assignment) -> RolledOut:
        """Roll out one group on weights no older than `assignment.version`.

        Raises `WorkflowError` (a bug in the workflow), `TaskTooLong`, `WeightsMismatch`.
        """
        ...

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead replica in the background; returns once any replica can serve.

        The replacement pulls from its relay before it runs anything. `on_recovery` is told the dead replica's name and
        the seconds until the replacement was ready, once, however many ask for it.
        """
        ...

    async def versions(self) -> Sequence[Acknowledged]:
        """What each live replica holds now."""
        ...

    async def loads(self) -> Sequence[ReplicaLoad]:
        """What each live replica is doing now.

        To ask changes nothing: a replica that is dead, or does not answer, is left out, and that is all.
        """
        ...

    async def move(self, source: str, to: str) -> int:
        """Let `to` go on with all that `source` is sampling, from the tokens there are, on the same version.

        Returns the number of groups moved: 0 if `to` does not hold that version any more, or has no room. What one of
        them breaks while moving is told to those who wait for the groups, not here.
        """
        ...

    def placements(self) -> Mapping[int, str]:
        """Serials of the groups being rolled out, and the replica each was given to."""
        ...


class PinnedRollouts(Rollouts, Protocol):
    """A pool of rollout replicas that stays on one version: for evaluation beside training."""

    async def pin(self, version: PolicyVersion) -> None:
        """Pin the pool to `version`, which must be among the newest published.

        Once this returns, `run` samples from exactly `version` until the next `pin`, on replaced replicas too,
        whatever is published meanwhile. Raises `WeightsMismatch` if the version is gone already.
        """
        ...


class Rewards(Protocol):
    """The pool of reward workers."""

    async def score(self, task: Task, group: Group) -> GroupScores:
        """Judge each episode. A judge that raises or hangs is a Score without a value. Raises `PayloadLost`."""
        ...

    async def graft(self, graft: Graft) -> Group:
        """The group with another's episode in it, as `Graft.applied` has it: composed here, because the driver holds no
        payload. Raises `PayloadLost` naming whichever of the two is gone."""
        ...

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead reward worker in the background; as `Rollouts.restart`."""
        ...


class Reference(Protocol):
    """A worker that adds one extra column to groups as they come."""

    async def annotate(self, groups: Sequence[Group], signal: Signal) -> list[Group]:
        """The same groups, each with a reference to the column in `columns[signal]`. Raises `PayloadLost`."""
        ...


class StepAnnotator(Protocol):
    """A worker that makes one extra column of a step that is put together."""

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, signal: Signal) -> list[Ref]:
        """One reference per rank: for each of its micro-batches, updates in order, the column of its trained tokens, as
        one array of floats. Raises `PayloadLost`."""
        ...


class Critic(StepAnnotator, Protocol):
    """The model that expects a return of every state, over all its ranks: as many as the actor has."""

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        """Have the data of the next step on every rank, for `annotate_step` and `train_step`. Raises `PayloadLost`,
        with nothing stepped."""
        ...

    async def train_step(self, plan: BatchPlan, columns: Mapping[Signal, Sequence[Ref]]) -> TrainStats:
        """One step on what was fetched; `columns` as for `Actor.train_step`. Raises `TrainingError` on NaN, with
        nothing of that update stepped; never `PayloadLost`."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer into `folder`."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote, onto any number of ranks."""
        ...


class Actor(Protocol):
    """The policy being trained, over all its ranks."""

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        """Have the data of the next step on every rank. Raises `PayloadLost`, with nothing stepped."""
        ...

    async def train_step(self, plan: BatchPlan, columns: Mapping[Signal, Sequence[Ref]]) -> TrainStats:
        """One step on what was fetched: every update of the plan, in order.

        `columns[signal][r]` is what `StepAnnotator.annotate_step` made for rank r. Raises `TrainingError` on NaN, with
        nothing of that update stepped; never `PayloadLost`.
        """
        ...

    async def publish(self, version: PolicyVersion) -> Published:
        """Hand the weights to the relays; returns once the bytes have left the actor."""
        ...

    async def announce_again(self, version: PolicyVersion) -> None:
        """Tell the relays of `version` once more: those that held it may have died. Returns once one of them has it.

        Does nothing if a newer version was published. Raises what kept `version` from the relays.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer into `folder`."""
        ...

    async def load(self, folder: Path) -> int:
        """Restore what `save` wrote, onto any number of ranks.

        Returns the steps that train the policy which its stabilizer, as it is from here on, must still see without
        staleness: all that one needs which `folder` knows nothing of, and 0 if there is none.
        """
        ...

    async def record(
        self,
        path: Path,
        step: int,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        assigned: Sequence[Sequence[TrajectoryAdvantage]],
    ) -> None:
        """Write the groups that the last step trained, for people and for `rlsys replay`: what was asked, said and
        scored, and what was made of it. Raises `PayloadLost`."""
        ...

    async def save_groups(self, path: Path, groups: Sequence[Group]) -> None:
        """Write finished groups with their payloads, for `load_groups`. Raises `PayloadLost`, with nothing written."""
        ...

    async def load_groups(self, path: Path) -> list[Group]:
        """Read what `save_groups` wrote; payloads go back into the object store."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version is in the relay tier: rollouts can pull it."""

    version: PolicyVersion
    hash: str
    """Content hash over names, shapes, dtypes and bytes of all tensors."""
    num_bytes: int
    num_sent: int
    """Bytes that had to travel: those of buckets which the version before did not have."""
    seconds: float
    """From the end of the publish to the first relay holding all of it."""


class Relays(Protocol):
    """The relay tier, as the driver sees it."""

    async def arrival(self, version: PolicyVersion) -> Arrival:
        """Returns once a relay holds `version` complete, as the actor published it."""
        ...

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        """Replace relays that die and fill them from their neighbours, for ever.

        Waits for a relay to die; nobody else waits for this. `on_failure` is told of each death, `on_recovery` the
        relay's name and the seconds until it held the newest version again.
        """
        ...


@dataclass(frozen=True)
class Workers:
    """Everything the driver talks to."""

    rollouts: Rollouts
    rewards: Rewards
    actor: Actor
    relays: Relays
    annotators: Mapping[Signal, Reference] = field(default_factory=dict)
    """Who makes the signals that are made as groups come."""
    evaluation: PinnedRollouts | None = None
    """Replicas of the evaluation lane; None in a run that measures nothing."""
    step_annotators: Mapping[Signal, StepAnnotator] = field(default_factory=dict)
    """Who makes the signals that are made once a step is put together; of `Signal.VALUES` it is the critic."""
    critic: Critic | None = None
    """None in a run whose algorithm needs no values."""
