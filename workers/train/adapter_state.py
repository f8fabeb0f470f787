"""Facts about an adapter in a checkpoint, and what a resume checks of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.config.lora_section import LoraSection
from rlsys.errors import CheckpointError
from rlsys.util.any_paths import AnyPath
from workers.train.state_files import load_state, saved_shapes

PART = "lora"
"""Part of a checkpoint with the facts of the adapter."""


def facts_of(lora: LoraSection, base: str) -> dict[str, Tensor]:
    """Facts about an adapter, as tensors for a checkpoint: its scale, and the hash of its base."""
    return {
        "alpha": torch.tensor(lora.alpha, dtype=torch.float64),
        "base": torch.frombuffer(bytearray(bytes.fromhex(base)), dtype=torch.uint8),
    }


def check_saved(
    folder: AnyPath, live: Mapping[str, Tensor], facts: Mapping[str, Tensor] | None, *, num_ranks: int
) -> None:
    """Raise `CheckpointError` unless a checkpoint fits the trained parameters `live`.

    `facts` are those of the adapter, None without an adapter. Collective.
    """
    saved, shapes = saved_shapes(folder, PART), saved_shapes(folder, "model")
    remedy = "resume with the settings that it was saved with, or start a new run"
    if facts is None:
        if saved:
            raise CheckpointError(f"{folder} was saved with train.lora, and this run has no adapter: {remedy}")
        return
    if not saved:
        raise CheckpointError(f"{folder} was saved without train.lora, and this run trains an adapter: {remedy}")
    wanted = {name: tuple(tensor.shape) for name, tensor in live.items()}
    if other := sorted(shapes.keys() ^ wanted.keys()):
        raise CheckpointError(
            f"{folder} was saved with other train.lora.targets; they differ in {len(other)} tensors, as {other[0]}: "
            f"{remedy}"
        )
    if other := [name for name in sorted(wanted) if shapes[name] != wanted[name]]:
        raise CheckpointError(
            f"{folder} was saved with another train.lora.rank: {other[0]} has shape {shapes[other[0]]} there and "
            f"{wanted[other[0]]} here; {remedy}"
        )
    found = {name: torch.empty_like(tensor) for name, tensor in facts.items()}
    load_state({PART: found}, folder, num_ranks=num_ranks)
    if found["alpha"] != facts["alpha"]:
        raise CheckpointError(
            f"{folder} was saved with train.lora.alpha {found['alpha']:g}, and this run has {facts['alpha']:g}: "
            f"{remedy}"
        )
    if not torch.equal(found["base"], facts["base"]):
        there, here = (bytes(each["base"].tolist()).hex() for each in (found, facts))
        raise CheckpointError(
            f"{folder} contains an adapter of the base {there}, and the weights of this run's model are {here}: "
            f"{remedy}"
        )
