"""Default learning rates for reinforcement learning, by model size and trained weights.

    parameters          all weights          adapters (LoRA)
    1.1 M (nano)        1e-4                 2e-4
    11 M                1e-5                 2e-4
    0.1 B and more      1e-6                 2e-5

From 0.1 B on, the values follow published ones: 1e-6 for all weights (DAPO, 32 B,
https://arxiv.org/abs/2503.14476; also the default of TRL's GRPO), and 10 to 100 times that for
adapters (TTT-Discover, rank 32: 4e-5, https://arxiv.org/abs/2601.16175). The values for nano were
tried here. The interpolation in between, by number of parameters, was not measured.
"""

from __future__ import annotations

import math

import jax

from seerjax.models import config as model_config, parameters

FULL_RATE = 1e-6  # Rate for all weights, from `LARGE` parameters on.
LORA_TIMES = 20.0  # Rate of adapters relative to that of all weights.
MOST_FULL, MOST_LORA = 1e-4, 2e-4  # Upper bounds for small models.
LARGE = 1.2e8  # Parameters.
# From `WARNED` parameters on, a rate above `MOST_TIMES` times the default gives a warning. Smaller
# models tolerate more, and are often trained from scratch.
MOST_TIMES = 5.0
WARNED = 1e7


def num_parameters(model: model_config.TransformerConfig) -> int:
  """Returns the number of weights of a model."""
  leaves = jax.tree.leaves(parameters.shapes(model, 1))
  return sum(math.prod(leaf.shape) for leaf in leaves)


def usual(count: int, *, is_lora: bool) -> float:
  """Returns the default learning rate for a model of `count` parameters, to one significant digit.

  Args:
    count: weights of the whole model, including frozen ones.
    is_lora: whether adapters are trained instead of all weights.
  """
  rate = FULL_RATE * max(1.0, LARGE / count)
  rate = min(MOST_LORA, LORA_TIMES * rate) if is_lora else min(MOST_FULL, rate)
  return float(f"{rate:.0e}")


def warning(rate: float, model: model_config.TransformerConfig, *, is_lora: bool) -> str:
  """Returns a one-line warning if a learning rate is far above the default; "" otherwise."""
  count = num_parameters(model)
  found = usual(count, is_lora=is_lora)
  most = float(f"{MOST_TIMES * found:.0e}")
  if count < WARNED or rate <= most:
    return ""
  what = "adapters of" if is_lora else "all of"
  return (
    f"WARNING: OptimizerConfig.learning_rate: got {rate:g} for {what} {count / 1e6:,.0f} M"
    f" parameters, expected about {found:g} and at most {most:g}; one step at too"
    " high a rate can undo what a model knows: set"
    f" --config.optimizer.learning_rate={found:g}, or 0, which takes that"
  )
