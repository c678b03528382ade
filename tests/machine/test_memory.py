"""Limits of memory that torch keeps."""

import os

from speakernet.machine import memory, settings


def test_compiled_shapes_are_bounded(monkeypatch):
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        # Set first, so that it is removed after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with settings.many_shapes():
        assert [os.environ[name] for name in names] == [str(memory.KEPT_SHAPES)] * 2
    # A value of the user stays.
    monkeypatch.setenv(names[0], "7")
    memory.bound_compiled_shapes()
    assert os.environ[names[0]] == "7"
