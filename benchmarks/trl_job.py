"""One GRPO run of TRL, for `benchmarks.peer_trl`, in a separate environment with TRL and without rlsys.

Reads a job as JSON from its only argument and appends one row to the job's `metrics` file after every optimizer step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Marker(TrainerCallback):
    """Callback that writes a row at the end of each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args, state, control, **kwargs) -> None:  # noqa: ANN001, ANN003  (TRL's signature)
        with self._path.open("a") as file:
            file.write(json.dumps({"step": state.global_step}) + "\n")


def exact(completions: list, answer: list[str], **columns: object) -> list[float]:
    """Return 1.0 for the exact answer; completions are texts, or lists of one message in a chat."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]


def main() -> None:
    """Train the job of the command line."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=job["model"],
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        reward_funcs=exact,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Marker(Path(job["metrics"]))],
        args=GRPOConfig(
            output_dir=str(Path(job["metrics"]).parent),
            max_steps=job["steps"],
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=job["groups_per_step"] * job["group_size"] // job["micro_batch"],
            num_generations=job["group_size"],
            max_completion_length=job["max_new_tokens"],
            temperature=job["temperature"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            adam_beta2=0.99,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            shuffle_dataset=False,
            model_init_kwargs={"dtype": job["dtype"]},
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
