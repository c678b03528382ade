"""Automatic choices for loading, each with its reason: workers, prefetching, RAM corpus, corpus on
the device.

Pure functions of facts about machine and corpus, which the caller passes in; the caller logs the
reasons.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from speakernet.files import human_bytes
from speakernet.options import Choice

MIN_BATCHES_FOR_WORKERS = 8  # shorter epochs are over before workers have started up
MAX_WORKERS = 12  # not measured: with more, the training process itself is probably the limit
MAX_SPAWNED_WORKERS = 4  # each imports torch again: seconds, and hundreds of megabytes
PREFETCHED = 4  # evens out slow reads; more would only take memory
MEMORY_SHARE = 0.5  # of the free memory, for corpora kept in memory
# For a two-second crop, measured on one core: 0.20 to 0.25 ms to change its speed, 0.03 ms to pass
# it to a process.
SPEED_MILLISECONDS = 0.25
HANDOVER_MILLISECONDS = 0.05
MAX_CROPS_PER_SECOND = 10_000  # more than one GPU trains on, so further workers would wait
ADVISED_SHARE = 0.10  # of the time spent waiting for data, above which a change is worthwhile
SLOW_DISK_BYTES_A_SECOND = 100e6


class CropWork(NamedTuple):
    """What workers would do for a crop."""

    is_reading_free: bool
    """Whether the corpus is packed or in memory."""
    augments: bool
    changed_share: float
    """Share of crops whose speed is changed."""


# Why not simply one worker for each core. A worker that only copies memory costs more than it
# gives, since its batch has to be handed over; more workers than crops can be used wait; and each
# takes memory for its batches. So every limit is a number with its reason, and the smallest one is
# what the log shows. The rates are from one machine: if they are wrong elsewhere, training waits,
# and `Workers` notices that.
def choose_num_workers(
    work: CropWork,
    *,
    cores: int,
    num_batches: int,
    trains_on_cpu: bool,
    batch_bytes: int,
    free_shared_bytes: int,
    processes_on_machine: int,
    is_spawned: bool,
) -> Choice[int]:
    """How many loader processes to start."""
    share = max(1, cores // processes_on_machine)
    if share == 1:
        return Choice(
            0, "this process has only one core, for which a worker would compete with training"
        )
    if num_batches < MIN_BATCHES_FOR_WORKERS:
        return Choice(
            0, f"an epoch of {num_batches} batches is over before workers have started up"
        )
    milliseconds = work.changed_share * SPEED_MILLISECONDS
    is_copy = work.is_reading_free and not work.augments
    if is_copy and milliseconds <= HANDOVER_MILLISECONDS:
        return Choice(
            0, "reading a crop is one copy in memory: passing it between processes would cost more"
        )
    # Half of the free memory, at two batches per worker, so that `choose_prefetch` finds memory for
    # two each.
    fitting = int(free_shared_bytes // 2 // max(1, 2 * batch_bytes))
    limits = [
        (
            fitting,
            f"shared memory has {human_bytes(free_shared_bytes)} left and a batch takes "
            f"{human_bytes(batch_bytes)} (in Docker: --shm-size or --ipc=host)",
        ),
        (MAX_WORKERS, f"more than {MAX_WORKERS} workers gain nothing"),
    ]
    if trains_on_cpu:
        limits.append((max(1, share // 4), f"the network itself needs most of the {share} cores"))
    else:
        limits.append((share - 1, f"{share} cores, one of them for training"))
    if is_copy:
        useful = math.ceil(milliseconds * MAX_CROPS_PER_SECOND / 1000)
        limits.append((useful, f"changing speed takes about {milliseconds:.1f} ms per crop"))
    if is_spawned:
        limits.append(
            (MAX_SPAWNED_WORKERS, "each worker imports everything again on this platform")
        )
    number, reason = min(limits)
    return Choice(number, reason)


def choose_prefetch(*, num_workers: int, batch_bytes: int, free_shared_bytes: int) -> int:
    """Batches that each worker prepares ahead: four, or fewer if shared memory is short."""
    fitting = free_shared_bytes // 2 // max(1, batch_bytes * num_workers)
    return max(1, min(PREFETCHED, fitting))


def choose_ram_corpus(
    *, switch: str, corpus_bytes: int, is_compressed: bool, is_packed: bool, budget_bytes: int
) -> Choice[bool]:
    """Whether to decode the corpus once into shared memory; ValueError if it is requested but too
    large.
    """
    sizes = (
        f"the corpus takes {human_bytes(corpus_bytes)}, the limit is {human_bytes(budget_bytes)}"
    )
    if switch == "off":
        return Choice(False, "switched off")
    if is_packed:
        return Choice(False, "a packed corpus is already mapped into memory")
    if corpus_bytes > budget_bytes:
        if switch == "on":
            raise ValueError(f"data.ram_corpus: on, but {sizes}; pack the corpus (speakernet pack)")
        return Choice(False, sizes)
    if switch == "on":
        return Choice(True, f"switched on; {sizes}")
    if not is_compressed:
        return Choice(False, "the files are plain PCM: reading a crop needs no decoding")
    return Choice(True, f"compressed files; {sizes}")


def choose_device_resident(
    *,
    switch: str,
    device_type: str,
    corpus_bytes: int,
    is_flat: bool,
    budget_bytes: int,
    augments_elsewhere: bool = False,
) -> Choice[bool]:
    """Whether to keep the corpus on the training device; ValueError if it is requested but
    impossible.

    `augments_elsewhere`: noise and RIRs will not be on the device, because of `augment.device` or
    their size.
    """
    sizes = (
        f"the corpus takes {human_bytes(corpus_bytes)}, the limit is {human_bytes(budget_bytes)}"
    )
    if switch == "off" or (switch == "auto" and device_type != "cuda"):
        return Choice(False, "switched off" if switch == "off" else "no GPU")
    obstacle = ""
    if not is_flat:
        obstacle = "the corpus is neither packed (speakernet pack) nor in memory"
    elif augments_elsewhere:
        obstacle = (
            "noise and RIRs for its crops are not on the device (augment.device, augment.codecs, "
            "data.device_gigabytes)"
        )
    elif corpus_bytes > budget_bytes:
        obstacle = sizes
    if switch == "on" and obstacle:
        raise ValueError(f"data.device_resident: on, but {obstacle}")
    return Choice(not obstacle, obstacle or sizes)


def choose_device_banks(
    *, bank_bytes: int, budget_bytes: int, needs_corpus: bool, is_corpus_there: bool
) -> Choice[bool]:
    """Whether to keep noise and RIRs on the training device.

    `needs_corpus`: babble is mixed from training utterances, so the corpus must be on the device
    too.
    """
    sizes = f"they take {human_bytes(bank_bytes)}, the limit is {human_bytes(budget_bytes)}"
    if bank_bytes <= budget_bytes and needs_corpus and not is_corpus_there:
        return Choice(
            False,
            "babble needs training utterances, which are not on the device (add a folder 'speech')",
        )
    return Choice(bank_bytes <= budget_bytes, sizes)


@dataclass(frozen=True)
class LoadingFacts:
    """How a run loads its data."""

    num_workers: int
    cores: int
    """Cores that the run may use."""
    is_packed: bool
    """Whether the corpus is packed or in memory."""
    is_compressed: bool
    """Whether files must be decoded."""
    augments_on_cpu: bool
    has_gpu: bool
    read_bytes_a_second: float = 0.0
    """0 if not measured."""
    is_on_disk: bool = False
    """Whether the packed corpus is larger than memory."""
    needs_cpu: bool = False
    """Whether augmentation uses codecs, which a GPU cannot run."""


def data_wait_advice(wait_share: float, facts: LoadingFacts) -> str:
    """The first change to try in a run that waits for data; empty if it hardly waits.

    >>> data_wait_advice(0.05, LoadingFacts(0, 8, False, False, True, True))
    ''
    """
    if wait_share <= ADVISED_SHARE:
        return ""
    speed = facts.read_bytes_a_second
    more = facts.cores - 1  # one core is left for the training process itself
    # A slow disk comes first, because it limits all else; the rest is ordered from the cheapest to
    # the most expensive.
    if 0 < speed < SLOW_DISK_BYTES_A_SECOND and not facts.is_packed:
        advice = (
            f"the disk reads {speed / 1e6:.0f} MB/s; pack the corpus onto a faster one (speakernet "
            "pack)"
        )
    elif facts.augments_on_cpu and facts.has_gpu and not facts.needs_cpu:
        # Costs nothing: the GPU is idle while it waits.
        advice = "let the GPU augment (augment.device: auto)"
    elif facts.is_on_disk and not facts.augments_on_cpu:
        advice = "the packed corpus is larger than memory; move it to a faster disk on this machine"
    elif facts.num_workers < more:
        advice = (
            f"raise data.num_workers from {facts.num_workers} to {more} (this run may use "
            f"{facts.cores} cores)"
        )
    elif not facts.is_packed:
        what = "decodes a file" if facts.is_compressed else "opens a file"
        advice = f"pack the corpus (speakernet pack), since every crop {what}"
    elif facts.augments_on_cpu:
        advice = "all cores are busy augmenting; lower augment.probability or use more cores"
    else:
        advice = (
            "the corpus is packed or in memory and all cores are busy; only more cores or faster "
            "memory help"
        )
    return f"training waits for data {100 * wait_share:.0f} % of the time: {advice}"
