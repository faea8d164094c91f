"""The decoder as a Flax module, and logits of whole sequences."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int
from seerjax.models import decoder as decoder_lib, head, shared_heads, transformer
from seerjax.models.config import TransformerConfig
from seerjax.models.decoder import Decoder
from seerjax.models.kv_layout import ScratchPages
from seerjax.models.parameters import Params, compute_params, init, shapes
from seerjax.types import TokenBatch


class Transformer(nnx.Module):
  """The decoder as a Flax NNX module.

  It holds the master weights as `nnx.Param`s under `params`. `pure_params` returns the pytree that
  `forward`, the engine and the trainer take, and `update_weights` sets the weights from one:

    module -> pure_params() -> rl.train, ttt.discover -> state.params -> update_weights() -> module

  """

  def __init__(
    self,
    config: TransformerConfig,
    numerics: numerics_lib.NumericsConfig,
    *,
    rngs: nnx.Rngs | None = None,
    params: Params | None = None,
  ):
    """Creates a module.

    Args:
      config: shape of the model.
      numerics: the numerics configuration.
      rngs: its stream `params` initialises new weights.
      params: f32 master weights, such as those of `huggingface.load`; instead of `rngs`.

    Raises:
      ValueError: for neither or both, and for weights of another shape.
    """
    if (rngs is None) == (params is None):
      given = "neither" if rngs is None else "both"
      raise ValueError(
        f"Transformer: got {given} of rngs and params, expected exactly one; rngs initialise new"
        " weights."
      )
    self.config = config
    self.decoder = decoder_lib.decide(config, numerics)
    self.numerics = numerics = self.decoder.numerics
    if params is None:
      assert rngs is not None
      params = init(rngs.params(), config, numerics)
    self._check(params)
    self.params = nnx.data(jax.tree.map(nnx.Param, params))

  def _check(self, params: Params) -> None:
    """Refuses weights of another model, dtype or layout."""
    layout = shapes(self.config, self.numerics.reduction_shards)
    expected = dict(jax.tree_util.tree_leaves_with_path(layout))
    got = dict(jax.tree_util.tree_leaves_with_path(params))
    for path in sorted({*expected, *got}, key=jax.tree_util.keystr):
      have, want = (
        f"{leaf.dtype.name}{list(leaf.shape)}" if leaf is not None else "nothing"
        for leaf in (got.get(path), expected.get(path))
      )
      if have != want:
        raise ValueError(
          f"Transformer.params{jax.tree_util.keystr(path)}: got {have}, expected {want}; pass"
          " master weights for this config and these numerics."
        )

  def update_weights(self, params: Params) -> None:
    """Copies master weights that were trained elsewhere into the module's `nnx.Param`s.

    Optimizers that were created for this module stay valid.

    Raises:
      ValueError: for weights of another shape; the module keeps its own.
    """
    self._check(params)

    def take(held: nnx.Param, leaf: Array) -> None:
      held[...] = jnp.asarray(leaf)

    jax.tree.map(take, self.params, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))

  def pure_params(self) -> Params:
    """Returns the master weights as a plain pytree.

    Of a key/value head that several slabs share, the first copy counts and gets the gradient.
    """
    params = jax.tree.map(
      lambda leaf: leaf[...], self.params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
    )
    return shared_heads.filled(params, self.config, self.numerics.reduction_shards)

  def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
    """Returns f32[b, t, v], logits of whole sequences."""
    return logits_of(
      compute_params(self.pure_params(), self.numerics), tokens, decoder=self.decoder
    )


def sequences_batch(
  batch_size: int, length: int, numerics: numerics_lib.NumericsConfig, page_size: int
) -> tuple[TokenBatch, int]:
  """Returns (TokenBatch of equal-length sequences with zero tokens, number of pages), numpy."""
  per_split = numerics.kv_split // page_size
  width = -(-length // numerics.kv_split) * per_split
  query_tile = numerics.query_tile
  per_sequence = -(-length // query_tile)
  rows = np.arange(batch_size * length, dtype=np.int32)
  sequence, position = rows // length, rows % length
  segment = np.arange(batch_size * per_sequence, dtype=np.int32)
  segment_sequence, first = segment // per_sequence, segment % per_sequence * query_tile
  # Any: the records are typed for device arrays, and this one is built on the host.
  fields: dict[str, Any] = dict(
    tokens=np.zeros_like(rows),
    positions=position,
    slots=((1 + sequence * width + position // page_size) * page_size + position % page_size),
    num_rows=np.int32(len(rows)),
    segment_start=segment_sequence * length + first,
    segment_length=np.minimum(length - first, query_tile).astype(np.int32),
    page_table=(
      1 + segment_sequence[:, None] * width + np.arange(width, dtype=np.int32)[None, :]
    ).astype(np.int32),
    num_segments=np.int32(len(segment)),
  )
  return TokenBatch(**fields), 1 + batch_size * width


def logits_of(
  params: Params,
  tokens: Int[Array, "b t"],
  *,
  decoder: Decoder,
) -> Float[Array, "b t v"]:
  """Returns f32[b, t, v], logits of sequences of equal length (`params` in compute dtype)."""
  hidden = hidden_of(params, tokens, decoder=decoder)
  logits = logits_of_hidden(params, hidden, decoder=decoder)
  return logits.reshape(*tokens.shape, -1)


def hidden_of(
  params: Params,
  tokens: Int[Array, "b t"],
  *,
  decoder: Decoder,
) -> Float[Array, "n d"]:
  """Returns f[b t, d], hidden rows of whole sequences before the final norm."""
  numerics = decoder.numerics
  batch_size, length = tokens.shape
  page_size = min(numerics.kv_split, 64)
  batch, num_pages = sequences_batch(batch_size, length, numerics, page_size)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens.reshape(-1))
  pages = ScratchPages(num_pages, page_size)
  hidden, _ = transformer.forward(params, batch, pages, decoder=decoder)
  return hidden


def logits_of_hidden(
  params: Params,
  hidden: Float[Array, "n d"],
  *,
  decoder: Decoder,
) -> Float[Array, "n v"]:
  """Returns f32[n, v], logits of hidden rows before the final norm."""
  backend = decoder.backend
  weights = {"final_norm": params["final_norm"], "head": head.table_of(params, decoder)}
  rows = functools.partial(head.logits_rows, backend, decoder.shape, None)
  return backend.map_rows(rows, weights, hidden, jnp.int32(hidden.shape[0]))
