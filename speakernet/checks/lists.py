"""The quick checks of lists, files, headers and speakers that training runs before its first step;
no audio is decoded.

They find problems that would stop or spoil a run hours later: missing files, speakers in both
training and trials, speakers with too few utterances, trial lists with only targets or only
non-targets.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

import numpy as np

from speakernet.checks import Finding, Level, some
from speakernet.data.audio import AUDIO_SUFFIXES
from speakernet.data.lists import (
    NameIndex,
    StringTable,
    TrainingList,
    TrialList,
    identify_trials,
    one_word,
    repeated_rows,
    repeated_trials,
)
from speakernet.data.names import advice_on_name
from speakernet.data.opening import kaldi_advice
from speakernet.data.sources import AudioSource
from speakernet.files import own_command
from speakernet.terminal import MAX_NAMED, counted

LOOKED_AT = 1000
"""Number of rows examined to recognise the kind of a list."""


def quick_check(
    *,
    train_list: TrainingList | None,
    train_source: AudioSource | None,
    trials: Iterable[tuple[TrialList, AudioSource | None]],
    min_utterances: int,
    max_bad_share: float,
    min_seconds: float,
) -> list[Finding]:
    """Check lists against each other and against their files.

    Returns:
        All findings, including the good ones, in the order of the checks. Nothing in a list raises
        an exception.
    """
    findings: list[Finding] = []
    lists = [] if train_list is None else [train_list]
    if train_list is not None and train_source is not None:
        # Trial paths do not name a corpus, so they are compared with each corpus separately.
        lists = train_source.apart(train_list)
    for listed in lists:
        rows = range(min(LOOKED_AT, len(listed)))
        paths = [listed.paths[row].split() for row in rows]
        firsts = {listed.speakers[int(listed.labels[row])] for row in rows}
        are_labelled = firsts <= {"0", "1"} or {path[-1] for path in paths} <= {
            "target",
            "nontarget",
        }
        are_trials = are_labelled and all(len(path) == 2 for path in paths)
        # Speakers may have any name, but are unlikely to be named like audio files.
        if are_trials or {PurePosixPath(one).suffix.casefold() for one in firsts} <= AUDIO_SUFFIXES:
            # The files and speakers of such a list are meaningless, so more findings would only
            # hide this one.
            advice = "a training list has `speaker path` lines; pass a trial list with --test_list"
            lasts = {PurePosixPath(path[-1]).suffix.casefold() for path in paths}
            if not are_trials and lasts.isdisjoint(AUDIO_SUFFIXES):
                advice = (
                    "its lines begin with a file name, but the speaker must come first: "
                    "`speaker path`"
                )
            found = f"{listed.source} is not a training list"
            return [Finding("error", "training list", found, advice)]
    if train_list is not None:
        findings += training_findings(train_list, min_utterances)
        findings += file_findings(
            train_list.paths, train_source, "training audio", max_bad_share, min_seconds
        )
    for one, source in trials:
        findings += trial_findings(one)
        # No missing file is tolerated, because it affects all its trials and so the error rate.
        findings += file_findings(
            one.names, source, f"trial audio ({PurePosixPath(one.source).name})", 0.0, min_seconds
        )
        for listed in lists:
            findings += overlap_findings(listed, one)
    return findings


def training_findings(training: TrainingList, min_utterances: int) -> list[Finding]:
    """Check size and balance of a training list, and look for repeated paths."""
    counts = np.bincount(training.labels, minlength=len(training.speakers))
    low = counts.min()
    high = counts.max()
    each = f"{low} each" if low == high else f"{low} to {high} each, median {np.median(counts):.0f}"
    size = (
        f"{counted(len(training), 'utterance')} of {counted(len(counts), 'speaker')} ({each}) "
        f"in {training.source}"
    )
    if len(counts) < 2:
        advice = (
            "training needs at least two speakers; lines are `speaker path`, in utt2spk "
            "`utterance speaker`"
        )
        return [Finding("error", "speakers", size, advice)]
    findings = [Finding("ok", "speakers", size)]
    few = np.flatnonzero(counts < min_utterances)
    if len(few):
        message = f"{counted(len(few), 'speaker')} with fewer than {min_utterances} utterances"
        advice = "training leaves these speakers out; add recordings or remove them from the list"
        examples = tuple(f"{training.speakers[row]} ({counts[row]})" for row in few[:MAX_NAMED])
        findings.append(Finding("warning", "few utterances", message, advice, examples))
    # Probably a folder of unnamed people rather than one person.
    if len(counts) > 2 and counts.max() > 100 * np.median(counts):
        message = (
            f"speaker {training.speakers[int(counts.argmax())]} has {counts.max():,} utterances, "
            f"the median speaker {np.median(counts):.0f}"
        )
        advice = "check that this is one person, or set data.max_utterances_per_speaker"
        findings.append(Finding("warning", "balance", message, advice))
    advice = "the same recording counts twice, perhaps under two speakers; remove the repeated rows"
    repeated = repeated_rows(training.paths)
    return findings + some(
        "warning", "repeated rows", repeated, training.paths.__getitem__, "repeated path", advice
    )


def trial_findings(trials: TrialList) -> list[Finding]:
    """Check size, labels and identity of a trial list."""
    size = (
        f"{len(trials):,} trials over {counted(len(trials.names), 'utterance')} in {trials.source}"
    )
    if trials.labels is None:
        return [Finding("ok", "trials", size + ", unlabelled: scores only, no error rates")]
    num_targets = int(np.count_nonzero(trials.labels))
    size += f", {num_targets:,} of them targets"
    if num_targets in (0, len(trials)):
        advice = (
            f"an error rate needs targets and non-targets; {own_command('prepare trials')} "
            "makes such lists"
        )
        return [Finding("error", "trials", size, advice)]
    findings = [Finding("ok", "trials", size)]

    def pair(row: int) -> str:
        return f"{trials.names[int(trials.enrol[row])]} {trials.names[int(trials.test[row])]}"

    folders = [name.split("/")[:-1] for name in trials.names]
    levels = ([one[position] for one in folders] for position in range(min(map(len, folders))))
    ids = (np.unique(level, return_inverse=True)[1] for level in levels)
    is_same = [one[trials.enrol] == one[trials.test] for one in ids]
    # Labels look swapped if some folder level is equal in all non-targets and different in all
    # targets, and none is the other way round.
    agrees, differs = (
        any(np.array_equal(one, trials.labels == kind) for one in is_same) for kind in (1, 0)
    )
    if differs and not agrees:
        message = (
            "every target trial pairs files from two folders, every non-target trial files "
            "from the same folder"
        )
        advice = "1 means the same speaker, 0 different speakers; the labels may be swapped"
        findings.append(Finding("warning", "labels", message, advice))
    if identity := identify_trials(trials):
        findings.append(Finding("ok", "trial identity", identity))
    _, contradicting = repeated_trials(trials)
    advice = "these pairs have both labels: correct or remove them"
    findings += some("error", "labels", contradicting, pair, "contradictory trial", advice)
    same = np.flatnonzero(trials.enrol == trials.test)
    advice = (
        "an utterance always matches itself, which makes the error rate optimistic; remove "
        "these trials"
    )
    return findings + some("warning", "self trials", same, pair, "self trial", advice)


def file_findings(
    names: StringTable,
    source: AudioSource | None,
    check: str,
    tolerated_share: float,
    min_seconds: float,
) -> list[Finding]:
    """Find missing and unreadable files, and check rates, channels and lengths of the others by
    their headers.
    """
    if source is None:
        return []
    missing = np.asarray(source.missing(names))
    if not len(missing):
        findings = [Finding("ok", f"{check}: files", f"all {len(names):,} exist")]
    else:
        option = (
            "data.train_path or data.corpora"
            if check == "training audio"
            else "the path of this list"
        )
        whole = (
            f"no path of the list exists in {source.root}; correct {option} (for doctor "
            "--list: --root)"
        )
        clean = (
            f"restore them or clean the list: {own_command('prepare trials')} clean LIST "
            "--root ROOT"
        )
        advice = whole if len(missing) == len(names) else clean
        if kaldi := kaldi_advice(source.root):
            advice = kaldi
        advice = advice_on_name(names[int(missing[0])]) or advice
        level: Level = "warning" if len(missing) <= tolerated_share * len(names) else "error"
        findings = some(
            level, f"{check}: files", missing, names.__getitem__, "missing file", advice
        )
    if len(missing) == len(names):
        return findings
    lookup = source.lookup_table(names)
    # A missing file has no header either.
    bad = sorted(set(lookup.problems) - set(missing.tolist()))
    level = "warning" if len(bad) <= tolerated_share * len(names) else "error"
    advice = "replace them or remove them from the list; --data.on_bad_audio skip tolerates a few"
    findings += some(
        level, f"{check}: headers", bad, lookup.problems.__getitem__, "unreadable file", advice
    )
    good = np.setdiff1d(np.arange(len(names)), list(lookup.problems))
    if not len(good):
        return findings
    rates, counts = np.unique(lookup.sample_rates[good], return_counts=True)
    shown = ", ".join(f"{rate} Hz ({count:,})" for rate, count in zip(rates, counts, strict=True))
    advice = ""
    if (rates != lookup.sample_rate).any():
        advice = (
            "other rates are resampled on every read, which is slow: convert or pack them "
            "once (speakernet pack)"
        )
        # Telephone and studio recordings differ above 4 kHz, so a network mistakes the microphone
        # for the voice.
        lower = (
            "; lower rates lack the upper band, and a network may learn that difference "
            "instead of the voices"
        )
        advice += lower if rates.min() < lookup.sample_rate else ""
    findings.append(Finding("warning" if advice else "ok", f"{check}: rate", shown, advice))
    if num_wide := int(np.count_nonzero(lookup.num_channels[good] > 1)):
        message = (
            f"{counted(num_wide, 'file')} with up to {lookup.num_channels[good].max()} "
            "channels, mixed down"
        )
        # A conversation may have one speaker per channel; the mixture would be neither of them.
        advice = (
            "fine if the channels are copies; if each has a different speaker, split them first"
        )
        findings.append(Finding("warning", f"{check}: channels", message, advice))
    seconds = lookup.seconds[good]
    total = f"{seconds.sum() / 3600:,.2f} hours; {seconds.min():.2f} to {seconds.max():.1f} s"
    findings.append(
        Finding("ok", f"{check}: length", f"{total}, median {np.median(seconds):.1f} s")
    )
    short = np.flatnonzero(seconds < min_seconds)
    if len(short):
        message = f"{counted(len(short), 'file')} shorter than {min_seconds:g} s"
        advice = (
            "short files are repeated to fill a crop and contribute little; data.min_seconds "
            "can leave them out"
        )
        examples = tuple(
            f"{names[int(good[row])]} ({seconds[row]:.2f} s)" for row in short[:MAX_NAMED]
        )
        findings.append(Finding("warning", f"{check}: short", message, advice, examples))
    return findings


def overlap_findings(training: TrainingList, trials: TrialList) -> list[Finding]:
    """Find speakers and files that are in both the training and the trial list.

    A trial list does not name speakers; they are taken from the folder level that holds the
    speaker's name in the training paths, counted from the start or the end of the path.
    """
    places = []
    for row in np.unique(
        np.linspace(0, len(training) - 1, min(LOOKED_AT, len(training))).astype(np.int64)
    ).tolist():
        steps = training.paths[row].split("/")
        speaker = training.speakers[int(training.labels[row])]
        found = {place for place, step in enumerate(steps[:-1]) if one_word(step) == speaker}
        places.append(found | {place - len(steps) for place in found})
    depths = set.intersection(*places)
    folders = (name.split("/") for name in trials.names)
    parts = {
        one_word(steps[depth])
        for steps in folders
        for depth in depths
        if -len(steps) <= depth < len(steps)
    }
    shared = sorted(parts & set(training.speakers))
    noun = "speaker"
    if not depths:
        rows = np.flatnonzero(NameIndex(training.paths).find(trials.names) >= 0)
        noun = "file"
        shared = [trials.names[int(row)] for row in rows]
    if shared:
        advice = (
            "the error rate says nothing about unseen speakers; make disjoint lists: "
            + own_command("prepare folder")
        )
        message = (
            f"{counted(len(shared), noun)} of {trials.source} also in the training list "
            f"{training.source}"
        )
        return [Finding("warning", "overlap", message, advice, tuple(shared[:MAX_NAMED]))]
    known_by = "" if depths else "; the paths do not name the speakers, so only files were compared"
    return [
        Finding("ok", "overlap", f"no {noun} of {trials.source} is in {training.source}{known_by}")
    ]
