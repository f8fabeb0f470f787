"""Console output of a run: a live line on a terminal, plain lines at intervals elsewhere. All of it goes to stderr.

step  42/150  0:21 left  reward 0.713  staleness 0  1,934 tokens/s

A progress line fits the width of the terminal, or 80 columns: figures at its end are left out, the remaining time
never.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TextIO

from rlsys.monitoring import events
from rlsys.util.printing import printable

COLUMNS = 80
"""Width of a line where the stream is no terminal."""
_WIDE = 110
"""Columns from which on there is room for a longer bar."""
_STEPS_FOR_ETA = 20
_STEPS_FOR_REWARD = 10


class ConsoleSink:
    """Sink that prints events as lines. It replaces control characters, because some lines contain text of a model."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        policy: str = "",
        run_dir: str | os.PathLike[str] = "",
    ) -> None:
        """`every_s`: seconds between two plain progress lines, where `stream` (stderr) is not a terminal.

        With `total_steps` 0 there are notes but no progress lines. With several policies, each line begins with the
        name of `policy`, and lines are always plain, because all policies share one terminal. The end of the run in
        `run_dir` is followed by the commands that are likely next.
        """
        self._total, self._run_dir = total_steps, os.fspath(run_dir)
        shown: TextIO = stream or sys.stderr
        prefix = f"{printable(policy)}: " if policy else ""
        is_live = shown.isatty() and total_steps > 0 and not policy
        self._screen = LiveScreen(shown, total_steps) if is_live else PlainScreen(shown, every_s, prefix)
        self._step_times_s: deque[float] = deque(maxlen=_STEPS_FOR_ETA + 1)
        self._rewards: deque[float] = deque(maxlen=_STEPS_FOR_REWARD)
        self._was_evaluated = False
        self._began_s = float("inf")
        self._engines: dict[tuple[str, str], list[str]] = {}
        """Workers that are not yet shown, by engine and reason."""

    def handle(self, event: events.Event, time_s: float) -> None:
        if isinstance(event, events.EngineChosen):
            self._engines.setdefault((event.engine, event.reason), []).append(event.worker)
            return
        self._show_engines()
        match event:
            case events.StepDone():
                self._step_times_s.append(time_s)
                self._rewards += [event.metrics["reward/mean"]] if "reward/mean" in event.metrics else []
                self._screen.progress([printable(part) for part in self._progress(event)], event.step, time_s)
                return
            case events.RolledBack():
                self._total = event.total_steps
            case events.EvalDone():
                self._was_evaluated = True
            case events.RunEnded():
                self._screen.finish()
            case _:
                pass
        line = self._phase(event, time_s) if isinstance(event, events.PhaseDone) else note_of(event)
        if line is not None:
            self._screen.note(printable(line))
        if isinstance(event, events.RunEnded) and self._run_dir:
            for line in self._closing(event):
                self._screen.note(printable(line))

    def close(self) -> None:
        self._show_engines()
        self._screen.finish()

    def _show_engines(self) -> None:
        for (engine, reason), workers in self._engines.items():
            verb = "generates" if len(workers) == 1 else "generate"
            self._screen.note(printable(f"{_worker_ranges(workers)} {verb} with {engine}: {reason}"))
        self._engines = {}

    def _phase(self, done: events.PhaseDone, time_s: float) -> str:
        """A phase of start-up, with the time since the command, e.g. `   7.3 s  start workers (5.1 s)`."""
        self._began_s = min(self._began_s, time_s - done.seconds)
        elapsed_s, name = time_s - self._began_s, done.phase.replace("_", " ")
        own = "" if elapsed_s - done.seconds < 0.05 else f" ({done.seconds:.1f} s)"
        return f"{elapsed_s:6.1f} s  {name}{own}"

    def _progress(self, done: events.StepDone) -> list[str]:
        """Parts of a progress line, the most important first."""
        parts = [f"step {done.step:>{len(str(self._total))}}/{self._total}"]
        times_s, step_s = self._step_times_s, done.metrics.get("time/step")
        if len(times_s) > 1:
            step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        if step_s is not None:
            parts.append(f"{duration((self._total - done.step) * step_s)} left")
        return [*parts, *figures(done.metrics)]

    def _closing(self, ended: events.RunEnded) -> Iterator[str]:
        """Lines after the end of a run: what it came to, and what to type next."""
        run = shlex.quote(_from_here(self._run_dir))
        if self._rewards:
            yield f"reward {fmean(self._rewards):.3f}, mean of the last {len(self._rewards)} steps"
        yield "next:"
        if ended.reason != "finished":
            yield f"  rlsys train {run}/config.resolved.yaml run.resume=auto"
        yield f"  rlsys dashboard {run}"
        if ended.reason == "finished":
            yield f"  rlsys report {run} -o report.html"
        if ended.reason == "finished" and self._total:  # a run of one policy
            yield f"  rlsys eval {run}" + ("" if self._was_evaluated else " --data FILE")
            yield f"  rlsys export {run} --to FOLDER"


def _worker_ranges(workers: Sequence[str]) -> str:
    """Name workers, those of a kind together: `rollout-0 to rollout-7, eval-0`."""
    kinds: dict[str, list[str]] = {}
    for worker in workers:
        kinds.setdefault(worker.rpartition("-")[0], []).append(worker)
    return ", ".join(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in kinds.values())


def _from_here(path: str) -> str:
    """Return a path as it is typed in the current folder: relative, if it is below."""
    here = os.path.relpath(path)
    return path if here.startswith("..") else here


ON_ANSWERS: Mapping[str, bool] = {
    "policy/nll": False,
    "distill/kl": False,
    "kto/margin": True,
    "dpo/margin": True,
}
"""Metric of a loss on answers as such; True if it reads rewards."""


def figures(metrics: Mapping[str, float]) -> list[str]:
    """Figures for a progress line, as far as their metrics exist, e.g. `reward 0.713`.

    Of a loss on answers as such, its value is the first; a reward that no loss reads is not shown.
    """
    own = next((name for name in ON_ANSWERS if name in metrics), None)
    shown = [
        text.format(metrics[name])
        for name, text in (
            *([("loss", "loss {:.3f}")] if own else []),
            *([("reward/mean", "reward {:.3f}")] if own is None or ON_ANSWERS[own] else []),
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
    return [*shown, *waits]


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
        case events.CautionRaised(sentence=sentence):
            return f"caution: {sentence}"
        case events.DataChanged(detail=detail):
            return f"data: {detail}"
        case events.GroupDropped(group_id=group_id, task_id=task_id, reason=reason, detail=detail):
            return f"dropped group {group_id} (task {task_id}): {reason}" + (f": {detail}" if detail else "")
        case events.GroupReissued(group_id=group_id, task_id=task_id, reason=reason):
            return f"group {group_id} (task {task_id}) is issued again: {reason}"
        case events.ZeroAdvantageWarning(num_groups=count, limit=limit, detail=detail):
            what = f"{count} groups one after the other had nothing to learn in them, and {limit} end the run"
            return f"{what}; look at rewards and tasks. The last: {detail}"
        case events.WorkerFailed(worker=worker, phase=phase, detail=detail):
            return f"{worker} failed while {phase}: {detail}"
        case events.WorkerRestarted(worker=worker, seconds=seconds):
            return f"{worker} is back after {seconds:.1f} s"
        case events.WorkerJoined(worker=worker, seconds=seconds):
            return f"{worker} has joined after {seconds:.1f} s"
        case events.WorkerLeft(worker=worker, seconds=seconds):
            return f"{worker} has left after {seconds:.1f} s"
        case events.CheckpointSaved(step=step, path=path):
            return f"checkpoint of step {step}: {path}"
        case events.CheckpointPassedOver(problem=problem):
            return f"a newer checkpoint is passed over: {problem}"
        case events.RolledBack(version=version, restored=restored, total_steps=total):
            lost = f"{version - restored} versions are lost, and the run ends at step {total}"
            return f"actor and critic train on from step {restored} as version {version}: {lost}"
        case events.FileSkipped(path=path, problem=problem):
            return f"{path} is not written, and the run goes on: {problem}"
        case events.FileStalled(path=path, problem=problem, seconds=seconds, num_lost=num_lost):
            return f"{path} could not be written for {seconds:.0f} s ({problem}); {num_lost} lines are lost"
        case events.EndpointFailed(endpoint=endpoint, detail=detail):
            return f"{endpoint} does not answer, and groups wait for it: {detail}"
        case events.EndpointRecovered(endpoint=endpoint, seconds=seconds, num_waited=num_waited):
            return f"{endpoint} answers again after {seconds:.0f} s; {num_waited} groups waited for it"
        case events.FileReplaced(path=path):
            return f"{path} was moved or removed, and another begins"
        case events.EventLost(lost=lost, problem=problem):
            return f"an event {lost} is lost: {problem}"
        case events.EvalDone(step=step, dataset=dataset, seconds=seconds, metrics=metrics):
            return f"step {step} on {dataset}: {_eval_text(dataset, metrics)} ({seconds:.1f} s)"
        case events.AlertRaised(alert=alert, step=step, sentence=sentence):
            return f"alert {alert} at step {step}: {sentence}"
        case events.RunEnded(step=step, reason=reason, detail=detail):
            return f"{reason} after step {step}" + (f": {detail}" if detail else "")
        case _:
            return None


def _eval_text(dataset: str, metrics: Mapping[str, float]) -> str:
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


def fit_line(parts: Sequence[str], columns: int) -> str:
    """Join the parts of a line that fit so many columns; the first two are always there."""
    line = "  ".join(parts[:2])
    for part in parts[2:]:
        if len(line) + 2 + len(part) > columns:
            break
        line += f"  {part}"
    return line


class PlainScreen:
    """Screen of plain lines: every note, and progress at most every `every_s` seconds."""

    def __init__(self, stream: TextIO, every_s: float, prefix: str = "") -> None:
        self._stream, self._every_s, self._prefix = stream, every_s, prefix
        self._shown_s = float("-inf")
        self._held_back: Sequence[str] = ()

    def progress(self, parts: Sequence[str], step: int, time_s: float) -> None:
        self._held_back = parts
        if time_s - self._shown_s >= self._every_s:
            self._shown_s = time_s
            self.finish()

    def note(self, line: str) -> None:
        self._stream.write(f"{self._prefix}{line}\n")
        self._stream.flush()

    def finish(self) -> None:
        """Show the last progress line, so that it is never lost, and stands before the end."""
        if self._held_back:
            self.note(fit_line(self._held_back, COLUMNS - len(self._prefix)))
            self._held_back = ()


class LiveScreen:
    """Progress bar at the bottom of the terminal, with notes above it. Until the first step it shows the time since its
    start."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task
        from rich.table import Column
        from rich.text import Text

        class Line(ProgressColumn):
            """The progress line, or the time of the start-up."""

            def render(self, task: Task) -> Text:
                return Text(task.description or f"starting  {duration(task.elapsed or 0.0)}", no_wrap=True)

        self._console = Console(file=stream, highlight=False)
        self._bar_width = 10 if self._console.width < _WIDE else 20
        bar, line = BarColumn(bar_width=self._bar_width), Line(table_column=Column(no_wrap=True))
        self._bar = Progress(
            bar, line, console=self._console, redirect_stdout=False, redirect_stderr=False, refresh_per_second=2
        )
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def progress(self, parts: Sequence[str], step: int, time_s: float) -> None:
        self._bar.start()  # a run that has ended may go on
        line = fit_line(parts, self._console.width - self._bar_width - 2)
        self._bar.update(self._task, completed=step, description=line)

    def note(self, line: str) -> None:
        self._console.print(line, markup=False)

    def finish(self) -> None:
        """Leave the last progress where it is; what follows comes below it."""
        self._bar.stop()
