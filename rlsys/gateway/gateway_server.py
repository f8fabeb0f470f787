"""HTTP server: a base URL and a secret for each session, OpenAI's paths, errors in OpenAI's form.

| status | when |
| --- | --- |
| 400 | the request is invalid, or asks for an unsupported feature |
| 400 | `context_length_exceeded`; `budget_spent`; `messages_refused` |
| 401 | the token belongs to another session |
| 404 | no such session, response or agent (`model_not_found`) |
| 410 | the session is over |
| 500 | a bug: it is also raised in the workflow |
| 503 | the infrastructure failed: that is also raised in the workflow, and the group is reissued |

`rlsys.gateway.http_front` has the statuses of what comes before: damaged and slow requests, and too many connections.
If a client disconnects before the reply is complete, its sampling is cancelled and nothing is recorded. A stream is
sent while the reply is sampled. What fails after its first text ends it with an error event instead of a status.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import orjson
from aiohttp import web

from rlsys.agents.agent import AgentStopped, ContextFull
from rlsys.agents.session import Session
from rlsys.errors import DataError, TaskTooLong, WorkerError
from rlsys.gateway.answers import Refused
from rlsys.gateway.chat_completions import ChatAnswer, ChatRequest, read_request
from rlsys.gateway.completions import CompletionAnswer, CompletionRequest
from rlsys.gateway.conversations import Conversations, TellChoice
from rlsys.gateway.http_exchange import Replies, has_token, json_response, model_object
from rlsys.gateway.http_front import DEFAULT_LIMITS, HttpFront
from rlsys.gateway.model_responses import ResponsesAnswer, ResponsesRequest
from rlsys.types import Message
from rlsys.util.connection_limits import ConnectionLimits

T = TypeVar("T")
Refusal: TypeAlias = AgentStopped | TaskTooLong | DataError
"""Reasons to refuse a request that are not failures of the run."""

HOST = "127.0.0.1"
GRACE_S = 1.0
"""Seconds that cancelled work of the client's side may take to end."""


class Endpoint:
    """Session as a client sees it: its URL, its secret, and its failures."""

    def __init__(self, session: Session, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key
        self.refusals: dict[str, Refusal] = {}
        """Reasons of refused requests, the last for each error code that the client received: a full context, a spent
        budget, messages that the chat template refuses."""
        self.conversations = Conversations(session)
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._work: set[asyncio.Task[Replies]] = set()
        self._is_over = False
        self._num_requests = 0
        self._responses: dict[str, tuple[Message, ...]] = {}
        """Messages up to each response, with it, by its id."""

    @property
    def models(self) -> list[str]:
        """Model names for clients: agents bound to a policy, and policies."""
        session = self.conversations.session
        return list(dict.fromkeys([*session.bindings, *session.policies]))

    def next_number(self) -> int:
        """Number of a new request."""
        self._num_requests += 1
        return self._num_requests - 1

    def before(self, asked: ResponsesRequest) -> tuple[Message, ...]:
        """Messages up to the response that a request continues. Raises `Refused` if there is no such response."""
        previous = asked.previous_response_id
        if previous is None:
            return ()
        if previous not in self._responses:
            raise Refused(
                404,
                f"there is no response {previous!r} in this session",
                code="not_found",
                param="previous_response_id",
            )
        return self._responses[previous]

    async def respond(
        self, asked: ResponsesRequest, chat: ChatRequest, response_id: str, tell: TellChoice | None
    ) -> Replies:
        """Reply to a request for a response, and remember it; see `reply`."""
        choices = await self.reply(chat, tell)
        self._responses[response_id] = (*self.before(asked), *asked.messages(), choices[0].message)
        return choices

    async def reply(self, asked: ChatRequest | CompletionRequest, tell: TellChoice | None = None) -> Replies:
        """Reply to a request. Raises `Refused` for any error; `while_sound` also raises those that the client did not
        cause."""
        if self._is_over:  # it was closed while the body was read
            raise _over()
        if self._failure.done():
            raise _unavailable(self._failure.result())
        work = asyncio.create_task(self.conversations.reply(asked, tell))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_over:
                raise _over() from None
            raise
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001  (raised in the workflow)
            raise self._refusal_response(error) from None

    async def while_sound(self, work: Awaitable[T]) -> T:
        """Run `work`, the client's side, and return its result.

        Waits for `work`; unblocked also by the first failure that the client did not cause, which is raised and cancels
        `work`. If an error of `work` reports a refusal, the refusal is raised from it. Cancelled work that does not end
        is abandoned after `GRACE_S`; the closed endpoint refuses its further requests.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            if task.cancelled():
                raise RuntimeError("the agent cancelled itself")
            if (error := task.exception()) and (refusal := self._find_refusal(error)):
                raise refusal from error
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=GRACE_S)

    async def close(self) -> None:
        """Refuse further requests and cancel sampling. Waits for cancelled requests to end."""
        self._is_over = True
        if self._work:
            for work in self._work:
                work.cancel()
            await asyncio.wait(self._work)

    def _refusal_response(self, error: Exception) -> Refused:
        match error:
            case ContextFull() | TaskTooLong():
                code, param = "context_length_exceeded", "messages"
            case AgentStopped():
                code, param = "budget_spent", None
            case DataError():
                code, param = "messages_refused", "messages"
            case _:
                if not self._failure.done():
                    self._failure.set_result(error)
                return _unavailable(error)
        self.refusals[code] = error
        return Refused(400, str(error), code=code, param=param)

    def _find_refusal(self, error: BaseException) -> Refusal | None:
        """Find the refusal that an error of the client's side reports, by its code or text in the error or its cause.

        Clients put the whole error body into an exception's text, programs print it to stderr, and libraries wrap it.
        An error that was raised while a refusal was handled, but not `from` it, does not count. In an exception group,
        every error has to report a refusal.
        """
        if isinstance(error, BaseExceptionGroup):
            refusals = [self._find_refusal(each) for each in error.exceptions]
            return refusals[0] if all(refusals) else None
        text = str(error)
        found = (refusal for code, refusal in self.refusals.items() if code in text or str(refusal) in text)
        return next(found, None) or (self._find_refusal(error.__cause__) if error.__cause__ else None)


class Gateway:
    """One listening socket for the sessions of a process, in their event loop."""

    def __init__(self, limits: ConnectionLimits = DEFAULT_LIMITS) -> None:
        self._secret = secrets.token_bytes(32)
        self.endpoints: dict[int, Endpoint] = {}
        """Endpoints of open sessions, by number."""
        self._num_sessions = 0
        routes = [
            web.post("/s/{session}/v1/chat/completions", self._chat),
            web.post("/s/{session}/v1/completions", self._complete),
            web.post("/s/{session}/v1/responses", self._respond),
            web.get("/s/{session}/v1/models", self._models),
            web.get("/s/{session}/v1/models/{model:.+}", self._model),
        ]
        self._front = HttpFront(routes, self._endpoint, limits)
        self._port = 0
        self._starting = asyncio.Lock()
        self.num_users = 0

    async def start(self) -> None:
        """Listen on a free port of the loopback interface. Does nothing if it listens already."""
        async with self._starting:
            if self._port == 0:
                self._port = await self._front.listen(HOST, 0)

    async def close(self) -> None:
        """Close the socket and every connection."""
        await self._front.close()

    @asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[Endpoint]:
        """Open the endpoint of a session, and close it at the end, which refuses further requests."""
        number = self._num_sessions
        self._num_sessions += 1
        endpoint = Endpoint(session, f"http://{HOST}:{self._port}/s/{number}/v1", self._key(number))
        self.endpoints[number] = endpoint
        try:
            yield endpoint
        finally:
            del self.endpoints[number]
            await endpoint.close()

    def _key(self, number: int) -> str:
        """Derive a session's token from its number, so that error 410 needs no stored tokens of closed sessions."""
        return hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()

    def _endpoint(self, request: web.Request) -> Endpoint:
        name = request.match_info["session"]
        number = int(name) if name.isdecimal() and len(name) < 16 else self._num_sessions
        if number >= self._num_sessions:
            raise Refused(404, f"there is no session {name}", code="session_not_found")
        if not has_token(request, self._key(number)):
            raise Refused(401, f"the token is not that of session {name}", code="invalid_api_key")
        if number not in self.endpoints:
            raise _over()
        return self.endpoints[number]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoint(request)
        asked = read_request(await self._front.body(request), ChatRequest)
        answer = ChatAnswer(endpoint.next_number(), asked)
        return await self._front.send(request, answer, partial(endpoint.reply, asked), is_streamed=asked.stream)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoint(request)
        asked = read_request(await self._front.body(request), CompletionRequest)
        answer = CompletionAnswer(endpoint.next_number(), asked)
        return await self._front.send(request, answer, partial(endpoint.reply, asked), is_streamed=asked.stream)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoint(request)
        asked = read_request(await self._front.body(request), ResponsesRequest)
        chat = asked.chat(endpoint.before(asked))
        answer = ResponsesAnswer(endpoint.next_number(), asked, chat)
        sample = partial(endpoint.respond, asked, chat, answer.id)
        return await self._front.send(request, answer, sample, is_streamed=asked.stream)

    async def _models(self, request: web.Request) -> web.Response:
        models = [model_object(name, int(time.time())) for name in self._endpoint(request).models]
        return json_response(orjson.dumps({"object": "list", "data": models}))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._endpoint(request).models:
            raise Refused(404, f"there is no model {name!r}", code="model_not_found", param="model")
        return json_response(orjson.dumps(model_object(name, int(time.time()))))


def _over() -> Refused:
    return Refused(410, "the session is over", code="session_over")


def _unavailable(error: Exception) -> Refused:
    if isinstance(error, WorkerError):
        return Refused(503, str(error), code="worker_failed")
    return Refused(500, f"{type(error).__name__}: {error}", code="bug")


# ---------------------------------------------------------------------------------------------------------- one a loop


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway] = WeakKeyDictionary()


@asynccontextmanager
async def shared_gateway() -> AsyncIterator[Gateway]:
    """Share one gateway in this event loop: the first user starts it, and the last user closes it."""
    loop = asyncio.get_running_loop()
    if (gateway := _SHARED.get(loop)) is None:
        gateway = _SHARED[loop] = Gateway()
    gateway.num_users += 1
    try:
        await gateway.start()
        yield gateway
    finally:
        gateway.num_users -= 1
        if gateway.num_users == 0:
            del _SHARED[loop]  # the next user starts another one
            await gateway.close()
