"""The guide's table of state and pages per device is what the memory functions compute."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from seerjax import parallel
from seerjax.engine import sizes
from seerjax.models import parameters, presets
from seerjax.models.config import TransformerConfig
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.trainer import optimizer as optimizer_lib, shards, state as state_lib

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "devices.md"
MESHES, PAGE_SIZE, GIB, KIB = (1, 2, 4, 8), 64, 2**30, 2**10
NUMERICS = NumericsConfig(compute_dtype="bfloat16", backend="tiled")


def row_of(name: str) -> str:
  """Returns a row: weights and training state in GiB, keys and values of a token in KiB."""
  shape = presets.get(name)
  slabs, period = decide(shape, NUMERICS).numerics.reduction_shards, shape.period
  columns: list[list[str]] = [[], [], []]
  for count in MESHES:
    if slabs % count:
      continue
    # Every further period of layers adds as much as the second one.
    first = bytes_of(shape.changed(num_layers=period), count)
    numbers, more = first, shape.num_layers // period - 1
    if more:
      numbers = first + more * (bytes_of(shape.changed(num_layers=2 * period), count) - first)
    for column, number in zip(columns, numbers / (GIB, GIB, KIB), strict=True):
      column.append(f"{number:,.0f}" if number >= 100 else f"{number:.3g}")
  return f"| `{name}` | {slabs} | " + " | ".join(" / ".join(one) for one in columns) + " |"


def bytes_of(shape: TransformerConfig, count: int) -> np.ndarray:
  """Returns f64[3], bytes on one of `count` devices: weights, training state, a token's KV."""
  decoder = decide(shape, NUMERICS)
  masters = parameters.shapes(shape, decoder.numerics.reduction_shards)
  weights = parameters.rounded_shapes(masters, decoder.numerics.dtype)
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=1e-4))
  mesh = parallel.make_mesh(tensor_parallel_size=count)
  pages = sizes.page_bytes(decoder, page_size=PAGE_SIZE, tensor_parallel_size=count)
  state = state_lib.abstract_state(masters, optimizer, mesh)
  return np.asarray([
    shards.bytes_of(weights, parameters.specs_of(weights), mesh),
    sum(map(_bytes, jax.tree.leaves(state))),
    pages / PAGE_SIZE / count,
  ])  # fmt: skip


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
  assert leaf.sharding is not None
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def test_the_table_of_the_guide_is_computed():
  text = GUIDE.read_text()
  rows = [row_of(name) for name in presets.CONFIGS if not name.startswith("nano")]
  missing = [row for row in rows if row not in text]
  assert not missing, "\n".join(["got a guide without these rows:", *missing])
  assert text.count("\n| `") == len(rows)
