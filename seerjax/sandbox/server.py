"""Server process of `sandbox.sandbox`, which isolates and runs untrusted programs.

  sandbox.Sandbox --socket--> server           imports numpy and scipy once, then only forks
                                `- supervisor   pid 1 of fresh namespaces; pipes, limits, verdict
                                     `- program  drops all privileges, then runs untrusted code

The server never reads untrusted data: it passes each call's socket to a fork. The supervisor builds
an empty root (read-only system and Python, small private /box and /tmp). When the program ends or
exceeds a limit, the supervisor kills all remaining processes: as pid 1 it is out of the program's
reach, and nothing outlives it. The program's process drops its privileges and sets its limits
before it reads any untrusted line. All of this uses only the standard library and system calls.

`helper` starts it; programs never import it. Source: man pages namespaces(7), landlock(7),
seccomp(2), pivot_root(2), getrlimit(2).
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import platform
import signal
import socket
import sys
from typing import Any

from seerjax.sandbox import children, confinement, isolation, linux, messages, supervisor

# Modules imported before every function call; missing ones are skipped.
PRELOADED = ("numpy", "scipy.optimize")


def main(control: socket.socket, settings: Mapping[str, Any]) -> None:
  """Reports the plan, imports what programs need, then forks for each call until EOF."""
  os.umask(0o022)  # The unprivileged user must be able to read files that root creates.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reaps supervisors automatically.
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # A program may send it to its supervisor.
  # A supervisor's parent ends at once, so the server becomes its parent.
  linux.kernel("prctl", linux.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  plan = find_plan(tuple(settings["readable"]))
  wait_for_supervisors()
  control.send(json.dumps(dataclasses.asdict(plan)).encode())
  sys.path.extend(path for path in settings["packages"] if path not in sys.path)
  for name in (*PRELOADED, *settings["preloaded"]):
    with contextlib.suppress(BlockingIOError):
      if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
        return  # Closed already: skip the other imports.
    with contextlib.suppress(ImportError):
      __import__(name)
  gc.collect()
  gc.freeze()  # Keeps these pages shared with forks for longer.
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not message:
      break
    # If the process limit prevents a fork, the caller sees its socket close.
    with socket.socket(fileno=descriptors[0]) as caller, contextlib.suppress(OSError):
      if os.fork() == 0:
        control.close()
        children.in_child(enter, plan, caller)
  wait_for_supervisors()


def wait_for_supervisors() -> None:
  """Waits until the last child has ended; because SIGCHLD is ignored, no status is returned."""
  with contextlib.suppress(ChildProcessError):
    os.waitpid(-1, 0)


def enter(plan: isolation.Plan, caller: socket.socket) -> None:
  """Enters fresh namespaces, and forks the supervisor as pid 1 there."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  try:
    enter_namespaces(plan.namespaces)
    if not plan.namespaces:
      supervisor.supervise(plan, caller)
    elif os.fork() == 0:
      children.in_child(supervisor.supervise, plan, caller)
  except BaseException as error:
    messages.answer(caller, {"error": f"{type(error).__name__}: {error}"}, [])


def enter_namespaces(kind: str) -> None:
  """Enters new namespaces; the next fork is pid 1. `kind` is as in `Plan.namespaces`."""
  if not kind:
    return
  user, group = os.geteuid(), os.getegid()
  linux.kernel("unshare", linux.NAMESPACES | (linux.CLONE_NEWUSER if kind == "user" else 0))
  if kind == "user":
    for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{isolation.NOBODY} {user} 1"),
      ("gid_map", f"{isolation.NOBODY} {group} 1"),
    ):
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
  # Mounts made here are not visible outside.
  linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)


def find_plan(readable: tuple[str, ...]) -> isolation.Plan:
  """Tries every isolation layer in a child process, the strongest first."""
  denied = []
  plan = isolation.Plan(readable=readable)

  def works(name: str, candidate: isolation.Plan) -> bool:
    ours, theirs = socket.socketpair()
    with ours:
      if os.fork() == 0:
        ours.close()
        children.in_child(enter, candidate, theirs)
      theirs.close()
      source = b"def probe(): return 1"
      request = {
        "function": "probe", "arguments": {}, "blobs": [len(source)], "files": [], "outputs": [],
        "limits": dict(
          wall_seconds=30.0, cpu_seconds=30.0, memory_bytes=2**31, file_bytes=2**20,
          output_bytes=2**16, num_processes=8, num_files=16,
        ),
      }  # fmt: skip
      with contextlib.suppress(OSError):
        messages.send(ours, request, [source])
      reply = messages.receive(ours)
      with contextlib.suppress(OSError):
        ours.recv(1)  # Returns nothing; waits until the supervisor has ended.
    if reply is None:
      denied.append((name, "the probe was killed"))
    elif "error" in reply[0]:
      denied.append((name, reply[0]["error"]))
    elif reply[0]["status"] != "ok":
      denied.append((name, reply[1][1].decode(errors="replace")[-400:]))
    else:
      return True
    return False

  for kind in ("root", "user") if os.geteuid() == 0 else ("user",):
    if works(f"namespaces ({kind})", dataclasses.replace(plan, namespaces=kind)):
      plan = dataclasses.replace(plan, namespaces=kind)
      break
  if plan.namespaces:
    for field in ("nests", "watches"):
      candidate = dataclasses.replace(plan, **{field: True})
      plan = candidate if works(field, candidate) else plan
  else:
    plan = dataclasses.replace(plan, watches=True)
  version = linux.LIBC.syscall(confinement.LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
  candidate = dataclasses.replace(plan, landlock=max(version, 0))
  if version < 1:
    denied.append(("landlock", os.strerror(ctypes.get_errno())))
  elif works("landlock", candidate):
    plan = candidate
  candidate = dataclasses.replace(plan, seccomp=True)
  if platform.machine() not in confinement.ARCHITECTURES:
    denied.append(("seccomp", f"no table of system calls for {platform.machine()}"))
  elif works("seccomp", candidate):
    plan = candidate
  return dataclasses.replace(plan, denied=tuple(denied))
