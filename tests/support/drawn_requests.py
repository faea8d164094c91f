"""Requests drawn by hypothesis, and each request's completion alone in a plain engine."""

from __future__ import annotations

import functools
import pathlib

from hypothesis import strategies as st
import tiny_model

from seerjax import models
from seerjax.engine import engine as engine_lib
from seerjax.engine.engine import EngineConfig
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.types import Completion, Request, SamplingParams

# Ids 3 to 63 are one character each, so that random texts contain random stop strings.
TOKENIZER = tokenizer_lib.load(pathlib.Path(models.__file__).parent / "nano")
CHARACTERS = TOKENIZER.decode(range(tiny_model.CONFIG.vocab_size))


def tokens(min_size: int, max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
  """Token ids; lengths are drawn first, so that long texts are as likely as short ones."""
  sized = st.integers(min_size, max_size).flatmap(lambda n: st.binary(min_size=n, max_size=n))
  return sized.map(lambda data: tuple(byte % tiny_model.CONFIG.vocab_size for byte in data))


def sometimes(strategy: st.SearchStrategy, min_size: int, max_size: int) -> st.SearchStrategy:
  """An empty tuple or, every other time, a tuple drawn from `strategy`."""
  some = st.lists(strategy, min_size=min_size, max_size=max_size).map(tuple)
  return st.booleans().flatmap(lambda is_it: some if is_it else st.just(()))


TOKEN = st.integers(0, tiny_model.CONFIG.vocab_size - 1)
RANGE = st.tuples(TOKEN, st.integers(1, 20)).map(
  lambda pair: (pair[0], min(sum(pair), tiny_model.CONFIG.vocab_size))
)
SAMPLING = st.fixed_dictionaries(
  dict(
    temperature=st.sampled_from([1.0, 0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 0, 1, 7]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
    logit_bias=sometimes(st.tuples(TOKEN, st.floats(-6.0, 6.0, width=32)), 1, 3),
    allowed_token_ranges=st.booleans().flatmap(
      lambda is_it: st.lists(RANGE, min_size=20, max_size=20).map(tuple) if is_it else st.just(())
    ),
    max_tokens=st.integers(1, 20),
    stop_token_ids=sometimes(TOKEN, 1, 6),
    stop=sometimes(st.text(CHARACTERS, min_size=1, max_size=2), 3, 8),
  )
)


def make_engine(
  config: EngineConfig, numerics, mesh=(1, 1), kind=engine_lib.Engine, **others
) -> engine_lib.Engine:
  """Returns an engine with a tokenizer; engines of one numerics and mesh share programs."""
  return tiny_model.make_engine(
    config, numerics, data_parallel_size=mesh[0], tensor_parallel_size=mesh[1], kind=kind,
    tokenizer=TOKENIZER,
    **others,
  )  # fmt: skip


@functools.cache
def plain_engine(numerics) -> engine_lib.Engine:
  return make_engine(tiny_model.ALONE, numerics)


@functools.cache
def alone(numerics, prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> Completion:
  """Returns the completion of a request that runs alone in a plain engine."""
  request = Request(request_id="alone", prompt=prompt, sampling=sampling, seed=seed)
  return plain_engine(numerics).generate([request])[0]
