"""status.json: what has become of a run, for programs that watch its directory.

    running --> finished            summary.json is there
            --> stopped             by Ctrl-C or SIGTERM, its last whole step saved: --resume
            --> failed              by an error, which "why" says

The file is replaced whole, never half. While a run is running it is written every ten seconds, so
that one which says "running" and is older than a minute was killed (kill -9, no memory left): its
process, "pid" on "host", is gone. `read` says so where it can see that, as "killed".
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
  """Writes the status of a run of this process; see `kept`."""

  def __init__(self, directory: pathlib.Path, step: int = 0):
    """Takes a run's directory and its whole steps so far; the file is written by `write`."""
    self.path = directory / FILE_NAME
    self.step = step
    self._began = _now()

  def write(self, state: str, why: str = "", *, at: str = "") -> None:
    """Writes the file.

    Args:
      state: "running", "finished", "stopped" or "failed".
      why: of a run that did not finish.
      at: what it is doing.

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
    """Says that the run is still running, and what it is at; a full disk is for others to say."""
    with contextlib.suppress(OSError):
      self.write("running", at=at)


@contextlib.contextmanager
def kept(directory: pathlib.Path, *, step: int = 0) -> Iterator[Status]:
  """Within, the directory's status.json says "running"; afterwards, how it ended.

  Args:
    directory: of the run.
    step: whole steps so far.

  Raises:
    ValueError: if another process, which is alive, is at the same directory.
  """
  before = read(directory)
  if before is not None and before["state"] == "running" and not _is_mine(before):
    if _is_alive(before):
      raise ValueError(
        f"{directory / FILE_NAME}: got a run that process {before['pid']} is at, expected one"
        f" process for a directory; wait for it, stop it with `kill {before['pid']}`, or choose"
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
    status.write("stopped", f"by {stops.name_of(stop)}; what was saved is kept")
    raise
  except BaseException as error:
    # The disk may be full, and the error is what has to be told.
    with contextlib.suppress(OSError):
      status.write("failed", f"{type(error).__name__}: {error}")
    raise
  status.write("finished")


def read(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns a run's status, None if it has none or the file is damaged.

  `state` is "killed" where the file says "running" and its process, of this host, is not there.
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
  """Returns whether the process that wrote a record is there; False on another host."""
  if not _is_here(record):
    return False
  try:
    os.kill(record["pid"], 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass  # Another user's.
  return record["process_started"] in ("", _started(record["pid"]))


def _started(pid: int) -> str:
  """Returns when a process began, in the kernel's own words; "" where it does not say.

  A number is given again to another process, at another time.
  """
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Its name may hold spaces and parentheses; field 22 is the 20th after it.
    ticks = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
  except OSError:
    return ""
  return f"{boot} {ticks}"


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
