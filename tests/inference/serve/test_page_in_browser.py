"""The page in headless Chromium, wide and narrow, with a synthetic voice as its microphone."""

import base64

import httpx
import numpy as np
import pytest

import speakernet
from speakernet.corpora.synthetic.speech import synthetic_speech
from speakernet.data import speech
from speakernet.data.audio import write_audio
from speakernet.inference.serve.in_browser import page_files
from tests.browser import NEEDS_BROWSER, Browser
from tests.inference.serve.serve_helpers import samples_of, serving, wav

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def browser(tmp_path_factory, voices):
    microphone = tmp_path_factory.mktemp("microphone") / "voice.wav"
    write_audio(microphone, voices[0][0])
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


def test_model_in_the_browser(browser, models, runtime, shared_data, monkeypatch):
    # The page has silero-vad alone, so it is compared on real speech.
    monkeypatch.setattr(speech, "default_detector", lambda: speech.SILERO)
    clips = sorted((shared_data / "speechocean_mini" / "dev").glob("*/*.flac"))
    real = [clips[row].read_bytes() for row in (0, 180)]
    files = page_files(models[0], runtime, synthetic_speech(4, 16000))
    verifier = speakernet.load(models[0], "cpu")
    with serving(models[0], files=files, token="t" * 16) as (address, _):
        browser.open(f"{address}/#token={'t' * 16}", 1280)
        assert browser.text("#advice") == ""
        for first, second in ((real[0], real[0]), real):
            drop(browser, "first", first)
            drop(browser, "second", second)
            browser.click("#compare")
            clips = [samples_of(clip) for clip in (first, second)]
            score = verifier.verify(*clips, sample_rate=16000).score
            browser.wait_for_text("#compare-answer", f"score {score:.3f}")
        drop(browser, "first", wav(np.zeros(16000, np.float32)))
        browser.click("#compare")
        browser.wait_for_text("#compare-answer", "a file.wav: silent")
        assert {request["method"] for request in browser.requests()} == {"GET"}
        assert browser.complaints() == []
        answer = httpx.post(f"{address}/verify", headers={"Authorization": f"Bearer {'t' * 16}"})
        assert answer.status_code == 404 and httpx.get(f"{address}/model.onnx").status_code == 401
