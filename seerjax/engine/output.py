"""Processes sampled tokens: draft verification, text, stop conditions, and finished requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from seerjax.engine import drafting
from seerjax.engine.counters import Counters
from seerjax.engine.drafting import Drafter, verify
from seerjax.engine.planner import Planner
from seerjax.engine.requests import Requests
from seerjax.engine.sequence import ScheduledRows, SequenceState, StepOutput, TopLogprobs
from seerjax.kv.memory import Memory
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.ops import sampling
from seerjax.types import Completion, Request

Accept = Callable[[SequenceState, int, float, float], StepOutput]
AskDrafter = Callable[[Callable[[Drafter], Any]], Any]
# Below any score: the processed distribution excludes the token.
LEFT_OUT = -1e20


class Top(NamedTuple):
  """Top tokens after the samples of a step: lists by instance, then by sample.

  Attributes:
    ids: the tokens, i32[k] of each sample.
    logprobs: their log-probabilities f32[k] under the processed distribution.
    raw_logprobs: the same f32[k] under softmax(logits).
  """

  ids: list[list[list[int]]]
  logprobs: list[list[list[float]]]
  raw_logprobs: list[list[list[float]]]

  def of(self, instance: int, samples: slice) -> Top:
    """Returns those of some samples of an instance, as if they were a step's."""
    part = lambda column: [column[instance][samples]]
    return Top(part(self.ids), part(self.logprobs), part(self.raw_logprobs))

  def pairs(self, row: int, count: int, *, is_raw: bool = False) -> TopLogprobs:
    """Returns the first `count` after a sample of the first instance, the likeliest first."""
    scores = (self.raw_logprobs if is_raw else self.logprobs)[0][row]
    pairs = zip(self.ids[0][row][:count], scores, strict=False)
    kept = (pair for pair in pairs if pair[1] > LEFT_OUT)
    return tuple(sorted(kept, key=lambda pair: (-pair[1], pair[0])))


def accept(sequence: SequenceState, token: int, logprob: float, raw_logprob: float) -> StepOutput:
  """Appends one sampled token to a response; returns its text and the finish reason, if any."""
  sequence.tokens.append(token)
  sequence.logprobs.append(logprob)
  sequence.raw_logprobs.append(raw_logprob)
  params = sequence.request.sampling
  reason = ""
  if token in params.stop_token_ids:
    reason = "stop"
  elif sequence.num_generated == params.max_tokens:
    reason = "length"
  if sequence.stream is not None:
    sequence.text += sequence.stream.push(token)
    if reason:
      sequence.text += sequence.stream.finish()
    cut = _first_stop(sequence.text, params.stop)
    if cut is not None:
      sequence.text, reason = sequence.text[:cut], "stop"
  text = _new_text(sequence, reason)
  return StepOutput(sequence.request.request_id, (token,), text, reason)


def begun(
  request: Request,
  instance: int,
  tokenizer: tokenizer_lib.Tokenizer | None,
  resume_from: Completion | None,
  **fields: Any,
) -> SequenceState:
  """Returns a new sequence for a request, at its prompt or after the partial response.

  Args:
    request: a new request.
    instance: instance to run on.
    tokenizer: None disables text.
    resume_from: the partial response, a partial stop string included.
    **fields: further fields of the sequence.
  """
  stream = None if tokenizer is None else tokenizer.stream()
  sequence = SequenceState(
    request=request,
    tokens=list(request.prompt),
    instance=instance,
    stream=stream,
    sampling=sampling.sampling_rows([request.sampling]),
    limit=0,
    **fields,
  )
  if resume_from is not None:
    _continue_from(sequence, resume_from)
  return sequence


def _continue_from(sequence: SequenceState, partial: Completion) -> None:
  sequence.tokens.extend(partial.tokens)
  sequence.logprobs.extend(np.asarray(partial.behaviour_logprobs, np.float32).tolist())
  sequence.raw_logprobs.extend(np.asarray(partial.raw_logprobs, np.float32).tolist())
  if sequence.stream is not None:
    sequence.text = "".join(sequence.stream.push(token) for token in partial.tokens)
  _new_text(sequence, "")  # It was streamed before.


def take_back(
  sequence: SequenceState, num_tokens: int, tokenizer: tokenizer_lib.Tokenizer | None
) -> None:
  """Drops the tokens that a failed step appended after `num_tokens`, prompt included."""
  if len(sequence.tokens) <= num_tokens:
    return
  sequence.truncate(num_tokens)
  sequence.streamed, sequence.text = 0, ""
  if tokenizer is not None:
    sequence.stream = stream = tokenizer.stream()
    answer = sequence.tokens[sequence.num_prompt :]
    sequence.text = "".join(stream.push(token) for token in answer)
  _new_text(sequence, "")  # It was streamed before.


def _new_text(sequence: SequenceState, reason: str) -> str:
  """Returns text to stream; holds back a possible prefix of a stop string."""
  end = len(sequence.text)
  if not reason:
    end -= max((len(stop) - 1 for stop in sequence.request.sampling.stop), default=0)
  text = sequence.text[sequence.streamed : max(end, sequence.streamed)]
  sequence.streamed += len(text)
  return text


def _by_request(updates: list[StepOutput]) -> list[StepOutput]:
  """Merges the updates of each request, at the place of its first update."""
  place_of: dict[str, int] = {}
  found: list[StepOutput] = []
  for update in updates:
    place = place_of.get(update.request_id)
    if place is None or found[place].finish_reason:  # A finished request's id may be reused.
      place_of[update.request_id] = len(found)
      found.append(update)
    else:
      before = found[place]
      found[place] = update._replace(
        tokens=before.tokens + update.tokens,
        text=before.text + update.text,
        tops=before.tops + update.tops,
        prompt=before.prompt if update.prompt is None else update.prompt,
      )
  return found


_Row = tuple[int, slice, ScheduledRows]  # Instance, its samples, and the scheduled rows.


def _is_left(row: _Row, tokens: list[list[list[Any]]], step: int) -> bool:
  """Returns whether a background row did not decode because the visit was over before a step."""
  instance, mine, piece = row
  return piece.sequence.is_background and tokens[instance][step][mine.start] < 0


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
  """Returns the index of the first stop string, None if there is none."""
  found = [place for stop in stop if (place := text.find(stop)) >= 0]
  return min(found, default=None)


def _score(sequence: SequenceState, raw: list[float], top: Top | None) -> None:
  """Stores the scores of a prompt's next tokens."""
  count = sequence.prompt_top
  for row, score in enumerate(raw):
    found = top.pairs(row, count) if top is not None and count else ()
    sequence.prompt_scores.append((score, found))


class Outputs:
  """Collects the output of one engine's steps until it is taken.

  Attributes:
    finished: completions, in the order they finished.
    updates: updates of the current visit, step by step.
  """

  def __init__(
    self,
    requests: Requests,
    memory: Memory,
    planner: Planner,
    counters: Counters,
    *,
    accept: Accept,
    ask_drafter: AskDrafter,
  ):
    self._requests = requests
    self._memory = memory
    self._planner = planner
    self._counters = counters
    self._accept = accept
    self._ask_drafter = ask_drafter
    self.finished: list[Completion] = []
    self.updates: list[StepOutput] = []

  def take(
    self,
    scheduled: list[list[ScheduledRows]],
    columns: list[list[list[list[Any]]]],
    num_steps: int,
    *,
    policy_version: int,
    top: Top | None = None,
  ) -> None:
    """Processes the samples of a visit step by step, as if each step had run alone.

    Args:
      scheduled: rows of the first step, by instance; if there are more steps, all rows decode.
      columns: tokens, log-probabilities and raw ones, by instance, step and sample.
      num_steps: maximum steps of the visit; it ends with the last response or chunk.
      policy_version: policy version of the engine.
      top: the top tokens, if a request needs any; the visit has one step then.
    """
    rows: list[_Row] = []
    for instance, pieces in enumerate(scheduled):
      place = 0
      for piece in pieces:
        end, scored = place + piece.num_samples, piece.num_scored
        if scored:
          of_prompt = slice(place, place + scored)
          raw = columns[2][instance][0][of_prompt]
          _score(piece.sequence, raw, None if top is None else top.of(instance, of_prompt))
        rows.append((instance, slice(place + scored, end), piece))
        place = end
    has_background = any(piece.sequence.is_background for _, _, piece in rows)
    for step in range(num_steps):
      if step and has_background:
        # A visit ends with its foreground rows; background rows continue in the next one.
        rows = [row for row in rows if not _is_left(row, columns[0], step)]
      if not rows:
        break
      self._counters.steps += 1
      live = []
      for row in rows:
        instance, mine, piece = row
        self._counters.rows += piece.num_rows
        if piece.sequence.is_background:
          self._counters.background_rows += piece.num_rows
        piece.sequence.num_written += piece.count
        of_piece = None if top is None else top.of(instance, mine)
        if mine.start < mine.stop and piece.sequence.reading is not None:
          assert of_piece is not None, "got no top tokens from a step with a prefill-only request"
          self._tell(piece, of_piece)
        elif mine.start < mine.stop:
          drawn, logprobs, raw = (column[instance][step][mine] for column in columns)
          assert drawn[0] >= 0, f"got no token for a decode row in step {step} of a visit"
          if self.add(piece, drawn, logprobs, raw, policy_version=policy_version, top=of_piece):
            live.append(row)
      rows = live

  def add(
    self,
    piece: ScheduledRows,
    tokens: list[int],
    logprobs: list[float],
    raw_logprobs: list[float],
    *,
    policy_version: int,
    top: Top | None = None,
  ) -> bool:
    """Appends samples to a request's response; an error in doing so ends this request only.

    Returns:
      Whether the request may have another token in this visit, within its chunk and its pages.
    """
    self._requests.busy = before = (piece.sequence, len(piece.sequence.tokens))
    try:
      update = self._add(piece, tokens, logprobs, raw_logprobs, policy_version, top)
    except Exception as error:
      self.fail(*before, error, policy_version=policy_version)
      return False
    if update.prompt is not None:
      piece.sequence.prompt_top = None
    self.updates.append(update)
    return not update.finish_reason and len(piece.sequence.tokens) < piece.sequence.end

  def _add(
    self,
    piece: ScheduledRows,
    tokens: list[int],
    logprobs: list[float],
    raw_logprobs: list[float],
    policy_version: int,
    top: Top | None,
  ) -> StepOutput:
    """Appends the tokens of the path with the longest acceptance, and the bonus token."""
    sequence = piece.sequence
    num_drafted, rows = 0, (0,)
    if piece.paths:
      verified = verify(
        [path.tokens for path in piece.paths],
        [[tokens[row] for row in (0, *path.rows)] for path in piece.paths],
      )
      chosen = piece.paths[verified.path]
      num_drafted, rows = len(chosen.tokens), (0, *chosen.rows[: verified.num_accepted])
      self._planner.drafts.adopt(piece, chosen)
      self._counters.drafted_tokens += piece.num_drafted
      self._counters.key_copies += piece.num_copies
      self._counters.side_paths += bool(chosen.scratch)
    added: list[int] = []
    tops: list[TopLogprobs] = []
    text = reason = ""
    for index in rows:
      self._counters.sampled_tokens += 1
      update = self._accept(sequence, tokens[index], logprobs[index], raw_logprobs[index])
      added += update.tokens
      if sequence.num_top and top is not None:
        tops.append(top.pairs(index, sequence.num_top))
      text, reason = text + update.text, update.finish_reason
      if reason:
        break
      # The next token of the response was drafted, so the keys before it are written.
      sequence.num_written = len(sequence.tokens) - 1
    request = sequence.request
    self._counters.accepted_tokens += len(added) - 1
    if piece.paths:
      self._ask_drafter(
        lambda drafter: drafter.observe(
          request.request_id, drafting.group_name(request), num_drafted, len(added) - 1
        )
      )
    if reason:
      self._tell_end(sequence)
      self._memory.remember(sequence, sequence.tokens[: sequence.num_written])
      self._leave(sequence, reason, policy_version)
    elif len(sequence.tokens) == sequence.limit:
      self._requests.pause(sequence)
    prompt = None if sequence.prompt_top is None else tuple(sequence.prompt_scores)
    return StepOutput(
      request.request_id, tuple(added), text, reason, tops=tuple(tops), prompt=prompt
    )

  def _tell(self, piece: ScheduledRows, top: Top) -> None:
    """Stores the top tokens of a prefill-only request and its drafts, and removes the request."""
    reading = piece.sequence.reading
    assert reading is not None
    rows: dict[tuple[int, ...], int] = {(): 0}
    for path in piece.paths:
      for depth in range(path.num_shared, len(path.tokens)):
        rows[path.tokens[: depth + 1]] = path.rows[depth]
    for tokens, row in rows.items():
      reading.found[tokens] = top.pairs(row, reading.num_top, is_raw=True)
    self._counters.read_tokens += len(rows)
    self._counters.key_copies += piece.num_copies
    self._planner.leave(piece)

  def fail(
    self, sequence: SequenceState, num_tokens: int, error: Exception, *, policy_version: int
  ) -> None:
    """Ends a request with an error; tokens of the failed step are dropped.

    Args:
      sequence: sequence of the request.
      num_tokens: its tokens before the step, prompt included.
      error: the error.
      policy_version: policy version of the engine.
    """
    sequence.truncate(num_tokens)
    sequence.text = sequence.text[: sequence.streamed]
    request_id = sequence.request.request_id
    reason = (
      f"request {request_id!r}: got {type(error).__name__} ({error}) in a step after"
      f" {sequence.num_generated} tokens, expected none; fix the cause, and submit the request"
      " again."
    )
    logging.warning("%s", reason, exc_info=error)
    self._counters.errors += 1
    self._tell_end(sequence)
    self._leave(sequence, "error", policy_version, reason)
    self.updates.append(StepOutput(request_id, (), "", "error", reason))

  def drop(self, request_id: str) -> None:
    """Drops the updates of a request in the current visit."""
    self.updates = [update for update in self.updates if update.request_id != request_id]

  def take_updates(self) -> list[StepOutput]:
    """Returns the visit's updates, one per request, and clears them."""
    updates, self.updates = self.updates, []
    return _by_request(updates)

  def take_finished(self) -> list[Completion]:
    """Returns the requests finished since the last call."""
    finished, self.finished = self.finished, []
    return finished

  def put_back(self, finished: list[Completion]) -> None:
    """Takes back completions of other requests, for the next `take_finished`."""
    self.finished.extend(finished)

  def _leave(
    self, sequence: SequenceState, reason: str, policy_version: int, error: str = ""
  ) -> None:
    self._memory.release(sequence)
    self._memory.kv_pool.end(sequence.request.request_id)
    self._requests.remove(sequence)
    self.finished.append(sequence.completion(reason, policy_version, error))

  def _tell_end(self, sequence: SequenceState) -> None:
    """Notifies the drafter, if there is one, that a request has ended."""
    request = sequence.request
    self._ask_drafter(
      lambda drafter: drafter.finish(
        request.request_id,
        drafting.group_name(request),
        sequence.tokens,
        sequence.num_prompt,
      )
    )
