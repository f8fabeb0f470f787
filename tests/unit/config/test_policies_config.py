"""Several policies in a configuration: their differences, and combinations that cannot be trained together."""

from pathlib import Path

import pytest

from algorithms.grpo import GRPO
from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import ConfigError

TWO = """\
run: {steps: 10, name: two}
model: {path: some/model}
data: {path: rows.jsonl}
algorithm: {type: grpo, group_size: 4}
train: {groups_per_step: 4}
policies:
  proposer: {}
  solver: {train: {lr: 1e-5, groups_per_step: 2}, algorithm: {clip_high: 0.5}, stabilizer: null}
  judge: {train: null, model: {path: other/model}}
agents: {asker: proposer}
"""


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "job.yaml"
    path.write_text(TWO)
    return Config.load(path, overrides)


def test_a_policy_is_the_run_with_what_it_differs_in(tmp_path: Path):
    config = load(tmp_path)
    proposer, solver, judge = (config.of(name) for name in ("proposer", "solver", "judge"))
    assert (solver.train.lr, solver.train.groups_per_step, solver.stabilizer) == (1e-5, 2, None)
    assert solver.algorithm == GRPO(group_size=4, clip_high=0.5)
    assert (proposer.train, proposer.stabilizer, proposer.algorithm) == (
        config.train,
        config.stabilizer,
        config.algorithm,
    )
    assert (judge.model.path, solver.model.path) == ("other/model", "some/model")
    assert solver.run_dir == Path("runs/two/policies/solver")
    assert not solver.policies
    assert list(config.trained_policies) == ["proposer", "solver"]


def test_a_policy_differs_in_single_resources(tmp_path: Path):
    config = load(tmp_path, "resources.actor={cpus: 2, gpus: 1}", "policies.solver.resources.actor.gpus=2")
    proposer, solver = (config.of(name).resources for name in ("proposer", "solver"))
    assert (proposer["actor"].cpus, proposer["actor"].gpus) == (2, 1)
    assert (solver["actor"].cpus, solver["actor"].gpus) == (2, 2)


def test_resuming_from_another_run_gives_each_policy_its_own_checkpoint(tmp_path: Path):
    config = load(tmp_path, "run.resume=runs/before")
    assert config.of("solver").run.resume == "runs/before/policies/solver"
    assert load(tmp_path, "run.resume=auto").of("solver").run.resume == "auto"


def test_what_was_resolved_reads_back_as_it_was(tmp_path: Path):
    config = load(tmp_path)
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "resolved.yaml") == config


def test_the_plan_describes_each_policy_and_counts_all_workers(tmp_path: Path):
    plan = plan_of(load(tmp_path, "asynchrony.max_staleness=1"))
    text = "\n".join(plan.lines())
    assert "policy proposer: 10 steps of 16 samples, 8 groups in the pipe" in text
    assert "policy solver: 10 steps of 8 samples, 4 groups in the pipe" in text
    assert "policy judge: frozen" in text
    assert [role.name for role in plan.roles] == [
        "rollout",
        "reward",
        "actor rank of proposer",
        "actor rank of solver",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "policies.solver.train.lrr=3",
            "policies.solver.train.lrr: unknown key; did you mean `policies.solver.train.lr`?",
        ),
        ("policies.solver.trian={lr: 1}", "policies.solver.trian: unknown key; did you mean `policies.solver.train`?"),
        (
            "policies.solver.model=",
            "policies.solver.model: null is for stabilizer, and for train of a policy that is not",
        ),
        ("policies.solver.resources.rollout.gpus=1", "policies.solver.resources.rollout: the policies share their"),
        ("policies.solver.resources.actr.gpus=1", "policies.solver.resources.actr: "),
        ("policies.solver.is_frozen=true", "policies.solver.is_frozen: no such key: set `train: null` in the policy"),
        ("policies.solver.train.num_gpus=1", "policies.solver.train.num_gpus: no such key: set `resources.actor.gpus`"),
        ("policies.solver.train.lr=-1", "policies.solver.train.lr: input should be greater than 0"),
        ("policies.judge.critic.lr=1", "policies.judge.critic: a frozen policy is not trained"),
        ("policies.solver.algorithm.group_size=6", "group_size is the same for all (proposer 4, solver 6)"),
        (
            "policies.proposer.algorithm={type: kto, group_size: 4}",
            "policies.proposer.algorithm: KTO pairs a completion",
        ),
        ("eval={data: x.jsonl, every: 5}", "policies: the evaluation lane measures one policy: set eval.every to 0"),
        ("curation.fewer_above=0.5", "policies: all draw the same groups: the section curation is for a run of one"),
        ("agents.asker=prposer", "agents.asker: no policy is called prposer; there are: proposer, solver, judge"),
        ("policies={proposer: {train: null}, solver: {train: null, algorithm: {}}}", "frozen"),
        ("policies.a/b={}", "string should match pattern"),
    ],
)
def test_what_cannot_be_is_told_with_its_place(tmp_path: Path, override: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert problem in str(caught.value)


def test_agents_are_bound_in_a_run_of_several_policies_only(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("run: {steps: 1}\nmodel: {path: m}\ndata: {path: d}\nagents: {a: b}\n")
    with pytest.raises(ConfigError, match=r"agents\.a: no policy is called b; name them in the section policies"):
        Config.load(path)
