"""A headless Chromium, spoken to over a pipe: what a page shows, and what its scripts did wrong."""

import contextlib
import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "--window-size=1280,1600",
)


class Browser:
    """One tab. `problems`: what was thrown, refused or logged as an error."""

    def __init__(self, process: "subprocess.Popen[bytes]", to: int, come: int) -> None:
        self._to, self._come = os.fdopen(to, "wb", buffering=0), os.fdopen(come, "rb", buffering=0)
        self._process = process
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, url: str) -> None:
        """Returns when it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise's when it is kept."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Until an expression is true, looked at with each frame; the test's own time limit bounds it."""
        look = f"(() => {{ if ({condition}) kept(true); else requestAnimationFrame(look); }})"
        self.evaluate(f"new Promise((kept) => {{ const look = {look}; look(); }})")

    def shot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._come.read(1 << 20)
            assert more, f"Chromium ended with {self._process.poll()}"
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            if message["method"] == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or str(details))
            if message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
        return message


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    theirs_in, to = os.pipe()
    come, theirs_out = os.pipe()

    # Chromium reads its orders from descriptor 3 and answers on 4.
    shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, to, come)
    finally:
        process.kill()
        process.wait()
