"""The policy of a session: prompts become tokens here, and a request router has replicas sample the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from typing import Self

from rlsys.agents.agent import Tell
from rlsys.errors import DataError, TaskTooLong, WorkerError
from rlsys.routing.known_prefixes import KnownPrefixes
from rlsys.routing.request_router import Claim, RequestRouter
from rlsys.routing.requests import LOSSES, Completion, Request
from rlsys.types import NO_OPTIONS, ChatOptions, Message, Prompt, Sampling, Turn, VersionSpan
from workers.text.tokenizer import TextTokenizer, TextTooLarge

LARGE = 16_384
"""Characters of a text above which it is tokenized in a thread: some 10 ms of work."""
TELL_S = 0.05
"""Least seconds between two texts of a reply that somebody reads while it is sampled."""
_READER = ThreadPoolExecutor(1, "tokenizer")
"""Thread that tokenizes large texts, one after the other: the episodes of a group then find their prompt cached."""


@dataclass(kw_only=True)
class PolicyText:
    """The part of `rlsys.agents.workflow.Policy` that needs no engine."""

    codec: TextTokenizer
    sampling: Sampling
    max_prompt_tokens: int
    """Most tokens of a task's prompt."""
    max_context_tokens: int
    """Most tokens of a conversation, its last reply included."""
    worker: str
    """Name of the worker in errors."""

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens

    @property
    def has_chat_template(self) -> bool:
        return self.codec.has_chat_template

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self.codec.stop_texts

    def spell(self, ids: Sequence[int]) -> str:
        return self.codec.spell(ids)

    def check_task(self, prompt_ids: tuple[int, ...]) -> None:
        if len(prompt_ids) > self.max_prompt_tokens:
            allowed = f"allowed are 1 to data.max_prompt_tokens = {self.max_prompt_tokens}"
            raise TaskTooLong(self.worker, "encoding a prompt", f"{len(prompt_ids)} tokens, {allowed}")

    def check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        """Raise `TaskTooLong` if a prompt leaves no room for a reply."""
        most = self.max_context_tokens - 1
        if not 0 < len(prompt_ids) <= most:
            allowed = f"allowed are 1 to {most}, one less than rollout.max_context_tokens"
            raise TaskTooLong(self.worker, "encoding a prompt", f"{len(prompt_ids)} tokens, {allowed}")

    def check_ids(self, ids: Sequence[int]) -> None:
        if (highest := max(ids)) >= self.codec.num_ids:
            raise DataError(f"token {highest} is not among the {self.codec.num_ids} of the model's vocabulary")

    async def encode(self, prompt: Prompt, options: ChatOptions = NO_OPTIONS) -> tuple[int, ...]:
        work = partial(self.codec.encode, prompt, options, most=self.max_context_tokens)
        return await self._tokenize(work, num_chars((prompt, options.tools)))

    async def append(self, text: str) -> tuple[int, ...]:
        return await self._tokenize(partial(self.codec.append, text, most=self.max_context_tokens), len(text))

    async def extend(
        self,
        ids: tuple[int, ...],
        history: tuple[Message, ...],
        new: tuple[Message, ...],
        options: ChatOptions = NO_OPTIONS,
    ) -> tuple[int, ...]:
        work = partial(self.codec.extend, ids, history, new, options, most=self.max_context_tokens)
        return await self._tokenize(work, num_chars((history, new, options.tools)))

    async def reply_ids(self, prompt_ids: tuple[int, ...], reply: str) -> tuple[int, ...]:
        """Token ids of a recorded reply. Raises `TaskTooLong`, also if they leave no room for the token that scoring
        needs."""
        ids = await self._tokenize(partial(self.codec.reply, reply), len(reply))
        most = min(self.sampling.max_new_tokens, self.max_context_tokens - len(prompt_ids) - 1)
        if not 0 < len(ids) <= most:
            raise TaskTooLong(
                self.worker,
                "encoding a recorded completion",
                f"{len(ids)} tokens with the one that ends it, allowed are 1 to {most}: rollout.max_new_tokens, or "
                "what a prompt leaves of rollout.max_context_tokens, less one",
            )
        return ids

    async def _tokenize(self, work: Callable[[], tuple[int, ...]], size: int) -> tuple[int, ...]:
        """Tokenize a text of `size` characters, in the thread if it is large. Raises `TaskTooLong`.

        Waits for the large texts before it and for its own; unblocked by their ends, and not by each other's errors.
        """
        try:
            return work() if size <= LARGE else await asyncio.get_running_loop().run_in_executor(_READER, work)
        except TextTooLarge as error:
            allowed = f"a conversation has at most rollout.max_context_tokens = {self.max_context_tokens} tokens"
            raise TaskTooLong(self.worker, "encoding a prompt", f"{error}; {allowed}") from None


@dataclass(kw_only=True)
class RoutedPolicy(PolicyText):
    """Implements `rlsys.agents.workflow.Policy` for the sessions of one group."""

    router: RequestRouter
    claim: Claim
    prefix: str
    """Start of the ids of its requests: unique among all groups and session workers."""
    failure: WorkerError | None = None
    """The first loss that the router could not mend. The group is then issued again, even if the workflow handles the
    error."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _contexts: KnownPrefixes[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = field(default_factory=KnownPrefixes)
    """Prompts and replies of all turns, with the spans of their replies."""

    @classmethod
    def of(cls, text: PolicyText, router: RequestRouter, claim: Claim, prefix: str) -> Self:
        """Let the replicas of a router speak in this form."""
        own = {field.name: getattr(text, field.name) for field in fields(PolicyText)}
        return cls(**own, router=router, claim=claim, prefix=prefix)

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        self.check_prompt(prompt_ids)
        sampling = self.sampling
        room = self.max_context_tokens - len(prompt_ids)
        most = min(sampling.max_new_tokens, room, room if max_new_tokens is None else max_new_tokens)
        if stop or most != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=most, stop=(*sampling.stop, *stop))
        replies = self._replies_in(prompt_ids)
        request = Request(f"{self.prefix}/{next(self._numbers)}", prompt_ids, sampling, seed, sampled=replies)
        take = None if tell is None else _ReplyReader(self.codec, tell).take
        try:
            done = await self.router.generate(request, self.claim, take)
        except LOSSES as error:
            self.failure = self.failure or error
            raise
        assert done.finish is not None
        context = prompt_ids + done.output_ids
        self._contexts.put(context, (context, (*replies, (len(prompt_ids), len(context)))))
        text = self.codec.decode(done.output_ids)
        return Turn(
            prompt_ids,
            done.output_ids,
            done.logprobs,
            done.versions,
            done.finish,
            text,
            sampling,
            done.routing,
            self.codec.opening_of(prompt_ids),
        )

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        self.check_prompt(prompt_ids)
        ids = await self.reply_ids(prompt_ids, reply)
        try:
            scored = await self.router.score(prompt_ids + ids, self.claim)
        except LOSSES as error:
            self.failure = self.failure or error
            raise
        versions, text = (VersionSpan(scored.version, len(ids)),), self.codec.decode(ids)
        logprobs, opening = scored.logprobs[-len(ids) :], self.codec.opening_of(prompt_ids)
        return Turn(prompt_ids, ids, logprobs, versions, "stop", text, self.sampling, template_opening=opening)

    def _replies_in(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Spans of a prompt that are replies of earlier turns: those of the longest dialogue that it goes on."""
        known = self._contexts.longest(prompt_ids, lambda value, length: value[0] == prompt_ids[:length])
        return known[1] if known else ()


@dataclass
class _ReplyReader:
    """Text of a reply while it is sampled, without a character that its next token completes."""

    codec: TextTokenizer
    tell: Callable[[str], None]
    _ids: list[int] = field(default_factory=list)
    _told: str = ""
    _told_s: float = 0.0

    def take(self, more: Completion) -> None:
        self._ids += more.output_ids
        if more.finish is not None or time.monotonic() - self._told_s < TELL_S:
            return
        text = self.codec.decode(tuple(self._ids)).rstrip("\ufffd")
        if text != self._told and text.startswith(self._told):
            self._told, self._told_s = text, time.monotonic()
            self.tell(text)


def num_chars(value: object) -> int:
    """Count the characters of all texts in a prompt, messages or schemas."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, tuple | list):
        return sum(map(num_chars, value))
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return sum(map(num_chars, parts))
