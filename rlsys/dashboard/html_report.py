"""Report of a run as one HTML file, to send, print or archive, without scripts or external resources.

    Path("report.html").write_text(report_of(Readings(run_dir)))

It uses the same answers as the pages of the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.markup import Html, h, joined, table
from rlsys.dashboard.plots import plot, short
from rlsys.dashboard.queries import Readings
from rlsys.dashboard.report_episodes import cut, episodes
from rlsys.dashboard.responses import RunAnswer, RunSummary, Series
from rlsys.monitoring.trackers.console import duration

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = Path(__file__).parent / "static" / "report.css"

_POINTS = 400
_MOST_ROWS = 50
"""Most rows of a table."""

_CHARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("Reward by function", ("reward/by/*",)),
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


def report_of(readings: Readings) -> str:
    """Build the report of the run that `readings` was opened with, and its policies. Raises `NoSuch` for no run."""
    listed = readings.runs()
    runs = sorted(run.id for run in listed.runs if run.id == "." or run.id.startswith("policies/"))
    if "." not in runs:
        raise NoSuch(f"{listed.folder} is no run directory: there are none of the files in it that a run writes")
    parts = [_run(readings, run) for run in runs]
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


def _run(readings: Readings, run: str) -> Html:
    answer = readings.run(run)
    parts = (
        *_summary(answer),
        *_alerts(readings, run),
        *_charts(readings, run),
        *_evaluations(readings, run),
        *_cluster(readings, run),
        *_ledger(readings, run),
        *episodes(readings, run),
        *_config(answer),
    )
    return joined(*parts)


def _summary(answer: RunAnswer) -> Iterator[Html]:
    run = answer.summary
    yield h("h1", run.name)
    yield h("p", *_sentence(run), class_=f"status {run.status}")
    facts = {
        "Folder": answer.folder,
        "Model": run.model,
        "Algorithm": run.algorithm,
        "Began": _moment(run.started_s),
        "Last wrote": _moment(run.updated_s),
        "Time of a step": "" if run.step_s is None else f"{short(run.step_s)} s, median of the last 20",
        "Mean reward of the last 20 steps": "" if run.reward is None else short(run.reward),
        "Start-up": ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in answer.phases.items()),
        "Engines": "; ".join(f"{worker}: {engine}" for worker, engine in answer.engines.items()),
        "Lines that could not be read": str(answer.num_corrupt) if answer.num_corrupt else "",
    }
    shown = ((h("dt", name), h("dd", value)) for name, value in facts.items() if value)
    yield h("dl", *(part for pair in shown for part in pair))


def _sentence(run: RunSummary) -> Iterator[str]:
    of_all = f" of {run.total_steps}" if run.total_steps else ""
    yield h("b", run.status)
    yield f" after step {run.step}{of_all}"
    if run.eta_s is not None:
        yield f", about {duration(run.eta_s)} left"
    if run.status == "silent":
        yield ": it wrote nothing for long, and never said that it ended"
    if run.last_error:
        yield f". {'Error' if run.status == 'failed' else 'Last error'}: {run.last_error}"


def _alerts(readings: Readings, run: str) -> Iterator[Html]:
    alerts = readings.alerts(run).alerts
    yield h("h2", "Alerts")
    if not alerts:
        yield h("p", "None was raised.", class_="muted")
    for alert in alerts[:_MOST_ROWS]:
        when = f"since step {alert.step}" if alert.until_step is None else f"steps {alert.step} to {alert.until_step}"
        state = "open" if alert.until_step is None else "over"
        name = h("b", alert.alert.replace("_", " "))
        yield h("p", name, f", {when} ({state}). ", alert.sentence, class_=f"alert {state}")


def _charts(readings: Readings, run: str) -> Iterator[Html]:
    yield h("h2", "Charts")
    figures = [figure for figure in _figures(readings, run) if figure]
    yield h("div", *figures, class_="charts") if figures else h("p", "No step was done.", class_="muted")


def _figures(readings: Readings, run: str) -> Iterator[Html]:
    reward, least, greatest = (_series(readings, run, [f"reward/{name}"]) for name in ("mean", "min", "max"))
    band = (least[0], greatest[0]) if least and greatest else None
    yield plot(
        "Reward", reward, band=band, note="mean of the episodes trained" + ("; area: least to greatest" if band else "")
    )
    means = [one for one in _series(readings, run, ["eval/*"]) if one.name.endswith("/mean")]
    yield plot("Evaluation", means, note="mean reward of each data set")
    for title, names in _CHARTS:
        found = _series(readings, run, names)
        yield plot(title, found, note=found[0].help if len(found) == 1 else "")


def _series(readings: Readings, run: str, names: Sequence[str]) -> list[Series]:
    return list(readings.series(run, names, _POINTS).series)


def _evaluations(readings: Readings, run: str) -> Iterator[Html]:
    columns: dict[str, list[Series]] = {}
    for one in _series(readings, run, ["eval/*"]):
        columns.setdefault(one.name.removeprefix("eval/").rpartition("/")[0], []).append(one)
    if columns:
        yield h("h2", "Evaluations")
    for dataset, measures in columns.items():
        measures.sort(key=lambda one: (not _is_score(one), not one.name.endswith("/failed_frac")))
        values = [dict(zip(one.steps, one.values, strict=True)) for one in measures]
        steps = sorted({step for one in measures for step in one.steps})[-_MOST_ROWS:]
        rows = [(str(step), *(short(value.get(step)) for value in values)) for step in steps]
        yield h("h3", dataset)
        yield table(("step", *(_measure(one) for one in measures)), rows)


def _is_score(one: Series) -> bool:
    return one.name.rpartition("/")[2].startswith(("mean", "pass@"))


def _measure(one: Series) -> str:
    name = one.name.rpartition("/")[2].replace("_", " ")
    return f"{name} ({one.unit})" if one.unit and one.unit not in name else name


def _cluster(readings: Readings, run: str) -> Iterator[Html]:
    cluster = readings.cluster(run, None, None, 1000)
    yield h("h2", "Workers")
    if cluster.bottleneck is not None:
        yield h("p", h("b", "Bottleneck: "), cluster.bottleneck.sentence)
    if not (cluster.replicas or cluster.restarts or cluster.bottleneck):
        yield h("p", "Nothing was told of them.", class_="muted")
    if cluster.replicas:
        rows = [
            (row.worker, *map(_whole, (row.version, row.behind)), "stale" if row.is_stale else "", str(row.restarts))
            for row in cluster.replicas
        ]
        yield table(("replica", "version", "versions behind", "", "restarts"), rows)
    if cluster.restarts:
        yield h("h3", "Failures of workers")
        rows = [
            (_moment(row.failed_s), row.worker, row.phase, _back(row.failed_s, row.back_s), cut(row.detail, 300))
            for row in cluster.restarts[:_MOST_ROWS]
        ]
        yield table(("when", "worker", "while", "back after", "detail"), rows)


def _back(failed_s: float, back_s: float | None) -> str:
    return "never" if back_s is None else f"{back_s - failed_s:.1f} s"


def _ledger(readings: Readings, run: str) -> Iterator[Html]:
    ledger = readings.ledger(run)
    yield h("h2", "Groups")
    dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in ledger.dropped.items()) or "none"
    yield h(
        "p",
        f"{ledger.num_issued} issued, {ledger.num_trained} trained, {len(ledger.pending)} pending at the end; ",
        f"dropped: {dropped}; issued again: {ledger.num_reissued}.",
    )
    if ledger.pending:
        rows = [
            (
                str(row.group_id),
                row.task_id,
                row.state,
                row.worker,
                f"{row.age_s:.0f} s",
                "overdue" if row.is_overdue else "",
            )
            for row in ledger.pending[:_MOST_ROWS]
        ]
        yield table(("group", "task", "state", "worker", "age", ""), rows)


def _config(answer: RunAnswer) -> Iterator[Html]:
    if answer.config:
        yield h("h2", "Configuration")
        yield h("pre", answer.config)


def _moment(time_s: float | None) -> str:
    return "" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)
