"""Draft models for tests (equal, rounded, unrelated, broken), and a one-slab target engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import tiny_model
import word_engine

from seerjax import numerics as numerics_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.speculation.budget import NOTHING, Budget, Choice
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import DraftProgram, decoder_of
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.speculation.suffix_drafter import SuffixDrafter

ONE_SLAB = dataclasses.replace(tiny_model.NUMERICS, reduction_shards=1)
CONTEXT = 64
# Pages that hold a whole answer: a draft ends at its sequence's last page, and these are small.
SIZES = EngineConfig(
  page_size=4,
  num_pages=65,
  max_num_seqs=4,
  max_model_len=CONTEXT,
  batch_size_buckets=(32,),
  reserved_tokens=0,
)
KEY = 11
# A single program, too small for most of the tests' prompts to fit whole.
CONFIG = DraftModelConfig(length=4, num_slots=3, batch_size_buckets=(12,))
# Step times where rows are almost free and a draft model's tokens are not.
TIMES = StepTimes(
  rows=(1, 64), seconds=(1.0, 1.5), drafting_seconds=0.02, draft_seconds=0.001
)  # fmt: skip
MODEL_TIMES = DraftTimes(once=0.05, position=0.02, token=0.001)


def rounded(params: parameters.Params) -> parameters.Params:
  """Weights rounded like INT8 by row, but to eight steps only, so that the rounding matters."""

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
    decoder=decoder_of(numerics, shape, CONTEXT),
    context=CONTEXT,
    num_slots=config.num_slots,
    width=config.width,
    batch_size_buckets=config.batch_size_buckets,
  )


def drafter(
  kind: str = "same",
  numerics: numerics_lib.NumericsConfig = ONE_SLAB,
  config: DraftModelConfig = CONFIG,
) -> ModelDrafter:
  shared = program(numerics, config)
  return ModelDrafter(
    Model(tiny_model.CONFIG, draft_params(kind, numerics), shared.decoder.numerics),
    context=CONTEXT,
    key=numerics_lib.key(KEY),
    config=config,
    program=shared,
  )


def suffix_budget() -> Budget:
  return Budget(TIMES)


def source_budget(max_width: int) -> Budget:
  """Returns a budget for both sources that plans by the times above."""
  return Budget(TIMES, model=MODEL_TIMES, max_width=max_width)


class DrawnSources(Budget):
  """Draws the source of every draft at random, so that each step uses every source."""

  def __init__(self, seed: int, max_width: int):
    super().__init__(TIMES, model=MODEL_TIMES, max_width=max_width)
    self._chooses = random.Random(seed)

  def plan(self, request_ids: Sequence[str], high: Collection[str] = ()) -> list[Choice]:
    return [self._drawn() for _ in request_ids]

  def _drawn(self) -> Choice:
    source = self._chooses.choice(("none", "suffix", "model", "both", "both"))
    lengths = [self._chooses.randint(1, self.config.num_speculative_tokens) for _ in "ab"]
    width = self._chooses.randint(1, self.max_width)
    match source:
      case "none":
        return NOTHING
      case "suffix":
        return Choice(source, lengths[0], 0, 1)
      case "model":
        return Choice(source, 0, lengths[1], width)
    return Choice("both", lengths[0], lengths[1], width)


def hybrid(
  kind: str = "same",
  numerics: numerics_lib.NumericsConfig = ONE_SLAB,
  config: DraftModelConfig = CONFIG,
) -> HybridDrafter:
  """Returns a suffix tree and a draft model of a kind, planned by the times above."""
  budget = source_budget(max_width=min(config.width, 4))
  return HybridDrafter(SuffixDrafter(budget=None), drafter(kind, numerics, config), budget)


def make_word_engine() -> Engine:
  """Returns an engine of one slab with the vocabulary of the shipped tokenizer."""
  shape = dataclasses.replace(tiny_model.SMALLEST, vocab_size=512)
  numerics = dataclasses.replace(ONE_SLAB, backend="native")
  params = parameters.init(numerics_lib.key(1), shape, numerics)
  return Engine(
    Model(shape, params, numerics, word_engine.TOKENIZER),
    config=dataclasses.replace(SIZES, decode_steps_per_call=1),
    key=numerics_lib.key(KEY),
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
