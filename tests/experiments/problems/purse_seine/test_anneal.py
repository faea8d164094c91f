"""The annealer keeps a fence simple, and its counts match a count by hand."""

from __future__ import annotations

from fence_cases import WHOLE, by_sum
import numpy as np

from experiments.problems.purse_seine import anneal, counting, rules


def test_the_annealer_keeps_a_fence_simple_and_shortens_one_that_is_too_long():
  fence = rules.fence_of(WHOLE.start(0))
  for seed in range(6):
    fence, best = anneal.anneal(
      WHOLE._counter,
      fence,
      num_steps=4000,
      temperatures=(30.0, 5.0),
      reaches=(9000.0, 900.0),
      grains=(300.0, 1.0),
      seed=seed,
    )
    artefact = rules.artefact_of(fence)
    assert rules.illegality(artefact) == ""
    assert counting.count(WHOLE._counter, fence) == by_sum(WHOLE.points, artefact)
    assert best is not None and rules.illegality(rules.artefact_of(best)) == ""
  xs = np.array([0, 100_000, 100_000, 60_000, 60_000, 40_000, 40_000, 0])
  ys = np.array([0, 0, 100_000, 100_000, 70_000, 70_000, 100_000, 100_000])
  too_long = rules.Fence(xs, ys)
  assert rules.perimeter_of(too_long) == 460_000
  options = dict(temperatures=(0.0, 0.0), reaches=(3000.0, 3000.0), seed=1)
  assert anneal.anneal(WHOLE._counter, too_long, num_steps=0, **options)[1] is None
  _, best = anneal.anneal(WHOLE._counter, too_long, num_steps=20_000, **options)
  assert best is not None and rules.illegality(rules.artefact_of(best)) == ""
