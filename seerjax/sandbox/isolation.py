"""The isolation of programs on this machine: its layers, and the paths and variables they see."""

from __future__ import annotations

import dataclasses

NOBODY = 65534  # User and group of programs.
ENVIRONMENT = {
  "HOME": "/box/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
  "NUMBA_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
# Not /dev/zero: shared pages of it that were unmapped belong to no process, but stay allocated.
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Isolation layers available on this machine, determined by trial when the server starts.

  Attributes:
    namespaces: "root" (created with the server's privileges), "user" (inside a user namespace), or
      "" if unavailable.
    nests: whether the program gets a separate user namespace, so that only its processes count
      toward the process limit.
    watches: whether the supervisor sees all processes of a program and sums their resources.
    landlock: version of the kernel's interface; 0 if unavailable.
    seccomp: whether system calls are filtered.
    denied: (layer, reason) for each missing layer.
    readable: absolute paths that programs may read.
  """

  namespaces: str = ""
  nests: bool = False
  watches: bool = False
  landlock: int = 0
  seccomp: bool = False
  denied: tuple[tuple[str, str], ...] = ()
  readable: tuple[str, ...] = ()
