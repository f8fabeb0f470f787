"""Maximum likelihood on answers, and distillation from a teacher: their losses and gradients by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.distill import Distill
from algorithms.sft import SFT
from rlsys.algorithm import Column
from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.types import OK, EpisodeMeta, TrajectoryMeta
from tests.groups import group
from tests.tokens import F64, column, tokens


def test_the_loss_is_the_cross_entropy_of_the_trained_tokens():
    logits_NV = torch.randn(6, 11, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens_N = torch.tensor([3, 1, 0, 10, 5, 3])
    logprobs_N = logits_NV.log_softmax(-1).gather(1, tokens_N[:, None])[:, 0]
    loss = SFT().loss(logprobs_N, tokens([-1.0] * 6, [1.0] * 6)).loss_N.mean()
    expected = torch.nn.functional.cross_entropy(logits_NV, tokens_N)
    (ours,) = torch.autograd.grad(loss, logits_NV, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, logits_NV)
    assert torch.allclose(loss, expected) and torch.allclose(ours, theirs)


def member(reward: float | None) -> EpisodeMeta:
    return EpisodeMeta((TrajectoryMeta("policy", None, OK, reward, ()),))


def test_only_answers_above_the_threshold_are_trained_where_there_is_one():
    episodes = [member(1.0), member(0.2), member(None)]
    some = group(0, episodes=episodes)
    assert [a.episode for a in SFT(group_size=3).advantages(some)] == [0, 1, 2]
    assert [a.episode for a in SFT(group_size=3, reward_above=0.5).advantages(some)] == [0]
    assert SFT(group_size=3, reward_above=0.5).can_learn_from(some)
    assert not SFT(group_size=3, reward_above=1.0).can_learn_from(some), "dropped as zero_advantage"


def gradient_of(logits_V: torch.Tensor, sampler_V: torch.Tensor, teacher_V: torch.Tensor) -> torch.Tensor:
    """Expected gradient of the loss of one token, sampled by the policy with `sampler_V`, none of them clipped."""
    distill = Distill(clip_low=0.999, clip_high=1e6)
    logprobs_V, behavior_V = logits_V.log_softmax(-1), sampler_V.log_softmax(-1)
    columns = {Column.REFERENCE_LOGPROBS: teacher_V.log_softmax(-1).tolist()}
    loss_N = distill.loss(logprobs_V, tokens(behavior_V.tolist(), [1.0] * len(behavior_V), columns=columns)).loss_N
    (found,) = torch.autograd.grad((behavior_V.exp() * loss_N).sum(), logits_V)
    return found


@pytest.mark.parametrize("is_stale", [False, True])
@given(st.integers(0, 10_000))
def test_the_expected_gradient_is_that_of_the_reverse_kl_to_the_teacher(is_stale: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits_V, teacher_V, other_V = torch.randn(3, 7, dtype=F64, generator=generator)
    logits_V.requires_grad_()
    logprobs_V, teacher_logprobs_V = logits_V.log_softmax(-1), teacher_V.log_softmax(-1)
    kl = (logprobs_V.exp() * (logprobs_V - teacher_logprobs_V)).sum()
    (expected,) = torch.autograd.grad(kl, logits_V)
    sampler_V = logits_V.detach() + (0.3 * other_V if is_stale else 0.0)
    assert torch.allclose(gradient_of(logits_V, sampler_V, teacher_V), expected, atol=1e-12)


def test_a_token_that_the_teacher_finds_impossible_is_bounded():
    columns = {Column.REFERENCE_LOGPROBS: [-900.0, -0.1]}
    batch = tokens([-0.1, -0.1], [1.0, 1.0], columns=columns)
    logprobs_N = column([-0.1, -0.1]).requires_grad_()
    Distill(max_advantage=5.0).loss(logprobs_N, batch).loss_N.sum().backward()
    assert logprobs_N.grad is not None and torch.equal(logprobs_N.grad, column([5.0, 0.0]))


def test_the_loss_reports_the_reverse_kl():
    batch = tokens([-1.0, -2.0], [1.0, 1.0], columns={Column.REFERENCE_LOGPROBS: [-0.5, -2.25]})
    found = Distill().loss(column([-1.0, -2.0]), batch).metrics_N["distill/kl"]
    assert torch.equal(found, column([-0.5, 0.25]))


@pytest.mark.parametrize(
    ("keys", "functions"),
    [
        (["algorithm.type=distill"], ["zero"]),
        (["algorithm.type=sft", "rollout.workflow=demonstrations"], ["zero"]),
        (["algorithm={type: sft, reward_above: 0.5}"], ["exact"]),
        (["algorithm.type=distill", "reward.fn=math"], ["math"]),
        ([], ["exact"]),
    ],
)
def test_rewards_are_optional_where_they_change_nothing(keys: list[str], functions: list[str]):
    config = Config.load([], ["run.steps=1", "model.path=m", "data.path=d", "stabilizer=null", *keys])
    assert [spec.fn for spec in config.reward_functions] == functions


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["algorithm.type=sft"], "its answers are sampled, and SFT would teach the policy what it does already"),
        (
            ["algorithm.type=ppo", "rollout.workflow=offline"],
            "its answers are recorded, and PPO needs answers that",
        ),
        (
            ["rollout.workflow=demonstrations"],
            "its answers are recorded, and GRPO needs answers that",
        ),
        (["algorithm.type=distill", "rollout.workflow=offline"], "its answers are recorded, and Distill needs"),
    ],
)
def test_answers_of_an_origin_that_the_loss_is_not_for_are_refused(keys: list[str], words: str):
    with pytest.raises(ConfigError, match=rf"rollout\.workflow: {words}"):
        Config.load([], ["run.steps=1", "model.path=m", "data.path=d", "stabilizer=null", *keys])


@pytest.mark.parametrize("algorithm", ["kto", "sft", "{type: sft, reward_above: 0.5}"])
def test_losses_without_a_ratio_take_recorded_answers(algorithm: str):
    keys = [f"algorithm={algorithm}", "rollout.workflow=offline"]
    assert Config.load([], ["run.steps=1", "model.path=m", "data.path=d", "stabilizer=null", *keys])


def test_a_teacher_runs_as_a_worker_of_its_own_beside_an_adapter():
    keys = ["run.steps=1", "model.path=m", "data.path=d", "stabilizer=null", "algorithm.type=distill", "train.lora={}"]
    assert not Config.load([], keys).has_reference
    taught = Config.load([], [*keys, "reference.path=teacher"])
    assert taught.has_reference and taught.reference_path == "teacher"
