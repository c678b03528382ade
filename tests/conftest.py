"""Shared by all tests: tiny synthetic speakers, optional real speech, single-threaded torch."""

import gc
import importlib.util
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

# The first example of a run pays for imports.
settings.register_profile("speakernet", deadline=None)
settings.load_profile("speakernet")

# More threads only slow the tests down: two cores, many small tensors. Set before torch is
# imported; processes started by tests inherit it and must give the same bits as this one.
os.environ["OMP_NUM_THREADS"] = "1"
# On a GPU, results are compared with each other and with the CPU's more closely than TensorFloat-32
# allows.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
# Otherwise every process started by a test compiles the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude the objects of imports and collection from garbage collection, which the trainer runs
    often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Tests over the table of networks need transformers for one of them."""
    for item in items:
        if "Pretrained" in item.name:
            item.add_marker(pytest.mark.needs("transformers", "peft"))


def pytest_runtest_setup(item):
    """Skip a test marked `needs` if one of the modules is not installed."""
    for marker in item.iter_markers("needs"):
        for module in marker.args:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed (pip install -e '.[test-all]')")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """A separate cache: names of temporary folders repeat, and lookup tables of an earlier run
    would be found.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKERNET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def freeze_objects():
    """Exclude the objects of earlier test files in the same way."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Release the memory of a slow test, which may hold large networks, before the next test."""
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow"):
            # Imported late: the process that distributes the tests does not need the package.
            from speakernet.machine.memory import release_freed_memory

            gc.collect()
            release_freed_memory()


@pytest.fixture(scope="module")
def blank_figures():
    """Save figures without drawing them, which takes most of a tiny run;
    `tests/evaluation/test_report.py` draws.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    from speakernet.evaluation import plots

    def save_blank(figure, path):
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (1, 1)).save(path, "png")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw_without_rendering", lambda figure: None)
        patch.setattr(plots, "figure_svg", lambda figure, name, description: "<svg></svg>")
        patch.setattr(plots, "save_figure", save_blank)
        yield


@pytest.fixture(scope="session")
def repository():
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real recorded speech beside the checkout."""
    if not (SHARED_DATA / "speechocean_mini" / "train_list.txt").is_file():
        pytest.skip("the real speech of ../shared/data is not on this machine")
    return SHARED_DATA


@pytest.fixture
def call(capsys):
    """Runs a command line in this process: exit status, standard output, standard error."""
    from speakernet.cli import main

    def run(line):
        capsys.readouterr()
        try:
            status = main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refuse(call):
    """The error message of a command line that must end with a status and without an answer."""

    def run(line, status=1):
        ended, out, err = call(line)
        assert (ended, out) == (status, "") and "Traceback" not in err, (line, err)
        return err

    return run


@pytest.fixture(scope="session")
def ffmpeg():
    """The user's ffmpeg, or the one of imageio-ffmpeg."""
    from speakernet.data.ffmpeg import FfmpegError, find_ffmpeg

    try:
        return find_ffmpeg()
    except FfmpegError as error:
        pytest.skip(str(error))


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Work in the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def random():
    """A generator with a fixed seed."""
    return np.random.default_rng(20260101)


def tiny_voice(speaker, utterance, seconds):
    """A crude voice: a pulse train at the speaker's pitch through the speaker's two resonances,
    plus faint noise.
    """
    random = np.random.default_rng([speaker, utterance])
    times = np.arange(int(seconds * 16000)) / 16000
    pitch_hz = (
        90 + 25 * speaker + 4 * np.sin(2 * np.pi * (1 + random.random()) * times + random.random())
    )
    phase = 2 * np.pi * np.cumsum(pitch_hz) / 16000
    voice = np.zeros_like(times)
    for harmonic in range(1, 20):
        frequency_hz = harmonic * (90 + 25 * speaker)
        gain = sum(
            1 / (1 + ((frequency_hz - centre) / 150) ** 2)
            for centre in (400 + 60 * speaker, 1500 + 90 * speaker)
        )
        voice += gain * np.sin(harmonic * phase + random.random() * 6)
    voice *= 0.5 + 0.5 * np.sin(2 * np.pi * 3 * times + random.random() * 6) ** 2
    voice += 0.01 * random.standard_normal(len(times))
    return (0.3 * voice / np.abs(voice).max()).astype(np.float32)


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory):
    """Eight training speakers with four utterances each, six trial speakers with three; lists
    beside the audio.
    """
    from speakernet.data.audio import write_audio

    root = tmp_path_factory.mktemp("tiny_corpus")
    train_lines = []
    names = {}
    for speaker in range(14):
        is_trial = speaker >= 8
        for utterance in range(3 if is_trial else 4):
            name = f"spk{speaker:02d}/utt{utterance}.wav"
            (root / name).parent.mkdir(exist_ok=True)
            write_audio(root / name, tiny_voice(speaker, utterance, 1.0 + 0.15 * utterance))
            if is_trial:
                names[name] = speaker
            else:
                train_lines.append(f"spk{speaker:02d} {name}\n")
    pairs = [(first, second) for first in names for second in names if first < second]
    trial_lines = [
        f"{int(names[first] == names[second])} {first} {second}\n" for first, second in pairs
    ]
    (root / "train_list.txt").write_text("".join(train_lines))
    (root / "trials.txt").write_text("".join(trial_lines))
    return root
