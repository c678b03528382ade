"""Headless Chromium for tests of pages."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM, reason="no headless Chromium on this machine (apt-get install chromium)"
    ),
]
SECONDS = 60
REQUEST = "Network.requestWillBeSent"
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One browser with one page; `microphone` is a WAV file that it repeats."""

    def __init__(self, profile, microphone=os.devnull):
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

    def open(self, address, width, ready="document.body?.dataset.ready === 'true'"):
        """Show a page in a window of that width, and wait until it is ready."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait(ready)

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
