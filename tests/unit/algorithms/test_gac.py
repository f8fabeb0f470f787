"""Gradient alignment control on plain tensors: the rule, its state, calibration, sharding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.gac import GAC, MAX_STEPS, Alignment, Regime
from rlsys.config.plugins import adapter
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.stabilizer import CHUNK, GradientDecision, alone

ON = GAC(enabled=True, c_low=0.05, c_high=0.7, update_every=1)
SKIPPING = GAC(enabled=True, c_low=0.05, c_high=0.3, max_skips=1, update_every=1)


def started(config: GAC, like: Mapping[str, Tensor]) -> Alignment:
    return config.start(like)


def steer_all(stabilizer: Alignment, gradients: dict[str, Tensor], staleness: float = 1.0) -> GradientDecision:
    """As the only update of a step."""
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    steered = stabilizer.steer(gradients, squares, alone, staleness)
    stabilizer.end_step()
    return steered


def steer(stabilizer: Alignment, *values: float, staleness: float = 1.0) -> tuple[list[float], GradientDecision]:
    """What becomes of a gradient of one parameter, `w`."""
    gradients = {"w": torch.tensor(values)}
    steered = steer_all(stabilizer, gradients, staleness)
    return gradients["w"].tolist(), steered


def regimes(stabilizer: Alignment, gradients: Iterable[tuple[float, ...]]) -> list[Regime]:
    return [Regime(int(steer(stabilizer, *g)[1].metrics["gac/regime"])) for g in gradients]


class Moves:
    """`Updates` of a given direction in one piece, which is `w`; remembers what was added."""

    name = "w"

    def __init__(self, now: Tensor, before: Tensor) -> None:
        self._now, self._before, self.taken = now, before, now.clone()

    def pieces(self) -> Iterable[Moves]:
        return [self]

    def before(self) -> Tensor:
        return self._before

    def now(self) -> Tensor:
        return self._now

    def add(self, direction: Tensor, scale: float) -> None:
        self.taken += scale * direction


# ------------------------------------------------------------------------------------------------------------- the rule


def test_projection_shortens_the_parallel_part_to_c_low() -> None:
    """(3, 4) after (2, 0): the cosine is .6, 3 lies along, and .05 of the length 5 is left of it."""
    stabilizer = started(ON, {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0)
    gradient, steered = steer(stabilizer, 3.0, 4.0)
    assert gradient == pytest.approx([0.25, 4.0])
    assert not steered.is_skipped
    assert steered.metrics == pytest.approx(
        {
            "gac/cosine": 0.6,
            "gac/parallel_share": 0.6,
            "gac/cosine_after": 0.25 / sqrt(0.25**2 + 4**2),
            "gac/regime": 1.0,
            "gac/skips_in_a_row": 0.0,
            "gac/c_low": 0.05,
            "gac/c_high": 0.7,
        }
    )


def test_a_gradient_against_the_one_before_is_left_alone() -> None:
    """It corrects an overshoot."""
    stabilizer = started(ON, {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0)
    gradient, steered = steer(stabilizer, -3.0, 4.0)
    assert gradient == [-3.0, 4.0] and steered.metrics["gac/regime"] == Regime.SAFE
    assert steered.metrics["gac/cosine"] == steered.metrics["gac/cosine_after"] == pytest.approx(-0.6)


@pytest.mark.parametrize("config", [ON, SKIPPING, replace(ON, where="update")])
def test_gradients_of_fresh_samples_are_left_alone(config: GAC) -> None:
    stabilizer = started(config, {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0, staleness=0.0)
    gradient, steered = steer(stabilizer, 3.0, 4.0, staleness=0.0)
    assert gradient == [3.0, 4.0] and not steered.is_skipped
    assert steered.metrics["gac/cosine"] == pytest.approx(0.6)
    _, steered = steer(stabilizer, 3.0, 4.0, staleness=0.25)
    assert steered.metrics["gac/regime"] > 0


def test_a_safe_gradient_stays_bit_for_bit_the_same() -> None:
    stabilizer = started(ON, {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0)
    gradient, steered = steer(stabilizer, 0.1, 2.1)
    assert gradient == torch.tensor([0.1, 2.1]).tolist()
    assert steered.metrics["gac/regime"] == Regime.SAFE


def test_cosines_beyond_c_high_skip_the_update() -> None:
    stabilizer = started(SKIPPING, {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0)
    gradient, steered = steer(stabilizer, 3.0, 4.0)
    assert steered.is_skipped
    assert gradient == [3.0, 4.0]
    assert steered.metrics["gac/skips_in_a_row"] == 1


@pytest.mark.parametrize(("max_skips", "expected"), [(0, "111111"), (1, "212121"), (2, "221221"), (99, "222222")])
def test_max_skips_in_a_row_are_followed_by_a_projection(max_skips: int, expected: str) -> None:
    stabilizer = started(replace(SKIPPING, max_skips=max_skips), {"w": torch.zeros(2)})
    found = regimes(stabilizer, [(1.0, 0.0)] * 7)
    assert "".join(str(int(regime)) for regime in found) == f"0{expected}"


def test_a_safe_gradient_ends_a_row_of_skips() -> None:
    stabilizer = started(SKIPPING, {"w": torch.zeros(2)})
    found = regimes(stabilizer, [(1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, 1.0)])
    assert found == [Regime.SAFE, Regime.SKIPPED, Regime.SAFE, Regime.SKIPPED]


def test_the_next_gradient_is_compared_with_the_raw_one() -> None:
    """Were the projected one stored, the cosine of the third would be near 1 and not .6."""
    stabilizer = started(replace(ON, c_high=1.0), {"w": torch.zeros(2)})
    steer(stabilizer, 1.0, 0.0)
    steer(stabilizer, 3.0, 4.0)
    assert stabilizer.state_dict()["w"].tolist() == pytest.approx([3.0, 4.0])
    _, steered = steer(stabilizer, 1.0, 0.0)
    assert steered.metrics["gac/cosine"] == pytest.approx(0.6)


def test_a_skipped_gradient_is_stored_as_well() -> None:
    stabilizer = started(SKIPPING, {"w": torch.zeros(2)})
    steer(stabilizer, 1.0, 0.0)
    steer(stabilizer, 3.0, 4.0)
    assert stabilizer.state_dict()["w"].tolist() == [3.0, 4.0]


def test_identical_gradients_with_nothing_safe_are_projected_to_nothing() -> None:
    stabilizer = started(GAC(enabled=True, c_low=0.0, c_high=1.0), {"w": torch.zeros(2)})
    steer(stabilizer, 3.0, 4.0)
    gradient, steered = steer(stabilizer, 3.0, 4.0)
    assert gradient == pytest.approx([0.0, 0.0], abs=1e-6)
    assert steered.metrics["gac/cosine_after"] == 0


def test_a_vanishing_gradient_has_no_direction() -> None:
    stabilizer = started(GAC(enabled=True, c_low=0.0, c_high=1.0), {"w": torch.zeros(2)})
    steer(stabilizer, 0.0, 1e-44)
    gradient, steered = steer(stabilizer, 0.0, 1.0)
    assert (gradient, steered.metrics["gac/cosine"]) == ([0.0, 1.0], 0)


vectors = st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4).map(torch.tensor)
zero_or_sized = vectors.filter(lambda vector: not 0 < vector.double().norm() < 1e-6)
"""Below that the direction computed here is clamped, and is no reference."""


@example(torch.tensor([0.0, 0.0, 0.0, 8.4e-45]), torch.tensor([0.0, 0.0, 0.0, 1.0]), 0.0, 1.0)
@given(zero_or_sized, vectors, st.floats(0.0, 0.9), st.sampled_from([1e-6, 1.0, 1e6]))
def test_projection_keeps_the_orthogonal_part_at_any_scale(
    before: Tensor, now: Tensor, c_low: float, scale: float
) -> None:
    stabilizer = started(GAC(enabled=True, c_low=c_low, c_high=1.0), {"w": before})
    steer_all(stabilizer, {"w": before * scale})
    gradient = now.clone()
    metrics = steer_all(stabilizer, {"w": gradient}).metrics
    length, unit = now.double().norm(), before.double() / before.double().norm().clamp(min=1e-9)
    along, along_before = gradient.double() @ unit, now.double() @ unit
    atol = 1e-5 * float(length) + 1e-6
    torch.testing.assert_close(gradient.double() - along * unit, now.double() - along_before * unit, rtol=0, atol=atol)
    assert min(along_before, 0) - atol <= along <= max(c_low * length, 0) + atol
    assert abs(metrics["gac/cosine_after"]) <= abs(metrics["gac/cosine"]) + 1e-9


@given(st.lists(vectors, min_size=1, max_size=6))
def test_off_it_changes_nothing_and_measures_the_same(gradients: list[Tensor]) -> None:
    off, on = (started(replace(SKIPPING, enabled=is_on), {"w": torch.zeros(4)}) for is_on in (False, True))
    for gradient in gradients:
        seen = gradient.clone()
        watched = steer_all(off, {"w": seen})
        steered = steer_all(on, {"w": gradient.clone()})
        assert torch.equal(seen, gradient)
        assert not watched.is_skipped
        assert watched.metrics["gac/cosine"] == pytest.approx(steered.metrics["gac/cosine"], abs=1e-5)
        assert watched.metrics["gac/cosine_after"] == watched.metrics["gac/cosine"]
        assert watched.metrics["gac/skips_in_a_row"] == 0


def test_every_metric_is_documented() -> None:
    stabilizer = started(ON, {"w": torch.zeros(2)})
    names = {*steer(stabilizer, 1.0, 0.0)[1].metrics, *stabilizer.correct(Moves(torch.zeros(1), torch.zeros(1)), alone)}
    assert len(names) == 8
    assert undocumented_names(names) == []


# ------------------------------------------------------------------------------------------------- what can be missing


def test_the_first_gradient_has_no_cosine_and_is_safe() -> None:
    gradient, steered = steer(started(SKIPPING, {"w": torch.zeros(2)}), 3.0, 4.0)
    assert gradient == [3.0, 4.0]
    assert (steered.metrics["gac/cosine"], steered.metrics["gac/regime"]) == (0.0, Regime.SAFE)


def test_a_zero_gradient_and_its_successor_are_safe() -> None:
    stabilizer = started(SKIPPING, {"w": torch.zeros(2)})
    found = regimes(stabilizer, [(1.0, 0.0), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0)])
    assert found == [Regime.SAFE, Regime.SAFE, Regime.SAFE, Regime.SKIPPED]


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    """An expert that no token was routed to."""
    stabilizer = started(replace(ON, enabled=False), {"a": torch.zeros(1), "expert": torch.zeros(1)})

    def cosine(**gradients: float) -> float:
        tensors = {name: torch.tensor([value]) for name, value in gradients.items()}
        return steer_all(stabilizer, tensors).metrics["gac/cosine"]

    cosine(a=3.0, expert=4.0)
    assert cosine(a=1.0) == pytest.approx(0.6)
    assert stabilizer.state_dict()["expert"].tolist() == [0.0]
    assert cosine(a=1.0, expert=1.0) == pytest.approx(sqrt(0.5))
    assert cosine() == 0.0
    assert cosine(a=1.0) == 0.0


def test_an_empty_shard_is_no_obstacle() -> None:
    """A parameter of fewer rows than ranks leaves the last rank nothing."""
    stabilizer = started(ON, {"w": torch.zeros(0), "v": torch.zeros(1)})
    first, second = (steer_all(stabilizer, {"w": torch.zeros(0), "v": torch.ones(1)}) for _ in range(2))
    assert (first.metrics["gac/cosine"], second.metrics["gac/cosine"]) == (0.0, 1.0)


# ------------------------------------------------------------------------------------------------------ the update


def test_update_projection_shortens_the_shared_part_by_the_same_factor() -> None:
    """The gradients' cosine is .6, so .05 / .6 is left of what the update shares with the one before."""
    stabilizer = started(replace(ON, where="update"), {"w": torch.zeros(2)})
    steer(stabilizer, 2.0, 0.0)
    moves = Moves(torch.tensor([5.0, 7.0]), torch.tensor([0.0, 3.0]))
    stabilizer.correct(moves, alone)
    assert moves.taken.tolist() == [5.0, 7.0]
    gradient, steered = steer(stabilizer, 3.0, 4.0)
    assert gradient == [3.0, 4.0]
    assert steered.metrics["gac/regime"] == Regime.PROJECTED
    assert steered.metrics["gac/cosine_after"] == steered.metrics["gac/cosine"]
    metrics = stabilizer.correct(moves, alone)
    assert moves.taken.tolist() == pytest.approx([5.0, 7.0 * 0.05 / 0.6])
    assert metrics["gac/update_cosine"] == pytest.approx(7 / sqrt(5**2 + 7**2))


@pytest.mark.parametrize("config", [ON, replace(ON, where="update", enabled=False), replace(SKIPPING, where="update")])
def test_otherwise_the_update_is_only_measured(config: GAC) -> None:
    """Projected already; off; or the first."""
    stabilizer = started(config, {"w": torch.zeros(2)})
    if config is not SKIPPING and config.c_high == ON.c_high:
        steer(stabilizer, 2.0, 0.0)
    steer(stabilizer, 3.0, 4.0)
    moves = Moves(torch.tensor([5.0, 7.0]), torch.zeros(2))
    assert stabilizer.correct(moves, alone) == {"gac/update_cosine": 0.0}
    moves = Moves(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    assert stabilizer.correct(moves, alone) == {"gac/update_cosine": pytest.approx(1.0)}
    assert moves.taken.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("where", "expected"), [("gradient", [0, 3, 6]), ("update", [0, 1, 2, 3, 4, 5, 6, 7])])
def test_the_update_is_measured_periodically_and_where_projected(where: str, expected: list[int]) -> None:
    stabilizer = started(replace(ON, c_high=1.0, update_every=3, where=where), {"w": torch.zeros(1)})
    moves = Moves(torch.ones(1), torch.ones(1))
    measured = []
    for step in range(8):
        steer(stabilizer, 1.0)
        if stabilizer.correct(moves, alone):
            measured.append(step)
    assert measured == expected


# ------------------------------------------------------------------------------------------------------- calibration


def turns(angle_of: Callable[[int], float], num: int) -> Iterable[tuple[float, float]]:
    """Unit gradients, each turned from the one before by so many radians."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for i in range(num):
        total = total + angle_of(i)
        yield float(total.cos()), float(total.sin())


def test_thresholds_are_those_of_the_synchronous_stretch() -> None:
    config = GAC(enabled=True, calibrate_steps=21)
    assert config.synchronous_steps == 21
    stabilizer = started(config, {"w": torch.zeros(2)})
    cosines = [0.0, *(0.01 * i for i in range(20))]  # the first has none; the others are .00 to .19
    for cosine, gradient in zip(cosines, turns(lambda i: float(torch.tensor(cosines[i]).acos()), 21), strict=True):
        left, steered = steer(stabilizer, *gradient)
        assert left == torch.tensor(gradient).tolist()
        assert steered.metrics["gac/regime"] == Regime.SAFE
        assert "gac/c_low" not in steered.metrics
        assert steered.metrics["gac/cosine"] == pytest.approx(cosine, abs=1e-6)
    _, steered = steer(stabilizer, 1.0, 0.0)
    c_low = 0.1805  # the 95th percentile of .00, .01, ..., .19
    assert steered.metrics["gac/c_low"] == pytest.approx(c_low, abs=1e-6)
    assert steered.metrics["gac/c_high"] == pytest.approx(sqrt(c_low), abs=1e-6)


def test_no_step_of_the_synchronous_stretch_would_have_been_skipped() -> None:
    stabilizer = started(GAC(calibrate_steps=30, max_skips=1), {"w": torch.zeros(2)})
    for gradient in turns(lambda i: 0.1 if i == 7 else torch.pi / 2, 30):
        steer(stabilizer, *gradient)
    _, steered = steer(stabilizer, 1.0, 0.0)
    assert steered.metrics["gac/c_high"] == pytest.approx(float(torch.tensor(0.1).cos()))


# --------------------------------------------------------------------------------------------------- state and shards


def test_going_on_from_saved_state_equals_never_having_stopped() -> None:
    config = GAC(enabled=True, calibrate_steps=10, max_skips=2)
    shapes = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}
    chance = torch.Generator().manual_seed(0)

    def gradients() -> dict[str, Tensor]:
        return {name: 1 + torch.randn(shape.shape, generator=chance) for name, shape in shapes.items()}

    steps = [gradients() for _ in range(24)]

    def outcomes(stabilizer: Alignment, some: Iterable[dict[str, Tensor]]) -> list[tuple[GradientDecision, Tensor]]:
        copies = [{name: g.clone() for name, g in step.items()} for step in some]
        return [(steer_all(stabilizer, step), torch.cat([g.flatten() for g in step.values()])) for step in copies]

    whole = outcomes(started(config, shapes), steps)
    assert {int(steered.metrics["gac/regime"]) for steered, _ in whole} == {0, 1, 2}
    for cut in (0, 1, 5, 10, 13, 14, 15, 20):
        first, second = started(config, shapes), started(config, shapes)
        outcomes(first, steps[:cut])
        second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
        for (a, x), (b, y) in zip(outcomes(second, steps[cut:]), whole[cut:], strict=True):
            assert a == b
            assert torch.equal(x, y)


def test_state_is_one_gradient_copy_in_the_same_live_tensors() -> None:
    shapes = {"a": torch.zeros(300, 20, dtype=torch.bfloat16), "b": torch.zeros(50)}
    stabilizer = started(GAC(enabled=True, c_low=0.0, c_high=1.0, calibrate_steps=10), shapes)
    before = stabilizer.state_dict()
    for _ in range(12):
        steer_all(stabilizer, {name: torch.randn(shape.shape) for name, shape in shapes.items()})
    after = stabilizer.state_dict()
    assert {n: (t.shape, t.data_ptr()) for n, t in before.items()} == {
        n: (t.shape, t.data_ptr()) for n, t in after.items()
    }
    assert {n: t.shape for n, t in after.items() if n in shapes} == {n: t.shape for n, t in shapes.items()}
    assert {t.dtype for n, t in after.items() if n in shapes} == {torch.float32}
    assert sum(t.nbytes for t in after.values()) <= 4 * (300 * 20 + 50) + 8 * MAX_STEPS + 200


def large_gradients(step: int) -> dict[str, Tensor]:
    """Two parameters of more than one chunk each; consecutive ones share a direction."""
    chance = torch.Generator().manual_seed(step)
    return {
        "a": 0.3 + torch.randn(CHUNK + 1000, generator=chance),
        "b": 0.3 + torch.randn(700, 300, generator=chance),
    }


def test_the_cosine_is_that_of_double_precision() -> None:
    first, second = large_gradients(0), large_gradients(1)
    stabilizer = started(GAC(), first)
    steer_all(stabilizer, {n: g.clone() for n, g in first.items()})
    found = steer_all(stabilizer, second).metrics["gac/cosine"]
    x, y = (torch.cat([g.double().flatten() for g in step.values()]) for step in (first, second))
    assert found == pytest.approx(float(x @ y / (x.norm() * y.norm())), abs=1e-7)


# ------------------------------------------------------------------------------------------------------------- config


def test_wrong_fields_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match="4 validation errors") as refusal:
        GAC(c_low=0.5, c_high=0.1, max_skips=-1, calibrate_steps=3, where="nowhere")  # type: ignore[arg-type]
    for key in ("c_high", "max_skips", "calibrate_steps", "where"):
        assert key in str(refusal.value)
    with pytest.raises(ValueError, match="c_lowest"):
        adapter(GAC).validate_python({"c_lowest": 0.1})


def test_reading_its_configuration_needs_no_torch() -> None:
    code = "import sys, algorithms.gac; algorithms.gac.GAC(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
