"""Strides of ResNet's stages: exact parameter counts, frames that are kept, refusals."""

import pytest
import torch

from speakernet.models.speaker_net import SpeakerNet

GOLDEN = {"mel_strides": [2, 2, 2, 2], "frame_strides": [1, 2, 1, 1]}
MELS, DIM = 72, 192


def make(**options: object) -> SpeakerNet:
    return SpeakerNet.named(
        "ResNet", embedding_dim=DIM, model_options=options, front_end_options={"num_mels": MELS}
    ).eval()


def counted(channels: int, blocks: list[int], strides: list[tuple[int, int]], mels: int) -> int:
    """Parameters by hand: stem, two 3 x 3 convolutions and norms a block, shortcuts, TSTP, embedding layer."""
    total, width_in = 9 * channels + 2 * channels, channels
    for stage, (number, stride) in enumerate(zip(blocks, strides, strict=True)):
        width, mels = channels * 2**stage, -(-mels // stride[0])
        total += number * (18 * width * width + 4 * width) - 9 * width * (width - width_in)
        if stride != (1, 1) or width_in != width:
            total += width_in * width + 2 * width
        width_in = width
    return total + 2 * width_in * mels * DIM + DIM


@pytest.mark.parametrize("blocks", [[1, 1, 1, 1], [2, 2, 2, 2], [1, 3, 3, 1]])
def test_parameters_are_counted_by_hand(blocks: list[int]) -> None:
    golden = list(zip(*GOLDEN.values(), strict=True))
    usual = [(1, 1), (2, 2), (2, 2), (2, 2)]
    for options, strides in (({}, usual), (GOLDEN, golden)):
        net = make(channels=16, blocks=blocks, **options)
        assert sum(one.numel() for one in net.parameters()) == counted(16, blocks, strides, MELS)


def test_exact_parameters_of_the_compact_network() -> None:
    assert sum(one.numel() for one in make(channels=16, blocks=[1, 1, 1, 1], **GOLDEN).parameters()) == 553_488


def test_golden_gemini_halves_mels_four_times_and_frames_once() -> None:
    features = torch.zeros(1, MELS, 150)
    shapes = [make(**options).trunk(features, None)[0].shape for options in ({}, GOLDEN)]
    assert [tuple(shape) for shape in shapes] == [(1, 128 * 9, 19), (1, 128 * 5, 75)]


def test_the_usual_strides_can_be_written_out() -> None:
    usual, written = make(), make(mel_strides=[1, 2, 2, 2], frame_strides=[1, 2, 2, 2])
    written.load_state_dict(usual.state_dict())
    features = torch.randn(1, MELS, 60)
    assert torch.equal(usual.from_features(features), written.from_features(features))
    assert SpeakerNet.from_spec(written.spec()).spec() == written.spec()


def test_a_stride_for_each_stage_or_none() -> None:
    with pytest.raises(
        ValueError, match=r"frame_strides is \[1, 2\] for blocks \[2, 2, 2, 2\]; expected a stride of each"
    ):
        make(frame_strides=[1, 2])
