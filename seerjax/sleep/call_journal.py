"""Journal of thinker calls and answers on disk, so that a restarted run repeats no paid call.

It has one record per call (`records.lines`): prompt digest, seed, limits, text, token counts
and finish reason. Failed calls are recorded, too, and repeated by the next run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Any

from seerjax.records import file
from seerjax.sleep.thinkers import Answer, Ask, Call, Completed

FORMAT = 1
_KIND = file.Kind(
  "calls", FORMAT, "journal", "a journal of calls", "choose another file, or a new name"
)


class CallJournal(file.RecordFile):
  """An open journal of calls.

  Attributes:
    num_found: answers taken from the journal.
    num_asked: calls made.
    num_failed: calls made that failed.
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
    self.num_found = self.num_asked = self.num_failed = 0
    self._at: dict[str, int] = {}
    self._settings: dict[str, Any] | None = None
    settings = file.plain_settings(settings, "CallJournal")
    super().__init__(path, _KIND)
    with self._closing_on_error():
      if self._settings is None:
        self._begin({"settings": settings})
      elif differing := file.differences(self._settings, settings):
        raise ValueError(
          f"{self.path}: got a different thinker ({'; '.join(differing)}), expected the one that"
          " started the journal; restore it, or use another journal."
        )

  def answer(self, call: Call) -> Completed | None:
    """Returns the journalled answer to a call, or None."""
    if call.key not in self._at:
      return None
    record = self._read(self._at[call.key])
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

  def __enter__(self) -> CallJournal:
    return self

  def _load_record(self, offset: int, record: dict[str, Any]) -> None:
    if self._settings is None:
      self._settings = record["settings"]
    elif record["kind"] == "call":
      self._at[record["key"]] = offset
