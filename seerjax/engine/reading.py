"""Prefill-only requests: the top-k next tokens after a prompt and after each draft.

    responses so far --rows of a step, drafts appended--> the top tokens at each position

Each is a sequence of the engine like any other and shares cached pages. It gets its rows of a step
and ends with its top tokens. Nothing is sampled or verified: its drafts are further positions with
top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
import dataclasses

from seerjax.engine import checks, output
from seerjax.engine.generation import RunsRequests
from seerjax.engine.runner import MAX_TOP
from seerjax.engine.sequence import ReadingState, SequenceState, StepOutput, TopLogprobs
from seerjax.types import Completion, Request, SamplingParams

Answer = tuple[int, ...]


def check_counts(what: str, num_top: int, prompt_top: int | None) -> None:
  """Refuses numbers of top tokens that no step returns.

  Raises:
    ValueError: with `what` as its prefix.
  """
  fix = "no more are returned for a position"
  checks.whole(f"{what}: num_top", num_top, 0, MAX_TOP, fix)
  if prompt_top is not None:
    checks.whole(f"{what}: prompt_top", prompt_top, 0, MAX_TOP, fix)


def begun(
  request: Request,
  answers: Sequence[Sequence[int]],
  count: int,
  drafts: Sequence[Sequence[Sequence[int]]],
  *,
  instance: int,
  adapter: int,
  vocab_size: int,
  live: Container[str],
) -> list[SequenceState]:
  """Returns a sequence for each partial response; see `Engine.top_logprobs`.

  Args:
    request: a request that the engine accepts.
    answers: the partial responses.
    count: number of top tokens at each position.
    drafts: for each response, paths of token ids after it.
    instance: instance to run on.
    adapter: index of the request's adapter.
    vocab_size: vocabulary size of the model.
    live: ids of the unfinished requests.

  Raises:
    ValueError: if the count is out of range, a response has max_tokens or more or invalid token
      ids, the number of drafts is not that of the responses, or a request id is in use.
  """
  what = f"Engine.top_logprobs of {request.request_id!r}"
  most = min(MAX_TOP, vocab_size)
  checks.whole(f"{what}: count", count, 1, most, "no more are returned for a position")
  if drafts and len(drafts) != len(answers):
    raise ValueError(
      f"{what}: got drafts for {len(drafts)} answers, expected drafts for {len(answers)}, or none"
      " at all; pass () for an answer without drafts."
    )
  found = []
  for place, answer in enumerate(answers):
    checks.tokens_of(f"{what}: answer {place}", answer, vocab_size)
    room = request.sampling.max_tokens - len(answer) - 1
    if room < 0:
      raise ValueError(
        f"{what}: got answer {place} of {len(answer)} tokens, expected fewer than max_tokens"
        f" {request.sampling.max_tokens}; tokens beyond them do not belong to the request."
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
        f"{what}: got the unfinished request {own.request_id!r}, an id that is needed to read an"
        " answer, expected none; rename it."
      )
    state = ReadingState(count, tuple(paths))
    sequence = output.begun(own, instance, None, None, adapter=adapter, reading=state)
    sequence.extend(None)
    found.append(sequence)
  return found


def to_ends(
  engine: RunsRequests,
  sequences: Sequence[SequenceState],
  *,
  live: Container[str],
  keep: Callable[[list[Completion]], None],
  on_step: Callable[[list[StepOutput]], None] | None,
) -> list[dict[Answer, TopLogprobs]]:
  """Runs prefill-only sequences to completion; returns the top tokens of each, in order.

  Args:
    engine: the engine that runs them, possibly with other requests.
    sequences: the submitted sequences.
    live: ids of the unfinished requests.
    keep: receives completions of other requests, for the next `poll`.
    on_step: called with each visit's updates of other requests.

  Raises:
    RuntimeError: with the error of a step that failed one of the sequences.
    BaseException: if a step raises, Ctrl-C included; all sequences are cancelled then.
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
        engine.abort_request(name)
    keep(others)
  found = [sequence.reading.found for sequence in sequences if sequence.reading is not None]
  assert all(found), "got a prefill-only request that ended without its result"
  return found
