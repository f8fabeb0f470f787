"""Groups at replicas: a `GroupRoute` per group, where its sessions run, and a stay on the engine that samples for it.

A group that moves keeps its sessions at the first replica; only its requests go elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rlsys.agents.agent import Tell
from rlsys.errors import DeadlineExceeded, TaskTooLong, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import NO_OPTIONS, Acknowledged, ChatOptions, Message, Prompt, Sampling, Turn, VersionSpan
from workers.engines.engine import Completion, Request
from workers.text.known_prefixes import KnownPrefixes
from workers.text.tokenizer import TextTokenizer, TextTooLarge

if TYPE_CHECKING:
    from workers.rollout.generator import Generator
    from workers.rollout.partial_responses import Partial
    from workers.rollout.turn_router import TurnRouter

LARGE = 16_384
"""Characters of a text above which it is tokenized in a thread: some 10 ms of work."""
TELL_S = 0.05
"""Seconds between two looks at a reply that somebody reads while it is sampled."""
_READER = ThreadPoolExecutor(1, "tokenizer")
"""Thread that tokenizes large texts, one after the other: the episodes of a group then find their prompt cached."""


class Ticket(NamedTuple):
    """One attempt at a group: `owner` is the replica of its sessions, and `number` distinguishes its attempts."""

    owner: str
    group_id: int
    number: int


@dataclass(eq=False)
class EngineStay:
    """Stay of one group on this engine."""

    ticket: Ticket
    since_s: float = field(default_factory=time.monotonic)
    """Start of the stay, on this machine's monotonic clock."""
    running: dict[str, Request] = field(default_factory=dict)
    """By request id."""
    finished: list[tuple[Request, Completion]] = field(default_factory=list)
    """Requests that finished here and that are not in the partial response pool yet."""
    noted: dict[int, int] = field(default_factory=dict)
    """Number of tokens already in the partial response pool, by the request's seed."""
    is_over: bool = False
    is_visit: bool = False
    """True if only single turns of the group are here, see `Generator.visit`."""
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a running request ends: the engine has answered or aborted it."""


@dataclass(frozen=True, slots=True)
class PolicyText:
    """Encoding of a policy's prompts, and sampling of its replies."""

    codec: TextTokenizer
    sampling: Sampling
    max_prompt_tokens: int
    """Most tokens of a task's prompt."""
    max_context_tokens: int
    """Most tokens of a conversation, its last reply included."""


@dataclass
class PolicySpeech:
    """The part of `rlsys.agents.workflow.Policy` that needs no engine: prompts as tokens."""

    ticket: Ticket
    speech: PolicyText

    @property
    def max_new_tokens(self) -> int:
        return self.speech.sampling.max_new_tokens

    @property
    def has_chat_template(self) -> bool:
        return self.speech.codec.has_chat_template

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self.speech.codec.stop_texts

    def spell(self, ids: Sequence[int]) -> str:
        return self.speech.codec.spell(ids)

    def check_task(self, prompt_ids: tuple[int, ...]) -> None:
        if len(prompt_ids) > self.speech.max_prompt_tokens:
            allowed = f"allowed are 1 to data.max_prompt_tokens = {self.speech.max_prompt_tokens}"
            raise TaskTooLong(self.ticket.owner, "encoding a prompt", f"{len(prompt_ids)} tokens, {allowed}")

    async def encode(self, prompt: Prompt, options: ChatOptions = NO_OPTIONS) -> tuple[int, ...]:
        work = partial(self.speech.codec.encode, prompt, options, most=self.speech.max_context_tokens)
        return await self._tokenized(work, num_chars((prompt, options.tools)))

    async def append(self, text: str) -> tuple[int, ...]:
        return await self._tokenized(
            partial(self.speech.codec.append, text, most=self.speech.max_context_tokens), len(text)
        )

    async def extend(
        self,
        ids: tuple[int, ...],
        said: tuple[Message, ...],
        new: tuple[Message, ...],
        options: ChatOptions = NO_OPTIONS,
    ) -> tuple[int, ...]:
        work = partial(self.speech.codec.extend, ids, said, new, options, most=self.speech.max_context_tokens)
        return await self._tokenized(work, num_chars((said, new, options.tools)))

    def _check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        most = self.speech.max_context_tokens - 1
        if not 0 < len(prompt_ids) <= most:
            allowed = f"allowed are 1 to {most}, one less than rollout.max_context_tokens"
            raise TaskTooLong(self.ticket.owner, "encoding a prompt", f"{len(prompt_ids)} tokens, {allowed}")

    async def _tokenized(self, work: Callable[[], tuple[int, ...]], size: int) -> tuple[int, ...]:
        """Tokenize a text of `size` characters, in the thread if it is large. Raises `TaskTooLong`.

        Waits for the large texts before it and for its own; unblocked by their ends, and not by each other's errors.
        """
        try:
            return work() if size <= LARGE else await asyncio.get_running_loop().run_in_executor(_READER, work)
        except TextTooLarge as error:
            allowed = f"a conversation has at most rollout.max_context_tokens = {self.speech.max_context_tokens} tokens"
            raise TaskTooLong(self.ticket.owner, "encoding a prompt", f"{error}; {allowed}") from None


@dataclass
class GroupRoute(PolicySpeech):
    """Implements `rlsys.agents.workflow.Policy` for the sessions of one group.

    The sessions stay at their replica; `place` may change at any time. The caller that changes it also aborts the
    requests at the old place. Requests then continue at the new place with the tokens sampled so far.
    """

    place: Generator
    """The replica that samples, possibly in another process. Its methods may raise `WorkerDied`."""
    held: Acknowledged | None
    """The weights on which the group began. It moves only to a replica with the same weights."""
    home: Generator
    """The replica of the sessions. It scores recorded replies, wherever the tokens are sampled."""
    turns: TurnRouter | None = None
    """Routes single turns to other replicas. None: every turn is sampled at `place`."""
    recalled: Mapping[int, Partial] = field(default_factory=dict)
    """Tokens sampled by an earlier attempt at this group, by the seed of each request."""
    since_s: float = field(default_factory=time.monotonic)
    """Start of the group, on this machine's monotonic clock."""
    away: dict[str, Generator] = field(default_factory=dict)
    """Other replicas that sample single turns of this group, by request id."""
    vouched: dict[Acknowledged, None] = field(default_factory=dict)
    """Acknowledgements of the weights that they sampled from."""
    failure: WorkerError | None = None
    """The first worker failure in its sessions. The group is then reissued, even if the workflow handles the error."""
    _num_requests: int = 0
    _contexts: KnownPrefixes[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = field(default_factory=KnownPrefixes)
    """Prompts and replies of all turns, with the spans of their replies."""

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        self._check_prompt(prompt_ids)
        sampling = self.speech.sampling
        room = self.speech.max_context_tokens - len(prompt_ids)
        most = min(sampling.max_new_tokens, room, room if max_new_tokens is None else max_new_tokens)
        if stop or most != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=most, stop=(*sampling.stop, *stop))
        done = self._begun(prompt_ids, sampling, seed)
        if done is None or done.finish is None:
            try:
                done = await self._sampled(prompt_ids, sampling, seed, done, tell)
            except (WorkerDied, DeadlineExceeded, WeightsMismatch) as error:
                self.failure = self.failure or error
                raise
        assert done.finish is not None
        context = prompt_ids + done.output_ids
        spans = (*self._replies_in(prompt_ids), (len(prompt_ids), len(context)))
        self._contexts.put(context, (context, spans))
        text = self.speech.codec.decode(done.output_ids)
        return Turn(
            prompt_ids, done.output_ids, done.logprobs, done.versions, done.finish, text, sampling, done.routing
        )

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        self._check_prompt(prompt_ids)
        ids = await self._reply_of(prompt_ids, reply)
        try:
            logprobs, version = await self.home.score(prompt_ids + ids)
        except (WorkerDied, DeadlineExceeded) as error:
            self.failure = self.failure or error
            raise
        versions, text = (VersionSpan(version, len(ids)),), self.speech.codec.decode(ids)
        return Turn(prompt_ids, ids, logprobs[-len(ids) :], versions, "stop", text, self.speech.sampling)

    async def _reply_of(self, prompt_ids: tuple[int, ...], reply: str) -> tuple[int, ...]:
        """Token ids of a reply. Raises `TaskTooLong`, also if they leave no room for the token that scoring needs."""
        ids = await self._tokenized(partial(self.speech.codec.reply, reply), len(reply))
        most = min(self.speech.sampling.max_new_tokens, self.speech.max_context_tokens - len(prompt_ids) - 1)
        if not 0 < len(ids) <= most:
            raise TaskTooLong(
                self.ticket.owner,
                "encoding a recorded completion",
                f"{len(ids)} tokens with the one that ends it, allowed are 1 to {most}: rollout.max_new_tokens, or "
                "what a prompt leaves of rollout.max_context_tokens, less one",
            )
        return ids

    def _replies_in(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Spans of a prompt that are replies of earlier turns: those of the longest dialogue that it goes on."""
        known = self._contexts.longest(prompt_ids, lambda value, length: value[0] == prompt_ids[:length])
        return known[1] if known else ()

    def _begun(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion | None:
        """Tokens that an earlier attempt sampled for this request. None if they do not fit its prompt or its token
        budget, which may differ this time."""
        partial = self.recalled.get(seed)
        if partial is None or partial.prompt_ids != prompt_ids:
            return None
        done, most = partial.done, sampling.max_new_tokens
        num = len(done.output_ids)
        if num > most or (done.finish == "length" and num < most):
            return None
        return replace(done, finish="length") if done.finish is None and num == most else done

    async def _sampled(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        begun: Completion | None,
        tell: Tell | None,
    ) -> Completion:
        self._num_requests += 1
        owner, group_id, number = self.ticket
        request_id = f"{owner}/{group_id}.{number}/{self._num_requests}"
        request = Request(request_id, prompt_ids, sampling, seed, begun, self._replies_in(prompt_ids))
        telling = asyncio.create_task(self._tell(request_id, tell)) if tell else None
        try:
            while True:
                place = self.place
                if self.turns and place is self.home:
                    request, is_done = await self._visited(self.turns, request)
                    if is_done:
                        assert request.begun is not None
                        return request.begun
                done = await place.serve(self.ticket, request)
                if done.finish != "abort":
                    return done
                if self.place is place:
                    raise WorkerDied(place.name, f"sampling for group {group_id}", "it let the group go")
                request = replace(request, begun=done if done.output_ids else None)
        finally:
            if telling:
                telling.cancel()

    async def _visited(self, turns: TurnRouter, request: Request) -> tuple[Request, bool]:
        """Let a peer sample a turn that would wait here. Returns the request with the tokens so far, and whether it is
        done. A peer that fails loses its tokens of the turn, and only those."""
        home = replace(await self.home.turn_load(), has_room=self.home.has_slot)
        peer = await turns.choose(home, request.prompt_ids)
        if peer is None:
            return request, False
        self.away[request.id] = peer
        try:
            done, weights = await peer.visit(self.ticket, request, home.held)
        except WorkerError:
            turns.failed(peer)
            return request, False
        finally:
            del self.away[request.id]
        self.vouched |= dict.fromkeys(weights)
        if done.finish != "abort":
            turns.note(peer, request.prompt_ids + done.output_ids)
        return replace(request, begun=done if done.output_ids else None), done.finish != "abort"

    async def _tell(self, request_id: str, tell: Tell) -> None:
        """Pass on the text of a request while it is sampled, without a character that its next token completes.

        Consumes the engine's progress, every `TELL_S`; unblocked by nothing: it is cancelled when the request ends.
        """
        told = ""
        while True:
            await asyncio.sleep(TELL_S)
            with suppress(WorkerError):  # which the request itself raises
                ids = await self.away.get(request_id, self.place).sampled_so_far(request_id)
                text = self.speech.codec.decode(ids).rstrip("\ufffd")
                if text != told and text.startswith(told):
                    tell(told := text)


def num_chars(value: object) -> int:
    """Count the characters of all texts in a prompt, messages or schemas."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple | list):
        return sum(map(num_chars, value))
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return sum(map(num_chars, parts))
