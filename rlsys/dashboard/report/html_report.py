"""Report of a run as one HTML file, to send, print or archive, without scripts or external resources.

    Path("report.html").write_text(report_of(Readings(run_dir), changed_keys))

It uses the same answers as the pages of the dashboard. Every list and text in it has a bound, so that the report of any
run, or of one policy of a run, prints on six pages of A4 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.query.configs import value_text
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.query.summary import SUMMARY_STEPS
from rlsys.dashboard.report.markup import Html, cut, h, join_html, table
from rlsys.dashboard.report.plots import plot, short
from rlsys.dashboard.report.report_episodes import best_and_worst
from rlsys.dashboard.responses import EvaluationRow, RunAnswer, RunSummary, Series
from rlsys.monitoring.trackers.console import duration

if TYPE_CHECKING:
    from rlsys.config.changed_keys import ChangedKey

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = Path(__file__).parents[1] / "static" / "report.css"

_POINTS = 400
_ALL = 10_000_000
"""More points than a series has."""
_MOST_ROWS = 6
"""Most rows of a table of scores, workers or groups."""
_MOST_KEYS = 44
_MOST_MEASURES = 6
_NAME, _VALUE, _SENTENCE = 36, 60, 140
"""Most characters of a name, of a value and of a sentence."""

T = TypeVar("T")
ChangedKeys: TypeAlias = "Callable[[Mapping[str, Any]], Sequence[ChangedKey]]"
"""`rlsys.config.changed_keys`, which the command hands in: pages of a run do not know the configuration's models."""

_CHARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("Entropy", ("policy/entropy",)),
    ("Loss", ("loss",)),
    ("KL", ("policy/kl_ref", "sampler/mismatch_kl")),
    ("Ratio of trainer to engine", ("sampler/ratio_p01", "sampler/ratio_p50", "sampler/ratio_p99")),
    ("Length", ("completions/length_mean", "completions/length_p90", "completions/length_max")),
    ("Shares that went wrong", ("completions/truncated_frac", "reward/failed_frac", "group/frac_zero_std")),
    ("Gradient norm", ("optim/grad_norm", "critic/grad_norm")),
    ("Alignment of gradients", ("gac/cosine",)),
    ("Staleness", ("async/staleness_mean", "async/staleness_max")),
    ("Speed", ("perf/tokens_per_s",)),
    (
        "Time of a step",
        ("time/step", "time/rollout", "time/reward", "time/train", "time/wait_batch", "time/wait_permit"),
    ),
)
"""Title -> metrics with the same unit."""


def report_of(readings: Readings, changed_keys: ChangedKeys) -> str:
    """Build the report of the run that `readings` was opened with, and its policies. Raises `NoSuch` for no run."""
    listed = readings.runs()
    runs = sorted(run.id for run in listed.runs if run.id == "." or run.id.startswith("policies/"))
    if "." not in runs:
        raise NoSuch(f"{listed.folder} is no run directory: there are none of the files in it that a run writes")
    parts = [_run(readings, run, changed_keys) for run in runs]
    name = readings.run(".").summary.name
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", f"{name} – rlsys report"),
        h("style", Html(_STYLE.read_text())),
    )
    return "<!doctype html>\n" + h("html", head, h("body", h("main", *parts)), lang="en") + "\n"


def _run(readings: Readings, run: str, changed_keys: ChangedKeys) -> Html:
    answer = readings.run(run)
    parts = (
        *_summary(answer),
        *_learning(readings, run, answer.summary),
        *_alerts(readings, run),
        *_waiting(readings, run),
        *_metrics(readings, run),
        *best_and_worst(readings, run),
        *_config(changed_keys(readings.config_values(run))),
    )
    return join_html(*parts)


def _summary(answer: RunAnswer) -> Iterator[Html]:
    run = answer.summary
    yield h("h1", cut(run.name, 200))
    yield h("p", *_sentence(run), class_=f"status {run.status}")
    facts = {
        "Model": cut(run.model, _VALUE),
        "Algorithm": cut(run.algorithm, _NAME),
        "Began": _moment(run.started_s),
        "Last wrote": _moment(run.updated_s),
        "Time of a step": "" if run.step_s is None else f"{short(run.step_s)} s, median of the last {SUMMARY_STEPS}",
        "Start-up": f"{sum(answer.phases.values()):.1f} s" if answer.phases else "",
        "Engine": cut("; ".join(dict.fromkeys(answer.engines.values())), _SENTENCE),
        "Folder": cut(answer.folder, _SENTENCE),
        "Unreadable lines": str(answer.num_corrupt) if answer.num_corrupt else "",
    }
    yield h("dl", *(h("div", h("dt", name), h("dd", value)) for name, value in facts.items() if value), class_="facts")


def _sentence(run: RunSummary) -> Iterator[str]:
    of_all = f" of {run.total_steps}" if run.total_steps else ""
    yield h("b", run.status)
    yield f" after step {run.step}{of_all}"
    if run.eta_s is not None:
        yield f", about {duration(run.eta_s)} left"
    if run.status == "silent":
        yield ": it wrote nothing for long, and never said that it ended"
    if run.last_error:
        yield f". {'Error' if run.status == 'failed' else 'Last error'}: {cut(run.last_error, 3 * _SENTENCE, 3)}"


def _learning(readings: Readings, run: str, summary: RunSummary) -> Iterator[Html]:
    """Rewards and evaluations, each score with the share of samples that failed."""
    yield h("h2", "Learning")
    reward, least, greatest = (_series(readings, run, [f"reward/{name}"]) for name in ("mean", "min", "max"))
    edges = (*least[:1], *greatest[:1])
    band = (edges[0], edges[1]) if len(edges) == 2 and any(len(set(edge.values)) > 1 for edge in edges) else None
    note = "mean of the episodes trained" + ("; area: least to greatest" if band else "")
    means = [one for one in _series(readings, run, ["eval/*"]) if one.name.endswith("/mean")]
    by_function = _series(readings, run, ["reward/by/*"])
    figures = (
        plot("Reward", reward, band=band, note=note),
        plot("Evaluation", means, note="mean reward of each data set"),
        plot("Reward by function", by_function) if len(by_function) > 1 else Html(),
    )
    yield from _figures(figures)
    evaluations = readings.rollouts.evaluations(run).evaluations
    datasets = {one.dataset: [e for e in evaluations[::-1] if e.dataset == one.dataset] for one in evaluations}
    training = _scores_of_training(readings, run)
    rows = [*([training] if training else []), *(_scores(name, found) for name, found in datasets.items())]
    if rows:
        yield table(("score", "first", "best", "last"), rows[: _MOST_ROWS + 1])
        yield _omission_note(len(rows), _MOST_ROWS + 1, "data sets")
    for name, found in islice(datasets.items(), 2):
        if len(found) > 2:
            yield from _evaluations(name, found)
    failures = readings.failures(run)
    if failures.failures:
        yield h("h3", f"Why {failures.num_failed:,} of {failures.num_episodes:,} episodes of training failed")
        rows = [(f"{row.num_episodes:,}", cut(row.reason, _SENTENCE, 2)) for row in failures.failures[:_MOST_ROWS]]
        yield table(("episodes", "reason"), rows)
        yield _omission_note(len(failures.failures), _MOST_ROWS, "reasons")


def _scores_of_training(readings: Readings, run: str) -> tuple[str, ...] | None:
    """First, best and last mean reward of 20 steps; None if no step had a reward."""
    values, failed = (_by_step(readings, run, f"reward/{name}") for name in ("mean", "failed_frac"))
    steps = sorted(values)
    windows = [steps[i : i + SUMMARY_STEPS] for i in range(max(1, len(steps) - SUMMARY_STEPS + 1))] if steps else []
    means = [(fmean(values[step] for step in window), window) for window in windows]
    if not means:
        return None

    def window_score(mean: float, window: Sequence[int]) -> str:
        shares = [failed[step] for step in window if step in failed]
        return _score(mean, None, fmean(shares) if shares else None, f"to step {window[-1]}")

    shown = (means[0], max(means, key=lambda one: one[0]), means[-1])
    return (f"training, mean of {len(windows[0])} steps", *(window_score(*one) for one in shown))


def _by_step(readings: Readings, run: str, name: str) -> dict[int, float]:
    found = readings.series(run, [name], _ALL).series
    pairs = ((step, value) for one in found for step, value in zip(one.steps, one.values, strict=True))
    return {step: value for step, value in pairs if value is not None}


def _scores(dataset: str, found: Sequence[EvaluationRow]) -> tuple[str, ...]:
    best = max(found, key=lambda one: one.scores.get("mean") or float("-inf"))
    rows = (
        _score(
            one.scores.get("mean"), one.scores.get("mean_ci95"), one.scores.get("failed_frac"), f"at step {one.step}"
        )
        for one in (found[0], best, found[-1])
    )
    return (cut(dataset, _NAME), *rows)


def _score(mean: float | None, ci95: float | None, failed: float | None, when: str) -> str:
    spread = "" if ci95 is None else f" ± {short(ci95, 2)}"
    return f"{short(mean)}{spread}, failed {_percent(failed)}, {when}"


def _evaluations(dataset: str, found: Sequence[EvaluationRow]) -> Iterator[Html]:
    """Table of the evaluations on one data set: the first, the last, and some in between."""
    measures = list(dict.fromkeys(name for one in found for name in one.scores))
    measures.sort(key=lambda name: (name != "mean", name != "failed_frac", not name.startswith(("mean", "pass@"))))
    measures = measures[:_MOST_MEASURES]
    rows = [(str(one.step), *(_metric_text(one.scores.get(name), name) for name in measures)) for one in _evenly(found)]
    few = f", {len(rows)} of {len(found)}" if len(rows) < len(found) else ""
    yield h("h3", f"Evaluations on {cut(dataset, _NAME)}{few}")
    yield table(("step", *(cut(name.replace("_", " ").replace("frac", "share"), _NAME) for name in measures)), rows)


def _metric_text(value: float | None, name: str) -> str:
    return _percent(value) if name.endswith("_frac") else short(value)


def _evenly(rows: Sequence[T]) -> Sequence[T]:
    """At most `_MOST_ROWS` of these rows, as far apart as possible, with the first and the last."""
    if len(rows) <= _MOST_ROWS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS)]


def _alerts(readings: Readings, run: str) -> Iterator[Html]:
    alerts = readings.alerts(run).alerts
    opened, over = ([one for one in alerts if (one.until_step is None) is is_open] for is_open in (True, False))
    yield h("h2", "Alerts")
    if not opened:
        yield h("p", "None is open.", class_="muted")
    for alert in opened[:_MOST_ROWS]:
        name = h("b", cut(alert.alert.replace("_", " "), _NAME))
        yield h("p", name, f", open since step {alert.step}. ", cut(alert.sentence, 3 * _SENTENCE), class_="alert")
    yield _omission_note(len(opened), _MOST_ROWS, "open alerts")
    if over:
        lines = (f"{cut(one.alert.replace('_', ' '), _NAME)} in steps {one.step} to {one.until_step}" for one in over)
        yield h("p", f"Over: {'; '.join(islice(lines, _MOST_ROWS))}.", class_="muted")
        yield _omission_note(len(over), _MOST_ROWS, "alerts that are over")


def _waiting(readings: Readings, run: str) -> Iterator[Html]:
    """The stage or worker that the others waited for, and the fate of workers and groups."""
    cluster, ledger = readings.cluster(run, None, None, 1000), readings.ledger(run)
    yield h("h2", "Who waited")
    if cluster.bottleneck is not None:
        yield h("p", cluster.bottleneck.sentence)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in cluster.bottleneck.shares.items() if share >= 0.005)
        yield h("p", f"Shares of a step's time: {shares}.", class_="muted") if shares else Html()
    dropped = ", ".join(f"{count} {cut(reason, _NAME).replace('_', ' ')}" for reason, count in ledger.dropped.items())
    yield h(
        "p",
        f"Groups: {ledger.num_issued:,} issued, {ledger.num_trained:,} trained, {len(ledger.pending)} pending at the "
        f"end; dropped: {dropped or 'none'}; issued again: {ledger.num_reissued}.",
    )
    if ledger.pending:
        rows = [
            (
                str(row.group_id),
                cut(row.task_id, _NAME),
                row.state,
                row.worker,
                f"{row.age_s:.0f} s",
                _if(row.is_overdue, "overdue"),
            )
            for row in sorted(ledger.pending, key=lambda row: not row.is_overdue)[:_MOST_ROWS]
        ]
        yield table(("pending group", "task", "state", "worker", "age", ""), rows)
        yield _omission_note(len(ledger.pending), _MOST_ROWS, "pending groups")
    if cluster.replicas:
        rows = [
            (row.worker, *map(_whole, (row.version, row.behind)), _if(row.is_stale, "stale"), str(row.restarts))
            for row in sorted(cluster.replicas, key=lambda row: (not row.is_stale, -row.restarts))[:_MOST_ROWS]
        ]
        yield table(("replica", "version", "versions behind", "", "restarts"), rows)
        yield _omission_note(len(cluster.replicas), _MOST_ROWS, "replicas")
    if cluster.restarts:
        rows = [
            (
                _moment(row.failed_s),
                row.worker,
                cut(row.phase, 20),
                _back(row.failed_s, row.back_s),
                cut(row.detail, _SENTENCE, 2),
            )
            for row in cluster.restarts[:_MOST_ROWS]
        ]
        yield h("h3", "Failures of workers")
        yield table(("when", "worker", "while", "back after", "detail"), rows)
        yield _omission_note(len(cluster.restarts), _MOST_ROWS, "failures")


def _back(failed_s: float, back_s: float | None) -> str:
    return "never" if back_s is None else f"{back_s - failed_s:.1f} s"


def _metrics(readings: Readings, run: str) -> Iterator[Html]:
    yield h("h2", "Metrics")
    shown = ((title, _series(readings, run, names)) for title, names in _CHARTS)
    figures = [plot(title, found, note=found[0].help if len(found) == 1 else "") for title, found in shown]
    yield from _figures(figures) if any(figures) else [h("p", "No step was done.", class_="muted")]


def _figures(figures: Iterable[Html]) -> Iterator[Html]:
    shown = [figure for figure in figures if figure]
    if shown:
        yield h("div", *shown, class_="charts")


def _series(readings: Readings, run: str, names: Sequence[str]) -> list[Series]:
    return list(readings.series(run, names, _POINTS).series)


def _config(changed: Sequence[ChangedKey]) -> Iterator[Html]:
    """Keys of the configuration whose value is not the default."""
    if changed:
        yield h("h2", "Configuration, where it differs from the defaults")
        yield h(
            "dl",
            *(h("div", h("dt", cut(one.key, _NAME)), _changed_value(one)) for one in changed[:_MOST_KEYS]),
            class_="keys",
        )
        yield _omission_note(len(changed), _MOST_KEYS, "keys")


def _changed_value(one: ChangedKey) -> Html:
    default = h("span", f" (default: {cut(value_text(one.default), _NAME)})", class_="muted")
    return h("dd", cut(value_text(one.value), _VALUE), None if one.default in (None, "", [], {}) else default)


def _omission_note(num: int, shown: int, what: str) -> Html:
    return h("p", f"{num - shown:,} more {what} are not shown.", class_="muted") if num > shown else Html()


def _if(is_so: bool, word: str) -> str:
    return word if is_so else ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"


def _moment(time_s: float | None) -> str:
    return "" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)
