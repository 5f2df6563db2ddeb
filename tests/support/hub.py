"""A model hub on loopback with the hub's HTTP protocol: listings, redirects, ETags, ranges, refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

NAME, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"
LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf")
REFUSALS = {
    "missing": (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}),
    "gated": (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}),
    "bad token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "forbidden": (403, {"X-Error-Message": "Forbidden"}),
    "limited": (429, {}),
    "broken": (500, {}),
    "page": (200, {}),  # of a proxy, in place of JSON
}


@dataclass
class Hub:
    """One repository, NAME, with the branch main. A fault is set before a request, which uses it up."""

    files: Mapping[str, bytes]
    refusal: str | None = None  # a key of REFUSALS, for every request
    token: str | None = None  # required if set
    cuts: list[int] = field(default_factory=list)  # bytes of a large file after which each next transfer is cut off
    garbled: bool = False  # the first byte of large files is wrong
    limited_heads: int = 0  # HEADs that get 429 first
    stalls: int = 0  # transfers that stop halfway until the client leaves
    is_silent: bool = False  # no request is answered
    asked: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)  # method, path, headers

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ranges(self) -> list[str]:
        """Return the transfers' ranges, in order; "": the whole file."""
        large = [headers for method, path, headers in self.asked if method == "GET" and path.startswith("/cdn/")]
        return [headers.get("range", "") for headers in large]

    def fetched(self) -> list[str]:
        """Return the names of the files whose contents were requested."""
        named = {hashlib.sha256(data).hexdigest(): name for name, data in self.files.items()}
        paths = [path for method, path, _ in self.asked if method == "GET"]
        small = [path.split("/", 5)[5] for path in paths if path.startswith(f"/{NAME}/resolve/")]
        return sorted({*(named[path[5:]] for path in paths if path.startswith("/cdn/")), *small})

    def entry(self, name: str) -> dict:
        """Return a file's entry for both listings, in the union of their spellings."""
        data = self.files[name]
        pointer = data if not name.endswith(LARGE_SUFFIXES) else b"version of " + data[:64]
        blob = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        line = {"type": "file", "path": name, "rfilename": name, "size": len(data), "oid": blob, "blobId": blob}
        if name.endswith(LARGE_SUFFIXES):
            digest = hashlib.sha256(data).hexdigest()
            line["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": len(pointer)}
        return line


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.asked.append((self.command, path, headers))
        if hub.is_silent:
            self.rfile.read(1)  # ends when the client is gone
            self.close_connection = True
            return None
        if path.startswith("/cdn/"):
            return self._send_large(path[5:], headers)
        if hub.refusal is not None:
            return self._send(*REFUSALS[hub.refusal])
        if hub.token is not None and headers.get("authorization") != f"Bearer {hub.token}":
            return self._send(*REFUSALS["missing"])
        if path.startswith(f"/api/models/{NAME}/"):
            return self._send_listing(path.removeprefix(f"/api/models/{NAME}/"))
        revision, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
        if revision not in ("main", COMMIT) or name not in hub.files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._send_file(name)

    def _send_listing(self, path: str) -> None:
        what, _, revision = path.partition("/")
        if revision not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        lines = [self.hub.entry(name) for name in self.hub.files]
        value = {"id": NAME, "sha": COMMIT, "siblings": lines} if what == "revision" else lines
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send_file(self, name: str) -> None:
        entry, data = self.hub.entry(name), self.hub.files[name]
        if self.command == "HEAD" and self.hub.limited_heads:
            self.hub.limited_heads -= 1
            return self._send(429, {"Retry-After": "0"})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            return self._send(200, headers, data)
        digest = entry["lfs"]["sha256"]
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return self._send(302, {**headers, "Location": f"http://localhost:{self.hub.port}/cdn/{digest}"})

    def _send_large(self, digest: str, headers: Mapping[str, str]) -> None:
        hub = self.hub
        data = next(data for data in hub.files.values() if hashlib.sha256(data).hexdigest() == digest)
        data = bytes([data[0] ^ 1]) + data[1:] if hub.garbled else data
        start = int(headers["range"].removeprefix("bytes=").rstrip("-")) if "range" in headers else 0
        status = 206 if start else 200
        self.send_response(status)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        end = min(len(data), start + hub.cuts.pop(0)) if hub.cuts else len(data)
        if hub.stalls:
            hub.stalls -= 1
            self.wfile.write(data[start : len(data) // 2])
            self.rfile.read(1)  # ends when the client is gone
            self.close_connection = True
            return
        self.wfile.write(data[start:end])
        self.close_connection = end < len(data)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
