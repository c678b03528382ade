"""RIRS_NOISES (simulated and measured room impulse responses): download, verify, unpack, check,
make mono and trim.

    speakernet prepare rirs --save_path data              everything
    speakernet prepare rirs --save_path data --prepare    only check and trim what is unpacked

Train with --rir_path data/RIRS_NOISES/simulated_rirs (as in the classic tools) or
data/RIRS_NOISES/real_rirs_mono (measured, one file per microphone, cut where the RIR has decayed by
60 dB).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from speakernet.corpora.listing import COMMON_ARGUMENTS
from speakernet.corpora.public_archives import (
    DOWNLOAD_ARGUMENTS,
    STEP_ARGUMENTS,
    STEPS,
    fetch,
    requested_steps,
)
from speakernet.corpora.steps import Folder, StepSummary, audio_seconds, finish
from speakernet.data.audio import (
    READABLE_SUFFIXES,
    SAMPLE_RATE,
    AudioError,
    audio_info,
    read_audio,
    write_audio,
)
from speakernet.data.folders import walk_files
from speakernet.files import exclusive

DECAY_DB = 60.0
# 10 ms at 16 kHz; no RIR is cut shorter than this.
SHORTEST_RESPONSE_SAMPLES = 160
SIMULATED_FOLDER = "RIRS_NOISES/simulated_rirs"
MEASURED_FOLDER = "RIRS_NOISES/real_rirs_isotropic_noises"
PREPARED_FOLDER = "RIRS_NOISES/real_rirs_mono"


ARGUMENTS = {
    **COMMON_ARGUMENTS,
    **STEP_ARGUMENTS,
    "--prepare": {
        "action": "store_true",
        "help": "check the simulated RIRs, make mono copies of the measured RIRs",
    },
    **DOWNLOAD_ARGUMENTS,
}


def run(arguments: argparse.Namespace) -> int:
    with exclusive(arguments.save_path):
        summaries = prepare(arguments, requested_steps(arguments))
        return finish(summaries, arguments.save_path / "summary.txt")


def prepare(arguments: argparse.Namespace, steps: Sequence[str] = STEPS) -> list[StepSummary]:
    """Make and check `RIRS_NOISES/` below the target folder, with mono files of its measured
    RIRs.
    """
    summaries = fetch("rirs", arguments, steps)
    if "prepare" not in steps:
        return summaries
    root = arguments.save_path
    num_jobs = arguments.num_jobs
    simulated = root / SIMULATED_FOLDER
    measured = root / MEASURED_FOLDER
    if not simulated.is_dir() and not measured.is_dir():
        raise ValueError(
            f"{root} has neither {SIMULATED_FOLDER} nor {MEASURED_FOLDER}; run with --download "
            "first"
        )

    def check(name: str) -> tuple[int, int]:
        if audio_seconds(simulated / name) is None:
            raise AudioError(f"{simulated / name}: unreadable, or only a header")
        return 0, 1

    summary = StepSummary("prepare_rirs", root)
    if simulated.is_dir():
        summary.count_each(
            check, walk_files(simulated, READABLE_SUFFIXES), num_jobs, "check simulated"
        )
    if measured.is_dir():
        target = Folder(root / PREPARED_FOLDER)
        # Names in this folder: RVB2014_type1_noise_… are recordings of noise, …_rir_… are RIRs.
        names = walk_files(measured, READABLE_SUFFIXES)
        responses = (name for name in names if "noise" not in name.rsplit("/", 1)[-1].lower())
        summary.count_each(
            partial(_prepare_response, measured, target), responses, num_jobs, "measured responses"
        )
    return [*summaries, summary]


def trimmed_response(response: np.ndarray) -> np.ndarray:
    """The RIR up to where the remaining energy is `DECAY_DB` below the total; shape (samples,).

    Source: Schroeder, "New method of measuring reverberation time", JASA 1965, eq. 2 (backward
    integration).
    """
    # What remains after 60 dB of decay is mostly noise of the measurement. It would be added to the
    # speech, and the longer the response, the more a convolution costs.
    energy = np.cumsum(np.square(response[::-1], dtype=np.float64))[::-1]
    if not len(energy) or energy[0] <= 0:
        raise AudioError("the RIR is silent")
    # Integrated backwards, the energy only falls, so counting finds the crossing.
    num_samples = int(np.count_nonzero(energy > energy[0] * 10 ** (-DECAY_DB / 10)))
    return response[: max(SHORTEST_RESPONSE_SAMPLES, num_samples)]


def _prepare_response(root: Path, target: Folder, name: str) -> tuple[int, int]:
    """Write one mono file per channel of an RIR; returns (made, skipped)."""
    path = root / name
    stem = name.rsplit(".", 1)[0]
    num_channels = audio_info(path).num_channels
    paths = [target.path(f"{stem}_ch{channel + 1}.wav") for channel in range(num_channels)]
    if all(audio_seconds(target_path, SAMPLE_RATE) is not None for target_path in paths):
        return 0, num_channels
    for channel, target_path in enumerate(paths):
        # Each channel separately: mixing the microphones of an array would comb-filter the RIR.
        response = trimmed_response(read_audio(path, channel=channel))
        # Scaled up, because the file has 16 bits: a quiet recording would lose its tail to
        # rounding.
        gain = 0.9 / max(float(np.abs(response).max()), 1e-9)
        write_audio(target_path, response * gain, SAMPLE_RATE)
    return num_channels, 0
