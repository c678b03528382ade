"""Checks of noise and RIRs, as training does before its first step. Needs torch."""

from collections.abc import Iterator

from speakernet.checks import Finding
from speakernet.data.augment.banks import open_noise, open_responses
from speakernet.data.augment.options import AugmentOptions
from speakernet.terminal import counted


def augmentation_findings(
    options: AugmentOptions, sample_rate: int, *, is_fast: bool = False
) -> Iterator[Finding]:
    """Whether noise and RIRs of a configuration can be read; only their headers if `is_fast`."""
    checks = (("noise", options.noise_path, open_noise), ("RIRs", options.rir_path, open_responses))
    for check, path, open_files in checks:
        if not path or not options.enabled:
            continue
        # The functions that training calls too, so the doctor accepts exactly what training does.
        try:
            files = open_files(path, sample_rate, is_fast=is_fast)
        except (ValueError, OSError) as error:
            yield Finding("error", check, str(error))
            continue
        if problem := files.left_out():
            advice = "restore or remove them; training leaves them out"
            yield Finding("warning", check, f"{path}: {problem}", advice)
        else:
            message = f"all {counted(len(files.names), 'file')} of {path} can be read"
            yield Finding("ok", check, message)
