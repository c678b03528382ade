"""The store of people: who is nearest, two processes, kills, other models, keys, and nothing left after a purge."""

import contextlib
import multiprocessing
import os
import sqlite3
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from speakernet.files import read_secret
from speakernet.inference import people
from speakernet.inference.people import (
    PROOF,
    PeopleStore,
    StoredRecording,
    StoreError,
    StoreKeyError,
    backups_of,
)

DIM = 16
NAMES = ["Zoë O'Brien", "José; DROP TABLE people;--", "名前", "a/b\\c", "  spaced  out ", '"quoted" 🙂', "%s %d \\n"]
BAD_NAMES = ["", "  ", "two\nlines", "x" * 201, "\udcff", ".", "..", "A\u200bda", "\u3164", "\u2800", "A\ufe0f"]
UNKNOWNS = [
    "Unknown",
    "unkn0wn",
    "\uff55nknown",
    "unkn\u043ewn",
    "\u03c5\u03b7known",
    "u\u0308nknown",
]

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
needs_fork = pytest.mark.skipif(FORK is None, reason="this system starts processes in another way")


def opened(path: Path, **how) -> PeopleStore:
    return PeopleStore(path, **{"fingerprint": "model", "embedding_dim": DIM, **how})


def of_any_model(path: Path, **how) -> PeopleStore:
    return PeopleStore(path, fingerprint=None, embedding_dim=None, **how)


def voice(seed: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def run_sql(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def old_store(path: Path, key: str | None = None) -> None:
    """A store as speakernet 0.2.0 made it, with two recordings of Ada and one of Bo."""
    connection = sqlite3.connect(path)
    connection.executescript(people.SCHEMA)
    connection.execute(f"PRAGMA application_id = {people.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    facts = {"fingerprint": "model", "embedding_dim": DIM, "model": "best.pt", "created": "2026-01-01T00:00:00Z"}
    aead = people._aead(key, b"0" * 16) if key else None
    if aead:
        facts |= {"salt": b"0" * 16, "proof": people._seal(aead, PROOF, PROOF)}
    connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
    for person, (name, count) in enumerate((("Ada", 2), ("Bo", 1)), start=1):
        connection.execute("INSERT INTO people VALUES (?, ?, '2026', '2026')", [person, name])
        for row in voice(person, count):
            content = people._seal(aead, row.tobytes(), b"person %d" % person) if aead else row.tobytes()
            checksum = zlib.crc32(content, zlib.crc32(name.encode()))
            connection.execute(
                "INSERT INTO recordings (person, source, seconds, speech_seconds, weight, warnings, added, embedding, "
                "checksum) VALUES (?, 'a.wav', 2, 1, 1, '', '2026', ?, ?)",
                [person, content, checksum],
            )
    connection.commit()
    connection.close()


def enrol_many(path: Path, name: str, count: int, done) -> None:
    with opened(path) as store:
        for number in range(count):
            store.enroll(f"{name}{number}", voice(number, 2))
            done.send(number)


def other_process(path: Path, name: str, count: int):
    """A process that enrols, and the end of a pipe that names whom it has committed."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=enrol_many, args=(path, name, count, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def enrol_the_same(path: Path) -> None:
    with opened(path) as store:
        store.enroll("Ada", voice(0, 3), None, [{"digest": digest} for digest in "abc"])


def test_scores_by_hand(tmp_path):
    mean = voice(99)[0]
    weights = np.array([1.0, 5.0, 0.5], dtype=np.float32)
    with opened(tmp_path / "p.db", mean=mean) as store:
        [store.enroll(f"p{person:02d}", voice(person, 3), weights) for person in range(30)]
        found = dict(store.identify(voice(500), top=30))
    for person in range(30):
        average = (unit(voice(person, 3) - mean) * weights[:, None]).sum(axis=0)
        assert found[f"p{person:02d}"] == pytest.approx(float(unit(average) @ unit(voice(500) - mean)[0]), abs=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True) and len(found) == 30


def test_names(tmp_path):
    with opened(tmp_path / "p.db") as store:
        for number, name in enumerate(NAMES):
            store.enroll(name, voice(number))
        kept = [name.strip() for name in NAMES]
        assert {one.name for one in store.people()} == set(kept)
        assert [store.identify(voice(number), top=1)[0][0] for number in range(len(NAMES))] == kept
        # Composed and decomposed letters are one name.
        assert store.enroll("Zoe\u0308 O'Brien", voice(50)) == 2
        for name in [*BAD_NAMES, *UNKNOWNS]:
            with pytest.raises(StoreError, match=r"name|called"):
                store.enroll(name, voice(0))
        assert len(store) == len(NAMES)


def test_bad_embeddings_write_nothing(tmp_path):
    ones, bad = (
        np.ones((1, DIM)),
        [(np.zeros((1, 3)), None), (np.zeros((0, DIM)), None), (np.full((1, DIM), np.nan), None)],
    )
    with opened(tmp_path / "p.db") as store:
        for embeddings, weights in [*bad, (np.ones((2, DIM)), [1.0]), (ones, [0.0]), (ones, [np.inf])]:
            with pytest.raises(StoreError, match="expected"):
                store.enroll("Ada", embeddings, weights)
        assert store.people() == [] and store.identify(voice(0)) == []


@needs_fork
def test_two_processes_write(tmp_path):
    path = tmp_path / "p.db"
    # Both may make the file.
    other, _receiver = other_process(path, "theirs", 8)
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
def test_a_kill_loses_only_what_was_not_committed(tmp_path):
    path = tmp_path / "p.db"
    running, receiver = other_process(path, "p", 100_000)
    last = [receiver.recv() for _ in range(10)][-1]
    running.kill()
    running.join()
    while receiver.poll():
        try:
            last = receiver.recv()
        except EOFError:
            break
    with opened(path) as store:
        there = {one.name: one.recordings for one in store.people()}
        # What was under way may be there whole, or not at all.
        assert set(there) - {f"p{last + 1}"} == {f"p{number}" for number in range(last + 1)}
        assert set(there.values()) == {2}
        store.enroll("after", voice(1))


@needs_fork
def test_equal_enrolments_at_once_keep_each_recording_once(tmp_path):
    path = tmp_path / "p.db"
    enrol_the_same(path)
    processes = [FORK.Process(target=enrol_the_same, args=(path,)) for _ in range(19)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(60)
    with opened(path) as store:
        assert len(store.recordings("Ada")) == 3 and {one.exitcode for one in processes} == {0}


def test_threads(tmp_path):
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


def test_reembed(tmp_path):
    path = tmp_path / "p.db"

    def embed(one):
        if one.source == "gone.wav":
            raise ValueError("gone.wav: cannot be read")
        return np.arange(4) + one.weight

    with opened(path, model="old.pt") as store:
        store.enroll("Ada", voice(0, 2), [1.0, 2.0], [{"source": "a.wav"}, {"source": "b.wav"}])
        store.enroll("Bo", voice(1), [1.0], [{"source": "gone.wav"}])
    before = path.read_bytes()
    for other_model in ({"fingerprint": "other"}, {"embedding_dim": 8}):
        with pytest.raises(StoreError, match=r"old.pt .*`speakernet people reembed --model new.pt"):
            opened(path, model="new.pt", **other_model)
    with opened(path) as store, opened(path) as other:
        store.identify(voice(0))
        with pytest.raises(StoreError, match=r"1 of 3 recordings .* Bo: gone.wav"):
            store.reembed(embed, fingerprint="new", embedding_dim=4)
        assert path.read_bytes() == before and backups_of(path) == []
        problems = store.reembed(embed, fingerprint="new", embedding_dim=4, drops_missing=True)
        assert problems == ["Bo: gone.wav: cannot be read"] and [one.name for one in store.people()] == ["Ada"]
        np.testing.assert_array_equal(store.recordings("Ada")[1].embedding, np.arange(4) + 2)
        assert store.identify(np.ones(4))[0][0] == "Ada"
        store.export(tmp_path / "out.json")
        # Whoever has it open for the old model notices.
        for ask in (lambda: other.identify(voice(0)), lambda: other.enroll("Cy", voice(1))):
            with pytest.raises(StoreError, match="another model"):
                ask()
    (backup,) = backups_of(path)
    with opened(backup) as store, opened(path, fingerprint="new", embedding_dim=4):
        assert {one.name for one in store.people()} == {"Ada", "Bo"}
        assert os.name != "posix" or {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("key", [None, "a passphrase"])
def test_purge_leaves_no_bytes_in_any_file(tmp_path, key):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    secret = voice(7777, 40)
    with opened(path, key=key) as store:
        for person in range(40):
            store.enroll(f"person{person}", voice(person, 3), None, [{"source": f"place{person}.wav"}] * 3)
        store.enroll("Melusine Purged", secret, None, [{"source": "hidden/melusine.wav", "warnings": "noisy"}] * 40)
        with opened(path, key=key) as other:
            other.reembed(lambda one: one.embedding, fingerprint="model", embedding_dim=DIM)
    traces = [b"Melusine", b"melusine.wav", *(row.tobytes() for row in secret)]
    names = [b"Melusine", b"melusine.wav"] if key else traces
    content = b"".join(one.read_bytes() for one in tmp_path.iterdir())
    assert all(trace in content for trace in names)
    assert not key or not any(row.tobytes() in content for row in secret)
    with opened(path, key=key) as store:
        assert store.remove("person7") == 3 and b"person7" in backups_of(path)[0].read_bytes()
        assert b"person7" not in path.read_bytes()
        assert store.purge("Melusine Purged") == [*backups_of(path), path] and len(store) == 39
        assert store.identify(voice(3, 3)[0], top=1)[0][0] == "person3"
        with pytest.raises(StoreError, match="nobody is called 'Melusine Purged'"):
            store.purge("Melusine Purged")
    for file in tmp_path.iterdir():
        assert not any(trace in file.read_bytes() for trace in traces), file
    assert {one.name for one in tmp_path.iterdir()} == {path.name, backups_of(path)[0].name}


def test_a_replaced_file_is_read_again(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store, opened(tmp_path / "new.db") as new:
        store.enroll("Ada", voice(0))
        new.enroll("Bo", voice(1))
        assert store.identify(voice(0))[0][0] == "Ada"
        (tmp_path / "new.db").replace(path)
        assert [name for name, _ in store.identify(voice(0))] == ["Bo"]
        store.enroll("Cy", voice(2))
        # A file that cannot be used is refused every time, and a good one is used again.
        for make in (path.unlink, lambda: path.write_text("no store"), lambda: opened(tmp_path / "x.db", key="key")):
            make()
            if (tmp_path / "x.db").exists():
                (tmp_path / "x.db").replace(path)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"p.db"):
                    store.identify(voice(0))
        path.unlink()
        with opened(path) as new:
            new.enroll("Di", voice(3))
        assert store.identify(voice(0))[0][0] == "Di"


def test_keys(tmp_path):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    with opened(path, key=b"right") as store:
        store.enroll("Ada", voice(0))
    assert voice(0).tobytes() not in path.read_bytes()
    for key in (None, "wrong", ""):
        with pytest.raises(StoreKeyError):
            opened(path, key=key)
    with opened(path, key="right") as store:
        assert store.identify(voice(0), top=1)[0] == ("Ada", pytest.approx(1.0, abs=1e-5))
    # Without the key people can be listed and removed, not read.
    with of_any_model(path) as store:
        assert [one.name for one in store.people()] == ["Ada"] and store.facts["is_encrypted"]
        for ask in (store.recordings, lambda: store.export(tmp_path / "x.json")):
            with pytest.raises(StoreKeyError, match=r"p.db"):
                ask()
        assert store.remove("Ada") == 1
    with opened(tmp_path / "plain.db"), pytest.raises(StoreKeyError, match=r"plain.db"):
        opened(tmp_path / "plain.db", key="right")


@pytest.mark.parametrize("is_old", [False, True])
def test_names_are_authenticated(tmp_path, is_old):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    if is_old:
        old_store(path, "key")
    with opened(path, key="key") as store:
        store.enroll("Ada", voice(5))
        store.enroll("Bo", voice(6))
    # Exchange the names, with checksums that fit.
    renames = (("x", 1), ("Ada", 2), ("Bo", 1))
    run_sql(path, *(f"UPDATE people SET name = '{name}' WHERE id = {person}" for name, person in renames))
    connection = sqlite3.connect(path)
    for row, person, content in connection.execute("SELECT id, person, embedding FROM recordings").fetchall():
        checksum = zlib.crc32(content, zlib.crc32(b"Bo" if person == 1 else b"Ada"))
        connection.execute("UPDATE recordings SET checksum = ? WHERE id = ?", [checksum, row])
    connection.commit()
    connection.close()
    with opened(path, key="key") as store, pytest.raises(StoreKeyError):
        store.identify(voice(5))


@pytest.mark.parametrize("key", [None, "a passphrase"])
def test_stores_of_0_2_are_read_and_written(tmp_path, key):
    pytest.importorskip("cryptography")
    path = tmp_path / "p.db"
    old_store(path, key)
    before = path.read_bytes()
    with opened(path, key=key) as store:
        assert store.identify(voice(2), top=1)[0] == ("Bo", pytest.approx(1.0, abs=1e-5))
        assert [one.digest for one in store.recordings()] == ["", "", ""]
        assert path.read_bytes() == before
        assert store.enroll("Ada", voice(1), None, [{"digest": "a"}]) == 3
        assert store.enroll("Ada", voice(1), None, [{"digest": "a"}]) == 3
    with opened(path, key=key) as store:
        np.testing.assert_array_equal(store.recordings("Ada")[0].embedding, voice(1, 2)[0])
        assert len(store.purge("Bo")) == 1
        # 0.2.0 allowed more names; they can be removed.
        run_sql(path, "UPDATE people SET name = '..' WHERE name = 'Ada'")
        assert store.remove("..") == 3


def test_secrets_have_one_reader(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_bytes(b" two words \r\n")
    assert read_secret(file, "S") == b" two words " and read_secret(None, "S") is None
    monkeypatch.setenv("S", "x")
    assert (read_secret(None, "S"), read_secret(file, "S")) == (b"x", b" two words ")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "long").write_text("x" * 5000)
    for name in ("fifo", "empty", "long", "absent", "."):
        with pytest.raises(ValueError, match=name.replace(".", str(tmp_path))):
            read_secret(tmp_path / name, "S")
    with pytest.raises(ValueError, match="/dev/zero"):
        read_secret(Path("/dev/zero"), "S")


def test_other_files_are_refused_and_left_alone(tmp_path):
    (tmp_path / "text.db").write_text("people of mine\n" * 10)
    (tmp_path / "empty.db").touch()
    run_sql(tmp_path / "other.db", "CREATE TABLE people (name TEXT)")
    settings = (f"PRAGMA application_id = {people.APPLICATION_ID}", "PRAGMA user_version = 9")
    run_sql(tmp_path / "newer.db", *settings, "CREATE TABLE people (name TEXT)")
    with zipfile.ZipFile(tmp_path / "zip.db", "w") as archive:
        archive.writestr("a", "b")
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}
    for name in ("text.db", "other.db", "newer.db", "zip.db", "."):
        with pytest.raises(StoreError, match=str(tmp_path / name)):
            opened(tmp_path / name)
    for name in ("empty.db", "absent.db"):
        for open_it in (of_any_model, lambda path: opened(path, must_exist=True)):
            with pytest.raises(StoreError, match=f"{name}.*speakernet enroll"):
                open_it(tmp_path / name)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_damaged_store_gives_no_wrong_answer_and_stays_as_it_is(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store:
        [store.enroll(f"person{person}", voice(person, 2)) for person in range(200)]
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
    with pytest.raises(StoreError, match="damaged"):
        opened(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_identifies(tmp_path):
    path = tmp_path / "folder" / "p.db"
    with opened(path) as store:
        store.enroll("Ada", voice(0))
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with opened(path) as store:
            assert store.identify(voice(0))[0][0] == "Ada"
            with pytest.raises(StoreError, match=r"p.db: cannot be used"):
                store.enroll("Bo", voice(1))
    finally:
        path.parent.chmod(0o700)


def test_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "p.db"
    monkeypatch.setattr(people, "BUSY_SECONDS", 0.1)
    with opened(path) as store:
        store.enroll("Ada", voice(0))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match=r"p.db: cannot be used .*locked"):
                store.enroll("Bo", voice(1))
        assert [one.name for one in store.people()] == ["Ada"]
    with pytest.raises(StoreError, match=r"inside.db"):
        opened(path / "inside.db")


def test_a_writer_is_waited_for(tmp_path):
    path = tmp_path / "p.db"
    with opened(path) as store, contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, other.rollback)
        timer.start()
        store.enroll("Ada", voice(0))
        timer.join()
        assert len(store) == 1


@pytest.mark.slow
def test_a_hundred_thousand_people(tmp_path):
    rows = np.random.default_rng(0).standard_normal((100_000, DIM)).astype(np.float32)
    with opened(tmp_path / "p.db") as store:
        with store._session(writes=True) as connection:
            made = (StoredRecording(f"person{row}", embedding, 1.0) for row, embedding in enumerate(rows))
            store._insert(connection, made)
        for row in (0, 54_321, 99_999):
            assert store.identify(rows[row], top=2)[0] == (f"person{row}", pytest.approx(1.0, abs=1e-5))
        store.remove("person54321")
        assert store.identify(rows[54_321], top=1)[0][0] != "person54321" and len(store) == 99_999
