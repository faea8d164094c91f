"""status.json: the state of a run, for programs that watch its directory.

    running --> finished            summary.json is there
            --> stopped             by Ctrl-C or SIGTERM; the last completed step is saved: --resume
            --> failed              by an error, described in "why"

The file is replaced atomically. A running process rewrites it every ten seconds, so a file that
says "running" and is older than a minute belongs to a killed process ("pid" on "host"; for example
kill -9 or out of memory). `read` returns "killed" if it can check that.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import datetime
import json
import os
import pathlib
import socket
from typing import Any

from seerjax import metrics
from seerjax.run import stops

FILE_NAME = "status.json"


class Status:
  """Writes the status of a run in this process; see `kept`."""

  def __init__(self, directory: pathlib.Path, step: int = 0):
    """Sets the directory and the number of completed steps; `write` writes the file."""
    self.path = directory / FILE_NAME
    self.step = step
    self._began = _now()

  def write(self, state: str, why: str = "", *, at: str = "") -> None:
    """Writes the file.

    Args:
      state: "running", "finished", "stopped" or "failed".
      why: reason, for a run that did not finish.
      at: current activity.

    Raises:
      OSError: if the disk is full.
    """
    record = dict(
      state=state,
      why=why,
      at=at,
      step=self.step,
      pid=os.getpid(),
      host=socket.gethostname(),
      process_started=_started(os.getpid()),
      began=self._began,
      written=_now(),
    )
    metrics.write_summary(self.path, record)

  def beat(self, at: str) -> None:
    """Updates the file of a running run; ignores a full disk, which other writes report."""
    with contextlib.suppress(OSError):
      self.write("running", at=at)


@contextlib.contextmanager
def kept(directory: pathlib.Path, *, step: int = 0) -> Iterator[Status]:
  """Keeps status.json at "running" within the block; then writes how the run ended.

  Raises:
    ValueError: if another live process uses the same directory.
  """
  before = read(directory)
  if before is not None and before["state"] == "running" and not _is_mine(before):
    if _is_alive(before):
      raise ValueError(
        f"{directory / FILE_NAME}: got a run that process {before['pid']} is running, expected one"
        f" process per directory; wait for it, stop it with `kill {before['pid']}`, or choose"
        " another --workdir."
      )
  status = Status(directory, step)
  status.write("running")
  try:
    yield status
  except stops.Interrupted as stopped:
    status.write("stopped", str(stopped))
    raise
  except KeyboardInterrupt as stop:
    status.write("stopped", f"by {stops.name_of(stop)}; saved results are kept")
    raise
  except BaseException as error:
    # The disk may be full; the original error is the one to report.
    with contextlib.suppress(OSError):
      status.write("failed", f"{type(error).__name__}: {error}")
    raise
  status.write("finished")


def read(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns a run's status; None if the file is missing or damaged.

  `state` is "killed" if the file says "running" but its process, on this host, no longer exists.
  """
  try:
    record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    if record["state"] == "running" and _is_here(record) and not _is_alive(record):
      record["state"] = "killed"
    return record
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _is_here(record: dict[str, Any]) -> bool:
  return record["host"] == socket.gethostname()


def _is_mine(record: dict[str, Any]) -> bool:
  return _is_here(record) and record["pid"] == os.getpid()


def _is_alive(record: dict[str, Any]) -> bool:
  """Returns whether the process that wrote a record exists; False on another host."""
  if not _is_here(record):
    return False
  try:
    os.kill(record["pid"], 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass  # Belongs to another user.
  return record["process_started"] in ("", _started(record["pid"]))


def _started(pid: int) -> str:
  """Returns a process's start time in kernel ticks, with the boot id; "" if unavailable.

  It distinguishes a process from a later one with the same pid.
  """
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The name may contain spaces and parentheses; field 22 is the 20th after it.
    ticks = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
  except OSError:
    return ""
  return f"{boot} {ticks}"


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
