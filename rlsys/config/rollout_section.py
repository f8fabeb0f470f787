"""The `rollout` section: the replicas that sample, and how they sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator

from rlsys.config.chat_section import ChatSection
from rlsys.config.config_problems import Problem, refuse, union_tag
from rlsys.config.plugins import WORKFLOWS, WorkflowSection
from rlsys.config.section import Section
from rlsys.config.server_section import ServerSection
from rlsys.types import Distribution, Sampling
from rlsys.util.number_ranges import Count, ManyFrom1, SecondsFrom0

_NAME, _SERVER = union_tag("name"), union_tag("server")
EngineKey = Annotated[
    Annotated[Literal["auto", "local", "vllm"], Tag(_NAME)] | Annotated[ServerSection, Tag(_SERVER)],
    Discriminator(lambda value: _SERVER if isinstance(value, dict | ServerSection) else _NAME),
]


class RolloutSection(Section):
    """Workers that generate rollouts."""

    engine: EngineKey = "auto"
    """Inference engine. vllm: vLLM, in the replica's own process. local: continuous batching over the Hugging Face
    model. auto: vLLM if it is installed and pays off (on a GPU, or for a model of 50 million parameters), else local;
    the run reports the choice and the reason. `{urls: [...]}`: vLLM servers that run already."""
    replicas: Count = 1
    """Copies of the policy that generate in parallel."""
    spread: bool = True
    """Place replicas on as many nodes as there are. False: on few, as Ray fills them."""
    tensor_parallel: Count = 1
    """Shards of one replica, each a process with a separate GPU (or core); vLLM only."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. `{gpu_memory_utilization: 0.8}`, except those that rlsys sets."""
    slots: ManyFrom1 | None = None
    """Sequences that one replica decodes together; further ones wait. None: 64 on a CPU; on a GPU as many as its memory
    has room for, a power of two up to 256."""
    max_new_tokens: PositiveInt = 256
    """Longest completion of one turn, in tokens."""
    max_context_tokens: PositiveInt | None = None
    """Longest conversation with its last reply, in tokens; a longer one ends as truncated. None:
    `data.max_prompt_tokens` + `rollout.max_new_tokens`."""
    chat: ChatSection = ChatSection()
    """Chat template and system message of conversations: `{system: Answer in one word.}`."""
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
    weight_change: Literal["between", "inflight", "inflight_recompute", "beside"] = "between"
    """Loading of new weights. between: load once no group is running, so a trajectory has one version. inflight: pause
    running sequences, swap the weights, and continue decoding; each token records its version, and attends to cached
    keys and values of older weights. inflight_recompute: as inflight, but the cache is computed again, at the cost of a
    prefill, so that later tokens are exactly those of the new weights. beside: load next to the old weights; running
    sequences end on the old ones, and new ones start at once; in vLLM only adapters (train.lora). A turn then has one
    version, while a trajectory may mix versions from turn to turn; the bound on staleness applies."""
    verify_s: SecondsFrom0 = 60.0
    """Seconds after which an idle replica verifies its weights again, in case its memory was damaged. 0: only when it
    loads them."""
    early_ends: bool = False
    """True to end redundant episodes of a group early, once half have ended with the same reward (after DeepPrune,
    arXiv:2510.08483); a quarter of the others go on, and stand for all of them. The reward functions then also run
    where groups are played, and which episodes end depends on timing."""
    workflow: WorkflowSection = Field(default_factory=lambda: WORKFLOWS.read({}))
    """Workflow of a task: `type` (the name of an installed workflow, or `module:Name` of yours; default single_turn)
    and that workflow's own keys. `workflow: NAME` is short for `workflow: {type: NAME}`."""

    @property
    def distribution(self) -> Distribution:
        """The distribution that is sampled from, and trained."""
        return Distribution(self.temperature, self.top_p, self.top_k, self.min_p)

    def sampling(self, temperature: float) -> Sampling:
        """Sampling parameters of a turn; evaluation has a temperature of its own."""
        return Sampling(temperature, self.top_p, self.top_k, self.min_p, self.max_new_tokens, tuple(self.stop))

    @property
    def engine_name(self) -> Literal["auto", "local", "vllm", "vllm_server"]:
        """The engine, without its keys."""
        return self.engine if isinstance(self.engine, str) else "vllm_server"

    @property
    def recomputes(self) -> bool:
        """True if a change of weights in flight computes cached keys and values again."""
        return self.weight_change == "inflight_recompute"

    @property
    def change(self) -> Literal["between", "inflight", "beside"]:
        """The moment at which new weights are loaded."""
        return "inflight" if self.weight_change == "inflight_recompute" else self.weight_change

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        refuse(self._of_a_server(self.engine) if isinstance(self.engine, ServerSection) else self._of_shards())
        return self

    def _of_shards(self) -> Iterator[Problem]:
        if self.tensor_parallel > 1 and self.engine == "local":
            yield ("tensor_parallel",), f"{self.tensor_parallel} needs the engine vllm: local has no shards"

    def _of_a_server(self, server: ServerSection) -> Iterator[Problem]:
        if self.tensor_parallel > 1:
            yield ("tensor_parallel",), "shards are an argument of the server: set 1"
        if self.vllm_args:
            yield ("vllm_args",), "these are arguments of the server: give them to it"
        if self.weight_change == "beside":
            yield ("weight_change",), "a server keeps one set of weights: set between or inflight_recompute"
        if self.weight_change == "inflight":
            text = "a server computes keys and values of running requests again: set inflight_recompute"
            yield ("weight_change",), text
        if (count := len(server.urls)) < self.replicas:
            yield ("engine", "urls"), f"{count} servers for {self.replicas} replicas: each needs its own"
