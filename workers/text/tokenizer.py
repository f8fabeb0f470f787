"""Text to token ids and back, by a Hugging Face fast tokenizer, without ever tokenizing again what the policy said."""

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
"""Those of a group's episodes are the same, and asked for at the same time."""


class TextTokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        end_id, end_text = tokenizer.eos_token_id, tokenizer.eos_token
        self._end = (end_id, end_text) if isinstance(end_id, int) and isinstance(end_text, str) else None
        self._template = ChatTemplate(tokenizer)
        self._opened = lru_cache(maxsize=_CACHED_PROMPTS)(self._tokens)

    @classmethod
    def load(cls, model_path: str | Path) -> TextTokenizer:
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

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """Plain text as it is; messages in the chat template, with the tools on offer and the assistant's turn opened.

        Raises `DataError` for messages where there is no template or it refuses them.
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

        The template's text after the policy's last reply is tokenized and appended, also where the template trims
        replies. One that rewrites what came before (hidden reasoning, for instance) cannot be continued: then the whole
        is tokenized, which starts a new sample.
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
        """Token ids of a whole reply that the policy might have given: its text, ended as the policy ends one."""
        ids = self._tokens(text)
        if self._end is None or ids[-1:] == (self._end[0],):
            return ids
        return (*ids, self._end[0])

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids`, special tokens left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Half a surrogate pair, which no tokenizer takes, is read as `?`."""
        pieces = text.encode(errors="replace").decode().split(BREAK)
        return tuple(token for piece in pieces for token in self._backend.encode(piece, add_special_tokens=False).ids)
