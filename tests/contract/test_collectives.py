"""The collectives of a compiled train step are totally ordered: one is in flight at a time.

On a CPU all collectives of a program share one rendezvous name. Two unordered ones gave a device
the other's data, or crashed the process (seen with JAX 0.10.2).
"""

from __future__ import annotations

import dataclasses

import collective_order
import jax
from jax import lax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
import tiny_model

from seerjax import layer_kinds, parallel
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config
from seerjax.ops import rotary
from seerjax.trainer import losses, step

CONFIG = model_config.TransformerConfig(
  vocab_size=36,
  hidden_size=11,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        has_qkv_biases=True,
        rotary=rotary.RotaryConfig(head_dim=4),
      ),
      feed_forward=Gated(intermediate_size=28),
    ),
    1,
  ),
  max_model_len=64,
)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3], ids=["all weights", "adapters"])
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_collectives_of_a_train_step_wait_for_each_other(backend, rank):
  numerics = dataclasses.replace(tiny_model.NUMERICS, backend=backend, reduction_shards=4)
  case = mesh_cases.Case(CONFIG, numerics, rank=rank)
  trainer, batch = mesh_cases.trainer_of(case, (1, 2)), mesh_cases.batch_of(case)
  params = trainer._placed(mesh_cases.weights_of(case)[1], "params")
  count, rows = batch.targets.shape
  batch = batch._replace(behaviour_logprobs=None, raw_logprobs=None)
  micro = step.MicroBatch(batch, np.zeros((count, rows), np.float32), np.full(count, True), None)
  totals = step.BatchTotals(losses.denominators(batch))
  given = (params, trainer._taken(micro, [0]), totals, trainer._zeros(params))
  text = trainer._gradient.lower(*given).compile().as_text()
  pairs, found = collective_order.unordered(text)
  assert not pairs, pairs
  assert found > 4


def test_twin_gatherings_that_do_not_wait_are_found():
  mesh = parallel.make_mesh(tensor_parallel_size=2)

  def text(waits: bool) -> str:
    def both(x, y):
      first = lax.all_gather(x, parallel.MODEL_AXIS)
      # Some collectives are in a branch.
      y = parallel.after(y, first) if waits else y
      gathered = lambda: lax.all_gather(y, parallel.MODEL_AXIS)
      second = lax.cond(jnp.any(y > 0), gathered, lambda: jnp.zeros((2, *y.shape), y.dtype))
      return first, second

    place = jax.P(parallel.MODEL_AXIS)
    spread = jax.shard_map(both, mesh=mesh, in_specs=place, out_specs=jax.P(), check_vma=False)
    ones = jnp.ones((4, 3), jnp.float32)
    return jax.jit(spread).lower(ones, ones).compile().as_text()

  assert collective_order.unordered(text(waits=True)) == ([], 3)
  pairs, found = collective_order.unordered(text(waits=False))
  assert len(pairs) == 1 and found == 3
