"""Client side of the grammar workers: starts their server and talks to each over a socket.

    Server --fork--> worker --`Line`--> answers in order of the requests, or how the worker ended

Only `wait` blocks, and at most for the given time.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import contextlib
import importlib.util
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
from typing import Any, Generic, TypeVar
import weakref

from seerjax.serve import grammar_server

# Per worker; above these a fresh worker replaces it, so that state left by earlier grammars is not
# held against a later one.
MOST_COMPILED = 256
MOST_MIB = 512
Asker = TypeVar("Asker")
Answer = tuple[int, float, float, bytes]  # Kind, seconds of compiling and of masks, mask or text.


class Line(Generic[Asker]):
  """Socket of one worker, with its outstanding requests in order."""

  def __init__(self, channel: socket.socket):
    channel.setblocking(False)
    self.channel = channel
    self.asked: collections.deque[tuple[Asker, int]] = collections.deque()
    self.digests: set[str] = set()
    self.sessions: dict[int, list[int]] = {}
    self.gone: list[int] = []
    self.mib = 0
    self.process = 0  # Process id; 0 until the worker reports it.
    self.is_yielding = False
    self.since = 0.0  # When the first of `asked` became the first.
    self._out, self._in = bytearray(), bytearray()

  @property
  def is_used_up(self) -> bool:
    """Whether a fresh worker should replace this one."""
    return self.is_yielding or len(self.digests) > MOST_COMPILED or self.mib > MOST_MIB

  def yield_to(self, nice: int) -> None:
    """Raises the worker's nice value for good: an unprivileged process cannot lower it again."""
    self.is_yielding = True
    with contextlib.suppress(OSError):  # The worker may have just ended.
      if self.process:
        os.setpriority(os.PRIO_PROCESS, self.process, min(os.nice(0) + nice, 19))

  def put(self, asks: list[dict[str, Any]]) -> None:
    """Sends requests as far as the socket accepts them without blocking; see `flush`."""
    text = json.dumps({"gone": self.gone, "asks": asks}).encode()
    self.gone = []
    self._out += grammar_server.LENGTH.pack(len(text)) + text
    self.flush()

  def flush(self) -> None:
    """Sends buffered data as far as the socket accepts it."""
    try:
      while self._out:
        del self._out[: self.channel.send(self._out)]
    except BlockingIOError:
      pass
    except OSError:  # The worker died; `take` reports it.
      self._out.clear()

  @property
  def is_flushed(self) -> bool:
    """Whether all data was sent."""
    return not self._out

  def take(self) -> tuple[list[Answer], str | None]:
    """Returns (available answers, how the worker ended).

    The second is an exit code as text, "" if the socket closed without one, or None while the
    worker runs.
    """
    ending: str | None = None
    try:
      while part := self.channel.recv(1 << 18):
        self._in += part
      ending = ""
    except BlockingIOError:
      pass
    except OSError:
      ending = ""
    found, head = [], grammar_server.HEAD
    while len(self._in) >= head.size:
      kind, session, compiling, masking, mib, length = head.unpack_from(self._in)
      if len(self._in) < head.size + length:
        break
      text = bytes(self._in[head.size : head.size + length])
      del self._in[: head.size + length]
      if kind == grammar_server.DEAD:
        ending = text.decode()
        break
      if kind == grammar_server.BORN:
        self.process = session
        continue
      self.mib = mib
      found.append((kind, compiling, masking, text))
    return found, ending

  def close(self) -> None:
    """Closes the socket, which ends the worker."""
    self.channel.close()


class Server:
  """The process that forks the workers."""

  def __init__(self, tokenizer: str, settings: Mapping[str, Any]):
    """Starts the process without waiting for it.

    Args:
      tokenizer: the tokenizer as JSON.
      settings: vocab_size, eos_ids, and the fields of `Limits`.
    """
    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Pass on no variables of the interpreter, no token and no paths.
    environment = {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    if "LD_LIBRARY_PATH" in os.environ:  # Some interpreters do not start without it.
      environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    said = json.dumps({**settings, "packages": [_package_path()]})
    with theirs, tempfile.TemporaryFile() as file:
      file.write(tokenizer.encode())
      file.flush()
      passed = [theirs.fileno(), file.fileno()]
      process = subprocess.Popen(
        [sys.executable, "-P", "-s", grammar_server.__file__, *map(str, passed), said],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        # Shields the process from an interrupt at the terminal. A separate session would, too, but
        # Linux first divides the cores between sessions and would ignore nice values across them.
        process_group=0,
      )
    self._process = process
    self._finalizer = weakref.finalize(self, _end, self._control, process)

  @property
  def is_alive(self) -> bool:
    """Whether the process runs."""
    return self._process.poll() is None

  def line(self, nice: int) -> Line:
    """Returns a line to a fresh worker with this nice value."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.suppress(OSError):  # If the server just died, the line reports it.
      socket.send_fds(self._control, [bytes([nice])], [theirs.fileno()])
    return Line(ours)

  def close(self) -> None:
    """Ends the process, and thereby its idle workers."""
    self._finalizer()


def wait(lines: Sequence[Line], seconds: float) -> bool:
  """Waits until a worker answers or accepts data; returns whether one did in time."""
  poll = select.poll()  # Unlike select, takes descriptors of any number.
  for line in lines:
    poll.register(line.channel, select.POLLIN | (0 if line.is_flushed else select.POLLOUT))
  found = poll.poll(max(1, round(1000 * seconds)))
  for line in lines:
    line.flush()
  return bool(found)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
  control.close()  # Tells the server to end.
  try:
    process.wait(timeout=10)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


def _package_path() -> str:
  """Returns the directory where llguidance is installed."""
  spec = importlib.util.find_spec("llguidance")
  if spec is None or not spec.origin:
    raise ValueError("serve: got no llguidance, expected the package; install the extra `serve`.")
  return str(pathlib.Path(spec.origin).parents[1])
