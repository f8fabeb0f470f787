"""Engines from a model path."""

from __future__ import annotations

from typing import Literal

import torch

from workers.engines.local import LocalEngine
from workers.train.model import load_model


def load_local(
    model_path: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    num_slots: int,
    max_context: int,
    stop_token_ids: frozenset[int],
    name: str,
    device: torch.device,
) -> LocalEngine:
    """A local engine on `device`. Raises `ModelError`."""
    model = load_model(model_path, getattr(torch, dtype), device)
    return LocalEngine(model, num_slots=num_slots, max_context=max_context, stop_token_ids=stop_token_ids, name=name)
