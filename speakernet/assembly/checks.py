"""From the configuration to the quick checks that training runs before its first step."""

import logging

from speakernet.assembly.data import build_source
from speakernet.assembly.model import build_loss, build_model
from speakernet.assembly.refusals import refuse_impossible
from speakernet.checks.findings import Finding, worst
from speakernet.checks.quick import quick_check
from speakernet.config import Config
from speakernet.data.lists import read_training_list, read_trials
from speakernet.machine.device import choose_device

logger = logging.getLogger(__name__)


def check_options(config: Config) -> list[Finding]:
    """Whether this machine can train what the options ask for, as the doctor's line."""
    try:
        device = choose_device(config.runtime)
        refuse_impossible(config, build_model(config), build_loss(config, 2), device)
    except ValueError as error:
        return [Finding("error", "options", str(error))]
    return [Finding("ok", "options", f"{config.model.name} with {config.loss.name} can be trained on {device.type}")]


def check_inputs(config: Config, min_utterances: int) -> list[Finding]:
    """Check the lists of a training run against each other and against their files; log what was found.

    Args:
        config: with the validation list filled in.
        min_utterances: utterances that the loss needs of each speaker.

    Raises:
        ValueError: a finding that would stop or spoil the run, all of them in one message.
    """
    data = config.data
    trial_lists = {(data.validation_list, data.validation_path), (data.test_list, data.test_path)}
    findings = quick_check(
        train_list=read_training_list(data.train_list),
        train_source=build_source(config, data.train_path),
        trials=[(read_trials(path), build_source(config, root)) for path, root in sorted(trial_lists) if path],
        min_utterances=min_utterances,
        max_bad_share=data.max_bad_share if data.on_bad_audio == "skip" else 0.0,
    )
    for finding in findings:
        if finding.level != "error":
            logger.log(logging.WARNING if finding.level == "warning" else logging.INFO, "%s", finding)
    if worst(findings) == "error":
        raise ValueError("\n".join(str(finding) for finding in findings if finding.level == "error"))
    return findings
