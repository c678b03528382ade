"""A real S3 interface on loopback (moto's server), behind a proxy that spoils answers."""

import contextlib
import http.client
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.loopback import serving


class Faults:
    """The faults of the next answers to GET requests for samples; `kinds` is consumed from its
    front.
    """

    def __init__(self):
        self.kinds = []
        self.fetched = []
        self.delay_seconds = 0.0


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def handle_one(self):
        faults = self.server.faults
        server = self.server
        is_samples = self.command == "GET" and self.path.partition("?")[0].endswith("samples.npy")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = faults.kinds.pop(0) if is_samples and faults.kinds else ""
        time.sleep(faults.delay_seconds)
        connection = http.client.HTTPConnection("127.0.0.1", server.target, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        status = answer.status
        if is_samples:
            faults.fetched.append(self.path)
        if kind == "503":
            content = b""
            status = 503
        elif kind == "wrong":
            content = content[:-2] + bytes(2 * [content[-1] ^ 255])
        elif kind == "slow":
            time.sleep(2)
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in (
                "content-length",
                "transfer-encoding",
                "connection",
                "server",
                "date",
            ):
                self.send_header(name, value)
        length = answer.getheader("content-length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if kind == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one


@contextlib.contextmanager
def object_store(monkeypatch):
    """The faults of an S3 server, named by the environment, with an empty bucket called
    `bucket`.
    """
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    backend = ThreadedMotoServer(port=0, verbose=False)
    backend.start()
    target = backend.get_host_and_port()[1]
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.target = target
    proxy.faults = Faults()
    with contextlib.ExitStack() as stack:
        stack.callback(backend.stop)
        address = stack.enter_context(serving(proxy))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        # An earlier test in this process left its objects, and a file system with its server's
        # address.
        urllib.request.urlopen(f"http://127.0.0.1:{target}/moto-api/reset", data=b"").close()
        s3fs.S3FileSystem.clear_instance_cache()
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{target}").create_bucket(Bucket="bucket")
        yield proxy.faults
