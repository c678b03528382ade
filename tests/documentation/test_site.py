"""The site builds without dead links, and no page is wider than a phone's screen."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
from html import unescape

import pytest

from speakernet.cli import COMMANDS
from speakernet.config.schema import SECTIONS
from tests.conftest import REPOSITORY
from tests.loopback import serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH = 390
LONGEST_PAGE = 2500
pytestmark = pytest.mark.slow

MEASURE = """<!DOCTYPE html><body>
<iframe id="frame" style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id="sizes"></pre><script>
const pages = PAGES, sizes = {}, frame = document.getElementById("frame");
frame.onload = () => setTimeout(() => {
  const root = frame.contentDocument.documentElement;
  sizes[pages.shift()] = [root.scrollWidth, frame.contentDocument.querySelectorAll("h1").length];
  if (pages.length) frame.src = pages[0];
  else document.getElementById("sizes").textContent = "FOUND" + JSON.stringify(sizes) + "END";
}, 200);
frame.src = pages[0];
</script></body>"""
OPTIONS = """--headless=new --no-sandbox --disable-gpu --enable-logging=stderr
--virtual-time-budget=60000 --dump-dom --hide-scrollbars"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as built by `make docs`; the notebook makes fewer voices."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(REPOSITORY / "docs", folder / "docs")
    shutil.copy(REPOSITORY / "mkdocs.yml", folder)
    (folder / "speakernet").symlink_to(REPOSITORY / "speakernet")
    (folder / "examples").mkdir()
    for notebook in (REPOSITORY / "examples").glob("*.ipynb"):
        text = re.sub(r"(SPEAKERS|EPOCHS) = \d+", r"\1 = 6", notebook.read_text(encoding="utf-8"))
        (folder / "examples" / notebook.name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    build = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr[-3000:]
    return folder / "site"


@pytest.mark.skipif(
    not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
)
def test_pages_fit_a_phone(site, tmp_path):
    names = sorted(path.name for path in site.glob("*.html"))
    page = MEASURE.replace("WIDTH", str(WIDTH)).replace("PAGES", json.dumps(names))
    (site / "measure.html").write_text(page)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
        command = [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={tmp_path}"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command += [f"{address}/measure.html"]
        browser = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    match = re.search(r"FOUND(.*?)END", browser.stdout, flags=re.DOTALL)
    assert match, browser.stderr[-2000:]
    sizes = json.loads(unescape(match[1]))
    assert set(sizes) == set(names) and len(names) > 60
    for name, (width, num_headings) in sizes.items():
        assert width <= WIDTH and num_headings == 1, (name, width, num_headings)
    assert "CONSOLE" not in browser.stderr


def test_generated_pages(site):
    for command in COMMANDS:
        assert f"usage: speakernet {command} " in text_of(site / f"command_{command}.html")
    for section in SECTIONS:
        assert (site / f"configuration_{section}.html").exists()
    page = site / "notebook_first_hour.html"
    pictures = re.findall(r'<img[^>]*src="(first_hour/[^"]+)"', page.read_text())
    assert len(pictures) == 5
    for picture in pictures:
        assert (site / picture).read_bytes().startswith(b"\x89PNG")
    # A notebook may divide a line among several outputs.
    text = " ".join(text_of(page).split())
    assert "test EER" in text and "Traceback" not in text
    statuses = re.findall(r"exit status (\d)", text)
    assert len(statuses) == 7 and set(statuses) <= {"0", "1"} and statuses.count("1") <= 1
    assert len(re.findall(r"(same speaker|different speakers): score", text)) == 3
    assert re.search(r"(Ada|Bo|unknown) score \d", text)
    assert "Who speaks when" in text_of(site / "notebook_your_own_voices.html")


def test_no_page_is_long(site):
    for path in site.glob("*.html"):
        assert len(text_of(path).split()) <= LONGEST_PAGE, path.name


def text_of(page):
    """The text of a page without navigation."""
    article = re.search(r"<article.*?</article>", page.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", "", article[0])) if article else ""
