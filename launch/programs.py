"""Selects the folder in which `launch/test.sh` keeps compiled programs, and limits its size.

  PLACE/jax-0.12.0.1-python-3.13.0-1f0c6a2d/    a folder per CPU, set of versions and flags
    jit_step-...-cache                          XLA programs
    native/                                     native handlers

  python launch/programs.py PLACE LOCK    cleans up PLACE, and prints this interpreter's folder

A program is code for one kind of CPU, made by one version of the compilers from one source. JAX's
key of a program covers its source, JAX's version and flags; the folder's name adds the CPU's
features and the versions of numba and llvmlite. So a cached program equals the one that this run
would compile.

JAX's own limit (`jax_compilation_cache_max_size`) reads the times of all programs whenever one is
added: 0.4 s of CPU time each with 3,000 programs. So the limit is enforced here, once per run.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
import pathlib
import platform
import re
import shutil
import sys

# Folders kept: Python 3.13, and Python 3.11 with the full CPU and with AVX2 only.
MAX_FOLDERS = 3
MAX_BYTES = 4 << 30  # Per folder.
# Lines of /proc/cpuinfo with a CPU's instruction sets and its model, which affects scheduling.
PROCESSOR = re.compile(r"^(vendor_id|cpu family|model|flags|Features)[ \t]*:.*$", re.MULTILINE)


def processor(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
  """Returns the properties of this CPU on which compiled code depends."""
  lines = PROCESSOR.finditer(cpuinfo.read_text()) if cpuinfo.exists() else ()
  return "\n".join([platform.machine(), platform.processor(), *sorted({line[0] for line in lines})])


def name_of(cpu: str, lock: str, environment: Mapping[str, str]) -> str:
  """Returns the folder's name for a CPU, locked versions, and the environment's flags."""
  jax = re.search(r"^jax==(\S+)", lock, re.MULTILINE)
  if jax is None:
    raise ValueError(
      "the lock: got no line jax==VERSION, expected one; name launch/locks/runtime-*.txt."
    )
  said = "\n".join([cpu, lock, environment.get("XLA_FLAGS", "")])
  key = hashlib.sha256(said.encode()).hexdigest()[:8]
  return f"jax-{jax[1]}-python-{platform.python_version()}-{key}"


def last_use(path: pathlib.Path) -> float:
  """Returns the time of a file's last use, as far as the file system records it."""
  stat = path.stat()
  return max(stat.st_mtime, stat.st_atime)


def make_tidy(place: pathlib.Path, max_folders: int, max_bytes: int) -> None:
  """Keeps the most recent folders, and evicts their least recently used files above the limit."""
  folders = sorted(place.glob("jax-*/"), key=lambda path: path.stat().st_mtime, reverse=True)
  for old in folders[max_folders:]:
    shutil.rmtree(old, ignore_errors=True)
  for folder in folders[:max_folders]:
    room = max_bytes
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=last_use, reverse=True):
      room -= path.stat().st_size
      if room < 0:
        path.unlink(missing_ok=True)


def folder_of(place: pathlib.Path, lock: str) -> pathlib.Path:
  """Creates the folder of this interpreter, CPU and flags, and cleans up."""
  folder = place / name_of(processor(), lock, os.environ)
  folder.mkdir(parents=True, exist_ok=True)
  os.utime(folder)  # Marks it as the most recent.
  make_tidy(place, MAX_FOLDERS, MAX_BYTES)
  return folder


if __name__ == "__main__":
  print(folder_of(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text()))
