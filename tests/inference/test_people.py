"""The store of people: nearest person, two processes, kills, other models, keys, purging."""

import contextlib
import multiprocessing
import os
import sqlite3
import threading
import zlib

import numpy as np
import pytest

from speakernet.files import read_secret
from speakernet.inference import people, store_file
from speakernet.inference.people import PeopleStore, StoredRecording, StoreError, StoreModel
from speakernet.inference.store_file import PROOF, StoreKeyError, backups_of

DIM = 16
NAMES = ["Zoë O'Brien", "José; DROP TABLE people;--", "名前", "a/b\\c", "  spaced  out ", "%s \\n"]
BAD_NAMES = ["  ", "two\nlines", "x" * 201, "..", "A\u200bda", "Speaker 10", "Unknown"]

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
needs_fork = pytest.mark.skipif(FORK is None, reason="this system starts processes in another way")
needs_keys = pytest.mark.skipif(store_file.AESGCM is None, reason="needs the library cryptography")
with_and_without_key = pytest.mark.parametrize(
    "key", [None, pytest.param("a passphrase", marks=needs_keys)]
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.db"


MODEL = StoreModel("model", DIM)


def opened(path, model=MODEL, **how):
    return PeopleStore(path, model, **how)


def voice(seed, count=1):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def recording(name, embedding, weight=1.0, **how):
    return StoredRecording(name, embedding, weight, **how)


def nearest(store, embedding):
    return store.identify(embedding, top=1)[0][0]


def names_of(store):
    return [person.name for person in store.people()]


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@contextlib.contextmanager
def connected(path):
    """A connection to a database, whose changes are kept."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def run_sql(path, *statements):
    with connected(path) as connection:
        connection.executescript(";".join(statements))


def old_store(path, key=None):
    """A store of speakernet 0.2.0 with two recordings of Ada and one of Bo."""
    own = f"PRAGMA application_id = {store_file.APPLICATION_ID}"
    run_sql(path, store_file.SCHEMA, own, "PRAGMA user_version = 1")
    facts = {"fingerprint": "model", "embedding_dim": DIM, "model": "best.pt", "created": "2026"}
    aead = store_file.derive_cipher(key, b"0" * 16) if key else None
    if aead:
        facts |= {"salt": b"0" * 16, "proof": store_file.seal(aead, PROOF, PROOF)}
    columns = "person, source, seconds, speech_seconds, weight, warnings, added"
    with connected(path) as connection:
        connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        for person, (name, count) in enumerate((("Ada", 2), ("Bo", 1)), start=1):
            connection.execute("INSERT INTO people VALUES (?, ?, '2026', '2026')", [person, name])
            for row in voice(person, count):
                content = row.tobytes()
                if aead:
                    content = store_file.seal(aead, content, b"person %d" % person)
                checksum = zlib.crc32(content, zlib.crc32(name.encode()))
                connection.execute(
                    f"INSERT INTO recordings ({columns}, embedding, checksum) "
                    "VALUES (?, 'a.wav', 2, 1, 1, '', '2026', ?, ?)",
                    [person, content, checksum],
                )


def test_scores_by_hand(path):
    mean = voice(99)[0]
    weights = np.array([1.0, 5.0, 0.5], dtype=np.float32)
    store = opened(path, StoreModel("model", DIM, mean=mean))
    for person in range(30):
        store.enroll(f"p{person:02d}", voice(person, 3), weights)
    scores = dict(store.identify(voice(500), top=30))
    for person in range(30):
        # The mean score with the person's recordings, weighted.
        scores_of_three = unit(voice(person, 3) - mean) @ unit(voice(500) - mean)[0]
        expected = float(scores_of_three @ weights / 6.5)
        assert scores[f"p{person:02d}"] == pytest.approx(expected, abs=1e-5)
    assert list(scores.values()) == sorted(scores.values(), reverse=True) and len(scores) == 30


def test_names(path):
    store = opened(path)
    for number, name in enumerate(NAMES):
        store.enroll(name, voice(number))
    kept = [name.strip() for name in NAMES]
    assert set(names_of(store)) == set(kept)
    assert [nearest(store, voice(number)) for number in range(len(NAMES))] == kept
    # Composed and decomposed letters are the same name.
    assert store.enroll("Zoe\u0308 O'Brien", voice(50)) == 2
    for name in BAD_NAMES:
        with pytest.raises(StoreError, match="name"):
            store.enroll(name, voice(0))
    assert len(store) == len(NAMES)


def test_bad_embeddings(path):
    store = opened(path)
    ones = np.ones((1, DIM))
    for embeddings, weights in (
        (np.zeros((1, 3)), None),
        (np.zeros((0, DIM)), None),
        (ones * np.nan, None),
        (ones, [0.0]),
    ):
        with pytest.raises(StoreError, match="expected"):
            store.enroll("Ada", embeddings, weights)
    assert store.people() == [] and store.identify(voice(0)) == []


@pytest.mark.slow
@needs_fork
def test_simultaneous_enrolments(path):
    def enrol():
        opened(path).add([recording("Ada", voice(0), digest=digest) for digest in "abc"])

    processes = [FORK.Process(target=enrol) for _ in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    store = opened(path)
    assert len(store.recordings("Ada")) == 3
    opened(path).remove("Ada")
    assert store.identify(voice(0)) == []


def test_reembed(path, tmp_path):
    def embed(recording):
        if recording.source == "gone.wav":
            raise ValueError("gone.wav: cannot be read")
        return np.arange(4) + recording.weight

    store = opened(path, StoreModel("model", DIM, "old.pt"))
    other = opened(path)
    store.add([recording("Ada", voice(0), 1.0), recording("Ada", voice(1), 2.0)])
    store.add([recording("Bo", voice(1), source="gone.wav")])
    before = path.read_bytes()
    for other_model in (StoreModel("other", DIM, "new.pt"), StoreModel("model", 8, "new.pt")):
        with pytest.raises(StoreError, match=r"old.pt .*`speakernet people reembed --model new.pt"):
            opened(path, other_model)
    new = StoreModel("new", 4)
    with pytest.raises(StoreError, match=r"1 of 3 recordings .* Bo: gone.wav"):
        store.reembed(embed, new)
    assert path.read_bytes() == before and backups_of(path) == []
    assert store.reembed(embed, new, drops_missing=True) == ["Bo: gone.wav: cannot be read"]
    assert names_of(store) == ["Ada"] and nearest(store, np.ones(4)) == "Ada"
    np.testing.assert_array_equal(store.recordings("Ada")[1].embedding, np.arange(4) + 2)
    store.export(tmp_path / "out.json")
    # A store opened for the old model notices the change.
    for ask in (lambda: other.identify(voice(0)), lambda: other.enroll("Cy", voice(1))):
        with pytest.raises(StoreError, match="different model"):
            ask()
    (backup,) = backups_of(path)
    assert names_of(opened(backup)) == ["Ada", "Bo"]
    if os.name == "posix":
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


@with_and_without_key
def test_purge(path, tmp_path, key):
    secret = voice(7777, 40)
    store = opened(path, key=key)
    for person in range(40):
        store.enroll(f"person{person}", voice(person, 3))
    how = {"source": "hidden/melusine.wav", "warnings": "noisy"}
    store.add([recording("Melusine Purged", row, **how) for row in secret])
    store.reembed(lambda recording: recording.embedding, MODEL)
    embeddings = [row.tobytes() for row in secret]
    names = [b"Melusine", b"melusine.wav"]
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert all(name in content for name in names)
    assert [row in content for row in embeddings] == [key is None] * 40
    (backup,) = backups_of(path)
    assert store.remove("person7") == 3
    assert [b"person7" in file.read_bytes() for file in (backup, path)] == [True, False]
    (tmp_path / "p.db.half-backup-1").write_bytes(content)
    assert store.purge("Melusine Purged") == [*backups_of(path), path] and len(store) == 39
    assert nearest(store, voice(3, 3)[0]) == "person3"
    with pytest.raises(StoreError, match=r"nobody is called 'Melusine Purged' .*backup"):
        store.purge("Melusine Purged")
    for file in tmp_path.iterdir():
        assert not any(trace in file.read_bytes() for trace in (*names, *embeddings)), file
    assert {file.name for file in tmp_path.iterdir()} == {path.name, backups_of(path)[0].name}


def test_replaced_file(path, tmp_path):
    store = opened(path)
    new = opened(tmp_path / "new.db")
    store.enroll("Ada", voice(0))
    new.enroll("Bo", voice(1))
    assert nearest(store, voice(0)) == "Ada"
    (tmp_path / "new.db").replace(path)
    assert [name for name, _ in store.identify(voice(0))] == ["Bo"]
    store.enroll("Cy", voice(2))
    # An unusable file is refused every time; a good one works again.
    for make in (
        path.unlink,
        lambda: path.write_text("no store"),
        lambda: run_sql(path, "CREATE TABLE a (b)"),
    ):
        make()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"p.db"):
                store.identify(voice(0))
        path.unlink(missing_ok=True)
    opened(path).enroll("Di", voice(3))
    assert nearest(store, voice(0)) == "Di"


@needs_keys
def test_keys(path, tmp_path):
    opened(path, key=b"right").enroll("Ada", voice(0))
    assert voice(0).tobytes() not in path.read_bytes()
    for key in (None, "wrong", ""):
        with pytest.raises(StoreKeyError):
            opened(path, key=key)
    assert opened(path, key="right").identify(voice(0))[0] == ("Ada", pytest.approx(1.0, abs=1e-5))
    # Without the key, people can be listed and removed but not read.
    store = PeopleStore(path)
    assert names_of(store) == ["Ada"] and store.facts["is_encrypted"]
    for ask in (store.recordings, lambda: store.export(tmp_path / "x.json")):
        with pytest.raises(StoreKeyError, match=r"p.db"):
            ask()
    assert store.remove("Ada") == 1
    opened(tmp_path / "plain.db")
    with pytest.raises(StoreKeyError, match=r"plain.db"):
        opened(tmp_path / "plain.db", key="right")


@needs_keys
@pytest.mark.parametrize("is_old", [False, True])
def test_authenticated_names(path, is_old):
    if is_old:
        old_store(path, "key")
    store = opened(path, key="key")
    store.enroll("Ada", voice(5))
    store.enroll("Bo", voice(6))
    # Exchange the names, with matching checksums.
    with connected(path) as connection:
        for name, person in (("x", 1), ("Ada", 2), ("Bo", 1)):
            connection.execute("UPDATE people SET name = ? WHERE id = ?", [name, person])
        columns = "SELECT id, person, embedding, weight, digest FROM recordings"
        for row, person, content, weight, digest in connection.execute(columns).fetchall():
            forged = recording("Bo" if person == 1 else "Ada", np.empty(0), weight, digest=digest)
            checksum = zlib.crc32(content, zlib.crc32(people._place(person, forged)))
            connection.execute("UPDATE recordings SET checksum = ? WHERE id = ?", [checksum, row])
    with pytest.raises(StoreKeyError):
        store.identify(voice(5))


def test_stores_of_0_3(path):
    """Their checksums cover only embedding and name; the next enrolment renews them."""
    store = opened(path)
    rows = zip(voice(1, 2), (3.0, 1.0), "ab", strict=True)
    store.add([recording("Ada", row, weight, digest=digest) for row, weight, digest in rows])
    with connected(path) as connection:
        for row, content in connection.execute("SELECT id, embedding FROM recordings").fetchall():
            checksum = zlib.crc32(content, zlib.crc32(b"Ada"))
            connection.execute("UPDATE recordings SET checksum = ? WHERE id = ?", [checksum, row])
        connection.execute("PRAGMA user_version = 2")
    for _ in range(2):
        assert [kept.weight for kept in opened(path).recordings("Ada")] == [3.0, 1.0]
        store.enroll("Bo", voice(2))
    # No weight of an old store is used that an enrolment could not have written.
    change = "UPDATE recordings SET weight = {} WHERE id = 1"
    for statements in (
        [change.format("3.0000000000000004")],
        [change.format("-1"), "PRAGMA user_version = 2"],
    ):
        run_sql(path, *statements)
        with pytest.raises(StoreError, match="Ada"):
            store.recordings()


@with_and_without_key
def test_stores_of_0_2(path, key):
    old_store(path, key)
    before = path.read_bytes()
    store = opened(path, key=key)
    assert store.identify(voice(2), top=1)[0] == ("Bo", pytest.approx(1.0, abs=1e-5))
    assert [kept.digest for kept in store.recordings()] == [""] * 3
    assert path.read_bytes() == before
    for _ in range(2):
        assert store.add([recording("Ada", voice(1), digest="a")]) == 3
    kept = opened(path, key=key).recordings("Ada")[0]
    np.testing.assert_array_equal(kept.embedding, voice(1, 2)[0])
    assert len(store.purge("Bo")) == 1
    # Names that only 0.2.0 allowed can be removed, even without the key.
    old = path.with_name("old.db")
    old_store(old, key)
    run_sql(old, "UPDATE people SET name = '..' WHERE name = 'Ada'")
    assert PeopleStore(old).remove("..") == 2


def test_secrets(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_bytes(b" two words \r\n")
    monkeypatch.delenv("S", raising=False)
    assert read_secret(file, "S") == b" two words " and read_secret(None, "S") is None
    monkeypatch.setenv("S", "x")
    assert (read_secret(None, "S"), read_secret(file, "S")) == (b"x", b" two words ")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").write_text("\n")
    for name in ("fifo", "empty", "absent"):
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            read_secret(tmp_path / name, "S")


def test_other_files(tmp_path):
    (tmp_path / "text.db").write_text("people of mine\n" * 10)
    (tmp_path / "empty.db").touch()
    run_sql(tmp_path / "other.db", "CREATE TABLE people (name TEXT)")
    settings = (f"PRAGMA application_id = {store_file.APPLICATION_ID}", "PRAGMA user_version = 9")
    run_sql(tmp_path / "newer.db", *settings, "CREATE TABLE people (name TEXT)")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for name in ("text.db", "other.db", "newer.db"):
        with pytest.raises(StoreError, match=str(tmp_path / name)):
            opened(tmp_path / name)
    for name in ("empty.db", "absent.db"):
        for open_it in (PeopleStore, lambda path: opened(path, must_exist=True)):
            with pytest.raises(StoreError, match=f"{name}.*speakernet enroll"):
                open_it(tmp_path / name)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_damaged_store(path):
    store = opened(path)
    for row in range(40):
        store.enroll(f"p{row}", voice(row, 2))

    def answers():
        asked = opened(path)
        return [asked.identify(voice(person, 2)[0], top=3) for person in range(0, 40, 10)]

    right = answers()
    whole = path.read_bytes()
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(25):
        broken = bytearray(whole)
        for place in random.integers(100, len(whole), 3):
            broken[place] ^= 1 << int(random.integers(8))
        path.write_bytes(broken)
        try:
            # Names and embeddings have checksums, so any answer is right.
            assert answers() == right
        except ValueError as error:
            refused += 1
            assert "p.db" in str(error)
        assert path.read_bytes() == bytes(broken)
    assert refused >= 10
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=r"malformed.*backup"):
        opened(path)


def test_waiting_for_a_writer(path, monkeypatch):
    store = opened(path)
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, other.rollback)
        timer.start()
        store.enroll("Ada", voice(0))
        timer.join()
        monkeypatch.setattr(store_file, "BUSY_SECONDS", 0.1)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"p.db cannot be used .*locked"):
            store.enroll("Bo", voice(1))
    assert names_of(store) == ["Ada"]
    with pytest.raises(StoreError, match=r"inside.db"):
        opened(path / "inside.db")
