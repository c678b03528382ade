"""The gain from quality measures in a calibration, for speakers on whom the calibration was not
fitted.

    python -m benchmarks.quality --model cam.pt --recordings calls/ --seconds 1 8

Recordings are laid out as speaker/(session/)file. A trial's enrolment side is a whole recording;
its test side is another recording, cut to a duration drawn log-uniformly. Targets are from
different sessions if a speaker has several. Speakers are divided into five parts; each part is
calibrated on the trials within the other four, and all parts are measured together. Figures are
means over several divisions; intervals come from 500 draws of speakers for one division.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import speakernet
from speakernet.evaluation.calibration import quality_columns, quality_inputs
from speakernet.evaluation.fitting import fit_calibration
from speakernet.evaluation.metrics import cllr, error_rates, min_cllr, min_dcf_point
from speakernet.evaluation.scoring import mean_embeddings
from speakernet.inference.recordings import audio_inputs, inspect_recording
from speakernet.random import numpy_generator
from speakernet.terminal import Bar

PARTS = 5
DIVISIONS = 10
DRAWS = 500
PRIOR = 0.5
COST_PRIOR = 0.05
TARGETS_EACH = 60
NONTARGETS_EACH = 300
MAX_RECORDINGS = 12
SETS: tuple[Sequence[str], ...] = (
    (),
    ("duration",),
    ("magnitude",),
    ("snr",),
    ("duration", "magnitude", "snr"),
)
FIGURES = ("min Cllr", "Cllr", f"minDCF({COST_PRIOR})")


def main() -> None:
    """Embed recordings, pair them, calibrate, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--recordings", required=True, help="folder of speaker/(session/)file")
    parser.add_argument(
        "--seconds", type=float, nargs=2, default=(1.0, 8.0), help="durations of the test side"
    )
    given = parser.parse_args()
    names, units, values = embedded(given.model, given.recordings, given.seconds)
    folders = [Path(name).relative_to(given.recordings).parts[:-1] for name in names]
    speakers = np.unique([one[0] for one in folders], return_inverse=True)[1]
    sessions = np.unique(["/".join(one) for one in folders], return_inverse=True)[1]
    enrol, test = trials_of(speakers, sessions)
    labels = speakers[enrol] == speakers[test]
    number = len(names)
    print(
        f"{number} recordings of {speakers.max() + 1} speakers; {labels.sum()} targets, "
        f"{(~labels).sum()} nontargets"
    )
    # In the arrays, the cut recordings follow the whole ones.
    test = test + number
    scores = (units[enrol] * units[test]).sum(axis=1)
    people = speakers[enrol], speakers[test - number]
    columns = {
        one: quality_columns(quality_inputs(one), scores, values, enrol, test) for one in SETS
    }
    found = {
        one: [calibrated(columns[one], labels, people, draw) for draw in range(DIVISIONS)]
        for one in SETS
    }
    for one in SETS:
        figures = np.array([measured(*row) for row in found[one]])
        print(f"{' + '.join(('score', *one)):32}", *(
            f"{name} {mean:.3f} (sd {spread:.3f})"
            for name, mean, spread in zip(FIGURES, figures.mean(axis=0), figures.std(axis=0), strict=True)
        ))  # fmt: skip
        if one:
            low, high = interval(found[()][0], found[one][0], people)
            print(
                " " * 32,
                *(
                    f"{name}: {a:+.3f} to {b:+.3f};"
                    for name, a, b in zip(FIGURES, low, high, strict=True)
                ),
            )


def embedded(
    model: str, folder: str, seconds: Sequence[float]
) -> tuple[list[str], np.ndarray, dict[str, np.ndarray]]:
    """Unit embeddings and quality measures of all recordings, first whole and then cut."""
    verifier = speakernet.load(model)
    random = numpy_generator(1)
    source, table = audio_inputs([folder], verifier.sample_rate)
    rows: list[tuple[np.ndarray, float, float]] = []
    with Bar("embedding", 2 * len(table), "recording") as bar:
        for is_cut in (False, True):
            for name in table:
                waveform = source.read(name)
                wanted = round(verifier.sample_rate * np.exp(random.uniform(*np.log(seconds))))
                if is_cut and len(waveform) > wanted:
                    # Around the loudest moment, so that no cut is just a pause.
                    start = np.abs(waveform).argmax() - random.integers(wanted)
                    start = min(max(0, start), len(waveform) - wanted)
                    waveform = waveform[start : start + wanted]
                quality = inspect_recording(waveform, sample_rate=verifier.sample_rate)
                embedding = verifier.embed(waveform, sample_rate=verifier.sample_rate)[0]
                rows.append((embedding, quality.seconds, quality.snr_db))
                bar.update(1)
    embeddings = np.stack([one[0] for one in rows])
    values = {
        "duration": np.array([one[1] for one in rows]),
        "magnitude": np.linalg.norm(embeddings, axis=1),
        "snr": np.array([one[2] for one in rows]),
    }
    return list(table), mean_embeddings(embeddings, verifier.mean), values


def trials_of(speakers: np.ndarray, sessions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some target and non-target trials of every speaker."""
    random = numpy_generator(2)
    enrol = []
    test = []
    for speaker in np.unique(speakers):
        own = random.permutation(np.flatnonzero(speakers == speaker))[:MAX_RECORDINGS]
        first, second = (one.ravel() for one in np.meshgrid(own, own))
        is_apart = (
            sessions[first] != sessions[second]
            if len(np.unique(sessions[own])) > 1
            else first != second
        )
        kept = random.permutation(np.flatnonzero(is_apart))[:TARGETS_EACH]
        others = random.choice(np.flatnonzero(speakers != speaker), NONTARGETS_EACH)
        enrol += [first[kept], random.choice(own, NONTARGETS_EACH)]
        test += [second[kept], others]
    return np.concatenate(enrol), np.concatenate(test)


def calibrated(
    columns: np.ndarray, labels: np.ndarray, people: tuple[np.ndarray, np.ndarray], draw: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the trials within any part, their log-likelihood ratios fitted on the other parts,
    and their labels.
    """
    part = numpy_generator(3, draw).permutation(people[0].max() + 1) % PARTS
    rows = []
    ratios = []
    for one in range(PARTS):
        inside = [part[side] == one for side in people]
        names = [str(number) for number in range(columns.shape[1])]
        outside = ~inside[0] & ~inside[1]
        fit = fit_calibration(columns[outside], labels[outside], PRIOR, names)
        rows.append(np.flatnonzero(inside[0] & inside[1]))
        ratios.append(fit.apply(columns[rows[-1]]))
    return np.concatenate(rows), np.concatenate(ratios), labels[np.concatenate(rows)]


def measured(_: np.ndarray, ratios: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    """The figures named in `FIGURES`."""
    rates = error_rates(ratios, labels)
    return min_cllr(rates), cllr(ratios, labels), min_dcf_point(rates, COST_PRIOR)[0]


def interval(first: tuple, second: tuple, people: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """95 % intervals of the differences, (2, figures): speakers are drawn with replacement, with
    all their trials.
    """
    random = numpy_generator(4)
    rows = first[0]
    labels = first[2]
    differences = []
    for _ in range(DRAWS):
        times = np.bincount(
            random.integers(0, people[0].max() + 1, people[0].max() + 1),
            minlength=people[0].max() + 1,
        )
        taken = np.repeat(np.arange(len(rows)), times[people[0][rows]] * times[people[1][rows]])
        both = [measured(rows, one[1][taken], labels[taken]) for one in (first, second)]
        differences.append(np.subtract(both[1], both[0]))
    return np.percentile(differences, [2.5, 97.5], axis=0)


if __name__ == "__main__":
    main()
