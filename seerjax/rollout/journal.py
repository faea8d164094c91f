"""The journal of a run: finished rollouts, chunks and attempts, with all data for recomputation.

An append-only file with one record per line:

  {"crc32":"8 hex digits","record":{...}}

The checksum covers the bytes of the record. The first record is the header (format, run settings,
numerics fingerprint). The others are rollouts, chunks, attempts (results of running a rollout's
program), events (of a cluster's workers, in the order in which the driver received them), and new
epochs of the numerics. A record is on disk before `append` returns; within `together`, before the
block ends, with one wait for many records. A kill during a write leaves a torn tail, which the next
open truncates; its contents are sampled again, to the same bits.

Nothing here reads a clock or a device.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from seerjax import numerics
from seerjax.records import file, lines
from seerjax.rollout import journal_records
from seerjax.rollout.journal_records import Chunk
from seerjax.tasks import digests
from seerjax.types import Completion, Rollout

FILE_NAME = "journal.jsonl"
FORMAT = 1
_KIND = file.Kind(
  "header", FORMAT, "journal", "a journal's header",
  "choose another file, or start a new run directory",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A finished rollout in the journal.

  Attributes:
    step: step of the run.
    group: index of the group in the step.
    member: index of the rollout in the group.
    epoch: index of the journal's fingerprint that applies to it.
    problem_id: id of the problem, "" if not given.
    prompt_text: the prompt as text, for readers; "" if not given.
    rollout: the rollout.
  """

  step: int
  group: int
  member: int
  epoch: int
  problem_id: str
  prompt_text: str
  rollout: Rollout


class Header(NamedTuple):
  """Header of a journal.

  Attributes:
    settings: the run's settings, JSON.
    fingerprints: one per epoch; see `numerics.fingerprint`.
  """

  settings: dict[str, Any]
  fingerprints: tuple[dict[str, str], ...]


def read(path: str | os.PathLike) -> tuple[Header, Iterator[Entry]]:
  """Returns a journal's header and its finished rollouts, in the order of writing.

  Rollouts that a later epoch replaced are skipped. The file is not changed, and may be the journal
  of a running run.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file is not a journal, or is damaged before its end.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: got no such file, expected a journal; pass the {FILE_NAME} of a run's directory."
    )
  _, _, header = next(lines.scan(path), (0, 0, {}))
  _KIND.check(path, header)
  epochs = [record for _, _, record in lines.scan(path) if record["kind"] == "epoch"]
  fingerprints = [header["fingerprint"]] + [epoch["fingerprint"] for epoch in epochs]

  def entries() -> Iterator[Entry]:
    epoch = 0
    for _, _, record in lines.scan(path):
      epoch += record["kind"] == "epoch"
      if record["kind"] == "rollout":
        # A later epoch repeats all steps after its own.
        if all(record["step"] <= later["step"] for later in epochs[epoch:]):
          yield _entry(record, epoch)

  return Header(header["settings"], tuple(fingerprints)), entries()


def _entry(record: Mapping[str, Any], epoch: int) -> Entry:
  return Entry(
    step=record["step"],
    group=record["group"],
    member=record["member"],
    epoch=epoch,
    problem_id=record["problem_id"],
    prompt_text=record["prompt_text"],
    rollout=journal_records.from_record(record["rollout"]),
  )


class Journal(file.RecordFile):
  """An open journal: append, and look up by (step, group, member); `read` is for readers.

  Memory holds one file offset per record; records are read on demand.

  Records that are appended twice must be equal. A resumed run that samples a step again is thus
  checked against the bits from before the kill.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    *,
    fingerprint: Mapping[str, str],
    settings: Mapping[str, Any],
    accept_new_numerics: bool = False,
    data: Mapping[str, str] | None = None,
    accept_new_data: bool = False,
    resume_step: int = -1,
  ):
    """Opens or creates a journal.

    Args:
      path: the file; its directory is created if missing.
      fingerprint: this run's numerics fingerprint.
      settings: all settings of this run, JSON, that must be equal to continue the journal.
      accept_new_numerics: on another fingerprint, start a new epoch and record both. Rollouts of
        steps after `resume_step` are then discarded and sampled again, to other bits.
      data: digests of the problems (`tasks.digests`); None if they come from no file.
      accept_new_data: on other data, start a new epoch likewise.
      resume_step: last completed step of the run.

    Raises:
      ValueError: if another writer has the file open; if it is not a journal or is damaged before
        its end; if a setting, the fingerprint or the data differ (the message has both values); or
        if the settings are not JSON.
      OSError: if the file is not writable.
    """
    self._index: dict[tuple[int, int, int], tuple[int, int]] = {}
    self._chunks: dict[tuple[int, int, int], list[int]] = {}
    self._attempts: dict[tuple[int, int, int], int] = {}
    self._events: list[int] = []
    self._known: collections.Counter[tuple[int, int, int]] = collections.Counter()
    self.fingerprints: list[dict[str, str]] = []
    # None for a journal from an earlier version, which has no data digests.
    self.data: dict[str, str] | None = None
    settings = file.plain_settings(settings, "journal")
    self._settings = settings  # Those of the header, once there is one.
    fingerprint, data = dict(fingerprint), dict(data or {})
    super().__init__(path, _KIND)
    with self._closing_on_error():
      if not self.fingerprints:
        # A kill during the header's write leaves only a torn header, never one with rollouts.
        self._begin({"settings": settings, "fingerprint": fingerprint, "data": data})
        self.fingerprints, self.data = [fingerprint], data
        return
      if differing := file.differences(self._settings, settings):
        raise ValueError(
          f"{self.path}: got other run settings ({'; '.join(differing)}), expected those at the"
          " start of the journal; restore them, or start a new run directory."
        )
      self.data = data if self.data is None else self.data
      if self.fingerprints[-1] != fingerprint or self.data != data:
        if not accept_new_numerics:
          numerics.require_same(self.fingerprints[-1], fingerprint, what=str(self.path))
        if not accept_new_data:
          digests.require_same(self.data, data, what=str(self.path))
        epoch = {
          "kind": "epoch", "step": int(resume_step), "fingerprint": fingerprint, "data": data
        }  # fmt: skip
        self._write(epoch)
        self._begin_epoch(epoch)

  def append(
    self,
    step: int,
    group: int,
    member: int,
    rollout: Rollout,
    *,
    problem_id: str = "",
    prompt_text: str = "",
  ) -> bool:
    """Appends a finished rollout.

    Args:
      step: step of the run.
      group: index of the group in the step.
      member: index of the rollout in the group.
      rollout: the rollout.
      problem_id: id of the problem.
      prompt_text: the prompt as text, for readers.

    Returns:
      False if an equal record exists already and nothing was written.

    Raises:
      ValueError: if a different rollout exists under the same three numbers (the message names the
        difference), or if the request failed.
      OSError: if the disk is full; the journal then ends with the previous record.
    """
    if rollout.completion.finish_reason == "error":
      raise ValueError(
        f"{self.path}: got a rollout that ended with an error ({rollout.completion.error}),"
        " expected a complete one; sample it again, because it cannot be used for training."
      )
    record = {
      "kind": "rollout",
      "step": int(step),
      "group": int(group),
      "member": int(member),
      "problem_id": problem_id,
      "prompt_text": prompt_text,
      "rollout": journal_records.to_record(rollout),
    }
    key = (int(step), int(group), int(member))
    if key in self._index:
      stored = self._read(self._index[key][0])
      if differing := _first_difference(stored, record):
        where, *both = differing
        was, now = map(lines.short, both)
        raise ValueError(
          f"{self.path}: got another rollout for step {step}, group {group}, member {member}:"
          f" {where} was {was} and is {now}, expected equal bits; the run was"
          " changed, or the contract is broken: start a new run directory, or replay the request."
        )
      return False
    self._index[key] = (self._write(record), len(self.fingerprints) - 1)
    return True

  def append_chunk(self, step: int, group: int, member: int, chunk: Chunk) -> bool:
    """Appends a finished chunk of a running rollout.

    A chunk may start before the end of the journalled ones, if a resumed run has other chunk
    boundaries. The shared tokens must have equal bits, and only new ones are written.

    Returns:
      False if nothing was new.

    Raises:
      ValueError: if the chunk leaves a gap, or its bits differ from the journalled ones.
      OSError: as for `append`.
    """
    key = (int(step), int(group), int(member))
    known = self._known[key]
    where = f"{self.path}: got a chunk for step {step}, group {group}, member {member}"
    if chunk.start > known:
      raise ValueError(
        f"{where} that starts at token {chunk.start}, expected at most token {known}, the end of"
        " the recorded ones; append chunks in order."
      )
    shared = min(known - chunk.start, len(chunk.tokens))
    stored = self.chunks(*key) if shared else ()
    rows = slice(chunk.start, chunk.start + shared)
    for name in ("tokens", "behaviour_logprobs", "raw_logprobs") if shared else ():
      was = np.concatenate([np.asarray(vars(part)[name]) for part in stored])[rows]
      now = np.asarray(vars(chunk)[name])[:shared]
      # Compared as bytes, so that NaN equals itself and -0.0 differs from 0.0.
      if was.tobytes() != now.astype(was.dtype).tobytes():
        at = next(i for i in range(shared) if was[i].tobytes() != now[i].tobytes())
        raise ValueError(
          f"{where} whose {name} at token {chunk.start + at} was {was[at]} and is {now[at]},"
          " expected equal bits; the run was changed, or the contract is broken: replay the"
          " request."
        )
    if shared == len(chunk.tokens):
      return False
    rest = dataclasses.replace(
      chunk,
      start=known,
      tokens=tuple(chunk.tokens[shared:]),
      behaviour_logprobs=chunk.behaviour_logprobs[shared:],
      raw_logprobs=chunk.raw_logprobs[shared:],
    )
    offset = self._write(
      {
        "kind": "chunk",
        "step": key[0],
        "group": key[1],
        "member": key[2],
        "chunk": journal_records.chunk_to_record(rest),
      }
    )
    self._chunks.setdefault(key, []).append(offset)
    self._known[key] += len(rest.tokens)
    return True

  def append_attempt(self, step: int, group: int, member: int, attempt: Mapping[str, Any]) -> bool:
    """Appends the result of running a rollout's program, JSON.

    Unlike tokens, the result of a program with a time limit is not reproducible: the first counts.

    Returns:
      False if a result exists already and nothing was written.

    Raises:
      OSError: as for `append`.
    """
    key = (int(step), int(group), int(member))
    if key in self._attempts:
      return False
    place = {"step": key[0], "group": key[1], "member": key[2]}
    self._attempts[key] = self._write({"kind": "attempt"} | place | {"attempt": dict(attempt)})
    return True

  def append_event(self, event: Mapping[str, Any]) -> int:
    """Appends an event, JSON; returns its index, from 0.

    Raises:
      OSError: as for `append`.
    """
    index = len(self._events)
    self._events.append(self._write({"kind": "event", "index": index, "event": dict(event)}))
    return index

  def events(self) -> Iterator[dict[str, Any]]:
    """Yields the events in order."""
    for offset in self._events:
      yield self._read(offset)["event"]

  def attempt(self, step: int, group: int, member: int) -> dict[str, Any] | None:
    """Returns the result of running a rollout's program, None if unknown."""
    offset = self._attempts.get((step, group, member))
    return None if offset is None else self._read(offset)["attempt"]

  def lookup(self, step: int, group: int, member: int, *, problem_id: str = "") -> Entry | None:
    """Returns the finished rollout of these three numbers, None if there is none.

    Raises:
      ValueError: if its problem id differs from `problem_id`, if both are given.
    """
    if (step, group, member) not in self._index:
      return None
    offset, epoch = self._index[step, group, member]
    entry = _entry(self._read(offset), epoch)
    if problem_id and entry.problem_id not in ("", problem_id):
      raise ValueError(
        f"{self.path}: got a rollout of problem {entry.problem_id!r} for step {step}, group"
        f" {group}, member {member}, expected problem {problem_id!r}, which now belongs there; the"
        f" task's problems have changed: restore them, or resume with {digests.ACCEPT}."
      )
    return entry

  def chunks(self, step: int, group: int, member: int) -> tuple[Chunk, ...]:
    """Returns the journalled chunks of a rollout, in order, without gaps."""
    offsets = self._chunks.get((step, group, member), ())
    return tuple(
      journal_records.chunk_from_record(self._read(offset)["chunk"]) for offset in offsets
    )

  def partial_completion(
    self, step: int, group: int, member: int, *, prompt: Sequence[int] = ()
  ) -> Completion | None:
    """Returns the partial completion of an unfinished rollout, None if it has no chunk.

    Raises:
      ValueError: if its prompt differs from `prompt`, if given.
    """
    chunks = self.chunks(step, group, member)
    if not chunks or (step, group, member) in self._index:
      return None
    if prompt and chunks[0].request.prompt != tuple(prompt):
      raise ValueError(
        f"{self.path}: got a partial answer to another prompt for step {step}, group {group},"
        f" member {member}, expected one to the current prompt; problems or chat have changed:"
        f" restore them, or resume with {digests.ACCEPT}."
      )
    return Completion(
      request_id=chunks[0].request.request_id,
      tokens=tuple(token for chunk in chunks for token in chunk.tokens),
      behaviour_logprobs=np.concatenate([chunk.behaviour_logprobs for chunk in chunks]),
      raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
      text="",
      finish_reason="",
      policy_version=chunks[0].policy_version,
    )

  def keys(self) -> tuple[tuple[int, int, int], ...]:
    """Returns (step, group, member) of every finished rollout, ascending."""
    return tuple(sorted(self._index))

  def __enter__(self) -> Journal:
    return self

  def _load_record(self, offset: int, record: dict[str, Any]) -> None:
    kind = record.get("kind")
    if not self.fingerprints:
      self._settings = record["settings"]
      self.fingerprints.append(record["fingerprint"])
      self.data = record.get("data")
    elif kind == "epoch":
      self._begin_epoch(record)
    elif kind == "event":
      self._events.append(offset)
    else:
      key = (record["step"], record["group"], record["member"])
      if kind == "rollout":
        self._index[key] = (offset, len(self.fingerprints) - 1)
      elif kind == "attempt":
        self._attempts[key] = offset
      else:
        self._chunks.setdefault(key, []).append(offset)
        self._known[key] += len(record["chunk"]["tokens"])

  def _begin_epoch(self, record: Mapping[str, Any]) -> None:
    self.fingerprints.append(record["fingerprint"])
    self.data = record.get("data", self.data)
    self._index = {key: at for key, at in self._index.items() if key[0] <= record["step"]}
    self._chunks = {key: at for key, at in self._chunks.items() if key[0] <= record["step"]}
    self._attempts = {key: at for key, at in self._attempts.items() if key[0] <= record["step"]}
    for key in [key for key in self._known if key[0] > record["step"]]:
      del self._known[key]


def _first_difference(stored: Any, current: Any, where: str = "") -> tuple[str, Any, Any] | None:
  if isinstance(stored, dict) and isinstance(current, dict):
    for name in sorted(set(stored) | set(current)):
      found = _first_difference(stored.get(name), current.get(name), f"{where}.{name}".strip("."))
      if found:
        return found
    return None
  return None if stored == current else (where, stored, current)
