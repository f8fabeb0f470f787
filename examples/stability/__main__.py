"""`python -m examples.stability`: run the missing runs, then write the table and draw.

    python -m examples.stability                the grid: 90 runs of about 15 CPU-seconds
    python -m examples.stability --corrections  nine ways to account for age at staleness 0, 4 and 16: 81 such runs
    python -m examples.stability --steadied     learning rates by age, and control, for four losses: 132 such runs
    python -m examples.stability --search       54 such runs, 10 of 2 CPU-minutes; then the winners, on two seeds
                                                outside the search: 28 and 28
    python -m examples.stability --quick        a few short runs, to check that everything works

Each finished run is a line of `results.jsonl` in the folder, so that an interrupted study can continue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.stability.lab import Outcome, Run, train
from examples.stability.report import draw_corrections, draw_grid, final_reward, quadratic_table, table
from examples.stability.studies import Row, confirmed, corrections, grid, search, steadied
from examples.study import run_all


def main() -> None:
    """Run, tabulate, draw."""
    parser = argparse.ArgumentParser(prog="python -m examples.stability", description="The stability lab.")
    study = parser.add_mutually_exclusive_group()
    study.add_argument("--corrections", action="store_true", help="losses against staleness instead of the grid")
    study.add_argument("--steadied", action="store_true", help="learning rates by age, and control, instead")
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

    def finish(rows: Sequence[Row]) -> dict[Run, Outcome]:
        """Return the outcomes of all runs of the rows."""
        runs = (run for row in rows for run in row.runs)
        return run_all(runs, train, Outcome, folder / "results.jsonl", jobs=arguments.jobs)

    if arguments.search:
        rows = search(seeds[:1])
        done = finish(rows)
        winners = confirmed(rows, lambda row: final_reward(row, done), seeds[1:])
        best = table(winners, finish(winners))
        name, text = "search", f"Chosen on seed {seeds[0]}:\n\n{table(rows, done)}"
        text = f"{text}\nThe best of each setting on other seeds:\n\n{best}"
    elif arguments.steadied:
        rows = steadied(seeds)
        name, text = "steadied", table(rows, finish(rows))
    elif arguments.corrections:
        rows = corrections(seeds)
        done = finish(rows)
        name, text = "corrections", table(rows, done)
        draw_corrections(rows, done, docs)
    else:
        rows = grid([0], steps=30, staleness=(0, 8)) if arguments.quick else grid(seeds)
        done = finish(rows)
        name, text = "table", f"{table(rows, done)}\n{quadratic_table()}"
        draw_grid(rows, done, docs)
    path = docs / f"stability_{name}.md"
    path.write_text(text)
    print(f"{text}\n{path}")


if __name__ == "__main__":
    main()
