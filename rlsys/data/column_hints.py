"""Proposals for missing columns: the likeliest `data.columns` for rows that lack a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial

from rlsys.data.row_adapters import ANSWERS, PROMPTS, Layout, Part, Row

LIKELY: Mapping[Part, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "query", "input", "instruction", "text"),
    "answer": (*ANSWERS, "target", "reference", "expected"),
    "id": ("id", "uid", "index"),
}
"""Common names of each part. They only choose the name that a message proposes; no data is read by them."""


def remedy(part: Part, layout: Layout, lacking: Sequence[Row], num_rows: int) -> str:
    """Describe the columns that were searched for a part, and propose `data.columns` for the rows that lack it."""
    name = layout.columns.name(part)
    if part == "prompt" and len(lacking) < num_rows:
        return f"looked for the prompt in {layout.sources[part]}, where other rows have it; keep it in one column"
    if part == "answer" and name is None:
        return (
            f"looked for the answer in {', '.join(layout.form.answer)}; give each form a file of its own, "
            "or name a column that all rows have: data.columns: {answer: NAME}"
        )
    candidates = list(dict.fromkeys(column for row in lacking for column in _candidates(row, part)))
    nearest = max(candidates, key=partial(_likeness, part), default="NAME")
    near = get_close_matches(name or "", candidates, n=1) or [nearest]
    looked = name or ", ".join(PROMPTS)
    return f"looked for the {part} in {looked}; if it has another name, say so: data.columns: {{{part}: {near[0]}}}"


def _likeness(part: Part, column: str) -> float:
    return max(SequenceMatcher(None, column, word).ratio() for word in LIKELY[part])


def _candidates(row: Row, part: Part) -> list[str]:
    """List the columns that could contain `part`, with dots for those inside objects. A prompt is text or a list."""
    inside = {f"{column}.{key}": v for column, o in row.items() if isinstance(o, dict) for key, v in o.items()}
    fitting = str | list if part == "prompt" else str | int | float | list
    return [name for name, value in {**row, **inside}.items() if isinstance(value, fitting)]
