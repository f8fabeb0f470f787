"""Console output of a run: a live line on a terminal, plain lines at intervals elsewhere. All of it goes to stderr.

step  42/150  reward 0.713  staleness 0  1,934 tokens/s  trainer waits 61 %, rollouts wait 24 %  0:21 left
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rlsys.monitoring import events
from rlsys.util.printing import printable

_STEPS_FOR_ETA = 20


class ConsoleSink:
    """Sink that prints events as lines. It replaces control characters, because some lines contain text of a model."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, every_s: float = 5.0, policy: str = "") -> None:
        """`every_s`: seconds between two plain progress lines, where `stream` (stderr) is not a terminal.

        With `total_steps` 0 there are notes but no progress lines. With several policies, each line begins with the
        name of `policy`, and lines are always plain, because all policies share one terminal.
        """
        self._total = total_steps
        shown: TextIO = stream or sys.stderr
        prefix = f"{printable(policy)}: " if policy else ""
        is_live = shown.isatty() and total_steps > 0 and not policy
        self._screen = LiveScreen(shown, total_steps) if is_live else PlainScreen(shown, every_s, prefix)
        self._step_times_s: deque[float] = deque(maxlen=_STEPS_FOR_ETA + 1)

    def handle(self, event: events.Event, time_s: float) -> None:
        if isinstance(event, events.StepDone):
            self._step_times_s.append(time_s)
            self._screen.progress(printable(self._progress(event)), event.step, time_s)
            return
        if isinstance(event, events.RolledBack):
            self._total = event.total_steps
        if (line := note_of(event)) is not None:
            self._screen.note(printable(line))

    def close(self) -> None:
        self._screen.close()

    def _progress(self, done: events.StepDone) -> str:
        parts = [f"step {done.step:>{len(str(self._total))}}/{self._total}", *figures(done.metrics)]
        times_s = self._step_times_s
        if len(times_s) > 1:
            step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
            parts.append(f"{duration((self._total - done.step) * step_s)} left")
        return "  ".join(parts)


def figures(metrics: Mapping[str, float]) -> list[str]:
    """Figures for a progress line, as far as their metrics exist, e.g. `reward 0.713`."""
    shown = [
        text.format(metrics[name])
        for name, text in (
            ("reward/mean", "reward {:.3f}"),
            ("async/staleness_max", "staleness {:.0f}"),
            ("perf/tokens_per_s", "{:,.0f} tokens/s"),
        )
        if name in metrics
    ]
    waits = [
        f"{who} {metrics[name] / metrics['time/step']:.0%}"
        for name, who in (("time/wait_batch", "trainer waits"), ("time/wait_permit", "rollouts wait"))
        if name in metrics and metrics.get("time/step", 0) > 0
    ]
    return [*shown, ", ".join(waits)] if waits else shown


def note_of(event: events.Event) -> str | None:
    """Line that describes an event; None for an event that the console does not show."""
    match event:
        case events.RunStarted(run_dir=run_dir, first_step=first):
            return f"run directory: {run_dir}" + (f", resuming after step {first}" if first else "")
        case events.PhaseDone(phase=phase, seconds=seconds):
            return f"{seconds:6.1f} s  {phase.replace('_', ' ')}"
        case events.EngineChosen(worker=worker, engine=engine, reason=reason):
            return f"{worker} generates with {engine}: {reason}"
        case events.TransportChosen(policy=policy, transport=transport, reason=reason):
            return f"weights of {policy} travel through {transport.replace('_', ' ')}: {reason}"
        case events.DataChanged(detail=detail):
            return f"data: {detail}"
        case events.GroupDropped(group_id=group_id, task_id=task_id, reason=reason, detail=detail):
            return f"dropped group {group_id} (task {task_id}): {reason}" + (f": {detail}" if detail else "")
        case events.GroupReissued(group_id=group_id, task_id=task_id, reason=reason):
            return f"group {group_id} (task {task_id}) is issued again: {reason}"
        case events.SignalMissing(num_groups=count, limit=limit, detail=detail):
            what = f"{count} groups one after the other had nothing to learn in them, and {limit} end the run"
            return f"{what}; look at rewards and tasks. The last: {detail}"
        case events.WorkerFailed(worker=worker, phase=phase, detail=detail):
            return f"{worker} failed while {phase}: {detail}"
        case events.WorkerRestarted(worker=worker, seconds=seconds):
            return f"{worker} is back after {seconds:.1f} s"
        case events.CheckpointSaved(step=step, path=path):
            return f"checkpoint of step {step}: {path}"
        case events.CheckpointPassedOver(problem=problem):
            return f"a newer checkpoint is passed over: {problem}"
        case events.CheckpointCopied(step=step, url=url, seconds=seconds):
            return f"checkpoint of step {step} is copied to {url} ({seconds:.1f} s)"
        case events.CheckpointCopyFailed(step=step, url=url, problem=problem):
            return f"checkpoint of step {step} is not copied to {url}, and the next one tries again: {problem}"
        case events.RolledBack(version=version, restored=restored, parent=parent, values=values) if parent:
            told = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            return f"took the weights of {parent}, version {restored}, as version {version}; {told}"
        case events.RolledBack(version=version, restored=restored, total_steps=total):
            lost = f"{version - restored} versions are lost, and the run ends at step {total}"
            return f"actor and critic train on from step {restored} as version {version}: {lost}"
        case events.FileSkipped(path=path, problem=problem):
            return f"{path} is not written, and the run goes on: {problem}"
        case events.FileStalled(path=path, problem=problem, seconds=seconds, num_lost=num_lost):
            return f"{path} could not be written for {seconds:.0f} s ({problem}); {num_lost} lines are lost"
        case events.EvalDone(step=step, dataset=dataset, seconds=seconds, metrics=metrics):
            return f"step {step} on {dataset}: {_measured(dataset, metrics)} ({seconds:.1f} s)"
        case events.AlertRaised(alert=alert, step=step, sentence=sentence):
            return f"alert {alert} at step {step}: {sentence}"
        case events.RunEnded(step=step, reason=reason, detail=detail):
            return f"{reason} after step {step}" + (f": {detail}" if detail else "")
        case _:
            return None


def _measured(dataset: str, metrics: Mapping[str, float]) -> str:
    """`mean 0.713 ± 0.021, pass@1 0.713, pass@4 0.902, failed 2 %`."""
    values = {name.removeprefix(f"eval/{dataset}/"): value for name, value in metrics.items()}
    interval = f" ± {values['mean_ci95']:.3f}" if "mean_ci95" in values else ""
    passes = [f"{name} {value:.3f}" for name, value in values.items() if name.startswith("pass@")]
    means = [f"mean {values['mean']:.3f}{interval}"] if "mean" in values else []  # files of another version may lack it
    failed = [f"failed {values['failed_frac']:.1%}"] if values.get("failed_frac") else []
    return ", ".join([*means, *passes, *failed])


def duration(seconds: float) -> str:
    """`0:21`, or `2:03:00` from an hour on."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


class PlainScreen:
    """Screen of plain lines: every note, and progress at most every `every_s` seconds."""

    def __init__(self, stream: TextIO, every_s: float, prefix: str = "") -> None:
        self._stream, self._every_s, self._prefix = stream, every_s, prefix
        self._shown_s = float("-inf")
        self._held_back = ""

    def progress(self, line: str, step: int, time_s: float) -> None:
        self._held_back = line
        if time_s - self._shown_s >= self._every_s:
            self._shown_s = time_s
            self._show_progress()

    def note(self, line: str) -> None:
        self._stream.write(f"{self._prefix}{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Show the last progress line, so that it is never lost."""
        self._show_progress()

    def _show_progress(self) -> None:
        if self._held_back:
            self.note(self._held_back)
            self._held_back = ""


class LiveScreen:
    """Progress bar at the bottom of the terminal, with notes above it."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._console = Console(file=stream, highlight=False)
        self._bar = Progress(
            BarColumn(bar_width=20), text, console=self._console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("starting", total=total_steps)
        self._bar.start()

    def progress(self, line: str, step: int, time_s: float) -> None:
        self._bar.update(self._task, completed=step, description=line)

    def note(self, line: str) -> None:
        self._console.print(line, markup=False)

    def close(self) -> None:
        self._bar.stop()
