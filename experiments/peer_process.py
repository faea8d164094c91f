"""Runs a side of a comparison in a separate process, which answers lines with lines of JSON.

Claim: none; experiments that compare us with llama.cpp, transformers and torch use it.

Peak memory and CPU seconds of a process of its own are the side's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import json
import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import types
from typing import Any

from experiments import llama_cpp

ROOT = pathlib.Path(__file__).parents[1]
# Additional packages by kind of side.
PACKAGES = {"transformers": ("torch", "transformers"), "llama.cpp": (llama_cpp.PACKAGE,)}


def environment() -> dict[str, str]:
  """Returns the environment of a side's process: our modules are importable, JAX uses the CPU."""
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
  return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


class Process:
  """A side in a separate process.

  Args:
    module: the module to run, which calls `serve`.
    arguments: its arguments.
    python: Python interpreter with the side's packages.
    log: file for stderr; None leaves it to this process.
  """

  def __init__(
    self,
    module: str,
    *arguments: str,
    python: str = sys.executable,
    log: pathlib.Path | None = None,
  ):
    with contextlib.nullcontext() if log is None else log.open("wb") as file:
      self._process = subprocess.Popen(
        [python, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
        text=True, env=environment(),
      )  # fmt: skip

  def send(self, line: str) -> None:
    """Sends a line.

    Raises:
      BrokenPipeError: if the process ended.
    """
    assert self._process.stdin is not None
    print(line, file=self._process.stdin, flush=True)

  def ask(self, line: str = "go") -> dict[str, Any]:
    """Sends a line; returns the reply, or {"error": ...} if the side fails."""
    assert self._process.stdout is not None
    try:
      self.send(line)
      text = self._process.stdout.readline()
    except BrokenPipeError:
      text = ""
    return json.loads(text) if text else dict(error="its process ended")

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None and self._process.stdout is not None
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def serve(records: Iterable[dict[str, Any]]) -> None:
  """Prints each record as a line of JSON; an exception is printed as {"error": ...} and raised.

  Args:
    records: a generator, which builds the side and yields a record for each line on stdin.
  """
  reply = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Output of libraries must not be mistaken for a reply.
  try:
    for record in records:
      print(json.dumps(record), file=reply, flush=True)
  except Exception as error:  # A side's failure is a result, reported under its name.
    print(json.dumps(dict(error=f"{type(error).__name__}: {error}")), file=reply, flush=True)
    raise


def answer(name: str, python: str, program: types.ModuleType, request: dict[str, Any]) -> Any:
  """Runs a module's file with a request on stdin; returns its last line, both as JSON.

  Args:
    name: name of the side, for messages.
    python: Python interpreter with its packages.
    program: the module; it imports the side's packages only when it runs.
    request: what it reads.

  Raises:
    RuntimeError: with the end of its output, if it fails.
  """
  assert program.__file__ is not None
  done = subprocess.run(
    [python, "-P", program.__file__], input=json.dumps(request),
    capture_output=True, text=True, check=False, env=environment() | {"HF_HUB_OFFLINE": "1"},
  )  # fmt: skip
  if done.returncode:
    raise RuntimeError(f"{name}: got status {done.returncode}: {done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
  """Returns an unused port."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def peak_memory() -> int:
  """Returns the peak resident memory of this process since exec, in bytes.

  On Linux `ru_maxrss` is inherited through fork and exec, so a small child of a large parent would
  seem as large. VmHWM starts anew with each program.
  """
  status = pathlib.Path("/proc/self/status")
  if not status.exists():  # macOS, where `ru_maxrss` is in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
  return int(kibibytes) * 1024


def missing_packages(packages: Sequence[str], python: str) -> list[str]:
  """Returns the packages that a Python interpreter lacks."""
  if not packages:
    return []
  program = (
    "import importlib.util, sys;"
    " print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
  )
  command = [python, "-P", "-c", program, *packages]
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def missing_of(kind: str, python: str) -> list[str]:
  """Returns the packages of a kind of side that a Python interpreter lacks."""
  return missing_packages(PACKAGES.get(kind, ()), python)


def pythons(torch_python: str) -> dict[str, str]:
  """Returns the Python interpreter of each kind of side.

  Args:
    torch_python: interpreter for transformers; if empty, this one if it has torch, else that of
      .venv-3.11 if it exists (torch's CPU build is only locked for Python 3.11).
  """
  venv_python = ROOT / ".venv-3.11" / "bin" / "python"
  if not torch_python:
    is_here = not missing_of("transformers", sys.executable)
    torch_python = str(venv_python) if venv_python.exists() and not is_here else sys.executable
  here = dict.fromkeys(("ours", "llama.cpp"), sys.executable)
  return here | {"transformers": torch_python}


def check_names(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
  """Rejects unknown names of a flag.

  Raises:
    ValueError: naming them.
  """
  known = tuple(known)
  if unknown := [name for name in names if name not in known]:
    raise ValueError(
      f"{flag}: got {', '.join(unknown)}, expected some of {', '.join(known)}; correct the name."
    )


def left_out(names: Sequence[str], packages: Sequence[str]) -> str:
  """Returns a line on sides that are not measured, because packages are missing."""
  return (
    f"{' and '.join(packages)} not installed: {', '.join(names)} left out (`bash launch/peers.sh`"
    " installs what this experiment compares with)"
  )
