"""Two draft sources under one plan: the feedback to each, the drafts, and errors."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import drafting_models
from drafting_models import CONFIG
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.step_times import DraftTimes, StepTimes
from seerjax.models import huggingface, parameters
from seerjax.speculation import draft_loading, hybrid_drafter
from seerjax.speculation.budget import NOTHING, Budget, Choice
from seerjax.speculation.config import DraftedRun, SpeculationConfig, make_drafter
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.speculation.statistics import Acceptance
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Request, SamplingParams

NATIVE = dataclasses.replace(drafting_models.ONE_SLAB, backend="native")
PROMPT = tuple(range(10, 16))


def hybrid(kind: str = "same", width: int = 1, **changes) -> HybridDrafter:
  return drafting_models.hybrid(kind, NATIVE, dataclasses.replace(CONFIG, width=width), **changes)


def group(step: int, count: int = 3, seeds=None, prompt=PROMPT) -> list[Request]:
  return [
    Request(
      request_id=f"{step}/{place}",
      prompt=prompt,
      sampling=SamplingParams(max_tokens=24, temperature=0.7),
      seed=place if seeds is None else seeds[place],
      group_id=f"group {step}",
    )
    for place in range(count)
  ]


def counts(drafter: HybridDrafter) -> dict[str, tuple[int, int]]:
  return {
    "suffix": (drafter.suffix.acceptance.num_drafted, drafter.suffix.acceptance.num_accepted),
    "model": (drafter.model.acceptance.num_drafted, drafter.model.acceptance.num_accepted),
    "all": (drafter.acceptance.num_drafted, drafter.acceptance.num_accepted),
  }


@pytest.fixture(scope="module")
def plain():
  """Returns each request's completion without drafts."""
  engine = drafting_models.make_engine(NATIVE)
  return {done.request_id: done for done in engine.generate(group(0))}


@pytest.mark.thorough
def test_a_good_model_drafts_and_a_useless_one_soon_does_not(plain):
  found = {}
  for kind in ("same", "nan"):
    engine, drafter = drafting_models.make_engine(NATIVE), hybrid(kind)
    engine.drafter = drafter
    for _ in range(4):
      for done in engine.generate(group(0)):
        assert done.has_bits_of(plain[done.request_id])
    found[kind] = counts(drafter)
    if kind == "nan":
      # Its omitted drafts are expected to fail, so it is seldom called.
      assert 0 < drafter.model.counters.calls < engine.counters.visits / 4
      assert drafter.budget.acceptance["model"][0] < 0.4
  drafted, accepted = found["same"]["model"]
  assert accepted > 0.8 * drafted > 60
  assert found["nan"]["model"] == (0, 0)
  assert found["nan"]["suffix"][1] > 0  # Equal texts repeat.


@pytest.mark.thorough
def test_a_drafter_that_drafts_nothing_leaves_visits_as_long_as_they_are(plain):
  dear = StepTimes(rows=(1, 64), seconds=(1.0, 64.0), visits=((1, 8, 1.0),), drafting_seconds=100.0)
  found = {}
  for drafter in (
    None,
    HybridDrafter(
      SuffixDrafter(budget=None),
      drafting_models.drafter("same", NATIVE),
      Budget(dear, model=DraftTimes(once=100.0), max_width=1),
    ),
  ):
    engine = drafting_models.make_engine(NATIVE)
    engine.drafter = drafter
    for done in engine.generate(group(0)):
      assert done.has_bits_of(plain[done.request_id])
    found[drafter is None] = engine.counters.visits, engine.counters.steps
    assert engine.drafter is drafter and engine.counters.drafted_tokens == 0
  assert found[True] == found[False] and found[True][1] > 2 * found[True][0]


class Result(NamedTuple):
  """The arguments of `Budget.observe`."""

  source: str
  allowed: int
  drafted: int
  held: int
  sibling: bool | None


class Recorder:
  """A budget that plans one choice and records its feedback."""

  def __init__(self, choice: Choice, drafter: HybridDrafter):
    self.choice, self.results = choice, []
    self.config, self.expected = drafter.budget.config, drafter.budget.expected

  def plan(self, request_ids, high=()):
    return [self.choice] * len(request_ids)

  def observe(
    self, request_id, source, num_allowed, num_drafted, num_accepted, *, sibling_held=None
  ):
    self.results.append(Result(source, num_allowed, num_drafted, num_accepted, sibling_held))

  def finish(self, request_id):
    pass


def test_each_source_is_told_how_its_own_path_held():
  drafter = hybrid(width=3)
  recorder = drafter.budget = Recorder(Choice("both", 4, 4, 2), drafter)  # pyright: ignore
  tokens = [*PROMPT]
  drafter.suffix.finish("before", "g", [*PROMPT, 1, 2, 3, 4, 5], len(PROMPT))
  query = DraftQuery("r", "g", tokens, len(PROMPT), 20)
  (paths,) = drafter.draft([query])
  by_model = drafter._drafted["r"].paths[1]
  assert drafter._drafted["r"].paths[0] == [(1, 2, 3, 4)] and (1, 2, 3, 4) in paths
  assert len(by_model[0]) == 4 and len(by_model) == 1 + 4  # Two ids per place.
  # The target accepts one token of the model's path, then a sibling of the second.
  sibling = next(path for path in by_model[1:] if len(path) == 2)
  tokens += [*sibling, 60]
  drafter.observe("r", "g", 2, 2)
  drafter.draft([query])
  assert recorder.results == [
    Result("suffix", 4, 4, 0, None), Result("model", 4, 4, 1, True), Result("both", 4, 4, 2, None)
  ]  # fmt: skip
  assert (drafter.acceptance.num_drafted, drafter.acceptance.num_accepted) == (2, 2)
  assert drafter.model.acceptance.num_accepted == 2
  # A completion that ends within a draft is no evidence about the rest.
  recorder.results.clear()
  main = drafter._drafted["r"].paths[1][0]
  drafter.finish("r", "g", [*tokens, *main[:2]], len(PROMPT))
  assert recorder.results[1] == Result("model", 2, 2, 2, False)
  # A draft with an unknown outcome gives no feedback.
  recorder.results.clear()
  drafter.draft([query._replace(request_id="s")])
  drafter.finish("s", "g", tokens, len(PROMPT))
  assert not recorder.results and not drafter._drafted


def test_what_is_planned_is_cut_at_what_can_be_used():
  drafter = hybrid()
  drafter.budget = Recorder(Choice("model", 0, 7, 1), drafter)  # pyright: ignore
  (paths,) = drafter.draft([DraftQuery("r", "", [*PROMPT], len(PROMPT), 2)])
  assert [len(path) for path in paths] == [2]
  drafter.budget = Recorder(NOTHING, drafter)  # pyright: ignore
  assert drafter.draft([DraftQuery("s", "", [*PROMPT], len(PROMPT), 2)]) == ()


def test_refusals():
  drafter = hybrid()
  planned = SuffixDrafter(budget=drafting_models.suffix_budget())
  with pytest.raises(ValueError, match="got a drafter with its own budget, expected one with"):
    HybridDrafter(planned, drafter.model, drafter.budget)
  with pytest.raises(ValueError, match="got a budget without a model, expected one that plans for"):
    HybridDrafter(drafter.suffix, drafter.model, drafting_models.suffix_budget())
  wide = drafting_models.source_budget(max_width=2)
  with pytest.raises(ValueError, match="got max_width=2 for a model of width 1, expected no more;"):
    HybridDrafter(drafter.suffix, drafter.model, wide)


@pytest.mark.thorough
def test_a_run_with_a_draft_model_gets_both(tmp_path):
  engine = drafting_models.make_word_engine()
  shape = dataclasses.replace(tiny_model.SMALLEST, vocab_size=512)
  one = dataclasses.replace(engine.numerics, reduction_shards=1)
  params = parameters.init(numerics_lib.key(0), shape, one)
  huggingface.save(tmp_path, params, shape, tokenizer=engine.tokenizer)
  taken = Acceptance()
  run = DraftedRun(engine=engine, is_probe=lambda _: False, acceptance=taken)
  assert isinstance(make_drafter(SpeculationConfig(), run), SuffixDrafter)
  config = SpeculationConfig(
    draft_model=str(tmp_path), draft=dataclasses.replace(CONFIG, width=2, num_slots=3)
  )
  drafter = make_drafter(config, run)
  assert isinstance(drafter, HybridDrafter) and drafter.acceptance is taken
  assert drafter.budget.config.num_speculative_tokens == 8 and drafter.budget.max_width == 2
  # Measuring leaves no state behind, and a model has a cost.
  assert drafter.model.counters.calls == 0 and not drafter.model.slots._slot_of
  cost = drafter.budget._costs["model"]
  assert cost.seconds(1, 8) >= cost.seconds(1, 1) > 0 and cost.seconds(2, 8) >= cost.seconds(1, 8)
  assert hybrid_drafter.of_run is not draft_loading.of_run
