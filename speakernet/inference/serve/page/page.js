// The page of `speakernet serve`: records or accepts clips, calls the API and shows the answers.

const MOST_SECONDS = 60;
const LEAST_SPEECH_SECONDS = 1; // as in the server's warnings
const LEAST_SURE = 0.9;
const AUDIO = /\.(wav|flac|ogg|oga|opus|mp3|m4a|aac|webm|wma|amr|caf|aiff?)$/i;
// Servers on other machines need a token. It follows # in the address, a part that browsers never send.
const token = decodeURIComponent(location.hash.replace(/^#token=/, ""));
const authorization = token ? { Authorization: `Bearer ${token}` } : {};
const find = id => document.getElementById(id);
let inBrowser = null; // the model, if it runs in the browser

async function ask(method, path, body, headers = {}) {
  headers = { ...headers, ...authorization };
  let response;
  try {
    response = await fetch(path, { method, body, headers });
  } catch {
    throw new Error("The server is not responding. Is it still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error?.message ?? `The server answered ${response.status}.`);
  return answer;
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A 16-bit mono WAV file from a list of Float32Arrays.
function wav(blocks, rate) {
  const count = blocks.reduce((sum, block) => sum + block.length, 0);
  const view = new DataView(new ArrayBuffer(44 + 2 * count));
  const word = (at, text) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  word(0, "RIFF"); view.setUint32(4, 36 + 2 * count, true); word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true);
  view.setUint16(34, 16, true); word(36, "data"); view.setUint32(40, 2 * count, true);
  new Int16Array(view.buffer, 44).set(int16(blocks, count));
  return new Blob([view], { type: "audio/wav" });
}

function int16(blocks, count = blocks.reduce((sum, block) => sum + block.length, 0)) {
  const samples = new Int16Array(count);
  let at = 0;
  for (const block of blocks) {
    for (let i = 0; i < block.length; i++) samples[at + i] = Math.max(-1, Math.min(1, block[i])) * 32767;
    at += block.length;
  }
  return samples;
}

class Microphone {
  // Samples go to `hear(block, rate)`; `ended` is called if the microphone is disconnected.
  async open(hear, ended) {
    if (!navigator.mediaDevices) throw new Error("Browsers record only from 127.0.0.1 or over HTTPS.");
    // Unprocessed, since processing for calls makes voices more alike.
    const wanted = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio: wanted });
    } catch (error) {
      throw new Error(error.name === "NotAllowedError"
        ? "The browser blocks the microphone; allow it in the address bar." : `No microphone: ${error.message}`);
    }
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule("recorder.js");
    const node = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    node.port.onmessage = message => hear(message.data, this.context.sampleRate);
    this.context.createMediaStreamSource(this.stream).connect(node);
    this.stream.getTracks()[0].onended = ended;
  }

  async close() {
    this.stream?.getTracks().forEach(track => track.stop());
    if (this.context && this.context.state !== "closed") await this.context.close();
  }
}

// A box that holds one clip: recorded, chosen or dropped.
class Clip {
  constructor(id, changed) {
    this.box = find(id);
    this.changed = changed;
    this.blob = null;
    this.live = null; // receives blocks during recording
    this.box.append(find("clip-template").content.cloneNode(true));
    const part = name => this.box.querySelector(name);
    [this.length, this.level, this.record, this.clearButton, this.player, this.hint, this.problem, this.input] =
      [".length", ".level i", ".record", ".clear", "audio", ".hint", ".problem", "input"].map(part);
    part("h3").textContent = this.box.ariaLabel = this.box.dataset.title;
    this.box.role = "group";
    this.record.onclick = () => (this.microphone ? this.stop() : this.start());
    this.clearButton.onclick = () => this.clear();
    this.input.onchange = () => { if (this.input.files[0]) this.take(this.input.files[0]); this.input.value = ""; };
    this.box.ondragover = event => { event.preventDefault(); this.box.classList.add("over"); };
    this.box.ondragleave = () => this.box.classList.remove("over");
    this.box.ondrop = event => {
      event.preventDefault();
      this.box.classList.remove("over");
      if (event.dataTransfer.files[0] && !this.microphone) this.take(event.dataTransfer.files[0]);
    };
    this.player.ondurationchange = () => {
      if (Number.isFinite(this.player.duration)) this.length.textContent = `${this.player.duration.toFixed(1)} s`;
    };
  }

  say(problem, isMild = false) {
    this.problem.textContent = problem;
    this.problem.classList.toggle("mild", isMild);
    this.problem.hidden = !problem;
  }

  async start() {
    this.clear();
    this.blocks = [];
    this.count = 0;
    const microphone = new Microphone();
    this.microphone = microphone;
    this.show();
    try {
      await microphone.open((block, rate) => this.hear(block, rate), () => this.stop());
      // Stopped while the browser was asking for permission.
      if (this.microphone !== microphone) await microphone.close();
    } catch (error) {
      this.microphone = null;
      this.show();
      this.say(error.message);
    }
  }

  hear(block, rate) {
    if (!this.microphone) return;
    this.rate = rate;
    this.blocks.push(block);
    this.count += block.length;
    this.live?.hear(block, rate);
    const loudest = block.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    this.level.style.transform = `scaleX(${Math.min(1, Math.sqrt(loudest)).toFixed(3)})`;
    this.length.textContent = `${(this.count / rate).toFixed(1)} s`;
    if (this.count > MOST_SECONDS * rate) this.stop();
  }

  async stop() {
    const microphone = this.microphone;
    this.microphone = null;
    this.level.style.transform = "scaleX(0)";
    await microphone.close();
    if (this.count) this.take(wav(this.blocks, this.rate), "recording.wav");
    else { this.show(); this.say("The microphone recorded nothing."); }
  }

  take(blob, name = blob.name) {
    this.clear();
    if (!blob.type.startsWith("audio/") && !AUDIO.test(name)) {
      this.say(`${name} is not audio; choose a WAV, FLAC, Ogg, MP3 or M4A file.`);
      return;
    }
    this.blob = blob;
    this.name = name;
    this.hint.textContent = name;
    this.player.src = this.address = URL.createObjectURL(blob);
    this.show();
    this.changed();
  }

  clear() {
    if (this.address) URL.revokeObjectURL(this.address);
    this.blob = this.address = null;
    this.player.removeAttribute("src");
    this.length.textContent = "";
    this.say("");
    this.show();
    this.changed();
  }

  show() {
    this.box.classList.toggle("recording", Boolean(this.microphone));
    this.box.classList.toggle("full", Boolean(this.blob));
    this.record.querySelector(".word").textContent = this.microphone ? "Stop" : "Record";
    this.player.hidden = this.clearButton.hidden = !this.blob;
    if (!this.blob) this.hint.textContent = "or drop a file here";
    this.hint.hidden = Boolean(this.microphone);
  }

  warn(found) {
    this.say(found?.warnings?.length ? sentence(found.warnings.join("; ")) : "", true);
  }
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function recordings(count) {
  return `${count} recording${count === 1 ? "" : "s"}`;
}

function rate(share) {
  return `${Number((100 * share).toPrecision(2))}\u00a0%`;
}

function isShort(found) {
  const heard = [found, ...(found.clips ?? [])].map(one => one.speech_seconds ?? LEAST_SPEECH_SECONDS);
  return Math.min(...heard) < LEAST_SPEECH_SECONDS;
}

// The probability of the same person if both answers were equally likely before.
function certainty(ratio) {
  return 1 / (1 + Math.exp(-ratio));
}

function percent(share) {
  const shown = 100 * Math.max(share, 1 - share);
  return shown > 99.9 ? "more than 99.9\u00a0%" : `${shown.toFixed(shown > 99 ? 1 : 0)}\u00a0%`;
}

// A score and its threshold with three decimals, or with as many as show which is larger.
function apart(score, threshold) {
  let digits = 3;
  while (threshold !== null && score !== threshold && digits < 9 && score.toFixed(digits) === threshold.toFixed(digits)) digits++;
  return [score.toFixed(digits), threshold?.toFixed(digits)];
}

function times(ratio) {
  const likelier = Math.exp(Math.min(Math.abs(ratio), Math.log(1e6)));
  return Math.abs(ratio) > Math.log(1e6) ? "more than a million times" : `${Number(likelier.toPrecision(2)).toLocaleString("en")} times`;
}

function scale(ratio, left = "different", right = "same") {
  const box = element("div", "", "scale");
  box.ariaHidden = "true"; // the text beside it says the same
  const bar = element("div", "", "bar");
  const mark = element("div", "", "mark");
  // Odds of ten thousand or more are at the ends.
  mark.style.left = `${50 + 50 * Math.max(-1, Math.min(1, ratio / Math.log(1e4)))}%`;
  const ends = element("div", "", "ends");
  ends.append(element("span", left), element("span", right));
  bar.append(mark);
  box.append(bar, ends);
  return box;
}

function show(box, kind, verdict, ...rest) {
  box.className = `answer ${kind}`;
  box.replaceChildren(element("p", verdict, "verdict"), ...rest.map(one => (typeof one === "string" ? element("p", one, "quiet") : one)));
  box.hidden = false;
}

function showDecision(box, found, prefix = "") {
  const [score, threshold] = apart(found.score, found.threshold);
  if (found.same_speaker === null) {
    show(box, "unsure", "No decision: not calibrated", sentence(`${prefix}score ${score}; a higher score means more alike`));
    return;
  }
  if (isShort(found)) {
    show(box, "unsure", "Undecided: too little speech", sentence(`${prefix}less than a second of speech was detected; record a few seconds`));
    return;
  }
  const words = found.same_speaker ? "The same person" : "Different people";
  const kind = found.same_speaker ? "same" : "other";
  const ratio = found.log_likelihood_ratio;
  const limit = `${found.same_speaker ? "It reaches" : "It is below"} the threshold ${threshold}` +
    (found.false_accept_rate === null ? "." : `, which ${rate(found.false_accept_rate)} of pairs of different people reach.`);
  if (ratio === null) {
    show(box, kind, words, sentence(`${prefix}the score is ${score}`), limit);
    return;
  }
  const sides = ratio >= 0 ? "one person as from two" : "two people as from one";
  // The threshold and the odds may disagree.
  const agrees = ratio >= 0 === found.same_speaker, share = certainty(ratio);
  const why = agrees ? "The percentage assumes that both answers were equally likely beforehand."
    : found.same_speaker ? "Not sure, because the odds and the threshold disagree."
      : "The voices are similar, but not enough for this threshold.";
  show(box, agrees && Math.max(share, 1 - share) >= LEAST_SURE ? kind : "unsure",
    agrees ? `${words}, ${percent(share)} sure` : found.same_speaker ? `${words}, but not sure` : "Not accepted: similar voices", scale(ratio),
    `${sentence(`${prefix}the score ${score} is ${found.is_at_bound ? "more than " : ""}${times(ratio)} as likely from ${sides}`)} ${limit}`, why);
}

function showPerson(box, found) {
  const [best, ...others] = found.candidates, [highest, threshold] = best ? apart(best.score, found.threshold) : [];
  const scores = best && [`${best.name} ${highest}`, ...others.map(one => `${one.name} ${one.score.toFixed(3)}`)].join(", ");
  if (!best || found.threshold === null) {
    if (best) show(box, "unsure", "No decision: not calibrated", `Highest scores: ${scores}.`);
    else show(box, "unsure", "Nobody is enrolled yet", "Enrol people below, then ask again.");
    return;
  }
  const ratio = best.log_likelihood_ratio, isNear = ratio !== null && ratio >= 0;
  const limit = `A person is named if the score is at least ${threshold}` +
    (found.stranger_rate === null ? "." : `; at most ${rate(found.stranger_rate)} of strangers reach it.`);
  const sides = isNear ? `${best.name} as from somebody else` : `somebody else as from ${best.name}`;
  const rest = [`Highest scores: ${scores}. ${limit}`];
  if (ratio !== null) rest.unshift(scale(ratio, "somebody else", best.name), `The highest score is ${times(ratio)} as likely from ${sides}.`);
  if (isShort(found)) {
    show(box, "unsure", "No name: too little speech", ...rest, "The clip has less than a second of speech; record a few seconds.");
  } else if (found.name === null && isNear) {
    show(box, "unsure", `Not sure: perhaps ${best.name}`, ...rest, "The voice fits, but not well enough to rule out a stranger. A longer clip may help.");
  } else {
    show(box, found.name === null ? "other" : "same", found.name ?? "Not an enrolled person", ...rest);
  }
}

// Sends a recording while it is being made, and shows the server's answer so far.
class Live {
  constructor(reference, box) {
    this.reference = reference;
    this.box = box;
    this.waiting = [];
    this.count = 0;
    this.sending = null;
  }

  hear(block, rate) {
    this.waiting.push(block);
    this.count += block.length;
    if (this.count >= rate / 2 && !this.sending && !this.failed && !this.closed) this.sending = this.send(rate).finally(() => { this.sending = null; });
  }

  async send(rate) {
    try {
      if (!this.id) {
        const form = new FormData();
        form.append("reference", this.reference.blob, this.reference.name);
        form.append("sample_rate", rate);
        this.id = (await ask("POST", "streams", form)).id;
      }
      const samples = int16(this.waiting);
      this.waiting = [];
      this.count = 0;
      const found = await ask("POST", `streams/${this.id}`, samples, { "Content-Type": "application/octet-stream" });
      if (found.state && !this.closed) showDecision(this.box, found.state, `After ${found.state.seconds.toFixed(0)} s: `);
    } catch (error) {
      this.failed = true;
      if (!this.closed) show(this.box, "unsure", "No live answer", error.message);
    }
  }

  async close() {
    this.closed = true;
    await this.sending;
    if (this.id) await ask("DELETE", `streams/${this.id}`).catch(() => {});
  }
}

// A button that starts some work on clips, which cannot be changed meanwhile, and shows its errors in `box`.
function action(button, box, clips, failed, work, isReady = () => true) {
  const update = () => { button.disabled = button.dataset.busy === "true" || !clips.every(clip => clip.blob) || !isReady(); };
  const run = async () => {
    const focused = document.activeElement, word = button.textContent;
    const hold = isBusy => clips.forEach(clip => { clip.box.inert = isBusy; });
    button.dataset.busy = "true";
    update();
    hold(true);
    button.textContent = "Working …";
    try {
      await work();
    } catch (error) {
      show(box, "unsure", failed, error.message);
    } finally {
      button.textContent = word;
      button.dataset.busy = "false";
      update();
      hold(false);
      // Disabled elements lose the focus.
      if (document.activeElement === document.body) (focused.disabled ? clips[0].record : focused).focus();
    }
  };
  return { update, run };
}

function form(fields) {
  const made = new FormData();
  for (const [name, value] of fields) value instanceof Clip ? made.append(name, value.blob, value.name) : made.append(name, value);
  return made;
}

let live = null;
const compareBox = find("compare-answer"), identifyBox = find("identify-answer"), enrolBox = find("enrol-answer");
// An answer belongs to its clips: a new clip clears it.
const clearing = (box, update) => () => { box.hidden = true; update(); };
const first = new Clip("first", clearing(compareBox, () => { live?.close(); compareAction?.update(); }));
const second = new Clip("second", clearing(compareBox, () => compareAction?.update()));
const unknown = new Clip("unknown", clearing(identifyBox, () => identifyAction?.update()));
const sample = new Clip("sample", clearing(enrolBox, () => enrolAction?.update()));
// A file dropped beside a box would replace the page.
document.ondragover = document.ondrop = event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); };

var compareAction = action(find("compare"), compareBox, [first, second], "No answer", async () => {
  const found = inBrowser
    ? await inBrowser.verify(first, second)
    : await ask("POST", "verify", form([["first", first], ["second", second]]));
  showDecision(compareBox, found);
  [first, second].forEach((clip, index) => clip.warn(found.clips?.[index]));
});
find("compare").onclick = compareAction.run;

const beginRecording = second.start.bind(second), endRecording = second.stop.bind(second);
second.start = async () => {
  compareBox.hidden = true;
  if (first.blob && !inBrowser) second.live = live = new Live(first, compareBox);
  await beginRecording();
};
second.stop = async () => {
  second.live = null;
  const closing = live?.close();
  live = null;
  await endRecording();
  await closing;
  if (first.blob && second.blob) await compareAction.run();
};

var identifyAction = action(find("identify"), identifyBox, [unknown], "No answer", async () => {
  const found = await ask("POST", "identify", form([["audio", unknown]]));
  showPerson(identifyBox, found);
  unknown.warn(found.clips[0]);
});
find("identify").onclick = identifyAction.run;

var enrolAction = action(find("enrol"), enrolBox, [sample], "Not enrolled", async () => {
  const found = await ask("POST", "people", form([["name", find("name").value], ["audio", sample]]));
  sample.clear();
  await listPeople();
  const done = !found.added ? `Nothing was added for ${found.name}`
    : found.recordings > found.added ? `A recording of ${found.name} was added` : `${found.name} is enrolled`;
  const next = !found.added ? [] : found.warnings.length
    ? [`It was added anyway. If that is wrong, remove ${found.name} and enrol again.`]
    : [`${recordings(found.recordings)} so far. A recording from a different day makes recognition more reliable.`];
  const isDoubtful = found.warnings.length > 0;
  show(enrolBox, isDoubtful ? "unsure" : "same", isDoubtful && found.added ? `${done}, with a warning` : done, ...found.warnings.map(one => `${one}.`), ...next);
}, () => find("name").value.trim() !== "");
find("name").oninput = clearing(enrolBox, enrolAction.update);
find("enrol-form").onsubmit = event => {
  event.preventDefault();
  if (!find("enrol").disabled) enrolAction.run();
};

async function listPeople() {
  const { people } = await ask("GET", "people");
  find("nobody").hidden = people.length > 0;
  identifyBox.hidden = true; // an answer belongs to its people
  find("people").replaceChildren(...people.map(person => {
    const row = element("li");
    const who = element("span", person.name);
    who.append(element("small", recordings(person.recordings)));
    const remove = element("button");
    const label = word => {
      remove.textContent = word;
      remove.ariaLabel = `${word} ${person.name}`;
    };
    label("Remove");
    remove.type = "button";
    remove.onblur = () => label("Remove");
    remove.onclick = async () => {
      // Needs a second click, since it cannot be undone.
      if (remove.textContent === "Remove") {
        label("Really remove?");
        return;
      }
      try {
        await ask("DELETE", `people/${encodeURIComponent(person.name)}`);
        await listPeople();
        enrolBox.hidden = true;
        find("people-title").focus();
      } catch (error) {
        show(enrolBox, "unsure", "Not removed", error.message);
      }
    };
    row.append(who, remove);
    return row;
  }));
}

async function begin() {
  try {
    const health = await ask("GET", "health");
    find("model").textContent = `${health.model}, ${health.sample_rate} Hz`;
    const fitted = health.calibration_trials ? ` on ${health.calibration_trials.toLocaleString("en")} pairs` : "";
    find("state").textContent = health.is_calibrated ? `calibrated${fitted}` : "not calibrated";
    find("state").hidden = false;
    find("advice").textContent = health.advice ?? "";
    find("advice").hidden = !health.advice;
    find("identify-card").hidden = find("people-card").hidden = !health.keeps_people;
    if (health.keeps_people) await listPeople();
    if (health.in_browser) {
      find("how").textContent = "Record or drop two clips of a few seconds each.";
      find("kept").textContent = "The model runs in this browser. No audio and no voice data leave it.";
      inBrowser = await (await import("./in_browser.js")).open(health, authorization);
    }
  } catch (error) {
    find("advice").textContent = error.message;
    find("advice").hidden = false;
  }
  document.body.dataset.ready = "true";
}

begin();
