"""Advice about waiting for data: right for each kind of run, silent when nothing is wrong."""

import pytest

from speakernet.training.progress import LoadingFacts, data_wait_advice


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LoadingFacts(7, 8, False, False, False, True, 40e6), "40 MB/s"),
        (LoadingFacts(7, 8, False, False, True, True), "augment.device"),
        (LoadingFacts(2, 8, False, False, False, True), "num_workers from 2 to 7"),
        (LoadingFacts(7, 8, False, True, False, True), "decoded for every crop"),
        (LoadingFacts(7, 8, False, False, False, True, 900e6), "opened for every crop"),
        (LoadingFacts(1, 2, True, False, True, False), "busy augmenting"),
        (LoadingFacts(1, 2, True, False, False, False), "all cores are busy"),
        (LoadingFacts(0, 8, True, False, False, True, is_on_disk=True), "onto a faster disk"),
        (LoadingFacts(2, 8, True, False, True, False, is_on_disk=True), "num_workers from 2 to 7"),
    ],
)
def test_advice_fits_the_run(facts: LoadingFacts, words: str) -> None:
    assert words in data_wait_advice(0.3, facts) and "30 %" in data_wait_advice(0.3, facts)
    assert data_wait_advice(0.1, facts) == ""
