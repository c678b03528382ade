"""Reports in headless Chromium, wide and narrow, light and dark: no requests, no console messages,
no overlap.

The page is served locally inside a frame of the wanted width; the outer page measures it and writes
the findings into its own document.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from html import unescape

import pytest

from speakernet.evaluation import plots
from speakernet.evaluation.report import write_report
from tests.evaluation.report_runs import make_run, make_trials

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    "",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
    ),
]

LONG_NAME = "second_run_with_a_long_name_without_breaks"
MEASURE = """<!DOCTYPE html><html><body style="margin:0">
<iframe id="frame" style="border:0;width:WIDTHpx;height:900px" src="PAGE"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("frame");
function boxes(root, selector) {
  return [...root.querySelectorAll(selector)].map(e => [e, e.getBoundingClientRect()])
    .filter(([e, b]) => b.width > 0 && b.height > 0);
}
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
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  page.querySelectorAll("details").forEach(one => one.open = true);
  const found = {
    resources: view.performance.getEntriesByType("resource").map(e => e.name),
    scroll: page.documentElement.scrollWidth, width: page.documentElement.clientWidth,
    blocks: crossing(boxes(page, "header, .card, .tile, h1, h2, nav, main > section > p")),
    inner: [...page.querySelectorAll(".card")].flatMap(card => crossing(boxes(card, ":scope > *"))),
    plots: [...page.querySelectorAll("svg")].flatMap(svg => crossing(boxes(svg, "text"))),
    outside: boxes(page, ".card svg, .tile b")
      .filter(([e, b]) => b.right > page.documentElement.clientWidth + 1).length,
    letters: Math.min(...boxes(page, "svg text").map(([e, b]) => b.height)),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    line: view.getComputedStyle(page.querySelector("svg text")).fill,
    svgs: page.querySelectorAll("svg").length,
  };
  document.getElementById("found").textContent = "FOUND" + JSON.stringify(found) + "END";
};
</script></body></html>"""


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
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield root, server
        server.shutdown()


def browse(pages, page, width, profile, *, is_dark):
    root, server = pages
    (root / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", page))
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    command += [
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
        "--virtual-time-budget=4000",
        "--dump-dom",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--hide-scrollbars"]
    command += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
    finished = subprocess.run(
        [*command, address], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r"FOUND(.*?)END", finished.stdout, flags=re.DOTALL)
    assert found, finished.stderr[-2000:]
    complaints = [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(found.group(1))), complaints


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("page", ["first/report.html", f"{LONG_NAME}/report.html"])
def test_page(pages, tmp_path, page, width, is_dark):
    found, complaints = browse(pages, page, width, tmp_path / "profile", is_dark=is_dark)
    assert complaints == [] and found["resources"] == []
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
