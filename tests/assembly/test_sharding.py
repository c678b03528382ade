"""Whether the processes of a run share the head: what is asked, what there is, and what the log says."""

import logging

import pytest

from speakernet.assembly.training import FEWEST_SPEAKERS, choose_sharding, shard_head
from speakernet.config import ConfigError
from speakernet.config.loading import load_config
from speakernet.losses.classification import AMSoftmax
from speakernet.losses.options import AAMSoftmaxOptions, AMSoftmaxOptions, CombinedOptions, GE2EOptions
from speakernet.parallel.sharding import sharded_names


@pytest.mark.parametrize(
    ("options", "speakers", "processes", "is_shared", "reason"),
    [
        (AAMSoftmaxOptions(), FEWEST_SPEAKERS, 2, True, "20,000 speakers on 2 processes"),
        (AAMSoftmaxOptions(), FEWEST_SPEAKERS - 1, 64, False, "it pays from 20,000"),
        (AAMSoftmaxOptions(), 10**6, 1, False, "one process"),
        (AAMSoftmaxOptions(sharded="on"), 10, 2, True, "as asked"),
        (AAMSoftmaxOptions(sharded="on"), 10, 1, False, "one process"),
        (AAMSoftmaxOptions(sharded="off"), 10**6, 8, False, "switched off"),
        (CombinedOptions(), 10**6, 8, True, "1,000,000 speakers on 8 processes"),
        (GE2EOptions(), 0, 8, False, "no head"),
    ],
)
def test_choices_have_reasons(options, speakers, processes, is_shared, reason):  # type: ignore[no-untyped-def]
    choice = choose_sharding(options, speakers, processes)
    assert choice.value is is_shared and reason in choice.reason


def test_one_process_keeps_its_head_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loss = AMSoftmax(AMSoftmaxOptions(sharded="on"), 4, 6)
    caplog.set_level(logging.DEBUG)
    shard_head(loss.options, loss)
    assert not sharded_names(loss) and len(loss.weight) == 6
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "loss.sharded: on: no (one process keeps every speaker)" in caplog.text


def test_shares_of_no_head_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigError, match=r"loss\.sharded: on, but ge2e has no head"):
        load_config(["--loss.name", "ge2e", "--loss.sharded", "on"])
