"""Choosing draft sources: against all choices where acceptance is known, and errors."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import refusals

from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.speculation import budget as budget_lib
from seerjax.speculation.budget import NOTHING, Budget, BudgetConfig, Choice

# Rows are nearly free, as where weights must be read anyway; or they cost what requests cost.
CHEAP = functools.partial(StepTimes, drafting_seconds=0.02, draft_seconds=0.001)
FLAT = CHEAP(rows=(1, 1024), seconds=(1.0, 1.1))
PRICED = CHEAP(rows=(1, 101), seconds=(1.0, 2.0))
LINEAR = CHEAP(rows=(1, 1024), seconds=(1.0, 1024.0))
MODEL = DraftTimes(once=0.05, position=0.02, token=0.001)
# Steps that the first trials of both sources may cost.
FIRST = 2 * budget_lib.FIRST_PROBES * budget_lib.FIRST_COST


def make(times=FLAT, *, model=MODEL, max_length=8, max_width=4) -> Budget:
  config = BudgetConfig(num_speculative_tokens=max_length)
  return Budget(times, config, model=model, max_width=max_width)


class World:
  """Requests with their own acceptance probabilities, token by token."""

  def __init__(self, rates: dict[str, dict[str, float]], *, sibling: float = 0.0, seed: int = 0):
    self.rates, self.sibling, self.rng = rates, sibling, random.Random(seed)

  def run(self, budget: Budget, num_steps: int) -> list[list[Choice]]:
    made = []
    for _ in range(num_steps):
      choices = [*budget.plan([*self.rates])] or [NOTHING] * len(self.rates)
      made.append(choices)
      for name, choice in zip(self.rates, choices):
        if choice.source == "none":
          continue
        found = []
        lengths: dict[budget_lib.Source, int] = {
          "suffix": choice.suffix_length, "model": choice.model_length
        }  # fmt: skip
        for source, length in lengths.items():
          if not length:
            continue
          held = 0
          while held < length and self.rng.random() < self.rates[name][source]:
            held += 1
          sibling = None
          if source == "model" and choice.width > 1 and held < length:
            sibling = self.rng.random() < self.sibling
          budget.observe(name, source, length, length, held, sibling_held=sibling)
          found.append((held, length))
        if choice.source == "both":
          held, length = max(found)
          budget.observe(name, "both", length, length, held)
    return made


def share(made: list[list[Choice]], place: int, *names: str) -> float:
  return sum(choices[place].source in names for choices in made) / len(made)


def test_each_request_gets_the_source_that_says_its_text():
  world = World(
    {f"r{n}": {"suffix": 0.95, "model": 0.3} for n in range(3)}
    | {f"n{n}": {"suffix": 0.05, "model": 0.85} for n in range(3)}
  )
  made = world.run(make(PRICED), 600)[300:]
  for place in range(3):
    assert share(made, place, "suffix") > 0.8
    assert share(made, 3 + place, "model", "both") > 0.8


def test_nothing_is_drafted_where_nothing_pays():
  rates = {f"r{n}": {"suffix": 0.1, "model": 0.1} for n in range(4)}
  made = World(rates).run(make(LINEAR), 400)[200:]
  drafted = sum(choice != NOTHING for choices in made for choice in choices)
  assert drafted < 0.05 * 4 * len(made)
  # A model that is always right, and dearer than what it saves.
  rates = {"r": {"suffix": 0.0, "model": 1.0}}
  made = World(rates).run(make(model=DraftTimes(position=1.2)), 400)[200:]
  assert share(made, 0, "none") > 0.95
  made = World(rates).run(make(model=DraftTimes(position=0.05)), 400)[200:]
  assert share(made, 0, "model") > 0.9


def test_visits_are_the_rival():
  rates = {"r": {"suffix": 0.0, "model": 0.6}}
  visits = CHEAP(rows=FLAT.rows, seconds=FLAT.seconds, visits=((1, 8, 2.0),))
  assert share(World(rates).run(make(), 400)[200:], 0, "model") > 0.9
  assert share(World(rates).run(make(visits), 400)[200:], 0, "none") > 0.9


def test_a_dearer_model_drafts_less_far():
  rates = {"r": {"suffix": 0.0, "model": 0.9}}
  lengths = []
  for position in (0.0, 0.1, 0.5):
    made = World(rates).run(make(model=DraftTimes(position=position), max_length=16), 600)[-1]
    lengths.append(made[0].model_length)
  assert lengths[0] > lengths[1] > lengths[2] > 0


def test_width_where_siblings_hold_and_rows_are_free():
  rates = {"r": {"suffix": 0.0, "model": 0.6}}
  often = World(rates, sibling=0.8).run(make(PRICED), 600)[300:]
  seldom = World(rates, sibling=0.0).run(make(PRICED), 600)[300:]
  wide = [sum(c[0].width > 1 for c in made) / len(made) for made in (often, seldom)]
  assert wide[0] > 0.8 and wide[1] < 0.2


def test_a_plan_is_close_to_the_best_of_all():
  rng = random.Random(0)
  for _ in range(20):
    names = ["a", "b", "c"]
    budget = make(CHEAP(rows=(1, 8, 16, 64), seconds=(1.0, 1.1, 1.6, 5.0)), max_length=4)
    for name, source in itertools.product(names, ("suffix", "model")):
      rate = rng.random()
      for _ in range(20):
        held = 0
        while held < 4 and rng.random() < rate:
          held += 1
        budget.observe(name, source, 4, 4, held)
    shape = (rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), 1)
    speed, choices = budget._best(names, shape)
    assert speed == pytest.approx(budget.speed(names, choices))
    options = budget._options(shape)
    best = max(budget.speed(names, picks) for picks in itertools.product(options, repeat=3))
    assert best * 0.95 <= speed <= best + 1e-9


def test_equal_histories_make_equal_plans():
  rates = {f"r{n}": {"suffix": 0.2 * n, "model": 0.7} for n in range(4)}
  assert World(rates).run(make(), 200) == World(rates).run(make(), 200)
  assert not make().plan([])


def test_probes_cost_no_more_than_they_may():
  budget = make(LINEAR)
  rates = {f"r{n}": {"suffix": 0.0, "model": 0.0} for n in range(8)}
  made = World(rates).run(budget, 2000)
  plain = budget.seconds([NOTHING] * 8)
  lost = sum(budget.seconds(choices) / plain - 1 for choices in made)
  assert 0 < lost <= FIRST + budget_lib.PROBE_COST * 2000 + 1.1
  assert budget.acceptance["model"][0] < 0.3


class Counted(Budget):
  """Counts the searches for the best choices."""

  num_searches = 0

  def _best(self, request_ids, shape):
    self.num_searches += 1
    return super()._best(request_ids, shape)


def test_asking_costs_next_to_nothing_where_nothing_pays():
  visits = CHEAP(rows=FLAT.rows, seconds=FLAT.seconds, visits=((1, 8, 2.0),))
  budget = Counted(visits, model=MODEL)
  World({"r": {"suffix": 0.0, "model": 0.0}}).run(budget, 4096)
  # Where a step costs four of a visit, not even the best drafts pay.
  assert budget.num_searches == 0 and not budget.is_on
  rates = {f"r{n}": {"suffix": 0.0, "model": 0.0} for n in range(4)}
  budget = Counted(PRICED, model=MODEL)
  World(rates).run(budget, 4096)
  num_shapes = len(set(budget._shapes()))
  # After 8 plans, 16, 32, ..., 512, and so on: a plan in 270.
  assert 0 < budget.num_searches < 15 * (num_shapes + 1) and not budget.is_on


def test_what_begins_to_pay_is_found_though_nothing_paid_for_long():
  budget = make(PRICED)
  World({"r": {"suffix": 0.0, "model": 0.0}}).run(budget, 2000)
  made = World({"r": {"suffix": 0.0, "model": 0.95}}).run(budget, 3000)
  assert share(made[:100], 0, "none") > 0.9 and share(made[-1000:], 0, "model") > 0.9


def test_what_pays_from_the_beginning_is_found_by_the_first_probes():
  # As a 10 M model on a CPU: rows are expensive, and plain decoding takes eight steps.
  dear = CHEAP(rows=(1, 5, 9), seconds=(1.1, 2.3, 3.1), visits=((1, 8, 8.0),))
  model = DraftTimes(once=0.1, position=0.08)
  for rate, is_worth_it in ((0.95, True), (0.3, False)):
    budget = Budget(dear, model=model)
    made = World({"r": {"suffix": 0.0, "model": rate}}).run(budget, 300)
    assert (share(made[20:], 0, "model") > 0.9) == budget.is_on == is_worth_it


def test_a_dear_probe_is_saved_up_for():
  made = World({"r": {"suffix": 0.0, "model": 0.0}}).run(make(LINEAR), 8000)
  lost = [make(LINEAR).seconds(choices) - 1 for choices in made if choices != [NOTHING]]
  assert len(lost) >= 2 and all(cost > 1 for cost in lost)
  assert sum(lost) <= FIRST + budget_lib.PROBE_COST * 8000 + 1


def test_merged_drafts_promise_no_more_than_the_better_until_seen():
  budget = make()
  for _ in range(50):
    budget.observe("r", "suffix", 4, 4, 4)
    budget.observe("r", "model", 4, 4, 1)
  both = Choice("both", 4, 4, 1)
  better = budget.expected("r", Choice("suffix", 4, 0, 1))
  assert both.rows == 8 and budget.expected("r", both) == pytest.approx(better)
  for _ in range(200):
    budget.observe("r", "both", 4, 4, 0)
  assert budget.expected("r", both) < 0.3 * better
  budget.finish("r")
  assert budget.expected("r", both) == budget.expected("never seen", both)


@refusals.table(
  (lambda: make(max_width=0), "Budget.max_width: got 0, expected 1 to 4; 4 is"),
  (lambda: make(max_width=5), "Budget.max_width: got 5, expected 1 to 4; 4 is"),
  (lambda: make().observe("r", "none", 1, 1, 0),
   "got 0 accepted of 1 drafted of 1 allowed by 'none', expected accepted <= drafted <= allowed,"),
  (lambda: Budget(FLAT).observe("r", "model", 1, 1, 0), "by one of ['suffix']; pass the counts"),
  (lambda: make().observe("r", "model", 1, 1, 2), "got 2 accepted of 1 drafted of 1 allowed by"),
  (lambda: DraftTimes(once=-1.0), "DraftTimes: got once=-1.0,", "at least 0 seconds"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
