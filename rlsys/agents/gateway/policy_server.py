"""HTTP server of a policy that is not being trained: OpenAI's chat completions, for any client, nothing recorded.

Unlike at a `Gateway`, the client decides how tokens are drawn: `temperature`, `top_p`, `seed`. Each request is a
conversation of its own. A stream is sent when the reply is complete.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, TypeAlias

import orjson
from aiohttp import web
from pydantic import Field

from rlsys.agents.agent import AgentStopped, Policy
from rlsys.agents.gateway.chat_completions import ChatReply, ChatRequest, Refused, read_request, without_stop
from rlsys.agents.gateway.gateway_server import MAX_BODY, in_openai_form, model_object
from rlsys.agents.session import Session
from rlsys.agents.tool_calls import message_of
from rlsys.errors import DataError, TaskTooLong
from rlsys.types import POLICY, Message, Task


class ServedRequest(ChatRequest):
    """Body of a request to a policy that is not being trained."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None


OpensPolicy: TypeAlias = Callable[[ServedRequest], AbstractAsyncContextManager[Policy]]
"""Opens the policy for one request, with the sampling that it asks for."""


class PolicyServer:
    """Server of one policy under one model name. Every request needs the token."""

    def __init__(self, opens: OpensPolicy, model: str, token: str) -> None:
        self._opens, self._model, self._token = opens, model, token
        self._numbers = itertools.count()
        self.app = web.Application(client_max_size=MAX_BODY, middlewares=[in_openai_form])
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_get("/v1/models", self._models)

    async def reply(self, asked: ServedRequest) -> ChatReply:
        """Sample the reply to a request. Raises `Refused`."""
        number = next(self._numbers)
        async with self._opens(asked) as policy:
            session = Session(Task(id=f"request-{number}", prompt=""), {POLICY: policy}, asked.seed or number)
            try:
                agent = session.agent(POLICY)
                said = await agent.act(
                    asked.prompt, asked.toolbox, max_new_tokens=asked.max_new_tokens, stop=asked.stop
                )
            except (TaskTooLong, AgentStopped) as error:
                raise Refused(400, str(error), code="context_length_exceeded", param="messages") from None
            except DataError as error:
                raise Refused(400, str(error), code="messages_refused", param="messages") from None
            finally:
                await session.close()
        text = without_stop(said.text, asked.stop)
        message = message_of(text, f"call_{number}") if asked.may_call else Message(role="assistant", content=text)
        return ChatReply(f"chatcmpl-{number}", asked, agent.turns[-1], message)

    async def _chat(self, request: web.Request) -> web.Response:
        self._check_token(request)
        asked = read_request(await request.read(), ServedRequest)
        reply = await self.reply(asked)
        if asked.stream:
            return web.Response(body=reply.events(), content_type="text/event-stream")
        return web.Response(body=reply.whole(), content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        self._check_token(request)
        body = orjson.dumps({"object": "list", "data": [model_object(self._model)]})
        return web.Response(body=body, content_type="application/json")

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise Refused(401, "the token is not that of this server", code="invalid_api_key")
