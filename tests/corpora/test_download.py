"""Downloads against a real HTTP server that is good, slow, cut, wrong, refusing, failing, or without ranges."""

import base64
import errno
import gzip
import hashlib
import logging
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import requests
from preparation_server import PlayedSource, played_source

from speakernet.corpora import download as download_module
from speakernet.corpora.download import (
    DownloadOptions,
    RemoteFile,
    _wanted_wait,
    download_all,
    load_catalogue,
    load_corpus,
)
from speakernet.corpora.steps import DiskFullError, StepSummary, finish

CONTENT = np.random.default_rng(7).bytes(200_000)
ACCESS = "fill the form at example.org"


def remote(source: PlayedSource, name: str = "a.zip", content: bytes = CONTENT, query: str = "") -> RemoteFile:
    md5 = hashlib.md5(content).hexdigest()
    return RemoteFile(name, (f"{source.address}/{name}{query}",), md5, len(content), ACCESS)


def fetch(files: list[RemoteFile], folder: Path, **options) -> StepSummary:
    waits: list[float] = []
    chosen = {"sleep": waits.append, "timeout_seconds": 1.0} | options
    with StepSummary("download", folder) as summary:
        download_all(files, folder, 2, DownloadOptions(**chosen), summary)
    return summary


def half_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".part", ".part.json", ".half", ".tmp"))]


@pytest.mark.parametrize("behaviour", ["good", "slow", "cut", "500 then good", "no ranges", "stalls"])
def test_the_whole_file_arrives(tmp_path, behaviour):
    with played_source({"a.zip": CONTENT}, behaviour=behaviour) as source:
        summary = fetch([remote(source)], tmp_path)
    assert (summary.made, summary.broken) == (1, 0)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert half_files(tmp_path) == []


def test_nothing_is_asked_twice(tmp_path):
    with played_source({"a.zip": CONTENT}) as source:
        fetch([remote(source)], tmp_path)
        asked = source.requests["a.zip"]
        summary = fetch([remote(source)], tmp_path)
        assert source.requests["a.zip"] == asked
    assert (summary.made, summary.skipped) == (0, 1)


def test_own_archives_are_not_fetched(tmp_path):
    (tmp_path / "a.zip").write_bytes(CONTENT)
    with played_source({}) as source:
        summary = fetch([remote(source)], tmp_path)
        assert not source.requests
    assert summary.skipped == 1


def test_a_damaged_archive_is_fetched_again(tmp_path):
    (tmp_path / "a.zip").write_bytes(CONTENT[:1000])
    with played_source({"a.zip": CONTENT}) as source:
        assert fetch([remote(source)], tmp_path).made == 1
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_resuming_sends_only_the_missing_bytes(tmp_path):
    (tmp_path / "a.zip.part").write_bytes(CONTENT[:150_000])
    with played_source({"a.zip": CONTENT}) as source:
        fetch([remote(source)], tmp_path)
        assert [one["Range"] for one in source.seen] == ["bytes=150000-"]
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


@pytest.mark.parametrize("there", [CONTENT, CONTENT + b"more", b"other" * 100])
def test_any_half_file_ends_well(tmp_path, there):
    (tmp_path / "a.zip.part").write_bytes(there)
    with played_source({"a.zip": CONTENT}) as source:
        assert fetch([remote(source)], tmp_path).made == 1
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_wrong_sum_is_not_kept(tmp_path):
    with played_source({"a.zip": CONTENT}, behaviour="wrong md5") as source:
        summary = fetch([remote(source)], tmp_path)
    assert summary.broken == 1
    assert not (tmp_path / "a.zip").exists()
    assert half_files(tmp_path) == []
    reason = summary.broken_path.read_text()
    assert hashlib.md5(CONTENT).hexdigest() in reason


@pytest.mark.parametrize("code", ["401", "403", "404"])
def test_a_refusal_is_final(tmp_path, code):
    with played_source({"a.zip": CONTENT}, behaviour=code) as source:
        summary = fetch([remote(source)], tmp_path)
        assert source.requests["a.zip"] == 1
    text = summary.broken_path.read_text()
    assert code in text
    assert ACCESS in text


def test_a_mirror_is_asked(tmp_path):
    with played_source({}, behaviour="404") as gone, played_source({"a.zip": CONTENT}) as good:
        file = remote(good)
        file = RemoteFile(file.name, (f"{gone.address}/a.zip", *file.urls), file.md5, None, "")
        assert fetch([file], tmp_path).made == 1


def test_one_bad_file(tmp_path):
    contents = {f"part{letter}": CONTENT[:1000] + letter.encode() for letter in "abcdef"}
    with played_source({name: content for name, content in contents.items() if name != "partc"}) as source:
        files = [remote(source, name, content) for name, content in contents.items()]
        summary = fetch(files, tmp_path)
    assert (summary.made, summary.broken) == (5, 1)
    assert "partc" in summary.broken_path.read_text()


def test_space_is_checked_first(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with played_source({"a.zip": CONTENT}) as source, pytest.raises(DiskFullError, match="needed"):
        fetch([remote(source)], tmp_path)
    assert not (tmp_path / "a.zip.part").exists()


def test_a_disk_that_fills_up_keeps_what_was_fetched(tmp_path, monkeypatch):
    get = download_module._get

    def fill_up(*arguments):
        reply = get(*arguments)
        read = reply.raw.read
        replies = iter([read(50_000)])

        def next_block(size):
            for block in replies:
                return block
            raise OSError(errno.ENOSPC, "No space left on device")

        reply.raw.read = next_block
        return reply

    with played_source({"a.zip": CONTENT}) as source:
        monkeypatch.setattr(download_module, "_get", fill_up)
        with pytest.raises(DiskFullError):
            fetch([remote(source)], tmp_path)
        assert not (tmp_path / "a.zip").exists()
        monkeypatch.setattr(download_module, "_get", get)
        assert fetch([remote(source)], tmp_path).made == 1
        assert source.seen[-1]["Range"] == "bytes=50000-"


def test_credentials_stay_with_their_server(tmp_path):
    credentials = {"user": "anna", "password": "s3cret"}
    expected = "Basic " + base64.b64encode(b"anna:s3cret").decode()
    with played_source({"a.zip": CONTENT}, user_and_password=expected) as source:
        assert fetch([remote(source)], tmp_path / "one", **credentials).made == 1
    with played_source({"a.zip": CONTENT}) as other, played_source({}, redirect_to=other.address) as first:
        assert fetch([remote(first)], tmp_path / "two", **credentials).made == 1
        assert "Authorization" in first.seen[0]
        assert all("Authorization" not in headers for headers in other.seen)


def test_secrets_are_not_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with played_source({"a.zip": CONTENT}, behaviour="500 then good") as source:
        fetch([remote(source, query="?key=TOPSECRET")], tmp_path, user="anna", password="s3cret")
        assert any("TOPSECRET" in headers["path"] for headers in source.seen)
        source.behaviour = "404"
        summary = fetch([remote(source, "b.zip", query="?key=TOPSECRET")], tmp_path)
        finish([summary])
    written = caplog.text + summary.broken_path.read_text() + repr(DownloadOptions(user="anna", password="s3cret"))
    written += "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "asking again" in caplog.text
    assert "TOPSECRET" not in written
    assert "s3cret" not in written


def test_waits_grow(tmp_path):
    waits: list[float] = []
    with played_source({"a.zip": CONTENT}) as source:
        address = source.address
    file = RemoteFile("a.zip", (f"{address}/a.zip",), "0" * 32, None, ACCESS)
    summary = fetch([file], tmp_path, num_retries=4, first_wait_seconds=1.0, sleep=waits.append)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert summary.broken == 1


def test_no_network(tmp_path, monkeypatch):
    def no_name(*arguments, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    waits: list[float] = []
    file = RemoteFile("a.zip", ("https://example.org/a.zip",), "0" * 32, 1000, ACCESS)
    summary = fetch([file], tmp_path, sleep=waits.append)
    assert waits == []
    assert "is there a network" in summary.broken_path.read_text()


@pytest.mark.parametrize("obstacle", [requests.ConnectTimeout("no answer"), requests.exceptions.ProxyError("dead")])
def test_firewalls_and_dead_proxies(tmp_path, monkeypatch, obstacle):
    def swallowed(*arguments, **options):
        raise obstacle

    monkeypatch.setattr(requests, "get", swallowed)
    waits: list[float] = []
    file = RemoteFile("a.zip", ("https://example.org/a.zip",), "0" * 32, 1000, ACCESS)
    summary = fetch([file], tmp_path, sleep=waits.append)
    assert waits == []
    assert "is there a network" in summary.broken_path.read_text()


def test_content_encoding_is_ignored(tmp_path):
    content = gzip.compress(CONTENT)
    with played_source({"a.tar.gz": content}, behaviour="calls it gzip") as source:
        assert fetch([remote(source, "a.tar.gz", content)], tmp_path).made == 1
    assert (tmp_path / "a.tar.gz").read_bytes() == content


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [("7", 7.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None)]
)
def test_retry_after(retry_after, seconds):
    assert _wanted_wait(retry_after) == seconds


def test_redirect_to_another_scheme(tmp_path):
    waits: list[float] = []
    with played_source({}, redirect_to="file:///etc") as source:
        summary = fetch([remote(source, query="?key=TOPSECRET")], tmp_path, sleep=waits.append)
    assert (summary.broken, waits) == (1, [])
    assert "http or https" in summary.broken_path.read_text()
    assert "TOPSECRET" not in summary.broken_path.read_text()


def test_other_schemes(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    file = RemoteFile("a.zip", (f"file://{secret}",), None, None, "")
    summary = fetch([file], tmp_path / "out")
    assert summary.broken == 1
    assert not (tmp_path / "out" / "a.zip").exists()


def test_names_stay_inside_the_folder(tmp_path):
    with played_source({"a.zip": CONTENT}) as source, pytest.raises(ValueError, match="leads outside"):
        fetch([RemoteFile("../a.zip", (f"{source.address}/a.zip",), None, None, "")], tmp_path / "out")
    assert list(tmp_path.rglob("a.zip")) == []


def test_the_shipped_table():
    table = load_catalogue()
    for name in table:
        corpus = load_corpus(name, key="k y")
        assert corpus.files
        for file in corpus.files.values():
            assert file.md5 is None or (len(file.md5) == 32 and int(file.md5, 16) >= 0)
            assert all(url.startswith("http") and "{" not in url for url in file.urls)
            assert file.access
        for joined in corpus.joined.values():
            assert all(piece in corpus.files for piece in joined.pieces)
    assert "key=k%20y" in load_corpus("voxceleb", key="k y").files["vox1_test_wav.zip"].urls[0]


def test_without_a_key(tmp_path):
    summary = fetch(list(load_corpus("voxceleb").files.values())[:1], tmp_path, num_retries=0)
    assert "an access key is needed" in summary.broken_path.read_text()
    assert "mm.kaist.ac.kr" in summary.broken_path.read_text()
