"""A named speaker in a session: what it says, the tools it calls, and a record of every token.

An author sees messages and text, never a token, a mask, a logprob or a version, and cannot forget to record one:
`Agent` is the only road to the policy, and it records every turn.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rlsys.agents.tool_calls import Call, ToolCall, described, read_calls
from rlsys.agents.tools import Toolbox, ToolResult, ToolSchema
from rlsys.errors import TaskTooLong, ToolError
from rlsys.types import OK, TRUNCATED, Message, Prompt, Trajectory, Turn, failed
from rlsys.util.seeds import request_seed

if TYPE_CHECKING:
    from rlsys.agents.session import Session


class AgentStopped(Exception):
    """An agent can say no more. Uncaught, it ends the episode where it stands, truncated; what was said is trained.

    In a subagent under `Session.gather` it ends that subagent alone.
    """


class ContextFull(AgentStopped):
    """A conversation outgrew `data.max_prompt_tokens`."""


class BudgetSpent(AgentStopped):
    """The workflow's limit on turns, tokens or tool calls is reached."""


class Policy(Protocol):
    """The one seam between a session and an engine."""

    @property
    def max_new_tokens(self) -> int:
        """The run's own limit on the tokens of a reply."""
        ...

    def encode(self, prompt: Prompt, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Token ids of plain text, or of messages in the chat template with the assistant's turn opened.

        `tools` are offered to the model in the template's own way, or else in the system message. Plain text is fed as
        it is, and offers none.
        """
        ...

    def extend(
        self,
        ids: tuple[int, ...],
        said: tuple[Message, ...],
        new: tuple[Message, ...],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...]:
        """Prompt ids of the next turn. `ids` are the tokens of `said`, whose last message is the policy's own, and
        `tools` those that its first message was encoded with: they offer nothing more.

        Starts with `ids` wherever the chat template allows, so that nothing the policy said is tokenized again.
        """
        ...

    async def sample(self, prompt_ids: tuple[int, ...], seed: int, max_new_tokens: int | None = None) -> Turn:
        """One completion, with its logprobs and versions, of at most `max_new_tokens` and the run's own limit."""
        ...

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        """A completion that is given, with the logprobs that its tokens have now, and the version these are of."""
        ...


Speaks: TypeAlias = "Callable[[tuple[int, ...]], Awaitable[Turn]]"
"""From the prompt ids of a turn to the turn."""


@dataclass(frozen=True)
class Reply:
    """What an agent said, and the tools it called in it."""

    text: str
    """All of it."""
    content: str
    """What stands before the first call."""
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Context:
    """What an agent had before it at one moment."""

    said: tuple[Message, ...] = ()
    """The conversation so far; empty while nothing, or only plain text, was said."""
    ids: tuple[int, ...] = ()
    """Its tokens, the policy's own included; empty where it is yet to be tokenized."""
    opened_with: tuple[ToolSchema, ...] = ()
    """The tools that its first tokens offer."""
    offered: tuple[ToolSchema, ...] = ()
    """Those on offer at its end."""

    @property
    def is_plain(self) -> bool:
        """Was it begun with plain text?"""
        return bool(self.ids) and not self.said


@dataclass
class Agent:
    """A named speaker in a session. Made by `Session.agent`."""

    name: str
    index: int
    """How many agents of the session were made before it; the root's is 0."""
    parent: int | None
    """Index of the agent that it works for."""
    policy_name: str
    path: tuple[int, ...]
    """Its number among those of its parent, after its parent's path; the root's is empty. Seeds, and the order in which
    an episode lists its agents, are functions of it, so that they do not depend on who was faster."""
    _session: Session
    context: Context = Context()
    """What the policy has before it, for `fork`."""
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    failure: str | None = None
    """Why its trajectory is left out of training; None if it is not."""
    is_cut: bool = False
    """Did its context or budget end before it was done? The trajectory is then truncated."""
    num_children: int = 0
    _num_asked: int = 0
    _is_speaking: bool = False

    @property
    def number(self) -> str:
        """Its path for people: `0` for the root, `1` for the first agent of the root's, `1.2` for the second of that
        one's."""
        return ".".join(map(str, self.path)) or "0"

    # ---------------------------------------------------------------------------------------------------- speaking

    async def chat(self, prompt: Prompt | None, *, max_new_tokens: int | None = None) -> str:
        """Say `prompt` (text, or messages) after all that was said so far; returns the policy's reply.

        None goes on from the context as it is. `max_new_tokens` lowers the run's own limit, and never raises it. Text
        to an agent that began with plain text is appended as it is; in a conversation it is a message of the user.

        Raises `ContextFull` if the conversation no longer fits, `BudgetSpent` if the workflow's limits are reached.
        """
        return await self._exchange(prompt, lambda prompt_ids: self._sampled(prompt_ids, max_new_tokens))

    async def act(self, prompt: Prompt | None, tools: Toolbox, *, max_new_tokens: int | None = None) -> Reply:
        """`chat` with tools on offer: the reply, and the calls in it, which are not run. See `answer`.

        Tools other than those offered so far are described after `prompt`. Raises `ValueError` for an agent that speaks
        plain text, which has no place for an offer.
        """
        speak: Speaks = lambda prompt_ids: self._sampled(prompt_ids, max_new_tokens)  # noqa: E731
        text = await self._exchange(prompt, speak, tools.schemas)
        content, calls = read_calls(text, f"call_{self.number}_{len(self.turns) - 1}")
        return Reply(text, content, calls)

    async def answer(self, calls: Sequence[Call], tools: Toolbox) -> Prompt:
        """Run calls in parallel; returns their results, to be said next. Of more calls than `max_calls_per_turn` the
        last are refused, and told so.

        Raises `BudgetSpent` before any is run if the episode's tool calls would be exceeded, and `ToolError`, of which
        this agent has then failed.
        """
        run = calls[: self._session.budget.max_calls_per_turn]
        self._session.count_tool_calls(len(run), self)
        try:
            results = await self._session.run_calls(run, tools)
        except ToolError as error:
            self.fail(str(error))
            raise
        refused = ToolResult(f"Refused: only the first {len(run)} calls of a reply are run.", "refused", 0.0)
        results = [*results, *[refused] * (len(calls) - len(run))]
        if self.context.is_plain:
            return "".join(f"\n<tool_response>\n{result.content}\n</tool_response>\n" for result in results)
        return tuple(_told(call, result) for call, result in zip(calls, results, strict=True))

    async def use(self, prompt: Prompt | None, tools: Toolbox, *, max_turns: int | None = None) -> str:
        """Let the agent call tools until it replies without a call; returns that reply.

        Raises as `act` and `answer` do, and `BudgetSpent` if the reply of turn `max_turns` still has calls.
        """
        left = math.inf if max_turns is None else max_turns
        while left > 0:
            reply = await self.act(prompt, tools)
            if not reply.calls:
                return reply.text
            prompt = await self.answer(reply.calls, tools)
            left -= 1
        raise self._stopped(BudgetSpent(f"{self.name} still called tools in turn {max_turns}, its last"))

    async def recite(self, prompt: Prompt, reply: str) -> None:
        """`chat` with a reply that is given: it is recorded as the policy's own, and nothing is sampled."""
        await self._exchange(prompt, lambda prompt_ids: self._policy.recite(prompt_ids, reply))

    # ----------------------------------------------------------------------------------------------------- context

    def fork(self, name: str | None = None, *, at: Context | None = None) -> Agent:
        """Another agent of the same policy whose context begins as this one's stands, or stood once (`at`).

        What was said by then is its prompt, token for token: engines have it cached, and it is trained here only.
        """
        return self._session.add(name or self.name, self, self.policy_name, at or self.context)

    def rewrite(self, prompt: Prompt) -> None:
        """Replace the whole context, system message included; the next turn starts a new sample, and offers the tools
        of that turn alone.

        `chat(None)` then goes on from it. Text is a message of the user in a conversation, and else plain text.
        """
        self._check_silent()
        is_plain = isinstance(prompt, str) and not self.context.said
        self.context = Context(ids=self._policy.encode(prompt)) if is_plain else Context(messages_of(prompt))
        self._session.note(self, "rewritten", prompt)

    def fail(self, reason: str) -> None:
        """Leave this agent's trajectory out of training. The root's failure is that of the episode."""
        self.failure = self.failure or reason

    def trajectory(self, parent: int | None) -> Trajectory:
        """All this agent said, for training; `parent` is the place of its parent in the episode. With a reward that is
        not a finite number it failed."""
        cut = self.is_cut or (bool(self.turns) and self.turns[-1].finish == "length")
        outcome = TRUNCATED if cut else OK
        if self.failure is not None:
            outcome = failed(self.failure)
        elif self.reward is not None and not math.isfinite(self.reward):
            outcome = failed(f"the workflow gave agent {self.name!r} the reward {self.reward}")
        return Trajectory(self.name, tuple(self.turns), outcome, self.reward, parent, self.policy_name)

    # ------------------------------------------------------------------------------------------------------ inside

    @property
    def _policy(self) -> Policy:
        return self._session.policies[self.policy_name]

    def _check_silent(self) -> None:
        if self._is_speaking:
            raise RuntimeError(f"agent {self.name!r} is asked while it speaks: await its reply, or make another agent")

    async def _exchange(self, prompt: Prompt | None, speak: Speaks, tools: tuple[ToolSchema, ...] = ()) -> str:
        self._check_silent()
        self._is_speaking = True
        try:
            with self._session.speaking(self):
                return await self._spoken(prompt, speak, tools)
        finally:
            self._is_speaking = False

    async def _spoken(self, prompt: Prompt | None, speak: Speaks, tools: tuple[ToolSchema, ...]) -> str:
        asked = self._asked(prompt, tools)
        if prompt is not None:
            self._session.note(self, "user", prompt)
        turn = await self._turn(asked.ids, speak)
        self._session.note(self, "assistant", turn.text)
        said = (*asked.said, Message(role="assistant", content=turn.text)) if asked.said else ()
        self.context = replace(asked, said=said, ids=asked.ids + turn.output_ids)
        return turn.text

    def _asked(self, prompt: Prompt | None, tools: tuple[ToolSchema, ...]) -> Context:
        """The context with `prompt` said in it."""
        before = self.context
        if not before.said and not isinstance(prompt, tuple):
            if tools:
                raise ValueError(
                    f"agent {self.name!r} speaks plain text, which offers no tools: begin with messages, or with a "
                    "system message"
                )
            return replace(before, ids=before.ids + self._policy.encode(prompt or ""))
        if before.is_plain:
            raise ValueError(f"agent {self.name!r} began with plain text and cannot go on with messages")
        new = () if prompt is None else messages_of(prompt)
        if not before.ids:
            said = (*before.said, *new)
            return Context(said, self._policy.encode(said, tools), tools, tools)
        if tools and tools != before.offered:
            new = _with_offer(new, described(tools))
        ids = self._policy.extend(before.ids, before.said, new, before.opened_with)
        return Context((*before.said, *new), ids, before.opened_with, tools or before.offered)

    async def _turn(self, prompt_ids: tuple[int, ...], speak: Speaks) -> Turn:
        try:
            turn = await speak(prompt_ids)
        except TaskTooLong as error:
            if not any(agent.turns for agent in self._session.agents):
                raise
            raise self._stopped(ContextFull(f"{self.name}, turn {len(self.turns) + 1}: {error}")) from None
        self.turns.append(turn)
        return turn

    async def _sampled(self, prompt_ids: tuple[int, ...], max_new_tokens: int | None) -> Turn:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; a reply has one token at least")
        session, policy = self._session, self._policy
        budget, purse = session.budget, session.purse
        if budget.max_turns is not None and len(self.turns) >= budget.max_turns:
            raise self._stopped(BudgetSpent(f"{self.name} had its {budget.max_turns} turns (max_turns)"))
        most = policy.max_new_tokens if max_new_tokens is None else min(max_new_tokens, policy.max_new_tokens)
        if not (granted := purse.take_tokens(most)):
            what = f"the {budget.max_tokens} tokens of the episode, or its share of them, are sampled"
            raise self._stopped(BudgetSpent(f"{self.name}: {what} (max_episode_tokens)"))
        seed = request_seed(session.seed, session.episode_index, self._num_asked, *self.path)
        self._num_asked += 1
        num_sampled = 0
        try:
            turn = await policy.sample(prompt_ids, seed, granted)
            num_sampled = len(turn.output_ids)
        finally:
            purse.give_tokens(granted - num_sampled)
        session.num_sampled += num_sampled
        purse.num_sequential += num_sampled
        return turn

    def _stopped(self, error: AgentStopped) -> AgentStopped:
        self.is_cut = True
        return error


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """A prompt as messages: text is the user's."""
    return (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt


def _with_offer(new: tuple[Message, ...], offer: str) -> tuple[Message, ...]:
    """The new messages of a conversation with an offer of tools at their end: what was said before stays, token for
    token."""
    if not new:
        return messages_of(offer)
    last = new[-1].copy()
    last["content"] = f"{last['content']}\n\n{offer}"
    return (*new[:-1], last)


def _told(call: Call, result: ToolResult) -> Message:
    message = Message(role="tool", content=result.content, tool_call_id=call.id)
    if isinstance(call, ToolCall):
        message["name"] = call.name
    return message
