"""The start-up measurement: its result on this backend, and that it can fail."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.run import self_test
from seerjax.trainer import packing

TILED = NumericsConfig(row_tile=16, query_tile=4, kv_split=64, backend="tiled")
UNTILED = NumericsConfig(row_tile=16, query_tile=4, kv_split=64, backend="untiled")


@pytest.mark.thorough
def test_tiled_rows_are_invariant_here():
  finding = self_test.measure(TILED)
  assert finding.is_invariant
  assert finding.num_values > 5000
  assert {name for name, _, _ in finding.by_comparison} == {
    "two tiles", "tile by tile", "alone", "decode",
  }  # fmt: skip
  assert str(finding) == f"rows are invariant: 0 of {finding.num_values} values differ"
  self_test.require(TILED)
  # Measured once.
  assert self_test.measure(TILED) is finding


@pytest.mark.thorough
def test_the_line_for_people_says_where_and_what():
  line = self_test.describe(TILED)
  assert line.startswith(f"cpu ({jax.devices()[0].device_kind}, {len(jax.devices())} devices)")
  assert f"JAX {jax.__version__}, tiled float32: rows are invariant: 0 of" in line
  assert "\n" not in line


@pytest.mark.thorough
def test_untiled_rows_are_refused_with_the_finding():
  # Twin that must differ; otherwise the measurement would show nothing.
  assert not self_test.measure(UNTILED).is_invariant
  with pytest.raises(ValueError, match="got backend='untiled' on .*, where rows are NOT"):
    self_test.require(UNTILED)
  with pytest.raises(ValueError, match="values differ (.*); expected 0 differences. Set"):
    self_test.require(UNTILED)


@pytest.mark.thorough
def test_splits_shorter_than_a_sequence_are_measured_too():
  short = NumericsConfig(
    backend="tiled",
    row_tile=4,
    query_tile=1,
    slot_tile=2,
    kv_split=4,
    reduction_shards=1,
  )
  assert self_test.measure(short).is_invariant


def test_a_finding_names_the_comparisons_that_differ():
  finding = self_test.Finding(
    num_values=30, num_differing=4, by_comparison=(("alone", 4, 10), ("decode", 0, 20))
  )
  assert str(finding) == "rows are NOT invariant: 4 of 30 values differ (alone 4 of 10)"


DECODER = decide(tiny_model.SMALLEST, tiny_model.ONE_SLAB)
SIZES = engine_lib.EngineConfig(
  page_size=8, num_pages=17, max_num_seqs=4, max_model_len=32, batch_size_buckets=(3, 24)
)


@functools.cache
def runner():
  return runner_lib.Runner(DECODER, parallel.make_mesh(), 2)


class Leaning(runner_lib.Runner):
  """Steps of the large bucket score an ulp higher."""

  def step(self, params, pages, inputs, key):
    pages, tokens, scores = runner().step(params, pages, inputs, key)
    if inputs.batch.tokens.shape[1] > 16:
      scores = scores._replace(logprob=jnp.nextafter(scores.logprob, jnp.float32(1)))
    return pages, tokens, scores


class LeaningInVisits(runner_lib.Runner):
  """Visits of several steps score an ulp higher."""

  def step(self, params, pages, inputs, key):
    return runner().step(params, pages, inputs, key)

  def visit(self, params, pages, inputs, key):
    pages, tokens, scores = runner().visit(params, pages, inputs, key)
    leaning = jnp.nextafter(scores.logprob, jnp.float32(1))
    return pages, tokens, scores._replace(logprob=leaning)


def of_model(runner, config=SIZES, **changes):
  return self_test.measure_model(
    DECODER,
    tiny_model.random_params(tiny_model.SMALLEST, tiny_model.ONE_SLAB),
    config=config,
    runner=runner,
    **changes,
  )


@pytest.mark.thorough
def test_the_model_at_hand_is_asked_in_every_bucket_and_refused_for_an_ulp():
  finding = of_model(runner())
  # Four requests of four tokens: the token and two numbers.
  assert finding.by_comparison == (("bucket 3", 0, 48), ("bucket 24", 0, 48))
  self_test.require_model(finding, DECODER)

  leaning = Leaning(DECODER, parallel.make_mesh(), 2)
  finding = of_model(leaning)
  assert {name: bad for name, bad, _ in finding.by_comparison}["bucket 24"] > 0
  with pytest.raises(ValueError, match="got a model where, in native float32 .*rows are NOT"):
    self_test.require_model(finding, DECODER)


@pytest.mark.thorough
def test_the_model_at_hand_is_asked_in_visits_as_the_run_s():
  config = dataclasses.replace(SIZES, decode_steps_per_call=8)
  assert of_model(runner(), config).is_invariant
  leaning = LeaningInVisits(DECODER, parallel.make_mesh(), 2)
  found = of_model(leaning, config).by_comparison
  assert [bad > 0 for _, bad, _ in found] == [True, True]
  assert of_model(leaning, dataclasses.replace(SIZES, decode_steps_per_call=1)).is_invariant


@pytest.mark.thorough
def test_experiments_say_what_was_found_before_they_refuse_or_go_on():
  lines = []

  def check(runner, **changes):
    self_test.check_model(
      DECODER,
      tiny_model.random_params(tiny_model.SMALLEST, tiny_model.ONE_SLAB),
      config=SIZES,
      runner=runner,
      say=lines.append,
      **changes,
    )

  check(runner())
  assert lines == ["model of this run: rows are invariant: 0 of 96 values differ"]
  leaning = Leaning(DECODER, parallel.make_mesh(), 2)
  with pytest.raises(ValueError, match="got a model where, .*, or pass"):
    check(leaning)
  check(leaning, bitwise=False)
  assert lines[1] == lines[2] and "rows are NOT invariant" in lines[1]


@pytest.mark.long
def test_the_trainer_is_asked_what_the_model_at_hand_said():
  sizes = dict(decoder=DECODER, page_size=8, rows_per_micro_batch=64)
  trainer = trainers.make(**sizes)
  pack = functools.partial(packing.pack, **sizes)
  assert of_model(runner(), trainer=trainer, pack=pack).by_comparison[-1] == ("trainer", 0, 32)
  leaning = Leaning(DECODER, parallel.make_mesh(), 2)
  found = of_model(leaning, trainer=trainer, pack=pack).by_comparison[-1]
  assert found[0] == "trainer" and 0 < found[1] < 32
