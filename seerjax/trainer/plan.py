"""Estimates a device's memory for training, before anything is computed.

    kept through the run    masters, moments of the optimiser, weights in compute dtype
    during an update        gradient sums, activations, scratch pages

All but the activations are exact counts. Activations estimate XLA's temporaries by the sums below,
fitted to `memory_analysis` of compiled gradient programs (docs/results/memory.md): the head, the
most expensive layer, and what every layer keeps for the backward pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from seerjax.layer_kinds import LayerConfig
from seerjax.models import transformer
from seerjax.models.decoder import Decoder
from seerjax.trainer import packing

MIB = 2**20
# Fitted: f32 copies of the embedding table in the head's gradient.
HEAD_TABLES = 2.8
# Fitted: f32 copies of one layer's weights in its gradient.
LAYER_WEIGHTS = 3.4
# Fitted: f32 copies of all layers' weights, if the layers are a loop: the loop stacks gradients.
LOOP_WEIGHTS = 0.7
# Counted: f32 arrays over all positions in attention's gradient, per query head and per KV head.
QUERY_ARRAYS, KEY_ARRAYS = 5, 6
# Fitted: bytes per row and feature kept of a rematerialised layer, in either dtype; and arrays of
# features, queries and keys kept of a layer that is not rematerialised.
KEPT_BYTES, KEPT_ARRAYS = 6, 5
# Temporaries of an update, in copies of the trained weights: clipped gradients and updates.
UPDATE_COPIES = 1.7


class Plan(NamedTuple):
  """Estimated bytes of one device.

  Attributes:
    masters: trained f32 weights.
    moments: state of the optimiser.
    weights: weights that engine and trainer run, if they are not the masters.
    sums: gradient sums that exist at the same time.
    activations: temporaries of a gradient (estimate).
    scratch: keys and values of a micro-batch.
    update: temporaries of an update (estimate).
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
    """Bytes held throughout the run, including sampling."""
    return self.masters + self.moments + self.weights

  @property
  def learning(self) -> int:
    """Peak of the additional bytes while training."""
    return max(self.sums + self.activations + self.scratch, self.masters + self.update)

  def describe(self) -> str:
    """Returns a one-line summary in MiB."""
    parts = ("masters", "moments", "weights", "sums", "activations", "scratch")
    names = dict(
      weights="weights to run", sums="gradient sums", scratch="scratch pages",
    )  # fmt: skip
    values = self._asdict()
    return ", ".join(f"{values[part] / MIB:,.0f} {names.get(part, part)}" for part in parts)


def num_sums(num_runs: int) -> int:
  """Returns the maximum number of simultaneous gradient sums: one run's own and the tree's."""
  return max((1 + index.bit_count() for index in range(num_runs)), default=0)


def tree_bytes(tree: Any) -> int:
  """Returns the bytes of all arrays (or shapes) of a pytree."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def scratch_bytes(
  decoder: Decoder,
  layout: packing.Layout,
  page_size: int,
  remat: transformer.Remat,
  tensor_parallel_size: int = 1,
) -> int:
  """Returns the bytes of a micro-batch's KV pages on one of `tensor_parallel_size` devices.

  Pages of all layers are counted, or of one layer if layers are rematerialised or the backend is
  native, which recreate them.
  """
  positions, item = layout.num_pages * page_size, decoder.numerics.dtype.itemsize
  slabs = decoder.numerics.reduction_shards
  kinds = [kind.attention.in_slabs(slabs) for kind in decoder.shape.layers]
  of_layers = [
    2 * positions * (kind.num_kv_heads // tensor_parallel_size) * kind.head_dim * item
    for kind in kinds
  ]
  is_kept = remat == "none" and decoder.backend.traits.keeps_pages
  return sum(of_layers) if is_kept else max(of_layers)


def activation_bytes(
  decoder: Decoder,
  layout: packing.Layout,
  page_size: int,
  remat: transformer.Remat,
  tensor_parallel_size: int = 1,
) -> int:
  """Estimates a gradient's temporary memory in bytes, excluding KV pages.

  Counts one of `tensor_parallel_size` devices, each with a part of the table, the heads and each
  layer.
  """
  model = decoder.shape
  rows, d = layout.num_rows, model.hidden_size
  item = decoder.numerics.dtype.itemsize
  positions = layout.num_pages * page_size
  head = HEAD_TABLES * model.vocab_size * d * 4 / tensor_parallel_size

  def of_layer(kind: LayerConfig) -> tuple[float, float, float]:
    """Returns the bytes while the layer runs, those of its weights in a loop, and those kept."""
    own = kind.attention.in_slabs(decoder.numerics.reduction_shards)
    inner = kind.feed_forward.all_features // tensor_parallel_size
    queries, keys = (
      heads * own.head_dim // tensor_parallel_size for heads in (own.num_heads, own.num_kv_heads)
    )
    weights = d * (2 * queries + 2 * keys) + 3 * d * inner
    attention = positions * (QUERY_ARRAYS * queries + KEY_ARRAYS * keys) * 4
    if remat != "none":
      kept = KEPT_BYTES * d
    elif decoder.backend.traits.keeps_gate_up:
      # Counted: input, queries, keys, values and attention's result; in float32 the rows after
      # attention, gate and up.
      kept = 2 * item * (d + queries + keys) + 4 * (d + 2 * inner)
    else:
      kept = KEPT_ARRAYS * item * (d + queries + keys)
    return max(attention, LAYER_WEIGHTS * weights * 4), LOOP_WEIGHTS * weights * 4, rows * kept

  running, stacked, kept = zip(*map(of_layer, model.layers), strict=True)
  stacks = sum(stacked) if decoder.pages.num_pooled else 0
  # Offloaded inputs are in host memory, except that of the current layer.
  num_kept = max(kept) if remat == "layer_offloaded" else sum(kept)
  return int(head + max(running) + stacks + num_kept)
