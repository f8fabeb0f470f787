"""Line charts as inline SVG: both axes have ticks and a unit; lines differ in dashes and colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from rlsys.dashboard.report.markup import Html, cut, h, join_html
from rlsys.dashboard.responses import Series

_WIDTH, _HEIGHT = 440, 160
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 22, 34
_NUM_KINDS = 6
"""Number of distinct line styles in the style sheet, and most lines of a chart."""
_NAME = 36
"""Most characters of a name."""
_MARKED = 40
"""Most points of a line that is drawn with markers."""


@dataclass(frozen=True)
class _Scale:
    """Linear scale from numbers to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, num: int) -> list[float]:
        """About `num` round numbers inside the range."""
        step = _round_step((self.high - self.low) / num)
        first = -floor(-self.low / step + 1e-9)
        count = floor((self.high - first * step) / step + 1e-9)
        return [(first + i) * step for i in range(count + 1)]


def plot(title: str, series: Sequence[Series], *, band: tuple[Series, Series] | None = None, note: str = "") -> Html:
    """Figure: title, chart, and a legend with name, first, last, least and greatest value of each line.

    All series have the same unit. `band`: least and greatest values, drawn as an area in the background.
    """
    with_points = [one for one in series if any(True for _ in _points(one))]
    if not with_points:
        return Html()
    shown = with_points[:_NUM_KINDS]
    values = [value for one in [*shown, *(band or ())] for _, value in _points(one)]
    steps = [step for one in shown for step, _ in _points(one)]
    across = _Scale(*_apart(min(steps), max(steps)), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(*_axis_bounds(min(values), max(values)), _HEIGHT - _BOTTOM, _TOP)
    drawn = h(
        "svg",
        *_axes(across, up, shown[0].unit),
        *([_area(band, across, up)] if band else []),
        *(mark for i, one in enumerate(shown) for mark in _line(one, i, across, up)),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title}: " + "; ".join(_series_caption(one) for one in shown),
    )
    more = f"{len(with_points) - len(shown)} more lines are not shown" if len(with_points) > len(shown) else None
    lines = (h("li", _swatch(i), h("span", _series_caption(one))) for i, one in enumerate(shown))
    legend = h("ul", *lines, h("li", more) if more else None)
    caption = h("figcaption", h("h3", title), h("p", note, class_="muted") if note else None)
    return h("figure", caption, drawn, legend)


def short(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` digits: `0.713`, `12.3k`, `4.1e-05`; a dash for None."""
    if value is None or not isfinite(value):
        return "–"
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            scale = 1e3 if letter == "k" else factor
            return f"{value / scale:.{digits}g}{letter}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _labels(ticks: Sequence[float]) -> list[str]:
    """Labels with as many digits as needed to be distinct."""
    spelled = ([short(value, digits) for value in ticks] for digits in range(3, 16))
    return next((labels for labels in spelled if len(set(labels)) == len(ticks)), [f"{value:g}" for value in ticks])


def _points(one: Series) -> Iterator[tuple[int, float]]:
    return (
        (step, value)
        for step, value in zip(one.steps, one.values, strict=True)
        if value is not None and isfinite(value)
    )


def _runs(one: Series) -> list[list[tuple[int, float]]]:
    """Points of a series, split where one is missing."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in zip(one.steps, one.values, strict=True):
        if value is not None and isfinite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _axes(across: _Scale, up: _Scale, unit: str) -> Iterator[Html]:
    ticks = up.ticks(4)
    for value, label in zip(ticks, _labels(ticks), strict=True):
        y = up.at(value)
        yield h("path", d=f"M{_LEFT} {y}H{_WIDTH - _RIGHT}", class_="grid")
        yield h("text", label, x=_LEFT - 6, y=y + 4, class_="y")
    bottom = _HEIGHT - _BOTTOM
    for value in across.ticks(5):
        if value == int(value):
            yield h("path", d=f"M{across.at(value)} {bottom}v4", class_="axis")
            yield h("text", f"{value:g}", x=across.at(value), y=bottom + 17, class_="x")
    yield h("path", d=f"M{_LEFT} {bottom}H{_WIDTH - _RIGHT}", class_="axis")
    yield h("text", unit or "no unit", x=2, y=12, class_="unit")
    yield h("text", "step", x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 6, class_="x unit")


def _line(one: Series, i: int, across: _Scale, up: _Scale) -> Iterator[Html]:
    runs = _runs(one)
    look = f"line k{i}"
    yield h("path", d="".join(_path(run, across, up) for run in runs), class_=look)
    if sum(map(len, runs)) <= _MARKED:
        for run in runs:
            for step, value in run:
                yield h("circle", cx=across.at(step), cy=up.at(value), r=2, class_=f"dot k{i}")


def _path(run: list[tuple[int, float]], across: _Scale, up: _Scale) -> str:
    return "M" + "L".join(f"{across.at(step)} {up.at(value)}" for step, value in run)


def _area(band: tuple[Series, Series], across: _Scale, up: _Scale) -> Html:
    least, greatest = (list(_points(one)) for one in band)
    outline = [*least, *reversed(greatest)]
    return h("path", d=_path(outline, across, up) + "Z", class_="band") if outline else Html()


def _series_caption(one: Series) -> str:
    values = [value for _, value in _points(one)]
    within = f" ({short(min(values))} to {short(max(values))})" if len(values) > 2 else ""
    return f"{cut(one.name, _NAME)} {short(values[0])} → {short(values[-1])}{within}"


def _swatch(i: int) -> Html:
    line = h("path", d="M0 5H24", class_=f"line k{i}")
    return h("svg", join_html(line), viewBox="0 0 24 10", class_="swatch", aria_hidden="true")


def _apart(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low - 1, high + 1)


def _axis_bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds of an axis, starting at 0 unless that wastes more than half of it."""
    if 0 <= low <= high / 2:
        low = 0.0
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    step = _round_step((high - low) / 4)
    return floor(low / step + 1e-9) * step, -floor(-high / step + 1e-9) * step


def _round_step(rough: float) -> float:
    power = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
