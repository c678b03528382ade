"""Several corpora in one run: shares of a batch by hand, no crop twice, packed beside a folder,
resuming, mistakes.
"""

import json
import shutil

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from speakernet.cli import main
from speakernet.corpora.pack_inputs import FolderInput
from speakernet.data.audio import read_audio
from speakernet.data.joined import JoinedSource, join
from speakernet.data.lists import ListError, StringTable, TrainingList, read_training_list
from speakernet.data.opening import open_source
from speakernet.data.options import DataOptions
from speakernet.data.packing import pack
from speakernet.data.sampling import BalancedSampler, ShuffledSampler, rank_share
from speakernet.data.sources import FolderSource
from tests.commands import run_command
from tests.data.loaders import is_cut_from, make_loader
from tests.tiny_recipe import write_recipe


def sampler_of(kind, sizes, speakers, size, *, weights=None, **options):
    """A sampler of corpora a, b … with these numbers of utterances and speakers, mixed by
    weights.
    """
    names = [chr(ord("a") + number) for number in range(len(sizes))]
    given = {
        name: {"train_list": "x", "weight": weight}
        for name, weight in zip(names, weights or ["auto"] * len(sizes), strict=True)
    }
    data = DataOptions(corpora=given, batch_size=size, **options)
    firsts = np.cumsum([0, *speakers])
    labels = [
        first + np.arange(count) % many
        for first, count, many in zip(firsts, sizes, speakers, strict=False)
    ]
    sampler = kind(np.concatenate(labels).astype(np.int32), data, seed=1)
    speaker_names = [
        f"{name}/{number}"
        for name, many in zip(names, speakers, strict=True)
        for number in range(many)
    ]
    listed = TrainingList(
        StringTable.from_strings([]), sampler.labels, StringTable.from_strings(speaker_names), ""
    )
    source = JoinedSource({name: FolderSource(name) for name in names}, {}, data)
    source.order(sampler, listed, None, 1)
    return sampler, source, listed


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"weights": [3, 1]}, [15, 5]),
        ({"weights": [0.02, 0.01]}, [13, 7]),
        ({}, [18, 2]),
        # The roots of 900 and 100 are 30 and 10.
        ({"corpora_temperature": 2}, [15, 5]),
        ({"corpora_temperature": 1e6}, [10, 10]),
    ],
)
def test_shares_of_a_batch(options, parts):
    sampler, source, listed = sampler_of(ShuffledSampler, [900, 100], [30, 10], 20, **options)
    plans = [sampler.epoch(number) for number in (0, 0, 1)]
    assert np.array_equal(plans[0].rows, plans[1].rows) and not np.array_equal(
        plans[0].rows, plans[2].rows
    )
    for plan in plans[1:]:
        assert len(plan) == 50 and len(np.unique(plan.rows)) == len(plan.rows) == 1000
        is_second = plan.rows % 1000 >= 900
        assert is_second.reshape(50, 20).sum(1).tolist() == 50 * parts[1:]
        assert plan.drawn == {"a": 50 * parts[0], "b": 50 * parts[1]}
        # A corpus drawn more often than it has utterances repeats each of them equally often, or
        # once more.
        times = np.bincount(plan.rows % 1000, minlength=1000)
        assert {*times[900:]} <= {50 * parts[1] // 100, -(-50 * parts[1] // 100)}
        for rank in range(2):
            mine = [is_second[rank_share(plan, batch, 1, rank, 2)].sum() for batch in range(50)]
            assert {*mine} <= {parts[1] // 2, -(-parts[1] // 2)}
    assert plan.num_left_out == (times == 0).sum()
    line = source.summary(listed, plan).splitlines()[1]
    drawn = f"{parts[1]} per batch, {50 * parts[1]:,} per epoch ({parts[1] / 2:.2f} passes)"
    assert line == f"b: 10 speakers, 100 utterances, {drawn}"


@pytest.mark.parametrize("weights", [[1, 1], [1, 3]])
def test_groups(weights):
    sampler, *_ = sampler_of(
        BalancedSampler, [600, 90], [60, 9], 8, weights=weights, utterances_per_speaker=2
    )
    plan = sampler.epoch(0)
    speakers = sampler.labels[plan.rows % 690].reshape(-1, 8, 2)
    assert len(speakers) > 35 and (speakers[:, :, 0] == speakers[:, :, 1]).all()
    assert all(len(np.unique(batch)) == 8 for batch in speakers[:, :, 0])
    assert ((speakers[:, :, 0] >= 60).sum(1) == 8 * weights[1] // sum(weights)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [900, 1]}, r"b gets 0 of the 20 items in a batch \(it has 1 usable"),
        (
            {"sizes": [900, 0], "weights": [1, 1]},
            r"b gets 10 of the 20 items in a batch \(it has 0 usable",
        ),
        (
            {"sizes": [900, 4], "weights": [1, 1]},
            "b gets 10 of the 20 items in a batch, but the training list has 4",
        ),
    ],
)
def test_corpora_too_small_for_a_batch(changes, message):
    with pytest.raises(ValueError, match=message):
        sampler_of(ShuffledSampler, **{"speakers": [30, 4], "size": 20, **changes})


@pytest.fixture(scope="module")
def corpora(tiny_corpus, tmp_path_factory):
    """The same corpus as a folder, packed, and in shards at an address; with the same names."""
    folder = tmp_path_factory.mktemp("corpora")
    pack(
        FolderInput(tiny_corpus, read_training_list(tiny_corpus / "train_list.txt").paths),
        folder / "packed",
    )
    lists = f"--source {tiny_corpus} --list {tiny_corpus}/train_list.txt --shards 3"
    run_command(f"pack file://{folder}/store {lists}")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKERNET_CACHE", str(tmp_path / "cache"))


def options_of(tiny_corpus, corpora, where="packed", **more):
    listed = str(tiny_corpus / "train_list.txt")
    paths = {
        "files": str(tiny_corpus),
        "other": str(corpora / where) if where == "packed" else f"file://{corpora}/{where}",
    }
    weights = {"files": 1, "other": 3}
    given = {
        name: {"train_list": listed, "train_path": paths[name], "weight": weights[name]}
        for name in paths
    }
    return {"corpora": given, "train_list": ""} | more


@pytest.mark.parametrize("where", ["packed", "store"])
def test_folder_beside_a_packed_corpus(tiny_corpus, corpora, where):
    straight = list(made := make_loader(tiny_corpus, **options_of(tiny_corpus, corpora, where)))
    alone = make_loader(tiny_corpus)
    half = alone.num_classes
    count = len(alone.training)
    assert made.num_classes == 2 * half and len(made.training) == 2 * count
    for batch in straight:
        assert (batch.indices >= count).sum() == 3 and (
            (batch.labels >= half) == (batch.indices >= count)
        ).all()
        assert_array_equal(batch.labels % half, alone.training.labels[batch.indices % count])
        names = alone.file_names(batch.indices % count)
        for name, crop in zip(names, batch.waveforms.numpy(), strict=True):
            assert is_cut_from(read_audio(tiny_corpus / name), crop)


@pytest.mark.slow
def test_report(tiny_corpus, corpora, tmp_path, caplog):
    caplog.set_level("INFO")
    unset = {"validation_speakers": 2, "train_path": ""}
    changes = {"data": options_of(tiny_corpus, corpora, **unset)}
    changes["training"] = {"max_epochs": 2, "test_interval": 2}
    changes["evaluation"] = {"subtract_mean": True, "score_norm": "as"}
    recipe = write_recipe(tmp_path / "run.yaml", tiny_corpus, run := tmp_path / "run", changes)
    run_command(f"train --config {recipe}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    drawn = [record["drawn"] for record in records if record["kind"] == "epoch"]
    assert len(drawn) == 2
    assert all(epoch["other"] == 3 * epoch["files"] > 0 for epoch in drawn)
    assert "per batch" in caplog.text
    page = (run / "report.html").read_text()
    assert (
        f"{drawn[0]['other'] + drawn[1]['other']:,}" in page
        and "75.00 %" in page
        and "files + other" in page
    )


MISTAKES = {
    "{a: {train_list: LIST}, b: {}}": "train_list",
    "{a: {train_list: LIST, weight: 0}}": "weight is 0; expected a number above 0",
    "{a: {train_list: LIST}, b: {train_list: LIST}}": "a, b, two of them",
    "{a: {train_list: LIST, weight: 1}, b: {train_list: TRIALS}}": "a weight for a",
    "{a: {train_list: TRIALS}}": "trials.txt",
    "{a/b: {train_list: LIST}}": "letters, digits",
    "{a: {train_list: LIST, wieght: 2}}": "did you mean 'weight'",
}


@pytest.mark.parametrize("given", [*MISTAKES, "beside"])
def test_mistakes(given, tiny_corpus, tmp_path, capsys):
    unset = [] if given == "beside" else ["--train_list", "", "--train_path", ""]
    text = "{a: {train_list: LIST}}" if given == "beside" else given
    text = text.replace("LIST", str(tiny_corpus / "train_list.txt")).replace(
        "TRIALS", str(tiny_corpus / "trials.txt")
    )
    recipe = write_recipe(tmp_path / "run.yaml", tiny_corpus, tmp_path / "run")
    assert main(["train", "--config", str(recipe), *unset, "--data.corpora", text]) in (1, 2)
    wrong = capsys.readouterr().err
    assert MISTAKES.get(given, "train_list: ") in wrong and "Traceback" not in wrong
    assert not (tmp_path / "run" / "last.pt").exists()


def test_recordings_in_two_corpora(tiny_corpus, tmp_path):
    """The same speakers as two classes each; other folders may well have the same names."""
    lines = (tiny_corpus / "train_list.txt").read_text().splitlines(keepends=True)
    (tmp_path / "part.txt").write_text("".join(lines[3:5]).replace(" ", " ./", 1))
    shutil.copytree(tiny_corpus, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tiny_corpus)
    listed, part = (
        read_training_list(path) for path in (tiny_corpus / "train_list.txt", tmp_path / "part.txt")
    )
    data = DataOptions(corpora={name: {"train_list": "x"} for name in "ab"})
    with pytest.raises(ListError, match=r"a and b share 2 recordings .*part\.txt"):
        join(
            {"a": (listed, open_source(tiny_corpus)), "b": (part, open_source(tmp_path / "link"))},
            data,
        )
    joined, _ = join(
        {"a": (listed, open_source(tiny_corpus)), "b": (part, open_source(tmp_path / "copy"))}, data
    )
    assert len(joined) == len(listed) + 2


def test_repeats_of_an_utterance_have_keys_of_their_own(tiny_corpus, corpora):
    """An utterance drawn twice in an epoch gets other crops and masks: their keys differ."""
    made = make_loader(tiny_corpus, **options_of(tiny_corpus, corpora))
    seen = {}
    for batch in made:
        for row, key in zip(batch.indices.tolist(), batch.draw_rows.tolist(), strict=True):
            seen.setdefault(row, []).append(key)
    assert max(map(len, seen.values())) > 1
    for row, keys in seen.items():
        assert len(set(keys)) == len(keys) and {key % len(made.training) for key in keys} == {row}
        # The first time it is keyed by its row, as in an epoch without repeats.
        assert row in keys
