"""Devices shared in turns against devices for each, hand-overs, and replicas that join.

    python -m benchmarks.placement [--quick | --short]

`together_over_split`   samples per second of a synchronous run whose actor and replica have both processors in turns,
                        over those of one whose actor and replica have one each; medians of runs in turns. A random
                        policy of 49 million parameters, whose sampling and training take about as long.
`wake_over_memcpy`      seconds in which the memory of an actor sleeps and wakes, over those of a copy of so many bytes
                        into memory that is there; `wake_over_clone`: into new memory. On a CPU, waking takes new
                        memory, which the kernel fills with zeros first.
`resident_over_larger`  most bytes on the device while actor and replica take turns, at the end of each sleep and wake,
                        over those of the larger of them alone.
`join_s`                from `rlsys scale RUN rollouts=2` until the new replica of a tiny policy has rolled out a group.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import ENV, in_fresh_process, parser_of, print_result, progress, timed
from tests.jobs import keys_of, write_model, write_tasks

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
KEYS = ("reward.workers=0", "checkpoint.every=0", "checkpoint.every_s=0", "record.rollouts_every=0",
        "asynchrony.max_staleness=0", "rollout.max_new_tokens=24", "algorithm.group_size=8", "train.groups_per_step=6",
        "rollout.slots=48", "train.lr=1e-9")  # fmt: skip
SPLIT = ("resources.actor.threads=1", "resources.rollout.threads=1")
TOGETHER = ("placement.together=[actor,rollout]", "resources.actor.threads=2", "resources.rollout.threads=2",
            "resources.actor.cpus=2", "resources.rollout.cpus=2")  # fmt: skip
SETTLING = 2
"""Steps that are left out."""
NUM_STEPS, NUM_ROUNDS = {"full": 8, "quick": 4, "short": 1}, {"full": 3, "quick": 1, "short": 1}


def main() -> None:
    """Measure all; print the result line."""
    size = parser_of(__doc__, quick="one round").parse_args().size
    with tempfile.TemporaryDirectory(prefix="placement_") as name:
        folder = Path(name)
        write_tasks(folder / "tasks.jsonl")
        write_model(folder / "tiny")
        write_model(folder / "model", **(SIZES if size != "short" else {}))
        speeds: dict[str, list[dict[str, float]]] = {"split": [], "together": []}
        for _ in range(NUM_ROUNDS[size]):
            for kind, keys in (("split", SPLIT), ("together", TOGETHER)):
                speeds[kind].append(speed(folder, kind, keys, NUM_STEPS[size]))
                progress(f"{kind}: {speeds[kind][-1]}")
        memory = in_fresh_process("benchmarks.placement:memory_of_turns", str(folder / "model"))
        progress(f"hand-overs: {memory}")
        joined = join_s(folder)
    split, together = (median(one["samples_per_s"] for one in speeds[kind]) for kind in ("split", "together"))
    print_result({"together_over_split": together / split, **memory, "join_s": joined, "rows": speeds})


@contextmanager
def running(folder: Path, name: str, *keys: str) -> Iterator[Path]:
    """The folder of a run, which ends with the block."""
    run = folder / name
    command = [sys.executable, "-m", "rlsys.cli", "train", *keys_of(folder / "model", folder / "tasks.jsonl", folder)]
    command += [f"run.name={name}", "run.steps=100000", "run.resume=never", *KEYS, *keys]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=ENV, stdout=log, stderr=log, start_new_session=True)
        try:
            yield run
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """What a run has told of this kind so far."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
    return [row for row in rows if row["kind"] == kind]


def speed(folder: Path, kind: str, keys: tuple[str, ...], num_steps: int) -> dict[str, float]:
    """Medians of some steps of a run."""
    number = len(list(folder.glob(f"{kind}-*.log")))
    with running(folder, f"{kind}-{number}", *keys) as run:
        while len(steps := events_of(run, "step_done")) < SETTLING + num_steps:
            time.sleep(0.1)
    metrics = [step["metrics"] for step in steps[SETTLING:]]
    found = {key: median(row.get(f"time/{key}", 0.0) for row in metrics) for key in ("step", "train", "hand_over")}
    return {"samples_per_s": median(row["perf/samples_per_s"] for row in metrics), **found}


def join_s(folder: Path) -> float:
    """Start a run with one replica, and ask for a second one."""
    tiny = f"model.path={folder / 'tiny'}"
    with running(folder, "joined", tiny, "rollout.replicas=1", "asynchrony.max_staleness=1", "ray=4") as run:
        while len(events_of(run, "step_done")) < SETTLING:
            time.sleep(0.1)
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "rlsys.cli", "scale", run, "rollouts=2"], env=ENV, check=True)
        while not any(row["worker"] == "rollout-1" for row in events_of(run, "group_rolled_out")):
            time.sleep(0.05)
        return time.monotonic() - began_s


def seconds_of(work: Callable[[], object]) -> float:
    """Median of five times."""
    took_s: list[float] = []
    for _ in range(5):
        with timed(took_s):
            work()
    return median(took_s)


def memory_of_turns(model_path: str) -> dict[str, float]:
    """Let an actor and a replica take turns in one process, and count the bytes that each has then."""
    import torch
    from torch import Tensor

    from rlsys.types import Distribution
    from tests.training import PLAIN, SETTINGS, data_of, planned
    from workers.engines.engine import EngineSpec
    from workers.engines.local.local_engine import LocalEngine
    from workers.model.model_loading import load_model
    from workers.train.fsdp import FsdpBackend
    from workers.train.rank_group import RankGroup

    torch.set_num_threads(1)
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    spec = EngineSpec(model_path=model_path, slots=48, max_context=64, shares_device=True)
    model = load_model(model_path, torch.float32)
    engine = LocalEngine(model, spec, stop_token_ids=frozenset(), name="rollout-0")

    def num_bytes(tensors: list[Tensor]) -> int:
        return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())

    def of_actor() -> int:
        return num_bytes(list(backend._resident()))

    def of_replica() -> int:
        return num_bytes([*engine._residents.tensors(), *engine._decoder._cache._tensors()])

    async def take_turns() -> dict[str, float]:
        plan, payloads = planned(0, 1, PLAIN)
        backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
        largest = max(of_actor(), of_replica())
        most, took_s, moved = 0, [], of_actor()
        await engine.sleep()
        for _ in range(5):
            most = max(most, of_actor() + of_replica())
            began_s = time.perf_counter()
            backend.move_out(moves_state=True)
            slept_s = time.perf_counter() - began_s
            most = max(most, of_actor() + of_replica())
            await engine.wake()
            most = max(most, of_actor() + of_replica())
            await engine.sleep()
            most = max(most, of_actor() + of_replica())
            began_s = time.perf_counter()
            backend.move_in()
            took_s.append(slept_s + time.perf_counter() - began_s)
        await engine.close()
        source, target = torch.ones(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
        copies = {"memcpy": lambda: target.copy_(source), "clone": source.clone}
        over = {f"wake_over_{kind}": median(took_s) / seconds_of(copy) for kind, copy in copies.items()}
        return {**over, "resident_over_larger": most / largest, "moved_mb": moved / 1e6}

    return asyncio.run(take_turns())


if __name__ == "__main__":
    main()
