"""The policies of a configuration in this process, on the local engine, for one session. No cluster is started."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsys.routing.request_router import Claim, RequestRouter
from rlsys.types import POLICY
from workers.engines.engine import EngineSpec
from workers.rollout.policy_text import PolicyText, RoutedPolicy
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import WeightChange
from workers.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from rlsys.config import Config

NAME = "rlsys workflow try"
"""Worker name in errors."""
_NUMBERS = itertools.count()


@asynccontextmanager
async def live_policies(config: Config) -> AsyncIterator[Mapping[str, RoutedPolicy]]:
    """All policies of a run with their initial weights, by name; freed at exit. Raises `ModelError`."""
    import torch

    from workers.engines.engine_choice import start_engine

    runs = {name: config.of(name) for name in config.policies} or {POLICY: config}
    async with AsyncExitStack() as ends:
        policies: dict[str, RoutedPolicy] = {}
        for name, run in runs.items():
            rollout = run.rollout
            codec = TextTokenizer.load(run.model.path, rollout.chat.with_text())
            spec = replace(EngineSpec.of(run), engine="local", tensor_parallel=1)
            device = torch.device("cuda" if run.resources["rollout"].num_gpus and torch.cuda.is_available() else "cpu")
            engine = await start_engine(
                spec, "local", stop_token_ids=codec.stop_ids, decode=codec.decode, device=device, worker=NAME
            )
            ends.push_async_callback(engine.close)
            text = PolicyText(
                codec=codec,
                sampling=rollout.sampling(rollout.temperature),
                max_prompt_tokens=run.data.max_prompt_tokens,
                max_context_tokens=spec.max_context,
                worker=NAME,
            )
            change = WeightChange("between", run.probe_tolerance)
            router = RequestRouter([EngineReplica(NAME, engine, None, change, num_slots=spec.slots)])
            policies[name] = _policy(text, router)
        yield policies


def sampling_as(policy: RoutedPolicy, *, temperature: float | None, top_p: float | None) -> RoutedPolicy:
    """The same policy with other sampling, for one request; None: as it is."""
    sampling = replace(
        policy.sampling,
        temperature=policy.sampling.temperature if temperature is None else temperature,
        top_p=policy.sampling.top_p if top_p is None else top_p,
    )
    return _policy(replace(policy, sampling=sampling), policy.router)


def _policy(text: PolicyText, router: RequestRouter) -> RoutedPolicy:
    """A policy for a conversation of its own. The first weights of the engine are never changed, so it claims none."""
    number = next(_NUMBERS)
    return RoutedPolicy.of(text, router, Claim(number), f"{NAME}/{number}")
