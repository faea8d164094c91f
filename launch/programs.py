"""Chooses the folder in which `launch/test.sh` keeps compiled programs, and bounds what lies there.

  PLACE/jax-0.12.0.1-python-3.13.0-1f0c6a2d/    a folder for each CPU, set of versions and flags
    jit_step-...-cache                          programs of XLA
    native/                                     native handlers

  python launch/programs.py PLACE LOCK    makes PLACE tidy and prints this interpreter's folder

A program is code for the instructions of one kind of CPU, made by one version of its compilers from
one source. JAX names a program by its source, its own version and its flags; what the CPU can do
and the versions of numba and llvmlite are named by the folder. So a program that an earlier run
kept is the program that this run would make.

JAX's own bound (`jax_compilation_cache_max_size`) reads the times of all programs whenever one is
added: 0.4 s of CPU time each among 3,000. So the bound is kept here, once a run.
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

# Folders that stay: Python 3.13, and 3.11 with all of the CPU and with AVX2 alone.
MAX_FOLDERS = 3
MAX_BYTES = 4 << 30  # In each.
# Lines of /proc/cpuinfo that say which instructions a CPU has, and how they are scheduled for it.
PROCESSOR = re.compile(r"^(vendor_id|cpu family|model|flags|Features)[ \t]*:.*$", re.MULTILINE)


def processor(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
  """Returns what sets this CPU apart from others, as far as compiled code can tell."""
  lines = PROCESSOR.finditer(cpuinfo.read_text()) if cpuinfo.exists() else ()
  return "\n".join([platform.machine(), platform.processor(), *sorted({line[0] for line in lines})])


def name_of(cpu: str, lock: str, environment: Mapping[str, str]) -> str:
  """Returns the name of the folder for a CPU, locked versions and the environment's flags."""
  jax = re.search(r"^jax==(\S+)", lock, re.MULTILINE)
  if jax is None:
    raise ValueError(
      "the lock: got no line jax==VERSION, expected one; name launch/locks/runtime-*.txt."
    )
  said = "\n".join([cpu, lock, environment.get("XLA_FLAGS", "")])
  key = hashlib.sha256(said.encode()).hexdigest()[:8]
  return f"jax-{jax[1]}-python-{platform.python_version()}-{key}"


def last_use(path: pathlib.Path) -> float:
  """Returns when a file was written or read last, as far as the file system keeps that."""
  stat = path.stat()
  return max(stat.st_mtime, stat.st_atime)


def make_tidy(place: pathlib.Path, max_folders: int, max_bytes: int) -> None:
  """Removes all but the folders used last, and files of each used longest ago beyond a bound."""
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
  """Makes the folder of this interpreter, this CPU and these flags, and makes the place tidy."""
  folder = place / name_of(processor(), lock, os.environ)
  folder.mkdir(parents=True, exist_ok=True)
  os.utime(folder)  # It is the one used last.
  make_tidy(place, MAX_FOLDERS, MAX_BYTES)
  return folder


if __name__ == "__main__":
  print(folder_of(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text()))
