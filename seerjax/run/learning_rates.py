"""Usual learning rates of reinforcement, by the size of a model and by what of it learns.

    parameters          all weights          adapters (LoRA)
    1.1 M (nano)        1e-4                 2e-4
    11 M                1e-5                 2e-4
    0.1 B and more      1e-6                 2e-5

At 0.1 B and more they are what others publish: 1e-6 for all weights (DAPO, 32 B,
https://arxiv.org/abs/2503.14476; it is also the default of TRL's GRPO), and for adapters 10 to 100
times that (TTT-Discover, rank 32: 4e-5, https://arxiv.org/abs/2601.16175). nano's was tried here.
Between them the rate falls with the number of parameters, an interpolation that nobody measured.
"""

from __future__ import annotations

import math

import jax

from seerjax.models import config as model_config, parameters

FULL_RATE = 1e-6  # Of all weights, from `LARGE` parameters on.
LORA_TIMES = 20.0  # How many times that of all weights the rate of adapters is.
MOST_FULL, MOST_LORA = 1e-4, 2e-4  # The highest rates, however small the model.
LARGE = 1.2e8  # Parameters.
# A rate so many times the usual one is warned of, from so many parameters on. Smaller models bear
# more, and are often trained from nothing.
MOST_TIMES = 5.0
WARNED = 1e7


def num_parameters(model: model_config.TransformerConfig) -> int:
  """Returns how many weights a model has."""
  leaves = jax.tree.leaves(parameters.shapes(model, 1))
  return sum(math.prod(leaf.shape) for leaf in leaves)


def usual(count: int, *, is_lora: bool) -> float:
  """Returns the usual learning rate of a model of `count` parameters, to one significant digit.

  Args:
    count: weights of the whole model, those that do not learn included.
    is_lora: whether adapters learn in place of all weights.
  """
  rate = FULL_RATE * max(1.0, LARGE / count)
  rate = min(MOST_LORA, LORA_TIMES * rate) if is_lora else min(MOST_FULL, rate)
  return float(f"{rate:.0e}")


def warning(rate: float, model: model_config.TransformerConfig, *, is_lora: bool) -> str:
  """Returns one line on a learning rate far above the usual one; "" if it is not."""
  count = num_parameters(model)
  found = usual(count, is_lora=is_lora)
  most = float(f"{MOST_TIMES * found:.0e}")
  if count < WARNED or rate <= most:
    return ""
  what = "adapters beside" if is_lora else "all of"
  return (
    f"WARNING: OptimizerConfig.learning_rate: got {rate:g} for {what} {count / 1e6:,.0f} M"
    f" parameters, expected about {found:g} and at most {most:g}; one step at too"
    " high a rate can undo what a model knows: set"
    f" --config.optimizer.learning_rate={found:g}, or 0, which takes that"
  )
