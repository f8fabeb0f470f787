"""Shared set-up of every test: offline, one thread per process.

And for those that ask: one Ray cluster, one tiny model, one file of tasks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Ray come first, those with vLLM and then those with a browser come last, each kind in one process.

    A process is in one Ray cluster at a time: tests with three nodes come before those that share the one of one node.
    vLLM turns thread counts, process groups and some of torch into its own; the driver of the browser keeps an event
    loop running in its thread, and no other can: nothing else may come after them.
    """

    def order(item: pytest.Item) -> tuple[bool, bool, bool, bool]:
        fixtures = getattr(item, "fixturenames", ())
        is_last = "chromium" in fixtures, item.get_closest_marker("vllm") is not None
        return *is_last, "three_nodes" not in fixtures, not _has_ray(item, fixtures)

    items.sort(key=order)
    for item in items:
        in_browser, has_vllm, _, has_no_ray = order(item)
        if in_browser or has_vllm:
            item.add_marker(pytest.mark.xdist_group("last"))
        elif not has_no_ray:
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif "two_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


def _has_ray(item: pytest.Item, fixtures: Collection[str]) -> bool:
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    return room in ("ray", "oracle", "benchmarks") or item.name.endswith("[ray]") or "three_nodes" in fixtures


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray cluster that believes it has 8 CPUs."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    """A local Ray cluster of three raylets, this process on the first."""
    import ray
    from ray.cluster_utils import Cluster

    memory = 200 << 20
    head = {"num_cpus": 4, "object_store_memory": memory, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=4, object_store_memory=memory)
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 40,000 parameters with the tokenizer of `examples.sort`."""
    from examples.sort.tokenizer import build_tokenizer
    from tests.models import tiny_sorter

    folder = tmp_path_factory.mktemp("model")
    tiny_sorter().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty prompts of one to three digits."""
    path = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    rows = [{"prompt": f"{i * 7919 % 1000:03d}>"[: 2 + i % 3], "answer": str(i % 10)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
