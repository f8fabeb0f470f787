"""Loading weights into vLLM, with its tied embeddings, shards, dtypes, and kernels that keep packed copies.

`WeightLoading` becomes part of every vLLM worker, one per tensor-parallel shard, in this process or another.

On the CPU, vLLM multiplies with packed copies of the weights, made once after loading. So a reload must pack again,
including an output matrix that is tied to the embedding. There the tensor is shared but the packed copy is not, and
vLLM's reload silently leaves it stale. Packing takes longer than copying, so it runs during decoding: `stage` fills and
packs a second set of parameters, and `swap` exchanges pointers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlsys.errors import ModelError
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.vllm.shared_tensors import MappedMemory, SharedTensors
from workers.engines.vllm.vllm_layout import PartSum, Placement, build_twin, is_plain, part_sums, record_layout
from workers.engines.vllm.vllm_shards import answer_in_a_thread
from workers.model.model_tensors import persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

COLUMNS = 8
"""Columns of each packed matrix that are read back per version. Other columns follow with the next version, so that a
packed copy that stays wrong is found whatever its error."""


class WeightLoading:
    """Extension of a vLLM worker: loads weights by the names that checkpoints give them.

    Each shard keeps its part of every tensor, cast to its compute dtype. `weights` is a mapping, or an address in the
    memory of the engine's process if the worker is another process.
    """

    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def rlsys_prepare(self, specs: Sequence[TensorSpec], config: PreTrainedConfig) -> None:
        """Allocate the second set of parameters, and record the layout of the published tensors `specs` of a model with
        this configuration. Once, before weights are staged; no step may be running."""
        if not hasattr(self, "rlsys_shadow"):
            shadow = Shadow.beside(self) if can_be_swapped(self.model_runner.get_model()) else None
            self.rlsys_layout: tuple[Placement, ...] = record_layout(self, specs, config)
            self.rlsys_shadow = shadow
            self.rlsys_mapped = MappedMemory()
            self.rlsys_staging = threading.Lock()

    def rlsys_limit_ids(self, num_ids: int) -> None:
        """Give the ids from `num_ids` on the probability 0, as `limit_ids` does in the trainer."""
        model = self.model_runner.get_model()
        if not isinstance(model.compute_logits, _LimitedLogits):
            model.compute_logits = _LimitedLogits(model.compute_logits, num_ids)

    def rlsys_begin(self, work: str, args: Sequence[Any], places: Sequence[str]) -> None:
        """Run a method in a thread, and write its result to this shard's place; see `answer_in_a_thread`."""
        answer_in_a_thread(places[self.rank], getattr(self, work), *args)

    def rlsys_stage(self, weights: Mapping[str, Tensor] | SharedTensors) -> None:
        """Lay out `weights` beside those in use, if the model has a second set. Decoding may continue."""
        with self.rlsys_staging:  # the thread of a cancelled call may still run
            self.rlsys_staged = self.rlsys_mapped.read(weights) if isinstance(weights, SharedTensors) else weights
            if self.rlsys_shadow is not None:
                self.rlsys_shadow.fill(self.rlsys_staged)

    def rlsys_swap(self) -> None:
        """Switch to the staged weights. No step may be running.

        Without a second set, this copies them. On CUDA, where that is so, it never ran.
        """
        if self.rlsys_shadow is not None:
            self.rlsys_shadow.swap()
        else:
            self.reload_weights(weights_iterator=iter(self.rlsys_staged.items()))
        self.rlsys_staged = {}

    @torch.no_grad()
    def rlsys_read_back(self) -> None:
        """Read columns of the packed copies in use, for `rlsys_checksums`. No step may be running: all products of a
        process share memory for intermediate results."""
        if self.rlsys_shadow is not None:
            self.rlsys_shadow.read_back()

    def rlsys_checksums(self, dtypes: Mapping[str, str]) -> list[PartSum]:
        """Checksums of this shard's part of every tensor, cast to `dtypes`. Decoding may continue."""
        if self.rlsys_shadow is not None:
            parameters = self.rlsys_shadow.in_use()
        else:
            parameters = dict(self.model_runner.get_model().named_parameters(remove_duplicate=False))
        return part_sums(self.rlsys_layout, parameters, dtypes)

    def rlsys_adapter_checksums(self, folder: str, adapter_id: int, scale: float) -> list[PartSum]:
        """Checksums of this shard's part of the adapter in `folder`; see `adapter_sums`. Decoding may continue."""
        from workers.engines.vllm.vllm_lora import adapter_sums

        return list(adapter_sums(self.model_runner.lora_manager._adapter_manager, folder, adapter_id, scale))


@dataclass(frozen=True, slots=True)
class _LimitedLogits:
    """A model's method, whose logits of ids from `num_ids` on become -inf."""

    compute: Callable[..., Tensor | None]
    num_ids: int

    def __call__(self, *args: object, **kwargs: object) -> Tensor | None:
        logits_NV = self.compute(*args, **kwargs)
        if logits_NV is not None:  # a shard that samples nothing has none
            logits_NV[:, self.num_ids :] = -torch.inf
        return logits_NV


@dataclass(slots=True)
class Packed:
    """A packed copy of a matrix, and what was read back from it."""

    multiply: Callable[..., Tensor]
    columns_C: Tensor
    """Indices of the columns that are read."""
    read_CN: Tensor | None = None
    """Their content, once it is read."""

    @classmethod
    def of(cls, layer: nn.Module, turn: int) -> Packed:
        """Pack a layer's weights; other columns are read each `turn`."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        weight: Any = layer.weight
        packing: Any = nn.Module()
        packing.weight, packing.bias = weight, getattr(layer, "bias", None)
        dispatch_cpu_unquantized_gemm(packing, remove_weight=False)
        count, width = min(COLUMNS, weight.shape[1]), weight.shape[1]
        return cls(packing.cpu_linear, torch.arange(turn * count, (turn + 1) * count) % width)

    def read(self, weight: Tensor) -> None:
        """Read some columns back.

        A row with a single 1 times the matrix is a column, exactly: all other products are 0. If .37 % of a matrix of
        576 rows differ, as after one step at a learning rate of 1e-6, these columns miss that with a probability of
        4e-8.
        """
        units_CK = torch.zeros(len(self.columns_C), weight.shape[1], dtype=weight.dtype)
        units_CK[torch.arange(len(self.columns_C)), self.columns_C] = 1
        self.read_CN = self.multiply(units_CK, weight, None)

    def correct_columns(self, weight: Tensor) -> Tensor:
        """Return `weight` with the columns that were read. A zero has any sign."""
        assert self.read_CN is not None, "read comes first"
        own_NC, read_NC = weight[:, self.columns_C], self.read_CN.t()
        if torch.equal(own_NC, read_NC):
            return weight
        corrected = weight.clone()
        corrected[:, self.columns_C] = torch.where(own_NC == read_NC, own_NC, read_NC)
        return corrected


class Shadow:
    """A second set of a model's parameters and persistent buffers, and the packed copies."""

    def __init__(self, live: nn.Module, shadow: nn.Module, config: Any) -> None:  # noqa: ANN401  (vLLM's own type)
        self._live, self._shadow, self._config = live, shadow, config
        self._layers = [(name, module) for name, module in live.named_modules() if _is_packed(module)]
        self._staged: dict[str, Packed] = {}
        self._used: dict[str, Packed] = {}
        self._num_fills = 0

    @classmethod
    def beside(cls, worker: Any) -> Shadow:  # noqa: ANN401  (vLLM's own type)
        """Build the second set for a worker's model. It doubles the memory of the weights."""
        with torch.device("cpu"):
            shadow, config = build_twin(worker)
        return cls(worker.model_runner.get_model(), shadow, config)

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights into the second set, and pack them."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            self._shadow.load_weights(iter(weights.items()))  # pyrefly: ignore[not-callable]
            twins = dict(self._shadow.named_modules())
            self._staged = {name: Packed.of(twins[name], self._num_fills) for name, _ in self._layers}
        self._num_fills += 1

    def swap(self) -> None:
        """Exchange parameters and persistent buffers with those of the second set, and the packed copies with the new
        ones."""
        twins = {**dict(self._shadow.named_parameters()), **persistent_buffers(self._shadow)}
        for name, own in {**dict(self._live.named_parameters()), **persistent_buffers(self._live)}.items():
            if own.numel():
                own.data, twins[name].data = twins[name].data, own.data
        self._used, self._staged = self._staged, {}
        for name, layer in self._layers:
            layer.__dict__["cpu_linear"] = self._used[name].multiply

    def read_back(self) -> None:
        """Read columns of every packed copy in use."""
        in_use = self._parameters()
        for name, _ in self._layers:
            self._used[name].read(in_use[f"{name}.weight"])

    def _parameters(self) -> dict[str, Tensor]:
        """Parameters from which the packed copies in use were made, and those that have none."""
        twins = dict(self._shadow.named_parameters(remove_duplicate=False))
        every = self._live.named_parameters(remove_duplicate=False)
        return {name: (p if p.numel() else twins[name]).detach() for name, p in every}

    @torch.no_grad()
    def in_use(self) -> dict[str, Tensor]:
        """Parameters that the model computes with, after a `swap` and a `read_back`, and before the next `fill`.

        A packed matrix is the one that was packed, with the columns that were read back. A layer that has another
        packed copy than the last `swap` gave it counts as NaN.
        """
        in_use = self._parameters()
        for name, layer in self._layers:
            weight, packed = in_use[f"{name}.weight"], self._used[name]
            is_used = layer.cpu_linear is packed.multiply
            actual = packed.correct_columns(weight) if is_used else torch.full_like(weight, torch.nan)
            if actual is not weight:
                for other in [key for key, tensor in in_use.items() if tensor.data_ptr() == weight.data_ptr()]:
                    in_use[other] = actual  # also under the name of the embedding that it is tied to
        return in_use


def can_be_swapped(model: nn.Module) -> bool:
    """True if this is a model on the CPU with only plain linear layers and embeddings, which `Shadow` can pack.

    Raises `ModelError` for a model on the CPU with other layers (experts, convolutions, quantized layers). vLLM changes
    the layout of their weights while loading, so a reload would corrupt them.
    """
    if not any(map(_is_packed, model.modules())):
        return False
    for name, module in model.named_modules():
        if not is_plain(module) or getattr(module, "_cpu_unpacked_conv_weight", None) is not None:
            raise ModelError(
                f"vLLM on the CPU cannot change the weights of {name} ({type(module).__name__}); use "
                "rollout.engine=local, or a GPU"
            )
    return True


def _is_packed(module: nn.Module) -> bool:
    return hasattr(module, "cpu_linear") and not getattr(module, "_cpu_skip_gemm_dispatch", False)
