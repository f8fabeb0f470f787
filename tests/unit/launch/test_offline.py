"""Commands on runs and models outside training, without a cluster."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path

import pytest

from examples.tiny_policy import build_tokenizer
from rlsys.config import Config
from rlsys.config.loader import load_sections
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.offline_commands import EXPORTED, evaluate, export, exported, made_once, write_template
from rlsys.launch.preflight import check_code, rooted
from rlsys.loop.checkpoint import CONFIG
from workers.text.tokenizer import TextTokenizer

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
    config = rooted(Config.load([], [*NEEDED, f"data.path={here}/set#train", sets]))
    assert Path(config.data.path).is_absolute()
    assert Path(config.data.path.removesuffix("#train")).samefile(tmp_path / "set")
    assert Path(config.eval.data["a"]).is_absolute()
    assert Path(config.eval.data["a"]).samefile(tmp_path / "rows.jsonl")
    assert (config.eval.data["b"], config.eval.data["c"]) == ("org/name:main#test", f"{here}/gone.jsonl")


def filling(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").touch()


def test_a_folder_is_made_once(tmp_path: Path):
    def never(folder: Path) -> None:
        raise AssertionError(folder)

    assert made_once(tmp_path / "model", filling) == made_once(tmp_path / "model", never) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_of_two_concurrent_makers_of_a_folder_the_first_wins(tmp_path: Path):
    def overtaken(folder: Path) -> None:
        filling(tmp_path / "model")
        filling(folder)
        (folder / "later").touch()

    assert made_once(tmp_path / "model", overtaken) == tmp_path / "model"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["model", "model/weights"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        made_once(tmp_path / "gone" / "model", filling)
    with pytest.raises(CheckpointError, match=r"rlsys export .*/run --to FOLDER --step 000001`, and evaluate that"):
        exported(tmp_path / "run" / "checkpoints" / "step_000001")


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
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    (tmp_path / "config.yaml").write_text(f"rollout: {{chat: {{template: {tmp_path}/mine.jinja}}}}\n")
    build_tokenizer().save_pretrained(tmp_path)
    write_template(tmp_path / "config.yaml", tmp_path)
    assert TextTokenizer.load(tmp_path).template == template
    (tmp_path / "plain.yaml").write_text("rollout: {slots: 4}\n")
    (tmp_path / "plain").mkdir()
    write_template(tmp_path / "plain.yaml", tmp_path / "plain")
    assert not list((tmp_path / "plain").iterdir())
