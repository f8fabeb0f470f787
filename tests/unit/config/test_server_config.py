"""vLLM servers in a configuration: one for each replica, and nothing that a server cannot do."""

from __future__ import annotations

import pytest

from rlsys.config import Config
from rlsys.errors import ConfigError
from workers.ray.worker_process import place_of, successor_name
from workers.worker_set import _replica_spec

NEEDED = ["run.steps=9", "model.path=m", "data.path=d"]
ONE = "rollout.engine={urls: [http://a:1/v1/]}"
THREE = "rollout.engine={urls: [http://a:1, http://b:1, http://c:1]}"


def load(*keys: str) -> Config:
    return Config.load([], [*NEEDED, *keys])


def test_an_address_may_end_with_v1_and_the_configuration_loads_back(tmp_path):
    config = load(ONE)
    assert getattr(config.rollout.engine, "urls") == ["http://a:1"]  # noqa: B009
    (tmp_path / "saved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["rollout.engine=vllm_server"], r"rollout\.engine: input should be 'auto', 'local' or 'vllm'"),
        (["rollout.engine={urls: [a]}"], r"rollout\.engine\.urls\[0\]: should begin with http://"),
        (["rollout.engine={urls: [http://a, http://a/]}"], "http://a is there twice"),
        ([ONE, "rollout.replicas=2"], r"rollout\.engine\.urls: 1 servers for 2 replicas"),
        ([ONE, "eval={data: d, every: 3}"], r"eval\.replicas: each replica needs its own server: give 2"),
        ([ONE, "rollout.weight_change=beside"], r"rollout\.weight_change: a server keeps one set"),
        ([ONE, "rollout.weight_change=inflight"], r"rollout\.weight_change: a server computes keys and values"),
        ([ONE, "rollout.tensor_parallel=2"], r"rollout\.tensor_parallel: shards are an argument of the server"),
        ([ONE, "resources.rollout.gpus=1"], r"resources\.rollout\.gpus: the server has the GPUs"),
        ([ONE, "rollout.vllm_args={seed: 3}"], r"rollout\.vllm_args: these are arguments of the server"),
        ([ONE, "train.lora={}"], r"train\.lora: a vLLM server takes whole weights"),
        ([ONE, "train.routing_replay=true"], r"train\.routing_replay: a vLLM server"),
        ([ONE, "policies={a: {}, b: {}}"], r"policies\.b\.rollout: http://a:1 samples for a: give b servers"),
        (["policies={a: {}, b: {rollout: {slots: 3}}}"], r"policies\.b\.rollout\.slots: the policies share"),
    ],
)
def test_what_a_server_cannot_do_is_refused(keys: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        load(*keys)


def test_each_place_has_its_own_server_and_a_successor_takes_it_over():
    spec = _replica_spec(load(THREE, "rollout.replicas=2", "eval={data: d, every: 3}"), "m", "newest")
    servers = [spec.at(place_of(successor_name(f"rollout-{i}", i))).engine.server for i in range(3)]
    assert [server and server.url for server in servers] == ["http://a:1", "http://b:1", "http://c:1"]
    assert all(server and server.takes_weights for server in servers)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.urls: 3 servers are too few"):
        spec.at(3)


def test_a_frozen_policy_may_have_servers_of_its_own_which_keep_their_weights():
    own = "{train: null, model: {path: j}, rollout: {engine: {urls: [http://j:1]}}}"
    judge = load(f"policies={{a: {{}}, judge: {own}}}").of("judge")
    server = _replica_spec(judge, judge.model.path, "never", 2).at(0).engine.server
    assert server is not None and (server.url, server.takes_weights) == ("http://j:1", False)
