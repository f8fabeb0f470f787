"""PPO and REINFORCE++: rewards per token, returns, the critic's loss and its warm-up, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithms.ppo import PPO
from algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from algorithms.rloo import RLOO
from rlsys.algorithm import Column
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import Group
from tests.groups import episode, group
from tests.tokens import column, numeric_gradient, tokens

VALUES, REFERENCE = Column.VALUES, Column.REFERENCE_LOGPROBS


def rewarded(*rewards: float | None) -> Group:
    return group(0, episodes=[episode(reward) for reward in rewards])


def test_the_advantage_of_a_trajectory_is_its_reward_without_peers() -> None:
    for algorithm in (PPO(group_size=1), ReinforcePP(group_size=1)):
        assert [a.advantage for a in algorithm.advantages(rewarded(0.5))] == [0.5]
        assert [a.advantage for a in algorithm.advantages(rewarded(0.5, None, 2.0))] == [0.5, 2.0]


def test_advantages_and_returns_by_hand() -> None:
    """Sample 1: values .5 .25, reward 1: deltas -.25 .75. Sample 2: value 1, reward -1: delta -2. lambda .5."""
    batch = tokens([-1.0] * 3, [1.0, 1.0, -1.0], lengths=[2, 1], columns={VALUES: [0.5, 0.25, 1.0]})
    shaped = PPO(gae_lambda=0.5).token_advantages(batch)
    assert shaped.advantages_N.tolist() == pytest.approx([0.125, 0.75, -2.0])
    assert shaped.returns_N is not None
    assert shaped.returns_N.tolist() == pytest.approx([0.625, 1.0, -1.0])


def test_the_kl_is_subtracted_from_rewards_and_absent_from_loss() -> None:
    columns = {VALUES: [0.0, 0.0], REFERENCE: [-1.5, -3.0]}
    batch = tokens([-1.0, -2.0], [1.0, 1.0], columns=columns)
    algorithm = PPO(kl_coef=0.1, gae_lambda=0.0)
    assert algorithm.columns == {VALUES, REFERENCE}
    assert algorithm.token_advantages(batch).advantages_N.tolist() == pytest.approx([-0.05, 0.9])
    output = algorithm.loss(column([-1.0, -2.0]), batch)
    assert output.loss_N.tolist() == [-1.0, -1.0]
    assert output.metrics_N["policy/kl_ref"].tolist() == pytest.approx([0.5, 1.0])


def test_every_sample_of_a_trajectory_ends_in_its_reward() -> None:
    batch = tokens([-1.0] * 4, [1.0] * 4, lengths=[3, 1], columns={VALUES: [0.0] * 4})
    assert PPO(gae_lambda=1.0, gamma=0.5).token_advantages(batch).advantages_N.tolist() == [0.25, 0.5, 1.0, 1.0]


def test_with_a_discount_advantages_and_returns_are_by_hand_numbers() -> None:
    """gamma .5, lambda .5: deltas .5 · .4 - .2 = 0, .5 · .8 - .4 = 0, 1 - .8 = .2; carried back by .25 a token."""
    batch = tokens([-1.0] * 3, [1.0] * 3, columns={VALUES: [0.2, 0.4, 0.8]})
    shaped = PPO(gamma=0.5, gae_lambda=0.5).token_advantages(batch)
    assert shaped.advantages_N.tolist() == pytest.approx([0.0125, 0.05, 0.2])
    assert shaped.returns_N is not None
    assert shaped.returns_N.tolist() == pytest.approx([0.2125, 0.45, 1.0])


def test_the_value_loss_by_hand() -> None:
    """Value .2 beyond the clip away from the return, beyond it towards the return, and within it."""
    batch = tokens([-1.0] * 3, [0.0] * 3, columns={VALUES: [1.0, 1.0, 1.0]}, returns=[2.0, 2.0, 2.0])
    values_N = column([0.5, 1.5, 1.1]).requires_grad_()
    output = PPO(value_clip=0.2).value_loss(values_N, batch)
    assert output.loss_N.tolist() == pytest.approx([1.5**2 / 2, 0.8**2 / 2, 0.9**2 / 2])
    assert output.metrics_N["critic/clip_frac"].tolist() == [0.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), values_N)
    assert gradient.tolist() == pytest.approx([-1.5, 0.0, -0.9])
    assert gradient.tolist() == pytest.approx(
        numeric_gradient(lambda x: PPO(value_clip=0.2).value_loss(x, batch), [0.5, 1.5, 1.1]), abs=1e-6
    )
    plain = PPO(value_clip=None).value_loss(column([0.5, 1.5, 1.1]), batch)
    assert plain.loss_N.tolist() == pytest.approx([1.5**2 / 2, 0.5**2 / 2, 0.9**2 / 2])
    assert undocumented_names(output.metrics_N) == []


def test_a_value_loss_without_returns_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the returns"):
        PPO().value_loss(column([0.0]), tokens([-1.0], [0.0], columns={VALUES: [0.0]}))


def test_the_policy_waits_for_the_critic_to_warm_up() -> None:
    assert [PPO(critic_warmup=2).trains_policy(version) for version in range(4)] == [False, False, True, True]
    assert PPO().trains_policy(0)


def test_whitening_is_the_frameworks() -> None:
    assert PPO().whitens and not PPO(whiten=False).whitens
    assert ReinforcePP().whitens and ReinforcePPBaseline().whitens


def test_reinforce_pp_returns_to_go_by_hand() -> None:
    """Reward 1 at the last token; KL of .5, 1 and -.5 nats a token, of the policy that sampled."""
    columns = {REFERENCE: [-1.5, -3.0, -0.5]}
    batch = tokens([-1.0, -2.0, -1.0], [1.0, 1.0, 2.0], lengths=[2, 1], columns=columns)
    shaped = ReinforcePP(kl_coef=0.1).token_advantages(batch)
    assert shaped.advantages_N.tolist() == pytest.approx([1 - 0.15, 1 - 0.1, 2.05])
    assert shaped.returns_N is None
    assert ReinforcePP().token_advantages(batch).advantages_N.tolist() == [1.0, 1.0, 2.0]
    assert ReinforcePP(kl_coef=0.1).loss(column([-1.0, -2.0, -1.0]), batch).loss_N.tolist() == [-1.0, -1.0, -2.0]


def test_the_kl_estimator_in_the_reward_is_configurable() -> None:
    """x = .5: k2 is .125; every class has its own default."""
    batch = tokens([-1.0], [0.0], columns={REFERENCE: [-1.5], VALUES: [0.0]})
    for algorithm in (ReinforcePP(kl_coef=1.0), RLOO(kl_coef=1.0), PPO(kl_coef=1.0)):
        assert algorithm.token_advantages(batch).advantages_N.tolist() == pytest.approx([-0.5])
        by_k2 = replace(algorithm, kl_estimator="k2")
        assert by_k2.token_advantages(batch).advantages_N.tolist() == pytest.approx([-0.125])
        assert algorithm.loss(column([-1.0]), batch).loss_N.tolist() == [0.0]


def test_the_baseline_form_centres_by_group_with_kl_in_loss() -> None:
    algorithm = ReinforcePPBaseline(kl_coef=0.1)
    assert [a.advantage for a in algorithm.advantages(rewarded(1.0, 0.0, 0.0, 0.0))] == [0.75, -0.25, -0.25, -0.25]
    output = algorithm.loss(column([-1.0]), tokens([-1.0], [2.0], columns={REFERENCE: [-1.5]}))
    assert output.loss_N.item() == pytest.approx(-2.0 + 0.1 * 0.125)
