"""The key `train.lora`: low-rank adapters that are trained instead of the model's weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from rlsys.config.section import PathText, Section

LayerName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")]


class LoraSection(Section):
    """Low-rank adapters (arXiv:2106.09685) of linear layers: an adapted layer computes `W x + alpha / rank * B A x`.

    Only A and B are trained, published and saved; `W` is frozen. A is random from a fixed seed, and B starts at 0.
    There is no key for dropout. The sampler has none, and a forward with dropout would compare the sampler's logprobs
    with those of another network.
    """

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter, divided by `rank`."""
    targets: Annotated[list[LayerName], Field(min_length=1)] | None = None
    """Adapted layers, by the ends of their names: `[q_proj, v_proj]`. None: all linear layers except the output
    matrix."""
    path: PathText | None = None
    """Folder of an adapter as `peft` writes it, from which the policy's adapter starts. Its rank, alpha and layers must
    be those set here. None: the adapter starts without effect. The reference is always the model without an adapter."""
