"""Report on a data file before the first run: its content, and the first prompt as a model sees it.

rlsys data inspect train.parquet --model my-org/my-model --max-prompt-tokens 512
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import orjson
from xxhash import xxh3_64_hexdigest

from rlsys.data.row_adapters import AS_FOUND, Columns, Row
from rlsys.data.task_file import read
from rlsys.types import Message, Prompt, Task

Ids: TypeAlias = tuple[int, ...]

_TASKS_SHOWN = 2
_WIDTH = 200
"""Characters of one value in the text report; the JSON report is not cut."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Tokenization of prompts, the same as in a rollout worker."""

    opened: Callable[[Task], Ids]
    """Tokens of a task's prompt."""
    encode: Callable[[Prompt], Ids]
    extend: Callable[[Ids, tuple[Message, ...], tuple[Message, ...]], Ids]
    """From ids, their messages and new messages to the ids of all; see `rlsys.agents.workflow.Policy`."""
    spell: Callable[[Ids], str]
    """Text of ids, special tokens included."""
    template: str | None
    """Chat template; None for a model without one."""
    stops: tuple[str, ...]
    """The tokens that end a reply, as text."""


@dataclass(frozen=True, slots=True)
class ColumnReport:
    """One column of the file."""

    name: str
    num_filled: int
    """Rows with a value other than null."""
    became: tuple[str, ...]
    """Uses of the column, e.g. `("prompt",)`, or `("answer (reward_model.ground_truth)", "info.reward_model")`."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the prompts: nearest-rank percentiles, so that each is the length of an actual prompt."""

    unit: Literal["tokens", "characters"]
    min: int
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, unit: Literal["tokens", "characters"], lengths: Sequence[int]) -> Lengths:
        """Compute the percentiles of `lengths`, which must not be empty."""
        ranked = sorted(lengths)
        p50, p90, p99 = (ranked[math.ceil(len(ranked) * percent / 100) - 1] for percent in (50, 90, 99))
        return cls(unit, ranked[0], p50, p90, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Properties of a chat template."""

    hash: str
    """Hash of its text (xxh3, 64 bits)."""
    keeps_turns: bool
    """True if a conversation of two turns starts with the rendering of its first turn and that turn's answer. Then a
    trajectory of several turns is one sample."""
    keeps_reasoning: bool
    """The same for an answer that begins with `<think>...</think>`."""

    @classmethod
    def of(cls, template: str, rendering: Rendering) -> TemplateReport:
        """Test the template with a short conversation."""
        digest = xxh3_64_hexdigest(template.encode())
        return cls(digest, _is_kept(rendering, "4"), _is_kept(rendering, "<think>\n2 and 2\n</think>\n\n4"))


@dataclass(frozen=True, slots=True)
class Inspection:
    """Report on a data file."""

    path: str
    split: str | None
    """Split that was read; None for a file, or a folder of one data set."""
    kind: str
    """Form of the rows: plain, trl, verl or skyrl."""
    num_rows: int
    num_answers: int
    """Rows with an answer."""
    columns: tuple[ColumnReport, ...]
    tasks: tuple[Task, ...]
    """The first two tasks."""
    lengths: Lengths
    max_prompt_tokens: int | None
    num_too_long: int | None
    """Prompts longer than `max_prompt_tokens`; None without that limit."""
    first_prompt: str | None
    """First prompt as the model sees it, special tokens included; None without a model."""
    template: TemplateReport | None
    """None without a model or a chat template."""
    stops: tuple[str, ...] | None
    """The tokens that end a reply, as text; None without a model."""


def inspect(
    path: str | os.PathLike[str],
    columns: Columns = AS_FOUND,
    rendering: Rendering | None = None,
    max_prompt_tokens: int | None = None,
) -> Inspection:
    """Read the file as a run does, and measure its prompts: in tokens if `rendering` is given, else in characters.

    `max_prompt_tokens` applies only with a rendering. Raises `DataError` where a run would.
    """
    file = read(path, columns)
    lengths = [len(rendering.opened(t)) if rendering else _num_characters(t.prompt) for t in file.tasks]
    limit = max_prompt_tokens if rendering else None
    return Inspection(
        path=os.fspath(path),
        split=file.split,
        kind=file.layout.form.kind,
        num_rows=len(file.tasks),
        num_answers=sum(task.answer is not None for task in file.tasks),
        columns=tuple(
            ColumnReport(name, num, file.layout.became(name)) for name, num in _count_filled(file.rows).items()
        ),
        tasks=tuple(file.tasks[:_TASKS_SHOWN]),
        lengths=Lengths.of("tokens" if rendering else "characters", lengths),
        max_prompt_tokens=limit,
        num_too_long=None if limit is None else sum(length > limit for length in lengths),
        first_prompt=rendering.spell(rendering.opened(file.tasks[0])) if rendering else None,
        template=TemplateReport.of(rendering.template, rendering) if rendering and rendering.template else None,
        stops=rendering.stops if rendering else None,
    )


def _count_filled(rows: Sequence[Row]) -> dict[str, int]:
    """Count the values other than null in every column, in order of first appearance."""
    num_filled = Counter(column for row in rows for column, value in row.items() if value is not None)
    return {column: num_filled[column] for row in rows for column in row}


def _num_characters(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _is_kept(rendering: Rendering, answer: str) -> bool:
    asked = Message(role="user", content="2+2?")
    ids = rendering.encode((asked,)) + rendering.encode(answer)
    history = (asked, Message(role="assistant", content=answer))
    return rendering.extend(ids, history, (Message(role="user", content="Sure?"),))[: len(ids)] == ids


# --------------------------------------------------------------------------------------------------------------- text


def lines_of(found: Inspection) -> Iterator[str]:
    """Format the inspection as lines for a terminal."""
    split = f"split {found.split}, " if found.split else ""
    yield f"{found.path}: {split}{found.kind}, {found.num_rows} rows, {found.num_answers} with an answer"
    yield ""
    width = max(len(column.name) for column in found.columns)
    for column in found.columns:
        yield f"  {column.name:<{width}}  {column.num_filled:>8} rows   {', '.join(column.became)}"
    for number, task in enumerate(found.tasks, 1):
        yield f"\ntask {number}, id {task.id}"
        yield from (f"  {part:<8}{_cut(value)}" for part, value in _parts(task))
    if found.first_prompt is not None:
        yield f"\nthe first prompt as the model sees it:\n{found.first_prompt}"
        yield f"\n{_stops_line(found.stops or ())}"
    n = found.lengths
    line = f"prompts, in {n.unit}: min {n.min}, p50 {n.p50}, p90 {n.p90}, p99 {n.p99}, max {n.max}"
    if found.num_too_long is not None:
        line += f"; {found.num_too_long} of {found.num_rows} are longer than {found.max_prompt_tokens}"
    yield f"\n{line}"
    if n.unit == "tokens":
        yield _template_line(found.template)


def _parts(task: Task) -> Iterator[tuple[str, str]]:
    if isinstance(task.prompt, str):
        yield "prompt", task.prompt
    else:
        yield from (("prompt", f"{message['role']}: {message['content']}") for message in task.prompt)
    yield "answer", "none" if task.answer is None else task.answer
    yield "info", orjson.dumps(task.info).decode()


def _cut(value: str) -> str:
    line = value.replace("\n", "\\n")
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}... ({len(line)} characters)"


def _stops_line(stops: Sequence[str]) -> str:
    if not stops:
        return "a reply ends at no token, only at rollout.max_new_tokens: the model's files name no end token"
    return f"the policy samples and trains what follows, up to and including one of: {' '.join(stops)}"


def _template_line(template: TemplateReport | None) -> str:
    if template is None:
        return "chat template: none; prompts must be plain text, and the texts of later turns follow without a mark"
    if not template.keeps_turns:
        kept = "rewrites earlier turns, so every turn of a conversation is a separate sample"
    elif not template.keeps_reasoning:
        kept = "keeps earlier turns but for their <think> part, so turns that think are samples of their own"
    else:
        kept = "keeps earlier turns, so a conversation is one sample"
    return f"chat template {template.hash}: {kept}"
