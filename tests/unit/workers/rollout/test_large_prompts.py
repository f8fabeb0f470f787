"""Large prompts: refused by their size before they are tokenized, and tokenized beside the other sessions."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from examples.tiny_policy import build_tokenizer
from rlsys.errors import TaskTooLong
from rlsys.types import Message, Prompt
from tests.replicas import text_of, until
from workers.rollout.policy_text import LARGE, PolicyText
from workers.text.tokenizer import TextTokenizer


class HeldTokenizer(TextTokenizer):
    """Keeps large texts until a test releases them, and counts all texts that it tokenizes."""

    def __init__(self) -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        self.num_texts, self.release = 0, threading.Event()
        super().__init__(tokenizer)

    def _tokens(self, text: str) -> tuple[int, ...]:
        self.num_texts += 1
        if len(text) > LARGE:
            assert self.release.wait(20), "the event loop waits for a text"
        return super()._tokens(text)


def limited(codec: TextTokenizer, max_prompt_tokens: int) -> PolicyText:
    return replace(
        text_of(4), codec=codec, max_prompt_tokens=max_prompt_tokens, max_context_tokens=max_prompt_tokens + 4
    )


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


@pytest.mark.parametrize("prompt", ["1" * (LARGE + 1), user("1" * (LARGE + 1))], ids=["text", "messages"])
def test_others_are_served_while_a_large_text_is_tokenized(prompt: Prompt):
    codec = HeldTokenizer()
    text = limited(codec, LARGE + 1)

    async def scenario() -> None:
        large = [asyncio.create_task(text.encode(prompt)) for _ in range(4)]
        await until(lambda: codec.num_texts == 1)
        assert len(await text.encode("12>")) == 3
        assert not any(task.done() for task in large)
        codec.release.set()
        first, *others = await asyncio.gather(*large)
        assert len(first) == LARGE + 1 and others == [first] * 3

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert codec.num_texts == 2, "the episodes of a group share their prompt"


@pytest.mark.parametrize("prompt", ["1" * 5_000_000, user("1" * 5_000_000)], ids=["text", "messages"])
def test_an_oversize_prompt_is_not_tokenized(prompt: Prompt):
    codec = HeldTokenizer()
    text = limited(codec, 60)
    limit = r"5000000 bytes of text, .* at most 64 bytes; a conversation has at most rollout\.max_context_tokens = 64"
    with pytest.raises(TaskTooLong, match=limit):
        asyncio.run(text.encode(prompt))
    assert codec.num_texts == 0


def test_a_conversation_that_grew_oversize_is_not_tokenized():
    codec = HeldTokenizer()
    text = limited(codec, 60)

    async def scenario() -> None:
        ids = await text.encode(user("12>"))
        said = (*user("12>"), Message(role="assistant", content="21"))
        with pytest.raises(TaskTooLong, match=r"rollout\.max_context_tokens = 64"):
            await text.extend(ids, said, user("1" * 5_000_000))

    asyncio.run(scenario())
    assert codec.num_texts == 1
