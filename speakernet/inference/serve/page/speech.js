// Finds speech with silero-vad, as speakernet/data/speech.py does; the numbers are explained there.

export const RATE = 16000;
const FRAME = 512, CONTEXT = 64;
const FRESH_FRAMES = 64;
const BEGIN = 0.85, END = 0.35;
const PADDING_SECONDS = 0.1, LEAST_GAP_SECONDS = 0.3, LEAST_SPEECH_SECONDS = 0.2;

// The probability of speech in each frame of 32 ms, for samples at 16 kHz; `session` runs silero_vad.onnx.
export async function probabilities(ort, session, samples) {
  const mean = samples.reduce((sum, value) => sum + value, 0) / samples.length;
  const count = Math.ceil(samples.length / FRAME);
  const padded = new Float32Array(CONTEXT + count * FRAME);
  padded.set(samples.map(value => value - mean), CONTEXT);
  const sr = new ort.Tensor("int64", BigInt64Array.of(BigInt(RATE)), []);
  // Follows the frames from `first` to before `last`, starting afresh.
  async function follow(first, last) {
    let state = new ort.Tensor("float32", new Float32Array(256), [2, 1, 128]);
    const followed = [];
    for (let at = first; at < last; at++) {
      const frame = padded.slice(at * FRAME, (at + 1) * FRAME + CONTEXT);
      const input = new ort.Tensor("float32", frame, [1, frame.length]);
      const { output, stateN } = await session.run({ input, state, sr });
      state = stateN;
      followed.push(output.data[0]);
    }
    return followed;
  }
  const whole = await follow(0, count);
  const half = FRESH_FRAMES / 2, fresh = new Float64Array(count);
  for (let first = 0; first < count; first += half) {
    const window = await follow(first, Math.min(count, first + FRESH_FRAMES));
    // All but the first frames lie in two windows, whose mean counts.
    window.forEach((score, at) => { fresh[first + at] += first + at < half ? score : score / 2; });
  }
  return whole.map((score, at) => Math.max(score, fresh[at]));
}

// Stretches of speech, [[begin, end], ...] in seconds, from the probability of each frame.
export function stretches(scores, seconds) {
  const joined = [];
  for (let at = 0; at < scores.length; at++) {
    if (scores[at] < END) continue;
    const start = at;
    let isSpoken = false;
    for (; at < scores.length && scores[at] >= END; at++) isSpoken ||= scores[at] >= BEGIN;
    if (!isSpoken) continue;
    const begin = Math.max(0, start * FRAME / RATE - PADDING_SECONDS), end = Math.min(seconds, at * FRAME / RATE + PADDING_SECONDS);
    if (joined.length && begin - joined.at(-1)[1] < LEAST_GAP_SECONDS) joined.at(-1)[1] = end;
    else joined.push([begin, end]);
  }
  return joined.filter(([begin, end]) => end - begin >= LEAST_SPEECH_SECONDS);
}

// The samples between these seconds, one stretch after the other, without their offset (DC).
export function cut(samples, rate, found) {
  const parts = found.map(([begin, end]) => samples.subarray(Math.round(begin * rate), Math.round(end * rate)));
  const joined = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => { joined.set(part, at); return at + part.length; }, 0);
  const mean = joined.reduce((sum, value) => sum + value, 0) / joined.length;
  return joined.map(value => value - mean);
}
