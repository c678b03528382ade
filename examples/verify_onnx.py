"""Are these two recordings of one person? Needs onnxruntime, numpy and a file of `speakernet
export`.

python verify_onnx.py model.onnx a.wav b.wav [threshold]   (16-bit WAV at the model's rate)
"""

import contextlib
import json
import math
import sys
import wave

import numpy as np
import onnxruntime


def read_wav(path: str, sample_rate: int) -> np.ndarray:
    """(1, samples) float32 in -1..1, channels mixed down."""
    with contextlib.suppress(OSError, EOFError, ValueError, wave.Error), wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        if (file.getsampwidth(), file.getframerate()) == (2, sample_rate):
            return (
                samples.reshape(-1, file.getnchannels()).mean(axis=1, dtype=np.float32)[None]
                / 32768
            )
    sys.exit(f"{path}: expected a 16-bit WAV file at {sample_rate} Hz")


def plda_score(
    between: np.ndarray, weights: np.ndarray, first: np.ndarray, second: np.ndarray
) -> float:
    """Log-likelihood ratio of two directions (dim,) under the model's PLDA."""
    x = first * math.sqrt(len(first) / (weights @ first**2))
    y = second * math.sqrt(len(second) / (weights @ second**2))
    quadratic = between**2 / (2 * (1 + between) * (1 + 2 * between))
    terms = (
        between / (1 + 2 * between) * x * y
        - quadratic * (x**2 + y**2)
        + np.log1p(between)
        - np.log1p(2 * between) / 2
    )
    return float(terms.sum())


def main(model: str, first_path: str, second_path: str, threshold: str = "") -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    facts = json.loads(session.get_modelmeta().custom_metadata_map["speakernet"])
    # The mean of `direction` is subtracted and its length is 1, so a dot product is the cosine.
    directions = []
    for path in (first_path, second_path):
        clip = read_wav(path, facts["sample_rate"])
        if "num_samples" in facts:  # of `export --seconds`: repeat short clips, cut long ones
            clip = np.resize(clip, (1, facts["num_samples"]))
        directions.append(session.run(["direction"], {"waveforms": clip})[0][0])
    first, second = directions
    if "plda" in facts:
        between, weights = (np.array(facts["plda"][name]) for name in ("between", "weights"))
        score = plda_score(between, weights, first, second)
    else:
        score = float(first @ second)
    print(f"score {score:.4f}")
    if facts["calibration"]:
        ratio = facts["calibration"]["weight"] * score + facts["calibration"]["offset"]
        share = 1 / (1 + math.exp(-ratio))
        print(f"log-likelihood ratio {ratio:.2f}: {share:.1%} if both answers were equally likely")
    limits = {"given": float(threshold)} if threshold else facts["thresholds"]
    for name, limit in limits.items():
        print(f"{'same' if score >= limit else 'different'} at the threshold {limit:.4f} ({name})")


if __name__ == "__main__":
    main(*sys.argv[1:])
