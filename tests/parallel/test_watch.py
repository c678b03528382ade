"""Heartbeats: a rank that gives none for too long is named, also if no collective fails for it."""

import json
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from speakernet.parallel import group
from speakernet.parallel.distributed import Place


def test_who_is_silent_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(group, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(group, "LOOK_SECONDS", 0.02)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    PrefixStore("speakernet/0", store).set("beat/1", json.dumps([1, 77, "gpu07", 3, "step 3"]))
    heartbeat = group.Heartbeat(Place(0, 2, 0, 2, "localhost", store.port), "speakernet/0", 0.2)
    named = "rank 1 (process 77 on gpu07, last at step 3)"
    deadline = time.monotonic() + 60
    while named not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    # Of many further looks none says it again.
    time.sleep(0.3)
    heartbeat.close()
    assert caplog.text.count(named) == 1
