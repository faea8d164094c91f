"""Verification rules on recorded logits: acceptance along texts, and steps by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments import speculation_rules
from experiments.speculation_rules import Record, Workload
from seerjax.speculation import verification


def laws(seed: int, vocab: int = 5, sharpness: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(1, vocab)) * sharpness
  both = logits, logits + rng.normal(size=(1, vocab)) * 0.7
  return speculation_rules.softmax(both[0]), speculation_rules.softmax(both[1])


def by_token(p: np.ndarray, q: np.ndarray, held) -> np.ndarray:
  """Returns f64[w]: how often child j holds, over all tokens that the target may say."""
  vocab = p.shape[1]
  said = np.arange(vocab)
  whole = held(np.repeat(p, vocab, axis=0), np.repeat(q, vocab, axis=0), said)
  return p[0] @ whole


def test_one_child_holds_where_the_laws_overlap():
  p, q = laws(0)
  rng = np.random.default_rng(0)
  held = by_token(p, q, lambda p, q, said: speculation_rules.mss(p, q, said, 1, "iid", rng, 1))
  assert held[0] == pytest.approx(np.minimum(p, q).sum())


@pytest.mark.parametrize("drawn", verification.DRAWN)
def test_chances_along_texts_are_the_rule_s_own(drawn):
  p, q = laws(1)
  rng = np.random.default_rng(0)
  held = by_token(
    p, q, lambda p, q, said: speculation_rules.mss(p, q, said, 3, drawn, rng, 400)
  ).sum()
  called = 0
  for _ in range(3000):
    children = rng.choice(5, 3, p=q[0], replace=drawn == "iid")
    called += verification.mss(p[0], q[0], children, rng.random(4), drawn=drawn).num_accepted
  assert held == pytest.approx(called / 3000, abs=0.03)


def test_coupled_children_given_the_token_are_those_of_the_noise():
  p, q = laws(2)
  rng = np.random.default_rng(0)
  told = by_token(
    np.repeat(p, 1, axis=0), q,
    lambda p, q, said: np.mean(
      [speculation_rules.coupled(p, q, said, rng) for _ in range(40)], axis=0
    ),
  )  # fmt: skip
  called = np.zeros(5)
  for _ in range(3000):
    noise = rng.random(5)
    own = verification.gumbel_top_k(p[0], noise, 1)[0]
    called[verification.gumbel_top_k(q[0], noise, 5).index(own)] += 1
  np.testing.assert_allclose(told, called / 3000, atol=0.04)


def test_independent_and_likeliest_children_by_hand():
  q = np.array([[0.5, 0.3, 0.2]] * 2)
  found = speculation_rules.independent(q, np.array([0, 2]))
  np.testing.assert_allclose(found[:, :2], [[0.5, 0.25], [0.2, 0.16]])
  assert speculation_rules.ranked(q, np.array([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]


def record_of(*lengths: int) -> Record:
  total = sum(lengths)
  return Record(np.zeros(total, np.int32), np.cumsum(lengths), np.zeros((total, 2)), {})


def test_steps_by_hand():
  record = record_of(20, 1)
  always, never = np.ones((21, 2)) * [1, 0], np.zeros((21, 2))
  # Nine tokens a step: 9, 9 and the last two; the other text has one token.
  found = speculation_rules.walked(record, *speculation_rules.comb(always, 2))
  assert found.num_steps.tolist() == [3, 1]
  found = speculation_rules.walked(record, *speculation_rules.comb(never, 2))
  assert found.num_steps.tolist() == [20, 1]
  # An accepted first sibling gives itself and the bonus token, and nothing below it.
  siblings = np.ones((21, 2)) * [0, 1]
  found = speculation_rules.walked(record, *speculation_rules.comb(siblings, 2))
  assert found.num_steps.tolist() == [10, 1]
  assert found.accepted[:2].tolist() == [11, 0]
  # Where only the third level is wide, an accepted sibling continues.
  held = np.ones((21, 2)) * [1, 0]
  held[2] = [0, 1]
  levels = speculation_rules.one_wide_level(held, 2)
  assert speculation_rules.walked(record, *levels).num_steps.tolist() == [3, 1]
  levels = speculation_rules.one_wide_level(held, 1)
  assert speculation_rules.walked(record, *levels).num_steps.tolist() == [3, 1]
  assert speculation_rules.walked(record, *levels).reached[2] == 3


def test_block_verification_from_everywhere_is_at_least_rejection():
  rng = np.random.default_rng(0)
  p = speculation_rules.softmax(rng.normal(size=(400, 4)))
  q = speculation_rules.softmax(np.log(p) + rng.normal(size=p.shape) * 0.5)
  tokens = np.array([rng.choice(4, p=row) for row in p])
  record = Record(tokens, np.array([200, 400]), np.zeros((400, 4)), {})
  block, rejection = speculation_rules.from_everywhere(record, p, q)
  assert block > rejection > 1
  assert speculation_rules.from_everywhere(record, p, p) == (block_of(400), block_of(400))


def block_of(num_rows: int) -> float:
  """Returns the tokens of a step that accepts all, cut by the ends of two texts."""
  left = np.minimum(np.arange(num_rows // 2, 0, -1), speculation_rules.DEPTH)
  return pytest.approx(1 + left.mean())


def test_weights_are_rounded_by_output_channel():
  rng = np.random.default_rng(0)
  tree = {"embed": rng.normal(size=(6, 4)), "norm": rng.normal(size=4),
          "down": rng.normal(size=(2, 3, 4))}  # fmt: skip
  found = speculation_rules.rounded(tree)
  assert (found["norm"] == tree["norm"]).all()
  for name, axes in (("embed", (1,)), ("down", (0, 1))):
    scale = np.abs(tree[name]).max(axis=axes, keepdims=True) / 127
    assert np.abs(found[name] - tree[name]).max() <= (scale / 2).max() * 1.001
    whole = found[name] / scale
    np.testing.assert_allclose(whole, np.round(whole), atol=1e-6)


@pytest.mark.thorough
def test_a_small_run_writes_and_reads_its_record(tiny, tmp_path):
  workload = Workload(model=tiny, num_prompts=2, num_answers=2, max_tokens=8, num_calls=20)
  text = speculation_rules.run(workload, tmp_path)
  assert "## Sampled: 4 answers" in text and "### Draft: INT8, greedy" in text
  assert speculation_rules.run(workload, tmp_path) == text
  other = Workload(model=tiny, num_prompts=3, num_answers=2, max_tokens=8, num_calls=20)
  with pytest.raises(ValueError, match=r"record.npz: got a record of .* name another --workdir"):
    speculation_rules.run(other, tmp_path)
  settings = json.loads(str(np.load(tmp_path / "record.npz")["settings"]))
  assert settings["num_prompts"] == 2


def test_a_workload_without_answers_is_refused():
  with pytest.raises(ValueError, match="Workload: got num_prompts=128, num_answers=0"):
    Workload(num_answers=0)
