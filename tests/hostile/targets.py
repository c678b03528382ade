"""The readers that are given hostile files, with small valid files to start from and checks of
their answers.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from mutation import VALUES, mutate, mutate_tree
from safetensors.torch import save_file

from speakernet.checkpoint import read_checkpoint, read_own_checkpoint
from speakernet.config import load_config
from speakernet.corpora.archives import extract
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.corpora.steps import StepSummary
from speakernet.corpora.utterances import read_table
from speakernet.data.audio import read_audio, write_audio
from speakernet.data.lists import StringTable, read_training_list, read_trials
from speakernet.data.lookup import build_lookup_table
from speakernet.data.opening import open_source
from speakernet.data.packed import PackedSource, verify
from speakernet.data.packing import pack
from speakernet.evaluation.embedding import Kept, load_embeddings, save_embeddings
from speakernet.evaluation.files import ARRAYS_NAME, read_run
from speakernet.evaluation.report import write_report
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import read_scores
from speakernet.evaluation.slices import read_metadata
from speakernet.evaluation.speakers import read_csv
from speakernet.files import sha256_of
from speakernet.models.model_file import load_model_file, model_file_contents
from tests.outcomes import digest
from tests.small_networks import scoring, tiny_resnet

RATE = 16_000
NAMES = [f"spk{speaker}/{name}.wav" for speaker in (1, 2, 3) for name in "ab"]


def mutate_file(path, draw):
    path.write_bytes(mutate(path.read_bytes(), draw))


@dataclass(frozen=True)
class Target:
    """A reader and the files it reads."""

    make: Callable[[Path], None]
    """Writes the valid files into a folder."""
    read: Callable[[Path], Any]
    """Reads them; raises AssertionError if the answer cannot be right."""
    files: tuple[str, ...]
    """The files that are damaged, one at a time."""
    changes: Callable[[Path, random.Random], None] = mutate_file
    """How they are damaged."""
    is_checked: bool = False
    """Whether the answer must equal that of the undamaged files, unless the damage is reported."""

    def damage(self, folder, draw):
        """Change one of the files written by `make` into `folder`; returns its name."""
        name = draw.choice(self.files)
        self.changes(folder / name, draw)
        return name


def voice(seconds=0.2, channels=1):
    """(samples, channels)."""
    return 0.1 * np.random.default_rng(7).standard_normal((int(RATE * seconds), channels))


def _audio(name, subtype, form=None, channels=1):
    def make(folder):
        samples = voice(channels=channels)
        soundfile.write(folder / name, samples, RATE // channels, subtype=subtype, format=form)

    def read(folder):
        whole = read_audio(folder / name)
        assert whole.dtype == np.float32 and whole.ndim == 1 and np.isfinite(whole).all()
        assert len(read_audio(folder / name, 0, 100)) == min(100, len(whole))
        names = StringTable.from_strings([name])
        options = {"sample_rate": RATE, "cache_folder": None, "num_threads": 1}
        table = build_lookup_table(str(folder), names, **options)
        assert table.problems or table.num_samples[0] == len(whole)

    return Target(make, read, (name,))


def _lines(name, text, read):
    def make(folder):
        (folder / name).write_text(text, encoding="utf-8")

    return Target(make, lambda folder: read(folder / name), (name,))


def _training_list(path):
    rows = read_training_list(path)
    assert len(rows.paths) == len(rows.labels) and rows.labels.max() < len(rows.speakers)
    assert all(rows.paths[row] for row in range(len(rows.paths)))


def _trials(path):
    trials = read_trials(path)
    assert len(trials.enrol) == len(trials.test)
    assert max(trials.enrol.max(), trials.test.max()) < len(trials.names)
    assert trials.labels is None or set(np.unique(trials.labels)) <= {0, 1}


def _scores(path):
    trials, scores = read_scores(path)
    assert len(scores) == len(trials)


TRAINING = "".join(f"{name.split('/')[0]} {name}\n" for name in NAMES)
TRIALS = "".join(f"{int(a[:4] == b[:4])} {a} {b}\n" for a in NAMES for b in NAMES if a < b)
PAIRS = [line.split()[1:] for line in TRIALS.splitlines()]
SCORES = "".join(f"{enrol} {test} {row / 7 - 1:.4f}\n" for row, (enrol, test) in enumerate(PAIRS))
TABLE = "path,speaker,gender,age\n" + "".join(f"{name},{name[:4]},f,20\n" for name in NAMES)
YAML = """# a run
data: {train_list: a.txt, batch_size: 8, crop_frames: 60, num_workers: 0}
model:
  name: ResNet
  options: {channels: 8, blocks: [1, 1], gated: true}
loss: {name: amsoftmax, margin: 0.2}
optimizer: {name: sgd, learning_rate: 1.0e-2}
schedule: {name: step}
augment: {speed_factors: [0.9, 1.0, 1.1], enabled: false}
training: {max_epochs: 2, save_path: here}
evaluation: {eval_frames: 60, dcf_target_priors: [0.01, 0.05], sweep: [noise]}
runtime: {device: cpu, seed: 3}
"""


def tiny_model():
    summary = {"epoch": 2, "step": 20, "best_eer_percent": 12.5}
    backend = {"score": "cosine", "embedding": "crops", "eval_frames": 400, "num_crops": 10}
    contents = model_file_contents(tiny_resnet(), loss_normalizes=True, training_summary=summary)
    mean = {"embedding_mean": torch.zeros(8), "embedding_mean_of": backend}
    return contents | mean | scoring(1.0, 0.0, backend, eer=0.2)


HOSTILE_TENSORS = (
    torch.zeros(0),
    torch.zeros(3),
    torch.full((8,), float("nan")),
    torch.zeros(8, dtype=torch.int64),
    torch.zeros(2, 2, dtype=torch.complex64),
    torch.zeros(()),
    torch.zeros(1).expand(10**9),
    torch.eye(3).to_sparse(),
)


def _model_content(path, draw):
    torch.save(mutate_tree(tiny_model(), draw, (*VALUES, *HOSTILE_TENSORS)), path)


def _load_model(folder):
    model = load_model_file(folder / "best.pt")
    waveforms = torch.from_numpy(voice(0.5)).float().T  # (1, samples)
    embedding = model.net.embed(waveforms, sample_rate=model.net.sample_rate)
    assert embedding.ndim == 2 and bool(torch.isfinite(embedding).all())


def _make_packed(folder):
    for row, name in enumerate(NAMES[:3]):
        path = folder / "audio" / name
        write_audio(path, voice(0.05 + 0.02 * row)[:, 0])
    pack(FolderInput(folder / "audio"), folder / "corpus", num_threads=1)


def _read_packed(folder):
    source = open_source(folder / "corpus")
    assert isinstance(source, PackedSource)
    problems = verify(folder / "corpus", 1)
    samples = [source.read(name).tobytes() for name in NAMES[:3]]
    if problems:
        raise ValueError(f"{folder / 'corpus'}: {problems[0]}")
    return samples


def _index_with_its_sum(path, draw):
    """A hostile index with a valid checksum."""
    mutate_file(path, draw)
    description = json.loads((path.parent / "corpus.json").read_text())
    description["index_sha256"] = sha256_of(path)
    (path.parent / "corpus.json").write_text(json.dumps(description))


def _read_packed_again(folder):
    source = open_source(folder / "corpus")
    for name in NAMES[:3]:
        assert np.isfinite(source.read(name)).all()


def _archive(name, kind):
    def make(folder):
        for row in range(4):
            member = folder / "in" / "wav" / f"id{row}" / "a.wav"
            member.parent.mkdir(parents=True)
            member.write_bytes(bytes([row]) * 3000)
        shutil.make_archive(str(folder / "a"), kind, folder / "in")
        shutil.rmtree(folder / "in")

    def read(folder):
        outside = set(folder.iterdir())
        summary = StepSummary("extract", folder / "out")
        extract(folder / name, folder / "out", summary)
        assert set(folder.iterdir()) <= outside | {folder / "out"}
        if summary.broken:
            raise ValueError(f"{name}: {summary.broken} members are broken")

    return Target(make, read, (name,))


RESULTS = Results(
    len(PAIRS), 6, 12.5, (10.0, 15.0), {"0.01": 0.5, "0.05": 0.4}, 3, backend={"score": "cosine"}
).to_dict() | json.loads("""{
  "slices": [{"by": "duration", "note": "", "rows": [
    {"label": "10", "eer_percent": 9.0, "eer_interval_percent": [1, 9]}]}],
  "sweep": [{"kind": "noise", "axis": "dB", "note": "", "rows": [
    {"label": "10", "eer_percent": 9.0, "eer_interval_percent": [1, 9]}]}],
  "lists": [{"role": "trials", "name": "t", "sha256": "0"}],
  "machine": {"cpu": "x"}, "versions": {"torch": "2"},
  "thresholds": [{"name": "eer", "threshold": 0.1, "backend": {}}],
  "training": {"speakers": 3, "utterances": 6, "hours": 0.1}
}""")
METRICS = "".join(
    f'{{"kind": "{kind}", "step": {step}, "epoch": 1, "loss": 1.0, "eer_percent": 9.0, '
    '"learning_rate": 0.1}\n'
    for step, kind in enumerate(("step", "step", "epoch", "evaluation"))
)


def _make_run(folder):
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "scores.txt").write_text(SCORES)
    (folder / "metrics.jsonl").write_text(METRICS)
    (folder / "config.yaml").write_text(YAML)
    labels = np.array([int(line[0]) for line in TRIALS.splitlines()], dtype=np.int8)
    np.savez(folder / ARRAYS_NAME, labels=labels, llrs=np.linspace(-3, 3, len(labels)))


def _result_content(path, draw):
    if path.name == "results.json" and draw.random() < 0.7:
        path.write_text(json.dumps(mutate_tree(RESULTS, draw)))
    else:
        mutate_file(path, draw)


def _report(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text and "\u202e" not in text


def _make_embeddings(folder):
    names = StringTable.from_strings(NAMES)
    embeddings = np.ones((len(NAMES), 1, 8), np.float32)
    save_embeddings(folder / "e.npz", "key", names, Kept(embeddings))


def _embeddings(folder):
    kept = load_embeddings(folder / "e.npz", "key")
    # Damaged embeddings are computed again, so either none are read or the undamaged ones.
    assert kept is None or (
        kept.embeddings.shape == (len(NAMES), 1, 8) and (kept.embeddings == 1).all()
    )


def _write_model(folder):
    torch.save(tiny_model(), folder / "best.pt")


def _write_safetensors(folder):
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 3)}, folder / "w.safetensors")


def _model_digest(folder):
    return digest(read_own_checkpoint(folder / "best.pt"))


PACKED_FILES = ("corpus/corpus.json", "corpus/index.npz", "corpus/samples.npy")
RUN_FILES = ("results.json", "scores.txt", "metrics.jsonl", "config.yaml", ARRAYS_NAME)
TARGETS = {
    "wav 16": _audio("a.wav", "PCM_16"),
    "wav 24 stereo": _audio("a.wav", "PCM_24", channels=2),
    "wav 32": _audio("a.wav", "PCM_32"),
    "wav float": _audio("a.wav", "FLOAT"),
    "wav a-law": _audio("a.wav", "ALAW"),
    "rf64": _audio("a.wav", "PCM_16", "RF64"),
    "wav extensible": _audio("a.wav", "PCM_24", "WAVEX"),
    "mp3": _audio("a.mp3", "MPEG_LAYER_III"),
    "flac": _audio("a.flac", "PCM_16"),
    "ogg": _audio("a.ogg", "VORBIS"),
    "aiff": _audio("a.aiff", "PCM_16"),
    "training list": _lines("train.txt", TRAINING, _training_list),
    "trial list": _lines("trials.txt", TRIALS, _trials),
    "trial list with tabs": _lines("trials.txt", "1\ta b\tc d\n0\ta b\te\n" * 9, _trials),
    "scores": _lines("scores.txt", SCORES, _scores),
    "speaker table": _lines("speakers.csv", TABLE, partial(read_csv, needed=("path", "speaker"))),
    "utterance table": _lines("table.csv", TABLE, lambda path: list(read_table(path))),
    "metadata": _lines("meta.csv", TABLE, lambda path: read_metadata(path, NAMES[:2])),
    "configuration": _lines("run.yaml", YAML, lambda path: load_config(["--config", str(path)])),
    "model by byte": Target(_write_model, _model_digest, ("best.pt",), is_checked=True),
    "model by content": Target(_write_model, _load_model, ("best.pt",), _model_content),
    "safetensors": Target(
        _write_safetensors,
        lambda folder: read_checkpoint(folder / "w.safetensors"),
        ("w.safetensors",),
    ),
    "packed corpus": Target(_make_packed, _read_packed, PACKED_FILES, is_checked=True),
    "packed corpus with its sum": Target(
        _make_packed, _read_packed_again, ("corpus/index.npz",), _index_with_its_sum
    ),
    "zip": _archive("a.zip", "zip"),
    "tar.gz": _archive("a.tar.gz", "gztar"),
    "tar": _archive("a.tar", "tar"),
    "run folder": Target(_make_run, read_run, RUN_FILES, _result_content),
    "report": Target(_make_run, _report, RUN_FILES, _result_content),
    "kept embeddings": Target(_make_embeddings, _embeddings, ("e.npz",)),
}
