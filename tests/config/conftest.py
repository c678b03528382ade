"""Shared by the tests of configurations: they write their files into the working directory."""

import pytest


@pytest.fixture(autouse=True)
def in_own_folder(in_tmp_path):
    pass
