"""What can be wrong with a configuration: pydantic's findings turned into lines a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Location: TypeAlias = tuple[int | str, ...]

NESTED = "rlsys_nested"
UNKNOWN = "rlsys_unknown"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where in the tree."""

    location: Location
    text: str
    is_unknown: bool = False
    """The key itself is not one of ours."""


def nested(problems: Iterable[tuple[Location, str]]) -> PydanticCustomError:
    """One error that carries several, each relative to the field whose validator raises it."""
    listed = list(problems)
    text = "; ".join(f"{dotted(location)}: {text}" if location else text for location, text in listed)
    return PydanticCustomError(NESTED, "{text}", {"text": text, "problems": listed})


def union_tag(name: str) -> str:
    """A tag for one form of a key that has several; pydantic puts it into locations, where nobody typed it."""
    return f"<{name}>"


def problems_in(error: ValidationError) -> Iterator[Problem]:
    """Every problem, those inside `nested` errors at their own place."""
    for detail in error.errors(include_url=False):
        detail["loc"] = tuple(part for part in detail["loc"] if not str(part).startswith("<"))
        if detail["type"] == NESTED:
            for location, text in detail.get("ctx", {})["problems"]:
                yield Problem((*detail["loc"], *location), text, text == UNKNOWN)
        else:
            yield problem_of(detail)


def problem_of(detail: ErrorDetails) -> Problem:
    """One finding of pydantic in our words."""
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return Problem(detail["loc"], UNKNOWN, is_unknown=True)
    if detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return Problem(detail["loc"], "required, and not given")
    if detail["type"] in ("model_type", "dataclass_type"):
        return Problem(detail["loc"], f"should be a section with keys of its own (got {_shown(detail['input'])})")
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return Problem(detail["loc"], text)
    return Problem(detail["loc"], f"{text[0].lower()}{text[1:]} (got {_shown(detail['input'])})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def dotted(location: Location) -> str:
    """A location as it is typed: `train.betas[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def unknown_key(location: Location, keys: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """What to say of a key that does not exist. `keys` maps every section's location to the keys it has.

    The nearest key beside it; else a key of another section by that name; else the keys there are.
    """
    section, name = tuple(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    siblings = keys.get(section, ())
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"unknown key; did you mean `{dotted((*location[:-1], close[0]))}`?"
    elsewhere = {key: where for where, names in keys.items() for key in names if where != section}
    if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        return f"unknown key; did you mean `{dotted((*elsewhere[close[0]], close[0]))}`?"
    has = f"; {dotted(location[:-1]) or 'the top level'} has: {', '.join(siblings)}" if siblings else ""
    return f"unknown key{has}"
