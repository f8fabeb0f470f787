"""A server that knows as much of the Hugging Face Hub as an upload of a model folder needs, in this process."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_me"
"""The token that it knows; its owner may write to `me/*`."""


@dataclass
class Repo:
    """A repository: its files by path, and the messages of its commits."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class HubServer(ThreadingHTTPServer):
    """Models by `org/name`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.takes_commits = True
        """False: every commit fails, as on a server without room."""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving_hub() -> Iterator[HubServer]:
    """A server that runs while the block does."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> HubServer:
        assert isinstance(self.server, HubServer)
        return self.server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class calls it so)
        """Print nothing."""

    def do_GET(self) -> None:
        """Facts about a repository."""
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        if (repo := self._hub.repos.get(name)) is None:
            self._reply(404, {"error": f"no {self.path}"})
        else:
            self._reply(200, {"id": name, "private": repo.is_private, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        """Create a repository, say how files are to be sent, or commit them."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/"):
            name, _, action = (
                self.path.partition("?")[0].removeprefix("/api/models/").removesuffix("/main").rpartition("/")
            )
            self._change(name, action, body)
        else:
            self._reply(404, {"error": f"no {self.path}"})

    def _create(self, asked: dict[str, str]) -> None:
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self._hub.repos:
            self._reply(409, {"error": "You already created this model repo", "url": f"{self._hub.url}/{name}"})
        elif not name.startswith("me/"):
            self._reply(403, {"error": f"You don't have the rights to create a model under {asked['organization']}"})
        else:
            self._hub.repos[name] = Repo(asked.get("visibility") == "private")
            self._reply(200, {"url": f"{self._hub.url}/{name}"})

    def _change(self, name: str, action: str, body: bytes) -> None:
        repo = self._hub.repos.get(name)
        if repo is None or not name.startswith("me/"):
            self._reply(403, {"error": f"You have no write access to {name}"})
        elif action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self._reply(200, {"files": modes})
        elif action == "commit" and self._hub.takes_commits:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    repo.commits.append(line["value"]["summary"])
                elif line["key"] == "file":
                    repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._reply(200, {"commitUrl": f"{self._hub.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self._reply(413, {"error": "Storage limit reached"})

    def _reply(self, status: int, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
