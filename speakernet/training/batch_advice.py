"""Whether a batch size that runs faster is worth taking: what it does to training. Arithmetic on what was measured."""

from dataclasses import dataclass

from speakernet.training.batch_size import Measurement

WORTHWHILE_GAIN = 0.15
"""Smaller gains in speed are within what timings differ by, and are not worth tuning a run anew."""
FEWEST_STEPS = 10_000
"""Runs of fewer steps lack updates, not speed. A guess between exp01 (720 steps; with 360 it learned next to nothing in
half of its epochs, docs/decisions.md) and the recipes for VoxCeleb (100,000 and more)."""


@dataclass(frozen=True)
class PlannedRun:
    """The run that a batch size is looked for.

    Attributes:
        num_utterances: of the training list; 0 where it is not there yet.
        num_epochs: of the run.
        learning_rate: at the top of its schedule.
        accumulation_steps: batches of a step.
        can_accumulate: whether a step of several batches is the same to the loss.
    """

    num_utterances: int
    num_epochs: int
    learning_rate: float
    accumulation_steps: int = 1
    can_accumulate: bool = True

    def steps(self, batch_size: int) -> int:
        """Steps of an epoch."""
        return self.num_utterances // (batch_size * self.accumulation_steps)


def batch_size_advice(
    configured: Measurement, fastest: Measurement, run: PlannedRun, per_speaker: int = 1
) -> list[str]:
    """Sentences for people: how much faster, what else changes, and whether to take it.

    Args:
        configured: the size of the configuration.
        fastest: the size of best throughput.
        run: what it is for.
        per_speaker: utterances that `data.batch_size` counts as one.

    Source: of the guesses at a learning rate, Goyal et al., Accurate, large minibatch SGD, 2017 (in proportion), and
    Malladi et al., On the SDEs and scaling rules for adaptive gradient algorithms, 2022 (its square root).
    """
    size, usual = fastest.batch_size, configured.batch_size
    take, keep = (f"--batch_size {max(one // per_speaker, 1)}" for one in (size, usual))
    if size == usual:
        return [f"the {usual} of the configuration are the fastest: keep {keep}"]
    if not configured.fits:
        lines = [f"the {usual} of the configuration do not fit: take {take}"]
        several = -(-usual // size)
        if run.can_accumulate and several > 1:
            lines.append(
                f"with --training.accumulation_steps {several * run.accumulation_steps} a step is made of about as "
                "many utterances as before, and training stays what it was"
            )
        return lines
    gain = fastest.throughput / configured.throughput - 1
    lines = [f"{size} in a batch run {100 * gain:.0f} % faster than the {usual} of the configuration"]
    if gain < WORTHWHILE_GAIN:
        return [*lines, f"that is too little to tune a run anew: keep {keep}"]
    for_sgd, for_adam = (run.learning_rate * (size / usual) ** power for power in (1.0, 0.5))
    lines.append(
        f"it changes training, not only its speed: {_steps_in_words(run, usual, size)}, and the learning rate of "
        f"{run.learning_rate:g} belongs to {usual} (a first guess for {size}: {for_sgd:.2g} for sgd, {for_adam:.2g} "
        "for adam)"
    )
    if size < usual:
        return [*lines, f"use it with {take}"]
    if not run.num_utterances:
        enough = FEWEST_STEPS * size * run.accumulation_steps // run.num_epochs
        return [
            *lines,
            f"use it with {take} where there are more than about {enough:,} utterances to train on; on fewer, "
            f"updates are what is short: keep {keep}",
        ]
    if run.steps(size) * run.num_epochs < FEWEST_STEPS:
        return [*lines, f"with so few updates a larger batch trains worse, however fast: keep {keep}"]
    return [*lines, f"use it with {take}"]


def _steps_in_words(run: PlannedRun, usual: int, size: int) -> str:
    if not run.num_utterances:
        return f"an epoch has {usual / size:.2g} times as many steps"
    before, after = run.steps(usual), run.steps(size)
    return (
        f"an epoch of {run.num_utterances:,} utterances has {after:,} steps instead of {before:,}, the run "
        f"{after * run.num_epochs:,} instead of {before * run.num_epochs:,}"
    )
