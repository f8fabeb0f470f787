"""Runs during which something happens to one of their hosts, and the seconds of their steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from tests.cluster.lab import Lab
from tests.cluster.lab_runs import LabRun
from tests.ray.commands import DEADLINE_S, ENDLESS, wait_until

SETTLING, CALM, AFTER = 10, 25, 10
"""Steps of a run that are left out, those that count before an outage, and those after it."""
NO_FILES = ("checkpoint.every=0", "checkpoint.every_s=0", "record.rollouts_every=0", f"run.steps={ENDLESS}")


@dataclass(frozen=True)
class Outage:
    """A run through an outage, seconds of its steps in it."""

    calm_median_s: float
    calm_longest_s: float
    longest_s: float
    """From the beginning to `AFTER` steps after the end of the outage, or to the last step of the run."""
    num_meanwhile: int
    """Steps that ended during the outage."""
    failures: Sequence[str]
    """Workers that failed, with the beginning of what is told of them."""
    num_lost: int
    """Groups that were dropped."""
    num_twice: int
    """Groups that two steps trained, of which none was rolled back."""
    code: int | None
    """Exit code of a run that ended by itself."""
    ended_after_s: float | None
    """Seconds from the beginning of the outage to the end of such a run."""
    ends_with: str
    """Its last line."""


def suffer(
    lab: Lab, overrides: Sequence[str], begin: Callable[[LabRun], object], end: Callable[[], object] | None = None,
    *, lasts_s: float = 0.0, driver: int = 1,
) -> Outage:  # fmt: skip
    """Train on a lab with a shared disk, let something happen to a host for a while, and look on for some steps more.

    Without `end` it is never mended.
    """
    shutil.rmtree(lab.folder / "shared" / "runs", ignore_errors=True)
    with LabRun.on(lab, driver, [*NO_FILES, *overrides]) as run:
        run.wait_for_step(SETTLING + CALM)
        calm = _gaps(run.steps_at[SETTLING:])
        began_s = time.time()
        begin(run)
        time.sleep(lasts_s)
        if end is not None:
            end()
        ended_s = time.time()
        wait_until(lambda: run.process.poll() is not None or _num_after(run, ended_s) >= AFTER)
        code = run.process.poll()
        over_s = None if code is None else time.time() - began_s
        if code is None:
            lab.host(driver).run("pkill", "-TERM", "-f", "rlsys train")
        _, errors = run.process.communicate(timeout=DEADLINE_S)
        steps = run.steps_at
        before = [at for at in steps if at < began_s]
        return Outage(
            calm_median_s=median(calm),
            calm_longest_s=max(calm),
            longest_s=max(_gaps([before[-1], *steps[len(before) :][: -1 if code is None else None]]), default=0.0),
            num_meanwhile=sum(began_s < at < ended_s for at in steps),
            failures=[
                f"{row['worker']}: {row['detail'].partition(': ')[2][:60]}" for row in run.events("worker_failed")
            ],
            num_lost=len(run.events("group_dropped")),
            num_twice=_num_twice(run),
            code=code,
            ended_after_s=over_s,
            ends_with=(errors.strip().splitlines() or [""])[-1],
        )


def cut_off(lab: Lab, number: int, seconds: float, overrides: Sequence[str], *, driver: int = 1) -> Outage:
    """Pull the cable of a host for a while, or for ever."""
    host = lab.host(number)

    def pull(_: LabRun) -> None:
        host.set_link(is_up=False)

    if seconds == inf:
        return suffer(lab, overrides, pull, driver=driver)
    return suffer(lab, overrides, pull, lambda: host.set_link(is_up=True), lasts_s=seconds, driver=driver)


def _num_twice(run: LabRun) -> int:
    """Count groups that are in two steps, of those steps that no roll-back has undone."""
    steps: dict[int, list[int]] = {}
    for row in sorted([*run.events("step_done"), *run.events("rolled_back")], key=lambda row: row["time_s"]):
        if row["kind"] == "step_done":
            steps[row["step"]] = row["group_ids"]
        else:
            steps = {step: groups for step, groups in steps.items() if step <= row["restored"]}
    trained = [group for groups in steps.values() for group in groups]
    return len(trained) - len(set(trained))


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _num_after(run: LabRun, time_s: float) -> int:
    return sum(at > time_s for at in run.steps_at)
