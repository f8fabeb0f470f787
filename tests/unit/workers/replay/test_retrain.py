"""`rlsys replay RUN --step N` retrains a recorded step, and compares bit for bit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from algorithms.grpo import GRPO
from rlsys import launch
from rlsys.algorithm import Column, StepAdvantages, TrajectoryAdvantage
from rlsys.batch.packing import BatchPlan, RankPlan
from rlsys.batch.tensors import StepData
from rlsys.cli import app
from rlsys.config import Config
from rlsys.errors import ConfigError, DataError
from rlsys.launch.run_folder import write_run_dir
from rlsys.loop.build_driver import shape_of
from rlsys.loop.checkpoint_files import GROUPS, STATE, hash_files, write_manifest
from rlsys.monitoring.events import Events, RunStarted, StepDone, WeightsPublished
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.replay.rollout_json import RolloutRecord, Rows
from rlsys.replay.rollout_parquet import read_records, write_records
from rlsys.replay.run_history import RecordedSteps, read_history
from rlsys.types import Distribution, Episode, Group, Task
from rlsys.util.files import CONFIG
from tests.models import random_group, save_model, tiny_qwen3
from tests.rollouts import lines_of, write_lines
from tests.training import group_of, random_team
from workers.replay.step_replay import models_on_gpu, retrain
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import critic_optimizer_settings, optimizer_settings
from workers.train.rank_group import RankGroup
from workers.train.reference_worker import ReferenceWorker
from workers.train.value_model import CriticBackend
from workers.transport.checksums import hash_of

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class PerSample(GRPO):
    """Gives each sample an advantage of its own; numbers of numpy, as a user's algorithm may."""

    def finalize_advantages(self, groups: Sequence[Group], past: Mapping[str, float]) -> StepAdvantages:
        whole = super().finalize_advantages(groups, past)
        split = (tuple(self._split(*pair)) for pair in zip(groups, whole.groups, strict=True))
        return StepAdvantages(tuple(split), whole.metrics)

    def _split(self, group: Group, assigned: Sequence[TrajectoryAdvantage]) -> Iterator[TrajectoryAdvantage]:
        for a in assigned:
            for s in range(len(group.episodes[a.episode].trajectories[a.trajectory].samples)):
                share = np.float64(a.advantage) / (s + 3)
                yield TrajectoryAdvantage(a.episode, a.trajectory, share, sample=s)


class Run:
    """A run of one rank, whose groups are random; written as a driver and its workers do."""

    def __init__(self, folder: Path, overrides: Sequence[str] = (), num_steps: int = STEPS) -> None:
        self.model, self.folder = save_model(folder / "model", tiny_qwen3()), folder / "run"
        keys = [f"run.folder={folder}", f"model.path={self.model}", "data.path=d", "algorithm.group_size=3"]
        self.keys = [
            "run.steps=3",
            *keys,
            "train.lr=1e-2",
            "train.micro_batch_tokens=64",
            "data.max_prompt_tokens=32",
            "rollout.max_new_tokens=32",
            *overrides,
        ]
        self.events = Events([JsonlSink(self.folder)])
        self.rng = random.Random(0)
        self.begin()
        self.publish()
        for _ in range(num_steps):
            self.train()

    def begin(self, *overrides: str, start: int = 0) -> None:
        """A session, from the checkpoint of `start` if it is not the first."""
        self.config = config = Config.load([], [*self.keys, *overrides])
        write_run_dir(config, start)
        model, dtype, columns = self.model, config.dtype, config.algorithm.columns
        self.backend = FsdpBackend(model, optimizer_settings(config), RankGroup(), dtype=dtype)
        self.critic = self.reference = None
        if Column.VALUES in columns:
            self.critic = CriticBackend(model, critic_optimizer_settings(config), RankGroup(), dtype=dtype)
        if Column.REFERENCE_LOGPROBS in columns:
            self.reference = ReferenceWorker(model, dtype, Distribution(), 64, torch.device("cpu"))
        if start:
            self.backend.load(self.checkpoint(start) / "actor")
        self.events.emit(RunStarted(str(self.folder), start, STEPS))

    def publish(self) -> None:
        found = hash_of(self.backend.full_weights(getattr(torch, self.config.dtype)))
        self.events.emit(WeightsPublished(self.backend.step, found, 1, 1, 0.0, 0.0))

    def train(self) -> None:
        step = self.backend.step + 1
        payloads = [make(self.rng, 3) for make in (random_group, random_group, random_team)]
        groups = [group_of(10 * step + i, payload) for i, payload in enumerate(payloads)]
        assigned, algorithm = self.config.algorithm.finalize_advantages(groups, {}).groups, self.config.algorithm
        plan = shape_of(self.config).plan(groups, assigned, algorithm, self.backend.step)[0]
        rows = [self.rows(payload) for payload in payloads]
        data = StepData(payloads, [{Column(name): column for name, column in of_group.items()} for of_group in rows])
        data = data.with_columns(self.columns(plan, data))
        metrics = self.backend.train_step(plan, data, algorithm, distribution=Distribution(1.0))
        if self.critic is not None:
            metrics |= self.critic.train_step(plan, data, algorithm)
        self.publish()
        self.events.emit(StepDone(step, {**metrics, "reward/mean": 0.5}, tuple(group.group_id for group in groups)))
        tasks = [Task(id=group.task_id, prompt="p") for group in groups]
        known = zip(tasks, groups, payloads, assigned, strict=True)
        records = [RolloutRecord.of(step, *of_group) for of_group in known]
        write_records(self.rollouts(step), [replace(r, columns=c) for r, c in zip(records, rows, strict=True)])

    def rows(self, payload: tuple[Episode, ...]) -> dict[str, Rows]:
        """What the reference says of a group."""
        if self.reference is None:
            return {}
        return {str(Column.REFERENCE_LOGPROBS): tuple(self.reference.logprobs(payload))}

    def columns(self, plan: RankPlan, data: StepData) -> dict[Column, StepColumn]:
        """What is made of a whole step."""
        columns = {}
        if self.reference is not None and Column.REFERENCE_MISMATCHED in self.config.algorithm.columns:
            kind = Column.REFERENCE_MISMATCHED
            columns[kind] = self.reference.column_of_rank(plan, data, kind)
        if self.critic is not None:
            columns[Column.VALUES] = self.critic.values(plan, data)
        return columns

    def save(self) -> None:
        folder = self.checkpoint(self.backend.step)
        self.backend.save(folder / "actor").wait()
        for name in (GROUPS, STATE):
            (folder / name).touch()
        write_manifest(folder, hash_files(folder))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def rollouts(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step_{step:06d}.parquet"

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))


@pytest.fixture(params=[1, 2])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """With one update per step, and with two."""
    return Run(tmp_path, [f"train.updates_per_step={request.param}"])


@pytest.fixture
def plain(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_step_replays_bit_for_bit_from_the_initial_model(run: Run) -> None:
    found = launch.replay_step(run.folder, STEPS)
    assert found.is_equal and found.first is None
    assert [each.what for each in found.weights] == [f"weights of version {v}" for v in range(STEPS + 1)]
    assert len({each.found for each in found.weights}) == STEPS + 1
    assert {"loss", "optim/grad_norm", "policy/entropy"} <= {each.what for each in found.metrics}
    assert "reward/mean" not in {each.what for each in found.metrics}, "no rank reports it"


KTO = ["algorithm.type=kto", "algorithm.desirable_above=-1"]
PER_SAMPLE = ["algorithm.type=tests.unit.workers.replay.test_retrain:PerSample"]
BF16 = ["model.dtype=bfloat16", "algorithm.kl_coef=0.1"]
WARM_UP = ["algorithm.type=ppo", "algorithm.critic_warmup=1"]


@pytest.mark.parametrize("keys", [KTO, PER_SAMPLE, BF16, WARM_UP], ids=["pairs", "samples", "bf16", "warm-up"])
def test_it_is_bit_for_bit(tmp_path: Path, keys: list[str]) -> None:
    run = Run(tmp_path, keys, num_steps=2)
    found = launch.replay_step(run.folder, 2)
    assert found.is_equal, found.first
    hashes = [each.found for each in found.weights]
    assert (hashes[0] == hashes[1]) == (keys is WARM_UP), "where the critic warms up, the policy stays as it was"
    assert hashes[1] != hashes[2]
    metrics = {each.what: each.found for each in found.metrics}
    assert ("kto/z0" in metrics, "critic/loss" in metrics) == (keys is KTO, keys is WARM_UP)
    if keys is KTO:
        assert metrics["kto/z0"] != 0, "all is wanted, and becomes likelier after other prompts too"


def test_a_resumed_step_replays_with_the_configuration_of_its_session(plain: Run) -> None:
    plain.save()
    plain.begin("train.lr=1e-3", "train.clip_norm=0.5", start=STEPS)
    plain.train()
    for step, beginning in ((STEPS, "the initial model"), (STEPS + 1, "checkpoints/step_000003")):
        found = launch.replay_step(plain.folder, step)
        assert (found.is_equal, found.beginning, found.changed) == (True, beginning, ()), found.first
    shutil.rmtree(plain.checkpoint(STEPS))
    found = launch.replay_step(plain.folder, STEPS + 1)
    assert (found.is_equal, set(found.changed)) == (False, {"train.lr", "train.clip_norm"})
    assert any("other values of train." in line for line in found.lines())


def test_models_are_where_the_sections_of_the_run_have_them() -> None:
    def models(*keys: str) -> set[str]:
        needed = ["run.steps=1", "model.path=m", "data.path=d"]
        return set(models_on_gpu(Config.load([], [*needed, *keys])))

    everywhere = ["resources.actor.gpus=1", "resources.critic.gpus=0.5", "resources.reference.gpus=1"]
    assert models(*everywhere) == {"policy"}, "there are no others"
    assert models(*everywhere, "algorithm.type=ppo") == {"policy", "critic"}
    assert models(*everywhere[1:], "algorithm.type=ppo") == {"critic"}
    assert models(*everywhere, "algorithm.type=kto") == {"policy", "reference"}
    assert models(*everywhere[:2], "algorithm.type=kto") == {"policy"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens on a machine without a GPU")
def test_models_that_lack_the_gpu_they_had_are_named(plain: Run) -> None:
    config = Config.load(plain.folder / CONFIG, ["resources.actor.gpus=1"])
    found = retrain(config, shape_of(config), RecordedSteps.of(plain.folder, 1))
    assert (found.is_equal, found.device) == (True, "computed on a CPU, where the run had a GPU: policy")
    assert found.device in found.lines()


def test_a_step_begins_from_the_newest_checkpoint_before_it(plain: Run) -> None:
    plain.save()
    plain.train()
    plain.rollouts(1).unlink()
    found = launch.replay_step(plain.folder, STEPS + 1)
    assert (found.is_equal, found.beginning, len(found.weights)) == (True, "checkpoints/step_000003", 2)
    done = CliRunner().invoke(app, ["replay", str(plain.folder), "--step", str(STEPS + 1)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "equal bit for bit"


def test_one_changed_logprob_is_noticed_in_its_training_step(run: Run) -> None:
    lines = lines_of(run.rollouts(2))
    lines[0]["episodes"][0]["trajectories"][0]["turns"][0]["logprobs"][0] *= 1.001
    write_lines(run.rollouts(2), lines)
    done = CliRunner().invoke(app, ["replay", str(run.folder), "--step", str(STEPS), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [each["told"] == each["found"] for each in found["weights"]] == [True, True, False, False]
    assert found["first"]["what"] == "weights of version 2"
    assert (found["is_equal"], found["first"]["told"]) == (False, read_history(run.folder).hashes[2])


def test_a_metric_that_is_another_is_shown_with_both_values(plain: Run) -> None:
    loss = read_history(plain.folder).ends[2].metrics["loss"]
    plain.edit("events.jsonl", f'"loss":{loss}', '"loss":0.125')
    found = launch.replay_step(plain.folder, 2)
    assert found.first is not None and (found.first.what, found.first.told, found.first.found) == ("loss", 0.125, loss)
    assert f"first difference: loss: the run had 0.125, this time it is {loss}" in list(found.lines())


def test_weights_that_never_arrived_are_reported_as_unknown(plain: Run) -> None:
    plain.edit("events.jsonl", f'"version":{STEPS}', '"version":99')
    found = launch.replay_step(plain.folder, STEPS)
    assert found.is_equal and found.weights[-1].told is None
    assert any("is not recorded: the run ended before it arrived" in line for line in found.lines())


def test_what_is_missing_is_named_with_the_remedy(plain: Run) -> None:
    plain.rollouts(1).unlink()
    with pytest.raises(DataError, match=r"step_000001\.parquet is not there, and to train step 2 again from the init"):
        RecordedSteps.of(plain.folder, 2)
    with pytest.raises(DataError, match=r"record\.rollouts_every=1.*checkpoint\.every"):
        RecordedSteps.of(plain.folder, 2)
    with pytest.raises(DataError, match=r"took no step 9: its last is 3; steps count from 1"):
        launch.replay_step(plain.folder, 9)
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.resolved\.yaml"):
        launch.replay_step(plain.folder / "rollouts", 1)


def test_rollouts_of_another_session_are_refused(plain: Run) -> None:
    first, *others = lines_of(plain.rollouts(2))
    write_lines(plain.rollouts(2), [first | {"group_id": 7}, *others])
    with pytest.raises(
        DataError, match=r"contains groups 7, 21, 22, and step 2 trained 20, 21, 22: the file is of another"
    ):
        RecordedSteps.of(plain.folder, 2).rollouts(2)


def test_a_resumed_run_forgets_what_it_takes_again(tmp_path: Path) -> None:
    events = Events([JsonlSink(tmp_path)])

    def takes(*steps: int, session: str) -> None:
        for step in steps:
            events.emit(WeightsPublished(step, f"{session}{step}", 1, 1, 0.0, 0.0))
            events.emit(StepDone(step, {"loss": 0.5}, (step,)))

    takes(1, 2, 3, 4, session="first")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind":"weights_published","time_s":1.0,"vers\n')  # killed while it wrote
    events.emit(RunStarted(str(tmp_path), 2, 9))
    takes(3, session="second")
    history = read_history(tmp_path)
    assert history.hashes == {1: "first1", 2: "first2", 3: "second3"}
    assert sorted(history.ends) == [1, 2, 3]


def test_a_folder_without_events_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cannot read .*events\.jsonl, which contains the hashes of weights: No such file"
    ):
        RecordedSteps.of(tmp_path, 1)


def test_it_stops_right_before_the_step_with_what_it_trains(plain: Run) -> None:
    stops: list[tuple[object, ...]] = []

    def stop(step: int, plan: BatchPlan, groups: Sequence[RolloutRecord], backend: FsdpBackend) -> None:
        stops.append((step, plan[0].num_tokens, [group.key.group_id for group in groups], backend.step))

    found = retrain(plain.config, shape_of(plain.config), RecordedSteps.of(plain.folder, 2), stop)
    num_tokens = sum(record.group.num_trained for record in read_records(plain.rollouts(2)))
    assert found.is_equal
    assert stops == [(2, num_tokens, [20, 21, 22], 1)]


def test_the_debugger_requires_one_rank_and_a_step(plain: Run) -> None:
    plain.edit(CONFIG, "shard: 1", "shard: 2")
    with pytest.raises(ConfigError, match=r"was trained on 2 ranks, and a debugger sees one process"):
        launch.replay_step(plain.folder, 1, debug=True)
    done = CliRunner().invoke(app, ["replay", str(plain.folder), "--debug"])
    assert (done.exit_code, "--debug needs --step" in done.output) == (2, True)
