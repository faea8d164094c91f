"""Beam search: the likeliest answers of a request, not a sample of them.

    hypotheses --Engine.likeliest: one step reads all--> candidates --the `width` best--> hypotheses

A hypothesis is an answer so far, and its score the sum of its tokens' log-probabilities under
softmax(logits): the policy as it is, before bias, temperature and filters. It goes on by each of
its `width` likeliest tokens; of all that these give and of the hypotheses that are over, the
`width` best are kept. As no token raises a score, those that are left when all are over are the
best that such a search finds.

The order is total, so that equal numbers give equal answers everywhere: the highest score, then the
lowest token id, then the better parent; what is over stands before what goes on with its score.

A drafter's tokens are read with the hypotheses that they follow. Where all that is kept was drafted
the next step of the search needs no step of the engine, so drafts change how many there are, and
no hypothesis: nothing is accepted or rejected, what was not read is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import NamedTuple

from seerjax import fields
from seerjax.engine import checks, drafting
from seerjax.engine.drafting import Drafter, DraftQuery
from seerjax.engine.engine import Engine
from seerjax.engine.sequence import Likeliest, StepOutput
from seerjax.types import PENALTIES, Request, SamplingParams

MAX_WIDTH = 16
# What a drafter is asked for: the likeliest continuations, without noise.
_GREEDY = SamplingParams(temperature=0.0)
Answer = tuple[int, ...]


class Hypothesis(NamedTuple):
  """An answer that a beam search found, or is finding.

  Attributes:
    tokens: of the answer, a stop id included.
    score: sum of their log-probabilities under softmax(logits), nats; f32 numbers added in order,
      in double precision.
    finish_reason: "stop" after one of the request's stop ids, "length" after max_tokens, "" where
      the search goes on.
    text: of the tokens; "" without a tokenizer.
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
  """Returns the best hypotheses of a request's answer, the best first.

  They are those of a search that reads each hypothesis alone, to the bit, whatever else the engine
  runs and whatever is drafted. They share the pages of what they have in common.

  Args:
    engine: that reads them; other requests in it go on meanwhile.
    request: its prompt, adapter, max_tokens and stop_token_ids count; its seed does not.
    width: hypotheses that are kept, 1 to 16; fewer are found where the vocabulary is small.
    drafter: guesses how each hypothesis goes on; None reads one token of each in a step.
    instance: of the engine, whose pages they share.
    on_step: called with each visit's updates of other requests.

  Raises:
    ValueError: if the width is out of its range, the request is none or has sampling that a search
      by the policy's own log-probabilities cannot follow, or the engine refuses it.
    RuntimeError: if a step fails a hypothesis, or the model's log-probabilities are not numbers.
  """
  _check(request, width)
  drafts = _Drafts(engine, request, drafter)
  kept: list[Hypothesis] = [Hypothesis((), 0.0)]
  known: dict[Answer, Likeliest] = {}
  while any(not one.finish_reason for one in kept):
    going = [one.tokens for one in kept if not one.finish_reason]
    if any(answer not in known for answer in going):
      answers = _unread(going, known, request)
      found = engine.likeliest(
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
    # What is shorter than those that go on is not asked for again.
    depth = max(len(one.tokens) for one in kept)
    known = {answer: top for answer, top in known.items() if len(answer) >= depth}
  drafts.finish(kept)
  if engine.tokenizer is None:
    return kept
  decode = engine.tokenizer.decode
  return [one._replace(text=decode([*one.tokens], skip_special_tokens=True)) for one in kept]


def best(
  kept: Sequence[Hypothesis],
  likeliest: Mapping[Answer, Likeliest],
  width: int,
  sampling: SamplingParams,
) -> list[Hypothesis]:
  """Returns the hypotheses after one step of a search, the best first.

  Args:
    kept: those before it, the best first.
    likeliest: what follows each that goes on: `width` tokens, or the whole vocabulary.
    width: most that are kept.
    sampling: its stop_token_ids and max_tokens end a hypothesis.

  Raises:
    RuntimeError: if a log-probability is NaN.
  """
  found: list[tuple[float, int, int, Hypothesis]] = []
  for place, parent in enumerate(kept):
    if parent.finish_reason:
      found.append((-parent.score, -1, place, parent))
      continue
    for token, logprob in likeliest[parent.tokens][:width]:
      if math.isnan(logprob):
        raise RuntimeError(
          f"beam_search: got a log-probability of NaN for token {token} at place"
          f" {len(parent.tokens)} of the answer, expected a number; the weights overflow here: go"
          " back to an earlier checkpoint."
        )
      tokens, score = (*parent.tokens, token), parent.score + logprob
      reason = "length" if len(tokens) == sampling.max_tokens else ""
      reason = "stop" if token in sampling.stop_token_ids else reason
      found.append((-score, token, place, Hypothesis(tokens, score, reason)))
  return [one for *_, one in sorted(found, key=lambda entry: entry[:3])[:width]]


def _unread(
  going: Sequence[Answer], known: Mapping[Answer, Likeliest], request: Request
) -> list[Answer]:
  """Returns the answers to be read: those that are not known, and of those that are, how they go on
  by their likeliest tokens, so that none runs out before the others."""
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
  """A drafter's guesses at how hypotheses go on.

  Each hypothesis is a request of its own to the drafter, named as the one that it goes on from, so
  that a draft model reads again only what is new.
  """

  def __init__(self, engine: Engine, request: Request, drafter: Drafter | None):
    self._asked = drafting.Drafting(drafter)
    self._request = request
    self._vocab_size = engine.model.vocab_size
    self._num_rows = engine.config.row_buckets[-1]
    self._named: dict[str, Answer] = {}

  def of(self, answers: Sequence[Answer]) -> list[list[tuple[int, ...]]]:
    """Returns paths for each answer; all have the same share of a step's rows."""
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
        queries.append(
          DraftQuery(name, group, tokens, num_prompt, most, request.seed, _GREEDY)
        )
        places.append(place)
    found = nothing
    for place, paths in zip(places, self._asked.paths(queries, self._vocab_size)):
      found[place] = paths
    return found

  def finish(self, kept: Sequence[Hypothesis]) -> None:
    """Tells the drafter that the hypotheses are over, and what they have become."""
    if self._named:
      self._names([one.tokens for one in kept])
    prompt, group = self._request.prompt, drafting.group_name(self._request)

    def tell(drafter: Drafter) -> None:
      for name, answer in self._named.items():
        drafter.finish(name, group, [*prompt, *answer], len(prompt))

    self._asked.ask(tell)

  def _names(self, answers: Sequence[Answer]) -> list[str]:
    """Returns the name of each answer: of those not taken, that whose answer begins most alike."""
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
  """Returns how many first tokens two answers have in common."""
  count = 0
  while count < min(len(left), len(right)) and left[count] == right[count]:
    count += 1
  return count


def _check(request: Request, width: int) -> None:
  """Refuses what is no beam search, before anything is read."""
  fix = "1 is the greedy answer, 4 is usual"
  checks.whole("beam_search: width", width, 1, MAX_WIDTH, fix)
  params = request.sampling
  for field, is_plain, expected, fix in (
    ("temperature", params.temperature in (0, 1), "0 or 1", "nothing is sampled"),
    ("top_k", not params.top_k, "0", "the width says how many tokens are looked at"),
    ("top_p", params.top_p == 1, "1", "hypotheses rank by the whole distribution"),
    ("min_p", not params.min_p, "0", "hypotheses rank by the whole distribution"),
    *((field, vars(params)[field] == none, f"{none}", "sample the request instead")
      for field, (_, _, none) in PENALTIES.items()),
    ("logit_bias", not params.logit_bias, "none", "sample the request instead"),
    ("allowed", not params.allowed, "no form", "sample the request instead"),
    ("stop_strings", not params.stop_strings, "none", "use stop_token_ids"),
  ):
    if not is_plain:
      raise ValueError(
        f"beam_search of {request.request_id!r}: got SamplingParams.{field}="
        f"{vars(params)[field]!r}, expected {expected}, as hypotheses are scored by"
        f" softmax(logits) itself; {fix}."
      )
