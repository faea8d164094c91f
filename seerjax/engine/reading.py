"""Texts that are read, not answered: what is likeliest after each of them, and after its drafts.

    answers so far --rows of a step, drafts behind them--> the likeliest tokens of each place

Each is a sequence of the engine like any other, with pages that share all that another one wrote;
it takes its rows of a step, and leaves with what it was told. Nothing is sampled of it, and nothing
verified: of a text that is read, drafts are places that are read with it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
import dataclasses
from typing import Protocol, runtime_checkable

from seerjax.engine import checks, output
from seerjax.engine.sequence import Likeliest, ReadingState, SequenceState, StepOutput
from seerjax.ops import sampling
from seerjax.types import Completion, Request, SamplingParams

MAX_TOP = 16
Answer = tuple[int, ...]


@runtime_checkable
class RunsSteps(Protocol):
  """What is asked of an engine; see `engine.Engine`."""

  def step(self) -> list[StepOutput]: ...
  def poll(self) -> list[Completion]: ...
  def cancel(self, request_id: str) -> None: ...


def begun(
  request: Request,
  answers: Sequence[Sequence[int]],
  count: int,
  drafts: Sequence[Sequence[Sequence[int]]],
  *,
  vocab_size: int,
  live: Container[str],
) -> list[SequenceState]:
  """Returns a sequence for each answer; see `Engine.likeliest`.

  Args:
    request: that an engine can answer.
    answers: the beginnings of its answer that are read.
    count: tokens to be told of at each place.
    drafts: for each answer, paths behind it.
    vocab_size: of the model.
    live: ids of the unfinished.

  Raises:
    ValueError: if the count is out of its range, an answer is as long as it may be or no token ids,
      drafts are those of another number of answers, or a name is taken.
  """
  what = f"Engine.likeliest of {request.request_id!r}"
  most = min(MAX_TOP, vocab_size)
  checks.whole(f"{what}: count", count, 1, most, "no more of a place are told")
  if drafts and len(drafts) != len(answers):
    raise ValueError(
      f"{what}: got drafts of {len(drafts)} answers, expected them of {len(answers)}, or none at"
      " all; pass () for an answer without any."
    )
  found = []
  for place, answer in enumerate(answers):
    checks.tokens_of(f"{what}: answer {place}", answer, vocab_size)
    room = request.sampling.max_tokens - len(answer) - 1
    if room < 0:
      raise ValueError(
        f"{what}: got answer {place} of {len(answer)} tokens, expected fewer than max_tokens"
        f" {request.sampling.max_tokens}; what follows it is not part of the request."
      )
    paths = []
    for path in drafts[place] if drafts else ():
      checks.tokens_of(f"{what}: drafts of answer {place}", path, vocab_size)
      paths.append(tuple(path[:room]))
    longest = max(map(len, paths), default=0)
    own = dataclasses.replace(
      request,
      request_id=f"{request.request_id}/{place}",
      prompt=(*request.prompt, *answer),
      sampling=SamplingParams(temperature=0.0, max_tokens=longest + 1),
      group_id="",
    )
    if own.request_id in live:
      raise ValueError(
        f"{what}: got the unfinished request {own.request_id!r}, whose name an answer is read"
        " under, expected none; rename it."
      )
    sequence = output.begun(own, 0, sampling.sampling_rows([own.sampling]), None, None)
    sequence.reading = ReadingState(count, tuple(paths))
    sequence.extend(None)
    found.append(sequence)
  return found


def to_ends(
  engine: RunsSteps,
  sequences: Sequence[SequenceState],
  *,
  live: Container[str],
  keep: Callable[[list[Completion]], None],
  on_step: Callable[[list[StepOutput]], None] | None,
) -> list[dict[Answer, Likeliest]]:
  """Returns what each sequence was told, in their order.

  Args:
    engine: that runs them, and whatever else is in it.
    sequences: that were submitted.
    live: ids of the unfinished.
    keep: takes what others' requests finished with, for the next `poll`.
    on_step: called with each visit's updates.

  Raises:
    RuntimeError: with what one of them met, if a step failed it.
    BaseException: what a step raises, Ctrl-C too; none of them is left then.
  """
  names = {sequence.request.request_id for sequence in sequences}
  others = engine.poll()
  try:
    while any(name in live for name in names):
      updates = engine.step()
      if on_step is not None:
        on_step([update for update in updates if update.request_id not in names])
      for completion in engine.poll():
        if completion.request_id not in names:
          others.append(completion)
        elif completion.error:
          raise RuntimeError(completion.error)
  finally:
    for name in names:
      if name in live:
        engine.cancel(name)
    keep(others)
  found = [sequence.reading.found for sequence in sequences if sequence.reading is not None]
  assert all(found), "got a text that left without having been read"
  return found
