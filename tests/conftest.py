"""Shared set-up of every test: offline, one thread per process.

And for those that ask: one Ray cluster, one tiny model, one file of tasks.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under `nohup`: commands that tests start would inherit it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # beside other tests, workers at Ray's 15 would starve
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("daily", ANY_MACHINE, max_examples=20)
settings.register_profile("nightly", ANY_MACHINE, max_examples=200)  # pytest --hypothesis-profile=nightly
settings.load_profile("daily")


FIRST = ("ray", "ranks", "benchmarks")
"""Groups of tests that take longest, in their order."""
RAY_ROOMS = ("ray", "oracle", "contract", "cluster")
"""Folders in which `make test` looks for tests with Ray."""
DAILY_VLLM = ("test_engine", "test_engine_weights")
"""Suites that `make test` runs on vLLM: tokens with their logprobs, and changes of weights. All others are nightly."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-cases", type=int, default=3, help="Seeds that each test with made-up damage runs with.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fuzz_case" in metafunc.fixturenames:
        metafunc.parametrize("fuzz_case", range(metafunc.config.getoption("fuzz_cases")))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups, and pytest for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Ray come first; those with vLLM, and then those with a browser, come last.

    A process is in one Ray cluster at a time: tests with several nodes come before those that share one of one node.
    vLLM turns thread counts, process groups and some of torch into its own; the driver of the browser keeps an event
    loop running in its thread, and no other can: nothing else may come after them. Where tests run in two processes,
    those of a group share one.
    """

    def order(item: pytest.Item) -> tuple[int, bool, bool]:
        fixtures, group = _fixtures_of(item), _group_of(item)
        place = FIRST.index(group) if group in FIRST else len(FIRST) + (group == "last")
        return place, "chromium" in fixtures, not {"three_nodes", "four_nodes", "gpu_nodes"} & fixtures.keys()

    items.sort(key=order)
    for item in items:
        if group := _group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
        if group == "ray":
            item.add_marker(pytest.mark.ray)
            if item.path.relative_to(Path(__file__).parent).parts[0] not in RAY_ROOMS:
                raise pytest.UsageError(f"{item.nodeid} runs with Ray: move it to tests/ray")
        if item.get_closest_marker("vllm") and item.path.stem not in DAILY_VLLM:
            item.add_marker(pytest.mark.nightly)
        if "chromium" in _fixtures_of(item):
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(tryfirst=True)  # before fixtures start an engine
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave little for vLLM's garbage collections: each start does several, over all that the process has imported."""
    if item.get_closest_marker("vllm"):
        gc.freeze()


def _fixtures_of(item: pytest.Item) -> Mapping[str, Sequence[pytest.FixtureDef[object]]]:
    return item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}


def _group_of(item: pytest.Item) -> str | None:
    """Name of the tests that share something costly with this one; None if it may run anywhere."""
    fixtures = _fixtures_of(item)
    if "chromium" in fixtures or item.get_closest_marker("vllm"):
        return "last"
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    if room == "benchmarks":
        return room
    case = item.name.partition("[")[2].rstrip("]")
    if room in ("ray", "oracle", "cluster") or case.split("-")[0] == "ray" or "cluster" in fixtures:
        return "ray"
    if {"two_ranks", "four_ranks"} & fixtures.keys():
        return "ranks"
    return item.path.stem if any(found[-1].scope == "module" for found in fixtures.values()) else None


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """A server that forks the workers of this process's clusters."""
    from workers.ray.forking import ForkServer

    server = ForkServer.start()
    yield
    server.close()


@pytest.fixture(scope="session")
def cluster(forks: None) -> Iterator[None]:
    """A local Ray cluster that believes it has 8 CPUs."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def three_nodes(forks: None) -> Iterator[Cluster]:
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


@pytest.fixture
def gpu_nodes(forks: None) -> Iterator[Callable[..., None]]:
    """What starts a cluster with a node for each of these numbers of logical GPUs, and labels for some by index."""
    import ray
    from ray.cluster_utils import Cluster

    nodes: list[Cluster] = []

    def begin(*gpus: int, labels: Mapping[int, Mapping[str, str]] | None = None) -> None:
        each = {"num_cpus": 8, "object_store_memory": 100 << 20}
        head = {**each, "num_gpus": gpus[0], "include_dashboard": False}
        nodes.append(cluster := Cluster(initialize_head=True, head_node_args=head))
        for i, num in enumerate(gpus[1:], start=1):
            cluster.add_node(num_gpus=num, labels=dict((labels or {}).get(i, {})), **each)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    yield begin
    ray.shutdown()
    for cluster in nodes:
        cluster.shutdown()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 12,000 parameters with the tokenizer of `examples.sort`."""
    from tests.jobs import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty prompts of one to three digits."""
    from tests.jobs import write_tasks

    return write_tasks(tmp_path_factory.mktemp("data") / "tasks.jsonl")
