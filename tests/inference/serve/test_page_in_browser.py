"""The page in headless Chromium, wide and narrow, with a synthetic voice as its microphone."""

import base64
import sys
from pathlib import Path

import pytest

from speakernet.data.audio import write_audio

sys.path.insert(0, str(Path(__file__).parent))
from chromium import CHROMIUM, Browser
from serve_helpers import serving, wav

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"),
]

LAYOUT = """(() => {
  const boxes = [...document.querySelectorAll("h1, h2, h3, p, button, label, input, .level, audio, .bar, li > span")]
    .map(e => [e, e.getBoundingClientRect()]).filter(([e, b]) => b.width > 1.5 && b.height > 1.5);
  const crossing = [];
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, p] = boxes[i], [b, q] = boxes[j];
    if (a.contains(b) || b.contains(a)) continue;
    const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (x > 1.5 && y > 1.5) crossing.push([a.outerHTML.slice(0, 60), b.outerHTML.slice(0, 60)]);
  }
  const width = document.documentElement.clientWidth;
  return {
    crossing, width, scroll: document.documentElement.scrollWidth,
    outside: boxes.filter(([e, b]) => b.right > width + 1 || b.left < -1).map(([e]) => e.outerHTML.slice(0, 60)),
    small: boxes.filter(([e, b]) => e.tagName === "BUTTON" && b.height < 40).length,
  };
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory, voices):
    microphone = tmp_path_factory.mktemp("microphone") / "voice.wav"
    write_audio(microphone, voices[0][0], 16000)
    with Browser(tmp_path_factory.mktemp("profile"), microphone) as one:
        yield one


def check_layout(browser, width):
    found = browser.run(LAYOUT)
    assert found["width"] == width and found["scroll"] <= width
    assert found["crossing"] == [] and found["outside"] == [] and found["small"] == 0


def record(browser, clip, seconds):
    """Record into a box of the page for so long."""
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
def test_two_clips_are_compared_somebody_is_enrolled_and_recognised(browser, models, voices, tmp_path, width):
    with serving(models[0], tmp_path / "people.db") as (address, service):
        browser.open(address, width, is_dark=width == 390)
        check_layout(browser, width)
        assert browser.run("document.querySelector('#compare').disabled")
        record(browser, "first", 2.0)
        # The second is recorded while the answer grows.
        browser.run("document.querySelector('#second .record').click()")
        browser.wait("/After [2-9] s/.test(document.querySelector('#compare-answer').textContent)")
        check_layout(browser, width)
        browser.run("document.querySelector('#second .record').click()")
        verdict = "document.querySelector('#compare-answer .verdict')?.textContent"
        browser.wait(f"/^The same person, .* sure/.test({verdict})")
        browser.wait("!/After/.test(document.querySelector('#compare-answer').textContent)")
        browser.wait("!document.querySelector('#compare').disabled")
        assert not service.streams
        other = wav(voices[3][0])
        drop(browser, "second", other)
        assert browser.run("document.querySelector('#compare-answer').hidden")
        assert "a file.wav" in browser.run("document.querySelector('#second').innerText")
        browser.run("document.querySelector('#compare').click()")
        browser.wait(f"/^Different people/.test({verdict})")
        name = "Zoë <b>Müller</b> & the very long name that goes on and on until it no longer fits on a line"
        browser.run(f"document.querySelector('#name').value = {name!r}")
        record(browser, "sample", 2.0)
        browser.wait("!document.querySelector('#enrol').disabled")
        browser.run("document.querySelector('#enrol').click()")
        browser.wait("document.querySelectorAll('#people li').length === 1")
        assert name in browser.run("document.querySelector('#people').textContent")
        assert browser.run("document.querySelectorAll('#people b').length") == 0
        record(browser, "unknown", 2.0)
        browser.run("document.querySelector('#identify').click()")
        browser.wait(f"document.querySelector('#identify-answer .verdict')?.textContent === {name!r}")
        drop(browser, "unknown", other)
        browser.run("document.querySelector('#identify').click()")
        browser.wait("document.querySelector('#identify-answer .verdict').textContent === 'Not an enrolled person'")
        check_layout(browser, width)
        browser.run("document.querySelector('#people button').click()")
        browser.run("document.querySelector('#people button').click()")
        browser.wait("document.querySelectorAll('#people li').length === 0")
        assert browser.complaints() == []
        assert all(asked.startswith((f"{address}/", "blob:", "data:")) for asked in browser.requests())
        assert service.store.people() == []
