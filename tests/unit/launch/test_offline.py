"""Commands on runs and models outside training, without a cluster."""

from __future__ import annotations

import json
import os
from contextlib import chdir
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.eval_section import EvalSection
from rlsys.config.loader import load_sections
from rlsys.config.run_sections import LimitsSection
from rlsys.errors import CheckpointError, ConfigError, RlsysError
from rlsys.launch.offline_commands import (
    EXPORTED,
    evaluate,
    export,
    export_once,
    make_once,
    measure_and_keep,
    template_of_run,
)
from rlsys.launch.preflight import check_code, with_absolute_paths
from rlsys.loop.evaluation import EvalMetrics, Evaluator
from rlsys.loop.failure_policy import FailurePolicy
from rlsys.monitoring.events import Events, FileSkipped
from rlsys.replay.rollout_parquet import read_records
from rlsys.testing import EventRecorder, FakeRewards, FakeRollouts, FakeWorld, run_virtual, tasks
from rlsys.util.files import CONFIG

PLANTED = """\
from pathlib import Path

Path(__file__).with_name("imported").touch()
"""
NEEDED = ["run.steps=1", "model.path=org/none"]


def test_data_is_found_from_any_folder_and_hub_names_stay(tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "set").mkdir()
    here = os.path.relpath(tmp_path)
    sets = f"eval.data={{a: {here}/rows.jsonl, b: org/name:main#test, c: {here}/gone.jsonl}}"
    config = with_absolute_paths(Config.load([], [*NEEDED, f"data.path={here}/set#train", sets]))
    assert Path(path := str(config.data.path)).is_absolute()
    assert Path(path.removesuffix("#train")).samefile(tmp_path / "set")
    assert Path(config.eval.data["a"].path).is_absolute()
    assert Path(config.eval.data["a"].path).samefile(tmp_path / "rows.jsonl")
    assert (config.eval.data["b"].path, config.eval.data["c"].path) == ("org/name:main#test", f"{here}/gone.jsonl")


def filling(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").touch()


def test_a_folder_is_made_once(tmp_path: Path):
    def never(folder: Path) -> None:
        raise AssertionError(folder)

    assert make_once(tmp_path / "model", filling) == make_once(tmp_path / "model", never) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_of_two_concurrent_makers_of_a_folder_the_first_wins(tmp_path: Path):
    def overtaken(folder: Path) -> None:
        filling(tmp_path / "model")
        filling(folder)
        (folder / "later").touch()

    assert make_once(tmp_path / "model", overtaken) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        make_once(tmp_path / "gone" / "model", filling)
    with pytest.raises(CheckpointError, match=r"rlsys export .*/run --to FOLDER --step 000001`, and evaluate that"):
        export_once(tmp_path / "run" / "checkpoints" / "step_000001")


def planted(folder: Path, *lines: str) -> Path:
    """A run folder from others, with code that leaves the file `imported` if it is imported."""
    run = folder / "run"
    run.mkdir()
    (run / "planted.py").write_text(PLANTED)
    (run / CONFIG).write_text("\n".join(["run: {steps: 1}", "model: {path: m}", "data: {path: d}", *lines]))
    return run


@pytest.mark.parametrize(
    "line", ["algorithm: planted:Own", "stabilizer: planted:Own", "rollout: {workflow: planted:Own}", "tracking: [p:O]"]
)
def test_an_export_imports_no_code_of_the_run(tmp_path: Path, line: str):
    run = planted(tmp_path, line)
    with chdir(run):
        config = load_sections(Config, run / CONFIG, EXPORTED, ["stabilizer=null"])
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            export(run, tmp_path / "model")
    assert (config.run.steps, config.model.path) == (1, "m")
    assert not (run / "imported").exists()


@pytest.mark.parametrize(
    "line", ["algorithm: planted:Own", "reward: {fn: RUN/planted.py:score}", "reward: {fn: [{fn: planted:score}]}"]
)
def test_code_inside_a_run_folder_is_refused(tmp_path: Path, line: str):
    run = planted(tmp_path, line.replace("RUN", str(tmp_path / "run")))
    with chdir(run), pytest.raises(ConfigError, match=r"is code in the run folder itself \(.*planted.py\)"):
        evaluate(str(run))
    assert not (run / "imported").exists()


def test_code_that_an_override_names_may_lie_in_a_run_folder(tmp_path: Path):
    run = planted(tmp_path, f"reward: {{fn: {tmp_path}/run/planted.py:score}}")
    check_code(run, run / CONFIG, [f"--reward.fn={run}/planted.py:score"])
    with pytest.raises(ConfigError, match=r"reward.fn: .* is code in the run folder"):
        check_code(run, run / CONFIG, ["train.lr=1"])


def test_an_exported_model_has_the_chat_template_of_its_run(tmp_path: Path):
    template, config = "{% for m in messages %}{{ m.content }};{% endfor %}", tmp_path / "config.yaml"
    config.write_text(json.dumps({"rollout": {"chat": {"template": template}}}))
    assert template_of_run(config) == template
    config.write_text("rollout: {slots: 4}\n")
    assert template_of_run(config) is None


def test_an_export_reads_no_template_that_the_configuration_of_a_run_names(tmp_path: Path):
    (tmp_path / "private").write_text("{{ secret }}")
    (tmp_path / "config.yaml").write_text(f"rollout: {{chat: {{template: {tmp_path}/private}}}}\n")
    with pytest.raises(ConfigError, match=r"names the file \S+/private, which an export does not read"):
        template_of_run(tmp_path / "config.yaml")


def evaluator_on(world: FakeWorld, recorder: EventRecorder) -> Evaluator:
    world.relay = 0
    failures, rules = FailurePolicy(LimitsSection()), EvalSection(samples=2, temperature=1)
    sets = {"held_out": tasks(3)}
    return Evaluator(FakeRollouts(world), FakeRewards(world), failures, Events([recorder]), sets, rules, 0, 4)


def test_a_command_keeps_samples_beside_those_of_training(tmp_path: Path):
    world = FakeWorld(reward=lambda group_id, episode: None if episode else 1.0)
    evaluator, record = evaluator_on(world, EventRecorder()), world.workers().actor.record_evaluated
    of_training = tmp_path / "evaluations" / "held_out"
    of_training.mkdir(parents=True)
    for ending in ("json", "parquet"):
        (of_training / f"step_000004.{ending}").write_text("of training")
    checkpoint = tmp_path / "checkpoints" / "step_000004"

    async def twice() -> list[EvalMetrics]:
        return [await measure_and_keep(checkpoint, evaluator, "held_out", record) for _ in range(2)]

    measures = run_virtual(twice())
    assert {path.read_text() for path in of_training.iterdir()} == {"of training"}
    for number, measured in enumerate(measures, start=1):
        path = tmp_path / "evaluations" / f"held_out@{number}" / "step_000004.json"
        row = json.loads(path.read_text())
        assert (row["step"], row["dataset"], row["mean"]) == (4, "held_out", measured.mean)
        records = read_records(path.with_suffix(".parquet"))
        assert [(each.step, each.task.id) for each in records] == [(4, f"task-{i}") for i in range(3)]
        outcomes = [e.trajectories[0].outcome for each in records for e in each.episodes]
        assert [bool(outcome.reason) for outcome in outcomes] == [False, True] * 3
    assert len(list((tmp_path / "evaluations").iterdir())) == 3


def test_a_command_keeps_samples_without_any_score(tmp_path: Path):
    world = FakeWorld(reward=lambda group_id, episode: None)
    evaluator, record = evaluator_on(world, EventRecorder()), world.workers().actor.record_evaluated
    with pytest.raises(RlsysError, match="no sample could be scored"):
        run_virtual(measure_and_keep(tmp_path / "checkpoints" / "step_000004", evaluator, "held_out", record))
    (written,) = (tmp_path / "evaluations" / "held_out@1").iterdir()
    assert len(read_records(written)) == 3


def test_a_command_measures_a_run_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "evaluations").write_text("a file where a folder should be")
    world, recorder = FakeWorld(), EventRecorder()
    evaluator, record = evaluator_on(world, recorder), world.workers().actor.record_evaluated
    measured = run_virtual(measure_and_keep(tmp_path / "checkpoints" / "step_000004", evaluator, "held_out", record))
    assert measured.num_tasks == 3
    assert [event.path for event in recorder.of(FileSkipped)] == [str(tmp_path / "evaluations")]
