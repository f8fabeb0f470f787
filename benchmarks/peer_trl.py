"""rlsys against TRL's GRPOTrainer: CPU-seconds per trained sample, samples per second.

    python -m benchmarks.peer_trl [--quick | --short]

Two jobs, the configurations of `examples/`: the tiny sorter (32 prompts x 8 samples) and SmolLM2-135M on the largest of
three (8 x 8). Both systems get the same model, the same prompts in the same order in each step, the same group size,
sampling, clipping and learning rate, and one thread in each process. TRL is one process; rlsys is its whole system:
driver, Ray's daemons, rollouts, rewards, relay, actor. CPU time is that of every process, between two step marks, so
that start-up does not count. Repeats alternate between the two.

TRL runs in a separate environment, `.cache/peer_trl/venv`, made on first use (some minutes, not measured). Its tuning
is limited to this: no gradient checkpointing; for SmolLM2 bf16 weights, faster there than fp32 with autocast, and
micro-batches of 8 samples, faster than all 64 at once. It has no vLLM. Long prompts with short answers favour rlsys: it
runs a prompt once for its group and computes logits for completion tokens only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measure import (
    ENV,
    Mark,
    Size,
    in_turn,
    marks_of,
    own_python,
    parser_of,
    print_result,
    smollm,
    sorter,
    spreads,
    train_command,
)
from rlsys.config import Config

TRL_REQUIREMENTS = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")


@dataclass(frozen=True)
class Contest:
    """One job for both systems, and the measured steps of each."""

    name: str
    example: str
    prepared: Path
    repeats: int
    trl_micro_batch: int
    """Samples of a micro-batch of TRL: all of a step, unless fewer are faster."""
    trl_steps: tuple[int, int]
    """Steps at whose ends the clock starts and stops; TRL's steps on SmolLM2 are long."""
    rlsys_steps: tuple[int, int]


TINY = Contest(
    name="tiny",
    example="sort",
    prepared=Path(".cache/sort/seed0"),
    repeats=5,
    trl_micro_batch=256,
    trl_steps=(10, 50),
    rlsys_steps=(10, 50),
)
SMOLLM = Contest(
    name="smollm",
    example="smollm",
    prepared=Path(".cache/smollm"),
    repeats=3,
    trl_micro_batch=8,
    trl_steps=(1, 4),
    rlsys_steps=(1, 7),
)
CONTESTS: Mapping[Size, Sequence[Contest]] = {
    "full": (TINY, SMOLLM),
    "quick": (
        replace(TINY, repeats=2, trl_steps=(5, 25), rlsys_steps=(5, 25)),
        replace(SMOLLM, repeats=1, trl_steps=(1, 2), rlsys_steps=(1, 4)),
    ),
    "short": (replace(TINY, repeats=1, trl_steps=(1, 2), rlsys_steps=(1, 2)),),
}


def main() -> None:
    """Compare on both jobs and print the result line."""
    size = parser_of(__doc__, quick="fewer steps and repeats; under 5 minutes once set up").parse_args().size
    trl_python = own_python(Path(".cache/peer_trl/venv"), TRL_REQUIREMENTS, size)
    sorter("full")
    if size != "short":
        smollm()
    print_result({contest.name: compare(contest, trl_python) for contest in CONTESTS[size]})


def compare(contest: Contest, trl_python: str) -> dict[str, object]:
    """Run both systems in turn, `repeats` times."""
    config = Config.load(Path(f"examples/{contest.example}/run.yaml"))

    def run(_: int, system: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="peer_trl_") as folder:
            if system == "trl":
                marks = run_trl(trl_python, contest, config, Path(folder))
            else:
                marks = run_rlsys(contest, Path(folder))
            return speed(marks, config)

    theirs, ours = map(spreads, in_turn(contest.repeats, ("trl", "rlsys"), run).values())
    return {
        "cpu_s_per_sample_ratio": theirs["cpu_s_per_sample"]["median"] / ours["cpu_s_per_sample"]["median"],
        "samples_per_s_ratio": ours["samples_per_s"]["median"] / theirs["samples_per_s"]["median"],
        "samples_per_step": config.samples_per_step,
        "rlsys": ours,
        "trl": theirs,
    }


def run_rlsys(contest: Contest, folder: Path) -> list[Mark]:
    """Run `rlsys train` on the contest's file; return its marks."""
    command = train_command(
        contest.prepared, folder, f"run.steps={contest.rlsys_steps[1]}", "data.shuffle=false", "train.warmup_steps=0",
        "train.final_lr_fraction=1", "checkpoint.every=0", example=contest.example,
    )  # fmt: skip
    return marks_of(command, ENV, folder / "run" / "metrics.jsonl", contest.rlsys_steps)


def run_trl(python: str, contest: Contest, config: Config, folder: Path) -> list[Mark]:
    """Run GRPOTrainer on the same job; return its marks."""
    metrics = folder / "trl" / "metrics.jsonl"
    job: Mapping[str, str | int | float] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "data": config.data.path,
        "metrics": str(metrics),
        "steps": contest.trl_steps[1],
        "micro_batch": contest.trl_micro_batch,
        "threads": 1,
        "groups_per_step": config.train.groups_per_step,
        "group_size": config.algorithm.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "lr": config.train.lr,
    }
    return marks_of([python, "-m", "benchmarks.trl_job", json.dumps(job)], ENV, metrics, contest.trl_steps)


def speed(marks: list[Mark], config: Config) -> dict[str, float]:
    """Return the cost of one run, between the first and the last mark."""
    first, last = marks
    samples = (last.step - first.step) * config.samples_per_step
    return {
        "cpu_s_per_sample": (last.cpu_s - first.cpu_s) / samples,
        "samples_per_s": samples / (last.wall_s - first.wall_s),
    }


if __name__ == "__main__":
    main()
