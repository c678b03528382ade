"""Convert another toolkit's checkpoint to a speakernet model file.

For wespeaker, 3D-Speaker, SpeechBrain, ReDimNet and BUT (its MHFA recipes), the toolkit and the
model's name are enough. A voxceleb_trainer checkpoint reveals embedding size, mel bands and
pooling; options give the rest: whether the features are log mel energies, the sinc stride of
RawNet3, the pooling of a VGGVox without attention, and the loss.
"""

import argparse

from speakernet.cli.shared import output_path

ARGUMENTS = {
    "file": {"help": "the checkpoint"},
    "--from": {
        "dest": "source",
        "default": "voxceleb_trainer",
        "help": "its toolkit: voxceleb_trainer (the default), wespeaker, 3dspeaker, speechbrain, "
        "redimnet or but",
    },
    "--model": {
        "required": True,
        "help": "its architecture, by the toolkit's name or ours, such as CAMPPlus; checked "
        "against the file",
    },
    "--licence": {"default": "", "help": "licence of the weights, kept in the model file"},
    "--trained-on": {"default": "", "help": "training data of the weights, kept in the model file"},
    "--out": {"type": output_path, "required": True, "help": "the model file to write"},
    # Checkpoints of voxceleb_trainer do not contain these.
    "--no-log-input --no_log_input": {
        "action": "store_true",
        "help": "voxceleb_trainer: trained on mel energies without logarithm (no log_input)",
    },
    "--pooling --encoder_type": {
        "default": "",
        "help": "voxceleb_trainer: encoder_type, if the weights do not show it",
    },
    "--num-mels --n_mels": {
        "type": int,
        "default": 0,
        "help": "voxceleb_trainer: n_mels, if the filterbank was not saved",
    },
    "--sinc-stride --sinc_stride": {
        "type": int,
        "default": 10,
        "help": "voxceleb_trainer: sinc_stride of RawNet3",
    },
    "--loss --trainfunc": {
        "default": "",
        "help": "voxceleb_trainer: trainfunc; proto is scored without normalisation",
    },
}


def run(arguments: argparse.Namespace) -> list[str]:
    """Read, identify, convert, check and write."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.exchange import import_weights

    return import_weights(arguments)
