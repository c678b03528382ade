"""One sentence of advice when training waits for its data. Arithmetic on facts that loader and tracker hand in."""

from dataclasses import dataclass

ADVISED_SHARE = 0.10  # waiting less than this is not worth a change
SLOW_DISK_BYTES_A_SECOND = 100e6


@dataclass(frozen=True)
class LoadingFacts:
    """How a run loads its data.

    Attributes:
        num_workers: loader processes.
        cores: cores that the run may use.
        is_packed: the corpus is packed or in memory.
        is_compressed: files must be decoded.
        augments_on_cpu: augmentation runs with the loading.
        has_gpu: training runs on a GPU.
        read_bytes_a_second: measured read speed; 0 when it was not measured.
        is_on_disk: the packed corpus is larger than memory.
    """

    num_workers: int
    cores: int
    is_packed: bool
    is_compressed: bool
    augments_on_cpu: bool
    has_gpu: bool
    read_bytes_a_second: float = 0.0
    is_on_disk: bool = False


def data_wait_advice(wait_share: float, facts: LoadingFacts) -> str:
    """What to change in this run; empty when training hardly waits.

    The cheapest change that can help comes first: a device that idles, then a disk that is the limit, then cores that
    idle, then decoding and opening files.

    >>> data_wait_advice(0.05, LoadingFacts(0, 8, False, False, True, True))
    ''
    """
    if wait_share <= ADVISED_SHARE:
        return ""
    waits = f"training waits for data {100 * wait_share:.0f} % of the time: "
    if 0 < facts.read_bytes_a_second < SLOW_DISK_BYTES_A_SECOND and not facts.is_packed:
        speed = facts.read_bytes_a_second / 1e6
        return waits + f"the disk gives {speed:.0f} MB/s; pack the corpus onto a faster one (speakernet pack)"
    # Free: the GPU idles while it waits.
    if facts.augments_on_cpu and facts.has_gpu:
        return waits + "let the GPU augment (augment.device: auto)"
    if facts.is_on_disk and not facts.augments_on_cpu:
        return waits + "the packed corpus is larger than memory; bring it onto a faster disk, each machine's own"
    # One core is left to the training process itself.
    if facts.num_workers < facts.cores - 1:
        more = facts.cores - 1
        return waits + f"raise data.num_workers from {facts.num_workers} to {more} ({facts.cores} cores are there)"
    if not facts.is_packed:
        why = "files are decoded for every crop" if facts.is_compressed else "a file is opened for every crop"
        return waits + f"pack the corpus (speakernet pack): {why}"
    if facts.augments_on_cpu:
        return waits + "all cores are busy augmenting; lower augment.probability or use a machine with more cores"
    return waits + ("the corpus is packed or in memory, and all cores are busy: only more cores or faster memory help")
