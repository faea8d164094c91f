"""Sizes of an engine: the capacity of free memory, and errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny_model
import word_engine

from seerjax import parallel
from seerjax.engine import checks, sizes
from seerjax.engine.engine import Engine
from seerjax.models import presets
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

MODEL, NUMERICS = tiny_model.CONFIG, tiny_model.NUMERICS
DECODER = decide(MODEL, NUMERICS)
PAGE_BYTES = (
  2
  * MODEL.num_layers
  * MODEL.layers[0].attention.num_kv_heads
  * MODEL.layers[0].attention.head_dim
  * 8
  * 4
)
OPEN = sizes.EngineConfig(page_size=8, max_model_len=32, batch_size_buckets=(4, 16))


def fitted(config: sizes.EngineConfig, num_pages: float) -> sizes.EngineConfig:
  """Returns the config when PAGES_SHARE of free memory holds `num_pages` pages."""
  free = (num_pages + 0.5) * PAGE_BYTES / sizes.PAGES_SHARE
  return sizes.fitted(config, DECODER, free_bytes=free)


def test_pages_that_fit_is_memory_over_the_bytes_of_a_page():
  for numerics, expected in ((NUMERICS, 10), (tiny_model.BFLOAT16, 20)):
    memory = 10 * PAGE_BYTES
    decoder = decide(MODEL, numerics)
    assert sizes.pages_that_fit(decoder, page_size=8, memory_bytes=memory) == expected
  assert sizes.pages_that_fit(DECODER, page_size=8, memory_bytes=memory - 1) == 9


def test_layers_with_a_window_have_fewer_pages_so_that_longer_contexts_fit():
  window = 8
  kinds = [MODEL.layers[0], MODEL.layers[0].changed(window=window)]
  decoder = decide(dataclasses.replace(MODEL, layers=tuple(kinds)), NUMERICS)
  of_layer = PAGE_BYTES // 2
  assert sizes.kind_bytes(decoder, page_size=8) == (of_layer, of_layer)
  config = dataclasses.replace(OPEN, decode_steps_per_call=1, max_model_len=800)
  counts = lambda num_pages: sizes.page_counts(config, decoder, num_pages=num_pages, max_num_seqs=2)
  # Twice two sequences with 8 + 16 + 8 positions and a further page, 16 rows, and the reserved one.
  assert counts(1000) == (1000, 1 + 2 * 2 * 5 + 2) and counts(9) == (9, 9)
  fit = lambda pages, most: sizes.pages_that_fit(
    decoder, page_size=8, memory_bytes=pages * of_layer, most=most
  )
  assert [fit(pages, (1000, 23)) for pages in (10, 46, 47, 123)] == [5, 23, 24, 100]
  assert fit(123, ()) == 61
  found = sizes.fitted(
    dataclasses.replace(config, max_num_seqs=2), decoder, free_bytes=224 * of_layer / 0.4
  )
  assert found.num_pages == 201 and sizes.pages_bytes(found, decoder) == 224 * of_layer


def test_zeros_are_filled_from_free_memory():
  # A context is four pages; four sequences want sixteen and the reserved one.
  plenty = fitted(OPEN, 1000)
  assert (plenty.num_pages, plenty.max_num_seqs) == (17, 4)
  scarce = fitted(OPEN, 10)
  assert (scarce.num_pages, scarce.max_num_seqs, scarce.max_model_len) == (10, 4, 32)
  # Whole answers, where they are reserved.
  whole = fitted(dataclasses.replace(OPEN, reserved_tokens=0), 10)
  assert (whole.num_pages, whole.max_num_seqs) == (10, 2)
  unknown = sizes.fitted(OPEN, DECODER, free_bytes=float("inf"))
  assert unknown == plenty


@pytest.mark.parametrize(("backend", "expected"), [("tiled", 1), ("native", 8)])
def test_steps_of_a_visit_that_are_left_open_are_the_backend_s(backend, expected):
  decoder = decide(MODEL, dataclasses.replace(NUMERICS, backend=backend))
  found = sizes.fitted(OPEN, decoder, free_bytes=float("inf"))
  assert found.decode_steps_per_call == expected


OPEN_SLABS = dataclasses.replace(NUMERICS, reduction_shards=0)
UNTILED = dataclasses.replace(OPEN_SLABS, backend="untiled")


@pytest.mark.parametrize(
  ("name", "numerics", "context", "max_num_seqs", "expected"),
  [
    # 4 (3 * 384 + 4 * 128) = 6,656 bytes a row: far more than 512 rows fit a GiB.
    ("nano", OPEN_SLABS, 512, 64, (64, 512)),
    ("nano", OPEN_SLABS, 1024, 0, (64, 512)),
    ("nano", UNTILED, 512, 64, (64, 512)),
    # 4 (3 * 3,072 + 4 * 1,024) = 53,248 and 4 (3 * 12,288 + 4 * 4,096) = 212,992: 5,041 of them.
    ("qwen3-0.6b", OPEN_SLABS, 1024, 0, (64, 512)),
    ("qwen3-8b", OPEN_SLABS, 32_768, 0, (64, 512)),
    # 8 * 151,936 logits more, 4,915,200 and 5,074,944 bytes: 218 and 211 rows.
    ("qwen3-0.6b", UNTILED, 1024, 0, (64, 128)),
    ("qwen3-8b", UNTILED, 32_768, 0, (64, 128)),
    # No more than sequences can fill, and no fewer than sequences.
    ("nano", OPEN_SLABS, 64, 3, (64, 256)),
    ("nano", OPEN_SLABS, 16, 1, (16,)),
    ("nano", OPEN_SLABS, 2, 0, (64, 128)),
    ("qwen3-8b", UNTILED, 1024, 1000, (64, 1024)),
  ],
)
def test_row_buckets_follow_from_model_and_context(name, numerics, context, max_num_seqs, expected):
  model = presets.get(name)
  config = sizes.EngineConfig(max_model_len=context, max_num_seqs=max_num_seqs)
  assert sizes.with_buckets(config, decide(model, numerics)).batch_size_buckets == expected
  # A model with a smaller context limits it.
  short = dataclasses.replace(model, max_model_len=context)
  config = sizes.EngineConfig(max_model_len=2**20, max_num_seqs=max_num_seqs)
  assert sizes.with_buckets(config, decide(short, numerics)).batch_size_buckets == expected


def test_row_buckets_that_no_gib_holds_are_less_and_one_at_least():
  # 16 * 2**20 bytes a row: 64 rows, a byte more: 32; 16 * 2**27: none.
  for features, expected in ((2**20, (64,)), (2**20 + 1, (32,)), (2**27, (1,))):
    model = presets.get("nano").changed(hidden_size=features - 3, intermediate_size=4)
    decoder = decide(model, OPEN_SLABS)
    assert sizes.with_buckets(sizes.EngineConfig(), decoder).batch_size_buckets == expected


def test_what_is_named_is_taken_as_it_is():
  named = sizes.EngineConfig(
    page_size=8,
    num_pages=7,
    max_num_seqs=3,
    max_model_len=32,
    batch_size_buckets=(4, 16),
    decode_steps_per_call=3,
    background_rows=2,
    pinned_pages=1,
  )
  assert fitted(named, 5) == named == sizes.with_buckets(named, DECODER)


def test_memory_that_holds_no_context_holds_shorter_requests():
  # Three pages of eight positions; the last token sampled needs none.
  short = fitted(OPEN, 4)
  assert (short.num_pages, short.max_num_seqs, short.max_model_len) == (4, 3, 25)
  with pytest.raises(ValueError, match=r"hold 1 pages, expected at least 2 pages of 8 positions"):
    fitted(OPEN, 1)


def test_a_real_model_answers_many_at_once():
  # Qwen3-8B on 45 GiB: 0.4 of them are one whole context of 40,960 positions and a half.
  model = presets.get("qwen3-8b")
  numerics = dataclasses.replace(NUMERICS, kv_split=256)
  for dtype, whole in (("float32", 1), ("bfloat16", 3)):
    decoder = decide(model, dataclasses.replace(numerics, compute_dtype=dtype))
    config = sizes.EngineConfig(max_model_len=40_960)
    found = sizes.fitted(config, decoder, free_bytes=45 * 2**30)
    assert (found.max_num_seqs, found.max_model_len) == (64, 40_960)
    config = dataclasses.replace(config, reserved_tokens=0)
    assert sizes.fitted(config, decoder, free_bytes=45 * 2**30).max_num_seqs == whole


@pytest.mark.thorough
def test_requests_beyond_what_the_pages_hold_are_refused_by_that():
  config = dataclasses.replace(word_engine.SIZES, num_pages=4)
  engine = word_engine.make_engine(config)
  assert engine.memory_plan().endswith(
    "; requests of at most 25 tokens; for more, raise EngineConfig.num_pages or free memory, as 3"
    " pages of 8 positions hold no more tokens"
  )


def test_free_memory_is_shared_by_the_devices_of_a_cpu():
  one, two = (sizes.free_bytes(parallel.make_mesh(data_parallel_size=n)) for n in (1, 2))
  assert 0 < two < one


@pytest.mark.thorough
def test_an_engine_of_open_sizes_says_what_it_took_and_answers():
  open_too = sizes.EngineConfig(page_size=8, max_num_seqs=4, max_model_len=32)
  engine = Engine(
    Model(MODEL, tiny_model.params(NUMERICS), NUMERICS),
    config=open_too,
    key=jax.random.key(0),
  )
  assert engine.config.batch_size_buckets == (64, 128)
  assert engine.memory_plan().startswith("1 instance(s), each with 17 pages of 8 positions")
  request = Request(request_id="0", prompt=(1, 2), sampling=SamplingParams(max_tokens=2))
  assert len(engine.generate([request])[0].tokens) == 2


def test_the_plan_says_what_was_allocated():
  assert word_engine.make_engine().memory_plan() == (
    "1 instance(s), each with 9 pages of 8 positions (64 tokens of context) and 4 sequences; steps"
    " of 4, 16 rows in arrays of 8, 16; 0.1 MiB of pages, 0.2 MiB of weights"
  )
  place = jax.sharding.NamedSharding(parallel.make_mesh(tensor_parallel_size=8), jax.P("model"))
  line = sizes.described(
    word_engine.make_engine().config,
    DECODER,
    data_parallel_size=1,
    allocated=(
      jnp.zeros(2**18, jnp.float32, device=place),
      jnp.zeros(2**21, jnp.float32, device=place),
    ),
    context=checks.Context(64, 64, ""),
  )
  assert line.endswith("; 1.0 MiB of pages, 8.0 MiB of weights; on each device 0.1 and 1.0 MiB")
