"""Stream of a completion, piece by piece."""

from __future__ import annotations

from asyncio import Future, Queue
from collections.abc import AsyncGenerator

from workers.engines.engine import Completion


async def as_sampled(
    done: Future[Completion], pieces: Queue[Completion | None], num_begun: int
) -> AsyncGenerator[Completion]:
    """Yield the pieces of the queue, then the rest of the completion that no piece contained. The first `num_begun`
    tokens are left out.

    Waits for a piece or the end; unblocked by the engine's steps. Raises the error of `done`.
    """
    done.add_done_callback(lambda _: pieces.put_nowait(None))
    num_sent = num_begun
    while (piece := await pieces.get()) is not None:
        num_sent += len(piece.output_ids)
        yield piece
    yield done.result().since(num_sent)
