"""What the preparation tests share: the server on the loopback, ffmpeg, tiny m4a files."""

import sys
from pathlib import Path

import pytest

# --import-mode=importlib puts no test folder on the path; the server is a plain module beside the tests.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def ffmpeg():
    """The user's ffmpeg, or the one of imageio-ffmpeg."""
    from speakernet.data.ffmpeg import FfmpegError, find_ffmpeg

    try:
        return find_ffmpeg()
    except FfmpegError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def published(tmp_path_factory, ffmpeg):
    from preparation_corpora import publish

    return publish(tmp_path_factory.mktemp("published"), ffmpeg)
