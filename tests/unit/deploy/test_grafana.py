"""The Grafana dashboard and the Prometheus rules refer to existing metrics, in their units."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlsys.monitoring.metric_catalog import METRICS
from workers.prometheus import gauge_name

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "rlsys.json").read_text())
KEYS = {f"ray_{gauge_name(key)}": key for key in METRICS}
UNITS = {"": "none", "s": "s", "share": "percentunit"}
"""Ours -> Grafana's; any other is shown behind the number as it is."""
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OTHERS = {"max", "by", "changes", "delta", "run", "policy"}
"""Words of the query language, and labels that every metric has."""


def yaml(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((DEPLOY / "prometheus" / name).read_text())


def metrics_in(query: str) -> list[str]:
    """Keys of the table in a query. Raises `KeyError` for a name that is not there, and checks that labels exist."""
    words = set(re.findall(r"[a-z]\w*", re.sub(r"\"[^\"]*\"|\[\w+\]", "", query)))
    keys = [KEYS[name] for name in sorted(words) if name.startswith("ray_")]
    labels = {label for key in keys for label in re.findall(r"\{(\w+)\}", key)}
    assert {word for word in words if not word.startswith("ray_")} <= OTHERS | labels, query
    return keys


def test_no_two_metrics_are_one_gauge():
    assert len(KEYS) == len(METRICS)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_title_and_description_and_matching_unit(panel: dict[str, Any]):
    assert panel["title"] and panel["description"] and panel["targets"]
    for target in panel["targets"]:
        keys = metrics_in(target["expr"])
        units = {METRICS[key].unit for key in keys}
        assert keys and len(units) == 1, target["expr"]
        (unit,) = units
        is_share = " / " in target["expr"]
        shown = "percentunit" if is_share else UNITS.get(unit, f"suffix: {unit}")
        assert panel["fieldConfig"]["defaults"]["unit"] == shown
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) >= {"run", "policy"}


def test_panels_do_not_overlap_and_have_unique_ids():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_variables_select_run_and_policy_from_the_step_metric():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "policy"]
    for name in ("run", "policy"):
        assert variables[name]["query"]["query"] == f"label_values(ray_rlsys_step, {name})"


@pytest.mark.parametrize("rule", yaml("rules.yaml")["groups"][0]["rules"], ids=lambda rule: rule["alert"])
def test_every_rule_is_of_a_metric_that_there_is(rule: dict[str, Any]):
    assert rule.keys() <= {"alert", "expr", "for", "annotations"}
    assert metrics_in(rule["expr"])
    assert "$labels.run" in rule["annotations"]["summary"]


def test_prometheus_finds_the_rules_and_the_nodes_of_ray():
    settings = yaml("prometheus.yaml")
    assert all((DEPLOY / "prometheus" / name).is_file() for name in settings["rule_files"])
    (job,) = settings["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
