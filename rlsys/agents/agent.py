"""Named participant of a session: its replies, its tool calls, and a record of every token.

A workflow's author sees messages and text, never tokens, masks, logprobs or versions, and cannot forget to record one:
`Agent` is the only road to the policy, and it records every turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from typing import Any, Protocol, TypeAlias

from rlsys.agents.session_budget import SessionRecord, append_paragraph, messages_of
from rlsys.agents.tool_calls import Call, ToolCall, after_thinking, describe_tools, read_calls
from rlsys.agents.tools import Toolbox, ToolResult, ToolSchema
from rlsys.batch.samples import without_repeats
from rlsys.errors import TaskTooLong, ToolError
from rlsys.types import NO_OPTIONS, OK, TRUNCATED, ChatOptions, Message, Prompt, Trajectory, Turn, failed
from rlsys.util.seeds import request_seed

Tell: TypeAlias = Callable[[str], None]
"""Takes the text of a reply so far, while it is sampled. Every text begins with the one before."""


_LAST = 8
"""Tokens at the end of a prompt that can open the thinking."""


class AgentStopped(Exception):
    """An agent cannot continue. Uncaught, it ends the episode as truncated; the turns so far are trained.

    In a subagent under `Session.gather` it ends only that subagent.
    """


class ContextFull(AgentStopped):
    """A conversation outgrew `rollout.max_context_tokens`."""


class BudgetSpent(AgentStopped):
    """The workflow reached its limit on turns, tokens or tool calls."""


class Policy(Protocol):
    """Interface between a session and an inference engine."""

    @property
    def max_new_tokens(self) -> int:
        """The run's limit on the tokens of a reply."""

    @property
    def has_chat_template(self) -> bool:
        """True if text prompts are messages of the user. Otherwise a context of text is one text."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The tokens that end a reply, as text."""

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""

    def check_task(self, prompt_ids: tuple[int, ...]) -> None:
        """Raise `TaskTooLong` if the prompt of a task has more than `data.max_prompt_tokens`."""

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `DataError` if a token id that a client gives is not in the model's vocabulary."""

    async def encode(self, prompt: Prompt, options: ChatOptions = NO_OPTIONS) -> tuple[int, ...]:
        """Return the token ids of the start of a context: of plain text after the start token, or of messages in the
        chat template. The assistant's turn is opened, or continued if the last message is the assistant's.

        Tools are described by the chat template if it supports tools, else in the system message. Raises `TaskTooLong`
        for a text that is too large to be a prompt.
        """

    async def append(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text that continues a context. Raises `TaskTooLong` as `encode` does."""

    async def extend(
        self,
        ids: tuple[int, ...],
        history: tuple[Message, ...],
        new: tuple[Message, ...],
        options: ChatOptions = NO_OPTIONS,
    ) -> tuple[int, ...]:
        """Return the prompt ids of the next turn. `ids` are the tokens of `history`, which ends with the policy's
        reply.

        `options` are those that the conversation was opened with; they offer no new tools. The result starts with `ids`
        wherever the chat template allows it, so that no token of the policy is tokenized again. Raises `TaskTooLong`
        for a text that is too large to be a prompt.
        """

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        """Sample one completion, with logprobs and versions, of at most `max_new_tokens` and the run's limit. It ends
        after a text of `stop`, as after those of the run. `tell` gets its text from time to time, and not the end."""

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        """Return the turn for a given completion, with the current logprobs of its tokens and their version."""


@dataclass(frozen=True)
class Reply:
    """Reply of an agent, and the tool calls in it."""

    text: str
    """The whole reply."""
    content: str
    """The text before the first call."""
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Context:
    """Context of an agent at one moment."""

    said: tuple[Message, ...] = ()
    """The conversation so far; empty before the first message, and in a plain-text context."""
    ids: tuple[int, ...] = ()
    """Tokens of the context, including the policy's; empty until the context is tokenized."""
    unread: str = ""
    """Plain text after these tokens, which the next turn tokenizes."""
    begun: str = ""
    """Start of the next reply, from a prompt that ends with a message of the assistant."""
    opened_with: ChatOptions = NO_OPTIONS
    """Options of the first tokens."""
    offered: tuple[ToolSchema, ...] = ()
    """Tools offered at the end of the context."""

    @property
    def is_plain(self) -> bool:
        """True if the context began with plain text."""
        return bool(self.ids or self.unread) and not self.said


@dataclass
class Agent:
    """Named participant of a session. Created by `Session.agent`."""

    name: str
    index: int
    """Number of agents created before this one in the session; the root has 0."""
    parent: int | None
    """Index of the parent agent."""
    policy_name: str
    path: tuple[int, ...]
    """Position in the tree of agents: the parent's path, then the agent's number among its siblings; () for the root.
    Seeds and the order of an episode's agents depend only on the path, so they do not depend on timing."""
    _session: SessionRecord
    _policy: Policy
    _add: Callable[[str, Agent, str, Context], Agent]
    """Creates an agent of the session, from its name, parent, policy's name and context."""
    context: Context = Context()
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    failure: str | None = None
    """Reason to leave the trajectory out of training; None if there is none."""
    is_cut: bool = False
    """True if the context or the budget ended before the agent was done. The trajectory is then truncated."""
    num_children: int = 0
    is_judged: bool = False
    """True if the reward functions judge its last turn, as they judge that of a root."""
    request: tuple[asyncio.Task[Any], asyncio.Future[None]] | None = None
    """Task with this agent's request in progress, and a future that is set when the request has ended."""
    _num_asked: int = 0

    @property
    def number(self) -> str:
        """The path as text: `0` for the root, `1` for the root's first child, `1.2` for that child's second child."""
        return ".".join(map(str, self.path)) or "0"

    # ---------------------------------------------------------------------------------------------------- speaking

    async def chat(
        self,
        prompt: Prompt | None,
        *,
        tools: tuple[ToolSchema, ...] = (),
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        begin: str = "",
        tell: Tell | None = None,
    ) -> str:
        """Append `prompt` (text or messages) to the conversation, and return the policy's reply.

        None continues from the current context. `max_new_tokens` can lower the run's limit, never raise it. The reply
        ends after a text of `stop`, which is part of it, and `tell` gets its text while it is sampled. It begins with
        `begin`: that text is context, and the policy samples what follows. Text is a user's message; if the model has
        no chat template and no message came before, it is appended unchanged.

        `tools` are described to the policy; `act` also reads its calls. Raises `ContextFull` if the conversation no
        longer fits, `BudgetSpent` if a limit of the workflow is reached.
        """
        return await self._exchange(prompt, tools, max_new_tokens=max_new_tokens, stop=stop, begin=begin, tell=tell)

    async def resume(
        self,
        text: str = "",
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> str:
        """Continue the last reply, which was cut, on its own tokens and `text`. Returns what the policy adds.

        A reply is cut by `max_new_tokens` or a text of `stop`. `text` is context. No token is tokenized again. Raises
        `ValueError` if there is no reply, or the policy has ended it; the other errors are those of `chat`.
        """
        return await self._exchange(text, max_new_tokens=max_new_tokens, stop=stop, tell=tell, resumes=True)

    @property
    def has_ended_reply(self) -> bool:
        """True if the policy ended its last reply with a token for that."""
        return bool(self.context.ids) and self._policy.spell(self.context.ids[-1:]) in self._policy.stop_texts

    async def act(
        self,
        prompt: Prompt | None,
        tools: Toolbox,
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        begin: str = "",
        tell: Tell | None = None,
    ) -> Reply:
        """Chat with tools on offer. Returns the reply with its calls, which `answer` runs.

        Tools that differ from those offered so far are described after `prompt`. The reply begins with `begin`, such as
        the opening of a call: that text is context, and the policy samples what follows. Raises `ValueError` in a
        plain-text context, which cannot offer tools.
        """
        text = await self._exchange(
            prompt, tools.schemas, max_new_tokens=max_new_tokens, stop=stop, begin=begin, tell=tell
        )
        content, calls = read_calls(text, f"call_{self.number}_{len(self.turns) - 1}")
        return Reply(text, content, calls)

    async def answer(self, calls: Sequence[Call], tools: Toolbox) -> Prompt:
        """Run calls in parallel, and return their results as the next prompt.

        Calls beyond `max_calls_per_turn` are refused, with a result that says so. Raises `BudgetSpent` before any call
        runs if the episode's tool calls would be exceeded. Raises `ToolError`, with which this agent also fails.
        """
        session, budget = self._session, self._session.budget
        run = calls[: budget.max_calls_per_turn]
        if not session.purse.take_calls(len(run)):
            what = f"the {budget.max_tool_calls} tool calls of the episode (max_tool_calls), or its share of them"
            raise self._mark_cut(BudgetSpent(f"{self.name} asked for more than {what}"))
        session.num_tool_calls += len(run)
        start_s, results = session.age_s, list[ToolResult]()
        try:
            results = await session.run_calls(run, tools)
        except ToolError as error:
            self.fail(str(error))
            raise
        finally:
            for call, result in zip_longest(run, results):
                name = call.name if isinstance(call, ToolCall) else ""
                session.note_time("tool", name, start_s, self, result.seconds if result else None)
        refused = ToolResult(f"Refused: only the first {len(run)} calls of a reply are run.", "refused", 0.0)
        results = [*results, *[refused] * (len(calls) - len(run))]
        if self.context.is_plain:
            return "".join(f"\n<tool_response>\n{result.content}\n</tool_response>\n" for result in results)
        return tuple(_tool_message(call, result) for call, result in zip(calls, results, strict=True))

    async def use(self, prompt: Prompt | None, tools: Toolbox, *, max_turns: int | None = None) -> str:
        """Let the agent call tools until it replies without a call. Returns that reply.

        Raises the errors of `act` and `answer`, and `BudgetSpent` if the reply of turn `max_turns` still has calls.
        """
        for _ in count() if max_turns is None else range(max_turns):
            reply = await self.act(prompt, tools)
            if not reply.calls:
                return reply.text
            prompt = await self.answer(reply.calls, tools)
        raise self._mark_cut(BudgetSpent(f"{self.name} still called tools in turn {max_turns}, its last"))

    async def recite(self, prompt: Prompt, reply: str, *, tools: tuple[ToolSchema, ...] = ()) -> None:
        """Chat with a given reply: it is recorded as the policy's reply, and nothing is sampled."""
        await self._exchange(prompt, tools, recited=reply)

    # ----------------------------------------------------------------------------------------------------- context

    def fork(self, name: str | None = None, *, at: Context | None = None) -> Agent:
        """Create an agent of the same policy that starts from this agent's context, or from an earlier one (`at`).

        That context is the fork's prompt, token for token. Engines have it cached, and only this agent trains on it.
        """
        return self._add(name or self.name, self, self.policy_name, at or self.context)

    def rewrite(self, prompt: Prompt) -> None:
        """Replace the whole context, system message included. The next turn starts a new sample with its own tools.

        Continue with `chat(None)`. In a conversation, text becomes a user message; otherwise it is plain text.
        """
        self._check_silent()
        is_plain = isinstance(prompt, str) and not self.context.said and not self._policy.has_chat_template
        self.context = Context(unread=prompt) if is_plain else Context(messages_of(prompt))
        self._session.note(self, "rewritten", prompt)

    def fail(self, reason: str) -> None:
        """Leave this agent's trajectory out of training. A failure of the root is a failure of the episode."""
        self.failure = self.failure or reason

    def trajectory(self, parent: int | None) -> Trajectory:
        """Build the trajectory for training. `parent` is the parent's position in the episode.

        A reward that is not finite makes the trajectory a failure.
        """
        cut = self.is_cut or (bool(self.turns) and self.turns[-1].finish == "length")
        outcome = TRUNCATED if cut else OK
        if self.failure is not None:
            outcome = failed(self.failure)
        elif self.reward is not None and not math.isfinite(self.reward):
            outcome = failed(f"the workflow gave agent {self.name!r} the reward {self.reward}")
        trajectory = Trajectory(
            self.name, tuple(self.turns), outcome, self.reward, parent, self.policy_name, self.is_judged
        )
        return without_repeats(trajectory) if any(turn.routing for turn in self.turns) else trajectory

    # ------------------------------------------------------------------------------------------------------ inside

    def _check_silent(self) -> None:
        if self.request:
            raise RuntimeError(
                f"agent {self.name!r} is called while its reply is pending: await the reply, or make another agent"
            )

    async def _exchange(
        self,
        prompt: Prompt | None,
        tools: tuple[ToolSchema, ...] = (),
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        begin: str = "",
        tell: Tell | None = None,
        recited: str | None = None,
        resumes: bool = False,
    ) -> str:
        """Append `prompt`, record the policy's reply, sampled or `recited`, and return it with its beginning.

        `resumes`: the reply continues the last one, and `prompt` is text in it.
        """
        self._check_silent()
        if self._session.is_over:
            raise RuntimeError(f"agent {self.name!r} is asked after its session ended: await all work in `run`")
        task, ended = asyncio.current_task(), asyncio.get_running_loop().create_future()
        assert task is not None
        self.request = (task, ended)
        try:
            asked = await self._resume_context(str(prompt)) if resumes else await self._prompt_context(prompt, tools)
            if begin:
                closing = after_thinking(self._policy.spell(asked.ids[-_LAST:]))
                begin = begin if closing and begin.startswith(closing.strip()) else closing + begin
                ids = asked.ids + await self._policy.append(begin)
                asked = replace(asked, ids=ids, begun=asked.begun + begin)
            if not self._session.has_replies:
                self._policy.check_task(asked.ids)
            if prompt is not None:
                self._session.note(self, "user", prompt)
            start_s = self._session.age_s
            if recited is None:
                turn = await self._sample_turn(asked.ids, max_new_tokens, stop, tell)
            else:
                turn = await self._policy.recite(asked.ids, recited)
            self._session.note_time("turn", "", start_s, self)
        except TaskTooLong as error:
            if not self._session.has_replies:
                raise
            raise self._mark_cut(ContextFull(f"{self.name}, turn {len(self.turns) + 1}: {error}")) from None
        finally:
            self.request = None
            ended.set_result(None)
        self.turns.append(turn)
        self._session.has_replies = True
        self._session.note(self, "assistant", turn.text)
        reply = Message(role="assistant", content=asked.begun + turn.text)
        history = (*asked.said, reply) if asked.said else ()
        self.context = replace(asked, said=history, ids=(*asked.ids, *turn.output_ids), begun="")
        return begin + turn.text

    async def _resume_context(self, text: str) -> Context:
        before = self.context
        if not before.ids or before.unread or (before.said and before.said[-1]["role"] != "assistant"):
            raise ValueError(f"agent {self.name!r} has no reply to resume: call chat first")
        if self.has_ended_reply:
            raise ValueError(f"agent {self.name!r} has ended its reply: call chat for another one")
        ids = before.ids + await self._policy.append(text) if text else before.ids
        if not before.said:
            return replace(before, ids=ids)
        return replace(before, said=before.said[:-1], ids=ids, begun=before.said[-1]["content"] + text)

    async def _prompt_context(self, prompt: Prompt | None, tools: tuple[ToolSchema, ...]) -> Context:
        before = self.context
        if not before.said and not before.is_plain and isinstance(prompt, str) and self._policy.has_chat_template:
            prompt = messages_of(prompt)
        if not before.said and not isinstance(prompt, tuple):
            if tools:
                raise ValueError(
                    f"agent {self.name!r} speaks plain text, which offers no tools: begin with messages, or with a "
                    "system message"
                )
            text = before.unread + (prompt or "")
            ids = before.ids + await (self._policy.append(text) if before.ids else self._policy.encode(text))
            return replace(before, ids=ids, unread="")
        if before.is_plain:
            raise ValueError(f"agent {self.name!r} began with plain text and cannot go on with messages")
        new = () if prompt is None else messages_of(prompt)
        if not before.ids:
            history, options = (*before.said, *new), self._session.task.chat_options(tools)
            ids = await self._policy.encode(history, options)
            begun = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
            return Context(history[:-1] if begun else history, ids, begun=begun, opened_with=options, offered=tools)
        if tools and tools != before.offered:
            new = append_paragraph(new, describe_tools(tools)) if new else messages_of(describe_tools(tools))
        ids = await self._policy.extend(before.ids, before.said, new, before.opened_with)
        return replace(before, said=(*before.said, *new), ids=ids, offered=tools or before.offered)

    async def _sample_turn(
        self, prompt_ids: tuple[int, ...], max_new_tokens: int | None, stop: tuple[str, ...], tell: Tell | None
    ) -> Turn:
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; a reply has one token at least")
        session, policy = self._session, self._policy
        budget, purse = session.budget, session.purse
        if len(self.turns) >= budget.max_turns:
            raise self._mark_cut(BudgetSpent(f"{self.name} had its {budget.max_turns} turns (max_turns)"))
        most = policy.max_new_tokens if max_new_tokens is None else min(max_new_tokens, policy.max_new_tokens)
        if not (granted := purse.take_tokens(most)):
            num, key = budget.max_episode_tokens, "max_episode_tokens"
            if session.token_limit is not None and session.token_limit < (num or math.inf):
                num, key = session.token_limit, "curation.length_cap"
            what = f"the {num} tokens of the episode, or its share of them, are sampled"
            raise self._mark_cut(BudgetSpent(f"{self.name}: {what} ({key})"))
        seed = request_seed(session.seed, session.episode_index, self._num_asked, *self.path)
        self._num_asked += 1
        num_sampled = 0
        try:
            turn = await policy.sample(prompt_ids, seed, granted, stop, tell)
            num_sampled = len(turn.output_ids)
        finally:
            purse.tokens += granted - num_sampled
        session.num_sampled += num_sampled
        purse.num_sequential += num_sampled
        return turn

    def _mark_cut(self, error: AgentStopped) -> AgentStopped:
        self.is_cut = True
        return error


def _tool_message(call: Call, result: ToolResult) -> Message:
    message = Message(role="tool", content=result.content, tool_call_id=call.id)
    if isinstance(call, ToolCall):
        message["name"] = call.name
    return message
