"""A run whose every text tries to break out of the page that shows it: a model may write anything.

hostile_run(root)       # in root / RUN
"""

from __future__ import annotations

from pathlib import Path

import orjson

from rlsys.monitoring.events import AlertRaised, EngineChosen, EvalDone, GroupDropped, PhaseDone, WorkerFailed
from tests.histories import History, Shape
from tests.rollouts import lines_of, write_lines

RUN = "x<img src=x onerror=window.pwned=1>&\"'#%2e%2e?a=b"
"""Name of its folder."""
ATTACKS = (
    "<script>window.pwned=2</script>",
    "</script><script>window.pwned=3</script>",
    '<img src="http://evil.test/x.png" onerror="window.pwned=4">',
    '<svg onload="window.pwned=5"><a xlink:href="javascript:window.pwned=6">x</a></svg>',
    '<a href="javascript:window.pwned=7">click</a>',
    '"><iframe srcdoc="<script>parent.pwned=8</script>"></iframe>',
    "'-(window.pwned=9)-'",
    "<style>*{display:none!important}</style><link rel=stylesheet href=//evil.test/x.css>",
    '<meta http-equiv="refresh" content="0;url=http://evil.test/">',
    "<base href=http://evil.test/><form action=http://evil.test/><button>go</button></form>",
    "{{constructor.constructor('window.pwned=10')()}} ${window.pwned=11} `",
    "\u202egnorw si siht\u202c \u0000 \x1b[31mred\x1b[0m \x1b]0;title\x07 \ufeff <!-- ]]> &lt;b&gt;",
)
HOSTILE = " ".join(ATTACKS)
MARK = "window.pwned=2"
"""Part of `HOSTILE` that a page which shows it as text has as text."""
_ASKED = orjson.dumps({"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}).decode()
_CALL = f"<tool_call>\n{_ASKED}\n</tool_call>"
LONG = "W" * 1_000_000
"""A word that no line has room for."""


def hostile_run(root: Path) -> Path:
    """Write it, and answer its folder: three steps, then it fails. Task ids, agents, texts, errors: all are hostile."""
    folder = root / RUN
    history = History(folder, Shape(steps=3, groups=3, size=2, replicas=2, tasks=3))
    history.start()
    for _ in range(3):
        history.step()
    history.emit(PhaseDone(HOSTILE, 1.0))
    history.emit(EngineChosen(HOSTILE, HOSTILE, HOSTILE))
    history.emit(EvalDone(3, HOSTILE, "hash", 1.0, {f"eval/{HOSTILE}/mean": 0.5}))
    history.emit(WorkerFailed("rollout-0", HOSTILE, HOSTILE))
    history.emit(GroupDropped(9, "task-0", HOSTILE, HOSTILE))
    history.emit(AlertRaised(HOSTILE, 3, 1.0, 0.5, HOSTILE))
    history.end("failed", HOSTILE)
    for path in sorted(folder.glob("rollouts/*.parquet")):
        write_lines(path, map(_spoilt, lines_of(path)))
    events = folder / "events.jsonl"
    task_id = orjson.dumps(task_id_of("task-0"))
    events.write_bytes(events.read_bytes().replace(b'"task-0"', task_id))
    config = folder / "config.resolved.yaml"
    config.write_text(config.read_text() + f"extra:\n  note: {orjson.dumps(HOSTILE).decode()}\n  '{ATTACKS[2]}': 1\n")
    return folder


def task_id_of(task_id: str) -> str:
    """What is made of a task's id."""
    return f"{task_id} {HOSTILE}" if task_id == "task-0" else task_id


def _spoilt(line: dict) -> dict:
    """A group of which every text is hostile; the second episode of every group says one very long word."""
    task = line["task"]
    task["id"] = task_id_of(task["id"])
    task["prompt"] = [{"role": HOSTILE, "content": HOSTILE}]
    task["answer"] = HOSTILE
    task["info"] = {HOSTILE: [HOSTILE]}
    line["parts"] = [{HOSTILE: 1.0} for _ in line["parts"]]
    for e, episode in enumerate(line["episodes"]):
        for t, trajectory in enumerate(episode["trajectories"]):
            trajectory["agent"] = HOSTILE
            trajectory["outcome"] = {"kind": "failed", "reason": HOSTILE} if e == 1 else trajectory["outcome"]
            for n, turn in enumerate(trajectory["turns"]):
                reading = line["readings"][e][t][n]
                reading["pieces"][0] = LONG if e == 1 else f"{HOSTILE}\n{_CALL}"
                turn["text"] = "".join(reading["pieces"])
                reading["said"] = HOSTILE
    return line
