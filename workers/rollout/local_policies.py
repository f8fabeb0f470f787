"""The policies of a configuration in this process, on the local engine, for one session. No cluster is started."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsys.types import POLICY
from workers.engines.engine import EngineSpec
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import GroupRoute, PolicyText, Ticket
from workers.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from rlsys.config import Config

NAME = "rlsys workflow try"
"""Worker name in errors."""
_NUMBERS = itertools.count(1)


@asynccontextmanager
async def live_policies(config: Config) -> AsyncIterator[Mapping[str, GroupRoute]]:
    """All policies of a run with their initial weights, by name; freed at exit. Raises `ModelError`."""
    import torch

    from workers.engines.engine_choice import start_engine

    runs = {name: config.of(name) for name in config.policies} or {POLICY: config}
    async with AsyncExitStack() as ends:
        policies: dict[str, GroupRoute] = {}
        for name, run in runs.items():
            rollout = run.rollout
            codec = TextTokenizer.load(run.model.path, rollout.chat.with_text())
            spec = replace(EngineSpec.of(run), engine="local", tensor_parallel=1)
            device = torch.device("cuda" if rollout.num_gpus and torch.cuda.is_available() else "cpu")
            engine = await start_engine(
                spec, "local", stop_token_ids=codec.stop_ids, decode=codec.decode, device=device, worker=NAME
            )
            ends.push_async_callback(engine.close)
            sampling = rollout.sampling(rollout.temperature)
            speech = PolicyText(codec, sampling, run.data.max_prompt_tokens, spec.max_context)
            generator = Generator(NAME, engine, speech, None, WeightChange("between", run.probe_tolerance))
            policies[name] = generator.begin(Ticket(NAME, 0, 0))
        yield policies


@asynccontextmanager
async def sampling_as(
    policy: GroupRoute, *, temperature: float | None, top_p: float | None
) -> AsyncIterator[GroupRoute]:
    """The same policy with other sampling, for one request; None: as it is. Ends its requests at exit."""
    generator, sampling = policy.place, policy.speech.sampling
    sampling = replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else top_p,
    )
    route = generator.begin(Ticket(NAME, next(_NUMBERS), 0))
    route.speech = replace(policy.speech, sampling=sampling)
    try:
        yield route
    finally:
        await generator.end(route, is_again=False, keep_partials=False)
