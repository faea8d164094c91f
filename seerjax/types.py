"""Records that cross rooms, in the order of the data.

problem -> prompt -> request -> TokenBatch (rows and segments) -> completion -> verdict -> rollout
-> group -> train batch -> params, policy_version -> the engine again.
"""

from __future__ import annotations

from collections.abc import Mapping
import copy
import dataclasses
import types
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from seerjax import fields
from seerjax.array_typing import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One thing to solve.

  Attributes:
    problem_id: unique within its task and split; equal ids mean equal problems.
    prompt: the whole user text, `context` and `question` included; what people and rewards read.
    context: the part that may be read before the question is known (may be empty).
    question: the part that asks.
    answer: the reference answer as text (an exact rational such as "7/2", a target, ...).
    num_steps: reasoning steps of the reference solution, a proxy of the answer's length; 0 if
      unknown.
    solution: a worked reference solution (pretraining reads it; no verdict does); may be empty.
    messages: the conversation that is continued, {"role": ..., "content": ...} each; empty where it
      is `prompt` as one user's message.
  """

  problem_id: str
  prompt: str
  context: str = ""
  question: str = ""
  answer: str = ""
  num_steps: int = 0
  solution: str = ""
  messages: tuple[Mapping[str, Any], ...] = ()

  def __post_init__(self):
    fields.check(self)
    if self.num_steps < 0:
      raise ValueError(
        f"Problem.num_steps: got {self.num_steps!r}, expected a whole number of at least 0; 0 if it"
        " is not known."
      )


def copied(value: Any) -> Any:
  """Returns a copy for a user's function, which may change it: no list, dict or object is shared.

  Rewards, verdicts and verifiers get such copies, so that none changes the next prompt or verdict.
  Data of JSON's kinds are copied several times faster than `copy.deepcopy` does.

  Raises:
    RecursionError: for lists within themselves, or too deep ones.
  """
  kind = type(value)
  if kind in _ATOMS:
    return value
  if kind is dict:
    return {key: copied(item) for key, item in value.items()}
  if kind is list:
    return [copied(item) for item in value]
  if kind is tuple:
    return tuple([copied(item) for item in value])
  if kind is Problem:
    if not value.messages:
      return value
    return dataclasses.replace(value, messages=copied(value.messages))
  return copy.deepcopy(value)


_ATOMS = frozenset((str, int, float, bool, type(None), bytes))


# What float32 noise handles right. Gumbel noise spans 21 nats: above the highest temperature a bias
# of -1e6 (an engine takes no more) would forbid no token for sure. Divided by 1e-24 such a bias
# passes what stands for minus infinity, and by 1e-33 it overflows; long before, at the lowest,
# logits of usual size that differ are further apart than any noise, so that 0 says the same.
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
# Of penalties: the lowest, the highest, and what is none.
PENALTIES: Mapping[str, tuple[float, float, float]] = types.MappingProxyType({
  "presence_penalty": (-2.0, 2.0, 0), "frequency_penalty": (-2.0, 2.0, 0),
  "repetition_penalty": (1e-4, 1e4, 1),
})  # fmt: skip
TEMPERATURES = f"{MIN_TEMPERATURE:g} <= temperature <= {MAX_TEMPERATURE:g}"


def is_temperature(value: float) -> bool:
  """Returns whether logits may be divided by it; 0, which is greedy, is none."""
  return MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How one request is sampled. With its seed and its prompt, this decides the text.

  They apply in this order: penalties (`repetition_penalty`, then the others), `logit_bias`,
  `temperature`, `allowed`, `top_k`, `top_p`, `min_p`. A raw log-probability is of none of them.

  Attributes:
    temperature: 0 is greedy (the argmax of the biased logits); else logits are divided by it, and
      it is from `MIN_TEMPERATURE` to `MAX_TEMPERATURE`.
    top_k: keep the k most likely tokens; 0 keeps all. Ties at the border are kept.
    top_p: keep the smallest set of most likely tokens whose probability reaches it; 1 keeps all.
    min_p: drop tokens less likely than `min_p` times the most likely one; 0 drops none.
    presence_penalty: subtracted from the logits of tokens that the answer so far has, -2 to 2;
      of a drafted position, the earlier tokens of the draft are part of the answer.
    frequency_penalty: subtracted from these once for each time that the token was said, -2 to 2.
    repetition_penalty: divides positive logits of tokens of the prompt and the answer so far, and
      multiplies the others; 1 is none, 1e-4 to 1e4.
    logit_bias: pairs (token id, bias) added to the logits.
    allowed: a grammar: pairs (low, high) by place in the answer, of which ids low <= id < high may
      stand there; empty allows all everywhere.
    max_tokens: most tokens generated; no more than places in `allowed`, if there are any.
    stop_token_ids: generation ends with the first of these; it is kept as the last token.
    stop_strings: generation ends once the decoded text contains one of these.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  allowed: tuple[tuple[int, int], ...] = ()
  max_tokens: int = 256
  stop_token_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()

  def __post_init__(self):
    # How far a bias may go is decided by the engine that runs the request.
    fields.check(self, unbounded=("logit_bias",))
    refuse = self._refuse
    if self.temperature != 0 and not is_temperature(self.temperature):
      refuse("temperature", self.temperature, f"0 or {TEMPERATURES}", "0 is greedy, 1 is usual")
    if not 0 <= self.top_k < 2**31:
      refuse("top_k", self.top_k, "0 <= top_k < 2**31", "0 keeps every token")
    if not (1e-37 <= self.top_p <= 1.0):  # In float32, less is zero, which keeps nothing.
      refuse("top_p", self.top_p, "0 < top_p <= 1 (1e-37 at the least)", "1 keeps every token")
    if not (0.0 <= self.min_p <= 1.0):
      refuse("min_p", self.min_p, "0 <= min_p <= 1", "0 drops no token")
    for field, (low, high, none) in PENALTIES.items():
      value = vars(self)[field]
      if not low <= value <= high:
        refuse(field, repr(value), f"{low:g} <= {field} <= {high:g}", f"{none} penalises no token")
    if self.max_tokens < 1:
      refuse("max_tokens", self.max_tokens, "max_tokens >= 1", "raise it")
    if self.allowed and self.max_tokens > len(self.allowed):
      places = f"{self.max_tokens} with {len(self.allowed)} places in `allowed`"
      refuse("max_tokens", places, "no more tokens than places", "lower it")
    for pair in self.allowed:
      if not 0 <= pair[0] < pair[1] < 2**31:
        refuse("allowed", pair, "pairs 0 <= low < high < 2**31", "name one id at least everywhere")
    for token in self.stop_token_ids:
      if not 0 <= token < 2**31:
        refuse("stop_token_ids", repr(token), "token ids from 0 on", "encode with the tokenizer")
    for text in self.stop_strings:
      if not text:
        refuse("stop_strings", repr(text), "strings of at least one character", "drop it")

  @property
  def has_penalties(self) -> bool:
    """Whether a token's logit follows what was said before it."""
    is_repeated = self.repetition_penalty != 1
    return bool(self.presence_penalty or self.frequency_penalty or is_repeated)

  @staticmethod
  def _refuse(field: str, got: object, expected: str, fix: str) -> NoReturn:
    raise ValueError(f"SamplingParams.{field}: got {got}, expected {expected}; {fix}.")


_FIXES = {
  "prompt": "encode text with the tokenizer, and write tuple(ids.tolist()) of an array"
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What the engine is asked for.

  Attributes:
    request_id: unique among the engine's live requests.
    prompt: token ids, at least one.
    sampling: see `SamplingParams`.
    seed: the request's own seed; together with the engine's key and a position it fixes the noise.
    group_id: requests of one group share a prompt and are placed on one instance.
    adapter: name of the adapter that answers beside the base (`Engine.set_adapters`); "" is the
      base alone.
    namespace: whose it is, "" for all that name none. What was kept for one namespace, keys and
      values or drafts, is found by no other; it decides no bit of an answer.
  """

  request_id: str
  prompt: tuple[int, ...]
  sampling: SamplingParams = SamplingParams()
  seed: int = 0
  group_id: str = ""
  adapter: str = ""
  namespace: str = ""

  def __post_init__(self):
    fields.check(self, fixes=_FIXES)
    for field in ("group_id", "namespace"):
      if "\0" in vars(self)[field]:
        raise ValueError(
          f"Request.{field}: got {vars(self)[field]!r}, expected text without the character NUL,"
          " which parts the two where texts are shared; leave it out."
        )


# Why a completion ended; "" while it runs.
FINISH_REASONS = ("", "stop", "length", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What the engine answers.

  Attributes:
    request_id: of the request.
    tokens: generated ids, a stop id included.
    behaviour_logprobs: f32[t], of each token under the processed distribution (bias, temperature,
      filters), in nats.
    raw_logprobs: f32[t], of each token under softmax(logits).
    text: decoded tokens, special tokens dropped and cut before a stop string; "" without a
      tokenizer.
    finish_reason: "stop" (a stop id or string), "length" (max_tokens), "error" (what it met in a
      step ended it: it is no sample of anything, and nothing learns from it), or "" while it runs.
    policy_version: of the weights that sampled every token.
    error: what it met, where `finish_reason` is "error"; else "".
  """

  request_id: str
  tokens: tuple[int, ...]
  behaviour_logprobs: np.ndarray
  raw_logprobs: np.ndarray
  text: str
  finish_reason: str
  policy_version: int
  error: str = ""

  def __post_init__(self):
    for field in ("behaviour_logprobs", "raw_logprobs"):
      found, count = vars(self)[field], len(self.tokens)
      if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.shape != (count,):
        is_array = isinstance(found, np.ndarray)
        got = f"{found.dtype}{list(found.shape)}" if is_array else type(found).__name__
        raise ValueError(
          f"Completion.{field}: got {got} for {count} tokens, expected float32[{count}], one for"
          " each; store what the engine returned, uncast."
        )
    if self.finish_reason not in FINISH_REASONS or (self.finish_reason == "error") != bool(
      self.error
    ):
      raise ValueError(
        f"Completion: got finish_reason={self.finish_reason!r} with error={self.error!r}, expected"
        f" one of {FINISH_REASONS}, and a reason with 'error' alone; say why it ended."
      )

  def has_bits_of(self, other: Completion) -> bool:
    """Returns whether tokens and log-probabilities are those of another, to the bit."""
    return self.tokens == other.tokens and all(
      np.array_equal(mine.view(np.uint32), theirs.view(np.uint32))
      for mine, theirs in (
        (self.behaviour_logprobs, other.behaviour_logprobs),
        (self.raw_logprobs, other.raw_logprobs),
      )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """A task's judgement of one text.

  Attributes:
    reward: what the trainer maximises; the weighted sum of `parts`, if there are any.
    correct: the answer is right.
    well_formed: an answer could be read from the text at all.
    answer: the answer as read, "" if none.
    parts: the reward's named parts, such as {"format": 1.0, "correct": 0.0}; make a verdict of them
      by `of_parts`. Empty if the reward has no parts.
  """

  reward: float
  correct: bool
  well_formed: bool
  answer: str = ""
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

  @classmethod
  def of_parts(
    cls, parts: Mapping[str, float], *, correct: bool, well_formed: bool, answer: str = ""
  ) -> Verdict:
    """Returns a verdict whose reward is the plain sum of its parts; a run applies its weights.

    Args:
      parts: finite numbers by name; a name is lower-case letters, digits and underscores.
      correct: the answer is right.
      well_formed: an answer could be read from the text at all.
      answer: the answer as read, "" if none.
    """
    return cls(
      reward=weighted_sum(parts, {}),
      correct=correct,
      well_formed=well_formed,
      answer=answer,
      parts=dict(parts),
    )


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
  """Returns the sum of weight x part over all parts, in float64 and in the order of their names.

  A part without a weight counts once. Nothing is normalised: weights need not sum to 1.
  """
  total = 0.0
  for name in sorted(parts):
    total += float(weights.get(name, 1.0)) * float(parts[name])
  return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
  """One request's whole life.

  Attributes:
    request: what was asked.
    completion: what was answered.
    verdict: how that was judged.
  """

  request: Request
  completion: Completion
  verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutGroup:
  """All rollouts of one problem, ordered by member.

  Attributes:
    group_index: the group's place in its step; the training batch is sorted by it.
    problem: what was asked.
    rollouts: by member index, never by completion time.
  """

  group_index: int
  problem: Problem
  rollouts: tuple[Rollout, ...]

  @property
  def rewards(self) -> np.ndarray:
    """f32[g]."""
    return np.asarray([r.verdict.reward for r in self.rollouts], np.float32)


@runtime_checkable
class Task(Protocol):
  """Where prompts come from and what a good answer is.

  Problems are a pure function of (split, index).
  """

  @property
  def name(self) -> str:
    """For logs and messages; a plain attribute will do."""
    ...

  def num_problems(self, split: str) -> int:
    """Returns how many problems `split` ("train" or "heldout") has."""
    ...

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`; equal arguments give equal problems on every machine."""
    ...

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges a completion's text. Never raises on any text."""
    ...


class TokenBatch(NamedTuple):
  """Flat token rows and the segments that attention sees: the input of the one forward.

  A segment is up to `query_tile` consecutive positions of one sequence. Rows beyond `num_rows` and
  segments beyond `num_segments` are padding: they are never computed, and what they hold is zero.
  Every array lives on one instance; the engine stacks instances in front.

  Attributes:
    tokens: i32[n].
    positions: i32[n], absolute position of each row in its sequence.
    slots: i32[n], flat index `page * page_size + offset` where the row's key and value are written.
    num_rows: i32[], valid rows.
    segment_start: i32[s], first row of the segment.
    segment_length: i32[s], valid rows of the segment, 0 for padding.
    page_table: i32[s, p], pages of the segment's sequence by position // page_size.
    num_segments: i32[], valid segments.
  """

  tokens: Int[Array, "n"]
  positions: Int[Array, "n"]
  slots: Int[Array, "n"]
  num_rows: Int[Array, ""]
  segment_start: Int[Array, "s"]
  segment_length: Int[Array, "s"]
  page_table: Int[Array, "s p"]
  num_segments: Int[Array, ""]


class KeyCopies(NamedTuple):
  """Rows whose keys and values are written to further slots, in every layer, before attention.

  So a position of a token tree that is computed once stands in the pages of every path through it.
  What lies beyond `count` is padding, and never read.

  Attributes:
    rows: i32[c], of the batch, below its `num_rows`.
    slots: i32[c], as `TokenBatch.slots`; no two are equal, nor equal to a row's own.
    count: i32[], valid copies.
  """

  rows: Int[Array, "c"]
  slots: Int[Array, "c"]
  count: Int[Array, ""]


class SamplingRows(NamedTuple):
  """Sampling parameters of rows, as arrays (see `SamplingParams`).

  Attributes:
    temperature: f32[n], 0 is greedy.
    top_k: i32[n], 0 keeps all.
    top_p: f32[n].
    min_p: f32[n].
    bias_ids: i32[n, e], -1 for unused entries.
    bias_values: f32[n, e].
    low: i32[n], ids below are not allowed.
    high: i32[n], nor those from here on.
    mask: u32[n, w], a bit for each id, the lowest bit first: those that are 0 are not allowed, in
      rows whose `high` is below `sampling.NO_LIMIT`; None where no row has such a mask.
    penalty_ids: i32[n, e], tokens that penalties change, each once, -1 for unused entries; None
      where no row is penalised, as the next two.
    penalty_values: f32[n, e], what is subtracted.
    repetition: f32[n], the repetition penalty.
  """

  temperature: Float[Array, "n"]
  top_k: Int[Array, "n"]
  top_p: Float[Array, "n"]
  min_p: Float[Array, "n"]
  bias_ids: Int[Array, "n e"]
  bias_values: Float[Array, "n e"]
  low: Int[Array, "n"]
  high: Int[Array, "n"]
  mask: Any = None
  penalty_ids: Any = None
  penalty_values: Any = None
  repetition: Any = None


class TokenScores(NamedTuple):
  """What the head says of one given token a row; nats.

  Attributes:
    logprob: f32[n], under the processed distribution.
    raw_logprob: f32[n], under softmax(logits).
    entropy: f32[n], of the processed distribution.
  """

  logprob: Float[Array, "n"]
  raw_logprob: Float[Array, "n"]
  entropy: Float[Array, "n"]


class TrainBatch(NamedTuple):
  """Packed micro-batches: leading axis m is the micro-batch, in an order fixed by (group, member).

  A row is an input token; its target is the next token of the same sequence. `loss_mask` is True
  where the target was generated by the policy.

  Attributes:
    tokens: TokenBatch with leading m on every field; its pages are scratch, written by the forward.
    targets: i32[m, n].
    loss_mask: bool[m, n].
    sequence_index: i32[m, n], index of the row's rollout in (group, member) order; -1 on padding.
    advantages: f32[m, n], the rollout's advantage on every row of it (0 on padding).
    behaviour_logprobs: f32[m, n], the engine's, at loss rows; 0 elsewhere.
    raw_logprobs: f32[m, n], the engine's raw ones, at loss rows; 0 elsewhere.
    sampling: SamplingRows with leading m.
  """

  tokens: TokenBatch
  targets: Any
  loss_mask: Any
  sequence_index: Any
  advantages: Any
  behaviour_logprobs: Any
  raw_logprobs: Any
  sampling: SamplingRows


class TrainState(NamedTuple):
  """Everything the optimiser owns.

  Attributes:
    params: master weights, f32, as `models.parameters.init` lays them out.
    opt_state: optax state.
    step: i32[], optimiser steps taken.
  """

  params: Any
  opt_state: Any
  step: Any
