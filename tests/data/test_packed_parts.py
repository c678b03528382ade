"""A corpus packed in parts by several machines equals one packed by one machine; missing and wrong
parts.
"""

import json
import logging
import shutil

import numpy as np
import pytest

from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import write_audio
from speakernet.data.lists import StringTable
from speakernet.data.opening import open_source
from speakernet.data.packed import DESCRIPTION, SAMPLES, PackedError, read_index, verify
from speakernet.data.packing import join_parts, pack, pack_part
from speakernet.data.parts import WorkPart
from tests.commands import run_command

NAMES = [f"id{speaker}/{utterance}.wav" for speaker in range(5) for utterance in range(2)]
HEADER_BYTES = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("audio")
    random = np.random.default_rng(5)
    for row, name in enumerate(NAMES):
        write_audio(root / name, 0.1 * random.standard_normal(700 + 30 * row))
    return root


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    corpus = tmp_path_factory.mktemp("whole") / "corpus"
    pack(FolderInput(folder), corpus)
    return corpus


def pack_parts(folder, corpus, order=(2, 3, 1), count=3):
    for number in order:
        run_command(f"pack {corpus} --source {folder} --part {number}/{count}")
    return corpus


@pytest.fixture(scope="module")
def parts(folder, tmp_path_factory):
    return pack_parts(folder, tmp_path_factory.mktemp("parts") / "corpus")


def test_parts_equal_the_whole(whole, parts):
    joined = b"".join(
        (part / SAMPLES).read_bytes()[HEADER_BYTES:] for part in sorted(parts.glob("part-*"))
    )
    assert joined == (whole / SAMPLES).read_bytes()[HEADER_BYTES:]
    left = read_index(whole)
    right = read_index(parts)
    assert left.names.equals(right.names) and left.sample_rate == right.sample_rate
    assert np.array_equal(left.sample_offsets, right.sample_offsets)
    assert np.array_equal(left.checksums, right.checksums)
    assert verify(parts) == []
    run_command(f"pack {parts} --verify")
    run_command(f"pack {parts}/part-0002-of-0003 --verify")


def test_missing_parts(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    corpus = pack_parts(folder, tmp_path / "corpus", (2,), count=4)
    assert "1/4, 3/4, 4/4" in caplog.text
    for attempt in (lambda: open_source(corpus), lambda: pack(FolderInput(folder), corpus)):
        with pytest.raises(
            PackedError, match=r"not finished .* the parts 1/4, 3/4, 4/4 are missing"
        ):
            attempt()
    with pytest.raises(PackedError, match="the parts 1/4, 3/4, 4/4 are missing"):
        join_parts(corpus)
    with pytest.raises(PackedError, match=r"nothing: no parts"):
        join_parts(tmp_path / "nothing")


def test_parts_collected_by_hand(folder, tmp_path, parts):
    places = [pack_parts(folder, tmp_path / f"machine{number}", (number,)) for number in (1, 2, 3)]
    for place in places[1:]:
        for part in place.glob("part-*"):
            shutil.move(part, places[0] / part.name)
    with pytest.raises(PackedError, match="--merge"):
        open_source(places[0])
    run_command(f"pack {places[0]} --merge --verify")
    assert (places[0] / DESCRIPTION).read_bytes() == (parts / DESCRIPTION).read_bytes()
    # Older versions did not write `part_of`.
    (places[0] / DESCRIPTION).unlink()
    old = places[0] / "part-0002-of-0003" / DESCRIPTION
    description = json.loads(old.read_text())
    assert description.pop("part_of")
    old.write_text(json.dumps(description))
    run_command(f"pack {places[0]} --merge")


def test_foreign_parts(folder, tmp_path):
    corpus = pack_parts(folder, tmp_path / "corpus", (1,))
    fewer = FolderInput(folder, StringTable.from_strings(NAMES[:9]))
    for source, count, rate in (
        (fewer, 3, 16000),
        (FolderInput(folder), 3, 8000),
        (FolderInput(folder), 4, 16000),
    ):
        with pytest.raises(PackedError, match="different utterances, a different rate"):
            pack_part(source, corpus, WorkPart(2, count), sample_rate=rate)
    other = tmp_path / "other"
    for number in (2, 3):
        pack_part(fewer, other, WorkPart(number, 3))
        shutil.move(other / WorkPart(number, 3).name, corpus)
    with pytest.raises(PackedError, match="its parts have different lists or rates"):
        join_parts(corpus)
    with pytest.raises(PackedError, match="10 utterances, too few for 11 parts"):
        pack_part(FolderInput(folder), tmp_path / "many", WorkPart(1, 11))


def test_killed_before_joining(folder, tmp_path, parts):
    """The command of any part joins them."""
    corpus = pack_parts(folder, tmp_path / "corpus")
    (corpus / DESCRIPTION).unlink()
    pack_parts(folder, corpus, (1,))
    assert (corpus / DESCRIPTION).read_bytes() == (parts / DESCRIPTION).read_bytes()


def test_damage(folder, tmp_path):
    corpus = pack_parts(folder, tmp_path / "corpus")
    kept = (corpus / DESCRIPTION).read_text()
    for damage, message in (
        (lambda found: found["parts"][0].update(name="../elsewhere"), "elsewhere"),
        (lambda found: found["parts"][1].update(index_sha256="0"), "not the part that"),
        (lambda found: found.update(version=3), "version 3, but this speakernet reads 2"),
    ):
        description = json.loads(kept)
        damage(description)
        (corpus / DESCRIPTION).write_text(json.dumps(description))
        with pytest.raises(PackedError, match=message):
            read_index(corpus)
    (corpus / DESCRIPTION).write_text(kept)
    (corpus / "part-0002-of-0003").rename(tmp_path / "taken away")
    with pytest.raises(PackedError, match="part-0002-of-0003: not a packed corpus"):
        read_index(corpus)
