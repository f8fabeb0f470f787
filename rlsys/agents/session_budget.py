"""Shared by the agents of a session: its budget, its transcript and its times.

The budget is exact with any number of concurrent agents. Tokens are reserved before a reply is sampled, and unused ones
are returned. Equal shares make the limit of one agent independent of the speed of the others.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context as TaskContext
from contextvars import ContextVar, copy_context
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import PositiveInt

from rlsys.agents.tool_calls import Call
from rlsys.agents.tools import Toolbox, ToolResult
from rlsys.errors import first_of
from rlsys.types import EpisodeSpan, Message, Prompt, SpanKind, Task

T = TypeVar("T")

_SHOWN_CHARS, _SHOWN_MESSAGES = 1000, 20
"""Longest message in a transcript, and the number of messages."""
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and unpaired surrogates."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one episode. A `Workflow` is a budget: these are fields of every workflow."""

    max_turns: PositiveInt = 64
    """Turns of each agent; one more ends the episode as truncated."""
    max_episode_tokens: PositiveInt | None = None
    """Sampled tokens of an episode, over all agents; None: unlimited. The last turn is cut to fit. Agents that run in
    parallel get equal shares of the rest."""
    max_tool_calls: PositiveInt | None = None
    """Tool calls of an episode, over all agents; None: unlimited. More calls end the episode as truncated. Parallel
    agents get equal shares of the rest."""
    max_calls_per_turn: PositiveInt = 32
    """Tool calls of one reply that are run; the rest are refused, with a result that says so."""


@dataclass
class Purse:
    """Remaining part of a budget, or of a share; infinite if it is unlimited."""

    tokens: float
    calls: float
    num_sequential: int = 0
    """Tokens sampled one after the other from this purse. Of parallel shares, only the largest number counts."""

    def take_tokens(self, num: int) -> int:
        """Take up to `num` tokens, and return the number taken; 0 if none is left."""
        taken = int(min(num, self.tokens))
        self.tokens -= taken
        return taken

    def take_calls(self, num: int) -> bool:
        """Take all of `num` calls, or none if fewer are left. Returns True if taken."""
        if num > self.calls:
            return False
        self.calls -= num
        return True

    def divide(self, num: int) -> list[Purse]:
        """Move the remaining budget into `num` equal shares; the first shares get one more if it does not divide."""
        tokens, calls = _shares(self.tokens, num), _shares(self.calls, num)
        self._set(0, 0)
        return [Purse(*share) for share in zip(tokens, calls, strict=True)]

    def join(self, shares: Sequence[Purse]) -> None:
        """Take back the rest of the shares, and empty them."""
        self._set(sum(share.tokens for share in shares), sum(share.calls for share in shares))
        self.num_sequential += max(share.num_sequential for share in shares)
        for share in shares:
            share._set(0, 0)

    def _set(self, tokens: float, calls: float) -> None:
        self.tokens = self.tokens if self.tokens == math.inf else tokens
        self.calls = self.calls if self.calls == math.inf else calls


def _shares(amount: float, num: int) -> list[float]:
    if amount == math.inf:
        return [amount] * num
    each, over = divmod(amount, num)
    return [each + (number < over) for number in range(num)]


@dataclass(frozen=True)
class Said:
    """One line of a transcript."""

    agent: str
    role: str
    text: str


class Participant(Protocol):
    """The parts of an agent that a session record names."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int:
        """Number of agents created before this one; the root has 0."""

    @property
    def number(self) -> str:
        """Its place in the tree of agents, `0` for the root."""


@dataclass
class SessionRecord:
    """Counts, times and transcript of one session."""

    task: Task
    _: KW_ONLY
    seed: int
    """Sampling seed of the group."""
    episode_index: int = 0
    budget: Budget = Budget()
    token_limit: int | None = None
    """Most tokens of this episode, if that is less than `budget.max_episode_tokens`."""
    log: list[Said] = field(default_factory=list)
    """All messages, in order."""
    num_sampled: int = 0
    """Tokens sampled so far, over all agents."""
    num_tool_calls: int = 0
    """Tool calls so far, over all agents."""
    has_replies: bool = False
    """True once a policy has replied to an agent."""
    is_over: bool = False
    """True once no agent may be asked any more."""
    _spans: list[EpisodeSpan] = field(default_factory=list)
    """With the index of the agent in place of that of the trajectory."""

    def __post_init__(self) -> None:
        self._began_s, self._began = time.time(), time.monotonic()
        tokens = min(self.budget.max_episode_tokens or math.inf, self.token_limit or math.inf)
        self._purse = Purse(tokens, self.budget.max_tool_calls or math.inf)

    def transcript(self) -> str:
        """Return the last messages as text for people, long messages cut."""
        shown = self.log[-_SHOWN_MESSAGES:]
        lines = [shown_line(line, _SHOWN_CHARS) for line in shown]
        left_out = len(self.log) - len(shown)
        return "\n".join([f"... {left_out} messages before", *lines] if left_out else lines)

    @contextmanager
    def record_span(self, kind: SpanKind, name: str, agent: Participant | None = None) -> Iterator[None]:
        """Record how long the block takes, for the timeline of the episode; see `EpisodeSpan`. Without `agent`, it
        counts as the root's.

            with session.record_span("environment", "step", agent):
                step = await world.step(reply)
        """
        start_s = self.age_s
        try:
            yield
        finally:
            self.note_time(kind, name, start_s, agent)

    @property
    def age_s(self) -> float:
        """Seconds since the start of the session."""
        return time.monotonic() - self._began

    def note_time(
        self, kind: SpanKind, name: str, start_s: float, agent: Participant | None, seconds: float | None = None
    ) -> None:
        """Record what began at the age `start_s`, and took `seconds` or ends now."""
        took_s = self.age_s - start_s if seconds is None else seconds
        index = agent.index if agent else 0
        self._spans.append(EpisodeSpan(kind, name, index, round(start_s, 6), round(took_s, 6)))

    @property
    def purse(self) -> Purse:
        """Remaining budget of the current task: the whole rest, or a share of it under `gather`."""
        share = _SHARE.get()
        return share[1] if share is not None and share[0] is self else self._purse

    @property
    def num_sequential(self) -> int:
        """Tokens on the longest chain in which each token had to wait for the one before. Work under `gather` and the
        calls of one reply count as parallel; all else counts as sequential."""
        return self._purse.num_sequential

    def note(self, agent: Participant, role: str, prompt: Prompt) -> None:
        """Add a prompt to the transcript; `role` applies to plain text."""
        who = f"{agent.name}#{agent.number}" if agent.index else agent.name
        self.log += [Said(who, message["role"], message["content"]) for message in messages_of(prompt, role)]

    async def run_calls(self, calls: Sequence[Call], tools: Toolbox) -> list[ToolResult]:
        """Run calls in parallel, each with a share of the remaining budget, since a call may run agents."""
        if len(calls) < 2:
            return await tools.run(calls)
        results = await self._side_by_side([tools.run([call]) for call in calls])
        return [result for (result,) in results]

    async def _side_by_side(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run work in parallel, each with a share of the remaining budget, and return the results in order. The first
        error cancels the rest, and is raised as is."""
        if not work:
            return []
        purse = self.purse
        shares = purse.divide(len(work))
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(work, shares, strict=True)
                tasks = [group.create_task(each, context=self._sharing(share)) for each, share in pairs]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            purse.join(shares)
        return [task.result() for task in tasks]

    def _sharing(self, share: Purse) -> TaskContext:
        context = copy_context()
        context.run(_SHARE.set, (self, share))
        return context


_SHARE: ContextVar[tuple[SessionRecord, Purse] | None] = ContextVar("share", default=None)
"""The current task's share and its session, since a task may outlive its session or serve several sessions."""


def messages_of(prompt: Prompt, role: str = "user") -> tuple[Message, ...]:
    """Convert a prompt to messages; text becomes a message of this role."""
    return (Message(role=role, content=prompt),) if isinstance(prompt, str) else prompt


def append_paragraph(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append a paragraph to the last message, since many chat templates refuse two messages of one role in a row."""
    *before, last = messages
    last = last.copy()
    last["content"] = f"{last['content']}\n\n{text}"
    return (*before, last)


def shown_line(line: Said, most: int | None = None) -> str:
    """Format a transcript line for a terminal. Control characters are escaped, and further lines are indented, so that
    a model's text cannot imitate another line. Text beyond `most` characters is cut."""
    text = _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), line.text[:most])
    text = text.replace("\n", "\n    ")
    cut = f"... ({len(line.text)} characters)" if len(line.text) > len(line.text[:most]) else ""
    return f"[{line.agent}] {line.role}: {text}{cut}"
