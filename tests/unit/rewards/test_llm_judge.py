"""LLM-as-judge, against a small test server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import RewardInput, RewardSpec, RewardSum
from rlsys.types import Json, Score, Task

TASK = Task(id="t", prompt=({"role": "user", "content": "2+3?"},), answer="5")


@dataclass
class Server:
    """Answers chat completions with `replies`, one after the other, the last one for ever; an int is a status."""

    replies: list[str | int]
    asked: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    answers = Server(["1"])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answers.keys.append(self.headers["Authorization"])
            reply = answers.replies.pop(0) if len(answers.replies) > 1 else answers.replies[0]
            status = reply if isinstance(reply, int) else 200
            message = {"role": "assistant", "content": str(reply)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  (the name of its base)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        answers.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield answers
        http.shutdown()
        thread.join()


def scores(url: str, *completions: str, task: Task = TASK, **args: Json) -> list[Score]:
    spec = RewardSpec("llm_judge", "judge", 1.0, {"base_url": url, "model": "m", **args})
    with closing(RewardSum([spec])) as rewards:
        rewards.check([])
        return rewards.score(task, [RewardInput(text) for text in completions])


def test_the_number_in_the_reply_is_the_value(server: Server) -> None:
    server.replies = ["It is 5, and 2+3 is 5.\n\nScore: 0.75"]
    assert scores(server.url, "five") == [Score(0.75, parts={"judge": 0.75})]
    (asked,) = server.asked
    assert (asked["model"], asked["temperature"]) == ("m", 0)
    (message,) = asked["messages"]
    assert all(f":\n{text}\n" in message["content"] for text in ("user: 2+3?", "5", "five"))
    assert "one number from 0 (wrong) to 1 (right)" in message["content"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("0", 0.0),
        (" 1.\n", 1.0),
        (".5", 0.5),
        ("**Final score:** `0.25`", 0.25),
        ("3 mistakes in 7 lines, so the score is 0.5.", 0.5),
        ("Score: 0.9\nNo:\nscore = 0.1", 0.1),
        ("8/10", 0.8),
        ("Score: 3 / 4", 0.75),
        ("90%", 0.9),
    ],
)
def test_a_number_on_the_last_line_or_after_score_counts(server: Server, reply: str, value: float) -> None:
    server.replies = [reply]
    assert scores(server.url, "x")[0].value == pytest.approx(value)


@pytest.mark.parametrize(
    "reply",
    [
        "good",
        "",
        "0.5 or 0.75",
        "I found 1",
        "1 mistake",
        "0,5",
        "From 0 to 1: 1",
        "Score: 0.5, nearly 1",
        "Score: 0.5\nIt has 1 mistake.",
    ],
)
def test_an_ambiguous_reply_is_a_failure_with_its_text(server: Server, reply: str) -> None:
    server.replies = [reply]
    problem = f"the judge's reply has no number from 0 to 1 alone on its last line: it ends with {reply!r}"
    assert scores(server.url, "x") == [Score(None, f"judge: {problem}")]


@pytest.mark.parametrize(("reply", "number"), [("7", "7"), ("Score: -0.1", "-0.1"), ("12/10", "1.2"), ("101%", "1.01")])
def test_a_number_out_of_bounds_fails_with_the_reply(server: Server, reply: str, number: str) -> None:
    server.replies = [reply]
    problem = f"the judge's reply says {number}, which is not from 0 to 1: {reply!r}"
    assert scores(server.url, "x") == [Score(None, f"judge: {problem}")]


def test_the_bounds_can_be_set(server: Server) -> None:
    server.replies = ["7", "50%", "0/10"]
    assert [scores(server.url, "x", highest=10)[0].value for _ in range(3)] == [7.0, 5.0, 0.0]
    assert "one number from 0 (wrong) to 10 (right)" in server.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(("reply", "lowest"), [("4/5", 1), ("50%", -1), ("1/0", 0)])
def test_an_ambiguous_fraction_or_percentage_is_a_failure(server: Server, reply: str, lowest: int) -> None:
    server.replies = [reply]
    (score,) = scores(server.url, "x", lowest=lowest, highest=5)
    assert score.value is None
    assert (
        score.failure
        == f"judge: the judge's reply contains no number from {lowest} to 5, but a part of a whole: {reply!r}"
    )


def test_the_template_is_filled_once(server: Server) -> None:
    scores(
        server.url,
        "{answer} {x}",
        task=Task(id="t", prompt="p {completion}"),
        template="{prompt}|{completion}|{answer}",
    )
    assert server.asked[0]["messages"][0]["content"] == "p {completion}|{answer} {x}|(not given)"


def test_a_request_that_fails_is_made_again(server: Server) -> None:
    server.replies = [500, 429, "0.5"]
    assert scores(server.url, "x", retries=2)[0].value == 0.5
    assert len(server.asked) == 3


def test_a_failing_server_fails_the_sample_instead_of_scoring_0(server: Server) -> None:
    server.replies = [503]
    (score,) = scores(server.url, "x", retries=1)
    assert score.value is None
    assert score.failure.startswith(f"judge: {server.url} does not answer: asked 2 times: Error code: 503")
    assert score.down is not None and score.down.is_busy


def test_a_server_without_room_asks_to_be_asked_later(server: Server) -> None:
    server.replies = [429]
    (score,) = scores(server.url, "x", retries=0)
    assert score.down is not None and score.down.is_busy


def test_a_request_that_is_refused_is_not_asked_again(server: Server) -> None:
    server.replies = [400]
    (score,) = scores(server.url, "x", retries=1)
    assert score.down is None
    assert score.failure.startswith(f"judge: no reply from {server.url}: Error code: 400")


def test_an_unreachable_server_fails_the_sample() -> None:
    (score,) = scores("http://127.0.0.1:9/v1", "x", retries=0)
    assert score.value is None
    assert "http://127.0.0.1:9/v1 does not answer: asked 1 times: Connection error. (" in score.failure
    assert score.down is not None and score.down.endpoint == "http://127.0.0.1:9/v1"


def test_what_was_asked_once_is_kept_on_disk(server: Server, tmp_path: Path) -> None:
    server.replies = ["0.25", "0.75"]
    cache = str(tmp_path / "scored")
    first = scores(server.url, "x", cache=cache)
    assert scores(server.url, "x", cache=cache) == first == [Score(0.25, parts={"judge": 0.25})]
    assert scores(server.url, "y", cache=cache)[0].value == 0.75
    assert scores(server.url, "x", cache=cache, template="Again: {completion}")[0].value == 0.75
    assert len(server.asked) == 3
    files = sorted(tmp_path.rglob("*.*"))
    assert len(files) == 3
    assert {json.loads(file.read_text())["reply"] for file in files} == {"0.25", "0.75"}


def test_a_reply_that_utf8_lacks_is_read_and_cached(server: Server, tmp_path: Path) -> None:
    server.replies = ["half \ud800\n0.5"]
    assert [scores(server.url, "x", cache=str(tmp_path))[0].value for _ in range(2)] == [0.5, 0.5]
    assert len(server.asked) == 1


def test_completions_of_a_group_are_asked_about_together(server: Server) -> None:
    assert [score.value for score in scores(server.url, *map(str, range(8)))] == [1.0] * 8
    assert len(server.asked) == 8


def test_the_key_comes_from_the_environment(server: Server) -> None:
    scores(server.url, "x", api_key_env="HOME")
    assert server.keys == [f"Bearer {Path.home()}"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"template": "Judge!"}, "template lacks {completion}"),
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "api_key_env: the environment has no NO_SUCH_KEY_HERE"),
        ({"cache": "scored"}, "cache: scored is relative"),
        ({"lowest": 2}, r"lowest is 2 and highest is 1\.0; give two numbers that ascend"),
        ({"temprature": 1}, "no argument temprature"),
    ],
)
def test_wrong_args_are_refused_before_the_run(args: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardSum([RewardSpec("llm_judge", "judge", 1.0, {"base_url": "http://x/v1", "model": "m", **args})])
