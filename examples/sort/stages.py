"""Train in three stages: on demonstrations (SFT), on preferences (DPO), on rewards (GRPO).

    python -m examples.sort.stages --seed 0

Each stage is a run of `examples/sort/run.yaml` with keys of its own, and begins with the weights of the one before:
`model.path` names its folder. Demonstrations and preferences are rows of the training data that no other stage has:

    {"prompt": "385120>", "completion": "012358"}
    {"prompt": "385120>", "chosen": "012358", "rejected": "021358"}

The last line of stdout is JSON: the accuracy on held-out rows, of samples at temperature 1, after each stage.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import rlsys
from benchmarks.measure import rows_of
from examples.sort.prepare import prepare_seed
from examples.tiny_policy import write_rows
from rlsys.config import Config

STAGES: Mapping[str, Sequence[str]] = {
    "sft": ("algorithm={type: sft}", "rollout.workflow=demonstrations", "train.lr=1e-4"),
    "dpo": ("algorithm={type: dpo, beta: 0.5, nll_weight: 1}", "rollout.workflow=offline", "train.lr=1e-4"),
    "grpo": ("algorithm.type=grpo",),
}
"""Keys of each stage."""
ROWS = 2048
"""Rows of each of the first two stages."""
ACCURACY = "eval/held_out/mean"


def main() -> None:
    """Run the stages that a folder has not finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32, help="of each stage")
    parser.add_argument("--out", type=Path, help="folder of the runs; else they are deleted at the end")
    options = parser.parse_args()
    prepared, figures = prepare_seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="stages_") as name:
        accuracies = train(prepared, options.out or Path(name), options.seed, options.steps)
    print(json.dumps({"before": figures["expected"], **accuracies}))


def train(prepared: Path, folder: Path, seed: int, steps: int, rows: int = ROWS) -> dict[str, float]:
    """Train all stages in `folder`, the first two on `rows` rows each; return the accuracy after each."""
    data = write_data(prepared, folder, seed, rows)
    model, accuracies = prepared / "model", {}
    for stage, keys in STAGES.items():
        config = Config.load(
            "examples/sort/run.yaml",
            [
                f"run={{folder: {folder}, name: {stage}, seed: {seed}, steps: {steps}, resume: auto}}",
                f"model.path={model}",
                f"data.path={data[stage]}",
                f"eval={{every: {steps}, temperature: 1, data: {{held_out: {prepared / 'eval.jsonl'}}}}}",
                *keys,
            ],
        )
        rlsys.train(config)
        model = config.run_dir
        accuracies[stage] = [row[ACCURACY] for row in rows_of(model / "metrics.jsonl") if ACCURACY in row][-1]
    return accuracies


def write_data(prepared: Path, folder: Path, seed: int, num_rows: int) -> dict[str, Path]:
    """Write the rows of each stage into `folder`; return their files."""
    rows, rng = rows_of(prepared / "train.jsonl"), random.Random(seed)
    of_stage = {
        "sft": [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows[:num_rows]],
        "dpo": [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": with_two_exchanged(row["answer"], rng)}
            for row in rows[num_rows : 2 * num_rows]
        ],
        "grpo": rows[2 * num_rows :],
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = {stage: folder / f"{stage}.jsonl" for stage in of_stage}
    for stage, path in paths.items():
        write_rows(path, of_stage[stage])
    return paths


def with_two_exchanged(answer: str, rng: random.Random) -> str:
    """Return the answer with two neighbours exchanged that differ: nearly right."""
    places = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    i = rng.choice(places)
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]


if __name__ == "__main__":
    main()
