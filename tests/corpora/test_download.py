"""Downloads from a real HTTP server that is good, slow, interrupted, wrong, refusing, failing, or
without ranges.
"""

import base64
import hashlib
import itertools
import logging
import resource
import socket
from dataclasses import replace

import numpy as np
import pytest
import requests
import yaml
from preparation_server import fake_source

from speakernet.cli.prepare import build_parser
from speakernet.corpora.download import (
    DownloadOptions,
    RemoteFile,
    download_all,
)
from speakernet.corpora.public_archives import CATALOGUE, PublicArchives
from speakernet.corpora.steps import DiskFullError, StepSummary, finish

CONTENT = np.random.default_rng(7).bytes(200_000)
ACCESS = "fill the form at example.org"
SECRET = "?key=TOPSECRET"


def serve(behaviour="good", **options):
    """A server with the file."""
    return fake_source({"a.zip": CONTENT}, behaviour=behaviour, **options)


def remote(source, name="a.zip", query=""):
    md5 = hashlib.md5(CONTENT).hexdigest()
    return RemoteFile(name, (f"{source.address}/{name}{query}",), md5, len(CONTENT), ACCESS)


def fetch(file, folder, **options):
    chosen = {"sleep": lambda seconds: None, "timeout_seconds": 0.4} | options
    summary = StepSummary("download", folder)
    download_all([file], folder, 2, DownloadOptions(**chosen), summary)
    return summary


def half_files(folder):
    return [path.name for path in folder.rglob("*") if path.name.endswith((".part", ".tmp"))]


def failing_fetch(file, folder, **options):
    """The waits between attempts, and the final error."""
    waits = []
    summary = fetch(file, folder, sleep=waits.append, **options)
    return waits, summary.broken_path.read_text()


@pytest.mark.parametrize(
    "behaviour", ["good", "slow", "cut", "500 then good", "no ranges", "stalls", "calls it gzip"]
)
def test_download(tmp_path, behaviour):
    with serve(behaviour) as source:
        summary = fetch(remote(source), tmp_path)
        assert (summary.made, summary.broken) == (1, 0)
        assert (tmp_path / "a.zip").read_bytes() == CONTENT and half_files(tmp_path) == []
        asked = source.requests["a.zip"]
        assert fetch(remote(source), tmp_path).skipped == 1
        assert source.requests["a.zip"] == asked


def test_changed_file(tmp_path):
    with serve("cut") as source:
        file = replace(remote(source), md5=None)
        assert (
            fetch(file, tmp_path, num_retries=0).broken == 1
            and (tmp_path / "a.zip.part").stat().st_size
        )
        source.files["a.zip"] = CONTENT[::-1]
        source.behaviour = "good"
        assert fetch(file, tmp_path).made == 1
    assert (tmp_path / "a.zip").read_bytes() == CONTENT[::-1]
    assert not (tmp_path / "a.zip.part.version").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.zip.part"])
@pytest.mark.parametrize("there", [CONTENT, CONTENT + b"more", b"other" * 100])
def test_existing_files(tmp_path, name, there):
    (tmp_path / name).write_bytes(there)
    with serve() as source:
        summary = fetch(remote(source), tmp_path)
        assert summary.made + summary.skipped == 1
        assert bool(source.requests) == (name != "a.zip" or there != CONTENT), (
            "an existing archive is not fetched"
        )
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_wrong_checksum(tmp_path):
    with serve("wrong md5") as source:
        summary = fetch(remote(source), tmp_path)
    assert summary.broken == 1 and not (tmp_path / "a.zip").exists() and half_files(tmp_path) == []
    assert hashlib.md5(CONTENT).hexdigest() in summary.broken_path.read_text()


@pytest.mark.parametrize("code", ["401", "403", "404"])
def test_refusal(tmp_path, code):
    with serve(code) as source, serve() as mirror:
        file = remote(source)
        text = fetch(file, tmp_path).broken_path.read_text()
        assert source.requests["a.zip"] == 1
        assert fetch(replace(file, urls=(*file.urls, *remote(mirror).urls)), tmp_path).made == 1
    assert code in text and ACCESS in text


def test_full_disk(tmp_path):
    with serve() as source:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, before[1]))
        try:
            with pytest.raises(DiskFullError, match=r"a\.zip"):
                fetch(remote(source), tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "a.zip").exists()
        assert fetch(remote(source), tmp_path).made == 1
        assert source.seen[-1]["Range"] == "bytes=120000-"


def test_credentials_after_a_redirect(tmp_path):
    credentials = {"user": "anna", "password": "s3cret"}
    expected = "Basic " + base64.b64encode(b"anna:s3cret").decode()
    with serve(user_and_password=expected) as source:
        assert fetch(remote(source), tmp_path / "one", **credentials).made == 1
    with serve() as other, fake_source({}, redirect_to=other.address) as first:
        assert fetch(remote(first), tmp_path / "two", **credentials).made == 1
        assert "Authorization" in first.seen[0]
        assert all("Authorization" not in headers for headers in other.seen)


def test_secrets_are_not_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with serve("500 then good") as source:
        fetch(remote(source, query=SECRET), tmp_path, user="anna", password="s3cret")
        assert any("TOPSECRET" in headers["path"] for headers in source.seen)
        source.behaviour = "404"
        summary = fetch(remote(source, "b.zip", query=SECRET), tmp_path)
        finish([summary])
    written = (
        caplog.text
        + summary.broken_path.read_text()
        + repr(DownloadOptions(user="anna", password="s3cret"))
    )
    written += "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "500" in caplog.text and "TOPSECRET" not in written and "s3cret" not in written


def test_waits(tmp_path):
    with fake_source({}) as source:
        file = remote(source)
    waits, reason = failing_fetch(file, tmp_path, num_retries=4)
    assert waits == [1.0, 2.0, 4.0, 8.0] and "after 4 " in reason


@pytest.mark.parametrize(
    ("place", "obstacle"),
    [
        (socket, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
        (requests, requests.ConnectTimeout("no answer")),
        (requests, requests.exceptions.ProxyError("dead")),
    ],
    ids=str,
)
def test_no_network(tmp_path, monkeypatch, place, obstacle):
    def swallowed(*arguments, **options):
        raise obstacle

    monkeypatch.setattr(place, "getaddrinfo" if place is socket else "get", swallowed)
    file = RemoteFile("a.zip", ("https://example.org/a.zip",), "0" * 32, 1000, ACCESS)
    waits, reason = failing_fetch(file, tmp_path)
    assert waits == [] and "no connection" in reason


def test_other_schemes(tmp_path):
    (tmp_path / "etc").write_text("secret")
    local = RemoteFile("a.zip", (f"file://{tmp_path}/etc{SECRET}",), None, 0, "")
    with fake_source({}, redirect_to="file:///etc") as source:
        for file in (local, remote(source, query=SECRET)):
            waits, reason = failing_fetch(file, tmp_path)
            assert waits == [] and "http or https" in reason and "TOPSECRET" not in reason
    assert not (tmp_path / "a.zip").exists()


def test_shipped_catalogue(tmp_path):
    arguments = build_parser("voxceleb").parse_args(["--key", "k y"])
    for name in yaml.safe_load(CATALOGUE.read_text(encoding="utf-8")):
        corpus = PublicArchives(name, arguments)
        for file in corpus.files.values():
            assert file.md5 is None or (len(file.md5) == 32 and int(file.md5, 16) >= 0)
            assert file.access and all(
                url.startswith("http") and "{" not in url for url in file.urls
            )
        assert corpus.files and {*itertools.chain(*corpus.parts.values())} <= {*corpus.files}
    corpus = PublicArchives("voxceleb", arguments)
    assert "key=k%20y" in corpus.files["vox1_test_wav.zip"].urls[0]
    arguments.key = ""
    part = PublicArchives("voxceleb", arguments).files["vox1_dev_wav_partaa"]
    reason = fetch(part, tmp_path, num_retries=0).broken_path.read_text()
    assert "access key" in reason and "mm.kaist.ac.kr" in reason
