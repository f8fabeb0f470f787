"""Progress and charts of a run in a notebook's cell, redrawn after each step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

from rlsys.dashboard.report.plots import plot, short
from rlsys.dashboard.responses import Series
from rlsys.monitoring.events import Event, RunEnded, RunStarted, StepDone

SHOWN = ("reward/mean", "loss", "policy/entropy", "completions/length_mean")
"""Metrics with a chart, if the run reports them."""
STYLE = """<style>.rlsys figure { display: inline-block; width: 23em; margin: 0 1em 0 0; font: 12px sans-serif }
.rlsys svg:not(.swatch) { width: 100% } .rlsys .swatch { width: 1.5em } .rlsys ul { list-style: none; padding: 0 }
.rlsys .grid { stroke: #8884 } .rlsys .axis { stroke: #888 } .rlsys text { fill: currentColor; font-size: 11px }
.rlsys .y { text-anchor: end } .rlsys .x { text-anchor: middle }
.rlsys .line { fill: none; stroke: #2a6fdb; stroke-width: 1.75 } .rlsys .dot { fill: #2a6fdb }</style>"""


def is_notebook() -> bool:
    """True in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class ChartSink:
    """Sink that shows a progress bar and charts in the output of the cell that started the run."""

    def __init__(self) -> None:
        ipython = import_module("IPython.display")  # the kernel of a notebook has it
        self._html, self._num_steps = ipython.HTML, 0
        self._rows: list[StepDone] = []
        self._end = ""
        self._display: Any = ipython.display(ipython.HTML(self._chart_html()), display_id=True)

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, RunStarted):
            self._num_steps = event.total_steps
        elif isinstance(event, StepDone):
            self._rows.append(event)
        elif isinstance(event, RunEnded):
            self._end = f"{event.reason} {event.detail}".strip()
        else:
            return
        self._display.update(self._html(self._chart_html()))

    def close(self) -> None: ...

    def _chart_html(self) -> str:
        step = self._rows[-1].step if self._rows else 0
        reward = f", reward {short(self._rows[-1].metrics['reward/mean'])}" if self._rows else ""
        state = self._end or ("training" if self._rows else "starting")
        bar = f'<progress max="{self._num_steps or 1}" value="{step}"></progress>'
        place = f"step {step} of {self._num_steps}{reward}: " if self._num_steps else ""
        text = escape(f"{place}{state}")
        return f'<div class="rlsys">{STYLE}{bar} {text}<br>{"".join(map(str, self._charts()))}</div>'

    def _charts(self) -> Sequence[object]:
        steps = [row.step for row in self._rows]
        return [
            plot(name, [Series(name, "", "", steps, [row.metrics.get(name) for row in self._rows], len(steps))])
            for name in SHOWN
            if any(name in row.metrics for row in self._rows)
        ]
