"""The page in headless Chromium, wide and narrow, with a synthetic voice as its microphone."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import speakernet
from speakernet.corpora.synthetic.speech import synthetic_speech
from speakernet.data import speech
from speakernet.data.audio import read_audio_bytes, write_audio
from speakernet.inference.serve.in_browser import page_files

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import serving, wav

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
SECONDS = 60
REQUEST = "Network.requestWillBeSent"
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
    ),
]


class Browser:
    """One browser with one page; `microphone` is a WAV file that it repeats."""

    def __init__(self, profile, microphone):
        self.events = []
        self.numbers = itertools.count(1)
        self.content = b""
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        options = (
            "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --hide-scrollbars "
            "--use-fake-device-for-media-stream --use-fake-ui-for-media-stream "
            f"--use-file-for-fake-audio-capture={microphone} --user-data-dir={profile} "
            "--autoplay-policy=no-user-gesture-required"
        ).split()
        options.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", script, CHROMIUM, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.session = ""
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)

    def send(self, method, **parameters):
        """Send a command and return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        while b"\0" not in self.content:
            assert select.select([self.reader], [], [], SECONDS)[0], "Chromium is silent"
            part = os.read(self.reader, 1 << 20)
            assert part, "Chromium has ended"
            self.content += part
        message, _, self.content = self.content.partition(b"\0")
        return json.loads(message)

    def open(self, address, width):
        """Show a page in a window of that width, and wait until it is ready."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.body?.dataset.ready === 'true'")

    def run(self, script):
        """The value of an expression in the page."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition):
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, (
                f"never: {condition}; the page: {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def complaints(self):
        """Errors and warnings on the page's console."""
        self.run("0")
        complaints = []
        for event in self.events:
            if event.get("method") in COMPLAINTS:
                entry = event["params"]
                level = entry.get("type") or entry.get("entry", {}).get("level", "error")
                if level in ("error", "warning"):
                    complaints.append(str(entry))
        return complaints

    def click(self, selector):
        """Click an element."""
        self.run(f"document.querySelector({selector!r}).click()")

    def text(self, selector):
        """The text of an element; None if there is none."""
        return self.run(f"document.querySelector({selector!r})?.textContent")

    def wait_for_text(self, selector, pattern):
        """Wait until the text of an element matches."""
        self.wait(f"/{pattern}/.test(document.querySelector({selector!r})?.textContent)")

    def requests(self):
        """All requests that the page has sent."""
        sent = [event for event in self.events if event.get("method") == REQUEST]
        return [event["params"]["request"] for event in sent]


@pytest.fixture(scope="module")
def browser(tmp_path_factory, voices):
    microphone = tmp_path_factory.mktemp("microphone") / "voice.wav"
    write_audio(microphone, voices[0][0], 16000)
    with Browser(tmp_path_factory.mktemp("profile"), microphone) as opened:
        yield opened


def check_width(browser, width):
    """Nothing is wider than the window, and every button is large enough for a finger."""
    assert browser.run("document.documentElement.scrollWidth") <= width
    heights = browser.run(
        "[...document.querySelectorAll('button')].map(box => box.getBoundingClientRect().height)"
    )
    assert min(height for height in heights if height) >= 40


def record(browser, clip, seconds):
    """Record into a box of the page for `seconds`."""
    browser.click(f"#{clip} .record")
    browser.wait(f"parseFloat(document.querySelector('#{clip} .length').textContent) > {seconds}")
    browser.click(f"#{clip} .record")
    browser.wait(f"document.querySelector('#{clip}').classList.contains('full')")


def drop(browser, clip, content):
    """Drop a file into a box of the page."""
    content = base64.b64encode(content).decode()
    browser.run(
        f"""(() => {{
          const transfer = new DataTransfer();
          const bytes = Uint8Array.from(atob({content!r}), letter => letter.charCodeAt(0));
          transfer.items.add(new File([bytes], "a file.wav", {{type: "audio/wav"}}));
          const dropped = new DragEvent("drop", {{dataTransfer: transfer, cancelable: true}});
          document.querySelector("#{clip}").dispatchEvent(dropped);
        }})()"""
    )
    browser.wait(f"document.querySelector('#{clip}').classList.contains('full')")


@pytest.mark.parametrize("width", [1280, 390])
def test_page(browser, models, voices, tmp_path, width):
    with serving(models[0], tmp_path / "people.db") as (address, service):
        browser.open(address, width)
        check_width(browser, width)
        assert browser.run("document.querySelector('#compare').disabled")
        assert browser.text("#state") == "calibrated on 276 pairs"
        record(browser, "first", 2.0)
        # The second clip is recorded while the answer is updated.
        browser.click("#second .record")
        browser.wait_for_text("#compare-answer", "After [2-9] s")
        check_width(browser, width)
        browser.click("#second .record")
        browser.wait_for_text("#compare-answer .verdict", "^The same person, .* sure")
        browser.wait("!/After/.test(document.querySelector('#compare-answer').textContent)")
        browser.wait("!document.querySelector('#compare').disabled")
        assert not service.streams
        other = wav(voices[3][0])
        drop(browser, "second", wav(voices[3][0][:9600]))
        browser.click("#compare")
        browser.wait_for_text("#compare-answer", "^Undecided: too little speech")
        drop(browser, "second", other)
        assert browser.run("document.querySelector('#compare-answer').hidden")
        assert "a file.wav" in browser.run("document.querySelector('#second').innerText")
        browser.click("#compare")
        # What was recorded decides whether the odds are for one person, yet below the threshold.
        browser.wait_for_text("#compare-answer .verdict", "^(Different people|Not accepted)")
        name = f"Zoë <b>Müller</b> & {'a very long name ' * 5}.".strip()
        browser.run(f"document.querySelector('#name').value = {name!r}")
        record(browser, "sample", 2.0)
        browser.wait("!document.querySelector('#enrol').disabled")
        browser.click("#enrol")
        browser.wait("document.querySelectorAll('#people li').length === 1")
        assert name in browser.text("#people")
        assert browser.run("document.querySelectorAll('#people b').length") == 0
        record(browser, "unknown", 2.0)
        browser.click("#identify")
        verdict = "#identify-answer .verdict"
        browser.wait(f"document.querySelector({verdict!r})?.textContent === {name!r}")
        drop(browser, "unknown", other)
        browser.click("#identify")
        browser.wait_for_text(verdict, "^Not (an enrolled person$|sure: perhaps )")
        enrolled = "document.querySelector('#enrol-answer .verdict').textContent"
        for answer in (f"A recording of {name} was added", f"Nothing was added for {name}"):
            drop(browser, "sample", wav(voices[0][0]))
            assert browser.run("document.querySelector('#enrol-answer').hidden")
            browser.click("#enrol")
            browser.wait(f"{enrolled}.startsWith({answer!r})")
        check_width(browser, width)
        browser.click("#people button")
        browser.click("#people button")
        browser.wait("document.querySelectorAll('#people li').length === 0")
        assert browser.complaints() == []
        own = (f"{address}/", "blob:", "data:")
        assert all(request["url"].startswith(own) for request in browser.requests())
        assert service.store.people() == []


@pytest.fixture(scope="module")
def runtime():
    """onnxruntime-web, from ONNXRUNTIME_WEB."""
    folder = Path(os.environ.get("ONNXRUNTIME_WEB", ""))
    if not (folder / "ort.wasm.min.mjs").is_file():
        pytest.skip(
            "ONNXRUNTIME_WEB is not the folder `dist` of onnxruntime-web (npm pack onnxruntime-web)"
        )
    return folder


def test_model_in_the_browser(browser, models, runtime, shared_data, monkeypatch):
    # The page has silero-vad alone, so it is compared on real speech.
    monkeypatch.setattr(speech, "default_detector", lambda: speech.SILERO)
    clips = sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))
    real = [clips[row].read_bytes() for row in (0, 180)]
    files = page_files(models[0], runtime, synthetic_speech(4, 16000))
    verifier = speakernet.load(models[0], device="cpu")
    with serving(models[0], files=files, token="t" * 16) as (address, _):
        browser.open(f"{address}/#token={'t' * 16}", 1280)
        assert browser.text("#advice") == ""
        for first, second in ((real[0], real[0]), real):
            drop(browser, "first", first)
            drop(browser, "second", second)
            browser.click("#compare")
            clips = [read_audio_bytes(clip, "a clip") for clip in (first, second)]
            score = verifier.verify(*clips, sample_rate=16000).score
            browser.wait_for_text("#compare-answer", f"score {score:.3f}")
        drop(browser, "first", wav(np.zeros(16000, np.float32)))
        browser.click("#compare")
        browser.wait_for_text("#compare-answer", "a file.wav: silent")
        assert {request["method"] for request in browser.requests()} == {"GET"}
        assert browser.complaints() == []
        answer = httpx.post(f"{address}/verify", headers={"Authorization": f"Bearer {'t' * 16}"})
        assert answer.status_code == 404 and httpx.get(f"{address}/model.onnx").status_code == 401
