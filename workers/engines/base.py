"""What a rollout needs of an inference engine: token ids in; token ids, logprobs and policy versions out.

One contract suite (`tests/contract/test_engine.py`) runs against every engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from rlsys.types import EngineStats, PolicyVersion, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

EngineName: TypeAlias = Literal["local", "vllm"]


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    id: str
    """Unique among requests in flight; what `abort` takes."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Token t of this request depends on (seed, t), the weights and the prompt only; not on who shares the batch."""
    begun: Completion | None = None
    """What was sampled of it already, here before an `abort` or on another engine: the completion begins with it, and
    `max_new_tokens` counts it. Without a stop token at its end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back, complete or cut short."""

    output_ids: tuple[int, ...]
    """With the stop token, where one ended it."""
    logprobs: tuple[float, ...]
    """Under the sampling distribution: after temperature and top-p. Greedy tokens have logprob 0."""
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"] | None
    """How it ended; None in a piece of a stream that goes on."""

    def since(self, num_tokens: int) -> Completion:
        """What follows the first `num_tokens` tokens."""
        versions = [span.version for span in self.versions for _ in range(span.num_tokens)][num_tokens:]
        spans = tuple(VersionSpan(version, len(list(run))) for version, run in groupby(versions))
        return Completion(self.output_ids[num_tokens:], self.logprobs[num_tokens:], spans, self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built from; the keys of `rollout` in the configuration."""

    engine: Literal["auto", "local", "vllm"]
    model_path: str
    dtype: Literal["float32", "bfloat16"]
    slots: int
    max_context: int
    kv_cache: Literal["keep", "recompute"]
    tensor_parallel: int
    step_s: float
    """Deadline of one step."""
    load_s: float
    """Deadline of taking in weights."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine a replica runs, and why."""

    engine: EngineName
    reason: str


class Engine(Protocol):
    """A sampler whose weights can be changed between any two tokens.

    `pause`, `load` and `resume` are called only in the order that `rlsys.weights.change_weights` owns.
    """

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights sampled from now."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Cancelling the call aborts the request.

        Raises `TaskTooLong` if prompt and new tokens exceed the context; `WorkerDied` after `close` or if the engine
        broke.
        """
        ...

    def stream(self, request: Request) -> AsyncGenerator[Completion]:
        """The same, in pieces as they are sampled: put together they are what `generate` returns.

        Only the last piece, which may be empty, has a `finish`. Leaving the loop early aborts the request.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, with finish `abort`. Unknown ids are ignored."""
        ...

    async def progress(self) -> Mapping[str, Completion]:
        """What every running request has sampled so far (with what it had begun with), by request id; finish None.

        Of one moment between two steps. Not of requests that wait, or that have sampled nothing here.
        """
        ...

    async def pause(self) -> None:
        """Return once no decoding step is running; none starts until `resume`. Requests and their cache are kept."""
        ...

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """Do ahead of `load` what can be done while decoding goes on. May be left out.

        Raises `WeightsMismatch` as `load` does.
        """
        ...

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Replace all weights while paused; returns the content hash of what was loaded.

        A tied output layer may be left out, and tensors are cast to the type the engine computes in. Running requests
        keep their cached keys and values, of the weights before, or have them computed anew: the engine was built with
        that choice. No request finds those of another version in a prefix cache.
        Raises `WeightsMismatch` naming every missing, unknown or misshapen tensor, with nothing changed.
        """
        ...

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of `token_ids[1:]`, each given those before it, at temperature 1 under the weights held.

        Not while paused: it may need a step.
        """
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every request with `WorkerDied` and free the engine; idempotent."""
        ...
