"""The picture of the report that the README shows, drawn from a finished run by a headless browser.

python trainSpeakerNet.py --config exp01.yaml
python -m benchmarks.report_picture exps/exp01
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from speakernet.files import atomic_write
from speakernet.run_folder import REPORT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURE = Path("docs/pictures/report.png")
WIDTH, HEIGHT = 1180, 1460
MOST_BYTES = 200_000
# The page has few colours; the smooth edges of its letters need most of these.
COLOURS = 128
BROWSER_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the top of a run's report into a PNG.

    Raises:
        ValueError: no report, no browser, or a browser that drew nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    given = parser.parse_args(arguments)
    data = draw(given.run / REPORT)
    with atomic_write(given.out, "wb") as file:
        file.write(data)
    sys.stdout.write(f"{given.out}: {len(data):,} bytes\n")
    return 0


def draw(page: Path) -> bytes:
    """The top of a page as a browser shows it, as a small PNG.

    Raises:
        ValueError: no page, no browser, a browser that drew nothing, or a picture of more than `MOST_BYTES`.
    """
    if not page.is_file():
        raise ValueError(f"{page} is not there: train first, or make it again with `speakernet report`")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ValueError(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", page.resolve().as_uri()]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BROWSER_SECONDS)
        if not shot.is_file():
            raise ValueError(f"{browser} drew nothing: {finished.stderr.strip()[-300:]}")
        picture = Image.open(shot).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    kept = io.BytesIO()
    picture.save(kept, format="PNG", optimize=True)
    if len(kept.getvalue()) > MOST_BYTES:
        raise ValueError(f"the picture has {len(kept.getvalue()):,} bytes, at most {MOST_BYTES:,} are wanted")
    return kept.getvalue()


if __name__ == "__main__":
    sys.exit(main())
