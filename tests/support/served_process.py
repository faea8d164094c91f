"""A server in its own process, which tests stop with any signal."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import serving


class Process:
  """`seerjax serve`, from start to exit.

  Attributes:
    process: the server's process.
    url: base URL, without "/v1".
  """

  def __init__(self, folder: pathlib.Path, *arguments: str):
    """Starts a server on a free port, and waits until it serves.

    Args:
      folder: folder of the log.
      arguments: arguments of the command, the model first.
    """
    self._log = folder / "serve.log"
    self._file = self._log.open("ab")
    command = [sys.executable, "-m", "seerjax.commands", "serve", *arguments, "--port=0"]
    offset = self._log.stat().st_size
    self.process = subprocess.Popen(
      command, stdout=subprocess.DEVNULL, stderr=self._file, env={**os.environ, "PYTHONPATH": "."}
    )
    self.url = ""
    while not self.url:
      assert self.process.poll() is None, self._log.read_text()[-3000:]
      for line in self._log.read_text()[offset:].splitlines():
        if line.startswith("serving at "):
          self.url = line.removeprefix("serving at ").removesuffix("/v1")
      time.sleep(0.1)

  def status(self, field: str) -> int:
    """Returns a number of /proc/PID/status: "Threads", or "VmRSS" in KiB."""
    lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))

  def metric(self, name: str) -> float:
    with serving.client(self.url) as plain:
      text = plain.get("/metrics").text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))

  def end(self, number: int) -> int:
    self.process.send_signal(number)
    code = self.process.wait(timeout=600)
    self._file.close()
    return code
