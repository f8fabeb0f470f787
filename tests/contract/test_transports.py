"""What every transport of weights promises, and what shared memory promises beyond."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from rlsys.errors import WorkerDied, WorkerError
from rlsys.types import Ref
from workers.ray.cluster import NO_MATHS
from workers.ray.shared_memory import WEIGHTS
from workers.ray.worker_process import Remote, start
from workers.transport.route import TransportSpec
from workers.transport.shared_files import SharedBytes, SharedMemoryTransport, remove_segments
from workers.transport.transport import TransportName, WeightTransport

PHASE = "sending the bytes of version 3"


class Peer:
    """Another process: it reads what this one has written, and keeps it."""

    def __init__(self, transport: TransportName) -> None:
        self._transport = TransportSpec(transport).start()
        self._kept: list[np.ndarray] = []

    async def read(self, ref: list[Ref]) -> bytes:
        self._kept.append(await self._transport.fetch(ref[0], "actor-0", PHASE))
        return self._kept[-1].tobytes()

    async def look(self) -> list[bytes]:
        """What it has read, at this moment."""
        return [data.tobytes() for data in self._kept]

    async def drop(self) -> None:
        self._kept.clear()


_peer: list[Peer] = []


def _in_peer(method: str, *arguments: object) -> object:
    if not _peer:
        _peer.append(Peer("shared_memory"))
    return asyncio.run(getattr(_peer[0], method)(*arguments))


@dataclass
class Kit:
    """A transport in this process, and a peer in another."""

    transport: WeightTransport
    ask: Callable[..., object]

    def wrote(self, version: int, value: int, num_bytes: int = 4096) -> Ref:
        """Write a version and share all of it."""
        memory = self.transport.memory(version, num_bytes, pin=False)
        memory[:] = value
        return self.transport.share(memory, 0, num_bytes)

    def read(self, ref: Ref) -> bytes:
        return asyncio.run(_fetched(self.transport, ref)).tobytes()


async def _fetched(transport: WeightTransport, ref: Ref) -> np.ndarray:
    return await transport.fetch(ref, "actor-0", PHASE)


@pytest.fixture(scope="module", params=["ray_object_store", "shared_memory"])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    if request.param == "shared_memory":
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            transport = SharedMemoryTransport("here")
            yield Kit(transport, lambda method, *arguments: pool.submit(_in_peer, method, *arguments).result(60))
    else:
        request.getfixturevalue("cluster")
        peer: Remote[Peer] = start(Peer, "peer", lambda: Peer("object_store"), NO_MATHS, 60.0)

        def ask(method: str, *arguments: object) -> object:
            async def main() -> object:
                return await peer.call(getattr(Peer, method), *arguments)

            return asyncio.run(main())

        yield Kit(TransportSpec("object_store").start(), ask)
        peer.kill()


def test_another_process_reads_the_bytes_that_were_shared(kit: Kit) -> None:
    memory = kit.transport.memory(0, 1000, pin=False)
    memory[:] = np.arange(1000) % 251
    for start_at, end in ((0, 1000), (64, 128), (990, 1000)):
        ref = kit.transport.share(memory, start_at, end)
        assert kit.ask("read", [ref]) == memory[start_at:end].tobytes() == kit.read(ref)
    kit.ask("drop")


def test_a_later_version_changes_nothing_that_a_process_reads(kit: Kit) -> None:
    refs = [kit.wrote(version, version) for version in range(3)]
    for ref in refs:
        kit.ask("read", [ref])
    del refs, ref
    for version in range(3, 9):
        kit.wrote(version, version)
    assert kit.ask("look") == [bytes([value]) * 4096 for value in range(3)]
    kit.ask("drop")


def test_a_held_reference_keeps_its_bytes(kit: Kit) -> None:
    held = kit.transport.keep_bytes(kit.wrote(1, 7))
    for version in range(2, 6):
        kit.wrote(version, version)
    assert kit.read(held) == bytes([7]) * 4096


def test_a_copy_does_not_follow_its_source(kit: Kit) -> None:
    data = np.full(100, 3, np.uint8)
    ref = kit.transport.put(data)
    data[:] = 4
    assert kit.read(ref) == bytes([3]) * 100


def test_bytes_are_read_only(kit: Kit) -> None:
    data = asyncio.run(_fetched(kit.transport, kit.wrote(1, 7)))
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


# -------------------------------------------------------------------------------------------------------- shared memory


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own in shared memory."""
    path = Path("/dev/shm") / f"test-{os.getpid()}-{tmp_path_factory.mktemp('x').name}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(transport: SharedMemoryTransport, version: int, num_bytes: int = 4096) -> Ref:
    memory = transport.memory(version, num_bytes, pin=False)
    memory[:] = version
    return transport.share(memory, 0, num_bytes)


def test_shared_memory_is_written_again_once_nobody_reads_it(folder: Path) -> None:
    transport = SharedMemoryTransport("here", folder)
    for version in range(20):
        ref = write(transport, version)
    assert ref and len(files(folder)) == 2, "one that `ref` names, one that is written"
    kept = [write(transport, version) for version in range(20, 23)]
    assert len(files(folder)) == 4
    assert kept


def test_a_late_reader_never_gets_a_newer_version(folder: Path) -> None:
    transport, reader = SharedMemoryTransport("here", folder), SharedMemoryTransport("here", folder)
    late = write(transport, 1)
    assert isinstance(late, SharedBytes)
    name = replace(late, lock=None)
    del late
    transport.memory(2, 4096, pin=False)
    with pytest.raises(WorkerDied, match=rf"actor-0 while {PHASE}: .*-v1 is not here, or in use for a newer version"):
        asyncio.run(_fetched(reader, name))


def test_a_version_that_is_being_written_cannot_be_read(folder: Path) -> None:
    transport, reader = SharedMemoryTransport("here", folder), SharedMemoryTransport("here", folder)
    transport.memory(1, 4096, pin=False)
    (name,) = files(folder)
    with pytest.raises(WorkerDied, match="in use for a newer version"):
        reader.keep_bytes(SharedBytes(str(folder / name), 0, 4096))


def test_full_shared_memory_is_named_and_nothing_is_lost(folder: Path) -> None:
    transport = SharedMemoryTransport("here", folder)
    ref = write(transport, 1)
    too_many = 2 * shutil.disk_usage(folder).total
    message = (
        rf"storing version 2: no room for {too_many} bytes in {folder}, of which \d+ are free: make /dev/shm larger"
    )
    with pytest.raises(WorkerError, match=message):
        transport.memory(2, too_many, pin=False)
    assert len(files(folder)) == 1
    assert asyncio.run(_fetched(transport, ref)).tobytes() == bytes([1]) * 4096


def test_files_in_use_and_spare_ones_hold_nobody_up(folder: Path) -> None:
    idle, other = SharedMemoryTransport("idle", folder), SharedMemoryTransport("here", folder)
    kept = [write(idle, version) for version in range(4)]
    del kept
    idle.memory(4, 4096, pin=False)
    ref = write(other, 1)
    assert asyncio.run(_fetched(other, ref)).tobytes() == bytes([1]) * 4096
    assert len(files(folder)) == 3, "one that is written, a spare one, and that of the other"


def test_a_cut_file_is_named(folder: Path) -> None:
    transport, reader = SharedMemoryTransport("here", folder), SharedMemoryTransport("here", folder)
    ref = write(transport, 1)
    assert isinstance(ref, SharedBytes)
    with pytest.raises(WorkerDied, match="is shorter than the 9000 bytes that were published"):
        asyncio.run(_fetched(reader, replace(ref, end=9000)))


def leave_a_version(folder: Path) -> None:
    """Write a version and die."""
    ref = write(SharedMemoryTransport("here", folder), 1)
    os._exit(int(ref is None))


def test_what_a_dead_process_left_is_removed_unless_it_is_read(folder: Path) -> None:
    process = get_context("spawn").Process(target=leave_a_version, args=(folder,))
    process.start()
    process.join(60)
    (name,) = files(folder)
    reader = SharedMemoryTransport("here", folder)
    held = reader.keep_bytes(SharedBytes(str(folder / name), 0, 4096))
    first = SharedMemoryTransport("here", folder)
    write(first, 2)
    assert name in files(folder) and asyncio.run(_fetched(reader, held))[0] == 1
    del held
    write(SharedMemoryTransport("here", folder), 3)
    assert name not in files(folder) and len(files(folder)) == 2


def test_ranks_that_make_room_at_once_leave_each_other_their_files(folder: Path) -> None:
    def make_files(number: int) -> None:
        transport = SharedMemoryTransport(f"rank {number}", folder)
        for _ in range(100):
            kept = [write(transport, version, 64) for version in range(5)]
            assert kept

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_files, range(8)))


def test_the_files_of_a_run_are_removed_when_it_ends(folder: Path) -> None:
    for run in ("here", "there"):
        write(SharedMemoryTransport(run, folder), 1)
    assert len(files(folder)) == 2 and all(name.startswith(WEIGHTS) for name in files(folder))
    remove_segments("here", folder)
    (left,) = files(folder)
    assert "there" in left


def test_memory_of_slow_readers_is_given_back(folder: Path) -> None:
    transport = SharedMemoryTransport("here", folder)
    kept = [write(transport, version) for version in range(6)]
    assert len(files(folder)) == 6
    del kept
    write(transport, 6)
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    ("num_bytes", "room", "is_one_machine", "expected", "reason"),
    [
        (10**9, 10**10, True, "shared_memory", "all nodes are on one machine"),
        (10**9, 4 * 10**9, True, "object_store", "/dev/shm has no room for 5.0 GB beside Ray's objects"),
        (0, 10**8, True, "object_store", "/dev/shm has no room for 1.1 GB beside Ray's objects"),
        (10**9, 10**12, False, "object_store", "the cluster has several machines"),
    ],
)
def test_the_transport_is_chosen_by_machines_and_room(num_bytes, room, is_one_machine, expected, reason):
    chosen = TransportSpec.for_room(num_bytes, room, is_one_machine=is_one_machine)
    assert (chosen.name, chosen.reason) == (expected, reason)
