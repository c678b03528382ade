"""The training loader: workers, ranks, resuming, bad files, speeds; the same batches from RAM and
GPU memory.
"""

import contextlib
import functools
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.signal import resample_poly

from speakernet.assembly.data import build_training_loader, choose_placement
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config
from speakernet.config.schema import with_changes
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data import workers
from speakernet.data.audio import AudioError, audio_info, read_audio, write_audio
from speakernet.data.augment.augmenter import build_augmenter
from speakernet.data.augment.mixers import bytes_of_banks
from speakernet.data.batches import (
    BatchMaker,
    BatchRequest,
    ResidentMaker,
    change_speed,
    samples_to_read,
)
from speakernet.data.loader import _on_second_stream
from speakernet.data.packed import RamRows, load_into_ram
from speakernet.data.packing import pack
from speakernet.data.workers import Workers
from tests.data.loaders import is_cut_from

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def disturbances(tmp_path_factory):
    root = tmp_path_factory.mktemp("disturbances")
    random = np.random.default_rng(3)
    for kind in ("noise", "music", "speech"):
        for number in range(3):
            write_audio(root / f"musan/{kind}/x/{number}.wav", 0.1 * random.standard_normal(9000))
    for number in range(2):
        response = random.standard_normal(2000) * np.exp(-np.arange(2000) / 300)
        write_audio(root / "rirs" / f"{number}.wav", 0.2 * response)
    return root


def config_of(corpus, disturbances=None, **changes):
    """The tiny corpus in small batches; in `changes`, __ stands for the dot of an option's name."""
    sections = {
        "data": {
            "train_list": str(corpus / "train_list.txt"),
            "crop_frames": 50,
            "batch_size": 8,
            "num_workers": 0,
        },
        "loss": {"name": "softmax"},
        "augment": {"enabled": disturbances is not None},
        "runtime": {},
    }
    if disturbances:
        sections["augment"] |= {
            "noise_path": f"{disturbances}/musan",
            "rir_path": f"{disturbances}/rirs",
        }
    for key, value in changes.items():
        section, field = key.split("__")
        sections[section][field] = value
    return with_changes(Config(), **sections)


def loader(corpus, disturbances=None, **changes):
    config = config_of(corpus, disturbances, **changes)
    return build_training_loader(config, Inputs(config, CPU))


def epoch(made, number=0):
    made.set_epoch(number)
    return list(made)


def assert_same(first, second, atol=1e-6, rtol=0.0):
    assert len(first) == len(second) > 0
    for batch, other in zip(first, second, strict=True):
        torch.testing.assert_close(batch.waveforms, other.waveforms, atol=atol, rtol=rtol)
        assert torch.equal(batch.labels, other.labels) and torch.equal(batch.indices, other.indices)


def test_crops(tiny_corpus):
    made = loader(tiny_corpus)
    batches = epoch(made)
    assert len(made) == len(batches) == 4 and made.num_classes == 8
    for batch in batches:
        assert (
            batch.waveforms.shape == (8, 50 * 160 + 240) and batch.waveforms.dtype == torch.float32
        )
        for waveform, label, name in zip(
            batch.waveforms, batch.labels, made.file_names(batch.indices), strict=True
        ):
            assert name.startswith(f"spk{int(label):02d}/")
            assert is_cut_from(read_audio(tiny_corpus / name), waveform.numpy())


@pytest.mark.parametrize("augmented", [False, True])
def test_workers(tiny_corpus, disturbances, augmented):
    noise = disturbances if augmented else None
    coded = {"augment__codec_probability": 0.5, "augment__codecs": ["mu-law", "gsm", "vorbis"]}
    alone = loader(tiny_corpus, noise, **coded)
    helped = loader(tiny_corpus, noise, data__num_workers=2, data__prefetch_factor=1, **coded)
    for number in (0, 1):
        assert_same(epoch(alone, number), epoch(helped, number))
    # After an abandoned epoch, the workers' unfinished batches must not appear in the next.
    helped.set_epoch(2)
    next(iter(helped))
    assert_same(epoch(alone, 3), epoch(helped, 3))
    helped.close()


@pytest.fixture(scope="module")
def packed(tiny_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "corpus"
    pack(FolderInput(tiny_corpus), folder)
    return str(folder)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_packed_corpus(tiny_corpus, packed, num_workers):
    # Some utterances are shorter than a crop and are repeated.
    options = {
        "data__crop_frames": 120,
        "data__num_workers": num_workers,
        "data__device_resident": "off",
    }
    files = loader(tiny_corpus, **options)
    made = loader(tiny_corpus, data__train_path=packed, **options)
    assert_same(epoch(files, 1), epoch(made, 1), atol=0.0)
    files.close()
    made.close()


def test_noise_and_rirs_take_precedence(tiny_corpus, disturbances, monkeypatch):
    """If memory is one byte short for all three, the corpus is not moved to the device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    config = config_of(tiny_corpus, disturbances, data__ram_corpus="on")
    inputs = Inputs(config, torch.device("cuda"))
    given = inputs.training
    reader = load_into_ram(given.source, given.rows.paths, given.table)
    augmenter = build_augmenter(
        config.augment,
        config.data,
        config.runtime.seed,
        reader,
        given.table,
        np.arange(len(given.rows)),
    )
    both = bytes_of_banks(augmenter.banks, augmenter.rirs, reader) + 2 * int(
        given.table.num_samples.sum()
    )
    for allowed, is_there in ((both, True), (both - 1, False)):
        asked = with_changes(config, data={"device_gigabytes": allowed / (1 << 30)})
        found = choose_placement(asked, reader, inputs, augmenter)
        assert (found.banks, found.corpus) == (True, is_there)
    asked = with_changes(config, augment={"codec_probability": 0.5, "codecs": ["gsm"]})
    found = choose_placement(asked, reader, inputs, augmenter)
    assert (found.banks, found.corpus) == (False, False)
    # Memory reserved for training is not used.
    for reserved, is_there in ((0, True), (1 << 30, False)):
        assert choose_placement(config, reader, inputs, None, reserved).corpus is is_there


@pytest.mark.slow
def test_spawned_workers(tiny_corpus, disturbances, monkeypatch):
    monkeypatch.setattr(workers, "START_METHOD", "spawn")
    made = loader(tiny_corpus, disturbances, data__num_workers=1, data__on_bad_audio="skip")
    assert_same(epoch(loader(tiny_corpus, disturbances)), epoch(made))
    made.close()


def test_position_in_the_epoch(tiny_corpus, disturbances):
    straight = epoch(loader(tiny_corpus, disturbances), 1)
    stopped = loader(tiny_corpus, disturbances)
    stopped.set_epoch(1)
    batches = iter(stopped)
    first = [next(batches), next(batches)]
    resumed = loader(tiny_corpus, disturbances)
    resumed.load_state_dict(stopped.state_dict())
    assert_same(straight, first + list(resumed))
    with pytest.raises(ValueError, match=r"2 of 4 batches were done.*the batch size"):
        loader(tiny_corpus, disturbances, data__batch_size=4).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize("is_augmented", [False, True])
@pytest.mark.parametrize("factors", [[1.0], [0.9, 1.0, 1.1], [0.9]])
def test_ram_and_resident_corpora(tiny_corpus, disturbances, factors, is_augmented):
    noise = disturbances if is_augmented else None
    options = {"augment__speed_factors": factors, "augment__telephone_probability": 0.3}
    files = loader(tiny_corpus, noise, **options)
    options["data__ram_corpus"] = "on"
    ram = loader(tiny_corpus, noise, **options, data__device_resident="off")
    resident = loader(tiny_corpus, noise, **options, data__device_resident="on")
    assert isinstance(resident.maker, ResidentMaker)
    for number in (0, 1):
        assert_same(epoch(files, number), epoch(ram, number))
        assert_same(epoch(ram, number), epoch(resident, number), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_speeds_after_the_transfer(tiny_corpus, num_workers):
    """As on a GPU without memory for the corpus: crops are transferred as int16, at the length
    their speed needs.
    """
    options = {
        "augment__enabled": True,
        "augment__speed_factors": [0.9, 1.0, 1.1],
        "augment__volume_db": [-1.0, 1.0],
    }
    here = loader(tiny_corpus, **options)
    there = loader(tiny_corpus, **options)
    there.augmenter = there.maker.augmenter
    raw = BatchMaker(
        there.maker.reader,
        there.maker.lengths,
        seed=there.maker.seed,
        speeds=there.maker.speeds,
        dtype=np.int16,
        changes_speed=False,
    )
    there.options = there.options.model_copy(
        update={"num_workers": num_workers, "prefetch_factor": 1}
    )
    there.maker = Workers(raw, there.options) if num_workers else raw
    labels = []
    speakers = []
    for batch, other in zip(epoch(here), epoch(there), strict=True):
        torch.testing.assert_close(batch.waveforms, other.waveforms, atol=1e-5, rtol=1e-4)
        assert torch.equal(batch.labels, other.labels)
        labels += batch.labels.tolist()
        speakers += [int(name[3:5]) for name in here.file_names(batch.indices)]
    # A speaker at a different speed is a different class.
    assert (
        here.num_classes == 24 and max(labels) >= 16 and [label % 8 for label in labels] == speakers
    )
    there.close()


@pytest.mark.parametrize(
    "factor", [Fraction(9, 10), Fraction(11, 10), Fraction(1, 2), Fraction(2), Fraction(19, 20)]
)
def test_speeds(factor, random):
    num_samples = 3001
    crops = random.standard_normal((3, samples_to_read(factor, num_samples))).astype(np.float32)
    expected = resample_poly(
        crops.astype(np.float64), factor.denominator, factor.numerator, axis=1
    )[:, :num_samples]
    made = change_speed(torch.from_numpy(crops), factor, num_samples)
    assert made.shape == (3, num_samples)
    np.testing.assert_allclose(made.numpy(), expected, atol=2e-6, rtol=1e-5)


def test_slot_reuse_waits_for_its_copy(tiny_corpus, monkeypatch):
    """A GPU copies from the ring while the host continues; one of two spare slots may still be in
    use.
    """
    made = loader(tiny_corpus)
    done = []
    before = []

    def moved(crops):
        made._copy_events.append(
            SimpleNamespace(synchronize=functools.partial(done.append, len(before) - 1))
        )
        return crops

    def run(requests):
        for made_batch in make(requests):
            before.append(list(done))
            yield made_batch

    make = made.maker.run
    monkeypatch.setattr(made, "_to_device", moved)
    monkeypatch.setattr(made.maker, "run", run)
    epoch(made)
    assert before == [[], [], [0], [0, 1]]
    epoch(made, 1)
    assert before[4] == [0, 1, 2, 3]


@pytest.fixture
def root(tiny_corpus, tmp_path):
    return Path(shutil.copytree(tiny_corpus, tmp_path / "copy"))


def spoil(root):
    for number in range(2):
        (root / f"spk{number:02d}" / "utt1.wav").write_bytes(b"no longer audio")


def test_warnings_at_the_start(root, tmp_path, caplog):
    with pytest.raises(ValueError, match="8 speakers"):
        loader(root, data__num_classes=5)
    loader(root, data__num_classes=9)
    assert "some outputs never train" in caplog.text
    with pytest.raises(ValueError, match="min_seconds"):
        loader(root, data__min_seconds=100.0)
    with pytest.raises(ValueError, match="training runs on cpu"):
        loader(root, tmp_path, augment__device="cuda", augment__noise_path="", augment__rir_path="",
               augment__volume_db=[-1.0, 1.0])  # fmt: skip
    (root / "spk00" / "utt0.wav").unlink()
    with pytest.raises(AudioError, match=r"1 of 32 training files cannot be read.*spk00/utt0\.wav"):
        loader(root)
    made = loader(root, data__on_bad_audio="skip", data__max_bad_share=0.1)
    assert made.plan.num_left_out + len(made.plan.rows) == 31


@pytest.fixture
def trusted_lookup(monkeypatch):
    """Files damaged after their headers were read: later loaders use the stored headers."""
    monkeypatch.setattr("speakernet.data.lookup.audio_info", functools.cache(audio_info))


@pytest.mark.usefixtures("trusted_lookup")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_files(root, num_workers):
    """Fewer than are reported at once; like training, the test reads exactly one epoch."""
    strict, lenient, failing = (
        loader(
            root, data__num_workers=num_workers, data__on_bad_audio=kind, data__max_bad_share=share
        )
        for kind, share in (("skip", 0.05), ("skip", 0.1), ("error", 0.1))
    )
    spoil(root)
    with pytest.raises(AudioError, match=r"spk0[01]/utt1\.wav"):
        epoch(failing)
    batches = iter(lenient)
    rows = torch.cat([next(batches).indices for _ in range(len(lenient))])
    names = lenient.file_names(rows)
    assert not {"spk00/utt1.wav", "spk01/utt1.wav"} & set(names)
    assert (
        sum(name.startswith("spk00/") for name in names) == 4
        and lenient.epoch_report()["bad_utterances"] == 2
    )
    batches = iter(strict)
    with pytest.raises(
        AudioError, match=r"2 of 32 utterances could not be read.*max_bad_share \(0.05\)"
    ):
        for _ in range(len(strict)):
            next(batches)
    strict.close()
    # Resuming does not get around the limit.
    resumed = loader(
        root, data__num_workers=num_workers, data__on_bad_audio="skip", data__max_bad_share=0.05
    )
    resumed.load_state_dict(strict.state_dict())
    with pytest.raises(AudioError, match="2 of 32 utterances"):
        list(resumed)
    for used in (failing, lenient, resumed):
        used.close()


@pytest.mark.usefixtures("trusted_lookup")
def test_bad_files_of_a_resident_corpus(root):
    """Files damaged between the reading of headers and of samples are replaced, as in the RAM
    corpus.
    """
    made = []
    loader(root)  # reads the headers
    spoil(root)
    for resident in ("off", "on"):
        options = {"data__ram_corpus": "on", "data__device_resident": resident}
        with pytest.raises(AudioError, match=r"utt1\.wav.*on_bad_audio: skip replaces"):
            epoch(loader(root, **options))
        options |= {"data__on_bad_audio": "skip"}
        with pytest.raises(AudioError, match="max_bad_share"):
            epoch(loader(root, **options, data__max_bad_share=0.05))
        made.append(loader(root, **options, data__max_bad_share=0.1))
    assert isinstance(made[1].maker, ResidentMaker)
    assert_same(*(epoch(loader_of) for loader_of in made))
    assert [loader_of.epoch_report()["bad_utterances"] for loader_of in made] == [2, 2]


def test_resident_row_shorter_than_its_header():
    """A truncated FLAC file: the header declared five times as many samples as were decoded."""
    held = torch.arange(1, 10001, dtype=torch.int16)
    reader = RamRows(held, np.array([0, 5000]), np.array([1000, 4000]), {})
    promised = np.array([5000, 5000])
    request = BatchRequest(0, np.arange(64) % 2, np.zeros(64, np.int64), 600)
    expected = np.empty((64, 600), np.float32)
    BatchMaker(reader, promised, seed=1).make(request, expected)
    crops, _ = ResidentMaker(reader, promised, seed=1, device=CPU).make(request)
    np.testing.assert_array_equal(crops.numpy(), expected)
    assert (crops != 0).all()


class FakeStream:
    """A fake GPU stream that records who waits for what."""

    def __init__(self, device=None):
        self.waited = []

    def record_event(self):
        return "ready"

    def wait_event(self, event):
        self.waited.append(event)


def test_batch_is_yielded_before_the_next_wait(monkeypatch):
    training = FakeStream()
    made = []
    kept = []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)

    def batches():
        for number in range(3):
            made.append(number)
            tensor = SimpleNamespace(record_stream=kept.append)
            yield SimpleNamespace(waveforms=tensor, labels=tensor, number=number), None

    for batch, _ in _on_second_stream(batches(), torch.device("cuda")):
        assert made == list(range(batch.number + 1))
        assert len(training.waited) == batch.number + 1 and kept == [training] * 2 * (
            batch.number + 1
        )
    assert len(made) == 3
