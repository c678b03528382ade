"""A source of files on the loopback that misbehaves on demand, for the download tests."""

import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class PlayedSource:
    """What the server has and how it behaves; `requests` and `headers` tell what was asked."""

    files: dict[str, bytes]
    behaviour: str = "good"
    user_and_password: str = ""
    redirect_to: str = ""
    requests: Counter = field(default_factory=Counter)
    seen: list[dict[str, str]] = field(default_factory=list)
    address: str = ""


class _Handler(BaseHTTPRequestHandler):
    source: PlayedSource

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        source = self.source
        name = self.path.split("?")[0].lstrip("/")
        source.requests[name] += 1
        source.seen.append(dict(self.headers.items()) | {"path": self.path})
        code = self._refusal(name)
        if code:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            if source.redirect_to:
                self.send_header("Location", source.redirect_to + self.path)
            self.end_headers()
            return
        content = source.files[name]
        if source.behaviour == "wrong md5":
            content = content[:-1] + bytes([content[-1] ^ 1])
        self._send(content)

    def _refusal(self, name: str) -> int:
        source = self.source
        if source.redirect_to:
            return 308
        if source.behaviour in ("401", "403", "404"):
            return int(source.behaviour)
        if source.behaviour == "500 then good" and source.requests[name] <= 3:
            return 500
        if source.user_and_password and self.headers.get("Authorization") != source.user_and_password:
            return 401
        return 0 if name in source.files else 404

    def _send(self, content: bytes) -> None:
        source = self.source
        start = 0
        wanted = self.headers.get("Range")
        tag = f'"{zlib.crc32(content)}"'
        if wanted and source.behaviour != "no ranges" and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", tag)
        if source.behaviour == "calls it gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        body = content[start:]
        with contextlib.suppress(ConnectionError):
            if source.behaviour == "cut":
                # A third of what is left, then the line drops: only resuming ever reaches the end.
                self.wfile.write(body[: max(1000, len(body) // 3)])
                self.close_connection = True
                return
            if source.behaviour == "stalls" and source.requests[self.path.lstrip("/")] <= 2:
                self.wfile.write(body[: len(body) // 2])
                time.sleep(3)
                return
            if source.behaviour in ("slow", "steady"):
                block = 4096 if source.behaviour == "slow" else 32768
                for position in range(0, len(body), block):
                    self.wfile.write(body[position : position + block])
                    time.sleep(0.002)
                return
            self.wfile.write(body)


@contextlib.contextmanager
def played_source(files: dict[str, bytes], **behaviour: str) -> Iterator[PlayedSource]:
    """A running server for these files; ends with the block."""
    source = PlayedSource(files, **behaviour)
    handler = type("Handler", (_Handler,), {"source": source})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    source.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield source
    finally:
        server.shutdown()
        server.server_close()
