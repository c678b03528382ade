"""Synthetic sentences as files, and a server of a model on loopback in a thread of this process."""

import io
import threading
from contextlib import contextmanager

import soundfile

import speakernet
from speakernet.inference.serve.limits import Limits
from speakernet.inference.serve.server import Address, Service, make_server

RATE = 16000


def files(**clips):
    """Uploads by the names of their fields."""
    return [(name, (f"{name}.wav", wav(clip))) for name, clip in clips.items()]


def wav(samples, rate=RATE, kind="WAV"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype="PCM_16")
    return file.getvalue()


def samples_of(content):
    """The samples of an upload."""
    return soundfile.read(io.BytesIO(content), dtype="float32")[0]


def refused(answer, status, code):
    """The message of a refusal of this kind."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], set(error)) == (status, code, {"code", "message"}), (
        answer.text
    )
    return error["message"]


@contextmanager
def serving(model, store_path=None, limits=None, token="", host="127.0.0.1", files=None):
    """The address of a running server, and its service."""
    verifier = speakernet.load(model, "cpu")
    store = verifier.people(store_path) if store_path else None
    service = Service(verifier, store, limits or Limits(), files)
    listener = Address(host, 0).listen()
    server = make_server(service, Address(host, 0), token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
