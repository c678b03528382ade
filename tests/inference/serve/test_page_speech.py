"""The page finds speech as Python does; needs Node.js, and onnxruntime-web for silero-vad."""

import json
import shutil
import subprocess
from importlib import resources

import numpy as np
import pytest

from speakernet.data.audio import read_audio
from speakernet.data.speech import (
    BEGIN,
    FRAME_SECONDS,
    sample_edges,
    silero_file,
    speech_probabilities,
    stretches,
)
from speakernet.evaluation.calibration import BY_DURATION, AffineCalibration
from speakernet.inference.decision import DecisionRule
from tests.inference.serve.serve_helpers import RATE


@pytest.fixture
def node(tmp_path):
    """Run a script with the page's functions in scope: the value that it returns."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("Node.js is not installed")
    page = resources.files("speakernet.inference.serve") / "page"
    (tmp_path / "speech.mjs").write_bytes((page / "speech.js").read_bytes())

    def run(script: str, given: object) -> object:
        (tmp_path / "given.json").write_text(json.dumps(given))
        (tmp_path / "run.mjs").write_text(
            'import { readFileSync } from "fs";\n'
            'import { cut, probabilities, stretches } from "./speech.mjs";\n'
            'const given = JSON.parse(readFileSync("given.json"));\n'
            f"const found = await (async () => {{ {script} }})();\n"
            "console.log(JSON.stringify(found));\n"
        )
        done = subprocess.run(
            [program, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_stretches(node, random):
    """Random probabilities of many lengths, silence, and a recording that is never sure."""
    cases = [np.zeros(0), np.zeros(40), np.full(40, BEGIN - 0.01), np.full(40, BEGIN)]
    for length in random.integers(1, 300, 60):
        smooth = np.convolve(random.normal(size=length), np.ones(5) / 2, "same")
        cases.append(1 / (1 + np.exp(-3 * smooth)))
    seconds = [max(0.0, (len(scores) - 0.5) * FRAME_SECONDS) for scores in cases]
    given = [[scores.tolist(), end] for scores, end in zip(cases, seconds, strict=True)]
    found = node("return given.map(([scores, end]) => stretches(scores, end));", given)
    num_stretches = 0
    for scores, end, ours in zip(cases, seconds, found, strict=True):
        expected = stretches(scores, end)
        assert np.reshape(ours, (-1, 2)) == pytest.approx(expected, abs=1e-9)
        num_stretches += len(expected)
    assert num_stretches > 60


def test_cut(node):
    given = [[0.0, 0.25], [0.5, 0.75]]
    samples = "Float32Array.from({ length: 16000 }, (_, at) => at)"
    found = node(f"return [...cut({samples}, 16000, given)];", given)
    edges = sample_edges(np.array(given), RATE)
    joined = np.concatenate([np.arange(*edge) for edge in edges])
    # The mean of 0 to 3,999 and 8,000 to 11,999 is 5,999.5.
    assert found == (joined - 5999.5).tolist()


def test_silero(node, runtime, shared_data):
    """The probabilities of real speech with an offset are those of Python."""
    path = sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))[0]
    samples = read_audio(path)
    script = """
        const ort = await import(given.runtime);
        ort.env.wasm.numThreads = 1;
        const graph = new Uint8Array(readFileSync(given.graph)), executionProviders = ["wasm"];
        const session = await ort.InferenceSession.create(graph, { executionProviders });
        return probabilities(ort, session, Float32Array.from(given.samples));
    """
    given = {
        "runtime": str(runtime / "ort.wasm.min.mjs"),
        "graph": str(silero_file("silero_vad.onnx")),
        "samples": (samples + 0.1).tolist(),
    }
    found = node(script, given)
    expected = speech_probabilities((samples - samples.mean()).astype(np.float32))
    assert expected.max() > BEGIN and found == pytest.approx(expected, abs=2e-3)


def test_decisions_for_seconds(node, tmp_path):
    """The page's rule for two durations is Python's."""
    page = resources.files("speakernet.inference.serve") / "page"
    source = (page / "in_browser.js").read_text().replace("./speech.js", "./speech.mjs")
    (tmp_path / "in_browser.mjs").write_text(source)
    calibration = AffineCalibration(
        np.array([6.0, -1.0, 0.3, 2.0, -0.4]), -2.0, BY_DURATION, 0.5, (1.0, 8.0)
    )
    limits = [{"name": "eer", "threshold": 1.0, "false_accept_rate": 0.1}]
    rule = DecisionRule(None, limits, "", quality=(calibration, limits))
    pairs = [[1.5, 3.0], [7.0, 2.0], [0.2, 90.0]]
    script = """
        const { forSeconds } = await import("./in_browser.mjs");
        return given.pairs.map(([first, second]) => forSeconds(given.durations, first, second));
    """
    answers = node(script, {"durations": rule.described_durations(), "pairs": pairs})
    for seconds, answer in zip(pairs, answers, strict=True):
        expected = rule.for_seconds(*seconds)
        assert answer["weight"] == pytest.approx(expected.calibration.weights[0])
        assert answer["offset"] == pytest.approx(expected.calibration.offset)
        threshold = (1.0 - answer["offset"]) / answer["weight"]
        assert threshold == pytest.approx(expected.decide(0.0).threshold)


# What a browser offers and Node.js does not: decoding, and files of the server.
