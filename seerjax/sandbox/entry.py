"""The program's process: drops its privileges, sets its limits, then runs untrusted code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import json
import linecache
import os
import platform
import random
import signal
import sys
import traceback
import types
from typing import Any

from seerjax.sandbox import confinement, isolation, linux

NO_MEMORY = b"memory"  # Not JSON: sent instead of a result after a MemoryError.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
  """Directories and descriptors of a program.

  Attributes:
    root: directory that becomes its "/"; "" without a separate root.
    work, temporary: its working directory and /tmp, as paths of the supervisor.
    inside: its working directory, as a path of the program.
    place: descriptor of its working directory, because a running program may replace the path.
    stdin: descriptor of its standard input.
    processes: proc file system with its processes only, or the host's; "" if there is none.
  """

  root: str
  work: str
  temporary: str
  inside: str
  place: int
  stdin: int
  processes: str


def become_program(
  plan: isolation.Plan, request: Mapping[str, Any], blobs: list[bytes], box: Box, writers: list[int]
) -> None:
  """Drops privileges, reports "ready", and then runs untrusted code."""
  setup, stdout, stderr, result = writers
  try:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Makes the kernel choose this process first when the machine runs out of memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")
    move_descriptors([box.stdin, stdout, stderr, result, setup])
    stdout, stderr, result, setup = 1, 2, 3, 4
    if box.root:
      pivot(box.root)
    os.chdir(box.inside)
    confinement.drop_privileges(plan)
    others = 0 if plan.nests else confinement.count_tasks(os.getuid())
    # Die with the supervisor. Set after the change of user, which resets it.
    linux.kernel("prctl", linux.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    linux.kernel("prctl", linux.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A single byte keeps a whole huge page alive: in a pipe, or mapped alone, it evades the sums.
    with contextlib.suppress(OSError):  # Not every kernel supports huge pages.
      linux.kernel("prctl", linux.PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if plan.landlock:
      confinement.restrict_files(
        plan.landlock,
        read=["/"] if box.root else plan.readable,
        write=["/box", "/tmp"] if box.root else [box.work, box.temporary],
        devices=isolation.DEVICES,
      )
    os.environ.clear()
    os.environ.update(isolation.ENVIRONMENT)
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    if not box.root:
      os.environ.update({"HOME": box.work, "TMPDIR": box.temporary})
    confinement.set_limits(request["limits"], others)
    if plan.seccomp:
      confinement.filter_calls(platform.machine())
    os.write(setup, b"ready")
    os.close(setup)
  except BaseException as error:
    os.write(setup, f"{type(error).__name__}: {error}".encode())
    os._exit(70)
  if "function" in request:
    call_function(request["function"], blobs[0], request["arguments"], result)
  os.close(result)
  for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; programs should not.
    signal.signal(number, signal.SIG_DFL)
  try:
    os.execvpe(request["command"][0], request["command"], dict(os.environ))
  except OSError as error:
    os.write(2, f"sandbox: got command {request['command'][0]!r}: {error.strerror}\n".encode())
    os._exit(127)


def move_descriptors(wanted: Sequence[int]) -> None:
  """Renumbers `wanted` to 0, 1, ...; keeps 0 to 2 open across exec, and closes all others."""
  high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in wanted]
  for place, descriptor in enumerate(high):
    os.dup2(descriptor, place, inheritable=place < 3)
  os.closerange(len(wanted), 2**20)


def pivot(root: str) -> None:
  """Makes `root` the root directory, and unmounts the old one."""
  linux.kernel(
    "unshare", linux.CLONE_NEWNS
  )  # The supervisor keeps its own mounts, to read the outputs.
  os.chdir(root)
  linux.kernel("syscall", {"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b".")
  linux.kernel("umount2", b".", linux.MNT_DETACH)
  os.chdir("/")


def call_function(function: str, source: bytes, arguments: Mapping[str, Any], result: int) -> None:
  """Calls a function of the source, writes its value to `result` as JSON, and ends the process."""
  # Saved, because the program may replace them.
  write, leave, dumps = os.write, os._exit, json.dumps
  code = 1
  try:
    text = source.decode()
    linecache.cache["program.py"] = (len(text), None, text.splitlines(True), "program.py")
    # All forks inherit the same generator state; seeding makes it the same for every server.
    random.seed(0)
    if "numpy" in sys.modules:
      sys.modules["numpy"].random.seed(0)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)
    value = module.__dict__[function](**arguments)
    sent = dumps(value, allow_nan=False, default=as_plain).encode()
    sys.stdout.flush()
    while sent:
      sent = sent[write(result, sent) :]
    code = 0
  except MemoryError:
    write(2, b"MemoryError\n")
    write(result, NO_MEMORY)
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else 1
  except BaseException:
    traceback.print_exc()
  finally:
    with contextlib.suppress(BaseException):
      sys.stdout.flush()
      sys.stderr.flush()
    leave(code & 255)


def as_plain(value: Any) -> Any:
  """Returns a numpy array or scalar as lists and numbers, for JSON."""
  if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"got a {type(value).__name__}, expected what JSON can hold; return lists")
