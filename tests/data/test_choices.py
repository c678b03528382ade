"""Automatic choices: the value and the reason for every kind of machine and corpus."""

import pytest

from speakernet.data.choices import (
    CropWork,
    LoadingFacts,
    choose_device_banks,
    choose_device_resident,
    choose_num_workers,
    choose_prefetch,
    choose_ram_corpus,
    data_wait_advice,
)

DECODING = CropWork(is_reading_free=False, augments=True, changed_share=0.0)
COPY = CropWork(is_reading_free=True, augments=False, changed_share=0.0)
MACHINE = {"work": DECODING, "cores": 16, "num_batches": 1000}
MACHINE |= {"processes_on_machine": 1, "is_spawned": False}
MACHINE |= {"trains_on_cpu": False, "batch_bytes": 8 << 20, "free_shared_bytes": 8 << 30}


@pytest.mark.parametrize(
    ("changes", "value", "reason"),
    [
        ({}, 12, "more than 12"),
        ({"cores": 1}, 0, "one core"),
        ({"cores": 16, "processes_on_machine": 8}, 1, "2 cores"),
        ({"work": COPY}, 0, "one copy"),
        ({"work": COPY._replace(changed_share=2 / 3)}, 2, "0.2 ms"),
        ({"trains_on_cpu": True, "cores": 2}, 1, "network"),
        ({"free_shared_bytes": 64 << 20}, 2, "--shm-size"),
    ],
)
def test_num_workers(changes, value, reason):
    choice = choose_num_workers(**{**MACHINE, **changes})
    assert choice.value == value and reason in choice.reason


CHOICES = {
    choose_ram_corpus: {
        "corpus_bytes": 9,
        "is_compressed": True,
        "is_packed": False,
        "budget_bytes": 9,
    },
    choose_device_resident: {
        "device_type": "cuda",
        "corpus_bytes": 9,
        "is_flat": True,
        "budget_bytes": 9,
    },
    choose_device_banks: {
        "bank_bytes": 9,
        "budget_bytes": 9,
        "needs_corpus": False,
        "is_corpus_there": False,
    },
}


@pytest.mark.parametrize(
    ("choose", "changes", "value"),
    [
        (choose_ram_corpus, {"switch": "auto"}, True),
        (choose_ram_corpus, {"switch": "auto", "is_compressed": False}, False),
        (choose_device_resident, {"switch": "auto"}, True),
        (choose_device_resident, {"switch": "auto", "device_type": "cpu"}, False),
        (choose_device_banks, {"needs_corpus": True, "is_corpus_there": True}, True),
        (choose_device_banks, {"needs_corpus": True}, False),
    ],
)
def test_choices(choose, changes, value):
    assert choose(**{**CHOICES[choose], **changes}).value == value


def test_prefetched_batches():
    for free_bytes, expected in ((1 << 30, 4), (64 << 20, 2), (0, 1)):
        facts = {"batch_bytes": 8 << 20, "free_shared_bytes": free_bytes}
        assert choose_prefetch(num_workers=2, **facts) == expected


@pytest.mark.parametrize(
    ("choose", "changes", "word"),
    [
        (choose_ram_corpus, {"budget_bytes": 8}, "pack the corpus"),
        (choose_device_resident, {"is_flat": False}, "packed"),
        (choose_device_resident, {"budget_bytes": 8}, "takes"),
        (choose_device_resident, {"augments_elsewhere": True}, "noise and RIRs"),
    ],
)
def test_impossible_requests(choose, changes, word):
    facts = {**CHOICES[choose], **changes}
    assert not choose(switch="auto", **facts).value
    with pytest.raises(ValueError, match=word):
        choose(switch="on", **facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LoadingFacts(7, 8, False, False, False, True, 40e6), "40 MB/s"),
        (LoadingFacts(7, 8, False, False, True, True), "augment.device"),
        (LoadingFacts(2, 8, False, False, False, True), "num_workers from 2 to 7"),
        (LoadingFacts(7, 8, False, True, False, True), "decodes a file"),
        (LoadingFacts(7, 8, False, False, False, True, 900e6), "opens a file"),
        (LoadingFacts(1, 2, True, False, True, False), "busy augmenting"),
        (LoadingFacts(0, 8, True, False, False, True, is_on_disk=True), "faster disk"),
    ],
)
def test_advice(facts, words):
    advice = data_wait_advice(0.3, facts)
    assert words in advice and "30 %" in advice
    assert data_wait_advice(0.1, facts) == ""
