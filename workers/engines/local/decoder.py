"""Continuous batching over a Hugging Face causal LM, without threads: admit jobs, step, release ended jobs.

Law: **a job's tokens and logprobs do not depend on the other jobs in its batch**, bit for bit in float32 on the CPU.
Sums of floats depend on their order, and kernels choose the order by shape. Every row has the same order if the rows of
a matrix product come in multiples of 16 and attention sees keys in multiples of 32: forwards are padded to these sizes,
and the rows of each expert.
(Fewer than four rows take another code path, eight do on some processors, and so does the tail of an activation. A
layer with a single output, as Qwen 2 MoE's gate of its shared expert, still takes its order from the batch.)
Attention of one query also sums in another order than attention of many. So the keys and values of a prompt come from
one forward over it. Those of sampled tokens come from rows of one query each: one step at a time, or many rows at once
for a request that began elsewhere. A prompt that goes on a dialogue is computed likewise: its replies in rows of one
query, the context between them in one forward each (`Request.sampled`). So their keys and values may as well come from
the turns before.

Neighbouring jobs of one version are a *run*: they step together, under the weights of that version.

Shape suffixes: `S` slots, `B` rows of a forward, `L` tokens per row, `K` keys, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from rlsys.errors import ConfigError
from rlsys.routing.requests import Completion
from rlsys.types import PolicyVersion
from workers.engines.engine import available_bytes
from workers.engines.local.padded_experts import ROW_MULTIPLE, pad_experts
from workers.engines.local.prefix_store import PrefixStore, StoredPrefix, pieces_of
from workers.engines.local.slot_cache import SLOT_ATTENTION, KeptCache, SlotCache, SlotMasks
from workers.engines.stepping import EngineJob
from workers.engines.stop_texts import NO_STOP_TEXTS, StopTexts
from workers.model.decoder_layers import num_cached_values
from workers.model.routers import RoutingRecorder
from workers.model.token_distribution import cut_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_MULTIPLE = 32
PREFIX_SHARE = 0.25
"""Memory for prefixes of dialogues that go on, over that of the slots."""


class Decoder:
    """Slots with one running job each, contiguous from the front: job i is in slot i."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context: int,
        stop_token_ids: Collection[int],
        stop_texts: StopTexts = NO_STOP_TEXTS,
        records_routing: bool = False,
        keeps_replies: bool = True,
    ) -> None:
        self._recorder = RoutingRecorder(model) if records_routing else None
        self.num_slots, self.max_context, self._keeps_replies = num_slots, max_context, keeps_replies
        self.num_vocab = model.get_input_embeddings().get_parameter("weight").shape[0]
        self.num_tokens = self.num_computed = self.num_cached = 0
        """Tokens sampled, tokens that were computed for that, and prompt tokens found in the store of prefixes."""
        self._prefixes = PrefixStore(max(max_context, int(PREFIX_SHARE * num_slots * max_context)))
        self.jobs: list[EngineJob] = []
        self._kept: list[KeptCache] | None = None
        """Keys and values of the jobs while the slots have no memory; None while they have."""
        self._model, self._device, self._dtype = model.eval(), model.device, model.dtype
        model.set_attn_implementation(SLOT_ATTENTION)
        pad_experts(model)
        self._num_rows = _up(num_slots, ROW_MULTIPLE)
        self._num_keys = _up(max_context, KEY_MULTIPLE)
        if self._device.type == "cpu":
            self._check_room(num_slots)
        self._cache = SlotCache(self._num_rows, self._num_keys)
        self._rows_S = torch.arange(self._num_rows, device=self._device)
        self._no_mask = torch.ones(1, 1, 1, 1, device=self._device)  # given, so that the model builds none
        self._stop_token_ids, self._stop_texts = frozenset(stop_token_ids), stop_texts
        self._is_stop_V = torch.isin(torch.arange(self.num_vocab), torch.tensor([*stop_token_ids])).to(self._device)
        self._allocate()

    def _check_room(self, num_slots: int) -> None:
        """Raise `ConfigError` if this machine has no room for the keys and values of all slots."""
        per_token = num_cached_values(self._model.config.get_text_config()) * self._dtype.itemsize
        needed, free = per_token * self._num_rows * self._num_keys, available_bytes()
        if needed > free:
            raise ConfigError(
                f"rollout.engine: keys and values of {num_slots} sequences of {self.max_context} tokens take "
                f"{needed / 1e9:.1f} GB, and this machine has {free / 1e9:.1f} GB free: lower rollout.slots, "
                "data.max_prompt_tokens or rollout.max_new_tokens"
            )

    def _allocate(self) -> None:
        """Allocate the state of the slots."""
        self._state: list[Tensor] = []

        def per_slot(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            self._state.append(torch.zeros(self._num_rows, *shape, dtype=dtype, device=self._device))
            return self._state[-1]

        self._inputs_S = per_slot()  # the newest token: in no cache yet
        self._positions_S = per_slot()  # position of that token in the sequence
        self._counts_S = per_slot()  # tokens sampled, here or before
        self._limits_S = per_slot()
        self._seeds_S = per_slot()
        real, whole = partial(per_slot, dtype=torch.float32), per_slot
        self._sampling_S = SamplingOfRows(real(), real(), whole(), real())
        self._output_ids = per_slot(self.max_context)
        self._logprobs = per_slot(self.max_context, dtype=torch.float32)
        num_bytes = self._recorder.num_bytes if self._recorder else 0
        self._routing_SKW = per_slot(self._num_keys, num_bytes, dtype=torch.uint8)  # as `MicroBatch.routing_RW`

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one forward, which allocates memory and fixes the shapes of keys and values."""
        self._prefill([(0,)], 0)
        self.num_computed = 0

    @torch.inference_mode()
    def admit(self, jobs: Sequence[EngineJob]) -> None:
        """Assign a slot to each job, all of one version; new jobs sample their first token.

        Equal prompts share one prefill, whose keys are copied.
        """
        groups: dict[_Prompt, list[EngineJob]] = {}
        for job in jobs:
            groups.setdefault(_Prompt(job.request.prompt_ids, job.request.sampled), []).append(job)
        first, num_prompts, version = len(self.jobs), len(groups), jobs[0].version
        starts = [self._begin_prompt(slot, version, *prompt) for slot, prompt in enumerate(groups, first)]
        logits_BV = self._prefill([prompt.ids for prompt in groups], first, starts)
        prompt_of = [*range(num_prompts), *(i for i, group in enumerate(groups.values()) for _ in group[1:])]
        prompt_of_B = self._tensor(prompt_of)
        followers_B = self._rows_S[first + num_prompts : first + len(prompt_of)]
        longest = max(len(prompt.ids) for prompt in groups)
        self._cache.copy(first + prompt_of_B[num_prompts:], followers_B, longest)
        self._routing_SKW[followers_B] = self._routing_SKW[first + prompt_of_B[num_prompts:]]
        self._enter([group[0] for group in groups.values()] + [job for group in groups.values() for job in group[1:]])
        fresh = []
        for slot in range(first, len(self.jobs)):
            if begun := self.jobs[slot].request.given_ids:
                self._replay(slot, begun[:-1], len(self.jobs[slot].request.prompt_ids))
            else:
                fresh.append(slot)
        if fresh:
            fresh_B = self._tensor(fresh)
            self._sample(logits_BV[prompt_of_B[fresh_B - first]], fresh_B)

    def _begin_prompt(
        self, slot: int, version: PolicyVersion, ids: tuple[int, ...], sampled: tuple[tuple[int, int], ...]
    ) -> int:
        """Take the longest stored prefix of a prompt into a slot, and compute all of the rest but its last piece.
        Returns where that begins."""
        start = 0
        if (prefix := self._prefixes.longest(version, ids, sampled)) is not None:
            start = len(prefix.cache.token_ids)
            self._cache.take(slot, prefix.cache)
            self._routing_SKW[slot, :start] = prefix.routing
            self.num_cached += start
        *pieces, last = pieces_of(len(ids), sampled, start)
        for piece in pieces:
            if piece.is_sampled:
                self._replay(slot, ids[piece.start : piece.end], piece.start)
            else:
                self._prefill([ids[: piece.end]], slot, [piece.start])
        return last.start

    def forget_prefixes(self, versions: Collection[PolicyVersion] = ()) -> None:
        """Drop stored prefixes of all but these versions: their weights are no longer there."""
        self._prefixes.keep_only(versions)

    def _store_prefix(self, slot: int) -> None:
        """Keep the keys and values of a reply that has ended, if one version sampled and computed all of it."""
        job, ids = self.jobs[slot], self._context(slot)
        begun = job.request.begun.versions if job.request.begun else ()
        if len(job.marks) > 1 or any(span.version != job.version for span in begun):
            return
        num_prompt = len(job.request.prompt_ids)
        sampled = (*job.request.sampled, (num_prompt, len(ids))) if len(ids) > num_prompt else job.request.sampled
        routing = self._routing_SKW[slot, : len(ids)].clone()
        self._prefixes.add(StoredPrefix(self._cache.keep(slot, job.version, ids), sampled, routing))

    def runs(self) -> Iterator[slice]:
        """Slots of each run: neighbouring jobs of one version."""
        for _, slots in groupby(range(len(self.jobs)), key=lambda slot: self.jobs[slot].version):
            first, *others = slots
            yield slice(first, first + 1 + len(others))

    @torch.inference_mode()
    def step(self, run: slice) -> None:
        """Sample one more token for every job of a run.

        Padding rows are slots of other runs, or free slots. The entries written there are overwritten before they are
        read: the newest token of that slot goes to the same position.
        """
        num_rows = _up(run.stop - run.start, ROW_MULTIPLE)
        first = min(run.start, self._num_rows - num_rows)
        rows = slice(first, first + num_rows)
        positions_B1 = self._positions_S[rows, None]
        self._cache.look(first, num_rows, positions_B1, _up(int(self._positions_S[run].max()) + 1, KEY_MULTIPLE))
        logits_BV = self._forward(self._inputs_S[rows, None], positions_B1)[:, 0]
        self.num_computed += run.stop - run.start
        self._sample(logits_BV[run.start - first : run.stop - first], self._rows_S[run])

    def ended_slots(self) -> list[int]:
        jobs = slice(0, len(self.jobs))
        is_last_S = self._is_stop_V[self._inputs_S[jobs]] | (self._counts_S[jobs] >= self._limits_S[jobs])
        for slot, job in enumerate(self.jobs):
            if stop := job.request.sampling.stop:
                count = int(self._counts_S[slot])
                first = max(0, count - self._stop_texts.window(stop) - 1)
                is_last_S[slot] |= self._stop_texts.end(stop, self._output_ids[slot, first:count].tolist())
        return is_last_S.nonzero().flatten().tolist()

    @torch.inference_mode()
    def recompute(self, max_tokens: int) -> None:
        """Recompute the keys and values of all running jobs, in forwards of at most `max_tokens` (or one job).

        What is recorded of sampled tokens stays: it is what they were sampled with.
        """
        recorded_SKW = self._routing_SKW.clone()
        contexts = [self._context(slot) for slot in range(len(self.jobs))]
        rows = max(1, max_tokens // max(map(len, contexts), default=1))
        for first in range(0, len(contexts), rows):
            self._prefill(contexts[first : first + rows], first)
        self._routing_SKW.copy_(recorded_SKW)

    @torch.inference_mode()
    def move_out(self) -> None:
        """Free the keys and values of all slots; those of running jobs are kept on the host."""
        self._kept = [self._cache.keep(slot, job.version, self._context(slot)) for slot, job in enumerate(self.jobs)]
        self._cache.free()

    @torch.inference_mode()
    def move_in(self) -> None:
        """Undo `move_out`."""
        self._cache.allocate()
        for slot, kept in enumerate(self._kept or ()):
            self._cache.take(slot, kept)
        self._kept = None

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of `token_ids[1:]` at temperature 1, in a separate forward that changes no slot."""
        ids_BL = self._tensor([token_ids])
        positions_BL = torch.arange(len(token_ids), device=self._device)[None]
        logits_BLV = self._model(
            input_ids=ids_BL,
            position_ids=positions_BL,
            attention_mask=self._no_mask,
            slot_masks=SlotMasks(positions_BL, len(token_ids), self._dtype),
            use_cache=False,
        ).logits
        logprobs_LV = logits_BLV[0, :-1].float().log_softmax(-1)
        return tuple(logprobs_LV.gather(1, ids_BL[0, 1:, None])[:, 0].tolist())

    @torch.inference_mode()
    def release(self, slots: Sequence[int], *, is_aborted: bool = False) -> list[tuple[EngineJob, Completion]]:
        """Remove the jobs in these slots and return their completions. The last jobs of their run fill the holes."""
        done: list[tuple[EngineJob, Completion]] = []
        for slot, job in zip(slots, self.read(slots), strict=True):
            ids, stop = job.output_ids, job.request.sampling.stop
            is_stopped = bool(ids) and (
                ids[-1] in self._stop_token_ids or self._stop_texts.end(stop, [*job.request.given_ids, *ids])
            )
            ended = "stop" if is_stopped else "length"
            if self._keeps_replies and not is_aborted:
                self._store_prefix(slot)
            done.append((job, job.completion("abort" if is_aborted else ended)))
        self._close_ranks(frozenset(slots))
        return done

    def read(self, slots: Sequence[int]) -> list[EngineJob]:
        """The jobs in these slots, with all tokens sampled here."""
        slots_S, jobs = self._tensor(slots), [self.jobs[slot] for slot in slots]
        counts, known = self._counts_S[slots_S].tolist(), [job.num_tokens for job in jobs]
        first, end = min(known, default=0), max(counts, default=0)
        rows_of_ids = self._output_ids[slots_S, first:end].tolist()
        rows_of_logprobs = self._logprobs[slots_S, first:end].tolist()
        for job, start, count, ids, logprobs in zip(jobs, known, counts, rows_of_ids, rows_of_logprobs, strict=True):
            job.output_ids += ids[start - first : count - first]
            job.logprobs += logprobs[start - first : count - first]
        if self._recorder:
            for slot, job in zip(slots, jobs, strict=True):
                if len(job.routing) < len(job.output_ids):
                    job.routing += self._newly_recorded(slot, job)
        return jobs

    def _newly_recorded(self, slot: int, job: EngineJob) -> list[bytes]:
        """Return what is recorded for the tokens since the last read, see `Turn.routing`."""
        num_begun, num_read = job.request.num_begun, len(job.routing)
        first = len(job.request.prompt_ids) + num_begun + num_read  # position of the first of these tokens
        start = first - 1 if num_begun + num_read else 0
        end = first + len(job.output_ids) - num_read - 1
        rows = self._routing_SKW[slot, start:end].cpu().numpy()
        return [rows[: first - start].tobytes(), *map(bytes, rows[first - start :])]

    def _context(self, slot: int) -> tuple[int, ...]:
        """The tokens whose keys and values are in a slot: all except the newest."""
        num_sampled = int(self._counts_S[slot]) - 1
        return self.jobs[slot].request.prompt_ids + tuple(self._output_ids[slot, :num_sampled].tolist())

    def _prefill(self, prompts: Sequence[tuple[int, ...]], first: int, starts: Sequence[int] = ()) -> Tensor:
        """Run each prompt in its own slot, from `first`; its first tokens, up to `starts`, have keys and values there.
        Returns the logits of the last token, (prompts, V).

        Padding is written behind each prompt, where the reply overwrites it.
        """
        starts = starts or [0] * len(prompts)
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        length, longest = _up(max(map(len, rests)), ROW_MULTIPLE), max(map(len, prompts))
        ids_BL = self._tensor([rest + (0,) * (length - len(rest)) for rest in rests])
        steps_L = torch.arange(length, device=self._device)
        starts_B = self._tensor(starts if len({*starts}) > 1 else starts[:1])
        positions_BL = (starts_B[:, None] + steps_L).clamp(max=_up(longest + 1, ROW_MULTIPLE) - 1)
        keep = sorted({len(rest) - 1 for rest in rests})
        columns_B = self._tensor([keep.index(len(rest) - 1) for rest in rests])
        self.num_computed += sum(map(len, rests))
        multiple = ROW_MULTIPLE // gcd(ROW_MULTIPLE, len(prompts))  # the output layer's rows come in as many, too
        keep += keep[-1:] * (_up(len(keep), multiple) - len(keep))
        self._cache.look(first, len(prompts), positions_BL, _up(longest, KEY_MULTIPLE))
        logits_BLV = self._forward(ids_BL, positions_BL, self._tensor(keep))
        return logits_BLV[torch.arange(len(prompts), device=self._device), columns_B]

    def _replay(self, slot: int, ids: tuple[int, ...], start: int) -> None:
        """Compute keys and values of tokens sampled elsewhere or before, from position `start` on, in forwards no wider
        than a step of all slots."""
        self.num_computed += len(ids)
        for first in range(0, len(ids), self._num_rows):
            piece = ids[first : first + self._num_rows]
            last = start + first + len(piece) - 1
            num_more = _up(len(piece), ROW_MULTIPLE) - len(piece)  # repeats the last token: written twice, equal
            ids_B1 = self._tensor([*piece, *piece[-1:] * num_more])[:, None]
            positions_B = torch.arange(start + first, last + 1 + num_more, device=self._device).clamp(max=last)
            self._cache.look(slot, 1, positions_B[:, None], _up(last + 1, KEY_MULTIPLE))
            self._forward(ids_B1, positions_B[:, None], self._tensor([]))

    def _forward(self, ids_BL: Tensor, positions_BL: Tensor, keep: Tensor | Literal[0] = 0) -> Tensor:
        """Logits at the columns `keep` (0: all) of the cache's window; `positions_BL` may have one row."""
        logits = self._model(
            input_ids=ids_BL,
            position_ids=positions_BL,
            attention_mask=self._no_mask,
            slot_masks=SlotMasks(positions_BL, self._cache.window.num_keys, self._dtype),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        if self._recorder:
            slots_B1 = self._cache.window.rows[:, :, 0]
            self._routing_SKW[slots_B1, positions_BL] = self._recorder.newest().unflatten(0, ids_BL.shape)
        return logits

    def _enter(self, jobs: Sequence[EngineJob]) -> None:
        """Put jobs into the next slots, each with the tokens sampled elsewhere."""
        slots = slice(len(self.jobs), len(self.jobs) + len(jobs))
        requests = [job.request for job in jobs]
        self._inputs_S[slots] = self._tensor([(r.prompt_ids + r.given_ids)[-1] for r in requests])
        self._positions_S[slots] = self._tensor([len(r.prompt_ids) + r.num_begun - 1 for r in requests])
        self._counts_S[slots] = self._tensor([r.num_begun for r in requests])
        self._limits_S[slots] = self._tensor([r.sampling.max_new_tokens for r in requests])
        self._seeds_S[slots] = self._tensor([as_int64(r.seed) for r in requests])
        for state_S, name in zip(self._sampling_S, ("temperature", "top_p", "top_k", "min_p"), strict=True):
            values = [getattr(r.sampling, name) for r in requests]
            state_S[slots] = torch.tensor(values, dtype=state_S.dtype, device=self._device)
        for slot, request in enumerate(requests, slots.start):
            self._output_ids[slot, : request.num_begun] = self._tensor(request.given_ids)
        self.jobs += jobs

    def _sample(self, logits_BV: Tensor, slots_B: Tensor) -> None:
        """Sample and store the next token of the jobs in `slots_B`."""
        counts_B = self._counts_S[slots_B]
        uniform_B = uniform(self._seeds_S[slots_B], counts_B)
        rows = SamplingOfRows(*(each[slots_B] for each in self._sampling_S))
        tokens_B, logprobs_B = draw(logits_BV, rows, uniform_B)
        self._output_ids[slots_B, counts_B] = tokens_B
        self._logprobs[slots_B, counts_B] = logprobs_B
        self._inputs_S[slots_B] = tokens_B
        self._positions_S[slots_B] += 1
        self._counts_S[slots_B] += 1
        self.num_tokens += len(tokens_B)

    def _close_ranks(self, leaving: frozenset[int]) -> None:
        """Close the gaps: the last jobs of each run move into its free slots, and runs move up to the one before."""
        staying = (slot for slot in range(len(self.jobs)) if slot not in leaving)
        runs = [list(run) for _, run in groupby(staying, key=lambda slot: self.jobs[slot].version)]
        end = 0
        for slots in runs:
            first, end = end, end + len(slots)
            self._move([slot for slot in slots if slot >= end], sorted(set(range(first, end)).difference(slots)))
        del self.jobs[end:]
        if self._kept is not None:
            del self._kept[end:]

    def _move(self, movers: Sequence[int], holes: Sequence[int]) -> None:
        if not movers:
            return
        holes_S, movers_S = self._tensor(holes), self._tensor(movers)
        if self._kept is None:
            self._cache.copy(movers_S, holes_S, int(self._positions_S[movers_S].max()))
        else:
            for hole, mover in zip(holes, movers, strict=True):
                self._kept[hole] = self._kept[mover]
        for state in self._state:
            state[holes_S] = state[movers_S]
        for hole, mover in zip(holes, movers, strict=True):
            self.jobs[hole] = self.jobs[mover]

    def _tensor(self, integers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(integers, dtype=torch.int64, device=self._device)


class _Prompt(NamedTuple):
    """A prompt and its sampled spans: what determines its keys and values."""

    ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_UNIFORM_BITS = 24  # all that float32 represents exactly, so that a number just below 1 stays below 1


def as_int64(number: int) -> int:
    """The signed 64-bit integer with the same low 64 bits, for tensors of seeds."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = as_int64(0x9E3779B97F4A7C15)
_MIX_1 = as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = as_int64(0x94D049BB133111EB)


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Numbers in [0, 1), float32: the hash of each (seed, position), both int64.

    SplitMix64 by counter (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
    mixed seed selects the stream, and the position is the counter.
    """
    bits = _mix(_mix(seeds_B) + (positions_B + 1) * _GAMMA)
    return _shift(bits, 64 - _UNIFORM_BITS).float() * 2.0**-_UNIFORM_BITS


class SamplingOfRows(NamedTuple):
    """`Distribution` of each row."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    min_p_B: Tensor


def draw(logits_BV: Tensor, rows: SamplingOfRows, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its logprob under the sampling distribution, computed in float32.

    The distribution is softmax(logits / temperature), cut as `cut_off` says and renormalised. Temperature 0 takes the
    most likely token, with logprob 0.
    """
    is_greedy_B = rows.temperature_B == 0
    logits_BV = logits_BV.float() / torch.where(is_greedy_B, 1.0, rows.temperature_B)[:, None]
    if bool(((rows.top_p_B < 1) | (rows.top_k_B > 0) | (rows.min_p_B > 0)).any()):
        cut_BV = cut_off(logits_BV, rows.top_p_B, rows.top_k_B, rows.min_p_B)
        logits_BV = logits_BV.masked_fill(cut_BV, -torch.inf)
    logprobs_BV = logits_BV.log_softmax(-1)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    tokens_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)
    logprobs_B = logprobs_BV.gather(1, tokens_B1).squeeze(1)
    tokens_B = tokens_B1.squeeze(1)
    if bool(is_greedy_B.any()):
        tokens_B = torch.where(is_greedy_B, logits_BV.argmax(-1), tokens_B)
        logprobs_B = torch.where(is_greedy_B, 0.0, logprobs_B)
    return tokens_B, logprobs_B


def _mix(state_B: Tensor) -> Tensor:
    """Finalizer of SplitMix64; int64 arithmetic wraps."""
    state_B = (state_B ^ _shift(state_B, 30)) * _MIX_1
    state_B = (state_B ^ _shift(state_B, 27)) * _MIX_2
    return state_B ^ _shift(state_B, 31)


def _shift(bits_B: Tensor, by: int) -> Tensor:
    """Logical shift to the right: `>>` of int64 copies the sign."""
    return (bits_B >> by) & ((1 << (64 - by)) - 1)
