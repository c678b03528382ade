"""A local server with the part of the hub's protocol that `huggingface_hub` uses to fetch and
upload models.

Large files are named by their SHA-256, range requests are answered, a private repository requires a
token, connections can be cut, and uploaded files can be fetched.
"""

import base64
import contextlib
import hashlib
import http.server
import json

import huggingface_hub.constants as constants

from speakernet.models import hub
from tests.loopback import serving

TOKEN = "hf_of_the_tests"
LARGE = (".pt", ".bin", ".ckpt", "avg_model")


class Server(http.server.ThreadingHTTPServer):
    """Repositories by name, each a folder."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders = {}
        self.private = set()
        self.cut_at = 0
        """Bytes of the next large file after which the connection ends, once."""
        self.requests = []
        """Method, path and range of each request for a file."""

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        """Log nothing."""

    def repository(self, words):
        """The folder of owner and name, if it exists and access is allowed."""
        name = "/".join(words[:2]).removesuffix(".git")
        if name in self.server.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return None
        return self.server.folders.get(name)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        words = path.strip("/").split("/")
        is_api = words[0] == "api"
        folder = self.repository(words[2:] if is_api else words)
        if folder is None:
            return self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        files = sorted(file for file in folder.iterdir() if file.is_file())
        content = b"".join(file.name.encode() + file.read_bytes() for file in files)
        commit = hashlib.sha1(content).hexdigest()
        if is_api and "tree" in words:
            facts = [{"type": "file", "path": file.name, **self.facts(file)} for file in files]
            return self.answer(facts)
        if is_api:
            name = "/".join(words[2:4])
            siblings = [{"rfilename": file.name} for file in files]
            return self.answer({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        file = folder / words[-1]
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        if not file.is_file():
            return self.answer({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = file.read_bytes()
        first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        tag = f'"{self.facts(file)["oid"]}"'
        headers = {"ETag": tag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.answer(data[first:], 206 if first else 200, headers)

    @staticmethod
    def facts(file):
        """Size and name of a file's content, as reported by the hub."""
        data = file.read_bytes()
        is_large = file.name.endswith(LARGE)
        digest = (hashlib.sha256 if is_large else hashlib.sha1)(data).hexdigest()
        facts = {"size": len(data), "oid": digest}
        return facts | ({"lfs": {**facts, "pointerSize": 134}} if is_large else {})

    def do_POST(self):
        words = self.path.partition("?")[0].strip("/").split("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if words[-1] == "validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "log in"}, 401, {})
        if words[1:] == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            root = next(iter(self.server.folders.values())).parent
            folder = self.server.folders.setdefault(name, root / name)
            folder.mkdir(parents=True, exist_ok=True)
            if asked.get("visibility") == "private" or asked.get("private"):
                self.server.private.add(name)
            return self.answer({"url": f"{self.server.address}/{name}"})
        if "preupload" in words:
            files = []
            for path in (file["path"] for file in json.loads(body)["files"]):
                mode = "lfs" if path.endswith(LARGE) else "regular"
                files.append({"path": path, "shouldIgnore": False, "oid": None, "uploadMode": mode})
            return self.answer({"files": files})
        folder = self.repository(words if words[-1] == "batch" else words[2:])
        assert folder is not None
        if words[-1] == "batch":
            objects = json.loads(body)["objects"]
            for file in objects:
                href = f"{self.server.address}/put/{folder.parent.name}/{file['oid']}"
                file["actions"] = {"upload": {"href": href}}
            return self.answer({"transfer": "basic", "objects": objects})
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif entry["key"] == "lfsFile":
                (folder.parent / value["oid"]).replace(folder / value["path"])
        where = "/".join(words[2:4])
        url = f"{self.server.address}/{where}/commit/{'0' * 40}"
        return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": url})

    def do_PUT(self):
        _, owner, oid = self.path.strip("/").split("/")
        root = next(iter(self.server.folders.values())).parent
        (root / owner / oid).write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"")

    def answer(self, data, status=200, headers=None):
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        kind = "application/octet-stream" if isinstance(data, bytes) else "application/json"
        self.send_response(status)
        headers = {"Content-Type": kind, **(headers or {}), "Content-Length": len(content)}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(data, bytes) and 0 < self.server.cut_at < len(content):
            self.wfile.write(content[: self.server.cut_at])
            self.server.cut_at = 0
            self.close_connection = True
            return
        self.wfile.write(content)


@contextlib.contextmanager
def local_hub(monkeypatch, cache):
    """A server in place of the hub, with an empty cache and no token."""
    server = Server()
    with serving(server) as address:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        # HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN_PATH are read at import.
        for name, value in (
            ("ENDPOINT", address),
            ("HUGGINGFACE_CO_URL_TEMPLATE", template),
            ("HF_HUB_CACHE", str(cache)),
            ("HF_TOKEN_PATH", str(cache / "token")),
            ("HF_HUB_DISABLE_XET", True),
        ):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(hub, "HUB_SECONDS", 2.0)
        yield server
