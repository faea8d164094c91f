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
import tempfile
from typing import Any, Generic, TypeVar

from seerjax.sandbox import helper
from seerjax.serve import grammar_server

# Per worker; above these a fresh worker replaces it, so that state left by earlier grammars is not
# held against a later one.
MOST_COMPILED = 256
MOST_MIB = 512
Asker = TypeVar("Asker")
Answer = tuple[int, float, float, bytes]  # Kind, seconds of compiling and of masks, mask or text.


def start(tokenizer: str, settings: Mapping[str, Any]) -> helper.Helper:
  """Starts the process that forks the workers, without waiting for it.

  Args:
    tokenizer: the tokenizer as JSON.
    settings: vocab_size, eos_ids, and the fields of `Limits`.
  """
  settings = {**settings, "packages": [_package_path()]}
  with tempfile.TemporaryFile() as file:
    file.write(tokenizer.encode())
    file.flush()
    return helper.Helper(grammar_server.__name__, settings, descriptors=[file.fileno()])


class Line(Generic[Asker]):
  """Socket of one worker, with its outstanding requests in order."""

  def __init__(self, server: helper.Helper, nice: int):
    """Connects to a fresh worker of this nice value; `take` reports a server that has died."""
    self.channel = server.call(bytes([nice]))
    self.channel.setblocking(False)
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


def wait(lines: Sequence[Line], seconds: float) -> bool:
  """Waits until a worker answers or accepts data; returns whether one did in time."""
  poll = select.poll()  # Unlike select, takes descriptors of any number.
  for line in lines:
    poll.register(line.channel, select.POLLIN | (0 if line.is_flushed else select.POLLOUT))
  found = poll.poll(max(1, round(1000 * seconds)))
  for line in lines:
    line.flush()
  return bool(found)


def _package_path() -> str:
  """Returns the directory where llguidance is installed."""
  spec = importlib.util.find_spec("llguidance")
  if spec is None or not spec.origin:
    raise ValueError("serve: got no llguidance, expected the package; install the extra `serve`.")
  return str(pathlib.Path(spec.origin).parents[1])
