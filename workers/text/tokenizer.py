"""Text to token ids and back with a Hugging Face fast tokenizer. Sampled text is never tokenized again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlsys.agents.tool_calls import OPEN, described, written_out
from rlsys.errors import DataError, ModelError
from rlsys.types import Json, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CACHED_PROMPTS = 64
"""The episodes of a group share their prompt, and encode it at the same time."""
_MIN_BYTES = 64
"""Least `TextTokenizer.bytes_per_token`: some tokenizers drop whitespace, or read an unknown word as one token."""


class TextTooLarge(Exception):
    """A text of more bytes than the tokens it may have. It was not tokenized."""


class TextTokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        end_id, end_text = tokenizer.eos_token_id, tokenizer.eos_token
        self._end = (end_id, end_text) if isinstance(end_id, int) and isinstance(end_text, str) else None
        self._template = ChatTemplate(tokenizer)
        self._opened = lru_cache(maxsize=_CACHED_PROMPTS)(self._tokens)
        self.bytes_per_token = max(_MIN_BYTES, *(len(token.encode()) for token in tokenizer.get_vocab()))
        """Bytes of the longest token of the vocabulary."""

    @classmethod
    def load(cls, model_path: str | Path) -> TextTokenizer:
        """Load the tokenizer of a model. Raises `ModelError` if the path has no fast tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: no tokenizer at {str(model_path)!r}: {error}") from error
        if not tokenizer.is_fast:
            raise ModelError(f"model.path: the tokenizer at {str(model_path)!r} has no fast version (tokenizer.json)")
        return cls(tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token that ends a completion; empty if the tokenizer has none."""
        return frozenset() if self._end is None else frozenset([self._end[0]])

    def encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Json]] = (), *, most: int | None = None
    ) -> tuple[int, ...]:
        """Encode plain text as it is, and messages with the chat template, the tools and an open assistant's turn.

        Raises `DataError` for messages if there is no template or if it refuses them, and `TextTooLarge` for a text
        that has more than `most` tokens by its size alone.
        """
        text = prompt if isinstance(prompt, str) else self._template.render(prompt, tools)
        return self._opened(self._fitting(text, most))

    def extend(
        self,
        ids: tuple[int, ...],
        said: tuple[Message, ...],
        new: tuple[Message, ...],
        tools: Sequence[Mapping[str, Json]] = (),
        *,
        most: int | None = None,
    ) -> tuple[int, ...]:
        """Prompt ids that continue `ids`; see `rlsys.agents.workflow.Policy`. Raises as `encode` does.

        The template's text after the policy's last reply is tokenized and appended, even if the template trims replies.
        A template that rewrites earlier text (for example, hides reasoning) cannot be continued. Then the whole
        conversation is tokenized, which starts a new sample.
        """
        text = self._fitting(self._template.render((*said, *new), tools), most)
        before, reply = self._template.render(said[:-1], tools), self._template.literal(said[-1]["content"])
        written = (before + form for form in (reply, reply.rstrip(), reply.lstrip(), reply.strip()))
        seen = next(filter(text.startswith, written), None)
        if seen is None:
            return self._tokens(text)
        rest = text[len(seen) :]
        if self._end is not None and ids[-1] == self._end[0]:
            rest = rest.removeprefix(self._end[1])
        return ids + self._tokens(rest)

    def reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a complete reply with this text, including the token that ends a completion."""
        ids = self._tokens(text)
        if self._end is None or ids[-1:] == (self._end[0],):
            return ids
        return (*ids, self._end[0])

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _fitting(self, text: str, most: int | None) -> str:
        """Return the text; raises `TextTooLarge` if even tokens of `bytes_per_token` would be more than `most`."""
        num_bytes = len(text.encode(errors="replace"))
        if most is not None and num_bytes > most * self.bytes_per_token:
            raise TextTooLarge(f"{num_bytes} bytes of text, and a token has at most {self.bytes_per_token} bytes")
        return text

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text. An unpaired surrogate, which no tokenizer accepts, is read as `?`.

        Other threads run meanwhile: the tokenizer lets go of Python's lock for a batch, not for a single text.
        """
        pieces = text.encode(errors="replace").decode().split(BREAK)
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return tuple(token for encoding in encodings for token in encoding.ids)


BREAK = "\ufdd0"
"""Separator: the texts on both sides are tokenized apart. A Unicode noncharacter, which no real text contains."""
_MARK = "Zq7"
"""A text that no template writes by itself."""
_TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {"name": _MARK, "description": _MARK, "parameters": {"type": "object", "properties": {}}},
}
_USER, _ASSISTANT = Message(role="user", content="?"), Message(role="assistant", content="!")


class ChatTemplate:
    """Chat template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def literal(self, text: str) -> str:
        """Break up special tokens with `BREAK`, so that they are tokenized as ordinary text."""
        return self._special.sub(lambda found: BREAK.join(found[0]), text)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> str:
        """Render the conversation and open the assistant's turn. The result must be tokenized apart at every `BREAK`.

        Raises `DataError` if there is no template or if it refuses the conversation.
        """
        fitted: Sequence[Message] = [written_out(message).copy() for message in messages]
        for message in fitted:
            message["content"] = self.literal(message["content"])
        tools = [json.loads(self.literal(json.dumps(dict(tool), ensure_ascii=False))) for tool in tools]
        if any(message["role"] == "tool" for message in messages) and not self._takes_results:
            fitted = list(_results_by_user(fitted))
        if tools and not self._offers_tools:
            fitted, tools = self._with_offer(fitted, described(tools)), ()
        return self._rendered(fitted, tools)

    def _with_offer(self, messages: Sequence[Message], offer: str) -> list[Message]:
        """Add the description of the tools to the system message, or to the first message if there can be none."""
        first, rest = messages[0], messages[1:]
        if first["role"] == "system":
            return [Message(role="system", content=f"{first['content']}\n\n{offer}"), *rest]
        if self._shows(Message(role="system", content=_MARK), _USER):
            return [Message(role="system", content=offer), *messages]
        return [Message(role=first["role"], content=f"{offer}\n\n{first['content']}"), *rest]

    @cached_property
    def _offers_tools(self) -> bool:
        try:
            text = self._rendered([_USER], [_TOOL])
        except DataError:
            return False
        return _MARK in text and OPEN in text and '"arguments"' in text

    @cached_property
    def _takes_results(self) -> bool:
        result = Message(role="tool", content=_MARK, tool_call_id="call_0_0_0", name="tool")
        return self._shows(_USER, _ASSISTANT, result)

    def _shows(self, *messages: Message) -> bool:
        try:
            return _MARK in self._rendered(messages)
        except DataError:
            return False

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> str:
        whose = f"the model {self._tokenizer.name_or_path!r}"
        return rendered(self._tokenizer, messages, whose=whose, opens_turn=True, tools=tools)


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    whose: str,
    opens_turn: bool,
    tools: Sequence[Mapping[str, Json]] = (),
) -> str:
    """Render messages in a tokenizer's chat template; with `opens_turn`, also the start of the assistant's reply.

    Raises `DataError`, which names the model as `whose`, if there is no template or if it refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the prompt is a list of messages, but {whose} has no chat template: give plain text prompts, "
            "or a model that has one"
        )
    conversation: list[Any] = [dict(message) for message in messages]
    offered: list[Any] = [dict(tool) for tool in tools]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tools=offered or None, tokenize=False, add_generation_prompt=opens_turn
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"the chat template of {whose} refuses a conversation of {roles}: {error}; "
            "give the tasks' prompts the roles that it takes, in its order, or change the template"
        ) from error
    return str(text)


def _results_by_user(messages: Sequence[Message]) -> Iterator[Message]:
    """Turn tool results into user messages, merged with adjacent results and the user message that follows. Templates
    with only two roles require them to alternate."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
        elif results and message["role"] == "user":
            yield Message(role="user", content="\n".join([*results, message["content"]]))
            results = []
        else:
            if results:
                yield Message(role="user", content="\n".join(results))
            yield message
            results = []
    if results:
        yield Message(role="user", content="\n".join(results))
