"""Key/value heads that several slabs share: each of these slabs has a copy of the head's columns.

    4 query heads, 2 key/value heads, 4 slabs; columns of a slab: query | key | value

    slab     0         1         2         3
    heads    0 | 0 | 0   1 | 0 | 0   2 | 1 | 1   3 | 1 | 1

The copies of a head are in consecutive slabs and always have equal bits: they are filled from one
head, and each gets the gradient of the head, the sum of its copies' gradients
(`trainer.head_gradients`). Files have the head once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.models.config import TransformerConfig

# The weights of a layer with columns of keys and values, and those of its adapter.
WEIGHTS = (("qkv",), ("qkv_bias",), ("qkv", "b"), ("qkv_lora", "b"))


class Shared(NamedTuple):
  """The shared heads of one weight f[..., r, ..., columns], or of its gradient.

  Attributes:
    copies: number of slabs that share a head; of a stacked weight f[l, r, ...] one for each layer.
    columns: number of the last columns of a slab, those of its key and value.
    axis: the axis of slabs.
  """

  copies: tuple[int, ...]
  columns: int
  axis: int


def of_leaves(tree: Any, config: TransformerConfig, num_slabs: int) -> list[Shared | None]:
  """Returns the shared heads of each leaf of weights, adapters or gradients; None if it has none.

  Layers may be stacked. Adapters may be attached (`lora.attach`) or by themselves.
  """
  kinds = [layer.attention for layer in config.layers]
  all_copies = [kind.copies(num_slabs) for kind in kinds]

  def of(path: tuple[Any, ...]) -> Shared | None:
    names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    if names[0] != "layers" or names[1:] not in WEIGHTS:
      return None
    indices = [key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)]
    own = indices or list(range(len(kinds)))
    copies = tuple(all_copies[index] for index in own)
    if max(copies) == 1:
      return None
    kind = kinds[own[0]].in_slabs(num_slabs)
    columns = 2 * kind.num_kv_heads // num_slabs * kind.head_dim
    return Shared(copies, columns, 0 if indices else 1)

  return [of(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def filled(tree: Any, config: TransformerConfig, num_slabs: int) -> Any:
  """Returns weights or adapters with every copy of a head equal to the first; layers listed."""

  def of(leaf: Any, shared: Shared | None) -> Any:
    if shared is None:
      return leaf
    (count,) = shared.copies
    first = jnp.repeat(leaf[::count, ..., -shared.columns :], count, axis=0)
    return jnp.concatenate([leaf[..., : -shared.columns], first], axis=-1)

  leaves, structure = jax.tree.flatten(tree)
  each = zip(leaves, of_leaves(tree, config, num_slabs), strict=True)
  return structure.unflatten([of(*pair) for pair in each])


def check(tree: Any, config: TransformerConfig, num_slabs: int, *, what: str) -> None:
  """Refuses weights or adapters in which copies of one head differ; layers listed.

  Raises:
    ValueError: naming the first path that differs.
  """
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  for (path, leaf), shared in zip(flat, of_leaves(tree, config, num_slabs), strict=True):
    if shared is None:
      continue
    (count,) = shared.copies
    keys = np.asarray(leaf[..., -shared.columns :])
    if not np.array_equal(keys, np.repeat(keys[::count], count, axis=0)):
      raise ValueError(
        f"{what}{jax.tree_util.keystr(path)}: got different copies of a key/value head that"
        f" {count} slabs share, expected equal ones; fill them with shared_heads.filled."
      )
