"""The store of people: who is nearest, two processes, kills, other models, keys, and nothing left after a purge."""

import multiprocessing
import os
import sqlite3
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from speakernet.inference.people import PeopleStore
from speakernet.inference.store_file import APPLICATION_ID, backups_of

DIM = 16
NAMES = ["Zoë O'Brien", "José; DROP TABLE people;--", "名前", "a/b\\c", "  spaced  out ", '"quoted" 🙂', "%s %d \\n"]

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
needs_fork = pytest.mark.skipif(FORK is None, reason="this system starts processes in another way")


def opened(path: Path, **how) -> PeopleStore:
    return PeopleStore(path, **{"fingerprint": "model", "embedding_dim": DIM, **how})


def voice(seed: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def enrol_many(path: Path, name: str, count: int, said) -> None:
    """What another process does."""
    with opened(path) as store:
        for number in range(count):
            store.enroll(f"{name}{number}", voice(number, 2))
            said.send(number)


def other_process(path: Path, name: str, count: int):
    """A process that enrols, and the end of a pipe that says whom it has committed."""
    heard, said = FORK.Pipe(duplex=False)
    process = FORK.Process(target=enrol_many, args=(path, name, count, said), daemon=True)
    process.start()
    said.close()
    return process, heard


def test_scores_are_cosines_with_the_weighted_mean_of_units_less_the_mean(tmp_path):
    mean = voice(99)[0]
    weights = np.array([1.0, 5.0, 0.5], dtype=np.float32)
    with opened(tmp_path / "p.db", mean=mean) as store:
        store.enroll_many((f"p{person:02d}", voice(person, 3), weights, ()) for person in range(30))
        found = dict(store.identify(voice(500), top=30))
    for person in range(30):
        average = (unit(voice(person, 3) - mean) * weights[:, None]).sum(axis=0)
        assert found[f"p{person:02d}"] == pytest.approx(float(unit(average) @ unit(voice(500) - mean)[0]), abs=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True) and len(found) == 30


def test_names_are_any_line_and_come_back(tmp_path):
    with opened(tmp_path / "p.db") as store:
        for number, name in enumerate(NAMES):
            store.enroll(name, voice(number))
        assert {one.name for one in store.people()} == {name.strip() for name in NAMES}
        assert [store.identify(voice(number), top=1)[0][0] for number in range(len(NAMES))] == [
            name.strip() for name in NAMES
        ]
        # Composed and decomposed letters are one name.
        assert store.enroll("Zoe\u0308 O'Brien", voice(50)) == 2
    for name in ["", "   ", "two\nlines", "null\0", "Unknown", "x" * 201, "\udcff"]:
        with opened(tmp_path / "p.db") as store, pytest.raises(ValueError, match=r"name|called"):
            store.enroll(name, voice(0))


@pytest.mark.parametrize(
    ("embeddings", "weights", "message"),
    [
        (np.zeros((1, 3)), None, r"shape \(1, 3\); expected \(recordings, 16\)"),
        (np.zeros((0, DIM)), None, "expected"),
        (np.full((1, DIM), np.nan), None, "NaN"),
        (np.ones((2, DIM)), [1.0], "expected 2 numbers above 0"),
        (np.ones((1, DIM)), [0.0], "above 0"),
        (np.ones((1, DIM)), [np.inf], "above 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_nothing_is_written(tmp_path, embeddings, weights, message):
    with opened(tmp_path / "p.db") as store:
        with pytest.raises(ValueError, match=message):
            store.enroll("Ada", embeddings, weights)
        assert store.people() == [] and store.identify(voice(0)) == []


@needs_fork
def test_another_process_is_seen_and_both_write(tmp_path):
    path = tmp_path / "p.db"
    # Both may make the file.
    other, _heard = other_process(path, "theirs", 8)
    with opened(path) as store:
        for number in range(8):
            store.enroll(f"mine{number}", voice(2000 + number))
            store.identify(voice(0))
        other.join(60)
        assert other.exitcode == 0 and len(store) == 16
        assert store.identify(voice(3, 2)[0], top=1)[0][0] == "theirs3"
        with opened(path) as another:
            another.remove("theirs3")
        assert store.identify(voice(3, 2)[0], top=1)[0][0] != "theirs3"


@needs_fork
def test_a_killed_process_loses_what_it_had_not_committed_and_nothing_else(tmp_path):
    path = tmp_path / "p.db"
    running, heard = other_process(path, "p", 100_000)
    last = [heard.recv() for _ in range(10)][-1]
    running.kill()
    running.join()
    while heard.poll():
        try:
            last = heard.recv()
        except EOFError:
            break
    with opened(path) as store:
        there = {one.name: one.recordings for one in store.people()}
        # What was under way may be there whole, or not at all.
        assert set(there) - {f"p{last + 1}"} == {f"p{number}" for number in range(last + 1)}
        assert set(there.values()) == {2}
        store.enroll("after", voice(1))


def test_threads_share_a_store(tmp_path):
    problems = []

    def work(store, thread):
        try:
            for number in range(4):
                store.enroll(f"t{thread}-{number}", voice(100 * thread + number))
                assert store.identify(voice(100 * thread + number), top=1)[0][0] == f"t{thread}-{number}"
        except Exception as error:
            problems.append(error)

    with opened(tmp_path / "p.db") as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert problems == [] and len(store) == 16


def test_another_models_store_is_refused_with_advice_and_untouched(tmp_path):
    path = tmp_path / "p.db"
    with opened(path, model="old.pt") as store:
        store.enroll("Ada", voice(0))
    before = path.read_bytes()
    for other in ({"fingerprint": "other"}, {"embedding_dim": 8}):
        with pytest.raises(ValueError, match=r"of another model: old.pt .*`speakernet people reembed --model new.pt"):
            opened(path, model="new.pt", **other)
    assert path.read_bytes() == before


def test_going_over_to_another_model_keeps_a_backup_and_refuses_half_the_work(tmp_path):
    path = tmp_path / "p.db"

    def embed(one):
        if one.source == "gone.wav":
            raise ValueError("gone.wav: cannot be read")
        return np.arange(4) + one.weight

    with opened(path) as store:
        store.enroll("Ada", voice(0, 2), [1.0, 2.0], [{"source": "a.wav"}, {"source": "b.wav"}])
        store.enroll("Bo", voice(1), [1.0], [{"source": "gone.wav"}])
    before = path.read_bytes()
    with opened(path) as store:
        with pytest.raises(ValueError, match=r"1 of 3 recordings .* nothing was changed: Bo: gone.wav"):
            store.reembed(embed, fingerprint="new", embedding_dim=4)
        assert path.read_bytes() == before and backups_of(path) == []
        problems = store.reembed(embed, fingerprint="new", embedding_dim=4, drops_missing=True)
        assert problems == ["Bo: gone.wav: cannot be read"]
        assert [one.name for one in store.people()] == ["Ada"]
        np.testing.assert_array_equal(store.recordings("Ada")[1].embedding, np.arange(4) + 2)
        assert store.identify(np.ones(4))[0][0] == "Ada"
    with opened(path, fingerprint="new", embedding_dim=4) as store:
        assert store.facts["embedding_dim"] == 4
    (backup,) = backups_of(path)
    with opened(backup) as store:
        assert {one.name for one in store.people()} == {"Ada", "Bo"}


def test_a_store_that_went_over_meanwhile_is_noticed(tmp_path):
    with opened(tmp_path / "p.db") as store:
        store.enroll("Ada", voice(0))
        store.identify(voice(0))
        with opened(tmp_path / "p.db") as other:
            other.reembed(lambda one: np.ones(4), fingerprint="new", embedding_dim=4)
        with pytest.raises(ValueError, match="went over to another model"):
            store.identify(voice(0))
        with pytest.raises(ValueError, match="went over to another model"):
            store.enroll("Bo", voice(1))


@pytest.mark.parametrize("key", [None, "a passphrase"])
def test_purge_leaves_nothing_readable_in_any_file(tmp_path, key):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    secret = voice(7777, 40)
    with opened(path, key=key) as store:
        store.enroll_many(
            (f"person{person}", voice(person, 3), None, [{"source": f"place{person}.wav"}] * 3) for person in range(40)
        )
        store.enroll("Melusine Purged", secret, None, [{"source": "hidden/melusine.wav", "warnings": "noisy"}] * 40)
        with opened(path, key=key) as other:
            other.reembed(lambda one: one.embedding, fingerprint="model", embedding_dim=DIM)
    traces = [b"Melusine", b"melusine.wav", *(row.tobytes() for row in secret)]
    names = [b"Melusine", b"melusine.wav"] if key else traces
    held = b"".join(one.read_bytes() for one in tmp_path.iterdir())
    assert all(trace in held for trace in names)
    assert not key or not any(row.tobytes() in held for row in secret)
    with opened(path, key=key) as store:
        files = store.purge("Melusine Purged")
        assert len(files) == 2 and len(store) == 40
        assert store.identify(voice(3, 3)[0], top=1)[0][0] == "person3"
        with pytest.raises(ValueError, match="nobody is called 'Melusine Purged'"):
            store.purge("Melusine Purged")
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        assert not any(trace in content for trace in traces), file
    assert {one.name for one in tmp_path.iterdir()} == {path.name, backups_of(path)[0].name}


def test_removing_overwrites_but_keeps_backups(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store:
        store.enroll("Ada Removed", voice(0, 3))
        store.reembed(lambda one: one.embedding, fingerprint="model", embedding_dim=DIM)
        assert store.remove("Ada Removed") == 3
        with pytest.raises(ValueError, match="nobody is called 'Ada Removed'"):
            store.remove("Ada Removed")
    assert b"Ada Removed" not in path.read_bytes()
    assert b"Ada Removed" in backups_of(path)[0].read_bytes()


def test_keys_open_what_they_sealed_and_nothing_else(tmp_path):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    with opened(path, key=b"right") as store:
        store.enroll("Ada", voice(0))
        store.enroll("Bo", voice(1))
    assert voice(0).tobytes() not in path.read_bytes()
    for key, message in ((None, "is encrypted; give its key"), ("wrong", "does not open with this key"), ("", "empty")):
        with pytest.raises(ValueError, match=message):
            opened(path, key=key)
    with opened(path, key="right") as store:
        assert store.identify(voice(1), top=1)[0] == ("Bo", pytest.approx(1.0, abs=1e-5))
    # Without the key people can be listed and removed, not read.
    with PeopleStore(path, fingerprint=None, embedding_dim=None) as store:
        assert [one.name for one in store.people()] == ["Ada", "Bo"] and store.facts["is_encrypted"]
        for ask in (store.recordings, lambda: store.export(tmp_path / "x.json")):
            with pytest.raises(ValueError, match="is encrypted; give its key"):
                ask()
    connection = sqlite3.connect(path)
    connection.execute(
        "UPDATE recordings SET (embedding, checksum) = (SELECT embedding, checksum FROM recordings WHERE person = 1)"
    )
    connection.commit()
    connection.close()
    with opened(path, key="right") as store, pytest.raises(ValueError, match="damaged"):
        store.identify(voice(0))
    with opened(tmp_path / "plain.db"), pytest.raises(ValueError, match="not encrypted"):
        opened(tmp_path / "plain.db", key="right")


def test_files_that_are_no_store_are_refused_and_left_as_they_are(tmp_path):
    (tmp_path / "text.db").write_text("people of mine\n" * 10)
    (tmp_path / "empty.db").touch()
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE people (name TEXT)")
    other.commit()
    other.close()
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    newer.execute("PRAGMA user_version = 9")
    newer.execute("CREATE TABLE people (name TEXT)")
    newer.commit()
    newer.close()
    with zipfile.ZipFile(tmp_path / "zip.db", "w") as archive:
        archive.writestr("a", "b")
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    messages = {"text": "another kind of file", "other": "another program", "newer": "version 9; .* upgrade"}
    for name, message in {**messages, "zip": "another kind"}.items():
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / f"{name}.db")
    with pytest.raises(ValueError, match="an empty file"):
        PeopleStore(tmp_path / "empty.db", fingerprint=None, embedding_dim=None)
    with pytest.raises(ValueError, match="a folder; name a file in it"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="no such store; make one with `speakernet enroll"):
        PeopleStore(tmp_path / "absent.db", fingerprint=None, embedding_dim=None)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_damaged_store_gives_no_wrong_answer_and_stays_as_it_is(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store:
        store.enroll_many((f"person{person}", voice(person, 2), None, ()) for person in range(200))
        right = [store.identify(voice(person, 2)[0], top=3) for person in range(0, 200, 40)]
    whole = path.read_bytes()
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(25):
        broken = bytearray(whole)
        for place in random.integers(100, len(whole), 3):
            broken[place] ^= 1 << int(random.integers(8))
        path.write_bytes(broken)
        try:
            with opened(path) as store:
                # Names and embeddings have a checksum: what is answered is right.
                assert [store.identify(voice(person, 2)[0], top=3) for person in range(0, 200, 40)] == right
        except ValueError as error:
            refused += 1
            assert "p.db" in str(error)
        assert path.read_bytes() == bytes(broken)
    assert refused >= 10
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        opened(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_can_only_be_read_identifies_and_says_why_it_cannot_enrol(tmp_path):
    path = tmp_path / "folder" / "p.db"
    with opened(path) as store:
        store.enroll("Ada", voice(0))
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with opened(path) as store:
            assert store.identify(voice(0))[0][0] == "Ada"
            with pytest.raises(ValueError, match="cannot be written here"):
                store.enroll("Bo", voice(1))
    finally:
        path.parent.chmod(0o700)


def test_a_store_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    path = tmp_path / "p.db"
    with opened(path) as store:
        store.enroll("Ada", voice(0))
        store._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(ValueError, match=r"p.db: cannot be written here .*readonly"):
            store.enroll("Bo", voice(1))
        assert [one.name for one in store.people()] == ["Ada"]
    with pytest.raises(ValueError, match=r"cannot be made|Not a directory"):
        opened(path / "inside.db")


def test_a_writer_is_waited_for(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store, opened(path) as other:
        other._connection.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: other._connection.execute("ROLLBACK"))
        timer.start()
        store.enroll("Ada", voice(0))
        timer.join()
        assert len(store) == 1


def test_a_store_is_its_owners_alone_and_so_is_its_backup(tmp_path):
    with opened(tmp_path / "p.db") as store:
        store.enroll("Ada", voice(0))
        store.reembed(lambda one: one.embedding, fingerprint="model", embedding_dim=DIM)
        store.export(tmp_path / "out.json")
    if os.name == "posix":
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


@pytest.mark.slow
def test_a_hundred_thousand_people(tmp_path):
    rows = np.random.default_rng(0).standard_normal((100_000, DIM)).astype(np.float32)
    with opened(tmp_path / "p.db") as store:
        store.enroll_many((f"person{row}", rows[row : row + 1], None, ()) for row in range(len(rows)))
        for row in (0, 54_321, 99_999):
            assert store.identify(rows[row], top=2)[0] == (f"person{row}", pytest.approx(1.0, abs=1e-5))
        store.remove("person54321")
        assert store.identify(rows[54_321], top=1)[0][0] != "person54321" and len(store) == 99_999
