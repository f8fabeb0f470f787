"""A run with trackers, from its configuration to what Prometheus scrapes from the node."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from pathlib import Path

import pytest

from rlsys import train
from rlsys.monitoring.metric_catalog import parse_metric
from tests.jobs import config_of
from workers.prometheus import gauge_name

pytestmark = pytest.mark.usefixtures("cluster")


def scraped(wanted: set[str], within_s: float = 60.0) -> str:
    """What the node's metrics port serves, once it has all of these names: Ray collects every ten seconds, and tells
    nobody when it has."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    until = time.monotonic() + within_s
    while True:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        missing = [name for name in wanted if f"# TYPE {name} gauge" not in text]
        if not missing:
            return text
        assert time.monotonic() < until, f"not there: {missing}"
        time.sleep(0.25)


@pytest.mark.nightly
def test_a_scrape_has_every_metric_under_its_documented_name(model_path, data_path, tmp_path: Path, capfd):
    own = ["run.name=watched", "run.steps=2", f"eval={{data: {{held_out: {data_path}}}, every: 1, limit: 4}}"]
    config = config_of(model_path, data_path, tmp_path, [*own, "tracking=[prometheus, tensorboard]"])
    assert train(config, progress=False).steps == 2
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    told = {key: value for row in rows for key, value in row.items() if key not in ("time_s", "step")}
    finite = {key for key, value in told.items() if value is not None and math.isfinite(value)}
    keys = {found.key for key in finite if (found := parse_metric(key))}
    assert len(finite) > 40
    text = scraped({f"ray_{gauge_name(key)}" for key in keys | {"step"}})
    lines = text.splitlines()
    (reward,) = (line for line in lines if line.startswith("ray_rlsys_reward_mean{") and 'run="watched"' in line)
    assert float(reward.split()[-1]) == pytest.approx(rows_of(rows, "reward/mean")[-1])
    (step,) = (line for line in lines if line.startswith("ray_rlsys_step{") and 'run="watched"' in line)
    assert float(step.split()[-1]) == 2
    (about,) = (line for line in lines if line.startswith("# HELP ray_rlsys_time_step "))
    assert about == "# HELP ray_rlsys_time_step wall time of the step [s]"
    assert any('dataset="held_out"' in line for line in lines if line.startswith("ray_rlsys_eval_mean{"))
    assert list((config.run_dir / "tracking" / "tensorboard").iterdir())
    assert "tracker" not in capfd.readouterr().err


def rows_of(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]
