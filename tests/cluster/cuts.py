"""Runs one of whose hosts is cut off for a while, and how long their steps take."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tests.cluster.lab import Lab
from tests.cluster.lab_runs import LabRun
from tests.ray.commands import DEADLINE_S, ENDLESS, wait_until

SETTLING, CALM, AFTER = 10, 25, 10
"""Steps of a run that are left out, those that count before the cut, and those after it."""
NO_FILES = ("checkpoint.every=0", "checkpoint.every_s=0", "record.rollouts_every=0", f"run.steps={ENDLESS}")


@dataclass(frozen=True)
class Cut:
    """A run through a cut, seconds of its steps in it."""

    calm_median_s: float
    calm_longest_s: float
    longest_s: float
    """From the cut to `AFTER` steps after it, or to the end of the run."""
    num_meanwhile: int
    """Steps that ended during the cut."""
    failures: Sequence[str]
    """Workers that failed, with the beginning of what is told of them."""
    code: int | None
    """Exit code of a run that ended by itself."""
    ends_with: str
    """Its last line."""


def cut_off(lab: Lab, number: int, seconds: float, overrides: Sequence[str], *, driver: int = 1) -> Cut:
    """Train on a lab with a shared disk, pull the cable of a host for a while, and look on for some steps more."""
    shutil.rmtree(lab.folder / "shared" / "runs", ignore_errors=True)
    with LabRun.on(lab, driver, [*NO_FILES, *overrides]) as run:
        run.wait_for_step(SETTLING + CALM)
        calm = gaps(run.steps_at[SETTLING:])
        host, began_s = lab.host(number), time.time()
        host.set_link(is_up=False)
        time.sleep(seconds)
        host.set_link(is_up=True)
        healed_s = time.time()
        wait_until(lambda: run.process.poll() is not None or after(run, healed_s) >= AFTER)
        steps = run.steps_at
        before = [at for at in steps if at < began_s]
        longest_s = max(gaps([before[-1], *steps[len(before) :]]), default=0.0)
        failures = [f"{row['worker']}: {row['detail'].partition(': ')[2][:60]}" for row in run.events("worker_failed")]
        code = run.process.poll()
        if code is None:
            lab.host(driver).run("pkill", "-TERM", "-f", "rlsys train")
        _, errors = run.process.communicate(timeout=DEADLINE_S)
        last = [*errors.strip().splitlines(), ""][0 if not errors.strip() else -1]
        num_meanwhile = sum(began_s < at < healed_s for at in steps)
        return Cut(median(calm), max(calm), longest_s, num_meanwhile, failures, code, last)


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def after(run: LabRun, time_s: float) -> int:
    return sum(at > time_s for at in run.steps_at)
