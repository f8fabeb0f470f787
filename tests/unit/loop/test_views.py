"""View of a group for one of several policies: its trained and compared trajectories."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from algorithms.grpo import GRPO
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import NothingToTrain, ZeroAdvantage
from rlsys.loop.curation import check_teaches
from rlsys.loop.step_metrics import PartNames, _rewards
from rlsys.monitoring.events import Events
from rlsys.types import Episode, Group, GroupKey, Score, Trajectory, Turn, VersionSpan, failed


def said(policy: str, version: int, *, reward: float | None = None, parent: int | None = 0) -> Trajectory:
    turn = Turn((1, 2), (3, 4, 5), (-1.0,) * 3, (VersionSpan(version, 3),), "stop", "...")
    return Trajectory(f"agent of {policy}", (turn,), reward=reward, parent=parent, policy=policy)


def view(policy: str, *episodes: tuple[Trajectory, ...]) -> Group:
    payload = tuple(map(Episode, episodes))
    return Group(
        key=GroupKey(0, 1), task_id="t", permit_version=0, replica="r", episodes=meta_of(payload),
        versions=versions_of(payload, policy), weights=(), payload=payload, policy=policy,
    )  # fmt: skip


PAIR = (said("lead", 7, parent=None), said("helper", 2))


def test_a_view_has_versions_and_tokens_of_its_own_policy():
    lead, helper = view("lead", PAIR, PAIR), view("helper", PAIR, PAIR)
    assert (lead.versions, helper.versions) == ((VersionSpan(7, 6),), (VersionSpan(2, 6),))
    assert [at for at, _ in helper.trajectories()] == [(0, 1), (1, 1)]
    assert len(list(helper.everyone())) == 4
    assert (helper.num_trained, helper.num_tokens) == (6, 10)


def test_unrewarded_agents_take_the_advantage_of_another_policys_root():
    helper = view("helper", PAIR, PAIR).with_scores((Score(1.0), Score(0.0)))
    assigned = {(a.episode, a.trajectory): a.advantage for a in GRPO(group_size=2).advantages(helper)}
    assert assigned.keys() == {(0, 1), (1, 1)}
    assert assigned[0, 1] > 0 > assigned[1, 1]


def test_reported_rewards_are_those_of_the_policy_or_root():
    team = view("helper", PAIR, PAIR).with_scores((Score(1.0), Score(0.0)))
    assert _rewards([team], PartNames(Events()), 1.0)["reward/mean"] == 0.5
    rewarded = (PAIR[0], said("helper", 2, reward=3.0))
    own = view("helper", rewarded, rewarded).with_scores((Score(1.0), Score(0.0)))
    assert _rewards([own], PartNames(Events()), 1.0)["reward/mean"] == 3.0
    assert _rewards([replace(own, policy="lead")], PartNames(Events()), 1.0)["reward/mean"] == 0.5


@dataclass(frozen=True, kw_only=True)
class Unmoved(GRPO):
    """Learns nothing from any group."""

    def can_learn_from(self, group: Group) -> bool:
        return False


ALGORITHM = GRPO(group_size=2)


def test_a_policy_without_turns_has_zero_advantage_and_no_failure():
    alone = (PAIR[0],)
    silent = view("helper", alone, alone).with_scores((Score(1.0), Score(0.0)))
    with pytest.raises(ZeroAdvantage, match="only other policies than helper spoke in it"):
        check_teaches(silent, ALGORITHM)


def test_a_policy_in_only_one_episode_has_zero_advantage():
    rewarded = (PAIR[0], said("helper", 2, reward=1.0))
    group = view("helper", rewarded, (PAIR[0],)).with_scores((Score(1.0), Score(0.0)))
    with pytest.raises(ZeroAdvantage, match="nobody to compare what helper said with"):
        check_teaches(group, ALGORITHM)
    scored = view("helper", rewarded, rewarded).with_scores((Score(1.0), Score(None, "the judge raised")))
    with pytest.raises(NothingToTrain, match="the judge raised"):
        check_teaches(scored, ALGORITHM)


def test_equal_root_rewards_are_reported_for_an_unrewarded_policy():
    group = view("helper", PAIR, PAIR).with_scores((Score(1.0), Score(1.0)))
    with pytest.raises(ZeroAdvantage, match=r"equal rewards: \[1.0\]"):
        check_teaches(group, Unmoved(group_size=2))


def test_a_policy_whose_agents_all_failed_has_failed():
    broken = (PAIR[0], replace(PAIR[1], outcome=failed("its tool broke")))
    group = view("helper", broken, broken).with_scores((Score(1.0), Score(0.0)))
    with pytest.raises(NothingToTrain, match="its tool broke"):
        check_teaches(group, ALGORITHM)
