"""One run under random faults, one after the other: what they break, and how long each holds the run up.

    python -m benchmarks.chaos [--faults 200 | --quick | --short] [--seed 0] [--ranks 2] [--only session,rollout]

Three raylets on this machine, the tiny sorter trained by PPO with a critic and a KL reference, a rollout replica and a
relay on each raylet, as many session workers, two reward workers, `max_staleness` 2, two ranks of actor and critic;
`--short` has one raylet and one rank. After every fault the run has to do further steps; where the fault ends the run,
it is resumed.

| fault | what happens |
| --- | --- |
| `rollout`, `session`, `reward`, `relay`, `reference`, `actor`, `critic` | SIGKILL for one process of the kind |
| `frozen ...` | SIGSTOP for one process of the kind |
| `collective` | SIGSTOP for a rank of the actor until the others wait for it in a collective, then SIGKILL |
| `node` | a raylet other than the head is killed with all that runs on it; another joins |
| `driver` | SIGKILL for the command |
| `SIGINT`, `SIGTERM`, `SIGHUP` | as from a terminal, Docker or Slurm |
| `head` | the cluster's state service (GCS) is killed; once the command has ended, all raylets are replaced |
| `damage` | SIGKILL for the command, then a byte of the newest checkpoint is changed, or one of its files cut |
| `damaged run` | the same for another file of the run than its events; one that a run refuses is put back |
| `shared memory` | /dev/shm is full for two seconds, and raylets that this kills are replaced; see below |
| `second start` | the same command beside the run: it has to be refused |
| `reward server` | the server of the rewards is away for ten seconds: no group may be dropped for it |
| `poisoned texts` | for two seconds, rewards are texts with half a surrogate pair and a NUL |
| `closed pipe` | the command is started anew, into a pipe whose reader ends after five lines |
| `file limit` | for two seconds the driver can write no file beyond its present size, as on a full disk |

The last one comes only if at most 2 GiB of /dev/shm are free, as under

    unshare -m sh -c "mount -t tmpfs -o size=1g tmpfs /dev/shm && exec python -m benchmarks.chaos"

`broken` lists what may never happen and did: a group trained twice, or neither trained nor dropped nor pending; a group
id with two tasks; a version published with two hashes, or restored with another hash; a damaged checkpoint that nothing
tells of; an exit code other than documented; a pause of more than 30 s between steps without an event that names its
cause; a signal that is not answered within 30 s.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from benchmarks.disturbed_run import PROCESSES, DisturbedRun, Line, is_step
from benchmarks.measure import (
    ENV,
    Raylets,
    parser_of,
    print_result,
    progress,
    raylets,
    sorter,
    spread,
    train_command,
)
from rlsys.agents.workflow import SingleTurn
from rlsys.loop.checkpoint import read_state
from rlsys.loop.checkpoint_files import find_latest, newest_whole

CPUS = 10
"""CPUs of all nodes together, besides one for each rank of actor and critic."""
REACHED_S = 1.0
"""Seconds in which the other ranks come to the next collective."""
STORE_BYTES = 256 << 20
LIMIT_S = 300.0
"""Deadline for a further step."""
PAUSE_S = 30.0
CAUSES = ("worker_failed", "rolled_back", "checkpoint_passed_over", "run_started", "run_ended", "alert_raised")
"""Kinds of events that name the cause of a pause."""
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
FILE_LIMIT_S, AWAY_S = 2.0, 10.0
POISON = "\ud83d\0\x1b[2J"
SHM = Path("/dev/shm")
SMALL_SHM = 2 << 30


@dataclass(frozen=True, kw_only=True)
class PlayedApart(SingleTurn):
    """A single turn as code of a user, which is not light: session workers play it."""


class RewardServer(ThreadingHTTPServer):
    """Server that compares completions with the answer, and can be away or poisoned."""

    is_away = is_poisoned = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Scores)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reward(self, completion: str, answer: str) -> float | str:
        return POISON if self.is_poisoned and completion < "5" else float(completion == answer)


class _Scores(BaseHTTPRequestHandler):
    server: RewardServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.is_away:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        rewards = [self.server.reward(completion, asked["answer"]) for completion in asked["completions"]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": rewards}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name in the base class)
        """Write nothing."""


@dataclass
class Chaos:
    """A disturbed run, and what was found."""

    run: DisturbedRun
    cluster: Raylets
    chance: random.Random
    num_ranks: int
    """Ranks of the actor, and of the critic."""
    server: RewardServer  # pyrefly: ignore[bad-override-mutable-attribute]
    counts: Counter[str] = field(default_factory=Counter)
    held_up_s: dict[str, list[float]] = field(default_factory=dict)
    """By fault: seconds until the next step."""
    answered_s: list[float] = field(default_factory=list)
    """Seconds from each signal to the end of the command."""
    named_s: list[float] = field(default_factory=list)
    """Seconds from each loss of the cluster to the end of the command."""
    broken: list[str] = field(default_factory=list)
    num_damaged: int = 0

    def strike(self, fault: str) -> None:
        """Cause one fault, and wait for two further steps."""
        progress(f"{self.counts.total() + 1}: {fault}")
        began_s = time.time()
        self._faults()[fault]()
        self.counts[fault] += 1
        if self.run.process is not None and self.run.process.poll() is not None:
            self.run.start()
        end = self.run.wait(lambda line: is_step(line) and line["time_s"] > began_s, LIMIT_S)
        self.run.wait(is_step, LIMIT_S)
        self.held_up_s.setdefault(fault, []).append(end["time_s"] - began_s)

    def faults(self) -> list[str]:
        """Names of all faults; frozen workers and dead nodes, which take longest, come once, others twice."""
        table = self._faults()
        return [name for name in table for _ in range(1 if "frozen" in name or name == "node" else 2)]

    def _faults(self) -> dict[str, Callable[[], None]]:
        table: dict[str, Callable[[], None]] = {}
        for kind in PROCESSES:
            table[kind] = lambda kind=kind: self._signal(kind, signal.SIGKILL)
        for kind in ("rollout", "reward", "actor"):
            table[f"frozen {kind}"] = lambda kind=kind: self._signal(kind, signal.SIGSTOP)
        if self.num_ranks > 1:
            table["collective"] = self._kill_in_collective
        for name in EXIT_CODES:
            table[name] = lambda name=name: self.interrupt(name)
        if self.cluster.cluster.worker_nodes:
            table |= {"node": self._lose_node, "head": self._lose_head}
        if shutil.disk_usage(SHM).free <= SMALL_SHM:
            table["shared memory"] = self._fill_shared_memory
        return table | {
            "driver": self._kill_driver,
            "damage": self._damage,
            "damaged run": self._damage_other,
            "second start": self._start_twice,
            "reward server": self._stop_server,
            "poisoned texts": self._poison,
            "closed pipe": self._close_pipe,
            "file limit": self._limit_files,
        }

    def _signal(self, kind: str, how: int) -> None:
        if targets := self.run.workers(kind):
            self.chance.choice(targets).send_signal(how)

    def _kill_in_collective(self) -> None:
        if targets := self.run.workers("actor"):
            rank = self.chance.choice(targets)
            rank.suspend()
            time.sleep(REACHED_S)
            rank.kill()

    def _lose_node(self) -> None:
        self.cluster.kill(self.chance)
        self.cluster.add()

    def _lose_head(self) -> None:
        self.cluster.lose_head()
        self._end_with_cluster()

    def _end_with_cluster(self) -> None:
        """Wait until the command has ended because of its cluster, and start another cluster."""
        assert self.run.process is not None
        began_s = time.monotonic()
        code = self.run.process.wait(LIMIT_S)
        self.named_s.append(time.monotonic() - began_s)
        self.run.follow()
        ended = self.run.events[-1]
        if code != 1 or ended["kind"] != "run_ended" or "Traceback" in self.run.console:
            log = (self.run.folder / "logs" / "driver.log").read_text(errors="replace")[-5000:]
            self.broken.append(f"lost cluster: exit code {code} after {self.named_s[-1]:.1f} s; {ended}; {log}")
        self.cluster.start_again()
        kept = [word for word in self.run.command if not word.startswith("ray=")]
        self.run.command = [*kept, f"ray={self.cluster.address}"]

    def _fill_shared_memory(self) -> None:
        with tempfile.NamedTemporaryFile(dir=SHM, buffering=0) as file:
            with suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(FILE_LIMIT_S)
        if self.cluster.replace_dead():  # a raylet that cannot write to its store is killed by the kernel
            self._end_with_cluster()

    def interrupt(self, name: str) -> None:
        code, seconds = self.run.end(getattr(signal, name), LIMIT_S)
        self.answered_s.append(seconds)
        if code != EXIT_CODES[name] or seconds > PAUSE_S:
            self.broken.append(f"{name}: exit code {code} after {seconds:.1f} s:\n{self.run.console[-2000:]}")

    def _kill_driver(self) -> None:
        self.run.end(signal.SIGKILL, LIMIT_S)

    def _damage(self) -> None:
        self._kill_driver()
        folder = self.run.folder / "checkpoints"
        newest = find_latest(folder)
        if newest is None or len(list(folder.glob("step_*"))) < 2:  # a run does not start if all are damaged
            return
        self._damage_one(newest)
        self.num_damaged += 1

    def _damage_other(self) -> None:
        self._kill_driver()
        victim, content = self._damage_one(self.run.folder, besides=("checkpoints", "events.jsonl", "console.log"))
        self.run.start()
        assert self.run.process is not None
        try:
            self.run.wait(lambda line: line["kind"] == "run_started", LIMIT_S)
        except RuntimeError:
            if self.run.process.poll() != 2 or victim.name not in self.run.console[-2000:]:
                raise
            victim.write_bytes(content)

    def _damage_one(self, folder: Path, besides: Sequence[str] = ()) -> tuple[Path, bytes]:
        """Change a bit of one file beneath `folder`, or cut the file; return its path, and what it held."""
        files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        victim = self.chance.choice(sorted(path for path in files if path.relative_to(folder).parts[0] not in besides))
        content = victim.read_bytes()
        place, damaged = self.chance.randrange(len(content)), bytearray(content)
        if self.chance.random() < 0.5:
            damaged[place] ^= 1 << self.chance.randrange(8)
        else:
            del damaged[place:]
        victim.write_bytes(damaged)
        return victim, content

    def _start_twice(self) -> None:
        done = subprocess.run(
            [*self.run.command, "run.resume=auto"],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 2 or "Traceback" in done.stderr:
            self.broken.append(f"second start: exit code {done.returncode}: {done.stderr[-300:]}")

    def _stop_server(self) -> None:
        self.server.is_away = True
        with suppress(RuntimeError):  # each group may be in work elsewhere meanwhile
            self.run.wait(lambda line: line["kind"] == "endpoint_failed", AWAY_S)
            time.sleep(AWAY_S)
            self.server.is_away = False
            self.run.wait(lambda line: line["kind"] == "endpoint_recovered", LIMIT_S)
        self.server.is_away = False

    def _poison(self) -> None:
        self.server.is_poisoned = True
        time.sleep(FILE_LIMIT_S)
        self.server.is_poisoned = False

    def _close_pipe(self) -> None:
        self.interrupt("SIGINT")
        self.run.start(num_read=5)

    def _limit_files(self) -> None:
        assert self.run.process is not None
        driver = psutil.Process(self.run.process.pid)
        size = (self.run.folder / "events.jsonl").stat().st_size
        driver.rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            self.run.process.wait(FILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            driver.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:  # a checkpoint could not be written
            if self.run.process.returncode != 1 or "Traceback" in self.run.console:
                self.broken.append(f"file limit: exit code {self.run.process.returncode}")

    def check(self) -> None:
        """Add what the events and the newest checkpoint show to be broken."""
        newest, _ = newest_whole(self.run.folder / "checkpoints")
        assert newest is not None
        state = read_state(newest)
        pending = set(state.ledger.pending)
        self.broken += broken_laws(self.run.events, pending, state.ledger.next_group_id)
        told = sum(line["kind"] == "checkpoint_passed_over" for line in self.run.events)
        if told < self.num_damaged:
            self.broken.append(f"{self.num_damaged} checkpoints were damaged, and {told} passed over")


def broken_laws(events: list[Line], pending: set[int], num_issued: int) -> list[str]:
    """Describe the laws that the events of a run break, whose newest checkpoint has these groups pending."""
    broken: list[str] = []
    task_of: dict[int, str] = {}
    steps: dict[int, list[int]] = {}
    """Groups by step, of the steps that are behind the weights."""
    hashes: dict[int, str] = {}
    """Hash of each version behind the weights whose line was not lost with a damaged file."""
    expected: dict[int, str] = {}
    """Hash with which a version has to be published next."""
    published: set[int] = set()
    dropped: set[int] = set()
    last_s, is_named = 0.0, True
    for line in events:
        kind = line["kind"]
        is_named = is_named or kind in CAUSES
        if kind == "run_started":
            first = line["first_step"]
            steps = {step: groups for step, groups in steps.items() if step <= first}
            hashes = {version: hash_ for version, hash_ in hashes.items() if version <= first}
            expected, published = {first: hashes[first]} if first in hashes else {}, set()
        elif kind == "rolled_back":
            steps = {step: groups for step, groups in steps.items() if step <= line["restored"]}
            expected[line["version"]] = hashes[line["restored"]]
        elif kind == "weights_published":
            version, hash_ = line["version"], line["hash"]
            if version in published:
                broken.append(f"version {version} was published twice")
            if expected.pop(version, hash_) != hash_:
                broken.append(f"version {version} was restored with another hash")
            published.add(version)
            hashes[version] = hash_
        elif kind == "group_issued":
            if task_of.setdefault(line["group_id"], line["task_id"]) != line["task_id"]:
                broken.append(f"group {line['group_id']} has two tasks")
        elif kind == "group_dropped":
            dropped.add(line["group_id"])
            if "does not answer" in line.get("detail", ""):
                broken.append(f"group {line['group_id']} was dropped, for its server was away")
        elif kind == "step_done":
            steps[line["step"]] = line["group_ids"]
            if last_s and line["time_s"] - last_s > PAUSE_S and not is_named:
                broken.append(f"{line['time_s'] - last_s:.1f} s before step {line['step']}, for no named cause")
            last_s, is_named = line["time_s"], False
    trained = Counter(group_id for groups in steps.values() for group_id in groups)
    broken += [f"group {group_id} was trained {count} times" for group_id, count in trained.items() if count > 1]
    broken += [f"group {group_id} is trained and pending" for group_id in pending & trained.keys()]
    lost = set(range(num_issued)) - trained.keys() - dropped - pending
    return broken + [f"group {group_id} is lost" for group_id in sorted(lost)]


def main() -> None:
    """Disturb a run; print the result line, and exit with 1 if anything is broken."""
    parser = parser_of(__doc__, quick="20 faults")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--ranks", type=int, default=2, help="of the actor, and of the critic")
    parser.add_argument("--only", type=lambda names: names.split(","), help="these faults; a name may come twice")
    arguments = parser.parse_args()
    num_nodes = 1 if arguments.size == "short" else 3
    num_ranks = 1 if arguments.size == "short" else arguments.ranks
    num_faults = {"full": arguments.faults, "quick": 20, "short": 2}[arguments.size]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="chaos_") as name,
        RewardServer() as server,
        raylets(num_nodes, -(-(CPUS + 2 * num_ranks) // num_nodes), STORE_BYTES) as nodes,
    ):
        command = train_command(
            sorter(arguments.size), Path(name), f"ray={nodes.address}", "run.steps=1000000",
            "algorithm.type=ppo", "algorithm.kl_coef=0.01", f"rollout.replicas={num_nodes}", "reward.workers=2",
            "train.groups_per_step=8", "asynchrony.max_staleness=2", "checkpoint.every=5", "checkpoint.keep_last=4",
            f"reward.fn=[{{fn: http, args: {{url: 'http://127.0.0.1:{server.server_port}'}}}}]", "reward.timeout_s=60",
            "record.rollouts_every=0", "limits.max_attempts=50", "limits.failed_share=1",
            f"train.mesh.shard={num_ranks}", f"rollout.workflow=benchmarks.chaos:{PlayedApart.__name__}",
        )  # fmt: skip
        chaos = Chaos(
            DisturbedRun(command, Path(name) / "run"), nodes, random.Random(arguments.seed), num_ranks, server
        )
        chaos.run.start()
        try:
            chaos.run.wait_steps(2, LIMIT_S)
            waiting: list[str] = []
            for _ in range(num_faults):  # every fault comes, in random order, before any comes again
                faults = arguments.only or chaos.faults()
                waiting = waiting or chaos.chance.sample(faults, len(faults))
                chaos.strike("actor" if arguments.size == "short" and not chaos.counts else waiting.pop())
                if chaos.broken:
                    progress(f"broken: {chaos.broken[-1]}")
            chaos.interrupt("SIGINT")
        except RuntimeError as error:
            chaos.broken.append(f"after {sum(chaos.counts.values())} faults: {error}")
        finally:
            chaos.run.kill()
            chaos.run.follow()
        chaos.check()
    print_result(
        {
            "broken": chaos.broken,
            "faults": dict(sorted(chaos.counts.items())),
            "held_up_s": {fault: spread(seconds) for fault, seconds in sorted(chaos.held_up_s.items())},
            "signal_answered_s": spread(chaos.answered_s) if chaos.answered_s else None,
            "loss_named_s": spread(chaos.named_s) if chaos.named_s else None,
            "steps": sum(map(is_step, chaos.run.events)),
            "seconds": time.monotonic() - began,
        }
    )
    raise SystemExit(bool(chaos.broken))


if __name__ == "__main__":
    main()
