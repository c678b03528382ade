"""Where figures come from: model, lists, versions and machine, with warnings for the reader; and
what remains of an earlier report of the same run.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import speakernet
from speakernet import distributed
from speakernet.data.lists import TrainingList, TrialList
from speakernet.data.names import folders_of, one_word
from speakernet.data.sources import AudioSource
from speakernet.evaluation.calibration import FITTED_ON_REPORTED
from speakernet.evaluation.figures import CHOSEN_ON_REPORTED, cautions
from speakernet.evaluation.further import CALIBRATION_LIST, ScoringParts
from speakernet.evaluation.results import Results
from speakernet.evaluation.shortcuts import ADVICE, describe, is_notable
from speakernet.evaluation.speakers import Speakers
from speakernet.files import sha256_of
from speakernet.machine.facts import system_info
from speakernet.terminal import MAX_NAMED, counted


def with_provenance(
    results: Results, trials: TrialList, speakers: Speakers, parts: ScoringParts
) -> Results:
    """Add what is needed to reproduce the figures: model, checkpoint, versions, machine,
    configuration, command; and what to know before trusting them.
    """
    contents = parts.contents
    chosen_by = (contents.get("training_summary") or {}).get("chosen_by") or {}
    warnings = [*(results.warnings or []), *parts.warnings]
    if trials.sha256 and chosen_by.get("list_sha256") == trials.sha256:
        warnings.append(CHOSEN_ON_REPORTED)
    known_speakers = dict(parts.known_speakers)
    if trials.sha256 and parts.fitted_on == trials.sha256:
        warnings.append(FITTED_ON_REPORTED)
        # Otherwise every speaker of the list would also be named as shared.
        known_speakers.pop(CALIBRATION_LIST, None)
    possible = set(speakers.names)
    if known_speakers and not possible:
        # Any folder of a path may name the speaker.
        for name in trials.recordings:
            possible.update(map(one_word, folders_of(name)))
    for role, names in known_speakers.items():
        if shared := sorted(names & possible):
            number = counted(len(shared), "speaker")
            warnings.append(
                f"{number} of the {role} may also be in the trials "
                f"({', '.join(shared[:MAX_NAMED])}); if so, the error rates are optimistic"
            )
    for row in filter(is_notable, results.shortcuts or []):
        warnings.append(f"{describe(row)}; {ADVICE}")
    warnings += cautions(results)
    thresholds = contents.get("thresholds") or []
    return replace(
        results,
        **parts.network,
        checkpoint={
            "path": str(parts.path),
            "sha256": distributed.from_main(lambda: sha256_of(parts.path)),
        },
        # Thresholds hold only for scores that were made in the same way.
        thresholds=[limit for limit in thresholds if limit["backend"] == results.backend],
        versions={
            "speakernet": speakernet.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        machine=system_info(),
        config=parts.backend.options.model_dump(),
        command=" ".join(sys.argv),
        date=time.strftime("%Y-%m-%d %H:%M"),
        warnings=warnings,
    )


def with_training_lists(
    results: Results, training: TrainingList, source: AudioSource, validation: TrialList
) -> Results:
    """Add the lists of the run, and how much speech the network was trained on."""
    lists = list(results.lists or [])
    for role, rows in (("training", training), ("validation", validation)):
        lists.append({"role": role, "name": Path(rows.source).name, "sha256": rows.sha256})
    table = source.lookup_table(training.paths)
    num_samples = float(np.maximum(table.num_samples, 0).sum())
    amounts = {
        "speakers": len(training.speakers),
        "utterances": len(training),
        "hours": round(num_samples / table.sample_rate / 3600, 2),
    }
    return replace(results, lists=lists, training=amounts)


def with_earlier_lists(results: Results, earlier: Results, changed: Sequence[str]) -> Results:
    """New results of a model that was trained on the lists of an earlier report."""
    of_model = {listed["role"]: listed for listed in earlier.lists or []}
    of_model.pop("trials", None)
    lists = [of_model.get(listed["role"], listed) for listed in results.lists or []]
    warning = (
        f"the model was trained before {' and '.join(changed)} changed; the SHA-256 on this page "
        "is that of the list it was trained with"
    )
    return replace(
        results,
        lists=lists,
        training=earlier.training,
        warnings=[*(results.warnings or []), warning],
    )
