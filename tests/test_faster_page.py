"""docs/faster.md: all advice that a run can give stands there, and the figures beside it are measured ones."""

import itertools
import re
from pathlib import Path

from speakernet.training.batch_advice import FEWEST_STEPS, WORTHWHILE_GAIN
from speakernet.training.data_wait import ADVISED_SHARE, LoadingFacts, data_wait_advice
from speakernet.training.progress import SHOWN_WAIT

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "faster.md").read_text(encoding="utf-8")


def all_advice() -> set[str]:
    """What can be said of any loader, without the share that is waited."""
    switches = itertools.product((0, 7), *[(False, True)] * 5, (0.0, 50e6))
    every = (
        data_wait_advice(0.2, LoadingFacts(workers, 8, packed, compressed, augments, gpu, speed, on_disk))
        for workers, packed, compressed, augments, gpu, on_disk, speed in switches
    )
    return {advice.partition(": ")[2] for advice in every}


def test_each_row_quotes_what_can_be_said_and_all_of_it_is_there() -> None:
    section = PAGE.split("## 1. It waits for data")[1].split("## 2.")[0]
    rows = [row.split("…") for row in re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)]
    covered = {
        advice: [row for row in rows if re.search(".*".join(map(re.escape, row)), advice)] for advice in all_advice()
    }
    assert [advice for advice, found in covered.items() if len(found) != 1] == []
    assert len(rows) == len({tuple(found[0]) for found in covered.values()})


def test_the_warning_of_a_run_is_what_that_run_would_say() -> None:
    facts = LoadingFacts(0, 2, is_packed=False, is_compressed=True, augments_on_cpu=True, has_gpu=False)
    assert f"WARNING {data_wait_advice(0.23, facts)}\n" in PAGE
    assert ADVISED_SHARE == SHOWN_WAIT == 0.10 and "It is shown from 10 % on." in PAGE
    assert f"gains under {100 * WORTHWHILE_GAIN:.0f} %, or that leaves fewer than {FEWEST_STEPS:,} steps" in PAGE


def test_what_remedies_give_was_measured() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = {
        "34 times as fast as the classic pipeline reads WAV": "packed corpus, int16 | 2,631 | 89,109 | 34 (",
        "FLAC from memory 137 times": "FLAC, RAM corpus | 637 | 87,929 | 137 (",
        "two workers 1.6 times one, augmenting": "two workers against one, augmented | 6,838 | 11,196 | 1.6 (",
        "waits fall to 0.07 of a memory map's": "wait fell to 0.07 of the memory map's",
        "0.545": "| bf16 | 0.545 |",
        "0.456": "**0.456**",
        "0.397": "**0.397**",
        "0.30 of the memory": "107.6 MiB | **0.30**",
        "about twice the time": "default + gradient checkpointing | | 0.70 with memory kept; 1.02 as set now",
    }
    assert [said for said, measured in rows.items() if said not in PAGE or measured not in performance] == []
