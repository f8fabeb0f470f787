"""Random schedules with faults, each a pure function of its seed: what may never happen, under any of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from rlsys.algorithm import Column, StepAdvantages
from rlsys.config.curation_section import CurationSection
from rlsys.data.task_source import TaskSource
from rlsys.loop.build_driver import Constants
from rlsys.loop.checkpoint import read_state
from rlsys.loop.driver import Driver
from rlsys.loop.task_ledger import LedgerState
from rlsys.monitoring.events import CheckpointSaved, Event, GroupDropped, GroupReissued, RolledBack
from rlsys.testing import FakeWorld, Fault, RewardAsAdvantage, run_virtual, tasks
from rlsys.testing.fake_run import go_on
from rlsys.types import Group
from rlsys.util.deadlines import ROUNDING_S
from tests.simulate.world import CONSTANTS, NUM_TASKS, StopAfter, driver_on

STALENESS = (0, 1, 2, 4, 8)
STEPS = 12
MACHINE_FAULTS = (Fault.DIES, Fault.HANGS, Fault.WRONG_WEIGHTS)
DEADLY_TO_ACTORS = tuple(f"actor-0 {call}" for call in ("fetch", "train_step", "publish", "save", "save_groups"))
DEADLY = (
    *DEADLY_TO_ACTORS,
    *(f"critic-0 {call}" for call in ("fetch", "annotate_step", "train_step", "save")),
    *(f"reference {call}" for call in ("annotate", "annotate_step")),
)
"""Calls in which a worker of the training side may die."""
ROLES = ("actor", "rollout", "critic", "reference", "evaluation")
MOVING = tuple(f"{worker} {call}" for worker in ("actor-0", "critic-0", "rollout") for call in ("sleep", "wake"))
"""Calls of hand-overs in which a worker may die."""
LOSABLE = ("score", "annotate", "fetch", "fetch_critic", "annotate_step", "save_groups")


@dataclass(frozen=True, kw_only=True)
class Choosy(RewardAsAdvantage):
    """Finds nothing to learn in some groups, and in some steps, as a pure function of their group_ids."""

    is_choosy: bool = False
    """Is there nothing to learn in every fifth group?"""
    empties: int = 0
    """Settling leaves nothing of a step whose oldest group's group_id is a multiple of this; 0: it leaves all."""

    def can_learn_from(self, group: Group) -> bool:
        return not self.is_choosy or group.group_id % 5 != 0

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        settled = super().finalize_advantages(groups, past)
        is_emptied = self.empties and min(group.group_id for group in groups) % self.empties == 0
        return StepAdvantages(tuple(() for _ in settled.groups)) if is_emptied else settled


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one schedule came to."""

    max_staleness: int
    """The limit that was set."""
    bound: int
    """Versions that no trained token may be behind, which follows from it."""
    staleness: int
    """Versions that the stalest trained token was behind."""
    num_stale: int
    """Groups dropped as too stale: pacing should leave none."""
    num_reissued: int
    num_healthy: int
    """Groups that were issued again although their payload was there."""
    is_exactly_once: bool
    """Was every group that was issued either trained or dropped, once; and were the tasks trained, of a schedule that
    drops none, those that an undisturbed run trains, each as often? A drop that a resume undoes does not count."""
    is_calibrated: bool
    """Were the steps that the stabilizer must see without staleness trained without any?"""
    has_all_permits: bool
    """Were there always as many permits as the bound is made of, or as many as groups that were still to be trained?"""
    num_replaced: int
    num_passed_over: int
    num_smaller: int
    num_rolled_back: int


Session: TypeAlias = "tuple[FakeWorld, Driver, Witness]"


def played(seed: int) -> Outcome:
    """One run under the schedule of this seed."""
    return outcome_of(*sessions_of(seed))


def sessions_of(seed: int) -> tuple[list[Session], Mapping[str, Any]]:
    """The parts of the run under the schedule of this seed, and its limits; every fourth run is interrupted, and
    resumed by another driver.

    No group may fail as often as a schedule could make it fail in one way: then the run has to survive.
    """
    chance = random.Random(seed)
    limits: dict[str, Any] = {
        "steps": STEPS,
        "groups_per_step": chance.randint(1, 4),
        "max_staleness": chance.choice(STALENESS),
        "window": chance.choice((1, 1, 2, 5)),
        "checkpoint_every": chance.choice((0, 3)),
        "algorithm": Choosy(
            needs=frozenset(Column) if chance.random() < 0.6 else frozenset(),
            is_choosy=chance.random() < 0.4,
            empties=chance.choice((0, 0, 7)),
        ),
        "synchronous_steps": chance.choice((0, 0, 3)),
    }
    limits["num_updates"] = chance.randint(1, limits["groups_per_step"])
    limits["rules"], limits["constants"] = curation_of(seed)
    limits["deaths"], limits["together"] = deaths_of(seed), together_of(seed)
    stop_at = chance.randint(1, STEPS - 1) if chance.random() < 0.25 else STEPS
    with TemporaryDirectory() as folder:
        return [_session(chance, Path(folder), limits, stop) for stop in sorted({stop_at, STEPS})], limits


def outcome_of(sessions: Sequence[Session], limits: Mapping[str, Any]) -> Outcome:
    """What the sessions of one run came to."""
    world, driver, witness = sessions[-1]
    num_groups = driver.queue.bound.groups_per_step * STEPS
    trained = [group_id for world, _, _ in sessions for group_id in world.trained_group_ids]
    dropped = [group_id for _, _, told in sessions[:-1] for group_id, _ in told.lasting_drops()]
    dropped += [group_id for group_id, _ in witness.dropped]
    source = TaskSource(tasks(NUM_TASKS), seed=0)
    expected = Counter(source.next().id for _ in range(num_groups))
    is_undisturbed = limits["algorithm"] == Choosy(needs=limits["algorithm"].needs) and limits["constants"] == CONSTANTS
    curations = [driver.queue.ledger.curation for _, driver, _ in sessions]
    synchronous = sorted(each for world, _, _ in sessions for each in world.staleness_by_version.items())
    return Outcome(
        max_staleness=driver.queue.bound.max_staleness,
        bound=driver.queue.bound.versions,
        staleness=max(staleness for world, _, _ in sessions for staleness in world.staleness),
        num_stale=sum(driver.queue.dropped["stale"] for _, driver, _ in sessions),
        num_reissued=sum(driver.queue.num_reissued for _, driver, _ in sessions),
        num_healthy=sum(max(0, told.num_reissued - len(world.gone)) for world, _, told in sessions),
        is_exactly_once=(
            len(trained) == num_groups
            and sorted(trained + dropped) == list(range(driver.queue.ledger.next_group_id))
            and not driver.queue.ledger.open
            and (world.consumed == expected or not is_undisturbed)
        ),
        is_calibrated=all(most == 0 for _, most in synchronous[: limits["synchronous_steps"]]),
        has_all_permits=not any(told.wrong_counts for _, _, told in sessions),
        num_replaced=sum(curation.num_replaced for curation in curations),
        num_passed_over=sum(curation.num_passed_over for curation in curations),
        num_smaller=sum(curation.num_smaller for curation in curations),
        num_rolled_back=witness.num_rolled_back,
    )


def _session(chance: random.Random, folder: Path, limits: Mapping[str, Any], stop: int) -> Session:
    """One driver's part of a run, from the newest checkpoint until step `stop`."""
    limits = dict(limits)
    world = replace(world_of(chance), together=limits.pop("together"))
    rules: CurationSection = limits.pop("rules")
    if limits.get("max_staleness", 0) == 0:
        rules = rules.model_copy(update={"stored_successes": 0})
    deaths: Mapping[str, set[int]] = limits.pop("deaths")
    if stop == STEPS:  # a stopped run is not rolled back
        world.training_deaths = deaths
    if limits["constants"] != CONSTANTS:
        world.reward = lambda group_id, episode: float(random.Random(group_id * 97 + episode).random() < 0.35)
        world.payload_losses = {**world.payload_losses, "replace": {chance.randrange(6)}}
    driver = driver_on(world, folder, **limits, max_attempts=most_failures(world) + 1, curation=rules)
    witness = Witness(driver)
    driver.events.attach(witness)
    if stop < STEPS:
        driver.events.attach(StopAfter(driver, stop))
    assert run_virtual(go_on(driver)) == stop + driver.position.num_lost
    witness.count_permits()
    return world, driver, witness


def curation_of(seed: int) -> tuple[CurationSection, Constants]:
    """Every second schedule curates its tasks, from two episodes of each on."""
    chance = random.Random(f"rules {seed}")
    if chance.random() < 0.5:
        return CurationSection(), CONSTANTS
    fewer, within = chance.choice((None, 0.3)), chance.choice(((0.0, 1.0), (0.2, 0.6)))
    constants = replace(CONSTANTS, min_episodes=2, look_again=chance.choice((1, 2)))
    stored = chance.choice((0, 3, 8))
    return CurationSection(fewer_above=fewer, success_within=within, stored_successes=stored), constants


def deaths_of(seed: int) -> dict[str, set[int]]:
    """In every third schedule, workers of the training side die, but not before the first weights are published."""
    chance = random.Random(f"deaths {seed}")
    if chance.random() < 0.67:
        return {}
    deaths = {call: {chance.randint(1, 12)} for call in chance.sample(DEADLY, chance.randint(1, 4))}
    moving = chance.sample(MOVING, 2) if together_of(seed) else []
    return deaths | {call: {chance.randint(1, 12)} for call in moving}


def together_of(seed: int) -> tuple[str, ...]:
    """In every third schedule, two roles or more share a device."""
    chance = random.Random(f"together {seed}")
    return ROLES[: chance.randint(2, len(ROLES))] if chance.random() < 0.33 else ()


def most_failures(world: FakeWorld) -> int:
    """How often one group or step can fail in one way, at most."""
    num_losses = sum(len(calls) for calls in world.payload_losses.values())
    return max(len(world.rollout_faults), len(world.reward_faults), num_losses, len(world.training_deaths))


def world_of(chance: random.Random) -> FakeWorld:
    """Latencies with long tails, and faults of everything that can fail."""

    def faults(most: int, kinds: tuple[Fault, ...]) -> dict[int, Fault]:
        return {chance.randrange(60): chance.choice(kinds) for _ in range(chance.randint(0, most))}

    return FakeWorld(
        num_replicas=chance.randint(1, 4),
        rollout_s=heavy_tailed(chance, 40.0),
        reward_s=heavy_tailed(chance, 5.0),
        annotate_s=heavy_tailed(chance, 3.0),
        train_s=heavy_tailed(chance, 8.0),
        broadcast_s=chance.choice((0.0, 0.7, 5.0)),
        weight_change=chance.choice(("between", "inflight")),
        relay_deaths_s=sorted(chance.uniform(0, 100) for _ in range(chance.randint(0, 3))),
        rollout_faults=faults(4, MACHINE_FAULTS),
        reward_faults=faults(3, (Fault.DIES, Fault.HANGS)),
        notice_s=heavy_tailed(chance, chance.choice((5.0, 200.0))),  # it may outlast the group's next attempt
        payload_losses={call: {chance.randrange(12) for _ in range(chance.randint(0, 2))} for call in LOSABLE},
    )


def heavy_tailed(chance: random.Random, longest_s: float) -> Callable[[int], float]:
    """Seconds as a pure function of a number."""
    seed = chance.randrange(10**9)
    return lambda number: random.Random(seed * 1_000_003 + number).paretovariate(1.1) % longest_s


@dataclass
class Witness:
    """Counts the permits whenever something happens, and the groups that are issued again."""

    driver: Driver
    wrong_counts: list[int] = field(default_factory=list)
    """Of permits, too many or too few."""
    num_reissued: int = 0
    num_rolled_back: int = 0
    dropped: list[tuple[int, float]] = field(default_factory=list)
    """Group id and time of each drop, in order."""
    saved: tuple[LedgerState, float] | None = None
    """Ledger in the newest checkpoint, and the time from which it is."""

    def handle(self, event: Event, time_s: float) -> None:
        self.num_reissued += isinstance(event, GroupReissued)
        if isinstance(event, CheckpointSaved):
            self.saved = read_state(Path(event.path)).ledger, time_s - event.seconds
        if isinstance(event, RolledBack):
            self.num_rolled_back += 1
            self.dropped = self.lasting_drops() if self.saved else []
        if isinstance(event, GroupDropped):
            self.dropped.append((event.group_id, time_s))
        else:  # of several groups that are dropped at once, each has its event
            self.count_permits()

    def lasting_drops(self) -> list[tuple[int, float]]:
        """Drops of groups that a resume from the newest checkpoint does not roll out again, in order.

        It does so with a group that was dropped after the state was captured, and is open or not yet issued in it.
        """
        assert self.saved is not None
        ledger, captured_s = self.saved
        pending = set(ledger.pending)
        undone = {group_id for group_id, _ in self.dropped if group_id in pending or group_id >= ledger.next_group_id}
        return [(n, at_s) for n, at_s in self.dropped if n not in undone or at_s < captured_s - ROUNDING_S]

    def count_permits(self) -> None:
        queue = self.driver.queue
        num_groups = (self.driver.end - queue.version) * queue.bound.groups_per_step
        least, most = (
            queue.permits_at(queue.version),
            queue.bound.capacity,
        )  # after the number fell, there are more for a while
        if not min(least, num_groups) <= queue.num_permits <= min(most, num_groups):
            self.wrong_counts.append(queue.num_permits)

    def close(self) -> None:
        pass
