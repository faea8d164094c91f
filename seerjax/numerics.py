"""All settings that determine bits, in one record, and their fingerprint.

Two runs may be compared bit by bit if and only if their fingerprints are equal (the contract). A
fingerprint therefore also contains properties that we do not choose: the versions, the compiler's
flags, and the processor for which XLA compiles. Nothing here depends on a batch; settings that
change no bit are defined elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import types
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device
from seerjax import fields, xla_flags
from seerjax.array_typing import Array, PRNGKeyArray

Backend = Literal["auto", "tiled", "native", "pallas", "pallas_interpreted", "untiled"]
BACKENDS = ("auto", "tiled", "native", "pallas", "pallas_interpreted", "untiled")
DTYPES = ("float32", "bfloat16")
# Incremented with every change of ours that changes a bit; CHANGELOG.md lists them.
BITS_VERSION = 7
# The same for the native backend.
NATIVE_BITS_VERSION = 2
# The same for the kernels' backend.
PALLAS_BITS_VERSION = 3
# For every key: with another one ("rbg" is usual on TPUs), noise depends on the batch.
KEY_IMPLEMENTATION = "threefry2x32"
# Default rows of the one compiled tile program: by platform, and for all others. By the TPU
# compiler's estimates (docs/results/tpu_compile.md), fewer rows take nearly as long there.
ROW_TILES: Mapping[str, int] = types.MappingProxyType({"tpu": 128})
ROW_TILE = 16
# The same for the rows of a tile of one expert: decoding gives most experts a row or none.
EXPERT_TILES: Mapping[str, int] = types.MappingProxyType({"tpu": 128})
EXPERT_TILE = 8
# JAX settings that a process may change and that change bits, with their usual values. A
# fingerprint contains those with another value.
JAX_SETTINGS: Mapping[str, Any] = types.MappingProxyType({
  # The noise for sampling tokens.
  "jax_threefry_partitionable": True, "jax_threefry_gpu_kernel_lowering": False,
  "jax_random_seed_offset": 0, "jax_high_dynamic_range_gumbel": False,
  # Computation of functions and their gradients.
  "jax_accurate_erf_inv": False, "jax_softmax_custom_jvp": False,
  "jax_use_hlo_logistic_lowering": None, "jax_allow_f16_reductions": True,
  # Compilation of programs.
  "jax_disable_most_optimizations": False, "jax_optimization_level": "UNKNOWN",
  "jax_compiler_enable_remat_pass": True, "jax_enable_pgle": False,
})  # fmt: skip
# Environment variables that other libraries read and that change bits if they are set.
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
CPUINFO = pathlib.Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsConfig:
  """The numerics of one run.

  Attributes:
    backend: "auto" lets machine and model decide (`models.decoder.decide`): on a CPU
      "native" if it can run, on a GPU "pallas" if the kernels support the model in bfloat16,
      otherwise "tiled", with a log line that gives the reason. "tiled" is the portable invariant
      path; "native" is the CPU's own, several times as fast, with handlers compiled by numba;
      "pallas" requires the kernels of Hopper GPUs, and is refused where they cannot run;
      "pallas_interpreted" is the same kernels on a CPU, for tests; "untiled" is plain XLA, with
      rows that depend on the batch (to measure the cost of invariance).
    row_tile: rows of the one compiled tile program of token-wise work, at least two. 16 suits small
      batches, 64 training-heavy runs. 0 lets the platform decide (`row_tile_of`).
    expert_tile: rows of the one compiled tile program of an expert, at least two (`ops.moe`). 0
      lets the platform decide, and is in no fingerprint: a model without experts keeps it.
    query_tile: positions of one attention segment.
    slot_tile: items of attention (a segment and a split) that one compiled program processes.
    kv_split: positions of one split of the key/value reduction, aligned to absolute positions.
    reduction_shards: logical slabs of every dimension a mesh may shard; contractions over them are
      added as one balanced binary tree. 0 lets the model decide (`models.decoder.decide`): the
      largest divisor, at most 8.
    compute_dtype: dtype of weights and activations; sums are always float32.
  """

  backend: Backend = "auto"
  row_tile: int = 0
  expert_tile: int = 0
  query_tile: int = 8
  slot_tile: int = 8
  kv_split: int = 256
  reduction_shards: int = 0
  compute_dtype: str = "float32"

  def __post_init__(self):
    if self.backend not in BACKENDS:
      raise ValueError(
        f"NumericsConfig.backend: got {self.backend!r}, expected one of"
        f" {BACKENDS}; 'tiled' runs everywhere."
      )
    fields.check(self, compute_dtype=fields.one_of(DTYPES, "'float32' is usual on CPU"))
    if self.uses_kernels and self.compute_dtype != "bfloat16":
      raise ValueError(
        f"NumericsConfig: got backend={self.backend!r} in {self.compute_dtype},"
        " expected compute_dtype='bfloat16', which the kernels require; set it, or"
        " backend='tiled'."
      )
    sizes = ("row_tile", "expert_tile", "query_tile", "slot_tile", "kv_split", "reduction_shards")
    for field in sizes:
      value = getattr(self, field)
      if field in ("row_tile", "expert_tile", "reduction_shards") and value == 0:
        continue
      if value < 1 or value & (value - 1):
        raise ValueError(
          f"NumericsConfig.{field}: got {value}, expected a power of two; the defaults are"
          " row_tile=0 and expert_tile=0 (chosen for the platform), query_tile=8, slot_tile=8,"
          " kv_split=256, reduction_shards=0 (chosen for the model)."
        )

  @property
  def uses_kernels(self) -> bool:
    """Whether rows go through the batch-invariant kernels of `pallas_kernels`."""
    return self.backend in ("pallas", "pallas_interpreted")

  @property
  def is_interpreted(self) -> bool:
    """Whether the kernels run on a CPU, interpreted."""
    return self.backend == "pallas_interpreted"

  @property
  def dtype(self) -> jnp.dtype:
    """The compute dtype as a JAX dtype."""
    return jnp.dtype(self.compute_dtype)


def row_tile_of(platform: str) -> int:
  """Returns the default rows of a tile on a platform ("cpu", "tpu", ...)."""
  return ROW_TILES.get(platform, ROW_TILE)


def with_row_tile(numerics: NumericsConfig) -> NumericsConfig:
  """Returns the numerics with explicit rows of a tile: their own, or this platform's default."""
  if numerics.row_tile:
    return numerics
  return dataclasses.replace(numerics, row_tile=row_tile_of(jax.devices()[0].platform))


def with_expert_tile(numerics: NumericsConfig) -> NumericsConfig:
  """Works like `with_row_tile`, for the rows of a tile of one expert."""
  if numerics.expert_tile:
    return numerics
  platform = jax.devices()[0].platform
  return dataclasses.replace(numerics, expert_tile=EXPERT_TILES.get(platform, EXPERT_TILE))


def largest_shards(sizes: Iterable[int]) -> int:
  """Returns the largest number of slabs, at most 8, that divides every size."""
  sizes = tuple(sizes)
  return max(r for r in (1, 2, 4, 8) if all(size % r == 0 for size in sizes))


def key(seed: int) -> PRNGKeyArray:
  """Returns the key of a seed, independent of this process's default implementation."""
  return jax.random.key(seed, impl=KEY_IMPLEMENTATION)


def wrap_key(data: Array) -> PRNGKeyArray:
  """Returns keys [...] from the result u32[..., 2] of `jax.random.key_data`."""
  return jax.random.wrap_key_data(data, impl=KEY_IMPLEMENTATION)


def pinned_randomness() -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which a key's numbers do not depend on `JAX_THREEFRY_PARTITIONABLE`."""
  return jax.threefry_partitionable(True)


def require_key(key: PRNGKeyArray, *, what: str) -> None:
  """Refuses a key that does not guarantee equal text.

  Args:
    key: key for drawing noise or weights.
    what: the argument, for the message.

  Raises:
    ValueError: if it is not a typed key of `KEY_IMPLEMENTATION`.
  """
  is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  got = f"a key of {jax.random.key_impl(key)!s}" if is_typed else f"{key!r}, not a typed key"
  if not is_typed or str(jax.random.key_impl(key)) != KEY_IMPLEMENTATION:
    raise ValueError(
      f"{what}: got {got}, expected a {KEY_IMPLEMENTATION} key, for noise that does not depend on"
      " the batch; make it with seerjax.numerics.key(seed), or jax.random.key(seed,"
      f" impl={KEY_IMPLEMENTATION!r})."
    )


@jax.jit
def _is_finite(leaf: Array) -> Array:
  return jnp.all(jnp.isfinite(leaf))


@functools.partial(jax.jit, static_argnums=(1,))
def _are_parts_finite(leaf: Array, place: jax.sharding.NamedSharding) -> Array:
  """Returns a flag for each device's part; no device waits for another."""
  names = place.mesh.axis_names
  local = lambda part: jnp.all(jnp.isfinite(part)).reshape((1,) * len(names))
  return jax.shard_map(
    local, mesh=place.mesh, in_specs=place.spec, out_specs=jax.P(*names), check_vma=False
  )(leaf)


def _flag(leaf: Any) -> Array:
  place = leaf.sharding if isinstance(leaf, jax.Array) else None
  is_shared = isinstance(place, jax.sharding.NamedSharding) and place.num_devices > 1
  return _are_parts_finite(leaf, place) if is_shared else _is_finite(leaf)


def require_finite(tree: Any, *, what: str, remedy: str) -> None:
  """Refuses values that are infinite or NaN; one check per leaf, fetched together.

  Args:
    tree: pytree of arrays; integers and keys pass. For arrays shared by several processes, each
      checks its own part.
    what: name of the tree, for the message.
    remedy: advice for the message: the change to make.

  Raises:
    ValueError: naming the leaves.
  """
  leaves = [
    (path, leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  found = [[part.data for part in _flag(leaf).addressable_shards] for _, leaf in leaves]
  flags = [np.all(parts) for parts in jax.device_get(found)]
  checked = zip(leaves, flags, strict=True)
  bad = [jax.tree_util.keystr(path) for (path, _), is_finite in checked if not is_finite]
  if bad:
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    raise ValueError(
      f"{what}: got values that are not finite in {', '.join(bad[:3])}{more}, expected finite"
      f" numbers in all {len(leaves)} arrays; {remedy}."
    )


def require_decided(numerics: NumericsConfig, *, why: str) -> None:
  """Refuses numerics with an open setting.

  Raises:
    ValueError: if the number of slabs, the backend or the rows of a tile are open; `why` is
      the reason, for the message.
  """
  for field, got, expected in (
    ("backend", numerics.backend, "a concrete backend"),
    ("row_tile", numerics.row_tile, "the number for this platform"),
    ("reduction_shards", numerics.reduction_shards, "the number for the model"),
  ):
    if got in ("auto", 0):
      raise ValueError(
        f"NumericsConfig.{field}: got {got!r}, expected {expected}, because {why}; use"
        " models.decoder.decide(model, numerics)."
      )


def fingerprint(numerics: NumericsConfig, remat: str = "none") -> dict[str, str]:
  """Returns every value that determines bits, as text, and one digest of them all.

  It is stored with checkpoints and journals; see `checkpoint` for what a mismatch refuses.

  Args:
    numerics: the numerics configuration, with a resolved number of slabs.
    remat: the trainer's `TrainerConfig.remat`; included unless it is "none". If looped layers are
      recomputed, the sums of a gradient are rounded elsewhere.

  Raises:
    ValueError: if the number of slabs, the backend or the rows of a tile are unresolved; on
      a GPU, if XLA's flags let measured speed determine bits (`xla_flags`).
  """
  require_decided(numerics, why="a fingerprint names it")
  values = {field: str(value) for field, value in dataclasses.asdict(numerics).items()}
  if not numerics.expert_tile:
    del values["expert_tile"]
  values["bits_version"] = str(BITS_VERSION)
  if numerics.backend == "native":
    values["native_bits_version"] = str(NATIVE_BITS_VERSION)
    values["numba_version"] = importlib.metadata.version("numba")
  if numerics.uses_kernels:
    values["pallas_bits_version"] = str(PALLAS_BITS_VERSION)
  values["jax_version"] = jax.__version__
  values["jaxlib_version"] = importlib.metadata.version("jaxlib")
  values["xla_flags"] = xla_flags.given()
  # JAX settings that a process may set and we do not; sums of gradients depend on the second.
  values["x64"] = str(jax.config.jax_enable_x64)
  values["matmul_precision"] = str(jax.config.jax_default_matmul_precision)
  values["disable_jit"] = str(jax.config.jax_disable_jit)
  values |= {
    name: str(jax.config.values[name])
    for name, usual in JAX_SETTINGS.items()
    if name in jax.config.values and jax.config.values[name] != usual
  }
  values |= {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
  values["device_kind"] = _device_kind()
  if jax.default_backend() == "gpu":
    xla_flags.require_gpu_flags(values["xla_flags"])
    values |= of_gpu(device.facts())
  if remat != "none":
    values["remat"] = remat
  values["digest"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
  return values


def of_gpu(facts: device.Facts) -> dict[str, str]:
  """Returns the fingerprint's values for a GPU's software besides XLA's flags."""
  return {
    "gpu_plugin": facts.plugin,
    "gpu_ptxas": device.version_text(facts.ptxas),
    "gpu_driver": facts.driver,
  }


def _device_kind() -> str:
  """Returns the compiler's target; for a CPU, a digest of its features, as JAX only says "cpu"."""
  first = jax.devices()[0]
  if first.platform != "cpu" or not CPUINFO.is_file():
    return first.device_kind
  lines = CPUINFO.read_text().splitlines()
  features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
  return f"cpu {hashlib.sha256(''.join(features).encode()).hexdigest()[:8]}"


def require_same(stored: dict[str, str], current: dict[str, str], *, what: str) -> None:
  """Refuses to mix two numerics.

  Args:
    stored: fingerprint found with `what`.
    current: fingerprint of this run.
    what: name of the resumed object, for the message.

  Raises:
    ValueError: naming every field that differs, with both values.
  """
  fields = sorted((set(stored) | set(current)) - {"digest"})
  differing = [
    f"{field} was {stored.get(field)!r} and is {current.get(field)!r}"
    for field in fields
    if stored.get(field) != current.get(field)
  ]
  if differing:
    raise ValueError(
      f"{what}: got another numerics fingerprint ({'; '.join(differing)}), expected the same one;"
      " restore those settings, or pass --accept_new_numerics to start a new epoch at this step."
    )
