"""Every key of a configuration: its type, default, range, unit and meaning.

The models are frozen and read once; a class takes the values it uses, never the whole. An algorithm owns its own keys.
Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rlsys.algorithm import Algorithm, Signal, version_after
from rlsys.config.config_problems import nested
from rlsys.config.curriculum_section import CurationSection
from rlsys.config.dashboard_section import DashboardSection, Thresholds
from rlsys.config.eval_section import EvalSection
from rlsys.config.plugins import (
    ALGORITHMS,
    STABILIZERS,
    WORKFLOWS,
    AlgorithmSection,
    StabilizerSection,
    TrackerSection,
    WorkflowSection,
)
from rlsys.config.policy_sections import PolicyName, PolicySection, problems_of, unbound
from rlsys.config.reward_section import RewardSection
from rlsys.config.section import Section
from rlsys.data.row_adapters import Columns
from rlsys.stabilizer import StabilizerPlugin


def _resume(value: str) -> str:
    if value not in ("auto", "never", "must") and "/" not in value:
        raise PydanticCustomError("resume", "should be auto, never, must, or the folder of a run (with a `/` in it)")
    return value


PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""By the type engines compute in: well above the rounding of two right implementations, which is 1e-5 and 0.04."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class RunSection(Section):
    """The run as a whole."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Name of the run; its directory is `folder/name`."""
    folder: Path = Path("runs")
    """Where run directories go."""
    seed: NonNegativeInt = 0
    """Root of every random stream: task order and sampling. Same seed and configuration, same run."""
    steps: PositiveInt
    """Optimizer steps of the whole run, those before a resume included."""
    resume: Annotated[str, AfterValidator(_resume)] = "never"
    """never: a new run; refused where an earlier one took a step. auto: go on from its latest checkpoint, else start.
    must: go on, or fail. A folder: start a new run from the latest checkpoint of that one."""


class ModelSection(Section):
    """The policy that is trained."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face causal language model with its tokenizer, or `org/name` on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that generate and compute gradients; the optimizer always keeps a float32 copy."""


ColumnName = Annotated[str, Field(min_length=1)]


class ColumnsSection(Section):
    """Where the parts of a task are, by the names of the file; `a.b` looks inside objects."""

    prompt: ColumnName | None = None
    """Text or messages; None: `prompt`, `messages` or `question`."""
    answer: ColumnName | None = None
    """What is right; None: `reward_model.ground_truth` (verl), `reward_spec.ground_truth` (SkyRL), `answer`,
    `ground_truth`, `solution` or `label`, the first that holds any."""
    id: ColumnName | None = None
    """Stable name of the row; None: `id`, or else a hash of the content."""

    def names(self) -> Columns:
        """The same, as `load_tasks` takes it."""
        return Columns(prompt=self.prompt, answer=self.answer, id=self.id)


class DataSection(Section):
    """The tasks."""

    path: str = Field(min_length=1)
    """JSONL or parquet file, folder or hub data set, of plain, TRL prompt-only, verl or SkyRL rows. `#split` at the end
    names one of several splits, and `org/name:config` a configuration of a hub data set."""
    columns: ColumnsSection = ColumnsSection()
    """Columns that have other names than those forms give them, in evaluation data too."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is dropped and counted as `too_long`."""
    shuffle: bool = True
    """Draw a new order every epoch (from `run.seed`), or keep the order of the file."""


class RolloutSection(Section):
    """The workers that generate."""

    engine: Literal["auto", "local", "vllm"] = "auto"
    """What generates. vllm: vLLM, in the replica's own process. local: continuous batching over the Hugging Face model.
    auto: vLLM where it is installed and worth it (on a GPU, or for a model of 50 million parameters), else local; the
    run says which and why."""
    replicas: PositiveInt = 1
    """Copies of the policy that generate side by side."""
    tensor_parallel: PositiveInt = 1
    """Shards of one replica, each a process with a GPU (or core) of its own; vLLM only."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. `{gpu_memory_utilization: 0.8}`; not those that rlsys sets itself."""
    slots: PositiveInt = 64
    """Sequences one replica decodes together; more wait their turn."""
    max_new_tokens: PositiveInt = 256
    """Longest completion of one turn, in tokens."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature; recorded logprobs are those of the tempered distribution."""
    weight_change: Literal["between", "inflight", "beside"] = "between"
    """between: new weights are loaded once no group is running, so a trajectory has one version. inflight: running
    sequences are paused, the weights swapped, and decoding goes on; each token carries its own version. beside: new
    weights lie beside the old, running sequences end on theirs, and new ones start at once; not with vLLM. A turn then
    has one version, and a trajectory of several turns may mix them from turn to turn; the bound on staleness holds."""
    resident_versions: Annotated[int, Field(ge=2)] | None = None
    """Sets of weights that a replica holds with weight_change `beside`; a further one waits until nothing runs on the
    oldest. None: 2."""
    repack_s: NonNegativeFloat = 5.0
    """Seconds between two looks at which replicas are nearly done with old weights: they hand what still runs to one of
    them, and the others take new weights and start anew. 0: never. With weight_change `between`, where running groups
    hold new weights back, and several replicas."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What becomes of the cached keys and values of sequences that a change in flight finds running. keep: the next
    tokens see those of the weights before. recompute: they are computed anew, so that later tokens are exactly those
    of the new weights, at the price of a prefill."""
    probe_tolerance: PositiveFloat | None = None
    """Most that a replica's logprobs may differ from the trainer's own, right after a change, on average over the same
    tokens, in nats; a replica above it is replaced. None: 1e-3 in float32, 0.1 in bfloat16."""
    workflow: WorkflowSection = Field(default_factory=lambda: WORKFLOWS.read({}))
    """Who speaks when on a task: `type` (the name of an installed workflow, or `module:Name` of yours; single_turn) and
    that workflow's own keys. `workflow: NAME` is short for `workflow: {type: NAME}`."""
    threads: PositiveInt = 1
    """CPU threads of one replica."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one replica."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one replica."""


class TrainSection(Section):
    """The worker that learns, and one step of it (AdamW)."""

    groups_per_step: PositiveInt = 32
    """Groups of one step; each holds `algorithm.group_size` episodes."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates of one step, each on other groups of it. Above 1, the later ones train on tokens of the weights
    before the step."""
    ranks: PositiveInt = 1
    """Data-parallel processes."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`."""
    final_lr_fraction: Fraction = 1.0
    """Learning rate of the last step over `lr`, reached linearly after the warm-up; 1 keeps it constant."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm, over all parameters and ranks."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of one forward and backward pass, shared prompts counted once. Bounds memory, changes no gradient."""
    threads: PositiveInt = 1
    """CPU threads of one rank."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one rank."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one rank."""

    @field_validator("updates_per_step")
    @classmethod
    def _has_groups_for_each(cls, updates_per_step: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups_per_step", updates_per_step)
        if updates_per_step > groups:
            raise ValueError(f"{updates_per_step} updates need as many groups, and train.groups_per_step is {groups}")
        return updates_per_step


class AsynchronySection(Section):
    """How far generation may run ahead of learning."""

    max_staleness: NonNegativeInt = 0
    """Most steps between the weights a trained token was sampled from and those it trains; 0: synchronous."""
    window: PositiveInt = 1
    """How far past the oldest unfinished group the learner may look for a finished one; 1: strictly in order."""

    def bound(self, groups_per_step: int) -> int:
        """Most versions a trained token can be behind: `max_staleness` at window 1, more the further groups
        overtake."""
        return ((self.max_staleness + 1) * groups_per_step + self.window - 2) // groups_per_step


class ReferenceSection(Section):
    """The frozen initial model; it runs only where the algorithm asks for it."""

    threads: PositiveInt = 1
    """CPU threads of the worker."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for the worker."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for the worker."""


class CriticSection(Section):
    """The model of values; it runs only where the algorithm asks for values, on `train.ranks` ranks."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """Model that it begins as, a folder or `org/name` on the hub; None: `model.path`."""
    lr: PositiveFloat | None = None
    """Peak learning rate; its course over the run is that of the policy. None: ten times `train.lr`, because its head
    begins at 0."""
    threads: PositiveInt = 1
    """CPU threads of one rank."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one rank."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one rank."""


class CheckpointSection(Section):
    """What is saved, and when."""

    every: NonNegativeInt = 50
    """Steps between two checkpoints; 0: only at the end and on interruption."""
    keep_last: PositiveInt = 3
    """Checkpoints kept; older ones are deleted."""


class LimitsSection(Section):
    """Deadlines, and how much failure is too much."""

    lease_s: PositiveFloat = 600.0
    """Deadline of rolling out one group, seconds; then its replica is replaced and the group issued again. Waiting at
    the replica for weights does not count. Of a reward worker: deadline of scoring one group."""
    transfer_s: PositiveFloat = 120.0
    """Deadline of one weight transfer, seconds. A single relay has a quarter of it to answer; one that does not is
    killed, and filled again."""
    step_s: PositiveFloat = 120.0
    """Deadline of one decoding step of an engine, seconds; then its replica is replaced."""
    no_progress_s: PositiveFloat = 900.0
    """Seconds without a finished group or step after which the run ends with a table of what is pending."""
    max_attempts: PositiveInt = 3
    """Times that rolling out one group or scoring it fails, or its payload is lost, before the run ends; each is
    counted apart."""
    max_failed_groups: PositiveInt = 16
    """Groups dropped in a row, failed or too long, that end the run."""
    max_no_signal_groups: PositiveInt = 1000
    """Groups in a row with nothing to learn in them, such as equal rewards, that end the run; a tenth of them is
    told."""


class RecordSection(Section):
    """What is written besides metrics and events."""

    rollouts_every: NonNegativeInt = 1
    """Steps between two whose rollouts are written as text; 0: never."""


class RaySection(Section):
    """The cluster."""

    address: str | None = None
    """`auto`, `host:port` or `ray://host:port`. None: join this process's connection or the job's cluster, else start a
    local one."""
    num_cpus: PositiveInt | None = None
    """CPUs of a local cluster; None: those of the machine."""


class Config(Section):
    """Everything one training job is told. Build it here, or read it with `Config.load`."""

    run: RunSection
    model: ModelSection
    data: DataSection
    algorithm: AlgorithmSection = Field(default_factory=lambda: ALGORITHMS.read({}))
    """`type` (the name of an installed algorithm, or `module:Name` of yours; grpo) and that algorithm's own keys."""
    stabilizer: StabilizerSection | None = Field(default_factory=lambda: STABILIZERS.read({}))
    """`type` (the name of an installed stabilizer, or `module:Name` of yours; gac) and that stabilizer's own keys;
    null: none."""
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
    """Where metrics go besides the files of the run: `[{type: wandb, project: sums}, tensorboard]`; each has a `type`
    (the name of an installed tracker, or `module:Name` of yours) and that tracker's own keys."""
    dashboard: DashboardSection = DashboardSection()
    alerts: Thresholds = Field(default={})
    """Thresholds by the name of an alert, instead of its own, `{entropy_collapse: 0.1, idle_side: null}`; null: it is
    not raised."""
    ray: RaySection = RaySection()
    policies: dict[PolicyName, PolicySection] = Field(default={})
    """Several policies by name, each with the keys in which it differs from the sections above: `{proposer: {}, solver:
    {train: {lr: 1e-5}}, judge: {is_frozen: true, model: {path: ...}}}`. None: one, which all agents speak with."""
    agents: dict[str, str] = Field(default={})
    """Which policy speaks for an agent, by its name in the workflow; for one that is not here, the policy of its
    name."""

    @classmethod
    def load(cls, paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Self:
        """Read files left to right, then overrides like `train.lr=1e-5`; later wins.

        Raises `ConfigError` listing every problem of all of them.
        """
        from rlsys.config.loader import load  # it needs this class

        return load(cls, [paths] if isinstance(paths, str | Path) else paths, overrides)

    def to_yaml(self) -> str:
        """Every key with its value, as `config.resolved.yaml` holds it; `load` gives it back."""
        from rlsys.config.loader import dump

        return dump(self.model_dump(mode="json"))

    @property
    def run_dir(self) -> Path:
        """The directory of this run: `run.folder/run.name`."""
        return self.run.folder / self.run.name

    def of(self, policy: str) -> Config:
        """The run of one of several policies by itself, in the directory `policies/NAME` of this one."""
        run, resume = self.run, self.run.resume
        sections = {name: getattr(self, name) for name in type(self).model_fields if name not in ("policies", "agents")}
        resume = f"{resume}/policies/{policy}" if "/" in resume else resume
        sections["run"] = run.model_copy(update={"folder": self.run_dir / "policies", "name": policy, "resume": resume})
        sections["rollout"] = self.rollout.model_copy(update={"repack_s": 0.0})  # its groups stay where they are
        return type(self).model_validate(self.policies[policy].over(sections))

    @property
    def trained(self) -> dict[str, Config]:
        """By name the run of every policy that is trained, of several."""
        return {name: self.of(name) for name, policy in self.policies.items() if not policy.is_frozen}

    @property
    def probe_tolerance(self) -> float:
        """Mean |difference| of logprobs tolerated between a replica and the trainer right after a change, in nats."""
        if self.rollout.probe_tolerance is not None:
            return self.rollout.probe_tolerance
        return PROBE_TOLERANCE[self.model.dtype]

    @property
    def resident_versions(self) -> int:
        """Sets of weights that a replica holds at the same time."""
        return (self.rollout.resident_versions or 2) if self.rollout.weight_change == "beside" else 1

    @property
    def permits(self) -> int:
        """Groups in the pipe at once, so that none can exceed `max_staleness`.

        A group admitted now waits behind at most `max_staleness` steps of earlier groups, and a step is one version.
        """
        return (self.asynchrony.max_staleness + 1) * self.train.groups_per_step

    @property
    def staleness_bound(self) -> int:
        """Most versions a trained token can be behind; see `AsynchronySection.bound`."""
        return self.asynchrony.bound(self.train.groups_per_step)

    @property
    def samples_per_step(self) -> int:
        """Episodes of one step."""
        return self.train.groups_per_step * self.algorithm.group_size

    @field_validator("algorithm")
    @classmethod
    def _asks_for_what_can_be_made(cls, algorithm: Algorithm) -> Algorithm:
        if unknown := sorted(str(signal) for signal in algorithm.signals if not isinstance(signal, Signal)):
            asked, known = ", ".join(unknown), ", ".join(Signal)
            raise ValueError(f"{type(algorithm).__name__} asks for {asked}, which no worker makes; signals are {known}")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _trains_the_policy(cls, algorithm: Algorithm, info: ValidationInfo) -> Algorithm:
        run = info.data.get("run")
        if run is not None and not any(map(algorithm.trains_policy, range(run.steps))):
            name = type(algorithm).__name__
            raise ValueError(
                f"{name} trains the policy in none of the {run.steps} steps (run.steps): its warm-up is longer"
            )
        return algorithm

    @field_validator("stabilizer")
    @classmethod
    def _is_done_before_the_end(cls, plugin: StabilizerPlugin | None, info: ValidationInfo) -> StabilizerPlugin | None:
        run, algorithm = info.data.get("run"), info.data.get("algorithm")
        if run is None or algorithm is None or plugin is None or not (needed := plugin.synchronous_steps):
            return plugin
        if version_after(algorithm, needed, start=0, end=run.steps) < run.steps:
            return plugin
        raise ValueError(
            f"{type(plugin).__name__} needs {needed} synchronous steps that train the policy before it does anything, "
            f"and the run ends first (run.steps is {run.steps}): make the run longer, or let it need fewer"
        )

    @field_validator("policies")
    @classmethod
    def _can_be_trained_together(
        cls, policies: dict[str, PolicySection], info: ValidationInfo
    ) -> dict[str, PolicySection]:
        sections = {name: info.data[name] for name in info.data if name not in ("policies", "agents")}
        if len(sections) + 2 < len(cls.model_fields):  # one of them is wrong, which is told
            return policies
        if problems := list(problems_of(cls, policies, sections)):
            raise nested(problems)
        return policies

    @field_validator("agents")
    @classmethod
    def _are_bound(cls, agents: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if problems := list(unbound(agents, info.data.get("policies", dict.fromkeys(agents.values())))):
            raise nested(problems)
        return agents

    @field_validator("rollout")
    @classmethod
    def _fits_the_engine(cls, rollout: RolloutSection) -> RolloutSection:
        shards, change = rollout.tensor_parallel, rollout.weight_change
        is_beside, problems = change == "beside", []
        if shards > 1 and rollout.engine == "local":
            problems.append((("tensor_parallel",), f"{shards} needs the engine vllm: local has no shards"))
        if rollout.num_gpus and rollout.num_gpus < shards:
            problems.append((("num_gpus",), f"should be {shards}, one for each shard (rollout.tensor_parallel)"))
        if is_beside and (rollout.engine == "vllm" or shards > 1):
            problems.append((("weight_change",), "beside needs the engine local: vllm holds one version at a time"))
        if rollout.resident_versions is not None and not is_beside:
            text = f"needs weight_change beside: with {change} a replica holds one version at a time"
            problems.append((("resident_versions",), text))
        if problems:
            raise nested(problems)
        return rollout

    @field_validator("curation")
    @classmethod
    def _goes_with_the_rest(cls, curation: CurationSection, info: ValidationInfo) -> CurationSection:
        algorithm, asynchrony = info.data.get("algorithm"), info.data.get("asynchrony")
        if algorithm is None:
            return curation
        if problems := curation.problems(algorithm, asynchrony and asynchrony.max_staleness):
            raise nested(problems)
        return curation

    @field_validator("asynchrony")
    @classmethod
    def _is_safe(cls, asynchrony: AsynchronySection, info: ValidationInfo) -> AsynchronySection:
        algorithm, train = info.data.get("algorithm"), info.data.get("train")
        if algorithm is None or train is None or (bound := algorithm.max_safe_staleness) is None:
            return asynchrony
        if (staleness := asynchrony.bound(train.groups_per_step)) <= bound:
            return asynchrony
        text = (
            f"{staleness} is more than {type(algorithm).__name__} is safe for ({bound}): its loss does "
            f"not correct for older tokens; set it to {bound} or less, or choose an algorithm that corrects for them"
        )
        raise nested([(("max_staleness",), text)])
