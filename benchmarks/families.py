"""Families of models against engines: which are trained, published, sampled and exported with logprobs that agree.

    python -m benchmarks.families [--engine local | --engine vllm] [--family NAME ...] [--write] [--short]

Each cell is a process: `check` and `check_chat` of `tests.contract.test_families` on a tiny random model. A vLLM takes
most of a minute to start. `--write` puts the cells that ran into the table of docs/models.md, and leaves the others as
they are.
`--short` is one family on the local engine.
One JSON object to the last line of stdout: `cells`, by engine and family, `agrees`, `refused: ...` or the last line of
an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import in_fresh_process, parser_of, print_result, progress
from tests.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
ENGINES = ("local", "vllm")
AGREES = "agrees"
RANK = "[rank0]: "
"""Prefix that PyTorch gives to the lines of an error."""
_PATH = re.compile(r"'/[^']*'")
_ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \|$")


def main() -> None:
    """Run the cells that are asked for, and print them."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=ENGINES, help="only this engine")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=FAMILIES, help="only these families")
    parser.add_argument("--write", action="store_true", help="write the table of docs/models.md")
    given = parser.parse_args()
    is_short = given.size == "short"
    engines = ("local",) if is_short else (given.engine,) if given.engine else ENGINES
    families = given.family[:1] if is_short else given.family
    cells = {engine: {family: cell(engine, family) for family in families} for engine in engines}
    if given.write:
        PAGE.write_text(with_cells(PAGE.read_text(), cells))
    print_result({"cells": cells})


def cell(engine: str, family: str) -> str:
    """Run one family on one engine in a fresh process; return `agrees`, or how it was refused or failed."""
    try:
        in_fresh_process("benchmarks.families:agree", engine, family)
        found = AGREES
    except RuntimeError as error:
        found = outcome_of(str(error).strip().splitlines()[-1].removeprefix(RANK))
    progress(f"{family} on {engine}: {found}")
    return found


def outcome_of(line: str) -> str:
    """Read the last line of an error.

    >>> outcome_of("rlsys.errors.ModelError: vLLM does not know '/tmp/x'; choose another")
    'refused: vLLM does not know the model; choose another'
    """
    _, refusal, why = line.partition("ModelError: ")
    return f"refused: {_PATH.sub('the model', why)}" if refusal else f"fails: {line}"


def agree(engine: str, family: str) -> None:
    """Raise an error unless the engine, the trainer and the exported model agree on the family."""
    from tests.contract.test_families import check, check_chat, local_of, vllm_of
    from tests.families import WIDE

    sizes, make = (WIDE, vllm_of) if engine == "vllm" else ({}, local_of)
    with TemporaryDirectory() as folder:
        check(family, sizes, make, Path(folder, "steps"))
        check_chat(family, sizes, make, Path(folder, "chat"))


def with_cells(page: str, cells: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page with these cells in its table.

    >>> with_cells("| `phi` | not run | not run |", {"local": {"phi": "agrees"}})
    '| `phi` | agrees | not run |'
    """

    def row(line: str) -> str:
        if not (found := _ROW.match(line)):
            return line
        family, *before = found.groups()
        now = [cells.get(engine, {}).get(family, old) for engine, old in zip(ENGINES, before, strict=True)]
        return f"| `{family}` | {' | '.join(text.replace('|', '/') for text in now)} |"

    return "\n".join(map(row, page.split("\n")))


if __name__ == "__main__":
    main()
