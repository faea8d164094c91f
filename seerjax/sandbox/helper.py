"""Starts a helper: a small process that forks a child for each call, so that this one never forks.

  Helper --control socket--> the helper   imports its module once, then only forks
         --one socket a call-----`- child  serves that call

A fork of this process would copy the locks that JAX's threads hold, but not the threads. A helper
is a fresh interpreter: it gets no variables, paths and descriptors of the caller, no interrupt of
the terminal, and imports this package by its path. Its module has `main(control, settings,
*descriptors)`, which forks for each socket that arrives on `control` and returns at EOF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import types
from typing import Any
import weakref

PACKAGE = pathlib.Path(__file__).parents[1]
NOTHING: Mapping[str, str] = types.MappingProxyType({})
CLOSE_SECONDS = 10  # Until a helper that does not end by itself is killed.
# The package itself is not imported, and children do not find its modules.
PROGRAM = """
import importlib, json, socket, sys, types
_, name, path, module, settings, control, *descriptors = sys.argv
package = sys.modules[name] = types.ModuleType(name)
package.__path__ = [path]
main = importlib.import_module(module).main
for one in [one for one in sys.modules if one.partition(".")[0] == name]:
  del sys.modules[one]
main(socket.socket(fileno=int(control)), json.loads(settings), *map(int, descriptors))
"""


class Helper:
  """A helper process; ends when it is closed or collected, or when this process ends."""

  def __init__(
    self,
    module: str,
    settings: Mapping[str, Any],
    *,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] = NOTHING,
    has_session: bool = False,
  ):
    """Starts the process without waiting for it.

    Args:
      module: the full name of a module of this package.
      settings: passed to its `main`; JSON.
      descriptors: open files that are passed to its `main`, too.
      environment: variables besides those that an interpreter needs.
      has_session: whether it gets a session, not only a process group. Linux first divides the
        cores between sessions, and ignores nice values across them.
    """
    self._module = module
    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
    if "LD_LIBRARY_PATH" in os.environ:  # Some interpreters do not start without it.
      variables["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    passed = [theirs.fileno(), *descriptors]
    arguments = [PACKAGE.name, str(PACKAGE), module, json.dumps(settings), *map(str, passed)]
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, "-P", "-s", "-c", PROGRAM, *arguments],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=variables,
        cwd="/",
        start_new_session=has_session,
        process_group=None if has_session else 0,
      )
    self._finalizer = weakref.finalize(self, _end, self._control, self._process)

  @property
  def is_alive(self) -> bool:
    """Whether the process runs, that is, whether its socket is open."""
    try:
      return bool(self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
      return True
    except OSError:  # Closed by this side, or reset.
      return False

  def report(self) -> dict[str, Any]:
    """Returns the JSON that the helper sends first.

    Raises:
      RuntimeError: if it ends without sending anything.
    """
    text = self._control.recv(2**16)
    if not text:
      self.close()
      raise RuntimeError(
        f"{self._module}: got exit code {self._process.returncode} from its server, expected it to"
        f" start; run `{sys.executable} -m {self._module}` by hand to see why."
      )
    return json.loads(text)

  def call(self, message: bytes) -> socket.socket:
    """Returns a socket to a fresh child that gets `message`; at EOF if the helper is gone."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.suppress(OSError):
      socket.send_fds(self._control, [message], [theirs.fileno()])
    return ours

  def close(self) -> None:
    """Ends the process; children that serve a call go on."""
    self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
  control.close()  # Tells the helper to end.
  try:
    process.wait(timeout=CLOSE_SECONDS)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
