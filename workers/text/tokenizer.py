"""Text to token ids and back with a Hugging Face fast tokenizer. Sampled text is never tokenized again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlsys.agents.session_budget import messages_of
from rlsys.agents.tool_calls import OPEN, describe_tools, with_calls_as_text
from rlsys.config.chat_section import NO_TEMPLATE, ChatSection
from rlsys.config.config_problems import short_repr
from rlsys.errors import DataError, ModelError
from rlsys.types import NO_OPTIONS, ChatOptions, Json, Message, Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

AS_MADE = ChatSection()
"""Chat as the model's makers mean it."""
_CACHED_PROMPTS = 64
"""The episodes of a group share their prompt, and encode it at the same time."""
_MIN_BYTES = 64
"""Least `TextTokenizer.bytes_per_token`: some tokenizers drop whitespace, or read an unknown word as one token."""
_SPARE_TOKENS = 8
"""Tokens that a tokenizer may add to those of a text, such as one for its beginning."""
_OPENING = re.compile(r"(<(?:think|thinking|reasoning)>)\s*$")
_OPENING_IDS = 16
"""Most tokens of an opening tag with the space after it."""


class TextTooLarge(Exception):
    """A text of more bytes than the tokens it may have. It was not tokenized."""


class TextTokenizer:
    """Tokenizer, chat template and stop tokens of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat: ChatSection = AS_MADE,
        stop_ids: Iterable[int] = (),
        num_ids: int | None = None,
    ) -> None:
        """`stop_ids` are those of the model's generation configuration; the tokenizer and its chat template add more.
        The files of `chat` are read, see `ChatSection.with_text`. `num_ids` are those of the model, which often has
        more than the tokenizer; None: as many as the tokenizer has."""
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer, chat)
        self._skips_special = chat.skip_special_tokens
        self._cached = lru_cache(maxsize=_CACHED_PROMPTS)(self._tokens)
        own = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None
        end = self._template.end_of_turn
        self._end_of_reply = own if end is None else end
        self.stop_ids = frozenset(token for token in (own, end, *stop_ids) if token is not None)
        """Tokens that end a completion; empty if the model has none."""
        self._start = self._start_ids()
        self.bytes_per_token = max(_MIN_BYTES, *(len(token.encode()) for token in tokenizer.get_vocab()))
        """Bytes of the longest token of the vocabulary."""
        self.num_ids = num_ids or max(tokenizer.get_vocab().values()) + 1
        """Token ids that the model can read and sample, from 0."""

    @classmethod
    def load(cls, model_path: str | Path, chat: ChatSection = AS_MADE) -> TextTokenizer:
        """Load the tokenizer of a model. Raises `ModelError` if the path has no fast tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path: no tokenizer at {str(model_path)!r}: {error}") from error
        if not tokenizer.is_fast:
            raise ModelError(f"model.path: the tokenizer at {str(model_path)!r} has no fast version (tokenizer.json)")
        return cls(tokenizer, chat, _stop_ids_at(model_path), _num_ids_at(model_path))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop tokens as text, by their ids."""
        return tuple(self.spell([token]) for token in sorted(self.stop_ids))

    def special_in(self, text: str) -> str | None:
        """The first special token that a text contains, None if there is none."""
        return self._template.special_in(text)

    @property
    def template(self) -> str | None:
        """The chat template in Jinja; None if there is none."""
        return self._template.text

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode_task(self, task: Task) -> tuple[int, ...]:
        """Token ids of a task's prompt as a single turn sends it: a text is a user's message if there is a template."""
        if isinstance(task.prompt, str) and not self.has_chat_template:
            return self.encode(task.prompt)
        return self.encode(messages_of(task.prompt), task.chat_options(task.tools))

    def fits(self, task: Task, most: int) -> bool:
        """True if a task's prompt has at most `most` tokens. A text of fewer bytes is not tokenized for that."""
        if isinstance(task.prompt, str) and not self.has_chat_template:
            text = task.prompt
        else:
            text = self._template.render(messages_of(task.prompt), task.chat_options(task.tools))
        if len(text.encode(errors="replace")) + len(self._start) + _SPARE_TOKENS <= most:
            return True
        return len(self.encode_task(task)) <= most

    def encode(self, prompt: Prompt, options: ChatOptions = NO_OPTIONS, *, most: int | None = None) -> tuple[int, ...]:
        """Encode the start of a context. Messages are rendered in the chat template with the assistant's turn opened;
        if the last one is the assistant's, the reply continues it. Plain text comes after the start token, if the
        tokenizer has one.

        Raises `DataError` for messages if there is no template or if it refuses them, and `TextTooLarge` for a text
        that has more than `most` tokens by its size alone.
        """
        if isinstance(prompt, str):
            return self._start + self._cached(self._fitting(prompt, most))
        return self._cached(self._fitting(self._template.render(prompt, options), most))

    def append(self, text: str, *, most: int | None = None) -> tuple[int, ...]:
        """Encode plain text that continues a context. Raises `TextTooLarge` as `encode` does."""
        return self._tokens(self._fitting(text, most))

    def extend(
        self,
        ids: tuple[int, ...],
        history: tuple[Message, ...],
        new: tuple[Message, ...],
        options: ChatOptions = NO_OPTIONS,
        *,
        most: int | None = None,
    ) -> tuple[int, ...]:
        """Prompt ids that continue `ids`; see `rlsys.agents.workflow.Policy`. Raises as `encode` does.

        The template's text after the policy's last reply is tokenized and appended, even if the template trims replies.
        A template that rewrites earlier text (for example, hides reasoning) cannot be continued. Then the whole
        conversation is tokenized, which starts a new sample.
        """
        text = self._fitting(self._template.render((*history, *new), options, opens_turn=True), most)
        before = self._template.render(history[:-1], options, opens_turn=True)
        reply = self._template.literal(history[-1]["content"])
        written = (before + form for form in (reply, reply.rstrip(), reply.lstrip(), reply.strip()))
        seen = next(filter(text.startswith, written), None)
        if seen is None:
            return self._tokens(text)
        rest = text[len(seen) :]
        if ids[-1] in self.stop_ids:
            rest = rest.removeprefix(self.spell(ids[-1:]))
        return ids + self._tokens(rest)

    def reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a complete reply with this text, including the token that ends a completion: the end of a turn
        of the chat template, or the tokenizer's end token."""
        ids = self._tokens(text)
        if self._end_of_reply is None or (ids and ids[-1] in self.stop_ids):
            return ids
        return (*ids, self._end_of_reply)

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of a reply, without the token that ends it; without special tokens if the configuration says so."""
        written = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self._backend.decode(written, skip_special_tokens=self._skips_special)

    def opening_of(self, prompt_ids: tuple[int, ...]) -> str:
        """The tag, such as `<think>`, with which a prompt ends: the reply goes on inside it. Empty if there is none."""
        found = _OPENING.search(self.spell(prompt_ids[-_OPENING_IDS:]))
        return found[1] if found else ""

    def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _start_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a text, such as `<s>`; those that it puts after one are left out."""
        words = sorted({*self.tokenizer.get_vocab()} - {*self.tokenizer.all_special_tokens})
        mark = next(filter(self._can_encode, (_MARK, *words)), "")
        whole = self._backend.encode(mark, add_special_tokens=True).ids
        text = self._backend.encode(mark, add_special_tokens=False).ids
        starts = (at for at in range(len(whole) - len(text) + 1) if whole[at : at + len(text)] == text)
        return tuple(whole[: next(starts, 0)])

    def _can_encode(self, text: str) -> bool:
        try:
            return bool(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception:  # noqa: BLE001  (its library raises no other class)
            return False

    def _fitting(self, text: str, most: int | None) -> str:
        """Return the text; raises `TextTooLarge` if even tokens of `bytes_per_token` would be more than `most`."""
        num_bytes = len(text.encode(errors="replace"))
        if most is not None and num_bytes > most * self.bytes_per_token:
            raise TextTooLarge(f"{num_bytes} bytes of text, and a token has at most {self.bytes_per_token} bytes")
        return text

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text. An unpaired surrogate, which no tokenizer accepts, is read as `?`.

        Raises `DataError` for a text that needs a token for the unknown, without which a vocabulary may be.

        Other threads run meanwhile: the tokenizer lets go of Python's lock for a batch, not for a single text.
        """
        pieces = text.encode(errors="replace").decode().split(BREAK)
        try:
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        except Exception as error:  # its library raises no other class
            raise DataError(f"the model's tokenizer cannot read {short_repr(text)}: {error}") from error
        return tuple(token for encoding in encodings for token in encoding.ids)


def _stop_ids_at(model_path: str | Path) -> tuple[int, ...]:
    """End tokens that the files of a model list: those of `generation_config.json`, or of `config.json` without it."""
    from transformers import GenerationConfig, PreTrainedConfig

    try:
        found: object = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        try:
            found = PreTrainedConfig.get_config_dict(model_path)[0].get("eos_token_id")
        except OSError:  # a folder with a tokenizer alone
            return ()
    ids = found if isinstance(found, list) else [found]
    return tuple(token for token in ids if isinstance(token, int))


def _num_ids_at(model_path: str | Path) -> int | None:
    """Vocabulary of a model by its `config.json`, also where that has the text model in a section."""
    from transformers import PreTrainedConfig

    try:
        found = PreTrainedConfig.get_config_dict(model_path)[0]
    except OSError:  # a folder with a tokenizer alone
        return None
    sizes = (section.get("vocab_size") for section in (found.get("text_config"), found) if isinstance(section, dict))
    return next((size for size in sizes if isinstance(size, int)), None)


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
    """Chat template of one tokenizer, or the one that replaces it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatSection = AS_MADE) -> None:
        self._tokenizer, self._system, self._kwargs = tokenizer, chat.system, chat.template_kwargs
        own = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.text = None if chat.template == NO_TEMPLATE else chat.template or own
        """The template in Jinja; None if there is none."""
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def special_in(self, text: str) -> str | None:
        """The first special token that a text contains, None if there is none."""
        found = self._special.search(text)
        return found and found[0]

    def literal(self, text: str) -> str:
        """Break up special tokens with `BREAK`, so that they are tokenized as ordinary text."""
        return self._special.sub(lambda found: BREAK.join(found[0]), text)

    def render(
        self, messages: Sequence[Message], options: ChatOptions = NO_OPTIONS, *, opens_turn: bool | None = None
    ) -> str:
        """Render the conversation and open the assistant's turn. The result must be tokenized apart at every `BREAK`.

        If the last message is the assistant's, the text ends where that message does; `opens_turn=True` opens another
        turn after it. Raises `DataError` if there is no template or if it refuses the conversation.
        """
        fitted: Sequence[Message] = [with_calls_as_text(message).copy() for message in messages]
        for message in fitted:
            message["content"] = self.literal(message["content"])
        tools = [json.loads(self.literal(json.dumps(dict(tool), ensure_ascii=False))) for tool in options.tools]
        if any(message["role"] == "tool" for message in messages) and not self._takes_results:
            fitted = list(_results_by_user(fitted))
        system = self._system if options.system is None else options.system
        if system and messages[0]["role"] != "system":
            fitted = self._with_system(fitted, system)
        if tools and not self._offers_tools:
            fitted, tools = self._with_system(fitted, describe_tools(tools)), []
        if opens_turn is None:
            opens_turn = fitted[-1]["role"] != "assistant"
        text = self._render_chat(fitted, tools, options.template_kwargs, opens_turn=opens_turn)
        return text if opens_turn else self._cut_after(text, fitted[-1]["content"])

    def _cut_after(self, text: str, reply: str) -> str:
        """Cut a rendered conversation after its last message, so that the model continues it."""
        stripped = reply.rstrip() if reply not in text else reply
        place = text.rfind(stripped)
        if place < 0:
            raise DataError(
                f"the chat template of {self._whose} changes the assistant's last message, so no reply can continue "
                "it: end the prompt with a user's message"
            )
        return text[: place + len(stripped)]

    def _with_system(self, messages: Sequence[Message], text: str) -> list[Message]:
        """Add a text to the system message, or to the first message if there can be none."""
        first, rest = messages[0], messages[1:]
        if first["role"] == "system":
            return [Message(role="system", content=f"{first['content']}\n\n{text}"), *rest]
        if self._shows(Message(role="system", content=_MARK), _USER):
            return [Message(role="system", content=text), *messages]
        return [Message(role=first["role"], content=f"{text}\n\n{first['content']}"), *rest]

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template writes after an assistant's message; None if it writes none."""
        try:
            text = self._render_chat([_USER, Message(role="assistant", content=_MARK)], opens_turn=False)
        except DataError:
            return None
        end = self._special.match(text.rpartition(_MARK)[2].lstrip())
        found = self._tokenizer.convert_tokens_to_ids(end[0]) if end else None
        return found if isinstance(found, int) else None

    @cached_property
    def _offers_tools(self) -> bool:
        try:
            text = self._render_chat([_USER], [_TOOL])
        except DataError:
            return False
        return _MARK in text and OPEN in text and '"arguments"' in text

    @cached_property
    def _takes_results(self) -> bool:
        result = Message(role="tool", content=_MARK, tool_call_id="call_0_0_0", name="tool")
        return self._shows(_USER, _ASSISTANT, result)

    def _shows(self, *messages: Message) -> bool:
        try:
            return _MARK in self._render_chat(messages)
        except DataError:
            return False

    @property
    def _whose(self) -> str:
        return f"the model {self._tokenizer.name_or_path!r}"

    def _render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] = (),
        template_kwargs: Mapping[str, Json] = NO_OPTIONS.template_kwargs,
        *,
        opens_turn: bool = True,
    ) -> str:
        options = ChatOptions(tuple(tools), {**self._kwargs, **template_kwargs})
        return render_template(
            self._tokenizer, messages, self.text, whose=self._whose, opens_turn=opens_turn, options=options
        )


def render_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template: str | None,
    *,
    whose: str,
    opens_turn: bool,
    options: ChatOptions = NO_OPTIONS,
) -> str:
    """Render messages in a chat template; with `opens_turn`, also the start of the assistant's reply.

    Raises `DataError`, which names the model as `whose`, if there is no template or if it refuses the conversation.
    """
    if template is None:
        raise DataError(
            f"the prompt is a list of messages, but {whose} has no chat template: give plain text prompts, "
            "a model that has one, or rollout.chat.template"
        )
    conversation: list[Any] = [dict(message) for message in messages]
    offered: list[Any] = [dict(tool) for tool in options.tools]
    more: Any = options.template_kwargs
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            offered or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=opens_turn,
            **more,
        )
    except (TemplateError, TypeError) as error:
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
