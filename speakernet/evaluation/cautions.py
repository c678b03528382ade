"""What must be known of a list before its figures are believed: told by commands, `results.json` and the report."""

from speakernet.evaluation.results import Results

CHOSEN_ON_REPORTED = "the best checkpoint was chosen on this very list: these error rates are optimistic"
WORSE_THAN_CHANCE = 50.0
"""EER in percent."""


def cautions(results: Results) -> list[str]:
    """Sentences for whoever reads these figures, the gravest first; empty where nothing is odd."""
    found = []
    if (results.eer_percent or 0.0) > WORSE_THAN_CHANCE:
        found.append(
            "worse than chance: a higher score has to mean the same speaker; are these distances, or labels swapped?"
        )
    if results.num_contradicting_trials:
        found.append(f"{results.num_contradicting_trials:,} trials stand in the list with both labels: one is wrong")
    if results.num_duplicate_trials:
        found.append(f"{results.num_duplicate_trials:,} trials occur more than once in the list and count each time")
    if results.interval_note:
        found.append(results.interval_note)
    if few := _priors_of_longer_lists(results):
        found.append(
            f"{results.num_trials - (results.num_targets or 0):,} pairs of different speakers are too few for "
            f"minDCF({', '.join(few)}): a single false accept costs as much there as accepting nobody"
        )
    return found


def _priors_of_longer_lists(results: Results) -> list[str]:
    """Target priors at which one false accept reaches the normalised cost of 1, so that only misses are counted."""
    if results.num_targets is None or results.dcf_costs is None:
        return []
    num_nontargets = results.num_trials - results.num_targets
    costs = results.dcf_costs
    # Of accepting nobody: c_miss x prior; of one false accept: c_fa x (1 - prior) / nontargets.
    return [
        prior
        for prior in results.min_dcf
        if costs["c_fa"] * (1 - float(prior)) >= num_nontargets * costs["c_miss"] * float(prior)
    ]
