"""A key-value cache of fixed slots, one request each, behind the cache interface of transformers; attention over it.

Every forward uses a *window*: neighbouring slots, the positions that its tokens are written at, and the number of keys
that attention sees. Used slots are contiguous from the front, so a window is a view: attention copies nothing. Layers
with a sliding window keep all keys as well, and mask those that are too old.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlsys.types import PolicyVersion
from workers.model.attention_kernels import dense_attention


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
    """Keys and values of one request, for prompts that go on from it."""

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

    def free(self) -> None:
        """Give the memory away; keys and values keep their shapes, and must not be used."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (t.new_zeros(()).expand(t.shape) for t in (self.keys, self.values))

    def allocate(self) -> None:
        """Take it back, filled with zeros."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (t.new_zeros(t.shape) for t in (self.keys, self.values))

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

    def take(self, slot: int, kept: KeptCache) -> None:
        """Put a copy into a slot."""
        for tensor, states in zip(self._tensors(), kept.tensors, strict=True):
            tensor[slot, :, : states.shape[1]] = states

    def free(self) -> None:
        """Give the memory of all slots away."""
        for layer in self._layers():
            layer.free()

    def allocate(self) -> None:
        """Take it back, filled with zeros."""
        for layer in self._layers():
            layer.allocate()

    def _layers(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    def _tensors(self) -> list[Tensor]:
        """Keys, then values, of each layer that has been updated."""
        return [tensor for layer in self._layers() for tensor in (layer.keys, layer.values) if tensor is not None]


class SlotMasks:
    """Masks of one forward over slots: a token sees the keys up to its position, or the newest of them."""

    def __init__(self, positions_BL: Tensor, num_keys: int, dtype: torch.dtype) -> None:
        """`positions_BL` are those of the forward's tokens; key i of a slot is at position i.

        A free slot may have a later position than all keys. It sees some too: of none, attention would be NaN.
        """
        keys_K = torch.arange(num_keys, device=positions_BL.device)
        self._distance_BLK, self._dtype = positions_BL[..., None].clamp(max=num_keys - 1) - keys_K, dtype
        self._masks: dict[int | None, Tensor] = {}

    def of(self, window: int | None) -> Tensor:
        """Return the mask of a layer, (rows or 1, 1, tokens, keys): 0 where a key is seen, else minus infinity."""
        if window not in self._masks:
            is_seen_BLK = self._distance_BLK >= 0
            if window is not None:
                is_seen_BLK &= self._distance_BLK < window
            self._masks[window] = torch.where(is_seen_BLK, 0.0, -torch.inf).to(self._dtype)[:, None]
        return self._masks[window]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_masks: SlotMasks,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of a model's layer to the window of a `SlotCache`; `s_aux` are sinks, one for each head.

    On the CPU, query heads share key heads inside the kernel; transformers copies the keys per head. Keys of dense
    attention are laid out alike for every window: a product of matrices chooses its kernel, and with it the order of
    its sums, by strides too, and those of one slot seen by many rows are 0.
    """
    mask = slot_masks.of(sliding_window or None)
    if softcap is not None or s_aux is not None:
        key, value = key.contiguous(), value.contiguous()
        return dense_attention(query, key, value, mask, scale=scaling, softcap=softcap, sinks_H=s_aux), None
    if query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    is_grouped = query.shape[1] != key.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
    )
    return output.transpose(1, 2).contiguous(), None


SLOT_ATTENTION = "rlsys_slots"
"""Name of this attention in the configuration of a model."""
AttentionInterface.register(SLOT_ATTENTION, slot_attention)
