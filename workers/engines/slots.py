"""A key-value cache of fixed slots, one request each, behind the cache interface of transformers.

Every forward looks through a *window*: some neighbouring slots, the positions its tokens are written at, and how many keys
attention sees. Slots in use are kept together at the front, so a window is a view: attention copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class Window:
    """Where the current forward reads and writes."""

    slots: slice = field(default_factory=lambda: slice(0, 0))
    rows: Tensor = field(default_factory=lambda: torch.empty(0, 1, 1))
    """The slots as an index, (slots, 1, 1)."""
    positions: Tensor = field(default_factory=lambda: torch.empty(0, 1, 1))
    """Where each token goes, (slots or 1, 1, tokens)."""
    num_keys: int = 0


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, positions, head size); allocated when the first ones come in."""

    def __init__(self, num_slots: int, max_context: int, window: Window) -> None:
        super().__init__()
        self.num_slots, self.max_context, self.window = num_slots, max_context, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(states: Tensor) -> Tensor:
            return states.new_zeros(self.num_slots, states.shape[1], self.max_context, states.shape[3])

        self.keys, self.values = room(key_states), room(value_states)
        self.heads = torch.arange(key_states.shape[1], device=key_states.device)[:, None]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write each row at its own positions; returns views of what the window sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        window = self.window
        at = (window.rows, self.heads, window.positions)
        self.keys[at], self.values[at] = key_states, value_states
        return self.keys[window.slots, :, : window.num_keys], self.values[window.slots, :, : window.num_keys]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.num_keys, 0

    def get_seq_length(self) -> int:
        return self.window.num_keys

    def get_max_length(self) -> int:
        return self.max_context


class SlotCache(Cache):
    """The layers of one model, sharing a window."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.window = Window()
        layer = partial(SlotLayer, num_slots, max_context, self.window)
        super().__init__(layer_class_to_replicate=layer)  # pyright: ignore[reportArgumentType]  (any maker of layers will do)

    def look(self, first: int, num_slots: int, positions: Tensor, num_keys: int) -> None:
        """Point the window at `num_slots` slots from `first`; `positions` is (num_slots or 1, tokens)."""
        window = self.window
        window.slots = slice(first, first + num_slots)
        window.rows = torch.arange(first, first + num_slots, device=positions.device)[:, None, None]
        window.positions, window.num_keys = positions[:, None], num_keys

    def copy(self, source: Tensor, target: Tensor, num_keys: int) -> None:
        """Copy the first `num_keys` entries of the source slots over those of the target slots; both are indices."""
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys[target, :, :num_keys] = layer.keys[source, :, :num_keys]
            layer.values[target, :, :num_keys] = layer.values[source, :, :num_keys]
