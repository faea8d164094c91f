"""Estimates the memory of a run before anything is allocated."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from seerjax import host_memory
from seerjax.engine import engine as engine_lib, sizes
from seerjax.models import parameters
from seerjax.run import policy as policy_lib, programs as programs_lib
from seerjax.run.config import SharedConfig
from seerjax.run.programs import Programs
from seerjax.trainer import plan as plan_lib, shards


class MemoryPlan(NamedTuple):
  """Estimated memory of a run, in bytes, on the device that uses the most.

  Attributes:
    learning: masters, moments, gradient sums and the rest of training.
    frozen: frozen weights, in addition to the running ones.
    pages: KV pages of the engine.
    are_pages_given_back: whether the engine releases its KV pages during training.
    held: memory that this process already uses, including the policy's initial weights; CPU only.
    others: total of all other devices if they share one memory, else 0.
    free: memory that is free now.
    engine: engine sizes, with all defaults filled in.
  """

  learning: plan_lib.Plan
  frozen: int
  pages: int
  are_pages_given_back: bool
  held: int
  others: int
  free: float
  engine: engine_lib.EngineConfig

  @property
  def needed(self) -> int:
    """Peak bytes in addition to `held`."""
    while_learning = self.learning.learning + (0 if self.are_pages_given_back else self.pages)
    return self.learning.kept + self.frozen + max(self.pages, while_learning) + self.others

  def describe(self) -> str:
    """Returns a one-line summary in MiB."""
    mib = plan_lib.MIB
    given_back = " (released while training)" if self.are_pages_given_back else ""
    others = f", {self.others / mib:,.0f} on the other devices" if self.others else ""
    free = (
      f"{self.free / mib:,.0f} are free" if self.free < math.inf else "the free memory is unknown"
    )
    return (
      f"memory, MiB a device: {self.learning.describe()}, {self.frozen / mib:,.0f} frozen weights,"
      f" {self.pages / mib:,.0f} pages of the engine{given_back}{others}; at most"
      f" {self.needed / mib:,.0f} on top of {self.held / mib:,.0f} in use now, and {free}"
    )


def memory_plan(programs: Programs) -> MemoryPlan:
  """Estimates the memory of a run without computing or allocating anything.

  Args:
    programs: the run's own programs, which are not compiled for this.

  Raises:
    ValueError: with all figures, if the run does not fit in free memory.
  """
  config, decoder = programs.config, programs.decoder
  model, trainer, mesh = decoder.shape, programs.trainer, programs.trainer.mesh
  masters = parameters.shapes(model, config.numerics.reduction_shards)
  plain = parameters.rounded_shapes(masters, config.numerics.dtype)
  weights = policy_lib.running_shapes(config.weights, model)
  layout = programs_lib.layout(config.engine, config.trainer, decoder)
  learning = trainer.plan(weights, layout, _most_micro_batches(config))
  # With adapters, the frozen weights are the running ones.
  is_beside = config.keeps_base and not config.lora_rank
  frozen = shards.bytes_of(plain, parameters.specs_of(plain), mesh) if is_beside else 0
  num_devices, is_cpu = mesh.devices.size, jax.default_backend() == "cpu"
  free = sizes.free_bytes(mesh)
  others = 0
  if is_cpu:
    free *= num_devices
    others = (num_devices - 1) * (learning.kept + learning.learning + frozen)
  plan = MemoryPlan(
    learning, frozen, 0, config.engine.release_kv_while_training,
    held=int(host_memory.resident_bytes()) if is_cpu else 0,
    others=others, free=free, engine=config.engine,
  )  # fmt: skip
  if plan.needed > free:
    raise ValueError(
      f"RunConfig: got a run that needs more memory than is free ({plan.describe()}), expected a"
      " run that fits; set TrainerConfig.remat=layer, RunConfig.lora_rank or a bfloat16"
      " NumericsConfig.compute_dtype, lower EngineConfig.max_model_len or"
      " TrainerConfig.sequences_per_micro_batch, or free memory."
    )
  sharers = num_devices if is_cpu else 1
  left = (free - plan.needed) / sharers
  if plan.are_pages_given_back:
    left += learning.learning / sharers
  engine = sizes.fitted(config.engine, decoder, free_bytes=left)
  context = min(config.engine.max_model_len, model.max_model_len)
  if engine.max_model_len < context:
    raise ValueError(
      f"RunConfig: got pages for requests of at most {engine.max_model_len} tokens"
      f" ({plan.describe()}), expected room for a context of {context};"
      f" {sizes.held_by_pages(engine)}, or lower EngineConfig.max_model_len."
    )
  sharers = config.tensor_parallel_size
  pages = sizes.pages_bytes(engine, decoder, tensor_parallel_size=sharers) // sharers
  return plan._replace(
    engine=engine,
    pages=pages,
    others=others + (num_devices - 1) * pages if is_cpu else 0,
  )


def _most_micro_batches(config: SharedConfig) -> int:
  """Returns the micro-batches per optimiser step if every completion has the maximum length."""
  groups = -(-config.prompts_per_step // config.trainer.num_mini_batches)
  longest = min(config.engine.max_model_len - 1, config.trainer.rows_per_micro_batch)
  fitting = max(1, config.trainer.rows_per_micro_batch // longest)
  together = min(fitting, config.trainer.sequences_per_micro_batch)
  return -(-groups * config.group_size // together)
