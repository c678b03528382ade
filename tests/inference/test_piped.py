"""`speakernet verify - enrolled.wav`: a WAV through a pipe, in whatever pieces, and what is no WAV."""

import io
import json
import sys

import numpy as np
import pytest
import torch

import speakernet
from speakernet.checkpoint import write_checkpoint
from speakernet.cli import main
from speakernet.data.audio import AudioError, read_audio, write_audio
from speakernet.inference.piped import chunks_of, open_piped
from speakernet.models.model_file import model_file_contents
from speakernet.models.speaker_net import SpeakerNet


class Pipe(io.BytesIO):
    """Gives at most seven bytes at a time, as a slow recorder might."""

    def read(self, size=-1):
        return super().read(min(7, size) if size >= 0 else 7)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name, seconds, seed in (("live.wav", 2.5, 0), ("enrolled.wav", 1.5, 1)):
        times = np.arange(int(16000 * seconds)) / 16000
        noise = 0.1 * np.random.default_rng(seed).standard_normal(len(times))
        write_audio(folder / name, (noise * (0.55 + 0.45 * np.sin(20 * times))).astype(np.float32))
    torch.manual_seed(0)
    net = SpeakerNet.named("ResNet", embedding_dim=8, model_options={"channels": 8, "blocks": [1, 1]})
    write_checkpoint(folder / "model.pt", model_file_contents(net, loss_normalizes=True))
    return folder


def endless(content):
    """A header as recorders write it before they know the length."""
    return content[:4] + b"\xff\xff\xff\xff" + content[8:40] + b"\xff\xff\xff\xff" + content[44:]


@pytest.mark.parametrize("kind", [io.BytesIO, Pipe])
def test_samples_come_whole_in_any_pieces(clips, kind):
    content = endless((clips / "live.wav").read_bytes())
    pipe = kind(content[: 44 + 2 * 3000 + 1])
    info, begun = open_piped(pipe)
    assert (info.sample_rate, info.num_channels) == (16000, 1)
    heard = np.concatenate(list(chunks_of(pipe, info, begun)))[:, 0]
    # Half a sample at the end is none.
    np.testing.assert_array_equal(heard, read_audio(clips / "live.wav")[:3000])


def test_the_command_says_how_sure_it_is_and_ends_as_verify_does(clips, monkeypatch, capsys):
    content = endless((clips / "live.wav").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    enrolled, model = str(clips / "enrolled.wav"), str(clips / "model.pt")
    for threshold, status in ((-1.0, 0), (1.0, 1)):
        sys.stdin.buffer.seek(0)
        options = ["--model", model, "--device", "cpu", "--threshold", str(threshold), "--json"]
        assert main(["verify", "-", enrolled, *options]) == status
        captured = capsys.readouterr()
        wanted = speakernet.load(model, device="cpu").verify(clips / "live.wav", enrolled, threshold=threshold)
        assert json.loads(captured.out)["score"] == pytest.approx(wanted.score, abs=1e-5)
        lines = captured.err.splitlines()
        assert [line.split(":")[0] for line in lines if line.startswith("after")] == ["after 1 s", "after 2 s"]
    sys.stdin.buffer.seek(0)
    assert main(["verify", "-", enrolled, "--model", model]) == 2
    assert "speakernet calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input is empty; pipe a WAV"),
        (b"no sound at all", "no WAV of plain samples"),
        (b"RIFF\0\0\0\0WAVEjunk", "broken WAV"),
        (b"fLaC" + bytes(100), "no WAV of plain samples"),
    ],
)
def test_what_is_no_wav_is_refused(content, message):
    with pytest.raises(AudioError, match=message):
        open_piped(io.BytesIO(content))
