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
from tests.config.layers import load_line, load_text, write


def test_command_line_beats_yaml_beats_default():
    file = write("data:\n  batch_size: 7\noptimizer:\n  learning_rate: 2e-3\n")
    config = load_line(f"--config {file} --data.batch_size 9").config
    assert (config.data.batch_size, config.optimizer.learning_rate) == (9, 2e-3)
    assert config.data.sample_rate == Config().data.sample_rate
    assert load_line(f"--batch_size 11 --config {file}").config.data.batch_size == 11
    # JSON is recognised by its content, with comments.
    text = '{\t// how many\n "data": {"batch_size": 6, "train_list": "s3://a//b.txt"} // "all"\n}'
    data = load_line(f"--config {write(text, 'b.conf')}").config.data
    assert (data.batch_size, data.train_list) == (6, "s3://a//b.txt")
    first = write("data:\n  batch_size: 7\n  crop_frames: 150\n", "first.yaml")
    second = write("data:\n  batch_size: 8\n", "b.yaml")
    config = load_line(f"--config {first} --config {second}").config
    assert (config.data.batch_size, config.data.crop_frames) == (8, 150)
    assert config.training.save_path == str(Path("exps/first"))


def test_files_of_prepare_and_files_without_an_option(caplog):
    caplog.set_level(logging.INFO)
    file = write("data:\n  batch_size: 7\n", "data/voices/voices.yaml")
    for name in ("--config voices.yaml", "--config voices", "voices.yaml", file):
        assert load_line(f"{name} --seed 3").config.data.batch_size == 7
    assert "data/voices/voices.yaml" in caplog.text
    # A file of the working directory comes first; two prepared ones are a question.
    write("", "data/other/voices.yaml")
    with pytest.raises(ConfigError, match=r"data/other/voices\.yaml, data/voices/voices\.yaml"):
        load_line("--config voices.yaml")
    write("data:\n  batch_size: 9\n", "voices.yaml")
    assert load_line("voices.yaml").config.data.batch_size == 9


# File, command line, fragments of the message.
MISTAKES = [
    ("", "--training.seed 3", r"^command line: .*training\.seed.*runtime\.seed"),
    ("data:\n  batch_size: 7\n  batchsize: 8\n", "", r"my\.yaml:3.*data\.batchsize.*'batch_size'"),
    ("\ndata:\n  batch_size: many\n", "", r"my\.yaml:3: data\.batch_size is 'many'.*whole number"),
    ("", "--max_epohc 3", r"--max_epohc.*max_epoch"),
    ("", "--mixed-precision half", r"runtime\.precision is 'half'"),
    ("", "--evaluation.sweep wind", r"evaluation\.sweep is 'wind'.*list in brackets"),
    ("", "--qqq 3", r"qqq; --help all"),
    ("", "--model.name ResNet35", r"^command line: model\.name\b(?!.*model\.name).*ResNet35"),
    ("", "--model CAM++", r"'CAM\+\+'; did you mean 'CAMPPlus'"),
    ("", "--model.embedding_dim --eval", r"model\.embedding_dim is without a value"),
    ("", "--defaults theirs", "theirs"),
    ("", "--config exp1.yaml", r"exp01\.yaml"),
    ("", "--eval 3", "--eval.*'3'"),
    (
        "exp_dir: e\ndataset_args: {}\nmodel_args: {}\n",
        "",
        r"exp_dir, dataset_args, model_args are .*import-config",
    ),
    # Names that have no counterpart.
    ("", "--warmup_ratio 0.1", "schedule.warmup_epochs"),
    ("", "--resume 0.1", "the same command resumes"),
    ("", "--fsdp 0.1", "runtime.parallel: fsdp"),
    # Options of an earlier version.
    ("", "--augment.warp_factors '[1.0, 1.1]'", r"augment\.warp_factors .*speed_factors"),
    ("", "--loss.teacher cam.pt", r"loss\.teacher was removed"),
    ("", "--trainfunc combined --loss.metric '{teacher: a.pt}'", r"loss\.metric\.teacher"),
    ("", "--training.trackers '[tensorboard, csv]'", r"csv .*metrics\.jsonl"),
    (
        "",
        "--stages '[{name: a, epochs: 1, augment: {warp_factors: [1.0]}}]'",
        r"augment\.warp_factors",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), MISTAKES)
def test_mistakes(text, line, message):
    with pytest.raises(ConfigError, match=message):
        load_text(text, line)


STAGES = """loss: {name: aamsoftmax, margin: 0.2}
schedule: {margin: linear}
stages:
  - {name: head, epochs: 3, augment: {speed_factors: [0.9, 1.0]}}
  - {name: joint, epochs: 2, optimizer: {name: adamw, learning_rate: 1.0e-5},
     data: {crop_frames: 300}}
  - {name: last, epochs: 1, loss: {margin: 0.5}, augment: {speed_factors: [1.0]}}
"""


def test_stages_build_on_each_other():
    config = load_text(STAGES, "--save_path run").config
    stages = stages_of(config)
    epochs = {name: stage.training.max_epochs for name, stage in stages.items()}
    assert epochs == {"head": 3, "joint": 2, "last": 1}
    assert [stage.optimizer.name for stage in stages.values()] == ["adam", "adamw", "adamw"]
    margins = [stage.schedule.margin for stage in stages.values()]
    assert margins == ["linear", "constant", "constant"]
    assert stages["last"].data.crop_frames == 300 and stages["last"].loss.margin == 0.5
    save_config(config, Path("saved.yaml"))
    saved = load_line("--config saved.yaml --save_path run").config
    assert stages_of(saved) == stages
    alone = load_line().config
    assert stages_of(alone) == {"": alone}


def test_unfreezing_is_of_one_stage():
    model = {"options": {"trained": "all", "unfreeze_epochs": 2}}
    plans = [{"name": name, "epochs": 2} for name in ("frozen", "joint", "margin", "again")]
    plans[1]["model"] = plans[3]["model"] = model
    pretrained = {"name": "Pretrained", "options": {"backbone": "b"}}
    text = yaml.safe_dump({"model": pretrained, "stages": plans})
    stages = stages_of(load_text(text).config)
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
def test_bad_stages(found, changed, message):
    assert found in STAGES
    file = write(STAGES.replace(found, changed))
    with pytest.raises(ConfigError, match=rf"{file}:\d+: .*{message}") as refused:
        load_line(f"--config {file}")
    assert "\n" not in str(refused.value)


def test_differences_in_a_flat_file(caplog):
    def loaded(text):
        return load_text(f"model: ResNetSE34L\n{text}\n")

    assert loaded("nLcasses: 5994").config.data.num_classes == 5994
    assert "my.yaml:2" in caplog.text and "nClasses" in caplog.text
    defaults = loaded("batch_size: 100").defaults
    assert "training.max_grad_norm 0.0 (5.0), runtime.precision no (auto)" in defaults
    assert "data.batch_size" not in defaults and "data.train_list" not in defaults
    assert "runtime.precision" not in loaded("mixedprec: True").defaults
    assert "max_grad_norm" not in load_line().defaults


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


def test_configuration_of_an_earlier_version(caplog):
    plain = load_line("--save_path . --trainfunc combined --max_epoch 2").config
    saved = plain.model_dump()
    del saved["training"]["save_path"]
    for section, fields in OF_EARLIER_VERSIONS.items():
        saved[section] |= fields
    saved["loss"]["classification"] |= {"teacher": "", "teacher_weight": 1.0}
    file = write(yaml.safe_dump(saved), "config.yaml")
    config = load_line(f"--config {file}").config
    assert config.training.trackers == ("tensorboard",) and config.loss == plain.loss
    assert config.training.stages[1].augment == {}
    assert "loss.teacher: teacher.pt is ignored" in caplog.text
    assert "augment.warp_factors: [1.0, 1.1] is ignored" in caplog.text
    assert "training.large_margin_epochs" in caplog.text and "training.stages" in caplog.text
    saved["training"]["save_path"] = "."
    assert config_from_dict(saved) == config


def test_words_of_switches():
    text = "data: {ram_corpus: on, pin_memory: off}\nruntime: {precision: no, compile: off}\n"
    config = load_text(text).config
    assert (config.data.ram_corpus, config.data.pin_memory) == ("on", False)
    assert (config.runtime.precision, config.runtime.compile) == ("no", "off")
    text = 'augment: "True"\nlog_input: "False"\nmodel: ResNetSE34L\neval: "False"\n'
    loaded = load_text(text)
    assert loaded.config.augment.enabled is True and loaded.config.frontend.log_input is False
    assert not loaded.evaluate_only and load_line("--eval").evaluate_only
    assert load_line("--mixed-precision --bf16").config.runtime.precision == "bf16"
    assert load_line("--bf16 --mixed-precision").config.runtime.precision == "auto"


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


def test_defaults():
    flat = write("model: ResNetSE34L\ntrainfunc: amsoftmax\n", "flat.yaml")
    sections = write("data:\n  batch_size: 7\n", "sections.yaml")
    loaded = load_line(f"--config {flat}")
    assert loaded.is_classic and loaded.defaults.startswith(f"voxceleb_trainer ({flat}")
    loaded = load_line(f"--config {sections} --max_epoch 3")
    assert not loaded.is_classic and loaded.config.training.max_epochs == 3
    theirs = load_line(f"--config {sections} --defaults=voxceleb_trainer").config
    ours = load_line(f"--config {flat} --defaults speakernet").config
    assert (theirs.augment.style, ours.augment.style) == ("classic", "ours")
    assert load_line("--bf16").defaults.startswith("speakernet (")
    assert "--defaults voxceleb_trainer" in load_line("--model ResNetSE34L").defaults


def test_defaults_of_a_foreign_checkpoint():
    asked = []

    def is_classic(*words):
        def is_foreign(path):
            asked.append(path)
            return path.name == "their.model"

        return load_config([*words], is_foreign).is_classic

    assert is_classic("--eval", "--initial_model", "their.model")
    assert not is_classic("--eval", "--initial_model", "best.pt")
    sections = write("data:\n  batch_size: 7\n")
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
    write("a a.wav\n", "mine/list.txt")
    monkeypatch.chdir("mine")
    words = (
        "--train_list list.txt --data.synthetic_corpus made --save_path run --lr 3e-4 "
        "--loss.name softmax --schedule.name constant"
    )
    config = load_line(words).config
    assert config_from_dict(config.model_dump()) == config
    save_config(config, Path("run/config.yaml"))
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert saved["loss"]["name"] == "softmax" and "margin" not in saved["loss"]
    assert "final_learning_rate" not in saved["schedule"]
    monkeypatch.chdir(tmp_path)
    again = load_line("--config mine/run/config.yaml").config
    assert again.data.train_list == f"{tmp_path}/mine/list.txt"
    assert again.data.synthetic_corpus == f"{tmp_path}/mine/made"
    assert again.training.save_path == str(Path("mine/run"))
    for section in ("loss", "schedule", "optimizer"):
        assert getattr(again, section) == getattr(config, section)
    Path("mine/run").rename("copy")
    copy = "--config copy/config.yaml"
    assert load_line(copy).config.training.save_path == "copy"
    assert load_line(f"{copy} --save_path new").config.training.save_path == "new"


def test_folder_of_a_saved_list(tmp_path, caplog):
    config = load_line("--train_list a/train.txt --test_list a/trials.txt").config
    config = with_options(config, "data", train_path="corpus/train", test_path="corpus/test")
    save_config(config, Path("run/config.yaml"))

    def data(options="", file="run/config.yaml"):
        return load_line(f"--config {file} {options}").config.data

    corpus = f"{tmp_path}/corpus/test"
    with caplog.at_level(logging.INFO):
        assert data().test_path == corpus and "data.test_path" not in caplog.text
        data("--test_list b/other.txt")
    assert caplog.text.count("data.test_path") == 1
    for spelling in ("--test_list", "--data.test_list"):
        other = data(f"{spelling} b/other.txt")
        assert (other.test_list, other.test_path) == ("b/other.txt", "")
        assert other.train_path == f"{tmp_path}/corpus/train"
        assert data(f"{spelling} a/trials.txt").test_path == corpus
        assert data(f"{spelling} b/other.txt --test_path c").test_path == "c"
    # A folder named in a recipe applies to other lists too.
    write("data: {test_list: a/trials.txt, test_path: corpus/test}\n", "recipe.yaml")
    assert data("--test_list b/other.txt", "recipe.yaml").test_path == "corpus/test"


def test_relative_inputs(monkeypatch):
    for name in ("here/both.txt", "there/both.txt", "there/only.txt"):
        write(name, name)
    text = "data: {train_list: both.txt, test_list: only.txt}\ntraining: {save_path: out}\n"
    write(text, "there/my.yaml")
    monkeypatch.chdir("here")
    config = load_line("--config ../there/my.yaml").config
    assert config.data.train_list == "both.txt" and config.training.save_path == "out"
    assert Path(config.data.test_list).read_text() == "there/only.txt"


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
    config = load_line(words).config
    assert (config.optimizer.learning_rate, config.data.num_workers) == (0.5, 3)
    assert (config.training.max_epochs, config.training.save_path) == (7, "exps/x")
    assert (config.runtime.compile, config.runtime.compile_mode) == ("on", "reduce-overhead")


def test_a_limit_of_trials_does_not_apply_to_scoring():
    """A training's file may limit its validation; on the command line of --eval the limit would do
    nothing.
    """
    file = write("evaluation: {max_trials: 100}\n")
    scoring = f"--config {file} --eval --initial_model best.pt"
    assert load_line(scoring).config.evaluation.max_trials == 100
    assert load_line("--max_test_pairs 5").config.evaluation.max_trials == 5
    with pytest.raises(ConfigError, match=r"--max_test_pairs: 5 .*--test_list"):
        load_line(f"{scoring} --max_test_pairs 5")
