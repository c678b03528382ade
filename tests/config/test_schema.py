"""Help for editors and shells: the JSON schema, differences between two files, completion."""

import json
import subprocess

import jsonschema
import pytest
import yaml

from speakernet.config.loading import RECIPES
from tests.commands import run_command
from tests.config.layers import load_line, load_text, write

RECIPE_FILES = sorted(RECIPES.rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema():
    return json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))


def errors_of(schema, values):
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(values)]


def test_file_is_current(schema, capsys):
    run_command("show-config --schema")
    assert json.loads(capsys.readouterr().out) == schema, "run make schema"


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.name)
def test_recipes(schema, path):
    text = path.read_text(encoding="utf-8")
    address = text.split("$schema=")[1].split("\n")[0]
    assert (path.parent / address).resolve() == (RECIPES / "schema.json").resolve()
    assert not errors_of(schema, yaml.safe_load(text))
    base = "--config exp01.yaml" if path.name.startswith(("preset", "test")) else ""
    assert not errors_of(schema, load_line(f"{base} --config {path}").config.model_dump())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: {name: ResNet35}", "ResNet35"),
        ("model: {name: ResNet34, options: {sinc_stride: 1}}", "sinc_stride"),
        ("loss: {name: softmax, margin: 0.2}", "margin"),
        ("training: {max_epochs: -1}", "-1"),
    ],
)
def test_mistakes(schema, text, word):
    assert any(word in message for message in errors_of(schema, yaml.safe_load(text)))


def test_schema_named_in_a_file():
    text = '{"$schema": "schema.json", "data": {"batch_size": 7}}'
    assert load_text(text).config.data.batch_size == 7


def test_differences(capsys):
    for size in (7, 8):
        text = f"data: {{batch_size: {size}}}\nmodel: {{name: ResNet34}}\n"
        write(text, f"{size}.yaml")
    command = "show-config --diff 7.yaml 8.yaml"
    run_command(command)
    assert capsys.readouterr().out == "data.batch_size: 7 -> 8\n"
    run_command(f"{command} --data.batch_size 9")
    assert capsys.readouterr().out == "no option differs\n"


def test_completion(capsys):
    run_command("--completion bash")
    write(capsys.readouterr().out, "completion")
    line = (
        "COMP_WORDS=(speakernet train --data.batch_s); COMP_CWORD=2; _shtab_speakernet; echo "
        '"${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "-c", f"source ./completion; {line}"], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["--data.batch_size"]
    run_command("--completion pwsh", 1)
