"""Many at once: nothing is lost, requests share batches, too many are told so, and a stop finishes what was begun."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from speakernet.inference.serve.batching import MOST_TOGETHER, Batcher
from speakernet.inference.serve.limits import Limits

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import serving, wav

CLIENTS = 200


async def ask_together(address, requests):
    """Answers to all requests, sent at once, each over a connection of its own."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        return await asyncio.gather(*[client.post(path, files=files) for path, files in requests])


def test_two_hundred_clients_at_once_lose_nothing(models, voices):
    clips = [wav(voices[speaker][0][:12000]) for speaker in range(6)]
    requests = [("/embed", {"audio": (f"{row}.wav", clips[row % 6])}) for row in range(CLIENTS)]
    with serving(models[0]) as (address, service):
        answers = asyncio.run(ask_together(address, requests))
        assert [answer.status_code for answer in answers] == [200] * CLIENTS
        alone = [httpx.post(f"{address}/embed", files={"audio": clip}).json()["embedding"] for clip in clips]
        for row, answer in enumerate(answers):
            np.testing.assert_allclose(answer.json()["embedding"], alone[row % 6], atol=1e-4)
        assert service.batcher.num_clips == CLIENTS + 6
        assert service.batcher.num_batches < CLIENTS / 2


def test_more_than_it_takes_on_are_told_to_come_back(models, voices):
    clip = wav(voices[0][0])
    with serving(models[0], limits=Limits(requests=5)) as (address, _):
        answers = asyncio.run(ask_together(address, [("/embed", {"audio": clip})] * 60))
        statuses = {answer.status_code for answer in answers}
        assert statuses == {200, 503}
        for answer in answers:
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "busy" and answer.headers["retry-after"] == "1"
        assert httpx.post(f"{address}/embed", files={"audio": clip}).status_code == 200


def test_clips_that_wait_are_embedded_together_and_a_bad_one_alone():
    sizes, first_has_begun, may_go_on = [], threading.Event(), threading.Event()

    def embed(clips):
        first_has_begun.set()
        may_go_on.wait(10)
        sizes.append(len(clips))
        if any(len(clip) == 0 for clip in clips):
            raise ValueError("nothing to hear")
        return np.array([[len(clip)] for clip in clips])

    batcher = Batcher(embed)
    first = batcher.submit(np.zeros(7))
    assert first_has_begun.wait(10)
    others = [batcher.submit(np.zeros(number % 5)) for number in range(1, 5)]
    cancelled, bad = batcher.submit(np.zeros(9)), batcher.submit(np.zeros(0))
    assert batcher.num_waiting == 6 and cancelled.cancel()
    may_go_on.set()
    assert [one.result(10)[0] for one in (first, *others)] == [7, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="nothing to hear"):
        bad.result(10)
    batcher.close()
    assert sizes[:2] == [1, 5] and MOST_TOGETHER > 5


def start(models, *options):
    command = [sys.executable, "-m", "speakernet", "serve", "--model", str(models[0]), "--port", "0", *options]
    # Where the tests run in the background of a shell, Ctrl-C is ignored, which a child would inherit.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
def test_the_command_is_soon_ready_and_soon_gone(models, voices, tmp_path):
    began = time.monotonic()
    process = start(models, "--store", str(tmp_path / "people.db"))
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), process.stderr.read()
        assert time.monotonic() - began < 20
        address = line.removeprefix("ready: ").strip()
        assert httpx.get(f"{address}health").json()["status"] == "ok"
        answers = []
        long = wav(np.tile(voices[0][0], 40))
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{address}embed", files={"audio": long}, timeout=30))
        )
        asking.start()
        while not httpx.get(f"{address}health").json()["clips"] and not answers:
            time.sleep(0.01)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0 and time.monotonic() - began < 10
        asking.join(10)
        assert answers[0].status_code == 200
        assert process.stderr.read().endswith("INFO stopped\n")
        assert not list(tmp_path.glob("*.wav"))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_others_than_this_machine_need_the_token_that_is_shown(models):
    process = start(models, "--host", "0.0.0.0")
    try:
        address, _, token = process.stdout.readline().removeprefix("ready: ").strip().partition("#token=")
        assert len(token) > 20
        address = address.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{address}people").status_code == 401
        assert httpx.get(f"{address}people", headers={"authorization": f"Bearer {token}"}).status_code == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()
