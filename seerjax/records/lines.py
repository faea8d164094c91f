"""Append-only files of checksummed records: one JSON object per line.

  {"crc32":"8 hex digits","record":{...}}

The checksum covers the bytes of the record. A record is on disk before `append` returns, unless
`waits` is False. A kill during a write leaves a torn tail, at which a scan ends; damage before the
last record raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import fcntl
import json
import os
import pathlib
from typing import Any
import zlib

_PREFIX = b'{"crc32":"%08x","record":'
_PREFIX_LENGTH = len(_PREFIX % 0)
_SUFFIX = b"}\n"


def line(record: Mapping[str, Any]) -> bytes:
  """Encodes a record of JSON values as a line."""
  # Escaped to ASCII, because decoded text may contain lone surrogates, which UTF-8 cannot encode.
  data = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
  return _PREFIX % zlib.crc32(data) + data + _SUFFIX


def parse(data: bytes) -> dict[str, Any] | None:
  """Returns the record of a line; None if the line is torn or altered."""
  record = data[_PREFIX_LENGTH : -len(_SUFFIX)]
  if data != _PREFIX % zlib.crc32(record) + record + _SUFFIX:
    return None
  return json.loads(record)


def scan(path: pathlib.Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """Yields (start, end, record) of each complete record; stops before a torn tail.

  Raises:
    ValueError: if a record other than the last is damaged.
  """
  with open(path, "rb") as file:
    start = 0
    for number, data in enumerate(file, 1):
      record = parse(data)
      if record is None:
        if file.read(1):
          raise ValueError(
            f"{path}: got a damaged record in line {number} (byte {start}) with more records after"
            " it, expected damage only in the last one; restore the file, or truncate it before"
            " that byte and resume from an earlier checkpoint."
          )
        return
      yield start, start + len(data), record
      start += len(data)


def append(
  descriptor: int,
  path: pathlib.Path,
  start: int,
  record: Mapping[str, Any],
  *,
  waits: bool = True,
) -> int:
  """Appends a record to a file; returns the file's new end.

  Args:
    descriptor: file descriptor.
    path: path of the file, for messages.
    start: current end of the file in bytes.
    record: JSON values.
    waits: whether to wait for the disk; otherwise the record is on disk once a later record that
      waits is, or once `wait` returns.

  Raises:
    OSError: if the disk is full; the file then ends with the previous record.
  """
  data = line(record)
  with _cut_where_full(descriptor, path, start, len(data)):
    done = 0
    while done < len(data):
      done += os.pwrite(descriptor, data[done:], start + done)
    if waits:
      os.fsync(descriptor)
  return start + len(data)


def wait(descriptor: int, path: pathlib.Path, start: int, end: int) -> None:
  """Waits until the records between two offsets of a file are on disk.

  Raises:
    OSError: if the disk is full; the file then ends at `start`.
  """
  with _cut_where_full(descriptor, path, start, end - start):
    os.fsync(descriptor)


@contextlib.contextmanager
def _cut_where_full(
  descriptor: int, path: pathlib.Path, start: int, num_bytes: int
) -> Iterator[None]:
  """Truncates a file to its first `start` bytes if the block fails, and explains a full disk."""
  try:
    yield
  except OSError as error:
    os.ftruncate(descriptor, start)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
      raise
    raise OSError(
      error.errno,
      f"journal: got '{os.strerror(error.errno)}' writing {num_bytes} bytes to {path}, expected"
      " room for them; free some space and resume: all earlier records are kept",
    ) from error


def read(path: pathlib.Path, offset: int) -> dict[str, Any]:
  """Returns the record that starts at a byte offset.

  Raises:
    ValueError: if it no longer exists there.
  """
  with open(path, "rb") as file:
    file.seek(offset)
    record = parse(file.readline())
  if record is None:
    raise ValueError(
      f"{path}: got a damaged record at byte {offset}, expected the record that was written there;"
      " another process changed the file: restore it."
    )
  return record


def cut_tail(descriptor: int, end: int) -> int:
  """Truncates a torn tail after the last complete record; returns its length in bytes."""
  torn = os.fstat(descriptor).st_size - end
  if torn:
    os.ftruncate(descriptor, end)
    os.fsync(descriptor)
  return torn


def lock(descriptor: int, path: pathlib.Path) -> None:
  """Locks the file for a single writer.

  Raises:
    ValueError: if another writer has it open.
  """
  # The kernel ties the lock to the open file and releases it on close or kill.
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
      f"{path}: got a journal that another writer has open, expected one writer at a time; wait for"
      " that run to end or stop it, or choose another directory."
    ) from error


def may_be_torn_header(path: pathlib.Path) -> bool:
  """Returns whether a file without a complete record may be a torn first record."""
  with open(path, "rb") as file:
    first = file.read(_PREFIX_LENGTH)
  start = b'{"crc32":"'
  return first.startswith(start) or start.startswith(first) or not first.strip(b"\0")


def short(value: Any) -> str:
  """Returns the repr of a value for a message, at most 100 characters."""
  text = repr(value)
  return text if len(text) <= 100 else text[:97] + "..."
