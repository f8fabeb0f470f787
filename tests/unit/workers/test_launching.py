"""Settings derived from a configuration, before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

from rlsys import Config
from rlsys.agents.workflow import Session, SingleTurn, Workflow
from rlsys.config.curation_section import CurationSection
from rlsys.data.task_source import TaskSource
from rlsys.errors import TrainingError
from rlsys.loop.build_driver import Constants, best_of, build_driver, evaluator_of
from rlsys.loop.repack import Repacker
from rlsys.monitoring.events import Events
from rlsys.stabilizer import StabilizerPlugin
from rlsys.testing import FakeActor, FakeWorld, RewardAsAdvantage, run_virtual, tasks
from rlsys.types import POLICY, PolicyVersion
from rlsys.util.files import CONFIG
from tests.groups import episode, group
from tests.jobs import config_of
from workers.ray.cluster import Resources
from workers.ray.worker_process import library_variables
from workers.rollout.rollout_worker import RolloutSpec
from workers.worker_set import _replica_spec, _replicas, _rollout_spec, _trainer_resources, plays_beside_engines

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Patient(RewardAsAdvantage):
    """Trains the policy in every second step, from the fourth on."""

    def trains_policy(self, version: PolicyVersion) -> bool:
        return version >= 3 and version % 2 == 1


@dataclass(frozen=True, kw_only=True)
class Calibrating(StabilizerPlugin):
    """Needs two synchronous steps."""

    @property
    def synchronous_steps(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class Own(Workflow):
    """A workflow with code of a user."""

    async def run(self, session: Session) -> None: ...


@dataclass(frozen=True, kw_only=True)
class OwnSingleTurn(SingleTurn):
    """One that inherits from a light one."""


def config(folder: Path, *overrides: str) -> Config:
    return config_of(folder / "model", folder / "data.jsonl", folder, overrides)


@pytest.mark.parametrize(
    ("overrides", "num_versions"),
    [
        ([], 1),
        (["rollout.weight_change=inflight"], 1),
        (["rollout.weight_change=beside"], 2),
        (["rollout.weight_change=inflight_recompute"], 1),
    ],
)
def test_only_replicas_that_train_hold_several_versions(tmp_path, overrides, num_versions):
    job = config(tmp_path, *overrides)
    trained = _replica_spec(job, "model", "newest")
    assert (trained.engine.resident_versions, trained.change.when) == (num_versions, job.rollout.change)
    pinned = _replica_spec(job, "model", "pinned")
    assert (pinned.engine.resident_versions, pinned.change.when) == (1, "between")


@pytest.mark.parametrize(
    ("num_engines", "overrides", "expected"),
    [
        (1, [], {}),
        (3, [], {"gpu_memory_utilization": pytest.approx(0.3)}),
        (3, ["rollout.vllm_args={gpu_memory_utilization: 0.2}"], {"gpu_memory_utilization": 0.2}),
        (1, ["resources.rollout.gpus=1"], {}),
        (1, ["resources.rollout.gpus=0.5"], {"gpu_memory_utilization": pytest.approx(0.46)}),
        (1, ["resources.rollout.gpus=2", "rollout.tensor_parallel=2", "rollout.engine=vllm"], {}),
    ],
)
def test_engines_share_the_memory_of_a_gpu(tmp_path, num_engines, overrides, expected):
    spec = _replica_spec(config(tmp_path, *overrides), "model", "newest", num_engines)
    assert spec.engine.vllm_args == expected


@pytest.mark.parametrize(
    ("overrides", "every_s"),
    [
        ([], 5.0),
        (["rollout.replicas=1"], None),
        (["rollout.weight_change=inflight"], None),
        (["rollout.weight_change=beside"], None),
    ],
)
def test_trajectories_are_moved_where_running_groups_hold_new_weights_back(tmp_path, overrides, every_s):
    data = TaskSource(tasks(3), seed=0)
    driver = build_driver(config(tmp_path, "rollout.replicas=2", *overrides), FakeWorld().workers(), data, Events([]))
    found = [each.every_s for each in driver.companions if isinstance(each, Repacker)]
    assert found == ([] if every_s is None else [every_s])


def test_constants_vary_how_often_trajectories_are_moved(tmp_path):
    def every_s(repack_s: float) -> list[float]:
        job, workers, data = config(tmp_path, "rollout.replicas=2"), FakeWorld().workers(), TaskSource(tasks(3), seed=0)
        driver = build_driver(job, workers, data, Events([]), constants=Constants(repack_s=repack_s))
        return [each.every_s for each in driver.companions if isinstance(each, Repacker)]

    assert (every_s(2.0), every_s(0.0)) == ([2.0], [])


def test_the_loss_budget_defaults_to_the_longest_completion(tmp_path):
    overrides = ["algorithm.type=dr_grpo", "rollout.max_new_tokens=100", "run.steps=1", "asynchrony.max_staleness=0"]
    data, workers = TaskSource(tasks(8), seed=0), FakeWorld().workers()
    assert run_virtual(build_driver(config(tmp_path, *overrides), workers, data, Events([])).run(0)) == 1
    assert isinstance(workers.actor, FakeActor) and workers.actor.last_step
    plan, _ = workers.actor.last_step
    refs = [ref for rank in plan for part in rank.micro_batches if part.weight for ref in part.samples]
    assert {ref.token_weight for ref in refs} == {1 / (len(refs) * 100)}


@pytest.mark.parametrize(
    ("algorithm", "stabilizer", "version"),
    [("Patient", "Calibrating", 6), (None, "Calibrating", 2), ("Patient", None, 0)],
)
def test_steps_are_synchronous_until_the_stabilizer_has_its_training_steps(tmp_path, algorithm, stabilizer, version):
    """Patient trains the policy at the versions 3, 5, 7: after the second of these the version is 6."""
    chosen = [f"algorithm={{type: '{__name__}:{algorithm}'}}"] if algorithm else []
    chosen.append(f"stabilizer={{type: '{__name__}:{stabilizer}'}}" if stabilizer else "stabilizer=null")
    job = config(tmp_path, "run.steps=9", *chosen)

    async def main() -> int:
        data = TaskSource(tasks(3), seed=0)
        return build_driver(job, FakeWorld().workers(), data, Events([])).queue.bound.synchronous_until

    assert run_virtual(main()) == version


def test_tasks_are_curated_as_the_configuration_says(tmp_path):
    keys = {
        "fewer_above": 0.7,
        "success_within": [0.1, 0.9],
        "stored_successes": 5,
    }
    job = config(tmp_path, "asynchrony.max_staleness=1", *(f"curation.{key}={value}" for key, value in keys.items()))
    data = TaskSource(tasks(3), seed=0)
    for told, rules in ((job, CurationSection.model_validate(keys)), (config(tmp_path), CurationSection())):
        assert build_driver(told, FakeWorld().workers(), data, Events([])).queue.ledger.curation.rules == rules


def test_an_episode_is_a_success_from_the_configured_reward_on(tmp_path):
    job = config(tmp_path, "reward.success=0.5", "curation.fewer_above=0.9")
    workers, scored = FakeWorld().workers(), group(0, versions=(0,), episodes=[episode(0.6), episode(0.2)])
    curation = build_driver(job, workers, TaskSource(tasks(3), seed=0), Events([])).queue.ledger.curation
    curation.record(scored)
    curation.settle(0)
    curation.publish()
    assert curation.state().tallies[scored.task_id].rate == 0.5
    evaluator = evaluator_of(job, workers.rollouts, workers.rewards, {}, Events([]))
    assert evaluator.metrics_of("d", [scored]).pass_at == {1: 0.5}


@pytest.mark.parametrize(("best_by", "is_highest"), [("", True), ("highest ", True), ("lowest ", False)])
def test_the_best_checkpoint_has_the_highest_or_the_lowest_value(tmp_path, best_by, is_highest):
    keys = ["eval={every: 5, data: d.jsonl}", "checkpoint.keep_best=2", f"checkpoint.best_by={best_by}eval/d/mean"]
    best = best_of(config(tmp_path, *keys))
    assert (best.count, best.metric, best.is_highest) == (2, "eval/d/mean", is_highest)


def test_workers_have_the_resources_of_their_role(tmp_path):
    job = config(tmp_path, "resources.rollout={cpus: 2, threads: 3}")
    assert spec_of(job).resources == Resources(2.0, 0.0, 3)


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_memory_of_a_rank_on_a_gpu_grows_in_place(tmp_path, role):
    job = config(tmp_path, f"resources.{role}.gpus=1")
    variables = library_variables(_trainer_resources(job, role), {})
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_allocator_that_a_user_made_are_kept(tmp_path, name):
    job = config(tmp_path, "resources.actor.gpus=1")
    variables = library_variables(_trainer_resources(job, "actor"), {name: "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in variables


def test_a_replica_and_a_rank_without_a_gpu_have_no_settings_of_the_allocator(tmp_path):
    job = config(tmp_path, "resources.rollout.gpus=1")
    for resources in (spec_of(job).resources, _trainer_resources(job, "actor")):
        assert "PYTORCH_ALLOC_CONF" not in library_variables(resources, {})


def test_a_run_keeps_its_configuration_with_a_step_that_fails(tmp_path):
    job = config(tmp_path, "run.steps=1")

    async def main() -> int:
        data = TaskSource(tasks(3), seed=0)
        workers = FakeWorld(nan_at=0).workers()
        return await build_driver(job, workers, data, Events([])).run(0)

    with pytest.raises(TrainingError):
        run_virtual(main())
    assert Config.load(job.run_dir / "failed" / "step_000001" / CONFIG) == job


def spec_of(job: Config, *, evaluates: bool = False) -> RolloutSpec:
    return _rollout_spec(job, {POLICY: _replica_spec(job, "model", "newest")}, evaluates=evaluates)


@pytest.mark.parametrize(
    ("overrides", "is_beside"),
    [
        (["resources.rollout.gpus=0"], True),
        (["resources.rollout.gpus=1"], False),
        (["resources.rollout.gpus=0", f"rollout.workflow={{type: '{__name__}:Own'}}"], False),
        (["resources.rollout.gpus=0", f"rollout.workflow={{type: '{__name__}:OwnSingleTurn'}}"], False),
    ],
)
def test_only_light_workflows_on_processors_are_played_beside_engines(tmp_path, overrides, is_beside):
    job = config(tmp_path, "rollout.replicas=3", *overrides)
    assert plays_beside_engines(spec_of(job)) == is_beside
    replicas, sessions = _replicas(job, {POLICY: _replica_spec(job, "model", "newest")}, {})
    assert replicas.size == 3
    assert (sessions is None) == is_beside


def test_groups_have_the_deadline_of_the_limits_and_replicas_none(tmp_path):
    job = config(tmp_path, "limits.group_s=77", "limits.max_attempts=4", "limits.silence_s=9")
    replicas, _ = _replicas(job, {POLICY: _replica_spec(job, "model", "newest")}, {})
    assert (replicas.deadline_s, replicas.silence_s, replicas.max_attempts) == (inf, 9.0, 4)
    assert (spec_of(job).group_s, spec_of(job).max_losses) == (77.0, 4)


def test_evaluations_end_no_episode_early(tmp_path):
    job = config(tmp_path, "rollout.early_ends=true")
    assert spec_of(job).ends_early
    assert not spec_of(job, evaluates=True).ends_early
