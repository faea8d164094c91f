"""Sizes of an engine: what free memory holds, and what is refused."""

from __future__ import annotations

import jax
import pytest
import tiny_model

from seerjax import parallel
from seerjax.engine import sizes
from seerjax.engine.engine import Engine
from seerjax.types import Request, SamplingParams

MODEL, NUMERICS = tiny_model.CONFIG, tiny_model.NUMERICS
PAGE_BYTES = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 8 * 4
OPEN = sizes.EngineConfig(page_size=8, max_context=32, row_buckets=(4, 16))


def fitted(config: sizes.EngineConfig, num_pages: float) -> sizes.EngineConfig:
  """The config where PAGES_SHARE of free memory holds so many pages."""
  free = (num_pages + 0.5) * PAGE_BYTES / sizes.PAGES_SHARE
  return sizes.fitted(config, MODEL, NUMERICS, free_bytes=free)


def test_pages_that_fit_is_memory_over_the_bytes_of_a_page():
  for numerics, expected in ((NUMERICS, 10), (tiny_model.BFLOAT16, 20)):
    memory = 10 * PAGE_BYTES
    assert sizes.pages_that_fit(MODEL, numerics, page_size=8, memory_bytes=memory) == expected
  assert sizes.pages_that_fit(MODEL, NUMERICS, page_size=8, memory_bytes=memory - 1) == 9


def test_zeros_are_filled_from_free_memory():
  # A context is four pages; four sequences want sixteen and the reserved one.
  plenty = fitted(OPEN, 1000)
  assert (plenty.num_pages, plenty.max_sequences) == (17, 4)
  scarce = fitted(OPEN, 10)
  assert (scarce.num_pages, scarce.max_sequences) == (10, 2)
  unknown = sizes.fitted(OPEN, MODEL, NUMERICS, free_bytes=float("inf"))
  assert unknown == plenty


def test_what_is_named_is_taken_as_it_is():
  named = sizes.EngineConfig(
    page_size=8, num_pages=7, max_sequences=3, max_context=32, row_buckets=(4, 16)
  )
  assert fitted(named, 5) == named


def test_memory_that_holds_no_context_is_refused():
  with pytest.raises(ValueError, match=r"holds 4 pages, expected at least 5 for one context of 32"):
    fitted(OPEN, 4)


def test_free_memory_is_shared_by_the_devices_of_a_cpu():
  one, two = (sizes.free_bytes(parallel.make_mesh(num_instances=n)) for n in (1, 2))
  assert 0 < two < one


def test_an_engine_of_open_sizes_says_what_it_took_and_answers():
  engine = Engine(
    MODEL, tiny_model.params(NUMERICS), numerics=NUMERICS, config=OPEN, key=jax.random.key(0)
  )
  assert engine.plan().startswith("1 instance(s), each 17 pages of 8 positions")
  request = Request(request_id="0", prompt=(1, 2), sampling=SamplingParams(max_tokens=2))
  assert len(engine.generate([request])[0].tokens) == 2
