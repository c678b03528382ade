// Runs the model in the browser: clips are decoded, embedded and compared here, and are never sent.

export const MOST_SECONDS = 60;

// `health` is the answer of /health; `headers` authorise the request for the graph.
export async function open(health, headers) {
  const ort = await import("./ort.wasm.min.mjs");
  // More threads need shared memory, which only cross-origin isolated pages have.
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./", location.href).href;
  const answer = await fetch("model.onnx", { headers });
  if (!answer.ok) throw new Error(`The model could not be loaded: the server answered ${answer.status}.`);
  const graph = new Uint8Array(await answer.arrayBuffer());
  const session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"] });

  // The graph's outputs for a clip ({blob, name}): `embedding`, and `direction`, whose dot products are scores.
  async function embed(clip) {
    const samples = await decode(clip, health.sample_rate, health.min_samples);
    const input = new ort.Tensor("float32", samples, [1, samples.length]);
    const { embedding, direction } = await session.run({ waveforms: input });
    return { embedding: [...embedding.data], direction: [...direction.data] };
  }

  // The same answer as the server's /verify, without `clips`.
  async function verify(first, second) {
    const one = (await embed(first)).direction, other = (await embed(second)).direction;
    const score = one.reduce((sum, value, at) => sum + value * other[at], 0);
    // The server's answers at scores 0 and 1 give the threshold and the calibration, which is linear.
    const [zero, unit] = health.in_browser;
    const slope = unit.log_likelihood_ratio - zero.log_likelihood_ratio;
    const ratio = zero.log_likelihood_ratio === null ? null : zero.log_likelihood_ratio + slope * score;
    return { ...zero, score, log_likelihood_ratio: ratio, same_speaker: zero.threshold === null ? null : score >= zero.threshold };
  }

  return { embed, verify };
}

// The samples of a clip at the model's rate, mixed down to mono.
async function decode(clip, rate, fewest) {
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
  if (samples.length < fewest) throw new Error(`${clip.name}: ${audio.duration.toFixed(2)} s is too short for this model.`);
  if (audio.duration > MOST_SECONDS) throw new Error(`${clip.name}: ${audio.duration.toFixed(0)} s; expected at most ${MOST_SECONDS} s.`);
  if (samples.every(value => Math.abs(value) < 1e-4)) throw new Error(`${clip.name}: silent; is the microphone on?`);
  return samples;
}
