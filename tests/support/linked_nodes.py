"""A Ray cluster of two nodes on this machine, with a link between them that can be cut.

    this process, the head --- a bridge --- its port = a veth pair --- the far node's namespace
      198.18.N.1                  cut here: the port is down           198.18.N.2

The far node has its own network namespace (`ip netns`), which only the link joins to the head. When
the link is cut, both sides keep their addresses, as when a cable is pulled out of a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time

import pytest

SECONDS = 300.0  # Time limit for a node's start on a loaded machine.
# Ray gives a node 30 s to start, and runs its workers at a lower priority than their callers.
OF_LOADED_MACHINES = {"RAY_raylet_start_wait_time_s": "60", "RAY_worker_niceness": "0"}
AGENTS = "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export"
MARK = "SEERJAX_LINKED_NODES"  # An environment variable of all the cluster's processes.


def ip(*arguments: str) -> None:
  """Runs `ip`.

  Raises:
    subprocess.CalledProcessError: with the output as a note.
  """
  done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
  if done.returncode:
    error = subprocess.CalledProcessError(done.returncode, done.args)
    error.add_note(done.stderr.strip())
    raise error


class Link:
  """A network namespace, and the link to it."""

  def __init__(self) -> None:
    number = os.getpid()
    self.namespace, self._bridge = f"seer{number}", f"seerb{number}"
    self._port, far = f"seerp{number}", f"seerf{number}"
    net = f"198.18.{number % 250}"
    self.near_address, self.far_address = f"{net}.1", f"{net}.2"
    if os.geteuid():
      pytest.skip("only root may make network namespaces")
    try:
      ip("netns", "add", self.namespace)
      ip("link", "add", self._bridge, "type", "bridge")
      ip("link", "add", self._port, "type", "veth", "peer", "name", far)
      ip("link", "set", far, "netns", self.namespace)
      ip("link", "set", self._port, "master", self._bridge)
    except (OSError, subprocess.CalledProcessError) as error:
      self.close()
      pytest.skip(f"this machine makes no network namespaces or bridges: {error!r}")
    ip("addr", "add", f"{self.near_address}/24", "dev", self._bridge)
    ip("-n", self.namespace, "addr", "add", f"{self.far_address}/24", "dev", far)
    ip("-n", self.namespace, "link", "set", "lo", "up")
    ip("-n", self.namespace, "link", "set", far, "up")
    ip("link", "set", self._bridge, "up")
    ip("link", "set", self._port, "up")

  def down(self) -> None:
    """Cuts the link: both ends lose the carrier and keep their addresses."""
    ip("link", "set", self._port, "down")

  def up(self) -> None:
    """Restores the link."""
    ip("link", "set", self._port, "up")

  def far_processes(self) -> list[int]:
    """Returns the ids of the processes in the namespace."""
    done = subprocess.run(
      ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
    )
    return [int(one) for one in done.stdout.split()]

  def close(self) -> None:
    """Removes the link and the namespace, which must have no processes left."""
    for one in (["link", "del", self._port], ["link", "del", self._bridge],
                ["netns", "del", self.namespace]):  # fmt: skip
      with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ip(*one)


class Nodes:
  """The head on this machine and the far node, each with room for one worker.

  Attributes:
    link: the link between the nodes.
    address: the head's address, for `RayWorkers`.
  """

  def __init__(self, link: Link, directory: pathlib.Path, environment: Mapping[str, str]):
    """Starts both nodes.

    Args:
      link: an intact link.
      directory: for Ray's files; must be short, since socket paths are limited to 107 bytes.
      environment: environment of the nodes' processes.
    """
    self.link = link
    self._directory = directory
    self._mark = secrets.token_hex(8)
    self._environment = {**environment, MARK: self._mark, **OF_LOADED_MACHINES}
    self._logs: list[pathlib.Path] = []
    try:
      [port] = free_ports(1)
      self._start(
        "head", [], "--head", f"--node-ip-address={link.near_address}", f"--port={port}",
        "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={directory}",
      )  # fmt: skip
      self.address = f"{link.near_address}:{port}"
      self._start_far()
    except BaseException:
      self.close()
      raise

  def _start_far(self) -> None:
    # The mount exists only in that namespace: nodes of two machines share no Ray directory.
    within = ["ip", "netns", "exec", self.link.namespace, "sh", "-c"]
    within += ['mount -t tmpfs tmpfs "$0" && exec "$@"', str(self._directory)]
    self._start(
      "far", within, f"--address={self.address}", f"--node-ip-address={self.link.far_address}"
    )

  def processes(self) -> list[int]:
    """Returns the ids of all processes of both nodes, workers included, by the inherited mark."""
    found, mark = [], f"{MARK}={self._mark}".encode()
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
      with contextlib.suppress(OSError):
        if mark in path.read_bytes().split(b"\0"):
          found.append(int(path.parent.name))
    return found

  def close(self) -> None:
    """Kills all processes of both nodes."""
    kill(self.processes)

  def _start(self, name: str, within: list[str], *flags: str) -> None:
    log = self._directory / f"{name} {len(self._logs)}.log"
    self._logs.append(log)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    # A raylet waits 15 s for its agents to report their ports, and then exits.
    command += [f"--{name}-port={port}" for name, port in zip(AGENTS, free_ports(len(AGENTS)))]
    until = time.monotonic() + SECONDS
    process = None
    while True:
      if process is None:
        with log.open("w") as file:
          process = subprocess.Popen(
            [*within, *command, "--object-store-memory=100000000", *flags],
            env=self._environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
          )  # fmt: skip
      has_ended = process.poll() is not None
      text = log.read_text()
      if "Ray runtime started" in text:
        return
      assert time.monotonic() < until, f"the {name} node: {text}"
      if has_ended:  # On a loaded machine another attempt may succeed.
        assert "timed out during startup" in text, f"the {name} node: {text}"
        process = None
      time.sleep(0.2)


def free_ports(count: int) -> list[int]:
  """Returns local ports without a listener."""
  with contextlib.ExitStack() as stack:
    found = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
    return [one.getsockname()[1] for one in found]


def kill(find) -> None:
  """Kills processes until none is left.

  Raises:
    AssertionError: if some are left after a minute.
  """
  until = time.monotonic() + 60
  while processes := find():
    for process in processes:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    assert time.monotonic() < until, f"these processes do not end: {processes}"
    time.sleep(0.1)
