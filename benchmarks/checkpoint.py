"""Cost of a checkpoint for training, and of a resume.

    python -m benchmarks.checkpoint [--quick | --short]

`stall`: one rank with about 600 MB of fp32 weights and AdamW state saves again and again. `copy_s` is the time of the
copy to host memory alone, `save_s` the time until all is on disk. `stall_s` is the time that training waits: in the
call that begins the save, and before the update of the next step, whose forward passes (512 tokens, without the
backward passes) run meanwhile. `stall_share` is its part of `save_s`, save by save. The first save, which allocates the
host memory, is `first_copy_s`, and counts nowhere else.

`resume_s`: a model of the size of SmolLM2-135M with random weights, on a local cluster, from the command to the
beginning of its first training step, with the seconds of each phase. The first answers are sampled in that time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Size,
    answer_of,
    parser_of,
    print_result,
    progress,
    rows_of,
    sorter,
    spread,
    spreads,
    train_command,
)

SIZES = {"full": (10, 3), "quick": (4, 1), "short": (2, 1)}
"""Repeats of saves and resumes."""
MEDIUM = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 16_384}
SMOLLM = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
FORWARDS = 8
"""Forward passes of 64 tokens beside a copy."""


def main() -> None:
    """Measure both; print the result line."""
    parser = parser_of(__doc__, quick="4 saves and one resume instead of 10 and 3")
    size = parser.parse_args().size
    num_saves, num_resumes = SIZES[size]
    with tempfile.TemporaryDirectory(prefix="checkpoint_") as name:
        folder = Path(name)
        saves = saves_of(_model(folder / "medium", **(TINY if size == "short" else MEDIUM)), folder, num_saves)
        resumes = resumes_of(folder, num_resumes, size)
    print_result({**saves, **resumes})


def _model(folder: Path, **sizes: Any) -> Path:  # noqa: ANN401  (of the configuration)
    """Write a random model of these sizes, with the tokenizer of `examples.sort`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.tiny_policy import build_tokenizer

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    shape = {**sizes, "num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": True}
    config = LlamaConfig.from_dict(shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def saves_of(model: Path, folder: Path, repeats: int) -> dict[str, object]:
    """Measure the saves of one rank."""
    from workers.train.fsdp import FsdpBackend
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup

    backend = FsdpBackend(str(model), OptimizerSettings(lr=1e-3, total_steps=1000), RankGroup(), probe_length=64)
    alone_s: list[float] = []
    rows: list[dict[str, float]] = []
    for save in range(repeats + 1):
        began = time.perf_counter()
        writing = backend.save(folder / f"alone{save}")
        backend.end_step()
        alone_s.append(time.perf_counter() - began)
        writing.wait()
        began = time.perf_counter()
        writing = backend.save(folder / f"beside{save}")
        called = time.perf_counter()
        for _ in range(FORWARDS):
            backend.probe()
        computed = time.perf_counter()
        backend.end_step()
        stall_s = (called - began) + (time.perf_counter() - computed)
        writing.wait()
        save_s = time.perf_counter() - began
        rows.append({"stall_s": stall_s, "save_s": save_s, "stall_share": stall_s / save_s})
        progress(f"copy {alone_s[-1]:.3f} s, stall {stall_s:.3f} s, save {save_s:.3f} s")
    state_mb = sum(p.numel() for p in backend.parameters().values()) * 12 / 1e6
    copies = {"first_copy_s": alone_s[0], "copy_s": spread(alone_s[1:]), "state_mb": round(state_mb)}
    return {**copies, **spreads(rows[1:])}


def resumes_of(folder: Path, repeats: int, size: Size) -> dict[str, object]:
    """Measure resumes from a checkpoint after one step."""
    prepared, source = folder / "prepared", sorter("short")
    _model(prepared / "model", **(TINY if size == "short" else SMOLLM))
    for name in ("train.jsonl", "eval.jsonl"):
        (prepared / name).symlink_to((source / name).resolve())
    keys = ("stabilizer=null", "eval.every=0", "rollout.replicas=1", "rollout.engine=local", "rollout.max_new_tokens=4")
    keys += ("train.groups_per_step=2", "algorithm.group_size=2", "checkpoint.keep_last=1", "record.rollouts_every=0")
    answer_of(train_command(prepared, folder, *keys, "run.steps=1", "run.resume=never"))
    resume_s: list[float] = []
    phases: dict[str, float] = {}
    for step in range(2, repeats + 2):
        began_s = time.time()
        phases = answer_of(train_command(prepared, folder, *keys, f"run.steps={step}", "run.resume=must"))["seconds"]
        resume_s.append(_training_began_s(rows_of(folder / "run" / "events.jsonl"), step) - began_s)
        progress(f"resume {resume_s[-1]:.1f} s: {phases}")
    return {"resume_s": spread(resume_s), "last_phases_s": phases}


def _training_began_s(events: list[dict[str, Any]], step: int) -> float:
    """Time at which training of a step began."""
    (done,) = [event for event in events if event["kind"] == "step_done" and event["step"] == step]
    return done["time_s"] - sum(done["metrics"].get(f"time/{part}", 0.0) for part in ("train", "publish"))


if __name__ == "__main__":
    main()
