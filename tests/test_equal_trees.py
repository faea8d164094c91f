"""Trees are equal if their bits are, and leaves that differ are named."""

from __future__ import annotations

from equal_trees import assert_equal_bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def tree_of(leaf):
  return {"layers": [jnp.ones(3), (leaf,)]}


SAME = [
  np.float32([[1, -0.0], [np.nan, np.inf]]),
  jnp.zeros((0, 2), jnp.bfloat16),
  jax.random.key(1),
  3,
]
OTHER = [
  (np.float32([0.0, 1]), np.float32([-0.0, 1]), "1 of 2 differ, at (0,) got 0.0, expected -0.0"),
  (jnp.ones((2, 2)).at[1, 0].set(3), jnp.ones((2, 2)), "1 of 4 differ, at (1, 0) got 3.0"),
  (np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32), "got nan"),
  (jnp.ones(2), jnp.ones(2, jnp.bfloat16), "got float32[2], expected bfloat16[2]"),
  (jnp.ones(2), jnp.ones(()), "got float32[2], expected float32[]"),
  (jax.random.key(1), jax.random.key(2), "1 of 2 differ"),
  (jax.random.key(1), jax.random.key_data(jax.random.key(1)), "got key<fry>[2], expected uint32"),
]


@pytest.mark.parametrize("leaf", SAME)
def test_a_tree_is_equal_to_itself_with_arrays_of_numpy(leaf):
  assert_equal_bits(tree_of(leaf), tree_of(leaf))
  if not isinstance(leaf, int) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    assert_equal_bits(tree_of(leaf), tree_of(np.asarray(leaf)))


@pytest.mark.parametrize(("found", "expected", "message"), OTHER)
def test_what_differs_is_named(found, expected, message):
  with pytest.raises(AssertionError) as caught:
    assert_equal_bits(tree_of(found), tree_of(expected))
  assert str(caught.value).startswith("['layers'][1][0]: ") and message in str(caught.value)


def test_other_structures_differ():
  with pytest.raises(AssertionError, match="expected PyTreeDef"):
    assert_equal_bits(tree_of(1.0), {"layers": [jnp.ones(3), [1.0]]})
