"""Ten thousand small files: memory stays flat, nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from preparation_corpora import voice

from speakernet.corpora.walking import walk_files
from speakernet.data.audio import write_audio

#: Runs in a process of its own, so that the peak of its memory is the conversion's alone.
CONVERT = """
import resource, sys
from pathlib import Path
from speakernet.corpora.conversion import Conversion, ConversionOptions, convert_all
from speakernet.corpora.summary import StepSummary
from speakernet.corpora.walking import walk_files
source, target, ffmpeg = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
pairs = (Conversion(source / name, target / (name[:-4] + ".wav")) for name in walk_files(source, {".m4a"}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with StepSummary("convert", target) as summary:
    convert_all(pairs, ConversionOptions(ffmpeg), 2, summary)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(summary.made, summary.skipped, summary.broken, (after - before) // 1024)
"""


def link_tree(root: Path, source: Path, count: int) -> None:
    """`count` names of one file, a hundred a folder."""
    for row in range(count):
        path = root / f"id{row // 1000:02}" / f"video{row // 100 % 10}" / f"{row:05}{source.suffix}"
        if row % 100 == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, path)


def convert(source: Path, target: Path, ffmpeg: str) -> list[int]:
    """(made, skipped, broken, growth of the memory's peak in MiB) of a conversion in a fresh process."""
    command = [sys.executable, "-c", CONVERT, str(source), str(target), ffmpeg]
    outcome = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return [int(word) for word in outcome.stdout.split()]


@pytest.mark.slow
def test_ten_thousand_conversions_need_no_more_memory_than_a_few(tmp_path, ffmpeg):
    write_audio(tmp_path / "a.wav", voice(1, 1, 0.3), 16000)
    command = [
        ffmpeg,
        "-nostdin",
        "-loglevel",
        "error",
        "-i",
        str(tmp_path / "a.wav"),
        "-c:a",
        "aac",
        str(tmp_path / "a.m4a"),
    ]
    subprocess.run(command, check=True)
    link_tree(tmp_path / "few", tmp_path / "a.m4a", 500)
    link_tree(tmp_path / "many", tmp_path / "a.m4a", 10_000)
    few = convert(tmp_path / "few", tmp_path / "few_wav", ffmpeg)
    many = convert(tmp_path / "many", tmp_path / "many_wav", ffmpeg)
    assert (few[:3], many[:3]) == ([500, 0, 0], [10_000, 0, 0])
    assert many[3] <= few[3] + 10, f"the peak grew by {few[3]} MiB for 500 files and by {many[3]} MiB for 10,000"
    assert convert(tmp_path / "many", tmp_path / "many_wav", ffmpeg)[:3] == [0, 10_000, 0]


def test_ten_thousand_files_are_walked_in_order_one_at_a_time(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"x")
    link_tree(tmp_path / "many", tmp_path / "a.wav", 10_000)
    walk = walk_files(tmp_path / "many", {".wav"})
    assert next(walk) == "id00/video0/00000.wav"
    rest = list(walk)
    assert len(rest) == 9_999
    assert rest == sorted(rest)


def test_a_link_that_leads_back_does_not_go_round_for_ever(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.wav").write_bytes(b"x")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "a" / ".hidden.wav").write_bytes(b"x")
    assert list(walk_files(tmp_path, {".wav"})) == ["a/1.wav"]
