"""Tools of an MCP server (https://modelcontextprotocol.io), as a `Toolbox` or as an environment.

    workflow: {type: play, environment: "mcp:python my_server.py"}

    async with mcp_toolbox("http://127.0.0.1:8000/mcp") as tools:
        agent = session.agent("policy", system="Call tools where they help.")
        answer = await agent.use(session.task.prompt, tools)

A command is started for each episode, and communicates over stdin and stdout. At the end it is killed with every
process that it started, in whatever session or group. A URL names a server that already runs (streamable HTTP).
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rlsys.agents.environment import Environment, Step, credential, needs
from rlsys.agents.tools import MAX_CHARS, TIMEOUT_S, Tool, Toolbox
from rlsys.errors import ConfigError, EndpointDown, ToolError, first_of
from rlsys.types import Prompt, Task
from rlsys.util.descendants import launcher_command


class Mcp(Environment):
    """Environment of tools only: a prompt, tool calls, and one answer that ends it, scored by `reward.fn`."""

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_chars: int = MAX_CHARS,
        variables: Mapping[str, str] | None = None,
        variables_env: Sequence[str] = (),
        api_key_env: str | None = None,
    ) -> None:
        """See `mcp_toolbox`. Run folders have a copy of the arguments, so credentials are given by name only.

        `variables_env` are environment variables of this process that a command gets too. `api_key_env` is the one
        with the `api_key` for a URL. Raises `ConfigError` if one is not set, or does not go with `server`.
        """
        if _is_url(server) and (variables or variables_env):
            raise ConfigError("environment 'mcp:': variables are for a command; a URL takes api_key_env")
        if api_key_env and not _is_url(server):
            raise ConfigError("environment 'mcp:': api_key_env is for a URL; a command takes variables_env")
        inherited = {name: credential("variables_env", name) for name in variables_env}
        self._tools = mcp_toolbox(
            server,
            timeout_s=timeout_s,
            max_chars=max_chars,
            variables={**(variables or {}), **inherited},
            api_key=credential("api_key_env", api_key_env) if api_key_env else None,
        )
        self._stack = AsyncExitStack()

    async def reset(self, task: Task, seed: int) -> Prompt:
        self.tools = await self._stack.enter_async_context(self._tools)
        return task.prompt

    async def step(self, reply: str) -> Step:
        return Step("", is_done=True)

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def mcp_toolbox(
    server: str,
    *,
    timeout_s: float = TIMEOUT_S,
    max_chars: int = MAX_CHARS,
    variables: Mapping[str, str] | None = None,
    api_key: str | None = None,
) -> AsyncIterator[Toolbox]:
    """Open the tools of a server, given by its URL or as a command line. Enter and exit in the same task.

    `timeout_s` is the deadline of a call, and of the server's first answer; a longer result than `max_chars` is cut.
    A command gets `variables` in its environment, besides `PATH`, `HOME` and the like. A URL gets `api_key` as a bearer
    token.

    Raises `ConfigError` for an empty command. If the server cannot be reached, raises `EndpointDown` for a URL and
    `ToolError` for a command. If it disconnects later, raises `ToolError`.
    """
    mcp = needs("mcp", "mcp")
    where: Any = server
    if not _is_url(server):
        if not (command := shlex.split(server)):
            raise ConfigError("environment 'mcp:': give a command or a URL after the colon")
        program, *arguments = launcher_command(command)
        where = mcp.StdioServerParameters(command=program, args=arguments, env=dict(variables or {}))
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(timeout_s):
                if api_key is not None:
                    http = needs("mcp.client.streamable_http", "mcp")
                    opened = http.create_mcp_http_client(headers={"Authorization": f"Bearer {api_key}"})
                    where = http.streamable_http_client(server, http_client=await stack.enter_async_context(opened))
                client = await stack.enter_async_context(mcp.Client(where, cache=None))
                offered = await _list_tools(client)
        except Exception as error:
            cause = first_of(error) if isinstance(error, BaseExceptionGroup) else error
            raise _error_of(server, cause) from error
        raised = None
        try:
            yield Toolbox(*(_tool(client, server, each, timeout_s, max_chars) for each in offered))
        except Exception as error:  # noqa: BLE001  (raised below: the client would wrap it in a group)
            raised = error
    if raised is not None:
        raise raised


def _error_of(server: str, cause: BaseException) -> EndpointDown | ToolError:
    """Error of a server that does not answer; a server at a URL is waited for, unless its answer is an error."""
    types = needs("mcp.types", "mcp")
    is_answer = isinstance(cause, needs("mcp.shared.exceptions", "mcp").MCPError)
    is_answer = is_answer and cause.error.code not in (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT)
    detail = f"{type(cause).__name__}: {cause}"
    if _is_url(server) and not is_answer:
        return EndpointDown(server, detail)
    return ToolError(f"the MCP server {server!r} does not answer: {detail}")


def _is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


async def _list_tools(client: Any) -> list[Any]:  # noqa: ANN401  (classes of the package)
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _tool(client: Any, server: str, offered: Any, timeout_s: float, max_chars: int) -> Tool:  # noqa: ANN401
    types, anyio = needs("mcp.types", "mcp"), needs("anyio", "mcp")

    async def call(**arguments: object) -> str:
        try:
            result = await client.call_tool(offered.name, arguments)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ToolError(f"the MCP server {server!r} is gone") from error
        except needs("mcp.shared.exceptions", "mcp").MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise ToolError(f"the MCP server {server!r} is gone: {error}") from error
            raise
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise McpToolFailed(text)
        return text

    return Tool(offered.name, offered.description or "", offered.input_schema, call, timeout_s, max_chars)


class McpToolFailed(Exception):
    """Failure reported by a tool; its text is for the model."""
