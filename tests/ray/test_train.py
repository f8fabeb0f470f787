"""The whole system on a local Ray cluster, with a model of 12,000 parameters."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsys import Config, evaluate, export, train
from rlsys.errors import ConfigError, ModelError, RunAborted
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.replay.rollout_parquet import read_records
from tests.hub_server import TOKEN, serving_hub
from tests.jobs import config_of
from tests.models import tiny_sorter
from tests.ray.judges import UNPICKLED_BY

pytestmark = pytest.mark.usefixtures("cluster")


def rows_of(run_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def weights_of(run_dir: Path, step: str = "latest") -> dict[str, torch.Tensor]:
    folder = export(run_dir, run_dir / f"export-{step}", step)
    return load_file(folder / "model.safetensors")


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.fixture(scope="module")
def whole_run(cluster, model_path, data_path, tmp_path_factory) -> Path:
    """Four steps without interruption; several tests compare with it."""
    config = config_of(model_path, data_path, tmp_path_factory.mktemp("runs"), ["rollout.replicas=2"])
    assert train(config, progress=False).steps == 4
    return config.run_dir


def test_a_run_leaves_everything_a_person_needs_in_its_folder(whole_run):
    assert Config.load(whole_run / "config.resolved.yaml").run.steps == 4
    metrics = rows_of(whole_run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert {row["async/staleness_max"] for row in metrics} == {0}
    kinds = [row["kind"] for row in rows_of(whole_run, "events.jsonl")]
    assert kinds[-1] == "run_ended"
    assert kinds.count("checkpoint_saved") == 4
    records = read_records(whole_run / "rollouts" / "step_000001.parquet")
    assert len(records) == 4
    assert all(len(r.episodes) == 4 for r in records)
    assert (whole_run / "logs" / "ray").is_dir()


def test_a_step_has_what_each_worker_and_node_uses(whole_run):
    last = rows_of(whole_run, "metrics.jsonl")[-1]
    workers = {path.stem for path in (whole_run / "machine").glob("*.jsonl")}
    assert workers > {"driver", "rollout-0", "rollout-1"}
    assert last.keys() >= {f"machine/{worker}/{used}" for worker in workers for used in ("cpu", "memory")}
    assert {name.split("/")[-1] for name in last if name.startswith("node/")} == {
        "cpu", "memory", "shm", "sent", "received"
    }  # fmt: skip
    assert undocumented_names(last.keys() - {"step", "time_s"}) == []


def test_the_sampler_and_the_trainer_agree_on_every_logprob(whole_run):
    assert max(row["sampler/logp_diff_max"] for row in rows_of(whole_run, "metrics.jsonl")) < 1e-5


@pytest.mark.nightly
def test_a_truncated_distribution_is_trained_as_it_is_sampled(cluster, model_path, data_path, tmp_path):
    keys = ["rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=9", "rollout.min_p=0.02", "run.steps=2"]
    config = config_of(model_path, data_path, tmp_path, keys)
    train(config, progress=False)
    assert max(row["sampler/logp_diff_max"] for row in rows_of(config.run_dir, "metrics.jsonl")) < 1e-4


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_an_interrupted_and_resumed_run_has_bit_identical_weights(step, whole_run, model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["rollout.replicas=2", "run.name=cut", "run.resume=must"])
    kept = f"step_{step:06d}"
    shutil.copytree(whole_run / "checkpoints" / kept, config.run_dir / "checkpoints" / kept)
    train(config, progress=False)
    assert are_equal(weights_of(config.run_dir), weights_of(whole_run))
    for later in range(step + 1, 5):
        name = f"rollouts/step_{later:06d}.parquet"
        assert said(config.run_dir / name) == said(whole_run / name)


@pytest.mark.parametrize(
    ("exists", "error", "reason"),
    [
        pytest.param(True, ConfigError, r"model\.path: .* began with .*, and .* has other weights", id="another model"),
        pytest.param(False, ModelError, "there is no folder", id="no model", marks=pytest.mark.nightly),
    ],
)
def test_a_refused_resume_leaves_a_finished_run_as_it_was(
    exists, error, reason, whole_run, model_path, data_path, tmp_path
):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole_run, run, symlinks=True)
    before = contents_of(run)
    if exists:
        shutil.copytree(model_path, other)
        tiny_sorter(head_dim=8).save_pretrained(other)
    with pytest.raises(error, match=reason):
        train(config_of(other, data_path, tmp_path, ["run.resume=auto"]), progress=False)
    assert contents_of(run) == before
    assert are_equal(weights_of(run), weights_of(whole_run))


def contents_of(run: Path) -> dict[str, bytes]:
    """Files of a run, without those of its processes."""
    files = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    of_processes = ("logs/", "machine/", "run.lock")
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(of_processes)}


@pytest.mark.nightly
def test_checkpoints_at_a_url_outlive_the_folder_and_start_another_run(whole_run, model_path, data_path, tmp_path):
    keys = ["rollout.replicas=2", f"checkpoint.to=file://{tmp_path / 'store'}", "run.resume=auto"]
    config = config_of(model_path, data_path, tmp_path / "runs", [*keys, "run.steps=3"])
    train(config, progress=False)
    saved = [row["path"] for row in rows_of(config.run_dir, "events.jsonl") if row["kind"] == "checkpoint_saved"]
    assert saved[-1] == f"file://{tmp_path / 'store'}/run/checkpoints/step_000003"
    shutil.rmtree(config.run_dir)
    assert train(config_of(model_path, data_path, tmp_path / "runs", keys), progress=False).steps == 4
    assert [row["step"] for row in rows_of(config.run_dir, "metrics.jsonl")] == [4]
    assert not (config.run_dir / "checkpoints").exists()
    assert are_equal(weights_of(config.run_dir), weights_of(whole_run))
    of_url = ["run.name=other", "run.steps=5", f"run.resume=file://{tmp_path / 'store' / 'run'}"]
    other = config_of(model_path, data_path, tmp_path / "runs", ["rollout.replicas=2", *of_url])
    assert train(other, progress=False).steps == 5
    assert [path.name for path in (other.run_dir / "checkpoints").glob("step_*[0-9]")] == ["step_000005"]


def said(path: Path) -> list[object]:
    """What a step trained: tasks, tokens, logprobs, rewards."""
    return [(r.key.group_id, r.task, r.episodes, r.advantages) for r in read_records(path)]


def test_two_ranks_train_the_weights_of_one(whole_run, model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["train.mesh.shard=2"])
    train(config, progress=False)
    assert furthest(weights_of(config.run_dir), weights_of(whole_run)) < 1e-5


def test_the_exported_model_loads_in_transformers(whole_run, tmp_path):
    folder = export(whole_run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert are_equal(dict(load_file(folder / "model.safetensors")), weights_of(whole_run))
    assert model.num_parameters() > 10_000


def test_a_checkpoint_is_measured_the_same_as_during_training(model_path, data_path, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data_path.read_text().splitlines(keepends=True)[:3]))
    section = f"{{every: 3, data: {{all: {data_path}, few: {few}}}, samples: 4, temperature: 1.0, limit: 8}}"
    config = config_of(model_path, data_path, tmp_path, [f"eval={section}", "asynchrony.max_staleness=1"])
    train(config, progress=False)
    rows = rows_of(config.run_dir, "metrics.jsonl")
    assert undocumented_names(name for row in rows for name in row if name != "time_s") == []
    for name, num_tasks in (("all", 8), ("few", 3)):
        measured = {row.pop("step"): row for row in map(dict, rows) if f"eval/{name}/mean" in row}
        assert list(measured) == [0, 3, 4]
        again = evaluate(str(config.run_dir))[name]
        assert {"time_s": measured[4]["time_s"], **again.as_metrics(name)} == measured[4]
        assert again.num_tasks == num_tasks
        assert 0 < again.mean < 1
        episodes = [
            e for r in read_records(config.run_dir / f"evaluations/{name}/step_000004.parquet") for e in r.episodes
        ]
        rewards = [episode.trajectories[0].reward for episode in episodes]
        assert len(episodes) == 4 * num_tasks and fmean(r for r in rewards if r is not None) == pytest.approx(
            again.mean
        )
        assert all([span.kind for span in episode.spans] == ["turn"] for episode in episodes)
    written = {path.stem for path in (config.run_dir / "machine").iterdir()}
    assert {"driver", "actor-0", "rollout-0", "eval-0", "reward-0", "recorder"} <= written
    assert (config.run_dir / "logs/rollout-0.log").is_file()


@pytest.mark.nightly
def test_a_run_that_stops_early_exports_its_best_checkpoint(model_path, data_path, tmp_path):
    """Rewards rise, so the lowest mean is that of an early step."""
    keys = [
        "run.steps=30", "eval={data: {d: " + str(data_path) + "}, every: 1, limit: 4}", "checkpoint.keep_last=1",
        "checkpoint={keep_best: 1, best_by: lowest eval/d/mean, early_stopping_patience: 3, every: 0}",
    ]  # fmt: skip
    config = config_of(model_path, data_path, tmp_path, keys)
    result = train(config, progress=False)
    assert result.steps < 30
    assert result.early_stop.startswith("stopped early: eval/d/mean did not improve in ")
    end = rows_of(config.run_dir, "events.jsonl")[-1]
    assert (end["reason"], end["detail"]) == ("finished", result.early_stop)
    kept = [int(path.name[5:]) for path in (config.run_dir / "checkpoints").glob("step_*")]
    results = [json.loads((config.run_dir / f"evaluations/d/step_{step:06d}.json").read_text()) for step in kept]
    best = min(results, key=lambda row: (row["mean"], -row["step"]))["step"]
    assert are_equal(weights_of(config.run_dir, "best"), weights_of(config.run_dir, str(best)))
    with pytest.raises(ConfigError, match="neither a number nor `latest`"):
        weights_of(config.run_dir, "worst")


@pytest.mark.nightly
def test_an_export_is_pushed_from_the_command_line(whole_run, tmp_path):
    with serving_hub() as hub:
        own = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "rlsys.cli", "export", str(whole_run), "--push", "me/sums", "--step", "2"]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/sums\n"), done.stderr
    repo = hub.repos["me/sums"]
    assert (repo.is_private, repo.commits) == (True, [f"Step 2 of {whole_run.name}"])
    kept = whole_run / "exports" / "step_000002"
    assert repo.files == {path.name: path.read_bytes() for path in kept.iterdir()}
    assert are_equal(weights_of(whole_run, "2"), load_file(kept / "model.safetensors"))


@pytest.mark.nightly
def test_an_evaluation_reuses_the_export_of_a_checkpoint(whole_run, data_path):
    def exported() -> Path:
        result = evaluate(str(whole_run), data={"d": str(data_path)}, samples=4, temperature=1.0, limit=8)
        assert result["d"].num_tasks == 8
        (model,) = whole_run.glob("checkpoints/*/model")
        return model / "model.safetensors"

    first = exported()
    assert are_equal(dict(load_file(first)), weights_of(whole_run))
    written = first.stat().st_mtime_ns
    assert exported().stat().st_mtime_ns == written


def test_an_evaluation_with_too_many_cpus_is_refused_at_once(whole_run, data_path):
    with pytest.raises(ConfigError, match=r"needs 21 CPUs and the cluster has 8"):
        evaluate(str(whole_run), data={"d": str(data_path)}, config_overrides=["eval.replicas=20"])


@pytest.mark.nightly
def test_staleness_stays_bounded_and_every_token_has_a_version(model_path, data_path, tmp_path):
    for change in ("between", "inflight"):
        overrides = [
            f"run.name={change}",
            "rollout.replicas=2",
            "asynchrony.max_staleness=2",
            f"rollout.weight_change={change}",
            "run.steps=6",
        ]
        config = config_of(model_path, data_path, tmp_path, overrides)
        train(config, progress=False)
        metrics = rows_of(config.run_dir, "metrics.jsonl")
        assert max(row["async/staleness_max"] for row in metrics) <= 2
        assert metrics[-1]["async/dropped"] == 0
        records = [r for p in (config.run_dir / "rollouts").iterdir() for r in read_records(p)]
        turns = [t for r in records for e in r.episodes for j in e.trajectories for t in j.turns]
        assert all(sum(s.num_tokens for s in t.versions) == len(t.output_ids) for t in turns)
        if change == "between":
            assert all(len(t.versions) == 1 for t in turns)


@pytest.mark.nightly
def test_the_kl_to_the_reference_starts_at_zero(model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["algorithm.kl_coef=0.1"])
    train(config, progress=False)
    kl = [row["policy/kl_ref"] for row in rows_of(config.run_dir, "metrics.jsonl")]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("algorithm", "measured"),
    [
        pytest.param("ppo", "critic/explained_variance", id="ppo"),
        pytest.param("kto", "kto/z0", id="kto", marks=pytest.mark.nightly),
    ],
)
def test_ppo_and_kto_resume_bit_for_bit(algorithm, measured, model_path, data_path, tmp_path):
    def run(name: str, *overrides: str) -> Path:
        keys = [f"run.name={name}", "run.steps=3", f"algorithm.type={algorithm}", *overrides]
        config = config_of(model_path, data_path, tmp_path, keys)
        train(config, progress=False)
        return config.run_dir

    whole = run("whole")
    rows = rows_of(whole, "metrics.jsonl")
    assert all(math.isfinite(row[measured]) for row in rows)
    assert undocumented_names(name for row in rows for name in row if name != "time_s") == []
    shutil.copytree(whole / "checkpoints" / "step_000002", tmp_path / "cut" / "checkpoints" / "step_000002")
    cut = run("cut", "run.resume=must")
    assert are_equal(weights_of(cut), weights_of(whole))
    assert rows_of(cut, "metrics.jsonl")[-1][measured] == rows[-1][measured]


def test_the_driver_never_deserialises_a_payload(model_path, data_path, tmp_path):
    overrides = ["rollout.workflow=tests.ray.judges:Marked", "run.steps=2"]
    UNPICKLED_BY.unlink(missing_ok=True)
    train(config_of(model_path, data_path, tmp_path, overrides), progress=False)
    readers = {int(line) for line in UNPICKLED_BY.read_text().split()}
    assert readers
    assert os.getpid() not in readers


def test_a_model_that_does_not_exist_is_one_clear_error(model_path, data_path, tmp_path):
    with pytest.raises(ModelError, match=r"/no/such/model"):
        train(config_of(model_path, data_path, tmp_path, ["model.path=/no/such/model"]), progress=False)


@pytest.mark.nightly
def test_a_judge_that_always_raises_is_located_in_the_error(model_path, data_path, tmp_path):
    overrides = ["reward.fn=tests/ray/judges.py:raises"]
    with pytest.raises(RunAborted, match=r"this judge is broken.*judges\.py:\d+"):
        train(config_of(model_path, data_path, tmp_path, overrides), progress=False)


def test_more_than_the_cluster_has_is_refused_at_once(model_path, data_path, tmp_path):
    with pytest.raises(ConfigError, match=r"needs .* CPUs and the cluster has 8"):
        train(config_of(model_path, data_path, tmp_path, ["rollout.replicas=20"]), progress=False)


def test_a_finished_run_is_never_overwritten(whole_run, model_path, data_path):
    config = config_of(model_path, data_path, whole_run.parent)
    with pytest.raises(ConfigError, match=r"holds a run already"):
        train(config, progress=False)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [2, 4])
def test_a_resume_with_nothing_left_to_train_says_so(steps, whole_run, model_path, data_path, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run", symlinks=True)
    config = config_of(model_path, data_path, tmp_path, [f"run.steps={steps}", "run.resume=auto"])
    train(config, progress=False)
    (caution,) = [row for row in rows_of(config.run_dir, "events.jsonl") if row["kind"] == "caution_raised"]
    assert caution["sentence"].startswith(f"step 4 is done, and the run ends at step {steps}: nothing is left to train")
