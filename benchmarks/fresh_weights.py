"""Freshness of weights over slow links, measured and simulated.

    python -m benchmarks.fresh_weights [--short]

Three hosts that are network namespaces of this machine, the actor on the first and a replica on each of the others,
synchronous. Each host's cable carries 100 Mbit/s, and delays every frame by 10 ms: 20 ms from host to host. A policy of
14 million parameters in bfloat16 is published whole, and with a learning rate so small that deltas are sent. Needs
root, iproute2 and util-linux.

`measured_s`   median of `weights/freshness_s`: from the end of a publish to the last replica's open gate.
`simulated_s`  that of `rlsys simulate` with the profile that rlsys makes of the run, and these values instead: one
               device on each node, `num_bytes` as sent, `link_bytes_per_s` of the cable less the headers of frames,
               `load_s` as without the limits, `link_latency_s` by a policy of 12,000 parameters on the same links,
               half of what they add to its freshness: it takes two links.
`measured_over_simulated` of the worse of both.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import parser_of, print_result, progress
from rlsys.simulate.measured_profile import measured_profile
from rlsys.simulate.profile import Profile
from rlsys.simulate.simulation import Simulation
from tests.cluster.lab import Lab, why_not
from tests.cluster.lab_runs import LabRun, give
from tests.jobs import write_model, write_tasks
from tests.ray.commands import ENDLESS

RATE, BYTES_PER_S = "100mbit", 12.5e6 * 1448 / 1538
"""Rate of a cable, and the bytes of it that are left for what frames of Ethernet, IP and TCP carry."""
DELAY_MS = 10.0
SETTLING = 4
"""Steps that are left out."""
NUM_STEPS = {"full": 14, "short": 4}
KEYS = ("rollout.replicas=2", "resources.rollout.cpus=3", "resources.actor.cpus=4", "reward.workers=0",
        "checkpoint.every=0", "checkpoint.every_s=0", "record.rollouts_every=2", f"run.steps={ENDLESS}")  # fmt: skip
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 6, "head_dim": 64}  # fmt: skip
"""Those of a policy with 14 million parameters."""
LARGE = ("model.path=/mnt/given/large", "model.dtype=bfloat16")
CASES = {"tiny": (), "whole": (*LARGE, "train.lr=1e-2"), "delta": (*LARGE, "train.lr=1e-6")}


@dataclass(frozen=True)
class Measured:
    """Medians of a run."""

    freshness_s: float
    num_sent: float
    num_bytes: float
    profile: str
    """Profile that rlsys makes of the run, as YAML."""


def main() -> None:
    """Measure all cases without limits, then with them; print the result line."""
    arguments = parser_of(__doc__).parse_args()
    if reason := why_not():
        sys.exit(reason)
    num_steps = NUM_STEPS[arguments.size]
    with tempfile.TemporaryDirectory(prefix="fresh_") as folder, Lab.open(Path(folder), 3, has_shared_disk=True) as lab:
        give(lab, write_model(Path(folder, "model")), write_tasks(Path(folder, "tasks.jsonl")))
        write_model(lab.given / "large", **SIZES)
        lab.start_ray(num_cpus=(4, 3, 3))
        calm = {case: measure(lab, case, num_steps) for case in CASES}
        for host in lab.hosts.values():
            host.shape(RATE, DELAY_MS)
        slow = {case: measure(lab, case, num_steps) for case in CASES}
    latency_s = (slow["tiny"].freshness_s - calm["tiny"].freshness_s) / 2
    rows = {case: compare(calm[case], slow[case], latency_s) for case in ("whole", "delta")}
    ratios = [row["measured_s"] / row["simulated_s"] for row in rows.values()]
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    print_result({"measured_over_simulated": worst, "link_latency_s": latency_s, "rows": rows})


def compare(calm: Measured, slow: Measured, latency_s: float) -> dict[str, float]:
    """Simulate a run on slow links; return its freshness as simulated, as measured, and as measured without limits."""
    links = {"num_bytes": round(slow.num_sent), "link_bytes_per_s": BYTES_PER_S, "link_latency_s": latency_s,
             "load_s": calm.freshness_s}  # fmt: skip
    keys = ["gpus_per_node=1", *(f"weights.{key}={value}" for key, value in links.items())]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(slow.profile)
        file.flush()
        profile = Profile.load(file.name, keys)
    simulated_s = Simulation(profile, 24).run().freshness_s
    assert simulated_s is not None, "every step has one"
    sizes = {"sent_mb": slow.num_sent / 1e6, "whole_mb": slow.num_bytes / 1e6}
    return {"measured_s": slow.freshness_s, "simulated_s": simulated_s, "calm_s": calm.freshness_s, **sizes}


def measure(lab: Lab, case: str, num_steps: int) -> Measured:
    """Train for some steps."""
    shutil.rmtree(lab.folder / "shared" / "runs", ignore_errors=True)
    with LabRun.on(lab, 1, [*KEYS, *CASES[case]]) as run:
        run.wait_for_step(SETTLING + num_steps)
        lab.host(1).run("pkill", "-TERM", "-f", "rlsys train")
        run.end()
        fresh = [row["metrics"].get("weights/freshness_s") for row in run.events("step_done")[SETTLING:]]
        published = run.events("weights_published")[SETTLING:]
        found = Measured(
            freshness_s=median(took_s for took_s in fresh if took_s is not None),
            num_sent=_middle(published, "num_sent"),
            num_bytes=_middle(published, "num_bytes"),
            profile=measured_profile(run.folder),
        )
    progress(f"{case}: fresh after {found.freshness_s:.3f} s, {found.num_sent:,.0f} of {found.num_bytes:,.0f} bytes")
    return found


def _middle(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return median(row[key] for row in rows)


if __name__ == "__main__":
    main()
