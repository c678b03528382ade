"""--help and the recipes agree with the code; tests/documentation/ does the same for the pages."""

from pathlib import Path

import pytest

from speakernet.config.loading import load_config
from speakernet.config.reference import help_text
from speakernet.config.schema import SECTIONS, known_fields

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_explained_in_the_help(section: str) -> None:
    text = help_text(section)
    for field in known_fields(section):
        assert f"--{section}.{field} " in text, field
    assert help_text("all").count(f"--{section}.") >= len(known_fields(section))


def test_the_short_help_is_short() -> None:
    assert 15 <= help_text().count("\n  --") <= 30
    with pytest.raises(ValueError, match="expected all or one of data, "):
        help_text("everything")


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_every_recipe_loads_and_says_what_it_is(recipe: Path) -> None:
    assert recipe.read_text(encoding="utf-8").startswith("# "), "the first line says what the recipe is for"
    load_config(["--config", str(recipe)])
