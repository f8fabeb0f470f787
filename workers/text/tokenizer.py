"""Text to token ids and back with a Hugging Face fast tokenizer. Sampled text is never tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlsys.errors import ModelError
from rlsys.types import Json, Message, Prompt
from workers.text.chat_template import BREAK, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_CACHED_PROMPTS = 64
"""The episodes of a group share their prompt, and encode it at the same time."""


class TextTokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        end_id, end_text = tokenizer.eos_token_id, tokenizer.eos_token
        self._end = (end_id, end_text) if isinstance(end_id, int) and isinstance(end_text, str) else None
        self._template = ChatTemplate(tokenizer)
        self._opened = lru_cache(maxsize=_CACHED_PROMPTS)(self._tokens)

    @classmethod
    def load(cls, model_path: str | Path) -> TextTokenizer:
        """Load the tokenizer of a model. Raises `ModelError` if the path has no fast tokenizer."""
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
        """The token that ends a completion; empty if the tokenizer has none."""
        return frozenset() if self._end is None else frozenset([self._end[0]])

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """Encode plain text as it is, and messages with the chat template, the tools and an open assistant's turn.

        Raises `DataError` for messages if there is no template or if it refuses them.
        """
        return self._opened(prompt if isinstance(prompt, str) else self._template.render(prompt, tools))

    def extend(
        self,
        ids: tuple[int, ...],
        said: tuple[Message, ...],
        new: tuple[Message, ...],
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> tuple[int, ...]:
        """Prompt ids that continue `ids`; see `rlsys.agents.workflow.Policy`.

        The template's text after the policy's last reply is tokenized and appended, even if the template trims replies.
        A template that rewrites earlier text (for example, hides reasoning) cannot be continued. Then the whole
        conversation is tokenized, which starts a new sample.
        """
        text = self._template.render((*said, *new), tools)
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

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text. An unpaired surrogate, which no tokenizer accepts, is read as `?`."""
        pieces = text.encode(errors="replace").decode().split(BREAK)
        return tuple(token for piece in pieces for token in self._backend.encode(piece, add_special_tokens=False).ids)
