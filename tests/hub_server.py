"""A Hub on this machine, for tests: what the library asks of the real one, and no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40

# Status and error code, in the place of a file or of a whole repository.
Refusal = tuple[int, str]
Files = Mapping[str, bytes | Refusal]
Repos = Mapping[str, Files | Refusal]


class Handler(BaseHTTPRequestHandler):
    """Lists of files, and files; `server.log` keeps every question."""

    server: Any

    def do_HEAD(self) -> None:
        """Facts about a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """The list of a repository's files, or one of them."""
        path = self.path.split("?")[0]
        self.server.log.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.server.repos.get(repo, (404, "RepoNotFound"))
        if isinstance(files, tuple):
            return self.refuse(*files)
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if not path.startswith("/api/models"):
            return self.file(files, rest[-1])
        self.answer(json.dumps(self.tree(files) if "tree" in rest else self.info(repo, files)))

    def info(self, repo: str, files: Files) -> dict[str, Any]:
        """What the library calls the model's info."""
        listed = [{"rfilename": name, "size": size(content)} for name, content in files.items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": listed, "tags": []}

    def tree(self, files: Files) -> list[dict[str, Any]]:
        """The files with their sizes and digests."""
        return [
            {"type": "file", "path": name, "size": size(content), "oid": digest(content)}
            for name, content in files.items()
        ]

    def file(self, files: Files, name: str) -> None:
        """One file, or that there is none."""
        content = files.get(name, (404, "EntryNotFound"))
        if isinstance(content, tuple):
            return self.refuse(*content)
        self.answer(content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})

    def answer(self, body: str | bytes, headers: Mapping[str, str] | None = None) -> None:
        """Status 200 with `body`."""
        content = body.encode() if isinstance(body, str) else body
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        """An error, in the way that the Hub says it."""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Keep the tests quiet."""


def digest(content: bytes | Refusal) -> str:
    """A name for the content."""
    return hashlib.sha1(repr(content).encode()).hexdigest()


def size(content: bytes | Refusal) -> int:
    """Bytes; any number will do for a file that is refused."""
    return 1 if isinstance(content, tuple) else len(content)


@contextmanager
def hub(repos: Repos) -> Iterator[tuple[str, list[str]]]:
    """The address of a running Hub with `repos`, and the list of questions that it got."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repos, server.log = repos, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.log
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
