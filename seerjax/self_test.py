"""Whether rows really are invariant here: measured on this backend before a run relies on it.

A tiny decoder of two layers runs the same positions in different company, and the hidden rows and
scores that differ are counted:

    whole     three tiles of rows under `value_and_grad`   the yardstick, as the trainer sees them
    tiles     two tiles under it; one tile after another   batches of other sizes, prompts in chunks
    alone     one sequence in a batch of its own
    decode    one row at a time, over pages                as the engine continues a prompt

Sequences lie across the end of the first split (what comes before them are pages of zeros), so that
merging is measured too. Two programs are compiled for it, which takes seconds. The measurement can
show that a backend is unfit; that it is fit is what the tests of the contract show.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import transformer
from seerjax.ops import logprobs, rotary, sampling, tiles
from seerjax.types import SamplingParams, TokenBatch, TokenScores

SEQUENCE = 6  # Positions of one sequence.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """What a measurement saw.

  Attributes:
    num_values: numbers that were compared.
    num_differing: of them, whose bits were not those of the same row in the largest batch.
    by_comparison: (name, differing, compared) of each comparison.
  """

  num_values: int
  num_differing: int
  by_comparison: tuple[tuple[str, int, int], ...]

  @property
  def is_invariant(self) -> bool:
    """No bit differs."""
    return self.num_differing == 0

  def __str__(self) -> str:
    counted = f"{self.num_differing} of {self.num_values} values differ"
    if self.is_invariant:
      return f"rows are invariant: {counted}"
    where = ", ".join(f"{name} {bad} of {all_}" for name, bad, all_ in self.by_comparison if bad)
    return f"rows are NOT invariant: {counted} ({where})"


def _model(numerics: numerics_lib.NumericsConfig) -> transformer.TransformerConfig:
  heads = max(numerics.reduction_shards or 8, 2)
  # Kernels multiply tiles of 64.
  width = 64 if numerics.uses_kernels else 8
  return transformer.TransformerConfig(
    family="llama",
    vocab_size=2 * width * heads,
    # A width at which XLA:CPU sums a row of 8 to 31 unlike one of more: of 72 or 256 features all
    # rows agreed, untiled too, and nothing would have been measured.
    hidden_size=128,
    intermediate_size=width * heads if numerics.uses_kernels else 12 * heads,
    num_layers=2,
    num_heads=2 * heads,
    num_kv_heads=heads,
    head_dim=width,
    rotary=rotary.RotaryConfig(head_dim=width),
    is_tied=False,
  )


def _params(
  config: transformer.TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> transformer.Params:
  """Weights from numpy (nothing to compile), large enough that every part matters."""
  rng = np.random.default_rng(0)

  def leaf(path, shape):
    noise = 0.15 * rng.standard_normal(shape.shape, np.float32)
    return jnp.asarray(noise + np.float32("norm" in path[-1].key), numerics.dtype)

  layout = transformer.shapes(config, numerics.reduction_shards)
  return jax.tree_util.tree_map_with_path(leaf, layout)


def _first_position(numerics: numerics_lib.NumericsConfig) -> int:
  """Returns where sequences begin: half of each is before the end of the first split."""
  return max(0, numerics.kv_split - SEQUENCE // 2)


def _splits(numerics: numerics_lib.NumericsConfig) -> int:
  return -(-(_first_position(numerics) + SEQUENCE) // numerics.kv_split)


def _rows(
  tokens: np.ndarray,
  first: int,
  num_rows: int,
  capacity: int,
  numerics: numerics_lib.NumericsConfig,
) -> TokenBatch:
  """Rows `first` to `first + num_rows` of sequences laid side by side, in a batch of `capacity`.

  A page is a split; sequence j owns `width` of them from 1 + j * width.
  """
  width = _splits(numerics)
  row = np.arange(first, first + num_rows)
  sequence, position = row // SEQUENCE, _first_position(numerics) + row % SEQUENCE
  page = 1 + sequence * width + position // numerics.kv_split
  is_start = (position % numerics.query_tile == 0) | (row % SEQUENCE == 0) | (row == first)
  starts = np.flatnonzero(is_start)

  def padded(values: np.ndarray) -> np.ndarray:
    missing = [(0, capacity - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values.astype(np.int32), missing)

  # Any: the records are typed as device arrays, and this one is made on the host.
  fields: dict[str, Any] = dict(
    tokens=padded(tokens[row]),
    positions=padded(position),
    slots=padded(page * numerics.kv_split + position % numerics.kv_split),
    num_rows=np.int32(num_rows),
    segment_start=padded(starts),  # A row has a segment of its own at most.
    segment_length=padded(np.diff(np.append(starts, num_rows))),
    page_table=padded(1 + sequence[starts][:, None] * width + np.arange(width)[None, :]),
    num_segments=np.int32(len(starts)),
  )
  return TokenBatch(**fields)


@functools.cache
def measure(numerics: numerics_lib.NumericsConfig) -> Finding:
  """Counts the bits that a row's company changes. Measured once for each numerics in a process.

  Args:
    numerics: any that can run here; an implementation without kernels refuses as `forward` does.

  Returns:
    Finding.
  """
  config = _model(numerics)
  numerics = transformer.numerics_for(config, numerics)
  params = _params(config, numerics)
  tile = numerics.row_tile
  total = 3 * tile
  num_sequences = -(-total // SEQUENCE)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, config.vocab_size, num_sequences * SEQUENCE)

  def batch_of(first: int, num_rows: int, capacity: int) -> TokenBatch:
    return _rows(tokens, first, num_rows, capacity, numerics)

  def scored(weights, rows, one):
    # The head without its sampling, whose sort and noise take longer to compile than all else.
    hidden, targets = rows
    logits = transformer.logits_rows(config, numerics, None, weights, hidden, one)
    return logprobs.score_rows(logits, logits / jnp.float32(0.7), targets, one, numerics)

  def scores_of(params, hidden, targets, num_rows):
    if numerics.uses_kernels:
      # One kernel samples and scores.
      count = targets.shape[0]
      parameters = sampling.sampling_rows([SamplingParams(temperature=0.7)] * count)
      _, scores = transformer.head(
        params, hidden, targets, jax.tree.map(jnp.asarray, parameters),
        jnp.zeros(count, jnp.uint32), jnp.zeros(count, jnp.int32), num_rows,
        numerics_lib.key(0), config=config, numerics=numerics,
      )  # fmt: skip
      return scores
    weights = {"final_norm": params["final_norm"], "head": params["head"]}
    return tiles.map_rows(scored, weights, (hidden, targets), num_rows, numerics)

  def run(params, pages, batch: TokenBatch):
    hidden, pages = transformer.forward(params, batch, pages, config=config, numerics=numerics)
    targets = (batch.tokens * 7 + 3) % config.vocab_size
    return hidden, scores_of(params, hidden, targets, batch.num_rows), pages

  def loss(params, pages, batch):
    hidden, scores, _ = run(params, pages, batch)
    # All that is returned is used: what XLA could remove would change the program around it.
    value = jnp.mean(scores.logprob) + jnp.mean(scores.raw_logprob) + jnp.mean(scores.entropy)
    return value, (hidden, scores)

  forward = jax.jit(run)
  backward = jax.jit(jax.value_and_grad(loss, has_aux=True))
  width = _splits(numerics)
  empty = transformer.empty_pages(
    config, numerics, num_pages=1 + num_sequences * width, page_size=numerics.kv_split
  )

  def numbers(hidden, scores: TokenScores, count: int) -> np.ndarray:
    """f32[count, d + 3]."""
    columns = [np.asarray(hidden, np.float32), *(np.asarray(s)[:, None] for s in scores)]
    return np.concatenate(columns, axis=1)[:count]

  def under_gradient(num_rows: int) -> np.ndarray:
    (_, (hidden, scores)), _ = backward(params, empty, batch_of(0, num_rows, total))
    return numbers(hidden, scores, num_rows)

  def in_steps(num_rows: int, step: int) -> np.ndarray:
    parts, pages = [], empty
    for first in range(0, num_rows, step):
      count = min(step, num_rows - first)
      hidden, scores, pages = forward(params, pages, batch_of(first, count, tile))
      parts.append(numbers(hidden, scores, count))
    return np.concatenate(parts)

  whole = under_gradient(total)
  found = {
    "two tiles": under_gradient(2 * tile),
    "tile by tile": in_steps(total, tile),
    "alone": in_steps(min(SEQUENCE, tile), tile),
    "decode": in_steps(SEQUENCE, 1),
  }
  # `!=` and not bits: a NaN, too, must not pass.
  compared = tuple(
    (name, int(np.sum(part != whole[: len(part)])), part.size) for name, part in found.items()
  )
  return Finding(
    num_values=sum(count for _, _, count in compared),
    num_differing=sum(bad for _, bad, _ in compared),
    by_comparison=compared,
  )


def describe(numerics: numerics_lib.NumericsConfig) -> str:
  """Returns one line: where we are, what runs, and what the measurement found."""
  devices = jax.devices()
  return (
    f"{devices[0].platform} ({devices[0].device_kind}, {len(devices)}"
    f" device{'s' if len(devices) > 1 else ''}), JAX {jax.__version__},"
    f" {numerics.implementation} {numerics.compute_dtype}: {measure(numerics)}"
  )


def require(numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses numerics whose rows are not invariant here.

  Raises:
    ValueError: with the finding.
  """
  finding = measure(numerics)
  if not finding.is_invariant:
    raise ValueError(
      f"self_test: got implementation={numerics.implementation!r} on"
      f" {jax.devices()[0].device_kind}, where {finding}; expected 0 that differ. Set"
      " NumericsConfig.implementation='tiled', or pass --bitwise=False to go on without equal bits."
    )
