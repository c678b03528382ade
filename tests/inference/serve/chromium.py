"""A headless Chromium, driven through its debugging pipe, with a file in place of a microphone."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
SECONDS = 60
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One browser with one page; `microphone` is a WAV file that it repeats."""

    def __init__(self, profile: Path, microphone: Path) -> None:
        self.events: list[dict] = []
        self.numbers = itertools.count(1)
        self.content = b""
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
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
        targets = self.tell("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)

    def tell(self, method: str, **parameters: object) -> dict:
        """One command and its result."""
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

    def open(self, address: str, width: int, *, is_dark: bool = False) -> None:
        """Show a page in a window of that width, and wait until it is ready."""
        self.events.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Page.navigate", url="about:blank")
        self.tell("Page.navigate", url=address)
        self.wait("document.body?.dataset.ready === 'true'")

    def run(self, script: str) -> object:
        """What an expression is worth in the page."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.tell("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression holds in the page."""
        deadline = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never: {condition}; the page: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Errors and warnings on the page's console."""
        self.run("0")
        bad = [event["params"] for event in self.events if event.get("method") in COMPLAINTS]
        levels = [one.get("type") or one.get("entry", {}).get("level", "error") for one in bad]
        return [str(one) for one, level in zip(bad, levels, strict=True) if level in ("error", "warning")]
