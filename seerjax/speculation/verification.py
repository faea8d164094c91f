"""Acceptance rules for drafted tokens, as functions of distributions and uniforms (numpy only).

  p[i]  the target's distribution after i drafted tokens     q[i]  the draft's for token i

  own_sample    y[i] = argmax(log p[i] + Gumbel); accepts drafted tokens while they equal y
  rejection     u < p[i, x] / q[i, x], one by one; then max(p - q, 0), normalised
  block         w[i] = min(w[i - 1] p[i, x] / q[i, x], 1), Z[i] = sum max(w[i] p - q, 0); accepts
                up to the *last* i with u < Z[i] / (Z[i] + 1 - w[i]); then max(w[i] p - q, 0)
  mss           children of one node in turn, as `rejection`; after a failure, p is the remainder
  gumbel_top_k  children: the top k of log q + the same Gumbel noise as in `own_sample`
  kl_gate       cuts a draft where KL(p || q) exceeds a threshold, or accepts below it

An exact rule samples from the target's distribution whatever the draft. The engine uses only
`own_sample`, with which the text is a function of p and its noise; with every other rule it also
depends on the draft. The others are implemented for comparison.

Five mistakes, each rejected here where detectable, or demonstrated by a test: `mss` on the draft's
most likely tokens as if they were samples; `block` stopped at the first failure; one uniform used
both to draw a token and to accept it; a token drawn again and accepted if equal; a gate that
discards a whole block under `rejection`.

Sources: Leviathan 2211.17192 and Chen 2302.01318 (rejection), Sun 2403.10444 (block), Miao
2305.09781 (mss), Daliri 2408.07978 (shared Gumbel), Holsman 2502.20704 (fuzzy).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from seerjax import fields

GATES = ("truncate", "block", "fuzzy")
DRAWN = ("iid", "without_replacement")
RULES = ("own_sample", "rejection", "block")
# Tolerance for the sum of probabilities.
_TOLERANCE = 1e-6


class Outcome(NamedTuple):
  """Result of a rule for a draft.

  Attributes:
    num_accepted: number of accepted tokens; for `mss` 1 or 0.
    token: the following token, bonus or correction; for `mss` the accepted child, if any.
  """

  num_accepted: int
  token: int


def own_sample(p: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray) -> Outcome:
  """Accepts drafted tokens that equal the target's own samples. Exact.

  Args:
    p: f64[n + 1, v], the target's distributions after the context and each drafted token.
    tokens: i64[n], drafted in any way.
    uniforms: f64[n + 1, v] in (0, 1), noise of each position.

  Raises:
    ValueError: for wrong shapes or invalid distributions.
  """
  p, tokens = _laws(p, "own_sample: p"), _tokens(tokens, p, "own_sample")
  _shape(uniforms, p.shape, "own_sample: uniforms")
  for place, token in enumerate(tokens):
    if (sampled := gumbel_top_k(p[place], uniforms[place], 1)[0]) != token:
      return Outcome(place, sampled)
  return Outcome(len(tokens), gumbel_top_k(p[-1], uniforms[-1], 1)[0])


def gumbel_top_k(law: np.ndarray, uniforms: np.ndarray, k: int) -> tuple[int, ...]:
  """Returns the k tokens with the largest log(law) + Gumbel, largest first.

  The first is a sample of the distribution; together they are a sample without replacement. With
  the target's own uniforms, they are the children most likely to contain the target's own token.

  Args:
    law: f64[v], a distribution.
    uniforms: f64[v] in (0, 1).
    k: at most v.

  Raises:
    ValueError: for wrong shapes, or k outside 1 to v.
  """
  _shape(uniforms, np.shape(law), "gumbel_top_k: uniforms")
  if not 1 <= k <= len(law):
    raise ValueError(
      f"gumbel_top_k: got k={k} for {len(law)} tokens, expected 1 to that; ask for fewer children."
    )
  # An exponential race: E / p has the same order as log p + Gumbel, and allows p = 0.
  with np.errstate(divide="ignore"):
    finish = -np.log(uniforms) / np.asarray(law, np.float64)
  return tuple(np.argsort(finish, kind="stable")[:k].tolist())


def rejection(p: np.ndarray, q: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray) -> Outcome:
  """Verifies by rejection sampling, token by token. Exact if tokens are samples of q.

  Args:
    p: f64[n + 1, v], the target's distributions after the context and each drafted token.
    q: f64[n, v], distributions that the tokens were drawn from; n may depend on earlier tokens.
    tokens: i64[n].
    uniforms: f64[n + 1] in [0, 1): one per token and one for the following token; none of them may
      have been used to draw a token.

  Raises:
    ValueError: for wrong shapes, invalid distributions, or a token with probability 0 under q.
  """
  p, q, tokens = _chain(p, q, tokens, uniforms, "rejection")
  for place, token in enumerate(tokens):
    if uniforms[place] >= p[place, token] / q[place, token]:
      return Outcome(place, _draw(np.maximum(p[place] - q[place], 0), p[place], uniforms[-1]))
  return Outcome(len(tokens), _draw(p[-1], p[-1], uniforms[-1]))


def block(p: np.ndarray, q: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray) -> Outcome:
  """Verifies by block verification, which accepts the most of all chain rules. Exact.

  Arguments and errors as for `rejection`.
  """
  p, q, tokens = _chain(p, q, tokens, uniforms, "block")
  num, weight = 0, 1.0
  after = [1.0]  # w[i], weight of the first i tokens.
  for place, token in enumerate(tokens):
    weight = min(weight * p[place, token] / q[place, token], 1.0)
    after.append(weight)
    if place + 1 == len(tokens):
      chance = weight
    else:
      left = np.maximum(weight * p[place + 1] - q[place + 1], 0).sum()
      chance = left / (left + 1 - weight) if left else 0.0
    if uniforms[place] < chance:
      num = place + 1  # A later position may be accepted again.
  if num == len(tokens):
    return Outcome(num, _draw(p[-1], p[-1], uniforms[-1]))
  left = np.maximum(after[num] * p[num] - q[num], 0)
  return Outcome(num, _draw(left, p[num], uniforms[-1]))


def mss(
  p: np.ndarray, q: np.ndarray, children: np.ndarray, uniforms: np.ndarray, *, drawn: str
) -> Outcome:
  """Verifies the children of one tree node by SpecInfer's multi-step sampling. Exact.

  Args:
    p: f64[v], the target's distribution.
    q: f64[v], the draft's distribution.
    children: i64[k], samples of q, in the order of drawing.
    uniforms: f64[k + 1] in [0, 1): one per child and one for the token that follows if all fail.
    drawn: "iid", or "without_replacement": each from q without the earlier children, normalised.

  Raises:
    ValueError: for wrong shapes, invalid distributions, or children not drawn in this way.
  """
  if drawn not in DRAWN:
    raise ValueError(
      f"mss: got children drawn as {drawn!r}, expected one of {DRAWN}; the draft's top k are not"
      " draws from it, and the text would follow another distribution: verify them with own_sample."
    )
  p, q = _laws(p[None], "mss: p")[0], _laws(q[None], "mss: q")[0]
  children = _tokens(children, np.broadcast_to(p, (len(children) + 1, len(p))), "mss")
  _shape(q, p.shape, "mss: q")
  _shape(uniforms, (len(children) + 1,), "mss: uniforms")
  rest = p
  for place, child in enumerate(children):
    if not q[child] > 0:
      raise ValueError(
        f"mss: got child {child}, which the draft never draws at position {place}, expected draws"
        f" {drawn}; pass the distribution that they were drawn from."
      )
    if uniforms[place] < rest[child] / q[child]:
      return Outcome(1, int(child))
    left = np.maximum(rest - q, 0)
    if left.sum() > 0:
      rest = left / left.sum()
    if drawn == "without_replacement" and place + 1 < len(children):
      q = np.where(np.arange(len(q)) == child, 0.0, q)
      q = q / q.sum() if q.sum() > 0 else q
  return Outcome(0, _draw(rest, p, uniforms[-1]))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """Returns KL(p || q) for distributions f64[n, v], f64[n] in nats; infinite if q lacks support."""
  with np.errstate(divide="ignore", invalid="ignore"):
    parts = np.where(p > 0, p * (np.log(p) - np.log(q)), 0.0)
  return np.maximum(parts.sum(axis=-1), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlGate:
  """Gate by KL(target || draft) at each drafted token.

  Attributes:
    kind: "truncate" cuts the draft at the first token whose divergence exceeds the threshold; exact
      under every rule, since the divergence at a token depends only on earlier tokens. "block"
      discards the whole draft if any token exceeds it; exact under own_sample only. "fuzzy"
      accepts up to the first token that exceeds it, without a rule, and is lossy.
    threshold: nats.
    rule: rule that verifies what passes the gate.
    learns: whether weights are trained on the text.
  """

  kind: str = "truncate"
  threshold: float = 0.1
  rule: str = "own_sample"
  learns: bool = False

  def __post_init__(self):
    fields.check(self)
    if self.kind not in GATES or self.rule not in RULES:
      raise ValueError(
        f"KlGate: got kind={self.kind!r} and rule={self.rule!r}, expected one of {GATES} and one of"
        f" {RULES}; choose one."
      )
    if not self.threshold >= 0:
      raise ValueError(
        f"KlGate.threshold: got {self.threshold}, expected at least 0 nats; 0.1 is usual."
      )
    if self.kind == "block" and self.rule != "own_sample":
      raise ValueError(
        f"KlGate: got kind='block' with rule={self.rule!r}, expected 'own_sample': a later"
        " divergence depends on the first drafted token, so that other rules sample another"
        " distribution; use kind='truncate'."
      )
    if self.is_lossy and self.learns:
      raise ValueError(
        f"KlGate: got kind={self.kind!r}, which is lossy, in a training run, expected an exact one:"
        f" its text is off policy by up to {self.bound(1):.3g} in total variation per token; use"
        " kind='truncate'."
      )

  @property
  def is_lossy(self) -> bool:
    """Whether the text follows another distribution than the target's."""
    return self.kind == "fuzzy"

  def bound(self, num_tokens: int) -> float:
    """Returns the maximum total variation over `num_tokens`, by Pinsker's inequality."""
    return min(1.0, num_tokens * math.sqrt(self.threshold / 2)) if self.is_lossy else 0.0

  def described(self, num_tokens: int) -> str:
    """Returns a sentence on the effect of this gate on a text of `num_tokens`."""
    if not self.is_lossy:
      return f"{self.kind} at {self.threshold:g} nats: exact, the text follows the target's law"
    return (
      f"fuzzy at {self.threshold:g} nats: lossy, at most {self.bound(1):.3g} in total variation a"
      f" token and {self.bound(num_tokens):.3g} in {num_tokens} (Pinsker)"
    )

  def passed(self, p: np.ndarray, q: np.ndarray) -> int:
    """Returns how many drafted tokens are passed to the rule; for "fuzzy", how many are accepted.

    Args:
      p: f64[n + 1, v], as in `rejection`.
      q: f64[n, v].

    Raises:
      ValueError: for wrong shapes or invalid distributions.
    """
    p = _laws(p, "KlGate: p")
    q = _laws(q, "KlGate: q") if len(q) else np.zeros((0, p.shape[1]))
    _shape(q, (len(p) - 1, p.shape[1]), "KlGate: q")
    exceeds = np.flatnonzero(divergence(p[:-1], q) > self.threshold)
    if not len(exceeds):
      return len(q)
    return 0 if self.kind == "block" else int(exceeds[0])


def fuzzy(
  p: np.ndarray, q: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray, *, gate: KlGate
) -> Outcome:
  """Verifies by a fuzzy gate alone. Lossy; see `KlGate.bound`.

  Arguments and errors as for `rejection`; only the last uniform is used. Raises for gates of
  another kind.
  """
  if gate.kind != "fuzzy":
    raise ValueError(
      f"fuzzy: got a gate of kind={gate.kind!r}, expected 'fuzzy'; pass drafts of other gates to"
      " their own rule."
    )
  p, q, tokens = _chain(p, q, tokens, uniforms, "fuzzy")
  num = gate.passed(p, q)
  return Outcome(num, _draw(p[num], p[num], uniforms[-1]))


def _draw(weights: np.ndarray, otherwise: np.ndarray, uniform: float) -> int:
  """Returns a sample by one uniform; from `otherwise` if all `weights` are 0 by rounding."""
  if not weights.sum() > 0:
    weights = otherwise
  edges = np.cumsum(weights)
  place = int(np.searchsorted(edges, uniform * edges[-1], side="right"))
  return min(place, int(np.flatnonzero(weights)[-1]))


def _chain(
  p: np.ndarray, q: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray, what: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  p = _laws(p, f"{what}: p")
  tokens = _tokens(tokens, p, what)
  q = _laws(q, f"{what}: q") if len(tokens) else np.zeros((0, p.shape[1]))
  _shape(q, (len(tokens), p.shape[1]), f"{what}: q")
  _shape(uniforms, (len(p),), f"{what}: uniforms")
  chances = q[np.arange(len(tokens)), tokens]
  if not np.all(chances > 0):
    place = int(np.flatnonzero(~(chances > 0))[0])
    raise ValueError(
      f"{what}: got token {tokens[place]} at place {place}, which q never draws, expected draws of"
      " q; pass the distribution that the token was drawn from, after temperature and filters."
    )
  return p, q, tokens


def _laws(laws: np.ndarray, what: str) -> np.ndarray:
  laws = np.asarray(laws, np.float64)
  if laws.ndim != 2 or not laws.size:
    raise ValueError(
      f"{what}: got shape {laws.shape}, expected [n, v], a distribution of v tokens per position;"
      " stack them."
    )
  totals = laws.sum(axis=1)
  if not np.all(laws >= 0) or not np.all(np.abs(totals - 1) <= _TOLERANCE):
    raise ValueError(
      f"{what}: got probabilities with sums of {totals.min():.6g} to {totals.max():.6g} and a"
      f" minimum of {laws.min():.3g}, expected distributions; pass probabilities, not logits, and"
      " no NaN."
    )
  return laws


def _tokens(tokens: np.ndarray, p: np.ndarray, what: str) -> np.ndarray:
  tokens = np.asarray(tokens, np.int64)
  if tokens.ndim != 1 or len(tokens) != len(p) - 1:
    raise ValueError(
      f"{what}: got tokens of shape {tokens.shape} for {len(p)} distributions of the target,"
      f" expected {len(p) - 1}: one distribution more than tokens; pass the one after the last"
      " token, too."
    )
  if len(tokens) and not 0 <= tokens.min() <= tokens.max() < p.shape[1]:
    raise ValueError(
      f"{what}: got tokens {tokens.min()} to {tokens.max()}, expected 0 to {p.shape[1] - 1}; draft"
      " with the target's vocabulary."
    )
  return tokens


def _shape(array: np.ndarray, expected: tuple[int, ...], what: str) -> None:
  if np.shape(array) != expected:
    raise ValueError(
      f"{what}: got shape {np.shape(array)}, expected {expected}; see the arguments of the rule."
    )
