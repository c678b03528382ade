"""From the configuration to the quick checks that training runs before its first step."""

import logging

from speakernet.assembly.inputs import Inputs
from speakernet.assembly.model import build_model
from speakernet.assembly.refusals import refuse_impossible
from speakernet.checks.findings import Finding, worst
from speakernet.checks.quick import quick_check
from speakernet.config import Config
from speakernet.machine.device import find_device

logger = logging.getLogger(__name__)

TOLD = ("speakers", "training files: length", "trials", "trial identity")
"""What is worth reading where all is well: how much there is. That nothing is missing is a detail."""


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train what the options ask for, as the doctor's line."""
    try:
        device = find_device(config.runtime)
        refuse_impossible(config, build_model(config), device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    return [Finding("ok", "options", f"{config.model.name} with {config.loss.name} can be trained on {device.type}")]


def check_inputs(config: Config, inputs: Inputs) -> list[Finding]:
    """Check the lists of a training run against each other and against their files; log what was found.

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
    for finding in findings:
        if finding.level == "warning":
            logger.warning("%s", finding)
        elif finding.level == "ok":
            logger.log(logging.INFO if finding.check in TOLD else logging.DEBUG, "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))
    return findings
