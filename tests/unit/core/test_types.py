"""Groups: the members that count, and those left out."""

from __future__ import annotations

from algorithms.grpo import GRPO
from rlsys.batch.packing import plan_batch
from rlsys.types import OK, EpisodeMeta, Group, Outcome, SampleMeta, Score, TrajectoryMeta, failed
from tests.groups import episode, group, num_ok

GONE = failed("its tool was gone")


def subagent(outcome: Outcome = OK, reward: float | None = None, num_samples: int = 1) -> TrajectoryMeta:
    return TrajectoryMeta("helper", 0, outcome, reward, (SampleMeta(2, 5, 5, 1),) * num_samples)


def team(reward: float, *helpers: TrajectoryMeta) -> EpisodeMeta:
    return EpisodeMeta((*episode(reward).trajectories, *helpers))


def places(of: Group) -> list[tuple[int, int]]:
    return [place for place, _ in of.trajectories()]


def test_failed_subagents_are_excluded_alone_but_failed_roots_with_episodes():
    whole = group(0, episodes=[team(1.0, subagent(GONE), subagent()), team(0.0, subagent())])
    assert places(whole) == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert num_ok(whole) == 2
    scored = whole.with_scores((Score(None, "judge hung"), Score(0.5)))
    assert places(scored) == [(1, 0), (1, 1)]
    assert [e.is_failed for e in scored.episodes] == [True, False]


def test_a_reward_that_is_not_finite_fails_its_subagent_alone():
    scored = group(0, episodes=[team(1.0, subagent(reward=float("nan"))), team(0.0, subagent(reward=1.0))])
    scored = scored.with_scores((Score(1.0), Score(0.0)))
    assert places(scored) == [(0, 0), (1, 0), (1, 1)]


def test_failed_subagents_get_no_advantage_and_change_no_other():
    whole = group(0, episodes=[team(1.0, subagent(GONE), subagent()), team(0.0, subagent())])
    assigned = {(a.episode, a.trajectory): a.advantage for a in GRPO(std_normalize=False).advantages(whole)}
    assert assigned == {(0, 0): 0.5, (0, 2): 0.5, (1, 0): -0.5, (1, 1): -0.5}


def test_an_agent_without_turns_changes_no_weight_of_others():
    def weights(*helpers: TrajectoryMeta) -> dict[tuple[int, int], float]:
        whole = group(0, episodes=[team(1.0, subagent(), *helpers), team(0.0)])
        algorithm = GRPO(over="agents")
        assigned = [tuple(algorithm.advantages(whole))]
        plan = plan_batch([whole], assigned, algorithm.aggregation, num_ranks=1, max_tokens=1000, num_updates=1)
        refs = [s for micro_batch in plan[0].micro_batches for s in micro_batch.samples]
        return {(s.episode, s.trajectory): s.token_weight for s in refs}

    assert weights(subagent(num_samples=0)) == weights()
