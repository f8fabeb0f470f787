"""A key-value cache of fixed slots, one request each, behind the cache interface of transformers; attention over it.

Every forward uses a *window*: neighbouring slots, the positions that its tokens are written at, and the number of keys
that attention sees. Used slots are contiguous from the front, so a window is a view: attention copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from rlsys.errors import ModelError
from rlsys.types import PolicyVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SlotWindow:
    """Slots and positions that the current forward reads and writes; see `SlotCache.look`."""

    slots: slice
    """One per row of the forward, or one for all."""
    rows: Tensor
    """The slots as an index, (slots, 1, 1)."""
    positions: Tensor
    """Position of each token, (rows or 1, 1, tokens)."""
    num_keys = 0


@dataclass(frozen=True, slots=True)
class KeptCache:
    """Keys and values of one request, for transfer to another slot, possibly in another process."""

    version: PolicyVersion
    """Version of the request's last token."""
    token_ids: tuple[int, ...]
    """Tokens of these keys and values: the prompt, and the sampled tokens except the newest."""
    tensors: tuple[Tensor, ...]
    """Keys, then values, of each layer, (heads, tokens, head size), on the host."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, positions, head size); allocated at the first update."""

    def __init__(self, num_slots: int, max_context: int, window: SlotWindow) -> None:
        super().__init__()
        self.num_slots, self.max_context, self.window = num_slots, max_context, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(states: Tensor) -> Tensor:
            return states.new_zeros(self.num_slots, states.shape[1], self.max_context, states.shape[3])

        self.keys, self.values = room(key_states), room(value_states)
        self.heads = torch.arange(key_states.shape[1], device=key_states.device)[:, None]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write each row at its positions. Returns views of the window."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, window = self.keys, self.values, self.window
        assert keys is not None
        assert values is not None
        at = (window.rows, self.heads, window.positions)
        keys[at], values[at] = key_states, value_states
        seen = (window.slots, slice(None), slice(window.num_keys))
        rows = (len(key_states), -1, -1, -1)
        return keys[seen].expand(rows), values[seen].expand(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.num_keys, 0

    def get_seq_length(self) -> int:
        return self.window.num_keys

    def get_max_length(self) -> int:
        return self.max_context


class SlotCache(Cache):
    """The layers of one model, with a shared window."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.window = SlotWindow()
        layer: Any = partial(SlotLayer, num_slots, max_context, self.window)
        super().__init__(layer_class_to_replicate=layer)  # any maker of layers will do

    def look(self, first: int, num_slots: int, positions: Tensor, num_keys: int) -> None:
        """Point the window at `num_slots` slots from `first`; `positions` is (num_slots or 1, tokens).

        With one slot, `positions` may also be (rows, tokens): all rows of the forward then write and see that slot.
        """
        window = self.window
        window.slots = slice(first, first + num_slots)
        window.rows = torch.arange(first, first + num_slots, device=positions.device)[:, None, None]
        window.positions, window.num_keys = positions[:, None], num_keys

    def copy(self, source: Tensor, target: Tensor, num_keys: int) -> None:
        """Copy the first `num_keys` entries of the source slots over those of the target slots; both are indices."""
        for tensor in self._tensors():
            tensor[target, :, :num_keys] = tensor[source, :, :num_keys]

    def keep(self, slot: int, version: PolicyVersion, token_ids: tuple[int, ...]) -> KeptCache:
        """Copy the keys and values of `token_ids` out of a slot, to the host."""
        own = [tensor[slot, :, : len(token_ids)] for tensor in self._tensors()]
        return KeptCache(version, token_ids, tuple(tensor.to("cpu", copy=True).contiguous() for tensor in own))

    def can_take(self, kept: KeptCache) -> bool:
        """True if these keys and values match the shape and dtype of this cache."""
        own = [(tensor[0, :, : len(kept.token_ids)].shape, tensor.dtype) for tensor in self._tensors()]
        return own == [(tensor.shape, tensor.dtype) for tensor in kept.tensors]

    def take(self, slot: int, kept: KeptCache) -> None:
        """Put a copy into a slot; requires `can_take`."""
        for tensor, states in zip(self._tensors(), kept.tensors, strict=True):
            tensor[slot, :, : states.shape[1]] = states

    def _tensors(self) -> list[Tensor]:
        """Keys, then values, of each layer that has been updated."""
        layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        return [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]


def check_cacheable(model: PreTrainedModel) -> None:
    """Raise `ModelError` if a layer caches something other than all keys and values (a sliding window, a state)."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ModelError(
            f"{type(model).__name__} has layers cached as {names}; the local engine serves full attention only: "
            "choose another model or engine"
        )


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention whose query heads share key heads inside the CPU kernel; transformers copies the keys per head."""
    is_grouped = query.shape[1] != key.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=is_grouped
    )
    return output.transpose(1, 2).contiguous(), None


GROUPED_ATTENTION = "rlsys_grouped"
AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
