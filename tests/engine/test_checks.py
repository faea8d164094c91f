"""Requests that are refused on submission."""

from __future__ import annotations

import dataclasses

import pytest
from word_engine import SIZES, make_engine, request, run


@pytest.mark.parametrize(
  "one, message",
  [
    (request("r", ()), r"request 'r': got an empty prompt, expected at least one token; add a BOS"),
    (request("r", (3, 512)), r"got token ids from 3 to 512, expected 0 to 511; encode with this"),
    (request("r", (-1,)), r"got token ids from -1 to -1, expected 0 to 511"),
    (dataclasses.replace(request(), seed=2**32), r"got seed 4294967296, expected 0 <= seed < 2"),
    (dataclasses.replace(request(), seed=-1), r"got seed -1, expected 0 <= seed"),
    (
      request("r", range(64), max_tokens=1),
      r"got a prompt of 64 tokens, expected fewer than the context of 64; .* model allows 4096\)",
    ),
    (
      request("r", range(60), max_tokens=5),
      r"got 60 prompt tokens and max_tokens 5, expected a sum of at most 64, the context; lower",
    ),
    (request("r", logit_bias=((512, 1.0),)), r"got logit_bias \(512, 1.0\), expected a token id"),
    (
      request("r", max_tokens=1, allowed=((7, 513),)),
      r"got a grammar that allows ids up to 512, expected at most 511; write",
    ),
    (request("r", logit_bias=((-1, 1.0),)), r"got logit_bias \(-1, 1.0\), .* 0 to 511 and a bias"),
    (
      request("r", logit_bias=((1, float("-inf")),)),
      r"got logit_bias \(1, -inf\), .* a bias from -1e\+06 to 1e\+06; the lowest bias forbids",
    ),
    (request("r", logit_bias=((1, float("nan")),)), r"got logit_bias \(1, nan\)"),
    (
      request("r", logit_bias=tuple((token, 1.0) for token in range(17))),
      r"SamplingParams.logit_bias: got 17 entries, expected at most 16; bias fewer",
    ),
  ],
)
def test_a_request_that_cannot_run_is_refused(one, message):
  engine = make_engine()
  with pytest.raises(ValueError, match=message):
    engine.submit(one)
  assert engine.num_unfinished == 0 and not engine._requests.waiting[0]


def test_a_request_of_the_whole_context_is_taken():
  engine = make_engine()
  engine.submit(request("r", range(59), max_tokens=5))
  assert len(run(engine)["r"].tokens) == 5


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
  engine = make_engine(dataclasses.replace(SIZES, num_pages=4))
  engine.submit(request("fits", range(20), max_tokens=5))  # 24 positions.
  with pytest.raises(
    ValueError,
    match=r"request 'r': got 20 prompt tokens and max_tokens 6, expected a sum of at most 25,"
    r" the context; lower SamplingParams.max_tokens or raise EngineConfig.num_pages or free memory,"
    r" as 3 pages of 8",
  ):
    engine.submit(request("r", range(20), max_tokens=6))


def test_a_second_request_of_one_name_is_refused_while_the_first_runs():
  engine = make_engine()
  engine.submit(request("a"))
  with pytest.raises(ValueError, match="request 'a': got the id of a running request, expected a"):
    engine.submit(request("a"))
  run(engine)
  engine.submit(request("a"))


def test_stop_strings_without_a_tokenizer_are_refused():
  with pytest.raises(ValueError, match="stop_strings without a tokenizer, expected a model that"):
    make_engine(tokenizer=None).submit(request(stop_strings=("x",)))
