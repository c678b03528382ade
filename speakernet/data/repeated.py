"""Trials that stand in a list more than once, and those of them whose labels contradict each other."""

import numpy as np

from speakernet.data.lists import TrialList


def repeated_trials(trials: TrialList) -> tuple[int, np.ndarray]:
    """Trials whose ordered pair occurred before in the list, and those of them that then had another label.

    Returns:
        How many there are, and the rows of those that contradict, int64 (contradicting,).
    """
    # Row numbers of a million names, multiplied, pass 2^31.
    pairs = trials.enrol.astype(np.int64) * len(trials.names) + trials.test
    order = np.argsort(pairs, kind="stable")
    is_again = np.diff(pairs[order]) == 0
    if trials.labels is None:
        return int(is_again.sum()), np.empty(0, dtype=np.int64)
    return int(is_again.sum()), np.sort(order[1:][is_again & (np.diff(trials.labels[order]) != 0)])
