"""Gradient alignment control in the real back-end: over ranks, switched off, and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from algorithms.gac import GAC, Regime
from rlsys.errors import CheckpointError
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.stabilizer import CHUNK
from rlsys.types import Distribution
from tests.by_day import first_by_day
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, everything_in, planned
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import squared_norms
from workers.train.rank_group import RankGroup

SAMPLED = Distribution(0.9)

ON = GAC(enabled=True, c_low=0.01, c_high=1.0, update_every=1)


def large_gradients(step: int) -> dict[str, Tensor]:
    """Two parameters, one of more than one chunk a rank; consecutive gradients share a direction."""
    chance = torch.Generator().manual_seed(step)
    return {
        "a": 0.3 + torch.randn(2 * CHUNK + 1000, generator=chance),
        "b": 0.3 + torch.randn(700, 300, generator=chance),
    }


def steered(ranks: RankGroup) -> list[tuple[Mapping[str, float], dict[str, Tensor]]]:
    """What a rank with its share of every parameter reports and is left with, over three steps."""

    def shards(step: int) -> dict[str, Tensor]:
        return {n: g.chunk(ranks.num_ranks)[ranks.rank].clone() for n, g in large_gradients(step).items()}

    stabilizer = ON.start(shards(0))
    sizes: list[int] = []

    def counted(figures: Mapping[str, Tensor]) -> Tensor:
        total = torch.stack([*figures.values()]).double().sum(0)
        sizes.append(total.numel())
        return ranks.sum(total)

    done = []
    for step in range(3):
        mine = shards(step)
        squares = float(ranks.sum(torch.stack([*squared_norms(mine).values()]).sum()))
        done.append((stabilizer.steer(mine, squares, counted, 1.0).metrics, mine))
    assert sizes == [1, 1, 1]
    return done


def test_gac_on_two_sharded_ranks_equals_gac_on_one(two_ranks: JoinedRanks) -> None:
    """With one all-reduce of one number."""
    one, (first, second) = steered(RankGroup()), two_ranks(steered)
    for (metrics, gradient), (metrics_0, half_0), (metrics_1, half_1) in zip(one, first, second, strict=True):
        assert metrics_0 == metrics_1
        assert metrics_0 == pytest.approx(metrics, rel=0, abs=1e-6)
        for name, whole in gradient.items():
            torch.testing.assert_close(torch.cat([half_0[name], half_1[name]]), whole, rtol=1e-5, atol=1e-6)
    assert one[1][0]["gac/regime"] == Regime.PROJECTED


def trained(
    model_path: str, config: GAC | None, num_steps: int, load: Path | None, save: Path, ranks: RankGroup
) -> list[dict[str, float]]:
    """Metrics of steps on the same samples, whose gradients are aligned."""
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    stabilizer = config.start(backend.shards()) if config else None
    if load:
        backend.load(load, stabilizer)
    metrics = []
    for _ in range(num_steps):
        plan, payloads = planned(0, ranks.num_ranks, PLAIN)
        mine = plan[ranks.rank]
        metrics.append(backend.train_step(mine, data_of(payloads), PLAIN, distribution=SAMPLED, stabilizer=stabilizer))
    backend.save(save, stabilizer).wait()
    return metrics


def test_observing_changes_no_bit_of_training(model_path: str, tmp_path: Path) -> None:
    plain = trained(model_path, None, 3, None, tmp_path / "none", RankGroup())
    watched = trained(model_path, GAC(update_every=1), 3, None, tmp_path / "off", RankGroup())
    without, beside = everything_in(tmp_path / "none"), everything_in(tmp_path / "off")
    assert [name for name in without if not torch.equal(without[name], beside[name])] == []
    for a, b in zip(plain, watched, strict=True):
        assert {name: b[name] for name in a} == a
        assert undocumented_names(b) == []
        assert len(b) - len(a) == 8


@pytest.mark.parametrize("where", first_by_day(["update", "gradient"]))
def test_two_ranks_train_as_one_does(where: str, model_path: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    config = replace(ON, where=where)
    one = trained(model_path, config, 3, None, tmp_path / "one", RankGroup())
    two = two_ranks(trained, model_path, config, 3, None, tmp_path / "two")[0]
    assert [of_step["gac/regime"] for of_step in one] == [0, 1, 1]
    for a, b in zip(one, two, strict=True):
        gac = [name for name in a if name.startswith("gac/")]
        assert [b[name] for name in gac] == pytest.approx([a[name] for name in gac], rel=1e-3, abs=1e-4)


@pytest.mark.nightly
def test_resuming_on_any_number_of_ranks_continues_the_calibration(
    model_path: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    config = GAC(enabled=True, calibrate_steps=10)
    straight = trained(model_path, config, 12, None, tmp_path / "straight", RankGroup())
    trained(model_path, config, 6, None, tmp_path / "a", RankGroup())
    rest = trained(model_path, config, 6, tmp_path / "a", tmp_path / "resumed", RankGroup())
    assert rest == straight[6:]
    assert differing(everything_in(tmp_path / "straight"), everything_in(tmp_path / "resumed")) == []
    on_two = two_ranks(trained, model_path, config, 6, tmp_path / "a", tmp_path / "two")[0]
    for name in ("gac/c_low", "gac/c_high"):
        assert name not in on_two[3]
        assert on_two[4][name] == pytest.approx(straight[10][name], abs=1e-3)


def test_a_resumed_run_that_enables_gac_uses_the_saved_gradients(model_path: str, tmp_path: Path) -> None:
    trained(model_path, GAC(), 2, None, tmp_path / "off", RankGroup())
    (first,) = trained(model_path, ON, 1, tmp_path / "off", tmp_path / "on", RankGroup())
    assert first["gac/regime"] == Regime.PROJECTED


def updated_twice(model_path: str, config: GAC, num_steps: int, ranks: RankGroup) -> tuple[int, dict[str, float]]:
    backend, metrics = FsdpBackend(model_path, SETTINGS, ranks), {}
    stabilizer = config.start(backend.shards())
    for _ in range(num_steps):
        plan, payloads = planned(backend.step, ranks.num_ranks, PLAIN, 2)
        mine = plan[ranks.rank]
        metrics = backend.train_step(mine, data_of(payloads), PLAIN, distribution=SAMPLED, stabilizer=stabilizer)
    return stabilizer.synchronous_steps_left, metrics


def test_a_calibration_counts_steps_however_many_updates_they_have(model_path: str) -> None:
    config = GAC(calibrate_steps=10)
    left, metrics = updated_twice(model_path, config, 9, RankGroup())
    assert left == 1
    assert "gac/c_low" not in metrics
    left, metrics = updated_twice(model_path, config, 11, RankGroup())
    assert left == 0
    assert metrics["gac/c_low"] > 0


def test_calibrated_thresholds_survive_a_resume_unless_set_explicitly(model_path: str, tmp_path: Path) -> None:
    trained(model_path, GAC(calibrate_steps=10), 10, None, tmp_path / "ten", RankGroup())
    found = [
        trained(model_path, config, 1, tmp_path / "ten", tmp_path / "on", RankGroup())[0]
        for config in (
            GAC(calibrate_steps=10),
            GAC(calibrate_steps=40, max_skips=3, where="update"),
            GAC(c_low=0.5, c_high=0.6),
        )
    ]
    assert found[0]["gac/c_low"] == found[1]["gac/c_low"] != found[2]["gac/c_low"]
    assert (found[2]["gac/c_low"], found[2]["gac/c_high"]) == (0.5, 0.6)


def test_in_the_middle_of_a_calibration_its_length_cannot_change(model_path: str, tmp_path: Path) -> None:
    trained(model_path, GAC(calibrate_steps=20), 3, None, tmp_path / "three", RankGroup())
    message = r"stabilizer.calibrate_steps is 40, and .* over 20 steps, of which 3 are done: go on with 20, or with 0"
    with pytest.raises(CheckpointError, match=message):
        trained(model_path, GAC(calibrate_steps=40), 0, tmp_path / "three", tmp_path / "on", RankGroup())
    (given_up,) = trained(model_path, GAC(c_low=0.1), 1, tmp_path / "three", tmp_path / "off", RankGroup())
    assert given_up["gac/c_low"] == 0.1


def test_calibration_enabled_on_resume_makes_its_steps_synchronous(model_path: str, tmp_path: Path) -> None:
    trained(model_path, GAC(), 2, None, tmp_path / "off", RankGroup())
    backend = FsdpBackend(model_path, SETTINGS, RankGroup())
    stabilizer = GAC(calibrate_steps=10).start(backend.shards())
    backend.load(tmp_path / "off", stabilizer)
    assert stabilizer.synchronous_steps_left == 10
