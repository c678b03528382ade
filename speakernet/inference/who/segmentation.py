"""Find how many people speak at a time, and which of them, with a published segmentation model.

The model sees windows of 10 s and gives each frame one of seven classes: nobody, one of three
people, or two of them. Its numbers of people hold within a window; clusters of embeddings join the
windows.

Source: Plaquet and Bredin, "Powerset multi-class cross entropy loss for neural speaker
diarization", Interspeech 2023; https://huggingface.co/pyannote/segmentation-3.0.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_array

from speakernet.data.audio import SAMPLE_RATE, audio_of_array
from speakernet.data.lookup import default_cache_folder
from speakernet.files import FileError, reading
from speakernet.inference.recordings import Recording
from speakernet.inference.who.clustering import runs
from speakernet.terminal import Bar

WINDOW_SAMPLES = 160_000
WINDOW_FRAMES = 589
FRAME_SAMPLES = 270
FIELD_SAMPLES = 991
"""A window of 10 s at 16 kHz, its frames, and the hop and receptive field of a frame."""
# Windows overlap by half, so that a frame at the edge of one is in the middle of another.
HOP_FRAMES = 296
"""Windows begin every 5 s; every second instead changed DER by less than 0.1 points."""
FRAME_SECONDS = FRAME_SAMPLES / SAMPLE_RATE
FIRST_SECONDS = (FIELD_SAMPLES - FRAME_SAMPLES) / 2 / SAMPLE_RATE
"""Where the first frame begins: each is about the middle of what it sees."""
CLASSES = np.array(
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], np.float32
)
"""Which of a window's three people speak, (classes, people)."""
FIRST_OVERLAP = 4
"""From this class on, two people speak."""
# Above one half, because a second voice that is not there counts as a false alarm.
MIN_OVERLAP = 0.6
CLEAR_SHARE = 0.5
"""A stretch belongs to one of a window's people if that person speaks alone in this share of it."""
NEIGHBOUR = 0.3
"""Added to the share of the person whose turn is nearest to an overlap."""
EXPECTED = (
    "an ONNX model with pyannote's seven classes (10 s of audio at 16 kHz -> 589 frames x 7 "
    "log-probabilities), such as pyannote/segmentation-3.0"
)

NO_SEGMENTATION = "none"

Section = tuple[float, float, int]
"""Start and stop in seconds, and the number of a voice."""


@dataclass(frozen=True)
class Segmentation:
    """What the model found in a recording.

    Attributes:
        name: name of the model's file.
        speech: (frames,) probability that anybody speaks, mean over windows.
        overlap: (frames,) probability that two people speak.
        classes: (windows, WINDOW_FRAMES) the most likely class; window i begins at frame
            i * HOP_FRAMES.
    """

    name: str
    speech: np.ndarray
    overlap: np.ndarray
    classes: np.ndarray

    def speech_at(self, seconds: np.ndarray) -> np.ndarray:
        """The probability of speech at these times."""
        middles = FIRST_SECONDS + FRAME_SECONDS * (np.arange(len(self.speech)) + 0.5)
        return np.interp(seconds, middles, self.speech)

    def people_of(self, stretches: np.ndarray) -> csr_array:
        """Which person of each window speaks alone in a stretch, (windows * 3, stretches) of 0 and
        1.

        Args:
            stretches: (stretches, 2) in seconds.
        """
        edges = _frames_of(stretches)
        rows = []
        columns = []
        for row, classes in enumerate(self.classes):
            # Stretches that this window of the model sees, in its own frames.
            within = np.clip(edges - row * HOP_FRAMES, 0, WINDOW_FRAMES)
            inside = np.flatnonzero(within[:, 0] < within[:, 1])
            is_alone = CLASSES[classes] * (classes < FIRST_OVERLAP)[:, None]
            counts = np.zeros((WINDOW_FRAMES + 1, CLASSES.shape[1]))
            counts[1:] = is_alone.cumsum(axis=0)
            # (stretches inside, people)
            alone = counts[within[inside, 1]] - counts[within[inside, 0]]
            # If two people alternate or overlap, the embedding belongs to neither.
            is_clear = alone.max(axis=1) >= CLEAR_SHARE * np.diff(edges[inside])[:, 0]
            columns.append(inside[is_clear])
            rows.append(CLASSES.shape[1] * row + alone[is_clear].argmax(axis=1))
        ones = np.ones(sum(map(len, rows)))
        shape = (CLASSES.shape[1] * len(self.classes), len(stretches))
        return csr_array((ones, (np.concatenate(rows), np.concatenate(columns))), shape=shape)

    def second_voices(self, sections: Sequence[Section], counts: np.ndarray) -> list[Section]:
        """Who else speaks in the overlaps of sections.

        Args:
            sections: one voice at a time, sorted.
            counts: (windows * 3, voices), in how many stretches each person of a window is each
                voice, where that person speaks alone.
        """
        # The embedding of an overlap is of no use, so each of the window's people is recognised
        # where that person speaks alone. The section's voice is known, and the other is the most
        # likely of the rest. A person who is never alone has no share; then the neighbouring turn
        # decides, because people overlap where turns change.
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        voices = np.full(len(self.speech), -1)
        for start, stop, voice in sections:
            first, last = _frames_of(np.array([start, stop]))
            voices[first:last] = voice
        # How likely each voice is one of the two, (frames, voices).
        likely = np.zeros((len(voices), shares.shape[1]), np.float32)
        num_windows = np.zeros(len(voices))
        for row, classes in enumerate(self.classes):
            two = np.flatnonzero(classes >= FIRST_OVERLAP)
            people = shares[CLASSES.shape[1] * row :][: CLASSES.shape[1]]
            likely[row * HOP_FRAMES + two] += CLASSES[classes[two]] @ people
            num_windows[row * HOP_FRAMES :][:WINDOW_FRAMES] += 1
        edges = np.array([section[:2] for section in sections])
        of_section = np.array([voice for *_, voice in sections])
        overlaps = []
        for first, last in runs(np.where(self.overlap > MIN_OVERLAP, voices, -1)):
            voice = voices[first]
            # Distance in time from the overlap to each section of somebody else.
            start, stop = FIRST_SECONDS + FRAME_SECONDS * np.array([first, last])
            distances = np.maximum(edges[:, 0] - stop, start - edges[:, 1])
            distances[of_section == voice] = np.inf
            if self.overlap[first] <= MIN_OVERLAP or voice < 0 or np.isinf(distances).all():
                continue
            scores = likely[first:last].mean(axis=0) / num_windows[first]
            scores[of_section[distances.argmin()]] += NEIGHBOUR
            scores[voice] = -1.0
            overlaps.append((float(start), float(stop), int(scores.argmax())))
        return overlaps


def segment(recording: Recording, choice: str | Path | None) -> Segmentation | None:
    """Run the model in the chosen file over a recording, which is read piece by piece; by default
    the file that `speakernet fetch` has put into the cache. None for `none`, or if there is none.
    """
    path = default_cache_folder() / "models" / "pyannote" / "segmentation-3.0.onnx"
    if choice is not None:
        path = Path(choice)
    elif not path.is_file():
        return None
    if str(path) == NO_SEGMENTATION:
        return None
    run = open_model(path)
    seconds = HOP_FRAMES * FRAME_SECONDS
    length = WINDOW_SAMPLES / SAMPLE_RATE
    count = 1 + max(0, int(np.ceil((recording.seconds - length) / seconds)))
    num_frames = (count - 1) * HOP_FRAMES + WINDOW_FRAMES
    sums = np.zeros((num_frames, 2))
    counts = np.zeros(num_frames)
    classes = np.zeros((count, WINDOW_FRAMES), np.uint8)
    rate = recording.sample_rate
    with Bar("segmentation", count, "window") as bar:
        for row in bar.over(range(count)):
            # Resampled window by window, so that a long recording is never in memory as a whole.
            part = recording.read(round(row * seconds * rate), round(length * rate))
            part = audio_of_array(part, rate, SAMPLE_RATE)
            window = np.zeros(WINDOW_SAMPLES, np.float32)
            window[: len(part)] = part[:WINDOW_SAMPLES]
            logarithms = run(window)
            probabilities = np.exp(logarithms)
            classes[row] = logarithms.argmax(axis=1)
            here = slice(row * HOP_FRAMES, row * HOP_FRAMES + WINDOW_FRAMES)
            # Probabilities are averaged over both windows; a vote would lose how certain each is.
            sums[here, 0] += 1.0 - probabilities[:, 0]
            sums[here, 1] += probabilities[:, FIRST_OVERLAP:].sum(axis=1)
            counts[here] += 1
    means = sums / counts[:, None]
    return Segmentation(path.name, means[:, 0], means[:, 1], classes)


def open_model(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Open a segmentation model in an ONNX file; it maps a window (samples,) to log-probabilities
    of the classes, (frames, classes), on the CPU.

    Raises:
        FileError: the file is missing, not ONNX, or a different model.
    """
    # Not imported above, since only a segmentation model needs it.
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Errors only.
    options.log_severity_level = 3

    def run(window: np.ndarray) -> np.ndarray:
        inputs = {session.get_inputs()[0].name: window[None, None]}
        return np.asarray(session.run(None, inputs)[0])[0]

    # Run once on silence, so that a model with other shapes or outputs fails here and not after an
    # hour of speech.
    with reading(path, EXPECTED):
        content = path.read_bytes()
        try:
            session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
            classes = run(np.zeros(WINDOW_SAMPLES, np.float32))
        except Exception as error:
            # ONNX Runtime has its own exceptions for files and for shapes.
            raise FileError(f"{path}: not {EXPECTED}") from error
    if classes.shape != (WINDOW_FRAMES, len(CLASSES)):
        raise FileError(f"{path}: the output has shape {classes.shape}; expected {EXPECTED}")
    if not np.allclose(np.exp(classes).sum(axis=1), 1.0, atol=1e-3):
        raise FileError(f"{path}: the output is not log-probabilities; expected {EXPECTED}")
    return run


def _frames_of(seconds: np.ndarray) -> np.ndarray:
    """The first frame that begins at or after these times, roughly."""
    return np.maximum(0, np.round((seconds - FIRST_SECONDS) / FRAME_SECONDS)).astype(np.int64)
