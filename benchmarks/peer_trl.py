"""rlsys against TRL's GRPOTrainer, side by side: CPU-seconds per trained sample, samples per second.

    python -m benchmarks.peer_trl [--quick]

Two jobs, the configurations of `examples/`: the tiny sorter (32 prompts x 8 samples) and SmolLM2-135M on the largest of
three (8 x 8). Both systems get the same model, the same prompts in the same order in each step, the same group size,
sampling, clipping and learning rate, and one thread in each process. TRL is one process; rlsys is its whole system:
driver, Ray's daemons, rollouts, rewards, relay, actor. CPU time is that of every process, between two step marks, so
that start-up does not count. Repeats alternate between the two.

TRL runs in an environment of its own, `.cache/peer_trl/venv`, made on first use (some minutes, not measured). It is
tuned no further than this: no gradient checkpointing; for SmolLM2 bf16 weights, faster there than fp32 with autocast,
and micro-batches of 8 samples, faster than all 64 at once. It has no vLLM. Long prompts with short answers favour
rlsys: it runs a prompt once for its group and computes logits for completion tokens only.

Progress goes to stderr, and one JSON object to the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.measure import Mark, marks_of, print_result, spread
from examples.smollm import prepare as smollm
from examples.sort import prepare as sort
from rlsys.config import Config

TRL_ENVIRONMENT = Path(".cache/peer_trl/venv")
TRL_REQUIREMENTS = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")
ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Contest:
    """One job for both systems, and how long each is watched."""

    name: str
    file: Path
    repeats: int
    trl_micro_batch: int
    """Samples TRL runs through the model together: all of a step, unless fewer are faster for it."""
    trl_steps: tuple[int, int]
    """Steps at whose ends the clock starts and stops; a step of TRL on SmolLM2 is long."""
    rlsys_steps: tuple[int, int]


TINY = Contest(
    name="tiny",
    file=Path("examples/sort/run.yaml"),
    repeats=5,
    trl_micro_batch=256,
    trl_steps=(10, 50),
    rlsys_steps=(10, 50),
)
SMOLLM = Contest(
    name="smollm",
    file=Path("examples/smollm/run.yaml"),
    repeats=3,
    trl_micro_batch=8,
    trl_steps=(1, 4),
    rlsys_steps=(1, 7),
)
QUICK = (
    replace(TINY, repeats=2, trl_steps=(5, 25), rlsys_steps=(5, 25)),
    replace(SMOLLM, repeats=1, trl_steps=(1, 2), rlsys_steps=(1, 4)),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """What one run of one system cost, between its marks."""

    cpu_s_per_sample: float
    samples_per_s: float


def main() -> None:
    """Compare on both jobs and print the closing line."""
    parser = argparse.ArgumentParser(description="rlsys against TRL's GRPOTrainer.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats; under 5 minutes once set up")
    arguments = parser.parse_args()
    make_trl_environment()
    sort.prepare(Path(".cache/sort/seed0"), sort.Recipe(seed=0))
    smollm.prepare(Path(".cache/smollm"), smollm.Recipe())
    contests = QUICK if arguments.quick else (TINY, SMOLLM)
    print_result({contest.name: compare(contest) for contest in contests})


def compare(contest: Contest) -> dict[str, object]:
    """Run both systems in turn, `repeats` times."""
    config = Config.load(contest.file)
    rlsys, trl = [], []
    for repeat in range(contest.repeats):
        with tempfile.TemporaryDirectory(prefix="peer_trl_") as folder:
            trl.append(speed(run_trl(contest, config, Path(folder)), config))
            rlsys.append(speed(run_rlsys(contest, Path(folder)), config))
        print(f"{contest.name} {repeat + 1}/{contest.repeats}  TRL {trl[-1]}  rlsys {rlsys[-1]}", file=sys.stderr)
    return {
        "cpu_s_per_sample_ratio": ratio(trl, rlsys, "cpu_s_per_sample"),
        "samples_per_s_ratio": ratio(rlsys, trl, "samples_per_s"),
        "samples_per_step": config.samples_per_step,
        "rlsys": spreads(rlsys),
        "trl": spreads(trl),
    }


def run_rlsys(contest: Contest, folder: Path) -> list[Mark]:
    """The marks of one `rlsys train` of the contest's file."""
    command = [sys.executable, "-m", "rlsys.cli", "train", str(contest.file)]
    command += [f"run.folder={folder}", "run.name=rlsys", f"run.steps={contest.rlsys_steps[1]}", "data.shuffle=false"]
    command += ["train.warmup_steps=0", "train.final_lr_fraction=1", "checkpoint.every=0", "--json"]
    return marks_of(command, ENV, folder / "rlsys" / "metrics.jsonl", contest.rlsys_steps)


def run_trl(contest: Contest, config: Config, folder: Path) -> list[Mark]:
    """The marks of one GRPOTrainer run of the same job."""
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
    python = TRL_ENVIRONMENT / "bin" / "python"
    return marks_of([str(python), "benchmarks/trl_job.py", json.dumps(job)], ENV, metrics, contest.trl_steps)


def speed(marks: list[Mark], config: Config) -> Speed:
    """Cost between the first and the last mark."""
    first, last = marks
    samples = (last.step - first.step) * config.samples_per_step
    return Speed((last.cpu_s - first.cpu_s) / samples, samples / (last.wall_s - first.wall_s))


def ratio(over: Sequence[Speed], under: Sequence[Speed], what: str) -> float:
    """Ratio of the medians over repeats."""
    return median(getattr(s, what) for s in over) / median(getattr(s, what) for s in under)


def spreads(speeds: Sequence[Speed]) -> dict[str, dict[str, float | int]]:
    """Median and range over repeats of both figures."""
    return {
        "cpu_s_per_sample": spread([s.cpu_s_per_sample for s in speeds]),
        "samples_per_s": spread([s.samples_per_s for s in speeds]),
    }


def make_trl_environment() -> None:
    """Create TRL's environment unless it holds what is asked for; the one rlsys runs in is left alone."""
    mark = TRL_ENVIRONMENT / "installed.txt"
    wanted = "\n".join(TRL_REQUIREMENTS)
    if mark.exists() and mark.read_text() == wanted:
        return
    print(f"installing TRL into {TRL_ENVIRONMENT}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", TRL_ENVIRONMENT], check=True)
    install = [TRL_ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *TRL_REQUIREMENTS], check=True, stdout=sys.stderr)
    mark.write_text(wanted)


if __name__ == "__main__":
    main()
