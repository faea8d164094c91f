"""The store tier on a local disk: one file a request, bounded, each with a checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import zlib

_CHECK_BYTES = 4


class DiskStore:
  """Files under a directory of its own; what an earlier process left there is removed."""

  def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int):
    """Makes a store.

    Args:
      directory: is made; files of other names in it are left alone.
      max_bytes: of all files together.

    Raises:
      ValueError: if `max_bytes` is negative.
    """
    if max_bytes < 0:
      raise ValueError(
        f"DiskStore.max_bytes: got {max_bytes}, expected at least 0; say how much of the disk may"
        " be used."
      )
    self.directory = pathlib.Path(directory)
    self.max_bytes = max_bytes
    self._sizes: dict[str, int] = {}
    self.directory.mkdir(parents=True, exist_ok=True)
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
    size = len(data) + _CHECK_BYTES
    if self.num_bytes - self._sizes.get(key, 0) + size > self.max_bytes:
      return False
    path = self._path(key)
    try:
      path.write_bytes(zlib.crc32(data).to_bytes(_CHECK_BYTES, "little") + data)
    except OSError as error:
      path.unlink(missing_ok=True)
      self._sizes.pop(key, None)
      if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return False
      raise
    self._sizes[key] = size
    return True

  def get(self, key: str) -> bytes:
    """Reads a file back.

    Raises:
      KeyError: if there is no such key.
      ValueError: if the file has other bytes than were written.
    """
    if key not in self._sizes:
      raise KeyError(key)
    data = self._path(key).read_bytes()
    check, data = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    if zlib.crc32(data).to_bytes(_CHECK_BYTES, "little") != check:
      raise ValueError(
        f"{self._path(key)}: got other bytes than were written for {key!r}, expected them whole;"
        " the disk or another program changed them, so resume the run from its journal."
      )
    return data

  def remove(self, key: str) -> None:
    """Removes a file; an unknown key is no error."""
    if self._sizes.pop(key, None) is not None:
      self._path(key).unlink(missing_ok=True)
