"""A request with an adapter gets the same bits in any batch as alone; so does the base model.

Cases come from `drawn_models` (models, tiles, slabs, meshes, buckets, drafts, spills, kills), with
adapters of ranks from 1 to 16 on drawn targets. Each completion is compared by bit with an engine
that holds only its adapter, attached as in training (`lora.attach`), before and after weights and
adapters are swapped. Event counts are printed, and an event with count 0 is a failure.

`python tests/support/adapter_cases.py IMPLEMENTATION SEED NUMBER` repeats a case.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import adapter_cases
import drawn_models
from drawn_models import OF_A_MODEL
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.engine.engine import EngineConfig
from seerjax.models import loading, lora
from seerjax.models.decoder import decide
from seerjax.types import Request, SamplingParams

BLOCKS = 16  # Models of the long run.
FRESH = 1000 * OF_A_MODEL  # First number of fresh cases, beyond those of all other fuzz tests.
EVENTS = (
  "steps of several adapters",
  "steps of base and adapters",
  "asked again after a swap",
  "of the base",
  "of an adapter",
)


# A model of one layer, for everyday runs.

MODEL = tiny_model.SMALLEST.changed(num_layers=1)
# The same with a window, a sink, and what Gemma has; its parts are computed apart.
PARTED = dataclasses.replace(
  MODEL.changed(window=5, has_sinks=True, activation="gelu_tanh", norm_placement="pre_and_post"),
  norm_weights="1 + w",
)
SIZES = EngineConfig(
  page_size=4, num_pages=80, max_num_seqs=8, max_model_len=32, batch_size_buckets=(24,)
)
TARGETS = {"poet": lora.TARGETS, "judge": lora.TARGETS, "clerk": ("out", "gate_up")}
RANKS = {"poet": 3, "judge": 3, "clerk": 1}
BACKENDS = [
  pytest.param(dataclasses.replace(tiny_model.ONE_SLAB, backend="native"), id="native"),
  pytest.param(
    dataclasses.replace(tiny_model.ONE_SLAB, backend="tiled"),
    id="tiled",
    marks=pytest.mark.thorough,
  ),
]


@functools.cache
def adapters(numerics, model=MODEL):
  rng = np.random.default_rng(5)
  leaf = lambda shape: jnp.asarray((0.3 * rng.standard_normal(shape.shape)).astype(np.float32))
  return {
    name: (jax.tree.map(leaf, lora.shapes(model, numerics, RANKS[name], targets)), 0.5 + place)
    for place, (name, targets) in enumerate(TARGETS.items())
  }


@functools.cache
def runner_of(numerics, max_programs: int, model=MODEL) -> runner_lib.Runner:
  return runner_lib.Runner(decide(model, numerics), parallel.make_mesh(), max_programs=max_programs)


def make_engine(numerics, kind=engine_lib.Engine, model=MODEL):
  # A single program for any set of adapters: another trace would fail.
  return kind(
    loading.Model(model, tiny_model.random_params(model, numerics), numerics),
    config=SIZES,
    key=numerics_lib.key(3),
    runner=runner_of(numerics, 1, model),
    adapters=adapters(numerics, model),
  )


def lone_engine(numerics, adapter: str, model=MODEL) -> engine_lib.Engine:
  params = tiny_model.random_params(model, numerics)
  if adapter:
    params = lora.attach(params, *adapters(numerics, model)[adapter])
  return engine_lib.Engine(
    loading.Model(model, params, numerics),
    config=dataclasses.replace(SIZES, max_num_seqs=1, enable_prefix_caching=False),
    key=numerics_lib.key(3),
    runner=runner_of(numerics, 3, model),
  )


def asked() -> list[Request]:
  """Returns requests with one prompt, so that pages are shared wherever permitted."""
  names = ("", *TARGETS)
  return [
    Request(
      request_id=str(place),
      prompt=tuple(range(3, 14)) + (place // 4,),
      sampling=SamplingParams(max_tokens=7),
      seed=place // 4,
      adapter=names[place % 4],
    )
    for place in range(12)
  ]


@functools.cache
def expected(numerics, model=MODEL):
  engines = {name: lone_engine(numerics, name, model) for name in ("", *TARGETS)}
  return {
    one.request_id: engines[one.adapter].generate([dataclasses.replace(one, adapter="")])[0]
    for one in asked()
  }


def differing(numerics, kind, model=MODEL) -> int:
  """Returns how many of twelve requests differ from their completion alone, in two waves."""
  engine = make_engine(numerics, kind, model)
  kind.events = collections.Counter()
  found = engine.generate(asked()) + engine.generate(asked())
  assert kind.events["steps of several adapters"] and kind.events["steps of base and adapters"]
  assert engine.counters.reused_tokens > 0
  wanted = expected(numerics, model)
  return sum(not tiny_model.same(one, wanted[one.request_id]) for one in found)


@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", BACKENDS)
def test_base_and_three_adapters_in_one_batch_have_the_bits_of_each_alone(numerics):
  assert differing(numerics, adapter_cases.Counting) == 0
  wanted = expected(numerics)
  # The completions differ; otherwise the comparison could find nothing.
  assert len({wanted[str(place)].tokens for place in range(4)}) == 4


@pytest.mark.thorough
def test_parts_that_are_computed_apart_mix_no_adapters():
  native = dataclasses.replace(tiny_model.ONE_SLAB, backend="native")
  assert differing(native, adapter_cases.Counting, PARTED) == 0
  wanted = expected(native, PARTED)
  assert len({wanted[str(place)].tokens for place in range(4)}) == 4


@pytest.mark.parametrize("numerics", BACKENDS)
def test_a_neighbours_adapter_and_pages_keyed_without_its_name_are_noticed(numerics):
  assert differing(numerics, adapter_cases.Neighbours) > 0
  assert differing(numerics, adapter_cases.SharesPages) > 0


@pytest.mark.parametrize("numerics", BACKENDS)
def test_adapters_that_come_and_go_need_no_new_program(numerics):
  engine, wanted = make_engine(numerics), expected(numerics)
  (base,) = engine.generate(asked()[:1])
  turned = {name: (one, 2 * scale) for name, (one, scale) in adapters(numerics).items()}
  engine.set_adapters(turned)
  found = engine.generate(asked()[:2])
  assert tiny_model.same(base, wanted["0"]) and tiny_model.same(found[0], wanted["0"])
  assert not tiny_model.same(found[1], wanted["1"])


# Adapters as users bring them.


def run_cases(numbers, backend, seed) -> collections.Counter:
  events = collections.Counter()
  for number in numbers:
    case = drawn_models.implemented(drawn_models.draw(seed, number), backend)
    adapter_cases.run_case(case, events)
  return events


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["native", pytest.param("tiled", marks=pytest.mark.long)])
def test_no_model_of_this_session_mixes_its_adapters(backend, seed, tell_events):
  events = run_cases(range(FRESH, FRESH + 3), backend, seed)
  tell_events(f"adapters of a fresh model, {backend}", events, EVENTS[2:])


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tiled", "native"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_adapter_of_sixty_four_cases_changes_a_bit(block, backend, seed, tell_events):
  # Four cases per model, on two machines.
  numbers = [FRESH + OF_A_MODEL * (1 + block) + place for place in (0, 1, 6, 8)]
  events = run_cases(numbers, backend, seed)
  tell_events(f"adapters of model {block}, {backend}", events, EVENTS)


@pytest.mark.long
@pytest.mark.parametrize("kind", [adapter_cases.OfNeighbours, adapter_cases.OfSharedPages])
def test_twins_of_a_drawn_model_are_noticed(kind, seed):
  for number in range(FRESH - OF_A_MODEL, FRESH):
    case = drawn_models.implemented(drawn_models.draw(seed, number), "native")
    try:
      adapter_cases.run_case(case, collections.Counter(), kind)
    except AssertionError as error:
      if "requests differ" not in str(error):
        raise
      return
  raise AssertionError(f"{kind.__name__}: got no difference in {OF_A_MODEL} cases, expected one")
