"""Off-policy corrections: by hand, alone and combined, and as configured by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from algorithms.aipo import AIPO
from algorithms.corrections import (
    Correction,
    Geometric,
    IcePop,
    OffPolicyMask,
    Policies,
    SequenceMis,
    SequenceTis,
    Tis,
    TokenMis,
)
from algorithms.grpo import GRPO
from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.monitoring.metric_catalog import undocumented_names
from tests.tokens import column, loss_of, tokens

RHO = [2.0, 2.0, 0.4, 8.0]
"""Two samples of two tokens: products 4 and 3.2, geometric means 2 and 1.789."""


def policies(rho: list[float] = RHO, ratio: list[float] | None = None, lengths: tuple[int, ...] = (2, 2)) -> Policies:
    """The sampler's logprobs are 0, so that those of the other policies are their log-ratios to it."""
    advantages = [1.0, -1.0, 1.0, -1.0][: len(rho)]
    batch = tokens([0.0] * len(rho), advantages, proximal=column(rho).log().tolist(), lengths=[*lengths])
    proximal_N = column(rho).log()
    return Policies(column(ratio or rho).log(), proximal_N, proximal_N, batch)


@pytest.mark.parametrize(
    ("correction", "weights", "is_touched"),
    [
        (Tis(cap=2.5), [2.0, 2.0, 0.4, 2.5], [0, 0, 0, 1]),
        (SequenceTis(cap=3.5), [3.5, 3.5, 3.2, 3.2], [1, 1, 0, 0]),
        (IcePop(), [2.0, 2.0, 0.0, 0.0], [0, 0, 1, 1]),
        (Geometric(low=0.5, high=1.9), [0, 0, 1, 1], [1, 1, 0, 0]),
        (SequenceMis(cap=3.5), [0, 0, 1, 1], [1, 1, 0, 0]),
        (TokenMis(low=0.5, high=2.0), [1, 1, 0, 0], [0, 0, 1, 1]),
    ],
)
def test_factors_by_hand(correction: Correction, weights: list[float], is_touched: list[int]) -> None:
    factor = correction.factor(policies())
    assert factor.weights_N.tolist() == pytest.approx(weights)
    assert factor.is_touched_N.tolist() == [bool(touched) for touched in is_touched]
    assert undocumented_names([correction.metric]) == []


def test_bounds_are_kept() -> None:
    rho = [0.49, 0.5, 1.0, 5.0]
    assert IcePop().factor(policies(rho)).weights_N.tolist() == pytest.approx([0.0, 0.5, 1.0, 5.0])


def test_the_off_policy_mask_drops_negative_tokens_of_distant_samples() -> None:
    """Means of log(mu / p): log 2 in the first sample, -log 2 in the second."""
    factor = OffPolicyMask(delta=0.5).factor(policies(ratio=[0.5, 0.5, 2.0, 2.0]))
    assert factor.weights_N.tolist() == [True, False, True, True]
    assert factor.is_touched_N.tolist() == [False, True, False, False]
    assert not OffPolicyMask(delta=0.7).factor(policies(ratio=[0.5, 0.5, 2.0, 2.0])).is_touched_N.any()


def test_the_off_policy_mask_uses_the_current_policy() -> None:
    """At a later update: the step started from the sampler, and the policy has halved the first token since."""
    behavior = [-1.0, -1.0]
    batch = tokens(behavior, [-1.0, -1.0], lengths=[1, 1])
    algorithm = GRPO(correction=(OffPolicyMask(delta=0.5), Tis()), clip_low=0.9)
    at = [-1.0 - math.log(2), -1.0]
    assert loss_of(algorithm, at, batch)[0] == pytest.approx([0.0, 1.0])
    moved = tokens(behavior, [-1.0, -1.0], lengths=[1, 1], proximal=at)
    assert loss_of(algorithm, behavior, moved)[0][0] != 0.0, "far at the step's start, and back at the sampler"


@pytest.mark.parametrize("kind", [Tis, SequenceTis, IcePop, Geometric, SequenceMis, TokenMis, OffPolicyMask])
def test_on_policy_every_correction_leaves_the_loss_alone(kind: Callable[[], Correction]) -> None:
    batch = tokens([-1.0, -2.0], [1.0, -1.0])
    plain = loss_of(GRPO(correction=()), [-1.0, -2.0], batch)
    assert loss_of(GRPO(correction=(kind(),)), [-1.0, -2.0], batch) == plain


def test_weights_have_no_gradient() -> None:
    logprobs_N = column([-1.0, -2.0]).requires_grad_()
    seen = Policies(logprobs_N, logprobs_N, logprobs_N, tokens([-1.1, -1.9], [1.0, 1.0]))
    assert not seen.log_rho().requires_grad
    assert not seen.log_drift().requires_grad


def test_parts_multiply_and_each_reports_its_share() -> None:
    """The first sample's mean is out of bounds; in the second, one token is beyond the cap."""
    behavior = (-column(RHO).log() - 1).tolist()
    batch = tokens(behavior, [1.0] * 4, proximal=[-1.0] * 4, lengths=[2, 2])
    algorithm = GRPO(correction=(Geometric(low=0.5, high=1.9), Tis(cap=2.0)))
    loss, gradient = loss_of(algorithm, [-1.0] * 4, batch)
    assert loss == pytest.approx([0.0, 0.0, -0.4, -2.0])
    assert gradient == pytest.approx([0.0, 0.0, -0.4, -2.0])
    metrics_N = algorithm.loss(column([-1.0] * 4), batch).metrics_N
    assert metrics_N["policy/geometric_masked_frac"].tolist() == [1, 1, 0, 0]
    assert metrics_N["policy/tis_truncated_frac"].tolist() == [0, 0, 0, 1]


def test_masks_alone_keep_the_ratio_in_the_loss() -> None:
    """Ratio 1.1 against the sampler, kept and then masked."""
    batch = tokens([-1.0 - math.log(1.1)], [1.0], proximal=[-1.0])
    assert loss_of(GRPO(correction=(TokenMis(),)), [-1.0], batch)[1] == pytest.approx([-1.1])
    assert loss_of(GRPO(correction=(TokenMis(high=1.05),)), [-1.0], batch)[1] == [0.0]


def test_counting_the_ratio_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="tis and icepop would each count the importance ratio; name one of them"):
        GRPO(correction=(Tis(), IcePop()))
    with pytest.raises(ValueError, match="tis would count the importance ratio a second time"):
        AIPO(correction=(Tis(),))
    with pytest.raises(ValueError, match="geometric is named twice"):
        GRPO(correction=(Geometric(), Geometric(high=1.1)))
    assert AIPO(correction=(Geometric(),)).correction == (Geometric(),)


def test_an_interpolated_proximal_policy_clips_part_of_the_drift() -> None:
    """Staleness 1: log p_prox is half way from the sampler to the policy, here ratio 4 in all, 2 and 2."""
    algorithm = GRPO(correction=(Tis(cap=3.0),), proximal="interpolated")
    batch = tokens([-1.0 - math.log(4)] * 2, [1.0, -1.0], proximal=[-1.0] * 2, staleness=[1, 1])
    loss, gradient = loss_of(algorithm, [-1.0, -1.0], batch)
    assert loss == pytest.approx([-2 * 1.28, 2 * 2.0])
    assert gradient == pytest.approx([0.0, 4.0])
    assert loss_of(GRPO(correction=(Tis(cap=3.0),)), [-1.0, -1.0], batch)[1] == pytest.approx([-3.0, 3.0])


def test_interpolation_weights_more_of_the_drift_of_older_tokens() -> None:
    """Staleness 3: three quarters of the way, so that of a ratio of 16 the weight is 8 and the clip sees 2."""
    algorithm = GRPO(correction=(Tis(cap=100.0),), proximal="interpolated")
    batch = tokens([-1.0 - math.log(16)] * 2, [1.0, -1.0], proximal=[-1.0] * 2, staleness=[3, 3])
    loss, gradient = loss_of(algorithm, [-1.0, -1.0], batch)
    assert loss == pytest.approx([-8 * 1.28, 8 * 2.0])
    assert gradient == pytest.approx([0.0, 16.0])


def test_a_fresh_token_is_clipped_against_the_sampler_if_interpolated() -> None:
    batch = tokens([-1.0 - math.log(4)], [1.0], proximal=[-1.0], staleness=[0])
    algorithm = GRPO(proximal="interpolated", correction=(Tis(),))
    assert loss_of(algorithm, [-1.0], batch) == ([-1.28], [0.0])
    with pytest.raises(ValueError, match="interpolated acts only with a weight"):
        GRPO(proximal="interpolated", correction=())


def test_a_long_sample_of_extreme_ratios_stays_finite() -> None:
    factor = SequenceTis().factor(policies([math.exp(20)] * 4))
    assert factor.weights_N.tolist() == [5.0] * 4
    assert torch.isfinite(SequenceTis(cap=1e30).factor(policies([math.exp(20)] * 4)).weights_N).all()


# ----------------------------------------------------------------------------------------------------- configuration

MINIMAL = """\
run: {steps: 10}
model: {path: some/model}
data: {path: rows.jsonl}
algorithm:
  correction: CORRECTION
"""


def load(folder: Path, correction: str) -> Config:
    path = folder / "job.yaml"
    path.write_text(MINIMAL.replace("CORRECTION", correction))
    return Config.load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tis", (Tis(),)),
        ("none", ()),
        ("[]", ()),
        ("{type: tis, cap: 5}", (Tis(cap=5.0),)),
        ("[geometric, tis]", (Geometric(), Tis())),
        ("[{type: token_mis, low: 0.9}, off_policy_mask]", (TokenMis(low=0.9), OffPolicyMask())),
    ],
)
def test_a_configuration_names_corrections(tmp_path: Path, text: str, expected: tuple[Correction, ...]) -> None:
    config = load(tmp_path, text)
    assert config.algorithm == GRPO(correction=expected)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml())
    assert Config.load(resolved) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tsi", "algorithm.correction: no correction is named 'tsi'; did you mean `tis`?"),
        ("[none, 3]", "algorithm.correction: no correction is named 'none'; there are: tis, "),
        ("{type: tis, cap: 0.5}", "algorithm.correction[0].cap: input should be greater than or equal to 1 (got 0.5)"),
        ("[tis, {type: geometric, low: 0}]", "algorithm.correction[1].low: input should be greater than 0 (got 0)"),
        ("{type: tis, kap: 1}", "algorithm.correction[0].kap: unknown key"),
        ("[tis, icepop]", "algorithm: correction: tis and icepop would each count the importance ratio"),
    ],
)
def test_a_wrong_correction_is_refused_where_it_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
