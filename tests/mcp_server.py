"""An MCP server on its standard input and output, for tests: tools that work, fail, hang, and start a child."""

import asyncio
import os
import subprocess
import sys

from mcp.server.mcpserver import MCPServer

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
def start_child() -> int:
    """Start a process that would outlive this one; its id."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(sleep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid


@server.tool()
def leave() -> str:
    """End the server at once."""
    os._exit(0)


if __name__ == "__main__":
    server.run("stdio")
