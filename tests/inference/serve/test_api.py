"""The JSON API over real HTTP: what it answers, what it refuses and in which words, and what it keeps."""

import math
import re
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import speakernet
from speakernet.data.audio import read_audio_bytes
from speakernet.inference.serve.limits import Limits

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import RATE, sentence, serving, wav


def files(**clips):
    return [(name, (f"{name}.wav", wav(clip))) for name, clip in clips.items()]


def refused(answer, status, code):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == code and set(error) == {"code", "message"}
    return error["message"]


def test_verify_says_what_python_says(server, models, voices):
    verifier = speakernet.load(models[0], device="cpu")
    for second in (voices[0][1], voices[3][0]):
        found = server.post("/verify", files=files(first=voices[0][0], second=second)).json()
        clips = [read_audio_bytes(wav(clip), "a clip") for clip in (voices[0][0], second)]
        wanted = verifier.verify(*clips, sample_rate=RATE)
        assert found["score"] == pytest.approx(wanted.score, abs=1e-4)
        assert found["log_likelihood_ratio"] == pytest.approx(wanted.log_likelihood_ratio, abs=1e-2)
        assert (found["same_speaker"], found["threshold"]) == (wanted.same_speaker, pytest.approx(wanted.threshold))
        assert found["false_accept_rate"] == 0.01 and found["advice"] is None
        assert found["clips"][0]["seconds"] == pytest.approx(len(voices[0][0]) / RATE, abs=1e-3)


def test_a_clip_is_its_own_speaker_in_every_format(server, voices):
    clip = voices[1][0]
    for kind, rate in (("WAV", 16000), ("FLAC", 16000), ("OGG", 16000)):
        pair = [("first", ("a.wav", wav(clip))), ("second", ("b", wav(clip, rate, kind)))]
        found = server.post("/verify", files=pair).json()
        assert found["same_speaker"] is True and found["score"] > 0.9, kind


def test_thresholds_may_be_chosen(server, voices):
    pair = files(first=voices[0][0], second=voices[0][0])
    strict = server.post("/verify", files=pair, data={"threshold": "1.5"}).json()
    assert strict["same_speaker"] is False and strict["threshold"] == 1.5 and strict["false_accept_rate"] is None
    assert server.post("/verify", files=pair, data={"false_accept_rate": "0.01"}).json()["same_speaker"] is True
    assert "far_0.001%" in refused(
        server.post("/verify", files=pair, data={"false_accept_rate": "0.00001"}), 422, "no_threshold"
    )
    assert "two" in refused(server.post("/verify", files=pair, data={"threshold": "two"}), 422, "no_number")
    refused(server.post("/verify", files=pair, data={"threshold": "nan"}), 422, "bad_threshold")


def test_embeddings_can_be_compared_later(server, models, voices):
    first, second = (
        server.post("/embed", files=files(audio=clip)).json()["embedding"] for clip in (voices[2][0], voices[2][1])
    )
    assert len(first) == 16
    later = server.post("/compare", json={"first": first, "second": second}).json()
    now = server.post("/verify", files=files(first=voices[2][0], second=voices[2][1])).json()
    assert later["score"] == pytest.approx(now["score"], abs=1e-5)


def test_people_are_enrolled_identified_and_forgotten(server, voices):
    for number, name in enumerate(["Anna", "Ärzte/⁂ ' \" <b>", "b c"]):
        clips = [("audio", (f"{one}.wav", wav(voices[number][one]))) for one in (0, 1)]
        found = server.post("/people", data={"name": name}, files=clips).json()
        assert (found["name"], found["recordings"], len(found["clips"])) == (name, 2, 2)
    more = server.post("/people", data={"name": "Anna"}, files=files(audio=voices[0][2])).json()
    assert more["recordings"] == 3
    listed = server.get("/people").json()["people"]
    assert {one["name"]: one["recordings"] for one in listed} == {"Anna": 3, "Ärzte/⁂ ' \" <b>": 2, "b c": 2}
    anybody = {"top": "2", "threshold": "-1"}
    found = server.post("/identify", files=files(audio=voices[0][0]), data=anybody).json()
    assert found["name"] == found["candidates"][0]["name"] == "Anna" and len(found["candidates"]) == 2
    assert found["candidates"][0]["score"] > found["candidates"][1]["score"]
    stranger = server.post("/identify", files=files(audio=voices[0][0]), data={"threshold": "1.5"}).json()
    assert stranger["name"] is None and stranger["candidates"][0]["name"] == "Anna"
    for one in listed:
        address = "/people/" + "".join(f"%{byte:02X}" for byte in one["name"].encode())
        assert server.delete(address).json()["name"] == one["name"]
    assert server.get("/people").json() == {"people": []}
    assert "Anna" in refused(server.delete("/people/Anna"), 404, "unknown_person")
    empty = server.post("/identify", files=files(audio=voices[0][0])).json()
    assert empty["name"] is None and empty["candidates"] == []


def test_a_stream_grows_surer_each_second(server, voices):
    long = np.concatenate([voices[0][1], voices[0][2], voices[0][3]])[: 4 * RATE]
    samples = (32768 * read_audio_bytes(wav(long), "a clip")).astype("<i2")
    form = {"sample_rate": str(RATE)}
    identity = server.post("/streams", files=files(reference=voices[0][0]), data=form).json()["id"]
    states = []
    for start in range(0, len(long), 3200):
        chunk = samples[start : start + 3200].tobytes()
        progress = server.post(f"/streams/{identity}", content=chunk).json()
        states += [progress["state"]] if progress["state"] else []
    assert [state["seconds"] for state in states] == [1, 2, 3, 4]
    assert all(math.isfinite(state["log_likelihood_ratio"]) for state in states)
    whole = server.post("/verify", files=files(first=voices[0][0], second=long)).json()
    assert states[-1]["score"] == pytest.approx(whole["score"], abs=1e-3)
    refused(server.post(f"/streams/{identity}", content=b"abc"), 422, "bad_samples")
    assert server.delete(f"/streams/{identity}").json() == {"id": identity}
    refused(server.post(f"/streams/{identity}", content=b""), 404, "unknown_stream")
    bad = server.post("/streams", files=files(reference=voices[0][0]), data={"sample_rate": "16"})
    assert "16" in refused(bad, 422, "bad_stream")
    refused(server.post("/streams", files=files(reference=voices[0][0])), 422, "missing_field")


def test_what_is_served_is_said(server):
    health = server.get("/health").json()
    assert (health["status"], health["model"], health["is_calibrated"]) == ("ok", "ResNet", True)
    assert health["advice"] is None and health["embedding_dim"] == 16
    described = server.get("/openapi.json").json()
    assert {"/verify", "/embed", "/people", "/identify", "/health"} <= set(described["paths"])
    fields = described["paths"]["/verify"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert fields["required"] == ["first", "second"]
    refused(server.get("/docs"), 404, "no_such_address")


TINY = np.zeros(320, dtype=np.float32)


@pytest.mark.parametrize(
    ("content", "status", "code", "words"),
    [
        (b"", 422, "bad_audio", "empty"),
        (b"this is text", 422, "bad_audio", "not a readable audio file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), 422, "bad_audio", "not a readable audio file"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", 422, "bad_audio", "audio.bin"),
        (wav(TINY[:1]), 422, "bad_audio", "too short"),
        (wav(np.zeros(16000, dtype=np.float32)), 422, "silent", "silent"),
        (wav(sentence(0, 0))[:60], 422, "bad_audio", "audio.bin"),
    ],
    ids=["empty", "text", "picture", "header", "one sample", "silence", "cut off"],
)
def test_what_is_no_voice_is_refused(server, content, status, code, words):
    answer = server.post("/embed", files={"audio": ("audio.bin", content)})
    assert words in refused(answer, status, code)


def test_a_clip_of_20_ms_is_answered_or_refused_but_never_fails(server, voices):
    answer = server.post("/verify", files=files(first=voices[0][0][:320], second=voices[0][0]))
    assert answer.status_code in (200, 422)
    if answer.status_code == 200:
        assert "too short" in answer.json()["clips"][0]["warnings"][0]


def test_broken_requests_are_refused_in_json(server, voices):
    refused(server.post("/verify", content=b"{", headers={"content-type": "application/json"}), 415, "no_form")
    refused(server.post("/verify"), 415, "no_form")
    kind = {"content-type": "multipart/form-data; boundary=x"}
    refused(server.post("/verify", content=b"nonsense", headers=kind), 400, "broken_form")
    refused(server.post("/verify", content=b"--x\r\ncut off", headers=kind), 400, "broken_form")
    refused(server.post("/verify", content=b"", headers={"content-type": "multipart/form-data"}), 400, "broken_form")
    message = refused(server.post("/verify", files=files(first=voices[0][0])), 422, "missing_field")
    assert "'second'" in message and "first" in message
    refused(server.post("/embed", data={"audio": "text"}, files={"x": b""}), 422, "no_file")
    many = [("audio", (f"{one}.wav", b"x")) for one in range(11)]
    refused(server.post("/people", data={"name": "a"}, files=many), 400, "broken_form")
    json_kind = {"content-type": "application/json"}
    refused(server.post("/compare", content=b'{"first": [1', headers=json_kind), 422, "bad_request")
    refused(server.post("/compare", json={"first": [1.0], "second": [2.0]}), 422, "bad_embedding")
    nan = b'{"first": [NaN], "second": [1.0]}'
    refused(server.post("/compare", content=nan, headers=json_kind), 422, "bad_embedding")
    refused(server.get("/verify"), 405, "wrong_method")
    refused(server.get("/../../etc/passwd"), 404, "no_such_address")
    refused(server.post("/identify", files=files(audio=voices[0][0]), data={"top": "0.5"}), 422, "bad_number")
    refused(server.post("/people", data={"name": "  "}, files=files(audio=voices[0][0])), 422, "bad_name")
    refused(server.post("/people", data={"name": "x" * 300}, files=files(audio=voices[0][0])), 422, "bad_name")


def test_too_much_is_refused_before_it_is_worked_on(models, voices):
    limits = Limits(body_bytes=200_000, clip_seconds=3.0, requests=0)
    with serving(models[0], limits=limits) as (address, _):
        refused(httpx.get(f"{address}/health"), 503, "busy")
    limits = Limits(body_bytes=200_000, clip_seconds=3.0, waiting_bytes=300_000, streams=1)
    with serving(models[0], limits=limits) as (address, service), httpx.Client(base_url=address) as client:
        huge = {"audio": ("a.wav", bytes(3_000_000))}
        assert "200,000 bytes" in refused(client.post("/embed", files=huge), 413, "too_large")
        long = {"audio": ("a.flac", wav(np.tile(voices[0][0], 4), kind="FLAC"))}
        assert "up to 3 s" in refused(client.post("/embed", files=long), 413, "too_long")
        refused(client.get("/people"), 404, "no_store")
        form = {"sample_rate": "16000"}
        clip = files(reference=voices[0][0][: 2 * RATE])
        assert client.post("/streams", files=clip, data=form).status_code == 200
        refused(client.post("/streams", files=clip, data=form), 503, "busy")
        assert client.get("/health").json()["status"] == "ok"
        assert len(service.streams) == 1


def test_a_slow_upload_is_ended(models):
    def slowly():
        yield b"--x\r\n"
        time.sleep(1.5)
        yield b"--x--\r\n"

    with serving(models[0], limits=Limits(receive_seconds=0.3)) as (address, _):
        kind = {"content-type": "multipart/form-data; boundary=x"}
        try:
            answer = httpx.post(f"{address}/embed", content=slowly(), headers=kind)
        except httpx.TransportError:
            return
        refused(answer, 408, "too_slow")


def test_a_model_without_calibration_says_so(models, voices):
    with serving(models[1]) as (address, _), httpx.Client(base_url=address) as client:
        health = client.get("/health").json()
        assert health["is_calibrated"] is False and "speakernet calibrate" in health["advice"]
        pair = files(first=voices[0][0], second=voices[0][1])
        found = client.post("/verify", files=pair).json()
        assert found["same_speaker"] is None and found["log_likelihood_ratio"] is None
        assert "speakernet calibrate" in found["advice"] and -1 <= found["score"] <= 1
        chosen = client.post("/verify", files=pair, data={"threshold": "-1"}).json()
        assert chosen["same_speaker"] is True and chosen["log_likelihood_ratio"] is None


def test_the_document_lists_every_request_and_the_limits(server, repository):
    text = (repository / "docs" / "serve.md").read_text(encoding="utf-8")
    listed = {
        tuple(one.split()) for one in re.findall(r"^\| `((?:GET|POST|DELETE) [^`]*)` \|", text, flags=re.MULTILINE)
    }
    paths = server.get("/openapi.json").json()["paths"]
    there = {
        (method.upper(), path.replace("{name}", "NAME").replace("{identity}", "ID"))
        for path, methods in paths.items()
        for method in methods
    }
    assert listed == there
    limits = Limits()
    for value, words in [
        (limits.receive_seconds, "within {:g} s"),
        (limits.answer_seconds, "over {:g} s"),
        (limits.body_bytes / 2**20, "more than {:g} MiB"),
        (limits.requests, "{:g} requests"),
        (limits.waiting_bytes / 2**20, "{:g} MiB of audio"),
        (limits.streams, "{:g} streams"),
    ]:
        assert words.format(value) in text
    assert limits.clip_seconds == 600 and "ten minutes" in text and limits.clips == 10 and "(1 to 10)" in text
