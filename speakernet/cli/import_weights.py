"""Convert another toolkit's checkpoint to a speakernet model file.

For wespeaker, 3D-Speaker, SpeechBrain and ReDimNet the toolkit and the model's name are enough. A checkpoint of
voxceleb_trainer shows its embedding size, mel bands and pooling; options give the rest: whether mel energies went
through the logarithm, the sinc stride of RawNet3, the pooling of a VGGVox without attention, and the loss.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """File in, file out, and what the checkpoint does not show."""
    parser.add_argument("file", help="the checkpoint")
    toolkits = "voxceleb_trainer (the default), wespeaker, 3dspeaker, speechbrain or redimnet"
    parser.add_argument("--from", dest="source", default="voxceleb_trainer", help=f"its toolkit: {toolkits}")
    parser.add_argument(
        "--model",
        required=True,
        help="its architecture by the toolkit's name or ours, such as CAMPPlus; checked against the file",
    )
    parser.add_argument("--licence", default="", help="the licence of the weights, kept in the model file")
    parser.add_argument("--trained-on", default="", help="what they were trained on, kept in the model file")
    parser.add_argument("--out", required=True, help="the model file to write")
    only = parser.add_argument_group("voxceleb_trainer", "what its checkpoints do not show")
    only.add_argument(
        "--no-log-input",
        "--no_log_input",
        action="store_true",
        help="it was trained on mel energies without logarithm (no log_input in its configuration)",
    )
    only.add_argument("--pooling", "--encoder_type", default="", help="its encoder_type, if its weights do not show it")
    only.add_argument("--num-mels", "--n_mels", type=int, default=0, help="its n_mels, if its filterbank was not saved")
    only.add_argument("--sinc-stride", "--sinc_stride", type=int, default=10, help="RawNet3: its sinc_stride")
    only.add_argument("--loss", "--trainfunc", default="", help="its trainfunc; proto is scored without normalisation")


def run(arguments: argparse.Namespace) -> int:
    """Read, recognise, translate, check, write."""
    # Late: --help and a mistyped option need no torch.
    from speakernet.assembly.exchange import import_weights

    return import_weights(arguments)
