"""Counts of a model and of its micro-batches on the meta device, for `rlsys.config.memory_plan`. No weights are read.

A forward and backward runs on models of one and of two decoder layers, without values. Tensors that are alive count
when they are made and until they are freed, so that every architecture that can be trained can be counted. Bytes are
linear in the layers and in the positions; the rest follows from two points each. Layers count as equal to the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlsys.config.memory_plan import ForwardBytes, LinearBytes, ModelSizes, StepBytes
from rlsys.config.mesh_section import MeshSection
from rlsys.errors import ModelError
from rlsys.types import Distribution
from workers.model.decoder_layers import (
    checkpoint_layers,
    decoder_layers,
    head_width,
    num_cached_values,
    num_key_value_heads,
)
from workers.model.logprobs import MAX_LOGITS, row_states, rows_of, token_logprobs
from workers.model.lora import adapter_of, add_adapter
from workers.model.model_loading import check_exists, outline, read_config
from workers.model.routers import Routers
from workers.model.row_attention import AttentionBlock, AttentionRow
from workers.model.split_layers import check_splits, experts_of
from workers.model.token_distribution import OutputLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlsys.config.lora_section import LoraSection
    from rlsys.config.train_section import ActivationCheckpointing
    from rlsys.stabilizer import StabilizerPlugin

Dtype: TypeAlias = Literal["float32", "bfloat16"]
META = torch.device("meta")
FEWEST = 64
"""Positions of the smallest micro-batch that is counted: fewer than these do not show the slope."""


class OneRun(AttentionRow):
    """Row of one sample. Sliding windows are ignored, so that no tensor but those of the model is needed."""

    def __init__(self, num_positions: int) -> None:
        whole = slice(0, num_positions)
        self.context = self.routing_PW = None
        self._one = [AttentionBlock(whole, whole, is_causal=True)]

    def blocks(self, window: int | None) -> list[AttentionBlock]:
        return self._one


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still alive, and the most of them since a mark."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Tensors that are `known` do not count, nor do their views."""
        super().__init__()
        self.now = self._most = 0
        self._seen = dict.fromkeys((tensor.untyped_storage()._cdata for tensor in known), 0)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        results = run(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return results

    def mark(self) -> int:
        """Return the most since the last mark, and begin anew."""
        most, self._most = self._most, self.now
        return most

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = storage.nbytes()
            self.now += storage.nbytes()
            self._most = max(self._most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._seen.pop(key)


def _grouped_product(left: Tensor, right: Tensor, *arguments: object, **options: object) -> Tensor:
    """Matrix products of experts, which the meta device has only for bfloat16."""
    product = torch.ops.aten._grouped_mm.default(left.bfloat16(), right.bfloat16(), *arguments, **options)
    return product.to(left.dtype)


class CountedModel:
    """Model of a folder or hub name that is counted."""

    def __init__(self, path: str, key: str = "model.path", mesh: MeshSection | None = None) -> None:
        """Read the model's configuration, and nothing else. Raises `ModelError`, which calls the path `key`.

        With `mesh`, only the part of one of the ranks of `tensor` is counted. The experts that more ranks split than
        `tensor` are counted as if no others did: a rank then gathers less than planned.
        """
        check_exists(path, key)
        try:
            self._config = read_config(path)
            whole = self._model("float32")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{key} {path!r} has no config.json of a causal language model: {error}") from error
        if mesh is not None:
            check_splits(whole, mesh)
        if mesh is not None and mesh.tensor > 1:
            _split(self._config, mesh.tensor, has_experts=bool(experts_of(whole)))
            whole = self._model("float32")
        self.is_stored_in_bfloat16 = self._config.get_text_config().dtype == torch.bfloat16
        """True if the model's files say that they have weights in bfloat16."""
        self._num_layers = self._config.get_text_config().num_hidden_layers
        self.sizes = _sizes(whole)

    def step(self, dtype: Dtype, how: ActivationCheckpointing, positions: int, *, has_head: bool) -> StepBytes:
        """Count one micro-batch in training; exact at `positions`, nearly so at fewer. A critic has no head."""

        def count(at: int) -> list[int]:
            one, two = (_count_step(self._model(dtype, depth), how, at, has_head=has_head) for depth in (1, 2))
            return [first + (self._num_layers - 1) * (second - first) for first, second in zip(one, two, strict=True)]

        activations, logits, layers, embeddings = self._lines(positions, count)
        return StepBytes(activations=activations, logits=logits, layers=layers, embeddings=embeddings)

    def forward(self, dtype: Dtype, positions: int) -> ForwardBytes:
        """Count one micro-batch without gradient, where a layer leaves nothing but its result."""
        layers, logits = self._lines(positions, lambda at: _count_forward(self._model(dtype, 2), at))
        return ForwardBytes(layers=layers, logits=logits)

    def _lines(self, positions: int, count: Callable[[int], list[int]]) -> list[LinearBytes]:
        """Fit a line to the bytes of each phase; `count` takes positions."""
        chunk = max(1, MAX_LOGITS // self.sizes.vocabulary)
        most = min(max(positions, FEWEST), 4 * chunk)  # from two chunks of logits on, the bytes are linear
        few, many = count(most // 2), count(most)
        return [LinearBytes.through((most // 2, a), (most, b)) for a, b in zip(few, many, strict=True)]

    def _model(self, dtype: Dtype, depth: int | None = None) -> PreTrainedModel:
        config = deepcopy(self._config)
        text = config.get_text_config()
        if depth is not None:
            text.num_hidden_layers = depth
            if kinds := getattr(text, "layer_types", None):
                text.layer_types = [*kinds, *kinds[-1:] * depth][:depth]  # a model may have one layer
        with META:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        return model.eval()


def _split(config: PreTrainedConfig, tensor: int, *, has_experts: bool) -> None:
    """Change a configuration to that of the layers which a rank of `tensor` computes."""
    text = config.get_text_config()
    text.head_dim = head_width(text)
    text.num_key_value_heads = num_key_value_heads(text) // tensor
    text.num_attention_heads //= tensor
    if has_experts:
        name = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(text, name))
        setattr(text, name, getattr(text, name) // tensor)
        text.num_experts_per_tok = min(text.num_experts_per_tok, getattr(text, name))
    else:
        text.intermediate_size //= tensor


def num_gpus() -> int:
    """Return the number of GPUs of this machine that this process may use."""
    return torch.cuda.device_count()


def memory_of_gpu() -> int | None:
    """Return the memory of this machine's first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def adapter_parameters(path: str, lora: LoraSection) -> int:
    """Return the number of parameters of an adapter of the model in `path`. Raises `ModelError`."""
    model = outline(path)
    with META:
        add_adapter(model, lora, path)
    return sum(parameter.numel() for parameter in adapter_of(model).values())


def check_routing(path: str) -> None:
    """Raise `ModelError` if no choices of experts can be recorded and replayed for the model in `path`."""
    Routers(outline(path))


def stabilizer_bytes(stabilizer: StabilizerPlugin | None) -> float:
    """Return the bytes that a stabilizer keeps for each parameter of a rank."""
    if stabilizer is None:
        return 0.0
    weight = torch.empty(2**20, device=META)
    state = stabilizer.start({"weight": weight}).state_dict()
    return sum(tensor.nbytes for tensor in state.values() if tensor.device == META) / weight.numel()


def _sizes(model: PreTrainedModel) -> ModelSizes:
    text = model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ValueError("it has no output matrix")
    numbers = [[p.numel() for p in layer.parameters()] for layer in decoder_layers(model)]
    if not numbers:
        raise ValueError("its decoder layers are not known")
    layers = [*map(sum, numbers)]
    total = sum(p.numel() for p in model.parameters())
    matrix = head.get_parameter("weight")
    is_tied = matrix is embeddings.get_parameter("weight")
    return ModelSizes(
        parameters=total,
        largest_layer=max(layers),
        largest_matrix=max(map(max, numbers)),
        outside=total - sum(layers),
        untied_head=0 if is_tied else matrix.numel(),
        vocabulary=len(matrix),
        heads=text.num_attention_heads,
        key_value_heads=num_key_value_heads(text),
        cached=num_cached_values(text),
    )


def _count_step(model: PreTrainedModel, how: ActivationCheckpointing, positions: int, *, has_head: bool) -> list[int]:
    """Count activations, and the most in the phases logits, layers and embeddings; see `StepBytes`."""
    parameters = [*model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    checkpoint_layers(model, how)
    embedded: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda _module, _input, output: embedded.append(output))
    marks: list[int] = []
    gradients = [cast("Tensor", parameter.grad) for parameter in parameters]
    with LiveBytes([*parameters, *gradients]) as live:
        hidden_NH = _hidden_states(model, positions)
        activations = live.now
        for tensor in (hidden_NH, embedded.pop()):
            tensor.register_hook(lambda _gradient: marks.append(live.mark()))
        live.mark()
        result_N = _logprobs(model, hidden_NH) if has_head else hidden_NH.float().sum(-1)
        del hidden_NH, tensor
        result_N.sum().backward()
        marks.append(live.mark())
    logits, layers, embeddings = marks
    return [activations, logits, layers, embeddings]


@torch.no_grad()
def _count_forward(model: PreTrainedModel, positions: int) -> list[int]:
    """Count the most in the layers and in the logits; see `ForwardBytes`."""
    with LiveBytes(model.parameters()) as live:
        hidden_NH = _hidden_states(model, positions)
        layers = live.mark()
        _logprobs(model, hidden_NH)
        return [layers, live.mark()]


def _hidden_states(model: PreTrainedModel, positions: int) -> Tensor:
    """Hidden states of one row of so many tokens, each of which is trained."""
    indices_R = torch.arange(positions, device=META)
    return rows_of(row_states(model, indices_R, indices_R, OneRun(positions)), indices_R)


def _logprobs(model: PreTrainedModel, hidden_NH: Tensor) -> Tensor:
    tokens_N = torch.zeros(len(hidden_NH), dtype=torch.int64, device=META)
    output = OutputLayer.of(model)
    return token_logprobs(output, hidden_NH, tokens_N, Distribution(1.0), max_logits=MAX_LOGITS)[0]
