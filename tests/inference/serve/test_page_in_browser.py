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
from speakernet.assembly.in_browser import page_files
from speakernet.data import speech
from speakernet.data.audio import read_audio_bytes, write_audio

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import serving, wav

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    "",
)
SECONDS = 60
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
    ),
]


class Browser:
    """One browser with one page; `microphone` is a WAV file that it repeats."""

    def __init__(self, profile: Path, microphone: Path) -> None:
        self.events: list[dict] = []
        self.numbers = itertools.count(1)
        self.content = b""
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--hide-scrollbars",
        ]
        options += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        options += [f"--use-file-for-fake-audio-capture={microphone}", f"--user-data-dir={profile}"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        options += ["--autoplay-policy=no-user-gesture-required"]
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
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)

    def send(self, method: str, **parameters: object) -> dict:
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

    def _next(self) -> dict:
        while b"\0" not in self.content:
            assert select.select([self.reader], [], [], SECONDS)[0], "Chromium is silent"
            part = os.read(self.reader, 1 << 20)
            assert part, "Chromium has ended"
            self.content += part
        message, _, self.content = self.content.partition(b"\0")
        return json.loads(message)

    def open(self, address: str, width: int) -> None:
        """Show a page in a window of that width, and wait until it is ready."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.body?.dataset.ready === 'true'")

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, (
                f"never: {condition}; the page: {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """Errors and warnings on the page's console."""
        self.run("0")
        bad = [event["params"] for event in self.events if event.get("method") in COMPLAINTS]
        levels = [one.get("type") or one.get("entry", {}).get("level", "error") for one in bad]
        return [
            str(one)
            for one, level in zip(bad, levels, strict=True)
            if level in ("error", "warning")
        ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory, voices):
    microphone = tmp_path_factory.mktemp("microphone") / "voice.wav"
    write_audio(microphone, voices[0][0], 16000)
    with Browser(tmp_path_factory.mktemp("profile"), microphone) as one:
        yield one


def check_width(browser, width):
    """Nothing is wider than the window, and every button is large enough for a finger."""
    assert browser.run("document.documentElement.scrollWidth") <= width
    heights = browser.run(
        "[...document.querySelectorAll('button')].map(one => one.getBoundingClientRect().height)"
    )
    assert min(height for height in heights if height) >= 40


def record(browser, clip, seconds):
    """Record into a box of the page for `seconds`."""
    browser.run(f"document.querySelector('#{clip} .record').click()")
    browser.wait(f"parseFloat(document.querySelector('#{clip} .length').textContent) > {seconds}")
    browser.run(f"document.querySelector('#{clip} .record').click()")
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
        assert (
            browser.run("document.querySelector('#state').textContent") == "calibrated on 276 pairs"
        )
        record(browser, "first", 2.0)
        # The second clip is recorded while the answer is updated.
        browser.run("document.querySelector('#second .record').click()")
        browser.wait("/After [2-9] s/.test(document.querySelector('#compare-answer').textContent)")
        check_width(browser, width)
        browser.run("document.querySelector('#second .record').click()")
        verdict = "document.querySelector('#compare-answer .verdict')?.textContent"
        browser.wait(f"/^The same person, .* sure/.test({verdict})")
        browser.wait("!/After/.test(document.querySelector('#compare-answer').textContent)")
        browser.wait("!document.querySelector('#compare').disabled")
        assert not service.streams
        other = wav(voices[3][0])
        drop(browser, "second", wav(voices[3][0][:9600]))
        browser.run("document.querySelector('#compare').click()")
        browser.wait(
            "/^Undecided: too little "
            "speech/.test(document.querySelector('#compare-answer').textContent)"
        )
        drop(browser, "second", other)
        assert browser.run("document.querySelector('#compare-answer').hidden")
        assert "a file.wav" in browser.run("document.querySelector('#second').innerText")
        browser.run("document.querySelector('#compare').click()")
        browser.wait(f"/^Different people/.test({verdict})")
        name = (
            "Zoë <b>Müller</b> & the very long name that goes on and on until it no longer "
            "fits on a line"
        )
        browser.run(f"document.querySelector('#name').value = {name!r}")
        record(browser, "sample", 2.0)
        browser.wait("!document.querySelector('#enrol').disabled")
        browser.run("document.querySelector('#enrol').click()")
        browser.wait("document.querySelectorAll('#people li').length === 1")
        assert name in browser.run("document.querySelector('#people').textContent")
        assert browser.run("document.querySelectorAll('#people b').length") == 0
        record(browser, "unknown", 2.0)
        browser.run("document.querySelector('#identify').click()")
        browser.wait(
            f"document.querySelector('#identify-answer .verdict')?.textContent === {name!r}"
        )
        drop(browser, "unknown", other)
        browser.run("document.querySelector('#identify').click()")
        stranger = "/^Not (an enrolled person$|sure: perhaps )/"
        browser.wait(
            f"{stranger}.test(document.querySelector('#identify-answer .verdict')?.textContent)"
        )
        enrolled = "document.querySelector('#enrol-answer .verdict').textContent"
        for verdict_of_enrolment in (
            f"A recording of {name} was added",
            f"Nothing was added for {name}",
        ):
            drop(browser, "sample", wav(voices[0][0]))
            assert browser.run("document.querySelector('#enrol-answer').hidden")
            browser.run("document.querySelector('#enrol').click()")
            browser.wait(f"{enrolled}.startsWith({verdict_of_enrolment!r})")
        check_width(browser, width)
        browser.run("document.querySelector('#people button').click()")
        browser.run("document.querySelector('#people button').click()")
        browser.wait("document.querySelectorAll('#people li').length === 0")
        assert browser.complaints() == []
        asked = [
            one["params"]
            for one in browser.events
            if one.get("method") == "Network.requestWillBeSent"
        ]
        assert all(
            one["request"]["url"].startswith((f"{address}/", "blob:", "data:")) for one in asked
        )
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
    real = [
        path.read_bytes()
        for path in sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))[::60]
    ]
    files = page_files(models[0], runtime)
    verifier = speakernet.load(models[0], device="cpu")
    with serving(models[0], files=files, token="t" * 16) as (address, _):
        browser.open(f"{address}/#token={'t' * 16}", 1280)
        assert browser.run("document.querySelector('#advice').textContent") == ""
        own = (
            "const own = await (await import('/in_browser.js')).open(await ask('/health'), headers)"
        )
        cosines = []
        for content in real:
            found = browser.run(
                f"""(async () => {{
                  const headers = {{Authorization: "Bearer {"t" * 16}"}};
                  const ask = async path => (await fetch(path)).json();
                  {own};
                  const bytes = Uint8Array.from(atob({base64.b64encode(content).decode()!r}), one => one.charCodeAt(0));
                  return (await own.embed({{blob: new Blob([bytes]), name: "a clip"}})).embedding;
                }})()"""
            )
            wanted = verifier.embed(
                read_audio_bytes(content, "a clip"), sample_rate=16000, speech=True
            )[0]
            cosines.append(wanted @ found / np.linalg.norm(wanted) / np.linalg.norm(found))
        assert len(cosines) == 4 and min(cosines) > 0.99999
        for first, second in ((real[0], real[0]), (real[0], real[3])):
            drop(browser, "first", first)
            drop(browser, "second", second)
            browser.run("document.querySelector('#compare').click()")
            clips = [read_audio_bytes(clip, "a clip") for clip in (first, second)]
            score = verifier.verify(*clips, sample_rate=16000).score
            browser.wait(
                f"document.querySelector('#compare-answer').textContent.includes('score {score:.3f}')"
            )
        drop(browser, "first", wav(np.zeros(16000, np.float32)))
        browser.run("document.querySelector('#compare').click()")
        browser.wait(
            "/a file.wav: silent/.test(document.querySelector('#compare-answer').textContent)"
        )
        asked = [
            one["params"]["request"]
            for one in browser.events
            if one.get("method") == "Network.requestWillBeSent"
        ]
        assert {one["method"] for one in asked} == {"GET"} and browser.complaints() == []
        answer = httpx.post(f"{address}/verify", headers={"Authorization": f"Bearer {'t' * 16}"})
        assert answer.status_code == 404 and httpx.get(f"{address}/model.onnx").status_code == 401
