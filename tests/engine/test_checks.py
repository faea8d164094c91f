"""Requests that are refused on submission; `test_doors.py` has a table of more."""

from __future__ import annotations

import dataclasses

import pytest
from word_engine import SIZES, make_engine, request, run


def test_a_refused_request_leaves_nothing_behind():
  engine = make_engine()
  with pytest.raises(ValueError, match="request 'r': got an empty prompt"):
    engine.add_request(request("r", ()))
  assert engine.num_unfinished == 0 and not engine._requests.waiting[0]


def test_a_request_of_the_whole_context_is_taken():
  engine = make_engine()
  engine.add_request(request("r", range(59), max_tokens=5))
  assert len(run(engine)["r"].tokens) == 5


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
  engine = make_engine(dataclasses.replace(SIZES, num_pages=4))
  engine.add_request(request("fits", range(20), max_tokens=5))  # 24 positions.
  with pytest.raises(
    ValueError,
    match=r"request 'r': got 20 prompt tokens and max_tokens 6, expected a sum of at most 25,"
    r" the context; lower SamplingParams.max_tokens or raise EngineConfig.num_pages or free memory,"
    r" as 3 pages of 8",
  ):
    engine.add_request(request("r", range(20), max_tokens=6))


def test_a_second_request_of_one_name_is_refused_while_the_first_runs():
  engine = make_engine()
  engine.add_request(request("a"))
  with pytest.raises(ValueError, match="request 'a': got the id of a running request, expected a"):
    engine.add_request(request("a"))
  run(engine)
  engine.add_request(request("a"))
