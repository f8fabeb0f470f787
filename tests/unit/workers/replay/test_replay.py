"""`rlsys replay` recomputes a failed step sample by sample, and names the first bad number."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from typer.testing import CliRunner

from rlsys import launch
from rlsys.algorithm import Column, TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import samples_in
from rlsys.batch.tensors import StepData
from rlsys.cli import app
from rlsys.config import Config
from rlsys.errors import ConfigError, DataError
from rlsys.loop.checkpoint import FailedStep, read_failed
from rlsys.loop.checkpoint_files import ACTOR, CRITIC, GROUPS
from rlsys.replay.replay_results import NonFinite, ReplayedSample, ReplayedStep
from rlsys.replay.rollout_json import GroupRecord, write_groups
from rlsys.types import Distribution, Episode
from rlsys.util.files import CONFIG
from tests.models import random_group, save_model, tiny_qwen3
from tests.training import group_of
from workers.model.logprobs import score
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup
from workers.train.value_model import CriticBackend

SAMPLED = Distribution(1.0)

pytestmark = pytest.mark.slow

STEP = FailedStep(
    6,
    (Column.REFERENCE_LOGPROBS,),
    ((TrajectoryAdvantage(0, 0, 1.5), TrajectoryAdvantage(1, 0, math.nan)), ()),
    2,
    "loss is nan",
)


# ------------------------------------------------------------------------------------------------------------ step.json


def test_a_failed_step_round_trips_including_nan(tmp_path: Path) -> None:
    STEP.write(tmp_path)
    read = read_failed(tmp_path)
    assert repr(read) == repr(STEP)  # NaN is not equal to itself


def test_a_folder_that_holds_no_failed_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no failed step: there is no step\.json in it; give the folder that"):
        read_failed(tmp_path)
    (tmp_path / "step.json").write_text('{"version": 1}')
    with pytest.raises(DataError, match=r"step\.json cannot be read: (.|\n)*another version of rlsys, or is damaged"):
        read_failed(tmp_path)


def test_a_failed_step_without_its_configuration_is_refused(tmp_path: Path) -> None:
    STEP.write(tmp_path)
    with pytest.raises(ConfigError, match=rf"cannot read configuration {tmp_path / CONFIG}"):
        launch.replay(tmp_path)


# ------------------------------------------------------------------------------------------------------------ the step


class Failed:
    """A run whose first step failed: three groups of a random model."""

    def __init__(
        self, run: Path, algorithm: str = "kto", model: Literal["actor", "critic"] = "actor", more: Sequence[str] = ()
    ) -> None:
        self.failing: Literal["actor", "critic"] = model
        self.update, self.num_updates = 0, 1
        self.folder = run / "failed" / "step_000001"
        self.folder.mkdir(parents=True)
        self.model = save_model(run / "model", tiny_qwen3())
        keys = ["run.steps=1", f"model.path={self.model}", "data.path=d", f"algorithm.type={algorithm}", *more]
        self.config = Config.load([], keys)
        (self.folder / CONFIG).write_text(self.config.to_yaml())
        rng = random.Random(0)
        self.payloads = [random_group(rng, 3) for _ in range(3)]
        self.groups = [group_of(group_id, payload) for group_id, payload in enumerate(self.payloads)]
        self.assigned: list[Sequence[TrajectoryAdvantage]] = [
            *self.config.algorithm.finalize_advantages(self.groups, {}).groups
        ]
        settings, sync = OptimizerSettings(lr=1e-3, total_steps=10), self.config.reference.sync
        self.backend = FsdpBackend(self.model, settings, RankGroup(), sync=sync)
        self.critic = CriticBackend(self.model, OptimizerSettings(lr=1e-3, total_steps=10), RankGroup())

    def keep(self, payloads: Sequence[tuple[Episode, ...]] | None = None) -> Path:
        """As a learner does; returns the folder."""
        columns = tuple(sorted(self.config.algorithm.columns))
        self.backend.save(self.folder / ACTOR).wait()
        if Column.VALUES in columns:
            self.critic.save(self.folder / CRITIC).wait()
        write_groups(self.folder / GROUPS, map(GroupRecord, self.groups, payloads or self.payloads))
        assigned, error = tuple(map(tuple, self.assigned)), "step 1: loss is nan"
        step = FailedStep(0, columns, assigned, self.num_updates, error, self.failing, self.update)
        step.write(self.folder)
        return self.folder

    def trained_loss(self) -> float:
        """What the trainer makes of the same step."""
        reference = load_model(self.model, torch.float32)
        columns = [
            {Column.REFERENCE_LOGPROBS: score(reference, [s for _, s in samples_in(p)], SAMPLED, max_tokens=64)}
            for p in self.payloads
        ]
        algorithm = replace(self.config.algorithm, variant="apo_zero_unpaired")  # pyrefly: ignore[unexpected-keyword]
        plan = plan_batch(self.groups, self.assigned, algorithm.aggregation, num_ranks=1, max_tokens=64)[0]
        return self.backend.train_step(plan, StepData(self.payloads, columns), algorithm, distribution=SAMPLED)["loss"]


def losses_of(folder: Path) -> list[float]:
    done = CliRunner().invoke(app, ["replay", str(folder), "--json"])
    assert done.exit_code == 0, done.exception
    return [sample["loss"] for sample in json.loads(done.stdout)["samples"]]


def test_a_reference_that_followed_the_policy_is_that_of_the_step(tmp_path: Path) -> None:
    other = load_model(save_model(tmp_path / "other", tiny_qwen3()), torch.float32)
    for parameter in other.parameters():
        parameter.data *= 0.5
    other.save_pretrained(tmp_path / "other")
    following = Failed(tmp_path / "a", more=["reference.sync={every: 1}"])
    assert following.backend._reference is not None
    for tensor in following.backend._reference.tensors.values():
        tensor *= 0.5
    frozen, of_other = (
        Failed(tmp_path / n, more=[f"reference.path={p}"]) for n, p in (("b", "null"), ("c", tmp_path / "other"))
    )
    found, with_initial, with_other = (losses_of(each.keep()) for each in (following, frozen, of_other))
    assert found == with_other
    assert found != with_initial


@pytest.fixture
def failed(tmp_path: Path) -> Failed:
    return Failed(tmp_path)


def test_a_replay_without_fault_matches_the_loss_in_training(failed: Failed) -> None:
    folder = failed.keep()
    done = CliRunner().invoke(app, ["replay", str(folder), "--json"])
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert (found["step"], found["error"], found["first"], found["weights"]) == (1, "step 1: loss is nan", None, None)
    assert len(found["samples"]) == sum(len(list(samples_in(payload))) for payload in failed.payloads)
    # Policy and reference are one here, so that z0 is 0: the loss of APO-zero.
    assert sum(s["loss"] for s in found["samples"]) == pytest.approx(failed.trained_loss(), rel=1e-5)
    assert all(s["log_ratio_max"] > 0 for s in found["samples"])
    assert any(s["grad_norm"] > 0 for s in found["samples"])  # a clipped sample has none


def test_a_nan_advantage_is_located_in_its_sample(failed: Failed) -> None:
    first, *others = failed.assigned[1]
    failed.assigned[1] = [replace(first, advantage=math.nan), *others]
    done = CliRunner().invoke(app, ["replay", str(failed.keep()), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    (bad,) = [s for s in found["samples"] if s["non_finite"]]
    assert (bad["group"], bad["episode"], bad["model"], bad["loss"]) == (1, first.episode, "policy", None)
    assert bad["non_finite"]["what"] == "advantage" and bad["non_finite"]["token"] == 0


def test_a_nan_sampler_logprob_is_located_at_its_token(failed: Failed) -> None:
    (root,) = failed.payloads[2][0].trajectories
    (turn, *_) = root.turns
    broken = replace(root, turns=(replace(turn, logprobs=(*turn.logprobs[:-1], math.nan)), *root.turns[1:]))
    payloads = [*failed.payloads[:2], (Episode((broken,)), *failed.payloads[2][1:])]
    replayed = launch.replay(failed.keep(payloads))
    (bad,) = [s for s in replayed.samples if s.non_finite]
    token = len(turn.logprobs) - 1
    assert bad.non_finite == NonFinite("sampler's logprob", "nan", token, chr(48 + turn.output_ids[-1]))
    assert replayed.first is not None and "policy, group 2, episode 0" in replayed.first


def test_weights_that_are_no_numbers_are_named_before_anything_else(failed: Failed) -> None:
    failed.backend.shards()["model.norm.weight"][3] = math.inf
    replayed = launch.replay(failed.keep())
    assert replayed.weights == NonFinite("policy's model.norm.weight", "inf")
    assert replayed.first == "before the step: policy's model.norm.weight is inf"


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_the_model_that_failed_is_computed(model: Literal["actor", "critic"], tmp_path: Path) -> None:
    failed = Failed(tmp_path, "ppo", model)
    replayed = launch.replay(failed.keep())
    num_samples = sum(len(list(samples_in(payload))) for payload in failed.payloads)
    assert [s.model for s in replayed.samples] == ["policy" if model == "actor" else "critic"] * num_samples
    assert replayed.is_fine
    assert all((s.log_ratio_max is None) == (model == "critic") for s in replayed.samples)
    # A critic that says 0 everywhere misses every return; half the square of that is its loss.
    if model == "critic":
        assert all(s.grad_norm > 0 and s.loss > 0 for s in replayed.samples)
    else:  # a sample that has moved beyond the clip has no gradient
        assert any(s.grad_norm > 0 for s in replayed.samples)


def test_a_folder_that_was_moved_is_computed_all_the_same(failed: Failed, tmp_path: Path) -> None:
    moved = failed.keep().rename(tmp_path / "elsewhere")
    assert launch.replay(moved).is_fine


def test_of_several_updates_the_one_that_failed_is_computed(failed: Failed) -> None:
    """From the second on what the policy said at the start of the step is gone, and this is said."""
    failed.num_updates = 3
    for update in range(3):
        failed.update = update
        done = CliRunner().invoke(app, ["replay", str(failed.keep()), "--json"])
        found = json.loads(done.stdout)
        assert {(s["update"], s["group"]) for s in found["samples"]} == {(update, update)}
        assert found["first"] is None
        assert done.exit_code == (1 if update else 0)
        assert bool(found["not_reproduced"]) == bool(update)
        last = [*launch.replay(failed.folder).lines()][-1]
        assert last == ("of the rest, every number is finite" if update else "every number is finite on this machine")


def test_a_gradient_overflowing_the_squared_norm_is_reported(failed: Failed) -> None:
    failed.assigned[1] = [replace(a, advantage=1e25) for a in failed.assigned[1]]
    replayed = launch.replay(failed.keep())
    bad = [s for s in replayed.samples if s.non_finite]
    assert bad and {s.group for s in bad} == {1}
    assert all(math.isfinite(s.grad_norm) and s.grad_norm > 1e19 for s in bad)
    assert bad[0].non_finite == NonFinite("squared norm of its gradient in fp32", "inf")


def test_a_critic_that_broke_is_named(tmp_path: Path) -> None:
    failed = Failed(tmp_path, "ppo")
    dict(failed.critic._model.named_parameters())["head.bias"].data[0] = math.nan
    replayed = launch.replay(failed.keep())
    assert replayed.first == "before the step: critic's head.bias is nan"
    bad = replayed.samples[0].non_finite
    assert bad is not None and bad.what == "values"


# ----------------------------------------------------------------------------------------------------------- the table


def row(**changes: object) -> ReplayedSample:
    plain = ReplayedSample(
        model="policy", update=0, group=4, task_id="t", episode=1, trajectory=0, sample=0, num_tokens=7,
        loss=0.25, grad_norm=1.5, log_ratio_max=0.01, non_finite=None,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_table_lists_failures_first_and_then_larger_gradients() -> None:
    bad = NonFinite("logprob", "nan", 3, "7")
    rows = (row(), row(group=5, grad_norm=9.0), row(group=6, loss=math.nan, grad_norm=math.nan, non_finite=bad))
    title, head, *body, last = ReplayedStep(7, "loss is nan\nand more", None, rows).lines()
    assert title == "step 7 failed with: loss is nan"
    assert head.split()[:4] == ["model", "update", "group", "episode"]
    assert [line.split()[2] for line in body] == ["6", "5", "4"]
    assert body[0].endswith("logprob of token 3 ('7') is nan")
    assert last == "first: policy, group 6, episode 1, trajectory 0, sample 0 (task t): logprob of token 3 ('7') is nan"


def test_of_many_samples_the_table_shows_forty() -> None:
    *_, more, last = ReplayedStep(7, "x", None, (row(),) * 50).lines()
    assert more == "... and 10 more; --json has all"
    assert last == "every number is finite on this machine"


def test_its_json_has_null_for_what_is_not_finite() -> None:
    found = ReplayedStep(7, "x", None, (row(loss=math.inf),)).as_json()
    assert json.loads(json.dumps(found, allow_nan=False))["samples"][0]["loss"] is None
