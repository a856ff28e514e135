"""A server on this machine that speaks the protocol of the Hugging Face hub, as far as a download needs it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

COMMIT = "c0ffee" + "0" * 34
_BLOCK = 1 << 16


class HubServer:
    """Serves one model, `owner/name`. The first transfer of the file `cut` ends after `cut_after` bytes; if `holds`, it
    stands there until the client goes."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        cut: str = "",
        cut_after: int = 0,
        holds: bool = False,
    ) -> None:
        self.name, self.files = name, dict(files)
        self.cut, self.cut_after, self.holds = cut, cut_after, holds
        self.requests: list[tuple[str, str, str]] = []
        """(method, path, range) of every request."""
        self.is_cut = threading.Event()
        """Set when a transfer was cut, or stands."""
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        """The test reads `requests` instead."""

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server_of, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api, resolve = f"/api/models/{hub.name}", f"/{hub.name}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": hub.name, "sha": COMMIT, "private": False, "siblings": siblings})
        elif path == f"{api}/tree/{COMMIT}":
            self._send_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _git_digest(content)}
                    for name, content in hub.files.items()
                ]
            )
        elif (name := path.removeprefix(resolve)) in hub.files and path.startswith(resolve):
            self._send_file(name, with_body=with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, *, with_body: bool) -> None:
        hub = self.server_of
        content = hub.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_git_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        end = len(content)
        is_cut = name == hub.cut and not hub.is_cut.is_set()
        if is_cut:
            end = hub.cut_after
        for offset in range(start, end, _BLOCK):
            self.wfile.write(content[offset : min(offset + _BLOCK, end)])
        if is_cut:
            self.wfile.flush()
            hub.is_cut.set()
            if hub.holds:
                self.connection.recv(1)  # Until the client has gone.
            self.close_connection = True


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
