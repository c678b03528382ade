"""The device of a run: what `runtime.device` and `runtime.gpu_id` mean on this machine."""

import logging

import torch

from speakernet import distributed
from speakernet.machine.driver import unusable_gpu
from speakernet.machine.facts import cpu_name
from speakernet.machine.limits import usable_cores
from speakernet.machine.options import MachineOptions

logger = logging.getLogger(__name__)


def choose_device(options: MachineOptions) -> torch.device:
    """The device that the options ask for, made torch's current one and logged with its reason.

    Raises:
        ValueError: a GPU was asked for and there is none, or none of that number.
    """
    device = find_device(options)
    if device.type == "cpu":
        why = "asked for" if options.device == "cpu" else "no GPU that torch can use"
        found, advice = ("", "") if options.device == "cpu" else unusable_gpu()
        if found:
            logger.warning("%s; this run is on the CPU, which is many times slower. To use the GPU: %s", found, advice)
        threads = torch.get_num_threads()
        logger.info("device: cpu (%s): %s, %d cores, threads: %d", why, cpu_name(), usable_cores(), threads)
        return device
    # What names no device (pinned memory, the profiler, a library) then uses this GPU too, and leaves the first alone.
    torch.cuda.set_device(device)
    logger.info("device: %s (%s)", device, torch.cuda.get_device_name(device))
    return device


def find_device(options: MachineOptions, local_rank: int | None = None) -> torch.device:
    """The same without a word or an effect.

    Args:
        options: which device.
        local_rank: of this process on its machine; None: that of the group that is running.

    Raises:
        ValueError: as `choose_device`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" or (options.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        found, advice = unusable_gpu()
        found, advice = found or "torch finds no GPU here", advice or "use --runtime.device auto or cpu"
        raise ValueError(f"runtime.device: cuda, but {found}; {advice}")
    own = distributed.local_rank() if local_rank is None else local_rank
    if options.gpu_id is None and own >= count:
        raise ValueError(
            f"process {own} of this machine (counted from 0) finds {count} GPUs, one for each process; start no more "
            "than these, or use --runtime.device cpu"
        )
    number = own if options.gpu_id is None else options.gpu_id
    if number >= count:
        raise ValueError(f"runtime.gpu_id: {number}, but there are {count} GPUs, numbered from 0")
    return torch.device("cuda", number)
