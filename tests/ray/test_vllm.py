"""A whole run on vLLM: two replicas, weights changed under running groups, and every token accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlsys
from examples.tiny_policy import build_tokenizer
from rlsys.errors import ModelError
from rlsys.replay.rollout_parquet import read_records
from tests.jobs import config_of
from tests.models import tiny_sorter
from tests.vllm_servers import vllm_server


@pytest.fixture
def vllm_model(tmp_path: Path) -> Path:
    tiny_sorter(head_dim=32).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.nightly
def test_a_model_vllm_cannot_run_is_refused(cluster, model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["rollout.engine=vllm"])
    with pytest.raises(ModelError, match=r"vllm cannot run model .*head_dim=16.*choose another rollout.engine"):
        rlsys.train(config, progress=False)


def test_sampler_and_trainer_logprobs_match_after_inflight_weight_changes(cluster, vllm_model, data_path, tmp_path):
    overrides = [
        "rollout.engine=vllm",
        "rollout.replicas=2",
        "rollout.weight_change=inflight_recompute",
        "asynchrony.max_staleness=2",
        "checkpoint.every=0",
    ]
    result = rlsys.train(config_of(vllm_model, data_path, tmp_path, overrides), progress=False)
    assert result.steps == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(e["worker"], e["engine"]) for e in events if e["kind"] == "engine_chosen"] == [
        ("rollout-0", "vllm"),
        ("rollout-1", "vllm"),
    ]
    assert [e["detail"] for e in events if e["kind"] == "worker_failed"] == []
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["async/staleness_max"] for row in rows) <= 2
    assert rows[-1]["async/dropped"] == 0
    # Keys and values were computed anew, so the trainer at the same version must find the same logprobs.
    assert max(row.get("sampler/s0/logp_diff_max", 0.0) for row in rows) < 1e-4
    assert any("sampler/s0/logp_diff_max" in row for row in rows)
    versions = {
        span.version
        for path in (tmp_path / "run" / "rollouts").glob("*.parquet")
        for record in read_records(path)
        for episode in record.episodes
        for span in episode.trajectories[0].turns[0].versions
    }
    assert len(versions) > 1


@pytest.mark.nightly
def test_a_server_that_runs_elsewhere_is_trained_with_and_its_weights_are_verified(
    cluster, vllm_model, data_path, tmp_path
):
    with vllm_server(vllm_model, context=64) as url:
        overrides = [
            f"rollout.engine={{urls: ['{url}']}}",
            "rollout.weight_change=inflight_recompute",
            "asynchrony.max_staleness=2",
            "checkpoint.every=0",
        ]
        result = rlsys.train(config_of(vllm_model, data_path, tmp_path, overrides), progress=False)
        assert result.steps == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["engine"] for e in events if e["kind"] == "engine_chosen"] == ["vllm_server"]
    assert [e["detail"] for e in events if e["kind"] == "worker_failed"] == []
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["async/staleness_max"] for row in rows) <= 2 and rows[-1]["async/dropped"] == 0
    assert max(row.get("sampler/s0/logp_diff_max", 0.0) for row in rows) < 1e-4
    assert any("sampler/s0/logp_diff_max" in row for row in rows)
