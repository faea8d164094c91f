"""The gradient of the overlap penalty against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.problems.circle_packing import descent


def test_the_gradient_is_that_of_the_penalty():
  rng = np.random.default_rng(0)
  z = np.concatenate([rng.random(10), rng.uniform(0.1, 0.3, 5)])
  gradient, other = np.empty(15), np.empty(15)
  descent._penalised(z, 20.0, gradient)
  for k in range(15):
    step = np.zeros(15)
    step[k] = 1e-6
    slope = descent._penalised(z + step, 20.0, other)
    slope -= descent._penalised(z - step, 20.0, other)
    assert slope / 2e-6 == pytest.approx(gradient[k], abs=1e-5)
