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
from speakernet.corpora.catalogue import RemoteFile, load_catalogue, load_corpus
from speakernet.corpora.download import DiskFullError, DownloadOptions, download_all
from speakernet.corpora.http_client import Credentials, _wanted_wait
from speakernet.corpora.summary import StepSummary

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
def test_every_server_that_can_be_coped_with_gives_the_whole_file(tmp_path, behaviour):
    with played_source({"a.zip": CONTENT}, behaviour=behaviour) as source:
        summary = fetch([remote(source)], tmp_path)
    assert (summary.made, summary.broken) == (1, 0)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert half_files(tmp_path) == []


def test_a_second_run_asks_for_nothing(tmp_path):
    with played_source({"a.zip": CONTENT}) as source:
        fetch([remote(source)], tmp_path)
        asked = source.requests["a.zip"]
        summary = fetch([remote(source)], tmp_path)
        assert source.requests["a.zip"] == asked
    assert (summary.made, summary.skipped) == (0, 1)


def test_an_archive_that_the_user_brought_is_verified_and_not_fetched(tmp_path):
    (tmp_path / "a.zip").write_bytes(CONTENT)
    with played_source({}) as source:
        summary = fetch([remote(source)], tmp_path)
        assert not source.requests
    assert summary.skipped == 1


def test_a_damaged_archive_under_the_final_name_is_fetched_again(tmp_path):
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
def test_a_half_file_that_is_whole_too_long_or_of_another_file_ends_well(tmp_path, there):
    (tmp_path / "a.zip.part").write_bytes(there)
    with played_source({"a.zip": CONTENT}) as source:
        assert fetch([remote(source)], tmp_path).made == 1
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_wrong_sum_is_never_kept_under_the_final_name(tmp_path):
    with played_source({"a.zip": CONTENT}, behaviour="wrong md5") as source:
        summary = fetch([remote(source)], tmp_path)
    assert summary.broken == 1
    assert not (tmp_path / "a.zip").exists()
    assert half_files(tmp_path) == []
    reason = summary.broken_path.read_text()
    assert hashlib.md5(CONTENT).hexdigest() in reason


@pytest.mark.parametrize("code", ["401", "403", "404"])
def test_a_refusal_names_the_access_form_and_is_not_asked_again(tmp_path, code):
    with played_source({"a.zip": CONTENT}, behaviour=code) as source:
        summary = fetch([remote(source)], tmp_path)
        assert source.requests["a.zip"] == 1
    text = summary.broken_path.read_text()
    assert code in text
    assert ACCESS in text


def test_a_mirror_is_asked_when_the_first_address_refuses(tmp_path):
    with played_source({}, behaviour="404") as gone, played_source({"a.zip": CONTENT}) as good:
        file = remote(good)
        file = RemoteFile(file.name, (f"{gone.address}/a.zip", *file.urls), file.md5, None, "")
        assert fetch([file], tmp_path).made == 1


def test_several_files_and_one_bad_among_them(tmp_path):
    contents = {f"part{letter}": CONTENT[:1000] + letter.encode() for letter in "abcdef"}
    with played_source({name: content for name, content in contents.items() if name != "partc"}) as source:
        files = [remote(source, name, content) for name, content in contents.items()]
        summary = fetch(files, tmp_path)
    assert (summary.made, summary.broken) == (5, 1)
    assert "partc" in summary.broken_path.read_text()


def test_the_space_is_checked_before_the_first_byte(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with played_source({"a.zip": CONTENT}) as source, pytest.raises(DiskFullError, match="are needed"):
        fetch([remote(source)], tmp_path)
    assert not (tmp_path / "a.zip.part").exists()


def test_a_disk_that_fills_up_on_the_way_keeps_what_was_fetched(tmp_path, monkeypatch):
    append = download_module._append_body

    def fill_up(reply, part, on_bytes):
        part.write_bytes(reply.body.read(50_000))
        raise OSError(errno.ENOSPC, "No space left on device")

    with played_source({"a.zip": CONTENT}) as source:
        monkeypatch.setattr(download_module, "_append_body", fill_up)
        with pytest.raises(DiskFullError, match="free some space and run this again"):
            fetch([remote(source)], tmp_path)
        assert not (tmp_path / "a.zip").exists()
        monkeypatch.setattr(download_module, "_append_body", append)
        assert fetch([remote(source)], tmp_path).made == 1
        assert source.seen[-1]["Range"] == "bytes=50000-"


def test_credentials_are_sent_to_their_server_and_to_no_other(tmp_path):
    credentials = Credentials("anna", "s3cret")
    expected = "Basic " + base64.b64encode(b"anna:s3cret").decode()
    with played_source({"a.zip": CONTENT}, user_and_password=expected) as source:
        assert fetch([remote(source)], tmp_path / "one", credentials=credentials).made == 1
    with played_source({"a.zip": CONTENT}) as other, played_source({}, redirect_to=other.address) as first:
        assert fetch([remote(first)], tmp_path / "two", credentials=credentials).made == 1
        assert "Authorization" in first.seen[0]
        assert all("Authorization" not in headers for headers in other.seen)


def test_no_secret_reaches_the_log_or_the_list_of_broken_files(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with played_source({"a.zip": CONTENT}, behaviour="500 then good") as source:
        fetch([remote(source, query="?key=TOPSECRET")], tmp_path, credentials=Credentials("anna", "s3cret"))
        assert any("TOPSECRET" in headers["path"] for headers in source.seen)
        source.behaviour = "404"
        summary = fetch([remote(source, "b.zip", query="?key=TOPSECRET")], tmp_path)
        summary.log()
    written = caplog.text + summary.broken_path.read_text() + repr(Credentials("anna", "s3cret"))
    written += "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "asking again" in caplog.text
    assert "TOPSECRET" not in written
    assert "s3cret" not in written


def test_a_server_that_never_recovers_is_given_up_with_growing_waits(tmp_path):
    waits: list[float] = []
    with played_source({"a.zip": CONTENT}) as source:
        address = source.address
    file = RemoteFile("a.zip", (f"{address}/a.zip",), "0" * 32, None, ACCESS)
    summary = fetch([file], tmp_path, num_retries=4, first_wait_seconds=1.0, sleep=waits.append)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert summary.broken == 1


def test_a_machine_without_a_network_is_told_so_at_once(tmp_path, monkeypatch):
    def no_name(*arguments, **options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    waits: list[float] = []
    file = RemoteFile("a.zip", ("https://example.org/a.zip",), "0" * 32, 1000, ACCESS)
    summary = fetch([file], tmp_path, sleep=waits.append)
    assert waits == []
    assert "is there a network" in summary.broken_path.read_text()


@pytest.mark.parametrize("obstacle", [requests.ConnectTimeout("no answer"), requests.exceptions.ProxyError("dead")])
def test_a_firewall_that_swallows_everything_and_a_dead_proxy_are_not_asked_again(tmp_path, monkeypatch, obstacle):
    def swallowed(*arguments, **options):
        raise obstacle

    monkeypatch.setattr(requests, "get", swallowed)
    waits: list[float] = []
    file = RemoteFile("a.zip", ("https://example.org/a.zip",), "0" * 32, 1000, ACCESS)
    summary = fetch([file], tmp_path, sleep=waits.append)
    assert waits == []
    assert "is there a network" in summary.broken_path.read_text()


def test_an_archive_that_the_server_calls_compressed_is_kept_as_it_is(tmp_path):
    content = gzip.compress(CONTENT)
    with played_source({"a.tar.gz": content}, behaviour="calls it gzip") as source:
        assert fetch([remote(source, "a.tar.gz", content)], tmp_path).made == 1
    assert (tmp_path / "a.tar.gz").read_bytes() == content


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [("7", 7.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None)]
)
def test_the_servers_own_wait_is_understood(retry_after, seconds):
    assert _wanted_wait(retry_after) == seconds


def test_a_redirect_to_another_scheme_is_refused_at_once(tmp_path):
    waits: list[float] = []
    with played_source({}, redirect_to="file:///etc") as source:
        summary = fetch([remote(source, query="?key=TOPSECRET")], tmp_path, sleep=waits.append)
    assert (summary.broken, waits) == (1, [])
    assert "neither http nor https" in summary.broken_path.read_text()
    assert "TOPSECRET" not in summary.broken_path.read_text()


def test_other_schemes_are_refused(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    file = RemoteFile("a.zip", (f"file://{secret}",), None, None, "")
    summary = fetch([file], tmp_path / "out")
    assert summary.broken == 1
    assert not (tmp_path / "out" / "a.zip").exists()


def test_names_from_the_table_stay_inside_the_folder(tmp_path):
    with played_source({"a.zip": CONTENT}) as source, pytest.raises(ValueError, match="contains"):
        fetch([RemoteFile("../a.zip", (f"{source.address}/a.zip",), None, None, "")], tmp_path / "out")
    assert list(tmp_path.rglob("a.zip")) == []


def test_the_shipped_table_is_whole():
    table = load_catalogue()
    for name in table:
        corpus = load_corpus(name, key="k y")
        assert corpus.files
        for file in corpus.files.values():
            assert file.md5 is None or (len(file.md5) == 32 and int(file.md5, 16) >= 0)
            assert all(url.startswith("http") and "{" not in url for url in file.urls)
            assert file.access
        for joined in corpus.joined.values():
            assert all(part in corpus.files for part in joined.parts)
    assert "key=k%20y" in load_corpus("voxceleb", key="k y").files["vox1_test_wav.zip"].urls[0]


def test_without_a_key_the_form_is_named_and_nothing_is_asked(tmp_path):
    summary = fetch(list(load_corpus("voxceleb").files.values())[:1], tmp_path, num_retries=0)
    assert "an access key is needed" in summary.broken_path.read_text()
    assert "mm.kaist.ac.kr" in summary.broken_path.read_text()
