"""The quick checks of lists, files, headers and speakers that training runs before its first step;
no audio is decoded.

They find problems that would stop or spoil a run hours later: missing files, speakers in both
training and trials, speakers with too few utterances, trial lists with only targets or only
non-targets.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

import numpy as np

from speakernet.checks import Finding, Level, findings_for_rows
from speakernet.data.audio import AUDIO_SUFFIXES
from speakernet.data.lists import (
    NameIndex,
    StringTable,
    TrainingList,
    TrialList,
    identify_trials,
    repeated_rows,
    repeated_trials,
)
from speakernet.data.lookup import LookupTable
from speakernet.data.names import advice_on_name, folders_of, one_word
from speakernet.data.opening import kaldi_advice
from speakernet.data.sources import AudioSource
from speakernet.files import own_command
from speakernet.terminal import MAX_NAMED, counted

EXAMINED_ROWS = 1000
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
    # Training runs this before its first step, so only headers are read: decoding a large corpus
    # would take hours.
    findings: list[Finding] = []
    lists: list[TrainingList] = []
    if train_list is not None:
        # Trial paths do not name a corpus, so they are compared with each corpus separately.
        lists = [train_list]
        if train_source is not None:
            lists = train_source.apart(train_list)
        for listed in lists:
            advice = _other_kind(listed)
            if advice:
                # The files and speakers of such a list are meaningless, so more findings would
                # only hide this one.
                message = f"{listed.source} is not a training list"
                return [Finding("error", "training list", message, advice)]
        findings += training_findings(train_list, min_utterances)
        findings += file_findings(
            train_list.paths, train_source, "training audio", max_bad_share, min_seconds
        )
    for trial_list, source in trials:
        findings += trial_findings(trial_list)
        check = trial_audio(trial_list)
        # No missing file is tolerated, because it affects all its trials and so the error rate.
        findings += file_findings(trial_list.recordings, source, check, 0.0, min_seconds)
        for listed in lists:
            findings += overlap_findings(listed, trial_list)
    return findings


def trial_audio(trials: TrialList) -> str:
    """What the checks of a trial list's audio are called."""
    return f"trial audio ({PurePosixPath(trials.source).name})"


def _other_kind(listed: TrainingList) -> str:
    """What to do if the list was read as a training list, but is another; empty if it is one."""
    # A trial list can be read as a training list: its label becomes the speaker, and training
    # starts without an error. Therefore the first rows are searched for signs of another kind of
    # list.
    paths = []
    speakers = set()
    for row in range(min(EXAMINED_ROWS, len(listed))):
        paths.append(listed.paths[row].split())
        speakers.add(listed.speakers[int(listed.labels[row])])
    lasts = {path[-1] for path in paths}
    are_labels = speakers <= {"0", "1"} or lasts <= {"target", "nontarget"}
    are_trials = are_labels and all(len(path) == 2 for path in paths)
    # Speakers may have any name, but are unlikely to be named like audio files.
    if not are_trials and not _suffixes(speakers) <= AUDIO_SUFFIXES:
        return ""
    if are_trials or _suffixes(lasts) & AUDIO_SUFFIXES:
        return "a training list has `speaker path` lines; pass a trial list with --test_list"
    return "its lines begin with a file name, but the speaker must come first: `speaker path`"


def _suffixes(names: Iterable[str]) -> set[str]:
    return {PurePosixPath(name).suffix.casefold() for name in names}


def training_findings(training: TrainingList, min_utterances: int) -> list[Finding]:
    """Check the size of a training list, and look for repeated paths."""
    # Few utterances limit what can be trained: a pair needs two of one speaker, and a class with a
    # single one is memorised.
    counts = np.bincount(training.labels, minlength=len(training.speakers))
    each = f"{counts.min()} to {counts.max()} each, median {np.median(counts):.0f}"
    size = (
        f"{counted(len(training), 'utterance')} of {counted(len(counts), 'speaker')} ({each}) in "
        f"{training.source}"
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
    advice = "the same recording counts twice, perhaps under two speakers; remove the repeated rows"
    rows = repeated_rows(training.paths)
    return findings + findings_for_rows(
        "warning", "repeated rows", rows, training.paths.__getitem__, "repeated path", advice
    )


def trial_findings(trials: TrialList) -> list[Finding]:
    """Check size, labels and identity of a trial list."""
    number = counted(len(trials.recordings), "utterance")
    size = f"{len(trials):,} trials over {number} in {trials.source}"
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
    if identity := identify_trials(trials):
        findings.append(Finding("ok", "trial identity", identity))

    def pair(row: int) -> str:
        return " ".join(trials.pair(row))

    # A repeated pair merely counts twice, but with both labels one of them must be wrong.
    _, contradicting = repeated_trials(trials)
    advice = "these pairs have both labels: correct or remove them"
    findings += findings_for_rows(
        "error", "labels", contradicting, pair, "contradictory trial", advice
    )
    same = np.flatnonzero(trials.enrol == trials.test)
    advice = (
        "an utterance always matches itself, which makes the error rate optimistic; remove "
        "these trials"
    )
    return findings + findings_for_rows("warning", "self trials", same, pair, "self trial", advice)


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
    # Training can do without the few broken files that every large corpus has; a missing trial
    # would change the reported error rate.
    most_tolerated = tolerated_share * len(names)
    missing = np.asarray(source.missing(names))
    findings = [Finding("ok", f"{check}: files", f"all {len(names):,} exist")]
    if len(missing):
        advice = _advice_on_missing(names, missing, source, check)
        level: Level = "warning" if len(missing) <= most_tolerated else "error"
        findings = findings_for_rows(
            level, f"{check}: files", missing, names.__getitem__, "missing file", advice
        )
    # If every file is missing, their headers would only repeat the same problem.
    if len(missing) == len(names):
        return findings
    lookup = source.lookup_table(names)
    # A missing file has no header either.
    bad = sorted(lookup.problems.keys() - set(missing.tolist()))
    level = "warning" if len(bad) <= most_tolerated else "error"
    advice = "replace them or remove them from the list; --data.on_bad_audio skip tolerates a few"
    findings += findings_for_rows(
        level, f"{check}: headers", bad, lookup.problems.__getitem__, "unreadable file", advice
    )
    # Unreadable headers were reported above and have no rate or length to check.
    good = np.setdiff1d(np.arange(len(names)), list(lookup.problems))
    if len(good):
        findings += _header_findings(names, lookup, good, check, min_seconds)
    return findings


def _advice_on_missing(
    names: StringTable, missing: np.ndarray, source: AudioSource, check: str
) -> str:
    # One path usually shows why all are missing, such as backslashes, quotes from a spreadsheet or
    # a Kaldi folder without its audio.
    advice = advice_on_name(names[int(missing[0])]) or kaldi_advice(source.root)
    if advice:
        return advice
    if len(missing) < len(names):
        command = own_command("prepare trials")
        return f"restore them or clean the list: {command} clean LIST --root ROOT"
    option = "the path of this list"
    if check == "training audio":
        option = "data.train_path or data.corpora"
    return (
        f"no path of the list exists in {source.root}; correct {option} (for doctor --list: --root)"
    )


def _header_findings(
    names: StringTable, lookup: LookupTable, good: np.ndarray, check: str, min_seconds: float
) -> list[Finding]:
    """Rates, channels and lengths of the `good` rows."""
    rates, counts = np.unique(lookup.sample_rates[good], return_counts=True)
    shown = ", ".join(f"{rate} Hz ({count:,})" for rate, count in zip(rates, counts, strict=True))
    level: Level = "ok"
    advice = ""
    if (rates != lookup.sample_rate).any():
        level = "warning"
        advice = (
            "other rates are resampled on every read, which is slow: convert or pack them "
            "once (speakernet pack)"
        )
    if rates.min() < lookup.sample_rate:
        # Telephone and studio recordings differ above 4 kHz, so a network mistakes the microphone
        # for the voice.
        advice += (
            "; lower rates lack the upper band, and a network may learn that difference "
            "instead of the voices"
        )
    findings = [Finding(level, f"{check}: rate", shown, advice)]
    channels = lookup.num_channels[good]
    if channels.max() > 1:
        num_wide = int(np.count_nonzero(channels > 1))
        message = f"{counted(num_wide, 'file')} with up to {channels.max()} channels, mixed down"
        # A conversation may have one speaker per channel; the mixture would be neither of them.
        advice = (
            "fine if the channels are copies; if each has a different speaker, split them first"
        )
        findings.append(Finding("warning", f"{check}: channels", message, advice))
    seconds = lookup.seconds[good]
    length = (
        f"{seconds.sum() / 3600:,.2f} hours; {seconds.min():.2f} to {seconds.max():.1f} s, median "
        f"{np.median(seconds):.1f} s"
    )
    findings.append(Finding("ok", f"{check}: length", length))

    def name_and_length(row: int) -> str:
        return f"{names[row]} ({lookup.seconds[row]:.2f} s)"

    advice = (
        f"shorter than {min_seconds:g} s: they are repeated to fill a crop and contribute little; "
        "data.min_seconds can leave them out"
    )
    short = good[seconds < min_seconds]
    return findings + findings_for_rows(
        "warning", f"{check}: short", short, name_and_length, "short file", advice
    )


def overlap_findings(
    training: TrainingList, trials: TrialList, role: str = "training list"
) -> list[Finding]:
    """Find speakers and files that are in both the training list (or the cohort) and the trials.

    A trial list does not name speakers; they are taken from the folder level that holds the
    speaker's name in the training paths, counted from the start or the end of the path.
    """
    # The overlap that ruins a result is of speakers, not of files: a network that has heard a voice
    # in training recognises it in any recording. But trial lists name files only, so the training
    # list, which has both, shows where in a path the speaker stands.
    depths = _depths_of_speakers(training)
    # Without such a place, only equal files can be found.
    if depths:
        noun = "speaker"
        folders = set()
        for name in trials.recordings:
            steps = folders_of(name)
            folders |= {
                one_word(steps[depth]) for depth in depths if -len(steps) <= depth < len(steps)
            }
        shared = sorted(folders & set(training.speakers))
    else:
        noun = "file"
        rows = np.flatnonzero(NameIndex(training.paths).find(trials.recordings) >= 0)
        shared = list(trials.recordings.take(rows))
    if shared:
        message = (
            f"{counted(len(shared), noun)} of {trials.source} also in the {role} {training.source}"
        )
        command = own_command("prepare folder")
        advice = (
            f"the error rate says nothing about unseen speakers; make disjoint lists: {command}"
        )
        return [Finding("warning", "overlap", message, advice, tuple(shared[:MAX_NAMED]))]
    message = f"no {noun} of {trials.source} is in {training.source}"
    if not depths:
        message += "; the paths do not name the speakers, so only files were compared"
    return [Finding("ok", "overlap", message)]


def _depths_of_speakers(training: TrainingList) -> set[int]:
    """Places in a path where every examined row has its speaker's folder, from the start (0, 1, …)
    and from the end (-1, -2, …).
    """
    depths: set[int] | None = None
    num_examined = min(EXAMINED_ROWS, len(training))
    # Spread over the list, because the first rows of a sorted list may all be of one speaker.
    spread = np.linspace(0, len(training) - 1, num_examined).astype(np.int64)
    for row in spread.tolist():
        steps = folders_of(training.paths[row])
        speaker = training.speakers[int(training.labels[row])]
        here = {place for place, step in enumerate(steps) if one_word(step) == speaker}
        here |= {place - len(steps) for place in here}
        depths = here if depths is None else depths & here
    return depths or set()
