"""Conversion of rows to tasks, for several conventions of rows.

| kind | mark of a row | prompt | answer: the first of these that any row fills |
| --- | --- | --- | --- |
| verl | `reward_model` with `ground_truth` or `style` | P | `reward_model.ground_truth`, then A |
| skyrl | `reward_spec` with `ground_truth` or `method` | P | `reward_spec.ground_truth`, then A |
| plain | `answer`, `messages` or `question` | P | A |
| trl | `prompt` and none of those (TRL's prompt-only rows) | P | A |

P is `prompt`, `messages`, `question`; A is `answer`, `ground_truth`, `solution`, `label`, in this order. A `label` of
true or false is no answer: TRL marks wanted completions with it. plain and trl rows may share a file; others may not.
`Columns` gives different names, and overrides all of these.

Every column stays in `Task.info` under its name, except `prompt`, `answer` and `id` where they became that part. An
`info` column that is an object, or the text of one, is unpack_row; a column of the same name overrides its entry. An
answer from another column than `answer`, or that is neither text nor number, is also `info.ground_truth`, unconverted,
unless the row has that column. `Task.answer` of a boolean, a list or an object is its JSON text, with sorted keys.

Where `chosen` and `rejected` are lists of messages, those that both begin with are the prompt, as TRL and data sets of
the hub have them: if the row has no `prompt`, or the same messages there, or the text of the last of them.

Replies continue a `prompt` that ends with a message of the assistant. Of `messages` that end so, the prompt is what
comes before: they are answered rows, as for supervised training. `tools` (schemas in the OpenAI form) and
`chat_template_kwargs` (variables of the chat template) go into the conversation too; both may be JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Annotated, Literal, TypeAlias, cast

import orjson
from pydantic import Field
from xxhash import xxh3_64_hexdigest

from rlsys.types import Json, Message, Prompt, Task

Row: TypeAlias = "dict[str, Json]"
Part: TypeAlias = Literal["prompt", "answer", "id"]

PARTS: tuple[Part, ...] = ("prompt", "answer", "id")
_EXACT = 2.0**53
"""Below it, every integer is exact as a float."""
_PROBLEMS_SHOWN = 10
PROMPTS = ("prompt", "messages", "question")
ANSWERS = ("answer", "ground_truth", "solution", "label")
_LIKELY: Mapping[Part, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "query", "input", "instruction", "text"),
    "answer": (*ANSWERS, "target", "reference", "expected"),
    "id": ("id", "uid", "index"),
}
"""Common names of each part. They only choose the name that a message proposes; no data is read by them."""


ColumnName = Annotated[str, Field(min_length=1)]


Columns: TypeAlias = dict[Part, ColumnName | None]
"""Column names of the parts of a task that are not found automatically, `{"prompt": "problem"}`. With `{"id": None}` no
column is the id."""
AS_FOUND: Columns = {}


@dataclass(frozen=True, slots=True)
class Form:
    """Convention of rows."""

    kind: str
    marks: tuple[str, ...]
    """Columns that mark a row: a row that fills one of them has this form."""
    answer: tuple[str, ...]
    """Columns of the answer; the first that any row fills is used."""


PLAIN = Form("plain", ("answer", "messages", "question"), ANSWERS)
FORMS = (
    Form("verl", ("reward_model.ground_truth", "reward_model.style"), ("reward_model.ground_truth", *ANSWERS)),
    Form("skyrl", ("reward_spec.ground_truth", "reward_spec.method"), ("reward_spec.ground_truth", *ANSWERS)),
    PLAIN,
    Form("trl", ("prompt",), ANSWERS),
)
"""Forms in order of precedence: a row has the first form whose mark it fills."""


class RowProblem(Exception):
    """A row cannot be used; the reader adds its position. `lacks` is the part that `data.columns` could locate."""

    def __init__(self, text: str, lacks: Part | None = None) -> None:
        super().__init__(text)
        self.lacks: Part | None = lacks


@dataclass(frozen=True, slots=True)
class Layout:
    """Mapping from the rows of one file to tasks."""

    form: Form
    sources: Mapping[Part, str]
    """Source column of each part."""
    columns: Columns
    """Configured column names."""
    absent: tuple[Part, ...]
    """Parts whose configured column is in no row."""

    def became(self, column: str) -> tuple[str, ...]:
        """List the uses of a column, e.g. `answer (reward_model.ground_truth)` and `info.reward_model`."""
        parts = self.sources.items()
        whole = [part for part, source in parts if source == column]
        inside = [f"{part} ({source})" for part, source in parts if source.startswith(f"{column}.")]
        kept = [] if column in whole else ["info.*" if column == "info" else f"info.{column}"]
        return (*whole, *inside, *kept)


# --------------------------------------------------------------------------------------------------- finding the parts


def sniff(rows: Sequence[Row], columns: Columns = AS_FOUND) -> Layout:
    """Choose the layout: the form of the first row that has one, and the columns that any row fills."""
    form = next((form for row in rows if (form := form_of(row)) is not None), PLAIN)
    if form.answer == PLAIN.answer and any(form_of(row) is PLAIN for row in rows):
        form = PLAIN
    sources: dict[Part, str] = {
        "prompt": columns.get("prompt") or _first_filled(rows, PROMPTS),
        "answer": columns.get("answer") or _first_filled(rows, form.answer),
        "id": columns.get("id") or ("" if "id" in columns else "id"),
    }
    named: list[Part] = [part for part in PARTS if columns.get(part)]
    absent: list[Part] = [part for part in named if not any(_has(row, sources[part]) for row in rows)]
    return Layout(form, sources, columns, tuple(absent))


def form_of(row: Row) -> Form | None:
    """Return the first form whose mark the row fills."""
    return next((form for form in FORMS if any(_fills(row, mark) for mark in form.marks)), None)


def value_at(row: Row, source: str) -> Json:
    """Return the value of column `source`, or inside objects for `a.b`; None if there is none."""
    if source in row:
        return row[source]
    column, dot, rest = source.partition(".")
    inner = row.get(column)
    return value_at(inner, rest) if dot and isinstance(inner, dict) else None


def _has(row: Row, source: str) -> bool:
    """True if the column exists, even with null."""
    column, dot, rest = source.partition(".")
    inner = row.get(column)
    return source in row or bool(dot and isinstance(inner, dict) and _has(inner, rest))


def _fills(row: Row, source: str) -> bool:
    value = value_at(row, source)
    return value is not None and not (source == "label" and isinstance(value, bool))


def _first_filled(rows: Sequence[Row], sources: tuple[str, ...]) -> str:
    return next((source for source in sources if any(_fills(row, source) for row in rows)), sources[0])


# ------------------------------------------------------------------------------------------------------- row to task


def unpack_row(row: Row) -> Row:
    """Parse an `info` that is the text of a JSON object, and take the prompt out of preferences."""
    return _with_info_parsed(_with_prompt_apart(row))


def _with_prompt_apart(row: Row) -> Row:
    chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return row
    pairs = enumerate(zip(chosen, rejected, strict=False))
    end = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    common = [message for message in chosen[:end] if isinstance(message, dict)]
    while common and common[-1].get("role") == "assistant":
        common.pop()
    if not common or prompt not in (None, common, common[-1].get("content")):
        return row
    return {**row, "prompt": [*common], "chosen": chosen[len(common) :], "rejected": rejected[len(common) :]}


def _with_info_parsed(row: Row) -> Row:
    text = row.get("info")
    if not (isinstance(text, str) and text.lstrip().startswith("{")):
        return row
    try:
        return {**row, "info": orjson.loads(text)}
    except orjson.JSONDecodeError:
        return row  # plain text


def task_of(row: object, layout: Layout) -> Task:
    """Convert a row to a task. Raises `RowProblem` if it cannot be used."""
    source = layout.sources
    if not isinstance(row, dict):
        raise RowProblem(f"the row is {describe_type(row)}, not an object with a `{source['prompt']}`")
    _check(row, layout)
    prompt = _prompt_of(source["prompt"], value_at(row, source["prompt"]))
    found = value_at(row, source["answer"])
    answer = _as_text(source["answer"], found)
    own_id = _text_of(source["id"], value_at(row, source["id"])) if source["id"] else None
    info = _info_of(row, layout)
    is_converted = source["answer"] != "answer" or isinstance(found, bool | list | dict)
    if is_converted and found is not None and info.get("ground_truth") is None:
        info["ground_truth"] = found
    content = orjson.dumps([prompt, answer, info], option=orjson.OPT_SORT_KEYS)
    return Task(
        id=own_id or xxh3_64_hexdigest(content),
        prompt=prompt,
        answer=answer,
        tools=_tools_of(info.get("tools")),
        template_kwargs=_template_kwargs_of(info.get("chat_template_kwargs")),
        info=info,
    )


def _check(row: Row, layout: Layout) -> None:
    """Raise `RowProblem` if a column is missing, or if the row has its answer in another column than the rest."""
    is_asked = value_at(row, layout.sources["prompt"]) is not None
    if lacks := layout.absent or (() if is_asked else PARTS[:1]):
        raise RowProblem(f"no `{layout.sources[lacks[0]]}`; {_columns_of(row)}", lacks[0])
    form = form_of(row) or layout.form
    if form.answer != layout.form.answer and "answer" not in layout.columns:
        forms = f"the row is of the form {form.kind}, the first one {layout.form.kind}"
        raise RowProblem(f"{forms}; {_columns_of(row)}", "answer")


def _columns_of(row: Row) -> str:
    return f"the row has {', '.join(row) or 'no columns'}"


def _info_of(row: Row, layout: Layout) -> Row:
    info = dict(row)
    for part in PARTS:
        if layout.sources[part] == part or info.get(part) is None:
            info.pop(part, None)
    nested = info.get("info")
    if not isinstance(nested, dict):
        return info
    del info["info"]
    return {**nested, **{column: value for column, value in info.items() if value is not None or column not in nested}}


def _prompt_of(source: str, prompt: Json) -> Prompt:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RowProblem(f"the `{source}` is empty")
        return prompt
    if not isinstance(prompt, list):
        raise RowProblem(f"`{source}` is {describe_type(prompt)}; give text or a list of messages")
    if not prompt:
        raise RowProblem(f"the `{source}` is empty")
    messages = tuple(message_of(source, number, message) for number, message in enumerate(prompt, 1))
    if source == "messages" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # its answer, which stays in the column
        if not messages:
            raise RowProblem("`messages` has nothing before the assistant's answer")
    return messages


def message_of(source: str, number: int, message: Json) -> Message:
    """Check a message in the OpenAI form, and put its text parts together; null keys are left out.

    Besides `role` and `content`, an assistant's message may have `tool_calls`. All other keys, such as `name`,
    `tool_call_id` and `reasoning_content`, go to the chat template as they are.
    """
    where = f"message {number} of the `{source}`"
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    role, content, calls = given.pop("role", None), given.pop("content", None), given.pop("tool_calls", [])
    if calls and role != "assistant":
        raise RowProblem(f"{where} has tool_calls, and its role is {role}: only the assistant calls tools")
    text = _text_in(where, "" if content is None and calls else content)
    if not isinstance(role, str) or text is None:
        raise RowProblem(f'{where} is not of the form {{"role": "...", "content": "..."}}')
    found = Message(role=role, content=text)
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) and "function" in call for call in calls):
            raise RowProblem(f'{where}: its tool_calls are not of the form [{{"function": {{"name", "arguments"}}}}]')
        found["tool_calls"] = calls
    return cast("Message", {**found, **given})


def _text_in(where: str, content: Json) -> str | None:
    """Text of a message's content: text, or a list of text parts. None for anything else."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    for part in content:
        filled = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        kind, text = filled.get("type"), filled.get("text")
        if kind != "text" or not isinstance(text, str):
            raise RowProblem(f"{where} has a part of type {kind}; only text can be trained on")
        texts.append(text)
    return "".join(texts)


def _tools_of(value: Json) -> tuple[dict[str, Json], ...]:
    """Read the column `tools`: schemas in the OpenAI form, or their JSON text, as columnar files need it."""
    found = _parse_json("tools", value)
    if found is None:
        return ()
    schemas = [_parse_json("tools", tool) for tool in found] if isinstance(found, list) else []
    tools = [tool for tool in schemas if isinstance(tool, dict) and isinstance(tool.get("function"), dict)]
    if not isinstance(found, list) or len(tools) < len(schemas):
        form = '[{"type": "function", "function": {"name", "description", "parameters"}}]'
        raise RowProblem(f"`tools` is not of the form {form}; give schemas, or give the column another name")
    return tuple(tools)


def _template_kwargs_of(value: Json) -> dict[str, Json]:
    found = _parse_json("chat_template_kwargs", value)
    if found is not None and not isinstance(found, dict):
        raise RowProblem(
            f"`chat_template_kwargs` is {describe_type(found)}; give an object, as in {{enable_thinking: false}}"
        )
    return {name: value for name, value in (found or {}).items() if value is not None}


def _parse_json(column: str, value: Json) -> Json:
    """Parse a value that is given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise RowProblem(f"`{column}` is text, but not JSON: {error.msg}") from None


def without_nulls(value: dict[str, Json]) -> dict[str, Json]:
    """Remove the null keys at every level, in lists too."""
    return {key: _without_nulls_in(inner) for key, inner in value.items() if inner is not None}


def _without_nulls_in(value: Json) -> Json:
    if isinstance(value, list):
        return [_without_nulls_in(each) for each in value]
    return without_nulls(value) if isinstance(value, dict) else value


def _text_of(source: str, value: Json) -> str | None:
    if isinstance(value, list | dict | bool):
        raise RowProblem(f"`{source}` is {describe_type(value)}; give text or a number")
    return _as_text(source, value)


def _as_text(source: str, value: Json) -> str | None:
    """Convert a value to text: a number in digits, a list, dict or bool as JSON; null stays None.

    Raises `RowProblem` for a float so large that it may be a rounded integer, as integers of over 64 bits are.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | dict | bool):
        return json_text(value)
    if isinstance(value, float) and abs(value) >= _EXACT:
        raise RowProblem(f"`{source}` is {value}, too large a number to be exact; give it as text")
    return str(int(value) if isinstance(value, float) and float.is_integer(value) else value)


def json_text(value: Json) -> str:
    """Write a value as JSON, with sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def describe_type(value: object) -> str:
    """Describe a value as `null` or by its type: `a list`, `an int`."""
    if value is None:
        return "null"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


# ---------------------------------------------------------------------------------------------------------- problems


def problem_lines(source: str, problems: Sequence[str], user: str = "") -> list[str]:
    """Write the lines of an error: the number of rows that cannot be used, and the first ten problems."""
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    more = len(problems) - _PROBLEMS_SHOWN
    rest = [f"... and {more} more"] if more > 0 else []
    return [f"{source}: {count} cannot be used{user}", *problems[:_PROBLEMS_SHOWN], *rest]


def remedies(lacking: Mapping[Part, Sequence[Row]], layout: Layout, rows: Sequence[Row]) -> Iterator[str]:
    """Yield proposals for missing columns. `lacking` are the rows without each part."""
    yield from (_remedy(part, layout, lacking[part], len(rows)) for part in PARTS if lacking[part])
    if any(lacking.values()):
        yield "data.columns applies to training and to evaluations; a set may have its own: {path: ..., columns: ...}"
        yield f"the columns of all rows: {', '.join(dict.fromkeys(column for row in rows for column in row))}"


def _remedy(part: Part, layout: Layout, lacking: Sequence[Row], num_rows: int) -> str:
    """Describe the columns that were searched for a part, and propose `data.columns` for the rows that lack it."""
    name = layout.columns.get(part)
    if part == "prompt" and len(lacking) < num_rows:
        return f"looked for the prompt in {layout.sources[part]}, where other rows have it; keep it in one column"
    if part == "answer" and name is None:
        return (
            f"looked for the answer in {', '.join(layout.form.answer)}; give each form a file of its own, "
            "or name a column that all rows have: data.columns: {answer: NAME}"
        )
    candidates = list(dict.fromkeys(column for row in lacking for column in _candidates(row, part)))
    likeness = {c: max(SequenceMatcher(None, c, word).ratio() for word in _LIKELY[part]) for c in candidates}
    near = get_close_matches(name or "", candidates, n=1) or [max(likeness, key=likeness.__getitem__, default="NAME")]
    looked = name or ", ".join(PROMPTS)
    return f"looked for the {part} in {looked}; if it has another name, say so: data.columns: {{{part}: {near[0]}}}"


def _candidates(row: Row, part: Part) -> list[str]:
    """List the columns that could contain `part`, with dots for those inside objects. A prompt is text or a list."""
    inside = {f"{column}.{key}": v for column, o in row.items() if isinstance(o, dict) for key, v in o.items()}
    fitting = str | list if part == "prompt" else str | int | float | list
    return [name for name, value in {**row, **inside}.items() if isinstance(value, fitting)]
