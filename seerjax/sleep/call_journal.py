"""Journal of thinker calls and answers on disk, so that a restarted run repeats no paid call.

It has one record per call (`records.lines`): prompt digest, seed, limits, text, token counts
and finish reason. Failed calls are recorded, too, and repeated by the next run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import json
import os
import pathlib
from typing import Any

from seerjax.records import lines
from seerjax.rollout import journal
from seerjax.sleep.thinkers import Answer, Ask, Call, Completed

FORMAT = 1


class CallJournal:
  """An open journal of calls. It has one writer at a time, which holds a lock until it closes.

  Attributes:
    path: path of the file.
    num_found: answers taken from the journal.
    num_asked: calls made.
    num_failed: calls made that failed.
    truncated_bytes: bytes of a torn tail that were cut off on opening.
  """

  def __init__(self, path: str | os.PathLike[str], *, settings: Mapping[str, Any]):
    """Opens a journal, or starts one.

    Args:
      path: path of the file; its folder is created if needed.
      settings: JSON that identifies the thinker (digest and numerics of a model, or endpoint and
        model name): everything that must be equal for journalled answers to be valid.

    Raises:
      ValueError: if another writer has the file open, if it is damaged before its end or is not a
        journal of calls, or if the settings differ (names both values) or are not JSON.
      OSError: if the file cannot be written.
    """
    self.path = pathlib.Path(path)
    self.num_found = self.num_asked = self.num_failed = 0
    self._at: dict[str, int] = {}
    self._end = 0
    try:
      settings = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"CallJournal: got settings that are not JSON ({error}), expected strings, finite numbers,"
        " lists and dicts; convert them first."
      ) from error
    if self.path.is_dir():
      raise ValueError(
        f"{self.path}: got a directory, expected the journal's file, or none yet; add a name such"
        " as calls.jsonl."
      )
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      lines.lock(self._descriptor, self.path)
      found = self._load()
      if found is None:
        self._write({"kind": "calls", "format": FORMAT, "settings": settings})
      elif differing := journal.settings_differences(found, settings):
        raise ValueError(
          f"{self.path}: got a different thinker ({'; '.join(differing)}), expected the one that"
          " started the journal; restore it, or use another journal."
        )
    except BaseException:
      self.close()
      raise

  def answer(self, call: Call) -> Completed | None:
    """Returns the journalled answer to a call, or None."""
    if call.key not in self._at:
      return None
    record = lines.read(self.path, self._at[call.key])
    return Completed(
      text=record["text"],
      num_tokens=record["num_tokens"],
      num_prompt_tokens=record["num_prompt_tokens"],
      finish_reason=record["finish_reason"],
    )

  def append(self, call: Call, answer: Answer) -> None:
    """Writes a call and its answer to disk.

    Raises:
      ValueError: if the journal is closed.
      OSError: if the disk is full; earlier records are intact.
    """
    self.num_asked += 1
    record: dict[str, Any] = {
      "kind": "call",
      "key": call.key,
      "prompt": call.prompt_digest,
      "seed": call.seed,
      "max_tokens": call.max_tokens,
      "temperature": float(call.temperature),
    }
    if isinstance(answer, Completed):
      record |= {
        "text": answer.text,
        "num_tokens": answer.num_tokens,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "finish_reason": answer.finish_reason,
      }
      self._at[call.key] = self._write(record)
    else:
      self.num_failed += 1
      self._write(record | {"kind": "failed", "error": str(answer)})

  def asking(self, ask: Ask) -> Ask:
    """Returns an `Ask` that answers from the journal, and runs and records the other calls."""

    def answered(calls: Sequence[Call]) -> Iterator[tuple[int, Answer]]:
      left = []
      for index, call in enumerate(calls):
        known = self.answer(call)
        if known is None:
          left.append(index)
        else:
          self.num_found += 1
          yield index, known
      for place, answer in ask([calls[index] for index in left]) if left else ():
        self.append(calls[left[place]], answer)
        yield left[place], answer

    return answered

  def close(self) -> None:
    """Closes the file; may be called repeatedly."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None

  def __enter__(self) -> CallJournal:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _load(self) -> dict[str, Any] | None:
    """Returns the settings in the journal's header; None for a new journal."""
    settings = None
    for start, end, record in lines.scan(self.path):
      if settings is None:
        if record.get("kind") != "calls" or record.get("format") != FORMAT:
          raise self._stranger(record)
        settings = record["settings"]
      elif record["kind"] == "call":
        self._at[record["key"]] = start
      self._end = end
    assert self._descriptor is not None
    if settings is None and os.fstat(self._descriptor).st_size:
      if not lines.may_be_torn_header(self.path):
        raise self._stranger({})
    self.truncated_bytes = lines.cut_tail(self._descriptor, self._end)
    return settings

  def _stranger(self, record: Mapping[str, Any]) -> ValueError:
    return ValueError(
      f"{self.path}: got {lines.short(record)} as the first record, expected a journal of"
      f" calls of format {FORMAT}; choose another file, or a new name."
    )

  def _write(self, record: Mapping[str, Any]) -> int:
    if self._descriptor is None:
      raise ValueError(
        f"{self.path}: got a call for a closed journal, expected an open one; append before close."
      )
    start = self._end
    self._end = lines.append(self._descriptor, self.path, start, record)
    return start
