"""From the sections augment and training to the voices that speakers are heard in: the only place that knows both."""

from speakernet.config.schema import Config
from speakernet.data.batches import speed_fractions
from speakernet.data.sampling import Voices


def voices_of(config: Config) -> Voices:
    """The voices of a run, or of one of its stages; one alone, the recorded one, where nothing is augmented."""
    augment = config.augment
    if not augment.enabled:
        return Voices()
    return Voices(
        speeds=tuple(speed_fractions(augment.speed_factors)),
        # As with speeds: the recorded voice comes first, so that its speakers keep their labels.
        warps=tuple(sorted(augment.warp_factors, key=lambda factor: factor != 1)),
        real_share=None if augment.real_share == "auto" else augment.real_share,
        real_from=config.training.max_epochs - augment.real_epochs if augment.real_epochs else None,
    )
