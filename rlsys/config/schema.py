"""Schema of a configuration: its sections, and what follows from several of them.

The models are frozen and read once; a class takes the values it uses, never the whole configuration. Keys of an
algorithm belong to the algorithm. Rules of one section are in its class; those of several in
`rlsys.config.section_rules`. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from rlsys.algorithm import REFERENCE_COLUMNS, Column
from rlsys.config.config_problems import refuse
from rlsys.config.curation_section import CurationSection
from rlsys.config.data_section import DataSection
from rlsys.config.eval_section import EvalSection
from rlsys.config.lora_section import LoraSection
from rlsys.config.placement_section import PlacementSection
from rlsys.config.plugins import (
    ALGORITHMS,
    STABILIZERS,
    WORKFLOWS,
    AlgorithmSection,
    StabilizerSection,
    TrackerSection,
)
from rlsys.config.policy_sections import PolicyName, PolicySection, problems_of
from rlsys.config.reward_section import RewardSection
from rlsys.config.rollout_section import RolloutSection
from rlsys.config.run_sections import (
    DEFAULT_RESOURCES,
    AsynchronySection,
    CheckpointSection,
    Cluster,
    Dashboard,
    LimitsSection,
    ModelSection,
    RecordSection,
    Resources,
    RunSection,
    Thresholds,
)
from rlsys.config.section import Section
from rlsys.config.section_rules import broken_rules
from rlsys.config.train_section import CriticSection, ReferenceSection, TrainSection
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.util.any_paths import AnyPath, RemotePath

ON_CPU_SLOTS, ON_CPU_MICRO_BATCH_TOKENS = 64, 8192
"""Values of `rollout.slots` and `train.micro_batch_tokens` on CPUs, see `rlsys.launch.device_defaults`."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Tolerance by the type that engines compute in. Rounding of two correct implementations is 1e-5 and 0.04."""


Tenancy: TypeAlias = Literal["actor", "critic", "reference", "rollout", "evaluation"]
"""A role that shares devices; `evaluation` if `rollout` does."""


class Config(Section):
    """Complete configuration of a training job. Build it here, or read it with `Config.load`."""

    model_config = ConfigDict(validate_default=True)

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    algorithm: AlgorithmSection = Field(default_factory=lambda: ALGORITHMS.read({}))
    """`type` (the name of an installed algorithm, or `module:Name` of yours; default grpo) and its keys."""
    stabilizer: StabilizerSection | None = Field(default_factory=lambda: STABILIZERS.read({}))
    """`type` (the name of an installed stabilizer, or `module:Name` of yours; default gac) and its keys; null: none."""
    resources: Resources = Field(default=DEFAULT_RESOURCES)
    """Resources of one worker, by its role: `{actor: {gpus: 1}, rollout: {gpus: 1, cpus: 2}}`; `actor` and `critic`: of
    one rank; `reference`; `rollout`: of one replica, and of one that evaluates; `reward`: of one reward worker, and its
    model."""
    placement: PlacementSection = PlacementSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    asynchrony: AsynchronySection = AsynchronySection()
    curation: CurationSection = CurationSection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsSection = LimitsSection()
    record: RecordSection = RecordSection()
    tracking: list[TrackerSection] = Field(default=[])
    """Destinations of metrics besides the files of the run: `[{type: wandb, project: sums}, tensorboard]`. Each has a
    `type` (the name of an installed tracker, or `module:Name` of yours) and that tracker's own keys."""
    dashboard: Dashboard = None
    """Address, HOST:PORT, of a dashboard that starts with the run, like `rlsys dashboard RUN`; it ends with the run and
    cannot slow or stop it. `127.0.0.1:8321`; port 0: any that is free. A host beyond this machine requires a token: the
    variable RLSYS_DASHBOARD_TOKEN, or the one in the URL that `RUN/logs/dashboard.url` contains. None: no dashboard."""
    alerts: Thresholds = Field(default={})
    """Thresholds that replace the default of an alert, by its name, `{entropy_collapse: 0.1, idle_side: null}`; null:
    the alert is off."""
    ray: Cluster = None
    """Ray cluster: `auto` or `HOST:PORT` of one that this machine is a node of, or `local` for one of this machine; a
    number: the CPUs of a local one. None: join this process's connection or the job's cluster, else start a local one
    with all CPUs of the machine."""
    policies: dict[PolicyName, PolicySection] = Field(default={})
    """Several policies by name, each with the keys that differ from the sections above: `{proposer: {}, solver: {train:
    {lr: 1e-5}}, judge: {train: null, model: {path: ...}}}`. `train: null`: the weights of `model.path` for the whole
    run. A section with another `type` replaces that of the run, and `stabilizer: null` is none. `group_size` is the
    same for all; of `rollout`, only `engine` can differ: `{urls: [...]}`, servers of its own. None: one policy for all
    agents."""
    agents: dict[str, str] = Field(default={})
    """Policy of each agent, by the agent's name in the workflow. An agent that is not listed uses the policy of its
    name."""

    @classmethod
    def load(cls, paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Self:
        """Read files left to right, then overrides like `train.lr=1e-5`; later values win.

        Raises `ConfigError` with every problem of all of them.
        """
        from rlsys.config.loader import load  # the loader imports this class

        return load(cls, [paths] if isinstance(paths, str | Path) else paths, overrides)

    def to_yaml(self) -> str:
        """Write every key with its value, as in `config.resolved.yaml`; `load` reads it back."""
        from rlsys.config.loader import dump

        return dump(self.model_dump(mode="json"))

    @property
    def reward_functions(self) -> tuple[RewardSpec, ...]:
        """Every reward function, with the default for tasks that have none."""
        return self.reward.functions if self.algorithm.uses_rewards else self.reward.functions_or("zero")

    @property
    def ray_address(self) -> str | None:
        """Address of the cluster to join; None: of none that the configuration names."""
        return self.ray if isinstance(self.ray, str) else None

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a conversation, and so of a sample."""
        return self.rollout.max_context_tokens or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def run_dir(self) -> Path:
        """Directory of this run: `run.folder/run.name`."""
        return self.run.folder / self.run.name

    @property
    def checkpoints_at(self) -> AnyPath:
        """Folder or URL of this run's checkpoints."""
        to = self.checkpoint.to
        return RemotePath(f"{to}/{self.run.name}/checkpoints") if to else self.run_dir / "checkpoints"

    def of(self, policy: str) -> Config:
        """Configuration of one of several policies as a run, in the directory `policies/NAME` of this run."""
        run, resume = self.run, self.run.resume
        sections = {name: getattr(self, name) for name in type(self).model_fields if name not in ("policies", "agents")}
        resume = f"{resume}/policies/{policy}" if "/" in resume else resume
        sections["run"] = run.model_copy(update={"folder": self.run_dir / "policies", "name": policy, "resume": resume})
        if to := self.checkpoint.to:
            update = {"to": f"{to}/{run.name}/policies"}
            sections["checkpoint"] = self.checkpoint.model_copy(update=update)
        return type(self).model_validate(self.policies[policy].over(sections))

    @property
    def trained_policies(self) -> dict[str, Config]:
        """Configuration of every trained policy by name, if there are several."""
        return {name: self.of(name) for name, policy in self.policies.items() if not policy.is_frozen}

    @property
    def probe_tolerance(self) -> float:
        """Largest mean |difference| of logprobs between replica and trainer right after a weight change, in nats."""
        return PROBE_TOLERANCE[self.dtype]

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Value of `model.dtype`, or that of a CPU."""
        return self.model.dtype or "float32"

    @property
    def slots(self) -> int:
        """Value of `rollout.slots`, or that of a CPU."""
        return self.rollout.slots or ON_CPU_SLOTS

    @property
    def micro_batch_tokens(self) -> int:
        """Value of `train.micro_batch_tokens`, or that of a CPU."""
        return self.train.micro_batch_tokens or ON_CPU_MICRO_BATCH_TOKENS

    @property
    def resident_versions(self) -> int:
        """Most sets of weights in a replica at the same time."""
        return 2 if self.rollout.weight_change == "beside" else 1

    @property
    def critic_lora(self) -> LoraSection | None:
        """The adapter of the critic: as `train.lora`, but without `path`, which is an adapter of the policy."""
        lora = self.train.lora
        return lora and lora.model_copy(update={"path": None})

    @property
    def has_reference(self) -> bool:
        """True if the run has a reference worker: its algorithm asks for one, and the actor is not its own
        reference."""
        return bool(self.algorithm.columns & REFERENCE_COLUMNS) and not self.is_own_reference

    @property
    def is_own_reference(self) -> bool:
        """True if the ranks of the actor compute the columns of the reference: without their adapter, or with weights
        that follow theirs."""
        return self.reference.path is None and (self.train.lora is not None or self.reference.sync is not None)

    @property
    def tenants(self) -> tuple[Tenancy, ...]:
        """Roles of this run that share devices in turns; empty if each has its own."""
        chosen = self.placement.together
        has: dict[Tenancy, bool] = {
            "actor": "actor" in chosen,
            "critic": "critic" in chosen and Column.VALUES in self.algorithm.columns,
            "reference": "reference" in chosen and self.has_reference,
            "rollout": "rollout" in chosen,
            "evaluation": "rollout" in chosen and self.eval.every > 0,
        }
        return tuple(role for role, is_there in has.items() if is_there)

    @property
    def columns_of_steps(self) -> frozenset[Column]:
        """Columns of a reference that are computed for whole steps: all if its devices are shared, or are the actor's;
        else those that need the whole step."""
        asked = self.algorithm.columns & REFERENCE_COLUMNS
        return asked if self.is_own_reference or "reference" in self.tenants else asked - {Column.REFERENCE_LOGPROBS}

    @property
    def reference_path(self) -> str:
        """Model of the reference."""
        return self.reference.path or self.model.path

    @property
    def permits(self) -> int:
        """Number of groups in the pipe at once, so that none can exceed `max_staleness`.

        A group admitted now waits behind at most `max_staleness` steps of earlier groups, and a step is one version.
        """
        return (self.asynchrony.max_staleness + 1) * self.train.groups_per_step

    @property
    def staleness_bound(self) -> int:
        """Largest staleness of a trained token; see `AsynchronySection.bound`."""
        return self.asynchrony.bound(self.train.groups_per_step)

    @property
    def staleness_caution(self) -> str:
        """Cost of a safe staleness with this algorithm, and the remedy; empty if there is none."""
        return self.algorithm.staleness_caution(
            self.staleness_bound, self.train.updates_per_step * self.algorithm.passes
        )

    @property
    def samples_per_step(self) -> int:
        """Episodes of one step."""
        return self.train.groups_per_step * self.algorithm.group_size

    @model_validator(mode="before")
    @classmethod
    def _averages_as_the_workflow_wants(cls, sections: object) -> object:
        """Fill in `algorithm.over` by `Workflow.loss_over`, for a section that does not set it."""
        if not isinstance(sections, Mapping):
            return sections
        rollout, chosen = sections.get("rollout"), sections.get("algorithm", {})
        named = {"type": chosen} if isinstance(chosen, str) else chosen
        if not (isinstance(rollout, Mapping) and isinstance(named, Mapping)) or "over" in named:
            return sections
        try:
            over = WORKFLOWS.load_class(rollout.get("workflow", {})).loss_over
            default = getattr(ALGORITHMS.load_class(named), "over", None)
        except ConfigError:  # reported where the section is read
            return sections
        is_filled = over is not None and default == "tokens"
        return {**sections, "algorithm": {**named, "over": over}} if is_filled else sections

    @field_validator("policies")
    @classmethod
    def _can_be_trained_together(
        cls, policies: dict[str, PolicySection], info: ValidationInfo
    ) -> dict[str, PolicySection]:
        sections = {name: info.data[name] for name in info.data if name not in ("policies", "agents")}
        if len(sections) + 2 < len(cls.model_fields):  # another section is invalid, which is reported
            return policies
        refuse(problems_of(cls, policies, sections))
        return policies

    @field_validator("*")
    @classmethod
    def _agrees_with_the_others(cls, section: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        refuse(broken_rules({**info.data, name: section}, name), are_located=True)
        return section
