"""A table divided over devices gives every token its row and its gradient, bit for bit."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import parallel
from seerjax.models import embedding

AXIS = parallel.MODEL_AXIS
ROWS_OF_SLAB, SLABS, FEATURES = 3, 8, 5
VOCABULARY = ROWS_OF_SLAB * SLABS
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
DEVICES = pytest.mark.parametrize("count", [2, 4, 8])
# Bits that an addition, or a conversion, would change.
SPECIAL = {
  jnp.float32: (0x80000000, 0x7FC12345, 0xFFC54321, 0x7F812345, 0x00000001, 0x7F800000),
  jnp.bfloat16: (0x8000, 0x7FD5, 0xFFC3, 0x7F95, 0x0001, 0x7F80),
}


def word_of(dtype) -> type[np.unsignedinteger]:
  return {2: np.uint16, 4: np.uint32}[jnp.dtype(dtype).itemsize]


def table_of(dtype) -> np.ndarray:
  """Random rows; first and last of every slab have a special value each."""
  rng = np.random.default_rng(5)
  table = rng.standard_normal((VOCABULARY, FEATURES)).astype(dtype)
  words = table.view(word_of(dtype))
  for index, row in enumerate(row for row in range(VOCABULARY) if row % ROWS_OF_SLAB != 1):
    words[row, index % FEATURES] = SPECIAL[dtype][index % len(SPECIAL[dtype])]
  return table


def tokens_of() -> np.ndarray:
  """Returns every token, and again the tokens at slab borders, in a drawn order."""
  borders = [row for row in range(VOCABULARY) if row % ROWS_OF_SLAB != 1]
  tokens = np.asarray([*range(VOCABULARY), *borders, 0, 0, VOCABULARY - 1], np.int32)
  return np.random.default_rng(6).permutation(tokens)


WHOLE, OWN = jax.P(), jax.P(AXIS)


def on_devices(function, count: int, *arguments, out=WHOLE):
  """Runs a function with its first argument's rows divided over `count` devices."""
  run = jax.shard_map(
    function,
    mesh=parallel.make_mesh(tensor_parallel_size=count),
    in_specs=(jax.P(AXIS), *(jax.P() for _ in arguments[1:])),
    out_specs=out,
    check_vma=False,
  )
  return np.asarray(jax.jit(run)(*arguments))


@pytest.mark.few(2)
@DTYPES
@DEVICES
def test_every_token_has_its_row_with_all_its_bits(dtype, count):
  table, tokens = table_of(dtype), tokens_of()
  found = on_devices(functools.partial(embedding.rows_of, axis=AXIS), count, table, tokens)
  assert found.dtype == table.dtype
  np.testing.assert_array_equal(found.view(word_of(dtype)), table[tokens].view(word_of(dtype)))
  one = np.asarray(jax.jit(functools.partial(embedding.rows_of, axis=None))(table, tokens))
  np.testing.assert_array_equal(one.view(word_of(dtype)), found.view(word_of(dtype)))


def test_one_collective_goes_forward_and_none_back():
  def gradient(table, tokens, cotangents):
    return jax.vjp(lambda t: embedding.rows_of(t, tokens, AXIS), table)[1](cotangents)[0]

  shapes = (
    jax.ShapeDtypeStruct((VOCABULARY, FEATURES), jnp.float32),
    jax.ShapeDtypeStruct((9,), jnp.int32),
    jax.ShapeDtypeStruct((9, FEATURES), jnp.float32),
  )

  def collectives(function, *shapes):
    run = jax.shard_map(
      function,
      mesh=parallel.make_mesh(tensor_parallel_size=4),
      in_specs=(jax.P(AXIS), *(jax.P() for _ in shapes[1:])),
      out_specs=jax.P(AXIS),
      check_vma=False,
    )
    text = jax.jit(run).lower(*shapes).compile().as_text() or ""
    return sum(text.count(f" {name}(") for name in ("all-reduce", "all-gather", "all-to-all"))

  assert collectives(functools.partial(embedding.rows_of, axis=AXIS), *shapes[:2]) == 1
  assert collectives(gradient, *shapes) == 0


def gradients(dtype, tokens):
  """Returns (table, cotangents f[n, d]) of sizes that put the order of a sum into its bits."""
  rng = np.random.default_rng(7)
  sizes = 10.0 ** rng.integers(-3, 4, (len(tokens), 1))
  cotangents = (rng.standard_normal((len(tokens), FEATURES)) * sizes).astype(dtype)
  return np.zeros((VOCABULARY, FEATURES), dtype), cotangents


def pulled(axis, table, tokens, cotangents):
  """The gradient of the table, f[v, d], this device's rows of it."""
  return jax.vjp(lambda t: embedding.rows_of(t, tokens, axis), table)[1](cotangents)[0]


@pytest.mark.few(2)
@DTYPES
@DEVICES
def test_the_gradient_adds_in_the_order_of_rows_as_on_one_device(dtype, count, seed):
  tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 96).astype(np.int32)
  table, cotangents = gradients(dtype, tokens)
  one = np.asarray(jax.jit(functools.partial(pulled, None))(table, tokens, cotangents))
  found = on_devices(functools.partial(pulled, AXIS), count, table, tokens, cotangents, out=OWN)
  assert found.dtype == dtype and found.tobytes() == one.tobytes()
  exact = np.zeros((VOCABULARY, FEATURES))
  np.add.at(exact, tokens, cotangents.astype(np.float64))
  rtol, atol = (2e-2, 60.0) if dtype == jnp.bfloat16 else (1e-5, 3e-3)
  np.testing.assert_allclose(found.astype(np.float64), exact, rtol=rtol, atol=atol)
  # The twin: rows that are added in another order have other bits.
  other = on_devices(
    functools.partial(pulled, AXIS), count, table, tokens[::-1].copy(), cotangents[::-1].copy(),
    out=OWN,
  )  # fmt: skip
  assert other.tobytes() != one.tobytes()


@pytest.mark.few(1)
@DTYPES
def test_twin_a_sum_of_floats_loses_bits(dtype):
  table, tokens = table_of(dtype), tokens_of()

  def summed(table, tokens):
    places = embedding.own_places(tokens, lax.axis_index(AXIS), table.shape[0])
    return lax.psum(table.at[places].get(mode="fill", fill_value=0), AXIS)

  found = on_devices(summed, 4, table, tokens).view(word_of(dtype))
  expected = table[tokens].view(word_of(dtype))
  minus_zero = SPECIAL[dtype][0]
  assert (expected == minus_zero).any() and not (found == minus_zero).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("shift", [-1, 1])
def test_twin_a_border_that_is_off_by_one_is_noticed(shift):
  table, tokens = table_of(jnp.float32), tokens_of()

  def shifted(table, tokens):
    places = embedding.own_places(tokens + shift, lax.axis_index(AXIS), table.shape[0])
    words = lax.bitcast_convert_type(table.at[places].get(mode="fill", fill_value=0), jnp.uint32)
    return lax.psum(words, AXIS)

  found = on_devices(shifted, 8, table, tokens)
  assert (found != table[tokens].view(np.uint32)).any()
