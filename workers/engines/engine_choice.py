"""Choose an engine for a model path, and start it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from rlsys.errors import ConfigError, ModelError, WorkerError
from workers.engines.engine import EngineChoice, EngineName, EngineSpec
from workers.model.lora import add_adapter
from workers.model.model_loading import load_model, outline
from workers.model.model_support import check_context

if TYPE_CHECKING:
    from workers.engines.engine import Engine
    from workers.engines.vllm.vllm_server import VllmServerEngine

WORTH_PARAMETERS = 50_000_000
"""Smallest model for which vLLM is chosen on a CPU. Measured at two sizes (`docs/measurements.md`): `local` is faster
at 0.4 million parameters, vLLM at 135 million. The crossover is not measured."""


def vllm_device() -> str | None:
    """Device type of the installed vLLM, `cpu` or `cuda`, which may differ from the replica's; None without vLLM."""
    if find_spec("vllm") is None:
        return None
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else current_platform.device_type


def choose(
    spec: EngineSpec, device: torch.device, vllm_runs_on: Callable[[], str | None] = vllm_device
) -> EngineChoice:
    """Resolve the engine `auto` and give the reason; any other name is returned as it is.

    vLLM serves every GPU that it is installed for. On a CPU, its start-up pays off for models above `WORTH_PARAMETERS`.
    It can load several versions of an adapter, and only one of whole weights.
    """
    if spec.engine != "auto":
        return EngineChoice(spec.engine, "as configured")
    if spec.tensor_parallel > 1:
        return EngineChoice("vllm", "local has no shards")
    if spec.resident_versions > 1 and spec.lora is None:
        return EngineChoice("local", "vLLM keeps one version of whole weights at a time")
    if spec.records_routing and device.type == "cpu":
        return EngineChoice("local", "vLLM records no experts on a CPU")
    reason = f"the device is {device.type}"
    if device.type == "cpu":
        size = outline(spec.model_path).num_parameters()
        reason = f"{size / 1e6:.1f} million parameters on a CPU"
        if size < WORTH_PARAMETERS:
            return EngineChoice("local", f"{reason} are not worth vLLM's start-up")
    runs_on = vllm_runs_on()
    if runs_on != device.type:
        why = "vLLM is not installed" if runs_on is None else f"the vLLM installed runs on {runs_on}"
        return EngineChoice("local", f"{reason}, and {why}")
    return EngineChoice("vllm", reason)


async def _start_engine(engine: VllmServerEngine) -> None:
    """Look at the server; close the connection to one that does not fit."""
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise


async def start_engine(
    spec: EngineSpec,
    name: EngineName,
    *,
    stop_token_ids: frozenset[int],
    decode: Callable[[tuple[int, ...]], str] | None = None,
    device: torch.device,
    worker: str,
) -> Engine:
    """Start the engine `name` on `device`. Returns after its first step. `decode` gives the text of token ids; without
    it, requests must have no stop texts.

    Raises `ModelError` if it cannot run the model, `ConfigError` if it cannot load several versions.
    """
    engine: Engine
    if name == "vllm":
        if spec.resident_versions > 1 and spec.lora is None:
            raise ConfigError(
                f"rollout.weight_change: beside: {spec.resident_versions} versions side by side, and vLLM holds one of "
                "whole weights; train an adapter (train.lora), set rollout.engine=local, or a rollout.weight_change "
                "other than beside"
            )
        from workers.engines.vllm.vllm_engine import VllmEngine

        engine = VllmEngine(spec, stop_token_ids=stop_token_ids, decode=decode, device=device, name=worker)
    elif name == "vllm_server":
        from workers.engines.vllm.vllm_server import VllmServerEngine

        assert spec.server is not None
        engine = VllmServerEngine(spec, spec.server, stop_token_ids=stop_token_ids, decode=decode, name=worker)
        await _start_engine(engine)
    else:
        from workers.engines.local.local_engine import LocalEngine

        model = load_model(spec.model_path, getattr(torch, spec.dtype), device)
        check_context(model, spec.max_context, f"model {spec.model_path!r}")
        if spec.lora:
            add_adapter(model, spec.lora, spec.model_path)
        engine = LocalEngine(model, spec, stop_token_ids=stop_token_ids, decode=decode, name=worker)
    try:
        await engine.score((0, 0))
    except WorkerError as error:
        await engine.close()
        raise ModelError(
            f"{name} cannot run model {spec.model_path!r}: {error.detail}; choose another rollout.engine"
        ) from error
    return engine
