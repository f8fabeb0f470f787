"""Work of shards in other processes: their results, errors and deaths reach the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import DeadlineExceeded, WorkerDied
from workers.engines.vllm.vllm_shards import ShardProcesses, answer_in_a_thread

Work = Callable[[int], object]


class Crew:
    """Shards that are threads of this process: `works` of them, None for one that dies at once."""

    def __init__(self, *works: Work | None) -> None:
        self._works = works

    def collective_rpc(self, method: str, args: tuple[str, Sequence[Any], Sequence[str]]) -> None:
        assert method == "rlsys_begin"
        _, arguments, places = args
        for work, place in zip(self._works, places, strict=True):
            if work is None:
                Path(place).open("wb").close()
            else:
                answer_in_a_thread(place, work, *arguments)


def called(*works: Work | None, load_s: float = 60.0) -> Sequence[Any]:
    async def ask(what: str, work: Callable[[], Any]) -> Any:
        return work()

    crew: Any = Crew(*works)
    shards = ShardProcesses(crew, "rollout-0", len(works), load_s, ask)
    try:
        return asyncio.run(shards.call("computing checksums", "work", 7))
    finally:
        shards.close()


def test_results_come_in_the_order_of_the_shards_whatever_their_size() -> None:
    second_ended = threading.Event()

    def second(number: int) -> bytes:
        second_ended.set()
        return bytes(number * 10**6)

    assert called(lambda number: second_ended.wait() and number, second) == [7, bytes(7 * 10**6)]


def test_an_error_of_a_shard_names_it() -> None:
    with pytest.raises(WorkerDied, match=r"rollout-0 while computing checksums: shard 1: ZeroDivisionError.*restart"):
        called(lambda number: number, lambda number: number / 0)


def test_a_shard_that_dies_is_named() -> None:
    with pytest.raises(WorkerDied, match="shard 0: its process has ended"):
        called(None, lambda number: number)


def test_a_shard_that_does_not_end_exceeds_the_deadline() -> None:
    may_end = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"computing checksums: the shards did not end within 0\.01 s"):
        called(lambda number: number, lambda number: may_end.wait(), load_s=0.01)
    may_end.set()
