"""The outcome of a run: everything in which a disturbed run must equal an undisturbed one."""

import hashlib
import json
import re

import torch

from speakernet.checkpoint import read_own_checkpoint

SAME_SECTIONS = ("errors", "slices", "hardest", "embeddings")
VOLATILE = {"performance", "seconds", "timings_seconds", "date", "command", "checkpoint", "machine"}
SAME_NUMBERS = ("kind", "step", "epoch", "loss", "accuracy_percent", "grad_norm", "eer_percent")
SAME_NUMBERS += ("learning_rate",)


def outcome_of(run):
    """Everything in which a finished run must equal an undisturbed one."""
    results = results_of(run)
    report = (run / "report.html").read_text()
    sections = {
        name: re.search(rf'<section[^>]*id="{name}".*?</section>', report, re.DOTALL)
        for name in SAME_SECTIONS
    }
    return {
        **{name: digests(run / name) for name in ("last.pt", "best.pt", "2_large_margin/last.pt")},
        "scores": (run / "scores.txt").read_text(),
        "results": {key: value for key, value in results.items() if key not in VOLATILE},
        "report": {
            name: found and hashlib.sha256(found[0].encode()).hexdigest()
            for name, found in sections.items()
        },
        "numbers": [
            numbers(run / name) for name in ("metrics.jsonl", "2_large_margin/metrics.jsonl")
        ],
        "files": sorted(
            path.relative_to(run).as_posix()
            for path in run.rglob("*")
            if path.is_file() and "tfevents" not in path.name and path.name != "run.lock"
        ),
    }


def results_of(run):
    return json.loads((run / "results.json").read_text())


def scores_of(run):
    return [float(line.split()[2]) for line in (run / "scores.txt").read_text().splitlines()]


def records_of(run, kind=""):
    """The records of the metrics, of one kind or all."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if kind in ("", record["kind"])]


def digests(path):
    """Digests of the weights and, if the file has it, of the training state."""
    contents = read_own_checkpoint(path)
    training = contents.get("training", {})
    names = ("net", "loss", "optimizer", "average", "random", "loader", "learning_rate")
    held = {name: training[name] for name in names if name in training}
    if "optimizer" in held:
        # Only the moments: the stored learning rate is of this process's last step, and there may
        # be none left.
        held["optimizer"] = held["optimizer"]["state"]
    held["weights"] = contents["weights"]
    return {name: digest(tree) for name, tree in held.items()}


def digest(tree):
    """Digest of all values in nested containers."""
    found = hashlib.sha256()
    for value in leaves(tree):
        found.update(
            value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        )
    return found.hexdigest()


def leaves(tree):
    """The values of nested containers, in order."""
    if isinstance(tree, dict):
        return leaves([*tree, *tree.values()])
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return [tree]


def numbers(path):
    """The records of a metrics file without timings."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in SAME_NUMBERS if name in row} for row in records]


def differences(found, expected):
    """Names of the entries that differ, with their differing parts."""
    names = []
    for name, value in expected.items():
        if found[name] != value:
            parts = []
            if isinstance(value, dict):
                parts = [part for part in value if found[name].get(part) != value[part]]
            names.append(f"{name} ({', '.join(parts)})" if parts else name)
    return names
