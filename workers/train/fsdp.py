"""The policy, trained data-parallel with fully sharded weights (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel

from rlsys.algorithm import Algorithm, Column, LossInputs
from rlsys.batch.packing import RankPlan, SampleRef
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.config.lora_section import LoraSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings, SyncSection
from rlsys.stabilizer import Stabilizer
from rlsys.types import Distribution, VersionSpan
from rlsys.weight_sync.manifest import Probe, Rectangle, shares
from workers.model.adapter_files import Adapter, write_adapter
from workers.model.checkpoint_names import checkpoint_tensors, in_own_memory
from workers.model.decoder_layers import pair_cost
from workers.model.logprobs import Scorer
from workers.model.lora import merge, peft_config, published_tensors, without_adapter
from workers.model.model_loading import CPU, load_model, load_tokenizer, outline
from workers.model.model_tensors import owned_part
from workers.model.routers import RoutingReplay
from workers.train.adapter_state import facts_of
from workers.train.layout import RankLayout
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup
from workers.train.rank_metrics import Mismatch, StepMetrics
from workers.train.sharded import REFERENCE, Sharded
from workers.train.step_data import Part, RankStep, mismatched_column
from workers.train.synced_reference import SyncedReference
from workers.train.token_columns import TokenColumns

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn


class PolicyScorer(Scorer):
    """The policy as one module, which also samples, token by token."""

    @torch.no_grad()
    def sample(self, length: int, *, seed: int = 0) -> tuple[int, ...]:
        """Sample `length` tokens at temperature 1 after the model's first token (or token 0); deterministic."""
        model, generator = self.model, torch.Generator().manual_seed(seed)
        cache = DynamicCache(config=model.config)
        first = model.config.get_text_config().bos_token_id
        ids = [first if isinstance(first, int) else 0]
        while len(ids) < length:
            newest = torch.tensor([ids[-1:]], device=model.device)
            logits_V = model(input_ids=newest, past_key_values=cache, use_cache=True).logits[0, -1]
            probs_V = logits_V.float().softmax(-1).cpu()
            ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
        return tuple(ids)


class FsdpBackend(Sharded):
    """One rank of the policy. A single rank runs the same code without sharding."""

    def __init__(
        self,
        model_path: str,
        settings: OptimizerSettings,
        ranks: RankGroup,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: torch.device = CPU,
        probe_length: int = 0,
        savings: MemorySavings = NO_SAVINGS,
        lora: LoraSection | None = None,
        replays_routing: bool = False,
        sync: SyncSection | None = None,
    ) -> None:
        """Load this rank's shards of the model in `model_path`. Raises `ModelError`.

        `probe_length` is the number of tokens of a probe, 0 for none. With `lora`, only an adapter is trained; the
        frozen model is in `dtype`. `replays_routing`: experts are those that engines recorded, see `RoutingReplay`.
        With `sync`, which excludes `lora`, there is a reference that follows the policy.
        """
        layout = RankLayout(ranks, getattr(torch, dtype), device, savings)
        adapter = Adapter(lora, model_path) if lora else None

        def lay_out(model: PreTrainedModel) -> None:
            self._replay = RoutingReplay(model, device) if replays_routing else None
            self._scorer = PolicyScorer(model, layout.context)
            with adapter.temporary_layers(model) if adapter else nullcontext():
                layout.apply(self._scorer)

        self._model_path, self._lora = model_path, lora
        self._model = load_model(
            model_path, layout.dtype if lora else torch.float32, device, lay_out, state_device=layout.state_device
        )
        self.base = adapter.start(self._model) if adapter else None
        """Hash of the frozen base; None if all weights are trained."""
        facts = facts_of(lora, self.base) if lora and self.base else None
        super().__init__(self._model, self._scorer, settings, layout, facts)
        self._reference = SyncedReference(self.parameters(), sync) if sync else None
        self.pair_cost = pair_cost(self._model)
        """See `Actor.pair_cost`."""
        register_fsdp_forward_method(self._scorer, PolicyScorer.sample.__name__)
        self._probe_ids = self._scorer.sample(probe_length) if probe_length else ()
        self.reshard()
        self._kept: dict[tuple[SampleRef, ...], tuple[LossInputs, Tensor, Tensor]] = {}
        """Arguments of `TokenColumns.of` for each micro-batch of the last step, of its last pass: tensors stay on the
        device."""

    def train_step(
        self,
        plan: RankPlan,
        data: StepData,
        algorithm: Algorithm,
        *,
        distribution: Distribution,
        stabilizer: Stabilizer | None = None,
    ) -> dict[str, float]:
        """Train one step on this rank's share of the batch, update by update. Returns metrics, equal on all ranks.

        `distribution` is that of sampling: the trained distribution is the sampled one. If the algorithm does not train
        the policy in this step, the step only counts. Raises `TrainingError` on all ranks if the loss or the gradient's
        norm is not finite; that update is then not applied.
        """
        self._kept = {}
        if not algorithm.trains_policy(self.step):
            self.end_step()
            return {}
        step = RankStep(plan=plan, data=data, algorithm=algorithm, version=self.step, device=self._device)
        totals, mismatch = StepMetrics(), Mismatch(self._device)

        def accumulate(part: Part) -> Tensor:
            logprobs_N, entropy_N = self._scorer(
                part.batch, distribution, entropy_has_gradient=algorithm.differentiates_entropy
            )
            inputs = replace(part.inputs, entropies_N=entropy_N)
            if not part.is_scored:  # the only update: this forward uses the step's initial weights
                inputs = replace(inputs, proximal_logprobs_N=logprobs_N.detach())
            logprobs_N.retain_grad()
            output = algorithm.loss(logprobs_N, inputs)
            loss = part.loss(output)
            loss.backward()
            entropy_N = entropy_N.detach()
            totals.add({"policy/entropy": entropy_N, **output.metrics_N}, part.weight)
            if part.weight:
                assert logprobs_N.grad is not None, "it was retained"
                if self._replay:
                    self._replay.count(part.batch)
                self._kept[part.samples] = (replace(inputs, entropies_N=None), entropy_N, logprobs_N.grad)
                mismatch.add(inputs.proximal_logprobs_N, inputs.behavior_logprobs_N, inputs.staleness_N)
            return loss.detach()

        score = torch.no_grad()(lambda batch: self._scorer(batch, distribution))
        means = self.train(step, step.whole(score, self._ranks), accumulate, stabilizer)
        if stabilizer:
            stabilizer.end_step()
        metrics = {
            "loss": means.pop("loss"),
            "optim/grad_norm": means.pop("grad_norm"),
            "optim/lr": self.lr(plan.staleness),
            "batch/skipped_frac": plan.num_skipped / (plan.num_tokens + plan.num_skipped),
        }
        num_tokens = plan.num_tokens * algorithm.passes
        metrics |= {**means, **totals.reduce_over(self._ranks, num_tokens), **mismatch.reduce_over(self._ranks)}
        metrics |= self._replay.reduce_over(self._ranks.sum_over_ranks) if self._replay else {}
        self.end_step()
        return metrics

    def end_step(self) -> None:
        super().end_step()
        if self._reference is not None:
            self._reference.end_step(self.step)

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        return super()._state() | ({REFERENCE: self._reference.tensors} if self._reference is not None else {})

    def _resident(self) -> Iterator[Tensor]:
        yield from super()._resident()
        yield from self._reference.tensors.values() if self._reference is not None else ()

    def columns(self) -> list[TokenColumns]:
        """Per-token results of this rank's last step; empty before the first step. Not collective."""
        return [TokenColumns.of(samples, *kept) for samples, kept in self._kept.items()]

    def reference(self, plan: RankPlan, data: StepData, kind: Column, distribution: Distribution) -> StepColumn:
        """A column of this rank's micro-batches under the reference that follows the policy, or else under the frozen
        base: the forward without the adapter.

        `kind` is `Column.REFERENCE_LOGPROBS` or `Column.REFERENCE_MISMATCHED`.
        """
        score = torch.no_grad()(lambda batch: self._scorer(batch, distribution))
        if self._reference is not None:
            self.wait_copied()
        with without_adapter(self._model) if self._reference is None else self._reference.swapped_in():
            if kind is Column.REFERENCE_MISMATCHED:
                column = [mismatched_column(data, m, plan.partners, score, self._device) for m in plan.micro_batches]
            else:
                batches = (replace(data.micro_batch(m), routing_RW=None) for m in plan.micro_batches)
                column = [score(batch.to(self._device))[0] for batch in batches]
            self.reshard()
        return [logprobs_N.cpu().numpy() for logprobs_N in column]

    def owned_tensors(self) -> dict[str, tuple[Rectangle, Tensor]]:
        """Live part of every published tensor on this rank, with its rectangle of the whole: all weights and persistent
        buffers by Hugging Face name, without tied duplicates, or the adapter by the names of `peft`. Not collective.

        Specs of weights are in the dtype that the model computes in, those of buffers in their own.
        """
        return {
            name: owned_part(name, str(_dtype_of(tensor, self.dtype)).removeprefix("torch."), tensor.detach())
            for name, tensor in published_tensors(self._model).items()
        }

    def published_rectangles(self) -> list[Rectangle]:
        """Rectangles that this rank publishes of its tensors: each element is published by one rank. Collective."""
        owned = [rectangle for rectangle, _ in self.owned_tensors().values()]
        return shares(self._ranks.all_objects(owned))[self._ranks.rank]

    def full_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A copy of the whole published tensors on the host, with the names of `owned_tensors`, for rank 0. Weights are
        in `dtype`, buffers in their own.

        Other ranks take part and get an empty dict.
        """
        weights: dict[str, Tensor] = {}
        for name, live in published_tensors(self._model).items():
            tensor = live.detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._ranks.rank == 0:
                weights[name] = torch.empty(whole.shape, dtype=_dtype_of(live, dtype)).copy_(whole)
        return weights

    def probe(self) -> Probe | None:
        """Logprobs of fixed tokens under the current weights of this rank; None if it was built without a probe."""
        if not self._probe_ids:
            return None
        first, *rest = self._probe_ids
        count = len(rest)
        sample = Sample((first,), tuple(rest), (True,) * count, (0.0,) * count, (VersionSpan(self.step, count),))
        with torch.no_grad():
            logprobs_N, _ = self._scorer(MicroBatch.of([sample]).to(self._device), Distribution())
        self.reshard()
        return Probe(self._probe_ids, tuple(logprobs_N.tolist()))

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter in fp32, for `peft.PeftModel.from_pretrained(base, folder)`."""
        assert self._lora is not None and self.base is not None, "it trains an adapter"
        adapter = self.full_weights(torch.float32)
        if self._ranks.rank == 0:
            config = peft_config(outline(self._model_path), self._lora, self._model_path)
            write_adapter(folder, adapter, config, self.base)

    def export(self, folder: Path) -> None:
        """Write config, safetensors and tokenizer, for `AutoModelForCausalLM.from_pretrained(folder)` and for engines.

        An adapter is merged into its base in fp32, then cast. Persistent buffers keep their dtype.
        """
        weights = self.full_weights(torch.float32 if self._lora else self.dtype)
        if self._ranks.rank == 0:
            if self._lora:
                base = published_tensors(load_model(self._model_path, torch.float32))
                merge(base, weights, self._lora)
                weights = {name: live.detach().to(_dtype_of(live, self.dtype)) for name, live in base.items()}
            folder.mkdir(parents=True, exist_ok=True)
            self._model.config.dtype = self.dtype
            self._model.config.save_pretrained(folder)
            if self._model.generation_config is not None:
                self._model.generation_config.save_pretrained(folder)
            named = checkpoint_tensors(outline(self._model_path), weights)
            save_torch_state_dict(in_own_memory(named), folder)
            load_tokenizer(self._model_path).save_pretrained(folder)


def _dtype_of(published: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a live tensor leaves a model of `dtype`: a buffer keeps its own."""
    return dtype if isinstance(published, nn.Parameter) else published.dtype
