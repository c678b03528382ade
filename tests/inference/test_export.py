"""Models in other programs: equal embeddings in every format and family; otherwise no file is
written.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import speakernet
from speakernet.corpora.synthetic.speech import synthetic_speech
from speakernet.data.audio import read_audio, write_audio
from speakernet.evaluation.scoring import WHOLE, verifying_backend
from speakernet.inference.export import FORMATS, METADATA_KEY, MIN_COSINE, compare, export_model
from speakernet.models.model_file import ModelFile, load_model_file
from tests.commands import run_command
from tests.small_networks import SMALLEST, scoring, small_network, write_model

RATE = 16000
STANDARD_OPERATORS = {"STFT", "DFT", "MelWeightMatrix", "HannWindow", "HammingWindow"}
FRONT_ENDS = ["log_mel", "fbank", "mfcc", "speechbrain", "tf_mel"]
KINDS = ["RawNet3", "ECAPA_TDNN", "CAMPPlus"]
TINY = {"channels": 8, "blocks": [1]}
MEAN = {"embedding_mean": torch.linspace(-1, 1, 32), "embedding_mean_of": {"embedding": "whole"}}


def made(name, front_end=None, **how):
    """A network with trained-looking batch norms."""
    net = small_network(name, front_end=front_end, **how).eval()
    for part in net.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.5, 1.5)
    return net


def embedded(net, waveforms):
    lengths = torch.full((len(waveforms),), waveforms.shape[1])
    return net.embed(torch.from_numpy(waveforms), lengths, sample_rate=RATE).numpy()


def noise(*shape):
    return np.float32(0.1) * np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def assert_close(actual, expected, share=1e-4):
    """Equal up to a share of the largest value."""
    np.testing.assert_allclose(actual, expected, atol=share * np.abs(expected).max())


@pytest.fixture(scope="module")
def speech():
    return synthetic_speech(3, RATE)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, speech):
    """A small model with a mean of whole recordings, a calibration and a threshold."""
    net = made("ResNet", model_options=TINY)
    rows = [net.embed(torch.from_numpy(clip)[None], sample_rate=RATE) for clip in speech]
    backend = {**verifying_backend({}).describe(WHOLE), "subtract_mean": True}
    return write_model(
        tmp_path_factory.mktemp("model") / "best.pt",
        net,
        embedding_mean=torch.cat(rows).mean(0),
        embedding_mean_of={"embedding": "whole"},
        **scoring(8.0, -2.0, backend, eer=0.25),
    )


@pytest.fixture(scope="module")
def verifier(model_path):
    return speakernet.load(model_path, "cpu")


@pytest.fixture(scope="module")
def exported(model_path, tmp_path_factory):
    """The ONNX file written by the command."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    run_command(f"export {model_path} --out {path}")
    return path


def test_outputs_of_onnx(model_path, exported, verifier, speech):
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["waveforms"]
    assert [value.name for value in session.get_outputs()] == ["embedding", "direction"]
    directions = []
    expected = [verifier.embed(clip, sample_rate=RATE) for clip in speech]
    for clip, row in zip(speech, expected, strict=True):
        embedding, direction = session.run(None, {"waveforms": clip[None]})
        assert embedding.dtype == np.float32 and embedding.shape == row.shape == (1, 32)
        assert_close(embedding, row)
        directions.append(direction[0])
    score = verifier.compare(*expected[:2])
    assert directions[0] @ directions[1] == pytest.approx(score, abs=1e-4)
    # Batch size and length are dynamic.
    for shape in ((5, 12345), (2, 320)):
        expected = embedded(load_model_file(model_path).net, noise(*shape))
        assert_close(session.run(None, {"waveforms": noise(*shape)})[0], expected)


def test_graph(exported):
    model = onnx.load(exported)
    onnx.checker.check_model(model, full_check=True)
    assert {opset.domain for opset in model.opset_import} <= {"", "ai.onnx"}
    assert not model.functions
    assert not {node.op_type for node in model.graph.node} & STANDARD_OPERATORS
    facts = facts_of(exported)
    assert facts["model"]["name"] == "ResNet"
    assert (facts["sample_rate"], facts["embedding_dim"]) == (RATE, 32)
    assert facts["calibration"] == {"weight": 8.0, "offset": -2.0}
    assert facts["thresholds"] == {"eer": 0.25}


@pytest.fixture(scope="module")
def exported_seconds(model_path, tmp_path_factory):
    """An ONNX file for recordings of exactly two seconds."""
    path = tmp_path_factory.mktemp("exported_seconds") / "model.onnx"
    run_command(f"export {model_path} --out {path} --seconds 2")
    return path


def dimensions(path):
    """Shape of every input, output and value in between, by name."""
    graph = onnx.load(path).graph
    shapes = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        axes = value.type.tensor_type.shape.dim
        shapes[value.name] = [
            axis.dim_value if axis.HasField("dim_value") else "?" for axis in axes
        ]
    return shapes


def facts_of(path):
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return json.loads(metadata[METADATA_KEY])


def test_fixed_length(exported, exported_seconds):
    """Files are compared with the model before they are written."""
    shapes = dimensions(exported_seconds)
    assert shapes["waveforms"] == [1, 32000]
    assert shapes["embedding"] == shapes["direction"] == [1, 32]
    assert not [name for name, shape in shapes.items() if "?" in shape]
    assert dimensions(exported)["waveforms"] == ["?", "?"]
    assert facts_of(exported_seconds)["num_samples"] == 32000
    assert "num_samples" not in facts_of(exported)
    fixed = onnxruntime.InferenceSession(exported_seconds, providers=["CPUExecutionProvider"])
    for shape in ((2, 32000), (1, 32001)):
        with pytest.raises(Exception, match="invalid dimensions"):
            fixed.run(None, {"waveforms": noise(*shape)})


def test_fixed_length_of_features(tmp_path, speech):
    path = saved(tmp_path / "model.pt", {"style": "lhotse", "normalize": "mean"}, **MEAN)
    out = tmp_path / "phone.onnx"
    run_command(f"export {path} --out {out} --for sherpa-onnx --seconds 2")
    shapes = dimensions(out)
    # A frame every 10 ms.
    assert shapes["features"] == [1, 200, 80] and shapes["embedding"] == [1, 32]
    assert not [name for name, shape in shapes.items() if "?" in shape]
    assert facts_of(out)["num_samples"] == 32000
    net = load_model_file(path).net
    clip = speech[0][None, :32000]
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    # The graph removes the mean of the features, which may be removed already.
    features = net.front_end(torch.from_numpy(clip)).transpose(1, 2).numpy()
    (embedding,) = session.run(None, {"features": features})
    assert_close(embedding, embedded(net, clip) - MEAN["embedding_mean"].numpy())


def test_other_formats(model_path, verifier, tmp_path, speech, call):
    write_audio(tmp_path / "short.wav", speech[0][:RATE])
    # Short recordings are repeated for the comparison.
    fixed = f"--seconds 1.5 --speech {tmp_path}/short.wav"
    for name, options in (("a.pt2", ""), ("b.pt2", fixed), ("a.safetensors", "")):
        status, out, _ = call(f"export {model_path} --out {tmp_path}/{name} {options}")
        assert status == 0 and "lowest cosine" in out
    again = speakernet.load(tmp_path / "a.safetensors", "cpu")
    expected = verifier.embed(speech[0], sample_rate=RATE)
    np.testing.assert_array_equal(again.embed(speech[0], sample_rate=RATE), expected)
    assert again.fingerprint == verifier.fingerprint
    assert again.decide(0.3, threshold="eer") == verifier.decide(0.3, threshold="eer")
    program = torch.export.load(tmp_path / "a.pt2").module()
    for clip in (speech[0], speech[1][:RATE]):
        embedding = program(torch.from_numpy(clip)[None])[0].numpy()
        assert_close(embedding, verifier.embed(clip, sample_rate=RATE))
    program = torch.export.load(tmp_path / "b.pt2")
    (inputs,), _ = program.example_inputs
    assert inputs.shape == (1, 24000) and not program.range_constraints


@pytest.mark.slow
def test_eight_bits(model_path, tmp_path, speech, call, caplog):
    for number, clip in enumerate(speech):
        write_audio(tmp_path / f"{number}.wav", clip)
    trials = "1 0.wav 0.wav\n1 1.wav 1.wav\n0 0.wav 1.wav\n0 1.wav 2.wav\n"
    (tmp_path / "trials.txt").write_text(trials)
    path = tmp_path / "model.int8.onnx"
    options = f"--int8 --trials {tmp_path}/trials.txt --audio {tmp_path}"
    status, out, _ = call(f"export {model_path} --out {path} {options}")
    # The root logger has onnxruntime's advice to developers.
    assert status == 0 and "root" not in [record.name for record in caplog.records]
    for words in ("after int8: lowest cosine 0.", "EER of 4 trials", "in int8 ("):
        assert words in out
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert "ConvInteger" in kinds and "DynamicQuantizeLinear" in kinds
    # Spectra remain in float32.
    assert kinds.index("Conv") < kinds.index("ConvInteger")


def test_unequal_export_is_not_written(model_path, tmp_path, speech, monkeypatch):
    wrong = ("x", lambda *_: b"", lambda _: lambda waveforms: [noise(len(waveforms), 32)])
    monkeypatch.setitem(FORMATS, ".pt2", wrong)
    out = tmp_path / "model.pt2"
    out.write_bytes(b"what was there")
    message = r"its embeddings differ from those of .*lowest cosine -?0\.\d"
    with pytest.raises(ValueError, match=message):
        export_model(load_model_file(model_path), out, speech=speech)
    assert out.read_bytes() == b"what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out model.bin", "model.bin"),
        ("--out x.pt2 --int8", "x.pt2"),
        ("--out x.onnx --trials t --audio .", "--int8"),
        ("--out x.safetensors --speech short.wav", "257 samples"),
        ("--out folder.onnx", "folder.onnx"),
        ("--out x.onnx --seconds nan", "--seconds nan"),
        ("--out x.onnx --seconds 601", "--seconds 601"),
        # 160 samples.
        ("--out x.onnx --seconds 0.01", "at least 257"),
        ("--out x.onnx --seconds 3 --int8", "--int8"),
        ("--out x.safetensors --seconds 3", "x.safetensors"),
    ],
)
def test_bad_options(model_path, tmp_path, monkeypatch, refuse, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    write_audio(tmp_path / "short.wav", np.full(100, 0.1, dtype=np.float32))
    before = sorted(tmp_path.iterdir())
    assert message in refuse(f"export {model_path} {options}")
    assert sorted(tmp_path.iterdir()) == before


SCRIPT = """
import sys, runpy
for name in ("torch", "speakernet"): sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_example_without_speakernet(
    repository, model_path, exported, exported_seconds, verifier, tmp_path, speech
):
    example = repository / "examples" / "verify_onnx.py"
    clips = [tmp_path / "0.wav", tmp_path / "1.wav"]
    for path, waveform in zip(clips, speech, strict=False):
        write_audio(path, waveform)

    def run(graph, *files):
        command = [sys.executable, "-c", SCRIPT, example, graph, *files]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    def score(out):
        return float(out.split()[1])

    out = run(exported, *clips).stdout
    decision = verifier.verify(*clips, threshold="eer")
    assert score(out) == pytest.approx(decision.score, abs=2e-3)
    answer = "same" if decision.same_speaker else "different"
    assert f"{answer} at the threshold 0.2500 (eer)" in out and "log-likelihood ratio" in out
    assert "16000 Hz" in run(exported, example, example).stderr
    net = load_model_file(model_path).net
    cut = [embedded(net, np.resize(read_audio(path), (1, 32000))) for path in clips]
    out = run(exported_seconds, *clips).stdout
    assert score(out) == pytest.approx(verifier.compare(*cut), abs=2e-3)
    net = made("ResNet", model_options=TINY)
    net.adapt({"name": "made", "maps": [[32, 32]], "score": "plda"})
    net.adaptation.between.copy_(torch.linspace(0.1, 3, 32))
    net.adaptation.weights.copy_(torch.linspace(0.5, 1, 32))
    path = write_model(tmp_path / "plda.pt", net)
    run_command(f"export {path} --out {tmp_path}/plda.onnx")
    out = run(tmp_path / "plda.onnx", *clips).stdout
    # The example embeds what it is given; cutting to speech is the caller's task.
    verifier = speakernet.load(path, "cpu")
    assert score(out) == pytest.approx(verifier.compare(*verifier.embed(clips)), abs=5e-3)


def assert_parity(model, ending, speech):
    _, write, open_it = FORMATS[ending]
    graph = open_it(write(model, None))
    parity = compare(model, graph, speech)
    assert parity.cosine > MIN_COSINE and parity.difference <= 1e-3 * parity.scale, str(parity)
    # One frame more or fewer at the ends, and incomplete segments.
    least = RATE if ending == ".pt2" else 0
    shortest = noise(2, max(model.net.min_samples, least))
    assert_close(graph(shortest)[0], embedded(model.net, shortest), 1e-3)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        *(pytest.param(name, ".pt2", marks=pytest.mark.slow) for name in KINDS),
        # The compiler behind torch's exporter takes up to a minute per network.
        *(pytest.param(name, ".onnx", marks=pytest.mark.compiled) for name in SMALLEST),
    ],
)
def test_every_family(speech, name, ending):
    assert_parity(ModelFile(made(name), {}), ending, [*speech, np.zeros(2 * RATE, np.float32)])


@pytest.mark.slow
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_every_front_end(speech, front_end):
    net = made("ResNet", front_end, model_options=TINY)
    assert_parity(ModelFile(net, {}), ".onnx", [*speech, np.zeros(2 * RATE, np.float32)])


def saved(path, front_end_options, **about):
    """A model file of a small network with an fbank."""
    options = {"model_options": TINY, "num_mels": 80, "window": "povey", **front_end_options}
    return write_model(path, made("ResNet", "fbank", **options), **about)


@pytest.mark.parametrize(
    ("front_end", "options", "message"),
    [
        ({}, "--out x.onnx", "needs style lhotse; this model has style kaldi"),
        ({"style": "lhotse"}, "--out x.pt2", "x.pt2"),
        ({"style": "lhotse"}, "--out x.onnx --int8", "int8"),
        ({"style": "lhotse"}, "--out x.onnx --for sherpa", "--for sherpa: unknown"),
    ],
)
def test_unsupported_by_sherpa(tmp_path, monkeypatch, refuse, front_end, options, message):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "model.pt", front_end)
    assert message in refuse(f"export {path} --for sherpa-onnx {options}")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.slow
@pytest.mark.needs("sherpa_onnx")
@pytest.mark.parametrize(("scale", "normalize"), [(1.0, "mean"), (32768.0, "none")])
def test_sherpa(tmp_path, shared_data, repository, scale, normalize):
    import sherpa_onnx

    how = {"style": "lhotse", "scale": scale, "normalize": normalize}
    path = saved(tmp_path / "model.pt", how, **MEAN)
    out = tmp_path / "phone.onnx"
    run_command(f"export {path} --out {out} --for sherpa-onnx")
    extractor = sherpa_onnx.SpeakerEmbeddingExtractor(
        sherpa_onnx.SpeakerEmbeddingExtractorConfig(model=str(out))
    )
    verifier = speakernet.load(path, "cpu")
    found = []
    for name in sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))[::60]:
        clip = read_audio(name, sample_rate=RATE)
        stream = extractor.create_stream()
        stream.accept_waveform(RATE, clip)
        stream.input_finished()
        theirs = np.array(extractor.compute(stream))
        ours = verifier.embed(clip, sample_rate=RATE)[0] - verifier.mean
        found.append(theirs @ ours / np.linalg.norm(theirs) / np.linalg.norm(ours))
        write_audio(tmp_path / f"{len(found)}.wav", clip)
    assert extractor.dim == 32 and len(found) == 4 and min(found) > 0.99999
    compiler = shutil.which("c++")
    package = Path(sherpa_onnx.__file__).parent
    if compiler is None or not (package / "include").is_dir():
        pytest.skip(
            "no C++ compiler, or a wheel of sherpa-onnx without headers: the program in C++ is not "
            "run"
        )
    flags = [f"-I{package}/include", f"-L{package}/lib", f"-Wl,-rpath,{package}/lib"]
    libraries = ["-lsherpa-onnx-c-api", "-lonnxruntime"]
    source = repository / "examples" / "verify_sherpa.cpp"
    program = tmp_path / "verify"
    subprocess.run([compiler, "-std=c++17", source, *flags, *libraries, "-o", program], check=True)
    clips = [tmp_path / "1.wav", tmp_path / "2.wav"]
    output = subprocess.run(
        [program, out, *clips], check=True, capture_output=True, text=True
    ).stdout
    # The program embeds what it is given; cutting to speech is the caller's task.
    expected = verifier.compare(*verifier.embed(clips))
    assert float(output.split()[1]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("command", "library"), [("export", "onnxruntime"), ("serve", "uvicorn")])
def test_missing_library(model_path, tmp_path, monkeypatch, call, command, library):
    for name in list(sys.modules):
        if name.startswith(("speakernet.inference.", "speakernet.assembly.exchange")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    words = {
        "export": f"{model_path} --out {tmp_path}/x.onnx",
        "serve": f"--model {model_path}",
    }
    status, _, err = call(f"{command} {words[command]}")
    message = f"needs the library {library}, which is not installed: pip install"
    assert status == 1 and message in err
