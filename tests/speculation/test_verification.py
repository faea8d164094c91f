"""Verification rules: the exact ones are exact for all sequences, and five known bugs are found.

A rule is a black box here. Each uniform of an acceptance has one threshold, found by bisection; the
last uniform has as many as there are tokens. So the law of an outcome is a sum of boxes, exact to
1e-9, and over all drafts of a small vocabulary it gives the law of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools

import hypothesis
from hypothesis import given, strategies as st
import numpy as np
import pytest
import refusals

from seerjax.speculation import verification
from seerjax.speculation.verification import KlGate, Outcome

_ALMOST = 1 - 1e-12
Prefix = tuple[int, ...]
Run = Callable[[np.ndarray], Outcome]


def halved(differs: Callable[[float], bool], low: float = 0.0, high: float = _ALMOST) -> float:
  """Returns where something that is False at `low` becomes True, to 1e-10."""
  for _ in range(34):
    middle = (low + high) / 2
    low, high = (low, middle) if differs(middle) else (middle, high)
  return high


def steps_of(run: Callable[[float], Outcome], low: float, high: float) -> Iterator:
  """Yields (outcome, width) of a step function of one uniform that never falls."""
  first, last = run(low), run(high)
  if first == last:
    yield first, high - low
    return
  edge = halved(lambda u: run(u) != first, low, high)
  yield first, edge - low
  if high - edge > 1e-9:
    yield from steps_of(run, edge, high)


def at(run: Run, before: Sequence[float], behind: Sequence[float], uniform: float) -> Outcome:
  return run(np.array([*before, uniform, *behind]))


def thresholds(run: Run, before: Sequence[float], behind: Sequence[float]) -> list[float]:
  """Returns the threshold of one acceptance uniform, given the others; [] if it has none."""
  one = functools.partial(at, run, before, (*behind, 0.5))
  accepted, refused = one(0.0), one(_ALMOST)
  return [] if accepted == refused else [round(halved(lambda u: one(u) != accepted), 10)]


def law_of(run: Run, num_accepting: int) -> dict[Outcome, float]:
  """Returns the chance of each outcome, over `num_accepting` uniforms that accept and one that
  draws."""
  bounds = []
  for place in range(num_accepting):
    found = {0.0, 1.0}
    for others in itertools.product((0.0, _ALMOST), repeat=num_accepting - 1):
      found.update(thresholds(run, others[:place], others[place:]))
    bounds.append(sorted(found))
  law: dict[Outcome, float] = {}
  for box in itertools.product(*(itertools.pairwise(edges) for edges in bounds)):
    volume = float(np.prod([high - low for low, high in box]))
    if volume < 1e-11:
      continue
    middles = [(low + high) / 2 for low, high in box]
    last = functools.partial(at, run, middles, ())
    for outcome, width in steps_of(last, 0.0, _ALMOST):
      law[outcome] = law.get(outcome, 0.0) + volume * width
  return law


class Pair:
  """A target's and a draft's law after every prefix, and how far the draft goes."""

  def __init__(self, seed: int, vocab: int, most: int, sharpness: float = 1.5):
    rng = np.random.default_rng(seed)
    self.vocab, self.most = vocab, most
    self.p: dict[Prefix, np.ndarray] = {}
    self.q: dict[Prefix, np.ndarray] = {}
    self.stops: dict[Prefix, bool] = {}
    for length in range(most + 1):
      for prefix in itertools.product(range(vocab), repeat=length):
        logits = rng.normal(size=vocab) * sharpness
        self.p[prefix] = softmax(logits)
        self.q[prefix] = softmax(logits + rng.normal(size=vocab) * sharpness)
        self.stops[prefix] = bool(length and rng.random() < 0.3)

  def texts(self) -> dict[Prefix, float]:
    """Returns the target's law of texts of `most` + 1 tokens."""
    return {
      text: float(np.prod([self.p[text[:k]][token] for k, token in enumerate(text)]))
      for text in itertools.product(range(self.vocab), repeat=self.most + 1)
    }

  def drafts(self, prefix: Prefix = ()) -> Iterator[tuple[Prefix, float]]:
    """Yields each draft and its chance; it stops at prefixes that say so."""
    if len(prefix) == self.most or self.stops[prefix]:
      yield prefix, 1.0
      return
    for token, chance in enumerate(self.q[prefix]):
      for draft, rest in self.drafts((*prefix, token)):
        yield draft, chance * rest

  def laws(self, draft: Prefix) -> tuple[np.ndarray, np.ndarray]:
    """Returns p f64[n + 1, v] and q f64[n, v] along a draft."""
    p = [self.p[draft[:k]] for k in range(len(draft) + 1)]
    q = [self.q[draft[:k]] for k in range(len(draft))]
    return np.array(p), np.array(q).reshape(len(draft), self.vocab)

  def text_law(self, rule: Callable) -> dict[Prefix, float]:
    """Returns the law of texts that begin with what a rule makes of a draft."""
    law = dict.fromkeys(self.texts(), 0.0)
    for draft, chance in self.drafts():
      p, q = self.laws(draft)
      run = functools.partial(rule, p, q, np.array(draft, np.int64))
      for outcome, share in law_of(run, len(draft)).items():
        self._spread(law, (*draft[: outcome.num_accepted], outcome.token), chance * share)
    return law

  def _spread(self, law: dict[Prefix, float], prefix: Prefix, chance: float) -> None:
    if len(prefix) == self.most + 1:
      law[prefix] += chance
      return
    for token, share in enumerate(self.p[prefix]):
      self._spread(law, (*prefix, token), chance * share)


def softmax(logits: np.ndarray) -> np.ndarray:
  chances = np.exp(logits - logits.max())
  return chances / chances.sum()


def variation(one: dict, other: dict) -> float:
  """Returns the total variation of two laws."""
  return sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in {*one, *other}) / 2


def truncated(rule: Callable, threshold: float) -> Callable:
  def run(p, q, tokens, uniforms):
    num = KlGate(threshold=threshold, rule=rule.__name__).passed(p, q)
    return rule(p[: num + 1], q[:num], tokens[:num], np.append(uniforms[:num], uniforms[-1]))

  return run


EXACT = {
  "rejection": verification.rejection,
  "block": verification.block,
  "rejection, truncated": truncated(verification.rejection, 0.4),
  "block, truncated": truncated(verification.block, 0.4),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
  "seed, vocab, most",
  [
    (0, 2, 2),
    (1, 3, 2),
    pytest.param(2, 3, 3, marks=pytest.mark.thorough),
    pytest.param(3, 5, 2, marks=pytest.mark.thorough),
    pytest.param(4, 5, 3, marks=pytest.mark.long),
  ],
)
def test_chains_say_the_target_s_texts(name, seed, vocab, most):
  pair = Pair(seed, vocab, most)
  assert any(pair.stops.values()) or most < 2
  assert variation(pair.text_law(EXACT[name]), pair.texts()) < 1e-6


def stopped_block(p, q, tokens, uniforms):
  """Bug: block verification that ends at the first failure."""
  whole = verification.block(p, q, tokens, uniforms)
  for num in range(len(tokens)):
    # Does it fail here? Then all that follow fail, too.
    cut = np.append(np.where(np.arange(len(tokens)) >= num, _ALMOST, 0.0), uniforms[-1])
    cut[num] = uniforms[num]
    if verification.block(p, q, tokens, cut).num_accepted <= num:
      return verification.block(p, q, tokens, cut)
  return whole


def gated_rejection(p, q, tokens, uniforms):
  """Bug: a whole block thrown away under rejection."""
  num = KlGate(kind="block", threshold=0.2).passed(p, q)
  return verification.rejection(
    p[: num + 1], q[:num], tokens[:num], np.append(uniforms[:num], uniforms[-1])
  )


def test_a_block_that_stops_at_the_first_failure_is_a_bug():
  pair = Pair(0, 3, 2)
  assert variation(pair.text_law(verification.block), pair.texts()) < 1e-6
  assert variation(pair.text_law(stopped_block), pair.texts()) > 1e-3


def test_a_whole_block_thrown_away_under_rejection_is_a_bug():
  pair = Pair(0, 3, 2)
  # The gate lets the first token through, and the second where the first is 0.
  pair.stops = dict.fromkeys(pair.stops, False)
  pair.q[()], pair.q[0,] = pair.p[()], pair.p[0,]
  assert variation(pair.text_law(verification.rejection), pair.texts()) < 1e-6
  assert variation(pair.text_law(gated_rejection), pair.texts()) > 1e-3


def test_one_uniform_that_draws_and_accepts_is_a_bug():
  pair = Pair(0, 3, 1)
  pair.stops[()] = False
  q = pair.laws((0,))[1]
  right, shared = np.zeros(3), np.zeros(3)
  edges = np.cumsum([0, *q[0]])
  for token in range(3):
    both = np.array([pair.p[()], pair.p[(token,)]])
    run = functools.partial(verification.rejection, both, q, np.array([token]))
    for outcome, share in law_of(run, 1).items():
      said = token if outcome.num_accepted else outcome.token
      right[said] += q[0, token] * share
    # The same, where the uniform of the acceptance is the one that drew the token.
    low, high = edges[token], min(edges[token + 1], _ALMOST)
    edge = min(max(thresholds(run, (), ())[0] if thresholds(run, (), ()) else high, low), high)
    shared[token] += edge - low
    if edge < high:
      for outcome, share in steps_of(functools.partial(at, run, (high,), ()), 0.0, _ALMOST):
        shared[outcome.token] += (high - edge) * share
  assert np.abs(right - pair.p[()]).sum() / 2 < 1e-6
  assert np.abs(shared - pair.p[()]).sum() / 2 > 1e-3


def test_a_token_drawn_again_is_a_bug():
  pair = Pair(0, 3, 1)
  p, q = pair.p[()], pair.q[()]
  agree = float(p @ q)
  # Accepting a draw that equals the draft, and otherwise using that same draw, keeps the law.
  own = p * q + p * (1 - q)
  again = p * q + (1 - agree) * p
  assert np.abs(own - p).sum() / 2 < 1e-6 and np.abs(again - p).sum() / 2 > 1e-3


def node_law(p, q, width, drawn):
  """Returns the law of the token at a node by `mss`, over all children that q may draw."""
  law = np.zeros(len(p))
  for children in itertools.product(range(len(p)), repeat=width):
    chance, left = 1.0, q
    for child in children:
      chance *= left[child]
      if drawn == "without_replacement" and chance:
        left = np.where(np.arange(len(q)) == child, 0.0, left)
        left = left / max(left.sum(), 1e-300)
    if chance:
      run = functools.partial(verification.mss, p, q, np.array(children), drawn=drawn)
      for outcome, share in law_of(run, width).items():
        law[outcome.token] += chance * share
  return law


@pytest.mark.parametrize("drawn", verification.DRAWN)
@pytest.mark.parametrize(
  "vocab, width", [(3, 1), (3, 2), (4, 2), pytest.param(5, 3, marks=pytest.mark.thorough)]
)
def test_children_that_were_drawn_say_the_target_s_token(drawn, vocab, width):
  pair = Pair(vocab + width, vocab, 0)
  p, q = pair.p[()], pair.q[()]
  assert np.abs(node_law(p, q, width, drawn) - p).sum() / 2 < 1e-6


def test_trees_of_drawn_children_say_the_target_s_texts():
  pair = Pair(7, 3, 3)
  law = dict.fromkeys(pair.texts(), 0.0)

  def walk(prefix: Prefix, chance: float) -> None:
    """Visits a node with drawn children; recurses into accepted ones until a prefix stops."""
    if len(prefix) == pair.most or pair.stops[prefix]:
      pair._spread(law, prefix, chance)
      return
    for token, share in enumerate(node_law(pair.p[prefix], pair.q[prefix], 2, "iid")):
      walk((*prefix, token), chance * share)

  walk((), 1.0)
  assert variation(law, pair.texts()) < 1e-6


def test_children_that_are_the_top_k_are_a_bug():
  pair = Pair(0, 4, 0)
  p, q = pair.p[()], pair.q[()]
  top = np.argsort(-q)[:2]
  law = law_of(lambda u: verification.mss(p, q, top, u, drawn="iid"), 2)
  tokens = {outcome.token: 0.0 for outcome in law}
  for outcome, share in law.items():
    tokens[outcome.token] += share
  assert variation(tokens, dict(enumerate(p))) > 1e-3


def gumbel_law(sample: Callable[[np.ndarray], int], vocab: int) -> np.ndarray:
  """Returns the law of a race: for each winner and its time, how early the others may come."""
  times, weights = np.polynomial.laguerre.laggauss(48)
  law = np.zeros(vocab)
  for winner in range(vocab):
    for time, weight in zip(times, weights):
      if weight < 1e-14:
        continue
      others = set(range(vocab)) - {winner}
      chances = [np.exp(-latest(sample, vocab, winner, time, other)) for other in others]
      law[winner] += weight * np.prod(chances)
  return law


def latest(sample: Callable, vocab: int, winner: int, time: float, other: int) -> float:
  """Returns from when on another one comes too late, where all the rest never come."""

  def wins(when: float) -> bool:
    race = np.full(vocab, 600.0)
    race[winner], race[other] = time, when
    return sample(np.exp(-race)) == winner

  return halved(wins, 0.0, 600.0)


def test_the_target_s_own_tokens_follow_its_law():
  p = np.array([0.5, 0.3, 0.2])
  both = np.array([p, p])
  sample = lambda u: own_text(both, [1], np.array([u, u]))[0]
  assert np.abs(gumbel_law(sample, 3) - p).sum() / 2 < 1e-6


def own_text(p, tokens, uniforms) -> Prefix:
  num, token = verification.own_sample(p, np.asarray(tokens), uniforms)
  return (*tokens[:num], token)


@given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=50)
def test_no_draft_changes_the_target_s_own_text(seed):
  rng = np.random.default_rng(seed)
  pair = Pair(seed, 3, 3)
  uniforms = rng.random((4, 3))
  text: list[int] = []
  for noise in uniforms:
    text.append(verification.gumbel_top_k(pair.p[tuple(text)], noise, 1)[0])
  for _ in range(4):
    draft = tuple(rng.integers(0, 3, rng.integers(0, 4)).tolist())
    p, _ = pair.laws(draft)
    said = own_text(p, list(draft), uniforms[: len(draft) + 1])
    assert list(said) == text[: len(said)]
    # Also under a gate that throws a whole block away.
    gate = KlGate(kind="block", threshold=0.4)
    num = gate.passed(*pair.laws(draft))
    assert num in (0, len(draft))
    said = own_text(p[: num + 1], list(draft[:num]), uniforms[: num + 1])
    assert list(said) == text[: len(said)]


def test_children_of_the_same_noise_hold_more_often_than_draws():
  # The coupling's chance is at least (1 - tv) / (1 + tv), and that of four siblings far higher.
  pair = Pair(5, 5, 0, sharpness=0.7)
  p, q = pair.p[()], pair.q[()]
  rng = np.random.default_rng(0)
  noise = rng.random((4000, 5))
  own = [verification.gumbel_top_k(p, u, 1)[0] for u in noise]
  children = [verification.gumbel_top_k(q, u, 3) for u in noise]
  held = [np.mean([y in c[:k] for y, c in zip(own, children)]) for k in (1, 2, 3)]
  total = np.abs(p - q).sum() / 2
  assert held[0] > (1 - total) / (1 + total) - 0.03 and held[0] > float(p @ q) + 0.05
  assert held[0] < held[1] < held[2]
  np.testing.assert_allclose(np.bincount(own, minlength=5) / 4000, p, atol=0.03)
  assert all(len(set(c)) == 3 for c in children)


def test_block_accepts_at_least_what_rejection_does():
  pair = Pair(3, 3, 2)
  mean = {}
  for rule in (verification.rejection, verification.block):
    mean[rule] = 0.0
    for draft, chance in pair.drafts():
      p, q = pair.laws(draft)
      law = law_of(functools.partial(rule, p, q, np.array(draft, np.int64)), len(draft))
      mean[rule] += chance * sum(outcome.num_accepted * share for outcome, share in law.items())
  assert mean[verification.block] > mean[verification.rejection] + 1e-3


def test_a_fuzzy_gate_is_off_by_no_more_than_pinsker_says():
  gate = KlGate(kind="fuzzy", threshold=0.4)
  pair = Pair(1, 3, 2, sharpness=0.7)
  law = pair.text_law(lambda *args: verification.fuzzy(*args, gate=gate))
  off = variation(law, pair.texts())
  assert 1e-3 < off <= gate.bound(2)
  assert gate.described(100).startswith("fuzzy at 0.4 nats: lossy, at most 0.447 in total")
  assert KlGate().described(9) == "truncate at 0.1 nats: exact, the text follows the target's law"


def test_divergences_by_hand():
  p, q = np.array([[0.5, 0.5], [1, 0], [0.5, 0.5]]), np.array([[0.5, 0.5], [0.5, 0.5], [1, 0]])
  np.testing.assert_allclose(verification.divergence(p, q), [0, np.log(2), np.inf])
  gate = KlGate(threshold=0.1)
  assert gate.passed(np.concatenate([p, p[:1]]), q) == 1


P, Q = np.full((2, 2), 0.5), np.array([[1.0, 0.0]])


@refusals.table(
  (lambda: KlGate(kind="hard"), "got kind='hard' and rule='own_sample', expected one of"),
  (lambda: KlGate(threshold=-1.0), "got -1.0, expected at least 0 nats; 0.1 is usual"),
  (lambda: KlGate(kind="block", rule="rejection"),
   "got kind='block' with rule='rejection', expected 'own_sample'", "use kind='truncate'"),
  (lambda: KlGate(kind="fuzzy", learns=True),
   "got kind='fuzzy', which is lossy, in a training run, expected an exact one", "truncate"),
  (lambda: verification.mss(P[0], P[0], np.array([0]), np.zeros(2), drawn="top_k"),
   "mss: got children drawn as 'top_k', expected one of", "verify them with own_sample"),
  (lambda: verification.mss(P[0], Q[0], np.array([1]), np.zeros(2), drawn="iid"),
   "mss: got child 1, which the draft never draws at position 0, expected draws iid"),
  (lambda: verification.rejection(P, Q, np.array([1]), np.zeros(2)),
   "rejection: got token 1 at place 0, which q never draws, expected draws of q"),
  (lambda: verification.rejection(P, Q, np.array([2]), np.zeros(2)),
   "got tokens 2 to 2, expected 0 to 1; draft with the target's vocabulary"),
  (lambda: verification.block(P, Q, np.array([0, 0]), np.zeros(2)),
   "block: got tokens of shape (2,) for 2 distributions of the target, expected 1: one"),
  (lambda: verification.block(P, Q, np.array([0]), np.zeros(3)),
   "block: uniforms: got shape (3,), expected (2,)"),
  (lambda: verification.own_sample(P * np.nan, np.array([0]), np.full((2, 2), 0.5)),
   "own_sample: p: got probabilities with sums of nan to nan", "pass probabilities, not logits"),
  (lambda: verification.own_sample(P[0], np.array([0]), np.full((2, 2), 0.5)),
   "own_sample: p: got shape (2,), expected [n, v]"),
  (lambda: verification.gumbel_top_k(P[0], np.full(2, 0.5), 3),
   "gumbel_top_k: got k=3 for 2 tokens, expected 1 to that; ask for fewer children"),
  (lambda: verification.fuzzy(P, Q, np.array([0]), np.zeros(2), gate=KlGate()),
   "fuzzy: got a gate of kind='truncate', expected 'fuzzy'"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
