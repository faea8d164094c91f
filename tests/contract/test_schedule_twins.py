"""Twins of the engine: each breaks the contract, and a schedule detects it."""

from __future__ import annotations

import collections
import dataclasses
import functools

from drawn_requests import make_engine
import hypothesis
import numpy as np
import pytest
import schedule_plans
import schedule_runs
from seen_inputs import SeesInputs
import twins

from seerjax.engine import engine as engine_lib, planner as planner_lib


class FollowsTheBatch(SeesInputs):
  """Twin: the noise changes when a step samples more than one request."""

  def _inputs(self, work):
    inputs = super()._inputs(work)
    crowded = (inputs.num_samples > 1).astype(np.uint32)
    return inputs._replace(seeds=inputs.seeds + crowded[:, None])


@pytest.mark.thorough
def test_a_sleeper_that_takes_the_slot_of_one_in_front_is_found_out():
  def make(context: int, decode_steps_per_call: int, **others) -> engine_lib.Engine:
    config = dataclasses.replace(
      schedule_plans.SIZES["chunks of 16"],
      max_model_len=context,
      decode_steps_per_call=decode_steps_per_call,
    )
    return make_engine(
      config, schedule_plans.NUMERICS["native f32"], planner=twins.TakesASlot, **others
    )

  plan, events = schedule_plans.beside_sleepers(64, host_pages=0), collections.Counter()
  with pytest.raises(AssertionError, match="got Completion"):
    schedule_runs.Schedule(
      plan, make, (64,), (1,), schedule_plans.NUMERICS["native f32"], events
    ).run()
  assert events["rows among others"] > 0


class BeginsLate(planner_lib.Planner):
  """Twin: visits of several steps start one position late."""

  def visit_inputs(self, scheduled, inputs, num_steps):
    visit = super().visit_inputs(scheduled, inputs, num_steps)
    batch = visit.step.batch
    late = batch._replace(positions=batch.positions + 1)
    return visit._replace(step=visit.step._replace(batch=late))


LATE = functools.partial(engine_lib.Engine, planner=BeginsLate)


@pytest.mark.thorough
@pytest.mark.parametrize(
  "kind, dtype, place, num, steps",
  [(FollowsTheBatch, "bf16", 1, 6, (1,)), (LATE, "f32", 0, 2, (8, 3))],
)
def test_an_engine_that_breaks_the_contract_is_found_out(kind, dtype, place, num, steps, seed):
  # The twin must fail, so nothing is saved to the database and nothing is shrunk.
  explicit = [hypothesis.Phase.explicit] if kind is LATE else []
  settings = hypothesis.settings(
    max_examples=num,
    phases=[*explicit, hypothesis.Phase.generate],
    database=None,
    report_multiple_bugs=False,
  )
  size, mesh, contexts, _ = schedule_plans.QUICK[dtype][place]
  given = dict(seed=seed, settings=settings, events=collections.Counter(), steps=steps, kind=kind)
  with pytest.raises(AssertionError, match="got Completion"):
    schedule_runs.run_schedules(schedule_plans.NUMERICS[dtype], size, mesh, contexts, **given)
