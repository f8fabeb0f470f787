"""Trackers: the data they receive, from a separate thread, and isolation of training from their failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch.train_run import check_trackers, facts_of
from rlsys.monitoring.events import (
    AlertRaised,
    EvalDone,
    Event,
    Events,
    GroupDropped,
    RolloutsWritten,
    RunEnded,
    RunStarted,
    StepDone,
)
from rlsys.monitoring.tracker import EndReason, RunFacts, StepTracker, TrackedEpisode, TrackerPlugin
from rlsys.monitoring.trackers.mlflow import MLflow, experiment_of
from rlsys.monitoring.trackers.tensorboard import TensorBoard
from rlsys.monitoring.trackers.tracker_thread import LONGEST, InThread, sample_rows
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.replay.rollout_parquet import write_records
from rlsys.types import Episode, GroupKey, Task, Trajectory
from tests.rollouts import rollouts, said

MINIMAL = ("run.steps=8", "model.path=m", "data.path=d")
ALERT = AlertRaised("entropy_collapse", 2, 0.01, 0.1, "Entropy fell to 0.01 nats: raise the temperature.")


@dataclass(frozen=True, kw_only=True)
class Heard(StepTracker):
    """Notes what it is told; raises at `fails_at`, and waits at `hangs_at` until it may go on."""

    told: list[object] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    fails_at: int | None = None
    error: BaseException = field(default_factory=lambda: ConnectionError("nobody is there"))
    hangs_at: int | None = None
    may_go_on: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    is_closed: threading.Event = field(default_factory=threading.Event)

    def start(self, run: RunFacts) -> Heard:
        self.told.append(("start", run.title, run.first_step))
        return self

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        if step == self.fails_at:
            raise self.error
        if step == self.hangs_at:
            self.hangs.set()
            self.may_go_on.wait()
        self.told.append((step, dict(values)))

    def rollouts(self, step: int, rows: Sequence[TrackedEpisode]) -> None:
        self.told.append((step, [row.reward for row in rows]))

    def alert(self, alert: AlertRaised) -> None:
        self.told.append(alert)

    def close(self, reason: EndReason) -> None:
        self.told.append(("close", reason))
        self.is_closed.set()


def run_of(folder: Path, policy: str = "") -> RunFacts:
    return RunFacts(folder, "sums", policy, {"run": {"name": "sums"}, "train": {"lr": 1e-5}})


def tell(sink: InThread, *events: Event) -> None:
    bus = Events([sink])
    for event in events:
        bus.emit(event)
    bus.close()


def test_a_tracker_gets_events_in_order_on_its_own_thread(tmp_path: Path):
    plugin = Heard(rollouts_every=10, max_rollouts=2)
    path = rollouts(tmp_path / "step_10.parquet", [0.0, 1.0])
    tell(
        InThread(plugin, run_of(tmp_path, "solver")),
        RunStarted("runs/sums", 4, 8),
        StepDone(10, {"reward/mean": 0.5}),
        EvalDone(8, "hard", "ab", 1.0, {"eval/hard/mean": 0.25}),
        RolloutsWritten(10, str(path)),
        RolloutsWritten(11, str(tmp_path / "not looked at")),
        GroupDropped(1, "t", "failed"),
        ALERT,
        RunEnded(10, "finished"),
    )
    assert plugin.told == [
        ("start", "sums/solver", 4),
        (10, {"reward/mean": 0.5}),
        (8, {"eval/hard/mean": 0.25}),
        (10, [0.0, 1.0]),
        ALERT,
        ("close", "finished"),
    ]
    assert plugin.threads == {"tracker-Heard"}


@pytest.mark.parametrize("error", [ConnectionError("nobody is there"), KeyboardInterrupt(), SystemExit(2)])
def test_a_tracker_that_raises_is_named_once_and_goes_on(error, tmp_path: Path, capsys):
    bad, good = Heard(fails_at=1, error=error), Heard()
    bus = Events([InThread(bad, run_of(tmp_path)), InThread(good, run_of(tmp_path))])
    for event in (RunStarted("r", 0, 3), *(StepDone(step, {}) for step in (1, 1, 2, 3)), RunEnded(3, "finished")):
        bus.emit(event)
    bus.close()
    assert bad.told == [("start", "sums", 0), (2, {}), (3, {}), ("close", "finished")]
    assert good.told == [("start", "sums", 0), (1, {}), (1, {}), (2, {}), (3, {}), ("close", "finished")]
    told = f"rlsys: the tracker Heard failed at step_done, and goes on: {error!r}\n"
    assert capsys.readouterr().err == told


def test_one_that_cannot_even_start_is_told_the_same_way(tmp_path: Path, capsys):
    tell(InThread(TrackerPlugin(), run_of(tmp_path)), RunStarted("r", 0, 3), StepDone(1, {}), RunEnded(1, "failed"))
    told = "rlsys: the tracker TrackerPlugin is off for the rest of the run: NotImplementedError("
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"),
        (b'{"step":10,', "is no rollout file, or damaged"),
        (b"{}\n", "is no rollout file, or damaged"),
        (b"[]\n", "is no rollout file, or damaged"),
    ],
)
def test_an_unreadable_rollout_file_costs_only_its_table(data: bytes | None, said: str, tmp_path: Path, capsys):
    plugin, good = Heard(rollouts_every=1), rollouts(tmp_path / "step_12.parquet", [0.0, 1.0])
    bad = tmp_path / "step_10.parquet"
    if data is not None:
        bad.write_bytes(data)
    tell(
        InThread(plugin, run_of(tmp_path)),
        RunStarted("r", 0, 12),
        *(RolloutsWritten(step, str(path)) for step, path in ((10, bad), (11, bad), (12, good))),
        RunEnded(12, "finished"),
    )
    assert plugin.told == [("start", "sums", 0), (12, [0.0, 1.0]), ("close", "finished")]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlsys: the tracker Heard shows no rollouts of step 10, nor of others ")
    assert said in line


def test_a_kept_id_is_stored_atomically_and_reused(tmp_path: Path):
    path = tmp_path / "tracking" / "wandb.json"
    path.parent.mkdir()
    (path.parent / "wandb.tmp").write_text('{"id": "a')  # of a process that was killed
    run = RunFacts(tmp_path, "sums", "", {})
    assert [run.kept_id("wandb", lambda: "a1"), run.kept_id("wandb", lambda: "b2")] == ["a1", "a1"]
    assert [file.name for file in path.parent.iterdir()] == ["wandb.json"]


@pytest.mark.parametrize("uri", ["https://me:secret@host/x", "http://token@host:5000"])
def test_a_password_in_an_address_is_refused(uri: str):
    with pytest.raises(ConfigError, match=r"tracking\[0\].uri: .*set MLFLOW_TRACKING_USERNAME"):
        Config.load([], [*MINIMAL, f"tracking=[{{type: mlflow, uri: '{uri}'}}]"])
    assert Config.load([], [*MINIMAL, "tracking=[{type: mlflow, uri: 'http://host/a@b'}]"]).tracking


def test_a_hanging_tracker_delays_nothing_and_its_queue_is_bounded(tmp_path: Path, capsys):
    plugin = Heard(hangs_at=1)
    sink = InThread(plugin, run_of(tmp_path), most=5, patience_s=0.05)
    sink.handle(RunStarted("r", 0, 1000), 0.0)
    sink.handle(StepDone(1, {}), 0.0)
    assert plugin.hangs.wait(10)
    for step in range(2, 1000):
        sink.handle(StepDone(step, {}), 0.0)
    sink.handle(RunEnded(999, "finished"), 0.0)
    sink.close()
    assert capsys.readouterr().err.splitlines() == [
        "rlsys: the tracker Heard does not keep up: the oldest of what it has not taken is dropped",
        "rlsys: the tracker Heard did not end within 0.05 s; what it had not taken is lost",
    ]
    plugin.may_go_on.set()
    assert plugin.is_closed.wait(10)
    kept = [(step, {}) for step in (996, 997, 998, 999)]
    assert plugin.told == [("start", "sums", 0), (1, {}), *kept, ("close", "finished")]


def test_what_was_dropped_is_counted(tmp_path: Path, capsys):
    plugin = Heard(hangs_at=1)
    sink = InThread(plugin, run_of(tmp_path), most=3)
    sink.handle(RunStarted("r", 0, 8), 0.0)
    sink.handle(StepDone(1, {}), 0.0)
    assert plugin.hangs.wait(10)
    for step in range(2, 9):
        sink.handle(StepDone(step, {}), 0.0)
    sink.handle(RunEnded(8, "finished"), 0.0)
    plugin.may_go_on.set()
    sink.close()
    assert capsys.readouterr().err.splitlines()[1:] == ["rlsys: the tracker Heard lost 5 events: it did not keep up"]


def test_a_run_that_fails_before_it_begins_leaves_nothing_anywhere(tmp_path: Path):
    plugin = Heard()
    tell(InThread(plugin, run_of(tmp_path)), RunEnded(0, "failed", "no such model"))
    assert plugin.told == []


def test_a_bus_that_is_closed_without_a_word_was_interrupted(tmp_path: Path):
    plugin = Heard()
    tell(InThread(plugin, run_of(tmp_path)), RunStarted("r", 0, 3))
    assert plugin.told == [("start", "sums", 0), ("close", "interrupted")]


def test_rollouts_are_sampled_evenly_over_the_rewards(tmp_path: Path):
    path = rollouts(tmp_path / "step_10.parquet", [0.75, 1.0, None, 0.25, 0.0, 0.5])
    assert [row.reward for row in sample_rows(path, 6)] == [None, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row.reward for row in sample_rows(path, 3)] == [None, 0.25, 1.0]
    assert [row.reward for row in sample_rows(path, 1)] == [None]
    assert sample_rows(path, 99)[0] == TrackedEpisode(
        step=10,
        task_id="t1",
        group_id=1,
        episode=0,
        reward=None,
        advantage=None,
        num_tokens=2,
        outcome="failed",
        prompt="user: 1 + 1?",
        text="it is None",
    )
    (best,) = (row for row in sample_rows(path, 99) if row.reward == 1.0)
    assert (best.prompt, best.advantage) == ("2 + 2?", 0.5)


def test_an_overlong_text_is_cut_with_a_note(tmp_path: Path):
    path = tmp_path / "step_10.parquet"
    episode = Episode((Trajectory("policy", (said("a" * (LONGEST + 1234), 1),), reward=1.0),))
    write_records(
        path, [RolloutRecord(10, GroupKey(0, 1), Task(id="t", prompt="p"), "rollout-0", 0, (episode,), (), ({},))]
    )
    (row,) = sample_rows(path, 9)
    assert row.text == "a" * LONGEST + " ... (1,234 characters more)"


# ----------------------------------------------------------------------------------------------------- configuration


def config(*tracking: object) -> Config:
    whole = {"run": {"steps": 8}, "model": {"path": "m"}, "data": {"path": "d"}, "tracking": list(tracking)}
    return Config.model_validate(whole)


def test_trackers_are_a_list_of_plugins_by_name(tmp_path: Path):
    read = Config.load([], [*MINIMAL, "tracking=[tensorboard, {type: mlflow, uri: 'http://h', names: trl}]"])
    assert read.tracking == [TensorBoard(), MLflow(uri="http://h", names="trl")]
    (tmp_path / "resolved.yaml").write_text(read.to_yaml())
    assert Config.load(tmp_path / "resolved.yaml") == read


@pytest.mark.parametrize(
    ("tracking", "said"),
    [
        ("[{type: mlflow, url: x}]", r"tracking\[0\].url: unknown key; did you mean `tracking\[0\].uri`"),
        ("[tensorboard, {uri: x}]", r"tracking\[1\].type: required: mlflow, prometheus, tensorboard, wandb"),
        ("[tensorbord]", "no tracker is named 'tensorbord'; did you mean `tensorboard`"),
        ("[{type: wandb, rollouts_every: -1}]", r"tracking\[0\].rollouts_every: input should be greater"),
        ("tensorboard", "tracking: input should be a valid list"),
    ],
)
def test_what_is_wrong_with_one_is_told_at_its_place(tracking: str, said: str):
    with pytest.raises(ConfigError, match=said):
        Config.load([], [*MINIMAL, f"tracking={tracking}"])


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Heard):
    package: ClassVar[str] = "no_such_package"


def test_a_tracker_without_its_package_is_refused_at_the_start():
    check_trackers(config(Heard()))
    with pytest.raises(ConfigError, match=r"tracking\[1\]: the package no_such_package is not installed; install it"):
        check_trackers(config(Heard(), Elsewhere()))


def test_each_policy_is_tracked_as_a_separate_run(tmp_path: Path):
    own = ["run.name=sums", f"run.folder={tmp_path}", "policies={solver: {}}"]
    whole = Config.load([], [*MINIMAL, *own, "tracking=[tensorboard]"])
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "config.resolved.yaml").write_text(whole.to_yaml())
    facts = facts_of(whole.of("solver"))
    assert (facts.title, facts.folder) == ("sums/solver", tmp_path / "sums" / "policies" / "solver" / "tracking")
    assert facts.config["tracking"][0]["type"] == "tensorboard"
    assert facts_of(whole).title == "sums"


# ------------------------------------------------------------------------------------------------------- tensorboard


def test_resumed_tensorboard_runs_replace_the_repeated_steps(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = rollouts(tmp_path / "step_2.parquet", [0.0, 1.0], step=2)
    plugin = TensorBoard(rollouts_every=2)
    first = [StepDone(step, {"reward/mean": step / 10}) for step in (1, 2, 3)]
    late = EvalDone(1, "hard", "ab", 1.0, {"eval/hard/mean": 0.5})
    tell(InThread(plugin, run_of(tmp_path)), RunStarted("r", 0, 4), *first, late, ALERT)
    again = [StepDone(step, {"reward/mean": step / 5}) for step in (2, 3, 4)]
    written = RolloutsWritten(2, str(path))
    tell(InThread(plugin, run_of(tmp_path)), RunStarted("r", 1, 4), *again, written, RunEnded(4, "finished"))

    loaded = EventAccumulator(str(tmp_path / "tracking" / "tensorboard")).Reload()
    rewards = [(event.step, round(event.value, 6)) for event in loaded.Scalars("reward/mean")]
    assert rewards == [(1, 0.1), (2, 0.4), (3, 0.6), (4, 0.8)]
    assert [(event.step, event.value) for event in loaded.Scalars("eval/hard/mean")] == [(1, 0.5)]
    about = loaded.SummaryMetadata("reward/mean")
    assert about.summary_description == "mean reward of the episodes trained"
    (table,) = (event.tensor_proto for event in loaded.Tensors("rollouts"))
    assert [dim.size for dim in table.tensor_shape.dim] == [3, 10]
    assert table.string_val[-1] == b"    it is 1.0"


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path):
    import subprocess

    program = f"""
import sys
from pathlib import Path
from rlsys.monitoring.tracker import RunFacts
from rlsys.monitoring.trackers.tensorboard import TensorBoard
tracker = TensorBoard().start(RunFacts(Path({str(tmp_path)!r}), "sums", "", {{}}))
tracker.metrics(1, {{"reward/mean": 0.5}})
tracker.close("finished")
print([m for m in ("torch", "tensorflow") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------------ mlflow


@pytest.mark.slow
def test_mlflow_has_configuration_history_and_rollouts_of_a_resumed_run(tmp_path: Path):
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow-skinny, the extra `mlflow` of rlsys")
    path = rollouts(tmp_path / "step_10.parquet", [0.0, 1.0])
    values = {"reward/mean": 0.5, "eval/hard/pass@4": 0.25}
    tell(InThread(MLflow(), run_of(tmp_path)), RunStarted("r", 0, 20), StepDone(10, values), ALERT)
    events = RunStarted("r", 10, 20), StepDone(11, {"reward/mean": 0.75}), RolloutsWritten(10, str(path))
    tell(InThread(MLflow(), run_of(tmp_path)), *events, RunEnded(11, "finished"))
    client = mlflow.MlflowClient((tmp_path / "tracking" / "mlflow").as_uri())
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
    assert run.data.params == {"run.name": "sums", "train.lr": "1e-05"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.5), (11, 0.75)]
    assert run.data.metrics["eval/hard/pass_at_4"] == 0.25
    assert run.data.tags["alert.entropy_collapse"] == f"step 2: {ALERT.sentence}"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml", "rollouts"]


@pytest.mark.slow
def test_a_concurrently_created_mlflow_experiment_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow-skinny, the extra `mlflow` of rlsys")

    class Late(mlflow.MlflowClient):
        """Sees what others made only once it fails to make it itself."""

        seen = False

        def get_experiment_by_name(self, name: str):
            return super().get_experiment_by_name(name) if self.seen else None

        def create_experiment(self, name: str, *args, **kwargs):
            self.seen = True
            return super().create_experiment(name, *args, **kwargs)

    store = (tmp_path / "mlflow").as_uri()
    first = experiment_of(mlflow.MlflowClient(store), "sums")
    assert experiment_of(Late(store), "sums") == first
