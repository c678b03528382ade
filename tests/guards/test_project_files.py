"""Project files parse, and the versions and folders they name are consistent."""

import re

import yaml

import speakernet
from speakernet.data.lookup import default_cache_folder
from tests.conftest import REPOSITORY

WORKFLOW = REPOSITORY / ".github" / "workflows" / "ci.yml"


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def text_of(name):
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_versions_of_the_workflow():
    matrix = read(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]
    (minors,) = re.findall(
        r"Python :: 3\.\{minor\}\" for minor in \(([\d, ]+)\)", text_of("setup.py")
    )
    assert matrix["python"] == [f"3.{minor}" for minor in minors.split(", ")]
    assert f'python_requires=">={matrix["python"][0]}"' in text_of("setup.py")
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}


def test_version():
    newest = re.findall(r"^## (\S+)$", text_of("CHANGELOG.md"), flags=re.MULTILINE)[0]
    assert newest == speakernet.__version__
    for name in ("setup.py", "pyproject.toml", "README.md"):
        assert speakernet.__version__ not in text_of(name), name


def test_cache_of_tests(tmp_path_factory):
    """It is not the user's cache, because another run of the tests has folders of the same
    names.
    """
    assert default_cache_folder().is_relative_to(tmp_path_factory.getbasetemp())
