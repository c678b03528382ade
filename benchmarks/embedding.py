"""Part of the suite `--scoring`: embedding a folder of recordings by the classic pipeline and by
ours.

Each runs in its own process with its usual settings: the classic one with torch's defaults and the
network's plain definition, ours with the memory settings of all our commands.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks import classic
from benchmarks.plain_models import plain_model
from benchmarks.served import ServedProcess, own_command, own_environment, serve
from benchmarks.timing import Speedup, Way, compare
from speakernet.assembly.training import prepare_machine
from speakernet.config.schema import Config, replaced
from speakernet.data.lists import StringTable
from speakernet.data.opening import open_source
from speakernet.evaluation.embedding import embed_utterances
from speakernet.evaluation.options import EvaluationOptions
from speakernet.models.speaker_net import SpeakerNet, folded

CLASSIC = "classic"
OURS = "ours"
NETWORK = "ResNetSE34L"
DIMENSIONS = 512
CROPS = 10
CROP_FRAMES = 400


def compare_embedding(folder: Path, num_utterances: int, rounds: int, threads: int) -> Speedup:
    """Ten crops of 4 s by ResNetSE34L in float32: the classic pipeline, one utterance per batch,
    against ours.

    Args:
        folder: recordings, sampled at regular intervals.
        num_utterances: number of recordings.
        rounds: rounds of A B A B ….
        threads: torch threads, the same for both.

    Raises:
        ValueError: the folder has no recordings, or a pipeline failed; the message has its errors.
    """
    count = len(_chosen(folder, num_utterances))
    given = (
        "--recordings",
        str(folder),
        "--num_utterances",
        str(num_utterances),
        "--threads",
        str(threads),
    )
    with contextlib.ExitStack() as stack:

        def way(name: str) -> Way:
            command = own_command(*given, "--embedding_of", name)
            process = ServedProcess(name, command, own_environment(huge_pages=name == OURS))
            stack.enter_context(contextlib.closing(process))
            return Way(lambda _: count * process.run())

        measure = f"embedding, {CROPS} crops of {CROP_FRAMES // 100} s"
        return compare(measure, way(CLASSIC), way(OURS), rounds=rounds, wanted=3, unit="utterances")


def serve_embedding(
    config: Config, folder: Path, num_utterances: int, threads: int, name: str
) -> None:
    """Run in a separate process: embed the recordings with one pipeline for every line of input."""
    torch.manual_seed(config.runtime.seed)
    net = SpeakerNet.named(NETWORK, embedding_dim=DIMENSIONS).eval()
    chosen = _chosen(folder, num_utterances)
    if name == CLASSIC:
        torch.set_num_threads(threads)
        paths = [str(path) for path in chosen]
        plain = plain_model(NETWORK, net.front_end, DIMENSIONS, net.front_end.num_features).eval()
        serve(lambda: _embed_classic(plain, paths))
    else:
        prepare_machine(replaced(config, runtime={"threads": threads, "device": "cpu"}))
        serve(_our_embedding(net, folder, chosen))


def _embed_classic(net: nn.Module, paths: list[str]) -> None:
    classic.embed_one_by_one(net, paths, num_frames=CROP_FRAMES, num_crops=CROPS)


def _our_embedding(net: SpeakerNet, folder: Path, chosen: list[Path]) -> Callable[[], None]:
    names = StringTable.from_strings(path.relative_to(folder).as_posix() for path in chosen)
    # With norms merged, as in the evaluation of a model file.
    used = folded(net)
    source = open_source(folder)
    options = EvaluationOptions(num_crops=CROPS)

    def run() -> None:
        embed_utterances(used, source, names, options)

    return run


def _chosen(folder: Path, num_utterances: int) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix in (".wav", ".flac"))
    if not found:
        raise ValueError(f"{folder} has no .wav or .flac files; expected a folder of recordings")
    return found[:: max(1, len(found) // num_utterances)][:num_utterances]
