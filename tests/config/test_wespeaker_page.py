"""The page for users of wespeaker: every key of its files is on it, every option on it exists, its commands run."""

import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
import torch

from speakernet.cli import main
from speakernet.config.schema import SECTIONS, TABLES
from speakernet.models.options import MODELS, POOLINGS
from speakernet.options import field_names
from tests.models.test_published_models import GOLDEN, foreign_state

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration_wespeaker.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
QUOTED = re.compile(r"`([^`]+)`")
# The keys of its examples/voxceleb/v2/conf (dfa7419) for models that there are here, and what its projections read.
KEYS = """
data_type do_lm enable_amp exp_dir gpus log_batch_interval loss loss_args margin_scheduler model model_init num_avg
num_epochs optimizer save_epoch_interval scheduler seed
dataloader_args: batch_size drop_last num_workers pin_memory prefetch_factor
dataset_args: aug_prob cmvn filter frontend num_frms resample_rate sample_num_per_epoch shuffle spec_aug speed_perturb
dataset_args.fbank_args: dither frame_length frame_shift num_mel_bins
dataset_args.filter_args: max_num_frames min_num_frames
dataset_args.shuffle_args: shuffle_size
dataset_args.spec_aug_args: max_f max_t num_f_mask num_t_mask prob
dataset_args.tfmel_args: do_preemph do_spec_aug eps f_max f_min hop_length n_fft n_mels norm_signal win_length
margin_update: final_margin fix_start_epoch increase_start_epoch increase_type initial_margin update_margin
model_args: embed_dim feat_dim pooling_func two_emb_layer
optimizer_args: momentum nesterov weight_decay
projection_args: do_lm easy_margin lanbuda margin_type project_type scale t K k_top mp
scheduler_args: final_lr initial_lr num_epochs scale_ratio warm_from_zero warm_up_epoch
"""


def their_keys() -> list[str]:
    keys = []
    for line in KEYS.strip().splitlines():
        section, colon, names = line.rpartition(":")
        keys += [f"{section}.{name}" if colon else name for name in names.split()]
    return keys


def our_keys() -> set[str]:
    """Every option that some configuration can name."""
    owners = [(section, options) for section, options in SECTIONS.items()]
    owners += [(section, part.options) for section, (_, table) in TABLES.items() for part in table.values()]
    owners += [("model.options", part.options) for part in MODELS.values()]
    owners += [("model.pooling_options", part.options) for part in POOLINGS.values()]
    return {f"{place}.{field}" for place, options in owners for field in field_names(options)}


def test_every_key_of_theirs_is_translated_once() -> None:
    named = [key for row in ROWS for key in QUOTED.findall(row[0])]
    assert set(their_keys()) <= set(named)
    assert len(named) == len(set(named))


def test_every_option_that_it_names_exists() -> None:
    known = our_keys()
    sections = tuple(f"{section}." for section in SECTIONS)
    for row in ROWS:
        assert row[1] == "none" or QUOTED.findall(row[1]), row
        for key in QUOTED.findall(row[1]):
            assert key in known, key
    for text in QUOTED.findall(PAGE):
        key = text.removeprefix("--").split(":")[0]
        if key.startswith(sections) and " " not in key and not key.endswith((".md", ".txt")):
            assert key in known, text


@pytest.fixture()
def prepared(tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as wespeaker's run.sh leaves it after stage 2, and an average model."""
    monkeypatch.chdir(tmp_path)
    train, test = tmp_path / "data" / "vox2_dev", tmp_path / "data" / "vox1"
    (test / "trials").mkdir(parents=True)
    (train / "shards").mkdir(parents=True)
    listed = [line.split() for line in (tiny_corpus / "train_list.txt").read_text().splitlines()]
    trials = [line.split() for line in (tiny_corpus / "trials.txt").read_text().splitlines()]
    (train / "wav.scp").write_text("".join(f"{name} {tiny_corpus / name}\n" for _, name in listed))
    (train / "utt2spk").write_text("".join(f"{name} {speaker}\n" for speaker, name in listed))
    shard = train / "shards" / "shards_000000000.tar"
    with tarfile.open(shard, "w") as archive:
        for speaker, name in listed:
            (tmp_path / "speaker").write_text(speaker)
            archive.add(tmp_path / "speaker", arcname=f"{name}.spk")
            archive.add(tiny_corpus / name, arcname=f"{name}.wav")
    (train / "shard.list").write_text(f"{shard}\n")
    names = sorted({name for _, *pair in trials for name in pair})
    rows = [{"key": name, "spk": name.split("/")[0], "wav": str(tiny_corpus / name)} for name in names]
    (test / "raw.list").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (test / "wav.scp").write_text("".join(f"{row['key']} {row['wav']}\n" for row in rows))
    kinds = {"1": "target", "0": "nontarget"}
    lines = [f"{enrol} {second} {kinds[label]}\n" for label, enrol, second in trials]
    (test / "trials" / "vox1_O_cleaned.kaldi").write_text("".join(lines))
    xvector = next(case for case in GOLDEN if (case["toolkit"], case["model"]) == ("wespeaker", "XVEC"))
    torch.save(foreign_state(xvector), tmp_path / "avg_model.pt")
    return tmp_path


SMALL = """
--augment.noise_path "" --augment.rir_path "" --data.batch_size 8 --data.crop_frames 40 --data.min_seconds 0
--data.num_workers 0
--model.name ResNet --model.options "{channels: 8, blocks: [1, 1], stem_stride: 2}" --training.max_epochs 1
--training.large_margin_epochs 0 --training.average_checkpoints 0 --evaluation.bootstrap_samples 0 --runtime.compile off
"""


@pytest.mark.slow
def test_its_commands_run_as_written(prepared: Path) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for number, line in enumerate(block.splitlines()):
        program, *words = shlex.split(line)
        if program == "speakernet":
            assert main(words) == 0, line
            continue
        assert (program, words[0]) == ("python", "trainSpeakerNet.py")
        small = [] if "--eval" in words else shlex.split(SMALL)
        assert main(["train", *words[1:], *small, "--save_path", f"run{number}"]) == 0, line
    assert Path("lists/vox2_dev.txt").is_file() and Path("model.pt").is_file()
    results = [json.loads(path.read_text()) for path in sorted(Path().glob("run*/**/results.json"))]
    assert len(results) == 4 and all("eer_percent" in one for one in results)
    assert [one["backend"]["score_norm"] for one in results] == ["as", "as", "none", "as"]
