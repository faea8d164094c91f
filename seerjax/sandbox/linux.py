"""Calls of the Linux kernel that Python lacks, with the constants of their headers.

Source: man pages namespaces(7), mount_setattr(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

# linux/sched.h
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 2**27, 2**28, 2**29, 2**30
NAMESPACES = (
  CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
)
# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
# linux/prctl.h
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_SET_THP_DISABLE = 38, 1, 41
PR_SET_VMA, PR_FUTEX_HASH = 0x53564D41, 78  # Names of mappings; hash table of futexes.

LIBC = ctypes.CDLL(None, use_errno=True)


def kernel(name: str, *arguments: Any) -> int:
  """Calls a function of the C library.

  Raises:
    OSError: if the call fails; names the call and the reason.
  """
  converted = [
    ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
  ]
  result = getattr(LIBC, name)(*converted)
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
  return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
  kernel("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def make_read_only(path: str, *, flags: int) -> None:
  """Sets flags (MOUNT_ATTR_...) on the mount at `path` and on all mounts below it."""
  attributes = struct.pack("QQQQ", flags, 0, 0, 0)
  kernel(
    "syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, len(attributes)
  )
