"""What a rollout needs of an inference engine: token ids in; token ids, logprobs and policy versions out.

One contract suite (`tests/contract/test_engine.py`) runs against every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rlsys.types import PolicyVersion, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    id: str
    """Unique among requests in flight; what `abort` takes."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Token t of this request depends on (seed, t), the weights and the prompt only; not on who shares the batch."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back, complete or cut short."""

    output_ids: tuple[int, ...]
    """With the stop token, where one ended it."""
    logprobs: tuple[float, ...]
    """Under the sampling distribution: after temperature and top-p. Greedy tokens have logprob 0."""
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for schedulers."""

    num_running: int
    num_waiting: int
    kv_used: float
    """Share of cache slots in use, 0 to 1."""
    num_tokens: int
    """Tokens sampled since start."""


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

    def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, with finish `abort`. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Return once no decoding step is running; none starts until `resume`. Requests and their cache are kept."""
        ...

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Replace all weights while paused; returns the content hash of what the engine now holds.

        Raises `WeightsMismatch` naming every missing, unknown or misshapen tensor, with nothing changed.
        """
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End every request with `WorkerDied` and free the engine; idempotent."""
        ...
