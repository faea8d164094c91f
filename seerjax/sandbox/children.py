"""Child processes: how they end, and what a program's processes use together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import os
import resource
import signal
import time
import traceback
from typing import Any

from seerjax.sandbox import isolation

# Upper bounds on kernel memory per open descriptor (a full pipe) and per mapping, in bytes.
BYTES_OF_DESCRIPTOR, BYTES_OF_MAPPING = 2**16, 256
MAX_MAPPINGS = 65_530  # Default bound per process, vm.max_map_count.
COUNTED_MAPPINGS = 8192  # A process with more is assumed to have `MAX_MAPPINGS`.


def in_child(work: Callable[..., None], *arguments: Any) -> None:
  """Runs `work`, then ends the process in any case."""
  code = 70
  try:
    work(*arguments)
    code = 0
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(code)


def beyond_limits(plan: isolation.Plan, limits: Mapping[str, Any], processes: str) -> str:
  """Returns a status if the program's processes together exceed a limit, else ""."""
  tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
  waited = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu_seconds = waited.ru_utime + waited.ru_stime
  num_tasks = 0
  of_kernel = 0  # Bytes held by the kernel for all processes; may be large with few resident pages.
  resident = {}  # Resident bytes of each process, by the id of a live task.
  for pid in list_processes(plan, processes):
    with contextlib.suppress(OSError):  # The process has ended.
      fields = read_stat(processes, pid)
      cpu_seconds += sum(map(int, fields[11:15])) / tick
      num_tasks += int(fields[17])
      if fields[0] == b"Z" and int(fields[17]) > 1:
        # The main thread has ended, and no longer reports the memory of the others.
        for task in map(int, os.listdir(f"{processes}/{pid}/task")):
          if (fields := read_stat(processes, task))[0] != b"Z":
            pid = task
            break
      resident[pid] = int(fields[21]) * page
      with open(f"{processes}/{pid}/status", "rb") as file:
        of_kernel += sum(int(line.split()[1]) * 1024 for line in file if line[:6] == b"VmPTE:")
      of_kernel += BYTES_OF_MAPPING * count_mappings(f"{processes}/{pid}/maps")
      of_kernel += BYTES_OF_DESCRIPTOR * count_descriptors(f"{processes}/{pid}/task", limits)
  if cpu_seconds > limits["cpu_seconds"]:
    return "cpu"
  # The kernel does not enforce this for some users, such as root. Factor 2: the sum is no snapshot.
  if num_tasks > 2 * limits["num_processes"]:
    return "killed"
  if sum(resident.values()) + of_kernel <= limits["memory_bytes"]:
    return ""
  # Forks share pages; dividing them among processes is slow, so it is done only now.
  memory_bytes = of_kernel
  for pid, num_bytes in resident.items():
    try:
      with open(f"{processes}/{pid}/smaps_rollup", "rb") as file:
        lines = [line.split() for line in file]
      memory_bytes += sum(int(line[1]) * 1024 for line in lines if line[0] == b"Pss:")
    except PermissionError:  # The process made itself unreadable.
      memory_bytes += num_bytes
    except OSError:  # The process has ended.
      pass
  return "memory" if memory_bytes > limits["memory_bytes"] else ""


def count_mappings(path: str) -> int:
  """Returns a process's number of mappings; `MAX_MAPPINGS` if it is unreadable or large."""
  count = 0
  try:
    with open(path, "rb", buffering=0) as file:
      while part := file.read(2**16):
        count += part.count(b"\n")
        if count > COUNTED_MAPPINGS:
          return MAX_MAPPINGS
  except PermissionError:
    return MAX_MAPPINGS
  return count


def count_descriptors(tasks: str, limits: Mapping[str, Any]) -> int:
  """Returns the number of open files of a process; tasks may have separate tables, so all count."""
  count = 0
  for task in os.listdir(tasks):
    try:
      count += len(os.listdir(f"{tasks}/{task}/fd"))
    except PermissionError:
      count += limits["num_files"]
  return count


def read_stat(processes: str, pid: int) -> list[bytes]:
  """Returns the fields of a process's or task's stat file, from the state on."""
  with open(f"{processes}/{pid}/stat", "rb") as file:
    return file.read().rpartition(b")")[2].split()


def list_processes(plan: isolation.Plan, processes: str) -> list[int]:
  """Returns the descendants of this process."""
  everyone = [int(name) for name in os.listdir(processes) if name.isdigit()]
  if plan.namespaces:
    return [pid for pid in everyone if pid != 1]
  parents = {}
  for pid in everyone:
    with contextlib.suppress(OSError):
      parents[pid] = int(read_stat(processes, pid)[1])
  below = [os.getpid()]
  for pid in below:  # The list grows during iteration.
    below += [child for child, parent in parents.items() if parent == pid]
  return below[1:]


def kill_all(plan: isolation.Plan, program: int = 0) -> int | None:
  """Kills all descendants of this process and waits for them; returns the exit code of `program`.

  A negative code is the signal that ended it.
  """
  code = None
  while True:
    with contextlib.suppress(ProcessLookupError):
      if plan.namespaces:
        assert os.getpid() == 1, "elsewhere, -1 would be everyone on this machine"
        os.kill(-1, signal.SIGKILL)  # Everything in this pid namespace except pid 1, this process.
      else:
        for pid in list_processes(plan, "/proc"):
          os.kill(pid, signal.SIGKILL)
    try:
      # Without a pid namespace, reading /proc may have missed a child: repeat.
      pid, status = os.waitpid(-1, 0 if plan.namespaces else os.WNOHANG)
    except ChildProcessError:
      return code
    if not pid:
      time.sleep(0.001)
    if pid == program:
      code = os.waitstatus_to_exitcode(status)
