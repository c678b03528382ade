"""Published models by name, from a local hub and a local address: checked, interrupted, private,
offline; pushed.
"""

import hashlib
import re
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
import torch
import yaml

import speakernet
from speakernet.assembly.published import cache_path, fetch
from speakernet.checkpoint import read_checkpoint
from speakernet.cli import main
from speakernet.cli.shared import load_configuration
from speakernet.files import sha256_of
from speakernet.models import published
from speakernet.models.importers import PUBLISHED
from tests.commands import run_command
from tests.hub_server import TOKEN, local_hub
from tests.models.test_published_models import GOLDEN, contents_of, golden_features

REFERENCE = (
    Path(__file__).resolve().parents[3] / "shared" / "reference" / "campplus_3dspeaker_192.pt"
)
CASE = next(case for case in GOLDEN if case.get("note") == "custom")
ENTRY = yaml.safe_load("""
{importer: redimnet, model: ReDimNet, licence: MIT, trained_on: nothing, sample_rate: 16000,
eer: {VoxCeleb1-O: 1.5}, parameters: 0.3 M}
""")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint in the format of ReDimNet's authors, with golden embeddings."""
    path = tmp_path_factory.mktemp("published") / "tiny.pt"
    torch.save(contents_of(CASE), path)
    return path


@pytest.fixture
def server(checkpoint, tmp_path, monkeypatch):
    """A local hub with the checkpoint, and the names `redimnet/tiny` (on the hub) and
    `redimnet/address`.
    """
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path / "ours"))
    (folder := tmp_path / "authors").mkdir()
    (folder / "tiny.pt").write_bytes(checkpoint.read_bytes())
    with local_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.folders["authors/tiny"] = folder
        table = {
            "redimnet/tiny": {**ENTRY, "hub": "authors/tiny", "files": ["absent.pt", "tiny.pt"]},
            "redimnet/address": {**ENTRY, "url": f"{hub.address}/authors/tiny/tiny.pt"},
        }
        monkeypatch.setattr(published, "catalogue", lambda: table)
        yield hub


def refused(capsys, *words):
    """The error message of a command that must end with status 2."""
    capsys.readouterr()
    assert main(list(words)) == 2
    *before, line = capsys.readouterr().err.strip().splitlines()
    # The hub's library prints bars and retries before it.
    assert not any("Traceback" in one for one in before)
    return line


def models_kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "ours").rglob("*.pt"))


def test_table():
    for name, entry in published.catalogue().items():
        if "segmentation" in entry:
            assert entry["segmentation"] == 5_992_913 and entry["licence"] == "MIT"
        else:
            format = PUBLISHED[entry["importer"]]
            assert entry["model"] in format.models(
                {"model_config": {}} if format.SOURCE == "redimnet" else {}
            ), name
        assert ("hub" in entry) == ("files" in entry) == ("url" not in entry), name
    if REFERENCE.is_file():
        assert published.catalogue()["3dspeaker/campplus-zh-en"]["sha256"] == sha256_of(REFERENCE)


def test_names_as_model_files(server, checkpoint, tmp_path, monkeypatch, capsys):
    # The connection is cut once; the library keeps complete blocks.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    server.cut_at = checkpoint.stat().st_size // 2
    for name in ("redimnet/tiny", "redimnet/address"):
        run_command(f"fetch {name} --out {tmp_path}/copy.pt")
        summary = read_checkpoint(tmp_path / "copy.pt")["training_summary"]
        assert (
            summary["licence"] == "MIT"
            and summary["sha256"] == sha256_of(checkpoint)
            and summary["name"] == name
        )
    ranges = [int(one[6:-1]) for *_, one in server.requests if one]
    assert len(ranges) == 1 and 0 < ranges[0] <= checkpoint.stat().st_size // 2, (
        "only the rest is requested"
    )
    # From here on there is no network.
    server.shutdown()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    verifier = speakernet.load("redimnet/tiny", "cpu")
    features = golden_features(208, CASE["num_mels"])
    wanted = torch.tensor(CASE["embeddings"][0])
    found = verifier.embed_features(features)[0]
    assert (found - wanted).norm() / wanted.norm() < 1e-4
    assert main(["info", "redimnet/address"]) == 0 and "MIT" in capsys.readouterr().out
    run_command("models")
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 5 and re.search(
        r"redimnet/tiny +1\.5 +- +0\.3 M +1 MB +MIT +yes +nothing", listed[1]
    )
    loaded = load_configuration(["--config", "finetune", "--initial_model", "redimnet/tiny"])
    assert loaded.config.training.initial_model == str(cache_path("redimnet/tiny"))
    assert (loaded.config.model.name, loaded.config.frontend.num_mels) == (
        "ReDimNetB0",
        CASE["num_mels"],
    )


def test_unexpected_content(server, checkpoint, tmp_path, capsys):
    right = sha256_of(checkpoint)
    wrong = "0" * 64
    for name in published.catalogue():
        published.catalogue()[name]["sha256"] = wrong
        line = refused(capsys, "fetch", name)
        aside = Path(re.search(r"moved to (\S+)\. ", line).group(1))
        assert (
            right in line
            and wrong in line
            and sha256_of(aside) == right
            and not models_kept(tmp_path)
        )
        del published.catalogue()[name]["sha256"]
        run_command(f"fetch {name}")
        # Without a published checksum, the checksum of the first fetch counts.
        cache_path(name).unlink()
        note = cache_path(name).with_suffix(".sha256")
        assert note.read_text() == right
        note.write_text(wrong)
        assert wrong in refused(capsys, "fetch", name) and models_kept(tmp_path) == []
        note.unlink()


def test_names_that_cannot_be_fetched(server, tmp_path, monkeypatch, capsys):
    server.private.add("authors/tiny")
    server.folders["authors/empty"] = tmp_path / "hub"
    (tmp_path / "hub").mkdir()
    for name, words in (
        ("redimnet/tny", ("'redimnet/tny'", "did you mean 'redimnet/tiny'")),
        ("redimnet/tiny", ("authors/tiny", "hf auth login", "HF_TOKEN")),
        ("nobody/nothing", ("nobody/nothing", "check the name")),
        ("authors/empty", ("authors/empty", "no model.pt")),
    ):
        line = refused(capsys, "fetch", name)
        assert all(word in line for word in words), line
    for words in (
        ("verify", "a.wav", "b.wav", "--model", "redimnet/tny"),
        ("train", "--config", "exp01", "--initial_model", "redimnet/tny"),
    ):
        assert "'redimnet/tiny'" in refused(capsys, *words)
    # A mistyped path is not taken for a name on the hub.
    assert "give a model file" in refused(capsys, "verify", "a", "b", "--model", f"{tmp_path}/best")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run_command("fetch redimnet/tiny")
    cache_path("redimnet/tiny").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["fetch", "redimnet/tiny"]) == 0, "the hub's cache has the checkpoint"
    for name in ("redimnet/address", "nobody/nothing"):
        line = refused(capsys, "fetch", name)
        assert "in the cache" in line and ("HF_HUB_OFFLINE" in line or "cannot be reached" in line)
    assert models_kept(tmp_path) == ["tiny.pt"]


class Harm:
    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def test_no_code_is_run(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Harm()}, tmp_path / "authors" / "tiny.pt")
    assert "nothing in it was run" in refused(capsys, "fetch", "redimnet/tiny")
    assert not Path("harmed").exists() and not models_kept(tmp_path)


def test_push(server, tmp_path, monkeypatch, capsys):
    file = str(fetch("redimnet/tiny"))
    assert "hf auth login" in refused(capsys, "push", "us/voices", "--model", file)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run_command(f"push us/voices --model {file} --private")
    assert f"{server.address}/us/voices" in capsys.readouterr().out
    folder = server.folders["us/voices"]
    assert sha256_of(folder / "model.pt") == sha256_of(file) and "us/voices" in server.private
    card = (folder / "README.md").read_text()
    for words in (
        "license: mit",
        "library_name: speakernet",
        'speakernet.load("us/voices")',
        "297,417",
        "nothing",
    ):
        assert words in card
    for name in ("us/voices", "us/voices@main"):
        assert speakernet.load(name, "cpu").fingerprint == speakernet.load(file, "cpu").fingerprint
    # A different model on the hub gets a different file in the cache; damage to it is noticed.
    (blob,) = (
        path
        for path in (tmp_path / "hub").rglob("*")
        if path.is_file() and path.name == sha256_of(file)
    )
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    assert "SHA-256" in refused(capsys, "info", "us/voices")
    assert speakernet.load("us/voices", "cpu").sample_rate == 16000


def test_a_repository_that_has_changed_is_named(server, tmp_path, monkeypatch, caplog):
    """Without a revision, a name follows `main`."""
    folder = tmp_path / "us" / "voices"
    folder.mkdir(parents=True)
    server.folders["us/voices"] = folder
    first = fetch("redimnet/tiny").read_bytes()
    (folder / "model.pt").write_bytes(first)
    for _ in range(2):
        assert fetch("us/voices").read_bytes() == first
    assert "has changed" not in caplog.text
    (folder / "model.pt").write_bytes(first + b"changed")
    before, now = (hashlib.sha256(content).hexdigest() for content in (first, first + b"changed"))
    for _ in range(2):
        caplog.clear()
        assert fetch("us/voices").read_bytes() == first + b"changed"
        assert f"{now} instead of {before}" in caplog.text
    # Accepted by removing the note that the warning names.
    (note,) = (tmp_path / "hub" / "models--us--voices").rglob("first-fetched-main.json")
    assert str(note) in caplog.text
    note.unlink()
    caplog.clear()
    fetch("us/voices")
    assert "has changed" not in caplog.text
