"""A small engine with the vocabulary of the shipped tokenizer, and requests for it."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import tiny_model

from seerjax import models, parallel
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import parameters, tokenizer as tokenizer_lib
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

# The tiny model with the vocabulary of the shipped tokenizer.
TOKENIZER = tokenizer_lib.load(pathlib.Path(models.__file__).parent / "nano")
CONFIG = dataclasses.replace(tiny_model.CONFIG, vocab_size=512)
NUMERICS = tiny_model.NUMERICS
# Eight usable pages, so that one request of the full context fills the memory.
SIZES = EngineConfig(
  page_size=8, num_pages=9, max_num_seqs=4, max_model_len=64, batch_size_buckets=(4, 16)
)


@functools.cache
def params(seed: int = 0):
  master = parameters.init(jax.random.key(seed), CONFIG, NUMERICS)
  return parameters.compute_params(jax.tree.map(lambda leaf: leaf * 5, master), NUMERICS)


def runner() -> runner_lib.Runner:
  """Two programs for all tests of a process; a third trace, in any test, fails that test."""
  return _runner(jax.config.jax_numpy_dtype_promotion)


@functools.cache
def _runner(dtype_promotion: str) -> runner_lib.Runner:
  del dtype_promotion  # Part of JAX's trace context: some folders set it to strict.
  return runner_lib.Runner(decide(CONFIG, NUMERICS), parallel.make_mesh(), max_programs=2)


def make_engine(
  config=SIZES, *, seed=0, tokenizer=TOKENIZER, kind: type[Engine] = Engine, **others
) -> Engine:
  return kind(
    Model(CONFIG, params(seed), NUMERICS, tokenizer),
    config=config,
    key=jax.random.key(3),
    runner=runner(),
    policy_version=seed,
    **others,
  )


def tokenizer_fields() -> dict:
  """Returns the fields of `TOKENIZER`, for a derived tokenizer; `vars` would include its cached
  values."""
  return {field.name: getattr(TOKENIZER, field.name) for field in dataclasses.fields(TOKENIZER)}


def request(name="a", prompt=(5, 6, 7), *, seed=0, group="", **sampling) -> Request:
  sampling.setdefault("max_tokens", 12)
  return Request(
    request_id=name,
    prompt=tuple(prompt),
    sampling=SamplingParams(**sampling),
    seed=seed,
    group_id=group,
  )


def run(engine: Engine, max_steps: int = 300) -> dict:
  """Steps until nothing is unfinished, at most `max_steps` times; returns completions by id."""
  for _ in range(max_steps):
    if not engine.num_unfinished:
      break
    engine.step()
  assert engine.num_unfinished == 0, f"got requests unfinished after {max_steps} steps"
  return {completion.request_id: completion for completion in engine.poll()}


def tokens_from(start: int, count: int) -> tuple[int, ...]:
  return tuple((start + 7 * index) % 500 for index in range(count))


def same(left, right) -> bool:
  """Returns whether two completions have the same tokens and the same bits."""
  return left.tokens == right.tokens and all(
    np.array_equal(getattr(left, name), getattr(right, name))
    for name in ("behaviour_logprobs", "raw_logprobs")
  )
