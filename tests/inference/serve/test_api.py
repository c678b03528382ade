"""The JSON API over real HTTP: answers as in Python, errors as JSON, nothing lost or stored."""

import io
import math
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import soundfile

import speakernet
from tests.inference.conftest import sentence
from tests.inference.serve.serve_helpers import RATE, files, refused, samples_of, serving, wav

ANNA = "Anna"
AERZTE = "Ärzte/⁂ ' \" <b>"


@pytest.fixture
def verify(server):
    """The answer of the server for two clips."""

    def ask(first, second, **data):
        return server.post("/verify", files=files(first=first, second=second), data=data)

    return ask


def test_verify(verify, models, voices):
    verifier = speakernet.load(models[0], "cpu")
    for second in (voices[0][1], voices[3][0]):
        answer = verify(voices[0][0], second).json()
        clips = [samples_of(wav(clip)) for clip in (voices[0][0], second)]
        decision = verifier.verify(*clips, sample_rate=RATE)
        assert answer["score"] == pytest.approx(decision.score, abs=1e-4)
        ratio = decision.log_likelihood_ratio
        assert answer["log_likelihood_ratio"] == pytest.approx(ratio, abs=1e-2)
        assert answer["same_speaker"] == decision.same_speaker
        assert answer["threshold"] == pytest.approx(decision.threshold)
        assert answer["false_accept_rate"] == 0.01 and answer["advice"] is None
        seconds = len(voices[0][0]) / RATE
        assert answer["clips"][0]["seconds"] == pytest.approx(seconds, abs=1e-3)


def test_thresholds(verify, voices):
    pair = voices[0][0], voices[0][0]
    strict = verify(*pair, threshold="1.5").json()
    assert (strict["same_speaker"], strict["threshold"]) == (False, 1.5)
    assert strict["false_accept_rate"] is None
    assert verify(*pair, false_accept_rate="0.01").json()["same_speaker"] is True
    refusal = verify(*pair, false_accept_rate="0.00001")
    assert "0.001%" in refused(refusal, 422, "no_threshold")
    for field, value in (("threshold", "two"), ("threshold", "nan"), ("false_accept_rate", "inf")):
        assert field in refused(verify(*pair, **{field: value}), 422, "bad_request")


def test_a_clip_without_its_end_is_named(server, voices):
    whole = wav(voices[0][0])
    for clip, warnings in ((whole, 0), (whole[: len(whole) * 3 // 4], 1)):
        uploads = [*files(first=voices[0][1]), ("second", ("second.wav", clip))]
        answer = server.post("/verify", files=uploads)
        assert str(answer.json()["clips"][1]["warnings"]).count("cut off") == warnings


def test_embeddings_can_be_compared_later(server, verify, voices):
    first, second = (
        server.post("/embed", files=files(audio=clip)).json()["embedding"] for clip in voices[2][:2]
    )
    assert len(first) == 16
    later = server.post("/compare", json={"first": first, "second": second}).json()
    now = verify(*voices[2][:2]).json()
    assert later["score"] == pytest.approx(now["score"], abs=1e-5)


def test_people(server, voices):
    def enrol(name, *clips):
        uploads = [("audio", (f"{row}.wav", wav(clip))) for row, clip in enumerate(clips)]
        return server.post("/people", data={"name": name}, files=uploads).json()

    def identify(**data):
        return server.post("/identify", files=files(audio=voices[0][0]), data=data)

    for number, name in enumerate([ANNA, AERZTE, "b c"]):
        done = enrol(name, *voices[number][:2])
        assert (done["name"], done["added"], done["recordings"]) == (name, 2, 2)
        assert len(done["clips"]) == 2
    for num_added in (1, 0):
        done = enrol(ANNA, voices[0][2])
        assert (done["added"], done["recordings"]) == (num_added, 3)
    everybody = server.get("/people").json()["people"]
    listed = {person["name"]: person["recordings"] for person in everybody}
    assert listed == {ANNA: 3, AERZTE: 2, "b c": 2}
    answer = identify(top="2", threshold="-1").json()
    first, second = answer["candidates"]
    assert answer["name"] == first["name"] == ANNA and first["score"] > second["score"]
    assert answer["threshold"] == -1 and answer["stranger_rate"] is None
    assert math.isfinite(first["log_likelihood_ratio"])
    stranger = identify(threshold="1.5").json()
    assert stranger["name"] is None and stranger["candidates"][0]["name"] == ANNA
    for top in ("nan", "0", "101"):
        assert "top" in refused(identify(top=top), 422, "bad_request")
    strict = identify().json()
    assert strict["threshold"] == 0.66 and strict["stranger_rate"] == pytest.approx(0.03)
    for name in listed:
        assert server.delete(f"/people/{quote(name, safe='')}").json()["name"] == name
    assert server.get("/people").json() == {"people": []}
    assert ANNA in refused(server.delete("/people/Anna"), 404, "unknown_person")
    empty = identify().json()
    assert empty["name"] is None and empty["candidates"] == []


def test_streams(server, verify, voices):
    long = np.concatenate(voices[0][1:])[: 4 * RATE]
    samples = (32768 * samples_of(wav(long))).astype("<i2")
    clip = files(reference=voices[0][0])

    def begin(**form):
        return server.post("/streams", files=clip, data=form)

    identity = begin(sample_rate=str(RATE)).json()["id"]

    def send(content):
        return server.post(f"/streams/{identity}", content=content)

    answers = [send(samples[start : start + 3200].tobytes()) for start in range(0, 4 * RATE, 3200)]
    states = [answer.json()["state"] for answer in answers]
    states = [state for state in states if state]
    assert [state["seconds"] for state in states] == [1, 2, 3, 4]
    # Less than a second of speech gives no odds.
    assert all(math.isfinite(state["log_likelihood_ratio"]) for state in states[1:])
    whole = verify(voices[0][0], long).json()
    assert states[-1]["score"] == pytest.approx(whole["score"], abs=1e-3)
    refused(send(b"abc"), 422, "bad_samples")
    # A longer request would still compute after its time limit.
    refused(send(bytes(2 * 11 * RATE)), 413, "too_long")
    assert server.delete(f"/streams/{identity}").json() == {"id": identity}
    refused(send(b""), 404, "unknown_stream")
    refused(begin(sample_rate="16"), 422, "bad_audio")
    refused(begin(), 422, "bad_request")


def test_health_and_description(server):
    health = server.get("/health").json()
    assert (health["status"], health["model"], health["is_calibrated"]) == ("ok", "ResNet", True)
    assert (health["advice"], health["embedding_dim"]) == (None, 16)
    assert health["calibration_trials"] == 276
    described = server.get("/openapi.json").json()
    assert {"/verify", "/embed", "/people", "/identify", "/health"} <= set(described["paths"])
    body = described["paths"]["/verify"]["post"]["requestBody"]["content"]["multipart/form-data"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    assert described["components"]["schemas"][name]["required"] == ["first", "second"]
    refused(server.get("/docs"), 404, "no_such_address")


def with_sample(value):
    samples = sentence(0, 0)
    file = io.BytesIO()
    samples[5000] = value
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


BAD = {
    "empty": b"",
    "text": b"this is text",
    "no samples": wav(np.zeros(0, np.float32)),
    "cut off": wav(sentence(0, 0))[:40],
    "20 ms": wav(sentence(0, 0)[4000:4320]),
    "silence": wav(np.zeros(2 * RATE, np.float32)),
    "hiss": wav(np.random.default_rng(0).normal(0, 0.1, 2 * RATE)),
    "NaN": with_sample(np.nan),
    "huge": with_sample(3e38),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_bad_audio(server, voices, content):
    bad = ("a clip.bin", content)
    fine = ("good.wav", wav(voices[1][0]))
    for address, uploads, data in [
        ("/verify", [("first", bad), ("second", fine)], {}),
        ("/verify", [("first", fine), ("second", bad)], {}),
        ("/embed", [("audio", bad)], {}),
        ("/people", [("audio", fine), ("audio", bad)], {"name": "Bo"}),
        ("/identify", [("audio", bad)], {}),
        ("/streams", [("reference", bad)], {"sample_rate": "16000"}),
    ]:
        answer = server.post(address, files=uploads, data=data)
        assert "a clip.bin" in refused(answer, 422, "bad_audio")
    assert server.get("/people").json() == {"people": []}


def test_bad_requests(server, voices):
    kind = {"content-type": "multipart/form-data; boundary=x"}
    json_kind = {"content-type": "application/json"}
    for content, headers, status in [
        (b"{", json_kind, 422),
        (b"", {}, 422),
        (b"nonsense", kind, 400),
        (b"--x\r\ncut off", kind, 400),
        (b"", {"content-type": "multipart/form-data"}, 400),
    ]:
        refused(server.post("/verify", content=content, headers=headers), status, "bad_request")
    clip = files(audio=voices[0][0])
    many = [("audio", ("a.wav", b"x"))] * 11
    half = files(first=voices[0][0])
    for address, code, how in [
        ("/verify", "bad_request", {"files": half}),
        ("/embed", "bad_request", {"data": {"audio": "text"}, "files": {"x": b""}}),
        ("/people", "bad_request", {"data": {"name": "a"}, "files": many}),
        ("/people", "refused", {"data": {"name": "  "}, "files": clip}),
        ("/compare", "bad_request", {"content": b'{"first": [1', "headers": json_kind}),
        ("/compare", "refused", {"json": {"first": [1.0], "second": [2.0]}}),
        (
            "/compare",
            "refused",
            {"content": b'{"first": [NaN], "second": [1.0]}', "headers": json_kind},
        ),
    ]:
        message = refused(server.post(address, **how), 422, code)
        assert address != "/verify" or "second" in message
    assert "POST" in refused(server.get("/verify"), 405, "wrong_method")
    assert "GET, POST" in refused(server.put("/people"), 405, "wrong_method")
    assert "/etc/passwd" in refused(server.get("/../../etc/passwd"), 404, "no_such_address")


def test_uncalibrated_model(models, voices):
    with serving(models[1]) as (address, _), httpx.Client(base_url=address) as client:
        health = client.get("/health").json()
        assert health["is_calibrated"] is False and "speakernet calibrate" in health["advice"]
        pair = files(first=voices[0][0], second=voices[0][1])
        found = client.post("/verify", files=pair).json()
        assert found["same_speaker"] is None and found["log_likelihood_ratio"] is None
        assert "speakernet calibrate" in found["advice"] and -1 <= found["score"] <= 1
        chosen = client.post("/verify", files=pair, data={"threshold": "-1"}).json()
        assert chosen["same_speaker"] is True and chosen["log_likelihood_ratio"] is None
