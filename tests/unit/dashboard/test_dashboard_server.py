"""The dashboard over HTTP: answers, access, and data that stays private."""

from __future__ import annotations

import errno
import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import pytest
from fastapi.routing import APIRoute

from rlsys.dashboard import responses as answers
from rlsys.dashboard.http_server import app_of
from rlsys.dashboard.listener import Listener, remedy_of
from rlsys.dashboard.security import Access, is_loopback
from rlsys.errors import ConfigError
from rlsys.monitoring.events import StepDone
from tests.dashboards import served
from tests.histories import History, Shape, small_run

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef"
WITH_TOKEN = {"RLSYS_DASHBOARD_TOKEN": TOKEN}


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Reply:
    """One request; `path` goes out as it is."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: one, and beside it a file that is nobody's business."""
    folder = tmp_path_factory.mktemp("served") / "runs"
    small_run(folder / "small")
    (folder.parent / "secret").write_text("secret")
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "events.jsonl").write_text("secret")
    (folder / "link").symlink_to(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


ADDRESSES = {
    "/api/runs": answers.RunsAnswer,
    "/api/run?run=small": answers.RunAnswer,
    "/api/series?run=small&name=reward/mean&name=eval/*&points=10": answers.SeriesAnswer,
    "/api/metrics?run=small": answers.MetricsAnswer,
    "/api/alerts?run=small": answers.AlertsAnswer,
    "/api/groups?run=small&step=3": answers.GroupsAnswer,
    "/api/group?run=small&step=1&group_id=0": answers.GroupAnswer,
    "/api/episode?run=small&step=1&group_id=0&episode=0": answers.EpisodeAnswer,
    "/api/task?run=small&task=task-0": answers.TaskAnswer,
    "/api/cluster?run=small&from=0&to=2e9&width=300": answers.ClusterAnswer,
    "/api/ledger?run=small": answers.LedgerAnswer,
    "/api/evaluations?run=small": answers.EvaluationsAnswer,
    "/api/machine?run=small": answers.MachineAnswer,
    "/api/compare?run=small&run=small": answers.CompareAnswer,
    "/api/failures?run=small": answers.FailuresAnswer,
    "/api/tables?run=small": answers.TablesAnswer,
    "/api/table?run=small&table=groups&filter=equal&search=task&order=step+desc&from=1&to=9": answers.TableAnswer,
    "/api/query?run=small&q=select+*+from+episodes": answers.TableAnswer,
}


@pytest.mark.parametrize("path", ADDRESSES)
def test_every_address_answers_with_the_fields_of_its_class(url: str, path: str) -> None:
    reply = ask(url, path)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert list(reply.json) == [field.name for field in fields(ADDRESSES[path])]


def test_every_address_is_documented() -> None:
    routes = app_of(*[None] * 3).routes  # type: ignore[arg-type]  (nothing is asked)
    paths = {route.path for route in routes if isinstance(route, APIRoute)}
    page = (Path(__file__).parents[3] / "docs" / "dashboard.md").read_text()
    assert paths == set(re.findall(r"`(/api/\w+)(?:\?[^`]*)?`", page))
    assert paths == {path.partition("?")[0] for path in ADDRESSES} | {"/api/stream"}  # which has tests of its own


def test_parts_of_a_query_reach_the_tables(url: str) -> None:
    parts = {"table": "groups", "filter": "equal", "search": "task-2", "order": "step desc", "show": "task, reward"}
    path = f"/api/table?{urlencode({'run': 'small', **parts, 'from': 4, 'to': 12, 'offset': 1, 'limit': 2})}"
    reply = ask(url, path).json
    while reply["indexed"] < 1:
        reply = ask(url, path).json
    assert [list(row) for row in reply["rows"]] == [["task", "reward", "step", "group_id", "recorded"]] * 2
    assert [row["step"] for row in reply["rows"]] == sorted((row["step"] for row in reply["rows"]), reverse=True)
    query = (
        "select task, reward, step, group_id, recorded from groups "
        "where equal and task like '%task-2%' and step between 4 and 12 order by step desc, group_id desc"
    )
    whole = ask(url, f"/api/query?{urlencode({'run': 'small', 'q': query})}").json
    assert whole["rows"][1:3] == reply["rows"]
    assert whole["num_rows"] == reply["num_rows"]
    grouped = ask(url, "/api/table?table=runs&group=train.lr").json
    assert [(row["train.lr"], row["num"]) for row in grouped["rows"]] == [(0.0003, 1)]


def test_a_table_follows_a_run_and_a_new_run_is_listed(tmp_path: Path) -> None:
    history = History(tmp_path / "first", Shape())
    history.start()
    history.step()

    def steps(run: str) -> int:
        reply = ask(url, f"/api/query?run={run}&q=select+step+from+steps").json
        return reply["num_rows"] if reply["indexed"] == 1 else steps(run)

    with served(tmp_path) as url:
        assert steps("first") == 1
        history.step()
        assert steps("first") == 2
        later = History(tmp_path / "sweep" / "second", Shape())
        later.start()
        later.step()
        assert {row["id"] for row in ask(url, "/api/table?table=runs").json["rows"]} == {"first", "sweep/second"}
        assert steps("sweep/second") == 1


def test_what_the_addresses_are_asked_for_reaches_the_reader(url: str) -> None:
    series = ask(url, "/api/series?run=small&name=reward/mean&name=loss&points=10").json["series"]
    assert [one["name"] for one in series] == ["reward/mean", "loss"]
    assert ask(url, "/api/group?run=small&step=1&group_id=2").json["group_id"] == 2


def test_a_metric_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(steps=1))
    history.start()
    history.events.emit(StepDone(1, {"loss": math.nan}))
    with served(tmp_path) as url:
        assert ask(url, "/api/series?run=run&name=loss").json["series"][0]["values"] == [None]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/api/run", "run: Field required"),
        ("/api/group?run=small&step=one&group_id=0", "step: "),
        ("/api/group?run=small&step=1&group_id=-1", "group_id: "),
        ("/api/groups?run=small&step=1e400", "step: "),
        (f"/api/group?run=small&step={10**30}&group_id=0", "step: "),
        ("/api/cluster?run=small&from=nan", "from: "),
        ("/api/series?run=small&name=loss&points=1000000000", "points: "),
        ("/api/table?run=small&table=episodes&filter=rewrd+<+1", "did you mean `reward`?"),
        ("/api/table?run=small&table=episodes&limit=1000000", "limit: "),
        ("/api/table?table=episodes", "run: "),
        ("/api/query?run=small&q=select+*+from+episode", "did you mean `episodes`?"),
    ],
)
def test_an_invalid_request_is_refused_naming_the_parameter(url: str, path: str, named: str) -> None:
    reply = ask(url, path)
    assert reply.status == 400
    assert named in reply.json["error"]


@pytest.mark.parametrize(
    "path", ["/api/run?run=none", "/api/group?run=small&step=1&group_id=999", "/api/none", "/none.js"]
)
def test_what_is_not_there_is_a_404_that_names_it(url: str, path: str) -> None:
    reply = ask(url, path)
    assert reply.status == 404
    assert list(reply.json) == ["error"]
    assert "none" in reply.json["error"] or "999" in reply.json["error"]


ESCAPES = ["..", "../", "../outside", "small/../../outside", "link", "./../outside", "..\\outside", "small/%2e%2e/x"]


@pytest.mark.parametrize(
    "run", [*ESCAPES, "/etc", "~", "outside", "\0", "small\0", "a" * 4000, "//etc", "small/checkpoints"]
)
def test_no_run_outside_the_folder_can_be_named(url: str, folder: Path, run: str) -> None:
    for named in (quote(run, safe=""), quote(quote(run, safe=""), safe=""), quote(str(folder / run), safe="")):
        reply = ask(url, f"/api/run?run={named}")
        assert reply.status in (400, 404)
        assert b"secret" not in reply.body


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/%2e%2e%2f%2e%2e%2fcli.py", "/vendor/../../server.py",
        "/..%5cserver.py", "//etc/passwd", "/%2fetc/passwd", "/vendor%00", "/....//server.py", "/api/../../server.py",
    ],
)  # fmt: skip
def test_only_the_pages_own_files_are_served(url: str, path: str) -> None:
    reply = ask(url, path)
    assert (reply.status, list(reply.json)) == (404, ["error"])


def test_page_and_modules_are_served_and_revalidated(url: str) -> None:
    page = ask(url, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    module = ask(url, "/app.js")
    assert (module.headers["content-type"], module.headers["cache-control"]) == (
        "text/javascript; charset=utf-8",
        "no-cache",
    )
    assert ask(url, "/app.js", headers={"If-None-Match": module.headers["etag"]}).status == 304


@pytest.mark.parametrize("path", ["/", "/api/runs", "/none", "/api/run", "/api/stream?run=none"])
def test_every_response_restricts_browsers_to_files_of_the_page(url: str, path: str) -> None:
    headers = ask(url, path).headers
    policy = {part.split()[0]: part.split(maxsplit=1)[1] for part in headers["content-security-policy"].split(";")}
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "form-action": "'none'",
    }
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == ("no-store" if path.startswith("/api/") else "no-cache")
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_done_but_looked_at(url: str, method: str) -> None:
    reply = ask(url, "/api/runs", method)
    assert (reply.status, reply.headers["allow"], list(reply.json)) == (405, "GET, HEAD", ["error"])


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/stream"])
def test_the_head_of_an_answer_can_be_asked_for(url: str, path: str) -> None:
    reply = ask(url, path, "HEAD")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "10.0.0.1", "", "[::1", "a@b:c"]
)
def test_on_loopback_a_request_under_a_foreign_name_is_refused(url: str, host: str) -> None:
    assert ask(url, "/api/runs", headers={"Host": host}).status in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1234", "127.0.0.1", "127.0.0.2:80", "[::1]:8321", "LOCALHOST"]
)
def test_loopback_host_names_are_accepted_on_any_port(url: str, host: str) -> None:
    assert ask(url, "/api/runs", headers={"Host": host}).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something new"])
@pytest.mark.parametrize("path", ["/api/runs", "/api/query?run=small&q=select+1", "/app.js", "/"])
def test_a_request_by_a_page_of_another_site_is_refused(url: str, path: str, site: str) -> None:
    reply = ask(url, path, headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
    assert (reply.status, "its own pages" in reply.json["error"]) == (403, True)


@pytest.mark.parametrize(
    "origin", ["https://evil.test", "null", "http://localhost:1", "http://[", "http://evil.test:HOST"]
)
def test_a_request_with_a_foreign_origin_is_refused(url: str, origin: str) -> None:
    origin = origin.replace("HOST", str(urlsplit(url).port))
    assert ask(url, "/api/runs", headers={"Origin": origin}).status == 403


def test_a_link_elsewhere_opens_a_page_but_no_address_of_data(url: str) -> None:
    by_link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(url, "/", headers=by_link).status == 200
    assert ask(url, "/api/runs", headers=by_link).status == 403


def test_the_pages_own_requests_and_those_of_programs_are_answered(url: str) -> None:
    for headers in (
        {},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Origin": f"http://{urlsplit(url).netloc}"},
    ):
        assert ask(url, "/api/runs", headers=headers).status == 200


def test_where_a_token_is_set_nothing_is_answered_without_it(folder: Path) -> None:
    with served(folder, environ=WITH_TOKEN) as url:
        assert url.endswith(f"/?token={TOKEN}")
        for path in ("/", "/api/runs", "/app.js", "/api/stream", "/?token=", "/?token=0123456789abcdeF"):
            assert ask(url, path).status == 401
        for wrong in ("Bearer", "Bearer x", f"Basic {TOKEN}", f"bearer{TOKEN}", TOKEN, f" {TOKEN}", "Bearer é"):
            assert ask(url, "/api/runs", headers={"Authorization": wrong}).status == 401
        assert ask(url, "/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200


def test_a_token_in_the_address_becomes_an_http_only_cookie(folder: Path) -> None:
    with served(folder, environ=WITH_TOKEN) as url:
        for path in (f"/?token={TOKEN}", f"//evil.example/?token={TOKEN}"):
            reply = ask(url, path)
            assert (reply.status, reply.headers["refresh"], reply.body) == (200, "0; url=/", b"")
        cookie, *flags = [part.strip() for part in reply.headers["set-cookie"].split(";")]
        assert {flag.lower() for flag in flags} >= {"httponly", "samesite=strict", "path=/"}
        assert ask(url, "/api/runs", headers={"Cookie": cookie}).status == 200
        assert ask(url, "/api/runs", headers={"Cookie": f"{cookie}x"}).status == 401


def test_a_token_may_have_any_characters(folder: Path) -> None:
    token = 'a+b/c=d&e;f"g h%20é'
    with served(folder, environ={"RLSYS_DASHBOARD_TOKEN": token}) as url:
        reply = ask(url, url.removeprefix(f"http://{urlsplit(url).netloc}"))
        cookie = reply.headers["set-cookie"].partition(";")[0]
        assert token not in cookie
        assert ask(url, "/api/runs", headers={"Cookie": cookie}).status == 200


def test_listening_beyond_this_machine_requires_or_makes_a_token(folder: Path) -> None:
    with served(folder, host="0.0.0.0") as url:
        token = re.search(r"token=([\w-]{16,})$", url)
        assert token is not None
        here = f"http://127.0.0.1:{urlsplit(url).port}"
        assert ask(here, "/api/runs", headers={"Host": "node7"}).status == 401
        assert ask(here, "/api/runs", headers={"Host": "node7", "Authorization": f"Bearer {token[1]}"}).status == 200


def test_two_dashboards_make_different_tokens() -> None:
    tokens = {Access.of(False, 1, {}).token for _ in range(2)}
    assert len(tokens) == 2
    assert Access.of(True, 1, {}).token is None


def test_a_short_token_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="RLSYS_DASHBOARD_TOKEN has 5 characters, and needs 16; make one with"):
        Listener.bind("127.0.0.1", 0, {"RLSYS_DASHBOARD_TOKEN": "short"})


@pytest.mark.parametrize(("host", "answer"), [("127.8.9.1", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)])
def test_loopback_is_told_from_other_addresses(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    listener = Listener.bind("127.0.0.1", 0, {})
    port = listener.socket.getsockname()[1]
    with pytest.raises(
        ConfigError, match=rf"cannot listen on port {port} of 127\.0\.0\.1: .* set the port of `dashboard`, or --port"
    ):
        Listener.bind("127.0.0.1", port, {})
    listener.socket.close()


@pytest.mark.parametrize(("number", "key"), [(errno.EACCES, "the port"), (errno.EADDRNOTAVAIL, "the host")])
def test_port_and_host_errors_have_different_remedies(number: int, key: str) -> None:
    assert f"; set {key} of `dashboard`, or --" in remedy_of(OSError(number, os.strerror(number)))


def test_an_address_of_another_machine_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"of 192\.0\.2\.1: .* set the host of `dashboard`, or --host"):
        Listener.bind("192.0.2.1", 0, {})


class Stream:
    """What a page follows."""

    def __init__(self, url: str, run: str | None, last: str = "") -> None:
        query = f"?{urlencode({'run': run})}" if run else ""
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        self._connection.request("GET", f"/api/stream{query}", headers={"Last-Event-ID": last})
        self.response = self._connection.getresponse()
        self.ids: list[str] = []
        """Of the messages so far."""

    def at_step(self, step: int) -> tuple[str, Any]:
        """The first message of this step: the files may be looked at while a step is half written."""
        while (told := self.next()) and told[1]["step"] != step:
            pass
        assert told is not None
        return told

    def next(self) -> tuple[str, Any] | None:
        """Id and data of the next message; None at the end."""
        found = {}
        while line := self.response.readline().decode():
            name, _, value = line.rstrip("\r\n").partition(": ")
            if not name and "data" in found:
                assert found["event"] == "change"
                self.ids.append(found["id"])
                return found["id"], json.loads(found["data"])
            found[name] = value
        return None

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def test_a_stream_sends_the_current_state_and_then_changes(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape())
    history.start()
    with served(tmp_path) as url:
        stream = Stream(url, "run")
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        first = stream.next()
        history.step()
        second = stream.at_step(1)
        assert first is not None
        assert first[1]["step"] == 0
        assert first[0] != second[0] == str(second[1]["revision"])
        stream.close()


def test_a_reconnected_stream_sends_only_unseen_changes(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape())
    history.start()
    with served(tmp_path) as url:
        stream = Stream(url, "run")
        first = stream.next()
        assert first is not None
        stream.close()
        again = Stream(url, "run", last=first[0])
        history.step()
        told = again.at_step(1)
        assert told[0] != first[0]
        assert first[0] not in again.ids
        again.close()


@pytest.mark.parametrize("last", ["9" * 5000, "9" * 19, "-1", "1.5", "\u0661"])
def test_a_last_id_that_is_no_revision_counts_as_none(url: str, last: str) -> None:
    stream = Stream(url, "small", last=last.encode().decode("latin-1"))
    assert stream.response.status == 200
    assert stream.next() is not None
    stream.close()


@pytest.mark.slow
def test_the_list_of_runs_is_followed_too(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        stream = Stream(url, None)
        first = stream.next()
        History(tmp_path / "new", Shape()).start()
        second = stream.next()
        assert first is not None
        assert second is not None
        assert first[0] != second[0]
        stream.close()


def test_open_streams_end_with_the_server(tmp_path: Path) -> None:
    History(tmp_path / "run", Shape()).start()
    with served(tmp_path) as url:
        stream = Stream(url, "run")
        stream.next()
    assert stream.next() is None
    stream.close()


def test_a_run_that_is_not_there_cannot_be_followed(url: str) -> None:
    assert ask(url, "/api/stream?run=none").status == 404


def dashboard_process(*arguments: str, **given: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlsys.cli", "dashboard", *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in WITH_TOKEN}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, **given)


@pytest.mark.slow
def test_the_command_prints_its_address_and_ctrl_c_ends_it(folder: Path) -> None:
    with dashboard_process(str(folder), "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        stream = Stream(url, "small")  # a page that is open does not hold it up
        assert stream.next() is not None
        process.send_signal(signal.SIGINT)
        assert stream.next() is None
        out, err = process.communicate(timeout=30)
        stream.close()
    assert (process.returncode, out, err) == (0, "", "")


def test_the_command_says_what_is_wrong_without_a_traceback(folder: Path) -> None:
    taken = Listener.bind("127.0.0.1", 0, {})
    port = str(taken.socket.getsockname()[1])
    with dashboard_process(str(folder), "--port", port) as process:
        _, err = process.communicate(timeout=30)
    taken.socket.close()
    assert process.returncode == 2
    assert err.startswith(f"rlsys: cannot listen on port {port} of 127.0.0.1")


@pytest.mark.slow
def test_a_dashboard_beside_a_run_ends_when_the_run_does(folder: Path) -> None:
    listener = Listener.bind("127.0.0.1", 0, {})
    fd, url = listener.socket.fileno(), listener.url
    process = dashboard_process(str(folder), "--fd", str(fd), stdin=subprocess.PIPE, pass_fds=[fd])
    with process:
        listener.socket.close()
        assert ask(url, "/api/runs").status == 200
        assert process.stdin is not None
        process.stdin.close()  # as the kernel does for a run that was killed
        assert process.wait(timeout=30) == 0
