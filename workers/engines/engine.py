"""What a rollout needs of an inference engine: token ids in; token ids, logprobs and policy versions out.

One contract suite (`tests/contract/test_engine*.py`) runs against every engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
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
    """What was sampled of it already, here or on another engine, until an `abort` or a smaller `max_new_tokens`.

    `generate` returns it with what follows, `stream` gives only what follows; `max_new_tokens` counts it. It must not
    have ended with a stop token. Where it carries a `cache` that fits, no key or value is computed again."""

    @property
    def num_begun(self) -> int:
        """Tokens sampled before this request came in."""
        return len(self.begun_ids)

    @property
    def begun_ids(self) -> tuple[int, ...]:
        """What was sampled before this request came in."""
        return self.begun.output_ids if self.begun else ()


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
    cache: object | None = field(default=None, compare=False, repr=False)
    """Keys and values of what was sampled, in the engine's own form, for an engine of the same kind that goes on with
    it; can be pickled. Only of a request that was aborted with `keep_cache`, and only of engines that can."""

    def since(self, num_tokens: int) -> Completion:
        """What follows the first `num_tokens` tokens."""
        spans = spans_of(self._token_versions()[num_tokens:])
        return Completion(self.output_ids[num_tokens:], self.logprobs[num_tokens:], spans, self.finish, self.cache)

    def then(self, more: Completion) -> Completion:
        """This, and what was sampled after it; it ends as `more` does."""
        ids, logprobs = self.output_ids + more.output_ids, self.logprobs + more.logprobs
        spans = spans_of(self._token_versions() + more._token_versions())
        return Completion(ids, logprobs, spans, more.finish, more.cache)

    def _token_versions(self) -> list[PolicyVersion]:
        return [span.version for span in self.versions for _ in range(span.num_tokens)]


def spans_of(versions: Sequence[PolicyVersion]) -> tuple[VersionSpan, ...]:
    """The versions of consecutive tokens, as runs."""
    return tuple(VersionSpan(version, len(list(run))) for version, run in groupby(versions))


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
    resident_versions: int = 1
    """Sets of weights held at the same time, so that requests end on the version that they began with; 1: new weights
    replace the old."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine a replica runs, and why."""

    engine: EngineName
    reason: str


class Engine(Protocol):
    """A sampler whose weights can be changed between any two tokens.

    `pause`, `load` and `resume` are called only in the order that `rlsys.weight_sync.sync.change_weights` owns.
    """

    @property
    def version(self) -> PolicyVersion:
        """The newest version held: new requests are sampled from it."""
        ...

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The versions held, oldest first; several only where the engine was built for several."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Cancelling the call aborts the request.

        A request that had begun goes on under the version it came to, where that is held, else under the newest.
        Raises `TaskTooLong` if prompt and new tokens exceed the context; `ValueError` if the request makes no sense, or
        what it has begun with had ended; `WorkerDied` after `close` or if the engine broke.
        """
        ...

    def stream(self, request: Request) -> AsyncGenerator[Completion]:
        """The same, in pieces as they are sampled: put together they are what `generate` returns.

        Only the last piece, which may be empty, has a `finish`. Leaving the loop early aborts the request.
        """
        ...

    def abort(self, request_id: str, *, keep_cache: bool = False) -> None:
        """End a request now; its `generate` returns what it has, with finish `abort`. Unknown ids are ignored.

        With `keep_cache` it comes with its keys and values as `Completion.cache`, if the engine can give them.
        """
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

        With several `resident_versions` it waits until there is room for one more set; unblocked by the requests of an
        older version ending, so not while paused. That has no deadline of its own: requests may be long.
        Raises `WeightsMismatch` as `load` does.
        """
        ...

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Take in all weights while paused; returns the content hash of what was loaded.

        A tied output layer may be left out, and tensors are cast to the type the engine computes in. They replace
        those before: running requests keep their cached keys and values, of the weights before, or have them computed
        anew, as the engine was built to. With several `resident_versions` they lie beside those before: running
        requests end on the version that they have, and a version on which nothing runs any more is let go. No request
        finds keys and values of another version in a prefix cache.
        Raises `WeightsMismatch` naming every missing, unknown or misshapen tensor, and `WorkerError` where there is no
        room for one more set because it was not staged, with nothing changed.
        """
        ...

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs of `token_ids[1:]`, each given those before it, at temperature 1 under the newest weights.

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
