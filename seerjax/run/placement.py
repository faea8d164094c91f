"""Command-line flags for dtype, backend and devices of a model.

Names and checks are those of `RunConfig`. Invalid values raise before any weight is read.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from absl import flags
import jax

from seerjax import numerics as numerics_lib, parallel
from seerjax.models import config as model_config, decoder as decoder_lib, huggingface, loading
from seerjax.models.decoder import Decoder


class Placement(NamedTuple):
  """Numerics and devices of a model.

  Attributes:
    decoder: the model as it was decided for this machine.
    mesh: the devices; each instance has a copy of the weights, sharded over its devices.
  """

  decoder: Decoder
  mesh: jax.sharding.Mesh

  @property
  def shape(self) -> model_config.TransformerConfig:
    """Shape of the model."""
    return self.decoder.shape

  @property
  def numerics(self) -> numerics_lib.NumericsConfig:
    """Numerics with nothing left open."""
    return self.decoder.numerics

  def describe(self) -> str:
    """Returns a one-line summary."""
    shape = self.mesh.shape
    return (
      f"runs in {self.decoder.describe()}, {shape[parallel.INSTANCE_AXIS]} instance(s) of"
      f" {shape[parallel.MODEL_AXIS]} {self.mesh.devices.flat[0].device_kind} device(s)"
    )


def define_numerics_flags() -> None:
  """Defines the flags of dtype and backend."""
  usual = numerics_lib.NumericsConfig()
  flags.DEFINE_string(
    "compute_dtype", usual.compute_dtype, "Type of weights and activations: float32 or bfloat16."
  )
  flags.DEFINE_string(
    "backend", usual.backend,
    "Backend of the model: auto, native (CPU), pallas (GPU, in bfloat16), tiled or untiled.",
  )  # fmt: skip


def define_flags() -> None:
  """Defines the flags."""
  define_numerics_flags()
  usual = numerics_lib.NumericsConfig()
  flags.DEFINE_integer(
    "reduction_shards", usual.reduction_shards, "Number of slabs in sums; 0 chooses for the model."
  )
  flags.DEFINE_integer("data_parallel_size", 1, "Copies of the model, which share the requests.")
  flags.DEFINE_integer(
    "tensor_parallel_size", 1, "Devices that share the weights of a copy: 1, 2, 4 or 8."
  )


def of_flags(model: str, numerics: numerics_lib.NumericsConfig) -> Placement:
  """Returns the placement that the flags request; on a CPU, also creates the devices.

  Call this before the first use of a device.

  Args:
    model: a shipped model, a directory, a GGUF file, or a Hub id; only its shape is read.
    numerics: values of all settings without a flag.

  Raises:
    FileNotFoundError: if the model does not exist.
    ValueError: if a flag is invalid, or does not suit this model or machine.
  """
  args = flags.FLAGS
  numerics = dataclasses.replace(
    numerics,
    compute_dtype=args.compute_dtype,
    backend=args.backend,
    reduction_shards=args.reduction_shards,
  )
  sizes = (args.data_parallel_size, args.tensor_parallel_size)
  parallel.require_sizes(*sizes, numerics.reduction_shards, what="--")
  parallel.start(parallel.SliceConfig(), num_devices=sizes[0] * sizes[1])
  return placed(model, numerics, data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])


def placed(
  model: str,
  numerics: numerics_lib.NumericsConfig,
  *,
  data_parallel_size: int,
  tensor_parallel_size: int,
) -> Placement:
  """Returns the placement of a model on the available devices.

  Raises:
    FileNotFoundError: if the model does not exist.
    ValueError: if numerics or shards do not suit this model or machine.
  """
  parallel.require_sizes(
    data_parallel_size, tensor_parallel_size, numerics.reduction_shards, what="--"
  )
  shape = huggingface.load_config(loading.path_of(model))
  decoder = decoder_lib.decide(shape, numerics)
  parallel.local_slabs(decoder.numerics.reduction_shards, tensor_parallel_size)
  mesh = parallel.make_mesh(
    data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size
  )
  return Placement(decoder.on(mesh), mesh)
