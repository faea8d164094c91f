"""Beam search: finds the most likely completions of a request, instead of sampling.

    hypotheses --Engine.top_logprobs, in one step--> candidates --the `width` best--> hypotheses

A hypothesis is a partial completion; its score is the sum of its tokens' log-probabilities under
softmax(logits), that is before bias, temperature and filters. It is continued by each of its
`width` most likely tokens. Of the results and the finished hypotheses, the `width` best are kept.
Since no token raises a score, those left when all are finished are the best that the search finds.

The order is total, so that equal numbers give equal results everywhere: highest score, then lowest
token id, then better parent. A finished hypothesis precedes an unfinished one of equal score.

A drafter's tokens are read together with the hypotheses that they continue. If everything that is
kept was drafted, the next step of the search needs no engine step. Drafts thus change the number of
steps, but no hypothesis: nothing is accepted or rejected, and what was not read is read on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import NamedTuple

from seerjax import fields
from seerjax.engine import checks, drafting
from seerjax.engine.drafting import Drafter, DraftQuery
from seerjax.engine.engine import Engine
from seerjax.engine.sequence import StepOutput, TopLogprobs
from seerjax.types import PENALTIES, Request, SamplingParams

MAX_WIDTH = 16
# Sampling for the drafter: the most likely continuations, without noise.
_GREEDY = SamplingParams(temperature=0.0)
Answer = tuple[int, ...]


class Hypothesis(NamedTuple):
  """A completion found by beam search, or a partial one.

  Attributes:
    tokens: tokens of the completion, including a stop id.
    score: sum of their log-probabilities under softmax(logits), nats; f32 numbers added in order,
      in double precision.
    finish_reason: "stop" after one of the request's stop ids, "length" after max_tokens, "" if
      unfinished.
    text: decoded tokens; "" without a tokenizer.
  """

  tokens: Answer
  score: float
  finish_reason: str = ""
  text: str = ""


@fields.checked
def beam_search(
  engine: Engine,
  request: Request,
  width: int,
  *,
  drafter: Drafter | None = None,
  instance: int = 0,
  on_step: Callable[[list[StepOutput]], None] | None = None,
) -> list[Hypothesis]:
  """Returns the best hypotheses for a request's completion, best first.

  They equal, to the bit, those of a search that reads each hypothesis alone, whatever else the
  engine runs and whatever is drafted. Hypotheses share the KV pages of common prefixes.

  Args:
    engine: engine that reads them; its other requests continue meanwhile.
    request: prompt, adapter, max_tokens and stop_token_ids are used; the seed is not.
    width: number of hypotheses to keep, 1 to 16; fewer are found if the vocabulary is small.
    drafter: drafts continuations of each hypothesis; None reads one token of each per step.
    instance: instance of the engine that holds the pages.
    on_step: called with each visit's updates of other requests.

  Raises:
    ValueError: if the width is out of range, the request is invalid or has sampling parameters that
      affect probabilities, or the engine rejects it.
    RuntimeError: if a step fails for a hypothesis, or the model's log-probabilities are NaN.
  """
  _check(request, width)
  drafts = _Drafts(engine, request, drafter)
  kept: list[Hypothesis] = [Hypothesis((), 0.0)]
  known: dict[Answer, TopLogprobs] = {}
  while any(not one.finish_reason for one in kept):
    going = [one.tokens for one in kept if not one.finish_reason]
    if any(answer not in known for answer in going):
      answers = _unread(going, known, request)
      found = engine.top_logprobs(
        request,
        answers,
        min(width, engine.model.vocab_size),
        drafts=drafts.of(answers),
        instance=instance,
        on_step=on_step,
      )
      for answer, by_path in zip(answers, found, strict=True):
        known |= {answer + path: top for path, top in by_path.items()}
    kept = best(kept, known, width, request.sampling)
    # Hypotheses shorter than the unfinished ones are not needed again.
    depth = max(len(one.tokens) for one in kept)
    known = {answer: top for answer, top in known.items() if len(answer) >= depth}
  drafts.finish(kept)
  if engine.tokenizer is None:
    return kept
  decode = engine.tokenizer.decode
  return [one._replace(text=decode([*one.tokens], skip_special_tokens=True)) for one in kept]


def best(
  kept: Sequence[Hypothesis],
  top_logprobs: Mapping[Answer, TopLogprobs],
  width: int,
  sampling: SamplingParams,
) -> list[Hypothesis]:
  """Returns the hypotheses after one step of a search, best first.

  Args:
    kept: hypotheses before it, best first.
    top_logprobs: next tokens of each unfinished hypothesis: `width` tokens, or the whole
      vocabulary.
    width: maximum number to keep.
    sampling: its stop_token_ids and max_tokens end a hypothesis.

  Raises:
    RuntimeError: if a log-probability is NaN.
  """
  found: list[tuple[float, int, int, Hypothesis]] = []
  for place, parent in enumerate(kept):
    if parent.finish_reason:
      found.append((-parent.score, -1, place, parent))
      continue
    for token, logprob in top_logprobs[parent.tokens][:width]:
      if math.isnan(logprob):
        raise RuntimeError(
          f"beam_search: got a log-probability of NaN for token {token} at position"
          f" {len(parent.tokens)} of the answer, expected a number; the weights overflow: go back"
          " to an earlier checkpoint."
        )
      tokens, score = (*parent.tokens, token), parent.score + logprob
      reason = "length" if len(tokens) == sampling.max_tokens else ""
      reason = "stop" if token in sampling.stop_token_ids else reason
      found.append((-score, token, place, Hypothesis(tokens, score, reason)))
  return [one for *_, one in sorted(found, key=lambda entry: entry[:3])[:width]]


def _unread(
  going: Sequence[Answer], known: Mapping[Answer, TopLogprobs], request: Request
) -> list[Answer]:
  """Returns the completions to read.

  Unknown ones, and for known ones their most likely continuation, so that none of them runs out
  before the others.
  """
  found: dict[Answer, None] = {}
  for answer in going:
    is_over = False
    while answer in known and not is_over:
      token, _ = known[answer][0]
      answer = (*answer, token)
      is_over = token in request.sampling.stop_token_ids
      is_over = is_over or len(answer) == request.sampling.max_tokens
    if not is_over:
      found[answer] = None
  return list(found)


class _Drafts:
  """Drafts of a drafter for hypotheses.

  Each hypothesis is a separate request to the drafter and keeps the name of the one it continues,
  so that a draft model reads only new tokens.
  """

  def __init__(self, engine: Engine, request: Request, drafter: Drafter | None):
    self._asked = drafting.Drafting(drafter)
    self._request = request
    self._vocab_size = engine.model.vocab_size
    self._num_rows = engine.config.batch_size_buckets[-1]
    self._named: dict[str, Answer] = {}

  def of(self, answers: Sequence[Answer]) -> list[list[tuple[int, ...]]]:
    """Returns paths for each completion; all get the same share of a step's rows."""
    request, nothing = self._request, [[] for _ in answers]
    share = (self._num_rows - len(answers)) // max(len(answers), 1)
    if self._asked.drafter is None or share < 1:
      return nothing
    queries, places, group = [], [], drafting.group_name(request)
    for place, (name, answer) in enumerate(zip(self._names(answers), answers, strict=True)):
      most = min(share, request.sampling.max_tokens - len(answer) - 1)
      if most > 0:
        tokens = [*request.prompt, *answer]
        num_prompt = len(request.prompt)
        queries.append(DraftQuery(name, group, tokens, num_prompt, most, request.seed, _GREEDY))
        places.append(place)
    found = nothing
    for place, paths in zip(places, self._asked.paths(queries, self._vocab_size)):
      found[place] = paths
    return found

  def finish(self, kept: Sequence[Hypothesis]) -> None:
    """Reports the final hypotheses to the drafter."""
    if self._named:
      self._names([one.tokens for one in kept])
    prompt, group = self._request.prompt, drafting.group_name(self._request)

    def tell(drafter: Drafter) -> None:
      for name, answer in self._named.items():
        drafter.finish(name, group, [*prompt, *answer], len(prompt))

    self._asked.ask(tell)

  def _names(self, answers: Sequence[Answer]) -> list[str]:
    """Returns the name of each completion: the unused one with the longest common prefix."""
    free, found = dict(self._named), []
    for answer in answers:
      name = max(free, key=lambda one: _num_shared(free[one], answer), default=None)
      if name is None:
        name = f"{self._request.request_id}/{len(self._named)}"
      free.pop(name, None)
      self._named[name] = answer
      found.append(name)
    return found


def _num_shared(left: Answer, right: Answer) -> int:
  """Returns the length of the common prefix of two completions."""
  count = 0
  while count < min(len(left), len(right)) and left[count] == right[count]:
    count += 1
  return count


def _check(request: Request, width: int) -> None:
  """Raises for an invalid beam search, before anything is read."""
  fix = "1 is the greedy answer, 4 is usual"
  checks.whole("beam_search: width", width, 1, MAX_WIDTH, fix)
  params = request.sampling
  for field, is_plain, expected, fix in (
    ("temperature", params.temperature in (0, 1), "0 or 1", "nothing is sampled"),
    ("top_k", not params.top_k, "0", "the width sets the number of tokens"),
    ("top_p", params.top_p == 1, "1", "hypotheses rank by the whole distribution"),
    ("min_p", not params.min_p, "0", "hypotheses rank by the whole distribution"),
    *(
      (field, vars(params)[field] == none, f"{none}", "sample the request instead")
      for field, (_, _, none) in PENALTIES.items()
    ),
    ("logit_bias", not params.logit_bias, "none", "sample the request instead"),
    (
      "allowed_token_ranges",
      not params.allowed_token_ranges,
      "no form",
      "sample the request instead",
    ),
    ("stop", not params.stop, "none", "use stop_token_ids"),
  ):
    if not is_plain:
      raise ValueError(
        f"beam_search of {request.request_id!r}: got SamplingParams.{field}="
        f"{vars(params)[field]!r}, expected {expected}, as hypotheses are scored by"
        f" softmax(logits) itself; {fix}."
      )
