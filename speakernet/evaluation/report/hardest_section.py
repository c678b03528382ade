"""The part of a report page about the hardest trials: who spoke, for how long and, on request, the audio itself."""

import base64

import numpy as np

from speakernet.data.audio import flac_bytes
from speakernet.data.sources import AudioSource
from speakernet.evaluation.report.data import RunData
from speakernet.evaluation.report.page import Block, Card, Cards, Cell, Paragraph, Table

NUM_HARDEST = 12
MAX_PLAYED_SECONDS = 20
"""Of each recording: a page with an hour of speech would be one that nobody can send."""


def hardest_part(run: RunData, audio: AudioSource | None = None) -> list[Block]:
    """The highest-scoring non-targets and the lowest-scoring targets.

    Args:
        run: with labelled scores.
        audio: where its utterances lie; they are put into the page.

    Raises:
        AudioError: an utterance that is not there, or cannot be read.
    """
    if run.labels is None or run.scores is None or run.trials is None:
        return []
    cards = []
    for kind, label, sign in (("False accepts", 0, -1), ("False rejects", 1, 1)):
        rows = np.flatnonzero(run.labels == label)
        keys = sign * run.scores[rows]
        few = min(NUM_HARDEST, len(rows))
        # Ten million trials are not sorted for twelve of them.
        nearest = np.argpartition(keys, few - 1)[:few]
        rows = rows[nearest[np.lexsort((rows[nearest], keys[nearest]))]]
        cells: list[list[str | Cell]] = [
            [
                _utterance(run, int(run.trials.enrol[row]), audio),
                _utterance(run, int(run.trials.test[row]), audio),
                f"{run.scores[row]:.4f}",
            ]
            for row in rows
        ]
        what = "non-targets with the highest scores" if label == 0 else "targets with the lowest scores"
        cards.append(Card(f"{kind}: {what}", [Table(["enrolment", "test", "score"], cells, numbers=(2,))]))
    if audio is not None:
        return [Cards(cards, "halves")]
    # Without the folder's name: a copy of the folder gives the same page.
    hint = "To listen to them: speakernet report FOLDER_OF_THIS_PAGE --audio FOLDER_OF_THE_AUDIO."
    return [Cards(cards, "halves"), Paragraph(hint, is_quiet=True)]


def _utterance(run: RunData, row: int, audio: AudioSource | None) -> Cell:
    """Name, speaker, length and perhaps the sound of one side of a trial."""
    assert run.trials is not None
    name, facts = run.trials.names[row], []
    if run.speakers is not None:
        number = int(run.speakers[row])
        facts.append(f"speaker {run.speaker_names[number] if run.speaker_names else number + 1}")
    if run.durations is not None:
        facts.append(f"{run.durations[row]:.1f} s")
    sound = ""
    if audio is not None:
        waveform = audio.read(name, 0, MAX_PLAYED_SECONDS * audio.sample_rate)
        sound = f"data:audio/flac;base64,{base64.b64encode(flac_bytes(waveform, audio.sample_rate)).decode('ascii')}"
    return Cell(name, ", ".join(facts), sound)
