"""Loading weights into vLLM, with its tied embeddings, shards, dtypes, and kernels that keep packed copies.

`WeightLoading` becomes part of every vLLM worker, one per tensor-parallel shard, in this process or another.

On the CPU, vLLM multiplies with packed copies of the weights, made once after loading. So a reload must pack again,
including an output matrix that is tied to the embedding. There the tensor is shared but the packed copy is not, and
vLLM's reload silently leaves it stale. Packing takes longer than copying, so it runs during decoding: `stage` fills and
packs a second set of parameters, and `swap` exchanges pointers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlsys.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


class WeightLoading:
    """Extension of a vLLM worker: loads weights by their Hugging Face names.

    Each shard keeps its part of every tensor, cast to its compute dtype. `weights` is a mapping, or the path of a
    safetensors file if the worker is another process.
    """

    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def rlsys_prepare(self) -> None:
        """Allocate the second set of parameters, once, before weights are staged. No step may be running."""
        if not hasattr(self, "rlsys_shadow"):
            self.rlsys_shadow = Shadow.beside(self) if can_be_swapped(self.model_runner.get_model()) else None

    def rlsys_stage(self, weights: Mapping[str, Tensor] | str) -> None:
        """Lay out `weights` beside those in use, if the model has a second set. Decoding may continue."""
        if isinstance(weights, str):
            from safetensors.torch import load_file

            weights = load_file(weights)
        self.rlsys_staged = weights
        if self.rlsys_shadow is not None:
            self.rlsys_shadow.fill(self.rlsys_staged)

    def rlsys_swap(self) -> None:
        """Switch to the staged weights. No step may be running."""
        if self.rlsys_shadow is not None:
            self.rlsys_shadow.swap()
        else:
            self.reload_weights(weights_iterator=iter(self.rlsys_staged.items()))
        self.rlsys_staged = {}


class Shadow:
    """A second set of a model's parameters, and their packed copies."""

    def __init__(self, live: nn.Module, shadow: nn.Module, config: Any) -> None:  # noqa: ANN401  (vLLM's own type)
        self._live, self._shadow, self._config = live, shadow, config
        twins = dict(shadow.named_modules())
        self._packed_pairs = [(m, twins[name]) for name, m in live.named_modules() if _is_packed(m)]
        self._packed: list[tuple[nn.Module, Any]] = []

    @classmethod
    def beside(cls, worker: Any) -> Shadow:  # noqa: ANN401  (vLLM's own type)
        """Build the second set for a worker's model. It doubles the memory of the weights."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(worker.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}  # layers register there by name, once per model
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            build: Any = initialize_model  # its decorator hides its arguments
            shadow = build(vllm_config=config, model_config=config.model_config)
        return cls(worker.model_runner.get_model(), shadow, config)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights into the second set, and pack them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        with set_current_vllm_config(self._config), torch.no_grad():
            self._shadow.load_weights(iter(weights.items()))  # pyrefly: ignore[not-callable]
            self._packed = []
            for live, twin in self._packed_pairs:
                packing: Any = SimpleNamespace(weight=twin.weight, bias=getattr(twin, "bias", None))
                dispatch_cpu_unquantized_gemm(packing, remove_weight=False)
                self._packed.append((live, packing.cpu_linear))

    def swap(self) -> None:
        """Exchange the parameters with those of the second set, and the packed copies with the new ones."""
        twins = dict(self._shadow.named_parameters())
        for name, parameter in self._live.named_parameters():
            if parameter.numel():
                parameter.data, twins[name].data = twins[name].data, parameter.data
        for live, packed in self._packed:
            live.cpu_linear = packed
        self._packed = []


def can_be_swapped(model: nn.Module) -> bool:
    """True if this is a model on the CPU with only plain linear layers and embeddings, which `Shadow` can pack.

    Raises `ModelError` for a model on the CPU with other layers (experts, convolutions, quantized layers). vLLM changes
    the layout of their weights while loading, so a reload would corrupt them.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not any(map(_is_packed, model.modules())):
        return False
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        is_plain = method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if not is_plain or getattr(module, "_cpu_unpacked_conv_weight", None) is not None:
            raise ModelError(
                f"vLLM on the CPU cannot change the weights of {name} ({type(module).__name__}); use "
                "rollout.engine=local, or a GPU"
            )
    return True


def _is_packed(module: nn.Module) -> bool:
    return hasattr(module, "cpu_linear") and not getattr(module, "_cpu_skip_gemm_dispatch", False)
