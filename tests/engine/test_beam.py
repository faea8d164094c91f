"""Beam search: hypotheses have the bits of separate runs, rows run once, drafts save steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

from beam_cases import SIZES, Knowing, Plain
import numpy as np
import pytest
import tiny_model

from seerjax.engine import beam, engine as engine_lib, planner as planner_lib
from seerjax.engine.beam import Hypothesis, beam_search
from seerjax.engine.engine import EngineConfig
from seerjax.models import loading
from seerjax.speculation import draft_loading
from seerjax.speculation.draft_model import DraftModelConfig
from seerjax.types import Request, SamplingParams

FEW_PAGES = 24  # Too few for a whole beam: it is read in several steps.
BACKENDS = tiny_model.BACKENDS
VOCABULARY = tiny_model.CONFIG.vocab_size


@functools.cache
def plain(numerics) -> Plain:
  return Plain(tiny_model.CONFIG, numerics, tiny_model.params(numerics))


def asked(rng: np.random.Generator, name: str = "beam") -> Request:
  """Returns a request that may end early."""
  prompt = tuple(rng.integers(0, VOCABULARY, int(rng.integers(1, 23))).tolist())
  stops = tuple(rng.integers(0, VOCABULARY, int(rng.integers(0, 9))).tolist())
  most = int(rng.integers(4, 15))
  return Request(
    request_id=name, prompt=prompt, sampling=SamplingParams(max_tokens=most, stop_token_ids=stops)
  )


def expected(numerics, request: Request, width: int):
  params = request.sampling
  return plain(numerics).search(request.prompt, width, params.max_tokens, params.stop_token_ids)


def as_rows(found) -> list[tuple[tuple[int, ...], float, str]]:
  """Returns comparable rows: doubles are equal if their bits are, since none is 0 or NaN."""
  return [(one.tokens, one.score, one.finish_reason) for one in found]


def differing(numerics, seed: int, planner=planner_lib.Planner, count: int = 4) -> int:
  """Returns how many of drawn searches have not the hypotheses and scores of the plain one."""
  rng, wrong = np.random.default_rng(seed), 0
  for width in range(2, 2 + count):
    request = asked(rng)
    engine = tiny_model.make_engine(SIZES, numerics, planner=planner)
    wanted, kept = expected(numerics, request, width)
    drafter = Knowing(kept, VOCABULARY, right=0.95, seed=seed)
    wrong += as_rows(beam_search(engine, request, width, drafter=drafter)) != wanted
  return wrong


def check_drawn(numerics, seed: int, count: int, **mesh: int) -> collections.Counter[str]:
  """Runs drawn searches with and without drafts, next to sampled requests; returns event counts."""
  rng, events = np.random.default_rng(seed), collections.Counter()
  for number in range(count):
    width, request = 2 + number % 7, asked(rng)
    wanted, kept = expected(numerics, request, width)
    is_tight = bool(rng.random() < 0.25)
    sizes = dataclasses.replace(SIZES, enable_prefix_caching=bool(rng.random() < 0.85))
    right = float(rng.choice([0.0, 0.6, 0.9, 1.0]))
    steps = []
    for drafter in (None, Knowing(kept, VOCABULARY, right=right, seed=number)):
      engine = tiny_model.make_engine(sizes, numerics, **mesh)
      instance = engine.data_parallel_size - 1
      pool = engine.memory.pools[instance]
      if is_tight:
        pool.take(pool.num_available - FEW_PAGES)
      num_free = pool.num_available
      others = [dataclasses.replace(asked(rng, str(i)), seed=i) for i in range(number % 3)]
      for other in others:
        engine.add_request(other)
      found = as_rows(beam_search(engine, request, width, drafter=drafter, instance=instance))
      assert found == wanted, f"seed {seed}, search {number}: {request}, width {width}"
      counters = engine.counters
      steps.append(counters.steps)
      while engine.num_unfinished:
        engine.step()
      for done in engine.poll():
        other = others[int(done.request_id)]
        assert done.has_bits_of(tiny_model.answer(numerics, other))
        events["sampled among others"] += 1
      assert pool.num_available == num_free
      events["read places"] += counters.read_tokens
      events["key copies"] += counters.key_copies
      events["trees cut"] += counters.cut_for_rows + counters.cut_for_pages
      events["waits for pages"] += counters.waits
    events["searches"] += 1
    events["fewer steps"] += steps[1] < steps[0]
    events["ended by a stop id"] += sum(reason == "stop" for *_, reason in wanted)
    events["ended at max_tokens"] += sum(reason == "length" for *_, reason in wanted)
  print(f"beam search, {numerics.backend} {numerics.compute_dtype}: {dict(events)}")
  return events


EVENTS = (
  "sampled among others",
  "key copies",
  "fewer steps",
  "ended by a stop id",
  "ended at max_tokens",
)


def test_hypotheses_have_the_bits_of_each_alone():
  assert check_drawn(tiny_model.NATIVE, 0, 3)["key copies"]


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("name", BACKENDS)
def test_so_they_have_on_each_backend(name):
  events = check_drawn(BACKENDS[name], 5, 7)
  assert events["key copies"] and events["fewer steps"]


@pytest.mark.long
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_searches_have_the_bits_of_each_alone(name, seed):
  events = check_drawn(BACKENDS[name], seed + 1, 42)
  assert all(events[name] for name in EVENTS), events


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("numerics", [tiny_model.NATIVE, tiny_model.BFLOAT16])
def test_so_they_have_on_several_devices(numerics, mesh):
  assert check_drawn(numerics, 9, 7, data_parallel_size=mesh[0], tensor_parallel_size=mesh[1])[
    "key copies"
  ]


@pytest.mark.thorough
def test_bugs_in_pages_and_places_are_found_out():
  assert not differing(tiny_model.NATIVE, 1)
  for bug in (WithoutCopies, OthersPages, NeighboursNumbers):
    assert differing(tiny_model.NATIVE, 1, bug), bug.__doc__


def with_paths(plan, change):
  """Returns a plan with the paths of each of its requests passed through `change`."""
  rows = [[piece._replace(paths=change(piece.paths)) for piece in pieces] for pieces in plan.rows]
  return plan._replace(rows=rows)


class WithoutCopies(planner_lib.Planner):
  """Twin: shared positions are in the first path's pages only."""

  def with_drafts(self, plan):
    without = lambda path: path._replace(copied=())
    return with_paths(super().with_drafts(plan), lambda paths: tuple(map(without, paths)))


class OthersPages(planner_lib.Planner):
  """Twin: a further path reads its keys from the first one's pages."""

  def leave(self, piece):
    first = piece.sequence.page_row
    super().leave(
      piece._replace(paths=tuple(path._replace(page_row=first) for path in piece.paths))
    )


class NeighboursNumbers(planner_lib.Planner):
  """Twin: the rows of each further path are off by one."""

  def with_drafts(self, plan):
    off_by_one = lambda path: path._replace(rows=tuple(row - 1 for row in path.rows))
    return with_paths(
      super().with_drafts(plan), lambda paths: (*paths[:1], *map(off_by_one, paths[1:]))
    )


def test_each_place_is_one_row_whatever_is_shared():
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  request = Request(
    request_id="beam", prompt=tuple(range(9)), sampling=SamplingParams(max_tokens=11)
  )
  found = beam_search(engine, request, 4)
  counters = engine.counters
  assert [one.finish_reason for one in found] == ["length"] * 4
  assert counters.steps == 11 and counters.read_tokens == 1 + 4 * 10
  assert counters.rows == 8 + counters.read_tokens  # The prompt's others, once.


@pytest.mark.long
def test_drafts_of_nano_save_a_quarter_of_the_steps_at_least():
  model = loading.load_model("nano")
  sizes = EngineConfig(num_pages=120, max_num_seqs=8, max_model_len=128, batch_size_buckets=(64,))
  engine = engine_lib.Engine(model, config=sizes)
  ids = model.tokenizer.chat_ids("Tom has 3 apples and buys 4. How many apples has Tom?")
  request = Request(
    request_id="tom",
    prompt=tuple(ids),
    sampling=SamplingParams(max_tokens=32, stop_token_ids=model.tokenizer.eos_ids),
  )
  config = DraftModelConfig(length=4, width=2, num_slots=8)
  drafter = draft_loading.drafter_for(engine, "nano", config)
  for width in (2, 4, 8):
    found, steps = [], []
    for one in (None, drafter):
      before = engine.counters.steps
      found.append(beam_search(engine, request, width, drafter=one))
      steps.append(engine.counters.steps - before)
    print(f"nano, width {width}: {steps[0]} steps, {steps[1]} with drafts of four tokens")
    assert found[0] == found[1] and all(one.text for one in found[0])
    assert steps[0] >= 1.3 * steps[1]


def test_ties_go_to_the_lowest_id_then_to_the_better_parent():
  kept = [Hypothesis((1,), -1.0), Hypothesis((7,), -1.5, "stop"), Hypothesis((2,), -2.0)]
  tops = {(1,): ((4, -1.0), (6, -1.0), (9, -1.25)), (2,): ((4, -0.0), (5, 0.25), (9, -0.25))}
  found = beam.best(kept, tops, 5, SamplingParams(max_tokens=2, stop_token_ids=(6,)))
  assert as_rows(found) == [
    ((7,), -1.5, "stop"),
    ((2, 5), -1.75, "length"),
    ((1, 4), -2.0, "length"),  # Of the better parent.
    ((2, 4), -2.0, "length"),
    ((1, 6), -2.0, "stop"),
  ]
  with pytest.raises(RuntimeError, match="NaN for token 3 at position 1 of the answer, exp"):
    beam.best(kept[:1], {(1,): ((3, math.nan),)}, 2, SamplingParams())


def test_a_drafter_that_fails_changes_nothing_and_one_that_lasts_hears_the_end():
  class Failing(Knowing):
    def draft(self, queries):
      raise KeyError("lost")

  rng = np.random.default_rng(2)
  request = asked(rng)
  wanted, kept = expected(tiny_model.NATIVE, request, 3)
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  failing = Failing(kept, VOCABULARY, right=1.0, seed=0)
  assert as_rows(beam_search(engine, request, 3, drafter=failing)) == wanted
  knowing = Knowing(kept, VOCABULARY, right=1.0, seed=0)
  assert as_rows(beam_search(engine, request, 3, drafter=knowing)) == wanted
  assert wanted[0][0] in set(map(tuple, knowing.finished.values()))


@pytest.mark.thorough
def test_greedy_is_the_beam_of_one():
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  request = Request(
    request_id="beam", prompt=(1, 2, 3), sampling=SamplingParams(temperature=0, max_tokens=9)
  )
  (found,), (sampled,) = beam_search(engine, request, 1), engine.generate([request])
  assert found.tokens == sampled.tokens
  assert found.score == sum(sampled.raw_logprobs.astype(float).tolist())


@pytest.fixture(scope="module")
def engine() -> engine_lib.Engine:
  return tiny_model.make_engine(SIZES, tiny_model.NATIVE)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("width", [0, 17, 2.5, "4"])
def test_a_width_is_one_to_sixteen(engine, width):
  request = Request(request_id="beam", prompt=(1,))
  message = "beam_search: width: got .*, expected (.*16; 1 is the gree|a whole number; )"
  with pytest.raises(ValueError, match=message):
    beam_search(engine, request, width)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(temperature=0.7), "temperature=0.7, expected 0 or 1"),
    (dict(top_k=3), "top_k=3, expected 0"),
    (dict(top_p=0.5), "top_p=0.5, expected 1"),
    (dict(min_p=0.1), "min_p=0.1, expected 0"),
    (dict(repetition_penalty=1.1), "repetition_penalty=1.1, expected 1"),
    (dict(presence_penalty=0.1), "presence_penalty=0.1, expected 0"),
    (dict(logit_bias=((3, 1.0),)), "logit_bias=.*, expected none"),
    (dict(allowed_token_ranges=((0, 9),) * 4), "allowed_token_ranges=.*, expected no form"),
    (dict(stop=("end",)), "stop=.*, expected none.*use stop_token_ids"),
  ],
)
def test_sampling_that_scores_cannot_follow_is_refused(engine, changes, message):
  params = SamplingParams(**{"max_tokens": 4, **changes})
  request = Request(request_id="beam", prompt=(1,), sampling=params)
  with pytest.raises(ValueError, match=f"beam_search of 'beam': got SamplingParams.{message}"):
    beam_search(engine, request, 2)


@pytest.mark.usefixtures("unchecked_annotations")
def test_what_is_no_request_or_does_not_fit_is_refused(engine):
  request = Request(request_id="beam", prompt=(1,) * 60, sampling=SamplingParams(max_tokens=5))
  with pytest.raises(ValueError, match="beam_search: request: got a list, expected a Request; "):
    beam_search(engine, [request, request], 2)
  with pytest.raises(ValueError, match="60 prompt tokens and max_tokens 5, expected a sum"):
    beam_search(engine, request, 2)
  with pytest.raises(ValueError, match="got an empty prompt"):
    beam_search(engine, dataclasses.replace(request, prompt=()), 2)
  with pytest.raises(ValueError, match="drafter: got 'nano', expected a Drafter or None"):
    beam_search(engine, dataclasses.replace(request, prompt=(1,)), 2, drafter="nano")
  with pytest.raises(ValueError, match="instance: got 1, expected at least 0|got 1, expected 0"):
    beam_search(engine, dataclasses.replace(request, prompt=(1,)), 2, instance=1)
  assert not engine.num_unfinished
