"""A completion on its way, piece by piece."""

from __future__ import annotations

from asyncio import Future, Queue
from collections.abc import AsyncGenerator

from workers.engines.engine import Completion


async def as_sampled(
    done: Future[Completion], pieces: Queue[Completion | None], num_begun: int
) -> AsyncGenerator[Completion]:
    """The pieces put into the queue, then what of the whole completion, after its first `num_begun` tokens, was in none
    of them.

    Waits for a piece or the end; unblocked by the engine's steps. Raises what `done` raises.
    """
    done.add_done_callback(lambda _: pieces.put_nowait(None))
    num_sent = num_begun
    while (piece := await pieces.get()) is not None:
        num_sent += len(piece.output_ids)
        yield piece
    yield done.result().since(num_sent)
