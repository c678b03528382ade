"""A file server on loopback that misbehaves on demand, for the download tests."""

import contextlib
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.loopback import serving


@dataclass
class FakeSource:
    """The files and behaviour of the server; `requests` and `seen` record the requests and their
    headers.
    """

    files: dict[str, bytes]
    behaviour: str = "good"
    user_and_password: str = ""
    redirect_to: str = ""
    requests: Counter = field(default_factory=Counter)
    seen: list[dict[str, str]] = field(default_factory=list)
    address: str = ""


class _Handler(BaseHTTPRequestHandler):
    source: FakeSource

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        source = self.source
        name = self.path.split("?")[0].lstrip("/")
        source.requests[name] += 1
        source.seen.append(dict(self.headers.items()) | {"path": self.path})
        code = self._refusal(name)
        if code:
            self._answer(
                code, {"Location": source.redirect_to + self.path} if source.redirect_to else {}
            )
            return
        content = source.files[name]
        if source.behaviour == "wrong md5":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self._send(content)

    def _refusal(self, name):
        source = self.source
        if source.redirect_to:
            return 308
        if source.behaviour in ("401", "403", "404"):
            return int(source.behaviour)
        if source.behaviour == "500 then good" and source.requests[name] <= 3:
            return 500
        if (
            source.user_and_password
            and self.headers.get("Authorization") != source.user_and_password
        ):
            return 401
        return 0 if name in source.files else 404

    def _answer(self, code, headers, length=0):
        self.send_response(code)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, content):
        source = self.source
        start = 0
        code = 200
        byte_range = self.headers.get("Range")
        tag = f'"{zlib.crc32(content)}"'
        headers = {"ETag": tag}
        if (
            byte_range
            and source.behaviour != "no ranges"
            and self.headers.get("If-Range", tag) == tag
        ):
            start = int(byte_range.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                self._answer(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            code = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if source.behaviour == "calls it gzip":
            headers["Content-Encoding"] = "gzip"
        body = content[start:]
        self._answer(code, headers, len(body))
        with contextlib.suppress(ConnectionError):
            if source.behaviour == "cut":
                # A third of the rest, then the connection drops: only resuming reaches the end.
                self.wfile.write(body[: max(1000, len(body) // 3)])
                self.close_connection = True
                return
            if source.behaviour == "stalls" and source.requests[self.path.lstrip("/")] <= 2:
                self.wfile.write(body[: len(body) // 2])
                time.sleep(3)
                return
            if source.behaviour == "slow":
                for position in range(0, len(body), 32768):
                    self.wfile.write(body[position : position + 32768])
                    time.sleep(0.002)
                return
            self.wfile.write(body)


@contextlib.contextmanager
def fake_source(files, **behaviour):
    source = FakeSource(files, **behaviour)
    handler = type("Handler", (_Handler,), {"source": source})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as source.address:
        yield source
