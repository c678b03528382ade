"""Reports in headless Chromium, wide and narrow, light and dark: no requests, no console messages,
no overlap.
"""

import re

import pytest

from speakernet.evaluation import plots
from speakernet.evaluation.report import write_report
from tests.browser import NEEDS_BROWSER, Browser
from tests.evaluation.report_runs import make_run, make_trials

pytestmark = NEEDS_BROWSER
LONG_NAME = "second_run_with_a_long_name_without_breaks"
MEASURE = """(() => {
  const boxes = (root, selector) => [...root.querySelectorAll(selector)]
    .map(e => [e, e.getBoundingClientRect()]).filter(([e, b]) => b.width > 0 && b.height > 0);
  function crossing(items) {
    const found = [];
    for (let i = 0; i < items.length; i++) for (let j = i + 1; j < items.length; j++) {
      const [a, p] = items[i], [b, q] = items[j];
      if (a.contains(b) || b.contains(a)) continue;
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 1.5 && y > 1.5) found.push([a.textContent.slice(0, 40), b.textContent.slice(0, 40)]);
    }
    return found;
  }
  document.querySelectorAll("details").forEach(each => each.open = true);
  return {
    scroll: document.documentElement.scrollWidth, width: document.documentElement.clientWidth,
    blocks: crossing(boxes(document, "header, .card, .tile, h1, h2, nav, main > section > p")),
    inner: boxes(document, ".card").flatMap(([card]) => crossing(boxes(card, ":scope > *"))),
    plots: boxes(document, "svg").flatMap(([svg]) => crossing(boxes(svg, "text"))),
    outside: boxes(document, ".card svg, .tile b")
      .filter(([e, b]) => b.right > document.documentElement.clientWidth + 1).length,
    letters: Math.min(...boxes(document, "svg text").map(([e, b]) => b.height)),
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    line: getComputedStyle(document.querySelector("svg text")).fill,
    svgs: document.querySelectorAll("svg").length,
  };
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    trials = make_trials(root / "trials.txt")
    runs = {"first": 1.2, LONG_NAME: 3.0}
    with pytest.MonkeyPatch.context() as patch:
        # The pages embed their drawings; the picture files would take most of the time.
        patch.setattr(plots, "save_figure", lambda figure, path: None)
        for number, (name, noise) in enumerate(runs.items(), start=1):
            write_report(root / name, make_run(root / name, trials, noise=noise, seed=number))
    return root


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("name", ["first", LONG_NAME])
def test_page(pages, tmp_path, name, width, is_dark):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    with Browser(tmp_path / "profile") as browser:
        browser.send("Emulation.setEmulatedMedia", features=[scheme])
        address = (pages / name / "report.html").as_uri()
        ready = f"location.href === {address!r} && document.readyState === 'complete'"
        browser.open(address, width, ready)
        found = browser.run(MEASURE)
        assert browser.complaints() == []
        urls = {request["url"] for request in browser.requests()}
        assert {url for url in urls if not url.startswith("data:")} == {address}
    assert found["svgs"] > 6
    assert found["width"] == width and found["scroll"] <= width
    assert found["blocks"] == [] and found["inner"] == [] and found["plots"] == []
    assert found["outside"] == 0
    assert found["letters"] > 8
    background, ink, letters = (
        sum(int(part) for part in re.findall(r"\d+", found[key])[:3])
        for key in ("background", "ink", "line")
    )
    assert (background < 150 < 600 < ink) if is_dark else (ink < 200 < 600 < background)
    assert (letters > 400) if is_dark else (letters < 400)
