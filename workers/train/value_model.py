"""The critic: a model of the value of the state before each trained token, trained data-parallel like the policy.

Shape suffixes: as in `rlsys.batch.tensors`, and `H` hidden size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlsys.algorithm import Algorithm, Column
from rlsys.batch.packing import RankPlan
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.config.lora_section import LoraSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings
from rlsys.errors import ModelError
from workers.model.adapter_files import Adapter
from workers.model.context import ContextGroup
from workers.model.logprobs import hidden_states
from workers.model.model_loading import CPU, load_base_model, load_tokenizer
from workers.train.adapter_state import facts_of
from workers.train.layout import RankLayout
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup
from workers.train.rank_metrics import StepMetrics
from workers.train.sharded import Sharded
from workers.train.step_data import Part, RankStep

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn


class ValueModel(nn.Module):
    """A causal language model without its output matrix, and a linear head, whose output is initially 0.

    It is one module, so that FSDP sees the two passes over the layers as one forward of its root.
    """

    def __init__(self, base: PreTrainedModel, context: ContextGroup | None = None) -> None:
        """`context` are the ranks that hold parts of each row, if any."""
        super().__init__()
        self.base = base
        self._context = context
        self.head = nn.Linear(base.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """`values_N` of the states before the trained tokens, in fp32."""
        context, mb = self._context, micro_batch
        if context is not None:
            mb = context.pad_row(mb)
        own_M = self.head(hidden_states(self.base, mb, context).float()).sum(-1)  # of one element; FSDP allows no view
        return own_M if context is None else context.gather_tokens(own_M, mb)


def load_value_model(path: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> ValueModel:
    """Load the initial critic from a causal language model, in `dtype`, with a head in fp32. Raises `ModelError`."""
    return ValueModel(load_base_model(path, dtype, device, key="critic.path")).to(device)


def check_vocabulary(path: str, policy_path: str) -> None:
    """Raise `ModelError` unless the critic of `path` and the policy of `policy_path` agree on token ids."""
    own = load_tokenizer(path, "critic.path").get_vocab()
    policy = load_tokenizer(policy_path).get_vocab()
    differing = sorted((number, token) for token, number in policy.items() if own.get(token) != number)
    if differing:
        number, token = differing[0]
        theirs = f"is {own[token]}" if token in own else "does not exist"
        raise ModelError(
            f"critic.path {path!r} has another vocabulary than the policy {policy_path!r}: token {token!r} is {number} "
            f"to the policy, and {theirs} to the critic; give a model with the policy's tokenizer"
        )


class CriticBackend(Sharded):
    """One rank of the critic. A single rank runs the same code without sharding."""

    def __init__(
        self,
        model_path: str,
        settings: OptimizerSettings,
        ranks: RankGroup,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: torch.device = CPU,
        savings: MemorySavings = NO_SAVINGS,
        lora: LoraSection | None = None,
    ) -> None:
        """Load this rank's shards of the causal language model in `model_path`. Raises `ModelError`.

        With `lora`, only the head and an adapter of the model are trained; the frozen model is in `dtype`.
        """
        layout = RankLayout(ranks, getattr(torch, dtype), device, savings)
        adapter = Adapter(lora, model_path) if lora else None

        def lay_out(base: PreTrainedModel) -> None:
            self._model = ValueModel(base, layout.context)
            with adapter.temporary_layers(base) if adapter else nullcontext():
                layout.apply(self._model, in_float32=[self._model.head])

        base = load_base_model(
            model_path, layout.dtype if lora else torch.float32, device, lay_out, key="critic.path",
            state_device=layout.state_device,
        )  # fmt: skip
        facts = facts_of(lora, adapter.start(base)) if lora and adapter else None
        self._model.head.to(layout.state_device)
        super().__init__(self._model, self._model, settings, layout, facts)

    def values(self, plan: RankPlan, data: StepData) -> StepColumn:
        """Value of the state before each trained token, for each of this rank's micro-batches."""
        with torch.no_grad():
            column_N = [self._model(data.micro_batch(m).to(self._device)) for m in plan.micro_batches]
        self.reshard()
        return [values_N.cpu().numpy() for values_N in column_N]

    def train_step(self, plan: RankPlan, data: StepData, algorithm: Algorithm) -> dict[str, float]:
        """Train one step on this rank's share of the batch, update by update. Returns metrics, equal on all ranks.

        `data` has the step's columns, including `Column.VALUES`. Raises `TrainingError` as `FsdpBackend` does.
        """
        step = RankStep(plan=plan, data=data, algorithm=algorithm, version=self.step, device=self._device)
        totals, fit = StepMetrics(), Fit(self._device)

        def accumulate(part: Part) -> Tensor:
            returns_N = part.inputs.returns_N
            if returns_N is None:
                raise ValueError(f"{type(algorithm).__name__}.token_advantages returns no targets for the critic")
            output = algorithm.value_loss(self._model(part.batch), part.inputs)
            share = part.loss(output)
            share.backward()
            totals.add(output.metrics_N, part.weight)
            if part.weight:
                fit.add(returns_N, part.inputs.columns_N[Column.VALUES])
            return share.detach()

        means = self.train(step, step.update_parts(), accumulate, what="the critic's ")
        metrics = {
            "critic/loss": means["loss"],
            "critic/grad_norm": means["grad_norm"],
            "critic/lr": self.lr(plan.staleness),
        }
        metrics |= {
            **totals.reduce_over(self._ranks, plan.num_tokens * algorithm.passes),
            **fit.reduce_over(self._ranks),
        }
        self.end_step()
        return metrics


class Fit:
    """Share of the variance of a step's returns that the critic's earlier values explain.

    Explained variance is 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one, less
    for a misleading one. If all returns are equal, it is 0.

    Only sums are kept, in fp64, so that the split into micro-batches and ranks changes nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums_6 = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, returns_N: Tensor, values_N: Tensor) -> None:
        """Add the tokens of one micro-batch."""
        returns_N, values_N = returns_N.double(), values_N.double()
        errors_N = returns_N - values_N
        terms = (torch.ones_like(returns_N), values_N, returns_N, returns_N.square(), errors_N, errors_N.square())
        self._sums_6 += torch.stack(terms).sum(1)

    def reduce_over(self, ranks: RankGroup) -> dict[str, float]:
        """`critic/explained_variance` and `critic/value_mean` over all ranks."""
        num, value, ret, ret_square, error, error_square = ranks.sum(self._sums_6).tolist()
        variance = ret_square / num - (ret / num) ** 2
        # Smaller values are rounding errors of equal fp32 returns.
        is_equal = variance <= 1e-12 * ret_square / num
        unexplained = error_square / num - (error / num) ** 2
        return {
            "critic/explained_variance": 0.0 if is_equal else 1 - unexplained / variance,
            "critic/value_mean": value / num,
        }
