"""A server of Weights & Biases that knows just enough for `wandb sync`: it keeps what it is sent, in this process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = {"id": "RW50aXR5OjE=", "name": "me"}
PROJECT = {"id": "UHJvamVjdDox", "name": "arithmetic", "entity": ENTITY}


class Server(ThreadingHTTPServer):
    """One project, any number of runs: run -> file -> its lines."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, list[str]]] = {}
        self.uploads: list[str] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run as a page of it would show them, without those that wandb adds."""
        rows = map(json.loads, self.runs[run].get("wandb-history.jsonl", []))
        return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]

    def answer(self, operation: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The data that answers an operation of GraphQL; None for one that it does not know."""
        match operation:
            case "RunResumeStatus":
                known = given["name"] in self.runs
                return {"model": {**PROJECT, "bucket": self._resumed(given["name"])} if known else None}
            case "UpsertBucket":
                self.runs.setdefault(given["name"], {})
                bucket = {"id": "UnVuOjE=", "name": given["name"], "displayName": "", "project": PROJECT}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateArtifact":  # as if the table were there already
                artifact = {"id": "QTox", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "QTox"}}}
                return {"createArtifact": {"artifact": artifact}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
                return {"createRunFiles": {"runID": "UnVuOjE=", "uploadHeaders": [], "files": files}}
            case "NotifyScriptableRunAlert":
                return {"notifyScriptableRunAlert": {"success": True}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
        return None

    def _resumed(self, run: str) -> dict[str, Any]:
        lines = self.runs[run]
        history = lines.get("wandb-history.jsonl", [])
        return {
            "id": "UnVuOjE=",
            "name": run,
            "displayName": "",
            "notes": "",
            "tags": [],
            "config": "{}",
            "wandbConfig": json.dumps({"t": {"value": 1}}),
            "summaryMetrics": lines.get("wandb-summary.json", ["{}"])[-1],
            "historyTail": json.dumps(history[-1:]),
            "eventsTail": "[]",
            "historyLineCount": len(history),
            "eventsLineCount": len(lines.get("wandb-events.jsonl", [])),
            "logLineCount": 0,
        }


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs while the block does."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _kept(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class calls it so)
        """Print nothing."""

    def do_PUT(self) -> None:
        """A file."""
        self._body()
        self._kept.uploads.append(self.path.removeprefix("/upload/"))
        self._reply({})

    def do_POST(self) -> None:
        """An operation, or lines of a run's files from some line on."""
        body = self._body()
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            found = self._kept.answer(operation[1] if operation else "", asked.get("variables") or {})
            self._reply({"data": found} if found is not None else {"errors": [{"message": f"no {operation}"}]})
            return
        if self.path.endswith("/file_stream"):
            files = self._kept.runs[self.path.split("/")[-2]]
            for name, part in (json.loads(body).get("files") or {}).items():
                lines = files.setdefault(name, [])
                lines[part["offset"] : part["offset"] + len(part["content"])] = part["content"]
        self._reply({})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
