"""From the section augment to what disturbs batches, and where it runs. `data.py` calls it."""

import logging

import numpy as np
import torch

from speakernet.config.schema import Config
from speakernet.data.augment.augmenter import Augmenter
from speakernet.data.augment.banks import ClipBank, RirBank, clips_into_ram, describe_banks, noise_banks, rir_bank
from speakernet.data.lookup import LookupTable
from speakernet.data.sources import AudioCache, RowReader
from speakernet.parallel.distributed import refuse_differences

logger = logging.getLogger(__name__)

MEASURED_ROUNDS = 3
# Of a batch, whose cost on a core grows with it: enough to tell.


def build_augmenter(config: Config, reader: RowReader, table: LookupTable, eligible: np.ndarray) -> Augmenter | None:
    """What disturbs batches, None where it is switched off or has nothing to work with.

    Raises:
        ValueError: several processes have different noise or room responses.
    """
    section, sample_rate = config.augment, config.data.sample_rate
    if not section.enabled:
        return None
    cache = AudioCache(config.data.cache_megabytes << 20)
    banks = noise_banks(section.noise_path, sample_rate, cache) if section.noise_path else {}
    if banks and "babble" not in banks and "babble" in section.categories:
        # Read like the training crops themselves.
        banks["babble"] = ClipBank(reader, eligible, table.num_samples[eligible])
        logger.info("no folder 'speech' among the noise: babble is mixed from training utterances")
    rirs: RirBank | None = None
    if section.rir_path:
        # The classic pipeline leaves the delay of the direct path in, which shifts the speech in its crop.
        rirs = rir_bank(section.rir_path, sample_rate, cache, is_aligned=section.style == "ours")
    # By their draws all processes mean the same clips.
    refuse_differences(
        {
            "the noise of augment.noise_path (clips and samples)": {
                kind: [len(bank), int(bank.lengths.sum())] for kind, bank in banks.items()
            },
            "the names of augment.rir_path (CRC-32)": f"{rirs.names.checksum:08x}" if rirs else "",
        }
    )
    augmenter = Augmenter(banks, rirs, section, sample_rate=sample_rate, seed=config.runtime.seed)
    if augmenter.missing and (section.noise_path or section.rir_path):
        logger.warning(
            "augmentation: nothing found for %s; their part goes to %s",
            ", ".join(augmenter.missing),
            ", ".join(dict.fromkeys(augmenter.available)) or "clean speech",
        )
    does_more = any(section.volume_db) or section.telephone_probability or section.codec_probability
    if not augmenter.available and not does_more:
        logger.warning(
            "augmentation is on, but neither augment.noise_path nor augment.rir_path is set: nothing is mixed in; "
            "`speakernet prepare musan` and `speakernet prepare rirs` fetch noise and room responses"
        )
        return None
    logger.info("augmentation: %s", describe_banks(banks, rirs))
    return augmenter


def noise_into_ram(config: Config, augmenter: Augmenter, reader: RowReader) -> None:
    """Decode clips of noise into memory, where they fit there; but for those that are training utterances."""
    # Noise is read more often than speech: babble takes three to seven clips for one utterance.
    banks = {kind: bank for kind, bank in augmenter.banks.items() if bank.reader is not reader}
    if banks:
        in_memory = clips_into_ram(banks, config.data.cache_megabytes << 20)
        where = "in memory" if in_memory else "read from disk (data.cache_megabytes)"
        logger.log(logging.DEBUG if in_memory else logging.INFO, "noise clips are %s", where)


def augments_on_device(config: Config, device: torch.device, *, is_resident: bool, are_banks_there: bool) -> bool:
    """Whether whole batches are augmented on the training device, not crops with the loading; logged with the reason.

    Raises:
        ValueError: a GPU is asked for and training runs elsewhere.
    """
    wanted = config.augment.device
    if wanted == "cuda" and device.type != "cuda":
        raise ValueError(f"augment.device is cuda, but training runs on {device.type}; use auto")
    is_gpu = device.type == "cuda"
    is_there = are_banks_there or is_resident or (is_gpu and wanted == "cuda")
    if is_there:
        where = "on the GPU" if is_gpu else "on the CPU, on batches of the resident corpus"
        lies_there = "noise and RIRs lie there" if are_banks_there else "the corpus lies there"
        reason = "asked for" if wanted == "cuda" else lies_there
    else:
        # A GPU would wait for the training process to gather every batch's noise; workers gather it side by side.
        where, reason = "on the CPU, with the loading", "noise and RIRs are not on the GPU" if is_gpu else "no GPU"
        reason = "asked for" if wanted == "cpu" else reason
    logger.debug("augmentation runs %s (%s)", where, reason)
    return is_there
