"""Chromium without a window, driven over a pipe by the Chrome DevTools Protocol. Needs no package and no port."""

from __future__ import annotations

import base64
import json
import os
import select
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

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0


def chromium() -> str:
    """Path of the browser. Skips the test if there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed (Debian: apt-get install chromium)")
    return path


# The browser reads its file descriptor 3 and writes 4. Both ends may have such a number, so they are moved first.
_LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Tab:
    """One page. `errors` has what its script threw and what its console called an error."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target_id = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target_id, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        request: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._target, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._source], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser has not answered within {_SECONDS:g} s"
            read = os.read(self._source, 1 << 20)
            assert read, "the browser has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Opens a file and waits until it has been drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for has been drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """Runs a script on the page and returns its value."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def wheel(self, x: float, y: float, delta: float, modifiers: int = 0) -> None:
        """Turns the wheel. `modifiers`: 2 for Ctrl, 8 for Shift."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, modifiers=modifiers)
        self.settle()

    def key(self, key: str) -> None:
        """Presses a key, such as "+" or "Enter"."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        named = {"key": key, **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def type(self, text: str) -> None:
        """Writes text into the focused element."""
        self.call("Input.insertText", text=text)
        self.settle()

    def picture(self) -> bytes:
        """Returns the page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    @property
    def errors(self) -> list[str]:
        """Texts of errors since the page was opened."""
        found = []
        for event in self._events:
            method, values = event.get("method"), event.get("params", {})
            is_error = method == "Log.entryAdded" and values["entry"]["level"] == "error"
            if is_error or method == "Runtime.exceptionThrown":
                found.append(json.dumps(values))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event["params"] for event in self._events if event.get("method") == "Network.requestWillBeSent"]
        return [values["request"]["url"] for values in sent]


@contextmanager
def browser() -> Iterator[Tab]:
    """Starts a browser with one page, and ends it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        from_test, to_test = os.pipe(), os.pipe()
        command = [
            *(sys.executable, "-c", _LAUNCHER, str(from_test[0]), str(to_test[1]), chromium()),
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
        ]
        process = subprocess.Popen(
            command, pass_fds=(from_test[0], to_test[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_test[0])
        os.close(to_test[1])
        try:
            yield Tab(to_test[0], from_test[1])
        finally:
            os.close(from_test[1])  # its end of the pipe makes the browser end
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_test[0])
