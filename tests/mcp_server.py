"""An MCP server on its standard input and output, for tests: tools that work, fail, hang, and leave processes."""

import asyncio
import os
import subprocess
from pathlib import Path

from mcp.server.mcpserver import MCPServer

from tests.processes import stray

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def variable(key: str) -> str:
    """The environment variable of this name."""
    return os.environ.get(key, "")


@server.tool()
def fail(why: str) -> str:
    """Always fails."""
    raise RuntimeError(why)


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def leave_behind(way: str, pipe: str) -> None:
    """Start a process that would outlive this one, in a way of `tests.stray_processes`."""
    subprocess.run(stray(way, Path(pipe)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


@server.tool()
def leave() -> str:
    """End the server at once."""
    os._exit(0)


if __name__ == "__main__":
    server.run("stdio")
