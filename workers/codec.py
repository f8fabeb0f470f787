"""Text to token ids and back, by a Hugging Face fast tokenizer, without ever tokenizing again what the policy said."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from rlsys.errors import DataError, ModelError
from rlsys.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class TextCodec:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        end_id, end_text = tokenizer.eos_token_id, tokenizer.eos_token
        self._end = (end_id, end_text) if isinstance(end_id, int) and isinstance(end_text, str) else None
        self._encode_text = lru_cache(maxsize=4096)(self._encode_text)

    @classmethod
    def load(cls, model_path: str | Path) -> TextCodec:
        """Raises `ModelError` if the path holds no fast tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: no tokenizer at {str(model_path)!r}: {error}") from error
        if not tokenizer.is_fast:
            raise ModelError(f"model.path: the tokenizer at {str(model_path)!r} has no fast version (tokenizer.json)")
        return cls(tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token that ends a completion; empty for a tokenizer that has none."""
        return frozenset() if self._end is None else frozenset([self._end[0]])

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Plain text as it is; messages in the chat template, with the assistant's turn opened.

        Raises `DataError` for messages where there is no template or it refuses them.
        """
        return self._encode_text(prompt if isinstance(prompt, str) else self._render(prompt))

    def extend(self, ids: tuple[int, ...], said: tuple[Message, ...], new: tuple[Message, ...]) -> tuple[int, ...]:
        """Prompt ids that continue `ids`; see `rlsys.workflow.Policy`.

        The template's text after the policy's last reply is tokenized and appended. A template that rewrites what
        came before
        (hidden reasoning, for instance) cannot be continued: then the whole is tokenized, which starts a new sample.
        """
        text = self._render((*said, *new))
        before = self._render(said[:-1]) + said[-1]["content"]
        if not text.startswith(before):
            return self._encode_text(text)
        rest = text[len(before) :]
        if self._end is not None and ids[-1] == self._end[0]:
            rest = rest.removeprefix(self._end[1])
        return ids + self._encode_text(rest)

    def reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole reply that the policy might have given: its text, ended as the policy ends one."""
        ids = self._encode_text(text)
        if self._end is None or ids[-1:] == (self._end[0],):
            return ids
        return (*ids, self._end[0])

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids`, special tokens left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: tuple[Message, ...]) -> str:
        whose = f"the model {self.tokenizer.name_or_path!r}"
        return rendered(self.tokenizer, messages, whose=whose, opens_turn=True)


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, whose: str, opens_turn: bool) -> str:
    """Messages in a tokenizer's chat template; `opens_turn`: with the beginning of the assistant's reply.

    Raises `DataError`, which names the model as `whose`, if there is no template or it refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the prompt is a list of messages, but {whose} has no chat template: give plain text prompts, "
            "or a model that has one"
        )
    conversation = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=opens_turn))
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise DataError(
            f"the chat template of {whose} refuses a conversation of {roles}: {error}; "
            "give the tasks' prompts the roles that it takes, in its order, or change the template"
        ) from error
