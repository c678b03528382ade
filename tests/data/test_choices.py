"""Automatic choices: the value and the reason for every kind of machine and corpus."""

import pytest

from speakernet.data.choices import (
    choose_device_banks,
    choose_device_resident,
    choose_num_workers,
    choose_prefetch,
    choose_ram_corpus,
)

MACHINE = {
    "cores": 16,
    "num_batches": 1000,
    "is_reading_free": False,
    "augments_in_workers": True,
    "trains_on_cpu": False,
    "batch_bytes": 8 << 20,
    "free_shared_bytes": 8 << 30,
}


@pytest.mark.parametrize(
    ("changes", "value", "reason"),
    [
        ({}, 12, "more than 12"),
        ({"cores": 8}, 7, "one of them for training"),
        ({"cores": 1}, 0, "one core"),
        ({"cores": 16, "processes_on_machine": 8}, 1, "2 cores"),
        ({"num_batches": 3}, 0, "3 batches"),
        ({"is_reading_free": True, "augments_in_workers": False}, 0, "one copy"),
        ({"is_reading_free": True}, 12, "more than 12"),
        ({"is_reading_free": True, "augments_in_workers": False, "changed_share": 2 / 3}, 2, "0.2 ms a crop"),
        ({"is_reading_free": True, "augments_in_workers": False, "changed_share": 1e-3}, 0, "one copy"),
        ({"trains_on_cpu": True, "cores": 2}, 1, "network"),
        ({"is_spawned": True}, 4, "starts from nothing"),
        ({"free_shared_bytes": 64 << 20}, 2, "--shm-size"),
        ({"free_shared_bytes": 0}, 0, "--shm-size"),
    ],
)
def test_num_workers(changes: dict, value: int, reason: str) -> None:
    choice = choose_num_workers(**{**MACHINE, **changes})
    assert choice.value == value and reason in choice.reason


def test_prefetch() -> None:
    assert choose_prefetch(num_workers=2, batch_bytes=1 << 20, free_shared_bytes=1 << 30).value == 4
    assert choose_prefetch(num_workers=2, batch_bytes=8 << 20, free_shared_bytes=64 << 20).value == 2
    assert choose_prefetch(num_workers=2, batch_bytes=1 << 30, free_shared_bytes=64 << 20).value == 1


def test_ram_corpus() -> None:
    facts = {"corpus_bytes": 100, "is_compressed": True, "is_packed": False, "budget_bytes": 200}
    assert choose_ram_corpus(switch="auto", **facts).value
    assert not choose_ram_corpus(switch="auto", **{**facts, "is_compressed": False}).value
    assert not choose_ram_corpus(switch="auto", **{**facts, "budget_bytes": 50}).value
    assert not choose_ram_corpus(switch="on", **{**facts, "is_packed": True}).value
    assert not choose_ram_corpus(switch="off", **facts).value
    with pytest.raises(ValueError, match="ram_corpus_gigabytes"):
        choose_ram_corpus(switch="on", **{**facts, "budget_bytes": 50})


def test_device_resident() -> None:
    facts = {"device_type": "cuda", "corpus_bytes": 100, "is_flat": True, "budget_bytes": 200}
    assert choose_device_resident(switch="auto", **facts).value
    assert not choose_device_resident(switch="auto", **{**facts, "device_type": "cpu"}).value
    assert choose_device_resident(switch="on", **{**facts, "device_type": "cpu"}).value
    for change, word in [
        ({"is_flat": False}, "packed"),
        ({"budget_bytes": 9}, "takes"),
        ({"augments_elsewhere": True}, "without noise and RIRs"),
    ]:
        assert not choose_device_resident(switch="auto", **{**facts, **change}).value
        with pytest.raises(ValueError, match=word):
            choose_device_resident(switch="on", **{**facts, **change})
    assert not choose_device_resident(switch="off", **facts).value


def test_noise_and_rirs_on_the_device() -> None:
    facts = {"bank_bytes": 100, "budget_bytes": 200, "needs_corpus": False, "is_corpus_there": False}
    assert choose_device_banks(**facts).value
    assert choose_device_banks(**{**facts, "needs_corpus": True, "is_corpus_there": True}).value
    for change, reason in (({"bank_bytes": 300}, "they take 300 B, 200 B are"), ({"needs_corpus": True}, "a folder")):
        choice = choose_device_banks(**{**facts, **change})
        assert not choice.value and reason in choice.reason
