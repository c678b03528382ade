"""From the configuration to the quick checks that training runs before its first step."""

import logging
import shutil
from pathlib import Path

from speakernet.assembly.inputs import Inputs, TrialInput
from speakernet.assembly.model import build_model
from speakernet.assembly.refusals import refuse_impossible
from speakernet.checks.findings import Finding, worst
from speakernet.checks.quick import quick_check
from speakernet.checks.samples import read_facts, sample_findings
from speakernet.config import Config
from speakernet.files import human_bytes
from speakernet.machine.device import find_device
from speakernet.machine.facts import usable_cores
from speakernet.models.speaker_net import SpeakerNet
from speakernet.run_folder import LAST

logger = logging.getLogger(__name__)

READ_AT_START_SECONDS = 3600.0
"""Trial lists of no more speech are decoded before the first step, in seconds; of longer ones the doctor tells."""
TOLD = ("speakers", "training files: length", "trials", "trial identity")
"""What is worth reading where all is well: how much there is. That nothing is missing is a detail."""


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train what the options ask for, as the doctor's lines."""
    try:
        device, net = find_device(config.runtime), build_model(config)
        refuse_impossible(config, net, device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    can = f"{config.model.name} with {config.loss.name} can be trained on {device.type}"
    return [Finding("ok", "options", can), *space_findings(config, net)]


def space_findings(config: Config, net: SpeakerNet) -> list[Finding]:
    """Nothing, or that the disk has no room for what a run of this network keeps: better said before than after it."""
    folder = Path(config.training.save_path)
    weights = sum(one.numel() * one.element_size() for one in net.parameters())
    # Two moments of the optimizer, and the average. The head comes on top: this is the least.
    last = weights * (3 + (config.training.ema_decay > 0))
    # A last.pt is written beside the one that it takes the place of, and that one is kept.
    needed = weights + last * (1 if (folder / LAST).exists() else 2)
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return []
    message = f"{human_bytes(free)} free in {there}; the checkpoints of {config.model.name} need {human_bytes(needed)}"
    return [Finding("error", "free space", message, "free some space, or choose another --save_path")]


def check_inputs(config: Config, inputs: Inputs, net: SpeakerNet) -> list[Finding]:
    """Check the lists of a run against each other and against their files, and the disk; log what was found.

    Raises:
        ValueError: a finding that would stop or spoil the run, all of them in one message.
    """
    data = config.data
    # Often one and the same.
    trial_lists = {(id(one.trials), id(one.source)): one for one in (inputs.validation, inputs.test)}
    findings = quick_check(
        train_list=inputs.training.rows,
        train_source=inputs.training.source,
        trials=[(one.trials, one.source) for one in trial_lists.values()],
        min_utterances=config.loss.min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
    )
    findings += space_findings(config, net)
    if worst(findings) != "error":
        findings += [one for given in trial_lists.values() for one in _decoded(given)]
    for finding in findings:
        if finding.level == "warning":
            logger.warning("%s", finding)
        elif finding.level == "ok":
            logger.log(logging.INFO if finding.check in TOLD else logging.DEBUG, "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))
    return findings


def _decoded(given: TrialInput) -> list[Finding]:
    """What only reading tells of the recordings that will judge the run: found now, not after its last epoch."""
    names = given.trials.names
    seconds = given.source.lookup_table(names).seconds
    if seconds.sum() > READ_AT_START_SECONDS:
        return []
    return sample_findings(names, read_facts(given.source, names, usable_cores()), "trial files")
