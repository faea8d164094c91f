"""Broadcasts and comparisons that keep the processes of a slice in agreement.

Every process of a slice (`parallel.start`) runs the same lines. Measurements, file contents and
external inputs differ between processes, so the first process obtains them and broadcasts them
(`from_first`). Results that every process computes for itself are compared (`compare`), so that
diverging processes end with an error message instead of waiting for each other forever.

All functions are collective: each process calls them in the same order. With a single process, they
return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import pickle
from typing import Any, TypeVar
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

T = TypeVar("T")
# Bytes that are broadcast together with the length of a value; most values, such as a verdict, fit.
FIRST_BYTES = 504
# Maximum bytes of a differing value in an error message.
TEXT_BYTES = 256


class Disagreement(RuntimeError):
  """Processes of a slice diverged, or the first process failed to compute a broadcast value."""


def is_first() -> bool:
  """Returns whether this is the first process, which broadcasts values and writes files."""
  return jax.process_index() == 0


def from_first(function: Callable[[], T]) -> T:
  """Returns the result of calling `function` in the first process; the others do not call it.

  Raises:
    Disagreement: in the other processes, if `function` raises in the first, with its message.
  """
  if jax.process_count() == 1:
    return function()
  if not is_first():
    return _told()
  try:
    found = function()
  except Exception as error:
    _tell(False, f"{type(error).__name__}: {error}")
    raise
  _tell(True, found)
  return found


def _tell(is_found: bool, value: Any) -> None:
  data = pickle.dumps(value)
  _broadcast(_words(np.asarray([len(data), is_found], np.uint32).tobytes() + data[:FIRST_BYTES]))
  if len(data) > FIRST_BYTES:
    _broadcast(_words(data[FIRST_BYTES:]))


def _told() -> Any:
  # Unpickling is safe: the data comes from the first process of the same program.
  first = _broadcast(_words(b"")).tobytes()
  length, is_found = np.frombuffer(first[:8], np.uint32).tolist()
  data = first[8:]
  if length > FIRST_BYTES:
    data += _broadcast(_words(b"", length - FIRST_BYTES)).tobytes()
  value = pickle.loads(data[:length])
  if not is_found:
    raise Disagreement(f"process 0 ended with {value}; see its log.")
  return value


def _words(data: bytes, length: int = 0) -> np.ndarray:
  """Returns bytes as a power of two of words, so that few sizes are ever compiled.

  Args:
    data: the bytes.
    length: number of bytes, if only the first process has them.
  """
  length = max(len(data), length, FIRST_BYTES + 8)
  count = 1 << (-(-length // 4) - 1).bit_length()
  return np.frombuffer(data.ljust(4 * count, b"\0"), np.uint32)


def _broadcast(words: np.ndarray) -> np.ndarray:
  return np.asarray(multihost_utils.broadcast_one_to_all(words))


def least(value: float) -> float:
  """Returns the minimum over all processes."""
  if jax.process_count() == 1:
    return value
  bits = np.asarray([value], np.float64).view(np.uint32)
  return float(_gathered(bits).view(np.float64).min())


def most(value: int) -> int:
  """Returns the maximum over all processes of whole numbers in [0, 2**32)."""
  if jax.process_count() == 1:
    return value
  return int(_gathered(np.asarray([value], np.uint32)).max())


def compare(what: str, decisions: Mapping[str, Any]) -> None:
  """Raises in all processes if any of them made another decision.

  Args:
    what: subject of the decisions, such as "engine step 12".
    decisions: arrays or values with a `repr`, by name; all processes have the same names. A digest
      of each is exchanged, in one array of words.

  Raises:
    Disagreement: in every process, with `what`, the first field that differs, and its values by
      process.
  """
  if jax.process_count() == 1:
    return
  words = np.asarray([_digest(value) for value in decisions.values()], np.uint32)
  found = _gathered(words)  # u32[p, w]
  differs = np.any(found != found[:1], axis=0)
  if not differs.any():
    return
  place = int(np.argmax(differs))
  name, value = list(decisions.items())[place]
  texts = _gathered(np.frombuffer(_text(value).encode()[:TEXT_BYTES].ljust(TEXT_BYTES), np.uint32))
  sides: dict[int, list[int]] = {}
  for process, digest in enumerate(found[:, place].tolist()):
    sides.setdefault(digest, []).append(process)
  values = "; ".join(
    f"{_text_of(texts[who[0]])} (digest {digest:08x}) in process {', '.join(map(str, who))}"
    for digest, who in sides.items()
  )
  raise Disagreement(
    f"{what}: got {name} that differs between processes ({values}), expected one value; give all"
    " processes the same code, flags and files. Checkpoints are intact: restart with --resume."
  )


def _text(value: Any) -> str:
  if isinstance(value, np.ndarray):
    return f"{value.dtype}{list(value.shape)} of {np.array2string(value.ravel(), threshold=8)}"
  return repr(value)


def _text_of(words: np.ndarray) -> str:
  return np.ascontiguousarray(words).tobytes().decode(errors="replace").strip()


def _digest(value: Any) -> int:
  if isinstance(value, np.ndarray):
    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
  return zlib.crc32(value if isinstance(value, bytes) else repr(value).encode())


def _gathered(words: np.ndarray) -> np.ndarray:
  """Returns u32[p, w], the words of all processes."""
  return np.asarray(multihost_utils.process_allgather(words))
