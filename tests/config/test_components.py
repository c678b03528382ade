"""Components from plugins: the example of the page trains and is used; mistakes are named."""

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from speakernet.cli import main
from speakernet.config import components
from speakernet.losses.options import LOSSES
from speakernet.options import PLUGIN_MODULES
from tests.tiny_recipe import write_recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "components.md").read_text(encoding="utf-8")
CODE, CHANGES = (
    re.search(rf"```{kind}\n(.+?)```", PAGE, re.DOTALL)[1] for kind in ("python", "yaml")
)


@pytest.fixture(autouse=True)
def restore_tables(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {kind: dict(table) for kind, table in components.TABLES.items()}
    yield
    for kind, table in components.TABLES.items():
        table.clear()
        table.update(before[kind])
    for name in PLUGIN_MODULES:
        del sys.modules[name]
    PLUGIN_MODULES.clear()


@pytest.fixture
def parts(tmp_path):
    path = tmp_path / "parts" / "my_parts.py"
    path.parent.mkdir()
    path.write_text(CODE)
    return path


@pytest.mark.slow
def test_example(tiny_corpus, tmp_path, parts, capsys, caplog):
    run = tmp_path / "run"
    changes = (yaml.safe_load(CHANGES), {"augment": {"enabled": True}})
    recipe = write_recipe(tmp_path / "my.yaml", tiny_corpus, run, *changes)
    assert main(f"train --plugin={parts} --config {recipe}".split()) == 0
    assert "augmentation is skipped" not in capsys.readouterr().err
    assert (run / "my_parts.py").read_bytes() == parts.read_bytes()
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["augment"]["components"]["Clipping"]["level"] == 0.2
    recording = str(tiny_corpus / (tiny_corpus / "train_list.txt").read_text().split()[1])
    out = str(tmp_path / "embeddings.npz")
    embed = f"embed {recording} --model {run}/best.pt --out {out}".split()
    assert main([*embed, "--plugin", str(parts)]) == 0
    known = dict(PLUGIN_MODULES)
    PLUGIN_MODULES.clear()
    assert main(embed) == 1
    assert "--plugin my_parts.py" in capsys.readouterr().err
    PLUGIN_MODULES.update({name: (text, "0" * 64) for name, (text, _) in known.items()})
    caplog.clear()
    assert main(embed) == 0
    assert "different version of my_parts.py" in caplog.text


def test_rows(parts, capsys, monkeypatch):
    assert main(f"list --plugin {parts} poolings".split()) == 0
    assert "Power" in capsys.readouterr().out
    components.add_file(parts)
    assert LOSSES["focal"] is components.TABLES["classification loss"]["focal"]
    (parts.parent / "package_of_parts.py").write_text(
        "from my_parts import *\nCOMPONENTS = {'pooling': {}}\n"
    )
    components.add_installed([EntryPoint("one", "package_of_parts", "speakernet.components")])
    assert set(PLUGIN_MODULES) == {"my_parts", "package_of_parts"}
    words = "--model.pooling_options.powr 4 --model.pooling Power"
    assert main(["show-config", "--plugin", str(parts), *words.split()])
    assert "powr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = ", "SyntaxError"),
        ("", "COMPONENTS"),
        (
            "from speakernet.options import *\nCOMPONENTS = {'pooling': {'A': Component(Options, "
            "'p:A')}}",
            "PoolingOptions",
        ),
        (
            "from speakernet.models.options import POOLINGS\nCOMPONENTS = {'pooling': POOLINGS}",
            "already",
        ),
        (
            "from speakernet.models.options import *\nfrom speakernet.options import Component\n"
            "COMPONENTS = {'pooling': {'A': Component(PoolingOptions, 'broken_parts:A')}}",
            "'A'",
        ),
    ],
)
def test_mistakes(tmp_path, capsys, text, words):
    path = tmp_path / "broken_parts.py"
    path.write_text(text)
    sys.modules.pop("broken_parts", None)
    assert main(["list", "--plugin", str(path)]) == 2
    assert words in capsys.readouterr().err and not PLUGIN_MODULES


@pytest.mark.parametrize("name", ["absent.py", "my-parts.py", "yaml.py"])
def test_files_that_cannot_be_imported(tmp_path, capsys, name):
    if name != "absent.py":
        (tmp_path / name).write_text("COMPONENTS = {}")
    assert main(["list", "--plugin", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert name in error and ("no such file" in error) == (name == "absent.py")
