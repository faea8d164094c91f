"""No model, numerics, bucket, mesh, schedule or damage changes a bit of a request's completion.

The other fuzz tests here draw schedules over one small model; this one draws what users bring:
models of every family and of odd sizes, adapters, every tile, split and slab, buckets of any number
of rows, 1 to 7 instances, model shards, drafts, spills to host memory and to a disk with damaged
bytes, kills. Each request is compared by bit with itself alone, on one device in a bucket of 64
rows, and then with the trainer's forward under `value_and_grad`. Event counts are printed, and an
event with count 0 is a failure.

A case depends only on the session's seed and its number; a failure names both, and
`python tests/support/model_cases.py SEED NUMBER` repeats it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import subprocess
import sys

import drawn_models
from drawn_models import OF_A_MACHINE, OF_A_MODEL
import model_cases
import pytest

from seerjax import numerics as numerics_lib
from seerjax.engine import runner as runner_lib
from seerjax.models.decoder import decide

BLOCKS = 26  # Models of the long run.
# First number of fresh cases, beyond the long run's.
FRESH, ENVIRONMENT, TWINS, RULES, EXPERTS, WINDOWS, SHARED, KINDS = (
  (BLOCKS + place) * OF_A_MODEL for place in range(8)
)
KIND_BLOCKS = 60  # Models of layer kinds drawn at random, in the long run.
SHARED_BLOCKS = 8  # Models with more slabs than key/value heads, in the long run.
WINDOW_BLOCKS = 20  # Models with short windows, in the long run.


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [pytest.param("tiled", marks=pytest.mark.thorough), "native"])
def test_no_model_of_this_session_changes_a_bit(backend, seed, tell_events):
  events = collections.Counter()
  cases = [drawn_models.draw(seed, FRESH + place) for place in range(OF_A_MACHINE)]
  for case in cases:
    model_cases.run_case(drawn_models.implemented(case, backend), events, trains=False)
  expected = model_cases.expected_of(cases, ("chunks", "spilled", "drafted tokens", "comparisons"))
  tell_events(f"a fresh model, {backend}", events, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
  "drawn, first, backend",
  [
    (drawn_models.with_rules, RULES, "tiled"),
    (drawn_models.with_rules, RULES, "native"),
    (drawn_models.with_experts, EXPERTS, "tiled"),
    (drawn_models.with_experts, EXPERTS, "native"),
    (drawn_models.with_short_windows, WINDOWS, "tiled"),
    (drawn_models.with_short_windows, WINDOWS, "native"),
    (drawn_models.with_shared_heads, SHARED, "tiled"),
    (drawn_models.with_shared_heads, SHARED, "native"),
  ],
  ids=[
    "windows",
    "windows native",
    "experts",
    "experts native",
    "short windows",
    "short windows native",
    "shared heads",
    "shared heads native",
  ],
)
def test_no_model_of_other_kinds_of_layers_changes_a_bit(drawn, first, backend, seed, tell_events):
  events = collections.Counter()
  cases = [
    drawn_models.implemented(drawn(drawn_models.draw(seed, first + place)), backend)
    for place in range(OF_A_MACHINE)
  ]
  for case in cases:
    model_cases.run_case(case, events, trains=case is cases[0])
  expected = model_cases.expected_of(cases, ("chunks", "spilled", "drafted tokens", "comparisons"))
  if first == WINDOWS:
    expected += model_cases.OF_WINDOWS
  if first == SHARED:
    expected += ["key heads shared by slabs"]
  tell_events(f"a fresh model {drawn.__name__}, {backend}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tiled", "native"])
@pytest.mark.parametrize("block", range(KIND_BLOCKS))
def test_no_model_of_drawn_kinds_changes_a_bit(block, backend, seed, tell_events):
  """Windows, sinks, caps, experts and shared MLPs together, eight schedules a model."""
  events = collections.Counter()
  first = KINDS + OF_A_MODEL * block
  drawn = (drawn_models.draw(seed, first + place) for place in range(8))
  cases = [drawn_models.with_rules(drawn_models.with_experts(case)) for case in drawn]
  for case in cases:
    model_cases.run_case(drawn_models.implemented(case, backend), events)
  expected = model_cases.expected_of(cases, ("chunks", "spilled", "drafted tokens", "comparisons"))
  tell_events(f"kinds, block {block}, {backend}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("block", range(WINDOW_BLOCKS))
def test_no_model_that_gives_pages_back_changes_a_bit(block, seed, tell_events):
  events = collections.Counter()
  first = KINDS + OF_A_MODEL * (KIND_BLOCKS + block)
  cases = [
    drawn_models.with_short_windows(drawn_models.draw(seed, first + place))
    for place in range(OF_A_MODEL)
  ]
  for case in cases:
    model_cases.run_case(case, events)
  expected = model_cases.expected_of(cases, ("chunks", "spilled", "drafted tokens", "comparisons"))
  expected += [*model_cases.OF_WINDOWS, "side paths"]
  tell_events(f"windows, block {block}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tiled", "native"])
@pytest.mark.parametrize("block", range(SHARED_BLOCKS))
def test_no_model_of_shared_heads_changes_a_bit(block, backend, seed, tell_events):
  """Key/value heads of several slabs, with rules or experts, on one device and on several."""
  events = collections.Counter()
  first = KINDS + OF_A_MODEL * (KIND_BLOCKS + WINDOW_BLOCKS + block)
  drawn = [drawn_models.draw(seed, first + place) for place in range(OF_A_MODEL)]
  cases = [drawn_models.with_shared_heads(case) for case in drawn]
  other = drawn_models.with_rules if block % 2 else drawn_models.with_experts
  for case in map(other, cases):
    model_cases.run_case(drawn_models.implemented(case, backend), events)
  expected = model_cases.expected_of(cases, ("chunks", "spilled", "drafted tokens", "comparisons"))
  expected += ["key heads shared by slabs"]
  tell_events(f"shared heads, block {block}, {backend}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tiled", "native"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_model_of_three_hundred_cases_changes_a_bit(block, backend, seed, tell_events):
  events = collections.Counter()
  numbers = range(OF_A_MODEL * block, OF_A_MODEL * (block + 1))
  cases = [drawn_models.draw(seed, number) for number in numbers]
  for case in cases:
    model_cases.run_case(drawn_models.implemented(case, backend), events)
  assert events["cases"] == OF_A_MODEL
  expected = model_cases.expected_of(cases, model_cases.EVENTS)
  tell_events(f"block {block}, {backend}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("seed, number", [(73184206, 288), (684845178, 312)])
def test_what_other_runs_found_is_mended(seed, number):
  # An adapter in tiles of one row, and an adapter of rank 1; both on four devices.
  case = drawn_models.draw(seed, number)
  model_cases.run_case(case, collections.Counter(), trains=False)


# Process-wide defaults.

ENVIRONMENTS = (
  {"JAX_DEFAULT_PRNG_IMPL": "rbg"},
  {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg", "JAX_THREEFRY_PARTITIONABLE": "false"},
  {"NPROC": "1"},
  {"NPROC": "5"},
  {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
  {"JAX_ENABLE_X64": "true"},
  {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"},
  {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
)


@pytest.mark.long
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: " ".join(one.values()))
def test_a_process_of_another_environment_says_the_same_or_has_another_fingerprint(
  environment, seed
):
  # The case holds under any of these: the process compares its own engines and trainer.
  done = subprocess.run(
    [sys.executable, model_cases.__file__, str(seed), str(ENVIRONMENT)],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  digest, fingerprint = done.stdout.split()[-2:]
  case = drawn_models.draw(seed, ENVIRONMENT)
  ours = numerics_lib.fingerprint(case.model.numerics)["digest"]
  assert digest == _digest(seed) or fingerprint != ours, case


@functools.cache
def _digest(seed: int) -> str:
  return model_cases.digest_of(drawn_models.draw(seed, ENVIRONMENT), collections.Counter())


# Twins.


class ReadsTheBucket(runner_lib.Runner):
  """Twin: the row tile depends on the bucket's rows, as in plain XLA."""

  @functools.cached_property
  def _by_tile(self) -> dict[int, runner_lib.Runner]:
    return {}

  def step(self, params, pages, inputs, key):
    tile = 1 << (inputs.batch.tokens.shape[1] - 1).bit_length()
    if tile not in self._by_tile:
      numerics = dataclasses.replace(self.decoder.numerics, row_tile=tile)
      self._by_tile[tile] = runner_lib.Runner(
        decide(self.decoder.shape, numerics), self.mesh, self.max_programs
      )
    return self._by_tile[tile].step(params, pages, inputs, key)


@pytest.mark.long
def test_a_bucket_that_is_read_as_a_tile_is_noticed(seed):
  numbers = range(TWINS, TWINS + 2 * OF_A_MODEL, OF_A_MACHINE)
  assert model_cases.is_noticed((drawn_models.draw(seed, n) for n in numbers), kind=ReadsTheBucket)


@pytest.mark.long
def test_the_untiled_path_is_noticed(seed):
  numbers = range(TWINS, TWINS + 2 * OF_A_MODEL, OF_A_MACHINE)
  cases = (drawn_models.draw(seed, n) for n in numbers)
  assert model_cases.is_noticed(drawn_models.implemented(case, "untiled") for case in cases)
