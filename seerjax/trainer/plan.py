"""What learning takes of a device's memory, before anything is computed.

    kept through the run    masters, moments of the optimiser, weights in compute dtype
    while it learns         gradient sums, activations, scratch pages

All but the activations are counted. Those are an estimate of XLA's temporaries, from the sums
below, which were fitted to `memory_analysis` of compiled gradient programs
(docs/results/memory.md): the head's, the dearest layer's, and what is kept of every layer for the
way back.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from seerjax import numerics as numerics_lib
from seerjax.models import config as model_config, transformer
from seerjax.trainer import packing

MIB = 2**20
# Fitted: f32 copies of the table that the head's gradient takes.
HEAD_TABLES = 2.8
# Fitted: f32 copies of one layer's weights, in its gradient.
LAYER_WEIGHTS = 3.4
# Counted: f32 arrays of all positions, by query heads and by key/value heads, in attention's.
QUERY_ARRAYS, KEY_ARRAYS = 5, 6
# Fitted: bytes a row and feature that are kept of a layer that is computed again, in either dtype;
# and arrays of features, queries and keys that are kept of one that is not.
KEPT_BYTES, KEPT_ARRAYS = 6, 5
# An update's temporaries, in copies of what learns: gradients that were clipped, and what is added.
UPDATE_COPIES = 1.7


class Plan(NamedTuple):
  """Bytes of one device.

  Attributes:
    masters: f32 weights that learn.
    moments: of the optimiser.
    weights: what engine and trainer run, where these are no masters.
    sums: gradients that are alive at once.
    activations: temporaries of a gradient, an estimate.
    scratch: keys and values of a micro-batch.
    update: temporaries of an update, an estimate.
  """

  masters: int
  moments: int
  weights: int
  sums: int
  activations: int
  scratch: int
  update: int

  @property
  def kept(self) -> int:
    """Bytes that are held while it samples, too."""
    return self.masters + self.moments + self.weights

  @property
  def learning(self) -> int:
    """Bytes that come on top while it learns, at the most."""
    return max(self.sums + self.activations + self.scratch, self.masters + self.update)

  def describe(self) -> str:
    """Returns one line in MiB."""
    parts = ("masters", "moments", "weights", "sums", "activations", "scratch")
    names = dict(
      weights="weights to run", sums="gradient sums", scratch="scratch pages",
    )  # fmt: skip
    values = self._asdict()
    return ", ".join(f"{values[part] / MIB:,.0f} {names.get(part, part)}" for part in parts)


def num_sums(num_runs: int) -> int:
  """Returns how many gradient sums are alive at once: a run's own and the tree's."""
  return max((1 + index.bit_count() for index in range(num_runs)), default=0)


def tree_bytes(tree: Any) -> int:
  """Returns the bytes of all arrays of a pytree, or of their shapes."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def scratch_bytes(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  layout: packing.Layout,
  page_size: int,
  remat: transformer.Remat,
  model_shards: int = 1,
) -> int:
  """Returns the bytes of a micro-batch's pages: of all layers, or of one.

  A layer's are made again where the layer is computed again, and natively in any case. They are
  those of one of `model_shards` devices.
  """
  positions = layout.num_pages * page_size
  heads = model.num_kv_heads // model_shards
  per_layer = 2 * positions * heads * model.head_dim * numerics.dtype.itemsize
  is_kept = remat == "none" and numerics.implementation != "native"
  return per_layer * (model.num_layers if is_kept else 1)


def activation_bytes(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  layout: packing.Layout,
  page_size: int,
  remat: transformer.Remat,
  model_shards: int = 1,
) -> int:
  """Returns about how many bytes of temporaries a gradient takes beside its pages.

  They are those of one of `model_shards` devices, each of which has a part of the table, of the
  heads and of each layer.
  """
  rows, d = layout.num_rows, model.hidden_size
  queries, keys = (
    heads * model.head_dim // model_shards for heads in (model.num_heads, model.num_kv_heads)
  )
  item = numerics.dtype.itemsize
  positions = layout.num_pages * page_size
  head = HEAD_TABLES * model.vocab_size * d * 4 / model_shards
  weights = d * (2 * queries + 2 * keys) + 3 * d * model.intermediate_size // model_shards
  attention = positions * (QUERY_ARRAYS * queries + KEY_ARRAYS * keys) * 4
  layer = max(attention, LAYER_WEIGHTS * weights * 4)
  kept = KEPT_ARRAYS * item * (d + queries + keys) if remat == "none" else KEPT_BYTES * d
  # In the host's memory but for the layer that is at work.
  num_kept = 1 if remat == "layer_offloaded" else model.num_layers
  return int(head + layer + num_kept * rows * kept)
