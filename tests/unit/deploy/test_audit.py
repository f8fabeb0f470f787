"""The check of locked packages against a database of vulnerabilities, with databases made here."""

import json
import runpy
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "requirements" / "audit.py"
AUDIT = runpy.run_path(str(SCRIPT))

VERSIONS = {"six": "1.17.0", "torch": "2.13.0+cpu"}
REASON = "only its server is affected, which nothing here starts"


def database(known: dict[tuple[str, str], list[str]]):
    """The answers of a database with these vulnerabilities, one to a page."""

    def ask(batch: dict[str, Any]) -> dict[str, Any]:
        results = []
        for query in batch["queries"]:
            assert query["package"]["ecosystem"] == "PyPI"
            names = known.get((query["package"]["name"], query["version"]), [])
            page = int(query.get("page_token", 0))
            result: dict[str, Any] = {"vulns": [{"id": names[page]}]} if names else {}
            if page + 1 < len(names):
                result["next_page_token"] = str(page + 1)
            results.append(result)
        return {"results": results}

    return ask


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    """Address of a server that answers every POST like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}"
        finally:
            httpd.shutdown()
            thread.join()


def test_packages_without_known_vulnerabilities_pass():
    assert AUDIT["audit"](VERSIONS, {}, database({("six", "1.16.0"): ["GHSA-old"]})) == (
        ["audit: 2 locked packages, 0 open and 0 accepted vulnerabilities"],
        True,
    )


def test_a_vulnerability_fails_and_is_named_with_its_page():
    lines, passes = AUDIT["audit"](VERSIONS, {}, database({("six", "1.17.0"): ["GHSA-1"]}))
    assert not passes
    assert lines[0].startswith("audit: six 1.17.0: https://osv.dev/vulnerability/GHSA-1; remedy: ")


def test_a_vulnerability_of_a_release_is_found_for_its_local_build():
    assert not AUDIT["audit"](VERSIONS, {}, database({("torch", "2.13.0"): ["GHSA-1"]}))[1]


def test_an_accepted_vulnerability_passes_and_others_of_the_package_fail():
    one, both = (database({("six", "1.17.0"): names}) for names in (["GHSA-1"], ["GHSA-1", "PYSEC-2"]))
    assert AUDIT["audit"](VERSIONS, {"GHSA-1": REASON}, one) == (
        ["audit: 2 locked packages, 0 open and 1 accepted vulnerabilities"],
        True,
    )
    lines, passes = AUDIT["audit"](VERSIONS, {"GHSA-1": REASON}, both)
    assert not passes
    assert ["PYSEC-2" in line for line in lines] == [True, False]


def test_a_reason_for_what_is_no_longer_found_fails():
    lines, passes = AUDIT["audit"](VERSIONS, {"GHSA-1": REASON}, database({}))
    assert not passes
    assert lines[0] == "audit: GHSA-1 is accepted but not found; remedy: delete its line of accepted.txt"


def test_an_acceptance_without_a_reason_is_refused():
    assert AUDIT["accepted_reasons"](f"# head\n\nGHSA-1 {REASON}\n") == {"GHSA-1": REASON}
    with pytest.raises(ValueError, match="without a reason: 'GHSA-1'"):
        AUDIT["accepted_reasons"]("GHSA-1\n")


def test_the_accepted_vulnerabilities_of_this_repository_have_reasons():
    AUDIT["accepted_reasons"]((SCRIPT.parent / "accepted.txt").read_text())


def test_the_nightly_check_audits_the_locks():
    nightly, audit = (
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for target in ("nightly", "audit")
    )
    assert nightly[-1].endswith(" audit")
    assert audit[-1].endswith(" requirements/audit.py")


def test_answers_of_a_server_are_read():
    body = json.dumps({"results": [{"vulns": [{"id": "GHSA-1", "modified": "2026-08-01T00:00:00Z"}]}, {}]}).encode()
    with server(200, body) as url:
        assert not AUDIT["audit"](VERSIONS, {}, AUDIT["post"](url))[1]


@pytest.mark.parametrize("status", [403, 502])
def test_a_database_behind_a_refusing_proxy_counts_as_unreachable(status: int):
    with server(status, b"") as url:
        lines, passes = AUDIT["audit"](VERSIONS, {}, AUDIT["post"](url))
    assert passes
    assert len(lines) == 1
    assert f"no vulnerability was looked up: the database cannot be reached (HTTP Error {status}: " in lines[0]


def test_a_database_that_no_port_answers_for_passes_with_one_line():
    with server(200, b"") as url:
        pass
    lines, passes = AUDIT["audit"](VERSIONS, {"GHSA-1": REASON}, AUDIT["post"](url))
    assert passes
    assert len(lines) == 1
    assert "cannot be reached" in lines[0]


def test_a_database_that_refuses_the_question_fails():
    with server(400, b"") as url, pytest.raises(HTTPError):
        AUDIT["audit"](VERSIONS, {}, AUDIT["post"](url))
