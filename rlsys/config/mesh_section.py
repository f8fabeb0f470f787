"""The key `train.mesh`: how the ranks that train a model split its batches, weights and positions."""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator

from rlsys.config.section import Section
from rlsys.util.number_ranges import Count


class MeshSection(Section):
    """Ranks of the actor, and of the critic: `replicate * shard * context * tensor` processes.

    Ranks that differ only in `context` or `tensor` train the same batches; they should be on one machine. Neighbours in
    rank order differ in `tensor` first, then in `context`, `shard`, `replicate`.
    """

    replicate: Count = 1
    """Copies of the sharded model, each with batches of its own (hybrid sharding). More ranks then talk within a copy
    for every layer, and between copies only for gradients."""
    shard: Count = 1
    """Ranks that split weights, gradients and optimizer state (FSDP2), each with batches of its own."""
    tensor: Count = 1
    """Ranks that split each attention and MLP layer by heads and columns, after the model's own plan."""
    context: Count = 1
    """Ranks that split the positions of every micro-batch; they split weights too, as `shard` does. Each must get whole
    attention heads."""
    expert: Count = 1
    """Ranks, of those of one copy, that split a model's experts whole and exchange tokens; a multiple of `tensor`."""

    @property
    def num_ranks(self) -> int:
        """Processes of the actor, and as many of the critic."""
        return self.replicate * self.num_shards * self.tensor

    @property
    def num_batches(self) -> int:
        """Ranks with batches of their own."""
        return self.replicate * self.shard

    @property
    def num_peers(self) -> int:
        """Ranks that train the same batches."""
        return self.context * self.tensor

    @property
    def num_shards(self) -> int:
        """Parts that FSDP2 splits a weight into."""
        return self.shard * self.context

    def __str__(self) -> str:
        sizes = {name: size for name, size in self.model_dump().items() if size > 1}
        return " x ".join(f"{name} {size}" for name, size in sizes.items()) or "one rank"

    @field_validator("expert")
    @classmethod
    def _divides_a_copy(cls, expert: int, info: ValidationInfo) -> int:
        sizes = [info.data.get(name, 1) for name in ("shard", "context", "tensor")]
        copy, tensor = sizes[0] * sizes[1] * sizes[2], sizes[2]
        if expert > 1 and (copy % expert or expert % tensor):
            raise ValueError(
                f"should divide the {copy} ranks of one copy (shard * context * tensor) and be a multiple of tensor "
                f"({tensor}); got {expert}"
            )
        return expert
