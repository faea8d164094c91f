"""A decoder has nothing open, and equal ones share compiled programs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends.tiled import Tiled
from seerjax.models import kv_layout, parameters
from seerjax.models.decoder import Decoder, PageLayout, decide, without_model
from seerjax.numerics import NumericsConfig

SHAPE, NUMERICS = tiny_model.CONFIG, tiny_model.NUMERICS
TWO_HEADS = SHAPE.changed(num_heads=4, num_kv_heads=2)


def test_what_is_left_open_is_decided_and_the_rest_is_kept():
  found = decide(TWO_HEADS, NumericsConfig(backend="tiled", compute_dtype="bfloat16"))
  assert found.numerics == NumericsConfig(
    backend="tiled", row_tile=16, reduction_shards=4, compute_dtype="bfloat16"
  )
  assert found.backend == Tiled(found.numerics)
  assert (found.shape, found.axis, found.is_plain) == (TWO_HEADS, None, False)
  assert decide(TWO_HEADS, found.numerics) == found
  assert found.describe() == "bfloat16 by 'tiled', 4 slabs"
  assert found.fingerprint("layer") == numerics_lib.fingerprint(found.numerics, "layer")


def test_slabs_that_do_not_divide_are_refused_with_both_numbers():
  with pytest.raises(ValueError, match=r"got 8, expected a divisor of num_heads=4; use .*=4"):
    decide(TWO_HEADS, NUMERICS)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("backend", "auto", r"backend: got 'auto', expected a concrete .* nothing open"),
    ("row_tile", 0, r"row_tile: got 0, expected the number for this platform, because a Decoder"),
    ("reduction_shards", 0, r"reduction_shards: got 0, expected the number for the model, because"),
  ],
)
def test_a_decoder_with_something_open_is_none(field, value, message):
  left = dataclasses.replace(NUMERICS, **{field: value})
  with pytest.raises(ValueError, match=f"NumericsConfig.{message}"):
    Decoder(SHAPE, left, Tiled(NUMERICS))


def test_without_a_model_the_slabs_stay_as_asked():
  for slabs in (0, 4):
    asked = NumericsConfig(backend="tiled", reduction_shards=slabs)
    assert without_model(asked) == Tiled(dataclasses.replace(asked, row_tile=16))


def test_pages_are_laid_out_as_the_decoder_says():
  row, deep = (
    decide(SHAPE.changed(num_layers=count), tiny_model.NATIVE)
    for count in (parameters.UNROLLED_LAYERS, parameters.UNROLLED_LAYERS + 1)
  )
  assert (row.pages, deep.pages) == (PageLayout(("cz", "zc"), 0), PageLayout(("cz", "zc"), 9))
  for decoder in (row, deep):
    pages = kv_layout.empty_pages(decoder, num_pages=2, page_size=8)
    assert kv_layout.is_pool(pages, decoder) == bool(decoder.pages.num_pooled)


def test_the_axis_is_the_one_that_a_mesh_spreads_slabs_over():
  alone = decide(SHAPE, NUMERICS)
  assert alone.on(parallel.make_mesh()) == alone
  shared = alone.on(parallel.make_mesh(tensor_parallel_size=2))
  assert shared == dataclasses.replace(alone, axis=parallel.MODEL_AXIS)
  assert shared.on(parallel.make_mesh(data_parallel_size=2)) == alone


def test_equal_decoders_are_one_key_of_a_program_and_others_are_not():
  traced = []

  @functools.partial(jax.jit, static_argnames="decoder")
  def program(x, *, decoder):
    traced.append(decoder)
    return x + decoder.shape.vocab_size

  one, same = (decide(dataclasses.replace(SHAPE), dataclasses.replace(NUMERICS)) for _ in range(2))
  assert one is not same and one == same and hash(one) == hash(same)
  for decoder in (one, same, one.for_rows(is_plain=False)):
    program(jnp.float32(0), decoder=decoder)
  assert len(traced) == 1
  others = (
    one.for_rows(is_plain=True),
    dataclasses.replace(one, axis="model"),
    decide(SHAPE, tiny_model.BFLOAT16),
    decide(dataclasses.replace(SHAPE, norm_eps=1e-5), NUMERICS),
  )
  for other in others:
    program(jnp.float32(0), decoder=other)
  assert traced == [one, *others]
