"""Profile of a simulation: a cluster, an engine, a workload, a trainer and the links between them, in numbers.

    profile = Profile.load("areal", ["max_staleness=2"])
    profile.num_replicas          # 96

A profile is a small YAML file; those in `profiles/` ship under their names and give the source of each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import exp, inf, log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rlsys.config import Config
from rlsys.config.config_problems import nearest, refuse
from rlsys.config.loader import load
from rlsys.config.section import Section
from rlsys.errors import ConfigError
from rlsys.loop.build_driver import Constants
from rlsys.loop.device_leases import ACTOR, ROLLOUT
from rlsys.testing.fake_world import RewardAsAdvantage
from rlsys.types import Group

TRANSFER_S = 4 * 3600.0
"""Deadline of a transfer; simulated transfers never hang."""
MICRO_BATCH_TOKENS = 1 << 20
"""Any value: the split of a step into micro-batches does not change the simulation."""
MOST_FAILURES = 100
"""Failure limit, of a group and in a row, that outlasts the deaths planted in a simulation."""
FOREVER_S = 1e9
FOLDER = Path(__file__).parent / "profiles"
_NORMAL = NormalDist()


class Spread(Section):
    """Distribution of a quantity: lognormal, cut off at `cap`; or a table of equally likely numbers."""

    mean: PositiveFloat = 1.0
    """Mean of the drawn values, after the cap."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm; 0: always the mean."""
    cap: PositiveFloat | None = None
    """Upper bound of the drawn values. None: no limit."""
    table: tuple[PositiveFloat, ...] = ()
    """Measured numbers to draw from, instead of mean, sigma and cap."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.cap is not None and self.sigma > 0 and self.mean >= self.cap:
            raise ValueError(f"a mean of {self.mean:g} is not below the cap of {self.cap:g}, which cuts off above it")
        return self

    def at(self, quantile: float) -> float:
        """Return the value at a quantile between 0 and 1, both excluded."""
        if self.table:
            return self._sorted_table[int(quantile * len(self.table))]
        value = exp(self._mu + self.sigma * _NORMAL.inv_cdf(quantile)) if self.sigma else self.mean
        return value if self.cap is None else min(value, self.cap)

    @property
    def largest(self) -> float:
        """Upper bound of the values; infinite without a limit."""
        return max(self.table) if self.table else (self.cap or inf) if self.sigma else self.mean

    @cached_property
    def _sorted_table(self) -> list[float]:
        return sorted(self.table)

    @cached_property
    def _mu(self) -> float:
        """Mean of the logarithm before the cap, found by bisection so that the mean after the cap is `mean`."""
        if self.cap is None:
            return log(self.mean) - self.sigma**2 / 2
        low, high = log(self.mean) - self.sigma**2 / 2, log(self.cap) + 10 * self.sigma
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if _capped_mean(middle, self.sigma, self.cap) < self.mean else (low, middle)
        return low


def _capped_mean(mu: float, sigma: float, cap: float) -> float:
    """Compute E[min(X, cap)] of a lognormal X."""
    z = (log(cap) - mu) / sigma
    return exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + cap * (1 - _NORMAL.cdf(z))


class DecodeSection(Section):
    """Seconds of one decoding step of a replica that runs b requests with T tokens of context in all:

    overhead_s + max(weights_s, b * sequence_s) + T * token_s

    The maximum is the roofline of the linear layers (read all weights, or compute); the last term is attention, which
    reads all keys and values.
    """

    overhead_s: NonNegativeFloat
    """Fixed cost of a step: scheduling, kernel launches, all-reduces."""
    weights_s: PositiveFloat
    """Time to read the weights once: bytes over memory bandwidth."""
    sequence_s: PositiveFloat
    """Time to compute one request's next token: 2 * parameters over the achieved FLOP/s."""
    token_s: NonNegativeFloat
    """Time to read the keys and values of one token of context."""


class TrainingSection(Section):
    """Seconds of one optimizer step: fixed_s + tokens / (tokens_per_s * GPUs)."""

    fixed_s: NonNegativeFloat
    """Cost of a step of any size: the optimizer, packing, fetching."""
    tokens_per_s: PositiveFloat
    """Tokens that one GPU trains in a second, all work on a token included."""


class WeightsSection(Section):
    """Size of the weights, and the links that carry them."""

    num_bytes: PositiveInt
    """Bytes of one version."""
    push_bytes_per_s: PositiveFloat
    """Bandwidth from the actor into host memory; only this transfer stalls the actor."""
    link_bytes_per_s: PositiveFloat
    """Bandwidth from one node's relay to the next."""
    link_latency_s: NonNegativeFloat
    """Latency of one transfer between relays, of any size."""
    load_s: NonNegativeFloat
    """Time in which a replica loads a version from its node's relay."""


Share = Annotated[float, Field(gt=0, lt=1)]


class Profile(Section):
    """One cluster and one workload."""

    seed: NonNegativeInt = 0
    """Seed of all drawn values: the same seed gives the same work, whatever the other keys are."""

    gpus: PositiveInt
    """Total number of GPUs."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one node. Each node with rollouts has one relay."""
    gpus_per_replica: PositiveInt = 1
    """GPUs of one rollout replica: its tensor parallelism."""
    inference_share: Share = 0.5
    """Share of the GPUs that sample; the others train. Ignored if `colocated`."""
    colocated: bool = False
    """Share all GPUs between sampling and training, in turns, as `placement.together` of a run."""
    switch_s: NonNegativeFloat = 0.0
    """Seconds to hand colocated GPUs over from sampling to training and back."""

    slots: PositiveInt
    """Requests that a replica decodes at once; others wait."""
    cache_tokens: PositiveInt
    """Size of a replica's key-value cache, in tokens."""
    decode: DecodeSection
    prefill_tokens_per_s: PositiveFloat
    """Prompt tokens that a replica prefills per second; it decodes nothing meanwhile."""

    groups_per_step: PositiveInt
    """Groups of one optimizer step."""
    group_size: PositiveInt
    """Episodes of one group."""
    prompt: Spread
    """Tokens of a prompt."""
    response: Spread
    """Tokens sampled in one turn."""
    turns: Spread = Spread()
    """Turns of an episode, rounded; at least 1."""
    environment_s: Spread | None = None
    """Seconds of the environment after each turn but the last. None: no time and no observation."""
    environments: PositiveInt | None = None
    """Total number of environments. An episode occupies one from its first turn to its last, and waits for a free one.
    None: one for every episode."""
    observation_tokens: NonNegativeInt = 0
    """Tokens of the environment's observation after a turn."""
    reward_s: NonNegativeFloat = 0.0
    """Seconds to score one group."""

    max_staleness: NonNegativeInt
    """As `asynchrony.max_staleness` of a run."""
    window: PositiveInt = 1
    """As `asynchrony.window` of a run."""
    weight_change: Literal["between", "inflight", "beside"] = "between"
    """As `rollout.weight_change` of a run."""
    kv_cache: Literal["keep", "recompute"] = "recompute"
    """Treatment of cached keys and values when weights change in flight, as `rollout.weight_change` of a run."""
    resident_versions: PositiveInt = 2
    """Most sets of weights of a replica, used only with `weight_change: beside`; a run has 2."""
    repack_s: NonNegativeFloat = 0.0
    """Seconds between two searches for replicas to empty; 0: never. As in a run, where they are 5 s, used only with
    `weight_change: between` and several replicas."""
    routing: Literal["group", "request", "prefix"] = "group"
    """group: all requests of a group go to the replica of the group. request: each goes to the least loaded replica.
    prefix: each goes to the replica that caches its session's prefix, unless that is overloaded. The last two only with
    `weight_change: inflight`."""
    tools: Literal["alone", "together"] = "alone"
    """together: synchronous batches of tool calls. The next turns of a replica's episodes begin when the tools of all
    its episodes are done."""

    train: TrainingSection
    weights: WeightsSection
    restart_s: NonNegativeFloat = 60.0
    """Seconds to replace a dead replica. Its sampled tokens are lost; a run keeps them in its partial response pool."""

    @classmethod
    def load(cls, name: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Load a shipped profile by name, or a file by path, with overrides like `max_staleness=2`.

        Raises `ConfigError` listing every problem.
        """
        return load(cls, [profile_path(name)], overrides)

    def config(self, folder: Path, steps: int) -> Config:
        """Build the driver's configuration of a run of `steps` steps on this cluster."""
        limits: dict[str, float] = dict.fromkeys(("max_attempts", "max_zero_advantage_groups"), MOST_FAILURES)
        limits |= {"failed_share": 1.0, "group_s": FOREVER_S, "no_progress_s": FOREVER_S}
        sections: dict[str, Any] = {
            "run": {"name": "simulated", "folder": folder, "steps": steps, "seed": self.seed},
            "model": {"path": "simulated"},
            "data": {"path": "simulated"},
            "algorithm": RewardAsAdvantage(group_size=self.group_size),
            "stabilizer": None,
            "rollout": {
                "replicas": self.num_replicas,
                "slots": self.slots,
                "weight_change": self.weight_change,
            },
            "train": {"groups_per_step": self.groups_per_step, "micro_batch_tokens": MICRO_BATCH_TOKENS},
            "asynchrony": {"max_staleness": self.max_staleness, "window": self.window},
            "checkpoint": {"every": 0, "every_s": 0, "keep_last": 1},
            "limits": limits,
            "record": {"rollouts_every": 0},
        }
        return Config(**sections)

    @property
    def constants(self) -> Constants:
        """Constants of the driver."""
        return Constants(transfer_s=TRANSFER_S, repack_s=self.repack_s)

    def train_s(self, groups: Sequence[Group]) -> float:
        """Return the trainer's compute seconds for a step on these groups."""
        num_tokens = sum(group.num_trained for group in groups)
        return self.train.fixed_s + num_tokens / (self.train.tokens_per_s * self.train_gpus)

    @property
    def together(self) -> tuple[str, ...]:
        """Roles that share devices in turns."""
        return (ACTOR, ROLLOUT) if self.colocated else ()

    @property
    def num_replicas(self) -> int:
        return self._inference_gpus // self.gpus_per_replica

    @property
    def train_gpus(self) -> int:
        return self.gpus if self.colocated else self.gpus - self.num_replicas * self.gpus_per_replica

    @property
    def replicas_per_node(self) -> int:
        """Replicas that pull from one relay."""
        return max(1, self.gpus_per_node // self.gpus_per_replica)

    @property
    def num_relays(self) -> int:
        """Number of relays: one for each node with rollouts."""
        return -(-self.num_replicas // self.replicas_per_node)

    @property
    def _inference_gpus(self) -> int:
        return self.gpus if self.colocated else int(self.gpus * self.inference_share + 1e-9)

    @field_validator("routing")
    @classmethod
    def _can_be_routed(cls, routing: str, info: ValidationInfo) -> str:
        if routing != "group" and info.data.get("weight_change") not in ("inflight", None):
            raise ValueError(f"{routing} spreads a group over replicas: that needs weight_change: inflight")
        return routing

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        problems: list[tuple[tuple[str, ...], str]] = []
        if self.num_replicas == 0:
            text = f"{self._inference_gpus} GPUs sample, and one replica needs {self.gpus_per_replica}: 0 replicas"
            problems.append((("gpus_per_replica",), text))
        longest = self.prompt.largest + self.response.largest
        if self.turns.largest == 1 and self.cache_tokens < longest < inf:
            text = f"an episode may hold {longest:.0f} tokens (prompt and response caps): one would not fit"
            problems.append((("cache_tokens",), text))
        refuse(problems)
        return self


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def profile_path(name: str | Path) -> Path:
    """Return the file of a profile. Raises `ConfigError` for an unknown name that is not a path."""
    if isinstance(name, Path) or name.endswith((".yaml", ".yml", ".toml")) or "/" in name:
        return Path(name)
    if name in profile_names():
        return FOLDER / f"{name}.yaml"
    hint = nearest(name, profile_names(), f"there are: {', '.join(profile_names())}")
    raise ConfigError(f"unknown profile {name!r}; {hint} A file is given by its path, as in my/{name}.yaml")
