"""Build the augmenter that the options describe, from the noise, RIRs and microphones on disk."""

import logging
from collections.abc import Iterator

import numpy as np

from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import ClipBank, RirBank, device_responses, noise_banks
from speakernet.data.augment.options import AugmentOptions
from speakernet.data.lookup import LookupTable
from speakernet.data.options import DataOptions
from speakernet.data.sources import AudioCache, RowReader
from speakernet.distributed import refuse_differences

logger = logging.getLogger(__name__)


def build_augmenter(
    options: AugmentOptions,
    data: DataOptions,
    seed: int,
    reader: RowReader,
    table: LookupTable,
    eligible: np.ndarray,
) -> Augmenter | None:
    """The augmenter, or None if it is switched off or has nothing to do.

    Babble may be mixed from the `eligible` rows of the training list, which `reader` reads.
    """
    sample_rate = data.sample_rate
    if not options.enabled:
        return None
    cache = AudioCache(data.cache_megabytes << 20)
    banks = noise_banks(options.noise_path, sample_rate, cache) if options.noise_path else {}
    if banks and "babble" not in banks and "babble" in options.categories and not reader.is_remote:
        banks["babble"] = ClipBank(reader, eligible, table.num_samples[eligible])
        logger.info("the noise has no folder 'speech': babble is mixed from training utterances")
    rirs: RirBank | None = None
    if options.rir_path:
        # The classic pipeline keeps the delay of the direct path, which shifts the speech in its
        # crop.
        rirs = RirBank(options.rir_path, sample_rate, cache, is_aligned=options.style == "ours")
    devices = None
    if options.microphone_path:
        devices = device_responses(options.microphone_path, sample_rate)
    sizes = {kind: [len(bank), int(bank.lengths.sum())] for kind, bank in banks.items()}
    # All processes draw from the same clips, by number.
    refuse_differences(
        {
            "the noise of augment.noise_path (clips and samples)": sizes,
            "the names of augment.rir_path (CRC-32)": f"{rirs.names.checksum:08x}" if rirs else "",
            "the devices of augment.microphone_path": 0 if devices is None else len(devices),
        }
    )
    augmenter = Augmenter(banks, rirs, options, sample_rate=sample_rate, seed=seed, devices=devices)
    if augmenter.missing and (options.noise_path or options.rir_path):
        logger.warning(
            "augmentation: found no files for %s; their share goes to %s",
            ", ".join(augmenter.missing),
            ", ".join(dict.fromkeys(augmenter.available)) or "clean speech",
        )
    if not augmenter.has_effect:
        logger.warning(
            "augmentation is skipped, because augment.noise_path and augment.rir_path contain "
            "nothing to mix in; `speakernet prepare musan` and `speakernet prepare rirs` fetch "
            "noise and RIRs"
        )
        return None
    logger.info("augmentation: %s", ", ".join(_describe_augmentation(augmenter, options)))
    return augmenter


def _describe_augmentation(augmenter: Augmenter, options: AugmentOptions) -> Iterator[str]:
    """What may happen to a crop, for the log."""
    for kind, bank in augmenter.banks.items():
        yield f"{len(bank):,} clips of {kind}"
    if augmenter.rirs is not None:
        yield f"{len(augmenter.rirs):,} RIRs"
    if options.microphone_probability:
        yield f"frequency responses of {options.microphone_db:g} dB"
    if augmenter.devices is not None:
        yield f"{len(augmenter.devices)} real microphones"
    if options.telephone_probability:
        yield "telephone"
    if options.codec_probability:
        yield f"codecs ({', '.join(dict.fromkeys(options.codecs))})"
    if any(options.volume_db):
        yield "volume"
    yield from options.components
