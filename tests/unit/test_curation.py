"""Curation: what tasks are issued, how large their groups are, and which get a stored success."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.curation import Rules
from rlsys.contracts import Graft, with_episode
from rlsys.curation import Curation, Tally
from rlsys.data.source import TaskSource
from rlsys.errors import RunAborted
from rlsys.ledger import Ledger, LedgerState
from rlsys.testing import tasks
from rlsys.types import Acknowledged, Assignment, EpisodeMeta, Group, VersionSpan, failed
from tests.groups import episode, group

SIZE = 8
EVERYTHING = Rules(fewer_above=0.6, within=(0.2, 0.9), min_episodes=8, look_again=2)


def judged(task_id: str, rewards: Sequence[float | None], serial: int = 0, version: int = 0) -> Group:
    """A judged group; the episode of a reward None could not be judged."""
    episodes = [episode(r) if r is not None else episode(None, failed("the judge raised")) for r in rewards]
    return replace(group(serial, versions=(version,), episodes=episodes), task_id=task_id, payload=f"payload-{serial}")


def settled(curation: Curation, task_id: str, num_successes: int, num_episodes: int) -> None:
    """The task was rolled out and trained, and the step published."""
    rewards = [1.0] * num_successes + [0.0] * (num_episodes - num_successes)
    curation.judged(judged(task_id, rewards))
    curation.settle(0)
    curation.publish()


def ledger_of(rules: Rules, num_tasks: int = 5) -> Ledger:
    return Ledger(TaskSource(tasks(num_tasks), 3), SIZE, 3, Curation(rules))


# ------------------------------------------------------------------------------------------------------------ history


def test_without_rules_nothing_is_kept_and_every_task_gets_a_whole_group():
    curation = Curation()
    settled(curation, "a", 8, 8)
    assert (curation.state().tallies, curation.metrics()) == ({}, {})
    assert not curation.passes_over("a")
    assert curation.size_of("a", SIZE) is None


@pytest.mark.parametrize(("num_successes", "size"), [(6, None), (7, 4), (8, 4)])
def test_a_task_above_the_bound_gets_half_the_episodes(num_successes: int, size: int | None):
    curation = Curation(Rules(fewer_above=0.75))
    settled(curation, "a", num_successes, 8)
    assert curation.size_of("a", SIZE) == size
    assert curation.metrics() == {"curation/smaller_groups": float(size is not None)}


def test_half_of_an_odd_group_is_rounded_up():
    curation = Curation(Rules(fewer_above=0.5, min_episodes=1))
    settled(curation, "a", 1, 1)
    assert curation.size_of("a", 5) == 3


def test_a_success_rate_counts_once_there_are_enough_judged_episodes_and_only_those_count():
    curation = Curation(Rules(fewer_above=0.5, min_episodes=4))
    curation.judged(judged("a", [1.0, None, None, 1.0, 1.0]))
    curation.settle(0)
    curation.publish()
    assert curation.state().tallies == {"a": Tally(3, 3)}
    assert curation.size_of("a", SIZE) is None
    settled(curation, "a", 1, 1)
    assert curation.size_of("a", SIZE) == 4


def test_what_is_settled_counts_from_the_next_published_step():
    curation = Curation(Rules(fewer_above=0.5))
    curation.judged(judged("a", [1.0] * 8))
    assert curation.size_of("a", SIZE) is None
    curation.settle(0)
    assert curation.size_of("a", SIZE) is None
    curation.publish()
    assert curation.size_of("a", SIZE) == 4


def test_of_two_attempts_at_a_group_the_later_counts_and_of_a_lost_one_none():
    curation = Curation(Rules(fewer_above=0.5))
    curation.judged(judged("a", [1.0] * 8, serial=0))
    curation.judged(judged("a", [0.0] * 8, serial=0))
    curation.judged(judged("b", [1.0] * 8, serial=1))
    curation.lose(1, "b")
    for serial in (0, 1):
        curation.settle(serial)
    curation.publish()
    assert curation.state().tallies == {"a": Tally(0, 8)}


@pytest.mark.parametrize(("num_successes", "is_left_out"), [(1, True), (2, False), (6, False), (7, True)])
def test_a_task_outside_the_range_is_passed_over(num_successes: int, is_left_out: bool):
    curation = Curation(Rules(within=(0.25, 0.75)))
    settled(curation, "a", num_successes, 8)
    assert curation.passes_over("a") == is_left_out
    assert not curation.passes_over("unknown")
    assert curation.metrics() == {"curation/passed_over": float(is_left_out)}


def test_a_task_is_looked_at_again_with_its_history_forgotten():
    curation = Curation(Rules(within=(0.0, 0.5), look_again=3))
    settled(curation, "a", 8, 8)
    assert [curation.passes_over("a") for _ in range(5)] == [True, True, True, False, False]
    settled(curation, "a", 8, 8)
    assert curation.passes_over("a")


def test_or_never():
    curation = Curation(Rules(within=(0.0, 0.5), look_again=0))
    settled(curation, "a", 8, 8)
    assert all(curation.passes_over("a") for _ in range(100))


# -------------------------------------------------------------------------------------------------------------- issue


def test_a_task_that_is_passed_over_uses_up_no_number_and_the_next_one_comes_in_its_place():
    order = [TaskSource(tasks(5), 3).at(c) for c in _cursors(10)]
    ledger = ledger_of(Rules(within=(0.0, 0.5)))
    settled(ledger.curation, order[1].id, 8, 8)
    issued = [ledger.issue(0) for _ in range(4)]
    assert [a.serial for a in issued] == [0, 1, 2, 3]
    assert [a.task for a in issued] == [order[i] for i in (0, 2, 3, 4)]


def test_a_group_keeps_its_size_when_it_is_issued_again_here_or_after_a_resume():
    ledger = ledger_of(Rules(fewer_above=0.5))
    first = ledger.issue(0)
    assert first.size == SIZE
    for task in tasks(5):
        settled(ledger.curation, task.id, 8, 8)
    second = ledger.issue(0)
    assert second.size == SIZE // 2
    for serial in (0, 1):
        ledger.again(serial)
    assert [ledger.issue(1).size for _ in range(2)] == [SIZE, SIZE // 2]
    resumed = ledger_of(Rules())
    resumed.restore(ledger.state(), finished=())
    assert [resumed.issue(1).size for _ in range(3)] == [SIZE, SIZE // 2, SIZE]


def test_if_every_task_is_passed_over_the_run_ends_with_the_remedy():
    ledger = ledger_of(Rules(within=(0.1, 0.9), look_again=0))
    for task in tasks(4):
        settled(ledger.curation, task.id, 8, 8)
    assert len({ledger.issue(0).task.id for _ in range(3)}) == 1, "one is left"
    settled(ledger.curation, "task-4", 0, 8)
    with pytest.raises(
        RunAborted, match=r"every task \(5 of them\) is below 0.1 or above 0.9.*widen curation\.success_"
    ):
        ledger.issue(0)


def test_tasks_that_are_all_passed_over_are_looked_at_again_and_the_run_goes_on():
    ledger = ledger_of(Rules(within=(0.0, 0.9), look_again=4))
    for task in tasks(5):
        settled(ledger.curation, task.id, 8, 8)
    assert len({ledger.issue(0).task.id for _ in range(5)}) == 5, "each has its turn"
    assert ledger.curation.num_passed_over == 5 * 4


def _cursors(count: int) -> list:
    source, found = TaskSource(tasks(5), 3), []
    for _ in range(count):
        found.append(source.cursor)
        source.next()
    return found


# ------------------------------------------------------------------------------------------------------------- grafts


def grafting() -> Curation:
    """With a success of task `a`, group 7, episode 1, sampled from version 3."""
    curation = Curation(Rules(stored_successes=2))
    curation.judged(judged("a", [0.5, 1.5, 1.0], serial=7, version=3))
    curation.publish()
    return curation


def at_least(version: int) -> Callable[[int], int]:
    """Tokens of this version and newer ones may be trained."""
    return lambda serial: version


@pytest.mark.parametrize(
    ("rewards", "episode"),
    [([0.5, 0.0, 0.0], 1), ([0.5, None, 0.0], 1), ([None, 0.0], 0), ([None, 0.0, None], 0)],
    ids=["the lowest", "one that could not be judged", "though one is left", "the first of them"],
)
def test_a_success_takes_the_place_of_the_episode_that_teaches_least(rewards, episode):
    curation = grafting()
    failed_group = judged("a", rewards, serial=9)
    graft = curation.graft_for(failed_group, at_least(0))
    assert graft is not None
    assert (graft.group, graft.episode, graft.donor.serial, graft.donor_episode) == (failed_group, episode, 7, 1)


@pytest.mark.parametrize(
    ("task_id", "rewards"),
    [("a", [0.0, 1.0]), ("b", [0.0, 0.0]), ("a", [None, None]), ("a", [0.0])],
    ids=["one succeeded", "another task", "none was judged", "nothing to compare with"],
)
def test_other_groups_are_left_as_they_are(task_id, rewards):
    assert grafting().graft_for(judged(task_id, rewards, serial=9), at_least(0)) is None


def test_a_success_is_of_use_once_a_later_step_is_published():
    curation = Curation(Rules(stored_successes=1))
    curation.judged(judged("a", [1.0, 0.0], serial=7))
    assert curation.graft_for(judged("a", [0.0, 0.0], serial=9), at_least(0)) is None
    curation.publish()
    assert curation.graft_for(judged("a", [0.0, 0.0], serial=9), at_least(0)) is not None


def test_a_success_that_is_too_old_for_a_group_is_counted_and_left_for_others():
    curation = grafting()
    assert curation.graft_for(judged("a", [0.0, 0.0], serial=9), at_least(4)) is None
    assert curation.metrics() == {"curation/grafted": 0, "curation/too_old": 1, "curation/stored": 1}
    assert curation.graft_for(judged("a", [0.0, 0.0], serial=10), at_least(3)) is not None


def test_the_newest_success_of_a_task_is_kept_and_the_task_least_recently_used_gives_way():
    curation = grafting()
    curation.judged(judged("b", [1.0, 0.0], serial=8))
    curation.publish()
    assert curation.graft_for(judged("a", [0.0, 0.0], serial=10), at_least(0)) is not None
    curation.judged(judged("c", [1.0, 0.0], serial=11))
    curation.judged(judged("a", [1.0, 0.0], serial=12))
    curation.publish()
    found = {task: curation.graft_for(judged(task, [0.0, 0.0], serial=20), at_least(0)) for task in "abc"}
    assert {task: graft and graft.donor.serial for task, graft in found.items()} == {"a": 12, "b": None, "c": 11}
    assert curation.metrics()["curation/stored"] == 2


@pytest.mark.parametrize("how", [Curation.lose, Curation.forget])
def test_a_success_whose_payload_is_gone_is_forgotten_and_only_that(how):
    curation = grafting()
    how(curation, 6, "a")
    assert curation.metrics()["curation/stored"] == 1
    how(curation, 7, "a")
    assert curation.metrics()["curation/stored"] == 0


def test_successes_are_not_kept_over_a_resume():
    curation, resumed = grafting(), Curation(Rules(stored_successes=2))
    resumed.restore(curation.state(), finished=())
    assert resumed.metrics()["curation/stored"] == 0


def test_what_is_grafted_keeps_its_own_reward_versions_and_acknowledgements_and_no_column():
    donor = replace(
        judged("a", [0.0, 1.0], serial=7, version=3),
        versions=(VersionSpan(2, 3), VersionSpan(3, 3)),
        weights=(Acknowledged("rollout-1", 2, "two"), Acknowledged("rollout-1", 3, "three")),
    )
    host = replace(judged("a", [0.0, 0.0], serial=9, version=5), columns={"reference_logprobs": "of other tokens"})
    versions = (VersionSpan(3, 3), VersionSpan(5, 3))
    after = Graft(host, 0, donor, 1).applied("composed", versions)
    assert after.episodes == (donor.episodes[1], host.episodes[1])
    assert (after.versions, after.oldest_version, after.payload, after.columns) == (versions, 3, "composed", {})
    assert {(a.replica, a.version) for a in after.weights} == {("rollout-0", 5), ("rollout-1", 3)}
    assert (after.serial, after.permit_version) == (9, 5)


def test_with_episode_changes_no_other():
    assert with_episode("abc", 1, "x") == ("a", "x", "c")


# --------------------------------------------------------------------------------------------------------------- laws


@dataclass
class History:
    """Everything that happened, from which what is known can be computed anew."""

    judged: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    pending: list[tuple[str, int, int]] = field(default_factory=list)
    published: list[tuple[str, int, int]] = field(default_factory=list)

    def settle(self, serial: int) -> None:
        if serial in self.judged:
            self.pending.append(self.judged.pop(serial))

    def publish(self) -> None:
        self.published += self.pending
        self.pending = []

    def tallies(self) -> dict[str, Tally]:
        counts = {task: (0, 0) for task, _, _ in self.published}
        for task, num_successes, num_episodes in self.published:
            counts[task] = (counts[task][0] + num_successes, counts[task][1] + num_episodes)
        return {task: Tally(*both) for task, both in counts.items()}


ACTIONS = ["issue", "issue", "judge", "judge", "consume", "drop", "again", "crash"]


@settings(deadline=None, max_examples=150)
@given(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, SIZE)), max_size=80))
def test_whatever_happens_the_history_is_that_of_the_groups_settled_and_published(actions):
    rules = Rules(fewer_above=0.5, min_episodes=4)
    ledger, model = ledger_of(rules), History()
    sizes: dict[int, int] = {}

    def judge(serial: int, num_successes: int) -> None:
        task_id, size = ledger.open[serial].task_id, sizes[serial]
        num_successes = min(num_successes, size)
        rewards = [1.0] * num_successes + [0.0] * (size - num_successes)
        ledger.curation.judged(judged(task_id, rewards, serial))
        model.judged[serial] = (task_id, num_successes, size)

    for action, choice, num_successes in actions:
        serials = sorted(ledger.open)
        serial = serials[choice % len(serials)] if serials else -1
        if action == "issue":
            known = model.tallies()
            issued = ledger.issue(0)
            tally = known.get(issued.task.id, Tally(0, 0))
            is_easy = tally.num_episodes >= 4 and tally.rate > 0.5
            assert issued.size == sizes.setdefault(issued.serial, SIZE // 2 if is_easy else SIZE)
        elif action == "judge" and serials:
            judge(serial, num_successes)
        elif action == "consume" and serials:
            ledger.consume([serial])
            model.settle(serial)
            model.publish()
        elif action == "drop" and serials:
            ledger.drop(serial)
            model.settle(serial)
        elif action == "again" and serials:
            ledger.again(serial)
            model.judged.pop(serial, None)
        elif action == "crash":
            finished = {serial for serial in model.judged if serial % 10 < choice}
            state, ledger = ledger.state(), ledger_of(rules)
            ledger.restore(state, finished)
            model.judged = {serial: row for serial, row in model.judged.items() if serial in finished}
        assert ledger.curation.state().tallies == model.tallies()


def played(
    seed: int, steps: int, *, crash_at: frozenset[int], hurry: Callable[[Sequence[Assignment]], Sequence[Assignment]]
) -> tuple[list[tuple[int, str, int]], LedgerState]:
    """Synchronous training of 6 groups a step, some of which are dropped; the order in which they are settled is
    `hurry`'s. Every crash comes with groups of the step open, and none finished."""
    ledger = ledger_of(EVERYTHING, num_tasks=20)
    issued: dict[int, Assignment] = {}

    def issue() -> Assignment:
        assignment = ledger.issue(0)
        issued.setdefault(assignment.serial, assignment)
        return assignment

    for step in range(steps):
        group_of_step = [issue() for _ in range(6)]
        if step in crash_at:
            state, ledger = ledger.state(), ledger_of(EVERYTHING, num_tasks=20)
            ledger.restore(state, finished=())
            group_of_step = [issue() for _ in range(6)]
        left = [a for a in hurry(group_of_step) if not _settle_early(ledger, a, seed)]
        while len(left) < 6:  # those that are dropped are filled in
            assignment = issue()
            if not _settle_early(ledger, assignment, seed):
                left.append(assignment)
        ledger.consume(a.serial for a in left)
    return [(a.serial, a.task.id, a.size) for a in issued.values()], ledger.state()


def _settle_early(ledger: Ledger, assignment: Assignment, seed: int) -> bool:
    """Judge a group; drop it if all its rewards are equal."""
    skill = random.Random(f"{seed} {assignment.task.id} {assignment.serial // 40}").random()
    chance = random.Random(f"{seed} {assignment.serial}")
    rewards = [float(chance.random() < 1.3 * skill) for _ in range(assignment.size)]
    ledger.curation.judged(judged(assignment.task.id, rewards, assignment.serial))
    if is_equal := len(set(rewards)) == 1:
        ledger.drop(assignment.serial)
    return is_equal


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), crash_at=st.frozensets(st.integers(0, 14), max_size=3))
def test_an_interrupted_run_issues_what_an_uninterrupted_one_does_and_knows_the_same(seed, crash_at):
    whole = played(seed, 15, crash_at=frozenset(), hurry=list)
    assert played(seed, 15, crash_at=crash_at, hurry=list) == whole


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), order=st.randoms(use_true_random=False))
def test_in_synchronous_training_nothing_depends_on_who_is_quicker(seed, order):
    def shuffled(assignments: Sequence[Assignment]) -> Sequence[Assignment]:
        return order.sample(assignments, len(assignments))

    issued, state = played(seed, 15, crash_at=frozenset(), hurry=list)
    issued_too, state_too = played(seed, 15, crash_at=frozenset(), hurry=shuffled)
    assert issued_too == issued
    assert state_too == state


def test_those_laws_are_about_runs_in_which_tasks_are_passed_over_and_groups_are_smaller():
    issued, state = played(5, 15, crash_at=frozenset(), hurry=list)
    assert {size for _, _, size in issued} == {SIZE, SIZE // 2}
    assert any(tally.num_passed for tally in state.curation.tallies.values())


@settings(deadline=None, max_examples=100)
@given(
    limit=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(["success", "failure", "publish"]), st.integers(0, 6)), max_size=60),
)
def test_there_are_never_more_successes_than_the_limit_and_each_is_the_newest_of_its_task(limit, actions):
    curation = Curation(Rules(stored_successes=limit))
    newest: dict[str, int] = {}
    for serial, (action, number) in enumerate(actions):
        task_id = f"task-{number}"
        if action == "publish":
            curation.publish()
        elif action == "success":
            curation.judged(judged(task_id, [0.0, 1.0], serial))
            newest[task_id] = serial
        else:
            graft = curation.graft_for(judged(task_id, [0.0, 0.0], serial), at_least(0))
            assert graft is None or graft.donor.serial == newest[task_id]
        assert curation.metrics()["curation/stored"] <= min(limit, len(newest))


def test_metas_of_a_grafted_group_are_those_of_its_payload():
    """`Graft.applied` and whoever composes the payload take the same places."""
    host, donor = (tuple(f"{name}{i}" for i in range(3)) for name in "hd")
    metas: Mapping[str, EpisodeMeta] = {name: episode(float(i)) for i, name in enumerate((*host, *donor))}
    groups = [
        replace(judged("a", [], i), episodes=tuple(metas[n] for n in names)) for i, names in enumerate((host, donor))
    ]
    graft = Graft(groups[0], 2, groups[1], 1)
    payload = with_episode(host, graft.episode, donor[graft.donor_episode])
    assert graft.applied(payload, ()).episodes == tuple(metas[name] for name in payload)
