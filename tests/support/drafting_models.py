"""Draft models for tests: right, wrong, rounded, broken, and an engine of one slab to draft for."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import DraftProgram, numerics_of

ONE_SLAB = dataclasses.replace(tiny_model.NUMERICS, reduction_shards=1)
CONTEXT = 64
SIZES = EngineConfig(
  page_size=4, num_pages=65, max_sequences=4, max_context=CONTEXT, row_buckets=(32,)
)
KEY = 11
# One program, into which most of the tests' prompts do not fit whole.
CONFIG = DraftModelConfig(length=4, num_slots=3, row_buckets=(12,))


def rounded(params: parameters.Params) -> parameters.Params:
  """Weights as INT8 would have them, by rows of eight steps only, so that it shows."""
  def coarse(leaf):
    if leaf.ndim < 2:
      return leaf
    scale = jnp.maximum(jnp.abs(leaf).max(axis=-1, keepdims=True), 1e-9) / 8
    return (jnp.round(leaf / scale) * scale).astype(leaf.dtype)

  return jax.tree.map(coarse, params)


def draft_params(kind: str, numerics: numerics_lib.NumericsConfig) -> parameters.Params:
  """Weights of the kinds "same", "rounded", "other" (of another seed) and "nan"."""
  params = tiny_model.params(numerics, 1 if kind == "other" else 0)
  if kind == "rounded":
    return rounded(params)
  if kind == "nan":
    return {**params, "final_norm": params["final_norm"] * jnp.nan}
  return params


@functools.cache
def program(
  numerics: numerics_lib.NumericsConfig, config: DraftModelConfig, vocab_size: int = 64
) -> DraftProgram:
  shape = dataclasses.replace(tiny_model.CONFIG, vocab_size=vocab_size)
  return DraftProgram(
    config=shape,
    numerics=numerics_of(numerics, shape, CONTEXT),
    context=CONTEXT,
    num_slots=config.num_slots,
    width=config.width,
    row_buckets=config.row_buckets,
  )


def drafter(
  kind: str = "same",
  numerics: numerics_lib.NumericsConfig = ONE_SLAB,
  config: DraftModelConfig = CONFIG,
) -> ModelDrafter:
  shared = program(numerics, config)
  return ModelDrafter(
    Model(tiny_model.CONFIG, draft_params(kind, numerics), shared.numerics),
    context=CONTEXT,
    key=numerics_lib.key(KEY),
    config=config,
    program=shared,
  )


def make_engine(
  numerics: numerics_lib.NumericsConfig = ONE_SLAB,
  sizes: EngineConfig = SIZES,
  mesh: tuple[int, int] = (1, 1),
  **others,
) -> Engine:
  return Engine(
    Model(tiny_model.CONFIG, tiny_model.params(numerics), numerics),
    config=sizes,
    key=numerics_lib.key(KEY),
    runner=tiny_model.runner(numerics, *mesh),
    **others,
  )
