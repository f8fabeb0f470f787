"""Off-policy corrections for tokens that another policy sampled than the one a step starts from.

rho = p_proximal / mu is a token's importance ratio: the trainer's policy at the start of the step over the sampler. The
sampler has older weights, or runs on an engine that computes differently. A correction multiplies the whole loss by a
factor per token, without gradient. Some corrections are weights, which carry rho; the loss then takes its ratio against
the proximal policy, so that rho counts once. The others only mask and leave the loss's ratio against the sampler. In a
configuration:

    correction: tis
    correction: {type: tis, cap: 5}
    correction: [geometric, tis]
    correction: none

A masked token still counts in the loss's denominator, so that the other tokens do not weigh more. Shape suffixes: `N`
trained tokens of a micro-batch, `S` its samples.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

from pydantic import BeforeValidator, Discriminator, NonNegativeFloat, Tag, TypeAdapter, WithJsonSchema
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from algorithms.fields import RULES, AtLeastOne, AtMostOne
from algorithms.sample_math import MAX_LOG_RATIO, log_ratio, sample_means, sample_sums
from rlsys.algorithm import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor


@plain_dataclass(frozen=True, slots=True)
class Policies:
    """Logprobs of a micro-batch's tokens under the policies that a loss compares; only `current_N` has a gradient."""

    current_N: Tensor
    """Policy in training."""
    proximal_N: Tensor
    """The target policy of the corrections."""
    base_N: Tensor
    """The base of the loss's ratio: the proximal policy if a correction carries rho, else the sampler."""
    batch: LossInputs

    def log_ratio(self) -> Tensor:
        return log_ratio(self.current_N, self.base_N)

    def ratio(self) -> Tensor:
        """Ratio of the loss, current over base."""
        return self.log_ratio().exp()

    def log_rho(self) -> Tensor:
        """Proximal over sampler, without gradient."""
        return log_ratio(self.proximal_N.detach(), self.batch.behavior_logprobs_N)

    def log_drift(self) -> Tensor:
        """Current policy over sampler, without gradient."""
        return log_ratio(self.current_N.detach(), self.batch.behavior_logprobs_N)

    def sequence_rho(self) -> Tensor:
        """Product of rho over each sample, at each of its tokens; its logarithm is clamped to ±20."""
        return sample_sums(self.log_rho(), self.batch.lengths_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@plain_dataclass(frozen=True, slots=True)
class Factor:
    """Effect of a correction on each token."""

    weights_N: Tensor
    """Factor or mask."""
    is_touched_N: Tensor
    """True where the weight was truncated or the token masked."""


@dataclass(frozen=True, kw_only=True, config=RULES)
class Correction:
    """Base of every correction."""

    type: str
    is_weight: ClassVar[bool] = False
    """True for a weight, which carries rho; false for a mask."""
    touches: ClassVar[str] = "masked"
    """Effect on the tokens it changes: `masked` or `truncated`."""

    @property
    def metric(self) -> str:
        """Name of the metric: the share of tokens masked or truncated."""
        return f"policy/{self.type}_{self.touches}_frac"

    def factor(self, policies: Policies) -> Factor:
        raise NotImplementedError(f"{type(self).__name__} gives no factor: implement `factor`")


@dataclass(frozen=True, kw_only=True, config=RULES)
class Tis(Correction):
    """min(rho, cap): truncated importance sampling (Ionides, 2008), which bounds the variance at the price of a bias.

    With one update per step it turns the clipped surrogate into AIPO (arXiv:2505.24034). As a correction between engine
    and trainer it is due to Yao et al., 2025 (https://fengyao.notion.site/off-policy-rl). With a surrogate that is
    clipped against the proximal policy it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5).
    """

    type: Literal["tis"] = "tis"
    cap: AtLeastOne = 2.0
    """Largest importance weight of a token. At least 1, which is the weight of an on-policy token."""
    is_weight: ClassVar[bool] = True
    touches: ClassVar[str] = "truncated"

    def factor(self, policies: Policies) -> Factor:
        rho_N = policies.log_rho().exp()
        return Factor(rho_N.clamp(max=self.cap), rho_N > self.cap)


@dataclass(frozen=True, kw_only=True, config=RULES)
class SequenceTis(Correction):
    """min(rho of the sample, cap) for each token of a sample, whose rho is the product over its trained tokens.

    Below the cap this weight is unbiased for a whole sequence; its variance grows with the length.
    """

    type: Literal["sequence_tis"] = "sequence_tis"
    cap: AtLeastOne = 5.0
    """Largest importance weight of a sample. At least 1; values from 2 to 10 are in use."""
    is_weight: ClassVar[bool] = True
    touches: ClassVar[str] = "truncated"

    def factor(self, policies: Policies) -> Factor:
        rho_N = policies.sequence_rho()
        return Factor(rho_N.clamp(max=self.cap), rho_N > self.cap)


@dataclass(frozen=True, kw_only=True, config=RULES)
class IcePop(Correction):
    """rho where low <= rho <= high, else 0: IcePop (arXiv:2510.18855), with its bounds.

    IcePop compares engine and trainer at the sampled version; here the age of a token counts as well.
    """

    type: Literal["icepop"] = "icepop"
    low: AtMostOne = 0.5
    """Smallest importance ratio of a trained token. More than 0, at most 1."""
    high: AtLeastOne = 5.0
    """Largest importance ratio of a trained token. At least 1."""
    is_weight: ClassVar[bool] = True

    def factor(self, policies: Policies) -> Factor:
        rho_N = policies.log_rho().exp()
        is_kept_N = (rho_N >= self.low) & (rho_N <= self.high)
        return Factor(rho_N * is_kept_N, ~is_kept_N)


@dataclass(frozen=True, kw_only=True, config=RULES)
class Geometric(Correction):
    """Keep a sample if the geometric mean of its tokens' rho is within bounds; unlike a product, at any length.

    Geometric rejection (Geo-RS) of verl's rollout correction (docs/algo/rollout_corr_math.md). Combines well with
    `tis`.
    """

    type: Literal["geometric"] = "geometric"
    low: AtMostOne = 0.999
    """Smallest geometric mean of a trained sample. More than 0, at most 1."""
    high: AtLeastOne = 1.001
    """Largest geometric mean of a trained sample. At least 1. The defaults cover differences between engine and
    trainer; older weights need wider bounds."""

    def factor(self, policies: Policies) -> Factor:
        mean_N = sample_means(policies.log_rho(), policies.batch.lengths_S).exp()
        is_kept_N = (mean_N >= self.low) & (mean_N <= self.high)
        return Factor(is_kept_N, ~is_kept_N)


@dataclass(frozen=True, kw_only=True, config=RULES)
class SequenceMis(Correction):
    """Keep a sample if the product of its tokens' rho is at most `cap`: masked importance sampling
    (https://yingru.notion.site/When-Speed-Kills-Stability). `[sequence_mis, sequence_tis]` also weights the kept
    samples by the product, as there; `sequence_mis` alone leaves the ratio to the loss."""

    type: Literal["sequence_mis"] = "sequence_mis"
    cap: AtLeastOne = 5.0
    """Largest importance ratio of a trained sample. At least 1."""

    def factor(self, policies: Policies) -> Factor:
        is_kept_N = policies.sequence_rho() <= self.cap
        return Factor(is_kept_N, ~is_kept_N)


@dataclass(frozen=True, kw_only=True, config=RULES)
class TokenMis(Correction):
    """Keep a token if its rho is within bounds: the mask of `icepop` without its weight."""

    type: Literal["token_mis"] = "token_mis"
    low: AtMostOne = 0.6
    """Smallest importance ratio of a trained token. More than 0, at most 1."""
    high: AtLeastOne = 1.4
    """Largest importance ratio of a trained token. At least 1."""

    def factor(self, policies: Policies) -> Factor:
        rho_N = policies.log_rho().exp()
        is_kept_N = (rho_N >= self.low) & (rho_N <= self.high)
        return Factor(is_kept_N, ~is_kept_N)


@dataclass(frozen=True, kw_only=True, config=RULES)
class OffPolicyMask(Correction):
    """Mask tokens with a negative advantage in samples where the mean of log(mu / p) exceeds `delta`, p being the
    current policy (DeepSeek-V3.2, arXiv:2512.02556)."""

    type: Literal["off_policy_mask"] = "off_policy_mask"
    delta: NonNegativeFloat = 1e-4
    """Nats per token. At least 0. The paper gives no number; this is the default of slime."""

    def factor(self, policies: Policies) -> Factor:
        is_far_N = sample_means(-policies.log_drift(), policies.batch.lengths_S) > self.delta
        is_masked_N = is_far_N & (policies.batch.advantages_N < 0)
        return Factor(~is_masked_N, is_masked_N)


def carries_ratio(corrections: Sequence[Correction]) -> bool:
    """True if one of the corrections is a weight, so that the loss's ratio is against the proximal policy."""
    return any(correction.is_weight for correction in corrections)


def apply_corrections(
    corrections: Sequence[Correction], policies: Policies, surrogate: LossOutput, kl: LossOutput | None
) -> LossOutput:
    """Multiply (surrogate + KL) of each token by the factors of all corrections; report the share of tokens each
    changed."""
    loss_N, metrics_N = surrogate.loss_N, dict(surrogate.metrics_N)
    if kl is not None:
        loss_N = loss_N + kl.loss_N
        metrics_N |= kl.metrics_N
    for correction in corrections:
        factor = correction.factor(policies)
        loss_N = factor.weights_N * loss_N
        metrics_N[correction.metric] = factor.is_touched_N.float()
    return LossOutput(loss_N, metrics_N)


# ----------------------------------------------------------------------------------------------------- configuration

_KINDS: dict[str, type[Correction]] = {
    kind.type: kind for kind in (Tis, SequenceTis, IcePop, Geometric, SequenceMis, TokenMis, OffPolicyMask)
}


def _as_tuple(section: object) -> object:
    """Convert every form of the key to a tuple; `none` is an empty one."""
    if section == "none":
        return ()
    parts = section if isinstance(section, list | tuple) else (section,)
    listed = tuple({"type": part} if isinstance(part, str) else part for part in parts)
    for part in listed:
        if (name := _name(part)) not in _KINDS:
            close = difflib.get_close_matches(str(name), _KINDS, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(_KINDS)}, or `none` alone"
            text = f"no correction is named {name!r}; {remedy}"
            raise PydanticCustomError("correction", "{text}", {"text": text})
    return listed


def _name(part: object) -> object:
    if isinstance(part, Mapping):
        return part.get("type")
    return part.type if isinstance(part, Correction) else part


def _tag(part: object) -> str:
    """Tag of a correction, in angle brackets, which error messages leave out of the location."""
    return f"<{_name(part)}>"


def _json_schema() -> dict[str, Any]:
    """Schema: a name, a section, or a list of them. A section accepts every bound, which keeps the schema short."""
    bounds: dict[str, Any] = {}
    for kind in _KINDS.values():
        for name, bound in TypeAdapter(kind).json_schema()["properties"].items():
            bounds.setdefault(name, {key: bound[key] for key in bound if key not in ("default", "title", "const")})
    section = {"type": "object", "properties": {**bounds, "type": {"enum": list(_KINDS)}}, "required": ["type"]}
    one = {"anyOf": [{"enum": list(_KINDS)}, section]}
    return {"anyOf": [{"const": "none"}, *one["anyOf"], {"type": "array", "items": one}]}


if TYPE_CHECKING:
    Corrections: TypeAlias = tuple[Correction, ...]
else:
    _Any = Annotated[
        Union[tuple(Annotated[kind, Tag(f"<{name}>")] for name, kind in _KINDS.items())],  # noqa: UP007
        Discriminator(_tag),
    ]
    Corrections = Annotated[tuple[_Any, ...], BeforeValidator(_as_tuple), WithJsonSchema(_json_schema())]


def problems_of(corrections: Sequence[Correction], *, takes_weights: bool) -> list[str]:
    """List the errors in a combination of corrections. `takes_weights`: true if the loss can leave its ratio to a
    weight."""
    names = [correction.type for correction in corrections]
    weights = [correction.type for correction in corrections if correction.is_weight]
    found = []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        found.append(f"correction: {', '.join(twice)} is named twice")
    elif len(weights) > 1:
        found.append(f"correction: {' and '.join(weights)} would each count the importance ratio; name one of them")
    if weights and not takes_weights:
        found.append(
            f"correction: {weights[0]} would count the importance ratio a second time, because this loss takes it "
            "against the sampler itself; name masks only, or none"
        )
    return found
