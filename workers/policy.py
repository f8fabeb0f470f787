"""A group's way to the engines: its sessions speak here, wherever its tokens are sampled at the moment."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from rlsys.errors import DeadlineExceeded, TaskTooLong, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import Acknowledged, Message, PolicyVersion, Prompt, Sampling, Turn, VersionSpan
from rlsys.workflow import Workflow
from workers.codec import TextCodec
from workers.engines.base import Completion, Request
from workers.occupancy import Ticket
from workers.partials import Partial
from workers.peers import Peer


@dataclass(frozen=True, slots=True)
class Play:
    """What a replica plays: who speaks when, how prompts become tokens, and how replies are drawn."""

    workflow: Workflow
    codec: TextCodec
    sampling: Sampling
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of all tokens of a sequence but the first, and the version of the weights they are of."""

    logprobs: tuple[float, ...]
    version: PolicyVersion


@dataclass
class GroupPolicy:
    """Implements `rlsys.workflow.Policy` for the sessions of one group.

    The sessions stay where they are; `place` may change at any time, and whoever changes it aborts what runs at the
    place before. Requests then go on at the next with the tokens there are.
    """

    ticket: Ticket
    play: Play
    place: Peer
    """The replica whose engine samples for this group."""
    held: Acknowledged | None
    """The weights it began on; it moves only to a replica that has the same."""
    score: Callable[[tuple[int, ...]], Awaitable[Scored]]
    """See `RolloutWorker.score`: by the replica where its sessions are, wherever its tokens are sampled."""
    recalled: Mapping[int, Partial] = field(default_factory=dict)
    """What an earlier attempt at this group has sampled, by the seed of each request."""
    since_s: float = field(default_factory=time.monotonic)
    """On this machine's monotonic clock."""
    failure: WorkerError | None = None
    """The first failure of a worker that its sessions met: the group is issued again, whatever they make of it."""
    _num_requests: int = 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return self.play.codec.encode(prompt)

    def extend(self, ids: tuple[int, ...], said: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[int, ...]:
        return self.play.codec.extend(ids, said, new)

    async def sample(self, prompt_ids: tuple[int, ...], seed: int) -> Turn:
        self._check_prompt(prompt_ids)
        done = self._begun(prompt_ids, seed)
        if done is None or done.finish is None:
            try:
                done = await self._sampled(prompt_ids, seed, done)
            except (WorkerDied, DeadlineExceeded, WeightsMismatch) as error:
                self.failure = self.failure or error
                raise
        assert done.finish is not None
        text, sampling = self.play.codec.decode(done.output_ids), self.play.sampling
        return Turn(prompt_ids, done.output_ids, done.logprobs, done.versions, done.finish, text, sampling)

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        self._check_prompt(prompt_ids)
        ids = self._reply_of(prompt_ids, reply)
        try:
            scored = await self.score(prompt_ids + ids)
        except (WorkerDied, DeadlineExceeded) as error:
            self.failure = self.failure or error
            raise
        logprobs, versions = scored.logprobs[-len(ids) :], (VersionSpan(scored.version, len(ids)),)
        return Turn(prompt_ids, ids, logprobs, versions, "stop", self.play.codec.decode(ids), self.play.sampling)

    def _check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        if not 0 < len(prompt_ids) <= self.play.max_prompt_tokens:
            raise TaskTooLong(
                self.ticket.owner,
                "encoding a prompt",
                f"{len(prompt_ids)} tokens, allowed are 1 to data.max_prompt_tokens = {self.play.max_prompt_tokens}",
            )

    def _reply_of(self, prompt_ids: tuple[int, ...], reply: str) -> tuple[int, ...]:
        """Raises `TaskTooLong`: also where prompt and reply together leave no room for the token that scoring needs."""
        ids, most = self.play.codec.reply(reply), self.play.sampling.max_new_tokens
        if len(prompt_ids) == self.play.max_prompt_tokens:
            most -= 1
        if not 0 < len(ids) <= most:
            raise TaskTooLong(
                self.ticket.owner,
                "encoding a recorded completion",
                f"{len(ids)} tokens with the one that ends it, allowed are 1 to {most}: rollout.max_new_tokens, one "
                "less after a prompt of data.max_prompt_tokens",
            )
        return ids

    def _begun(self, prompt_ids: tuple[int, ...], seed: int) -> Completion | None:
        """What there is of this request: only of exactly this, since what a tool answers may differ from before."""
        partial = self.recalled.get(seed)
        return partial.done if partial is not None and partial.prompt_ids == prompt_ids else None

    async def _sampled(self, prompt_ids: tuple[int, ...], seed: int, begun: Completion | None) -> Completion:
        self._num_requests += 1
        owner, serial, number = self.ticket
        request_id = f"{owner}/{serial}.{number}/{self._num_requests}"
        request = Request(request_id, prompt_ids, self.play.sampling, seed, begun)
        while True:
            place = self.place
            done = await place.serve(self.ticket, request)
            if done.finish != "abort":
                return done
            if self.place is place:
                raise WorkerDied(place.name, f"sampling for group {serial}", "it let the group go")
            request = replace(request, begun=done if done.output_ids else None)
