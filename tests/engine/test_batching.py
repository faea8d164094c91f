"""Biases of single tokens reach the right rows."""

from __future__ import annotations

import numpy as np
import tiny_model
from word_engine import make_engine, request


def test_a_forbidden_token_is_not_said_and_a_favoured_one_is():
  greedy = make_engine().generate([request(temperature=0.0, max_tokens=3)])[0]
  first = greedy.tokens[0]
  other = make_engine().generate(
    [request(temperature=0.0, max_tokens=3, logit_bias=((first, -1e6),))]
  )[0]
  assert first not in other.tokens
  favoured = make_engine().generate([request(max_tokens=3, logit_bias=((9, 1e6),))])[0]
  assert favoured.tokens == (9, 9, 9)
  np.testing.assert_array_equal(favoured.behaviour_logprobs, 0.0)  # Certain,
  assert (favoured.raw_logprobs < -0.1).all()  # but not by the model.


def test_two_biases_of_one_token_add_up():
  twice = make_engine().generate([request(logit_bias=((9, 1.5), (9, 2.0)))])[0]
  once = make_engine().generate([request(logit_bias=((9, 3.5),))])[0]
  assert tiny_model.same(twice, once)
