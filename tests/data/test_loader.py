"""The training loader: workers, ranks, resuming, bad files, speeds; RAM and resident corpora give the same batches."""

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config
from speakernet.config.schema import replaced
from speakernet.data.audio import AudioError, audio_info, read_audio, write_audio
from speakernet.data.batches import Batch, BatchMaker, BatchRequest, ResidentMaker
from speakernet.data.loader import TrainingLoader
from speakernet.data.packed import RamRows
from speakernet.data.workers import Workers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def disturbances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two noises of each kind and two room responses."""
    root = tmp_path_factory.mktemp("disturbances")
    random = np.random.default_rng(3)
    for kind in ("noise", "music", "speech"):
        for number in range(3):
            (root / "musan" / kind / "x").mkdir(parents=True, exist_ok=True)
            write_audio(root / "musan" / kind / "x" / f"{number}.wav", 0.1 * random.standard_normal(9000))
    (root / "rirs").mkdir()
    for number in range(2):
        write_audio(
            root / "rirs" / f"{number}.wav", 0.2 * random.standard_normal(2000) * np.exp(-np.arange(2000) / 300)
        )
    return root


def config_of(corpus: Path, disturbances: Path | None = None, **changes: object) -> Config:
    """The tiny corpus in small batches; `changes` are dotted keys with __ for the dot."""
    sections: dict[str, dict[str, object]] = {
        "data": {"train_list": str(corpus / "train_list.txt"), "crop_frames": 50, "batch_size": 8, "num_workers": 0},
        "loss": {"name": "softmax"},
        "augment": {"enabled": disturbances is not None},
        "runtime": {},
    }
    if disturbances:
        sections["augment"] |= {"noise_path": f"{disturbances}/musan", "rir_path": f"{disturbances}/rirs"}
    for key, value in changes.items():
        section, field = key.split("__")
        sections[section][field] = value
    return replaced(Config(), **sections)


def loader(
    corpus: Path, disturbances: Path | None = None, start_method: str | None = None, **changes: object
) -> TrainingLoader:
    """A loader over the tiny corpus."""
    config = config_of(corpus, disturbances, **changes)
    return build_training_loader(config, Inputs(config, CPU), start_method)


def epoch(made: TrainingLoader, number: int = 0) -> list[Batch]:
    made.set_epoch(number)
    return list(made)


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.waveforms, other.waveforms, atol=1e-6, rtol=0)
        assert torch.equal(one.labels, other.labels) and torch.equal(one.indices, other.indices)


def test_batches_hold_crops_of_their_files(tiny_corpus: Path) -> None:
    made = loader(tiny_corpus)
    batches = epoch(made)
    assert len(made) == len(batches) == 4 and made.num_classes == 8
    for batch in batches:
        assert batch.waveforms.shape == (8, 50 * 160 + 240) and batch.waveforms.dtype == torch.float32
        for waveform, label, name in zip(batch.waveforms, batch.labels, made.file_names(batch.indices), strict=True):
            assert name.startswith(f"spk{int(label):02d}/")
            whole = read_audio(tiny_corpus / name)
            place = np.flatnonzero(np.isclose(whole[: len(whole) - 8239], float(waveform[0]), atol=1e-7))
            assert any(np.allclose(whole[p : p + 8240], waveform.numpy(), atol=1e-6) for p in place)


@pytest.mark.parametrize("augmented", [False, True])
def test_workers_give_the_same_batches(tiny_corpus: Path, disturbances: Path, augmented: bool) -> None:
    noise = disturbances if augmented else None
    alone = loader(tiny_corpus, noise)
    helped = loader(tiny_corpus, noise, data__num_workers=2, data__prefetch_factor=1)
    for number in (0, 1):
        assert_same(epoch(alone, number), epoch(helped, number))
    # Left in the middle, the workers' half-made batches must not turn up in the next epoch.
    helped.set_epoch(2)
    next(iter(helped))
    assert_same(epoch(alone, 3), epoch(helped, 3))
    helped.close()


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(tiny_corpus: Path, disturbances: Path) -> None:
    made = loader(tiny_corpus, disturbances, "spawn", data__num_workers=1, data__on_bad_audio="skip")
    assert_same(epoch(loader(tiny_corpus, disturbances)), epoch(made))
    made.close()


def test_position_in_the_epoch_is_state(tiny_corpus: Path, disturbances: Path) -> None:
    straight = epoch(loader(tiny_corpus, disturbances), 1)
    stopped = loader(tiny_corpus, disturbances)
    stopped.set_epoch(1)
    batches = iter(stopped)
    first = [next(batches), next(batches)]
    resumed = loader(tiny_corpus, disturbances)
    resumed.load_state_dict(stopped.state_dict())
    assert_same(straight, first + list(resumed))


def test_a_position_among_other_batches_is_refused(tiny_corpus: Path, disturbances: Path) -> None:
    stopped = loader(tiny_corpus, disturbances)
    next(iter(stopped))
    with pytest.raises(ValueError, match=r"1 of 4 batches were done.*the batch size"):
        loader(tiny_corpus, disturbances, data__batch_size=4).load_state_dict(stopped.state_dict())


def test_memory_and_resident_corpora_give_the_same_batches(tiny_corpus: Path, disturbances: Path) -> None:
    for noise in (None, disturbances):
        plain = epoch(loader(tiny_corpus, noise))
        assert_same(plain, epoch(loader(tiny_corpus, noise, data__ram_corpus="on")))
        resident = loader(tiny_corpus, noise, data__ram_corpus="on", data__device_resident="on")
        assert isinstance(resident.maker, ResidentMaker)
        assert_same(plain, epoch(resident))
    with pytest.raises(ValueError, match="neither packed"):
        loader(tiny_corpus, data__device_resident="on")


@pytest.mark.parametrize("factors", [[0.9, 1.0, 1.1], [0.9]])
def test_a_resident_corpus_changes_speed_as_the_host_does(
    tiny_corpus: Path, disturbances: Path, factors: list[float]
) -> None:
    """Disturbances of resident banks included."""
    options = {"data__ram_corpus": "on", "augment__speed_factors": factors, "augment__telephone_probability": 0.3}
    host, resident = (loader(tiny_corpus, disturbances, **options, data__device_resident=one) for one in ("off", "on"))
    assert isinstance(resident.maker, ResidentMaker) and resident.augmenter.resident is not None
    for number in (0, 1):
        for one, other in zip(epoch(host, number), epoch(resident, number), strict=True):
            torch.testing.assert_close(one.waveforms, other.waveforms, atol=1e-5, rtol=1e-4)
            assert torch.equal(one.labels, other.labels) and torch.equal(one.indices, other.indices)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_speeds_changed_after_the_transfer_are_the_same(tiny_corpus: Path, num_workers: int) -> None:
    """As on a GPU without room for the corpus: crops travel as int16, as long as their speed needs them."""
    options = {"augment__enabled": True, "augment__speed_factors": [0.9, 1.0, 1.1], "augment__volume_db": [-1.0, 1.0]}
    here, there = loader(tiny_corpus, **options), loader(tiny_corpus, **options)
    there.augmenter = there.maker.augmenter
    raw = BatchMaker(there.maker.reader, there.maker.lengths, seed=there.maker.seed, speeds=there.maker.speeds,
                     dtype=np.int16, changes_speed=False)  # fmt: skip
    there.options = there.options.model_copy(update={"num_workers": num_workers, "prefetch_factor": 1})
    there.maker = Workers(raw, there.options) if num_workers else raw
    labels, speakers = [], []
    for one, other in zip(epoch(here), epoch(there), strict=True):
        torch.testing.assert_close(one.waveforms, other.waveforms, atol=1e-5, rtol=1e-4)
        assert torch.equal(one.labels, other.labels)
        labels += one.labels.tolist()
        speakers += [int(name[3:5]) for name in here.file_names(one.indices)]
    # A speaker at another speed is another class.
    assert here.num_classes == 24 and max(labels) >= 16 and [label % 8 for label in labels] == speakers
    there.close()


def test_augmentation_on_the_cpu_and_a_corpus_on_the_gpu_exclude_each_other(
    tiny_corpus: Path, disturbances: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The decision comes before anything is moved: no GPU is needed to see it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 34, 1 << 34))
    options = {"data__ram_corpus": "on", "data__pin_memory": False, "augment__device": "cpu"}
    gpu = torch.device("cuda")
    config = config_of(tiny_corpus, disturbances, **options)
    made = build_training_loader(config, Inputs(config, gpu))
    assert isinstance(made.maker, BatchMaker) and made.maker.augmenter
    assert "corpus on the device: no (its crops would be augmented" in caplog.text
    resident = config_of(tiny_corpus, disturbances, **options, data__device_resident="on")
    with pytest.raises(ValueError, match=r"data.device_resident: on, but its crops"):
        build_training_loader(resident, Inputs(resident, gpu))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_report_counts_cache_hits_of_the_epoch(tiny_corpus: Path, tmp_path: Path, num_workers: int) -> None:
    for path in sorted(tiny_corpus.rglob("*.wav")):
        target = tmp_path / "flac" / path.relative_to(tiny_corpus).with_suffix(".flac")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_audio(target, read_audio(path))
    listed = (tiny_corpus / "train_list.txt").read_text(encoding="utf-8").replace(".wav", ".flac")
    (tmp_path / "flac" / "train_list.txt").write_text(listed, encoding="utf-8")
    made = loader(tmp_path / "flac", data__ram_corpus="off", data__cache_megabytes=64, data__num_workers=num_workers)
    for number, (hits, misses) in enumerate([(0, 32), (32, 0), (32, 0)]):
        epoch(made, number)
        report = made.epoch_report()
        assert (report.get("cache_hits", 0), report.get("cache_misses", 0)) == (hits, misses)
    made.close()


def test_a_place_is_written_anew_only_when_its_copy_is_done(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies from the ring while the host goes on; of two spare places one may still be copied."""
    made, done, before = loader(tiny_corpus), [], []

    def moved(crops: torch.Tensor) -> torch.Tensor:
        made._copies.append(SimpleNamespace(synchronize=functools.partial(done.append, len(before) - 1)))
        return crops

    def run(requests: list[BatchRequest]):
        for one in make(requests):
            before.append(list(done))
            yield one

    make = made.maker.run
    monkeypatch.setattr(made, "_to_device", moved)
    monkeypatch.setattr(made.maker, "run", run)
    epoch(made)
    assert before == [[], [], [0], [0, 1]]
    epoch(made, 1)
    assert before[4] == [0, 1, 2, 3]


def broken_corpus(tiny_corpus: Path, folder: Path) -> Path:
    """A copy of the tiny corpus to be damaged."""
    root = folder / "broken"
    shutil.copytree(tiny_corpus, root)
    return root


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_files_are_errors_or_replaced(tiny_corpus: Path, tmp_path: Path, num_workers: int) -> None:
    root = broken_corpus(tiny_corpus, tmp_path)
    made = loader(root, data__num_workers=num_workers)
    skipping = loader(root, data__num_workers=num_workers, data__on_bad_audio="skip", data__max_bad_share=0.1)
    (root / "spk03" / "utt1.wav").write_bytes(b"no longer audio")
    with pytest.raises(AudioError, match=r"spk03/utt1\.wav"):
        epoch(made)
    batches = epoch(skipping)
    names = skipping.file_names(torch.cat([batch.indices for batch in batches]))
    assert "spk03/utt1.wav" not in names and sum(name.startswith("spk03/") for name in names) == 4
    assert skipping.epoch_report()["bad_utterances"] >= 1
    made.close()
    skipping.close()


def test_what_is_wrong_at_the_start_is_said(
    tiny_corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = broken_corpus(tiny_corpus, tmp_path)
    with pytest.raises(ValueError, match="8 speakers"):
        loader(root, data__num_classes=5)
    loader(root, data__num_classes=9)
    assert "some outputs will never train" in caplog.text
    with pytest.raises(ValueError, match="no utterance is left"):
        loader(root, data__min_seconds=100.0)
    with pytest.raises(ValueError, match="training runs on cpu"):
        loader(root, tmp_path, augment__device="cuda", augment__noise_path="", augment__rir_path="",
               augment__volume_db=[-1.0, 1.0])  # fmt: skip
    # Another folder: a table that was kept is trusted until a file is opened.
    root = broken_corpus(tiny_corpus, tmp_path / "second")
    (root / "spk00" / "utt0.wav").unlink()
    with pytest.raises(AudioError, match=r"1 of 32 training files cannot be read.*spk00/utt0\.wav"):
        loader(root)
    made = loader(root, data__on_bad_audio="skip", data__max_bad_share=0.1)
    assert made.plan.num_left_out + len(made.plan.rows) == 31


@pytest.fixture
def trusted_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files rot after their headers were read: a loader that is made later finds the headers as they were."""
    monkeypatch.setattr("speakernet.data.lookup.audio_info", functools.cache(audio_info))


def rotten_corpus(tiny_corpus: Path, folder: Path, num_bad: int) -> tuple[Path, Callable[[], None]]:
    """A copy of the tiny corpus, and what spoils its first files once their headers were read."""
    root = broken_corpus(tiny_corpus, folder)

    def rot() -> None:
        for number in range(num_bad):
            (root / f"spk{number:02d}" / "utt1.wav").write_bytes(b"no longer audio")

    return root, rot


@pytest.mark.usefixtures("trusted_lookup")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_few_bad_files_over_the_limit_end_the_epoch(tiny_corpus: Path, tmp_path: Path, num_workers: int) -> None:
    """Fewer than are said at once, and a reader that asks for no more batches than there are, as training does."""
    root, rot = rotten_corpus(tiny_corpus, tmp_path, 2)
    options = {"data__num_workers": num_workers, "data__on_bad_audio": "skip"}
    strict, lenient = (
        loader(root, **options, data__max_bad_share=0.05),
        loader(root, **options, data__max_bad_share=0.1),
    )
    rot()
    batches = iter(lenient)
    assert len([next(batches) for _ in range(len(lenient))]) == 4
    batches = iter(strict)
    with pytest.raises(AudioError, match=r"2 of 32 utterances could not be read.*max_bad_share \(0.05\)"):
        for _ in range(len(strict)):
            next(batches)
    strict.close()
    # The same command again is no way around it.
    resumed = loader(root, **{**options, "data__max_bad_share": 0.05})
    resumed.load_state_dict(strict.state_dict())
    batches = iter(resumed)
    with pytest.raises(AudioError, match="2 of 32 utterances"):
        for _ in range(len(resumed) - strict.state_dict()["batch"]):
            next(batches)
    for one in (lenient, resumed):
        one.close()


@pytest.mark.usefixtures("trusted_lookup")
def test_a_resident_corpus_replaces_what_cannot_be_read(tiny_corpus: Path, tmp_path: Path) -> None:
    """Files that rot between the reading of headers and of samples, as in the corpus in memory on the host."""
    made = []
    for number, resident in enumerate(("off", "on")):
        root, rot = rotten_corpus(tiny_corpus, tmp_path / str(number), 2)
        options = {"data__ram_corpus": "on", "data__device_resident": resident}
        kept = loader(root)  # its lookup table is what the next loaders trust
        rot()
        assert len(kept) == 4
        with pytest.raises(AudioError, match=r"utt1\.wav.*on_bad_audio: skip replaces"):
            epoch(loader(root, **options))
        strict = loader(root, **options, data__on_bad_audio="skip", data__max_bad_share=0.05)
        with pytest.raises(AudioError, match="max_bad_share"):
            epoch(strict)
        made.append(loader(root, **options, data__on_bad_audio="skip", data__max_bad_share=0.1))
    assert isinstance(made[1].maker, ResidentMaker)
    assert_same(*(epoch(one) for one in made))
    assert [one.epoch_report()["bad_utterances"] for one in made] == [2, 2]


def test_a_resident_row_shorter_than_its_header_is_cut_as_from_memory() -> None:
    """A FLAC file that ends early: the header promised five times as many samples as were decoded."""
    random = np.random.default_rng(0)
    held = torch.from_numpy(random.integers(1, 1000, 10000).astype(np.int16))
    starts, lengths, promised = np.array([0, 5000]), np.array([1000, 4000]), np.array([5000, 5000])
    reader = RamRows(held, starts, lengths, {})
    request = BatchRequest(0, np.array([0, 1] * 8), np.zeros(16, np.int64), 600)
    for at in range(4):
        request.epoch = at
        expected = np.empty((16, 600), np.float32)
        BatchMaker(reader, promised, seed=1).make(request, expected)
        crops, _ = ResidentMaker(reader, promised, seed=1, device=CPU).make(request)
        np.testing.assert_array_equal(crops.numpy(), expected)
        assert (crops != 0).all()
