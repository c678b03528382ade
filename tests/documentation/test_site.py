"""The site builds without dead links, and no page is wider than a phone's screen."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path

import pytest

from speakernet.cli import COMMANDS
from speakernet.config.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WIDTH = 390
LONGEST_PAGE = 2900
pytestmark = pytest.mark.slow

MEASURE = """<!DOCTYPE html><body><iframe id="frame" style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id="found"></pre><script>
const pages = PAGES, found = {}, frame = document.getElementById("frame");
frame.onload = () => setTimeout(() => {
  const root = frame.contentDocument.documentElement;
  found[pages.shift()] = [root.scrollWidth, frame.contentDocument.querySelectorAll("h1").length];
  if (pages.length) frame.src = pages[0];
  else document.getElementById("found").textContent = "FOUND" + JSON.stringify(found) + "END";
}, 200);
frame.src = pages[0];
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as built by `make docs`; the notebook makes fewer voices."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "speakernet").symlink_to(ROOT / "speakernet")
    (folder / "examples").mkdir()
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        text = re.sub(r"(SPEAKERS|EPOCHS) = \d+", r"\1 = 6", notebook.read_text(encoding="utf-8"))
        (folder / "examples" / notebook.name).write_text(text, encoding="utf-8")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / "site"


@pytest.mark.skipif(
    not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
)
def test_pages_fit_a_phone(site, tmp_path):
    names = sorted(path.name for path in site.glob("*.html"))
    page = MEASURE.replace("WIDTH", str(WIDTH)).replace("PAGES", json.dumps(names))
    (site / "measure.html").write_text(page)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
        ]
        command += [
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=60000",
            "--dump-dom",
            "--hide-scrollbars",
        ]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        done = subprocess.run(
            [*command, address], capture_output=True, text=True, timeout=300, check=False
        )
        server.shutdown()
    found = re.search(r"FOUND(.*?)END", done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    measured = json.loads(unescape(found[1]))
    assert set(measured) == set(names) and len(names) > 60
    assert {name: width for name, (width, _) in measured.items() if width > WIDTH} == {}
    assert [name for name, (_, headings) in measured.items() if headings != 1] == []
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


def test_generated_pages(site):
    for command in COMMANDS:
        assert f"usage: speakernet {command} " in text_of(site / f"command_{command}.html")
    for section in SECTIONS:
        assert (site / f"configuration_{section}.html").exists()
    page = site / "notebook_first_hour.html"
    pictures = re.findall(r'<img[^>]*src="(first_hour/[^"]+)"', page.read_text())
    assert len(pictures) == 5 and all(
        (site / one).read_bytes().startswith(b"\x89PNG") for one in pictures
    )
    assert "test EER" in text_of(page) and "Traceback" not in text_of(page)
    assert "Who speaks when" in text_of(site / "notebook_your_own_voices.html")


def test_no_page_is_long(site):
    words = {path.name: len(text_of(path).split()) for path in site.glob("*.html")}
    assert {name: count for name, count in words.items() if count > LONGEST_PAGE} == {}


def text_of(page):
    """The text of a page without navigation."""
    article = re.search(r"<article.*?</article>", page.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", "", article[0])) if article else ""
