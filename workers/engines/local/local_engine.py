"""The engine for tests and laptops, and the reference for others: continuous batching over a Hugging Face model."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsys.types import EngineStats, PolicyVersion
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.engine import EngineSpec, ModelShapes, check_weights
from workers.engines.local.decoder import Decoder
from workers.engines.stepping import EngineJob, SteppingEngine
from workers.engines.stop_texts import StopTexts
from workers.model.lora import published_tensors
from workers.model.moving_memory import MovingMemory, own_memory
from workers.transport.buckets import specs_in
from workers.transport.checksums import checksum_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 4096
"""Tokens of one prefill; a longer prompt is prefilled alone."""


class LocalEngine(SteppingEngine):
    """Samples from a model on the device of the model. The engine owns the model; its thread runs until `close`.

    An adapter is not merged: its layers compute base plus adapter, as those of the trainer do. So nothing is rounded
    into the base, and a version computes the same, whatever was loaded before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: EngineSpec,
        *,
        stop_token_ids: frozenset[int],
        decode: Callable[[tuple[int, ...]], str] | None = None,
        version: PolicyVersion = 0,
        name: str,
    ) -> None:
        """`decode` gives the text of token ids; without it, requests must have no stop texts."""
        texts, self._memory = StopTexts(decode), MovingMemory(model.device)
        if spec.shares_device:
            own_memory(model)
        self._shapes, self._residents = ModelShapes.of(model), Residents(model, version)
        self._specs: tuple[TensorSpec, ...] = ()
        """Of the newest weights, as they were published."""
        self._staged: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None
        """Weights as given to `stage`, and what `Residents.lay_out` made of them."""
        self._decoder = Decoder(
            model,
            num_slots=spec.slots,
            max_context=spec.max_context,
            stop_token_ids=stop_token_ids,
            stop_texts=texts,
            records_routing=spec.records_routing,
            keeps_replies=spec.keeps_replies,
        )
        num_vocab = self._decoder.num_vocab
        super().__init__(
            name, spec, version=version, num_vocab=num_vocab, stop_token_ids=stop_token_ids, stop_texts=texts
        )

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return self._residents.versions

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.stage`: with several resident versions, lays out the new set in a separate thread."""
        check_weights(self._name, weights, self._shapes)
        if self._spec.resident_versions == 1 or (self._staged is not None and self._staged[0] is weights):
            return
        self._staged = None
        await self._find_room()
        async with self._on_device():
            self._staged = weights, await to_thread(self._residents.lay_out, weights)

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        load = self._replace if self._spec.resident_versions == 1 else self._add
        async with self._on_device(ends_pause=True):
            await self._ask(f"loading version {version}", partial(load, version, weights), self._spec.load_s)

    async def checksums(self) -> Mapping[TensorSpec, int]:
        """See `Engine.checksums`: of the model's parameters and buffers, in a separate thread."""
        self._check_open("computing checksums")
        async with self._on_device():
            return await to_thread(self._residents.checksums, self._specs)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        async with self._on_device():
            return await self._ask("scoring tokens", partial(self._score, token_ids))

    def stats(self) -> EngineStats:
        num_running = len(self._decoder.jobs)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._waiting),
            kv_used=num_running / self._spec.slots,
            num_tokens=self._decoder.num_tokens,
            num_cached_tokens=self._decoder.num_cached,
            step_age_s=self.step_age_s,
        )

    @property
    def num_computed(self) -> int:
        """Tokens computed since start: of prompts, and one for each token sampled after the first of a reply."""
        return self._decoder.num_computed

    def forget_prefixes(self) -> None:
        """Keep nothing of the replies so far: the next turns compute their prompts whole. For measurements."""
        self._decoder.forget_prefixes()

    # ------------------------------------------------------------------------------------------- on the step thread

    def _start_up(self) -> None:
        self._decoder.warm_up()

    def _move_out(self) -> None:
        self._decoder.move_out()
        if self._spec.shares_device:
            self._memory.move_out(self._residents.tensors())

    def _move_in(self) -> None:
        self._memory.move_in()
        self._decoder.move_in()

    def _is_busy(self) -> bool:
        return bool(self._decoder.jobs)

    def _running(self) -> Iterable[EngineJob]:
        return self._decoder.read(range(len(self._decoder.jobs)))

    def _advance(self) -> None:
        """Admit arrivals, then step every version in turn."""
        if arrivals := self._arrivals():
            self._residents.use(arrivals[0].version)
            self._decoder.admit(arrivals)
            self._release(self._decoder.ended_slots())
        for run in self._decoder.runs():
            self._residents.use(self._decoder.jobs[run.start].version)
            self._decoder.step(run)
        self._release(self._decoder.ended_slots())

    def _arrivals(self) -> list[EngineJob]:
        """Take the next waiting jobs, of one version, that fit in the free slots and one prefill."""
        jobs: list[EngineJob] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._decoder.jobs) + len(jobs) < self._spec.slots:
            job = self._waiting[0]
            version = job.request.version_among(self.versions, self._version)
            prompt = job.request.prompt_ids
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            if jobs and (len(prompts) * longest > PREFILL_TOKENS or version != jobs[0].version):
                break
            job.marks.append((0, version))
            jobs.append(self._waiting.popleft())
        return jobs

    def _release(self, slots: Sequence[int], *, is_aborted: bool = False) -> None:
        if slots:
            for job, completion in self._decoder.release(slots, is_aborted=is_aborted):
                self._answer(job.future, completion)
            self._evict()

    def _cut(self, is_meant: Callable[[EngineJob], bool]) -> None:
        slots = [slot for slot, job in enumerate(self._decoder.jobs) if is_meant(job)]
        self._release(slots, is_aborted=True)

    def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._residents.use(self._version)
        return self._decoder.score(token_ids)

    def _replace(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; running jobs continue under the new ones."""
        check_weights(self._name, weights, self._shapes)
        self._residents.overwrite(version, weights)
        self._decoder.forget_prefixes()
        if self._spec.kv_cache == "recompute" and self._decoder.jobs:
            self._decoder.recompute(PREFILL_TOKENS)
        self._specs = tuple(specs_in(weights).values())
        self._become(version)

    def _add(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Add a set of weights; running jobs end on the old ones."""
        check_weights(self._name, weights, self._shapes)
        staged, self._staged = self._staged, None
        self._check_room(version)
        tensors = staged[1] if staged and staged[0] is weights else self._residents.lay_out(weights)
        self._decoder.forget_prefixes(set(self._residents.versions) - {version})
        self._residents.add(version, tensors)
        self._specs, self._version = tuple(specs_in(weights).values()), version
        self._evict()

    def _evict(self) -> None:
        self._residents.evict_all_but({job.version for job in self._decoder.jobs})
        self._decoder.forget_prefixes(self._residents.versions)
        self._grant_room()


class Residents:
    """Weights by version; the model computes with the version last passed to `use`. Of a model with an adapter, the
    weights are those of the adapter, and all versions share the base.

    With several sets, their tensors are never written again. So a set may share equal tensors with the set before it,
    and requests of its version may run for any time.
    """

    def __init__(self, model: PreTrainedModel, version: PolicyVersion) -> None:
        """Register the model's current weights as `version`."""
        self._model, self._live = model, published_tensors(model)
        self._name_of = ModelShapes.of(model).first_names
        own = {name: tensor.data for name, tensor in self._live.items()}
        self._sets: dict[PolicyVersion, Mapping[str, Tensor]] = {version: own}  # replaced, not mutated: threads read it
        self._used = version

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The loaded versions, in order of loading."""
        return tuple(self._sets)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the model, and of every set; some share memory."""
        yield from chain(self._model.parameters(), self._model.buffers(), *(of.values() for of in self._sets.values()))

    @torch.no_grad()
    def overwrite(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Copy weights over the only set and assign it `version`."""
        (tensors,) = self._sets.values()
        for name, tensor in weights.items():
            tensors[self._name_of[name]].copy_(tensor)
        self._sets = {version: tensors}
        self._used = version

    @torch.no_grad()
    def lay_out(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Lay out weights as a new set, which shares equal tensors with the newest set. Thread-safe."""
        newest = list(self._sets.values())[-1]
        return {
            self._name_of[name]: _shared_or_copied(tensor, newest[self._name_of[name]])
            for name, tensor in weights.items()
        }

    def checksums(self, specs: Iterable[TensorSpec]) -> dict[TensorSpec, int]:
        """Checksums of the newest set, cast back to the published dtypes. Thread-safe."""
        newest = list(self._sets.values())[-1]
        return {spec: checksum_of(newest[self._name_of[spec.name]].to(getattr(torch, spec.dtype))) for spec in specs}

    def add(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Add a set from `lay_out` as the newest."""
        others = {held: tensors for held, tensors in self._sets.items() if held != version}
        self._sets = {**others, version: tensors}
        if version == self._used:
            self._point_at(version)

    def use(self, version: PolicyVersion) -> None:
        """Make the model compute with the weights of `version`."""
        if version != self._used:
            self._point_at(version)

    def evict_all_but(self, versions: Collection[PolicyVersion]) -> None:
        """Evict every set except the newest and those of `versions`."""
        newest = self.versions[-1]
        kept = {newest, *versions}
        if self._used not in kept:
            self._point_at(newest)
        self._sets = {version: tensors for version, tensors in self._sets.items() if version in kept}

    def _point_at(self, version: PolicyVersion) -> None:
        tensors = self._sets[version]
        for name, live in self._live.items():
            live.data = tensors[name]
        self._used = version


def _shared_or_copied(given: Tensor, own: Tensor) -> Tensor:
    """Cast `given` to the device and dtype of `own`. Returns `own` if the bytes are equal, else a copy."""
    cast = given.detach().to(own.device, own.dtype)
    if torch.equal(cast.reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8)):
        return own
    return cast.clone(memory_format=torch.contiguous_format) if cast.data_ptr() == given.data_ptr() else cast
