"""Precedence, old names, errors with file, line and nearest key."""

import logging
from pathlib import Path

import pytest
import yaml

from speakernet.config import Config, ConfigError, config_from_dict, config_to_dict, load_config
from speakernet.config.aliases import ALIASES, CLASSIC_DEFAULTS, REMOVED, translate
from speakernet.config.loading import find_config, save_config
from speakernet.config.reference import help_text
from speakernet.config.schema import SECTIONS, known_fields
from speakernet.models.options import ResNetOptions

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))


def write(folder: Path, text: str, name: str = "my.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_beats_yaml_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "data:\n  batch_size: 7\noptimizer:\n  learning_rate: 2e-3\n")
    config = load_config(["--config", file, "--data.batch_size", "9"]).config
    assert config.data.batch_size == 9
    assert config.optimizer.learning_rate == 2e-3
    assert config.data.sample_rate == Config().data.sample_rate


def test_command_line_beats_yaml_through_an_old_name_too(tmp_path: Path) -> None:
    file = write(tmp_path, "data:\n  batch_size: 7\n")
    assert load_config(["--config", file, "--batch_size=11"]).config.data.batch_size == 11
    assert load_config(["--batch_size", "11", "--config", file]).config.data.batch_size == 11


def test_later_files_win(tmp_path: Path) -> None:
    first = write(tmp_path, "data:\n  batch_size: 7\n  crop_frames: 150\n", "first.yaml")
    second = write(tmp_path, "data:\n  batch_size: 8\n", "second.yaml")
    config = load_config(["--config", first, "--config", second]).config
    assert (config.data.batch_size, config.data.crop_frames) == (8, 150)
    assert config.training.save_path == str(Path("exps/first"))


@pytest.mark.parametrize("section", ["training", "trainning"])
def test_an_option_in_the_wrong_section_is_found_in_its_own(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key {section}\.seed; did you mean 'runtime\.seed'\?"):
        load_config([f"--{section}.seed", "3"])


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, "data:\n  batch_size: 7\n  batchsize: 8\n")
    with pytest.raises(ConfigError, match=r"my\.yaml:3: unknown key data\.batchsize; did you mean 'batch_size'"):
        load_config(["--config", file])


def test_known_typo_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, "model: ResNetSE34L\nnLcasses: 5994\n")
    assert load_config(["--config", file]).config.data.num_classes == 5994
    assert "my.yaml:2" in caplog.text and "nClasses" in caplog.text
    with pytest.raises(ConfigError, match=r"my\.yaml:2: unknown key nCLasess"):
        load_config(["--config", write(tmp_path, "model: ResNetSE34L\nnCLasess: 5994\n")])


def test_wespeaker_file_names_the_page(tmp_path: Path) -> None:
    file = write(tmp_path, "exp_dir: exp\nmodel: ResNet34\ndataset_args:\n  num_frms: 200\nmodel_args: {}\n")
    with pytest.raises(ConfigError, match=r"exp_dir, model, dataset_args, model_args are wespeaker.*migration"):
        load_config(["--config", file])


def test_differing_defaults_of_a_flat_file_are_named(tmp_path: Path) -> None:
    defaults = load_config(["--config", write(tmp_path, "model: ResNetSE34L\nbatch_size: 100\n")]).defaults
    assert "training.max_grad_norm 0.0 (5.0), runtime.precision no (auto)" in defaults
    assert "data.batch_size" not in defaults and "data.train_list" not in defaults
    given = load_config(["--config", write(tmp_path, "model: ResNetSE34L\nmixedprec: True\n")]).defaults
    assert "runtime.precision" not in given
    assert "max_grad_norm" not in load_config([]).defaults


def test_removed_option_is_refused_but_read_in_a_saved_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "runtime.old_way", "write runtime.new_way")
    config = load_config(["--save_path", str(tmp_path)]).config
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert load_config(["--config", write(tmp_path, text + "  old_way: 3\n", "config.yaml")]).config == config
    values = config_to_dict(config)
    values["runtime"]["old_way"] = 3
    assert config_from_dict(values) == config
    with pytest.raises(ConfigError, match=r"my\.yaml:2: runtime\.old_way .*runtime\.new_way"):
        load_config(["--config", write(tmp_path, "runtime:\n  old_way: 3\n")])


def test_unknown_option_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"command line: --max_epohc.*max_epoch"):
        load_config(["--max_epohc", "3"])


def test_wrong_type_names_file_line_value_and_type(tmp_path: Path) -> None:
    file = write(tmp_path, "\ndata:\n  batch_size: many\n")
    with pytest.raises(ConfigError, match=r"my\.yaml:3: data\.batch_size is 'many'; expected int"):
        load_config(["--config", file])


def test_wrong_choice_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.precision is 'half'"):
        load_config(["--mixed-precision", "half"])


def test_unquoted_off_and_no_of_yaml_are_the_words_that_were_written(tmp_path: Path) -> None:
    file = write(tmp_path, "data:\n  ram_corpus: on\n  pin_memory: off\nruntime:\n  precision: no\n  compile: off\n")
    config = load_config(["--config", file]).config
    assert (config.data.ram_corpus, config.runtime.precision, config.runtime.compile) == ("on", "no", "off")
    assert config.data.pin_memory is False


def test_mixed_precision_without_a_value_is_automatic() -> None:
    assert load_config(["--mixed-precision", "--bf16"]).config.runtime.precision == "bf16"
    assert load_config(["--bf16", "--mixed-precision"]).config.runtime.precision == "auto"


def test_a_key_like_nothing_else_is_not_answered_with_hundreds_of_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown key qqq; --help all lists every option$"):
        load_config(["--qqq", "3"])


def test_help_offers_only_what_is_taken() -> None:
    assert "configuration file" not in help_text() and "--data.batch_size" in help_text("all")


def test_missing_file_names_recipes() -> None:
    with pytest.raises(ConfigError, match=r"exp01\.yaml"):
        load_config(["--config", "exp1.yaml"])


def test_bare_name_without_suffix_is_found_in_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("exp01").name == "exp01.yaml"
    write(tmp_path, "data:\n  batch_size: 3\n", "exp01.yaml")
    assert find_config("exp01.yaml").resolve() == tmp_path / "exp01.yaml"


OF_OTHER_PARTS = {"loss.hard_probability", "loss.hard_rank", "optimizer.nesterov"}
"""Defaults that AM-softmax and Adam do not take."""


def test_flat_yaml_starts_from_classic_defaults(tmp_path: Path) -> None:
    loaded = load_config(["--config", write(tmp_path, "model: ResNetSE34L\ntrainfunc: amsoftmax\n")])
    assert loaded.is_classic
    values = config_to_dict(loaded.config)
    assert values["loss"] == {"name": "amsoftmax", "sharded": "auto", "margin": 0.1, "scale": 30.0}
    for key, expected in CLASSIC_DEFAULTS.items():
        section, field = key.split(".")
        if key not in OF_OTHER_PARTS:
            assert values[section][field] == expected, key


def test_sectioned_yaml_with_an_old_name_on_the_command_line_keeps_our_defaults(tmp_path: Path) -> None:
    loaded = load_config(["--config", write(tmp_path, "data:\n  batch_size: 7\n"), "--max_epoch", "3"])
    assert not loaded.is_classic
    assert loaded.config.training.max_epochs == 3
    assert loaded.config.augment.style == "ours"


@pytest.mark.parametrize(
    ("short", "dotted"),
    [("test_list", "data.test_list"), ("batch_size", "data.batch_size"), ("bf16", "runtime.precision")],
)
def test_the_spelling_of_an_option_changes_no_default(short: str, dotted: str) -> None:
    value = {"bf16": "bf16"}.get(short, "7")
    first = load_config([f"--{short}", *([] if short == "bf16" else [value])])
    second = load_config([f"--{dotted}", value])
    assert first.config == second.config and not first.is_classic and not second.is_classic


def test_defaults_can_be_asked_for_and_beat_the_shape_of_the_file(tmp_path: Path) -> None:
    flat = write(tmp_path, "model: ResNetSE34L\n", "flat.yaml")
    sections = write(tmp_path, "data:\n  batch_size: 7\n", "sections.yaml")
    assert load_config(["--defaults", "voxceleb_trainer"]).config.data.batch_size == 200
    assert load_config(["--config", sections, "--defaults=voxceleb_trainer"]).config.augment.style == "classic"
    assert load_config(["--config", flat, "--defaults", "speakernet"]).config.augment.style == "ours"
    with pytest.raises(ConfigError, match="theirs"):
        load_config(["--defaults", "theirs"])
    assert "--defaults" in help_text("all")


def test_defaults_are_logged_with_the_reason(tmp_path: Path) -> None:
    flat = write(tmp_path, "model: ResNetSE34L\n", "flat.yaml")
    assert load_config(["--config", flat]).defaults.startswith(f"voxceleb_trainer's ({flat}")
    assert load_config(["--bf16"]).defaults.startswith("speakernet's")
    assert "--defaults voxceleb_trainer" in load_config(["--model", "ResNetSE34L"]).defaults


def test_their_checkpoint_means_their_defaults_only_where_it_is_scored_alone(tmp_path: Path) -> None:
    asked: list[Path] = []

    def is_theirs(path: Path) -> bool:
        asked.append(path)
        return path.name == "their.model"

    scored = load_config(["--eval", "--initial_model", "their.model"], is_theirs)
    assert scored.is_classic and "their.model" in scored.defaults
    assert not load_config(["--eval", "--initial_model", "best.pt"], is_theirs).is_classic
    assert len(asked) == 2
    sections = write(tmp_path, "data:\n  batch_size: 7\n")
    for others in (["--config", sections, "--eval"], ["--defaults", "speakernet", "--eval"], ["--max_epoch", "3"]):
        assert not load_config([*others, "--initial_model", "their.model"], is_theirs).is_classic
    assert len(asked) == 2, "a file is read only where its kind decides"


def test_eval_is_a_mode_and_takes_python_booleans(tmp_path: Path) -> None:
    assert load_config(["--eval"]).evaluate_only
    assert not load_config(["--config", write(tmp_path, 'eval: "False"\nmodel: ResNetSE34L\n')]).evaluate_only


def test_python_booleans_as_strings(tmp_path: Path) -> None:
    file = write(tmp_path, 'augment: "True"\nlog_input: "False"\nmodel: ResNetSE34L\n')
    config = load_config(["--config", file]).config
    assert config.augment.enabled is True
    assert config.frontend.log_input is False


def test_json_is_a_configuration_too(tmp_path: Path) -> None:
    file = write(tmp_path, '{\n\t"data": {"batch_size": 5}\n}\n', "my.json")
    assert load_config(["--config", file]).config.data.batch_size == 5


def test_model_options_from_yaml_and_command_line_are_merged(tmp_path: Path) -> None:
    file = write(tmp_path, "model:\n  name: ResNet\n  options: {channels: 32}\n")
    config = load_config(["--config", file, "--model.options.gated", "true"]).config
    assert config.model.options == ResNetOptions(channels=32, gated=True)


def test_saved_copy_loads_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(["--data.batch_size", "9", "--lr", "3e-4", "--save_path", str(tmp_path)]).config
    save_config(config, tmp_path / "config.yaml")
    assert load_config(["--config", str(tmp_path / "config.yaml")]).config == config
    assert config_from_dict(config_to_dict(config)) == config


def test_a_saved_copy_means_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "list.txt").write_text("a a.wav\n")
    monkeypatch.chdir(tmp_path / "work")
    config = load_config(["--train_list", "list.txt", "--data.synthetic_corpus", "made", "--save_path", "run"]).config
    save_config(config, Path("run/config.yaml"))
    monkeypatch.chdir(tmp_path)
    again = load_config(["--config", "work/run/config.yaml"]).config
    assert again.data.train_list == str(tmp_path / "work" / "list.txt")
    assert again.data.synthetic_corpus == str(tmp_path / "work" / "made")
    assert again.training.save_path == str(Path("work/run"))
    (tmp_path / "work" / "run").rename(tmp_path / "copy")
    assert load_config(["--config", "copy/config.yaml"]).config.training.save_path == "copy"
    assert load_config(["--config", "copy/config.yaml", "--save_path", "new"]).config.training.save_path == "new"


def test_the_folder_of_a_runs_list_is_not_that_of_another_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--train_list", "a/train.txt", "--test_list", "a/trials.txt"]).config
    config.data.train_path, config.data.test_path = "corpus/train", "corpus/test"
    save_config(config, Path("run/config.yaml"))

    def data(*options: str, file: str = "run/config.yaml"):
        return load_config(["--config", file, *options]).config.data

    corpus = str(tmp_path / "corpus" / "test")
    with caplog.at_level(logging.INFO):
        assert data().test_path == corpus
        assert "of another list" not in caplog.text
        data("--test_list", "b/other.txt")
    assert caplog.text.count("data.test_path") == 1
    for spelling in ("--test_list", "--data.test_list"):
        other = data(spelling, "b/other.txt")
        assert (other.test_list, other.test_path) == ("b/other.txt", "")
        assert other.train_path == str(tmp_path / "corpus" / "train")
        assert data(spelling, "a/trials.txt").test_path == corpus
        assert data(spelling, "b/other.txt", "--test_path", "c").test_path == "c"
    assert data("--train_list", "b/other.txt").train_path == "" and data("--train_list", "b/x.txt").test_path == corpus
    # Whoever writes a folder into a recipe means it, also for another list.
    Path("recipe.yaml").write_text("data: {test_list: a/trials.txt, test_path: corpus/test}\n")
    assert data("--test_list", "b/other.txt", file="recipe.yaml").test_path == "corpus/test"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_no_saved_copy_and_its_run_is_kept_under_its_name(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(["--config", str(recipe)]).config
    assert config.training.save_path == str(Path("exps") / recipe.stem)
    assert "no effect" not in caplog.text


def test_inputs_are_looked_for_from_here_and_then_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.txt").write_text(folder)
    (tmp_path / "there" / "only.txt").write_text("there")
    write(tmp_path / "there", "data:\n  train_list: both.txt\n  test_list: only.txt\ntraining:\n  save_path: out\n")
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(["--config", "../there/my.yaml"]).config
    assert config.data.train_list == "both.txt"
    assert Path(config.data.test_list).read_text() == "there"
    assert config.training.save_path == "out", "outputs are always from the working directory"


def test_old_names_lead_to_fields_that_exist() -> None:
    for name in ALIASES:
        for value in (True, False, "1"):
            for key in translate(name, value):
                section, field = key.split(".")[:2]
                assert field in known_fields(section), f"--{name} leads to {key}"


# Of common trainers; those of voxceleb_trainer are in test_classic_options.py.
OLD_OPTIONS = {
    "fp16": ("true", "runtime.precision", "fp16"),
    "bf16": ("True", "runtime.precision", "bf16"),
    "mixed-precision": ("no", "runtime.precision", "no"),
    "use_amp": ("False", "runtime.precision", "no"),
    "use_compile": ("true", "runtime.compile", "on"),
    "per_device_train_batch_size": ("16", "data.batch_size", 16),
    "model_path": ("x.pt", "training.initial_model", "x.pt"),
    "max_grad_norm": ("1.5", "training.max_grad_norm", 1.5),
}


@pytest.mark.parametrize("name", OLD_OPTIONS)
def test_old_option_has_its_meaning(name: str) -> None:
    value, key, expected = OLD_OPTIONS[name]
    section, field = key.split(".")
    assert getattr(getattr(load_config([f"--{name}", value]).config, section), field) == expected


def test_several_processes_are_asked_for_by_their_old_names() -> None:
    runtime = load_config(["--distributed", "--port", "1234"]).config.runtime
    assert runtime.distributed and runtime.port == 1234
    # voxceleb_trainer's default, which nobody chose.
    assert load_config(["--port", "8888"]).config.runtime.port == 0


def test_fields_are_plain_values() -> None:
    assert yaml.safe_load(yaml.safe_dump(config_to_dict(Config()))) == config_to_dict(Config())
    assert list(config_to_dict(Config())) == list(SECTIONS)
