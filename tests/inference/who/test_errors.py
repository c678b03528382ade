"""Diarization error rates: numbers worked out by hand, and an independent count of frames."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from speakernet.inference.who.errors import diarization_errors
from speakernet.inference.who.rttm import merge_turns

X = ("x", "1")


def turns_of(*turns):
    """Turns `(start, stop, speaker)` of a recording, as `read_turns` gives them."""
    speakers = {}
    for start, stop, speaker in turns:
        speakers.setdefault(speaker, []).append((start, stop))
    return {
        X: {
            speaker: merge_turns(np.array(stretches, dtype=float))
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
        lines = [
            f"SPEAKER {file} {channel} {start} {stop - start} <NA> <NA> {who} <NA> <NA>\n"
            for file, start, stop, who in turns
        ]
        path.write_text("".join(lines))
        return path

    return write


@pytest.fixture
def der(call):
    """Runs `der`: the figures of each line of its table (none in lines without), and its text."""

    def run(words):
        status, out, err = call(f"der {words}")
        assert status == 0, err
        figures = []
        for line in out.splitlines()[1:]:
            numbers = line.split()[1:6]
            is_row = numbers and all(number.replace(".", "").isdigit() for number in numbers)
            figures.append([float(number) for number in numbers] if is_row else [])
        return figures, out

    return run


def test_command(written, tmp_path, der, refuse):
    true = written("true.rttm", ("x", 0, 10, "a"), ("x", 8, 16, "b"), ("y", 0, 4, "c"))
    # 22 s of speech: 1 s missed in x (half of the overlap), 2 s of false alarm in y, 1 s of b
    # attributed to a.
    ours = written(
        "ours.rttm", ("x", 0, 10, "1"), ("x", 9, 15, "2"), ("x", 15, 16, "1"), ("y", 0, 6, "1")
    )
    nothing = written("nothing.rttm", ("x", 0, 0, "1"), ("y", 0, 0, "1"))
    (of_all, of_x, of_y, _, of_nothing, *_), out = der(f"{true} {ours} {nothing} --each")
    assert of_all[:4] == pytest.approx([400 / 22, 100 / 22, 200 / 22, 100 / 22], abs=0.006)
    # Shared by reference and hypothesis: 10 of 11 s of a, 6 of 8 s of b.
    jaccard = 100 * (1 / 11 + 2 / 8) / 2
    assert of_x == pytest.approx([200 / 18, 100 / 18, 0, 100 / 18, jaccard], abs=0.006)
    assert of_y == pytest.approx([50, 0, 50, 0, 100 / 3], abs=0.006)
    assert of_nothing[0] == 100
    # Two recordings give no interval, five do.
    last = out.splitlines()[-1]
    assert "against" in last and "at least 5" in last and "significant" not in last
    first, second = (
        written(f"{name}.rttm", *[(str(n), 0, 4 + n * more, "a") for n in range(5)])
        for name, more in (("p", 0), ("q", 1))
    )
    assert "significant" in der(f"{first} {first} {second}")[1].splitlines()[-1]
    (tmp_path / "only.uem").write_text("x 1 0 8\ny 1 0 4\n")
    assert der(f"{true} {ours} --uem {tmp_path}/only.uem")[0][0][0] == 0
    (tmp_path / "bad.rttm").write_text("SPEAKER x 1 zero 1 <NA> <NA> a <NA> <NA>\n")
    (tmp_path / "lacks.uem").write_text("x 1 0 8\n")
    (tmp_path / "back.uem").write_text("x 1 0 8\ny 1 4 0\n")
    (tmp_path / "empty.rttm").write_text("")
    for words, value in {
        f"{true} {tmp_path}/bad.rttm": "line 1",
        f"{true} {ours} --draws 0": "--draws 0",
        f"{true} {ours} --collar -1": "--collar -1",
        f"{true} {ours} --collar 100": "100 s",
        f"{true} {ours} --uem {tmp_path}/lacks.uem": "for y",
        f"{true} {ours} --uem {tmp_path}/back.uem": "line 2",
        f"{true} {ours} --uem {tmp_path}/none.uem": "UEM",
        f"{true} {tmp_path}/none.rttm": "none.rttm",
        f"{true} {tmp_path}/empty.rttm": "empty",
    }.items():
        assert value in refuse(f"der {words}")


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
    """The same by counting frames of 10 ms."""
    at = np.arange(0, 40, 0.01) + 0.005

    def frames_in(stretches):
        return np.any([(start <= at) & (at < stop) for start, stop in stretches], axis=0)

    def spoken(turns):
        return np.array([frames_in(stretches) for stretches in turns_of(*turns)[X].values()])

    ours = spoken(true)  # (speakers, frames)
    theirs = spoken(claimed)
    is_scored = frames_in(regions)
    shared = (ours[:, None] & theirs & is_scored).sum(axis=2)
    rows, columns = linear_sum_assignment(-shared)
    for border in np.concatenate(list(turns_of(*true)[X].values())).ravel():
        is_scored &= np.abs(at - border) > collar
    num_true = ours.sum(axis=0)
    num_claimed = theirs.sum(axis=0)
    if skips_overlap:
        is_scored &= num_true < 2
    num_right = (ours[rows] & theirs[columns]).sum(axis=0)
    parts = [
        np.maximum(num_true - num_claimed, 0),
        np.maximum(num_claimed - num_true, 0),
        np.minimum(num_true, num_claimed) - num_right,
    ]
    return [100 * part[is_scored].sum() / num_true[is_scored].sum() for part in parts]


def test_against_counting_frames():
    random = np.random.default_rng(0)

    def drawn(count, names):
        starts = random.integers(0, 3000, size=count) / 100
        stops = starts + random.integers(20, 700, size=count) / 100
        speakers = random.choice(list(names), size=count)
        return list(zip(starts.tolist(), stops.tolist(), speakers.tolist(), strict=True))

    for _ in range(20):
        true = drawn(10, "abcd")
        claimed = drawn(10, "wxyz")
        regions = [(2.0, 18.5), (20.0, 33.0)]
        for collar, skips_overlap in itertools.product((0.0, 0.25), (False, True)):
            expected = frame_rates(true, claimed, regions, collar, skips_overlap)
            measured = rates(true, claimed, regions, collar=collar, skips_overlap=skips_overlap)
            assert measured[:4] == pytest.approx([sum(expected), *expected])


def test_jaccard_error_rate():
    # a and x share 8 of 12 s; b has nobody.
    assert rates([(0, 10, "a"), (20, 25, "b")], [(2, 12, "x")])[4] == pytest.approx(
        100 * (1 - 8 / 12 + 1) / 2
    )


def test_reference_without_speech(written, tmp_path, der):
    silent = written("silent.rttm")
    _, out = der(f"{silent} {written('talks/silent.rttm', ('silent', 1, 3.5, 'a'))} --each")
    assert out.count("undefined: no speech in the reference, 2.50 s of false alarms") == 2
    assert "no interval" in out
    _, out = der(f"{silent} {written('other/silent.rttm')} {silent}")
    assert "0.00 s of false alarms" in out and "DER undefined" in out and "nan" not in out
    # A silent recording among others: its false alarms count for the whole.
    written("true/s.rttm")
    written("true/x.rttm", ("x", 0, 5, "a"))
    ours = written("ours.rttm", ("s", 0, 1, "a"), ("x", 0, 5, "a"))
    (of_all, of_s, of_x, *_), out = der(f"{tmp_path}/true {ours} --each")
    assert of_all[0] == 20 and not of_s and of_x[0] == 0
    assert "1.00 s of false alarms" in out.splitlines()[2]


def test_draws_without_speech_are_left_out(written, tmp_path, der):
    # Most draws of five recordings hold only silent ones.
    for number in range(5):
        written(f"true/{number}.rttm", *[(str(number), 0, 10, "a")] * (number == 0))
    folder = tmp_path / "true"
    _, out = der(f"{folder} {folder} {written('ours.rttm', ('0', 0, 5, 'a'))}")
    assert "interval 0.00 to 0.00" in out and "nan" not in out
    assert "interval +50.00 to +50.00: significant" in out


def test_channels(written, tmp_path, der, refuse):
    first = written("first.txt", ("x", 0, 10, "a"))
    second = written("second.txt", ("x", 0, 10, "b"), channel="2")
    true = tmp_path / "true.rttm"
    true.write_text(first.read_text() + second.read_text())
    _, out = der(f"{true} {true} --each")
    assert "x (channel 2)" in out and "2 of 2" in out
    # Channel 2 is silent in the hypothesis, and channel 1 is all of it.
    single = written("single.rttm", ("x", 0, 10, "a"))
    assert der(f"{true} {single}")[0][0][:4] == [50, 50, 0, 0]
    # A single channel is the same channel whatever its number.
    zero = written("zero.rttm", ("x", 0, 10, "s"), channel="0")
    assert der(f"{single} {zero}")[0][0][0] == 0
    (tmp_path / "first.uem").write_text("x 1 0 5\n")
    assert "x (channel 2)" in refuse(f"der {true} {true} --uem {tmp_path}/first.uem")


def test_folders(written, tmp_path, der, refuse):
    true = written("true.rttm", ("x", 0, 10, "a"), ("x", 8, 12, "b"))
    # The exclusive turns that `who` writes are no second hypothesis, unless they are alone or
    # named.
    everything = written("out/x.rttm", ("x", 0, 10, "1"), ("x", 8, 12, "2"))
    exclusive = written("out/x.exclusive.rttm", ("x", 0, 9, "1"), ("x", 9, 12, "2"))
    figures, _ = der(f"{true} {tmp_path}/out {exclusive}")
    rates = [row[0] for row in figures if row]
    assert rates == pytest.approx([0, 100 * 2 / 14], abs=0.006)
    everything.unlink()
    assert der(f"{true} {tmp_path}/out")[0][0][0] == pytest.approx(100 * 2 / 14, abs=0.006)
    # Turns of one recording in two files are not added up.
    written("both/x.rttm", ("x", 0, 10, "a"))
    (tmp_path / "both" / "x.ctm").write_text("x 1 0 10 word 1.0 lex a\n")
    err = refuse(f"der {true} {tmp_path}/both")
    assert "x.ctm" in err and "x.rttm" in err
