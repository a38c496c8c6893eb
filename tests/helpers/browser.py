"""Chromium without a window, driven over a pipe by the Chrome DevTools Protocol, and a web server for a folder."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic"),
)
_CODES = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
"""Codes of keys that write no character."""


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
    """One page, with the messages of its console and the addresses that it asked for."""

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
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if the window were in front

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        request: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._target, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._next(_SECONDS)
            assert answer is not None, f"the browser has not answered {method} within {_SECONDS:g} s"
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None after some time without one. Keeps it if it is an event."""
        until = time.monotonic() + seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._source], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            read = os.read(self._source, 1 << 20)
            assert read, "the browser has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self._events.append(answer)
        return answer

    def open(self, page: Path | str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Opens a file or an address and waits until it has been drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        # Colours that are under way from one to another would be neither.
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert self._next(_SECONDS) is not None, f"{page} has not been loaded within {_SECONDS:g} s"
        self.settle()

    def wait(self, condition: str) -> None:
        """Waits until an expression of JavaScript is true."""
        until = time.monotonic() + _SECONDS / 3
        while not self.run(condition):
            assert time.monotonic() < until, f"not true after {_SECONDS / 3:g} s: {condition}"
            self._next(0.05)

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
        """Presses a key, such as "+" or "Enter", and waits until its effect has been drawn."""
        self.press(key)
        self.settle()

    def press(self, key: str) -> None:
        """Presses a key that may open another page."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = ord(key.upper()) if key.isalnum() and len(key) == 1 else _CODES.get(key)
        named = {"key": key, **({"windowsVirtualKeyCode": code, "code": key} if code else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        """Writes text into the focused element."""
        self.call("Input.insertText", text=text)
        self.settle()

    def picture(self) -> bytes:
        """Returns the page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the page was opened, and loads that failed."""
        found = []
        for event in self._events:
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(values["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append(f"{values['type']}: {[each.get('value') for each in values['args']]}")
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            elif method == "Network.responseReceived" and values["response"]["status"] >= 400:
                found.append(f"{values['response']['status']} {values['response']['url']}")
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened, each once."""
        sent = [event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return list(dict.fromkeys(values["request"]["url"] for values in sent))


@contextmanager
def browser() -> Iterator[Tab]:
    """Starts a browser with one page, and ends it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        from_test, to_test = os.pipe(), os.pipe()
        command = [
            *(sys.executable, "-c", _LAUNCHER, str(from_test[0]), str(to_test[1]), chromium()),
            *(*_FLAGS, f"--user-data-dir={profile}"),
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


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of the loopback address and yields its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
