"""A vLLM server that runs elsewhere as an engine: token ids and logprobs over its HTTP interface.

    VllmServerEngine._sample    consumes: one request       produces: its tokens, with versions
                                waits for: a slot, `resume`, tokens from the server
                                unblocked by: other requests ending, `resume`, the server, the deadline of a step

A pause ends what the server samples for every request; each goes on after `resume` from the tokens that arrived, with
a new generator. So the version of each token is known, and keys and values are those of the weights that sample. A
server that schedules asynchronously answers the pause once no step is in flight, and drops what it sampled for ended
requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import orjson
import torch

from rlsys.errors import DeadlineExceeded, ModelError, WorkerDied, WorkerError
from rlsys.routing.requests import Completion, Request
from rlsys.types import EngineStats, PolicyVersion, Sampling
from rlsys.util.seeds import continuation_seed
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.engine import EngineSpec, ModelShapes, ServerSpec, check_weights
from workers.engines.stepping import EngineJob, RequestLimits, progress_of
from workers.engines.stop_texts import StopTexts
from workers.engines.vllm.vllm_layout import PartSum, sum_checksums
from workers.model.checkpoint_names import checkpoint_tensors, in_own_memory
from workers.model.model_loading import num_known_ids, outline
from workers.transport.buckets import specs_in

if TYPE_CHECKING:
    from torch import Tensor

ANSWER_S = 30.0
"""Deadline of a call that samples nothing."""
KEPT_S = 2.0
"""Seconds that an unused connection is kept, fewer than the 5 after which the server closes it."""
LINE_BYTES = 1 << 20
"""Most bytes of one line of a stream."""
HOW_TO_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype DTYPE --max-model-len CONTEXT --logprobs-mode processed_logprobs "
    "--generation-config vllm --worker-extension-cls workers.engines.vllm.vllm_served.ServedWeights"
)


class VllmServerEngine:
    """Implements `Engine` on one server, which must have no other client. `start` comes before any other call."""

    def __init__(
        self,
        spec: EngineSpec,
        server: ServerSpec,
        *,
        stop_token_ids: frozenset[int],
        decode: Callable[[tuple[int, ...]], str] | None = None,
        version: PolicyVersion = 0,
        name: str,
    ) -> None:
        """`decode` gives the text of token ids; without it, requests must have no stop texts."""
        model = self._outline = outline(spec.model_path)
        self._shapes = ModelShapes.of(model, getattr(torch, spec.dtype))
        num_vocab = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._num_ids = num_known_ids(spec.model_path) or num_vocab
        self._limits = RequestLimits(spec.max_context, num_vocab, stop_token_ids)
        self._spec, self._server, self._name, self._version = spec, server, name, version
        self._stop_texts = StopTexts(decode)
        self._session: aiohttp.ClientSession | None = None
        self._model = ""
        """Name of the model at the server."""
        self._salt = secrets.token_hex(8)
        self._num_loads = self._num_tokens = 0
        """The salt and the number of loads separate the prefix caches of weights, also those of earlier engines."""
        self._jobs: dict[EngineJob, asyncio.Task[None]] = {}
        self._running: dict[EngineJob, asyncio.Task[Literal["stop", "length"] | None]] = {}
        """Requests with a slot, and their streams."""
        self._room = asyncio.Semaphore(spec.slots)
        self._going = asyncio.Event()
        self._going.set()
        self._heard_s = time.monotonic()
        """Time of the last token from the server, or of the last request if that is later."""
        self._specs: tuple[TensorSpec, ...] = ()
        """Of the newest weights, as they were published."""
        self._staged: Mapping[str, Tensor] | None = None
        self._end: WorkerError | None = None

    async def start(self) -> None:
        """Look at the server: its model, its context, the meaning of its logprobs, and whether it takes weights.

        Ends what a predecessor left there. Raises `WorkerDied` if the server does not answer, `ModelError` if it does
        not fit.
        """
        key = os.environ.get(self._server.api_key_env, "") if self._server.api_key_env else ""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=LINE_BYTES,
        )
        served = (await self._call("GET", "/v1/models"))["data"]
        found = next((one for one in served if self._is_own(one["root"]) and not one.get("parent")), None)
        if found is None:
            roots = ", ".join(str(one["root"]) for one in served)
            raise ModelError(f"rollout.engine: {self._url} serves {roots}, and model.path is {self._spec.model_path}")
        self._model = found["id"]
        if (longest := found["max_model_len"]) < self._spec.max_context:
            raise ModelError(
                f"rollout.engine: {self._url} has a context of {longest} tokens, and the run needs "
                f"{self._spec.max_context} (rollout.max_context_tokens): start it with --max-model-len"
            )
        await self._check_updates()
        await self._check_logprobs()

    async def _check_updates(self) -> None:
        """Raise `ModelError` if the server does not take weights that are to come, or has others than those of the
        model which is to stay."""
        try:
            (first, *_) = await self._rpc("reading its loads", "rlsys_served_loads")
            await self._call("POST", "/pause?mode=abort")
            await self._call("POST", "/resume")
        except WorkerError as error:
            if self._server.takes_weights:
                raise ModelError(
                    f"rollout.engine: {self._url} takes no new weights, so it can only evaluate, or sample for a "
                    f"frozen policy ({error.detail}); start it with {HOW_TO_START}, on machines with this rlsys"
                ) from error
            return
        if self._num_ids < self._limits.num_vocab:
            await self._rpc("leaving out ids without text", "rlsys_served_limit_ids", str(self._num_ids))
        if first["loads"] and not self._server.takes_weights:
            raise ModelError(
                f"rollout.engine: the weights of {self._url} were changed since it started, and are no longer those of "
                f"{self._spec.model_path}: start it again"
            )

    async def _check_logprobs(self) -> None:
        """Raise `ModelError` unless logprobs are those of the distribution that is sampled from.

        At half the temperature, the logprobs of two tokens are twice as far apart.
        """
        gaps = []
        for temperature in (1.0, 0.5):
            body = self._body((0,), Sampling(temperature=temperature, max_new_tokens=1), seed=0) | {"logprobs": 5}
            answer = await self._call("POST", "/v1/completions", body, self._spec.step_s)
            values = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
            gaps.append(values[0] - values[4])  # the sampled token may come after these five
        if not abs(gaps[1] - 2 * gaps[0]) <= 0.05 * abs(gaps[1]) + 1e-4:
            raise ModelError(
                f"rollout.engine: the logprobs of {self._url} are not those of the distribution that it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return (self._version,)

    async def generate(self, request: Request) -> Completion:
        self._limits.check(self._name, request)
        self._check_open(f"sampling request {request.id}")
        job = EngineJob(request, asyncio.get_running_loop().create_future())
        self._jobs[job] = asyncio.create_task(self._sample(job))
        try:
            return await job.future
        finally:
            if (work := self._jobs.pop(job, None)) is not None:
                work.cancel()

    def abort(self, request_id: str) -> None:
        for job in [job for job in self._jobs if job.request.id == request_id]:
            self._answer(job, job.completion("abort"))
            self._jobs.pop(job).cancel()

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        self._check_open("reporting progress")
        return progress_of(self._running, known)

    async def pause(self) -> None:
        """See `Engine.pause`. The server aborts every request; those tokens of which arrived are kept."""
        self._check_open("pausing the engine")
        if not self._going.is_set():
            return
        self._going.clear()
        await self._call("POST", "/pause?mode=abort", deadline_s=self._spec.step_s)
        streams = list(self._running.values())
        for stream in streams:  # of a request that came to the server after the pause, nothing would end it
            stream.cancel()
        if streams:
            await asyncio.wait(streams)

    async def resume(self) -> None:
        self._check_open("resuming the engine")
        await self._call("POST", "/resume")
        self._going.set()

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.stage`. The weights go through a file in a folder that this machine shares with the server."""
        self._check_open("staging weights")
        if self._staged is weights:
            return
        check_weights(self._name, weights, self._shapes)
        self._staged = None
        path = Path(self._server.folder) / f"rlsys-{self._salt}-{self._num_loads}.safetensors"
        specs = [[n, self._spec.dtype, list(self._shapes.known[n])] for n in sorted(self._shapes.required)]
        try:
            firsts = {name: t for name, t in weights.items() if self._shapes.first_names[name] == name}
            await asyncio.to_thread(_write, checkpoint_tensors(self._outline, firsts), path)
            await self._rpc("staging weights", "rlsys_served_stage", str(path), json.dumps(specs))
        except OSError as error:
            raise WorkerDied(self._name, "staging weights", f"cannot write {path}: {error}") from error
        finally:
            with suppress(OSError):
                await asyncio.to_thread(path.unlink, missing_ok=True)
        self._staged = weights

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        await self.stage(weights)
        await self._rpc(f"loading version {version}", "rlsys_served_swap")
        self._specs, self._staged = tuple(specs_in(weights).values()), None
        self._version, self._num_loads = version, self._num_loads + 1

    async def checksums(self) -> Mapping[TensorSpec, int]:
        self._check_open("computing checksums")
        if not self._specs:
            return {}
        names = [self._shapes.first_names[spec.name] for spec in self._specs]
        firsts = [TensorSpec(name, spec.dtype, spec.shape) for name, spec in zip(names, self._specs, strict=True)]
        dtypes = json.dumps({spec.name: spec.dtype for spec in firsts})
        shards = await self._rpc("computing checksums", "rlsys_served_sums", dtypes)
        parts = [[PartSum(name, tuple(at), tuple(shape), value) for name, at, shape, value in own] for own in shards]
        sums = sum_checksums(parts, firsts)
        return {spec: sums[first] for spec, first in zip(self._specs, firsts, strict=True) if first in sums}

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._check_open("scoring tokens")
        body = self._body(token_ids, Sampling(temperature=0.0, max_new_tokens=1), seed=0) | {"prompt_logprobs": 0}
        answer = await self._call("POST", "/v1/completions", body, self._spec.step_s)
        found = answer["choices"][0]["prompt_logprobs"]
        return tuple(one[str(token)]["logprob"] for token, one in zip(token_ids[1:], found[1:], strict=True))

    async def sleep(self) -> None:
        """See `Engine.sleep`: the server keeps its device, which no worker of a run shares."""

    async def wake(self) -> None:
        """See `Engine.wake`."""

    def stats(self) -> EngineStats:
        """See `Engine.stats`. The use of the server's cache is unknown here, and reads 0."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._jobs) - len(self._running),
            kv_used=0.0,
            num_tokens=self._num_tokens,
            num_cached_tokens=0,
            step_age_s=time.monotonic() - self._heard_s if self._running else 0.0,
        )

    async def close(self) -> None:
        """See `Engine.close`. The server goes on."""
        self._finish(WorkerDied(self._name, "sampling requests", "the engine was closed"))
        if self._session is not None:
            await self._session.close()

    # --------------------------------------------------------------------------------------------------------- sampling

    async def _sample(self, job: EngineJob) -> None:
        """Sample a request to its end; see the table of the module."""
        this = asyncio.current_task()
        assert this is not None
        try:
            async with self._room:
                finish = None
                while finish is None:
                    await self._going.wait()
                    job.marks.append((len(job.output_ids), self._version))
                    stream = self._running[job] = asyncio.create_task(self._stream(job))
                    try:
                        finish = await stream
                    except asyncio.CancelledError:
                        if this.cancelling():
                            raise
                    finally:
                        del self._running[job]
            self._answer(job, job.completion(finish))
        except WorkerError as error:
            self._answer(job, error)
            if isinstance(error, WorkerDied | DeadlineExceeded):
                self._finish(error)

    async def _stream(self, job: EngineJob) -> Literal["stop", "length"] | None:
        """Take tokens of a request from the server. Returns how it ended; None if a pause cut it."""
        request = job.request
        num_begun = request.num_begun + len(job.output_ids)
        ids = request.prompt_ids + request.given_ids + tuple(job.output_ids)
        seed = (continuation_seed(request.seed, num_begun) if num_begun else request.seed) % 2**63
        left = request.sampling.max_new_tokens - num_begun
        body = self._body(ids, request.sampling, seed) | {"max_tokens": left, "stream": True}
        phase, self._heard_s = f"sampling request {request.id}", time.monotonic()
        try:
            async with self._open.post(f"{self._url}/v1/completions", data=orjson.dumps(body), headers=_JSON) as answer:
                if answer.status != 200:
                    raise WorkerDied(self._name, phase, f"{self._url}: {answer.status}: {(await answer.text())[:500]}")
                async for event in self._events(answer.content, phase):
                    if "error" in event:
                        raise WorkerDied(self._name, phase, f"{self._url}: {event['error']}")
                    if finish := self._take(job, event["choices"][0]):
                        return None if finish == "abort" else finish
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerDied(self._name, phase, f"{self._url} does not answer: {error!r}") from error
        if not self._going.is_set():
            return None  # what is aborted while it is on its way into the server ends without an event
        raise WorkerDied(self._name, phase, f"{self._url} ended the stream of request {request.id} without a reason")

    async def _events(self, content: aiohttp.StreamReader, phase: str) -> Any:  # noqa: ANN401  (an async generator)
        """Yield the events of a stream. Raises `DeadlineExceeded` if no request gets a token within the deadline."""
        while True:
            try:
                async with asyncio.timeout(self._spec.step_s):
                    line = await content.readline()
            except TimeoutError:
                if time.monotonic() - self._heard_s < self._spec.step_s:
                    continue  # the server samples for others first
                text = f"no token came within {self._spec.step_s:g} s; restart {self._url}"
                raise DeadlineExceeded(self._name, phase, text) from None
            if not line:
                return
            self._heard_s = time.monotonic()
            if line.startswith(b"data: {"):
                yield orjson.loads(line[6:])

    def _take(self, job: EngineJob, choice: Mapping[str, Any]) -> Literal["stop", "length", "abort"] | None:
        """Append new tokens. Returns how the request ended, None if it goes on."""
        is_greedy = job.request.sampling.temperature == 0
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs", ())
        for token, logprob in zip(choice.get("token_ids") or (), logprobs, strict=True):
            job.output_ids.append(token)
            job.logprobs.append(0.0 if is_greedy else logprob)
            self._num_tokens += 1
            if token in self._limits.stop_token_ids:
                return "stop"
            if self._stop_texts.end(job.request.sampling.stop, (*job.request.given_ids, *job.output_ids)):
                return "stop"
        return choice.get("finish_reason")

    def _body(self, ids: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": sorted(self._limits.stop_token_ids),
            "ignore_eos": True,  # a request ends only at the configured stop tokens
            "return_token_ids": True,
            "cache_salt": f"{self._salt} load {self._num_loads}",
        }

    # ------------------------------------------------------------------------------------------------------- the server

    @property
    def _url(self) -> str:
        return self._server.url

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start comes first"
        return self._session

    def _is_own(self, root: str) -> bool:
        own = self._spec.model_path
        return root == own or (Path(own).is_dir() and Path(root).is_dir() and Path(root).samefile(own))

    async def _rpc(self, phase: str, method: str, *args: str) -> list[Any]:
        """Run a method of every worker of the server; returns their results."""
        body = {"method": method, "args": list(args), "timeout": self._spec.load_s}
        answer = await self._call("POST", "/collective_rpc", body, self._spec.load_s, phase)
        return answer.get("results", [])

    async def _call(
        self, method: str, path: str, body: object = None, deadline_s: float = ANSWER_S, phase: str = ""
    ) -> dict[str, Any]:
        phase = phase or f"requesting {path.partition('?')[0]}"
        data = None if body is None else orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._open.request(method, f"{self._url}{path}", data=data, headers=_JSON) as answer,
            ):
                text = await answer.text()
        except TimeoutError:
            raise DeadlineExceeded(self._name, phase, f"{self._url} gave no answer in {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerDied(self._name, phase, f"{self._url} does not answer: {error!r}") from error
        if answer.status != 200:
            raise WorkerDied(self._name, phase, f"{self._url}{path}: {answer.status}: {text[:500]}")
        return orjson.loads(text) if text else {}

    def _check_open(self, what: str) -> None:
        if self._end is not None:
            raise type(self._end)(self._name, what, self._end.detail)

    def _finish(self, end: WorkerError) -> None:
        """End the engine: answer every request with the error."""
        self._end = self._end or end
        for job, work in list(self._jobs.items()):
            self._answer(job, type(end)(self._name, f"sampling request {job.request.id}", self._end.detail))
            if work is not asyncio.current_task():
                work.cancel()

    def _answer(self, job: EngineJob, outcome: Completion | WorkerError) -> None:
        if job.future.done():
            return
        if isinstance(outcome, WorkerError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


_JSON = {"Content-Type": "application/json"}


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a file that only this user can read."""
    from safetensors.torch import save_file

    path.touch(mode=0o600)
    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    save_file(in_own_memory(whole), path)
