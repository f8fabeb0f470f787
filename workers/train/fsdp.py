"""The policy, trained data-parallel with fully sharded weights (FSDP2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlsys.algorithm import Algorithm
from rlsys.batch.packing import RankPlan
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.stabilizer import Stabilizer
from rlsys.types import VersionSpan
from rlsys.weight_sync.sync import Probe, TensorSpec
from workers.train.logprobs import Scorer
from workers.train.model_loading import CPU, load_model, load_tokenizer
from workers.train.optimizer_settings import OptimizerSettings
from workers.train.probe import probe_tokens
from workers.train.rank_group import RankGroup
from workers.train.rank_metrics import Mismatch, StepMetrics
from workers.train.sharded import Sharded, Updated, mean_of
from workers.train.step_data import Part, RankStep
from workers.train.token_columns import Kept, TokenColumns


class FsdpBackend:
    """Implements `TrainBackend`. One rank runs the same code without sharding."""

    def __init__(
        self,
        model_path: str,
        settings: OptimizerSettings,
        ranks: RankGroup,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: torch.device = CPU,
        probe_length: int = 0,
    ) -> None:
        """Load the whole model from `model_path` on every rank, then keep this rank's shard. Raises `ModelError`.

        `probe_length` is the number of tokens of a probe, 0 for none.
        """
        self._model_path, self._ranks, self._device = model_path, ranks, device
        self._model = load_model(model_path, torch.float32, device)
        self._probe_ids = probe_tokens(self._model, probe_length) if probe_length else ()
        self._scorer = Scorer(self._model)
        self._sharded = Sharded(self._model, self._scorer, settings, ranks, dtype)
        self._kept = Kept()

    @property
    def step(self) -> int:
        return self._sharded.step

    def train_step(
        self,
        plan: RankPlan,
        data: StepData,
        algorithm: Algorithm,
        *,
        temperature: float,
        stabilizer: Stabilizer | None = None,
    ) -> dict[str, float]:
        self._kept = Kept()
        if not algorithm.trains_policy(self.step):
            self._sharded.end_step()
            return {}

        def logprobs(batch: MicroBatch) -> Tensor:
            with torch.no_grad():
                return self._scorer(batch, temperature)[0]

        step = RankStep(plan=plan, data=data, algorithm=algorithm, version=self.step, device=self._device)
        totals, mismatch = StepMetrics(), Mismatch(self._device)
        updates: list[Updated] = []
        for parts in step.whole(logprobs, self._ranks):
            self._sharded.begin_update()
            loss = torch.zeros((), device=self._device)
            for part in parts:
                loss += self._accumulate(part, algorithm, temperature, totals, mismatch)
            index = len(updates)
            updates.append(self._sharded.update(loss, step.update_name(index), index, stabilizer))
        if stabilizer:
            stabilizer.end_step()
        update = mean_of(updates)
        metrics = {"loss": update.loss, "optim/grad_norm": update.grad_norm, "optim/lr": self._sharded.lr}
        metrics |= {**update.metrics, **totals.reduced(self._ranks, plan.num_tokens), **mismatch.reduced(self._ranks)}
        self._sharded.end_step()
        return metrics

    def columns(self) -> list[TokenColumns]:
        return self._kept.columns()

    def shards(self) -> dict[str, Tensor]:
        return self._sharded.shards()

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        named = str(dtype).removeprefix("torch.")
        return [TensorSpec(name, named, tuple(p.shape)) for name, p in self._sharded.parameters().items()]

    def copy_weights(self, into: Mapping[str, Tensor]) -> None:
        for name, parameter in self._sharded.parameters().items():
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
            logprobs_N, _ = self._scorer(MicroBatch.of([sample]).to(self._device), 1.0)
        self._sharded.reshard()
        return Probe(self._probe_ids, tuple(logprobs_N.tolist()))

    def save(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        self._sharded.save(folder, stabilizer)

    def load(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        self._sharded.load(folder, stabilizer)

    def load_weights(self, folder: Path) -> None:
        """Load only the weights of a checkpoint, which is enough to export. Raises `CheckpointError`."""
        self._sharded.load_weights(folder)

    def export(self, folder: Path) -> None:
        dtype = self._sharded.dtype
        weights = self.full_weights(dtype)
        if self._ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._model.config.dtype = dtype
            self._model.config.save_pretrained(folder)
            if self._model.generation_config is not None:
                self._model.generation_config.save_pretrained(folder)
            save_torch_state_dict(weights, folder)
            load_tokenizer(self._model_path).save_pretrained(folder)

    def _accumulate(
        self, part: Part, algorithm: Algorithm, temperature: float, totals: StepMetrics, mismatch: Mismatch
    ) -> Tensor:
        """Forward and backward of one micro-batch; gradients add up. Returns its share of the update's loss."""
        logprobs_N, entropy_N = self._scorer(part.batch, temperature)
        inputs = part.inputs
        if not part.is_scored:  # the only update: this forward uses the step's initial weights
            inputs = replace(inputs, proximal_logprobs_N=logprobs_N.detach())
        logprobs_N.retain_grad()
        output = algorithm.loss(logprobs_N, inputs)
        loss = part.loss(output)
        loss.backward()
        self._kept.add(part, inputs.proximal_logprobs_N, entropy_N, logprobs_N)
        totals.add({"policy/entropy": entropy_N, **output.metrics_N}, part.weight)
        if part.weight:
            mismatch.add(inputs.proximal_logprobs_N, inputs.behavior_logprobs_N, inputs.staleness_N)
        return loss.detach()
