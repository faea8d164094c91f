"""Trainers of small models."""

from __future__ import annotations

from typing import Any

import jax
import optax

from seerjax import parallel
from seerjax.models.transformer import Remat
from seerjax.trainer import losses, packing, step

GRPO = losses.grpo()


def make(
  *,
  loss: losses.LossConfig = GRPO,
  optimizer: optax.GradientTransformation | None = None,
  mesh: jax.sharding.Mesh | None = None,
  remat: Remat = "none",
  **layout: Any,
) -> step.Trainer:
  """Returns a trainer of micro-batches of `packing.layout(**layout)`; SGD by default."""
  return step.Trainer(
    layout["decoder"],
    loss,
    optimizer or optax.sgd(1e-3),
    mesh or parallel.make_mesh(),
    packing.layout(**layout).num_pages,
    layout["page_size"],
    remat,
  )
