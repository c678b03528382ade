"""`speakernet export`: what a model file is compared on when it is written in another format, and what int8 costs."""

import argparse
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
from speakernet.evaluation.embedding import EmbeddingNet, embed_utterances
from speakernet.evaluation.metrics import eer
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.scoring import cosine_scores, mean_embeddings, mean_of_whole_utterances
from speakernet.files import human_bytes
from speakernet.inference.export import ExportError, Run, check_target, export_model, open_onnx
from speakernet.models.model_file import ModelFile, load_model_file
from speakernet.random import numpy_generator

NUM_COMPARED = 4
SYNTHETIC_SYLLABLES = 16
"""Of a synthetic recording: about four seconds."""
SPEECH_STREAM = 7001


def export(arguments: argparse.Namespace) -> int:
    """Write the file and print what was compared."""
    check_target(arguments.out, arguments.int8)
    if (arguments.trials is None) != (arguments.audio is None) or (arguments.trials and not arguments.int8):
        raise ExportError("--trials LIST and --audio FOLDER go together, with --int8: they measure its error rate")
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
        lines.append(f"after int8: {report.rounded}")
    if trials is not None:
        rounded = ExportedEmbedder(open_onnx(Path(arguments.out).read_bytes()), rate, model.net.min_samples)
        before, after = (_eer_percent(one, model, trials, arguments.audio) for one in (model.net, rounded))
        lines.append(
            f"EER of {len(trials):,} trials of {trials.source}: {before:.3f} % in float32, {after:.3f} % in int8 "
            f"({after - before:+.3f})"
        )
    elif report.rounded is not None:
        lines.append("the error rate of int8 was not measured; --trials LIST --audio FOLDER does that")
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def synthetic_speech(count: int, sample_rate: int) -> list[np.ndarray]:
    """Sentences of synthetic voices, (samples,) float32 each, always the same."""
    speech = []
    for number in range(count):
        generator = numpy_generator(0, SPEECH_STREAM, number)
        tracks = lay_out(draw_phones(generator, SYNTHETIC_SYLLABLES + number), generator)
        sentence = synthesise(draw_voice(generator), tracks, generator)
        speech.append(audio_of_array(0.3 * sentence / np.abs(sentence).max(), SAMPLE_RATE, sample_rate))
    return speech


@dataclass
class ExportedEmbedder:
    """An exported graph as evaluation's network: utterances go in one by one."""

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


def _eer_percent(net: EmbeddingNet, model: ModelFile, trials: TrialList, audio: Path) -> float:
    source = open_source(audio, net.sample_rate)
    embeddings = embed_utterances(net, source, trials.names, EvaluationOptions(embedding="whole"))
    units = mean_embeddings(embeddings, mean_of_whole_utterances(model.contents))
    assert trials.labels is not None
    return eer(cosine_scores(units, trials.enrol, trials.test), trials.labels)
