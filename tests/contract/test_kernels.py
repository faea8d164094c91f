"""The engine with GPU kernels, interpreted on a CPU: a request's bits do not depend on the batch.

The interpreter's tensor core is NumPy, so these tests show that the kernels' inputs, and the
operations between kernels, never mix rows. The tensor core itself is tested on a Hopper GPU, where
the same tests run the real kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu
from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import (
  adapters as adapters_lib,
  config as model_config,
  flax_module,
  head,
  kv_layout,
  lora,
  parameters,
  transformer,
)
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops import rotary, sampling
from seerjax.types import KeyCopies, Request, SamplingParams

# On a Hopper GPU the real kernels run.
IS_INTERPRETED = gpu.device_reason(interpret=False) is not None
REASON = gpu.device_reason(interpret=IS_INTERPRETED)
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

NUMERICS = numerics_lib.NumericsConfig(
  backend="pallas_interpreted" if IS_INTERPRETED else "pallas",
  compute_dtype="bfloat16",
  row_tile=4,
  query_tile=4,
  slot_tile=2,
  kv_split=64,
  reduction_shards=1,
)
# The smallest sizes that the kernels accept: tiles of 64.
CONFIG = model_config.TransformerConfig(
  vocab_size=128,
  hidden_size=64,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=64),
      ),
      feed_forward=Gated(intermediate_size=64),
    ),
    1,
  ),
  is_tied=True,
)
PAGE_SIZE, ROWS = 32, 8


@functools.cache
def params():
  master = parameters.init(jax.random.key(0), CONFIG, NUMERICS)
  return parameters.compute_params(master, NUMERICS)


def forward(params, batch, forced, rows, numerics):
  """Runs `ROWS` rows through forward and head; rows at the same position share their noise."""
  pages = kv_layout.empty_pages(decide(CONFIG, numerics), num_pages=9, page_size=PAGE_SIZE)
  hidden, _ = transformer.forward(params, batch, pages, decoder=decide(CONFIG, numerics))
  return hidden, head.sample_and_score(
    params,
    hidden,
    forced,
    rows,
    jnp.zeros(ROWS, jnp.uint32),
    batch.positions,
    batch.num_rows,
    jax.random.key(1),
    decoder=decide(CONFIG, numerics),
  )


step = jax.jit(forward, static_argnums=4)


def sequences(lengths):
  """Returns a batch of `ROWS` rows with sequences of these lengths, and each sequence's rows."""
  whole, _ = flax_module.sequences_batch(1, ROWS, NUMERICS, PAGE_SIZE)
  rng = np.random.default_rng(5)
  tokens = {length: rng.integers(0, CONFIG.vocab_size, 16).astype(np.int32) for length in (3, 4, 1)}
  named = {name: value for name, value in whole._asdict().items() if value is not None}
  fields = {name: np.zeros_like(np.asarray(value)) for name, value in named.items()}
  table = np.zeros((ROWS, 2), np.int32)
  none = np.zeros(ROWS, np.int32)
  fields |= dict(page_table=table, segment_start=none.copy(), segment_length=none.copy())
  first, places = 0, {}
  for index, length in enumerate(lengths):
    rows = slice(first, first + length)
    fields["tokens"][rows] = tokens[length][:length]
    fields["positions"][rows] = np.arange(length)
    fields["slots"][rows] = (1 + 2 * index) * PAGE_SIZE + np.arange(length)
    fields["segment_start"][index], fields["segment_length"][index] = first, length
    table[index] = (1 + 2 * index, 2 + 2 * index)
    places[length] = rows
    first += length
  fields["num_rows"], fields["num_segments"] = np.int32(first), np.int32(len(lengths))
  return type(whole)(**jax.tree.map(jnp.asarray, fields)), places


def arguments(lengths, *, samples):
  """Returns the arguments of `forward`, and the place of each sequence."""
  batch, places = sequences(lengths)
  rows = sampling.sampling_rows([SamplingParams(temperature=0.8)] * ROWS)
  forced = jnp.full(ROWS, -1, jnp.int32) if samples else (batch.tokens * 7 + 3) % CONFIG.vocab_size
  return (params(), batch, forced, jax.tree.map(jnp.asarray, rows)), places


def numbers(hidden, tokens_and_scores):
  """Returns f32[8, d + 4]: hidden rows, tokens and scores."""
  tokens, scores = tokens_and_scores
  columns = [hidden, *(column[:, None] for column in (tokens, *scores))]
  return np.concatenate([np.asarray(column, np.float32) for column in columns], axis=1)


def run(lengths, numerics=NUMERICS, *, samples):
  args, places = arguments(lengths, samples=samples)
  return numbers(*step(*args, numerics)), places


@pytest.mark.thorough
def test_a_row_has_its_token_and_bits_whatever_is_beside_it():
  together, places = run((3, 4, 1), samples=True)
  assert np.isfinite(together).all()
  assert len(set(together[:, CONFIG.hidden_size])) > 1  # Tokens.
  for lengths in ((3,), (1, 3), (4, 3)):
    found, where = run(lengths, samples=True)
    np.testing.assert_array_equal(found[where[3]], together[places[3]], err_msg=f"in {lengths}")


@pytest.mark.thorough
def test_the_kernels_agree_with_the_portable_path():
  tiled = dataclasses.replace(NUMERICS, backend="tiled")
  found, places = run((3, 4, 1), samples=False)
  expected, _ = run((3, 4, 1), tiled, samples=False)
  for rows in places.values():
    np.testing.assert_allclose(found[rows], expected[rows], atol=0.02, rtol=0.02)


@pytest.mark.thorough
def test_a_branch_of_a_tree_has_the_bits_of_its_path():
  # Rows 0 to 3 are one path; row 4 replaces the token at position 2, with its own pages.
  batch, _ = sequences((4,))
  fields = {name: np.array(value) for name, value in batch._asdict().items() if value is not None}
  others = (3 * PAGE_SIZE, 3 * PAGE_SIZE + 1)
  fields["tokens"][4], fields["positions"][4] = 77, 2
  fields["slots"][4] = others[1] + 1
  fields["segment_start"][1], fields["segment_length"][1] = 4, 1
  fields["page_table"][1] = (3, 4)
  fields["num_rows"], fields["num_segments"] = np.int32(5), np.int32(2)
  tree = batch._replace(**jax.tree.map(jnp.asarray, fields))
  lone = {name: value.copy() for name, value in fields.items()}
  lone["tokens"][2], lone["num_rows"], lone["num_segments"] = 77, np.int32(3), np.int32(1)
  lone["segment_length"][:2] = (3, 0)

  weights = params()  # Outside of a trace, since they are kept.

  @jax.jit
  def run(batch, copies):
    pages = kv_layout.empty_pages(decide(CONFIG, NUMERICS), num_pages=9, page_size=PAGE_SIZE)
    return transformer.forward(
      weights, batch, pages, key_copies=copies, decoder=decide(CONFIG, NUMERICS)
    )[0]

  i32 = functools.partial(jnp.asarray, dtype=jnp.int32)
  copies = KeyCopies(i32((0, 1, 0, 0)), i32((*others, 0, 0)), i32(2))
  found = np.asarray(run(tree, copies), np.float32)
  alone = batch._replace(**jax.tree.map(jnp.asarray, lone))
  for others in (None, copies._replace(count=i32(0))):
    expected = np.asarray(run(alone, others), np.float32)
    np.testing.assert_array_equal(found[[0, 1, 4]], expected[:3])
  without = np.asarray(run(tree, copies._replace(count=i32(0))), np.float32)
  assert (without[4] != found[4]).any() and (without[:4] == found[:4]).all()  # The twin.


@pytest.mark.long
def test_rows_of_several_adapters_have_the_bits_of_each_alone():
  batch, places = sequences((3, 4, 1))
  rng = np.random.default_rng(6)
  draw = lambda shape: jnp.asarray((0.3 * rng.standard_normal(shape.shape)).astype(np.float32))
  named = {
    name: (jax.tree.map(draw, lora.shapes(CONFIG, NUMERICS, rank, targets)), scale)
    for name, rank, targets, scale in (("a", 3, lora.TARGETS, 0.5), ("b", 1, ("qkv", "down"), 2.0))
  }

  @jax.jit
  def hidden(params, adapters):
    pages = kv_layout.empty_pages(decide(CONFIG, NUMERICS), num_pages=9, page_size=PAGE_SIZE)
    return transformer.forward(
      params, batch, pages, adapters=adapters, decoder=decide(CONFIG, NUMERICS)
    )[0]

  chosen = adapters_lib.stacked(params(), named, pads=False)
  rows = np.zeros(ROWS, np.int32)
  names = {3: "a", 4: "b", 1: ""}
  for length, name in names.items():
    rows[places[length]] = chosen.index_of[name]
  mixed = np.asarray(hidden({**params(), "adapters": chosen.forms}, jnp.asarray(rows)))
  for length, name in names.items():
    alone = hidden(lora.attach(params(), *named[name]) if name else params(), None)
    np.testing.assert_array_equal(mixed[places[length]], np.asarray(alone)[places[length]])


@pytest.mark.long
def test_a_gradient_moves_no_bit_of_the_scores():
  args, places = arguments((3, 4, 1), samples=False)

  def loss(params, *rest):
    hidden, (tokens, scores) = forward(params, *rest, NUMERICS)
    value = jnp.mean(scores.logprob) + jnp.mean(scores.raw_logprob) + jnp.mean(scores.entropy)
    return value, (hidden, (tokens, scores))

  (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
  expected, _ = run((3, 4, 1), samples=False)
  for rows in places.values():
    np.testing.assert_array_equal(numbers(*found)[rows], expected[rows])
  assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.long
def test_requests_say_alone_what_they_say_together():
  def engine(most):
    return engine_lib.Engine(
      Model(CONFIG, params(), NUMERICS),
      config=engine_lib.EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=17,
        max_num_seqs=most,
        max_model_len=128,
        batch_size_buckets=(ROWS,),
      ),
      key=jax.random.key(1),
    )

  requests = [
    Request(
      request_id=str(i),
      prompt=tuple(range(3 + 5 * i)),
      sampling=SamplingParams(max_tokens=4, temperature=float(i), top_k=3 if i == 2 else 0),
      seed=i,
    )
    for i in range(4)
  ]

  def tokens_and_bits(completion):
    return completion.tokens, completion.behaviour_logprobs.tobytes()

  shared = engine(4)
  together = {done.request_id: tokens_and_bits(done) for done in shared.generate(requests)}
  assert len({tokens for tokens, _ in together.values()}) > 1
  for request in requests:
    (alone,) = shared.generate([request])
    assert tokens_and_bits(alone) == together[request.request_id]
