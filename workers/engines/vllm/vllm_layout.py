"""Layout of published tensors in a vLLM model: which rectangle of which tensor is in which part of which parameter.

vLLM fuses, shards and pads tensors while it loads them. The layout is not written down here: the model's own loader
loads tensors without content into a twin without content, and the copies that it makes are recorded. That needs no name
of any family.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.weight_sync.manifest import Rectangle, TensorSpec
from workers.model.checkpoint_names import checkpoint_tensors
from workers.model.model_tensors import NoContent, memory_of
from workers.transport.checksums import checksum

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a memory: for index (i, j), the one at `offset + i * strides[0] + j * strides[1]`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, whole: Tensor | None = None) -> View:
        """The view that `tensor` is of its memory, or of the contiguous tensor `whole` in that memory."""
        begin = int(whole.storage_offset()) if whole is not None else 0
        return cls(int(tensor.storage_offset()) - begin, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of every dimension, without those of size 1; neighbours that are one in memory are joined.

        Views with equal runs and offsets have the same elements in the same order, whatever their shapes.
        """
        runs: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = (runs[-1][0] * size, stride)
            else:
                runs.append((size, stride))
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class Placement:
    """One copy that the loader makes: a rectangle of a published tensor, into a view of a parameter's memory."""

    rectangle: Rectangle
    parameter: str
    parameter_shape: tuple[int, ...]
    view: View


@dataclass(frozen=True, slots=True)
class PartSum:
    """Checksum of a rectangle, as one shard has it."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int


def rectangle_of(view: View, tensor: TensorSpec) -> Rectangle | None:
    """The rectangle that a view of a contiguous tensor is, in the order of its elements; None if it is none."""
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    begin, end = (_index(place, tensor.shape) for place in (view.offset, last))
    shape = tuple(to - start + 1 for start, to in zip(begin, end, strict=True))
    if prod(shape) != prod(view.shape) or min(shape, default=1) < 1:
        return None
    expected = View(view.offset, shape, _strides(tensor.shape))
    return Rectangle(tensor, begin, shape) if expected.runs == view.runs else None


def _index(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index of the element at `place` of a contiguous tensor."""
    index = []
    for stride in _strides(shape):
        index.append(place // stride)
        place %= stride
    return tuple(index)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def record_layout(
    worker: Any,  # noqa: ANN401  (vLLM's own type)
    specs: Iterable[TensorSpec],
    config: PreTrainedConfig,
) -> tuple[Placement, ...]:
    """Record where the loader of a worker's model puts these published tensors, on this shard. No step may be running.

    `config` is the model's, in the Transformers library. Left out are tensors that the loader computes
    with before it copies them, as it does with those of one element, and those of layers that keep their weights in
    another form than the loader's.
    """
    from transformers import AutoModelForCausalLM
    from vllm.config import set_current_vllm_config

    with torch.device("meta"):
        sized = [spec for spec in specs if prod(spec.shape) > 1]
        given = {spec: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in sized}
        with NoContent():
            twin, of_twin = build_twin(worker)
        outline = AutoModelForCausalLM.from_config(config)
    named = checkpoint_tensors(outline, {spec.name: tensor for spec, tensor in given.items()})
    copies = _Copies()
    with set_current_vllm_config(of_twin), torch.no_grad(), copies:
        twin.load_weights(iter(named.items()))  # pyrefly: ignore[not-callable]
    sources = {memory_of(tensor): spec for spec, tensor in given.items()}
    targets = {memory_of(parameter): (name, tuple(parameter.shape)) for name, parameter in _plain_parameters(twin)}
    placements = []
    for target, source in copies.made:
        spec, parameter = sources.get(memory_of(source)), targets.get(memory_of(target))
        if spec and parameter and (rectangle := rectangle_of(View.of(source), spec)):
            placements.append(Placement(rectangle, *parameter, View.of(target)))
    return tuple(placements)


def build_twin(worker: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401  (vLLM's own type)
    """Build a second model like a worker's, on the device of the context. Returns its configuration too."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(worker.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}  # layers register there by name, once per model
    build: Any = initialize_model  # its decorator hides its arguments
    with set_default_torch_dtype(config.model_config.dtype):
        return build(vllm_config=config, model_config=config.model_config), config


def part_sums(
    placements: Iterable[Placement], parameters: Mapping[str, Tensor], dtypes: Mapping[str, str]
) -> list[PartSum]:
    """Checksums of one shard's rectangles, cast to the published `dtypes` of their tensors.

    Leaves out parameters that have another shape than their loader filled: their kernel keeps them in a form of its
    own.
    """
    sums = []
    for placement in placements:
        rectangle, view, held = placement.rectangle, placement.view, parameters[placement.parameter]
        spec = rectangle.tensor
        if held.shape == placement.parameter_shape and held.is_contiguous():
            part = held.as_strided(view.shape, view.strides, held.storage_offset() + view.offset)
            part = part.reshape(rectangle.shape).to(getattr(torch, dtypes[spec.name]))
            value = checksum(part, spec.shape, rectangle.offset)
            sums.append(PartSum(spec.name, rectangle.offset, rectangle.shape, value))
    return sums


def sum_checksums(shards: Iterable[Iterable[PartSum]], specs: Iterable[TensorSpec]) -> dict[TensorSpec, int]:
    """Checksums of whole tensors, from those of the rectangles of all shards.

    Equal copies of a rectangle count once. Copies that differ all count, so that the sum is wrong. A tensor that the
    rectangles do not cover exactly is left out.
    """
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in (part for shard in shards for part in shard):
        parts[part.name][part.offset, part.shape].add(part.checksum)
    return {
        spec: sum(sum(values) for values in parts[spec.name].values()) % 2**64
        for spec in specs
        if covers([Rectangle(spec, *place) for place in parts[spec.name]], spec)
    }


def covers(rectangles: Sequence[Rectangle], tensor: TensorSpec) -> bool:
    """True if every element of the tensor is in exactly one of these rectangles."""
    num_elements = sum(prod(rectangle.shape) for rectangle in rectangles)
    return num_elements == prod(tensor.shape) and not any(_overlap(*pair) for pair in combinations(rectangles, 2))


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


class _Copies(TorchDispatchMode):
    """Records every copy of one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []
        """(target, source)."""

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):  # noqa: ANN001, ANN204, ANN401  (torch's own)
        if func is torch.ops.aten.copy_.default and args[0].numel() == args[1].numel():
            self.made.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the layers that compute with what their loader wrote."""
    for name, module in model.named_modules():
        if is_plain(module):
            for own, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{own}".removeprefix("."), parameter


def is_plain(module: nn.Module) -> bool:
    """True unless the layer may change the layout of its weights after loading: experts, quantized layers."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
