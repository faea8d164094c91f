"""The optimiser's learning rate by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from seerjax.trainer import optimizer as optimizer_lib


@pytest.mark.parametrize(
  ("warmup_steps", "rates"),
  [
    (4, [0.025, 0.05, 0.075, 0.1, 0.1]),
    (2, [0.05, 0.1, 0.1, 0.1, 0.1]),
    (1, [0.1] * 5),
    (0, [0.1] * 5),
  ],
)
def test_the_learning_rate_warms_up_from_its_first_part_so_that_no_step_teaches_nothing(
  warmup_steps, rates
):
  optimizer = optimizer_lib.make_optimizer(
    optimizer_lib.OptimizerConfig(learning_rate=0.1, warmup_steps=warmup_steps)
  )
  params = {"w": jnp.ones(3)}
  state, sizes = optimizer.init(params), []
  for _ in rates:
    updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
    sizes.append(float(jnp.max(jnp.abs(updates["w"]))))
  np.testing.assert_allclose(sizes, rates, atol=1e-4)
