"""Raw log-probabilities have one path: a row's filter, bias or grammar changes no bit of them.

Rows of drawn models are sampled with drawn parameters, and their tokens are scored again: by rows
without parameters, and under a gradient. Then an engine's completions are scored by the other
readers of raw scores: prompt scoring, `Engine.top_logprobs` and the trainer. The twin takes the raw
scores of filtered rows from another backend, and the same comparison must fail.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import NamedTuple

import drawn_models
import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import tiny_model
import trainers

from pallas_kernels import gpu
from seerjax import numerics as numerics_lib
from seerjax.backends.numba_cpu import NumbaCpu
from seerjax.engine.engine import EngineConfig
from seerjax.models import config as model_config, head
from seerjax.models.decoder import decide
from seerjax.ops import penalties, rotary, sampling
from seerjax.trainer import losses, packing, step
from seerjax.types import Request, SamplingParams

ROWS = 32  # Rows of one draw.
KEY = numerics_lib.key(11)
KINDS = (
  ("native", "float32"),
  ("native", "bfloat16"),
  ("tiled", "float32"),
  ("tiled", "bfloat16"),
  ("pallas_interpreted", "bfloat16"),  # The kernels accept this dtype only.
)
BOTH = [tiny_model.NATIVE, tiny_model.NATIVE_BFLOAT16]
ALL = [*BOTH, tiny_model.NUMERICS, tiny_model.BFLOAT16]
NAMES = ["native f32", "native bf16", "tiled f32", "tiled bf16"]
EVENTS = ("rows", "special", "filtered", "biased", "grammars", "masks", "penalised", "greedy")


class Drawn(NamedTuple):
  """Rows of one head.

  Attributes:
    config: the model's config.
    numerics: the model's numerics.
    params: the head's weights.
    hidden: f[n, d].
    parameters: the rows' sampling parameters.
    seeds: u32[n].
    positions: i32[n].
  """

  config: model_config.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  params: dict[str, jax.Array]
  hidden: jax.Array
  parameters: sampling.SamplingRows
  seeds: np.ndarray
  positions: np.ndarray


def of_any_size(backend, dtype, rng):
  """Returns config and numerics as drawn, or of the one size that the kernels accept."""
  model = drawn_models.draw_model(rng)
  others = dict(backend=backend, compute_dtype=dtype)
  if backend != "pallas_interpreted":
    return model.config, dataclasses.replace(model.numerics, **others)
  config = model.config.changed(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=2,
    head_dim=64, rotary=rotary.RotaryConfig(head_dim=64),
  )  # fmt: skip
  others |= dict(reduction_shards=2, kv_split=int(rng.choice([64, 128, 256])))
  return config, dataclasses.replace(model.numerics, **others)


def draw(config, numerics, rng, events=None) -> Drawn:
  """Returns rows of a model's head."""
  slabs, width = numerics.reduction_shards, config.vocab_size // numerics.reduction_shards
  floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {
    "final_norm": 1 + 0.3 * floats(config.hidden_size),
    "head": 0.3 * floats(slabs, width, config.hidden_size),
  }
  hidden = jnp.asarray(floats(ROWS, config.hidden_size), numerics.dtype)
  return Drawn(
    config,
    numerics,
    jax.tree.map(lambda leaf: jnp.asarray(leaf, numerics.dtype), params),
    hidden,
    draw_parameters(rng, config.vocab_size, collections.Counter() if events is None else events),
    rng.integers(0, 2**32, ROWS, np.uint32),
    rng.integers(0, 9999, ROWS, np.int32),
  )


def draw_parameters(rng, vocab_size, events) -> sampling.SamplingRows:
  """Returns parameters of rows; every other row with a grammar has its own mask."""
  params = [drawn_models.draw_sampling(rng, vocab_size) for _ in range(ROWS)]
  rows = sampling.sampling_rows(params, [0] * ROWS)
  fields = penalties.empty((ROWS,), penalties.SHORTEST)
  for row, one in enumerate(params):
    prompt, answer = (rng.integers(0, vocab_size, 20).tolist() for _ in range(2))
    if one.has_penalties:
      penalties.write(fields, (row,), one, penalties.entries(one, prompt, answer))
      events["penalised"] += 1
  rows = rows._replace(**fields)
  mask = np.full((ROWS, -(-vocab_size // 32)), sampling.ALL_ALLOWED, np.uint32)
  for row, one in enumerate(params):
    is_masked = bool(one.allowed_token_ranges) and rng.random() < 0.5
    if is_masked:
      mask[row] = rng.integers(0, 2**32, mask.shape[1], np.uint32)
      token = int(rng.integers(*one.allowed_token_ranges[0]))
      mask[row, token // 32] |= np.uint32(1 << token % 32)
    events["rows"] += 1
    events["masks"] += is_masked
    events["greedy"] += one.temperature == 0
    events["filtered"] += bool(one.top_k) or one.top_p < 1 or one.min_p > 0
    events["biased"] += bool(one.logit_bias)
    events["grammars"] += bool(one.allowed_token_ranges)
  events["special"] += int(sampling.is_special(rows).sum())
  return rows._replace(mask=mask)


@functools.partial(jax.jit, static_argnames=("config", "numerics", "backend", "has_gradient"))
def scores_of(
  params, hidden, forced, parameters, seeds, positions, *, config, numerics, backend, has_gradient
):
  """Returns tokens and scores of rows and, if requested, the weight gradient of all scores."""

  def run(params):
    found = head.sample_and_score(
      params,
      hidden,
      forced,
      parameters,
      seeds,
      positions,
      jnp.int32(ROWS),
      KEY,
      decoder=decide(config, numerics, backend=backend),
    )
    return sum(map(jnp.sum, found[1])), found

  if has_gradient:
    (_, found), gradient = jax.value_and_grad(run, has_aux=True)(params)
    return found, gradient
  return run(params)[1]


def differing_rows(drawn: Drawn, backend=None, *, trains=False) -> int:
  """Returns the number of rows in which a comparison differs; `trains` adds the gradient's."""

  def scored(forced, parameters, *, has_gradient=False):
    return scores_of(
      drawn.params, drawn.hidden, forced, parameters, drawn.seeds, drawn.positions,
      config=drawn.config, numerics=drawn.numerics, backend=backend, has_gradient=has_gradient,
    )  # fmt: skip

  plain = sampling.sampling_rows([SamplingParams()] * ROWS)
  # Arrays of equal shapes, so that both calls use one program.
  plain = plain._replace(
    mask=np.full_like(drawn.parameters.mask, sampling.ALL_ALLOWED),
    **penalties.empty((ROWS,), penalties.SHORTEST),
  )
  tokens, scores = scored(np.full(ROWS, -1, np.int32), drawn.parameters)
  _, of_plain_rows = scored(tokens, plain)
  _, forced = scored(tokens, drawn.parameters)
  again = [forced]
  if trains:
    (_, trained), gradient = scored(tokens, drawn.parameters, has_gradient=True)
    assert all(np.isfinite(leaf.astype(jnp.float32)).all() for leaf in jax.tree.leaves(gradient))
    again.append(trained)
  words = lambda values: np.asarray(values).view(np.uint32)
  differs = words(of_plain_rows.raw_logprob) != words(scores.raw_logprob)
  for found in again:
    for one, other in zip(found, scores, strict=True):
      differs |= words(one) != words(other)
  return int(differs.sum())


@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", BOTH, ids=NAMES[:2])
def test_no_filter_of_a_row_moves_its_raw_score(numerics, seed, tell_events):
  events = collections.Counter()
  for number in range(4):
    rng = np.random.default_rng((seed, number))
    count = differing_rows(draw(tiny_model.CONFIG, numerics, rng, events))
    assert not count, f"{count} of {ROWS} rows differ, draw {number} of seed {seed}"
  tell_events("raw scores of rows", events, EVENTS)


@pytest.mark.long
@pytest.mark.parametrize("backend, dtype", KINDS)
def test_no_filter_of_five_hundred_rows_moves_a_raw_score(backend, dtype, seed, tell_events):
  if backend == "pallas_interpreted" and (reason := gpu.device_reason(interpret=True)):
    pytest.skip(reason)
  events = collections.Counter()
  for number in range(18):
    # Four draws per model share its programs.
    shape = of_any_size(backend, dtype, np.random.default_rng((seed, number // 4)))
    drawn = draw(*shape, np.random.default_rng((seed, 9, number)), events)
    count = differing_rows(drawn, trains=True)
    assert not count, f"{count} of {ROWS} rows differ, draw {number} of seed {seed}: {shape}"
  assert events["special"] >= 250 and events["rows"] >= 500
  tell_events(f"raw scores of rows, {backend} {dtype}", events, EVENTS)


# Readers of raw scores: the engine, prompt scoring, the trainer.

SIZES = EngineConfig(
  page_size=8, num_pages=60, max_num_seqs=6, max_model_len=64, batch_size_buckets=(24,)
)
LAYOUT = {
  "page_size": 8,
  "rows_per_micro_batch": 96,
  "max_num_seqs": 5,
  "max_sequence_tokens": 64,
}


@functools.cache
def trainer(numerics) -> step.Trainer:
  return trainers.make(decoder=decide(tiny_model.CONFIG, numerics), **LAYOUT)


def answered(numerics, rng, count):
  """Returns requests of one crowded engine, and their completions."""
  requests = [
    Request(
      request_id=str(name),
      prompt=tuple(rng.integers(0, 64, int(rng.integers(2, 30))).tolist()),
      sampling=drawn_models.draw_sampling(rng, tiny_model.CONFIG.vocab_size),
      seed=int(rng.integers(2**32)),
    )
    for name in range(count)
  ]
  engine = tiny_model.make_engine(SIZES, numerics)
  return engine, list(zip(requests, engine.generate(requests), strict=True))


def scored(engine, tokens):
  """Returns the scores of a prompt's tokens, but the first's."""
  found = []
  engine.add_request(
    Request(request_id="scored", prompt=tokens, sampling=SamplingParams(max_tokens=1)),
    prompt_top=0,
  )
  while engine.num_unfinished:
    found += [update.prompt for update in engine.step() if update.prompt is not None]
  engine.poll()
  (scores,) = found
  return [score for score, _ in scores]


def compare_readers(numerics, rng, count, events, *, trains=True):
  engine, answers = answered(numerics, rng, count)
  for request, found in answers:
    raw = tiny_model.bits(found.raw_logprobs)
    events["tokens"] += len(raw)
    events["restricted"] += len(raw) * bool(sampling.is_special(
      sampling.sampling_rows([request.sampling], [0])
    )[0])  # fmt: skip
    scores = scored(engine, (*request.prompt, *found.tokens))
    assert tiny_model.bits(scores[len(request.prompt) - 1 :]) == raw, f"scored: {request}"
    places = [found.tokens[:place] for place in range(len(found.tokens))]
    for place, top in enumerate(engine.top_logprobs(request, places, 16)):
      for token, score in top[()]:
        if token == found.tokens[place]:
          events["read"] += 1
          assert tiny_model.bits([score]) == [raw[place]], f"read: {request}, token {place}"
  if not trains:
    return
  advantages = np.ones((count, 1), np.float32)
  for replaced in ({}, {"sampling": SamplingParams()}):
    groups = [
      made_rollouts.of_pairs([(dataclasses.replace(request, **replaced), found)], place)
      for place, (request, found) in enumerate(answers)
    ]
    biases, decoder = sampling.MAX_LOGIT_BIAS, decide(tiny_model.CONFIG, numerics)
    batch = packing.pack(groups, advantages, decoder=decoder, num_biases=biases, **LAYOUT)
    _, _, scores = trainer(numerics).gradient(
      tiny_model.params(numerics), batch, losses.denominators(batch), None
    )
    mask = np.asarray(batch.loss_mask)
    events["trained"] += int(mask.sum())
    ours, engines = scores.raw_logprob[mask], batch.raw_logprobs[mask]
    assert tiny_model.bits(ours) == tiny_model.bits(engines)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", BOTH, ids=NAMES[:2])
def test_what_reads_raw_scores_reads_the_engines(numerics, seed, tell_events):
  events = collections.Counter()
  compare_readers(numerics, np.random.default_rng(seed), 8, events, trains=False)
  tell_events("readers of raw scores", events, ("tokens", "restricted", "read"))


@pytest.mark.long
@pytest.mark.parametrize("numerics", ALL, ids=NAMES)
def test_what_reads_five_hundred_raw_scores_reads_the_engines(numerics, seed, tell_events):
  events = collections.Counter()
  for part in range(2):
    compare_readers(numerics, np.random.default_rng((seed, part)), 45, events)
  assert events["restricted"] >= 500
  tell_events("readers of raw scores", events, ("tokens", "restricted", "read", "trained"))


# The twin.


class RawOfTiles(NumbaCpu):
  """Twin: a special row takes its raw scores from the program that filters it."""

  def head(self, stage, weights, rows, num_rows):
    tokens, scores = super().head(stage, weights, rows, num_rows)
    _, tiled = self._tiled.head(stage, weights, rows, num_rows)
    is_special = sampling.is_special(rows[2])
    raw = jnp.where(is_special, tiled.raw_logprob, scores.raw_logprob)
    return tokens, scores._replace(raw_logprob=raw)


def test_raw_scores_of_another_program_are_noticed():
  drawn = draw(tiny_model.CONFIG, tiny_model.NATIVE, np.random.default_rng(3))
  assert differing_rows(drawn, RawOfTiles(drawn.numerics)) > 2
