"""A policy without a model, for tests of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlsys.types import (
    Message,
    Prompt,
    Turn,
    VersionSpan,
)


@dataclass
class ScriptedPolicy:
    """Implements `rlsys.workflow.Policy` without a model: a token is a character, and `reply` says what comes next.

    Messages are written as `<role>content`, each on a line of its own, and the assistant's turn is opened by
    `<assistant>`; so that what was said before is always kept as it is.
    """

    reply: Callable[[str], str] = lambda prompt: "ok"
    """The reply to the text of everything said so far."""
    max_new_tokens: int = 1000
    """A longer reply is cut there, with finish `length`."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Prompt and seed of every request, in order."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(map(ord, prompt if isinstance(prompt, str) else _written(prompt)))

    def extend(self, ids: tuple[int, ...], said: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[int, ...]:
        return ids + self.encode("\n" + _written(new))

    async def sample(self, prompt_ids: tuple[int, ...], seed: int) -> Turn:
        prompt = "".join(map(chr, prompt_ids))
        self.asked.append((prompt, seed))
        await asyncio.sleep(0)
        reply = self.reply(prompt)
        text = reply[: self.max_new_tokens]
        finish = "stop" if text == reply else "length"
        ids, logprobs = tuple(map(ord, text)), (-1.0,) * len(text)
        return Turn(prompt_ids, ids, logprobs, (VersionSpan(0, len(ids)),), finish, text)

    async def recite(self, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        ids = tuple(map(ord, reply))
        return Turn(prompt_ids, ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids)),), "stop", reply)


def _written(messages: Sequence[Message]) -> str:
    return "\n".join([*(f"<{m['role']}>{m['content']}" for m in messages), "<assistant>"])
