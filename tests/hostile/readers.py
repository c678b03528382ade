"""Every reader of the package with a small real file of its kind: what the mutations of `fuzz.py` begin with.

A reader answers with what it read, in a form that can be compared, or None where any value is a right answer: a changed
word of a list is another word. Files with checksums have one right answer.
"""

import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from speakernet.arrays import read_arrays
from speakernet.checkpoint import read_own_checkpoint, write_checkpoint
from speakernet.config import load_config
from speakernet.config.loading import save_config
from speakernet.corpora.archives import extract
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.utterances import read_table
from speakernet.data.audio import audio_info, read_audio, write_audio
from speakernet.data.lists import read_training_list, read_trials
from speakernet.data.opening import open_source
from speakernet.data.packed.writer import pack
from speakernet.evaluation.report.data import read_run
from speakernet.evaluation.score_files import read_scores
from speakernet.evaluation.slices import read_metadata
from speakernet.evaluation.speakers import read_speaker_table
from speakernet.files import sha256_of
from speakernet.models.model_file import load_initial_weights, load_model_file, model_file_contents
from speakernet.models.speaker_net import SpeakerNet


@dataclass(frozen=True)
class Reader:
    """A kind of file.

    Attributes:
        make: writes a small one into a folder and gives its path.
        read: reads it; raises ValueError where it cannot be used.
        has_checksum: whether what is read has to be what was written.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    has_checksum: bool = False


def voice(seconds: float = 0.4, rate: int = 16000) -> np.ndarray:
    """A tone with noise."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(len(times))
    return (0.3 * np.sin(2 * np.pi * 220 * times) + 0.02 * noise).astype(np.float32)


def audio(name: str, rate: int = 16000, **options: Any) -> Reader:
    """Recordings of one format."""

    def make(folder: Path) -> Path:
        soundfile.write(folder / name, voice(rate=rate), rate, **options)
        return folder / name

    def read(path: Path) -> None:
        audio_info(path)
        assert read_audio(path).dtype == np.float32
        read_audio(path, 100, 200)

    return Reader(make, read)


def text(name: str, content: str, read: Callable[[Path], Any]) -> Reader:
    """Files of lines."""

    def make(folder: Path) -> Path:
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return Reader(make, read)


def network() -> SpeakerNet:
    """The smallest that there is."""
    torch.manual_seed(0)
    return SpeakerNet.named("ResNet", "TSTP", 8, {"channels": 8, "blocks": [1, 1]}, front_end_options={"num_mels": 16})


def model(*, compress: bool, as_training: bool = False) -> Reader:
    """Model files, to be scored with or to begin with."""

    def make(folder: Path) -> Path:
        fit = {"inputs": ["score"], "weights": [2.0], "offset": 0.5, "prior": 0.01, "backend": {"score": "cosine"}}
        summary = {"epoch": 3, "step": 9, "best_eer_percent": 5.0}
        contents = model_file_contents(
            network(),
            loss_normalizes=True,
            embedding_mean=torch.ones(8),
            calibration={"fits": [fit]},
            training_summary=summary,
        )
        write_checkpoint(folder / "best.pt", contents, compress=compress)
        return folder / "best.pt"

    def read(path: Path) -> Any:
        if as_training:
            net = network()
            load_initial_weights(net, None, path)
            return sums(net.state_dict())
        loaded = load_model_file(path)
        return sums(loaded.net.state_dict()), repr(loaded.contents["calibration"])

    return Reader(make, read, has_checksum=True)


def sums(state: dict[str, torch.Tensor]) -> list[tuple[str, float]]:
    """What tells two sets of weights apart."""
    return [(name, float(value.double().sum())) for name, value in state.items()]


def last_checkpoint(folder: Path) -> Path:
    """What training goes on from, in small."""
    write_checkpoint(folder / "last.pt", {"weights": {"a": torch.arange(100.0)}, "training": {"state": {"epoch": 1}}})
    return folder / "last.pt"


def corpus(folder: Path) -> Path:
    """A packed corpus of two utterances."""
    for name in ("a", "b"):
        write_audio(folder / "audio" / f"{name}.wav", voice())
    pack(FolderInput(folder / "audio"), folder / "corpus")
    return folder / "corpus"


def part_of_corpus(name: str, *, recomputed: bool = False) -> Reader:
    """One file of a packed corpus, with the checksum of the index made anew or not."""

    def read(path: Path) -> None:
        if recomputed:
            description = json.loads((path.parent / "corpus.json").read_text())
            description["index_sha256"] = sha256_of(path)
            (path.parent / "corpus.json").write_text(json.dumps(description))
        source = open_source(path.parent)
        for one in ("a.wav", "b.wav"):
            source.read(one)

    return Reader(lambda folder: corpus(folder) / name, read)


def archive(name: str) -> Reader:
    """Zip and tar files of a few recordings."""

    def make(folder: Path) -> Path:
        members = {f"wav/{one}.wav": bytes([one]) * 700 for one in range(4)}
        if name.endswith(".zip"):
            with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as packed:
                for member, content in members.items():
                    packed.writestr(member, content)
        else:
            for member, content in members.items():
                (folder / member).parent.mkdir(exist_ok=True)
                (folder / member).write_bytes(content)
            with tarfile.open(folder / name, "w:gz") as tar:
                tar.add(folder / "wav", "wav")
        return folder / name

    def read(path: Path) -> None:
        out = path.parent / "out"
        with StepSummary("extract", out) as summary:
            extract(path, out, summary)
        shutil.rmtree(out)

    return Reader(make, read)


def configuration(folder: Path) -> Path:
    """A whole saved configuration."""
    save_config(load_config([]).config, folder / "my.yaml")
    return folder / "my.yaml"


def arrays(folder: Path) -> Path:
    """Kept arrays."""
    np.savez_compressed(folder / "kept.npz", labels=np.arange(200) % 2, names=np.array(["a", "bc"]))
    return folder / "kept.npz"


RESULTS = {
    "num_trials": 2,
    "eer_percent": 5.0,
    "eer_interval_percent": [4.0, 6.0],
    "min_dcf": {"0.01": 0.4},
    "slices": [{"by": "gender", "note": "", "rows": [{"label": "f", "eer_percent": 3.0}]}],
    "lists": [{"role": "trials", "name": "t.txt", "sha256": "0"}],
}
LINES = "".join(f"{one % 2} spk{one}/a b{one}.wav\tx\n" for one in range(20))
TABLE = "path,speaker,gender\n" + "".join(f"a{one}.wav,s{one % 3},f\n" for one in range(10))
READERS: dict[str, Reader] = {
    "wav 16": audio("a.wav"),
    "wav 24 extensible": audio("a.wav", subtype="PCM_24", format="WAVEX"),
    "wav float at 8 kHz": audio("a.wav", rate=8000, subtype="FLOAT"),
    "rf64": audio("a.wav", format="RF64"),
    "a-law": audio("a.wav", subtype="ALAW"),
    "flac": audio("a.flac"),
    "ogg": audio("a.ogg"),
    "mp3": audio("a.mp3"),
    "aiff": audio("a.aiff"),
    "training list": text("list.txt", LINES, read_training_list),
    "trials": text("trials.txt", "".join(f"{one % 2} a{one} b{one}\n" for one in range(20)), read_trials),
    "kaldi trials": text("trials.txt", "".join(f"a{one} b{one} target\n" for one in range(20)), read_trials),
    "trials with tabs": text("trials.txt", "1\ta b\tc d\n0\ta b\te\n" * 9, read_trials),
    "scores": text("scores.txt", "".join(f"a{one} b{one} {one / 7:.6f}\n" for one in range(20)), read_scores),
    "speaker table": text("table.csv", TABLE, read_speaker_table),
    "metadata": text("table.csv", TABLE, lambda path: read_metadata(path, ["a1.wav", "a2.wav"])),
    "utterance table": text("table.csv", TABLE, lambda path: list(read_table(path))),
    "results": text("results.json", json.dumps(RESULTS), lambda path: read_run(path.parent)),
    "metrics": text(
        "metrics.jsonl",
        "".join(json.dumps({"kind": "step", "step": one, "loss": 1.5}) + "\n" for one in range(9)),
        lambda path: read_run(path.parent),
    ),
    "configuration": Reader(configuration, lambda path: load_config(["--config", str(path)])),
    "model file": model(compress=False),
    "model file, deflated": model(compress=True),
    "initial model": model(compress=False, as_training=True),
    "last.pt": Reader(last_checkpoint, lambda path: sums(read_own_checkpoint(path)["weights"]), has_checksum=True),
    "corpus.json": part_of_corpus("corpus.json"),
    "corpus index": part_of_corpus("index.npz"),
    "corpus index with its checksum": part_of_corpus("index.npz", recomputed=True),
    "corpus samples": part_of_corpus("samples.npy"),
    "zip": archive("a.zip"),
    "tar": archive("a.tar.gz"),
    "arrays": Reader(arrays, lambda path: read_arrays(path, "arrays")),
}
