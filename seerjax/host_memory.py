"""Memory available to this process, given the host's memory and its control groups' limits.

A container's limit is seldom the host's memory: a process that exceeds it is killed, regardless of
the host's free memory. The available memory is the minimum of the host's available memory and, for
each group from the process's own up to the root, the group's limit minus its usage. Inactive file
pages are reclaimed before a process is killed, so they do not count as used.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current,
memory.stat) and cgroup-v1/memory.html (memory.limit_in_bytes, memory.usage_in_bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import pathlib

ROOT = pathlib.Path("/")


def free_bytes(root: pathlib.Path = ROOT) -> float:
  """Returns the bytes available to this process; infinite if they are unknown.

  Args:
    root: root of the file system with `proc` and `sys`.
  """
  found = [_fields(root / "proc/meminfo").get("MemAvailable:", float("inf")) * 1024]
  for group, names in _groups(root):
    limit = _number(group / names[0])
    used = _number(group / names[1])
    if limit < float("inf") and used < float("inf"):
      reclaimable = _fields(group / "memory.stat").get(names[2], 0)
      found.append(max(0.0, limit - used + reclaimable))
  return min(found)


def resident_bytes(root: pathlib.Path = ROOT) -> float:
  """Returns the resident bytes of this process; 0 if they are unknown."""
  return _fields(root / "proc/self/status").get("VmRSS:", 0) * 1024


def give_back() -> None:
  """Returns freed memory of this process to the system, if its C library is glibc.

  launch/environment.sh makes glibc keep freed memory, because a step requests the same buffers
  again. What loading needed is never requested again.
  """
  with contextlib.suppress(OSError, AttributeError):  # Other libraries have no such function.
    ctypes.CDLL(None).malloc_trim(0)


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str]]]:
  """Yields the folders of this process's groups, from its own up, with their files' names."""
  for line in _lines(root / "proc/self/cgroup"):
    _, controllers, path = line.split(":", 2)
    if not controllers:
      top, names = root / "sys/fs/cgroup", V2
    elif "memory" in controllers.split(","):
      top, names = root / "sys/fs/cgroup/memory", V1
    else:
      continue
    group = top / path.lstrip("/")
    # In a container, its own group may be mounted as the root, while the path is the host's.
    while group != top and top in group.parents:
      yield group, names
      group = group.parent
    yield top, names


def _lines(path: pathlib.Path) -> list[str]:
  try:
    return path.read_text().splitlines()
  except OSError:
    return []


def _fields(path: pathlib.Path) -> dict[str, int]:
  """Returns the numbers of lines such as `MemAvailable: 12 kB` by their first word."""
  words = [line.split() for line in _lines(path)]
  return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _number(path: pathlib.Path) -> float:
  """Returns a file's only number; infinite if the file is missing or contains "max"."""
  lines = _lines(path)
  return float(lines[0]) if lines and lines[0].strip().isdigit() else float("inf")
