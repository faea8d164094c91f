"""A model's perplexity and its comparison with `transformers`."""

from __future__ import annotations

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.models import loading
from seerjax.models.loading import Model
from seerjax.run import parity, routes


@pytest.fixture(scope="module")
def model(tiny: str) -> Model:
  return loading.load_model(tiny)


def test_a_model_without_a_preference_has_the_perplexity_of_its_vocabulary(model: Model):
  flat = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
  text = "once upon a time " * 200  # More than one window.
  value, count = parity.perplexity(flat, text)
  assert model.tokenizer is not None
  num_windows = math.ceil(len(model.tokenizer.encode(text)) / parity.WINDOW)
  assert num_windows > 1
  assert count == len(model.tokenizer.encode(text)) - num_windows
  np.testing.assert_allclose(value, model.config.vocab_size, rtol=1e-5)
  assert abs(parity.perplexity(model, text)[0] - value) > 1e-3


def test_a_text_without_a_second_token_is_refused(model: Model):
  with pytest.raises(
    ValueError, match="got a text of 1 tokens, expected at least 2; pass a longer"
  ):
    parity.perplexity(model, "a")


def test_a_python_without_transformers_is_refused_with_its_last_lines(model: Model, tiny: str):
  if parity.has_transformers():
    pytest.skip("this Python has transformers")
  with pytest.raises(ValueError, match="(?s)got exit status 1, expected 0; .*No module"):
    parity.compare(model, tiny, sys.executable)


def test_logits_and_greedy_tokens_are_those_of_transformers(model: Model, tiny: str):
  pytest.importorskip("transformers", reason="parity needs the optional transformers")
  found = parity.compare(model, tiny)
  assert found.logit_gap < 2e-5
  assert found.num_equal == found.num_tokens == parity.NUM_TOKENS * len(parity.TEXTS)


# Sets of experts.


@pytest.fixture(scope="module")
def experts() -> Model:
  return loading.load_model("nano-moe")


def test_no_route_of_a_model_with_experts_differs(experts: Model):
  line = parity.route_disagreements(experts)
  assert line.startswith("0 of ") and "pass, 0 between decoding alone" in line, line


def test_sets_of_experts_are_counted_by_hand(experts: Model):
  """Logits of the chosen experts are above the others by a margin, or by less in one row."""
  prompts = {"a": np.arange(1, 8), "b": np.arange(20, 24)}
  (rule, *_), tokens = experts.config.routings.values(), np.zeros((2, 7), np.int32)
  for place, ids in enumerate(prompts.values()):
    tokens[place, : len(ids)] = ids
  ours = routes.whole_routes(experts.params, tokens, experts.decoder)
  theirs = {}
  for place, (name, ids) in enumerate(prompts.items()):
    logits = np.zeros((len(ours), len(ids), rule.num_experts), np.float32)
    np.put_along_axis(logits, ours[:, place, : len(ids)], 1.0, axis=-1)
    theirs[f"{name}.routers"] = logits
  total = 11 * len(ours)
  assert parity.compare_routes(experts, prompts, theirs) == (total, total, 0)
  theirs["a.routers"][0, 2] *= 1e-6
  theirs["b.routers"][1, 0] = np.roll(theirs["b.routers"][1, 0], 1)
  found = parity.compare_routes(experts, prompts, theirs)
  assert found == (total - 2, total - 1, 1)
  assert str(found).endswith("(1 with a margin below 1e-05 are left out)")


def test_sets_of_experts_are_those_of_transformers(experts: Model):
  pytest.importorskip("transformers", reason="parity needs the optional transformers")
  found = parity.compare(experts, loading.path_of("nano-moe")).routes
  assert found is not None
  assert found.num_equal == found.num_compared
  assert found.num_close <= 0.01 * found.num_compared
