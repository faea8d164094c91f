"""A Flax NNX module as a policy: trained with NNX, then by SeerJAX, then with NNX again.

    nnx.Module --pure_params--> a GRPO step --> a step of discovery --update_weights--> nnx.Module
      |                                                                                    |
      +-- nnx.Optimizer, before                                       nnx.Optimizer, after +

A small transformer first learns to imitate worked solutions with `nnx.Optimizer`. Its weights then
take a step of GRPO on word problems, and a step of test-time training on `vehicle_routing.py`, in
an edit language that uses the first 88 ids of the vocabulary. The weights return to the same
module, which computes logits with the same bits as our forward pass, and the original optimiser
continues with them.

  python examples/flax_policy.py

Takes one to two minutes on two CPU cores, mostly compilation. The last line reads
`equal bits: True`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import NumericsConfig, layer_kinds, rl, ttt
from seerjax.discovery import loading
from seerjax.discovery.config import DiscoverConfig, TinyConfig
from seerjax.engine.engine import EngineConfig
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import (
  config as model_config,
  flax_module,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.models.decoder import decide
from seerjax.ops import rotary
from seerjax.rollout.groups import RolloutConfig
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.run.policy import Policy
from seerjax.tasks import word_problems

PROBLEM = pathlib.Path(__file__).with_name("vehicle_routing.py")
TOKENIZER = tokenizer_lib.load(pathlib.Path(tokenizer_lib.__file__).parent / "nano")
NUMERICS = NumericsConfig(query_tile=4, slot_tile=32, kv_split=64)
MODEL = model_config.TransformerConfig(
  vocab_size=TOKENIZER.vocab_size,
  hidden_size=32,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=8,
        num_kv_heads=8,
        head_dim=4,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=4, base=10_000.0),
      ),
      feed_forward=Gated(intermediate_size=64),
    ),
    1,
  ),
  max_model_len=256,
)
ENGINE = EngineConfig(
  page_size=32, num_pages=96, max_num_seqs=8, max_model_len=256, batch_size_buckets=(64,)
)
TRAINER = TrainerConfig(rows_per_micro_batch=512, sequences_per_micro_batch=8)
LENGTH = 128  # Tokens of a training example; longer ones are cut.


def examples() -> jax.Array:
  """Returns i32[8, LENGTH], word problems with their solutions, padded with the end token."""
  task, rows = word_problems.WordProblems(), []
  for index in range(8):
    problem = task.problem("train", index)
    ids = [*TOKENIZER.chat_ids(problem.prompt), *TOKENIZER.encode(problem.solution)]
    rows.append((ids + [TOKENIZER.eos_ids[0]] * LENGTH)[:LENGTH])
  return jnp.asarray(rows, jnp.int32)


@nnx.jit
def imitate(module: flax_module.Transformer, optimizer: nnx.Optimizer, tokens: jax.Array):
  """Takes one step of next-token prediction on i32[b, t]; returns the loss before it."""

  def loss(module: flax_module.Transformer) -> jax.Array:
    scores = jax.nn.log_softmax(module(tokens)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

  value, gradient = nnx.value_and_grad(loss)(module)
  optimizer.update(module, gradient)
  return value


# --8<-- [start:grpo_step]
def grpo_step(params: parameters.Params, directory: pathlib.Path) -> parameters.Params:
  """Returns the weights after one step of GRPO on word problems."""
  config = RunConfig(
    model="an nnx module",
    num_steps=1,
    numerics=NUMERICS,
    engine=ENGINE,
    rollout=RolloutConfig(prompts_per_step=2, group_size=4, max_tokens=12),
    trainer=TRAINER,
    evaluation=EvaluationConfig(num_problems=2),
  )

  class Brief(word_problems.WordProblems):
    """Rewards short answers, which untrained weights can learn."""

    def verdict(self, problem, text):
      return dataclasses.replace(super().verdict(problem, text), reward=-len(text) / 100)

  policy = Policy(MODEL, params, TOKENIZER)
  result = rl.train(config, policy, Brief(), directory, log=lambda line: None)
  assert result.summary["kl_max"] == 0.0 and result.summary["optimizer_steps"] == 1
  return result.state.params


# --8<-- [end:grpo_step]
def discovery_step(params: parameters.Params, directory: pathlib.Path) -> parameters.Params:
  """Returns the weights after one step of test-time training on one problem."""
  config = DiscoverConfig(
    problem=str(PROBLEM),
    num_steps=1,
    prompts_per_step=2,
    group_size=4,
    numerics=NUMERICS,
    engine=ENGINE,
    trainer=TRAINER,
    tiny=TinyConfig(warm_sentences=0),  # Keep the given weights.
  )
  found = ttt.discover(
    config,
    loading.load(config.problem),
    directory,
    policy=Policy(MODEL, params),
    log=lambda line: None,
  )
  print(f"discovery: the shortest tours found are {found.score.value:.0f} long")
  return found.state.params


def main() -> bool:
  """Runs all stages; returns whether the module's logits equal our forward pass at the end."""
  tokens = examples()
  module = flax_module.Transformer(MODEL, NUMERICS, rngs=nnx.Rngs(params=0))
  optimizer = nnx.Optimizer(module, optax.adam(3e-3), wrt=nnx.Param)
  losses = [float(imitate(module, optimizer, tokens)) for _ in range(20)]
  print(f"imitation under nnx.Optimizer: {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")

  with tempfile.TemporaryDirectory() as directory:
    first = module.pure_params()
    second = grpo_step(first, pathlib.Path(directory) / "grpo")
    third = discovery_step(second, pathlib.Path(directory) / "discovery")
  moved = [
    max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new)))
    for old, new in ((first, second), (second, third))
  ]
  print(f"largest change of a weight: {moved[0]:.1e} by GRPO, {moved[1]:.1e} by discovery")
  assert min(moved) > 0

  module.update_weights(third)
  expected = flax_module.logits_of(
    parameters.compute_params(third, NUMERICS), tokens, decoder=decide(MODEL, NUMERICS)
  )
  is_equal = np.array_equal(nnx.jit(lambda module, x: module(x))(module, tokens), expected)
  losses = [float(imitate(module, optimizer, tokens)) for _ in range(20)]
  print(f"and on under nnx.Optimizer: {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")
  assert losses[-1] < losses[0]
  return is_equal


if __name__ == "__main__":
  is_equal = main()
  print("equal bits:", is_equal)
  sys.exit(not is_equal)
