"""Data-parallel training with fully sharded weights (FSDP2). One rank is the same code with nothing to shard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlsys.algorithm import Algorithm, LossOutput, Stabilizer
from rlsys.batch.plan import Denominators, MicroBatchPlan
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.errors import TrainingError
from rlsys.types import VersionSpan
from rlsys.weights import Probe, TensorSpec
from workers.train import checkpoint
from workers.train.metrics import StepMetrics
from workers.train.model import CPU, load_model, load_tokenizer
from workers.train.optim import adamw, clip, global_norm, local_gradients
from workers.train.probing import probe_tokens
from workers.train.ranks import Ranks
from workers.train.scoring import Scorer
from workers.train.settings import OptimizerSettings, learning_rate


class FsdpBackend:
    """A `TrainBackend`. Master weights and AdamW are fp32; `dtype` is what the model computes in.

    Sharding a fp32 model over one rank would be the identity and cost its hooks, so there it is left out.
    """

    def __init__(
        self,
        model_path: str,
        settings: OptimizerSettings,
        ranks: Ranks,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: torch.device = CPU,
        probe_length: int = 0,
    ) -> None:
        """Every rank reads the whole model from `model_path`, then keeps its shard. Raises `ModelError`.

        `probe_length` is the number of tokens of a probe, 0 for none.
        """
        self._model_path, self._settings, self._ranks, self._device = model_path, settings, ranks, device
        self._dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self._model = load_model(model_path, torch.float32, device)
        self._probe_ids = probe_tokens(self._model, probe_length) if probe_length else ()
        self._scorer = Scorer(self._model)
        if ranks.num_ranks > 1 or self._dtype is not torch.float32:
            self._shard()
        self._optimizer = adamw(self._model, settings)
        self._step = torch.zeros((), dtype=torch.int64)

    @property
    def step(self) -> int:
        return int(self._step)

    def train_step(
        self,
        plan: Sequence[MicroBatchPlan],
        denominators: Denominators,
        data: StepData,
        algorithm: Algorithm,
        *,
        temperature: float,
        stabilizer: Stabilizer | None = None,
    ) -> dict[str, float]:
        self._optimizer.zero_grad()
        totals = StepMetrics(self._device)
        for micro_batch_plan in plan:
            micro_batch = data.micro_batch(micro_batch_plan).to(self._device)
            self._accumulate(micro_batch, micro_batch_plan.weight, denominators, algorithm, temperature, totals)
        gradients = local_gradients(self._model)
        extra = stabilizer(gradients, self._ranks.sum) if stabilizer else {}
        norm = global_norm(gradients, self._ranks.sum)
        metrics = totals.reduced(self._ranks, denominators, norm)
        _check_finite(metrics, self.step)
        clip(gradients, norm, self._settings.clip_norm)
        return {**metrics, **extra, "optim/lr": self._update()}

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        named = str(dtype).removeprefix("torch.")
        return [TensorSpec(name, named, tuple(parameter.shape)) for name, parameter in self._model.named_parameters()]

    def copy_weights(self, into: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            tensor = parameter.detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._ranks.rank == 0:
                into[name].copy_(whole, non_blocking=True)  # cast on the device, then sent
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def full_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        specs = self.specs(dtype) if self._ranks.rank == 0 else []
        weights = {spec.name: torch.empty(spec.shape, dtype=dtype) for spec in specs}
        self.copy_weights(weights)
        return weights

    def probe(self) -> Probe | None:
        if not self._probe_ids:
            return None
        first, *rest = self._probe_ids
        count = len(rest)
        sample = Sample((first,), tuple(rest), (True,) * count, (0.0,) * count, (VersionSpan(self.step, count),))
        with torch.no_grad():
            logprobs_N, _ = self._scorer(MicroBatch.of([sample], [0.0], {}).to(self._device), 1.0)
        self._reshard()
        return Probe(self._probe_ids, tuple(logprobs_N.tolist()))

    def save(self, folder: Path) -> None:
        checkpoint.save(self._state(), folder, num_ranks=self._ranks.num_ranks)

    def load(self, folder: Path) -> None:
        checkpoint.load(self._state(), folder, num_ranks=self._ranks.num_ranks)

    def load_weights(self, folder: Path) -> None:
        """The weights alone of what `save` wrote: enough to export. Raises `CheckpointError`."""
        weights: dict[str, dict[str, Tensor]] = {"model": dict(self._model.named_parameters())}
        checkpoint.load(weights, folder, num_ranks=self._ranks.num_ranks)

    def export(self, folder: Path) -> None:
        weights = self.full_weights(self._dtype)
        if self._ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._model.config.dtype = self._dtype
            self._model.config.save_pretrained(folder)
            if self._model.generation_config is not None:
                self._model.generation_config.save_pretrained(folder)
            save_torch_state_dict(weights, folder)
            load_tokenizer(self._model_path).save_pretrained(folder)

    def _shard(self) -> None:
        """One all-gather per decoder layer, the rest (embeddings, output matrix) with the root.

        Gradients are summed over ranks, not averaged: each rank divided its loss by the denominators of the whole step.
        """
        mesh = self._ranks.mesh(self._device)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        layers = set(self._model._no_split_modules or ())
        for module in list(self._model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        # The root is given a batch whose logprobs must stay fp32.
        root_policy = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(self._scorer, mesh=mesh, mp_policy=root_policy)
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _reshard(self) -> None:
        """Give up gathered weights, which a forward leaves to a backward: else parameters are not the optimizer's."""
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _accumulate(
        self,
        micro_batch: MicroBatch,
        weight: float,
        denominators: Denominators,
        algorithm: Algorithm,
        temperature: float,
        totals: StepMetrics,
    ) -> None:
        """Forward and backward of one micro-batch; gradients add up."""
        logprobs_N, entropy_N = self._scorer(micro_batch, temperature)
        # One update per batch: the weights of this forward are those the step starts from.
        inputs = micro_batch.loss_inputs(logprobs_N.detach())
        output = algorithm.loss(logprobs_N, inputs)
        loss = weight * normalised(output, micro_batch, denominators)
        loss.backward()
        totals.add(loss.detach(), {"policy/entropy": entropy_N, **output.metrics_N}, weight)
        if weight:
            staleness_N = self.step - micro_batch.versions_N
            totals.mismatch.add(inputs.proximal_logprobs_N, inputs.behavior_logprobs_N, staleness_N)

    def _update(self) -> float:
        """Step the optimizer on the gradients there are; returns the learning rate used."""
        lr = learning_rate(self.step, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._step += 1
        return lr

    def _state(self) -> dict[str, dict[str, Tensor]]:
        return {**checkpoint.training_state(self._model, self._optimizer), "progress": {"step": self._step}}


def normalised(output: LossOutput, micro_batch: MicroBatch, denominators: Denominators) -> Tensor:
    """A micro-batch's share of the step's loss; shares add up over micro-batches and ranks, however it is split."""
    if output.over == "tokens":
        return output.loss_N.sum() / denominators.tokens
    num_trained_S = micro_batch.num_trained_S
    num_trained_N = num_trained_S.repeat_interleave(num_trained_S, output_size=len(output.loss_N))
    return (output.loss_N / num_trained_N).sum() / denominators.sequences


def _check_finite(metrics: dict[str, float], step: int) -> None:
    for name in ("loss", "optim/grad_norm"):
        if not math.isfinite(metrics[name]):
            raise TrainingError(
                f"optimizer step {step}: {name} is {metrics[name]}, and nothing was stepped. If rewards and logprobs "
                "are finite, lower the learning rate, or train in float32 if this was bfloat16"
            )
