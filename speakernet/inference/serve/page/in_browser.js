// Runs the model in the browser: clips are decoded, cut to their speech, embedded and compared here, and are never sent.

import { RATE, cut, probabilities, stretches } from "./speech.js";

export const MOST_SECONDS = 60;
const LEAST_SPEECH_SECONDS = 1; // for a decision, as in Python

// `health` is the answer of /health; `headers` authorise the request for the graph.
export async function open(health, headers) {
  const ort = await import("./ort.wasm.min.mjs");
  // More threads need shared memory, which only cross-origin isolated pages have.
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./", location.href).href;
  const { decision, calibration, durations, speech } = health.in_browser;

  async function load(name) {
    const answer = await fetch(name, { headers });
    if (!answer.ok) throw new Error(`${name} could not be loaded: the server answered ${answer.status}.`);
    return ort.InferenceSession.create(new Uint8Array(await answer.arrayBuffer()), { executionProviders: ["wasm"] });
  }

  const session = await load("model.onnx"), detector = await load("speech.onnx");

  // The samples that are embedded for a decision, and the seconds of speech in a clip ({blob, name}).
  async function hear(clip) {
    const samples = await decode(clip, health.sample_rate);
    const seconds = samples.length / health.sample_rate;
    const searched = health.sample_rate === RATE ? samples : await decode(clip, RATE);
    const found = stretches(await probabilities(ort, detector, searched), seconds);
    if (!found.length) throw new Error(`${clip.name}: no speech was found in ${seconds.toFixed(1)} s; record somebody who speaks.`);
    const speechSeconds = found.reduce((sum, [begin, end]) => sum + end - begin, 0);
    return { samples: speech === "detected" ? cut(samples, health.sample_rate, found) : samples, speechSeconds };
  }

  // The graph's outputs for a clip: `embedding`, and `direction`, whose dot products are scores.
  async function embed(clip) {
    const { samples, speechSeconds } = await hear(clip);
    if (samples.length < health.min_samples) throw new Error(`${clip.name}: ${speechSeconds.toFixed(2)} s of speech is too short for this model.`);
    const input = new ort.Tensor("float32", samples, [1, samples.length]);
    const { embedding, direction } = await session.run({ waveforms: input });
    return { embedding: [...embedding.data], direction: [...direction.data], speechSeconds };
  }

  // The same answer as the server's /verify, without `clips`.
  async function verify(first, second) {
    const one = await embed(first), other = await embed(second);
    const score = one.direction.reduce((sum, value, at) => sum + value * other.direction[at], 0);
    const heard = Math.min(one.speechSeconds, other.speechSeconds);
    const isMade = heard >= LEAST_SPEECH_SECONDS;
    let ratio = null, { threshold } = decision, rule = calibration;
    if (durations) {
      rule = { ...calibration, ...forSeconds(durations, one.speechSeconds, other.speechSeconds) };
      threshold = (durations.threshold - rule.offset) / rule.weight;
    }
    if (rule && isMade) ratio = Math.max(rule.least, Math.min(rule.most, rule.offset + rule.weight * score));
    return {
      ...decision, score, threshold, log_likelihood_ratio: ratio, speech_seconds: heard,
      same_speaker: threshold === null ? null : isMade && score >= threshold,
      is_at_bound: ratio !== null && (ratio === calibration.least || ratio === calibration.most),
    };
  }

  return { embed, verify };
}

// The weight of the score and the offset for two clips with this much speech, as `quality_columns` in Python.
export function forSeconds({ inputs, weights, offset, seconds: [least, most] }, first, second) {
  const [low, high] = [first, second].map(value => Math.min(most, Math.max(least, value))).sort((a, b) => a - b);
  const forms = { min: Math.log(low), max: Math.log(high), difference: high - low, ratio: low / high };
  let weight = 0;
  inputs.forEach((name, at) => {
    const term = weights[at] * (forms[name.split(" ").at(-1)] ?? 1);
    if (name.startsWith("score")) weight += term;
    else offset += term;
  });
  return { weight, offset };
}

// The samples of a clip at the model's rate, mixed down to mono.
async function decode(clip, rate) {
  let audio;
  try {
    // A context at this rate resamples what it decodes.
    audio = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await clip.blob.arrayBuffer());
  } catch {
    throw new Error(`${clip.name}: this browser cannot decode the file; choose a WAV, FLAC or MP3 file.`);
  }
  const samples = new Float32Array(audio.length);
  for (let channel = 0; channel < audio.numberOfChannels; channel++) {
    audio.getChannelData(channel).forEach((value, at) => { samples[at] += value / audio.numberOfChannels; });
  }
  if (audio.duration > MOST_SECONDS) throw new Error(`${clip.name}: ${audio.duration.toFixed(0)} s; expected at most ${MOST_SECONDS} s.`);
  if (samples.every(value => Math.abs(value) < 1e-4)) throw new Error(`${clip.name}: silent; is the microphone on?`);
  return samples;
}
