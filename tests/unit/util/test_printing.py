"""Text of others in a terminal: what a terminal would obey is replaced, everything else is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from rlsys.cli import app
from rlsys.util.printing import encodable, printable

ATTACK = "\x1b[31mred\x1b]0;title\x07\x9b1m\u202egnp\r\u200b\ud800"
SAFE = "�[31mred�]0;title��1m�gnp���"
ROW = {"prompt": ATTACK[:-1], "id": ATTACK[:-1], ATTACK[:-1]: ATTACK[:-1]}


def test_what_a_terminal_would_obey_is_replaced() -> None:
    assert printable(ATTACK) == SAFE


def test_text_of_any_language_is_unchanged() -> None:
    text = "é 数\u3000学\u00a0🙂\n\tالعربية"
    assert printable(text) == encodable(text) == text


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert encodable("\x1b \ud800\udc00 \udfff") == "\x1b \ufffd\ufffd \ufffd"


def test_inspected_data_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    shown = CliRunner().invoke(app, ["data", "inspect", str(path)])
    assert shown.stdout.count(SAFE[:-1]) >= 3
    assert printable(shown.stdout) == shown.stdout
    found = json.loads(CliRunner().invoke(app, ["data", "inspect", str(path), "--json"]).stdout)
    assert found["tasks"][0]["prompt"] == ROW["prompt"]


def test_a_tried_workflow_cannot_control_the_terminal() -> None:
    arguments = ["workflow", "try", "single_turn", "--task", json.dumps(ROW), "--policy", f"scripted:{ATTACK[:-1]}"]
    shown = CliRunner().invoke(app, arguments)
    assert f"on task {SAFE[:-1]}" in shown.stdout
    assert printable(shown.stdout) == shown.stdout


def test_errors_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({ATTACK[:-1]: 1}))
    command = [sys.executable, "-m", "rlsys.cli", "data", "inspect", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"the row has {SAFE[:-1]}" in done.stderr
    assert printable(done.stderr) == done.stderr


def test_a_closed_stream_and_a_lost_reader_are_no_errors():
    code = "from rlsys.util.printing import print_note, print_result\nprint_result('x')\nprint_note('y')\n"
    closed = [sys.executable, "-c", f"import sys\nsys.stdout = sys.stderr = None\n{code}"]
    assert subprocess.run(closed, check=False).returncode == 0
