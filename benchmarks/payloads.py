"""Cost of tokens on their way: payloads, records of rollouts, and chunks of replies.

    python -m benchmarks.payloads [--quick | --short]

`payload_pickle_over_numpy` is the CPU time of pickling and unpickling the payload of one group as Ray does, with
buffers outside of the pickle, over that of numpy arrays with the same numbers. `record_stall` is what recording 1
million tokens takes from the learner, copying a rank's numbers for the recorder, over a step of one minute, and
`record_s` is the recorder's time to write them. `chunks_growth` is the cost per token of the chunks of a reply while it
grows from 29,000 to 30,000 tokens, over that from 0 to 1,000: in the engine's report, the replica's stream, its message
to another process, and the router.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Size, in_turn, parser_of, print_result, spreads
from rlsys.batch.packing import SampleRef
from rlsys.batch.samples import meta_of, versions_of
from rlsys.routing.request_router import Claim, KnownReplica, _Tokens
from rlsys.routing.requests import Chunk, Completion, Request
from rlsys.types import EngineStats, Episode, Group, GroupKey, Task, Trajectory, Turn, VersionSpan
from workers.engines.stepping import EngineJob, progress_of
from workers.rollout.chunk_stream import ChunkStream
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import WeightChange

GROUP = 8
"""Episodes of a group."""
STEP_S = 60.0
PIECE = 100
"""Tokens of a chunk."""


def main() -> None:
    """Measure all parts, and print the result line."""
    size: Size = parser_of(__doc__, quick="fewer repeats; under a minute").parse_args().size
    print_result(figures(size))


def figures(size: Size) -> Mapping[str, Mapping[str, float]]:
    """Measure each part in turn."""
    repeats = {"full": 5, "quick": 3, "short": 1}[size]
    parts: Sequence[Callable[[Size], Mapping[str, float]]] = (payload_pickle, recording, chunks)
    runs = in_turn(repeats, range(len(parts)), lambda _, part: parts[part](size))
    return {name: spread for rows in runs.values() for name, spread in spreads(rows).items()}


def episodes(num_tokens: int, seed: int = 0) -> tuple[Episode, ...]:
    """Return a group whose replies have so many tokens each."""
    random = np.random.default_rng(seed)

    def turn() -> Turn:
        ids, logprobs = random.integers(0, 150_000, num_tokens), -random.exponential(size=num_tokens)
        prompt = tuple(range(200))
        return Turn(prompt, ids.tolist(), logprobs.tolist(), (VersionSpan(3, num_tokens),), "stop", "")

    return tuple(Episode((Trajectory("policy", (turn(),), reward=1.0),)) for _ in range(GROUP))


def payload_pickle(size: Size) -> Mapping[str, float]:
    """Time the round trip of a payload, and that of bare arrays."""
    payload = episodes(200 if size == "short" else 8000)
    turns = [t.turns[0] for episode in payload for t in episode.trajectories]
    arrays = [np.asarray(part) for turn in turns for part in (turn.prompt_ids, turn.output_ids, turn.logprobs)]
    own, bare = round_trip_s(payload), round_trip_s(arrays)
    return {"payload_pickle_over_numpy": own / bare, "payload_us": 1e6 * own}


def round_trip_s(value: object, times: int = 50) -> float:
    """Seconds to pickle a value with its buffers, copy those, and read it again."""

    def once() -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])

    once()
    began = time.process_time()
    for _ in range(times):
        once()
    return (time.process_time() - began) / times


def recording(size: Size) -> Mapping[str, float]:
    """Time what the learner does for a rollout file, and what the recorder does."""
    from rlsys.replay.rollout_json import RolloutRecord
    from rlsys.replay.rollout_parquet import write_records
    from workers.train.token_columns import Reader, Speller, TokenColumns

    num_tokens, num_groups = (100, 2) if size == "short" else (3906, 32)
    payloads = [episodes(num_tokens, seed) for seed in range(num_groups)]
    task, numbers = Task(id="t", prompt="p"), np.zeros(num_tokens * GROUP, np.float32)
    began = time.perf_counter()
    columns = [
        TokenColumns(
            samples=tuple(SampleRef(g, e, 0, 0, 0.5, 1.0) for e in range(GROUP)),
            lengths_S=(num_tokens,) * GROUP,
            trainer_logprobs_N=numbers.copy(),
            entropies_N=numbers.copy(),
            advantages_N=numbers.copy(),
            is_masked_N=np.zeros(len(numbers), np.bool_),
        )
        for g in range(num_groups)
    ]
    copied = pickle.loads(pickle.dumps(columns, protocol=5))
    stall_s = time.perf_counter() - began
    reader = Reader(copied, Speller(lambda ids: "".join(f" {token}" for token in ids)))

    def record(place: int) -> RolloutRecord:
        record = RolloutRecord.of(1, task, group_of(place, payloads[place]), payloads[place], ())
        return replace(record, readings=reader.read(place, record))

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_000001.parquet")
        write_records(path, map(record, range(num_groups)))
        record_s, num_bytes = time.perf_counter() - began, path.stat().st_size
    total = num_tokens * num_groups * GROUP
    return {"record_stall": stall_s / STEP_S, "record_s": record_s, "record_bytes_per_token": num_bytes / total}


def group_of(group_id: int, payload: tuple[Episode, ...]) -> Group:
    """Return the metadata of a payload."""
    spans = versions_of(payload)
    return Group(
        key=GroupKey(group_id, 1), task_id="t", permit_version=3, replica="r", episodes=meta_of(payload),
        versions=spans, weights=(), payload=None,
    )  # fmt: skip


def chunks(size: Size) -> Mapping[str, float]:
    """Time the chunks of a growing reply at its start and its end."""
    lengths = (200, 400) if size == "short" else (1000, 30_000)
    request = Request("a", (1,) * 200, sampling=None, seed=7, is_read=True)  # type: ignore[arg-type]
    job = EngineJob(request, future=None, marks=[(0, 3)])  # type: ignore[arg-type]

    class Engine:
        versions = (3,)

        async def generate(self, request: Request) -> Completion:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
            return progress_of([job], known)

        def stats(self) -> EngineStats:
            return EngineStats(1, 0, 0.0, 0)

    async def grown() -> dict[int, float]:
        replica = EngineReplica("r", Engine(), None, WeightChange("between", 0.0), num_slots=1)  # type: ignore[arg-type]
        stream, claim, tokens, spent = ChunkStream(replica), Claim(0), _Tokens(None), {}
        stream.submit([request])
        await asyncio.sleep(0)  # the request is at the engine
        for end in range(PIECE, lengths[1] + 1, PIECE):
            job.output_ids += [5] * PIECE
            job.logprobs += [-0.5] * PIECE
            began = time.process_time()
            for _, chunk in pickle.loads(pickle.dumps(await stream._message())):
                assert isinstance(chunk, Chunk), chunk
                tokens.add(chunk.more)
                claim.note(KnownReplica(replica=replica), chunk)
            spent[end] = time.process_time() - began
        stream.close()
        return spent

    spent = asyncio.run(grown())
    first = sum(s for end, s in spent.items() if end <= lengths[0])
    last = sum(s for end, s in spent.items() if end > lengths[1] - lengths[0])
    return {"chunks_growth": last / first, "chunks_us_per_token": 1e6 * first / lengths[0]}


if __name__ == "__main__":
    main()
