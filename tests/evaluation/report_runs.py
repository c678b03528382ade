"""Synthetic run folders for tests of plots, reports and commands, without audio or a network."""

import itertools
import json

import numpy as np
import yaml

from speakernet.data.lists import StringTable, TrialList, read_trials, write_trials
from speakernet.evaluation.figures import figures
from speakernet.evaluation.files import Evaluation
from speakernet.evaluation.options import EvaluationOptions
from speakernet.evaluation.results import Results
from speakernet.evaluation.score_files import write_scores
from speakernet.evaluation.scoring import cosine_scores, mean_embeddings
from speakernet.evaluation.speakers import speakers_of

FACTS = yaml.safe_load("""
seconds: 1.5
model: {name: ResNetSE34L, options: {pooling: SAP}}
num_parameters: 1_437_080
training: {speakers: 96, utterances: 1440, hours: 1.43}
date: "2026-01-02 10:20"
lists:
  - {role: trials, name: trials.txt, sha256: "0"}
  - {role: training, name: train_list.txt, sha256: "1"}
  - {role: validation, name: held_out.txt, sha256: "2"}
machine: {cpu: a processor, memory_bytes: 8589934592}
warnings: [the best checkpoint was chosen on this very list]
slices:
  - by: duration of the shorter side
    note: ""
    rows:
      - {label: under 2 s, num_trials: 40, num_targets: 6, note: only 6 targets,
         eer_percent: 9.0, eer_interval_percent: [4.0, 14.0]}
      - {label: 2 s and more, num_trials: 40, num_targets: 0, note: no targets, eer_percent: null}
sweep:
  - kind: noise
    axis: signal-to-noise ratio (dB)
    note: ""
    rows:
      - {label: none, eer_percent: 5.0, eer_interval_percent: [4.0, 6.0]}
      - {label: "10", eer_percent: 8.0, eer_interval_percent: [7.0, 9.0]}
      - {label: "0", eer_percent: 20.0, eer_interval_percent: [19.0, 21.0]}
""")
"""Entries of results that no test computes."""


def trials_of(names, pairs, labels):
    """Trials of rows of the names; without labels if None."""
    enrol, test = np.array(pairs, dtype=np.int32).T
    known = None if labels is None else np.array(labels, dtype=np.int8)
    return TrialList(StringTable.from_strings(names), enrol, test, known, "trials.txt")


def make_trials(path, num_speakers=12, utterances=4):
    names = [
        f"dev/s{speaker:02d}/{utterance}.wav"
        for speaker in range(num_speakers)
        for utterance in range(utterances)
    ]
    pairs = itertools.combinations(names, 2)
    write_trials(path, ((int(enrol[:7] == test[:7]), enrol, test) for enrol, test in pairs))
    return read_trials(path)


def make_run(folder, trials, noise=1.2, seed=1):
    """A folder with all files of a run, and its evaluation."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    speakers = speakers_of(trials)
    centres = random.standard_normal((speakers.count, 16))
    table = centres[speakers.ids] + noise * random.standard_normal((len(speakers.ids), 16))
    embeddings = mean_embeddings(table.astype(np.float32))
    scores = cosine_scores(embeddings, trials.enrol, trials.test)
    write_scores(folder / "scores.txt", trials, scores)
    results = figures(
        trials, scores, speakers, EvaluationOptions(bootstrap_samples=50), 0
    ).to_dict()
    command = "trainSpeakerNet.py --config <exp01.yaml> --save_path " + "exps/long_name_" * 12
    checkpoint = {"path": str(folder / "best.pt"), "sha256": "c" * 64}
    results |= FACTS | {"checkpoint": checkpoint, "command": command}
    (folder / "results.json").write_text(json.dumps(results))
    lines = []
    for step in range(1, 41):
        values = {"loss": 8 / step, "margin": 0.01 * step, "data_wait_share": 0.03}
        lines.append({"kind": "step", "step": step, "epoch": 1 + step // 10, **values})
        if step % 10 == 0:
            epoch = {"step": step, "epoch": step // 10}
            lines.append({"kind": "epoch", **epoch, "loss": 8 / step, "step_seconds": 4.5})
            eer = {"eer_percent": 30 / step, "eer_interval_percent": [20 / step, 45 / step]}
            lines.append({"kind": "evaluation", **epoch, **eer, "evaluation_seconds": 15.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        f"data:\n  batch_size: {64 * seed}\nmodel:\n  name: ResNetSE34L\n"
    )
    durations = np.arange(len(trials.names)) / 10 + 1
    return Evaluation(
        trials, scores, Results.from_dict(results), None, embeddings, speakers, durations
    )
