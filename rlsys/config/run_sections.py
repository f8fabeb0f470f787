"""Sections of the run as a whole: `run`, `model`, `resources`, `asynchrony`, `checkpoint`, `limits`, `record`; and the
keys `dashboard` and `alerts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlsys.config.config_problems import Problem, nearest, refuse, short_repr, union_tag
from rlsys.config.eval_section import EvalSection
from rlsys.config.section import Folder, PathText, Section
from rlsys.monitoring.alert_rules import RULES
from rlsys.util.number_ranges import Count, CountFrom0, Fraction, Seconds, SecondsFrom0


def _resume(value: str) -> str:
    if value not in ("auto", "never", "must") and "/" not in value:
        raise PydanticCustomError(
            "resume", "should be auto, never, must, or the folder of a run, or its URL (with a `/` in it)"
        )
    return value


class RunSection(Section):
    """General settings of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Name of the run; its directory is `folder/name`."""
    folder: Folder = Path("runs")
    """Parent folder of run directories."""
    seed: NonNegativeInt = 0
    """Root of every random stream: task order and sampling. The same seed and configuration give the same run."""
    steps: NonNegativeInt = 0
    """Optimizer steps of the whole run, including those before a resume. Set this or `epochs`."""
    epochs: NonNegativeFloat = 0.0
    """Passes over the tasks of all sources, instead of `steps`: `epochs` * tasks / `train.groups_per_step` steps,
    rounded up. A task that is dropped is drawn, and fills no step."""
    resume: Annotated[PathText, AfterValidator(_resume)] = "never"
    """never: start a new run; refused if an earlier run took a step. auto: resume from the latest checkpoint, else
    start. must: resume, or fail. A folder: start a new run from the latest checkpoint of the run in that folder. A URL:
    the same, from the checkpoints of that run at `TO/NAME` (`checkpoint.to`)."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if bool(self.steps) == bool(self.epochs):
            text = "give the number of steps here, or that of passes over the data in run.epochs, and not both"
            refuse([(("steps",), text)])
        return self


class ModelSection(Section):
    """The trained policy."""

    path: PathText
    """Folder of a Hugging Face causal language model with its tokenizer, `org/name` on the hub, or the folder of a run,
    whose newest weights are taken."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights for generation and gradients; the optimizer always keeps a float32 copy. None: bfloat16 if
    ranks and replicas have GPUs and the model is stored so, else float32."""


WorkerRole: TypeAlias = Literal["actor", "critic", "reference", "rollout", "reward"]


class WorkerResources(Section):
    """Resources of one worker: one rank of the actor or the critic, the reference, a replica, or a reward worker."""

    cpus: Annotated[float, Field(ge=0, le=10_000)] = 1.0
    """CPUs that Ray reserves for one worker."""
    gpus: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """GPUs that Ray reserves for one worker; a part such as 0.5 for one that shares its GPU. None: 0. If no role sets
    them, in a run that starts its own cluster: one for each rank, the reference, and each shard of a replica, if there
    are enough."""
    threads: Count = 1
    """CPU threads for maths of one worker."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may have one, as `ray start --labels` sets them, for example `{accelerator: h100}`."""

    @property
    def num_gpus(self) -> float:
        """GPUs of one worker; 0 where none are set."""
        return self.gpus or 0.0


def _of_all_roles(given: dict[WorkerRole, WorkerResources]) -> dict[WorkerRole, WorkerResources]:
    return DEFAULT_RESOURCES | given


DEFAULT_RESOURCES: dict[WorkerRole, WorkerResources] = dict.fromkeys(get_args(WorkerRole), WorkerResources())
Resources = Annotated[dict[WorkerRole, WorkerResources], AfterValidator(_of_all_roles)]


class AsynchronySection(Section):
    """Distance between generation and training."""

    max_staleness: CountFrom0 = 0
    """Most steps between the weights that sample a token and the weights that it trains; 0: synchronous."""
    window: Count = 1
    """Number of groups, from the oldest unfinished one on, that the learner may choose from; 1: strictly in order."""

    def bound(self, groups_per_step: int) -> int:
        """Largest staleness of a trained token: `max_staleness` at window 1, more at larger windows."""
        return ((self.max_staleness + 1) * groups_per_step + self.window - 2) // groups_per_step


class CheckpointSection(Section):
    """Checkpoints of the run."""

    every: NonNegativeInt = 50
    """Steps between two checkpoints; 0: only at the end, on interruption, and by `every_s`."""
    every_s: SecondsFrom0 = 600.0
    """Seconds after which the next step is saved too, whatever `every` is: about what a crash can lose. 0: never."""
    keep_last: PositiveInt = 3
    """Checkpoints kept; older ones are deleted."""
    keep_best: NonNegativeInt = 0
    """Keep so many of the best checkpoints too, by `best_by`, and save every evaluated step; 0: none."""
    best_by: Annotated[str, Field(pattern=r"^((highest|lowest) )?[^ ]+$")] | None = None
    """Metric of the evaluation that `keep_best` compares, `eval/held_out/mean`; a larger value is better, unless
    `lowest` comes before it: `lowest eval/held_out/length_mean`."""
    early_stopping_patience: NonNegativeInt = 0
    """Evaluations in a row without a better value of `best_by` that end the run early; needs `keep_best`. 0: never."""
    to: str | None = None
    """Folder or bucket in which checkpoints are written and read, in place of the run's folder: a URL of fsspec such as
    `s3://bucket/path`, which the driver and all ranks reach; those of the run are in `to/NAME`. Credentials come from
    the environment. None: in the run's folder, which all machines then share."""

    @property
    def best_metric(self) -> str:
        """The metric of `best_by`; empty if there is none."""
        return (self.best_by or "").rpartition(" ")[2]

    @property
    def is_lowest_best(self) -> bool:
        return (self.best_by or "").startswith("lowest ")

    def problems(self, evaluation: EvalSection) -> Iterator[Problem]:
        """Conflicts with the evaluation by which checkpoints are compared."""
        if not self.keep_best:
            return
        there = f"there are: {', '.join(evaluation.metrics)}"
        if not evaluation.every:
            yield ("keep_best",), "there is no evaluation; set eval.every and eval.data, or set this to 0"
        elif not self.best_by:
            yield ("best_by",), f"checkpoint.keep_best needs the name of a metric; {there}"
        elif (metric := self.best_metric) not in evaluation.metrics:
            hint = nearest(metric, evaluation.metrics, there)
            yield ("best_by",), f"the evaluation has no metric {metric}; {hint}"

    @field_validator("early_stopping_patience")
    @classmethod
    def _has_a_best(cls, patience: int, info: ValidationInfo) -> int:
        if patience and not info.data.get("keep_best", 1):
            raise ValueError(
                "needs checkpoint.keep_best, so that the best checkpoint is there at the end: set that to 1"
            )
        return patience

    @field_validator("to")
    @classmethod
    def _is_url(cls, to: str | None) -> str | None:
        url = to and to.strip().rstrip("/")
        if url is not None and "://" not in url:  # not in `s3://` without its slashes either
            example = "should be a URL with a bucket or folder, such as s3://bucket/path or file:///folder"
            raise ValueError(f"{example} (got {short_repr(to)})")
        return url


class LimitsSection(Section):
    """Deadlines, and limits on failures."""

    group_s: Seconds = 1800.0
    """Seconds that one attempt at a group may wait for tokens; then the group is issued again. Time of tools and
    environments, of weights on their way, and without a replica does not count. Also the deadline of scoring one
    group."""
    silence_s: Seconds = 6.0
    """Seconds without a heartbeat after which a rollout replica or a reward worker is replaced. A thread of its own
    answers for the worker, so a long computation does not count; a process that is stopped does."""
    no_progress_s: Seconds = 900.0
    """Seconds without a finished group or step after which the run ends with a table of pending work."""
    max_attempts: PositiveInt = 3
    """Attempts at one group, at its scoring, or at keeping its payload, each counted separately. Then a group whose
    workflow raised or that waited too long is dropped; the run ends if workers or payloads were lost."""
    failed_share: Fraction = 0.5
    """Share of the last 100 groups of which more may not fail, or be too long: then the run ends. It also ends if each
    of the first 16 has failed."""
    max_zero_advantage_groups: PositiveInt = 1000
    """Groups in a row that teach nothing, such as those with equal rewards, that end the run; a tenth of this number
    causes a warning."""


class RecordSection(Section):
    """Files besides metrics and events."""

    rollouts_every: NonNegativeInt = 1
    """Steps between two whose rollouts are written; 0: never."""


def _no_client(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(
            "a driver must run inside the cluster, and ray:// is for programs outside: submit it with "
            "`rlsys submit --address http://HEAD:8265`, or start it on a node with ray=auto"
        )
    return address


_ADDRESS, _CPUS = union_tag("address"), union_tag("cpus")
_Named = Annotated[
    Annotated[Count, Tag(_CPUS)] | Annotated[str, Field(min_length=1), AfterValidator(_no_client), Tag(_ADDRESS)],
    Discriminator(lambda value: _ADDRESS if isinstance(value, str) else _CPUS),
]
Cluster = _Named | None


def dashboard_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"should be HOST:PORT, such as 127.0.0.1:8321, with port 0 for any that is free (got {address!r})"
        )
    return host, int(port)


def _with_port(address: str | None) -> str | None:
    return address and ":".join(map(str, dashboard_address(address)))


Dashboard = Annotated[str | None, AfterValidator(_with_port)]


def _check_rules(thresholds: dict[str, float | None]) -> dict[str, float | None]:
    there = f"there are: {', '.join(RULES)}"
    refuse(((name,), f"no such alert; {nearest(name, RULES, there)}") for name in thresholds if name not in RULES)
    return thresholds


Thresholds = Annotated[dict[str, float | None], AfterValidator(_check_rules)]
