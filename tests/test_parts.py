"""Work in parts: what `--part` may say, who does which rows, and which parts are missing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from speakernet.parts import PartError, WorkPart, list_parts, missing_parts, parse_part, parts_in, share


@given(some.integers(0, 200), some.integers(1, 40))
def test_the_parts_one_after_the_other_are_the_whole(num_rows: int, count: int) -> None:
    shares = [share(range(num_rows), number, count) for number in range(1, count + 1)]
    assert [row for one in shares for row in one] == list(range(num_rows))
    sizes = {len(one) for one in shares}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3/2", "there is no part 3 of 2; the parts are counted from 1, so give 1/2 to 2/2"),
        ("0/4", "there is no part 0 of 4"),
        ("1/0", "0 parts; expected 1 to 9999"),
        ("2", "expected i/n, such as 2/4"),
        ("-1/4", "expected i/n"),
        ("1/4/2", "expected i/n"),
        ("", "expected i/n"),
        ("99999999999999999999/4", "expected i/n"),
    ],
)
def test_what_is_no_part_is_refused(text: str, message: str) -> None:
    with pytest.raises(PartError, match=message):
        parse_part(text)


def test_parts_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("part-0002-of-0003.npz", "part-0001-of-0003.npz", "part-0003-of-0003", "other.npz"):
        (tmp_path / name).touch()
    found = list(parts_in(tmp_path, ".npz"))
    assert found == [WorkPart(1, 3), WorkPart(2, 3)]
    assert list_parts(missing_parts(found, tmp_path)) == "3/3"
    assert parts_in(tmp_path / "nothing") == {}


def test_parts_of_different_numbers_are_told_apart() -> None:
    with pytest.raises(PartError, match="holds parts of 3 and of 4"):
        missing_parts([WorkPart(1, 3), WorkPart(2, 4)], "corpus")


def test_many_missing_parts_are_counted() -> None:
    assert list_parts([WorkPart(one, 30) for one in range(1, 31)]).endswith("20/30 and 10 more")
