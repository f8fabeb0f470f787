"""Memory of a training rank, of a frozen model and of a rollout replica by owner, computed from counts of a model.

The counts come from `workers.model.memory_counts`, which reads no weights. Everything else here is arithmetic, so that
a search can try thousands of settings. `benchmarks.trainer` compares ranks with measured steps on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

VLLM_SHARE = 0.92
"""Part of a GPU's memory that one vLLM takes by default (`gpu_memory_utilization`)."""
VLLM_MEMORY = 0.9
"""Part that several vLLMs of a replica take together by default."""
MASTER_BYTES = 4
"""Bytes of a weight, of a gradient and of each of AdamW's two moments in the state of a rank, which is fp32."""


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """Bytes that grow linearly with the positions of a micro-batch."""

    fixed: float
    per_position: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> LinearBytes:
        """Return the line through two points, (positions, bytes) each."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)

    def at(self, positions: int) -> int:
        return max(0, round(self.fixed + self.per_position * positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Numbers of a model, counted without weights. Tied weights count once."""

    parameters: int
    """All parameters."""
    largest_layer: int
    """Parameters of the largest decoder layer."""
    largest_matrix: int
    """Elements of the largest parameter of a decoder layer, whose gradient `StepBytes.layers` includes."""
    outside: int
    """Parameters outside of the decoder layers: embeddings, the last norm, the output matrix."""
    untied_head: int
    """Parameters of the output matrix; 0 if it is the matrix of the embeddings."""
    vocabulary: int
    """Rows of the output matrix."""
    heads: int
    """Attention heads of queries."""
    key_value_heads: int
    cached: int
    """Numbers that one token adds to a key-value cache, over all layers."""

    def without_head(self) -> ModelSizes:
        """Sizes of a critic on this model. Its own head, a vector, is left out."""
        return replace(
            self, parameters=self.parameters - self.untied_head, outside=self.outside - self.untied_head, untied_head=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Most bytes of tensors alive in each phase of one micro-batch, beyond weights, gradients and optimizer state.

    All positions are trained, which is the most there can be. `logits`, `layers` and `embeddings` include what is left
    of the activations in that phase.
    """

    activations: LinearBytes
    """Alive after the forward of the layers."""
    logits: LinearBytes
    """Forward and backward of the logprobs."""
    layers: LinearBytes
    """Backward of the layers; under activation checkpointing with the activations that one layer computes again."""
    embeddings: LinearBytes
    """Backward of the embeddings, after that of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBytes:
    """Most bytes of tensors alive in a forward without gradient, beyond the weights."""

    layers: LinearBytes
    logits: LinearBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device by owner, at the moment of the most."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Moments of AdamW, and the state of a stabilizer."""
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    """Gathered weights, and gradients on their way to their shards."""
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __add__(self, other: Memory) -> Memory:
        """Memory of two models side by side."""
        return Memory(**{owner: getattr(self, owner) + getattr(other, owner) for owner in OWNERS})


OWNERS = tuple(field.name for field in fields(Memory))


def rank_memory(
    sizes: ModelSizes,
    step: StepBytes,
    *,
    shards: int,
    positions: int,
    value_bytes: int,
    stabilizer_bytes: float = 0.0,
    adapter: int | None = None,
    keeps_reference: bool = False,
) -> Memory:
    """Memory of one of `shards` ranks that train a model together, at the moment of the most within a step.

    `value_bytes` are those of one number of the type that the model computes in; `stabilizer_bytes` those that the
    stabilizer keeps per trained parameter. The gradients of earlier micro-batches of the update are there. `adapter`
    is the number of parameters of an adapter that is trained instead of the model; its activations, few numbers per
    position and layer, are left out. `keeps_reference`: the rank keeps the weights of a reference beside its own.
    """
    own = -(-(sizes.parameters if adapter is None else adapter) // shards)
    frozen = 0 if adapter is None else value_bytes * -(-sizes.parameters // shards)
    state = Memory(
        weights=MASTER_BYTES * own * (1 + keeps_reference) + frozen,
        gradients=MASTER_BYTES * own,
        optimizer=round((2 * MASTER_BYTES + stabilizer_bytes) * own),
    )
    buffers = _buffers(sizes, shards, value_bytes) if adapter is None else _frozen_buffers(sizes, shards, value_bytes)
    moments = _moments(step, buffers, positions)
    return max((replace(state, **moment) for moment in moments), key=lambda memory: memory.total)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Bytes of sharding in each phase of a step."""

    logits: int = 0
    layers: int = 0
    embeddings: int = 0
    end: int = 0


def _buffers(sizes: ModelSizes, shards: int, value_bytes: int) -> _Buffers:
    """Bytes of gathered weights and of gradients that are not sharded yet, as FSDP2 keeps them.

    What is outside of the layers is gathered for the whole step, and a layer for its forward and backward. The result
    of an all-gather is copied; the copied one lives until the next. A backward gathers the next layer ahead. A
    reduce-scatter copies the gradients in fp32, and its input lives until the next. One fp32 rank shards nothing.
    """
    if shards == 1 and value_bytes == MASTER_BYTES:
        return _Buffers()
    outside, layer, head = (value_bytes * n for n in (sizes.outside, sizes.largest_layer, sizes.untied_head))
    in_flight = layer if shards > 1 else 0  # one rank copies its weights without an all-gather
    gradients = layer - value_bytes * sizes.largest_matrix
    layer_input, root_input = MASTER_BYTES * sizes.largest_layer, MASTER_BYTES * sizes.outside
    kept = outside + in_flight
    scattered = 1 / shards if shards > 1 else 2  # one rank copies the input twice
    return _Buffers(
        logits=kept,
        layers=kept + head + in_flight + max(layer + gradients + layer_input, round(layer_input * (1 + scattered))),
        embeddings=kept + head + layer_input,
        end=in_flight + max(outside + root_input, round(root_input * (1 + scattered))),
    )


def _frozen_buffers(sizes: ModelSizes, shards: int, value_bytes: int) -> _Buffers:
    """Bytes of gathered weights as in `_buffers`, of a model without gradients. One rank keeps it in the type it
    computes in, and gathers nothing."""
    if shards == 1:
        return _Buffers()
    outside, layer = value_bytes * sizes.outside, value_bytes * sizes.largest_layer
    return _Buffers(logits=outside + layer, layers=outside + 3 * layer, embeddings=outside + layer, end=outside)


def _moments(step: StepBytes, buffers: _Buffers, positions: int) -> Iterator[dict[str, int]]:
    """Yield activations, logits and buffers in each phase of one micro-batch."""
    kept = step.activations.at(positions)
    yield {
        "activations": kept,
        "logits": max(0, step.logits.at(positions) - kept),
        "buffers": buffers.logits,
    }
    yield {"activations": step.layers.at(positions), "buffers": buffers.layers}
    yield {"activations": step.embeddings.at(positions), "buffers": buffers.embeddings}
    yield {"buffers": buffers.end}


def frozen_memory(sizes: ModelSizes, forward: ForwardBytes, *, positions: int, value_bytes: int) -> Memory:
    """Memory of a whole model that computes logprobs without gradient."""
    layers, logits = forward.layers.at(positions), forward.logits.at(positions)
    of_most = {"activations": layers} if layers >= logits else {"logits": logits}
    return Memory(weights=value_bytes * sizes.parameters, **of_most)


SAMPLING_BYTES = 16
"""Bytes of a logit while tokens are drawn from it: fp32 logits, logprobs, probabilities and a sort."""


def slots_memory(
    sizes: ModelSizes,
    forward: ForwardBytes,
    *,
    positions: int,
    slots: int,
    context: int,
    value_bytes: int,
    versions: int,
) -> Memory:
    """Memory of the engine `local`, whose `slots` have room for the whole context from the start.

    `positions` are those of one prefill, `versions` the sets of weights.
    """
    return Memory(
        weights=value_bytes * sizes.parameters * versions,
        activations=forward.layers.at(positions),
        logits=SAMPLING_BYTES * slots * sizes.vocabulary,
        kv_cache=value_bytes * sizes.cached * slots * context,
    )


def blocks_memory(
    sizes: ModelSizes,
    forward: ForwardBytes,
    *,
    positions: int,
    slots: int,
    context: int,
    value_bytes: int,
    shards: int,
    granted: int,
) -> Memory:
    """Memory of one shard of vLLM, whose cache takes what is left of the `granted` bytes: one sequence at the least.

    Shards beyond the key-value heads repeat these. `positions` are those of one step.
    """
    memory = Memory(
        weights=value_bytes * sizes.parameters // shards,
        activations=forward.layers.at(positions),
        logits=SAMPLING_BYTES * slots * sizes.vocabulary // shards,
    )
    sequence = value_bytes * sizes.cached * context // min(shards, sizes.key_value_heads)
    return replace(memory, kv_cache=max(granted - memory.total, sequence))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Workers of one kind, and the memory of one of them on each of its devices."""

    name: str
    count: int
    num_gpus: float
    """GPUs that Ray reserves for one worker; 0: it runs on CPUs, where nothing is limited."""
    num_devices: int = 1
    """Devices that one worker spreads its model over."""
    memory: Memory
    limit: int | None
    """Most bytes on one device; None for a worker on CPUs."""
    remark: str = ""

    @property
    def fits(self) -> bool:
        return self.limit is None or self.memory.total <= self.limit

    def shortage(self) -> str:
        """Say by how much a worker does not fit, and what takes most."""
        assert self.limit is not None
        parts = sorted(asdict(self.memory).items(), key=lambda part: -part[1])[:3]
        listing = ", ".join(f"{_label(owner)} {gigabytes(taken)}" for owner, taken in parts if taken)
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.name}: {gigabytes(self.memory.total)} of {gigabytes(self.limit)}{remark}; {listing}"


def gigabytes(number: float) -> str:
    """Write a number of bytes, such as 80.0 GB, or 3.5 MB below a tenth of a GB."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def table_of(workers: Sequence[WorkerMemory]) -> Iterator[str]:
    """Yield the lines of a table: one row for each kind of worker, one column for each owner."""
    is_large = any(worker.memory.total >= 1e9 for worker in workers)
    unit, scale = ("GB", 1e9) if is_large else ("MB", 1e6)
    head = [f"{unit} on each device", "workers", *map(_label, OWNERS), "total", "limit"]
    rows = [head]
    for worker in workers:
        taken = [f"{number / scale:.1f}" if number else "-" for number in asdict(worker.memory).values()]
        limit = "-" if worker.limit is None else f"{worker.limit / scale:.1f}"
        devices = f"{worker.count}" + (f" x {worker.num_devices}" if worker.num_devices > 1 else "")
        rows.append([worker.name, devices, *taken, f"{worker.memory.total / scale:.1f}", limit])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        name, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join([name.strip().ljust(widths[0]), *others])
    yield from (f"{worker.name}: {worker.remark}" for worker in workers if worker.remark)


def _label(owner: str) -> str:
    return "KV cache" if owner == "kv_cache" else owner


def vllm_share(num_gpus: float, tensor_parallel: int, num_engines: int) -> float:
    """Return the part, 0 to 1, of each GPU's memory that one vLLM takes by default. Its replica has `num_engines` of
    them, and reserves `num_gpus` for `tensor_parallel` devices: a fraction of a GPU is that fraction of its memory.
    Without GPUs, as with whole ones.
    """
    whole = VLLM_SHARE if num_engines == 1 else VLLM_MEMORY / num_engines
    return whole * (min(1.0, num_gpus / tensor_parallel) or 1.0)
