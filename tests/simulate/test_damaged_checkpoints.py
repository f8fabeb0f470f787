"""Contents of checkpoints, which the ranks compare: a damaged one is passed over at a resume and at a roll-back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.errors import CheckpointError
from rlsys.monitoring.events import CheckpointPassedOver, CheckpointSaved, RolledBack
from rlsys.testing import EventRecorder, FakeRun, FakeWorld, run_virtual
from rlsys.testing.fake_run import go_on
from tests.simulate.test_rollback import ALL, Hearing
from tests.simulate.world import driver_on


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def saved_run(folder: Path) -> Path:
    """Train three steps, each with a checkpoint; return the folder of the checkpoints."""
    assert FakeRun(folder, checkpoint={"every": 1}).train() == 3
    return folder / "checkpoints"


@pytest.mark.parametrize("name", ["actor/weights.json", "driver.json"])
def test_a_flipped_bit_passes_the_checkpoint_over(tmp_path, name):
    flip(path := saved_run(tmp_path / "run") / "step_000003" / name)
    run = FakeRun(tmp_path / "run", run={"steps": 5})
    assert run.train() == 5
    (passed,) = run.recorder.of(CheckpointPassedOver)
    assert passed.problem == f"{path} has other contents than were saved"
    assert len(run.metrics) == 3, "it goes on from step 2"


def test_a_run_with_damaged_checkpoints_alone_never_restarts(tmp_path):
    folder = saved_run(tmp_path / "run")
    for step in (1, 2, 3):
        flip(folder / f"step_{step:06d}" / "actor" / "weights.json")
    with pytest.raises(CheckpointError) as raised:
        FakeRun(tmp_path / "run", run={"steps": 5}).train()
    assert str(raised.value).count("weights.json has other contents") == 3
    assert "restore these files" in str(raised.value)


def test_a_roll_back_passes_a_damaged_checkpoint_over(tmp_path):
    world, recorder = FakeWorld(training_deaths={"actor-0 train_step": {5}}), EventRecorder()
    driver = driver_on(world, tmp_path, recorder=recorder, algorithm=ALL, checkpoint_every=2)
    newest = tmp_path / "checkpoints" / "step_000004"
    driver.events.attach(
        Hearing(CheckpointSaved, lambda event: flip(newest / "actor" / "weights.json") if event.step == 4 else None)
    )
    run_virtual(go_on(driver))
    (passed,), (back,) = recorder.of(CheckpointPassedOver), recorder.of(RolledBack)
    assert passed.problem == f"{newest / 'actor' / 'weights.json'} has other contents than were saved"
    assert back.restored == 2
