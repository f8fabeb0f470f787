"""Continuous batching over a Hugging Face causal LM, one thread, no clock: admit jobs, step, release what ended.

The law it keeps: **a job's tokens and logprobs do not depend on who shares its batch**, bit for bit in float32 on the CPU.
Sums of floats depend on their order, and kernels choose the order by shape; it is the same for every row when
the rows of a matrix product come in eights (fewer than four take other code) and when attention sees keys in
multiples of 32. Padding to those costs little; a test holds the law.

Shape suffixes: `S` slots, `B` rows of a forward, `L` tokens per row, `K` keys, `V` vocabulary.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer

from rlsys.errors import ModelError
from rlsys.types import PolicyVersion, VersionSpan
from workers.engines.base import Completion, Request
from workers.engines.sampling import as_int64, draw, uniform
from workers.engines.slots import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 8
KEYS = 32


@dataclass(slots=True, eq=False)
class Job:
    """One request and who waits for it."""

    request: Request
    future: Future[Completion]
    marks: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(tokens sampled before it, version), one entry for every version that the job ran under."""

    def versions(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        """The marks as spans of the `num_tokens` sampled."""
        ends = [start for start, _ in self.marks[1:]] + [num_tokens]
        spans = (VersionSpan(version, end - start) for (start, version), end in zip(self.marks, ends, strict=True))
        return tuple(span for span in spans if span.num_tokens)


class Decoder:
    """Slots with one running job each, kept together at the front: job i is in slot i."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context: int, stop_token_ids: Collection[int]
    ) -> None:
        _refuse_windows(model)
        self.model = model.eval()
        model.set_attn_implementation(_GROUPED if model.device.type == "cpu" else "sdpa")
        self.num_slots, self.max_context, self.stop_token_ids = num_slots, max_context, stop_token_ids
        self.num_vocab: int = model.get_input_embeddings().weight.shape[0]
        self.num_tokens = 0
        self.jobs: list[Job] = []
        rows = _up(num_slots, ROWS)
        self._cache = SlotCache(rows, _up(max_context, KEYS))

        def per_slot(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=model.device)

        self._inputs_S = per_slot()
        """The newest token: not in the cache yet."""
        self._positions_S = per_slot()
        """Where in the sequence the newest token stands."""
        self._counts_S = per_slot()
        """Tokens sampled."""
        self._limits_S, self._seeds_S = per_slot(), per_slot()
        self._temperature_S, self._top_p_S = per_slot(dtype=torch.float32), per_slot(dtype=torch.float32)
        self._output_ids = per_slot(max_context)
        self._logprobs = per_slot(max_context, dtype=torch.float32)
        self._is_stop_V = torch.zeros(self.num_vocab, dtype=torch.bool, device=model.device)
        self._is_stop_V[[i for i in stop_token_ids if i < self.num_vocab]] = True
        self._keys_K = torch.arange(_up(max_context, KEYS), device=model.device)

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> None:
        """Give each job a slot and its first token. Jobs with equal prompts share one prefill, whose keys are copied."""
        groups: dict[tuple[int, ...], list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.request.prompt_ids, []).append(job)
        prompts, first = list(groups), len(self.jobs)
        logits_BV = self._prefill(prompts, first)
        source = list(range(len(prompts))) + [i for i, g in enumerate(groups.values()) for _ in g[1:]]
        source_B = torch.tensor(source, device=self.model.device)
        slots_B = torch.arange(first, first + len(jobs), device=self.model.device)
        num_keys = max(map(len, prompts))
        self._cache.copy(first + source_B[len(prompts) :], slots_B[len(prompts) :], num_keys)
        self._enter([g[0] for g in groups.values()] + [job for g in groups.values() for job in g[1:]])
        self._sample(logits_BV[source_B], slice(first, len(self.jobs)))

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every job."""
        num_jobs = len(self.jobs)
        rows = slice(0, _up(num_jobs, ROWS))
        num_keys = int(self._positions_S[:num_jobs].max()) + 1
        logits_BLV = self._forward(self._inputs_S[rows, None], 0, self._positions_S[rows, None], num_keys, keep=[0])
        self._sample(logits_BLV[:num_jobs, 0], slice(0, num_jobs))

    def ended(self) -> list[int]:
        """Slots of the jobs whose newest token is their last."""
        jobs = slice(0, len(self.jobs))
        is_last_S = self._is_stop_V[self._inputs_S[jobs]] | (self._counts_S[jobs] >= self._limits_S[jobs])
        return is_last_S.nonzero().flatten().tolist()

    def counts(self) -> list[int]:
        """Tokens sampled so far, by slot."""
        return self._counts_S[: len(self.jobs)].tolist()

    def release(self, slots: Sequence[int], *, is_aborted: bool = False) -> list[tuple[Job, Completion]]:
        """Take these jobs out, with what they sampled; the last jobs move into the holes."""
        index_S = torch.tensor(slots, dtype=torch.int64, device=self.model.device)
        counts = self._counts_S[index_S].tolist()
        longest = max(counts, default=0)
        ids = self._output_ids[index_S, :longest].tolist()
        logprobs = self._logprobs[index_S, :longest].tolist()
        done: list[tuple[Job, Completion]] = []
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            job, output_ids = self.jobs[slot], tuple(ids[row][:count])
            finish = "abort" if is_aborted else self._finish(output_ids)
            done.append((job, Completion(output_ids, tuple(logprobs[row][:count]), job.versions(count), finish)))
        self._close_ranks(frozenset(slots))
        return done

    def _prefill(self, prompts: Sequence[tuple[int, ...]], first: int) -> Tensor:
        """Run each prompt in a slot of its own, from `first`; the logits of its last token, (prompts, V)."""
        num_keys = max(map(len, prompts))
        length = _up(num_keys, ROWS)
        ids_BL = torch.tensor([p + (0,) * (length - len(p)) for p in prompts], device=self.model.device)
        keep = sorted({len(p) - 1 for p in prompts})
        columns = torch.tensor([keep.index(len(p) - 1) for p in prompts], device=self.model.device)
        keep += keep[-1:] * (-len(keep) % (ROWS // gcd(ROWS, len(prompts))))  # the output layer, too, has rows in eights
        positions_BL = torch.arange(length, device=self.model.device)[None]
        logits_BLV = self._forward(ids_BL, first, positions_BL, length, keep)
        return logits_BLV[torch.arange(len(prompts), device=self.model.device), columns]

    def _forward(self, ids_BL: Tensor, first: int, positions_BL: Tensor, num_keys: int, keep: list[int]) -> Tensor:
        """Logits of the tokens in the columns `keep`, (B, len(keep), V), for rows in the slots from `first`."""
        num_keys = _up(num_keys, KEYS)
        self._cache.look(first, len(ids_BL), positions_BL, num_keys)
        is_seen_BLK = self._keys_K[:num_keys] <= positions_BL[..., None]
        mask_B1LK = torch.where(is_seen_BLK, 0.0, -torch.inf).to(self.model.dtype)[:, None]
        return self.model(
            input_ids=ids_BL,
            position_ids=positions_BL,
            attention_mask=mask_B1LK,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(keep, device=ids_BL.device),
        ).logits

    def _enter(self, jobs: Sequence[Job]) -> None:
        """Put prefilled jobs into the next slots."""
        slots = slice(len(self.jobs), len(self.jobs) + len(jobs))
        requests = [job.request for job in jobs]
        numbers = [(len(r.prompt_ids) - 1, 0, r.sampling.max_new_tokens, as_int64(r.seed)) for r in requests]
        targets = (self._positions_S, self._counts_S, self._limits_S, self._seeds_S)
        for target_S, values in zip(targets, torch.tensor(numbers, device=self.model.device).T, strict=True):
            target_S[slots] = values
        self._temperature_S[slots] = torch.tensor([r.sampling.temperature for r in requests], device=self.model.device)
        self._top_p_S[slots] = torch.tensor([r.sampling.top_p for r in requests], device=self.model.device)
        self.jobs += jobs

    def _sample(self, logits_BV: Tensor, slots: slice) -> None:
        """Draw and record the next token of the jobs in `slots`."""
        counts_B = self._counts_S[slots]
        uniform_B = uniform(self._seeds_S[slots], counts_B)
        tokens_B, logprobs_B = draw(logits_BV, self._temperature_S[slots], self._top_p_S[slots], uniform_B)
        self._output_ids[slots].scatter_(1, counts_B[:, None], tokens_B[:, None])
        self._logprobs[slots].scatter_(1, counts_B[:, None], logprobs_B[:, None])
        self._inputs_S[slots] = tokens_B
        self._positions_S[slots] += 1
        counts_B += 1
        self.num_tokens += len(tokens_B)

    def _finish(self, output_ids: tuple[int, ...]) -> Literal["stop", "length"]:
        return "stop" if output_ids[-1] in self.stop_token_ids else "length"

    @torch.inference_mode()
    def _close_ranks(self, leaving: frozenset[int]) -> None:
        remaining = len(self.jobs) - len(leaving)
        holes = sorted(slot for slot in leaving if slot < remaining)
        movers = [slot for slot in range(remaining, len(self.jobs)) if slot not in leaving]
        if holes:
            to_S, from_S = (torch.tensor(slots, device=self.model.device) for slots in (holes, movers))
            self._cache.copy(from_S, to_S, int(self._positions_S[from_S].max()))
            for tensor in (
                self._inputs_S, self._positions_S, self._counts_S, self._limits_S, self._seeds_S,
                self._temperature_S, self._top_p_S, self._output_ids, self._logprobs,
            ):  # fmt: skip
                tensor[to_S] = tensor[from_S]
            for hole, mover in zip(holes, movers, strict=True):
                self.jobs[hole] = self.jobs[mover]
        del self.jobs[remaining:]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention in which query heads share key heads, in torch's CPU kernel; transformers would copy the keys per head."""
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


_GROUPED = "rlsys_grouped"
AttentionInterface.register(_GROUPED, grouped_attention)


def _refuse_windows(model: PreTrainedModel) -> None:
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ModelError(
            f"{type(model).__name__} has layers cached as {names}; the local engine serves full attention only: use the vllm engine"
        )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
