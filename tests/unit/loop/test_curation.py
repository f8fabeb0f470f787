"""Curation: the issued tasks, the sizes of their groups, and the replacements of stored successes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.curation_section import CurationSection
from rlsys.contracts import Replacement, with_episode
from rlsys.data.task_source import TaskSource
from rlsys.errors import RunAborted
from rlsys.loop.curation import Curation, Tally, num_sampled
from rlsys.loop.task_ledger import Ledger, LedgerState
from rlsys.testing import tasks
from rlsys.types import Acknowledged, Assignment, EpisodeMeta, Group, VersionSpan, failed
from tests.groups import episode, group

SIZE = 8
EVERYTHING = CurationSection(fewer_above=0.6, success_within=(0.2, 0.9))


def scored(task_id: str, rewards: Sequence[float | None], group_id: int = 0, version: int = 0) -> Group:
    """A scored group; the episode of a reward None could not be scored."""
    episodes = [episode(r) if r is not None else episode(None, failed("the judge raised")) for r in rewards]
    return replace(
        group(group_id, versions=(version,), episodes=episodes), task_id=task_id, payload=f"payload-{group_id}"
    )


def passes_over(curation: Curation, task_id: str) -> bool:
    return curation.on_issue(task_id, SIZE) is None


def size_of(curation: Curation, task_id: str, group_size: int) -> int | None:
    issue = curation.on_issue(task_id, group_size)
    assert issue is not None
    return issue.size


def token_limit(curation: Curation, task_id: str) -> int | None:
    issue = curation.on_issue(task_id, SIZE)
    assert issue is not None
    return issue.token_limit


def settled(curation: Curation, task_id: str, num_successes: int, num_episodes: int) -> None:
    """The task was rolled out and trained, and the step published."""
    rewards = [1.0] * num_successes + [0.0] * (num_episodes - num_successes)
    curation.record(scored(task_id, rewards))
    curation.settle(0)
    curation.publish()


def ledger_of(rules: CurationSection, num_tasks: int = 5, *, min_episodes: int = 8, look_again: int = 4) -> Ledger:
    curation = Curation(rules, min_episodes=min_episodes, look_again=look_again)
    return Ledger(TaskSource(tasks(num_tasks), 3), SIZE, 3, curation)


# ------------------------------------------------------------------------------------------------------------ history


def test_without_rules_nothing_is_kept_and_groups_are_whole():
    curation = Curation()
    settled(curation, "a", 8, 8)
    assert (curation.state().tallies, curation.metrics()) == ({}, {})
    assert not passes_over(curation, "a")
    assert size_of(curation, "a", SIZE) is None


@pytest.mark.parametrize(("num_successes", "size"), [(6, None), (7, 4), (8, 4)])
def test_a_task_above_the_bound_gets_half_the_episodes(num_successes: int, size: int | None):
    curation = Curation(CurationSection(fewer_above=0.75))
    settled(curation, "a", num_successes, 8)
    assert size_of(curation, "a", SIZE) == size
    assert curation.metrics() == {"curation/smaller_groups": float(size is not None)}


def test_half_of_an_odd_group_is_rounded_up():
    curation = Curation(CurationSection(fewer_above=0.5), min_episodes=1)
    settled(curation, "a", 1, 1)
    assert size_of(curation, "a", 5) == 3


def test_success_rates_need_enough_scored_episodes():
    curation = Curation(CurationSection(fewer_above=0.5), min_episodes=4)
    curation.record(scored("a", [1.0, None, None, 1.0, 1.0]))
    curation.settle(0)
    curation.publish()
    assert curation.state().tallies == {"a": Tally(3, 3)}
    assert size_of(curation, "a", SIZE) is None
    settled(curation, "a", 1, 1)
    assert size_of(curation, "a", SIZE) == 4


def test_what_is_settled_counts_from_the_next_published_step():
    curation = Curation(CurationSection(fewer_above=0.5))
    curation.record(scored("a", [1.0] * 8))
    assert size_of(curation, "a", SIZE) is None
    curation.settle(0)
    assert size_of(curation, "a", SIZE) is None
    curation.publish()
    assert size_of(curation, "a", SIZE) == 4


def test_the_last_attempt_counts_and_lost_groups_do_not():
    curation = Curation(CurationSection(fewer_above=0.5))
    curation.record(scored("a", [1.0] * 8, group_id=0))
    curation.record(scored("a", [0.0] * 8, group_id=0))
    curation.record(scored("b", [1.0] * 8, group_id=1))
    curation.lose(1, "b")
    for group_id in (0, 1):
        curation.settle(group_id)
    curation.publish()
    assert curation.state().tallies == {"a": Tally(0, 8)}


@pytest.mark.parametrize(("num_successes", "is_left_out"), [(1, True), (2, False), (6, False), (7, True)])
def test_a_task_outside_the_range_is_passed_over(num_successes: int, is_left_out: bool):
    curation = Curation(CurationSection(success_within=(0.25, 0.75)))
    settled(curation, "a", num_successes, 8)
    assert passes_over(curation, "a") == is_left_out
    assert not passes_over(curation, "unknown")
    assert curation.metrics() == {"curation/passed_over": float(is_left_out)}


def test_a_task_is_looked_at_again_with_its_history_forgotten():
    curation = Curation(CurationSection(success_within=(0.0, 0.5)), look_again=3)
    settled(curation, "a", 8, 8)
    assert [passes_over(curation, "a") for _ in range(5)] == [True, True, True, False, False]
    settled(curation, "a", 8, 8)
    assert passes_over(curation, "a")


def test_or_never():
    curation = Curation(CurationSection(success_within=(0.0, 0.5)), look_again=0)
    settled(curation, "a", 8, 8)
    assert all(passes_over(curation, "a") for _ in range(100))


# -------------------------------------------------------------------------------------------------------------- issue


def test_a_skipped_task_uses_no_group_id():
    order = [TaskSource(tasks(5), 3).at(c) for c in _cursors(10)]
    ledger = ledger_of(CurationSection(success_within=(0.0, 0.5)))
    settled(ledger.curation, order[1].id, 8, 8)
    issued = [ledger.issue(0) for _ in range(4)]
    assert [a.group_id for a in issued] == [0, 1, 2, 3]
    assert [a.task for a in issued] == [order[i] for i in (0, 2, 3, 4)]


def test_a_reissued_group_keeps_its_size_also_after_a_resume():
    ledger = ledger_of(CurationSection(fewer_above=0.5))
    first = ledger.issue(0)
    assert first.size == SIZE
    for task in tasks(5):
        settled(ledger.curation, task.id, 8, 8)
    second = ledger.issue(0)
    assert second.size == SIZE // 2
    for group_id in (0, 1):
        ledger.again(group_id)
    assert [ledger.issue(1).size for _ in range(2)] == [SIZE, SIZE // 2]
    resumed = ledger_of(CurationSection())
    resumed.restore(ledger.state(), finished=())
    assert [resumed.issue(1).size for _ in range(3)] == [SIZE, SIZE // 2, SIZE]


def test_skipping_every_task_ends_the_run_with_the_remedy():
    ledger = ledger_of(CurationSection(success_within=(0.1, 0.9)), look_again=0)
    for task in tasks(4):
        settled(ledger.curation, task.id, 8, 8)
    assert len({ledger.issue(0).task.id for _ in range(3)}) == 1, "one is left"
    settled(ledger.curation, "task-4", 0, 8)
    with pytest.raises(
        RunAborted, match=r"every task \(5 of them\) is below 0.1 or above 0.9.*widen curation\.success_"
    ):
        ledger.issue(0)


def test_skipped_tasks_are_revisited_after_look_again_passes():
    ledger = ledger_of(CurationSection(success_within=(0.0, 0.9)), look_again=4)
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


# --------------------------------------------------------------------------------------------------------- replacements


def with_success() -> Curation:
    """With a success of task `a`, group 7, episode 1, sampled from version 3."""
    curation = Curation(CurationSection(stored_successes=2))
    curation.record(scored("a", [0.5, 1.5, 1.0], group_id=7, version=3))
    curation.publish()
    return curation


def at_least(version: int) -> Callable[[int], int]:
    """Tokens of this version and newer ones may be trained."""
    return lambda group_id: version


@pytest.mark.parametrize(
    ("rewards", "episode"),
    [([0.5, 0.0, 0.0], 1), ([0.5, None, 0.0], 1), ([None, 0.0], 0), ([None, 0.0, None], 0)],
    ids=["the lowest", "one that could not be scored", "though one is left", "the first of them"],
)
def test_a_success_replaces_the_lowest_or_an_unscored_episode(rewards, episode):
    curation = with_success()
    failed_group = scored("a", rewards, group_id=9)
    found = curation.replacement_for(failed_group, at_least(0))
    assert found is not None
    assert (found.group, found.episode, found.donor.group_id, found.donor_episode) == (failed_group, episode, 7, 1)


@pytest.mark.parametrize(
    ("task_id", "rewards"),
    [("a", [0.0, 1.0]), ("b", [0.0, 0.0]), ("a", [None, None]), ("a", [0.0])],
    ids=["one succeeded", "another task", "none was scored", "nothing to compare with"],
)
def test_other_groups_are_left_as_they_are(task_id, rewards):
    assert with_success().replacement_for(scored(task_id, rewards, group_id=9), at_least(0)) is None


def test_a_success_is_available_after_the_next_publish():
    curation = Curation(CurationSection(stored_successes=1))
    curation.record(scored("a", [1.0, 0.0], group_id=7))
    assert curation.replacement_for(scored("a", [0.0, 0.0], group_id=9), at_least(0)) is None
    curation.publish()
    assert curation.replacement_for(scored("a", [0.0, 0.0], group_id=9), at_least(0)) is not None


def test_a_success_too_stale_for_one_group_remains_for_others():
    curation = with_success()
    assert curation.replacement_for(scored("a", [0.0, 0.0], group_id=9), at_least(4)) is None
    assert curation.metrics() == {"curation/replaced": 0, "curation/too_old": 1, "curation/stored": 1}
    assert curation.replacement_for(scored("a", [0.0, 0.0], group_id=10), at_least(3)) is not None


@pytest.mark.parametrize(("more", "is_used"), [(0, False), (1, False), (2, True)])
def test_an_older_success_is_used_as_far_as_the_rules_allow(more, is_used):
    curation = Curation(CurationSection(stored_successes=2, stored_staleness=more))
    curation.record(scored("a", [0.0, 1.0], group_id=7, version=3))
    curation.publish()
    replacement = curation.replacement_for(scored("a", [0.0, 0.0], group_id=9, version=6), at_least(5))
    assert (replacement is not None) == is_used
    if replacement is not None:
        composed = replacement.build_group("composed", (VersionSpan(6, 1),))
        assert composed.oldest_version == 6, "the bound is on what was sampled for this group"


def test_episodes_are_limited_by_the_longest_success_of_their_task():
    curation = Curation(CurationSection(length_cap=1.5))
    assert token_limit(curation, "a") is None
    curation.record(scored("a", [0.0, 0.0]))
    curation.settle(0)
    curation.publish()
    assert token_limit(curation, "a") is None, "without a success there is no limit"
    short = scored("a", [1.0, 0.0], group_id=1)
    (longest,) = {num_sampled(episode) for episode in short.episodes}
    curation.record(short)
    curation.settle(1)
    curation.publish()
    assert token_limit(curation, "a") == ceil(1.5 * longest)
    resumed = Curation(CurationSection(length_cap=1.5))
    resumed.restore(curation.state(), finished=())
    assert token_limit(resumed, "a") == token_limit(curation, "a")


def test_a_reissued_group_keeps_its_limit():
    ledger = Ledger(TaskSource(tasks(1), 3), 2, 0, Curation(CurationSection(length_cap=1.0)))
    task_id = ledger.issue(0).task.id
    ledger.curation.record(scored(task_id, [1.0, 0.0]))
    ledger.consume([0])
    limited = ledger.issue(0)
    assert limited.token_limit is not None
    ledger.again(limited.group_id)
    assert ledger.issue(1).token_limit == limited.token_limit


def test_stored_successes_are_the_newest_per_task_with_lru_eviction():
    curation = with_success()
    curation.record(scored("b", [1.0, 0.0], group_id=8))
    curation.publish()
    assert curation.replacement_for(scored("a", [0.0, 0.0], group_id=10), at_least(0)) is not None
    curation.record(scored("c", [1.0, 0.0], group_id=11))
    curation.record(scored("a", [1.0, 0.0], group_id=12))
    curation.publish()
    found = {task: curation.replacement_for(scored(task, [0.0, 0.0], group_id=20), at_least(0)) for task in "abc"}
    assert {task: each and each.donor.group_id for task, each in found.items()} == {"a": 12, "b": None, "c": 11}
    assert curation.metrics()["curation/stored"] == 2


@pytest.mark.parametrize("how", [Curation.lose, Curation.forget])
def test_a_success_with_a_lost_payload_is_forgotten_alone(how):
    curation = with_success()
    how(curation, 6, "a")
    assert curation.metrics()["curation/stored"] == 1
    how(curation, 7, "a")
    assert curation.metrics()["curation/stored"] == 0


def test_successes_are_not_kept_over_a_resume():
    curation, resumed = with_success(), Curation(CurationSection(stored_successes=2))
    resumed.restore(curation.state(), finished=())
    assert resumed.metrics()["curation/stored"] == 0


def test_a_stored_episode_keeps_its_reward_and_the_group_its_own_versions():
    donor = replace(
        scored("a", [0.0, 1.0], group_id=7, version=3),
        versions=(VersionSpan(2, 3), VersionSpan(3, 3)),
        weights=(Acknowledged("rollout-1", 2, "two"), Acknowledged("rollout-1", 3, "three")),
    )
    host = replace(scored("a", [0.0, 0.0], group_id=9, version=5), columns={"reference_logprobs": "of other tokens"})
    versions = (VersionSpan(5, 3),)
    after = Replacement(host, 0, donor, 1).build_group("composed", versions)
    assert after.episodes == (replace(donor.episodes[1], origin="stored"), host.episodes[1])
    assert (after.versions, after.oldest_version, after.payload, after.columns) == (versions, 5, "composed", {})
    assert {(a.replica, a.version) for a in after.weights} == {("rollout-0", 5)}
    assert (after.group_id, after.permit_version) == (9, 5)


def test_with_episode_changes_no_other():
    assert with_episode("abc", 1, "x") == ("a", "x", "c")


# --------------------------------------------------------------------------------------------------------------- laws


@dataclass
class History:
    """Everything that happened, from which what is known can be computed anew."""

    scored: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    pending: list[tuple[str, int, int]] = field(default_factory=list)
    published: list[tuple[str, int, int]] = field(default_factory=list)

    def settle(self, group_id: int) -> None:
        if group_id in self.scored:
            self.pending.append(self.scored.pop(group_id))

    def publish(self) -> None:
        self.published += self.pending
        self.pending = []

    def tallies(self) -> dict[str, Tally]:
        counts = {task: (0, 0) for task, _, _ in self.published}
        for task, num_successes, num_episodes in self.published:
            counts[task] = (counts[task][0] + num_successes, counts[task][1] + num_episodes)
        return {task: Tally(*both) for task, both in counts.items()}


ACTIONS = ["issue", "issue", "judge", "judge", "consume", "drop", "again", "crash"]


@given(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, SIZE)), max_size=80))
def test_history_always_covers_settled_and_published_groups(actions):
    rules = CurationSection(fewer_above=0.5)
    ledger, model = ledger_of(rules, min_episodes=4), History()
    sizes: dict[int, int] = {}

    def judge(group_id: int, num_successes: int) -> None:
        task_id, size = ledger.open[group_id].task_id, sizes[group_id]
        num_successes = min(num_successes, size)
        rewards = [1.0] * num_successes + [0.0] * (size - num_successes)
        ledger.curation.record(scored(task_id, rewards, group_id))
        model.scored[group_id] = (task_id, num_successes, size)

    for action, choice, num_successes in actions:
        group_ids = sorted(ledger.open)
        group_id = group_ids[choice % len(group_ids)] if group_ids else -1
        if action == "issue":
            known = model.tallies()
            issued = ledger.issue(0)
            tally = known.get(issued.task.id, Tally(0, 0))
            is_easy = tally.num_episodes >= 4 and tally.rate > 0.5
            assert issued.size == sizes.setdefault(issued.group_id, SIZE // 2 if is_easy else SIZE)
        elif action == "judge" and group_ids:
            judge(group_id, num_successes)
        elif action == "consume" and group_ids:
            ledger.consume([group_id])
            model.settle(group_id)
            model.publish()
        elif action == "drop" and group_ids:
            ledger.drop(group_id)
            model.settle(group_id)
        elif action == "again" and group_ids:
            ledger.again(group_id)
            model.scored.pop(group_id, None)
        elif action == "crash":
            finished = {group_id for group_id in model.scored if group_id % 10 < choice}
            state, ledger = ledger.state(), ledger_of(rules, min_episodes=4)
            ledger.restore(state, finished)
            model.scored = {group_id: row for group_id, row in model.scored.items() if group_id in finished}
        assert ledger.curation.state().tallies == model.tallies()


def played(
    seed: int, steps: int, *, crash_at: frozenset[int], hurry: Callable[[Sequence[Assignment]], Sequence[Assignment]]
) -> tuple[list[tuple[int, str, int]], LedgerState]:
    """Synchronous training of 6 groups a step, some of which are dropped; the order in which they are settled is
    `hurry`'s. Every crash comes with groups of the step open, and none finished."""
    ledger = ledger_of(EVERYTHING, num_tasks=20, look_again=2)
    issued: dict[int, Assignment] = {}

    def issue() -> Assignment:
        assignment = ledger.issue(0)
        issued.setdefault(assignment.group_id, assignment)
        return assignment

    for step in range(steps):
        group_of_step = [issue() for _ in range(6)]
        if step in crash_at:
            state, ledger = ledger.state(), ledger_of(EVERYTHING, num_tasks=20, look_again=2)
            ledger.restore(state, finished=())
            group_of_step = [issue() for _ in range(6)]
        left = [a for a in hurry(group_of_step) if not _settle_early(ledger, a, seed)]
        while len(left) < 6:  # those that are dropped are filled in
            assignment = issue()
            if not _settle_early(ledger, assignment, seed):
                left.append(assignment)
        ledger.consume(a.group_id for a in left)
    return [(a.group_id, a.task.id, a.size) for a in issued.values()], ledger.state()


def _settle_early(ledger: Ledger, assignment: Assignment, seed: int) -> bool:
    """Judge a group; drop it if all its rewards are equal."""
    skill = random.Random(f"{seed} {assignment.task.id} {assignment.group_id // 40}").random()
    chance = random.Random(f"{seed} {assignment.group_id}")
    rewards = [float(chance.random() < 1.3 * skill) for _ in range(assignment.size)]
    ledger.curation.record(scored(assignment.task.id, rewards, assignment.group_id))
    if is_equal := len(set(rewards)) == 1:
        ledger.drop(assignment.group_id)
    return is_equal


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), crash_at=st.frozensets(st.integers(0, 14), max_size=3))
def test_an_interrupted_run_issues_the_same_groups_and_history(seed, crash_at):
    whole = played(seed, 15, crash_at=frozenset(), hurry=list)
    assert played(seed, 15, crash_at=crash_at, hurry=list) == whole


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), order=st.randoms(use_true_random=False))
def test_in_synchronous_training_nothing_depends_on_who_is_quicker(seed, order):
    def shuffled(assignments: Sequence[Assignment]) -> Sequence[Assignment]:
        return order.sample(assignments, len(assignments))

    issued, state = played(seed, 15, crash_at=frozenset(), hurry=list)
    issued_too, state_too = played(seed, 15, crash_at=frozenset(), hurry=shuffled)
    assert issued_too == issued
    assert state_too == state


def test_the_tested_runs_include_skipped_tasks_and_smaller_groups():
    issued, state = played(5, 15, crash_at=frozenset(), hurry=list)
    assert {size for _, _, size in issued} == {SIZE, SIZE // 2}
    assert any(tally.num_passed for tally in state.curation.tallies.values())


@given(
    limit=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(["success", "failure", "publish"]), st.integers(0, 6)), max_size=60),
)
def test_stored_successes_stay_within_the_limit_and_newest_per_task(limit, actions):
    curation = Curation(CurationSection(stored_successes=limit))
    newest: dict[str, int] = {}
    for group_id, (action, number) in enumerate(actions):
        task_id = f"task-{number}"
        if action == "publish":
            curation.publish()
        elif action == "success":
            curation.record(scored(task_id, [0.0, 1.0], group_id))
            newest[task_id] = group_id
        else:
            replacement = curation.replacement_for(scored(task_id, [0.0, 0.0], group_id), at_least(0))
            assert replacement is None or replacement.donor.group_id == newest[task_id]
        assert curation.metrics()["curation/stored"] <= min(limit, len(newest))


def test_metas_of_a_replaced_group_are_those_of_its_payload():
    """`Replacement.build_group` and whoever composes the payload take the same places."""
    host, donor = (tuple(f"{name}{i}" for i in range(3)) for name in "hd")
    metas: Mapping[str, EpisodeMeta] = {name: episode(float(i)) for i, name in enumerate((*host, *donor))}
    groups = [
        replace(scored("a", [], i), episodes=tuple(metas[n] for n in names)) for i, names in enumerate((host, donor))
    ]
    replacement = Replacement(groups[0], 2, groups[1], 1)
    payload = with_episode(host, replacement.episode, donor[replacement.donor_episode])
    stored = {"d1": replace(metas["d1"], origin="stored")}
    assert replacement.build_group(payload, ()).episodes == tuple({**metas, **stored}[name] for name in payload)
