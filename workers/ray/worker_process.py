"""Plain workers in processes of Ray: `start` gives one a process, `Remote` calls its methods.

    relay = start(Relay, "relay-1a2b", partial(Relay, "relay-1a2b", node, store, 60.0), NO_MATHS, 15.0, place=node)
    reference = await relay.call(Relay.give, bucket, wait=True)

`workers.ray.call_stream` has calls that travel together. No other module calls `.remote()`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import pickle
import re
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import iscoroutine, iscoroutinefunction
from math import inf
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast

import ray
from ray import ObjectRef
from ray._private import state as ray_state
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlsys.errors import DeadlineExceeded, RlsysError, WorkerDied, WorkerError
from rlsys.util import deadlines
from rlsys.util.deadlines import phase_of, timeout
from rlsys.util.importing import search_path
from workers.ray import node_network, vitals
from workers.ray.cluster import (
    LOOPBACK,
    NO_MATHS,
    Resources,
    lacking,
    log_folder,
    mark_semaphores,
)
from workers.ray.forking import fork_environment
from workers.ray.placement import ReservedBundle
from workers.ray.shared_memory import shared_memory_problem

W = TypeVar("W")
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")
RayActor: TypeAlias = Any
"""A Ray actor handle, with the methods of the actor's class, each with `.remote()`."""
_Split: TypeAlias = tuple[T, *tuple[Any, ...]] | Coroutine[Any, Any, tuple[T, *tuple[Any, ...]]]
Raylet: TypeAlias = tuple[str, int]
"""Host and port of a raylet."""
Chunks: TypeAlias = Any
"""References to the results of a streaming call: a `ray.ObjectRefGenerator`, which is untyped there."""
ASYNC_CALLS = 10_000
"""Maximum concurrent calls of an async actor. The real limit on groups in flight is the permits."""
SET_UP_S = 600.0
"""Deadline for a worker to load its model and be ready."""
SET_UP_PATIENCE = 10
"""Multiple of `limits.silence_s` that a worker may be silent while it is set up: loading a model can keep the lock."""
UNPLACED_S = 5.0
"""Seconds without a process after which what a worker needs is compared with what is free."""
BESIDE = "beside"
"""Ray's name for the second thread of a worker without async methods."""
CONNECT_S = 2.0
"""Deadline of a connection to the node of a silent worker."""
CLOSE_S = 5.0
"""Deadline for a worker to free its resources."""
DUMP_S = 1.0
"""Deadline for a worker to write its stacks into its log."""
STDERR = 2
"""Descriptor of the worker's log."""
HEARTBEAT = "heartbeat"
"""Ray's name for the calls of a worker that a thread of their own answers."""
BEATS = 3
"""Heartbeats within the silence that ends a worker."""


class _Process:
    """A Ray actor's process, and the worker that `build` creates in it.

    Without `setup`, for example after a restart by Ray, the first call builds the worker.
    """

    def __init__(self, build: Callable[..., object]) -> None:
        vitals.begin_in_worker()
        mark_semaphores()
        node_network.use_interface()
        self._build = build
        self._worker: object = None
        self._thread = 0
        """Thread of the calls."""

    def _method(self, path: str) -> Callable[..., Any]:
        if self._worker is None:
            self._worker = self._build()
        return attrgetter(path)(self._worker)

    @ray.method(concurrency_group=HEARTBEAT)
    def beat(self, silence_s: float) -> int:
        """Answer, whatever the worker computes, with its attribute `progress`, a count; 0 for a worker without.

        The process writes its stacks to its log unless the next heartbeat comes within two thirds of `silence_s`: then
        a computation keeps the interpreter's lock.
        """
        faulthandler.dump_traceback_later(silence_s * 2 / 3, file=STDERR)
        return getattr(self._worker, "progress", 0)

    @ray.method(concurrency_group=HEARTBEAT)
    def where(self) -> str:
        """File, line and function that the thread of the worker is in now, outside of installed packages if it can."""
        return place_in_code(sys._current_frames().get(self._thread))

    @ray.method(concurrency_group=HEARTBEAT)
    def dump_stacks(self) -> None:
        faulthandler.dump_traceback(file=STDERR)


def place_in_code(frame: FrameType | None) -> str:
    """Name the innermost place outside of installed packages in the calls that lead to `frame`: `env.py:12 in step`."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = next((f for f in frames if not f.f_code.co_filename.startswith((*installed, "<"))), None)
    if own is None and not frames:
        return "an unknown place"
    found = own or frames[0]
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_qualname}"


class _OneAtATime(_Process):
    """The process of a worker without async methods."""

    def setup(self, *args: object) -> None:
        self._thread = get_ident()
        self._worker = self._build(*args)
        gc.freeze()  # what it was built of stays, and a collection need not look at it again

    def address(self, ports: tuple[int, int] | None) -> str:
        if ray.util.get_node_ip_address() == LOOPBACK:  # all ranks are on this machine, where others may reach a port
            return f"file://{tempfile.mkdtemp(prefix='ranks-', dir=log_folder().parent)}/store"
        address = node_network.own_address()
        return f"tcp://{address}:{node_network.listen(address, ports)}"

    def call(self, path: str, *args: object, **kwargs: object) -> object:
        return self._method(path)(*args, **kwargs)

    @ray.method(concurrency_group=BESIDE)
    def beside(self, path: str, *args: object, **kwargs: object) -> object:
        return self._method(path)(*args, **kwargs)


class _ManyAtOnce(_Process):
    """The process of a worker with async methods."""

    async def setup(self, *args: object) -> None:
        self._thread = get_ident()
        self._worker = await _result(self._build(*args))
        gc.freeze()  # what it was built of stays, and a collection need not look at it again

    async def call(self, path: str, *args: object, **kwargs: object) -> object:
        return await _result(self._method(path)(*args, **kwargs))

    async def stream(self, path: str, *args: object) -> AsyncIterator[object]:
        async for part in self._method(path)(*args):
            yield _Pickled(part)


class _Pickled:
    """A value that is pickled by Python's own pickler, in less than half the time of Ray's. It reads as itself."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(self._value, protocol=5, buffer_callback=buffers.append)
        return _unpickle, (text, *buffers)


def _unpickle(text: bytes, *buffers: pickle.PickleBuffer) -> object:
    return pickle.loads(text, buffers=buffers)


async def _result(made: object) -> object:
    return await made if iscoroutine(made) else made


@dataclass(frozen=True, eq=False)
class Remote(Generic[W]):
    """A worker in another process. It can be passed on to further processes.

    The decorator `rlsys.util.deadlines.remote` names a method's phase and sets its patience. A call raises
    `DeadlineExceeded`, `WorkerDied`, the worker's `RlsysError`, or a `WorkerError` for any other error.
    """

    name: str
    """Name of the worker in errors."""
    kind: type[W]
    actor: RayActor
    deadline_s: float
    """Deadline for an answer, in seconds; methods with `patience` have a multiple of it."""
    place: str = ""
    """The node that the process is bound to."""
    resources: Resources = NO_MATHS
    """Resources of the process."""
    part: str = ""
    """Attribute of the worker that is called here, e.g. `generator.`; empty for the worker."""
    bundle: ReservedBundle | None = None
    """The bundle that the process is placed in."""

    async def call(
        self, method: Callable[Concatenate[W, P], Coroutine[Any, Any, T] | T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the worker. References among the arguments are resolved on arrival."""
        answer = self.actor.call.remote(self.part + method.__name__, *args, **kwargs)
        return await self._await_answer(answer, method, args, kwargs)

    async def beside(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of a worker without async methods in a second thread, beside its other calls."""
        answer = self.actor.beside.remote(self.part + method.__name__, *args, **kwargs)
        return await self._await_answer(answer, method, args, kwargs)

    async def split(
        self, method: Callable[Concatenate[W, P], _Split[T]], num_kept: int, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, list[ObjectRef]]:
        """Call a method; returns its first value, and references to the `num_kept` others."""
        call = self.actor.call.options(num_returns=1 + num_kept)
        answer, *kept = call.remote(self.part + method.__name__, *args, **kwargs)
        return await self._await_answer(answer, method, args, kwargs), kept

    def stream(
        self, method: Callable[Concatenate[W, P], AsyncIterator[object]], *args: P.args, **kwargs: P.kwargs
    ) -> Chunks:
        """References to the values that a method yields; see `CallStream`."""
        return self.actor.stream.remote(self.part + method.__name__, *args, **kwargs)

    @property
    def proxy(self) -> W:
        """This object typed as the worker's class, for its `name`, its `place` and its async methods."""
        return cast("W", self)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self.kind, name)
        return lambda *args, **kwargs: self.call(method, *args, **kwargs)

    def at(self, kind: type[V], part: str) -> Remote[V]:
        """The attribute `part` of the worker, an object of class `kind`."""
        return cast("Remote[V]", replace(self, kind=cast("Any", kind), part=f"{self.part}{part}."))

    def within(self, deadline_s: float) -> Remote[W]:
        """The same worker with another deadline."""
        return replace(self, deadline_s=deadline_s)

    async def setup(
        self, *args: object, silence_s: float = SET_UP_S, on_unplaced: Callable[[WorkerError], None] = lambda lack: None
    ) -> None:
        """Build the worker; `args` follow the arguments given to `build`.

        Raises `DeadlineExceeded` if its process sends no heartbeat for ten times `silence_s`. `on_unplaced` is called
        again and again while there is no process and the cluster has too little free for one.
        """
        await self._wait_for_place(on_unplaced)
        patience_s = min(SET_UP_PATIENCE * silence_s, SET_UP_S)
        setting_up = call(self.actor.setup.remote(*args), self.name, "setting up the worker", SET_UP_S)
        await deadlines.unless(setting_up, self.watch_process(patience_s))

    async def _wait_for_place(self, on_unplaced: Callable[[WorkerError], None]) -> None:
        """Return once there is a process. Waits for free resources, which cannot notify."""
        answer = call(self.actor.__ray_ready__.remote(), self.name, "starting the worker", SET_UP_S)
        started = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([started], timeout=UNPLACED_S))[0]:
                if self.bundle and await asyncio.to_thread(self.bundle.is_reserved):
                    continue
                if lack := await asyncio.to_thread(lacking, self.resources):
                    on_unplaced(WorkerError(self.name, "waiting for resources", lack))
            await started
        finally:
            started.cancel()

    async def address(self) -> str:
        """Meeting place of ranks, of a worker without async methods: an address on its node where it listens, such as
        `tcp://10.0.0.4:41234`; in a cluster that `connect` starts, `file://PATH` in a folder of this user alone."""
        return await call(
            self.actor.address.remote(self.resources.ports), self.name, "choosing a meeting place", SET_UP_S
        )

    async def end(self) -> None:
        """Close the worker, then kill its process. Errors of the close are ignored."""
        with suppress(RlsysError):
            await call(self.actor.call.remote("close"), self.name, "closing the worker", CLOSE_S)
        self.kill()

    async def watch_process(self, silence_s: float, on_progress: Callable[[], None] = lambda: None) -> None:
        """Return never. Raises `WorkerDied` soon after the process died, or what `beat` raises for a silent one.

        Waits a third of `silence_s` between two heartbeats; only the end of the process unblocks it. `on_progress` is
        called after each heartbeat between which and the last the worker's `progress` has changed.
        """
        before = 0
        while True:
            if (progress := await self.beat(silence_s)) != before:
                before = progress
                on_progress()
            await deadlines.sleep(silence_s / BEATS)  # silence cannot notify

    async def beat(self, silence_s: float) -> int:
        """Return the worker's `progress` once the process answers, even if the worker computes.

        Raises `WorkerDied`, or `DeadlineExceeded` after `silence_s`.
        """
        return await call(self.actor.beat.remote(silence_s), self.name, "answering a heartbeat", silence_s)

    async def raylet(self) -> Raylet:
        """Address of the raylet that the worker's process belongs to. Asks Ray's head. Raises `WorkerDied`."""
        found = await asyncio.to_thread(_raylet_of, self.actor)
        if found is None:
            raise WorkerDied(self.name, "looking up its node", "Ray does not know the node of its process")
        return found

    async def is_cut_off(self, raylet: Raylet) -> bool:
        """True if no connection to the worker's node succeeds from here. Asks nothing else, so that it ends."""
        try:
            async with timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*raylet)
        except OSError:  # also a time-out
            return True
        writer.close()
        return False

    async def where(self, deadline_s: float) -> str:
        """Name the place in the code that the worker is in, also if its event loop is blocked."""
        try:
            return await call(self.actor.where.remote(), self.name, "reporting its node", deadline_s)
        except WorkerError as error:
            return f"an unknown place ({error.detail})"

    async def kill_with_stacks(self) -> None:
        """Let a worker write its stacks into its log, if it can; then kill its process."""
        try:
            with suppress(RlsysError):
                await call(self.actor.dump_stacks.remote(), self.name, "writing its stacks", DUMP_S)
        finally:
            self.kill()

    def kill(self, *, restart: bool = False) -> None:
        """Kill the process. With `restart`, Ray starts it again, if it was started with `restarts`."""
        ray.kill(self.actor, no_restart=not restart)

    async def _await_answer(
        self, answer: Awaitable[T], method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        phase, patience = phase_of(method, args, kwargs)
        deadline_s = patience * self.deadline_s
        return await call(answer, self.name, phase, None if deadline_s == inf else deadline_s)


def start(
    kind: type[W],
    name: str,
    build: Callable[..., W | Coroutine[Any, Any, W]],
    resources: Resources,
    deadline_s: float,
    *,
    place: str = "",
    bundle: ReservedBundle | None = None,
    spreads: bool = False,
    restarts: bool = False,
) -> Remote[W]:
    """Start a worker in its own process, on the node `place`, in a `bundle`, or on any node: with `spreads` on one that
    has few others. `build` is called there, see `Remote.setup`.

    With `restarts`, Ray restarts a process that dies, without the worker's state. By default it does not: the failure
    policy decides.

    A worker with async methods serves many calls at once. Any other worker serves one at a time, because Ray would
    start a thread for each. The process inherits the driver's import path, and has its thread count and the settings of
    its allocator in the environment before any import.
    """
    is_async = any(iscoroutinefunction(getattr(kind, method)) for method in dir(kind))
    # The class has the worker's name, because Ray shows it in process titles and on its dashboard.
    process = type(kind.__name__, (_ManyAtOnce if is_async else _OneAtATime,), {})
    environment = {
        **library_variables(resources, os.environ),
        **vitals.environment_of(name),
        **node_network.environment_of(resources.interface),
    }
    if ray.util.get_node_ip_address() == LOOPBACK:  # of a cluster that `connect` starts: collectives stay there too
        environment |= dict.fromkeys((node_network.GLOO, node_network.NCCL), "lo")
    groups = {HEARTBEAT: 1} if is_async else {HEARTBEAT: 1, BESIDE: 1}
    actor = ray.remote(concurrency_groups=groups)(process).options(  # pyrefly: ignore[unexpected-keyword]
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus,
        max_restarts=-1 if restarts else 0,
        max_concurrency=ASYNC_CALLS if is_async else 1,
        scheduling_strategy=_strategy(place, bundle, spreads=spreads),
        label_selector=dict(resources.labels) or None,
        runtime_env=fork_environment(environment, has_gpu=resources.has_cuda),
    )
    return Remote(name, kind, actor.remote(build), deadline_s, place, resources, bundle=bundle)


def _strategy(
    place: str, bundle: ReservedBundle | None, *, spreads: bool
) -> NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy | Literal["SPREAD"] | None:
    if place:
        return NodeAffinitySchedulingStrategy(place, soft=False)
    return bundle.strategy if bundle else "SPREAD" if spreads else None


def library_variables(resources: Resources, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker's process that its libraries read; `environment` is the driver's."""
    threads = str(resources.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": search_path(),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **resources.allocator_variables(environment),
    }


def this_worker(name: str, kind: type[W]) -> Remote[W]:
    """Return this process's own worker, for other processes."""
    return Remote(name, kind, ray.get_runtime_context().current_actor, inf)


def successor_name(name: str, num_before: int) -> str:
    """Return the name of a worker that follows `num_before` others in the place `name`.

    It differs from theirs, so that an old failure is never taken for its own.
    """
    return f"{name}.{num_before}" if num_before else name


def place_of(name: str) -> int:
    """Index of a worker's place in its pool: 2 for `rollout-2`, and for `rollout-2.1`, which succeeds it."""
    return int(name.rpartition("-")[2].partition(".")[0])


async def call(ref: Awaitable[T], worker: str, phase: str, deadline_s: float | None = None) -> T:
    """Await the value of a reference.

    Raises `DeadlineExceeded`, `WorkerDied`, or the worker's `RlsysError`. Any other error of the worker becomes a
    `WorkerError` that ends with its traceback.
    """
    try:
        async with timeout(deadline_s):
            return await ref
    except RayTaskError as error:  # comes first: one for a TimeoutError of the worker is both
        cause = error.cause
        raise (
            cause if isinstance(cause, RlsysError) else WorkerError(worker, phase, _with_cause(_plain_text(error)))
        ) from error
    except TimeoutError as error:
        raise DeadlineExceeded(worker, phase, f"no answer within {deadline_s:g} s") from error
    except RayActorError as error:
        raise WorkerDied(
            worker, phase, _with_cause(_first_line(error).rstrip(".")) + await vitals.end_of(worker)
        ) from error
    except RayError as error:
        raise WorkerDied(worker, phase, _with_cause(f"{type(error).__name__}: {_first_line(error)}")) from error


def may_live(error: WorkerError) -> bool:
    """Return True for the error of a worker that gave no answer, and False if Ray knows that it has died."""
    return isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, ActorUnavailableError)


def cause_of(error: WorkerError) -> Exception | None:
    """Return the exception of the worker's code that `call` made this error of; None if it was none."""
    return error.__cause__.cause if isinstance(error.__cause__, RayTaskError) else None


def _with_cause(detail: str) -> str:
    """Add a likely cause to the detail of a failure: a full /dev/shm on this node."""
    problem = shared_memory_problem()
    return f"{detail}; {problem}" if problem else detail


def _raylet_of(actor: RayActor) -> Raylet | None:
    """Return the address of the raylet of an actor's node; None if Ray knows no such node."""
    found = cast("dict[str, Any]", ray_state.actors(actor._actor_id.hex()))
    node = next((node for node in ray.nodes() if node["NodeID"] == found["Address"]["NodeID"]), None)
    return node and (node["NodeManagerAddress"], node["NodeManagerPort"])


def _plain_text(error: RayTaskError) -> str:
    """Return the text of an error without the codes with which Ray colours it for a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
