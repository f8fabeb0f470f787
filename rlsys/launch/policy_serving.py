"""`rlsys serve`: the newest policy of a run, or a model, behind OpenAI's API, in this process and without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rlsys.agents.agent import Policy
from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.gateway.http_front import DEFAULT_LIMITS
from rlsys.gateway.policy_server import Drawing, PolicyServer
from rlsys.launch import preflight, run_folder
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.offline_commands import export_once
from rlsys.types import POLICY
from rlsys.util.connection_limits import ConnectionLimits
from rlsys.util.files import CONFIG

TOKEN_VARIABLE = "RLSYS_SERVE_TOKEN"
_MIN_TOKEN = 16


def serve(target: str, host: str, port: int, tell: Callable[[str], object], overrides: tuple[str, ...] = ()) -> None:
    """Serve the newest checkpoint of a run directory, or a model, until Ctrl-C. `tell` gets the lines to print.

    Raises `ConfigError` if the address cannot be listened on or the token is too short, `CheckpointError` or
    `ModelError` if there is no such policy.
    """
    config, name = config_to_serve(target, overrides)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe()
    if len(token) < _MIN_TOKEN:
        raise ConfigError(f"{TOKEN_VARIABLE} has {len(token)} characters, and needs {_MIN_TOKEN}; leave it out for one")
    asyncio.run(_serve(config, name, host, port, token, tell))


def config_to_serve(target: str, overrides: tuple[str, ...] = ()) -> tuple[Config, str]:
    """Configuration whose model is the policy, and the name to serve it under: `org/name`, or that of the folder."""
    ensure_not_shadowed()
    run = Path(target)
    if not (run / CONFIG).is_file():
        keys = ["run.steps=1", f"model.path={json.dumps(target)}", "stabilizer=null", *overrides]
        config = Config.load([], keys)
        preflight.check_model(config)
        return config, run.absolute().name if run.is_dir() else target
    preflight.check_code(run, run / CONFIG, list(overrides))
    config = Config.load(run / CONFIG, list(overrides))
    path = export_once(run_folder.checkpoint_of(run.absolute(), "latest"))
    model = config.model.model_copy(update={"path": str(path)})
    return config.model_copy(update={"model": model}), run.absolute().name


@asynccontextmanager
async def serve_policy(
    config: Config, name: str, token: str, limits: ConnectionLimits = DEFAULT_LIMITS
) -> AsyncIterator[PolicyServer]:
    """Load the policy, and yield its server."""
    from workers.rollout.local_policies import live_policies, sampling_as

    async with live_policies(config) as policies:
        route = policies[POLICY]

        def open_policy(drawing: Drawing) -> Policy:
            return sampling_as(route, temperature=drawing.temperature, top_p=drawing.top_p)

        yield PolicyServer(open_policy, name, token, limits)


async def _serve(config: Config, name: str, host: str, port: int, token: str, tell: Callable[[str], object]) -> None:
    """Serve until the task is cancelled, which Ctrl-C does."""
    async with serve_policy(config, name, token) as server:
        try:
            try:
                bound = await server.listen(host, port)
            except OSError as error:
                raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
            tell(f"base_url  http://{host}:{bound}/v1")
            tell(f"api_key   {token}")
            tell(f"model     {name}")
            await asyncio.Event().wait()
        finally:
            await server.close()
