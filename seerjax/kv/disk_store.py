"""Disk store: a bounded KV store tier on a local disk, shared by processes, one file per value.

    directory/OWNER/NAME.kv     NAME is a hash of the key, so any process finds it
    directory/OWNER/lock        locked while the process that wrote the files lives

Each process writes and removes files of its own folder only, and reads all folders. Files that a
dead process left are taken over by the next process that opens the directory: they stay readable,
and are evicted first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pathlib
import uuid
import weakref

LOCK_NAME = "lock"


class DiskStore:
  """A store in the process's own folder of a shared directory."""

  def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int):
    """Opens the store and takes over the files of dead processes.

    Args:
      directory: created if missing; files of other names in it are left alone.
      max_bytes: capacity for the files of this process, those that it took over included.

    Raises:
      ValueError: if `max_bytes` is negative, or the directory is a file.
    """
    if max_bytes < 0:
      raise ValueError(
        f"DiskStore.max_bytes: got {max_bytes}, expected at least 0; set it to the disk space that"
        " may be used."
      )
    self.directory = pathlib.Path(directory)
    self.max_bytes = max_bytes
    self._sizes: dict[str, int] = {}  # Bytes of files that this process put, by file name.
    self._left: dict[str, int] = {}  # Bytes of files that were taken over, oldest first.
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
      raise ValueError(
        f"DiskStore.directory: got {self.directory}, which is a file or lies below one, expected a"
        " directory; choose another KVPoolConfig.disk."
      ) from error
    lock = None
    while lock is None:  # Another process may take over a folder just before it is locked.
      self._folder = self.directory / uuid.uuid4().hex
      self._folder.mkdir()
      lock = _locked(self._folder)
    weakref.finalize(self, os.close, lock)
    self._take_over()
    self._make_room(0)

  @property
  def num_bytes(self) -> int:
    """Bytes of this process's files on the disk."""
    return sum(self._sizes.values()) + sum(self._left.values())

  def put(self, key: str, data: bytes) -> bool:
    """Writes a file; returns False if the capacity is exceeded or the disk is full."""
    name = _file_name(key)
    self._left.pop(name, None)  # Overwritten.
    if sum(self._sizes.values()) - self._sizes.get(name, 0) + len(data) > self.max_bytes:
      return False
    self._make_room(len(data) - self._sizes.get(name, 0))
    path = self._folder / name
    unfinished = path.with_suffix(".tmp")
    try:
      unfinished.write_bytes(data)
      unfinished.replace(path)  # Atomic, for readers in other processes.
    except OSError as error:
      unfinished.unlink(missing_ok=True)
      path.unlink(missing_ok=True)
      self._sizes.pop(name, None)
      if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return False
      raise
    self._sizes[name] = len(data)
    return True

  def has(self, key: str) -> bool:
    """Returns whether any process has put a file for `key`."""
    return bool(self._paths(key))

  def get(self, key: str) -> bytes | None:
    """Returns the bytes of a file that any process put; None if there is none."""
    for path in self._paths(key):
      try:
        return path.read_bytes()
      except OSError:
        pass  # Its process has just removed it, or the disk fails.
    return None

  def remove(self, key: str) -> None:
    """Removes a file of this process; any other key is no error."""
    name = _file_name(key)
    if self._sizes.pop(name, None) is not None:
      (self._folder / name).unlink(missing_ok=True)

  def _paths(self, key: str) -> list[pathlib.Path]:
    name = _file_name(key)
    own = self._folder / name
    return [own] if own.exists() else sorted(self.directory.glob(f"*/{name}"))

  def _make_room(self, num_bytes: int) -> None:
    """Removes files of dead processes, oldest first, until `num_bytes` fit."""
    while self._left and self.num_bytes + num_bytes > self.max_bytes:
      name = next(iter(self._left))
      del self._left[name]
      (self._folder / name).unlink(missing_ok=True)

  def _take_over(self) -> None:
    """Moves the files of dead processes to this process's folder."""
    found = []
    for folder in {path.parent for path in self.directory.glob(f"*/{LOCK_NAME}")}:
      lock = None if folder == self._folder else _locked(folder)
      if lock is None:
        continue
      for path in folder.glob("*.kv"):
        status = path.stat()
        path.replace(self._folder / path.name)
        found.append((status.st_mtime_ns, path.name, status.st_size))
      for path in folder.iterdir():
        path.unlink()
      folder.rmdir()
      os.close(lock)
    self._left = {name: size for _, name, size in sorted(found)}


def _file_name(key: str) -> str:
  # Hashed, because a key may contain slashes.
  return f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.kv"


def _locked(folder: pathlib.Path) -> int | None:
  """Locks a folder and returns the open lock file; None if another process holds the lock."""
  try:
    file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
  except FileNotFoundError:
    return None  # Another process took the folder over.
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(file)
    return None
  return file
