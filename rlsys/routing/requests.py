"""Request, chunks of its answer, and the replica that gives them.

    session worker                                    replica
    Request(prompt ids, tokens so far, weights) ->    samples
                                   <- Chunk, Chunk, Chunk(finish: stop | length | abort)

The session worker has all tokens, so a request can be sent again to any replica with the weights that it wants, from
its last token. That one rule serves repacking, the death of a replica, an early weight change and scale-down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias

from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied
from rlsys.types import Acknowledged, PolicyVersion, Pull, ReplicaLoad, Sampling, VersionSpan

LOSSES = (WorkerDied, DeadlineExceeded, WeightsMismatch)
"""Failures after which a replica is replaced, and its requests go on elsewhere."""
AbortReason: TypeAlias = Literal["drained", "weights"]
"""Reason for which a replica ends a request before its end: it was drained, or has other weights than wanted."""


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """Weights that a request may be sampled from."""

    version: PolicyVersion
    """This version, or a newer one if `hash` is None."""
    hash: str | None = None
    """Content hash of exactly these weights; None: any no older than `version`."""

    def fits(self, held: Acknowledged | None) -> bool:
        """True if a replica that holds these weights may sample. A replica without an acknowledgement never changes its
        weights, or has not pulled any; `Replica.hold` tells which."""
        if held is None:
            return False
        if self.hash is None:
            return held.version >= self.version
        return (held.version, held.hash) == (self.version, self.hash)


@dataclass(frozen=True, slots=True)
class Hold:
    """Claim of a group on the weights of a replica: they do not change before its release.

    With weights that may change under running requests, nothing is claimed: `id` is empty.
    """

    id: str
    replica: str
    held: Acknowledged | None
    """The loaded weights; None if they are those that the engine was started with."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    id: str
    """Unique among requests in flight; the argument of `abort`."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Token t of this request depends only on (seed, t), the weights and the prompt, not on the rest of the batch."""
    begun: Completion | None = None
    """Tokens sampled so far, here or on another engine, until an `abort` or a smaller `max_new_tokens`.

    `Engine.generate` returns them with the new tokens, and `max_new_tokens` counts them. They must not end with a stop
    token.
    """

    sampled: tuple[tuple[int, int], ...] = ()
    """Spans of the prompt, first and end, that were replies in earlier turns. An engine may compute them as it did
    then, and reuse what it has of them."""
    wanted: WeightsWanted | None = None
    """Weights to sample from; None: those that the engine has."""
    hold: str = ""
    """Hold of its group on the weights of the replica; empty without one."""
    is_read: bool = False
    """True if a reader follows the reply: its chunks then do not wait until the request is old."""

    @property
    def num_begun(self) -> int:
        """Number of tokens sampled before this request."""
        return len(self.given_ids)

    @property
    def given_ids(self) -> tuple[int, ...]:
        """Tokens sampled before this request."""
        return self.begun.output_ids if self.begun else ()

    def version_among(self, loaded: Collection[PolicyVersion], newest: PolicyVersion) -> PolicyVersion:
        """Version of its next token: that of the last token sampled before, if it is loaded, else the newest."""
        came_to = self.begun.versions[-1].version if self.begun and self.num_begun else newest
        return came_to if came_to in loaded else newest


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request, complete or partial."""

    output_ids: tuple[int, ...]
    """Includes the stop token, if there is one."""
    logprobs: tuple[float, ...]
    """Under the sampling distribution: after temperature and top-p. Greedy tokens have logprob 0."""
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"] | None
    """Reason for the end; None while the request runs."""
    routing: tuple[bytes, ...] = ()
    """See `Turn.routing`."""

    def since(self, num_tokens: int) -> Completion:
        """The part after the first `num_tokens` tokens."""
        if not num_tokens:
            return self
        ids, logprobs = self.output_ids[num_tokens:], self.logprobs[num_tokens:]
        spans = spans_after(self.versions, num_tokens)
        return Completion(ids, logprobs, spans, self.finish, self.routing[num_tokens:])

    def then(self, more: Completion) -> Completion:
        """This completion followed by `more`; it ends as `more` does."""
        return Completion.join([self, more])

    @classmethod
    def join(cls, parts: Sequence[Completion]) -> Completion:
        """Join consecutive parts, one at least; the whole ends as the last one does."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tuple(token for part in parts for token in part.output_ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            joined_spans(span for part in parts for span in part.versions),
            parts[-1].finish,
            tuple(places for part in parts for places in part.routing),
        )


def joined_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join neighbouring spans of one version."""
    runs = groupby(spans, key=attrgetter("version"))
    joined = (VersionSpan(version, sum(span.num_tokens for span in run)) for version, run in runs)
    return tuple(span for span in joined if span.num_tokens)


def spans_after(spans: Iterable[VersionSpan], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans of the tokens after the first `num_tokens`."""
    left = []
    for span in spans:
        num_cut = min(num_tokens, span.num_tokens)
        num_tokens -= num_cut
        left.append(VersionSpan(span.version, span.num_tokens - num_cut))
    return joined_spans(left)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a request since its last chunk."""

    more: Completion
    """The new tokens. `finish` is None while the request runs."""
    weights: tuple[Acknowledged, ...] = ()
    """Acknowledgement of each version of these tokens; empty if the engine keeps its first weights."""
    reason: AbortReason | None = None
    """Reason of the finish `abort`."""
    load: ReplicaLoad | None = None
    """Load of the replica, with the last chunk."""
    held: Acknowledged | None = None
    """Weights of the replica, with the last chunk."""
    pulls: tuple[Pull, ...] = ()
    """With the last chunk: weight changes of the replica that it has not reported before."""
    told_s: float = 0.0
    """With the last chunk: its time, on the clock of `pulls`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of given tokens."""

    logprobs: tuple[float, ...]
    """Of every token but the first, at temperature 1."""
    version: PolicyVersion
    weights: tuple[Acknowledged, ...] = ()
    """Acknowledgement of `version`; empty if the engine keeps its first weights."""


class Replica(Protocol):
    """One engine, as a session worker sees it. Every method may raise `WorkerDied`, `DeadlineExceeded` or
    `WeightsMismatch`: the replica is then lost, and its requests go on elsewhere."""

    is_near: bool
    """True if it is in the process of the session worker: a request there takes no message."""

    @property
    def name(self) -> str:
        """Name of its worker; a successor has another one."""

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Sample a request; yield its tokens as they come, the last chunk with a finish.

        Finish `abort` with a reason if the replica does not, or no longer, sample it; it can go on at another one.
        Closing the iterator ends the request. Raises the errors of `Engine.generate`.
        """

    async def score(self, token_ids: Sequence[int]) -> Scored:
        """Return logprobs of given tokens under the newest weights."""

    async def hold(self, wanted: WeightsWanted, *, waits: bool = True) -> Hold | None:
        """Claim weights; None if the replica cannot have exactly those wanted.

        Waits until the replica has pulled them: unblocked by their arrival and, where groups delay a change of weights,
        by the end of those groups. Without `waits`, None if the replica would have to wait.
        """

    async def release(self, hold: Hold) -> None:
        """End a claim. Does nothing if the replica is gone, or the claim is not known."""
