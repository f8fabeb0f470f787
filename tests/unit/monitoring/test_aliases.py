"""Metric aliases: every alias refers to an existing metric, and no two metrics share an alias."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.monitoring import metric_catalog
from rlsys.monitoring.metric_catalog import METRICS, NameSet, alias, rename_metrics

SETS: tuple[NameSet, ...] = ("verl", "trl")
VERL = {key: metric.verl for key, metric in METRICS.items() if metric.verl}
TRL = {key: metric.trl for key, metric in METRICS.items() if metric.trl}
ALIASES = {"verl": VERL, "trl": TRL}


@pytest.mark.parametrize("names", SETS)
def test_every_alias_names_a_catalogued_metric_with_its_placeholders(names: NameSet):
    theirs = ALIASES[names]
    assert len(theirs) > 15
    for ours, name in theirs.items():
        assert ("{dataset}" in ours) == ("{dataset}" in name)
        assert ("{function}" in ours) == ("{function}" in name)


@pytest.mark.parametrize("names", SETS)
def test_no_two_metrics_end_under_one_name(names: NameSet):
    ends = [ALIASES[names].get(key, key) for key in METRICS]
    assert len(set(ends)) == len(ends)


@pytest.mark.parametrize(
    ("names", "theirs"),
    [
        ("verl", ["critic/score/mean", "actor/entropy", "reward/by/exact"]),
        ("trl", ["train/reward", "train/entropy", "train/rewards/exact/mean"]),
        ("rlsys", ["reward/mean", "policy/entropy", "reward/by/exact"]),
    ],
)
def test_aliases_rename_known_metrics_and_keep_the_others(names: NameSet, theirs: list[str]):
    values = {"reward/mean": 0.5, "policy/entropy": 1.0, "reward/by/exact": 0.25, "gac/cosine": 2.0, "own/thing": 3.0}
    assert rename_metrics(values, names) == dict(
        zip([*theirs, "gac/cosine", "own/thing"], values.values(), strict=True)
    )


def test_verl_means_of_samples_include_their_number():
    values = {"eval/held_out/mean": 0.5, "eval/held_out/samples": 8.0}
    assert rename_metrics(values, "verl") == {"val-core/held_out/reward/mean@8": 0.5, "eval/held_out/samples": 8.0}
    assert alias("eval/held_out/mean", "verl") == "eval/held_out/mean"


def test_what_is_merely_alike_keeps_our_name():
    assert "reward/std" not in TRL  # theirs is the mean over groups of their standard deviations
    assert not {"policy/clip_frac_low", "policy/clip_frac_high"} & VERL.keys()  # theirs is both in one
    assert not {"time/rollout", "time/reward", "time/annotate"} & VERL.keys()  # theirs are phases, ours overlap
    assert "policy/kl_ref" not in VERL  # theirs is of an estimator that is chosen
    assert not [key for key in TRL if key.startswith("eval/")]  # theirs know no data set


def test_every_row_of_the_page_of_metrics_is_a_metric_of_its_family():
    page = Path(metric_catalog.__file__).with_name("metrics.md").read_text()
    read: list[str] = []
    for part in page.split("\n## ")[1:]:
        family, *lines = part.splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        keys = [key for key in METRICS if key.partition("/")[0] == family]
        assert [row.partition("` |")[0] for row in rows] == [f"| `{key}" for key in keys]
        read += keys
    assert read == list(METRICS)
