"""Problems of a configuration: pydantic's errors as lines that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from rlsys.config.other_trainers import SECTIONS, habit_of
from rlsys.util.url_credentials import credential_in

Location: TypeAlias = tuple[int | str, ...]
Problem: TypeAlias = tuple[Location, str]
"""Location of a problem in the tree, and its text: `UNKNOWN` if the key itself is unknown."""

NESTED = "rlsys_nested"
UNKNOWN = "rlsys_unknown"
MISSING = "required, and not given"
LARGEST = 2**63 - 1
"""Largest number of a configuration."""


def nest_problems(problems: Iterable[Problem], *, are_located: bool = False) -> PydanticCustomError:
    """Combine several problems in one error, each relative to the field whose validator raises it, unless
    `are_located`: then locations are those of the whole configuration."""
    listed = list(problems)
    text = "; ".join(f"{dotted_key(location)}: {text}" if location else text for location, text in listed)
    return PydanticCustomError(NESTED, "{text}", {"text": text, "problems": listed, "are_located": are_located})


def refuse(problems: Iterable[Problem], *, are_located: bool = False) -> None:
    """Raise these problems as one error, see `nest_problems`, if there are any."""
    if listed := list(problems):
        raise nest_problems(listed, are_located=are_located)


def union_tag(name: str) -> str:
    """Tag for one form of a key that has several. Pydantic adds it to locations, although the user did not type it."""
    return f"<{name}>"


def problems_in(error: ValidationError) -> Iterator[Problem]:
    """All problems, those inside `nest_problems` errors at their full location."""
    for detail in error.errors(include_url=False):
        if detail["loc"][-1:] == ("[key]",) and detail["type"] == "literal_error":
            detail["type"] = "extra_forbidden"
        detail["loc"] = tuple(part for part in detail["loc"] if not str(part).startswith("<") and part != "[key]")
        if detail["type"] == NESTED:
            found = detail.get("ctx", {})
            around = () if found["are_located"] else detail["loc"]
            yield from (((*around, *location), text) for location, text in found["problems"])
        else:
            yield detail["loc"], _text_of(detail)


def _text_of(detail: ErrorDetails) -> str:
    """Describe one pydantic error in the words of this project."""
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return UNKNOWN
    if detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return MISSING
    if detail["type"] in ("model_type", "dataclass_type"):
        return f"should be a section with keys (got {short_repr(detail['input'])})"
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return text
    return f"{text[0].lower()}{text[1:]} (got {short_repr(detail['input'])})"


def short_repr(value: object) -> str:
    """Value in an error message, at most 40 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number with too many digits"
    return text if len(text) <= 40 else text[:37] + "..."


def problems_of_value(given: object, read: object, at: Location = ()) -> Iterator[Problem]:
    """Problems of a value that pydantic accepts: `true` and 1e30 as counts, a NUL, a credential in a URL.

    `read` is what pydantic made of `given`. Values inside sections are not looked at; each section does that.
    """
    if isinstance(given, str):
        if "\0" in given:
            yield at, "contains a NUL, which no text of a configuration may"
        if (credential := credential_in(given)) is not None:
            remedy = "name an environment variable, such as in `api_key_env`; in a path, write %40 for the at sign"
            yield at, f"has {credential} in a URL, and the run folder keeps a copy of it: remove it; {remedy}"
    elif isinstance(given, bool):
        if not isinstance(read, bool):
            yield at, f"should be a number (got {str(given).lower()})"
    elif isinstance(given, int | float):
        if abs(given) > LARGEST:
            yield at, f"should be a number of at most {LARGEST} (got {short_repr(given)})"
    elif isinstance(given, Mapping) and isinstance(read, Mapping):
        for key, value in given.items():
            yield from problems_of_value(key, key, at)
            yield from problems_of_value(value, read.get(key), (*at, str(key)))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, value in enumerate(given):
            yield from problems_of_value(value, read[index], (*at, index))


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Remedy for a name that is not among the known ones: the nearest of them, or `otherwise`."""
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise


def dotted_key(location: Location) -> str:
    """Location as a user types it: `train.betas[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def unknown_key(location: Location, keys: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    """Message for a key that does not exist. `keys` maps every section's location to its keys.

    The message names the nearest key of the same section, else a key of that name in another section, else all keys.
    """
    section, name = tuple(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    siblings = keys.get(section, ())
    if not section and name in SECTIONS:
        return "unknown key; it is a section of verl: `rlsys convert FILE` converts its configurations"
    if (habit := habit_of(dotted_key(location))) and not difflib.get_close_matches(name, siblings, n=1, cutoff=0.9):
        return f"unknown key; {habit.hint}"
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"unknown key; did you mean `{dotted_key((*location[:-1], close[0]))}`?"
    elsewhere = {key: where for where, names in keys.items() for key in names if where != section}
    if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        return f"unknown key; did you mean `{dotted_key((*elsewhere[close[0]], close[0]))}`?"
    has = f"; {dotted_key(location[:-1]) or 'the top level'} has: {', '.join(siblings)}" if siblings else ""
    return f"unknown key{has}"
