"""Part of `benchmarks.relay`: bytes that are sent of a version after a step, and the time of their encoding.

    python -m benchmarks.measure benchmarks.weight_deltas:after_steps '["full"]'      # this part alone

SmolLM2-135M (the tiny sorter with `"short"`) takes steps of GRPO on its own answers, and publishes bfloat16 after each.
By learning rate, of all buckets of the last version, with the median and range over seeds, which have other prompts:

`sent_share`        bytes sent over all bytes.
`changed`           share of the weights that differ from the version before.
`encode_s`          CPU seconds to encode all buckets on one core, the median of repeats; `decode_s` to decode them.
                    Programs beside this one change them less than elapsed time.
`time_over_saved`   both together, over the time of the saved bytes at 10 Gbit/s, 1.25e9 bytes a second. Below 1, a
                    version arrives sooner with deltas.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.measure import Size, engine_spec, group_of, progress, smollm, sorter, spreads

if TYPE_CHECKING:
    import numpy as np

    from rlsys.types import Episode
    from workers.train.fsdp import FsdpBackend

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
SEEDS = (0, 1)
NUM_STEPS = 4
REPEATS = 5
BYTES_PER_S = 1.25e9
SIZES = {"full": (8, 32), "quick": (8, 16), "short": (4, 4)}
"""Prompts, and tokens of an answer."""


def after_steps(size: Size) -> dict[str, dict[str, dict[str, float | int]]]:
    """Return the figures for each learning rate."""
    import torch

    from benchmarks.agreement import prompts_of, sampled

    torch.set_num_threads(1)
    folder = sorter(size) if size == "short" else smollm()
    num_prompts, num_tokens = SIZES[size]
    path = str(folder / "model")
    spec = engine_spec("local", path, "float32", slots=num_prompts, max_context=256)
    prompts = prompts_of(folder, len(SEEDS) * num_prompts)
    runs: dict[float, list[dict[str, float]]] = {lr: [] for lr in LEARNING_RATES}
    for seed in SEEDS:
        own = prompts[seed * num_prompts : (seed + 1) * num_prompts]
        episodes = asyncio.run(sampled(spec, own, num_tokens, [1.0]))[1.0]
        for lr, results in runs.items():
            results.append(_measured(*_last_two(path, episodes, lr)))
            progress(f"seed {seed}, learning rate {lr:g}: {results[-1]}")
    return {f"{lr:g}": spreads(results) for lr, results in runs.items()}


def _last_two(path: str, episodes: tuple[Episode, ...], lr: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Buckets of the last two versions of `NUM_STEPS` steps."""
    from algorithms.grpo import GRPO
    from rlsys.algorithm import Aggregation, TrajectoryAdvantage
    from rlsys.batch.packing import plan_batch
    from rlsys.batch.tensors import StepData
    from rlsys.types import Distribution
    from workers.train.fsdp import FsdpBackend
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup

    backend = FsdpBackend(path, OptimizerSettings(lr=lr, total_steps=NUM_STEPS), RankGroup(), dtype="bfloat16")
    assigned = [TrajectoryAdvantage(e, 0, 1.0 if e % 2 else -1.0) for e in range(len(episodes))]
    plan = plan_batch([group_of(0, episodes)], [assigned], Aggregation(), num_ranks=1, max_tokens=2048)
    old: list[np.ndarray] = []
    for _ in range(NUM_STEPS):
        old = _buckets(backend)
        backend.train_step(plan[0], StepData([episodes], [{}]), GRPO(), distribution=Distribution(1.0))
    return old, _buckets(backend)


def _buckets(backend: FsdpBackend) -> list[np.ndarray]:
    """Copies of the buckets that the only rank publishes."""
    import numpy as np

    from workers.transport.buckets import PartLayout

    layout = PartLayout(backend.published_rectangles())
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.write(memory, backend.owned_tensors())
    return [memory[start:end] for start, end in pairwise(layout.bounds)]


def _measured(old: list[np.ndarray], new: list[np.ndarray]) -> dict[str, float]:
    """Encode and decode all buckets. One that is sent whole counts with its encoding, and needs no decoding."""
    import numpy as np

    from workers.transport.deltas import apply_delta, delta_of

    encode_s: list[float] = []
    decode_s: list[float] = []
    deltas: list[np.ndarray | None] = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        deltas = [delta_of(*pair) for pair in zip(old, new, strict=True)]
        encoded_s = time.thread_time()
        for before, delta in zip(old, deltas, strict=True):
            if delta is not None:
                apply_delta(before, delta)
        encode_s.append(encoded_s - began_s)
        decode_s.append(time.thread_time() - encoded_s)
    num_sent = num_changed = 0
    for before, after, delta in zip(old, new, deltas, strict=True):
        assert delta is None or np.array_equal(apply_delta(before, delta), after), "the exact bytes"
        num_sent += after.nbytes if delta is None else delta.nbytes
        num_changed += int(np.count_nonzero(before.view(np.uint16) != after.view(np.uint16)))
    whole = sum(after.nbytes for after in new)
    saved_s = (whole - num_sent) / BYTES_PER_S
    seconds = median(encode_s) + median(decode_s)
    return {
        "sent_share": round(num_sent / whole, 5),
        "changed": round(2 * num_changed / whole, 5),
        "encode_s": round(median(encode_s), 6),
        "decode_s": round(median(decode_s), 6),
        "time_over_saved": round(seconds / saved_s, 3) if saved_s else float("inf"),
    }
