"""An open file of records: a header, then what its one writer appends."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
import contextlib
import json
import os
import pathlib
from typing import Any, NamedTuple

from seerjax.records import lines


class Kind(NamedTuple):
  """Description of a kind of record file.

  Attributes:
    kind: "kind" of its header.
    format: "format" of its header.
    noun: its name in messages, such as "journal".
    header: its header in messages, such as "a journal's header".
    fix: advice about a file of another kind.
  """

  kind: str
  format: int
  noun: str
  header: str
  fix: str

  def check(self, path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Refuses a file that does not begin with a header of this kind.

    Raises:
      ValueError: naming the record.
    """
    if record.get("kind") != self.kind or record.get("format") != self.format:
      raise ValueError(
        f"{path}: got {lines.short(record)} as the first record, expected {self.header} of format"
        f" {self.format}; {self.fix}."
      )


class RecordFile(abc.ABC):
  """Base of open files of records, which have one writer at a time. Readers need not wait.

  Attributes:
    path: path of the file.
    truncated_bytes: bytes of a torn tail that were cut off on opening.
  """

  def __init__(self, path: str | os.PathLike[str], kind: Kind):
    """Opens or creates a file and takes its records.

    Args:
      path: the file; its directory is created if missing.
      kind: what it is.

    Raises:
      ValueError: if another writer has it open, or it is of another kind or damaged before its end.
      OSError: if it is not writable.
    """
    self.path = pathlib.Path(path)
    self._kind = kind
    self._end = 0
    self._together = False  # Whether records wait for the disk together.
    if self.path.is_dir():
      raise ValueError(
        f"{self.path}: got a directory, expected the {self._kind.noun}'s file, or none yet; add a"
        " name such as journal.jsonl."
      )
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
    with self._closing_on_error():
      # Before anything is read, because a torn tail is truncated.
      lines.lock(self._descriptor, self.path)
      for start, end, record in lines.scan(self.path):
        if not self._end:
          self._kind.check(self.path, record)
        self._load_record(start, record)
        self._end = end
      size = os.fstat(self._descriptor).st_size
      if not self._end and size and not lines.may_be_torn_header(self.path):
        self._kind.check(self.path, {})  # Another kind of file, which must not be truncated.
      self.truncated_bytes = lines.cut_tail(self._descriptor, self._end)

  @abc.abstractmethod
  def _load_record(self, offset: int, record: dict[str, Any]) -> None:
    """Takes a record that the file has when it is opened; the first is the header."""

  @contextlib.contextmanager
  def together(self) -> Iterator[None]:
    """Appends within the block wait for the disk only once, at the end of the block.

    Raises:
      OSError: if the disk is full. The file then has some of the records, each complete, and the
        run must end and be resumed.
    """
    if self._together:  # The outer block waits.
      yield
      return
    start, self._together = self._end, True
    try:
      yield
    finally:
      self._together = False
      if self._end > start and self._descriptor is not None:
        lines.wait(self._descriptor, self.path, start, self._end)

  def close(self) -> None:
    """Closes the file; may be called twice."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None

  def __exit__(self, *_: object) -> None:
    self.close()

  @contextlib.contextmanager
  def _closing_on_error(self) -> Iterator[None]:
    try:
      yield
    except BaseException:
      self.close()
      raise

  def _begin(self, header: Mapping[str, Any]) -> None:
    """Writes the header of a new file."""
    self._write({"kind": self._kind.kind, "format": self._kind.format, **header})

  def _write(self, record: Mapping[str, Any]) -> int:
    """Appends a record, waits for the disk unless within `together`, and returns its offset."""
    if self._descriptor is None:
      raise ValueError(
        f"{self.path}: got a record for a closed {self._kind.noun}, expected an open one; open it"
        " again."
      )
    start = self._end
    self._end = lines.append(self._descriptor, self.path, start, record, waits=not self._together)
    return start

  def _read(self, offset: int) -> dict[str, Any]:
    return lines.read(self.path, offset)


def plain_settings(settings: Mapping[str, Any], what: str) -> dict[str, Any]:
  """Returns settings as JSON values; `what` is the prefix of the message.

  Raises:
    ValueError: if they are not JSON.
  """
  try:
    return json.loads(json.dumps(dict(settings), allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{what}: got settings that are not JSON ({error}), expected strings, finite numbers, lists"
      " and dicts; convert them first."
    ) from error


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
  """Returns a sentence for each setting that differs or is missing on one side, by dotted name."""
  found: list[str] = []

  def compare(was: Any, now: Any, where: str) -> None:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
      for name in sorted({*was, *now}):
        compare(was.get(name), now.get(name), f"{where}.{name}".strip("."))
    elif was != now:
      found.append(f"{where} was {lines.short(was)} and is {lines.short(now)}")

  compare(stored, current, "")
  return found
