"""Runs untrusted programs in isolation; only data comes back.

  program text, arguments --JSON--> an isolated process --JSON--> value, or the reason of a failure

A program sees an empty directory, the system and Python (read-only), and its own processes: no
network, no other processes, no files of the caller. It runs as the user `nobody`, with limits of
time, memory, processes and output, in separate namespaces, behind Landlock and seccomp. When it
ends or is killed, all its processes are killed. `server` implements this. It creates the namespaces
itself, as bubblewrap would, so no other tool is needed.

The result is untrusted data. A function's value comes from the process that ran the program, so it
proves nothing: the caller must recompute everything that matters.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175; programs there run
in a plain subprocess and return pickles, which is avoided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import socket
import sys
import threading
import types
from typing import Any, NamedTuple

from seerjax import fields
from seerjax.sandbox import confinement, entry, helper, isolation, messages, server

NO_FILES: Mapping[str, bytes] = types.MappingProxyType({})
MAX_DEPTH = 64  # Nesting of lists in a result, so that no reader overflows its stack.
MAX_LISTS = 1_000_000  # Lists and dicts in a result: an empty one is 2 characters, 60 bytes here.
MAX_LIMIT = 2**53


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits of one call.

  Attributes:
    wall_seconds: wall time, from the program's first line on.
    cpu_seconds: CPU time of all its processes together.
    memory_bytes: memory of all its processes together, including the interpreter's.
    file_bytes: largest file it may write, and largest function result; all files together may have
      four times as much (not enforced without namespaces).
    output_bytes: bytes of standard output, and as many of standard error.
    num_processes: processes and threads at a time.
    num_files: open files at a time, in each process.
  """

  wall_seconds: float = 10.0
  cpu_seconds: float = 10.0
  memory_bytes: int = 2**30
  file_bytes: int = 2**24
  output_bytes: int = 2**20
  num_processes: int = 32
  num_files: int = 64

  def __post_init__(self):
    rule = fields.Rule(
      f"a positive number up to {MAX_LIMIT}, the kernel's maximum",
      lambda value: 0 < value <= MAX_LIMIT,
      "every limit must be set, and 0 would stop every program",
    )
    rules: dict[str, Any] = dict.fromkeys(vars(self), rule)
    fields.check(self, **rules)


class Outcome(NamedTuple):
  """Outcome of a program.

  Attributes:
    status: "ok"; "failed" (non-zero exit code, or a result that is not JSON); "timeout" (wall
      time), "cpu", "memory", "output" (too much printed or written); "killed" (by a signal, or with
      too many processes). A program that handles the error of a limit may end with any status.
    exit_code: exit code; None if it did not exit by itself.
    stdout, stderr: output, up to the limit.
    files: the regular files among `outputs`, by name.
    wall_seconds, cpu_seconds: time used.
  """

  status: str
  exit_code: int | None
  stdout: bytes
  stderr: bytes
  files: Mapping[str, bytes]
  wall_seconds: float
  cpu_seconds: float


class Sandbox:
  """Runs untrusted programs. Thread-safe.

  One server process stays alive, with numpy and scipy imported, and is forked for every call: close
  the sandbox, or use it as a context manager.
  """

  def __init__(self, *, allow_weak: bool = False, preloaded: Sequence[str] = ()):
    """Determines what can be enforced on this machine.

    Args:
      allow_weak: also run where programs could access files, network or other processes.
      preloaded: modules that are imported before every function call, besides numpy and scipy; they
        must be in the same directories as numpy and scipy.

    Raises:
      ValueError: if isolation is incomplete and `allow_weak` is False.
    """
    self._lock = threading.Lock()
    self._is_closed = False
    self._preloaded = tuple(preloaded)
    self._helper, self._plan = self._start()
    plan = self._plan
    missing = [] if plan.namespaces or plan.landlock else ["file-system isolation"]
    missing += [] if plan.namespaces or plan.seccomp else ["network isolation"]
    # Since version 6, Landlock also blocks signals to other processes of the same user.
    missing += [] if plan.namespaces or plan.landlock >= 6 else ["process isolation"]
    if missing and not allow_weak:
      self.close()
      raise ValueError(
        f"Sandbox: got a machine without {' and '.join(missing)} ({self.describe()}), expected all"
        " isolation for untrusted programs; allow user namespaces (sysctl"
        " user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0) or Landlock 6"
        " and seccomp, or pass --allow_weak_sandbox if you trust every program."
      )

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the server; running calls still end within their limits."""
    with self._lock:
      self._is_closed = True
      self._helper.close()

  def describe(self) -> str:
    """Describes in one line which limits are enforced and which are not, with reasons."""
    plan = self._plan
    parts = []
    if plan.namespaces:
      kinds = "pid, mount, network, ipc, uts, cgroup" + (", user" if plan.nests else "")
      by = "made as root" if plan.namespaces == "root" else "made inside a user namespace"
      parts += [f"namespaces ({kinds}; {by})", "an empty root with /usr and Python read-only"]
    if plan.landlock:
      parts.append(f"Landlock {plan.landlock}")
    if plan.seccomp:
      parts.append(f"seccomp ({len(confinement.DENIED) + 2} system calls refused)")
    parts.append("rlimits")
    if plan.watches:
      parts.append("sums over all processes")
    if os.geteuid() == 0 and plan.namespaces != "user":
      parts.append(f"user {isolation.NOBODY}")
    text = f"sandbox: {', '.join(parts)}"
    if plan.denied:
      text += "; not: " + "; ".join(f"{name} ({reason})" for name, reason in plan.denied)
    return text

  def run(
    self,
    command: Sequence[str],
    *,
    files: Mapping[str, bytes] = NO_FILES,
    outputs: Sequence[str] = (),
    stdin: bytes = b"",
    limits: Limits = Limits(),
  ) -> Outcome:
    """Runs a command in an empty directory.

    Args:
      command: program and arguments; searched on the path of the system and of this Python.
      files: executable files to create first, by name; names may have folders ("src/main.cc").
      outputs: names of files to read back. Missing files, links, irregular files and files that are
        too large are omitted.
      stdin: standard input.
      limits: limits of this call.

    Raises:
      ValueError: if the command is empty, a name is outside of the directory, or the sandbox is
        closed.
      RuntimeError: if the isolation available at the start no longer works.
    """
    if not command or not all(command):
      raise ValueError(
        f"Sandbox.run: got command {list(command)}, expected a program's name, then its arguments;"
        " name one, such as 'g++'."
      )
    for name in (*files, *outputs):
      parts = name.split("/")
      if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
          f"Sandbox.run: got the file name {name!r}, expected one below the working directory, such"
          " as 'src/main.cc'; name it without '..' and without a leading '/'."
        )
    request = {"command": list(command), "files": list(files), "outputs": list(outputs)}
    outcome, _ = self._call(request, [stdin, *files.values()], limits)
    return outcome

  def run_python(
    self,
    source: str,
    function: str,
    arguments: Mapping[str, Any],
    *,
    limits: Limits = Limits(),
  ) -> tuple[Any, Outcome]:
    """Calls a function of a program.

    The program runs as a module named "program" (so `if __name__ == "__main__"` is false), with
    numpy and scipy available. The global generators of `random` and `numpy.random` start from
    seed 0. Without namespaces, it can import only what its user may read.

    Args:
      source: source of the program.
      function: name of a function that it defines.
      arguments: arguments by name; JSON, numpy arrays become lists.
      limits: limits of this call.

    Returns:
      (value, outcome): the function's value after JSON (arrays and tuples become lists), and the
      outcome. The value is None unless the status is "ok"; its numbers are finite.

    Raises:
      ValueError: if the arguments are not JSON, or the sandbox is closed.
      RuntimeError: see `run`.
    """
    try:
      text = json.dumps(dict(arguments), allow_nan=False, default=entry.as_plain)
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(
        f"Sandbox.run_python: got arguments that JSON cannot represent ({error}), expected finite"
        " numbers, strings, lists and dicts; convert them first."
      ) from error
    request = {"function": function, "arguments": json.loads(text), "files": [], "outputs": []}
    encoded = source.encode(errors="replace")  # Source with lone surrogates is invalid anyway.
    outcome, result = self._call(request, [encoded, b""], limits)
    if outcome.status != "ok":
      return None, outcome
    try:
      return parse_result(result), outcome
    except ValueError as error:
      reason = f"{function}: got an invalid result: {error}\n".encode(errors="replace")
      return None, outcome._replace(status="failed", stderr=outcome.stderr + reason)

  def _start(self) -> tuple[helper.Helper, isolation.Plan]:
    """Returns a new server, with what it can enforce."""
    settings = {
      "readable": readable_paths(),
      "packages": package_paths(),
      "preloaded": self._preloaded,
    }
    environment = {**isolation.ENVIRONMENT, "HOME": "/"}
    started = helper.Helper(server.__name__, settings, environment=environment, has_session=True)
    plan = started.report()
    for field in ("denied", "readable"):
      plan[field] = tuple(tuple(item) if isinstance(item, list) else item for item in plan[field])
    return started, isolation.Plan(**plan)

  def _call(
    self, request: dict[str, Any], blobs: list[bytes], limits: Limits
  ) -> tuple[Outcome, bytes]:
    """Runs a request; returns its outcome and the data from the result's pipe."""
    request["limits"] = dataclasses.asdict(limits)
    request["blobs"] = [len(blob) for blob in blobs]
    reply = self._ask(request, blobs)
    if reply is None:
      with self._lock:
        is_served = self._helper.is_alive
      if not is_served:  # The server was killed, perhaps before it forked.
        reply = self._ask(request, blobs)
    if reply is None:
      reason = b"sandbox: the supervisor was killed (no memory left on this machine?)\n"
      return Outcome("killed", None, b"", reason, {}, 0.0, 0.0), b""
    header, (*parts,) = reply
    if "error" in header:
      raise RuntimeError(
        f"Sandbox: got {header['error']!r} while isolating a program, expected the isolation that"
        f" worked at the start ({self.describe()}); nothing was run."
      )
    stdout, stderr, result, *contents = parts
    outcome = Outcome(
      status=header["status"],
      exit_code=header["exit_code"],
      stdout=stdout,
      stderr=stderr,
      files=dict(zip(header["files"], contents)),
      wall_seconds=header["wall_seconds"],
      cpu_seconds=header["cpu_seconds"],
    )
    return outcome, result

  def _ask(
    self, request: dict[str, Any], blobs: list[bytes]
  ) -> tuple[dict[str, Any], list[bytes]] | None:
    """Sends a request to a fresh supervisor; returns the reply, or None if it was killed."""
    # If this thread is interrupted, the socket closes and the supervisor kills the program.
    with self._supervisor() as ours:
      with contextlib.suppress(ConnectionError):
        messages.send(ours, request, blobs)
      reply = messages.receive(ours)
      with contextlib.suppress(ConnectionError):
        ours.recv(1)  # Returns nothing; waits until the supervisor has ended.
    return reply

  def _supervisor(self) -> socket.socket:
    """Returns a socket to a fresh supervisor; restarts the server if it was killed."""
    with self._lock:
      if self._is_closed:
        raise ValueError("Sandbox: got a call after close(), expected none; create a new Sandbox.")
      if not self._helper.is_alive:
        self._helper.close()
        self._helper, plan = self._start()
        if self._plan != plan:
          self._plan = plan
          raise RuntimeError(
            f"Sandbox: got {self.describe()} from a restarted server, expected the isolation of the"
            " first one; create a new Sandbox."
          )
      return self._helper.call(b"+")


def package_paths() -> list[str]:
  """Returns the directories in which numpy and scipy are installed."""
  paths = []
  for name in ("numpy", "scipy"):
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin:
      paths.append(str(pathlib.Path(spec.origin).parents[1]))
  return list(dict.fromkeys(paths))


def readable_paths() -> list[str]:
  """Returns the paths that programs need to read: system tools, Python, numpy; without repeats."""
  wanted = [path for path in isolation.SYSTEM if os.path.isdir(path)]
  for path in (sys.base_prefix, sys.prefix, *package_paths()):
    path = os.path.abspath(path)
    if path != "/" and not any((path + "/").startswith(other + "/") for other in wanted):
      wanted.append(path)
  others = (*isolation.SYSTEM_FILES, *isolation.DEVICES)
  return wanted + [path for path in others if os.path.exists(path)]


def parse_result(text: bytes) -> Any:
  """Parses strict JSON.

  Raises:
    ValueError: if it is invalid, has a number that is not finite or text that is not valid Unicode,
      or more than `MAX_LISTS` lists or `MAX_DEPTH` levels; has the reason.
  """
  if not text:
    raise ValueError("got no result, expected a value; return instead of exiting")
  # This also counts brackets in strings, which are rare.
  if (num := text.count(b"[") + text.count(b"{")) > MAX_LISTS:
    raise ValueError(f"got {num} lists and dicts, expected at most {MAX_LISTS}")

  def number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
      raise ValueError(f"got {digits[:40]}, expected a finite number")
    return value

  try:
    # json itself would also accept other encodings, and lone surrogates.
    value = json.loads(text.decode(), parse_float=number, parse_constant=number)
    if b"\\ud" in text.lower():
      json.dumps(value, ensure_ascii=False).encode()
  except RecursionError as error:
    raise ValueError(f"got lists nested too deeply, expected at most {MAX_DEPTH} levels") from error
  level = [value]
  for _ in range(MAX_DEPTH):
    level = [
      child
      for item in level
      if isinstance(item, list | dict)
      for child in (item.values() if isinstance(item, dict) else item)
      if isinstance(child, list | dict)
    ]
  if level:
    raise ValueError(f"got lists nested too deeply, expected at most {MAX_DEPTH} levels")
  return value
