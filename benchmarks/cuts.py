"""Steps of a run while one of its hosts is cut off, on hosts that are network namespaces of this machine.

    python -m benchmarks.cuts [--quick | --short]

Three hosts with a shared disk and Ray's tokens, and a tiny random model, synchronous. For each case: the median and
longest step before the cut, the longest from it until ten steps after it, steps that ended meanwhile, and what is told
of it. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import parser_of, print_result, progress
from tests.cluster.cuts import cut_off
from tests.cluster.lab import Lab, why_not
from tests.cluster.lab_runs import give
from tests.jobs import write_model, write_tasks

TWO = ("rollout.replicas=2",)
CASES = {
    "relay alone, 10 s": (3, 10.0, TWO, 1),
    "relay alone, 60 s": (3, 60.0, TWO, 1),
    "one of two replicas, 10 s": (2, 10.0, (*TWO, "resources.rollout.cpus=2"), 1),
    "driver, 10 s": (2, 10.0, TWO, 2),
    "one of two replicas, 60 s": (2, 60.0, (*TWO, "resources.rollout.cpus=2"), 1),
    "driver, 70 s": (2, 70.0, TWO, 2),
}
"""By name of the case: the host that is cut off, for how long, further keys, and the host of the driver."""
NUM_CASES = {"full": 6, "quick": 4, "short": 1}


def main() -> None:
    """Cut hosts off in turn, each in a lab of its own; print the result line."""
    arguments = parser_of(__doc__, quick="only cuts of 10 s, and one of 60 s").parse_args()
    if reason := why_not():
        sys.exit(reason)
    found = {}
    for name in list(CASES)[: NUM_CASES[arguments.size]]:
        number, seconds, keys, driver = CASES[name]
        with (
            tempfile.TemporaryDirectory(prefix="cuts_") as folder,
            Lab.open(Path(folder), 3, has_shared_disk=True) as lab,
        ):
            give(lab, write_model(Path(folder, "model")), write_tasks(Path(folder, "tasks.jsonl")))
            lab.start_ray(num_cpus=(4, 2, 0))
            found[name] = asdict(cut_off(lab, number, seconds, keys, driver=driver))
        progress(f"{name}: {found[name]}")
    print_result(found)


if __name__ == "__main__":
    main()
