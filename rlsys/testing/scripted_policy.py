"""Policy without a model, for tests of workflows."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlsys.agents.agent import Policy, Tell
from rlsys.agents.tool_calls import describe_tools
from rlsys.agents.workflow import Workflow
from rlsys.errors import DataError
from rlsys.types import (
    NO_OPTIONS,
    ChatOptions,
    Episode,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Task,
    Turn,
    VersionSpan,
)


@dataclass
class ScriptedPolicy:
    """Implement `rlsys.agents.workflow.Policy` without a model: a token is a character, and `reply` returns the next
    text.

    Messages are encoded as `<role>content`, one on a line, and `<assistant>` opens the assistant's turn. So an encoded
    conversation is always a prefix of its continuation. A line `<tools>` before the first message describes the tools;
    `extend` adds none, as with a tokenizer.
    """

    reply: Callable[[str], str] = lambda prompt: "ok"
    """Function from the text so far to the reply."""
    max_new_tokens: int = 1000
    """Length at which a reply is cut, with finish `length`."""
    version: PolicyVersion = 0
    """Version of all its tokens."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Prompt and seed of every request, in order."""
    has_chat_template: bool = False
    """True to read text prompts as messages of the user."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return ()

    def spell(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def check_task(self, prompt_ids: tuple[int, ...]) -> None:
        """Do nothing: prompts of any length are allowed."""

    def check_ids(self, ids: Sequence[int]) -> None:
        if max(ids) > sys.maxunicode:
            raise DataError(f"token {max(ids)} is no character")

    async def encode(self, prompt: Prompt, options: ChatOptions = NO_OPTIONS) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.append(prompt)
        offer = f"<tools>{describe_tools(options.tools)}\n" if options.tools else ""
        text = offer + _prompt_text(prompt)
        return await self.append(text.removesuffix("\n<assistant>") if prompt[-1]["role"] == "assistant" else text)

    async def append(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    async def extend(
        self,
        ids: tuple[int, ...],
        history: tuple[Message, ...],
        new: tuple[Message, ...],
        options: ChatOptions = NO_OPTIONS,
    ) -> tuple[int, ...]:
        return ids + await self.append("\n" + _prompt_text(new))

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        prompt = "".join(map(chr, prompt_ids))
        self.asked.append((prompt, seed))
        await asyncio.sleep(0)
        reply = self.reply(prompt)
        most = min(self.max_new_tokens, max_new_tokens or self.max_new_tokens)
        ends = [place + len(each) for each in stop if (place := reply.find(each)) >= 0]
        reply = reply[: min(ends, default=len(reply))]
        text = reply[:most]
        if tell is not None:
            for end in range(1, len(text)):
                tell(text[:end])
                await asyncio.sleep(0)
        finish = "stop" if text == reply else "length"
        ids, logprobs = tuple(map(ord, text)), (-1.0,) * len(text)
        sampling = Sampling(max_new_tokens=most)
        return Turn(prompt_ids, ids, logprobs, (VersionSpan(self.version, len(ids)),), finish, text, sampling)

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        ids = tuple(map(ord, reply))
        return Turn(prompt_ids, ids, (-1.0,) * len(ids), (VersionSpan(self.version, len(ids)),), "stop", reply)


def _prompt_text(messages: Sequence[Message]) -> str:
    return "\n".join([*(f"<{m['role']}>{m['content']}" for m in messages), "<assistant>"])


def play_scripted(
    workflow: Workflow,
    task: Task,
    reply: Callable[[str], str] | Policy | Mapping[str, Policy],
    *,
    seed: int = 1,
    episode_index: int = 0,
    bindings: Mapping[str, str] | None = None,
) -> Episode:
    """Play one session of a workflow on a task, without an engine.

    `reply` is a function from the text so far to a scripted policy's reply; or a policy, or several policies by name.
    """
    if isinstance(reply, Mapping):
        policies = reply
    else:
        policies = {"policy": ScriptedPolicy(reply) if callable(reply) else reply}
    session = workflow.session(task, policies, seed, episode_index, bindings or {})
    return asyncio.run(workflow.play(session))
