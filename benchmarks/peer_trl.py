"""rlsys against TRL's GRPOTrainer: CPU-seconds per trained sample, samples per second.

    python -m benchmarks.peer_trl [--quick | --short]

Two jobs, the configurations of `examples/`: the tiny sorter (32 prompts x 8 samples) and SmolLM2-135M on the largest of
three (8 x 8). Both systems get the same model, the same prompts in the same order in each step, the same group size,
sampling, clipping and learning rate, and one thread in each process. TRL is one process; rlsys is its whole system:
driver, Ray's daemons, rollouts, rewards, relay, actor. The sorter has one replica here, of the two of its example. CPU
time is that of every process, between two step marks, so that start-up does not count. Repeats alternate.

TRL runs in a separate environment, `.cache/peer_trl/venv`, made on first use (some minutes, not measured). Its tuning
is limited to this: no gradient checkpointing; for SmolLM2 bf16 weights, faster there than fp32 with autocast, and
micro-batches of 8 samples, faster than all 64 at once. It has no vLLM. Long prompts with short answers favour rlsys: it
runs a prompt once for its group and computes logits for completion tokens only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import (
    ENV,
    Mark,
    Size,
    fresh_command,
    in_turn,
    marks_of,
    own_python,
    parser_of,
    print_result,
    rows_of,
    smollm,
    sorter,
    spreads,
    train_command,
)

if TYPE_CHECKING:
    from rlsys.config import Config

TRL_REQUIREMENTS = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")


@dataclass(frozen=True)
class Contest:
    """One job for both systems, and the measured steps of each."""

    name: str
    example: str
    trl_micro_batch: int
    """Samples of a micro-batch of TRL: all of a step, unless fewer are faster."""
    repeats: int
    trl_steps: tuple[int, int]
    """Steps at whose ends the clock starts and stops; TRL's steps on SmolLM2 are long."""
    rlsys_steps: tuple[int, int]
    overrides: tuple[str, ...] = ()
    """Changes to the example's configuration."""


TINY = Contest("tiny", "sort", trl_micro_batch=256, repeats=5, trl_steps=(10, 50), rlsys_steps=(10, 50),
               overrides=("rollout.replicas=1", "rollout.slots=256"))  # fmt: skip
SMOLLM = Contest("smollm", "smollm", trl_micro_batch=8, repeats=3, trl_steps=(1, 4), rlsys_steps=(1, 7))
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
    print_result({contest.name: compare(contest, trl_python) for contest in CONTESTS[size]})


def compare(contest: Contest, trl_python: str) -> dict[str, object]:
    """Run both systems in turn, `repeats` times."""
    from rlsys.config import Config

    prepared = sorter("full") if contest.example == "sort" else smollm()
    config = Config.load(Path(f"examples/{contest.example}/run.yaml"))

    def run(_: int, system: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="peer_trl_") as folder:
            if system == "trl":
                marks = run_trl(trl_python, contest, config, Path(folder))
            else:
                marks = run_rlsys(prepared, contest, Path(folder))
            return speed(marks, config)

    theirs, ours = map(spreads, in_turn(contest.repeats, ("trl", "rlsys"), run).values())
    return {
        "cpu_s_per_sample_ratio": theirs["cpu_s_per_sample"]["median"] / ours["cpu_s_per_sample"]["median"],
        "samples_per_s_ratio": ours["samples_per_s"]["median"] / theirs["samples_per_s"]["median"],
        "samples_per_step": config.samples_per_step,
        "rlsys": ours,
        "trl": theirs,
    }


def run_rlsys(prepared: Path, contest: Contest, folder: Path) -> list[Mark]:
    """Run `rlsys train` on the contest's file; return its marks."""
    command = train_command(
        prepared, folder, f"run.steps={contest.rlsys_steps[1]}", "data.shuffle=false", "train.warmup_steps=0",
        "train.final_lr_fraction=1", "checkpoint.every=0", *contest.overrides, example=contest.example,
    )  # fmt: skip
    return marks_of(command, ENV, folder / "run" / "metrics.jsonl", contest.rlsys_steps)


def run_trl(python: str, contest: Contest, config: Config, folder: Path) -> list[Mark]:
    """Run GRPOTrainer on the same job; return its marks."""
    metrics = folder / "trl" / "metrics.jsonl"
    settings = {
        "output_dir": str(metrics.parent),
        "max_steps": contest.trl_steps[1],
        "per_device_train_batch_size": contest.trl_micro_batch,
        "gradient_accumulation_steps": config.samples_per_step // contest.trl_micro_batch,
        "num_generations": config.algorithm.group_size,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "learning_rate": config.train.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "adam_beta2": 0.99,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_type": "dapo",
        "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": config.dtype},
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    job = (config.model.path, config.data.path, str(metrics), settings)
    command = fresh_command("benchmarks.peer_trl:train_by_trl", *job, python=python)
    return marks_of(command, ENV, metrics, contest.trl_steps)


def train_by_trl(model: str, data: str, metrics: str, settings: Mapping[str, Any]) -> None:
    """Train by GRPOTrainer in this process, which has TRL and not rlsys; append a row to `metrics` at each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Marker(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            with Path(metrics).open("a") as file:
                file.write("{}\n")

    def exact(completions: list, answer: list[str], **columns: object) -> list[float]:
        """Return 1.0 for the exact answer; completions are texts, or lists of one message in a chat."""
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]

    torch.set_num_threads(1)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=exact,
        train_dataset=Dataset.from_list(rows_of(Path(data))),
        callbacks=[Marker()],
        args=GRPOConfig(**settings),
    )
    trainer.train()


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
