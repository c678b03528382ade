// Runs on the browser's audio thread and passes every block of microphone samples to the page.
class Recorder extends AudioWorkletProcessor {
  process(inputs) {
    const channel = inputs[0][0];
    // Copied, since the browser reuses the block.
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
}
registerProcessor("recorder", Recorder);
