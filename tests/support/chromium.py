"""A headless Chromium driven over two pipes by the DevTools protocol, without any package."""

from __future__ import annotations

import base64
from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def found() -> str:
  """Returns the path of the browser, or "" where there is none."""
  return next((path for name in NAMES if (path := shutil.which(name))), "")


class Tab:
  """One page of a browser."""

  def __init__(self, commands: int, answers: int):
    self._commands, self._answers = commands, answers
    self._number, self._session, self._held = 0, "", b""
    target = self.send("Target.createTarget", url="about:blank")["targetId"]
    found = self.send("Target.attachToTarget", targetId=target, flatten=True)
    self._session = found["sessionId"]
    self.errors: list[str] = []
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.send(f"{domain}.enable")

  def send(self, method: str, *, seconds: float = 120, **params: Any) -> dict[str, Any]:
    """Returns the response to a protocol command; records page errors that arrive meanwhile."""
    self._number += 1
    message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._commands, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._read(seconds)
      if answer.get("id") == self._number:
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]
      self._note(answer)

  def _read(self, seconds: float) -> dict[str, Any]:
    while b"\0" not in self._held:
      assert select.select([self._answers], [], [], seconds)[0], "the browser says nothing"
      data = os.read(self._answers, 1 << 16)
      assert data, "the browser is gone"
      self._held += data
    one, _, self._held = self._held.partition(b"\0")
    return json.loads(one)

  def _note(self, event: dict[str, Any]) -> None:
    params = event.get("params", {})
    if event.get("method") == "Runtime.exceptionThrown":
      self.errors.append(json.dumps(params["exceptionDetails"])[:500])
    elif event.get("method") == "Log.entryAdded" and params["entry"]["source"] == "security":
      self.errors.append(params["entry"]["text"])

  def run(self, script: str) -> Any:
    """Returns the awaited value of an expression."""
    result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in result, result["exceptionDetails"]
    return result["result"].get("value")

  def go(self, url: str) -> None:
    """Opens a page."""
    self.send("Page.navigate", url=url)
    self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

  def wait(self, condition: str, seconds: float = 240) -> None:
    """Waits until an expression is true."""
    end = time.monotonic() + seconds
    while not self.run(f"!!({condition})"):
      seen = self.run("document.body.innerText")
      assert time.monotonic() < end, f"{condition} never came: {seen}"
      time.sleep(0.1)

  def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
    """Sets the size and the colour scheme of the window."""
    self.send(
      "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
      mobile=width < 600,
    )  # fmt: skip
    scheme = "dark" if is_dark else "light"
    self.send(
      "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )

  def picture(self) -> bytes:
    """Returns a screenshot as PNG."""
    return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def tab(folder: pathlib.Path) -> Iterator[Tab]:
  """Runs a browser with its files in `folder`, and yields its only page."""
  low = [*os.pipe(), *os.pipe()]
  # Descriptors above those that the browser's shell uses; it reads from 3 and writes to 4.
  theirs_in, ours_out, ours_in, theirs_out = (
    fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in low
  )
  for one in low:
    os.close(one)
  command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
  process = subprocess.Popen(
    [
      "bash", "-c", command, found(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
      "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
      "--disable-background-networking", f"--user-data-dir={folder}", "about:blank",
    ],
    pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  os.close(theirs_in)
  os.close(theirs_out)
  try:
    yield Tab(ours_out, ours_in)
  finally:
    process.kill()
    process.wait()
    os.close(ours_out)
    os.close(ours_in)
