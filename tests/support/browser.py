"""Headless Chromium, driven over a pipe: pages at a width and a colour scheme, what is in them, what they asked for."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser_path() -> str | None:
    """The browser of this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser; a context manager, which ends it.

    ``requests`` holds the address of everything that was asked for since the last :meth:`open`, the page among it.
    """

    def __init__(self, profile: Path, seconds: float = 60) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._seconds, self._next, self._rest = seconds, 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._session: str | None = None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        # The browser reads from 3 and writes to 4: its ends lie above both until a shell puts them there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (reads, writes)]
        command = [
            str(browser_path()), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
            *(["--no-sandbox"] if os.getuid() == 0 else []), "about:blank",
        ]  # fmt: skip
        shell = ["bash", "-c", f'exec 3<&{ends[0]} 4>&{ends[1]}; exec "$@"', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (reads, writes, *ends):
            os.close(end)

    def __enter__(self) -> Browser:
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Load ``page`` from the disk into a window of ``width`` pixels."""
        self.requests.clear()
        self.complaints.clear()
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=page.absolute().as_uri())
        end = time.monotonic() + self._seconds
        while self.ask("document.readyState") != "complete" or self.ask("location.href") == "about:blank":
            if time.monotonic() > end:
                raise TimeoutError(f"{page} was not loaded in {self._seconds} seconds")
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._send("Page.printToPDF", printBackground=False)["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while self._next not in self._answers:
            self._receive(end - time.monotonic())
        answer = self._answers.pop(self._next)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self, seconds: float) -> None:
        ready, _, _ = select.select([self._in], [], [], max(seconds, 0))
        read = os.read(self._in, 1 << 20) if ready else b""
        if not read:
            raise TimeoutError("the browser does not answer" if not ready else f"the browser ended with {self._process.poll()}")
        *messages, self._rest = (self._rest + read).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
