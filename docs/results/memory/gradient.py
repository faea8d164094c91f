"""Temporaries of the gradient program of Qwen3-0.6B's form, by implementation; no weights are made.

PYTHONPATH=. python docs/results/memory/gradient.py tiled,native none,layer 1,2,4
"""

import dataclasses
import sys

import jax
import numpy as np
import optax

from seerjax import numerics as numerics_lib, parallel
from seerjax.models import parameters, presets
from seerjax.trainer import losses, packing, step
from seerjax.types import (
  Completion,
  Problem,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  Verdict,
)

PAGE_SIZE = 32


def temporaries(implementation: str, remat: str, num_layers: int) -> int:
  """Returns bytes that XLA plans for one micro-batch of 2,048 rows and 4 sequences."""
  model = dataclasses.replace(presets.get("qwen3-0.6b"), num_layers=num_layers)
  numerics = numerics_lib.NumericsConfig(
    implementation=implementation,
    compute_dtype="bfloat16",
    query_tile=4,
    slot_tile=32,
    kv_split=64,
  )
  layout = dict(
    numerics=numerics,
    page_size=PAGE_SIZE,
    rows_per_micro_batch=2048,
    max_sequences=4,
    max_sequence_tokens=1024,
  )
  trainer = step.Trainer(
    model,
    numerics,
    losses.grpo(),
    optax.sgd(1.0),
    parallel.make_mesh(),
    packing.layout(**layout).num_pages,
    PAGE_SIZE,
    remat=remat,
  )
  completion = Completion(
    request_id="0",
    tokens=(1, 2),
    behaviour_logprobs=np.full(2, -1, np.float32),
    raw_logprobs=np.full(2, -1, np.float32),
    text="",
    finish_reason="length",
    policy_version=0,
  )
  request = Request(request_id="0", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=2), seed=0)
  verdict = Verdict(reward=0.0, correct=False, well_formed=True)
  group = RolloutGroup(
    group_index=0,
    problem=Problem(problem_id="0", prompt=""),
    rollouts=(Rollout(request=request, completion=completion, verdict=verdict),),
  )
  batch = packing.pack([group], np.ones((1, 1), np.float32), **layout)
  one = lambda leaf: leaf[0]
  zeros = np.zeros(batch.targets.shape, np.float32)
  micro = step.MicroBatch(
    batch._replace(behaviour_logprobs=None, raw_logprobs=None), zeros, np.full(1, True), None
  )
  weights = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, numerics.dtype), parameters.shapes(model, 8)
  )
  sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), weights)
  lowered = trainer._gradient.lower(
    weights, jax.tree.map(one, micro), losses.denominators(batch), sums
  )
  return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
  implementations, remats, layers = (argument.split(",") for argument in sys.argv[1:])
  for implementation in implementations:
    for remat in remats:
      for count in layers:
        found = temporaries(implementation, remat, int(count))
        form = f"{implementation} remat={remat} {count} layer(s)"
        print(f"{form}: {found / 2**20:,.0f} MiB", flush=True)
