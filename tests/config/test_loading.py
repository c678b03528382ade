"""Precedence, old names, errors with file, line and nearest key."""

import logging
from pathlib import Path

import pytest
import yaml

from speakernet.config import Config, ConfigError, config_from_dict, load_config
from speakernet.config.aliases import ALIASES, translate
from speakernet.config.loading import save_config
from speakernet.config.reference import help_text, reference
from speakernet.config.schema import SECTIONS, known_fields, stages_of, with_options

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_beats_yaml_beats_default(tmp_path):
    file = write(tmp_path, "data:\n  batch_size: 7\noptimizer:\n  learning_rate: 2e-3\n")
    config = load_config(f"--config {file} --data.batch_size 9".split()).config
    assert (config.data.batch_size, config.optimizer.learning_rate) == (9, 2e-3)
    assert config.data.sample_rate == Config().data.sample_rate
    assert load_config(f"--batch_size 11 --config {file}".split()).config.data.batch_size == 11
    # JSON is recognised by its content, with comments.
    text = '{\t// how many\n "data": {"batch_size": 6, "train_list": "s3://a//b.txt"} // "all"\n}'
    data = load_config(["--config", write(tmp_path, text, "b.conf")]).config.data
    assert (data.batch_size, data.train_list) == (6, "s3://a//b.txt")
    first = write(tmp_path, "data:\n  batch_size: 7\n  crop_frames: 150\n", "first.yaml")
    second = write(tmp_path, "data:\n  batch_size: 8\n", "b.yaml")
    config = load_config(f"--config {first} --config {second}".split()).config
    assert (config.data.batch_size, config.data.crop_frames) == (8, 150)
    assert config.training.save_path == str(Path("exps/first"))


def test_files_of_prepare_and_files_without_an_option(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    for folder in ("data/voices", "data/other"):
        Path(folder).mkdir(parents=True)
    file = write(tmp_path / "data/voices", "data:\n  batch_size: 7\n", "voices.yaml")
    for words in (["--config", "voices.yaml"], ["--config", "voices"], ["voices.yaml"], [file]):
        assert load_config([*words, "--seed", "3"]).config.data.batch_size == 7
    assert "data/voices/voices.yaml" in caplog.text
    # A file of the working directory comes first; two prepared ones are a question.
    write(tmp_path / "data/other", "", "voices.yaml")
    with pytest.raises(ConfigError, match=r"data/other/voices\.yaml, data/voices/voices\.yaml"):
        load_config(["--config", "voices.yaml"])
    write(tmp_path, "data:\n  batch_size: 9\n", "voices.yaml")
    assert load_config(["voices.yaml"]).config.data.batch_size == 9


# File, command line, fragments of the message.
MISTAKES = [
    ("", ["--training.seed", "3"], r"^command line: .*training\.seed.*runtime\.seed"),
    ("data:\n  batch_size: 7\n  batchsize: 8\n", [], r"my\.yaml:3.*data\.batchsize.*'batch_size'"),
    ("\ndata:\n  batch_size: many\n", [], r"my\.yaml:3: data\.batch_size is 'many'.*whole number"),
    ("", ["--max_epohc", "3"], r"--max_epohc.*max_epoch"),
    ("", ["--mixed-precision", "half"], r"runtime\.precision is 'half'"),
    ("", ["--evaluation.sweep", "wind"], r"evaluation\.sweep is 'wind'.*list in brackets"),
    ("", ["--qqq", "3"], r"qqq; --help all"),
    ("", ["--model.name", "ResNet35"], r"^command line: model\.name\b(?!.*model\.name).*ResNet35"),
    ("", ["--model.embedding_dim", "--eval"], r"model\.embedding_dim is without a value"),
    ("", ["--defaults", "theirs"], "theirs"),
    ("", ["--config", "exp1.yaml"], r"exp01\.yaml"),
    ("", ["--eval", "3"], "--eval.*'3'"),
    (
        "exp_dir: e\ndataset_args: {}\nmodel_args: {}\n",
        [],
        r"exp_dir, dataset_args, model_args are .*import-config",
    ),
]


@pytest.mark.parametrize(("text", "options", "found"), MISTAKES)
def test_mistakes(text, options, found, tmp_path):
    file = ["--config", write(tmp_path, text)] if text else []
    with pytest.raises(ConfigError, match=found):
        load_config([*file, *options])


STAGES = """loss: {name: aamsoftmax, margin: 0.2}
schedule: {margin: linear}
stages:
  - {name: head, epochs: 3, augment: {speed_factors: [0.9, 1.0]}}
  - {name: joint, epochs: 2, optimizer: {name: adamw, learning_rate: 1.0e-5},
     data: {crop_frames: 300}}
  - {name: last, epochs: 1, loss: {margin: 0.5}, augment: {speed_factors: [1.0]}}
"""


def test_stages_build_on_each_other(tmp_path):
    config = load_config(["--config", write(tmp_path, STAGES), "--save_path", "run"]).config
    stages = stages_of(config)
    epochs = {name: stage.training.max_epochs for name, stage in stages.items()}
    assert epochs == {"head": 3, "joint": 2, "last": 1}
    assert [stage.optimizer.name for stage in stages.values()] == ["adam", "adamw", "adamw"]
    margins = [stage.schedule.margin for stage in stages.values()]
    assert margins == ["linear", "constant", "constant"]
    assert stages["last"].data.crop_frames == 300 and stages["last"].loss.margin == 0.5
    save_config(config, tmp_path / "saved.yaml")
    saved = load_config(f"--config {tmp_path}/saved.yaml --save_path run".split()).config
    assert stages_of(saved) == stages
    alone = load_config([]).config
    assert stages_of(alone) == {"": alone}


def test_unfreezing_is_of_one_stage(tmp_path):
    model = {"options": {"trained": "all", "unfreeze_epochs": 2}}
    plans = [{"name": name, "epochs": 2} for name in ("frozen", "joint", "margin", "again")]
    plans[1]["model"] = plans[3]["model"] = model
    pretrained = {"name": "Pretrained", "options": {"backbone": "b"}}
    text = yaml.safe_dump({"model": pretrained, "stages": plans})
    stages = stages_of(load_config(["--config", write(tmp_path, text)]).config)
    options = [stage.model.options for stage in stages.values()]
    assert [option.unfreeze_epochs for option in options] == [0, 2, 0, 2]
    assert [option.trained for option in options] == ["nothing", "all", "all", "all"]


@pytest.mark.parametrize(
    ("found", "changed", "message"),
    [
        ("epochs: 3, ", "", "entry 1: epochs"),
        (
            "learning_rate",
            "learning_rat",
            r"joint: optimizer\.learning_rat does not exist; did you mean 'learn",
        ),
        ("crop_frames: 300", "train_list: a", r"joint: data\.train_list belongs to the whole run"),
        (
            "data: {crop_frames: 300}",
            "model: {name: ResNet34}",
            r"joint: model\.name belongs to the whole run",
        ),
        ("data: {crop_frames: 300}", "frontend: {}", "entry 2: frontend does not exist"),
        ("margin: 0.5", "margin: 5", r"last: loss\.margin is 5; expected a number from 0 to 3"),
        ("[1.0]", "[1.1, 1.0]", "last: .*augment.speed_factors"),
        ("name: last", "name: joint", "head, joint, joint"),
        ("aamsoftmax, margin: 0.2", "softmax", r"last: loss\.margin does not exist"),
        ("stages:", "stage: jont\nstages:", "there is no stage 'jont'; did you mean 'joint'"),
        ("stages:", "training: {max_epochs: 9}\nstages:", "max_epochs: 9"),
        (
            "stages:",
            "training: {large_margin_epochs: 9}\nstages:",
            "large_margin_epochs was removed; .*training.stages",
        ),
    ],
)
def test_bad_stages(tmp_path, found, changed, message):
    assert found in STAGES
    file = write(tmp_path, STAGES.replace(found, changed))
    with pytest.raises(ConfigError, match=rf"{file}:\d+: .*{message}") as refused:
        load_config(["--config", file])
    assert "\n" not in str(refused.value)


def test_differences_in_a_flat_file(tmp_path, caplog):
    def loaded(text):
        return load_config(["--config", write(tmp_path, f"model: ResNetSE34L\n{text}\n")])

    assert loaded("nLcasses: 5994").config.data.num_classes == 5994
    assert "my.yaml:2" in caplog.text and "nClasses" in caplog.text
    defaults = loaded("batch_size: 100").defaults
    assert "training.max_grad_norm 0.0 (5.0), runtime.precision no (auto)" in defaults
    assert "data.batch_size" not in defaults and "data.train_list" not in defaults
    assert "runtime.precision" not in loaded("mixedprec: True").defaults
    assert "max_grad_norm" not in load_config([]).defaults


OF_EARLIER_VERSIONS = {
    "augment": {"warp_factors": [1.0, 1.1]},
    "loss": {"teacher": "teacher.pt", "teacher_weight": 1.0, "teacher_input": "recordings"},
    "training": {
        "trackers": ["tensorboard", "csv"],
        # Of the large-margin stage of 0.3.0.
        "large_margin_epochs": 5,
        "large_margin": 0.5,
        "stages": [
            {"name": "base", "epochs": 2},
            {"name": "last", "epochs": 1, "augment": {"warp_factors": [1.0]}},
        ],
    },
}


def test_configuration_of_an_earlier_version(tmp_path, caplog):
    words = f"--save_path {tmp_path} --trainfunc combined --max_epoch 2".split()
    plain = load_config(words).config
    saved = plain.model_dump()
    del saved["training"]["save_path"]
    for section, fields in OF_EARLIER_VERSIONS.items():
        saved[section] |= fields
    saved["loss"]["classification"] |= {"teacher": "", "teacher_weight": 1.0}
    file = write(tmp_path, yaml.safe_dump(saved), "config.yaml")
    config = load_config(["--config", file]).config
    assert config.training.trackers == ("tensorboard",) and config.loss == plain.loss
    assert config.training.stages[1].augment == {}
    assert "loss.teacher: teacher.pt is ignored" in caplog.text
    assert "augment.warp_factors: [1.0, 1.1] is ignored" in caplog.text
    assert "training.large_margin_epochs" in caplog.text and "training.stages" in caplog.text
    saved["training"]["save_path"] = str(tmp_path)
    assert config_from_dict(saved) == config


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--augment.warp_factors", "[1.0, 1.1]"], r"augment\.warp_factors .*speed_factors"),
        (["--loss.teacher", "cam.pt"], r"loss\.teacher was removed"),
        (["--trainfunc", "combined", "--loss.metric", "{teacher: a.pt}"], r"loss\.metric\.teacher"),
        (["--training.trackers", "[tensorboard, csv]"], r"csv .*metrics\.jsonl"),
        (
            ["--stages", "[{name: a, epochs: 1, augment: {warp_factors: [1.0]}}]"],
            r"augment\.warp_factors",
        ),
    ],
)
def test_options_of_an_earlier_version_are_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        load_config(words)


def test_words_of_switches(tmp_path):
    text = "data: {ram_corpus: on, pin_memory: off}\nruntime: {precision: no, compile: off}\n"
    config = load_config(["--config", write(tmp_path, text)]).config
    assert (config.data.ram_corpus, config.data.pin_memory) == ("on", False)
    assert (config.runtime.precision, config.runtime.compile) == ("no", "off")
    text = 'augment: "True"\nlog_input: "False"\nmodel: ResNetSE34L\neval: "False"\n'
    loaded = load_config(["--config", write(tmp_path, text)])
    assert loaded.config.augment.enabled is True and loaded.config.frontend.log_input is False
    assert not loaded.evaluate_only and load_config(["--eval"]).evaluate_only
    assert load_config(["--mixed-precision", "--bf16"]).config.runtime.precision == "bf16"
    assert load_config(["--bf16", "--mixed-precision"]).config.runtime.precision == "auto"


def test_help_and_reference():
    assert "--defaults" in help_text("all") and 15 <= help_text().count("\n  --") <= 30
    with pytest.raises(ValueError, match="expected all or one of data, "):
        help_text("everything")
    page = reference()
    for section in SECTIONS:
        assert f"\n## {section}\n" in page and help_text("all").count(f"--{section}.") >= len(
            known_fields(section)
        )
        for field in known_fields(section):
            assert f"| `{field}` |" in page and f"--{section}.{field} " in help_text(section), field


def test_defaults(tmp_path):
    flat = write(tmp_path, "model: ResNetSE34L\ntrainfunc: amsoftmax\n", "flat.yaml")
    sections = write(tmp_path, "data:\n  batch_size: 7\n", "sections.yaml")
    loaded = load_config(["--config", flat])
    assert loaded.is_classic and loaded.defaults.startswith(f"voxceleb_trainer ({flat}")
    loaded = load_config(f"--config {sections} --max_epoch 3".split())
    assert not loaded.is_classic and loaded.config.training.max_epochs == 3
    theirs = load_config(["--config", sections, "--defaults=voxceleb_trainer"]).config
    ours = load_config(f"--config {flat} --defaults speakernet".split()).config
    assert (theirs.augment.style, ours.augment.style) == ("classic", "ours")
    assert load_config(["--bf16"]).defaults.startswith("speakernet (")
    assert "--defaults voxceleb_trainer" in load_config(["--model", "ResNetSE34L"]).defaults


def test_defaults_of_a_foreign_checkpoint(tmp_path):
    asked = []

    def is_classic(*words):
        def is_foreign(path):
            asked.append(path)
            return path.name == "their.model"

        return load_config([*words], is_foreign).is_classic

    assert is_classic("--eval", "--initial_model", "their.model")
    assert not is_classic("--eval", "--initial_model", "best.pt")
    sections = write(tmp_path, "data:\n  batch_size: 7\n")
    for words in (
        ("--config", sections, "--eval"),
        ("--defaults", "speakernet", "--eval"),
        ("--max_epoch", "3"),
    ):
        assert not is_classic(*words, "--initial_model", "their.model")
    assert len(asked) == 2


def test_defaults_of_a_model_file():
    of_model = {"model.name": "ResNet", "model.options.channels": 32, "model.embedding_dim": 64}

    def loaded(*options):
        return load_config(
            ["--initial_model", "m.pt", *options], settings_of_model=lambda path: of_model
        ).config

    assert (loaded().model.options.channels, loaded().model.embedding_dim) == (32, 64)
    assert loaded("--model.options.channels", "16").model.options.channels == 16
    other = loaded("--model", "ResNet34").model
    assert (other.name, other.options.channels, other.embedding_dim) == ("ResNet34", 32, 256)
    assert loaded("--eval").model.name == Config().model.name


def test_saved_copy(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "list.txt").write_text("a a.wav\n")
    monkeypatch.chdir(tmp_path / "work")
    words = (
        "--train_list list.txt --data.synthetic_corpus made --save_path run --lr 3e-4 "
        "--loss.name softmax --schedule.name constant"
    )
    config = load_config(words.split()).config
    assert config_from_dict(config.model_dump()) == config
    save_config(config, Path("run/config.yaml"))
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert saved["loss"]["name"] == "softmax" and "margin" not in saved["loss"]
    assert "final_learning_rate" not in saved["schedule"]
    monkeypatch.chdir(tmp_path)
    again = load_config(["--config", "work/run/config.yaml"]).config
    assert again.data.train_list == str(tmp_path / "work" / "list.txt")
    assert again.data.synthetic_corpus == str(tmp_path / "work" / "made")
    assert again.training.save_path == str(Path("work/run"))
    for section in ("loss", "schedule", "optimizer"):
        assert getattr(again, section) == getattr(config, section)
    (tmp_path / "work" / "run").rename(tmp_path / "copy")
    copy = ["--config", "copy/config.yaml"]
    assert load_config(copy).config.training.save_path == "copy"
    assert load_config([*copy, "--save_path", "new"]).config.training.save_path == "new"


def test_folder_of_a_saved_list(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config = load_config(["--train_list", "a/train.txt", "--test_list", "a/trials.txt"]).config
    config = with_options(config, "data", train_path="corpus/train", test_path="corpus/test")
    save_config(config, Path("run/config.yaml"))

    def data(*options, file="run/config.yaml"):
        return load_config(["--config", file, *options]).config.data

    corpus = str(tmp_path / "corpus" / "test")
    with caplog.at_level(logging.INFO):
        assert data().test_path == corpus and "data.test_path" not in caplog.text
        data("--test_list", "b/other.txt")
    assert caplog.text.count("data.test_path") == 1
    for spelling in ("--test_list", "--data.test_list"):
        other = data(spelling, "b/other.txt")
        assert (other.test_list, other.test_path) == ("b/other.txt", "")
        assert other.train_path == str(tmp_path / "corpus" / "train")
        assert data(spelling, "a/trials.txt").test_path == corpus
        assert data(spelling, "b/other.txt", "--test_path", "c").test_path == "c"
    # A folder named in a recipe applies to other lists too.
    Path("recipe.yaml").write_text("data: {test_list: a/trials.txt, test_path: corpus/test}\n")
    assert data("--test_list", "b/other.txt", file="recipe.yaml").test_path == "corpus/test"


def test_relative_inputs(tmp_path, monkeypatch):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.txt").write_text(folder)
    (tmp_path / "there" / "only.txt").write_text("there")
    write(
        tmp_path / "there",
        "data:\n  train_list: both.txt\n  test_list: only.txt\ntraining:\n  save_path: out\n",
    )
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(["--config", "../there/my.yaml"]).config
    assert config.data.train_list == "both.txt" and config.training.save_path == "out"
    assert Path(config.data.test_list).read_text() == "there"


def test_old_names():
    for name in ALIASES:
        for value in (True, False, "1"):
            for key in translate(name, value):
                section, field = key.split(".")[:2]
                assert field in known_fields(section), f"--{name} leads to {key}"


def test_names_that_people_type():
    words = (
        "--learning_rate 0.5 --num_workers 3 --max_epochs 7 --output_dir exps/x "
        "--torch_compile_mode reduce-overhead"
    )
    config = load_config(words.split()).config
    assert (config.optimizer.learning_rate, config.data.num_workers) == (0.5, 3)
    assert (config.training.max_epochs, config.training.save_path) == (7, "exps/x")
    assert (config.runtime.compile, config.runtime.compile_mode) == ("on", "reduce-overhead")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("--warmup_ratio", "schedule.warmup_epochs"),
        ("--resume", "the same command resumes"),
        ("--fsdp", "runtime.parallel: fsdp"),
    ],
)
def test_names_without_a_counterpart(word, advice):
    with pytest.raises(ConfigError, match=advice):
        load_config([word, "0.1"])


def test_a_limit_of_trials_does_not_apply_to_scoring(tmp_path):
    """A training's file may limit its validation; on the command line of --eval the limit would do
    nothing.
    """
    path = tmp_path / "a.yaml"
    path.write_text("evaluation: {max_trials: 100}\n")
    scoring = f"--config {path} --eval --initial_model best.pt".split()
    assert load_config(scoring).config.evaluation.max_trials == 100
    assert load_config(["--max_test_pairs", "5"]).config.evaluation.max_trials == 5
    with pytest.raises(ConfigError, match=r"--max_test_pairs: 5 .*--test_list"):
        load_config([*scoring, "--max_test_pairs", "5"])
