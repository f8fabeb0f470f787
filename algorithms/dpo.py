"""Direct preference optimisation: training on pairs of answers, one preferred to the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.sample_math import per_sample, sample_totals
from rlsys.algorithm import Aggregation, Algorithm, Column, LossInputs, LossOutput, Ranks, TrajectoryAdvantage
from rlsys.types import Answers, Group
from rlsys.util.number_ranges import ManyFrom1

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, config=RULES)
class DPO(Algorithm):
    """Direct preference optimisation (arXiv:2305.18290), offline on recorded pairs or online on sampled ones.

    With r = log pi(y|x) - log ref(y|x), summed over the trained tokens of an answer, the loss of a pair is (eq. 7)

        -log sigmoid(beta (r(chosen) - r(rejected)))

    averaged over pairs. A group is a pair: of its trajectories with the same first prompt, the one with the highest
    reward is chosen, the one with the lowest rejected. Equal ones share the place: their mean r counts. A group without
    a difference is dropped. Rows with `chosen` and `rejected`, which the workflow `offline` replays, are such groups,
    and so are sampled answers with rewards (online DPO, arXiv:2402.04792), with a `group_size` of at least 2. All
    samples of a trajectory are one answer. A trajectory without a reward takes its episode's.

    The answers of a pair need not meet in a micro-batch or on a rank: each takes the others' r at the start of the
    step. So the gradient of a step's first update is that of the paper; in a later one, the others have not moved.
    """

    group_size: ManyFrom1 = 1
    """Episodes per task: 1 for recorded pairs, at least 2 for sampled answers."""
    beta: PositiveFloat = 0.1
    """Slope of the sigmoid: a larger value keeps the policy closer to the reference."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of -log pi of the chosen answer, averaged over its tokens and added to the loss (arXiv:2404.19733, eq. 2).
    Without it chosen answers may become less likely, as long as rejected ones do so faster."""

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset({Column.REFERENCE_LOGPROBS})

    @property
    def answers(self) -> frozenset[Answers]:
        """Both: the loss has no ratio against the sampler."""
        return frozenset({"sampled", "recorded"})

    @property
    def max_safe_staleness(self) -> int | None:
        """Any: which of two answers is better does not depend on the policy that gave them, nor on the time."""
        return None

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("sequences")

    @property
    def has_step_statistics(self) -> bool:
        return True

    def can_learn_from(self, group: Group) -> bool:
        return any(True for _ in self.advantages(group))

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """Give 1 to the chosen trajectory of each prompt and -1 to the rejected one, shared among equal ones."""
        answers: defaultdict[int, list[tuple[float, int, int]]] = defaultdict(list)
        for (e, t), trajectory in group.trajectories():
            root = group.episodes[e].trajectories[0]
            reward = root.reward if trajectory.reward is None else trajectory.reward
            first = next((sample for sample in trajectory.samples if sample.num_trained), None)
            if first is not None and reward is not None and isfinite(reward):
                answers[first.prompt_key].append((reward, e, t))
        for of_prompt in answers.values():
            rewards = [reward for reward, _, _ in of_prompt]
            if min(rewards) < max(rewards):
                for sign, extreme in ((1.0, max(rewards)), (-1.0, min(rewards))):
                    share = sign / rewards.count(extreme)
                    yield from (TrajectoryAdvantage(e, t, share) for reward, e, t in of_prompt if reward == extreme)

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Compute `margin g`, beta (r(chosen) - r(rejected)) of group g at the start of the step, the mean number of
        samples of a group, and the means that are reported."""
        groups_S = ranks.gather(step.groups_S)
        shares_S = ranks.gather(per_sample(step.advantages_N, step.lengths_S))
        rewards_S = shares_S * ranks.gather(self._rewards(step.proximal_logprobs_N, step))
        found_P, pairs_S = groups_S.unique(return_inverse=True)
        num_pairs = len(found_P)
        margins = rewards_S.new_zeros(num_pairs).index_add_(0, pairs_S, rewards_S).tolist()
        return {
            "samples_per_pair": len(shares_S) / num_pairs,
            "accuracy": sum(margin > 0 for margin in margins) / num_pairs,
            "margin": sum(margins) / num_pairs,
            "reward_chosen": float(rewards_S[shares_S > 0].sum()) / num_pairs,
            "reward_rejected": -float(rewards_S[shares_S < 0].sum()) / num_pairs,
            **{f"margin {g}": margin for g, margin in zip(found_P.tolist(), margins, strict=True)},
        }

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        """Give every token the loss of its pair, as far as its own sample has moved it since the start of the step.

        The framework averages over samples. Gradients are scaled by the samples of a pair, so that they sum to those of
        the mean over pairs.
        """
        lengths_S, facts = batch.lengths_S, batch.facts
        shares_S = per_sample(batch.advantages_N, lengths_S)
        margins = {int(name.removeprefix("margin ")): x for name, x in facts.items() if name.startswith("margin ")}
        start_G = logprobs_N.new_tensor([margins.get(g, 0.0) for g in range(max(margins) + 1)])
        moved_S = self._rewards(logprobs_N, batch) - self._rewards(batch.proximal_logprobs_N, batch)
        margin_S = start_G[batch.groups_S] + shares_S * moved_S
        loss_S = margin_S.new_zeros(()).logaddexp(-margin_S)  # -log sigmoid(margin)
        scale = facts["samples_per_pair"]
        loss_S = loss_S.detach() + scale * (loss_S - loss_S.detach())
        if self.nll_weight:
            nll_S = -sample_totals(logprobs_N, lengths_S) / lengths_S
            loss_S = loss_S + self.nll_weight * scale * shares_S.clamp(min=0) * nll_S
        num_tokens = len(logprobs_N)
        metrics = {
            f"dpo/{name}": logprobs_N.new_full((num_tokens,), facts[name])
            for name in ("accuracy", "margin", "reward_chosen", "reward_rejected")
        }
        return LossOutput(loss_S.repeat_interleave(lengths_S, output_size=num_tokens), metrics)

    def _rewards(self, logprobs_N: Tensor, batch: LossInputs) -> Tensor:
        """beta (log pi - log ref) of each sample."""
        return self.beta * sample_totals(logprobs_N - batch.columns_N[Column.REFERENCE_LOGPROBS], batch.lengths_S)
