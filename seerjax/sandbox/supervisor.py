"""Supervisor of one program, pid 1 of fresh namespaces: pipes, limits, verdict.

It builds an empty root (read-only system and Python, small private /box and /tmp). When the program
ends or exceeds a limit, it kills all remaining processes: as pid 1 it is out of the program's
reach, and nothing outlives it. Source: man pages pivot_root(2), proc(5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import math
import os
import resource
import select
import signal
import socket
import stat
import tempfile
import time
from typing import Any

from seerjax.sandbox import children, entry, isolation, linux, messages

WATCH_SECONDS = 0.05  # Interval at which the supervisor sums the resources of all processes.
SETUP_SECONDS = 60.0  # Timeout of the set-up.


def supervise(plan: isolation.Plan, caller: socket.socket) -> None:
  """Reads a request, runs the program, and sends its outcome."""
  message = messages.receive(caller)
  if message is None:
    return
  request, blobs = message
  stage = ""
  try:
    if not plan.namespaces:
      linux.kernel("prctl", linux.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
      stage = tempfile.mkdtemp(prefix="sandbox-")
    box = make_box(plan, request, blobs, stage)
    outcome, parts = watch(plan, caller, request, blobs, box)
    if outcome:
      for name, content in read_outputs(box.place, request).items():
        outcome["files"].append(name)
        parts.append(content)
      messages.answer(caller, outcome, parts)
  except BaseException as error:
    messages.answer(caller, {"error": f"{type(error).__name__}: {error}"}, [])
  finally:
    children.kill_all(plan)
    if stage:
      remove_tree(stage)


def make_box(
  plan: isolation.Plan, request: Mapping[str, Any], blobs: list[bytes], stage: str
) -> entry.Box:
  """Builds the program's root (or a bare directory without namespaces), and creates its files.

  Args:
    plan: plan of the server.
    request: request of the caller.
    blobs: source (if there is one), standard input, then the contents of the files.
    stage: an empty directory on the host, used without namespaces.
  """
  processes = "/proc"
  box = stage
  root = ""
  if plan.namespaces:
    # Any directory without needed contents works, because no other process sees this mount.
    stage = next(
      path for path in ("/sys", "/mnt", "/srv", "/media", "/opt")
      if os.path.isdir(path) and not any((r + "/").startswith(path + "/") for r in plan.readable)
    )  # fmt: skip
    linux.mount("tmpfs", stage, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=64k,mode=755")
    root, processes = f"{stage}/root", f"{stage}/proc"
    os.mkdir(root)
    os.mkdir(processes)
    if plan.watches:
      linux.mount("proc", processes, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    box = f"{root}/box"
    for path in ("/box", "/tmp", "/dev", "/etc"):
      os.mkdir(root + path)
    size = 4 * request["limits"]["file_bytes"] + 2 * sum(map(len, blobs)) + 2**20
    most_files = 4096 + 2 * len(blobs)
    linux.mount(
      "tmpfs", box, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"size={size},nr_inodes={most_files}"
    )
  os.chmod(box, 0o755)
  work, temporary = f"{box}/work", f"{box}/tmp"
  for path in (work, temporary):
    os.mkdir(path, 0o700)
  if root:
    linux.mount(temporary, f"{root}/tmp", "none", linux.MS_BIND)
    fill_root(root, plan.readable)
  contents = list(blobs)
  if "function" in request:
    contents.pop(0)
  # Standard input is an unlinked file, so that nothing blocks and no writer is needed.
  with open(f"{box}/stdin", "w+b") as file:
    file.write(contents.pop(0) if contents else b"")
    file.flush()
    stdin = os.open(f"{box}/stdin", os.O_RDONLY | os.O_CLOEXEC)
  os.unlink(f"{box}/stdin")
  owner = isolation.NOBODY if os.geteuid() == 0 else -1
  for name, content in zip(request["files"], contents):
    path = work
    *folders, last = name.split("/")
    for folder in folders:
      path = f"{path}/{folder}"
      if not os.path.isdir(path):
        os.mkdir(path, 0o755)
        os.chown(path, owner, owner)
    with open(f"{path}/{last}", "xb") as file:
      file.write(content)
    os.chmod(f"{path}/{last}", 0o755)
    os.chown(f"{path}/{last}", owner, owner)
  for path in (work, temporary):
    os.chown(path, owner, owner)
  return entry.Box(
    root=root,
    work=work,
    temporary=temporary,
    inside="/box/work" if root else work,
    place=os.open(work, os.O_RDONLY | os.O_DIRECTORY),
    stdin=stdin,
    processes=processes if plan.watches else "",
  )


def fill_root(root: str, readable: Sequence[str]) -> None:
  """Mounts system and Python in a new root, read-only, at their usual paths."""
  for path in readable:
    target = root + path
    if path in isolation.SYSTEM and os.path.islink(path):
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.symlink(os.readlink(path), target)
      continue
    if os.path.isdir(path):
      os.makedirs(target, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(target), exist_ok=True)
      os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(path, target, "none", linux.MS_BIND | linux.MS_REC)
    flags = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID
    linux.make_read_only(
      target, flags=flags if path in isolation.DEVICES else flags | linux.MOUNT_ATTR_NODEV
    )
  os.symlink("/tmp", f"{root}/dev/shm")
  with open(f"{root}/etc/passwd", "w") as file:
    file.write(f"nobody:x:{isolation.NOBODY}:{isolation.NOBODY}:nobody:/box/work:/bin/sh\n")
  with open(f"{root}/etc/group", "w") as file:
    file.write(f"nogroup:x:{isolation.NOBODY}:\n")
  os.chmod(f"{root}/etc/passwd", 0o644)
  os.chmod(f"{root}/etc/group", 0o644)
  # Only this mount: /box and /tmp stay writable.
  linux.mount(
    "none", root, "none", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID
  )


def watch(
  plan: isolation.Plan,
  caller: socket.socket,
  request: Mapping[str, Any],
  blobs: list[bytes],
  box: entry.Box,
) -> tuple[dict[str, Any], list[bytes]]:
  """Runs the program until it ends or exceeds a limit.

  Returns:
    (fields of the outcome, [standard output, standard error, result]); both empty if the caller
    closed the connection.
  """
  limits = request["limits"]
  setup, stdout, stderr, result = pipes = [os.pipe() for _ in range(4)]
  program = os.fork()
  if program == 0:
    children.in_child(entry.become_program, plan, request, blobs, box, [pipe[1] for pipe in pipes])
  for pipe in pipes:
    os.close(pipe[1])
  os.close(box.stdin)
  most = {
    setup[0]: 2**16, stdout[0]: limits["output_bytes"], stderr[0]: limits["output_bytes"],
    result[0]: limits["file_bytes"],
  }  # fmt: skip
  got = {descriptor: bytearray() for descriptor in most}
  ended = os.pidfd_open(program)
  poll = select.poll()
  for descriptor in (*most, ended, caller.fileno()):
    poll.register(descriptor, select.POLLIN)
  status = ""
  begin = last_look = time.monotonic()
  is_set_up = False

  def read(descriptor: int) -> bool:
    """Reads available data; returns False at the end of the pipe or above its limit."""
    nonlocal status
    part = os.read(descriptor, 2**16)
    got[descriptor] += part
    if len(got[descriptor]) > most[descriptor]:
      status = status or "output"
      del got[descriptor][most[descriptor] :]
      return False
    return bool(part)

  while not status:
    left = begin + (limits["wall_seconds"] if is_set_up else SETUP_SECONDS) - time.monotonic()
    if left <= 0:
      status = "timeout"
      break
    wait = min(left, WATCH_SECONDS) if box.processes else left
    events = [descriptor for descriptor, _ in poll.poll(math.ceil(1000 * wait))]
    if caller.fileno() in events:
      return {}, []  # Callers send nothing more, so the socket was closed.
    if box.processes and time.monotonic() - last_look >= WATCH_SECONDS:
      status = children.beyond_limits(plan, limits, box.processes)
      last_look = time.monotonic()
    for descriptor in events:
      if descriptor in most and not read(descriptor):
        poll.unregister(descriptor)
        if descriptor == setup[0]:
          is_set_up = True
          begin = time.monotonic()
    if ended in events:
      break
  wall_seconds = time.monotonic() - begin
  code = children.kill_all(plan, program)
  assert code is not None
  for descriptor in most:
    # All writers are dead, but a pipe that is still in flight to a socket never reaches its end.
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
      while read(descriptor):
        pass
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu_seconds = used.ru_utime + used.ru_stime
  if b"ready" not in got[setup[0]]:
    text = bytes(got[setup[0]]).decode(errors="replace")
    return {"error": text or f"set-up ended with {code}"}, []
  by_signal = -code if code < 0 else 0
  if not status:
    if by_signal == signal.SIGXCPU or cpu_seconds > limits["cpu_seconds"]:
      status = "cpu"
    elif by_signal == signal.SIGXFSZ:
      status = "output"
    elif bytes(got[result[0]]) == entry.NO_MEMORY:
      status = "memory"
    elif by_signal:
      status = "killed"
    else:
      status = "ok" if code == 0 else "failed"
  outcome = {
    "status": status, "exit_code": None if code < 0 else code, "wall_seconds": wall_seconds,
    "cpu_seconds": cpu_seconds, "files": [],
  }  # fmt: skip
  return outcome, [bytes(got[pipe[0]]) for pipe in (stdout, stderr, result)]


def read_outputs(work: int, request: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns the requested output files; follows no links, and skips irregular files."""
  found = {}
  most = request["limits"]["file_bytes"]
  for name in request["outputs"]:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
      place = work
      *folders, last = name.split("/")
      for folder in folders:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
        stack.callback(os.close, place)
      # Without O_NONBLOCK, opening a named pipe would wait for a writer.
      file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
      stack.callback(os.close, file)
      about = os.fstat(file)
      if stat.S_ISREG(about.st_mode) and about.st_size <= most:
        with os.fdopen(os.dup(file), "rb") as reader:
          content = reader.read(most + 1)
        if len(content) <= most:
          found[name] = content
  return found


def remove_tree(path: str) -> None:
  """Removes a directory that a program made difficult to remove: unreadable, or very deep."""
  waiting, num_moved = [path], 0
  while waiting:
    folder = waiting.pop()
    with contextlib.suppress(OSError):
      os.chmod(folder, 0o700)
      for entry in list(os.scandir(folder)):
        if not entry.is_dir(follow_symlinks=False):
          os.unlink(entry.path)
          continue
        os.chmod(entry.path, 0o700)
        num_moved += 1
        # Move it to the top, so that paths do not exceed the kernel's length limit.
        waiting.append(f"{path}/.{num_moved}")
        os.rename(entry.path, waiting[-1])
      if folder != path:
        os.rmdir(folder)
  with contextlib.suppress(OSError):
    os.rmdir(path)
