"""Records shared between packages, in the order of the data flow.

problem -> prompt -> request -> TokenBatch (rows and segments) -> completion -> verdict -> rollout
-> group -> train batch -> params, policy_version -> engine.
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
  """One problem of a task.

  Attributes:
    problem_id: unique within a task and split; equal ids mean equal problems.
    prompt: the whole user text, including `context` and `question`; for display and rewards.
    context: the part that may be read before the question is known (may be empty).
    question: the part that asks.
    answer: the reference answer as text (an exact rational such as "7/2", a target, ...).
    num_steps: reasoning steps of the reference solution, a proxy for the response length; 0 if
      unknown.
    solution: a worked reference solution, used for pretraining but not by verdicts; may be empty.
    messages: the conversation to continue, each {"role": ..., "content": ...}; empty if it is
      just `prompt` as one user message.
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
    fields.check(self, num_steps=fields.at_least(0, "0 if unknown"))


def copied(value: Any) -> Any:
  """Returns a deep copy for a user's function, which may modify it.

  Rewards, verdicts and verifiers receive such copies, so that none can change later prompts or
  verdicts. JSON-like data is copied several times faster than by `copy.deepcopy`.

  Raises:
    RecursionError: for lists that contain themselves or are nested too deeply.
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


# Range in which float32 noise behaves correctly. Gumbel noise spans 21 nats: above the maximum, a
# bias of -1e6 (the engine's limit) would no longer reliably forbid a token. Below the minimum,
# logits of usual size differ by more than any noise, so the result equals temperature 0. (Divided
# by 1e-24 such a bias passes the value used for minus infinity; by 1e-33 it overflows.)
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
# (lowest, highest, neutral) value of each penalty.
PENALTIES: Mapping[str, tuple[float, float, float]] = types.MappingProxyType({
  "presence_penalty": (-2.0, 2.0, 0), "frequency_penalty": (-2.0, 2.0, 0),
  "repetition_penalty": (1e-4, 1e4, 1),
})  # fmt: skip
TEMPERATURES = f"{MIN_TEMPERATURE:g} <= temperature <= {MAX_TEMPERATURE:g}"


def is_temperature(value: float) -> bool:
  """Returns whether `value` is a valid divisor of logits; 0 (greedy) is not."""
  return MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """Sampling parameters of one request. With prompt and seed they determine the completion.

  They apply in this order: penalties (`repetition_penalty`, then the others), `logit_bias`,
  `temperature`, `allowed_token_ranges`, `top_k`, `top_p`, `min_p`. Raw log-probabilities ignore all
  of them.

  Attributes:
    temperature: 0 is greedy (the argmax of the biased logits); otherwise logits are divided by
      it, and it must lie between `MIN_TEMPERATURE` and `MAX_TEMPERATURE`.
    top_k: keep the k most likely tokens; 0 keeps all. Ties at the border are kept.
    top_p: keep the smallest set of most likely tokens with at least this total probability; 1 keeps
      all.
    min_p: drop tokens less likely than `min_p` times the most likely one; 0 drops none.
    presence_penalty: subtracted from the logits of tokens that occur in the completion so far, -2
      to 2. At a drafted position, earlier draft tokens count as part of the completion.
    frequency_penalty: subtracted from the same logits once per occurrence, -2 to 2.
    repetition_penalty: divides positive logits and multiplies the others of tokens that occur in
      the prompt or the completion so far; 1 is neutral, 1e-4 to 1e4.
    logit_bias: pairs (token id, bias) added to the logits.
    allowed_token_ranges: a grammar: for each position of the completion a pair (low, high); only
      ids with low <= id < high may be sampled there. Empty allows all ids everywhere.
    max_tokens: maximum number of generated tokens; at most `len(allowed_token_ranges)` if that is
      set.
    stop_token_ids: generation ends with the first of these; it is kept as the last token.
    stop: generation ends once the decoded text contains one of these.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  allowed_token_ranges: tuple[tuple[int, int], ...] = ()
  max_tokens: int = 256
  stop_token_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()

  def __post_init__(self):
    # The engine that runs the request limits the bias.
    fields.check(self, unbounded=("logit_bias",))
    refuse = self._refuse
    if self.temperature != 0 and not is_temperature(self.temperature):
      refuse("temperature", self.temperature, f"0 or {TEMPERATURES}", "0 is greedy, 1 is usual")
    if not 0 <= self.top_k < 2**31:
      refuse("top_k", self.top_k, "0 <= top_k < 2**31", "0 keeps every token")
    if not (1e-37 <= self.top_p <= 1.0):  # Smaller values are 0 in float32 and keep no token.
      refuse("top_p", self.top_p, "0 < top_p <= 1 (1e-37 at the least)", "1 keeps every token")
    if not (0.0 <= self.min_p <= 1.0):
      refuse("min_p", self.min_p, "0 <= min_p <= 1", "0 drops no token")
    for field, (low, high, none) in PENALTIES.items():
      value = vars(self)[field]
      if not low <= value <= high:
        refuse(field, repr(value), f"{low:g} <= {field} <= {high:g}", f"{none} penalises no token")
    if self.max_tokens < 1:
      refuse("max_tokens", self.max_tokens, "max_tokens >= 1", "raise it")
    if self.allowed_token_ranges and self.max_tokens > len(self.allowed_token_ranges):
      count = len(self.allowed_token_ranges)
      places = f"{self.max_tokens} with {count} positions in `allowed_token_ranges`"
      refuse("max_tokens", places, "at most one token per position", "lower it")
    for pair in self.allowed_token_ranges:
      if not 0 <= pair[0] < pair[1] < 2**31:
        refuse(
          "allowed_token_ranges",
          pair,
          "pairs 0 <= low < high < 2**31",
          "allow at least one id everywhere",
        )
    for token in self.stop_token_ids:
      if not 0 <= token < 2**31:
        refuse("stop_token_ids", repr(token), "token ids from 0 on", "encode with the tokenizer")
    for text in self.stop:
      if not text:
        refuse("stop", repr(text), "strings of at least one character", "drop it")

  @property
  def has_penalties(self) -> bool:
    """Whether a token's logit depends on earlier tokens."""
    is_repeated = self.repetition_penalty != 1
    return bool(self.presence_penalty or self.frequency_penalty or is_repeated)

  @staticmethod
  def _refuse(field: str, got: object, expected: str, fix: str) -> NoReturn:
    raise ValueError(f"SamplingParams.{field}: got {got}, expected {expected}; {fix}.")


_FIXES = {"prompt": "encode text with the tokenizer, and write tuple(ids.tolist()) of an array"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One generation request.

  Attributes:
    request_id: unique among the engine's live requests.
    prompt: token ids, at least one.
    sampling: see `SamplingParams`.
    seed: the request's seed; the engine's key, this seed and the position determine the noise.
    group_id: requests of a group share a prompt and run on the same instance.
    adapter: name of the adapter to apply (`Engine.set_adapters`); "" is the base model.
    namespace: isolates cached data: KV pages and drafts stored under one namespace are invisible
      to every other. It never affects the output. "" is the default namespace.
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
          " which separates fields in shared keys; remove it."
        )


# Why a completion ended; "" while it is running.
FINISH_REASONS = ("", "stop", "length", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """Completion of one request.

  Attributes:
    request_id: id of the request.
    tokens: generated ids, including a stop id.
    behaviour_logprobs: f32[t], log-probability of each token under the processed distribution
      (bias, temperature, filters), in nats.
    raw_logprobs: f32[t], log-probability of each token under softmax(logits).
    text: decoded text without special tokens, cut before a stop string; "" without a tokenizer.
    finish_reason: "stop" (a stop id or string), "length" (max_tokens), "error" (a step failed; the
      completion is not a valid sample and is never trained on), or "" while it is running.
    policy_version: version of the weights that sampled every token.
    error: the error message if `finish_reason` is "error", else "".
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
          " each; keep the engine's array, without a cast."
        )
    if self.finish_reason not in FINISH_REASONS or (self.finish_reason == "error") != bool(
      self.error
    ):
      raise ValueError(
        f"Completion: got finish_reason={self.finish_reason!r} with error={self.error!r}, expected"
        f" one of {FINISH_REASONS}, and an error text only with 'error'; set both to match."
      )

  def has_bits_of(self, other: Completion) -> bool:
    """Returns whether tokens and log-probabilities are equal to the bit."""
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
    reward: quantity that the trainer maximises; the weighted sum of `parts`, if there are any.
    correct: whether the answer is right.
    well_formed: whether an answer could be parsed from the text.
    answer: the parsed answer, "" if none.
    parts: named parts of the reward, such as {"format": 1.0, "correct": 0.0}; use `of_parts` to
      build such a verdict. Empty if the reward has no parts.
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
    """Returns a verdict with the unweighted sum of `parts` as reward; a run applies its weights.

    Args:
      parts: finite numbers by name (lower-case letters, digits and underscores).
      correct: whether the answer is right.
      well_formed: whether an answer could be parsed from the text.
      answer: the parsed answer, "" if none.
    """
    return cls(
      reward=weighted_sum(parts, {}),
      correct=correct,
      well_formed=well_formed,
      answer=answer,
      parts=dict(parts),
    )


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
  """Returns the sum of weight x part over all parts, in float64, in alphabetical order of names.

  A missing weight is 1. Nothing is normalised: weights need not sum to 1.
  """
  total = 0.0
  for name in sorted(parts):
    total += float(weights.get(name, 1.0)) * float(parts[name])
  return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
  """A request with its completion and verdict.

  Attributes:
    request: the request.
    completion: the completion.
    verdict: verdict on the completion.
  """

  request: Request
  completion: Completion
  verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutGroup:
  """All rollouts of one problem, ordered by member.

  Attributes:
    group_index: index of the group in its step; the training batch is sorted by it.
    problem: the problem that all requests pose.
    rollouts: ordered by member index, independent of completion time.
  """

  group_index: int
  problem: Problem
  rollouts: tuple[Rollout, ...]

  @property
  def rewards(self) -> np.ndarray:
    """Rewards of the rollouts, f32[g]."""
    return np.asarray([r.verdict.reward for r in self.rollouts], np.float32)


@runtime_checkable
class Task(Protocol):
  """Source of problems and judge of answers.

  Problems are a pure function of (split, index).
  """

  @property
  def name(self) -> str:
    """Name for logs and messages; a plain attribute is enough."""
    ...

  def num_problems(self, split: str) -> int:
    """Returns the number of problems in `split` ("train" or "heldout")."""
    ...

  def problem(self, split: str, index: int) -> Problem:
    """Returns problem `index`; equal arguments must give equal problems on every machine."""
    ...

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges a completion's text. Must not raise, whatever the text."""
    ...


class TokenBatch(NamedTuple):
  """Flat token rows and their attention segments: the input of the model's forward pass.

  A segment is up to `query_tile` consecutive positions of one sequence. Rows beyond `num_rows` and
  segments beyond `num_segments` are padding: they are never computed and contain zeros. Every array
  belongs to one instance; the engine stacks instances along a new leading axis.

  Attributes:
    tokens: i32[n].
    positions: i32[n], position of each row in its sequence.
    slots: i32[n], flat index `page * page_size + offset` where the row's key and value are written.
    num_rows: i32[], number of valid rows.
    segment_start: i32[s], first row of the segment.
    segment_length: i32[s], valid rows of the segment, 0 for padding.
    page_table: i32[s, p], pages of the segment's sequence by position // page_size.
    num_segments: i32[], number of valid segments.
  """

  tokens: Int[Array, "n"]
  positions: Int[Array, "n"]
  slots: Int[Array, "n"]
  num_rows: Int[Array, ""]
  segment_start: Int[Array, "s"]
  segment_length: Int[Array, "s"]
  page_table: Int[Array, "s p"]
  num_segments: Int[Array, ""]


class PageRows(NamedTuple):
  """Slots and page tables of a further kind of pages (`PageLayout.windows`), as in `TokenBatch`.

  Attributes:
    slots: i32[n], flat index `page * page_size + offset` where the row's key and value are written.
    page_table: i32[s, p], pages of the segment's sequence; 0 for pages that were given back, which
      no row of the segment reads.
    copy_slots: i32[c], slots of `KeyCopies`.
  """

  slots: Int[Array, "n"]
  page_table: Int[Array, "s p"]
  copy_slots: Int[Array, "c"]


class KeyCopies(NamedTuple):
  """Extra slots to which rows' keys and values are written, in every layer, before attention.

  A token-tree position is thus computed once and stored in the pages of every path through it.
  Entries beyond `count` are padding and never read.

  Attributes:
    rows: i32[c], row indices of the batch, below `num_rows`.
    slots: i32[c], as `TokenBatch.slots`; distinct from each other and from all rows' own slots.
    count: i32[], number of valid copies.
  """

  rows: Int[Array, "c"]
  slots: Int[Array, "c"]
  count: Int[Array, ""]


class SamplingRows(NamedTuple):
  """Sampling parameters per row, as arrays (see `SamplingParams`).

  Attributes:
    temperature: f32[n], 0 is greedy.
    top_k: i32[n], 0 keeps all.
    top_p: f32[n].
    min_p: f32[n].
    bias_ids: i32[n, e], -1 for unused entries.
    bias_values: f32[n, e].
    low: i32[n], lowest allowed id.
    high: i32[n], end (exclusive) of the allowed ids.
    mask: u32[n, w], one bit per id, lowest bit first; a 0 forbids the id, in rows with
      `high` below `sampling.NO_LIMIT`. None if no row has a mask.
    penalty_ids: i32[n, e], distinct tokens that penalties affect, -1 for unused entries. This and
      the next two fields are None if no row has penalties.
    penalty_values: f32[n, e], amount subtracted from each logit.
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
  """The head's scores of one given token per row, in nats.

  Attributes:
    logprob: f32[n], under the processed distribution.
    raw_logprob: f32[n], under softmax(logits).
    entropy: f32[n], of the processed distribution.
  """

  logprob: Float[Array, "n"]
  raw_logprob: Float[Array, "n"]
  entropy: Float[Array, "n"]


class TrainBatch(NamedTuple):
  """Packed micro-batches, stacked on the leading axis m, in an order fixed by (group, member).

  A row is an input token; its target is the next token of the same sequence. `loss_mask` is True
  where the policy generated the target.

  Attributes:
    tokens: TokenBatch with a leading m on every field; its pages are scratch space of the forward.
    targets: i32[m, n].
    loss_mask: bool[m, n].
    sequence_index: i32[m, n], index of the row's rollout in (group, member) order; -1 on padding.
    advantages: f32[m, n], the rollout's advantage, repeated on its rows (0 on padding).
    behaviour_logprobs: f32[m, n], the engine's processed log-probabilities at loss rows; 0
      elsewhere.
    raw_logprobs: f32[m, n], the engine's raw log-probabilities at loss rows; 0 elsewhere.
    sampling: SamplingRows with a leading m.
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
  """Training state: weights and optimiser.

  Attributes:
    params: master weights, f32, in the layout of `models.parameters.init`.
    opt_state: optax state.
    step: i32[], number of optimiser steps taken.
  """

  params: Any
  opt_state: Any
  step: Any
