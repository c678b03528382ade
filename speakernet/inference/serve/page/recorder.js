// Runs on the browser's audio thread: hands every block of the microphone's samples to the page.
class Recorder extends AudioWorkletProcessor {
  process(inputs) {
    const channel = inputs[0][0];
    // A copy: the browser uses the block again.
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
}
registerProcessor("recorder", Recorder);
