"""Reads GGUF files: metadata and tensors of any architecture, checked before use.

    "GGUF" version counts | key kind value ... | name shape kind offset ... | data, aligned

Files are untrusted: lengths, counts and offsets are compared with the size of the file before
anything is read or allocated, and errors name the key or tensor. The `gguf` package (extra `gguf`)
converts blocks of quantised kinds to float32, a few rows at a time.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
import importlib
import math
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from seerjax import fields as fields_lib

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_DIMENSIONS = 4
MAX_STRINGS = 2**22  # In all lists of a file: far more than any vocabulary and its merges.
MAX_ENTRIES, MAX_TENSORS = 2**16, 2**20  # Per file.
# Minimum bytes of a metadata entry (key length, kind, value) and of a tensor's record.
MIN_ENTRY, MIN_RECORD = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
NUMBERS_AT_ONCE = 2**20  # Numbers converted to float32 at once.
SPLIT_NAME = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
AGAIN = "the file is truncated or corrupt; download it again"

# Struct formats of the number kinds of metadata values, by their ids.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
LENGTH = struct.Struct("<Q")


class Tensor(NamedTuple):
  """Location of a tensor.

  Attributes:
    shape: rows first, as in numpy.
    kind: one of `KINDS`.
    part: index of the file that holds it.
    offset: offset of its first byte in that file.
    size: bytes.
  """

  shape: tuple[int, ...]
  kind: str
  part: int
  offset: int
  size: int


class File:
  """A GGUF file, or the files of a model that was split.

  Attributes:
    path: path of the file, the first one if there are several.
    metadata: values by key; lists of numbers are numpy arrays, float32 numbers are rounded to their
      shortest decimals.
    tensors: locations by name.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads the heads of all files.

    Raises:
      FileNotFoundError: if the file, or another one of a split model, is missing.
      ImportError: if the `gguf` package is not installed.
      NotImplementedError: for an unsupported version, kind or byte order.
      ValueError: naming the file and the key, tensor or field that is wrong.
    """
    self._gguf = package()
    self.path = pathlib.Path(path)
    head = _Head(self.path, self._gguf)
    self.metadata: Mapping[str, Any] = head.metadata
    self.tensors: dict[str, Tensor] = dict(head.tensors)
    self._parts = [head]
    for number, part in enumerate(_other_parts(head), start=1):
      other = _Head(part, self._gguf, number)
      _require_part(other, number, head)
      for name, tensor in other.tensors.items():
        if name in self.tensors:
          raise _twice(part, name)
        self.tensors[name] = tensor
      self._parts.append(other)
    expected = head.whole("split.tensors.count", len(self.tensors))
    if expected != len(self.tensors):
      raise ValueError(
        f"{self.path}: split.tensors.count: got {expected}, expected {len(self.tensors)}, the"
        " number of tensors in its files; the files do not belong together."
      )

  def file_of(self, name: str) -> pathlib.Path:
    """Returns the file that holds a tensor."""
    return self._parts[self.tensors[name].part].path

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor of any kind as f32; it may contain NaN or infinities."""
    tensor = self.tensors[name]
    data = self._parts[tensor.part].data[tensor.offset : tensor.offset + tensor.size]
    width = tensor.shape[-1]
    rows = np.frombuffer(data, np.uint8).reshape(math.prod(tensor.shape[:-1]), -1)
    out = np.empty((len(rows), width), np.float32)
    kind = self._gguf.GGMLQuantizationType[tensor.kind]
    step = max(1, NUMBERS_AT_ONCE // width)
    with np.errstate(invalid="ignore", over="ignore"):  # For blocks with invalid scales.
      for first in range(0, len(rows), step):
        block = np.ascontiguousarray(rows[first : first + step])
        out[first : first + step] = self._gguf.dequantize(block, kind)
    return out.reshape(tensor.shape)


def is_named(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path has the suffix of a GGUF file."""
  return pathlib.PurePath(path).suffix.lower() == SUFFIX


def package() -> Any:
  """Returns the `gguf` package.

  Raises:
    ImportError: if it is not installed, with the command that installs it.
  """
  try:
    return importlib.import_module("gguf")  # Lazy: an extra.
  except ImportError as error:
    raise ImportError(
      "GGUF: got no package gguf, expected it for GGUF files; run `pip install seerjax[gguf]`."
    ) from error


class _Head:
  """Metadata and tensor locations of one file; the data stays on disk."""

  def __init__(self, path: pathlib.Path, gguf: Any, part: int = 0):
    self.path = path
    if not path.is_file():
      raise FileNotFoundError(f"{path}: got no such file, expected a GGUF file; check the path.")
    if path.stat().st_size < 24:
      raise ValueError(
        f"{path}: got {path.stat().st_size} bytes, expected at least the 24 of a GGUF file's head;"
        f" {AGAIN}."
      )
    self.data = np.memmap(path, np.uint8, mode="r").data
    self._at, self._num_strings = 0, 0
    num_tensors, num_entries = self._counts()
    self.metadata: dict[str, Any] = {}
    for number in range(num_entries):
      key = self._string(f"key {number} of the metadata")
      if key in self.metadata:
        raise ValueError(f"{path}: {key}: got the key twice, expected it once; {AGAIN}.")
      self.metadata[key] = self._value(key)
    self.tensors: dict[str, Tensor] = {}
    self._read_records(num_tensors, gguf, part)

  def whole(self, key: str, default: int) -> int:
    """Returns a whole number of the metadata.

    Raises:
      ValueError: for anything else.
    """
    value = self.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
      raise ValueError(
        f"{self.path}: {key}: got {fields_lib.shown(value)}, expected a whole number; {AGAIN}."
      )
    return value

  def _counts(self) -> tuple[int, int]:
    magic = self._bytes(4, "magic")
    if magic != MAGIC:
      raise ValueError(
        f"{self.path}: got a file that begins with {magic!r}, expected {MAGIC!r}; it is not a GGUF"
        " file, or it is corrupt: download it again."
      )
    version = self._number("I", "version")
    if version not in VERSIONS:
      swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
      got = f"{swapped} in big-endian order" if swapped in VERSIONS else str(version)
      raise NotImplementedError(
        f"{self.path}: version: got {got}, expected one of {VERSIONS}, little-endian; convert the"
        " model again with today's llama.cpp."
      )
    num_tensors, num_entries = (
      self._number("Q", name) for name in ("number of tensors", "number of metadata entries")
    )
    rest = len(self.data) - self._at
    for name, count, least, most in (
      ("number of metadata entries", num_entries, MIN_ENTRY, MAX_ENTRIES),
      ("number of tensors", num_tensors, MIN_RECORD, MAX_TENSORS),
    ):
      if count > min(rest // least, most):
        raise self._too_long(name, f"{count}", f"{min(rest // least, most)}")
    return num_tensors, num_entries

  def _read_records(self, count: int, gguf: Any, part: int) -> None:
    """Reads the tensor records; their offsets count from the first aligned byte after the head."""
    records: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
    alignment = self._alignment()
    for number in range(count):
      name = self._string(f"name of tensor {number}")
      if name in records:
        raise _twice(self.path, name)
      num_dimensions = self._number("I", f"{name}: number of dimensions")
      if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(
          f"{self.path}: {name}: got {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS};"
          f" {AGAIN}."
        )
      axes = [self._number("Q", f"{name}: shape") for _ in range(num_dimensions)]
      shape = tuple(reversed(axes))  # The file has the fastest axis first.
      kind = self._number("I", f"{name}: kind")
      offset = self._number("Q", f"{name}: offset")
      kind, size = self._size(name, shape, kind, gguf)
      if offset % alignment:
        raise ValueError(
          f"{self.path}: {name}: got the offset {offset}, expected a multiple of"
          f" general.alignment={alignment}; {AGAIN}."
        )
      records[name] = shape, kind, offset, size
    start = -(-self._at // alignment) * alignment
    end, before = start, "the head"
    for name, (shape, kind, offset, size) in sorted(records.items(), key=lambda item: item[1][2]):
      offset += start
      if offset + size > len(self.data):
        raise ValueError(
          f"{self.path}: {name}: got {size:,} bytes at offset {offset:,}, expected it within the"
          f" file's size, {len(self.data):,}; {AGAIN}."
        )
      if offset < end:
        raise ValueError(
          f"{self.path}: {name}: got the offset {offset:,}, expected at least {end:,}, where"
          f" {before} ends; {AGAIN}."
        )
      end, before = offset + size, name
      self.tensors[name] = Tensor(shape, kind, part, offset, size)

  def _alignment(self) -> int:
    alignment = self.whole("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
      raise ValueError(
        f"{self.path}: general.alignment: got {alignment}, expected a power of two of at most"
        f" {MAX_ALIGNMENT}; {AGAIN}."
      )
    return alignment

  def _size(self, name: str, shape: tuple[int, ...], number: int, gguf: Any) -> tuple[str, int]:
    """Returns the name of a tensor's kind, and the tensor's bytes."""
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    kind = known.get(number, f"number {number}")
    if kind not in KINDS:
      raise NotImplementedError(
        f"{self.path}: {name}: got the kind {kind}, expected one of {', '.join(KINDS)}; choose"
        " another file of this model, for example in Q8_0."
      )
    length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if 0 in shape or shape[-1] % length:
      raise ValueError(
        f"{self.path}: {name}: got the shape {shape} in {kind}, expected rows of whole blocks of"
        f" {length} numbers; {AGAIN}."
      )
    return kind, math.prod(shape) // length * size

  def _value(self, key: str) -> Any:
    kind = self._number("I", key)
    if kind == ARRAY:
      return self._list(key)
    return self._scalar(key, kind)

  def _scalar(self, key: str, kind: int) -> Any:
    if kind == STRING:
      return self._string(key)
    if kind == BOOL:
      value = self._number("B", key)
      if value > 1:
        raise ValueError(f"{self.path}: {key}: got {value}, expected 0 or 1; {AGAIN}.")
      return bool(value)
    if kind not in NUMBERS:
      raise self._unknown_kind(key, kind)
    value = self._number(NUMBERS[kind], key)
    # The decimal that was written: 1e-06, not 9.999999974752427e-07.
    return float(str(np.float32(value))) if kind == FLOAT32 else value

  def _list(self, key: str) -> Any:
    kind, count = self._number("I", key), self._number("Q", key)
    rest = len(self.data) - self._at
    if kind == ARRAY:
      raise NotImplementedError(
        f"{self.path}: {key}: got a list of lists, expected a list of strings or numbers; convert"
        " the model again with llama.cpp."
      )
    if kind == STRING:
      if count * 8 > rest:
        raise self._too_long(key, f"{count} strings", f"{rest // 8}")
      self._num_strings += count
      if self._num_strings > MAX_STRINGS:
        raise ValueError(
          f"{self.path}: {key}: got {count:,} strings, expected at most {MAX_STRINGS:,} in all"
          f" lists; {AGAIN}."
        )
      return [self._string(key) for _ in range(count)]
    if kind not in NUMBERS and kind != BOOL:
      raise self._unknown_kind(key, kind)
    dtype = np.dtype(np.bool_) if kind == BOOL else np.dtype("<" + NUMBERS[kind])
    if count * dtype.itemsize > rest:
      raise self._too_long(key, f"{count} numbers", f"{rest // dtype.itemsize}")
    return np.frombuffer(self._bytes(count * dtype.itemsize, key), dtype)

  def _bytes(self, size: int, what: str) -> bytes:
    if size > len(self.data) - self._at:
      raise self._too_long(what, f"{size} bytes", f"{len(self.data) - self._at}")
    self._at += size
    return bytes(self.data[self._at - size : self._at])

  def _number(self, letter: str, what: str) -> Any:
    return struct.unpack("<" + letter, self._bytes(struct.calcsize("<" + letter), what))[0]

  def _string(self, what: str) -> str:
    start, rest = self._at + 8, len(self.data) - self._at - 8
    # A vocabulary has 300,000 strings, so they are unpacked in place.
    size = LENGTH.unpack_from(self.data, self._at)[0] if rest >= 0 else 8
    if size > rest:
      raise self._too_long(what, f"{size} bytes", f"{max(rest, 0)}")
    self._at = start + size
    try:
      return str(self.data[start : self._at], "utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(
        f"{self.path}: {what}: got bytes that are not UTF-8"
        f" ({bytes(self.data[start : start + min(size, 20)])!r}), expected text; {AGAIN}."
      ) from error

  def _too_long(self, what: str, got: str, expected: str) -> ValueError:
    return ValueError(
      f"{self.path}: {what}: got {got} at offset {self._at:,}, expected at most the {expected} that"
      f" the file has left; {AGAIN}."
    )

  def _unknown_kind(self, key: str, kind: int) -> ValueError:
    return ValueError(
      f"{self.path}: {key}: got a value of kind {kind}, expected one of 0 to 12; {AGAIN}."
    )


def _twice(path: pathlib.Path, name: str) -> ValueError:
  return ValueError(f"{path}: {name}: got the tensor twice, expected it once; {AGAIN}.")


def _other_parts(first: _Head) -> list[pathlib.Path]:
  """Returns the other files of a split model, given the first one.

  Raises:
    FileNotFoundError: naming the missing file.
    ValueError: if this is not the first file, or its name does not match the split.
  """
  path, count, place = first.path, first.whole("split.count", 1), first.whole("split.no", 0)
  named = SPLIT_NAME.fullmatch(path.name)
  if count <= 1 and named is None:
    return []
  if named is None or int(named["count"]) != count:
    raise ValueError(
      f"{path}: split.count: got {count}, expected the count in the file name, such as"
      f" '{path.stem}-00001-of-{max(count, 2):05d}.gguf'; restore the original file names."
    )
  if int(named["number"]) != 1 or place != 0:
    raise ValueError(
      f"{path}: split.no: got {place} in file {int(named['number'])} of {count}, expected the first"
      " file; pass the first file, and the others are found next to it."
    )
  parts = [
    path.with_name(f"{named['start']}-{number:05d}-of-{count:05d}.gguf")
    for number in range(2, count + 1)
  ]
  for part in parts:
    if not part.is_file():
      raise FileNotFoundError(
        f"{part}: got no such file, expected all {count} files of the model next to {path.name};"
        " download it."
      )
  return parts


def _require_part(part: _Head, number: int, first: _Head) -> None:
  for key, expected in (("split.no", number), ("split.count", first.whole("split.count", 1))):
    if (found := part.whole(key, -1)) != expected:
      raise ValueError(
        f"{part.path}: {key}: got {found}, expected {expected}, as in its name and"
        f" {first.path.name}; the files do not belong together."
      )
