"""A headless Chromium, driven by the DevTools protocol over a pipe. Without the program, tests skip.

apt-get install chromium        # or set CHROMIUM to the path of a Chromium or Chrome
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

PROGRAM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

# The browser reads commands from descriptor 3 and writes to 4.
_WITH_PIPE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A tab."""

    def __init__(self, read: int, write: int) -> None:
        self._reader, self._write = os.fdopen(read, "rb", buffering=0), write
        self._rest = b""
        self._last_id = 0
        self._session = ""
        self.problems: list[str] = []
        """Errors that the page or the browser reported: exceptions, refused files."""

    def open(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.evaluate("document.body.innerText"), self.problems)
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            data = self._reader.read(1 << 16)
            assert data, "the browser has exited"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])


@contextmanager
def chromium() -> Iterator[Page]:
    if not PROGRAM:
        pytest.skip("no Chromium is installed: apt-get install chromium, or set CHROMIUM to its path")
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        browser = subprocess.Popen(
            [
                *(sys.executable, "-c", _WITH_PIPE, str(to_browser[0]), str(from_browser[1])),
                *(PROGRAM, *flags, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(to_browser[0], from_browser[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        page = Page(from_browser[0], to_browser[1])
        try:
            page.open()
            yield page
        finally:
            browser.kill()
            browser.wait()
            os.close(to_browser[1])
