"""Access, size, time and concurrency limits; unfinished requests; stopping finishes running
requests.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

import speakernet
from speakernet.inference.serve import limits as module
from speakernet.inference.serve.batching import MAX_TOGETHER, Batcher
from speakernet.inference.serve.limits import Limits, TimedProtocol
from speakernet.inference.serve.server import TOKEN_VARIABLE, Address, read_token
from tests.inference.serve.serve_helpers import RATE, refused, serving, wav

TOKEN = "a-token-of-some-length"
CLIENTS = 100
ORIGINS = ("https://evil.example", "null", "http://localhost:1")
FOREIGN = [
    *({"origin": origin} for origin in ORIGINS),
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


def test_foreign_pages_and_hosts(server, voices):
    for headers in FOREIGN:
        answer = server.post("/people", headers=headers)
        refused(answer, 403, "foreign_page")
        assert "access-control-allow-origin" not in answer.headers
    own = {"origin": str(server.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert server.post("/embed", files={"audio": wav(voices[0][0])}, headers=own).status_code == 200
    assert server.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "192.168.0.1"):
        assert server.get("/people", headers={"host": host}).status_code == 400
    assert server.get("/health", headers={"host": "localhost:1234"}).status_code == 200


def test_page_loads_nothing_from_elsewhere(server):
    for path in ("/", "/page.css", "/page.js", "/recorder.js", "/in_browser.js", "/speech.js"):
        answer = server.get(path)
        assert answer.status_code == 200
        assert not re.search(r"(https?:)?//[\w.-]+\.\w", answer.text), path
        # Compiled modules are allowed; only scripts of this server can load them.
        policy = answer.headers["content-security-policy"].replace(" 'wasm-unsafe-eval'", "")
        assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_token(models, tmp_path):
    store = tmp_path / "people.db"
    with serving(models[0], store, token=TOKEN) as (address, _):
        for token in (b"", b"Bearer wrong", f"Bearer {TOKEN}x".encode(), b"Bearer \xff\xfe"):
            for path in ("/people", "/openapi.json", "/nothing"):
                answer = httpx.get(f"{address}{path}", headers={"authorization": token})
                refused(answer, 401, "token_needed")
                assert answer.headers["www-authenticate"] == "Bearer"
        right = {"authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{address}/people", headers=right).json() == {"people": []}
        for path in ("/", "/page.js", "/health"):
            assert httpx.get(f"{address}{path}").status_code == 200


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    everywhere = Address("0.0.0.0", 0)
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        assert read_token(Address(host, 0), None) == ""
    first, second = (read_token(everywhere, None) for _ in range(2))
    assert len(first) >= 24 and first != second
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    assert read_token(everywhere, file) == "0123456789abcdef"
    for content in (b"short", b"\xff" * 20, b"\n", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="bytes"):
            read_token(everywhere, file)
    for content, message in (("", f"{TOKEN_VARIABLE}.*0 bytes"), (os.fsdecode(b"\xff" * 20), "20")):
        monkeypatch.setenv(TOKEN_VARIABLE, content)
        with pytest.raises(ValueError, match=message):
            read_token(Address("localhost", 0), None)


def test_addresses():
    with Address("127.0.0.1", 0).listen() as taken:
        port = taken.getsockname()[1]
        for where in (("127.0.0.1", port), ("no.such.host.invalid", 0), ("::1", 70000)):
            with pytest.raises(ValueError, match=rf"port {where[1]}\b"):
                Address(*where).listen()


def test_large_uploads_and_long_clips(models, voices):
    limits = Limits(body_bytes=200_000, clip_seconds=3.0, streams=1)
    with serving(models[0], limits=limits) as (address, service):
        huge = ("a.wav", bytes(3_000_000))
        assert "200,000" in refused(embed(address, huge), 413, "too_large")
        long = ("a.flac", wav(np.tile(voices[0][0], 4), kind="FLAC"))
        assert "a.flac" in refused(embed(address, long), 413, "too_long")
        refused(httpx.get(f"{address}/people"), 404, "no_store")
        assert begin_stream(address, voices[0][0][: 2 * RATE]).status_code == 200
        refused(begin_stream(address, voices[0][0][: 2 * RATE]), 503, "busy")
        service.limits = Limits(stream_idle_seconds=0.0)
        assert begin_stream(address, voices[0][0][: 2 * RATE]).status_code == 200
        assert len(service.streams) == 1


def embed(address, content, **how):
    return httpx.post(f"{address}/embed", files={"audio": content}, **how)


def connect(address):
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 20)


def begin_stream(address, clip):
    form = {"sample_rate": "16000"}
    return httpx.post(f"{address}/streams", files={"reference": wav(clip)}, data=form)


def wait_for_memory(service):
    """All of it is given back, which may be after the answer is sent."""
    deadline = time.monotonic() + 10
    while service.budget.left != service.limits.memory_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_decoded_audio_is_bounded_over_all_requests(models, voices):
    content = wav(np.zeros(60 * RATE, np.float32) + voices[0][0][:1], kind="FLAC")
    assert len(content) < 100_000 < 4 * 60 * RATE
    with serving(models[0], limits=Limits(memory_bytes=4 * 60 * RATE)) as (address, service):
        answer = embed(address, ("a.flac", content))
        refused(answer, 503, "busy")
        assert answer.headers["retry-after"] == "1"
        assert embed(address, wav(voices[0][0])).status_code == 200
        wait_for_memory(service)


CHUNKED = (
    b"POST /embed HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
)
ANNOUNCED = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 30000000")


@pytest.mark.parametrize("head", [CHUNKED, ANNOUNCED])
def test_bodies_that_do_not_arrive_keep_nobody_out(models, voices, head):
    # Fewer slots and less memory than there are idle requests.
    limits = Limits(requests=2, memory_bytes=64 << 20, arriving=30)
    with serving(models[0], limits=limits) as (address, service):
        idle = [connect(address) for _ in range(40)]
        for connection in idle:
            connection.sendall(head)
        assert embed(address, wav(voices[0][0]), timeout=20).status_code == 200
        # Those that have waited longest gave way.
        assert b" 408 " in idle[0].recv(1000)
        for connection in idle:
            connection.close()
        # A client that disconnects is forgotten, and its memory is free again.
        wait_for_memory(service)


@pytest.mark.parametrize("seconds", [(0.3, 60.0), (60.0, 0.3)])
def test_a_slow_request_ends(models, seconds):
    idle, receive = seconds
    limits = Limits(idle_seconds=idle, receive_seconds=receive)
    with serving(models[0], limits=limits) as (address, service):
        with connect(address) as connection:
            connection.sendall(CHUNKED + b"5\r\n--x\r\n\r\n")
            assert b" 408 " in connection.recv(1000)
        wait_for_memory(service)


def test_unfinished_headers(models, monkeypatch):
    monkeypatch.setattr(module, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(module, "MAX_WITHOUT_HEADERS", 20)
    with serving(models[0]) as (address, _):
        halves = [connect(address) for _ in range(60)]
        for connection in halves:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert httpx.get(f"{address}/health").json()["status"] == "ok"
        assert len(TimedProtocol.waiting) <= 21
        for connection in halves:
            with connection, contextlib.suppress(ConnectionResetError):
                assert connection.recv(10) == b""
        records = [module.logging.makeLogRecord({"msg": message}) for message in ("a", "a", "b")]
        assert [module.is_new(record) for record in records] == [True, False, True], "logged once"
        # A connection kept open must also send its next headers in time.
        with connect(address) as kept:
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += kept.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")
            kept.sendall(b"GET /hea")
            assert kept.recv(10) == b""


async def ask_together(address, clips):
    """Answers of /embed to simultaneous requests, each over its own connection."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        return await asyncio.gather(
            *[client.post("/embed", files={"audio": clip}) for clip in clips]
        )


def test_a_hundred_clients(models, voices):
    clips = [wav(voices[speaker][0][:12000]) for speaker in range(6)]
    with serving(models[0]) as (address, service):
        answers = asyncio.run(ask_together(address, [clips[row % 6] for row in range(CLIENTS)]))
        assert [answer.status_code for answer in answers] == [200] * CLIENTS
        assert service.batcher.num_batches < CLIENTS / 2
        for number, clip in enumerate(clips):
            alone = embed(address, clip).json()["embedding"]
            for answer in answers[number::6]:
                np.testing.assert_allclose(answer.json()["embedding"], alone, atol=1e-4)
        assert service.batcher.num_clips == CLIENTS + 6


def test_too_many_requests(models, voices):
    clip = wav(voices[0][0])
    with serving(models[0], limits=Limits(requests=5)) as (address, _):
        answers = asyncio.run(ask_together(address, [clip] * 60))
        assert {answer.status_code for answer in answers} == {200, 503}
        assert embed(address, clip).status_code == 200


def test_batch_with_a_bad_clip():
    sizes = []
    has_begun = threading.Event()
    may_continue = threading.Event()

    def embed(clips):
        has_begun.set()
        may_continue.wait(10)
        sizes.append(len(clips))
        if any(len(clip) == 0 for clip in clips):
            raise ValueError("empty")
        return np.array([[len(clip)] for clip in clips])

    batcher = Batcher(embed)
    first = batcher.submit(np.zeros(7))
    assert has_begun.wait(10)
    others = [batcher.submit(np.zeros(number % 5)) for number in range(1, 5)]
    cancelled = batcher.submit(np.zeros(9))
    bad = batcher.submit(np.zeros(0))
    assert batcher.waiting.qsize() == 6 and cancelled.cancel()
    may_continue.set()
    assert [future.result(10)[0] for future in (first, *others)] == [7, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="empty"):
        bad.result(10)
    batcher.close()
    assert sizes[:2] == [1, 5] and MAX_TOGETHER > 5
    assert batcher.submit(np.zeros(1)).cancelled()


def test_time_limit_of_work(models, voices):
    limits = Limits(receive_seconds=0.5, answer_seconds=0.5)
    with serving(models[0], limits=limits) as (address, service):
        inner = service.batcher._embed
        computed = []

        def slowly(clips):
            time.sleep(0.3)
            computed.append(len(clips))
            return inner(clips)

        service.batcher._embed = slowly
        identity = begin_stream(address, voices[0][0]).json()["id"]
        samples = (32768 * np.tile(voices[0][1], 4)[: 10 * RATE]).astype("<i2").tobytes()
        refused(httpx.post(f"{address}/streams/{identity}", content=samples), 504, "too_slow")
        time.sleep(1.0)
        # One window of the reference, and those of the ten seconds that were computed in time.
        assert len(computed) < 7


@contextlib.contextmanager
def started(models, *options, program=("-m", "speakernet"), **variables):
    """A server in its own process, and the address it prints."""
    serve = f"serve --model {models[0]} --port 0".split()
    command = [sys.executable, *program, *serve, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **variables}, **pipes)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), process.stderr.read()
        yield process, line.removeprefix("ready: ").strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_command(models, voices, tmp_path):
    pytest.importorskip("cryptography")
    store = tmp_path / "people.db"
    answers = []
    options = ("--store", str(store), "--host", "0.0.0.0")
    with started(models, *options, SPEAKERNET_STORE_KEY="a key") as (process, page):
        address, _, token = page.replace("0.0.0.0", "127.0.0.1").partition("#token=")
        how = {"headers": {"authorization": f"Bearer {token}"}, "timeout": 30}
        assert len(token) > 20 and httpx.get(f"{address}people").status_code == 401
        assert httpx.get(f"{address}people", **how).json() == {"people": []}
        long = wav(np.tile(voices[0][0], 40))
        asking = threading.Thread(
            target=lambda: answers.append(embed(address.rstrip("/"), long, **how))
        )
        asking.start()
        while not httpx.get(f"{address}health").json()["clips"] and not answers:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        asking.join(10)
        assert answers[0].status_code == 200
        assert process.stderr.read().endswith("INFO stopped\n") and not list(tmp_path.glob("*.wav"))
    verifier = speakernet.load(models[0], "cpu")
    with pytest.raises(ValueError, match="encrypted"):
        verifier.people(store)
    verifier.people(store, b"a key")


@pytest.mark.slow
def test_stop_during_a_long_computation(models, voices):
    slow = (
        "import sys, time; from speakernet.inference.serve import server; server.STOP_SECONDS = 1; "
        "server.Batcher._answer = lambda *_: time.sleep(60); import speakernet.cli; "
        "sys.exit(speakernet.cli.main())"
    )
    with (
        started(models, program=("-c", slow)) as (process, address),
        httpx.Client(timeout=30) as client,
    ):
        clip = {"audio": wav(voices[0][0])}
        asking = threading.Thread(
            target=client.post, args=(f"{address}embed",), kwargs={"files": clip}
        )
        asking.start()
        while not client.get(f"{address}health").json()["clips"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        asking.join(10)
