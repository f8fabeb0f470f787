"""Rewards from a server over HTTP, against a small test server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlsys.errors import ConfigError
from rlsys.rewards.reward_function import NOT_APPLICABLE, RewardInput, RewardSpec, RewardSum
from rlsys.types import Json, Score, Task

TASK = Task(id="t", prompt="2+3?", answer="5", info={"level": "easy"}, source="sums")
CHAT = Task(id="c", prompt=({"role": "user", "content": "2+3?"},), answer="5")


@dataclass
class Server:
    """Answers with `answers`, one after the other, the last one for ever: (status, body), or None for no answer."""

    answers: list[tuple[int, str] | None]
    asked: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server() -> Iterator[Server]:
    own = Server([(200, '{"rewards": [1.0, 0.0]}')])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            own.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            own.keys.append(self.headers["Authorization"])
            answer = own.answers.pop(0) if len(own.answers) > 1 else own.answers[0]
            if answer is None:
                own.over.wait(30)
                return
            status, body = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  (the name of its base)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        own.url = f"http://127.0.0.1:{http.server_port}/score"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield own
        own.over.set()
        http.shutdown()
        thread.join()


def scores(server: Server, *texts: str, task: Task = TASK, **args: Json) -> list[Score]:
    rewards = RewardSum([RewardSpec("http", "http", args={"url": server.url, **args})])
    return rewards.score(task, [RewardInput(text) for text in texts])


def test_a_server_scores_the_completions_of_a_task_in_one_request(server: Server):
    assert [score.value for score in scores(server, "5", "6")] == [1.0, 0.0]
    assert server.asked == [
        {
            "task_id": "t",
            "source": "sums",
            "prompt": "2+3?",
            "answer": "5",
            "info": {"level": "easy"},
            "completions": ["5", "6"],
        }
    ]


def test_a_conversation_is_sent_as_messages_and_its_replies_as_text(server: Server):
    scores(server, "5", "6", task=CHAT)
    assert server.asked[0]["prompt"] == [{"role": "user", "content": "2+3?"}]
    assert server.asked[0]["completions"] == ["5", "6"]


def test_a_server_may_name_parts_and_say_that_it_does_not_apply(server: Server):
    server.answers = [(200, '{"rewards": [{"score": 0.5, "format": 1}, null]}')]
    first, second = scores(server, "5", "6")
    assert (first.value, dict(first.parts)["http/format"]) == (0.5, 1.0)
    assert second == NOT_APPLICABLE


def test_a_request_that_fails_is_made_again(server: Server):
    server.answers = [(503, "busy"), (429, "later"), (200, '{"rewards": [1, 1]}')]
    assert [score.value for score in scores(server, "5", "6")] == [1.0, 1.0]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "num_asked", "failure"),
    [
        ((500, "broken"), 2, "{url} does not answer: asked 2 times: HTTP 500: broken"),
        ((404, "not here"), 1, "{url} answered HTTP 404: not here"),
        ((302, ""), 1, "{url} answered HTTP 302"),
        ((200, "one"), 1, "{url} answered 'one', which is not JSON"),
        ((200, "[1, 2]"), 1, "{url} answered [1, 2], which has no `rewards`"),
        ((200, '{"rewards": [1]}'), 1, "returned 1 rewards for 2 completions"),
        ((200, '{"rewards": 7}'), 1, "returned 7 (int), not a list of 2 numbers"),
        ((200, '{"rewards": ["good", "bad"]}'), 1, "returned 'good' (str), not a number"),
        (None, 1, "{url} does not answer: no answer within 0.1 s"),
    ],
)
def test_a_server_that_fails_never_gives_a_reward_of_0(
    server: Server, answer: tuple[int, str] | None, num_asked: int, failure: str
):
    server.answers = [answer]
    found = scores(server, "5", "6", retries=1, timeout_s=0.1 if answer is None else 30.0)
    assert all(score.value is None and failure.format(url=server.url) in score.failure for score in found[:1])
    assert found[1].value is None and len(server.asked) == num_asked


def test_a_server_that_is_not_there_is_named(server: Server):
    server.url = "http://127.0.0.1:9/score"
    (score,) = scores(server, "5", retries=0)
    assert score.value is None and "http://127.0.0.1:9/score does not answer: asked 1 times" in score.failure


@pytest.mark.parametrize(("status", "is_busy"), [(429, True), (503, True), (500, False)])
def test_a_server_that_asks_to_be_asked_later_is_busy(server: Server, status: int, is_busy: bool):
    server.answers = [(status, "")]
    (score,) = scores(server, "5", retries=0)
    assert score.down is not None and score.down.endpoint == server.url
    assert score.down.is_busy == is_busy


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "secret")
    scores(server, "5", "6", api_key_env="MY_KEY")
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"url": "host:8000/score"}, "url: 'host:8000/score' is no address such as"),
        ({"url": "http://x/s", "api_key_env": "NO_SUCH_KEY"}, "the environment has no NO_SUCH_KEY"),
        ({"url": "http://x/s", "timeout_s": 0}, "timeout_s should be above 0"),
        ({}, "needs args: url"),
    ],
)
def test_wrong_args_are_refused_before_the_run(args: dict[str, Json], problem: str):
    with pytest.raises(ConfigError, match=problem):
        RewardSum([RewardSpec("http", "http", args=args)])
