"""Tensor and expert parallelism: layers split over ranks by the plan that comes with a model.

The Transformers library knows each family's plan (`base_model_tp_plan`, `base_model_ep_plan`) and applies it.
Embeddings and the output matrix stay whole on each of the ranks, because tied ones are one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism

from rlsys.config.mesh_section import MeshSection
from rlsys.errors import ModelError

_OF_HEADS = "replicated_with_grad_allreduce"
"""Style of a weight that is whole on each rank and computes on the rank's heads, as a norm of queries."""
_STYLES = {
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep", _OF_HEADS,
}  # fmt: skip
"""Supported styles of a plan. Others are of experts, or of layers whose gradients were never compared with those
of one rank."""


def check_splits(model: PreTrainedModel, mesh: MeshSection) -> None:
    """Raise `ModelError` if this mesh cannot split this model, which may be on the meta device."""
    if mesh.tensor == mesh.context == mesh.expert == 1:
        return
    text, name = model.config.get_text_config(), type(model).__name__
    num_heads, num_kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    problems: list[str] = []
    if mesh.tensor > 1:
        if not _tensor_plan(model):
            problems.append(f"tensor: {mesh.tensor} needs a tensor-parallel plan, and {name} has none")
        if unknown := sorted({*_tensor_plan(model).values()} - _STYLES):
            problems.append(f"tensor: {mesh.tensor} is not supported with the plan of {name}: {', '.join(unknown)}")
        for what, count in (("attention heads", num_heads), ("key-value heads", num_kv)):
            if count % mesh.tensor:
                problems.append(f"tensor: {mesh.tensor} does not divide the {count} {what} of {name}")
        if not experts_of(model) and getattr(text, "intermediate_size", 0) % mesh.tensor:
            problems.append(
                f"tensor: {mesh.tensor} does not divide the {text.intermediate_size} columns of the MLPs of {name}"
            )
        if experts_of(model) and mesh.expert == 1:
            problems.append(f"tensor: {mesh.tensor} needs train.mesh.expert, because {name} has experts")
    if mesh.context > 1 and not problems:
        own, own_kv = num_heads // mesh.tensor, num_kv // mesh.tensor
        if own % mesh.context or (own_kv % mesh.context and mesh.context % own_kv):
            rest = f" that tensor: {mesh.tensor} leaves to a rank" if mesh.tensor > 1 else ""
            problems.append(
                f"context: {mesh.context} does not divide the {own} attention heads and {own_kv} key-value heads of "
                f"{name}{rest}"
            )
    if mesh.expert > 1:
        num_experts = _num_experts(model)
        if not num_experts or not model.ep_plan:
            problems.append(f"expert: {mesh.expert} needs a plan for experts, and {name} has none")
        elif num_experts % mesh.expert:
            problems.append(f"expert: {mesh.expert} does not divide the {num_experts} experts of {name}")
    if problems:
        raise ModelError("train.mesh does not fit the model: " + "; ".join(problems))


def split_tensors(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split attention and MLP layers over the ranks of a one-dimensional mesh; parameters become `DTensor`s."""
    plan = _tensor_plan(model)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _OF_HEADS})
    for name, module in model.named_modules():
        if plan.get(_layer_pattern(name)) == _OF_HEADS:
            module.forward = _summing(module, mesh.get_group())


def split_experts(model: PreTrainedModel, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None) -> None:
    """Give each rank of a one-dimensional mesh some experts whole; tokens travel to them.

    Ranks of `tensor_mesh` have the same tokens, and each sends some of them.
    """
    apply_expert_parallelism(model, mesh, cast("DeviceMesh", tensor_mesh), model.ep_plan)


def experts_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the experts of a layer."""
    models = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    plan = models[0].ep_plan if models else {}
    names = {name for name, style in (plan or {}).items() if style == "ep_dispatch_experts"}
    return [module for name, module in models[0].named_modules() if _layer_pattern(name) in names] if names else []


def _num_experts(model: PreTrainedModel) -> int:
    experts = experts_of(model)
    return len(next(experts[0].parameters())) if experts else 0


def _tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's plan without the output matrix and without experts."""
    plan, experts = model.tp_plan or {}, [*(model.ep_plan or {})]
    base = model.base_model_prefix + "."
    inside = {name: style for name, style in plan.items() if name.removeprefix(base).startswith("layers.")}
    return {
        name: style
        for name, style in inside.items()
        if not any(name == expert or name.startswith(f"{expert}.") for expert in experts)
    }


def _layer_pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _summing(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Return a forward of the module in whose backward the gradients of its weights are summed over ranks.

    The library uses a hook of the module instead, which may run before the gradient of a weight is complete.
    """
    plain = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        weights = module._parameters
        module._parameters = {n: p if p is None else _SumOfGradients.apply(p, group) for n, p in weights.items()}
        try:
            return plain(module, *args, **kwargs)
        finally:
            module._parameters = weights

    return forward


class _SumOfGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
