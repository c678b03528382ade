"""Every command on a page is taken by its parser; those that cost nothing are run, others by the tests of a page."""

import functools
import re
from pathlib import Path

import pytest

from speakernet.cli import COMMANDS, main
from speakernet.config.schema import NESTED, PARTS, SECTIONS, TABLES
from speakernet.options import field_names
from tests.documentation.pages import PAGES, ROOT, Page, parse_page, read_page
from tests.documentation.parsing import OTHERS, PageError, check
from tests.documentation.shell import Command, commands_in, commands_in_prose

RUN_BY_PAGE = {
    "docs/data.md": "tests/test_recipes.py",
    "docs/migration_wespeaker.md": "tests/config/test_wespeaker_page.py",
    "docs/models.md": "tests/models/test_fine_tuning_page.py",
    "docs/use.md": "tests/inference/test_use_page.py",
}
"""Page -> the test that runs its commands, or those of them that need no data of the reader's."""
RUN_HERE = ("list", "show-config")
"""Commands that answer at once, and are run where they stand."""
ONLY_PARSED = {
    "train": "takes minutes: tests/test_journey.py and the tests of pages run it on tiny corpora",
    "evaluate": "needs scores or a model: tests/evaluation/ runs it",
    "compare": "needs two runs: tests/evaluation/ runs it",
    "report": "needs a run: tests/evaluation/ runs it",
    "prepare": "needs recordings or a network: tests/corpora/ runs it",
    "pack": "needs recordings: tests/data/test_packing.py runs it",
    "doctor": "looks at the reader's files: tests/checks/ runs it",
    "find-batch-size": "fills the memory: tests/training/test_find_batch_size.py runs it",
    "benchmark": "takes minutes: tests/benchmarks/ runs it",
    "import-weights": "needs a foreign model: tests/models/ runs it",
    "export": "needs a model and the extra `export`: tests/inference/ runs it",
    "serve": "answers until it is stopped: tests/inference/serve/ runs it",
    "info": "needs a model: tests/inference/test_use_page.py runs it",
    "calibrate": "needs a model: tests/inference/test_use_page.py runs it",
    "verify": "needs a model: tests/inference/test_use_page.py runs it",
    "embed": "needs a model: tests/inference/test_use_page.py runs it",
    "enroll": "needs a model: tests/inference/test_use_page.py runs it",
    "identify": "needs a model: tests/inference/test_use_page.py runs it",
    "people": "needs a store: tests/inference/test_use_page.py runs it",
}
"""Command -> why a page's command is parsed here and not run, and what runs it."""
HISTORY = {"docs/decisions.md": "names options that were tried and taken out again"}
EXCEPTIONS: dict[str, str] = {}
"""A line of a page that no parser takes -> why it stands there."""


@pytest.fixture(scope="module", params=PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Page:
    return read_page(request.param)


def test_every_command_is_taken_by_its_parser(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = []
    for command in [*commands_in(page), *commands_in_prose(page)]:
        try:
            if command.text not in EXCEPTIONS:
                check(command, tmp_path)
        except PageError as error:
            refused.append(str(error))
    assert not refused, "\n".join(refused)


def test_commands_that_answer_at_once_are_run(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands_in(page):
        program, *words = command.words
        is_cheap = words[:1] and words[0] in RUN_HERE and "--schedule" not in words and not command.is_partial
        if program == "speakernet" and is_cheap:
            check(command, tmp_path)
            assert main(words) == 0, command.text
            assert capsys.readouterr().out, command.text


def test_every_command_is_run_somewhere() -> None:
    assert {*ONLY_PARSED, *RUN_HERE} == set(COMMANDS)
    for reason in [*ONLY_PARSED.values(), *OTHERS.values()]:
        for path in re.findall(r"tests/[\w/.]*\w", reason):
            assert (ROOT / path).exists(), path
    for page, test in RUN_BY_PAGE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_exceptions_still_stand_on_a_page() -> None:
    written = {command.text for path in PAGES for command in commands_in(read_page(path))}
    assert EXCEPTIONS.keys() <= written


def test_options_that_pages_name_exist(page: Page) -> None:
    if page.name in HISTORY:
        return
    sections = tuple(f"{section}." for section in SECTIONS)
    for text in page.code_words():
        key = re.split(r"[:= ]", text.removeprefix("--"), maxsplit=1)[0]
        if key.startswith(sections) and re.fullmatch(r"\w+\.[a-z_]+(\.\w+)*", key) and not is_file(key):
            assert key in known_keys(), f"{page.name}: {text}"


@functools.cache
def known_keys() -> set[str]:
    """Every option that some configuration can name."""
    owners = [(section, options) for section, options in SECTIONS.items()]
    owners += [(section, part.options) for section, (_, table) in TABLES.items() for part in table.values()]
    owners += [(key, part.options) for key, place in NESTED.items() for part in PARTS[place][1].values()]
    return {f"{place}.{field}" for place, owner in owners for field in field_names(owner)}


def is_file(name: str) -> bool:
    """Whether dotted words are the name of a file or of a module, `training.md` among them."""
    return name.endswith((".md", ".py", ".txt", ".yaml", ".pt"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speakernet trian", "no command 'trian'"),
        ("speakernet verify a.wav b.wav --modle best.pt", "--model"),
        ("speakernet verify a.wav b.wav --model best.pt --far x", "invalid float"),
        ("speakernet people forget Ada --store people.db", "invalid choice"),
        ("python trainSpeakerNet.py --config exp02.yaml", "exp01.yaml"),
        ("torchrun --nproc_per_node=8 trainSpeakerNet.py --config exp01.yaml --data.batch_sise 3", "batch_size"),
        ("python data_prep/folder.py", "required"),
        ("python data_prep/vctkk.py data", "does not exist"),
        ("python -m benchmarks.sharded_head --spekers 3", "--spekers"),
        ("pip install 'speakernet[servre]'", "servre"),
        ("make tset", "tset"),
        ("pytest tests/test_nothing.py", "does not exist"),
        ("frobnicate --all", "frobnicate"),
        ("cat a.txt | speakernet embed -", "--model"),
    ],
)
def test_a_wrong_command_is_found(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = parse_page(ROOT / "made.md", f"Do this:\n\n```sh\n{text}\n```\n")
    with pytest.raises(PageError, match=f"made.md, line 4: .*{re.escape(said)}"):
        for command in commands_in(page):
            check(command, tmp_path)


def test_in_prose_what_is_required_may_be_missing_and_nothing_else(tmp_path: Path) -> None:
    page = parse_page(ROOT / "made.md", "`speakernet export`, `speakernet export --ot x`, `speakernet COMMAND`.\n")
    right, wrong, any_one = commands_in_prose(page)
    check(right, tmp_path)
    check(any_one, tmp_path)
    with pytest.raises(PageError, match="does not take '--ot'"):
        check(wrong, tmp_path)
    assert Command("", "", ()).is_partial is False
