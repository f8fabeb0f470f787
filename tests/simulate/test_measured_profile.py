"""A profile that is made of a run simulates that run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlsys.errors import ConfigError, DataError
from rlsys.monitoring.events import Event, GroupRolledOut
from rlsys.simulate.measured_profile import Steps, Turns, measured_profile, profile_of
from rlsys.simulate.profile import Profile
from rlsys.simulate.simulation import Report, Simulation
from rlsys.testing.fake_pools import now

KEYS = ["turns={mean: 1}", "environment_s=null", "observation_tokens=0", "decode.token_s=0", "prefill_tokens_per_s=1e8"]


@dataclass
class Recorder:
    """Events with their times on the virtual clock."""

    events: list[tuple[Event, float]] = field(default_factory=list)

    def handle(self, event: Event, time_s: float) -> None:
        self.events.append((event, now()))

    def close(self) -> None: ...


def run_of(profile: Profile) -> tuple[Report, list[tuple[Event, float]]]:
    recorder = Recorder()
    simulation = Simulation(profile, 24, [(0.0, lambda run: run.driver.events.attach(recorder))])
    return simulation.run(), recorder.events


@pytest.mark.parametrize(
    ("key", "tolerance"),
    [
        ("seed=1", 0.07),
        ("max_staleness=0", 0.05),
        ("train.tokens_per_s=400", 0.05),
        ("decode.overhead_s=0.03", 0.06),
        ("decode.sequence_s=0.002", 0.3),  # steps of very unequal length: groups tell only their mean
    ],
)
def test_a_profile_made_of_a_run_simulates_that_run(tmp_path: Path, key: str, tolerance: float):
    profile = Profile.load("local", [*KEYS, key])
    before, events = run_of(profile)
    lengths = [length for event, _ in events if isinstance(event, GroupRolledOut) for length in event.lengths]
    turns = Turns([32] * len(lengths), lengths, [1] * len(lengths))
    path = tmp_path / "mine.yaml"
    config = profile.config(tmp_path, 24)
    path.write_text(profile_of(config, events, turns, source="a run"))
    again = Profile.load(path)
    after, _ = run_of(again)
    assert after.tokens_per_s == pytest.approx(before.tokens_per_s, rel=tolerance)
    assert after.step_s == pytest.approx(before.step_s, rel=tolerance)
    assert again.weights.load_s == pytest.approx(profile.weights.load_s, rel=0.1)
    assert (again.num_replicas, again.groups_per_step, again.group_size) == (2, 8, 4)


def test_the_cost_of_a_step_is_the_line_through_what_replicas_did():
    points = [(n, 0.01 + 0.002 * n) for n in (1.0, 4.0, 9.0, 16.0)]
    assert Steps(points).line == pytest.approx((0.01, 0.002))
    assert Steps([(4.0, 0.02), (4.0, 0.02)]).line == (0.02, 0.0)
    assert Steps([(1.0, 0.05), (8.0, 0.01)]).line[1] == 0.0


def test_a_folder_that_is_no_run_or_recorded_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run directory"):
        measured_profile(tmp_path)
    (tmp_path / "config.resolved.yaml").write_text("{}")
    with pytest.raises(DataError, match=r"has no rollouts.*record\.rollouts_every"):
        measured_profile(tmp_path)
