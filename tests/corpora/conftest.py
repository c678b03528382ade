"""Shared by the preparation tests: the loopback server, tiny m4a files."""

import sys
from pathlib import Path

import pytest

# --import-mode=importlib does not add the test folder to the path; the server is a module beside
# the tests.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def published(tmp_path_factory, ffmpeg):
    from preparation_corpora import publish

    return publish(tmp_path_factory.mktemp("published"), ffmpeg)
