"""A local Mooncake master, for tests that skip where the package is not installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import socket
import subprocess
import time

import pytest


@dataclasses.dataclass
class Master:
  """A running master.

  Attributes:
    address: the master's address.
    process: the master's process.
  """

  address: str
  process: subprocess.Popen

  def end(self) -> None:
    """Stops the master."""
    self.process.terminate()
    self.process.wait()


def skip_without_mooncake() -> None:
  # Without libibverbs the package is installed but does not load; pytest would not skip that.
  reason = "Mooncake or libibverbs is not installed"
  pytest.importorskip("mooncake.store", reason=reason, exc_type=ImportError)


def free_port() -> int:
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


def start(log: pathlib.Path) -> Master:
  """Starts a master that listens when this returns; its output goes to a file."""
  skip_without_mooncake()
  package = importlib.util.find_spec("mooncake")
  assert package is not None and package.origin is not None
  port = free_port()
  with log.open("w") as file:
    process = subprocess.Popen(
      [
        pathlib.Path(package.origin).with_name("mooncake_master"),
        "--rpc_port", str(port), "--metrics_port", str(free_port()),
      ],
      stdout=file, stderr=subprocess.STDOUT,
    )  # fmt: skip
  for _ in range(300):
    with socket.socket() as one:
      if one.connect_ex(("127.0.0.1", port)) == 0:
        break
    assert process.poll() is None, log.read_text()
    time.sleep(0.1)
  return Master(f"127.0.0.1:{port}", process)
