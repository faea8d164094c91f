"""The store tier on a local disk: one file a request, bounded."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib


class DiskStore:
  """Files under a directory of its own; what an earlier process left there is removed."""

  def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int):
    """Makes a store.

    Args:
      directory: is made; files of other names in it are left alone.
      max_bytes: of all files together.

    Raises:
      ValueError: if `max_bytes` is negative, or the directory is a file.
    """
    if max_bytes < 0:
      raise ValueError(
        f"DiskStore.max_bytes: got {max_bytes}, expected at least 0; say how much of the disk may"
        " be used."
      )
    self.directory = pathlib.Path(directory)
    self.max_bytes = max_bytes
    self._sizes: dict[str, int] = {}
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
      raise ValueError(
        f"DiskStore.directory: got {self.directory}, which is or goes through a file, expected a"
        " directory; choose another KVPoolConfig.disk."
      ) from error
    for left in self.directory.glob("*.kv"):
      left.unlink()

  @property
  def num_bytes(self) -> int:
    """Bytes on the disk now."""
    return sum(self._sizes.values())

  def _path(self, key: str) -> pathlib.Path:
    # Any key makes a name: ids may hold slashes.
    return self.directory / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.kv"

  def put(self, key: str, data: bytes) -> bool:
    """Writes a file; False if the bound or the disk itself has no room."""
    if self.num_bytes - self._sizes.get(key, 0) + len(data) > self.max_bytes:
      return False
    path = self._path(key)
    try:
      path.write_bytes(data)
    except OSError as error:
      path.unlink(missing_ok=True)
      self._sizes.pop(key, None)
      if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return False
      raise
    self._sizes[key] = len(data)
    return True

  def get(self, key: str) -> bytes | None:
    """Reads a file back; None if there is none."""
    try:
      return self._path(key).read_bytes() if key in self._sizes else None
    except OSError:
      return None  # Another program removed it, or the disk fails.

  def remove(self, key: str) -> None:
    """Removes a file; an unknown key is no error."""
    if self._sizes.pop(key, None) is not None:
      self._path(key).unlink(missing_ok=True)
