"""The training loader of a small corpus, for the tests of what a loader reads from."""

import numpy as np
import torch

from speakernet.assembly.data import build_training_loader
from speakernet.assembly.inputs import Inputs
from speakernet.config import Config
from speakernet.config.schema import with_changes


def make_loader(corpus, **data):
    """A loader of the corpus's `train_list.txt`, in batches of four crops without augmentation."""
    small = {"crop_frames": 50, "batch_size": 4, "num_workers": 0}
    data = {"train_list": f"{corpus}/train_list.txt", **small, **data}
    config = with_changes(Config(), data=data, augment={"enabled": False}, loss={"name": "softmax"})
    return build_training_loader(config, Inputs(config, torch.device("cpu")))


def is_cut_from(whole, crop):
    """Whether the beginning of a crop is somewhere in an utterance."""
    windows = np.lib.stride_tricks.sliding_window_view(whole, 160)
    return (windows == crop[:160]).all(axis=1).any()
