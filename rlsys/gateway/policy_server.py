"""HTTP server of a policy that is not being trained: OpenAI's API, for any client, nothing recorded.

Unlike at a `Gateway`, the client decides how tokens are drawn: `temperature`, `top_p`, `seed`. Each request is a
conversation of its own, so no response can be continued by its id.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeAlias

import orjson
from aiohttp import web
from pydantic import AfterValidator, Field

from rlsys.agents.agent import AgentStopped, Policy
from rlsys.agents.session import Session
from rlsys.errors import DataError, TaskTooLong, WorkerError
from rlsys.gateway.answers import AnswerForm, Refused
from rlsys.gateway.chat_completions import ChatAnswer, ChatRequest, Lenient, read_request
from rlsys.gateway.completions import CompletionAnswer, CompletionRequest
from rlsys.gateway.conversations import Conversations, TellChoice
from rlsys.gateway.http_exchange import Replies, has_token, json_response, model_object
from rlsys.gateway.http_front import DEFAULT_LIMITS, HttpFront
from rlsys.gateway.model_responses import ResponsesAnswer, ResponsesRequest
from rlsys.types import POLICY, Task
from rlsys.util.connection_limits import ConnectionLimits

MIN_TEMPERATURE = 0.01
"""Lowest temperature besides 0: logits over a lower one are no numbers."""


def _drawable(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"should be 0, which takes the most likely token, or from {MIN_TEMPERATURE:g} to 2")
    return temperature


class Drawing(Lenient):
    """How the tokens of a reply are drawn."""

    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_drawable)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None


class _Chat(ChatRequest, Drawing): ...


class _Completion(CompletionRequest, Drawing): ...


class _Responses(ResponsesRequest, Drawing):
    previous_response_id: None = None


OpensPolicy: TypeAlias = Callable[[Drawing], Policy]
"""Returns the policy for one request, with the sampling that it asks for."""


class PolicyServer:
    """Server of one policy under one model name. Every request needs the token."""

    def __init__(self, opens: OpensPolicy, model: str, token: str, limits: ConnectionLimits = DEFAULT_LIMITS) -> None:
        self._opens, self._model, self._token = opens, model, token
        self._numbers = itertools.count()
        routes = [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.post("/v1/responses", self._respond),
            web.get("/v1/models", self._models),
        ]
        self._front = HttpFront(routes, self._check_token, limits)

    async def listen(self, host: str, port: int) -> int:
        """Listen on a port, or on any free one if it is 0. Returns the port. Raises `OSError`."""
        return await self._front.listen(host, port)

    async def close(self) -> None:
        """Close the socket and every connection."""
        await self._front.close()

    async def reply(
        self, drawing: Drawing, asked: ChatRequest | CompletionRequest, number: int, tell: TellChoice | None = None
    ) -> Replies:
        """Sample the replies to a request. Raises `Refused`."""
        seed = number if drawing.seed is None else drawing.seed
        session = Session(Task(id=f"request-{number}", prompt=""), {POLICY: self._opens(drawing)}, seed=seed)
        try:
            return await Conversations(session).reply(asked, tell)
        except (TaskTooLong, AgentStopped) as error:
            raise Refused(400, str(error), code="context_length_exceeded", param="messages") from None
        except DataError as error:
            raise Refused(400, str(error), code="messages_refused", param="messages") from None
        except WorkerError as error:
            raise Refused(503, str(error), code="worker_failed") from None
        finally:
            await session.close()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await self._front.body(request), _Chat)
        number = next(self._numbers)
        return await self._send_answer(request, ChatAnswer(number, asked), asked, asked, number)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await self._front.body(request), _Completion)
        number = next(self._numbers)
        return await self._send_answer(request, CompletionAnswer(number, asked), asked, asked, number)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await self._front.body(request), _Responses)
        chat, number = asked.chat(()), next(self._numbers)
        return await self._send_answer(request, ResponsesAnswer(number, asked, chat), asked, chat, number)

    async def _send_answer(
        self,
        request: web.Request,
        answer: AnswerForm,
        drawing: Drawing,
        asked: ChatRequest | CompletionRequest,
        number: int,
    ) -> web.StreamResponse:
        sample = partial(self.reply, drawing, asked, number)
        return await self._front.send(request, answer, sample, is_streamed=asked.stream)

    async def _models(self, request: web.Request) -> web.Response:
        return json_response(orjson.dumps({"object": "list", "data": [model_object(self._model, int(time.time()))]}))

    def _check_token(self, request: web.Request) -> None:
        if not has_token(request, self._token):
            raise Refused(401, "the token is not that of this server", code="invalid_api_key")
