"""The workers that read grammars, as the server of answers sees them: a socket each.

    Server --fork--> worker --`Line`--> answers, in the order of what was asked, or how it ended

No call waits for a worker but `wait`, and that as long as it is told to.
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

# Of a worker: beyond, a fresh one takes its place, so that no grammar is blamed for what others
# have left there.
MOST_COMPILED = 256
MOST_MIB = 512
Asker = TypeVar("Asker")
Answer = tuple[int, float, float, bytes]  # Kind, seconds of compiling and of masks, mask or text.


class Line(Generic[Asker]):
  """A worker's socket: what was asked by it, in order, and what came back."""

  def __init__(self, channel: socket.socket):
    channel.setblocking(False)
    self.channel = channel
    self.asked: collections.deque[tuple[Asker, int]] = collections.deque()
    self.digests: set[str] = set()
    self.sessions: dict[int, list[int]] = {}
    self.gone: list[int] = []
    self.mib = 0
    self.process = 0  # Until it has told.
    self.is_yielding = False
    self.since = 0.0  # When the first of `asked` became that.
    self._out, self._in = bytearray(), bytearray()

  @property
  def is_used_up(self) -> bool:
    """Whether a fresh one should take its place."""
    return self.is_yielding or len(self.digests) > MOST_COMPILED or self.mib > MOST_MIB

  def yield_to(self, nice: int) -> None:
    """Has the worker leave the cores to others, for good: no process may take that back."""
    self.is_yielding = True
    with contextlib.suppress(OSError):  # It may have just ended.
      if self.process:
        os.setpriority(os.PRIO_PROCESS, self.process, nice)

  def put(self, asks: list[dict[str, Any]]) -> None:
    """Sends what is asked as far as the socket takes it; see `flush`."""
    text = json.dumps({"gone": self.gone, "asks": asks}).encode()
    self.gone = []
    self._out += grammar_server.LENGTH.pack(len(text)) + text
    self.flush()

  def flush(self) -> None:
    """Sends what is left, as far as the socket takes it."""
    try:
      while self._out:
        del self._out[: self.channel.send(self._out)]
    except BlockingIOError:
      pass
    except OSError:  # It died; `take` will tell.
      self._out.clear()

  @property
  def is_flushed(self) -> bool:
    """Whether all is sent."""
    return not self._out

  def take(self) -> tuple[list[Answer], str | None]:
    """Returns the answers that are there, and how the worker ended: by an exit code, by "" for a
    cause that nobody told of, None if it did not end."""
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
    """Lets the worker end."""
    self.channel.close()


class Server:
  """The process that forks workers."""

  def __init__(self, tokenizer: str, settings: Mapping[str, Any]):
    """Starts it, and does not wait for it.

    Args:
      tokenizer: as its JSON.
      settings: vocab_size, eos_ids, and the fields of `Limits`.
    """
    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # No interpreter's variable, no token and no path of ours is passed on.
    environment = {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    if "LD_LIBRARY_PATH" in os.environ:  # Some interpreters do not start without.
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
        # An interrupt at the terminal is not for it. A session of its own would do the same, but
        # Linux shares the cores between sessions first, and then by niceness inside each.
        process_group=0,
      )
    self._process = process
    self._finalizer = weakref.finalize(self, _end, self._control, process)

  @property
  def is_alive(self) -> bool:
    """Whether it runs."""
    return self._process.poll() is None

  def line(self, nice: int) -> Line:
    """Returns a line to a fresh worker."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.suppress(OSError):  # It may have just died: the line says so then.
      socket.send_fds(self._control, [bytes([nice])], [theirs.fileno()])
    return Line(ours)

  def close(self) -> None:
    """Ends it, and with it the workers that have nothing more to do."""
    self._finalizer()


def wait(lines: Sequence[Line], seconds: float) -> bool:
  """Waits until a worker has said something or takes more; returns whether one has."""
  poll = select.poll()  # A descriptor may be any number.
  for line in lines:
    poll.register(line.channel, select.POLLIN | (0 if line.is_flushed else select.POLLOUT))
  found = poll.poll(max(1, round(1000 * seconds)))
  for line in lines:
    line.flush()
  return bool(found)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
  control.close()  # The server's sign to end.
  try:
    process.wait(timeout=10)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


def _package_path() -> str:
  """Returns where llguidance was installed for this interpreter."""
  spec = importlib.util.find_spec("llguidance")
  if spec is None or not spec.origin:
    raise ValueError("serve: got no llguidance, expected it; install the extra `serve`.")
  return str(pathlib.Path(spec.origin).parents[1])
