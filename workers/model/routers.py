"""Choices of the routers in a model with experts: recorded where an engine samples, replayed where a trainer trains.

Engine and trainer round differently, and a router whose two best experts are nearly equal then chooses differently. So
the trainer can reuse the engine's choices (rollout routing replay, arXiv:2510.11370): a router still computes its own
probabilities, with gradient, and takes those of the experts that were chosen.

Routers and their probabilities are those of the Transformers library. Whatever a router computes, it selects with one
`torch.topk`, and only the result of that is recorded or replaced.

Shape suffixes: `P` positions of one rank, `L` layers with experts, in order, `C` experts chosen for a position, `W`
bytes of all choices for a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlsys.batch.samples import NOT_RECORDED
from rlsys.batch.tensors import MicroBatch
from rlsys.errors import ModelError, TrainingError
from workers.model.decoder_layers import decoder_layers
from workers.model.row_attention import AttentionRow

MAX_EXPERTS = 65_535
"""Experts of a layer that two bytes can number, as `NOT_RECORDED` is no expert."""


class Routers:
    """The routers of a model, one for each layer with experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `ModelError` if the model has no experts, or routers that do not select as described above."""
        text, kinds, name = model.config.get_text_config(), _router_kinds(model), type(model).__name__
        layers = [[m for m in layer.modules() if type(m) in kinds] for layer in decoder_layers(model)]
        self.by_layer = {place: found[0] for place, found in enumerate(layers) if found}
        """Routers by the number of their decoder layer, in order."""
        if not self.by_layer:
            raise ModelError(f"train.routing_replay: {name} has no experts that are chosen by routers; leave it out")
        self.num_chosen: int = getattr(text, "num_experts_per_tok", 0)
        num_experts = len(next(self.routers[0].parameters()))
        self._dtype = torch.uint8 if num_experts <= NOT_RECORDED else torch.uint16
        selected = {_num_selected(router) for router in self.routers}
        if num_experts > MAX_EXPERTS or selected != {self.num_chosen} or max(map(len, layers)) > 1:
            raise ModelError(
                f"train.routing_replay: {name} has routers of type {type(self.routers[0]).__name__}, which do not "
                "select all experts of a position at once; leave it out"
            )

    @property
    def routers(self) -> list[nn.Module]:
        return [*self.by_layer.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all choices for one position."""
        return len(self.by_layer) * self.num_chosen * self._dtype.itemsize

    def pack(self, experts_PLC: Tensor) -> Tensor:
        """Return choices as bytes, `(P, W)`."""
        return experts_PLC.to(self._dtype).flatten(1).contiguous().view(torch.uint8)

    def unpack(self, bytes_PW: Tensor, place: int) -> Tensor:
        """Return choices of one of the layers as indices, `(P, C)`; -1 where nothing is recorded. Raises
        `TrainingError` for bytes of another model."""
        if bytes_PW.shape[1] != self.num_bytes:
            raise TrainingError(
                f"the experts recorded for a position take {bytes_PW.shape[1]} bytes, and those that the trainer's "
                f"model chooses {self.num_bytes}: give rollouts and actor the same model.path"
            )
        own_PW = bytes_PW.chunk(len(self.by_layer), 1)[place]
        experts_PC = own_PW.contiguous().view(self._dtype).long()
        return experts_PC.masked_fill((own_PW == NOT_RECORDED).all(1, keepdim=True), -1)


class RoutingRecorder:
    """Records what the routers of an engine's model choose."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `ModelError` as `Routers`."""
        self._routers = Routers(model)
        self._newest: list[Tensor] = [torch.empty(0)] * len(self._routers.routers)
        for place, router in enumerate(self._routers.routers):
            router.forward = partial(self._record, router.forward, place)

    @property
    def num_bytes(self) -> int:
        """Bytes of all choices for one position."""
        return self._routers.num_bytes

    def newest(self) -> Tensor:
        """Return the choices of the last forward, for its positions in order, as bytes `(P, W)`."""
        return self._routers.pack(torch.stack(self._newest, 1))

    def _record(self, forward: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _TopK() as selection:
            result = forward(*args, **kwargs)
        self._newest[place] = selection.own
        return result


class RoutingReplay:
    """Lets the routers of a trainer's model choose what a row has recorded, and counts where they would not have.

    A row without records, and a position without, is routed as ever.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        """Must precede activation checkpointing, whose second forward needs the row too. Raises `ModelError` as
        `Routers`."""
        self._routers = Routers(model)
        self._recorded_PW: Tensor | None = None
        """Records of the row that the running layer computes."""
        self._replayed_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Recorded choices, and those of them that differ from the router's own."""
        self._trained_2 = torch.zeros(2, dtype=torch.float64, device=device)
        """Positions that were trained on, and those of them that are recorded."""
        layers = decoder_layers(model)
        for place, (number, router) in enumerate(self._routers.by_layer.items()):
            layers[number].forward = partial(self._run_layer, layers[number].forward)
            router.forward = partial(self._route, router.forward, place)

    def count(self, batch: MicroBatch) -> None:
        """Count the positions of a micro-batch that is trained on."""
        routing_RW = batch.routing_RW
        self._trained_2[0] += len(batch.tokens_R)
        if routing_RW is not None:
            self._trained_2[1] += (routing_RW != NOT_RECORDED).any(1).sum()

    def reduce_over(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return `sampler/experts_*` over all ranks since the last call; no share of nothing. Collective."""
        sums = sum_over_ranks(torch.cat([self._trained_2, self._replayed_2])).tolist()
        self._trained_2.zero_()
        self._replayed_2.zero_()
        parts = {"recorded": (sums[1], sums[0]), "differ": (sums[3], sums[2])}
        return {f"sampler/experts_{name}": part / whole for name, (part, whole) in parts.items() if whole}

    def _run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        row: AttentionRow | None = kwargs.get("row")
        self._recorded_PW = None if row is None else row.routing_PW
        return forward(*args, **kwargs)

    def _route(self, forward: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._recorded_PW is None:
            return forward(*args, **kwargs)
        chosen_PC = self._routers.unpack(self._recorded_PW, place)
        with _TopK(chosen_PC) as selection:
            result = forward(*args, **kwargs)
        is_known_PC = chosen_PC >= 0
        is_other_PC = is_known_PC & (chosen_PC[:, :, None] != selection.own[:, None]).all(-1)
        self._replayed_2 += torch.stack([is_known_PC.sum(), is_other_PC.sum()])
        return result


class _TopK(TorchFunctionMode):
    """Sees what `torch.topk` chooses, and replaces it where something else is `chosen`, which is -1 elsewhere."""

    own: Tensor
    """Indices that the function has found."""

    def __init__(self, chosen_PC: Tensor | None = None) -> None:
        super().__init__()
        self.num_calls = 0
        self._chosen_PC = chosen_PC

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        self.num_calls += 1
        self.own = result.indices
        if self._chosen_PC is None:
            return result
        indices = torch.where(self._chosen_PC < 0, self.own, self._chosen_PC)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def _router_kinds(model: PreTrainedModel) -> set[type]:
    """Return the classes of the model's routers, as its author declares them."""
    recorded: object = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    recorders = recorded if isinstance(recorded, list | tuple) else [recorded]
    return {kind for recorder in recorders if (kind := getattr(recorder, "target_class", None)) is not None}


def _num_selected(router: nn.Module) -> int:
    """Return the number of experts that a router selects for a position with one `torch.topk`; tried without values. 0
    if it selects otherwise, or needs more than states."""
    (weight, *_) = router.parameters()
    states = torch.empty(2, weight.shape[-1], device="meta", dtype=weight.dtype)
    tensors = {**dict(router.named_parameters()), **dict(router.named_buffers())}
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with torch.no_grad(), _TopK() as selection:
        try:
            torch.func.functional_call(router, meta, states)
        except (TypeError, RuntimeError):
            return 0
    return selection.own.shape[-1] if selection.num_calls == 1 else 0
