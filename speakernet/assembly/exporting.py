"""`speakernet export`: what a model file is compared on when it is written in another format, and what int8 costs."""

import argparse
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speakernet.corpora.synthetic.speech import SAMPLE_RATE, draw_phones, draw_voice, lay_out, synthesise
from speakernet.data.audio import audio_of_array, read_audio
from speakernet.data.lists import TrialList, read_trials
from speakernet.data.opening import open_source
from speakernet.evaluation.backend import mean_of_whole_utterances
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import EmbeddingOptions
from speakernet.evaluation.scoring import cosine_scores, mean_embeddings
from speakernet.files import human_bytes
from speakernet.inference.export.formats import Run, open_onnx
from speakernet.inference.export.writing import ExportError, check_target, export_model
from speakernet.models.model_file import ModelFile, load_model_file
from speakernet.random import numpy_generator

logger = logging.getLogger(__name__)

NUM_COMPARED = 4
SYNTHETIC_SYLLABLES = 16
"""Of a synthetic recording: about four seconds."""
SPEECH_STREAM = 7001


def export(arguments: argparse.Namespace) -> int:
    """Write the file and say what was compared.

    Raises:
        ValueError: what `export_model` refuses, a list without labels, or audio that cannot be read.
    """
    check_target(arguments.out, arguments.int8)
    if arguments.trials is not None and not arguments.int8:
        raise ExportError("--trials measures what --int8 does to the error rate; give both or neither")
    if (arguments.trials is None) != (arguments.audio is None):
        raise ExportError("--trials needs --audio, the folder that its paths are relative to, and the reverse")
    if folder := next((path for path in arguments.speech if path.is_dir()), None):
        raise ExportError(f"--speech {folder} is a folder; give recordings, such as {folder / '*.wav'}")
    model = load_model_file(arguments.model)
    trials = _labelled_trials(arguments.trials) if arguments.trials else None
    rate = model.net.sample_rate
    if arguments.speech:
        speech, kind = [read_audio(path, sample_rate=rate) for path in arguments.speech], "recordings"
    elif trials is not None:
        source = open_source(arguments.audio, rate)
        speech, kind = [source.read(name) for name in list(trials.names)[:NUM_COMPARED]], "recordings of the list"
    else:
        speech, kind = synthetic_speech(NUM_COMPARED, rate), "synthetic voices"
    report = export_model(arguments.model, arguments.out, speech=speech, int8=arguments.int8)
    lines = [f"{report.path}: {report.title}, {human_bytes(report.num_bytes)}", f"compared on {kind}: {report.parity}"]
    if report.rounded is not None:
        lines.append(f"behind int8: {report.rounded}")
        if trials is None:
            lines.append("what int8 does to the error rate was not measured; --trials LIST --audio FOLDER does")
        else:
            lines.append(_what_int8_costs(model, Path(arguments.out), trials, arguments.audio))
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def synthetic_speech(count: int, sample_rate: int) -> list[np.ndarray]:
    """Sentences of voices that are nobody's, (samples,) float32 each, always the same."""
    speech = []
    for number in range(count):
        generator = numpy_generator(0, SPEECH_STREAM, number)
        tracks = lay_out(draw_phones(generator, SYNTHETIC_SYLLABLES + number), generator)
        sentence = synthesise(draw_voice(generator), tracks, generator)
        speech.append(audio_of_array(0.3 * sentence / np.abs(sentence).max(), SAMPLE_RATE, sample_rate))
    return speech


@dataclass
class ExportedEmbedder:
    """An exported graph where evaluation expects a network: utterances of different lengths go in one by one.

    Attributes:
        run: the graph.
        sample_rate: Hz, of its waveforms.
        min_samples: of the shortest.
    """

    run: Run
    sample_rate: int
    min_samples: int

    def embed(self, waveforms: Tensor, lengths: Tensor | None = None, *, sample_rate: int) -> Tensor:
        """(batch, samples) to (batch, dim)."""
        assert sample_rate == self.sample_rate
        whole = [waveforms.shape[1]] * len(waveforms) if lengths is None else lengths.tolist()
        rows = [self.run(row[None, :length].numpy())[0] for row, length in zip(waveforms, whole, strict=True)]
        return torch.from_numpy(np.concatenate(rows))


def _labelled_trials(path: Path) -> TrialList:
    trials = read_trials(path)
    if trials.labels is None or len(np.unique(trials.labels)) < 2:
        raise ExportError(f"{path}: an error rate needs labelled trials of both kinds (1 same, 0 different)")
    return trials


def _what_int8_costs(model: ModelFile, path: Path, trials: TrialList, audio: Path) -> str:
    net = model.net
    rounded = ExportedEmbedder(open_onnx(path.read_bytes()), net.sample_rate, net.min_samples)
    before, after = (_eer_percent(one, model, trials, audio) for one in (net, rounded))
    return (
        f"EER of {len(trials):,} trials of {trials.source}: {before:.3f} % in float32, {after:.3f} % in int8 "
        f"({after - before:+.3f})"
    )


def _eer_percent(net: EmbeddingNet, model: ModelFile, trials: TrialList, audio: Path) -> float:
    options = EmbeddingOptions(embedding="whole")
    source = open_source(audio, net.sample_rate)
    embeddings = embed_utterances(net, source, trials.names, options, description="embedding")
    units = mean_embeddings(embeddings, mean_of_whole_utterances(model.contents))
    scores = cosine_scores(units, trials.enrol, trials.test)
    assert trials.labels is not None
    return eer(scores, trials.labels)
