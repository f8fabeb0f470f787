"""Train on three sources with fixed weights and with weights that follow what they teach; print a table.

    python -m examples.sort.mixture --seeds 0,1,2

Sources: tasks like those of the evaluation; tasks whose digits are in order already, which the policy soon solves; and
tasks whose answers are wrong, which it never does. Each run is `rlsys train examples/sort/run.yaml` with the seed, its
model, these sources at equal weights, and `curation.source_weights`. Finished runs are lines of the file `--out` and
not run again; all figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from examples.sort.prepare import prepare_seed
from examples.study import PREPARED, Comparison, Row
from examples.tiny_policy import write_rows

WEIGHTS = ("fixed", "reward_std")
NAMES = ("useful", "solved", "hopeless")
WINDOW = 10
"""Steps of a mean."""


def sources_of(rows: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Split rows of the task into the three sources."""
    third = len(rows) // 3
    useful, others, wrong = rows[:third], rows[third : 2 * third], rows[2 * third :]
    return {
        "useful": [dict(row) for row in useful],
        "solved": [{**row, "prompt": f"{row['answer']}>"} for row in others],
        "hopeless": [{**row, "answer": "none"} for row in wrong],
    }


def prepare_sources(seed: int) -> tuple[Path, object]:
    """Fill the folder of a seed, with a file for each source."""
    folder, figures = prepare_seed(seed)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for name, own in sources_of(rows).items():
        write_rows(folder / f"{name}.jsonl", own)
    return folder, figures


def overrides_of(weights: str) -> tuple[str, ...]:
    """Overrides of a case."""
    listed = ", ".join(f"{{path: {PREPARED}/{name}.jsonl}}" for name in NAMES)
    return f"data.path=[{listed}]", f"curation.source_weights={weights}"


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics."""
    accuracies = [row["eval/held_out/mean"] for row in rows if "eval/held_out/mean" in row]
    shares = [row.get("curation/share/useful", 1 / len(NAMES)) for row in rows if "reward/mean" in row]
    return {"before": accuracies[0], "after": accuracies[-1], "share": fmean(shares[-WINDOW:])}


COMPARISON = Comparison(
    example="sort",
    prepare_seed=prepare_sources,
    figures_of=figures_of,
    head=("weights",),
    columns={
        "accuracy before": ("before", ".3f", ""),
        "accuracy after": ("after", ".3f", ""),
        "share of the useful source, last steps": ("share", ".2f", ""),
    },
    is_evaluated=True,
)
CASES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (weights,): (*overrides_of(weights), "eval.temperature=1") for weights in WEIGHTS
}


if __name__ == "__main__":
    parser = COMPARISON.parser(__doc__, steps=60)
    parser.set_defaults(out=Path(".cache/sort/mixture.jsonl"))
    COMPARISON.show(CASES, parser.parse_args())
