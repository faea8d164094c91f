"""Compares trees of arrays bit for bit, and names the leaves that differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_equal_bits(found: Any, expected: Any) -> None:
  """Asserts equal structures and, for each leaf, equal dtype, shape and bytes.

  Hence -0.0 is not 0.0, a NaN equals itself only, and float32 is not bfloat16.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(found)
  others, wanted = jax.tree.flatten(expected)
  assert structure == wanted, f"got {structure}, expected {wanted}"
  pairs = [(jax.tree_util.keystr(path), leaf, other) for (path, leaf), other in zip(leaves, others)]
  differing = [f"{path}: {how}" for path, *pair in pairs if (how := _difference(*pair))]
  assert not differing, "\n".join(differing)


def _difference(leaf: Any, other: Any) -> str:
  """Returns how a leaf differs from the expected one; "" if it does not."""
  (dtype, array), (wanted, expected) = _array_of(leaf), _array_of(other)
  if (dtype, array.shape) != (wanted, expected.shape):
    return f"got {dtype}{list(array.shape)}, expected {wanted}{list(expected.shape)}"
  if array.tobytes() == expected.tobytes():
    return ""
  one, two = array.reshape(-1), expected.reshape(-1)
  places = [i for i in range(array.size) if one[i].tobytes() != two[i].tobytes()]
  at = tuple(map(int, np.unravel_index(places[0], array.shape)))
  return f"{len(places)} of {array.size} differ, at {at} got {array[at]}, expected {expected[at]}"


def _array_of(leaf: Any) -> tuple[str, np.ndarray]:
  """Returns the dtype and the values of a leaf; for a sampling key, those of its data."""
  is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
  return str(leaf.dtype if is_key else array.dtype), array
