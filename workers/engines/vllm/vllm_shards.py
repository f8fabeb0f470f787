"""Work of vLLM's shards beside decoding: in a thread of this process, or in one of each shard's process.

vLLM's queue of messages to its shards belongs to the step thread, and a shard that works on a message decodes nothing.
So a message only starts the work, and the shard reports its end through a pipe.

    ShardProcesses.call    consumes: one answer of every shard    produces: their results, or an error
                           waits for: the work of all shards      unblocked by: answers, ends of processes, deadline
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlsys.errors import DeadlineExceeded, WorkerDied
from rlsys.util.deadlines import timeout
from workers.engines.vllm.shared_tensors import TensorMemory

if TYPE_CHECKING:
    from io import BufferedWriter

    from torch import Tensor
    from vllm.v1.engine.llm_engine import LLMEngine


class Shards(Protocol):
    """The shards of one engine."""

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """Run `rlsys_stage` of every shard with these weights."""

    async def call(self, phase: str, work: str, *args: object) -> Sequence[Any]:
        """Run a method of every shard while decoding continues. Returns the results in the order of the shards.

        Raises `WorkerDied` naming the shard that failed, or `DeadlineExceeded`.
        """

    def close(self) -> None:
        """Free what the shards share."""


class OwnShard:
    """The only shard, in this process."""

    def __init__(self, llm: LLMEngine, name: str) -> None:
        """`name` is the worker's name in errors."""
        self._llm, self._name = llm, name

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Shards.stage`."""
        await self.call("staging weights", "rlsys_stage", weights)

    async def call(self, phase: str, work: str, *args: object) -> Sequence[Any]:
        """See `Shards.call`."""
        try:
            return await to_thread(self._llm.collective_rpc, work, args=args)
        except Exception as error:
            raise WorkerDied(self._name, phase, f"{error!r}; restart the worker") from error

    def close(self) -> None:
        """See `Shards.close`: there is nothing."""


class ShardProcesses:
    """Several shards, each in a child process of this one."""

    def __init__(
        self,
        llm: LLMEngine,
        name: str,
        count: int,
        load_s: float,
        ask: Callable[[str, Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """`load_s` is the deadline of a call. `ask` runs a function on the step thread, between two steps."""
        self._llm, self._name, self._count, self._load_s, self._ask = llm, name, count, load_s, ask
        self._memory = TensorMemory(name)

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Shards.stage`: the shards read the weights from memory that this process writes once."""
        shared = await to_thread(self._memory.write, weights)
        await self.call("staging weights", "rlsys_stage", shared)

    async def call(self, phase: str, work: str, *args: object) -> Sequence[Any]:
        """See `Shards.call`."""
        with ExitStack() as pipes:
            ends, places = [], []
            with ExitStack() as own:
                for _ in range(self._count):
                    readable, writable = os.pipe()
                    ends.append(pipes.enter_context(FileIO(readable)))
                    own.callback(os.close, writable)
                    places.append(f"/proc/{os.getpid()}/fd/{writable}")
                begin = partial(self._llm.collective_rpc, "rlsys_begin", args=(work, args, places))
                await self._ask(phase, begin)
            try:
                async with timeout(self._load_s):
                    answers = await asyncio.gather(*map(_read, ends))
            except TimeoutError as error:
                detail = f"the shards did not end within {self._load_s:g} s; restart the worker"
                raise DeadlineExceeded(self._name, phase, detail) from error
        return [self._result(phase, shard, answer) for shard, answer in enumerate(answers)]

    def close(self) -> None:
        """See `Shards.close`."""
        self._memory.close()

    def _result(self, phase: str, shard: int, answer: bytes) -> object:
        is_done, result = pickle.loads(answer) if answer else (False, "its process has ended")
        if not is_done:
            raise WorkerDied(self._name, phase, f"shard {shard}: {result}; restart the worker")
        return result


def answer_in_a_thread(place: str, work: Callable[..., object], *args: object) -> None:
    """Run `work` in a thread of this process, and write (is_done, result) to the pipe at `place`, pickled.

    The pipe is opened before the return, so that it also ends if this process dies.
    """
    pipe = Path(place).open("wb")  # noqa: SIM115  (the thread closes it)
    threading.Thread(target=_answer, args=(pipe, work, args), daemon=True).start()


def _answer(pipe: BufferedWriter, work: Callable[..., object], args: Sequence[object]) -> None:
    try:
        answer: tuple[bool, object] = True, work(*args)
    except Exception as error:  # noqa: BLE001  (the thread's boundary: the caller gets the error)
        answer = False, repr(error)
    with suppress(BrokenPipeError), pipe:  # the caller has given up
        pickle.dump(answer, pipe)


async def _read(pipe: FileIO) -> bytes:
    """Everything that is written to a pipe until its writers have closed it."""
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()
