"""A replica is killed under its requests, with the engines that runs use: their tokens so far are not sampled again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy import build_tokenizer
from rlsys.types import POLICY, Assignment, Group, GroupKey, Task
from tests.jobs import config_of
from tests.vllm_servers import vllm_server
from workers.ray.call_stream import PayloadRef
from workers.rollout.chunk_stream import YOUNG_S
from workers.rollout.rollout_pool import RolloutPool
from workers.worker_set import WorkerSet

NUM_TOKENS, CONTEXT, SIZE, NUM_GROUPS = 1900, 2048, 4, 4


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A policy that never ends its reply by itself."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
            eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[1, 0] = -10.0
    model.save_pretrained(tmp_path / "endless")
    build_tokenizer().save_pretrained(tmp_path / "endless")
    return tmp_path / "endless"


@pytest.fixture(params=["local", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("vllm", "vllm_server"))])
def engine(request: pytest.FixtureRequest, endless: Path) -> Iterator[str]:
    """The key `rollout.engine`."""
    with ExitStack() as servers:
        if request.param != "vllm_server":
            yield request.param
            return
        urls = [servers.enter_context(vllm_server(endless, context=CONTEXT)) for _ in range(2)]
        yield json.dumps({"urls": urls})


def sampled(group: Group) -> list[int]:
    """Tokens by episode."""
    ref = group.payload
    assert isinstance(ref, PayloadRef)
    episodes = ray.get(ref.chunk)[ref.index]
    return [len(turn.output_ids) for e in episodes for t in e.trajectories for turn in t.turns]


async def tokens_of(pool: RolloutPool) -> dict[str, int]:
    """Tokens sampled, by live replica."""
    return {load.replica: load.stats.num_tokens for load in await pool.loads()}


def test_what_a_dead_replica_sampled_is_not_sampled_again(cluster, engine, endless, data_path, tmp_path):
    keys = [
        f"rollout.engine={engine}", "rollout.replicas=2", "rollout.workflow=tests.ray.tools:Talks",
        f"rollout.max_new_tokens={NUM_TOKENS}", "data.max_prompt_tokens=24", "record.rollouts_every=0",
    ]  # fmt: skip
    crew = WorkerSet.of(config_of(endless, data_path, tmp_path, keys))

    async def main() -> None:
        await crew.ready()
        try:
            await crew.lines[POLICY].actor.publish(0)
            pool = crew.rollouts
            assert isinstance(pool, RolloutPool)
            task = Task(id="t", prompt="312>")
            play = [Assignment(GroupKey(n, 1), task, SIZE, 0, seed=n) for n in range(NUM_GROUPS)]
            groups = [asyncio.create_task(pool.run(each)) for each in play]
            loop = asyncio.get_running_loop()
            while not (await tokens_of(pool))["rollout-0"]:  # noqa: ASYNC110  (tokens announce themselves to nobody)
                await asyncio.sleep(0.02)
            began_s = loop.time()
            await asyncio.sleep(1.5 * YOUNG_S)  # the age at which a reply's tokens are sent as they come
            before = await tokens_of(pool)
            speed = before["rollout-0"] / (loop.time() - began_s)
            pool.members[0].worker.kill()
            ends = await asyncio.gather(*groups)
            assert [n for (group,) in ends for n in sampled(group)] == [NUM_TOKENS] * SIZE * NUM_GROUPS
            after = await tokens_of(pool)
            total = before["rollout-0"] + sum(num for name, num in after.items() if name != "rollout-0")
            again = total - SIZE * NUM_GROUPS * NUM_TOKENS
            assert before["rollout-0"] < SIZE * NUM_GROUPS * NUM_TOKENS / 2, "it died under its requests"
            assert again <= 0.3 * speed, f"{before}, {after}: some were on their way, not {again}"
        finally:
            await crew.close()

    asyncio.run(asyncio.wait_for(main(), 220))
