"""Diarization error rates: numbers worked out by hand, and an independent count of frames."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from speakernet.cli import main
from speakernet.inference.who.errors import diarization_errors
from speakernet.inference.who.rttm import merged

X = ("x", "1")


def turns_of(*turns):
    """Turns `(start, stop, speaker)` of a recording, as `read_turns` gives them."""
    speakers = {}
    for start, stop, speaker in turns:
        speakers.setdefault(speaker, []).append((start, stop))
    return {
        X: {
            speaker: merged(np.array(stretches, dtype=float))
            for speaker, stretches in speakers.items()
        }
    }


def rates(true, claimed, regions=None, **options):
    """DER, missed, false alarms, confusion, JER in percent."""
    scored = None if regions is None else {X: np.array(regions, dtype=float)}
    errors = diarization_errors(
        turns_of(*true), turns_of(*claimed), scored, **{"collar": 0.0, **options}
    )
    return errors.rates().tolist()


@pytest.fixture
def written(tmp_path):
    """Writes turns `(recording, start, stop, speaker)` as RTTM; `channel` is that of all lines."""

    def write(name, *turns, channel="1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            f"SPEAKER {file} {channel} {a} {b - a} <NA> <NA> {who} <NA> <NA>\n"
            for file, a, b, who in turns
        )
        path.write_text("".join(lines))
        return str(path)

    return write


def table(capsys):
    """The figures of each line of the table, by name; the text of lines without figures."""
    found = {}
    for line in capsys.readouterr().out.splitlines()[1:]:
        words = line.split()
        found[words[0]] = (
            [float(word) for word in words[1:6]] if words[1].replace(".", "").isdigit() else line
        )
    return found


def test_command(written, tmp_path, capsys):
    true = written("true.rttm", ("x", 0, 10, "a"), ("x", 8, 16, "b"), ("y", 0, 4, "c"))
    # 22 s of speech: 1 s missed in x (half of the overlap), 2 s of false alarm in y, 1 s of b
    # attributed to a.
    ours = written(
        "ours.rttm", ("x", 0, 10, "1"), ("x", 9, 15, "2"), ("x", 15, 16, "1"), ("y", 0, 6, "1")
    )
    nothing = written("nothing.rttm", ("x", 0, 0, "1"), ("y", 0, 0, "1"))
    assert main(["der", true, ours, nothing, "--each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    of_all, of_x, of_y = (np.array(line.split()[1:6], dtype=float) for line in lines[1:4])
    assert of_all[:4] == pytest.approx([400 / 22, 100 / 22, 200 / 22, 100 / 22], abs=0.006)
    assert of_x[:4] == pytest.approx([200 / 18, 100 / 18, 0, 100 / 18], abs=0.006)
    assert of_y == pytest.approx([50, 0, 50, 0, 100 / 3], abs=0.006)
    # Shared by reference and hypothesis: 10 of 11 s of a, 6 of 8 s of b.
    assert of_x[4] == pytest.approx(100 * (1 / 11 + 2 / 8) / 2, abs=0.006)
    assert float(lines[5].split()[1]) == 100 and "against" in lines[-1]
    # Two recordings give no interval, five do.
    assert "at least 5" in lines[-1] and "significant" not in lines[-1]
    five = [
        written(f"{name}.rttm", *[(str(n), 0, 4 + n * more, "a") for n in range(5)])
        for name, more in (("p", 0), ("q", 1))
    ]
    assert main(["der", five[0], *five]) == 0
    assert "significant" in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "only.uem").write_text("x 1 0 8\ny 1 0 4\n")
    assert main(["der", true, ours, "--uem", str(tmp_path / "only.uem")]) == 0
    assert float(capsys.readouterr().out.splitlines()[1].split()[1]) == 0
    (tmp_path / "bad.rttm").write_text("SPEAKER x 1 zero 1 <NA> <NA> a <NA> <NA>\n")
    (tmp_path / "lacks.uem").write_text("x 1 0 8\n")
    (tmp_path / "back.uem").write_text("x 1 0 8\ny 1 4 0\n")
    (tmp_path / "empty.rttm").write_text("")
    for words, part in {
        (true, str(tmp_path / "bad.rttm")): "line 1",
        (true, ours, "--draws", "0"): "--draws 0",
        (true, ours, "--collar", "-1"): "--collar -1",
        (true, ours, "--collar", "100"): "100 s",
        (true, ours, "--uem", str(tmp_path / "lacks.uem")): "for y",
        (true, ours, "--uem", str(tmp_path / "back.uem")): "line 2",
        (true, ours, "--uem", str(tmp_path / "none.uem")): "UEM",
        (true, str(tmp_path / "none.rttm")): "none.rttm",
        (true, str(tmp_path / "empty.rttm")): "empty",
    }.items():
        assert main(["der", *words]) == 1, words
        err = capsys.readouterr().err
        assert part in err and "Traceback" not in err, err


def test_turns_of_one_speaker_count_once():
    whole = [(0, 10, "s")]
    for pieces in (
        [(0, 7, "a"), (4, 10, "a")],
        [(0, 10, "a"), (0, 10, "a")],
        [(0, 10, "a"), (3, 5, "a")],
    ):
        assert rates(pieces, whole) == [0, 0, 0, 0, 0]
        assert rates(whole, pieces) == [0, 0, 0, 0, 0]
    # Two people at once are two seconds of speech a second: of 12 s, 2 s are missed and 4 s
    # confused.
    two = [(0, 6, "a"), (4, 10, "b")]
    assert rates(two, whole)[:4] == pytest.approx([50, 100 * 2 / 12, 0, 100 * 4 / 12])
    # Borders inside a merged turn have no collar: all but 2 x 0.5 s is scored, and 1 s of that is
    # missed.
    assert rates([(0, 7, "a"), (4, 10, "a")], [(0, 4, "x"), (5, 10, "x")], collar=0.5)[
        0
    ] == pytest.approx(100 / 9)


def test_speakers_are_mapped_before_overlaps_are_excluded():
    # x shares 6 s with a and with b, which overlap, and 4 s with c: it is not c, so the 4 s that
    # are scored are wrong.
    true = [(0, 6, "a"), (0, 6, "b"), (6, 10, "c")]
    claimed = [(0, 10, "x")]
    assert rates(true, claimed, skips_overlap=True)[:4] == [100, 0, 0, 100]
    # Outside the scored regions, nothing counts for the mapping either.
    assert rates(true, claimed, regions=[(5, 10)], skips_overlap=True)[:4] == [0, 0, 0, 0]


def test_collars_are_excluded_after_mapping():
    # With collars of 1 s, 2 s of a and 3 s of b are left; x shares 4 s with a, 5 s with b.
    true = [(0, 4, "a"), (4, 9, "b")]
    claimed = [(0, 9, "x")]
    assert rates(true, claimed, collar=1.0)[:4] == [40, 0, 0, 40]


def frame_rates(true, claimed, regions, collar, skips_overlap):
    """The same by counting frames of 10 ms and trying every mapping."""
    at = np.arange(0, 40, 0.01) + 0.005

    def spoken(turns):
        return np.array(
            [
                np.any(
                    [(start <= at) & (at < stop) for start, stop, who in turns if who == name],
                    axis=0,
                )
                for name in sorted({speaker for *_, speaker in turns})
            ]
        )

    a = spoken(true)
    b = spoken(claimed)
    inside = np.any([(start <= at) & (at < stop) for start, stop in regions], axis=0)
    size = max(len(a), len(b))
    a, b = (
        np.concatenate([rows, np.zeros((size - len(rows), len(at)), dtype=bool)]) for rows in (a, b)
    )
    shared = (a[:, None] & b[None] & inside).sum(axis=2)
    best = max(
        itertools.permutations(range(size)), key=lambda order: sum(shared[range(size), order])
    )
    is_scored = inside.copy()
    for name in {speaker for *_, speaker in true}:
        stretches = merged(
            np.array([(start, stop) for start, stop, who in true if who == name], dtype=float)
        )
        for border in stretches.ravel():
            is_scored &= (at < border - collar) | (at > border + collar)
    if skips_overlap:
        is_scored &= a.sum(axis=0) < 2
    num_true = a.sum(axis=0)
    num_claimed = b.sum(axis=0)
    right = (a & b[list(best)]).sum(axis=0)
    parts = [
        np.maximum(num_true - num_claimed, 0),
        np.maximum(num_claimed - num_true, 0),
        np.minimum(num_true, num_claimed) - right,
    ]
    total = num_true[is_scored].sum()
    return [100 * part[is_scored].sum() / total for part in parts]


def test_against_counting_frames():
    random = np.random.default_rng(0)

    def drawn(count, names):
        starts = random.integers(0, 3000, size=count) / 100
        stops = starts + random.integers(20, 700, size=count) / 100
        return [
            (float(a), float(b), str(random.choice(list(names))))
            for a, b in zip(starts, stops, strict=True)
        ]

    for _ in range(20):
        true = drawn(10, "abcd")
        claimed = drawn(10, "wxyz")
        regions = [(2.0, 18.5), (20.0, 33.0)]
        for collar, skips_overlap in itertools.product((0.0, 0.25), (False, True)):
            expected = frame_rates(true, claimed, regions, collar, skips_overlap)
            measured = rates(true, claimed, regions, collar=collar, skips_overlap=skips_overlap)
            assert measured[0] == pytest.approx(sum(expected)) and measured[1:4] == pytest.approx(
                expected
            )


def test_jaccard_error_rate():
    # a and x share 8 of 12 s; b has nobody.
    assert rates([(0, 10, "a"), (20, 25, "b")], [(2, 12, "x")])[4] == pytest.approx(
        100 * (1 - 8 / 12 + 1) / 2
    )


def test_reference_without_speech(written, capsys):
    silent = written("silent.rttm")
    assert (
        main(["der", silent, written("talks/silent.rttm", ("silent", 1, 3.5, "a")), "--each"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        out.count("undefined: no speech in the reference, 2.50 s of false alarms") == 2
        and "no interval" in out
    )
    assert main(["der", silent, written("other/silent.rttm"), silent]) == 0
    out = capsys.readouterr().out
    assert "0.00 s of false alarms" in out and "DER undefined" in out and "nan" not in out
    # A silent recording among others: its false alarms count for the whole.
    true = [
        written(f"true/{name}.rttm", *turns)
        for name, turns in (("s", []), ("x", [("x", 0, 5, "a")]))
    ]
    ours = written("ours.rttm", ("s", 0, 1, "a"), ("x", 0, 5, "a"))
    assert true and main(["der", true[0].removesuffix("/s.rttm"), ours, "--each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1].split()[1] == "20.00"
        and "1.00 s of false alarms" in lines[2]
        and lines[3].split()[1] == "0.00"
    )


def test_draws_without_speech_are_left_out(written, capsys):
    # Most draws of five recordings hold only silent ones.
    true = [
        written(f"true/{n}.rttm", *([(str(n), 0, 10, "a")] if n == 0 else [])) for n in range(5)
    ]
    folder = true[0].removesuffix("/0.rttm")
    assert main(["der", folder, folder, written("ours.rttm", ("0", 0, 5, "a"))]) == 0
    out = capsys.readouterr().out
    assert (
        "interval 0.00 to 0.00" in out
        and "interval +50.00 to +50.00: significant" in out
        and "nan" not in out
    )


def test_channels(written, tmp_path, capsys):
    def both(name, first, second):
        one, two = (
            written(f"{name}{n}.txt", *turns, channel=n) for n, turns in ((1, first), (2, second))
        )
        (tmp_path / name).write_text(Path(one).read_text() + Path(two).read_text())
        return str(tmp_path / name)

    true = both("true.rttm", [("x", 0, 10, "a")], [("x", 0, 10, "b")])
    assert main(["der", true, true, "--each"]) == 0
    assert "x (channel 2)" in (out := capsys.readouterr().out) and "2 of 2" in out
    # Channel 2 is silent in the hypothesis, and channel 1 is all of it.
    assert main(["der", true, written("one.rttm", ("x", 0, 10, "a"))]) == 0
    assert table(capsys)[str(tmp_path / "one.rttm")[-23:]][:4] == [50, 50, 0, 0]
    # A single channel is the same channel whatever its number.
    single = written("single.rttm", ("x", 0, 10, "a"))
    assert main(["der", single, written("zero.rttm", ("x", 0, 10, "s"), channel="0")]) == 0
    assert table(capsys)[str(tmp_path / "zero.rttm")[-23:]][0] == 0
    (tmp_path / "one.uem").write_text("x 1 0 5\n")
    assert main(["der", true, true, "--uem", str(tmp_path / "one.uem")]) == 1
    assert "x (channel 2)" in capsys.readouterr().err


def test_folders(written, tmp_path, capsys):
    true = written("true.rttm", ("x", 0, 10, "a"), ("x", 8, 12, "b"))
    # The exclusive turns that `who` writes are no second hypothesis, unless they are alone or
    # named.
    written("out/x.rttm", ("x", 0, 10, "1"), ("x", 8, 12, "2"))
    exclusive = written("out/x.exclusive.rttm", ("x", 0, 9, "1"), ("x", 9, 12, "2"))
    assert main(["der", true, str(tmp_path / "out"), exclusive]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[1].split()[1]) == 0 and float(lines[3].split()[1]) == pytest.approx(
        100 * 2 / 14, abs=0.006
    )
    (tmp_path / "out" / "x.rttm").unlink()
    assert main(["der", true, str(tmp_path / "out")]) == 0
    assert float(capsys.readouterr().out.splitlines()[1].split()[1]) == pytest.approx(
        100 * 2 / 14, abs=0.006
    )
    # Turns of one recording in two files are not added up.
    written("both/x.rttm", ("x", 0, 10, "a"))
    (tmp_path / "both" / "x.ctm").write_text("x 1 0 10 word 1.0 lex a\n")
    assert main(["der", true, str(tmp_path / "both")]) == 1
    error = capsys.readouterr().err
    assert "x.ctm" in error and "x.rttm" in error


def test_many_turns():
    # Every second of 10,000 one of three people speaks; x, y and z say so in half of the seconds
    # each.
    true = [(second, second + 1, "abc"[second % 3]) for second in range(10000)]
    claimed = [(second, second + 1, "xyz"[second % 3]) for second in range(0, 10000, 2)]
    assert rates(true, claimed)[:4] == pytest.approx([50, 50, 0, 0], abs=0.02)
