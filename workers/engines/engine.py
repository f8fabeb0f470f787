"""Contract of an inference engine: token ids in; token ids, logprobs and policy versions out.

One contract suite (`tests/contract/test_engine*.py`) runs against every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from rlsys.config.lora_section import LoraSection
from rlsys.errors import WeightsMismatch
from rlsys.routing.requests import Completion, Request
from rlsys.types import EngineStats, PolicyVersion
from rlsys.weight_sync.links import BYTES_PER_S, TRANSFER_S, deadline_s
from rlsys.weight_sync.manifest import TensorSpec
from workers.transport.buckets import specs_in

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from transformers import PreTrainedModel

    from rlsys.config import Config

EngineName: TypeAlias = Literal["local", "vllm", "vllm_server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A vLLM server that runs already."""

    url: str
    """Without a `/` at its end."""
    api_key_env: str | None = None
    """Environment variable with its key."""
    folder: str = "/dev/shm"
    """Folder for new weights, which this machine and the server share."""
    takes_weights: bool = True
    """False: it keeps those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Arguments of an engine; the keys of `rollout` in the configuration."""

    engine: Literal["auto", "local", "vllm", "vllm_server"] = "auto"
    server: ServerSpec | None = None
    """The server of `vllm_server`."""
    model_path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int
    """Maximum requests that run at a time; others wait."""
    max_context: int
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Keep or recompute the cache of running requests when new weights replace the old; no effect with several
    `resident_versions`."""
    tensor_parallel: int = 1
    step_s: float = 120.0
    """Deadline of one step."""
    load_s: float = 600.0
    """Deadline of loading weights."""
    resident_versions: int = 1
    """Maximum sets of weights in memory. With several, requests end on the version they began with; with 1, new weights
    replace the old."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM."""
    records_routing: bool = False
    """Return which experts were chosen, see `Turn.routing`. Not supported by vLLM on a CPU."""
    keeps_replies: bool = True
    """Keep keys and values of replies for prompts that go on from them. vLLM always does."""
    shares_device: bool = False
    """True if its device is a GPU that other workers use in turns: then its memory is given away in `Engine.sleep`."""
    lora: LoraSection | None = None
    """The adapter that `load` takes, on the frozen model of `model_path`; None: `load` takes all weights."""

    @classmethod
    def of(cls, config: Config) -> EngineSpec:
        """An engine for the model of a configuration, with one set of weights."""
        rollout = config.rollout
        return cls(
            engine=rollout.engine_name,
            model_path=config.model.path,
            dtype=config.dtype,
            slots=config.slots,
            max_context=config.max_context_tokens,
            kv_cache="recompute" if rollout.recomputes else "keep",
            tensor_parallel=rollout.tensor_parallel,
            load_s=deadline_s(TRANSFER_S, weight_bytes(config.model.path), BYTES_PER_S),
            vllm_args=rollout.vllm_args,
        )


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine of a replica, and the reason for it."""

    engine: EngineName
    reason: str


class Engine(Protocol):
    """A sampler whose weights can change between any two tokens.

    `pause`, `load` and `resume` are called only in the order that `rlsys.weight_sync.sync.change_weights` defines.
    """

    @property
    def version(self) -> PolicyVersion:
        """The newest loaded version: new requests are sampled from it."""

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The loaded versions, oldest first; several only with several `resident_versions`."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Cancelling the call aborts the request.

        A request with `begun` tokens continues under the version of the last one if it is loaded, else under the
        newest. Raises `TaskTooLong` if prompt and new tokens exceed the context; `ValueError` if the request is invalid
        or its `begun` has ended; `WorkerDied` after `close` or if the engine broke.
        """

    def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far, with finish `abort`. Unknown ids are ignored."""

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        """Report new tokens of the running requests among `known`, those after their first `known[id]`, by request id;
        finish None. Their `begun` tokens count too.

        A consistent snapshot between two steps. Excludes requests that wait, or have sampled nothing here or nothing
        more.
        """

    async def pause(self) -> None:
        """Return once no decoding step is running; none starts until `resume`. Requests and their cache are kept."""

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """Prepare `load` while decoding continues. Optional.

        With several `resident_versions`, waits for room for one more set; unblocked by the requests of an older version
        ending, so never call it while paused. That wait has no deadline: requests may be long. Raises `WeightsMismatch`
        as `load` does.
        """

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Load all weights, or those of the adapter, while paused. `checksums` says what the engine then computes with.

        A tied output layer may be left out. Tensors are widened to the engine's dtype. With one resident version, they
        replace the old weights; running requests keep their cached keys and values or recompute them, as configured.
        With several `resident_versions`, the old sets stay: running requests end on their version, and a version
        without requests is evicted. No request reuses keys and values of another version from a prefix cache. Raises
        `WeightsMismatch` naming every missing, unknown, misshapen or narrowed tensor, and `WorkerError` if there is no
        room because the set was not staged. In both cases nothing changes.
        """

    async def checksums(self) -> Mapping[TensorSpec, int]:
        """Checksum of every tensor of the newest weights, under the spec that it was published with.

        They are computed from what the engine computes with, in its own layout, and cast back to the published dtype,
        which is exact. Each shard sums its part; what several shards have counts once. An engine leaves a tensor out if
        it keeps that tensor in another form. Empty before the first `load`.

        Decoding continues. Do not call it between `stage` and `load`. Raises `WorkerDied` as `generate` does.
        """

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of `token_ids[1:]`, each given those before it, at temperature 1 under the newest weights.

        Do not call it while paused: it may need a step.
        """

    async def resume(self) -> None:
        """Continue decoding."""

    async def sleep(self) -> None:
        """Decode nothing, and free the memory of the device, until `wake`. Weights, and requests with all their tokens,
        are kept elsewhere.

        Waits for the calls under way that read or write weights, which may need a step; those that come meanwhile wait
        for `wake`. A weight change that has paused the engine may go on after it.
        """

    async def wake(self) -> None:
        """Take the memory back, and go on as before `sleep`."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every request with `WorkerDied` and free the engine; idempotent."""


@dataclass(frozen=True)
class ModelShapes:
    """Shapes and dtypes of a model's tensors by name, as an engine takes them."""

    known: Mapping[str, tuple[int, ...]]
    """Every name with its shape, including tied tensors."""
    required: frozenset[str]
    """Names that every set of weights must contain."""
    dtypes: Mapping[str, dtype] = field(default_factory=dict)
    """The dtype that the engine computes with, by name; a tensor without one may have any."""
    first_names: Mapping[str, str] = field(default_factory=dict)
    """For every known name, the required name of the same tensor: `model.embed_tokens.weight` for a tied
    `lm_head.weight`."""

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: dtype | None = None) -> ModelShapes:
        """Shapes of a Hugging Face model, which may be on the meta device. Of a model with an adapter, only those of
        the adapter. `dtype` is that of parameters, and buffers may have any; None: each tensor's."""
        from torch import nn

        from workers.model.lora import published_tensors

        every, first = published_tensors(model, has_aliases=True), published_tensors(model)
        names = {id(tensor): name for name, tensor in first.items()}
        return cls(
            known={name: tuple(tensor.shape) for name, tensor in every.items()},
            required=frozenset(first),
            dtypes={
                name: dtype or tensor.dtype
                for name, tensor in every.items()
                if dtype is None or isinstance(tensor, nn.Parameter)
            },
            first_names={name: names[id(tensor)] for name, tensor in every.items()},
        )


def weight_bytes(model_path: str) -> int:
    """Bytes of the weights in a model's folder; 0 for a name on the hub."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))


def available_bytes() -> int:
    """Memory of this machine that can be allocated without swapping."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(field[1]) for field in fields if field[0] == "MemAvailable:")


def check_weights(worker: str, weights: Mapping[str, Tensor], shapes: ModelShapes) -> None:
    """Raise `WeightsMismatch` naming every tensor that is missing, unknown, misshapen, or would lose digits."""
    import torch

    known, specs = shapes.known, specs_in(weights)
    problems = [f"missing {name}" for name in sorted(shapes.required - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - known.keys())]
    problems += [
        f"{name} has shape {specs[name].shape}, the engine's has {known[name]}"
        for name in sorted(weights.keys() & known.keys())
        if specs[name].shape != known[name]
    ]
    problems += [
        f"{name} is torch.{specs[name].dtype}, which the engine would narrow to {shapes.dtypes[name]}"
        for name in sorted(weights.keys() & shapes.dtypes.keys())
        if torch.promote_types(getattr(torch, specs[name].dtype), shapes.dtypes[name]) != shapes.dtypes[name]
    ]
    if problems:
        raise WeightsMismatch(
            worker,
            "loading weights",
            f"{'; '.join(problems)}. Nothing was changed; publish the model that the engine was built from",
        )
