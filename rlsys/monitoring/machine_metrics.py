"""Metrics of what the workers of a run use of their machines, and all together of each node, from their samples.

Names and units are those of `machine/` and `node/` in the metric catalog. A thread reads the samples, so that a step
takes the newest metrics without a look at a file. Workers on nodes that do not see the run's folder write no samples.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlsys.monitoring.machine_samples import MACHINE, MachineSample, last_sample

READ_S = 5.0
"""Seconds between two looks at the samples; workers write them as often."""
GONE_S = 60.0
"""Age from which the worker of a sample counts as ended, also in an earlier session of the run."""
_Value = Callable[[MachineSample], float | None]
OF_WORKER: Mapping[str, _Value] = {
    "cpu": lambda sample: sample.cpu,
    "memory": lambda sample: sample.memory,
    "gpu": lambda sample: sample.gpu,
    "gpu_memory": lambda sample: sample.gpu_memory,
}
"""Name of a metric of a worker -> its value in a sample; None: there is no GPU."""
OF_NODE: Mapping[str, _Value] = {
    "cpu": lambda sample: sample.node_cpu,
    "memory": lambda sample: sample.node_memory,
    "shm": lambda sample: sample.node_shm,
    "sent": lambda sample: sample.node_sent,
    "received": lambda sample: sample.node_received,
}
"""Name of a metric of a node -> its value in a sample."""


class MachineMetrics:
    """Newest metrics of the machines of a run.

    consumes: last samples of workers    waits for: `READ_S`
    produces: `newest`                   unblocked by: time, or `close`
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ended = threading.Event()
        self._newest: Mapping[str, float] = {}

    def newest(self) -> Mapping[str, float]:
        """Return the metrics of the last look; none before the first one. Never waits."""
        return self._newest

    def start(self) -> None:
        """Look at the samples in a thread, from now on. A disk that hangs delays neither the run nor its end."""
        threading.Thread(target=self._read_until_ended, name="machine-metrics", daemon=True).start()

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._ended.set()

    def _read_until_ended(self) -> None:
        while True:
            self._newest = machine_metrics(self._run_dir, time.time())
            if self._ended.wait(READ_S):
                return


def machine_metrics(run_dir: Path, now_s: float) -> dict[str, float]:
    """Return the metrics of the last sample of each worker, and of each node; samples older than `GONE_S` are left
    out. A folder that cannot be read has none.

    Example: `{"machine/rollout-0/cpu": 0.97, "machine/rollout-0/memory": 593494016, "node/gpu-a/memory": 0.41, ...}`.
    """
    metrics: dict[str, float] = {}
    nodes: dict[str, MachineSample] = {}
    for worker in _workers_in(run_dir / MACHINE):
        sample = last_sample(run_dir, worker)
        if sample is None or now_s - sample.time_s > GONE_S:
            continue
        metrics |= _values(f"machine/{worker}", OF_WORKER, sample)
        if sample.host not in nodes or sample.time_s > nodes[sample.host].time_s:
            nodes[sample.host] = sample
    for host, sample in sorted(nodes.items()):
        metrics |= _values(f"node/{host}", OF_NODE, sample)
    return metrics


def _workers_in(folder: Path) -> list[str]:
    try:
        return sorted(path.stem for path in folder.glob("*.jsonl"))
    except OSError:
        return []


def _values(prefix: str, values: Mapping[str, _Value], sample: MachineSample) -> dict[str, float]:
    found = ((name, value_of(sample)) for name, value_of in values.items())
    return {f"{prefix}/{name}": value for name, value in found if value is not None}
