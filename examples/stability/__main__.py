"""`python -m examples.stability`: run the missing runs, then write the table and draw.

    python -m examples.stability                the grid: 90 runs of about 15 CPU-seconds
    python -m examples.stability --corrections  eight corrections for age at staleness 0, 4 and 16: 72 such runs
    python -m examples.stability --search       54 such runs, 10 of 2 CPU-minutes; then the winners, on two seeds
                                                outside the search: 28 and 28
    python -m examples.stability --quick        a few short runs, to check that everything works

Each finished run is a line of `results.jsonl` in the folder, so that an interrupted study can continue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from examples.stability.report import draw_corrections, draw_grid, final_reward, quadratic_table, table
from examples.stability.results import Results, run_all
from examples.stability.studies import Row, confirmed, corrections, grid, search


def main() -> None:
    """Run, tabulate, draw."""
    parser = argparse.ArgumentParser(prog="python -m examples.stability", description="The stability lab.")
    study = parser.add_mutually_exclusive_group()
    study.add_argument("--corrections", action="store_true", help="losses against staleness instead of the grid")
    study.add_argument("--search", action="store_true", help="settings of the control at staleness 8 and 16 instead")
    study.add_argument("--quick", action="store_true", help="one seed, 30 steps, staleness 0 and 8: about a minute")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="a search chooses on the first, confirms on the others"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one core each")
    parser.add_argument("--folder", type=Path, default=Path("runs/stability"), help="of the results")
    parser.add_argument("--docs", type=Path, help="folder of table and pictures; that of the results if left out")
    arguments = parser.parse_args()
    seeds: list[int] = arguments.seeds
    if arguments.search and len(seeds) < 2:
        parser.error("--search needs two seeds or more: one to choose on, the others to confirm on")

    folder: Path = arguments.folder / "quick" if arguments.quick else arguments.folder
    docs: Path = arguments.docs or folder
    docs.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.jsonl")
    ran = partial(_ran, results=results, jobs=arguments.jobs)
    if arguments.search:
        searched = ran(search(seeds[:1]))
        winners = ran(confirmed(searched, lambda row: final_reward(row, results.read()), seeds[1:]))
        chosen = f"Chosen on seed {seeds[0]}:\n\n{table(searched, results.read())}"
        text, name = f"{chosen}\nThe best of each setting on other seeds:\n\n{table(winners, results.read())}", "search"
    elif arguments.corrections:
        rows = ran(corrections(seeds))
        text, name = table(rows, results.read()), "corrections"
        draw_corrections(rows, results.read(), docs)
    else:
        rows = ran(grid([0], steps=30, staleness=(0, 8)) if arguments.quick else grid(seeds))
        text, name = f"{table(rows, results.read())}\n{quadratic_table()}", "table"
        draw_grid(rows, results.read(), docs)
    path = docs / f"stability_{name}.md"
    path.write_text(text)
    print(f"{text}\n{path}")


def _ran(rows: Sequence[Row], results: Results, jobs: int) -> Sequence[Row]:
    """Return the rows, once all of their runs are in the file."""
    run_all((run for row in rows for run in row.runs), results, jobs=jobs)
    return rows


if __name__ == "__main__":
    main()
