"""A dataset hub on 127.0.0.1 for tests: lists, serves ranges, redirects, and fails on request."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPO = "owner/repo"

# Answers one request for a file in place of the hub; gets the file's content.
Fault = Callable[["Handler", bytes], None]


@dataclass
class FakeHub:
    """Files by path, how they are listed and what goes wrong, request by request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)
    listing: list[Any] | bytes | None = None
    page_size: int = 1000
    next_link: str | None = None
    cdn: "FakeHub | None" = None
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def requests_for(self, path: str) -> list[dict[str, str]]:
        """Headers of the requests for a file, in order; "tree" is the listing."""
        return [headers for name, headers in self.seen if name == path]

    def entries(self) -> list[Any]:
        """The listing as the hub writes it."""
        folders = sorted({path.rpartition("/")[0] for path in self.files} - {""})
        made: list[Any] = [{"type": "directory", "path": folder, "size": 0} for folder in folders]
        return made + [
            list_entry(path, self.files[path], path in self.small) for path in self.files
        ]


def list_entry(path: str, content: bytes, small: bool = False) -> dict[str, Any]:
    """One file of a listing; all but small ones are LFS, with a SHA-256."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if not small:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


class Handler(BaseHTTPRequestHandler):
    """Answers for `hub`, the attribute of the subclass that a server is given."""

    hub: FakeHub

    def do_GET(self) -> None:
        """Listing, redirect or file."""
        parts = urlsplit(self.path)
        if parts.path.startswith("/api/datasets/"):
            self._note("tree")
            self._list(int(parse_qs(parts.query).get("cursor", ["0"])[0]))
            return
        path = unquote(parts.path.partition("/resolve/main/")[2])
        self._note(path)
        content = self.hub.files.get(path)
        if self.hub.faults[path]:
            self.hub.faults[path].pop(0)(self, content or b"")
        elif content is None:
            self.answer(404)
        elif self.hub.cdn is not None:
            self.answer(302, {"Location": self.hub.cdn.url + self.path})
        else:
            self._send_file(content)

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        """One whole answer; a Content-Length given in `headers` is kept."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _note(self, name: str) -> None:
        self.hub.seen.append((name, dict(self.headers.items())))

    def _list(self, cursor: int) -> None:
        hub = self.hub
        if hub.faults["tree"]:
            hub.faults["tree"].pop(0)(self, b"")
            return
        if isinstance(hub.listing, bytes):
            self.answer(200, body=hub.listing)
            return
        entries = hub.entries() if hub.listing is None else hub.listing
        end = cursor + hub.page_size
        headers = {}
        if end < len(entries):
            link = hub.next_link or f"{hub.url}{urlsplit(self.path).path}?cursor={end}"
            headers["Link"] = f'<{link}>; rel="next"'
        self.answer(200, headers, json.dumps(entries[cursor:end]).encode())

    def _send_file(self, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, body=content)
            return
        start = int(asked[1])
        if start >= len(content):
            self.answer(416)
            return
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(206, {"Content-Range": span}, content[start:])

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test looks at what was seen."""


def refuse(status: int, **headers: str) -> Fault:
    """Answer with a status; `Retry_After="7"` is the header Retry-After."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, content: handler.answer(status, named)


def cut_at(num_bytes: int) -> Fault:
    """Promise the whole file, send its start and hang up."""

    def fault(handler: Handler, content: bytes) -> None:
        handler.answer(200, {"Content-Length": str(len(content))}, content[:num_bytes])

    return fault


def hang_up(handler: Handler, content: bytes) -> None:
    """Close the connection without a word."""


def send(content: bytes, status: int = 200, **headers: str) -> Fault:
    """Send other bytes than the file's."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, _: handler.answer(status, named, content)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run `hub` on a free port of 127.0.0.1."""
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
