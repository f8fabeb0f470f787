"""The key `rollout.engine` of servers that run already."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from rlsys.config.section import PathText, Section


def _plain(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"should begin with http:// or https:// (got {url!r})")
    return url.rstrip("/").removesuffix("/v1")


def _differ(urls: list[str]) -> list[str]:
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"{twice} is there twice: a server samples for one replica")
    return urls


class ServerSection(Section):
    """vLLM servers that run already. Each samples for one replica, and must have no other client."""

    urls: Annotated[list[Annotated[str, AfterValidator(_plain)]], Field(min_length=1), AfterValidator(_differ)]
    """Addresses, one for each of `rollout.replicas`, then one for each of `eval.replicas` if `eval.every` is set."""
    api_key_env: str | None = None
    """Environment variable with the key of the servers; None: they ask for none."""
    folder: PathText = "/dev/shm"
    """Folder that the replicas share with the servers, with room for the weights of each: a new version goes there as a
    safetensors file, which only this user can read, until the server has it. `/dev/shm` serves on one machine."""
