"""Schema of a configuration: type, default, range, unit and meaning of every key.

The models are frozen and read once; a class takes the values it uses, never the whole configuration. Keys of an
algorithm belong to the algorithm. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlsys.algorithm import REFERENCE_SIGNALS, Algorithm, Signal, version_after
from rlsys.config.chat_section import ChatSection
from rlsys.config.config_problems import Problem, nearest, nested, refuse, shown, union_tag
from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
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
from rlsys.config.reward_section import Functions, RewardSection, specs_of
from rlsys.config.sections import (
    CurationSection,
    DashboardSection,
    EvalSection,
    Fraction,
    Section,
    Thresholds,
    dataset_name,
)
from rlsys.config.server_section import ServerSection
from rlsys.data.row_adapters import Columns
from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardSpec
from rlsys.stabilizer import StabilizerPlugin
from rlsys.types import Answers, Distribution, Sampling


def _resume(value: str) -> str:
    if value not in ("auto", "never", "must") and "/" not in value:
        raise PydanticCustomError(
            "resume", "should be auto, never, must, or the folder of a run, or its URL (with a `/` in it)"
        )
    return value


ON_CPU_SLOTS, ON_CPU_MICRO_BATCH_TOKENS = 64, 8192
"""Values of `rollout.slots` and `train.micro_batch_tokens` on CPUs, see `rlsys.launch.device_defaults`."""
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Tolerance by the type that engines compute in. Rounding of two correct implementations is 1e-5 and 0.04."""
_WRONG_ORIGIN: Mapping[Answers, str] = {
    "recorded": "its answers are recorded, and {} needs answers that the policy sampled: its loss compares with the "
    "sampler's probabilities; set algorithm.type to kto or sft",
    "sampled": "its answers are sampled, and {} would teach the policy what it does already: set "
    "algorithm.reward_above to train on the best, or take the workflow demonstrations or offline",
}
_OF_THE_SERVER = {
    "vllm_args": "these are arguments of the server: give them to it",
    "num_gpus": "the server has the GPUs: set 0",
}
Momentum = Annotated[float, Field(ge=0, lt=1)]


class RunSection(Section):
    """General settings of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Name of the run; its directory is `folder/name`."""
    folder: Path = Path("runs")
    """Parent folder of run directories."""
    seed: NonNegativeInt = 0
    """Root of every random stream: task order and sampling. The same seed and configuration give the same run."""
    steps: NonNegativeInt = 0
    """Optimizer steps of the whole run, including those before a resume. Set this or `epochs`."""
    epochs: NonNegativeFloat = 0.0
    """Passes over the tasks of all sources, instead of `steps`: `epochs` * tasks / `train.groups_per_step` steps,
    rounded up. A task that is dropped is drawn, and fills no step."""
    resume: Annotated[str, AfterValidator(_resume)] = "never"
    """never: start a new run; refused if an earlier run took a step. auto: resume from the latest checkpoint, or its
    copy (`checkpoint.copy_to`), else start. must: resume, or fail. A folder: start a new run from the latest checkpoint
    of the run in that folder. A URL: the same, from the copies of that run, `COPY_TO/NAME`."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if bool(self.steps) == bool(self.epochs):
            text = "give the number of steps here, or that of passes over the data in run.epochs, and not both"
            refuse([(("steps",), text)])
        return self


class ModelSection(Section):
    """The trained policy."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face causal language model with its tokenizer, or `org/name` on the hub."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights for generation and gradients; the optimizer always keeps a float32 copy. None: bfloat16 if
    ranks and replicas have GPUs and the model is stored so, else float32."""


class WeightFrom(Section):
    """Weight of a source from a step on."""

    step: PositiveInt
    """First step; tasks count by `train.groups_per_step` as they are drawn."""
    weight: NonNegativeFloat
    """Share of the tasks, as in `weight`."""


class SourceSection(Section):
    """One of several sources of training tasks."""

    path: str = ""
    """As `data.path`."""
    proposed: bool = False
    """Tasks that episodes of this run propose (`Session.propose`), instead of those of a file. Nothing is drawn until
    there is one."""
    name: str = Field("", pattern=r"^[\w.-]*$")
    """Name in metrics, messages and checkpoints; empty: that of the file."""
    weight: NonNegativeFloat = 1.0
    """Share of the tasks that are drawn, over the sum of all weights; 0: none."""
    later_weights: list[WeightFrom] = Field(default=[])
    """Weights from later steps on, for a curriculum: `[{step: 100, weight: 0.5}]`."""
    shuffle: bool | None = None
    """Order of this source, as `data.shuffle`; `false` keeps a file that goes from easy to hard. None:
    `data.shuffle`."""
    system: str | None = None
    """System message of conversations about these tasks; empty: none; None: `rollout.chat.system`."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template for these tasks, before those of `rollout.chat`; a row's own come first."""
    columns: Columns | None = None
    """Column names of this source; None: `data.columns`."""
    reward: Functions | None = None
    """Reward of the tasks of this source, in the form of `reward.fn`; None: `reward.fn`."""

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if bool(self.path) == self.proposed:
            refuse([(("path",), "give either a file or data set here, or proposed: true")])
        if self.proposed and not self.name:
            refuse([(("name",), "a source of proposed tasks needs a name")])
        return self if self.name else self.model_copy(update={"name": dataset_name(self.path)})

    def weight_at(self, step: int) -> float:
        """Weight that holds from a step on."""
        return next((later.weight for later in reversed(self.later_weights) if later.step <= step), self.weight)


class DataSection(Section):
    """The training tasks. A list is short for `sources`."""

    path: str = ""
    """JSONL, JSON, CSV or parquet file, folder or hub data set, of plain, TRL prompt-only, verl or SkyRL rows. `#split`
    at the end selects one of several splits, and `org/name:config` a configuration of a hub data set."""
    sources: list[SourceSection] = Field(default=[])
    """Several sources instead of `path`: `[{path: a.jsonl, weight: 0.8}, {path: b.jsonl, weight: 0.2, reward: math}]`.
    Any number of tasks has those shares, and each source its own order and place, which a resume keeps. A source that
    is added begins at its beginning."""
    columns: Columns = Columns()
    """Column names that differ from those of the supported forms, in evaluation data too."""
    max_prompt_tokens: PositiveInt = 1024
    """A task with a longer prompt is dropped and counted as `too_long`; later turns are bounded by
    `rollout.max_context_tokens`."""
    shuffle: bool = True
    """Draw a new order every epoch (from `run.seed`), or keep the order of the file."""
    balance_by: str | None = None
    """Column of the rows, such as a topic or a level: tasks with each of its values are drawn equally often, within
    their source. None: as often as there are."""

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, given: object) -> object:
        return {"sources": given} if isinstance(given, list) else given

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        names = [source.name for source in self.sources]
        problems: list[Problem] = []
        if bool(self.path) == bool(self.sources):
            problems.append((("path",), "give either one file or data set here, or several in data.sources"))
        for step, weights in self.weights_by_step.items():
            if not any(weights[source.name] for source in self.sources if not source.proposed):
                since = f" from step {step} on" if step else ""
                which = "of sources with a path " if any(source.proposed for source in self.sources) else ""
                problems.append((("sources",), f"all weights {which}are 0{since}, so there is no task to train on"))
        if sum(source.proposed for source in self.sources) > 1:
            problems.append((("sources",), "only one source can have proposed: true"))
        for index, source in enumerate(self.sources):
            steps = [later.step for later in source.later_weights]
            if steps != sorted(set(steps)):
                problems.append((("sources", index, "later_weights"), "the steps should increase"))
        for index, name in enumerate(names):
            if name in names[:index]:
                problems.append((("sources", index, "name"), f"{name!r} is the name of another source too"))
        refuse(problems)
        return self

    @property
    def weights_by_step(self) -> dict[int, dict[str, float]]:
        """Weights of the sources by name, by the step from which they hold."""
        steps = {0 for _ in self.sources} | {later.step for source in self.sources for later in source.later_weights}
        return {step: {source.name: source.weight_at(step) for source in self.sources} for step in sorted(steps)}


_NAME, _SERVER = union_tag("name"), union_tag("server")
EngineKey = Annotated[
    Annotated[Literal["auto", "local", "vllm"], Tag(_NAME)] | Annotated[ServerSection, Tag(_SERVER)],
    Discriminator(lambda value: _SERVER if isinstance(value, dict | ServerSection) else _NAME),
]


class EarlyEndsSection(Section):
    """Early ends of episodes whose group is settled: all of those that have ended so far have the same reward."""

    after: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the group's episodes that must have ended."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Probability with which each of the others goes on. Those that do stand for all of them, with the weight
    1 / `keep`."""


class RolloutSection(Section):
    """Workers that generate rollouts."""

    engine: EngineKey = "auto"
    """Inference engine. vllm: vLLM, in the replica's own process. local: continuous batching over the Hugging Face
    model. auto: vLLM if it is installed and pays off (on a GPU, or for a model of 50 million parameters), else local;
    the run reports the choice and the reason. `{type: vllm_server, urls: [...]}`: vLLM servers that run already."""
    replicas: PositiveInt = 1
    """Copies of the policy that generate in parallel."""
    tensor_parallel: PositiveInt = 1
    """Shards of one replica, each a process with a separate GPU (or core); vLLM only."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. `{gpu_memory_utilization: 0.8}`, except those that rlsys sets."""
    slots: PositiveInt | None = None
    """Sequences that one replica decodes together; further ones wait. None: 64 on a CPU; on a GPU as many as its memory
    has room for, a power of two up to 256."""
    max_new_tokens: PositiveInt = 256
    """Longest completion of one turn, in tokens."""
    max_context_tokens: PositiveInt | None = None
    """Longest conversation with its last reply, in tokens; a longer one ends as truncated. None:
    `data.max_prompt_tokens` + `rollout.max_new_tokens`."""
    chat: ChatSection = ChatSection()
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature; recorded logprobs are those of the tempered distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that have this probability together; 1: from all. Trained tokens have the
    logprobs of this truncated distribution too."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: from all. As with `top_p`, the truncated distribution is trained."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens with at least this share of the largest probability; 0: from all. As with `top_p`, the
    truncated distribution is trained."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that end a reply, e.g. `["</answer>"]`; they belong to it, and are trained."""
    weight_change: Literal["between", "inflight", "beside"] = "between"
    """Loading of new weights. between: load once no group is running, so a trajectory has one version. inflight: pause
    running sequences, swap the weights, and continue decoding; each token records its version. beside: load next to the
    old weights; running sequences end on the old ones, and new ones start at once; in vLLM only adapters (train.lora).
    A turn then has one version, while a trajectory may mix versions from turn to turn; the bound on staleness
    applies."""
    resident_versions: Annotated[int, Field(ge=2)] | None = None
    """Most sets of weights in one replica with weight_change `beside`; a further set waits until no sequence runs on
    the oldest. None: 2."""
    early_ends: EarlyEndsSection | None = None
    """End redundant episodes of a group early, once its advantages are settled (after DeepPrune, arXiv:2510.08483). The
    reward functions then also run where groups are played, and which episodes end depends on timing. None: every
    episode is played to its end."""
    repack_s: NonNegativeFloat = 5.0
    """Seconds between two checks for replicas that are nearly done with old weights. One of them takes over the
    requests of the others, which load new weights. 0: never. Applies to several replicas with weight_change `between`,
    where running groups delay new weights."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Cached keys and values of running sequences when weights change inflight. keep: later tokens attend to those of
    the old weights. recompute: they are computed again, so that later tokens are exactly those of the new weights, at
    the cost of a prefill."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean difference of logprobs between a replica and the trainer on the same tokens, right after a weight
    change, in nats; a replica above it is replaced. None: 1e-3 in float32, 0.1 in bfloat16."""
    workflow: WorkflowSection = Field(default_factory=lambda: WORKFLOWS.read({}))
    """Workflow of a task: `type` (the name of an installed workflow, or `module:Name` of yours; default single_turn)
    and that workflow's own keys. `workflow: NAME` is short for `workflow: {type: NAME}`."""
    threads: PositiveInt = 1
    """CPU threads of one replica."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one replica."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one replica; a replica without shards may have a part of one, e.g. 0.5."""

    @property
    def distribution(self) -> Distribution:
        """The distribution that is sampled from, and trained."""
        return Distribution(self.temperature, self.top_p, self.top_k, self.min_p)

    def sampling(self, temperature: float) -> Sampling:
        """Sampling parameters of a turn; evaluation has a temperature of its own."""
        return Sampling(temperature, self.top_p, self.top_k, self.min_p, self.max_new_tokens, tuple(self.stop))


ActivationCheckpointing: TypeAlias = Literal["none", "selective", "full"]
"""Activations of a decoder layer that are not kept for the backward, but computed again: none; all but the results of
matrix products and of attention; all but the layer's input."""
GatherWeights: TypeAlias = Literal["micro_batch", "update"]
"""How long gathered weights, and the gradient that is not yet summed over ranks, are kept."""
LrStaleness: TypeAlias = Literal["none", "sqrt", "linear"]
"""Divisor of the learning rate for the age of samples: 1, the root of 1 + s, or 1 + s."""


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """The keys of `train` by which a rank saves memory and spends time. None changes what is computed."""

    activation_checkpointing: ActivationCheckpointing = "none"
    gather_weights: GatherWeights = "micro_batch"
    offload: bool = False


NO_SAVINGS = MemorySavings()


class TrainSection(Section):
    """Worker that trains, and the settings of one step (AdamW)."""

    groups_per_step: PositiveInt = 32
    """Groups of one step; each has `algorithm.group_size` episodes."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates of one step, each on other groups. Above 1, later updates train on tokens of the weights before
    the step."""
    mesh: MeshSection = MeshSection()
    """Processes that train a model together, the actor and the critic each, and how they split it: `{shard: 8}`."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`."""
    final_lr_fraction: Fraction = 1.0
    """Learning rate of the last step over `lr`, reached by `lr_schedule` after the warm-up; 1 keeps it constant."""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """Way from `lr` to `final_lr_fraction` of it after the warm-up: a line, or half a cosine."""
    lr_staleness: LrStaleness = "none"
    """Divisor of the policy's learning rate for the age of samples, s versions on average over the tokens of the step:
    `none`; `sqrt`: the root of 1 + s; `linear`: 1 + s."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm, over all parameters and ranks."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of one forward and backward pass, a row without padding in which shared prefixes count once; at least
    those of one sample. Bounds memory, changes no gradient. None: 8192 on a CPU; on a GPU as many as its memory has
    room for, a power of two up to 32,768 or one sample."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that a decoder layer computes again for its backward, instead of keeping them: `none`; `selective`:
    all but the results of matrix products and of attention; `full`: all. Saves memory for time, changes no gradient."""
    gather_weights: GatherWeights = "micro_batch"
    """How often ranks gather sharded weights and sum gradients: `micro_batch`: in every forward and backward pass;
    `update`: once. `update` keeps the whole model in `model.dtype` and its whole gradient in fp32 on every rank during
    an update, 6 bytes a parameter in bfloat16."""
    offload: bool = False
    """True to keep shards, gradients and optimizer state in host memory: a rank's GPU has only what it computes with,
    and the optimizer runs on the CPU. A rank on a CPU has its state in host memory anyway."""
    lora: LoraSection | None = None
    """Adapters that are trained instead of all weights, for the policy and the critic; null: none. `lora: {}` has the
    defaults."""
    routing_replay: bool = False
    """True to train a model with experts on those that the engine chose for each token, which rounding would let the
    trainer choose otherwise. Not supported by vLLM on a CPU."""
    threads: PositiveInt = 1
    """CPU threads of one rank."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one rank."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one rank."""

    @property
    def savings(self) -> MemorySavings:
        return MemorySavings(self.activation_checkpointing, self.gather_weights, self.offload)

    @field_validator("lr_schedule")
    @classmethod
    def _has_an_end(cls, schedule: str, info: ValidationInfo) -> str:
        if schedule == "cosine" and info.data.get("final_lr_fraction") == 1:
            raise ValueError("cosine with train.final_lr_fraction 1 is constant: set that to the end, e.g. 0.1 or 0")
        return schedule

    @field_validator("lora")
    @classmethod
    def _is_not_split(cls, lora: LoraSection | None, info: ValidationInfo) -> LoraSection | None:
        mesh = info.data.get("mesh", MeshSection())
        if lora is not None and mesh.tensor * mesh.expert > 1:
            raise ValueError(
                f"adapters of split layers are not supported, and train.mesh is {mesh}: use shard, replicate or context"
            )
        return lora

    @field_validator("updates_per_step")
    @classmethod
    def _has_groups_for_each(cls, updates_per_step: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups_per_step", updates_per_step)
        if updates_per_step > groups:
            raise ValueError(f"{updates_per_step} updates need as many groups, and train.groups_per_step is {groups}")
        return updates_per_step


class AsynchronySection(Section):
    """Distance between generation and training."""

    max_staleness: NonNegativeInt = 0
    """Most steps between the weights that sample a token and the weights that it trains; 0: synchronous."""
    adaptive: bool = True
    """Have no more groups in flight than keep the trainer busy: those beyond only grow old. `false`: always as many as
    `max_staleness` allows, so that nearly every token is that old."""
    window: PositiveInt = 1
    """Number of groups, from the oldest unfinished one on, that the learner may choose from; 1: strictly in order."""

    @property
    def is_adaptive(self) -> bool:
        """True if the number of groups in flight can be adapted."""
        return self.adaptive and self.max_staleness > 0

    def bound(self, groups_per_step: int) -> int:
        """Largest staleness of a trained token: `max_staleness` at window 1, more at larger windows."""
        return ((self.max_staleness + 1) * groups_per_step + self.window - 2) // groups_per_step


class ReferenceSection(Section):
    """Frozen model, the initial one or a teacher. It runs only where the algorithm asks for it, and the initial model
    not with `train.lora`: there the ranks of the actor compute its columns, without the adapter."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """Another model, such as the teacher of `distill`: a folder or `org/name` on the hub, with the vocabulary of the
    policy. None: `model.path`."""
    threads: PositiveInt = 1
    """CPU threads of the worker."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for the worker."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for the worker."""


class CriticSection(Section):
    """Value model; runs only if the algorithm needs values, on ranks in the same mesh as those of the policy."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """Initial model, a folder or `org/name` on the hub; None: `model.path`."""
    lr: PositiveFloat | None = None
    """Peak learning rate, with the schedule of the policy. None: ten times `train.lr`, as its head starts at 0."""
    threads: PositiveInt = 1
    """CPU threads of one rank."""
    num_cpus: NonNegativeFloat = 1.0
    """CPUs Ray reserves for one rank."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs Ray reserves for one rank."""


class CheckpointSection(Section):
    """Checkpoints of the run."""

    every: NonNegativeInt = 50
    """Steps between two checkpoints; 0: only at the end, on interruption, and by `every_s`."""
    every_s: NonNegativeFloat = 600.0
    """Seconds after which the next step is saved too, whatever `every` is: about what a crash can lose. 0: never."""
    keep_last: PositiveInt = 3
    """Checkpoints kept; older ones are deleted."""
    keep_every: NonNegativeInt = 0
    """Keep checkpoints of steps that are multiples of this too; 0: none."""
    keep_best: NonNegativeInt = 0
    """Keep so many of the best checkpoints too, by `best_by`, and save every evaluated step; 0: none."""
    best_by: str | None = None
    """Metric of the evaluation that `keep_best` compares, e.g. `eval/held_out/mean`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Direction in which `best_by` is better."""
    early_stopping_patience: NonNegativeInt = 0
    """Evaluations in a row without a better value of `best_by` that end the run early; needs `keep_best`. 0: never."""
    copy_to: str | None = None
    """Folder or bucket to which each checkpoint is copied in the background, a URL of fsspec such as `s3://bucket/path`;
    the copies of the run are in `copy_to/NAME`. Credentials come from the environment. None: no copies."""

    @field_validator("copy_to")
    @classmethod
    def _is_url(cls, copy_to: str | None) -> str | None:
        if copy_to is not None and "://" not in copy_to:
            raise ValueError(f"should be a URL, such as s3://bucket/path or file:///folder (got {shown(copy_to)})")
        return copy_to and copy_to.rstrip("/")


class LimitsSection(Section):
    """Deadlines, and limits on failures."""

    group_s: PositiveFloat = 1800.0
    """Seconds that one attempt at a group may wait for tokens; then the group is issued again. Time of tools and
    environments, of weights on their way, and without a replica does not count. Also the deadline of scoring one
    group."""
    transfer_s: PositiveFloat = 120.0
    """Least deadline of one weight transfer, seconds. To it comes ten times what the bytes take at the measured speed
    of the links. A single relay must answer within a quarter of it; otherwise it is killed and filled again."""
    step_s: PositiveFloat = 120.0
    """Deadline of one decoding step of an engine, seconds; after it, the replica is replaced."""
    silence_s: PositiveFloat = 6.0
    """Seconds without a heartbeat after which a rollout replica or a reward worker is replaced. A thread of its own
    answers for the worker, so a long computation does not count; a process that is stopped does."""
    no_progress_s: PositiveFloat = 900.0
    """Seconds without a finished group or step after which the run ends with a table of pending work."""
    max_attempts: PositiveInt = 3
    """Failed rollouts of one group, failed scorings, or losses of its payload before the run ends; each is counted
    separately."""
    max_failed_groups: PositiveInt = 16
    """Groups dropped in a row, failed or too long, that end the run."""
    max_no_signal_groups: PositiveInt = 1000
    """Groups in a row without a signal, such as equal rewards, that end the run; a tenth of this number causes a
    warning."""


class RecordSection(Section):
    """Files besides metrics and events."""

    rollouts_every: NonNegativeInt = 1
    """Steps between two whose rollouts are written; 0: never."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups to write in such a step; their ids decide which. `rlsys replay` needs all of them."""


class RaySection(Section):
    """Ray cluster of the run."""

    address: str | None = None
    """`auto` or `host:port`, of a cluster that this machine is a node of. None: join this process's connection or the
    job's cluster, else start a local one."""
    num_cpus: PositiveInt | None = None
    """CPUs of a local cluster; None: all CPUs of the machine."""

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, address: str | None) -> str | None:
        if address and address.startswith("ray://"):
            raise ValueError(
                "a driver must run inside the cluster, and ray:// is for programs outside: submit it with "
                "`ray job submit --address http://HEAD:8265`, or start it on a node with ray.address=auto"
            )
        return address


class Config(Section):
    """Complete configuration of a training job. Build it here, or read it with `Config.load`."""

    run: RunSection
    model: ModelSection
    data: DataSection
    algorithm: AlgorithmSection = Field(default_factory=lambda: ALGORITHMS.read({}))
    """`type` (the name of an installed algorithm, or `module:Name` of yours; default grpo) and its keys."""
    stabilizer: StabilizerSection | None = Field(default_factory=lambda: STABILIZERS.read({}))
    """`type` (the name of an installed stabilizer, or `module:Name` of yours; default gac) and its keys; null: none."""
    rollout: RolloutSection = Field(default=RolloutSection(), validate_default=True)
    reward: RewardSection = RewardSection()
    train: TrainSection = Field(default=TrainSection(), validate_default=True)
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
    dashboard: DashboardSection = DashboardSection()
    alerts: Thresholds = Field(default={})
    """Thresholds that replace the default of an alert, by its name, `{entropy_collapse: 0.1, idle_side: null}`; null:
    the alert is off."""
    ray: RaySection = RaySection()
    policies: dict[PolicyName, PolicySection] = Field(default={})
    """Several policies by name, each with the keys that differ from the sections above: `{proposer: {}, solver: {train:
    {lr: 1e-5}}, judge: {is_frozen: true, model: {path: ...}}}`. None: one policy for all agents."""
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
        """Every reward function: those of `reward.fn`, and those of single sources of data."""
        own = (spec for s in self.data.sources if s.reward is not None for spec in specs_of(s.reward, source=s.name))
        is_free = self.reward.fn is None and self.reward.model is None and not self.algorithm.uses_rewards
        return (*(specs_of("zero") if is_free else self.reward.functions), *own)

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a conversation, and so of a sample."""
        return self.rollout.max_context_tokens or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def run_dir(self) -> Path:
        """Directory of this run: `run.folder/run.name`."""
        return self.run.folder / self.run.name

    @property
    def copies(self) -> str | None:
        """URL of the copies of this run's checkpoints; None: there are none."""
        return self.checkpoint.copy_to and f"{self.checkpoint.copy_to}/{self.run.name}/checkpoints"

    def of(self, policy: str) -> Config:
        """Configuration of one of several policies as a run, in the directory `policies/NAME` of this run."""
        run, resume = self.run, self.run.resume
        sections = {name: getattr(self, name) for name in type(self).model_fields if name not in ("policies", "agents")}
        resume = f"{resume}/policies/{policy}" if "/" in resume else resume
        sections["run"] = run.model_copy(update={"folder": self.run_dir / "policies", "name": policy, "resume": resume})
        sections["rollout"] = self.rollout.model_copy(update={"repack_s": 0.0})  # its groups do not move
        if copies := self.checkpoint.copy_to:
            update = {"copy_to": f"{copies}/{run.name}/policies"}
            sections["checkpoint"] = self.checkpoint.model_copy(update=update)
        return type(self).model_validate(self.policies[policy].over(sections))

    @property
    def trained(self) -> dict[str, Config]:
        """Configuration of every trained policy by name, if there are several."""
        return {name: self.of(name) for name, policy in self.policies.items() if not policy.is_frozen}

    @property
    def probe_tolerance(self) -> float:
        """Largest mean |difference| of logprobs between replica and trainer right after a weight change, in nats."""
        if self.rollout.probe_tolerance is not None:
            return self.rollout.probe_tolerance
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
        return (self.rollout.resident_versions or 2) if self.rollout.weight_change == "beside" else 1

    @property
    def critic_lora(self) -> LoraSection | None:
        """The adapter of the critic: as `train.lora`, but without `path`, which is an adapter of the policy."""
        lora = self.train.lora
        return lora and lora.model_copy(update={"path": None})

    @property
    def has_reference(self) -> bool:
        """True if the run has a reference worker. An actor that trains an adapter computes those columns itself."""
        is_asked = bool(self.algorithm.signals & REFERENCE_SIGNALS)
        return is_asked and (self.train.lora is None or self.reference.path is not None)

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
        return self.algorithm.staleness_caution(self.staleness_bound, self.train.updates_per_step)

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
            over = WORKFLOWS.chosen(rollout.get("workflow", {})).loss_over
            default = getattr(ALGORITHMS.chosen(named), "over", None)
        except ConfigError:  # reported where the section is read
            return sections
        is_filled = over is not None and default == "tokens"
        return {**sections, "algorithm": {**named, "over": over}} if is_filled else sections

    @field_validator("algorithm")
    @classmethod
    def _can_be_trained(cls, algorithm: Algorithm, info: ValidationInfo) -> Algorithm:
        name = type(algorithm).__name__
        if unknown := sorted(str(signal) for signal in algorithm.signals if not isinstance(signal, Signal)):
            asked, known = ", ".join(unknown), ", ".join(Signal)
            raise ValueError(f"{name} asks for {asked}, which no worker makes; signals are {known}")
        run = info.data.get("run")
        if run is not None and run.steps and not any(map(algorithm.trains_policy, range(run.steps))):
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
        if not run.steps or version_after(algorithm, needed, start=0, end=run.steps) < run.steps:
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
        if len(sections) + 2 < len(cls.model_fields):  # another section is invalid, which is reported
            return policies
        refuse(problems_of(cls, policies, sections))
        return policies

    @field_validator("agents")
    @classmethod
    def _are_bound(cls, agents: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        refuse(unbound(agents, info.data.get("policies", dict.fromkeys(agents.values()))))
        return agents

    @field_validator("rollout")
    @classmethod
    def _fits_the_engine(cls, rollout: RolloutSection, info: ValidationInfo) -> RolloutSection:
        shards, change = rollout.tensor_parallel, rollout.weight_change
        is_beside, problems = change == "beside", []
        if shards > 1 and rollout.engine == "local":
            problems.append((("tensor_parallel",), f"{shards} needs the engine vllm: local has no shards"))
        if shards > 1 and isinstance(rollout.engine, ServerSection):
            problems.append((("tensor_parallel",), "shards are an argument of the server: set 1"))
        longest = info.data["data"].max_prompt_tokens if "data" in info.data else 0
        if rollout.max_context_tokens is not None and rollout.max_context_tokens <= longest:
            text = f"should be more than data.max_prompt_tokens ({longest}): a reply comes after the prompt"
            problems.append((("max_context_tokens",), text))
        if shards > 1 and 0 < rollout.num_gpus < shards:
            problems.append((("num_gpus",), f"should be {shards}, one for each shard (rollout.tensor_parallel)"))
        if rollout.resident_versions is not None and not is_beside:
            text = f"needs weight_change beside: with {change} a replica keeps one version at a time"
            problems.append((("resident_versions",), text))
        if isinstance(rollout.engine, ServerSection):
            problems += [((key,), text) for key, text in _OF_THE_SERVER.items() if getattr(rollout, key)]
            if is_beside:
                problems.append((("weight_change",), "a server keeps one set of weights: set between or inflight"))
            if change == "inflight" and rollout.kv_cache == "keep":
                text = "a server computes keys and values of running requests again: set this to recompute"
                problems.append((("kv_cache",), text))
            if len(rollout.engine.urls) < rollout.replicas:
                text = f"{len(rollout.engine.urls)} servers for {rollout.replicas} replicas: each needs its own"
                problems.append((("engine", "urls"), text))
        algorithm, workflow = info.data.get("algorithm"), rollout.workflow
        if algorithm is not None and workflow.answers not in algorithm.answers:
            problems.append((("workflow",), _WRONG_ORIGIN[workflow.answers].format(type(algorithm).__name__)))
        refuse(problems)
        return rollout

    @field_validator("train")
    @classmethod
    def _fits_the_replicas(cls, train: TrainSection, info: ValidationInfo) -> TrainSection:
        rollout = info.data.get("rollout")
        if rollout is None or rollout.weight_change != "beside" or train.lora is not None:
            return train
        if rollout.engine == "vllm" or rollout.tensor_parallel > 1:
            text = (
                "should be set: with rollout.weight_change beside, vLLM keeps several adapters, and one version of "
                "whole weights; or set rollout.engine to local"
            )
            raise nested([(("lora",), text)])
        return train

    @field_validator("train")
    @classmethod
    def _has_what_it_replays(cls, train: TrainSection, info: ValidationInfo) -> TrainSection:
        rollout = info.data.get("rollout")
        if rollout is not None and isinstance(rollout.engine, ServerSection):
            text = "a vLLM server takes whole weights, and tells nothing about experts: set this to "
            problems = [((key,), text + off) for key, off in (("lora", "null"), ("routing_replay", "false"))]
            refuse(problem for problem in problems if getattr(train, str(problem[0][0])))
        if rollout is None or not train.routing_replay or rollout.num_gpus:
            return train
        if rollout.engine == "vllm" or rollout.tensor_parallel > 1:
            text = "vllm records no experts on a CPU: set rollout.engine to local, or rollout.num_gpus"
            raise nested([(("routing_replay",), text)])
        return train

    @field_validator("curation")
    @classmethod
    def _goes_with_the_rest(cls, curation: CurationSection, info: ValidationInfo) -> CurationSection:
        algorithm, asynchrony = info.data.get("algorithm"), info.data.get("asynchrony")
        if algorithm is not None:
            refuse(curation.problems(algorithm, asynchrony and asynchrony.max_staleness))
        reward = info.data.get("reward")
        if curation.stored_successes and reward is not None and not reward.workers:
            text = "a reward worker puts them into groups: set reward.workers to 1 or more"
            raise nested([(("stored_successes",), text)])
        data = info.data.get("data")
        if curation.follows_signal and data is not None and not data.sources:
            raise nested([(("source_weights",), "there is one source of data: name several in data, or set fixed")])
        return curation

    @field_validator("eval")
    @classmethod
    def _has_servers(cls, evaluation: EvalSection, info: ValidationInfo) -> EvalSection:
        rollout = info.data.get("rollout")
        if rollout is None or not evaluation.every or not isinstance(rollout.engine, ServerSection):
            return evaluation
        count, needed = len(rollout.engine.urls), rollout.replicas + evaluation.replicas
        if count < needed:
            text = f"each replica needs its own server: give {needed} in rollout.engine.urls, not {count}"
            raise nested([(("replicas",), text)])
        return evaluation

    @field_validator("checkpoint")
    @classmethod
    def _can_be_compared(cls, checkpoint: CheckpointSection, info: ValidationInfo) -> CheckpointSection:
        evaluation, metric = info.data.get("eval"), checkpoint.best_by
        if checkpoint.early_stopping_patience and not checkpoint.keep_best:
            text = "needs checkpoint.keep_best, so that the best checkpoint is there at the end: set that to 1"
            raise nested([(("early_stopping_patience",), text)])
        if evaluation is None or not checkpoint.keep_best:
            return checkpoint
        there = f"there are: {', '.join(evaluation.metrics)}"
        if not evaluation.every:
            raise nested([(("keep_best",), "there is no evaluation; set eval.every and eval.data, or set this to 0")])
        if metric is None:
            raise nested([(("best_by",), f"checkpoint.keep_best needs the name of a metric; {there}")])
        if metric not in evaluation.metrics:
            text = f"the evaluation has no metric {metric}; {nearest(metric, evaluation.metrics, there)}"
            raise nested([(("best_by",), text)])
        return checkpoint

    @field_validator("rollout")
    @classmethod
    def _may_end_early(cls, rollout: RolloutSection, info: ValidationInfo) -> RolloutSection:
        algorithm = info.data.get("algorithm")
        if rollout.early_ends is not None and algorithm is not None and not algorithm.allows_early_ends:
            text = f"{type(algorithm).__name__} needs all episodes of a group; take an algorithm such as grpo, or null"
            raise nested([(("early_ends",), text)])
        return rollout

    @field_validator("reward")
    @classmethod
    def _is_known_early(cls, reward: RewardSection, info: ValidationInfo) -> RewardSection:
        rollout = info.data.get("rollout")
        if rollout is not None and rollout.early_ends is not None and reward.model is not None:
            raise nested([(("model",), "a replica has no reward model: set rollout.early_ends to null, or this")])
        if reward.model is not None and not reward.workers:
            raise nested([(("workers",), "the reward model needs a worker: set it to 1 or more")])
        return reward

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
