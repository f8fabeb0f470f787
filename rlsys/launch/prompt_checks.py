"""Checks of what the model reads, before anything starts: its tokenizer, chat template and the prompts of the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsys.config import Config
from rlsys.errors import DataError, ModelError
from rlsys.types import Task
from rlsys.util.files import can_be_hub_name

if TYPE_CHECKING:
    from workers.text.tokenizer import TextTokenizer

NUM_MEASURED = 100
"""Tasks whose prompts are rendered."""


def check_prompts(config: Config, key: str, tasks: Sequence[Task]) -> None:
    """Load the tokenizer. If the workflow opens with the task's prompt, render the first tasks of `key` and one of each
    order of roles.

    Raises `ModelError` for a model without a tokenizer, `DataError` for prompts that the chat template refuses, or that
    it would render a second time.
    """
    tokenizer = _tokenizer(config)
    if config.has_reference and config.reference.path is not None:
        _check_vocabulary(config, tokenizer)
    if not config.rollout.workflow.opens_with_prompt:
        return
    first = tasks[:NUM_MEASURED]
    for task in [*first, *_of_new_roles(tasks[NUM_MEASURED:], first)]:
        _encode_prompt(tokenizer, key, task)
    _check_rendered_once(tokenizer, key, tasks)


def too_long(config: Config, key: str, tasks: Sequence[Task]) -> list[str]:
    """Ids of the tasks whose prompts a rollout would refuse for their length; none if the workflow does not open with
    the prompt.

    Raises `ModelError` for a model without a tokenizer, `DataError` for prompts that the chat template refuses, or if
    all are too long.
    """
    if not config.rollout.workflow.opens_with_prompt:
        return []
    tokenizer, most = _tokenizer(config), min(config.data.max_prompt_tokens, config.max_context_tokens - 1)
    found = [task.id for task in tasks if not tokenizer.fits(task, most)]
    if len(found) == len(tasks):
        lengths = [len(_encode_prompt(tokenizer, key, task)) for task in tasks[:NUM_MEASURED]]
        raise DataError(
            f"{key}: none of the {len(tasks)} prompts has at most {most} tokens, and the first {len(lengths)} have "
            f"{min(lengths)} to {max(lengths)}: raise data.max_prompt_tokens, or rollout.max_context_tokens"
        )
    return found


def _tokenizer(config: Config) -> TextTokenizer:
    from workers.text.tokenizer import TextTokenizer

    path = config.model.path
    try:
        return TextTokenizer.load(path, config.rollout.chat.with_text())
    except ModelError as error:
        if Path(path).is_dir() or not can_be_hub_name(path):
            raise
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ModelError(
            f"model.path: there is no folder {path}, and as a model of the hub it does not load: {reason}"
        ) from error


def _check_vocabulary(config: Config, tokenizer: TextTokenizer) -> None:
    """Raise `ModelError` if the reference reads token ids as other tokens than the policy."""
    from workers.text.tokenizer import TextTokenizer

    path = str(config.reference.path)
    try:
        other = TextTokenizer.load(path)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "reference.path", 1)) from error
    own, theirs = tokenizer.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    if own != theirs:
        differ = next((t for t in {**own, **theirs} if own.get(t) != theirs.get(t)), "")
        raise ModelError(
            f"reference.path: {path} has another vocabulary than model.path, {config.model.path} ({len(theirs)} and "
            f"{len(own)} tokens; {differ!r} is {theirs.get(differ)} and {own.get(differ)}): its logprobs of the "
            "policy's tokens would mean nothing; give a model of the same tokenizer"
        )


def _encode_prompt(tokenizer: TextTokenizer, key: str, task: Task) -> tuple[int, ...]:
    try:
        return tokenizer.encode_task(task)
    except DataError as error:
        raise DataError(f"{key}: task {task.id}: {error}") from error


def _of_new_roles(tasks: Iterable[Task], known: Iterable[Task]) -> Iterator[Task]:
    """Yield the first task of every order of roles that no task of `known` has."""
    seen = set(map(_roles, known))
    for task in tasks:
        if (roles := _roles(task)) not in seen:
            seen.add(roles)
            yield task


def _roles(task: Task) -> tuple[str, ...]:
    return ("text",) if isinstance(task.prompt, str) else tuple(message["role"] for message in task.prompt)


def _check_rendered_once(tokenizer: TextTokenizer, key: str, tasks: Iterable[Task]) -> None:
    """Raise `DataError` for texts that have special tokens of a chat template already."""
    if not tokenizer.has_chat_template:
        return
    texts = ((task, task.prompt) for task in tasks if isinstance(task.prompt, str))
    rendered = [(task, special) for task, text in texts if (special := tokenizer.special_in(text))]
    if rendered:
        task, special = rendered[0]
        others = f" (and {len(rendered) - 1} more)" if rendered[1:] else ""
        raise DataError(
            f"{key}: task {task.id}{others}: its prompt contains {special}, so it seems to be in a chat template "
            "already, and would be rendered in the model's once more: give messages, or set rollout.chat.template to "
            "none"
        )
