"""A draft model: its guesses, and that it changes no completion."""

from __future__ import annotations

import dataclasses

from absl import logging
import drafting_models
import numpy as np
import pytest
import refusals
import tiny_model

from seerjax.engine.drafting import Drafter, DraftQuery
from seerjax.models.loading import Model
from seerjax.speculation import draft_model
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.types import Request, SamplingParams


def asked(count: int = 4, **sampling) -> list[Request]:
  sampling = {"max_tokens": 14, **sampling}
  return [
    Request(
      request_id=f"r{index}",
      prompt=tuple((index + 5 * place) % 64 for place in range(3 + 9 * index)),
      sampling=SamplingParams(**sampling),
      seed=index,
    )
    for index in range(count)
  ]


def query(tokens, *, name="r", num_prompt=3, most=16, seed=0, **sampling) -> DraftQuery:
  return DraftQuery(name, "", list(tokens), num_prompt, most, seed, SamplingParams(**sampling))


def answers(engine, requests) -> dict:
  return {completion.request_id: completion for completion in engine.generate(requests)}


def test_a_draft_of_the_targets_own_weights_is_right_and_moves_no_bit():
  engine = drafting_models.make_engine()
  alone = answers(engine, asked())
  engine.drafter = drafter = drafting_models.drafter()
  assert isinstance(drafter, Drafter)
  found = answers(engine, asked())
  assert all(found[name].has_bits_of(alone[name]) for name in alone)
  assert drafter.acceptance.rate > 0.7  # At a lower temperature, tried now and then, it is not.
  assert drafter.counters.without_slot > 0 < drafter.counters.drafts
  # Most of the longest prompt is read in calls of its own.
  assert drafter.counters.calls > drafter.counters.steps / 4


def test_a_request_that_begins_anew_under_its_old_name_is_read_again():
  engine = drafting_models.make_engine()
  first, second = asked(2)
  alone = answers(engine, [first, second])
  engine.drafter = drafter = drafting_models.drafter()
  engine.add_request(first)
  for _ in range(2):
    engine.step()
  engine.abort_request(first.request_id)
  engine.add_request(dataclasses.replace(second, request_id=first.request_id))
  engine.step()
  engine.chunks.preempt(first.request_id)
  while engine.num_unfinished:
    engine.step()
  (found,) = engine.poll()
  assert found.has_bits_of(alone[second.request_id])
  assert drafter.slots.num_read_again == 1
  engine.update_weights(tiny_model.params(drafting_models.ONE_SLAB, 1), 1)
  drafter.update_weights(tiny_model.params(drafting_models.ONE_SLAB, 1))
  accepted = drafter.acceptance.num_accepted
  drafted = answers(engine, [second])[second.request_id]
  assert drafter.acceptance.num_accepted > accepted
  engine.drafter = None
  assert drafted.has_bits_of(answers(engine, [second])[second.request_id])


def test_logits_that_are_not_finite_draft_nothing_and_are_said_once(caplog):
  logging.use_absl_handler()
  drafter = drafting_models.drafter("nan")
  for _ in range(2):
    assert drafter.draft([query([1, 2, 3])]) == [[]]
  assert drafter.counters.not_finite == 2 and drafter.counters.drafts == 0
  (record,) = [r for r in caplog.records if "not finite" in r.getMessage()]
  assert "load other weights, or use another draft" in record.getMessage()


def test_a_draft_goes_as_far_as_it_can_be_used_and_says_what_a_grammar_allows():
  drafter = drafting_models.drafter()
  ((path,),) = drafter.draft([query([1, 2, 3], most=2)])
  assert len(path) == 2
  allowed = [(10, 12), (20, 21), (30, 34), (40, 41), (50, 51)]
  ((path,),) = drafter.draft(
    [query([1, 2, 3, 11], allowed_token_ranges=tuple(allowed), max_tokens=5)]
  )
  assert path[0] == 20 and path[1] in range(30, 34) and path[2:] == (40, 50)
  drafter.length = 0
  assert drafter.draft([query([1, 2, 3])]) == ()


def test_what_the_draft_cannot_read_is_not_drafted_for():
  drafter = drafting_models.drafter()
  paths = drafter.draft([query([1, 64, 3], name="a"), query([1, 2, 3], name="b")])
  assert paths[0] == [] and len(paths[1]) == 1
  assert drafter.counters.unreadable == 1


def test_the_temperature_that_is_accepted_most_is_drawn_at():
  temperatures = draft_model._Temperatures()
  right = (1, 3, 2)  # Tokens accepted at each.
  chosen = []
  for _ in range(2000):
    chosen.append(temperatures.choose())
    temperatures.observe(chosen[-1], right[chosen[-1]])
  last = chosen[-800:]
  assert last.count(1) > 700 and min(last.count(0), last.count(2)) >= 16
  right = (3, 1, 1)
  for _ in range(2000):
    chosen.append(temperatures.choose())
    temperatures.observe(chosen[-1], right[chosen[-1]])
  assert chosen[-800:].count(0) > 700


def test_a_greedy_request_teaches_nothing_of_temperatures():
  drafter = drafting_models.drafter()
  before = list(drafter._temperatures._drafts)
  drafter.draft([query([1, 2, 3], temperature=0.0)])
  drafter.observe("r", "", 4, 4)
  assert drafter._temperatures._drafts == before and drafter.acceptance.num_accepted == 4


@refusals.table(
  (lambda: DraftModelConfig(length=17), "length: got 17, expected 1 to 16"),
  (lambda: DraftModelConfig(length=0), "length: got 0, expected 1 to 16"),
  (lambda: DraftModelConfig(width=9), "width: got 9, expected 1 to 8"),
  (lambda: DraftModelConfig(width=True), "width: got True, expected a whole number; write 1"),
  (lambda: DraftModelConfig(num_slots=0), "num_slots: got 0, expected 1 to"),
  (lambda: DraftModelConfig(batch_size_buckets=(8, 4)),
   "batch_size_buckets: got (8, 4), expected ascending numbers of rows"),
  (lambda: DraftModelConfig(num_slots=64, batch_size_buckets=(8,)),
   "the last at least num_slots=64; (8, 64, 256) is usual"),
  (lambda: ModelDrafter(model(), context=5000),
   "got a draft of 4096 positions for sequences of 5000, expected at least as many"),
  (lambda: ModelDrafter(model(shards=8), context=64),
   "got a draft with 8 slabs, expected 1, because it runs on one"),
  (lambda: ModelDrafter(model(), context=64, program=program()),
   "share a program only between drafters of the same sizes"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


def model(shards: int = 1) -> Model:
  numerics = dataclasses.replace(drafting_models.ONE_SLAB, reduction_shards=shards)
  return Model(tiny_model.CONFIG, {}, numerics)


def program():
  return drafting_models.program(drafting_models.ONE_SLAB, drafting_models.CONFIG)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tiled", "native"])
def test_siblings_are_the_next_by_logit_and_noise(kind):
  numerics = dataclasses.replace(drafting_models.ONE_SLAB, backend=kind)
  config = dataclasses.replace(drafting_models.CONFIG, width=3)
  chain, comb = (
    drafting_models.drafter("same", numerics),
    drafting_models.drafter("same", numerics, config),
  )
  for seed in range(6):
    asked = query([3, 1, 4, 1, 5], seed=seed, top_k=4)
    ((main,),) = chain.draft([asked])
    mine, *teeth = comb.draft([asked])[0]
    assert mine == main and len(teeth) == 8
    for place in range(4):
      at = [tooth for tooth in teeth if len(tooth) == place + 1]
      assert all(tooth[:-1] == main[:place] for tooth in at)
      assert len({main[place], *(tooth[-1] for tooth in at)}) == len(at) + 1
  assert len(comb.draft([query([3, 1, 4], most=6)])[0]) == 3  # Four tokens and two teeth.
  # Where a filter keeps two ids there is no third.
  few = comb.draft([query([3, 1, 4], top_k=2)])[0]
  assert [len(path) for path in few] == [4, 1, 2, 3, 4]


@pytest.mark.thorough
def test_a_cache_that_forgot_gives_the_same_drafts():
  remembering, forgetful = drafting_models.drafter(), drafting_models.drafter()
  rng = np.random.default_rng(0)
  tokens = [1, 2, 3]
  for _ in range(12):
    forgetful.slots.forget_all()
    asked = [query(tokens, temperature=0.7)]
    assert remembering.draft(asked) == forgetful.draft(asked)
    for drafter in (remembering, forgetful):
      drafter.observe("r", "", 4, 1)
    tokens = [*tokens, *rng.integers(0, 64, 3).tolist()]
  assert remembering.counters.rows_read < forgetful.counters.rows_read / 3
