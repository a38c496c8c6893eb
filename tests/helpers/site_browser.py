"""Headless Chromium, driven over a pair of pipes by its DevTools protocol, and a web server for a folder."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import itertools
import json
import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One tab of a headless Chromium, with the messages of its console and the addresses that it asked for."""

    def __init__(self, folder: Path) -> None:
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if path is None:
            pytest.skip("needs Chromium: apt-get install chromium")
        (profile := folder / "profile").mkdir()
        # Chromium reads commands from its descriptor 3 and writes answers to 4.
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        self._pid = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": str(folder)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, to_browser, 13),  # out of the way of 3 and 4, which the pipes may be themselves
                (os.POSIX_SPAWN_DUP2, from_browser, 14),
                (os.POSIX_SPAWN_DUP2, 13, 3),
                (os.POSIX_SPAWN_DUP2, 14, 4),
                (os.POSIX_SPAWN_OPEN, 2, str(folder / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600),
            ],
            setpgroup=0,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", None
        self.events: list[dict] = []
        (target,) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if the window were in front
        # Colours that are under way from one to another would be neither.
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **params: object) -> dict:
        """Sends a command and returns its result. Keeps the events that come meanwhile."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read(30)
            if message is None:
                raise TimeoutError(f"the browser does not answer {method}")
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _read(self, seconds: float) -> dict | None:
        """Returns the next message, or None after some time without one. Keeps it if it is an event."""
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            if not ready:
                return None
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, address: str, width: int, height: int = 800) -> None:
        """Opens a page in a window of that size and waits until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str, seconds: float = 20) -> object:
        """Waits until an expression of JavaScript is true and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.value(condition)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds} s: {condition}")
            self._read(0.05)
        return value

    def value(self, expression: str) -> object:
        """Returns the value of an expression of JavaScript, waiting for a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Presses and releases a key."""
        described = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **described, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **described)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def complaints(self) -> list[str]:
        """Returns errors and warnings of the console since the page was opened, and loads that failed."""
        found = []
        for event in self.events:
            what, params = event["method"], event["params"]
            if what == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif what == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(f"{params['type']}: {[each.get('value') for each in params['args']]}")
            elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif what == "Network.responseReceived" and params["response"]["status"] >= 400:
                found.append(f"{params['response']['status']} {params['response']['url']}")
        return found

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the page was opened."""
        sent = (event["params"]["request"] for event in self.events if event["method"] == "Network.requestWillBeSent")
        return list(dict.fromkeys(request["url"] for request in sent))

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Writes a picture of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path):
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
