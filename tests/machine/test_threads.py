"""Work in lanes: in order, bounded, with the threads shared out and given back, and errors in their turn."""

import threading
import time

import pytest
import torch

from speakernet.machine.threads import in_lanes, lanes_of


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_order_bounds_and_threads():
    taken, open_lanes, most = [], 0, 0
    lock = threading.Lock()

    def items():
        for number in range(12):
            taken.append(number)
            yield number

    def work(number):
        nonlocal open_lanes, most
        with lock:
            open_lanes += 1
            most = max(most, open_lanes)
        time.sleep(0.002 * (number % 3))
        with lock:
            open_lanes -= 1
        return number, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    found = []
    for one in in_lanes(work, items(), 2):
        found.append(one)
        assert len(taken) <= len(found) + 3
    assert [one[0] for one in found] == list(range(12)) and most == 2
    assert {one[1:] for one in found} == {(2, False)} and torch.get_num_threads() == 4


def test_an_error_comes_in_its_turn():
    done = []

    def work(number):
        if number == 3:
            raise ValueError("the fourth is bad")
        done.append(number)

    with pytest.raises(ValueError, match="the fourth"):
        list(in_lanes(work, iter(range(1000)), 2))
    assert len(done) < 10 and torch.get_num_threads() == 4


def test_one_lane_is_the_callers_thread():
    here = threading.get_ident()
    assert set(in_lanes(lambda _: (threading.get_ident(), torch.get_num_threads()), range(3), 1)) == {(here, 4)}


def test_number_of_lanes():
    assert lanes_of("cpu") == 4 and lanes_of("cuda:1") == 1
    torch.set_num_threads(64)
    assert lanes_of(torch.device("cpu")) == 8
