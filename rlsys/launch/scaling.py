"""Another number of replicas for a running job: `rlsys scale` leaves the wish in its folder, and the run follows it."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlsys.config.loader import tree_in
from rlsys.errors import ConfigError
from rlsys.launch.run_lock import LOCK
from rlsys.util.deadlines import sleep
from rlsys.util.files import CONFIG, write_atomically

WISH = "scale.txt"
"""File in a run's folder with the number of replicas that is wanted, until the run has read it."""
LOOK_S = 0.5
"""Pause between two looks for this file."""
MOST = 10_000
"""Replicas that can be asked for."""


def scale(run: Path, wishes: Sequence[str]) -> int:
    """Ask a running job for another number of rollout replicas, given as `rollouts=N`; return the number.

    The run starts and ends replicas in the background, and its events say when each has joined or left. Raises
    `ConfigError` for anything else, for a folder in which no run is running, and for a run on servers of its own.
    """
    number = _number(wishes)
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG}")
    if isinstance(tree_in(run / CONFIG)["rollout"]["engine"], dict):
        raise ConfigError(f"{run} samples at the servers of rollout.engine.urls, and starts no others")
    if not _is_running(run):
        raise ConfigError(f"no run is running in {run} on this machine: give rollout.replicas={number} when it goes on")
    try:
        write_atomically(run / WISH, f"rollouts={number}")
    except OSError as error:
        raise ConfigError(f"cannot write {run / WISH}: {error.strerror}") from None
    return number


@asynccontextmanager
async def follow(run: Path, resize: Callable[[int], None], refuse: Callable[[str], None]) -> AsyncIterator[None]:
    """Call `resize` with each number that is asked for during the block, or `refuse` with the reason why one cannot be
    read. What was asked for earlier is forgotten."""
    wish = run / WISH
    wish.unlink(missing_ok=True)
    following = asyncio.create_task(_look_for_wishes(wish, resize, refuse))
    try:
        yield
    finally:
        following.cancel()


async def _look_for_wishes(wish: Path, resize: Callable[[int], None], refuse: Callable[[str], None]) -> None:
    """Waits for the file, which cannot notify; ends when it is cancelled."""
    while True:
        try:
            if (text := await asyncio.to_thread(_take, wish)) is not None:
                resize(_number([text]))
        except (OSError, ValueError, ConfigError) as error:
            refuse(f"{wish} cannot be followed: {error}")
        await sleep(LOOK_S)


def _take(wish: Path) -> str | None:
    """Return the text of the file, and remove it; None if there is none."""
    taken = wish.with_suffix(".taken")
    try:
        wish.rename(taken)
    except FileNotFoundError:
        return None
    text = taken.read_text()
    taken.unlink()
    return text


def _number(wishes: Sequence[str]) -> int:
    name, _, text = wishes[0].partition("=") if len(wishes) == 1 else ("", "", "")
    if name != "rollouts" or not text.isdecimal() or not 1 <= int(text) <= MOST:
        given = " ".join(wishes) or "nothing"
        raise ConfigError(f"give rollouts=N, a number of replicas from 1 to {MOST:,}; {given} was given")
    return int(text)


def _is_running(run: Path) -> bool:
    """True if a process has the lock of a run's folder."""
    try:
        with (run / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
