"""The discovery environments: schedules of one program, and tiles of two kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.problems.kernel_speed import rules, schedules, tiles, trimul
from experiments.problems.kernel_speed.edits import FieldEdits
from experiments.problems.kernel_speed.rules import (
  CONFIRMING_LAPS,
  KINDS,
  LAPS,
  TOLERANCE,
  Field,
  Race,
)
from experiments.problems.kernel_speed.schedules import FIELDS, Schedule
from experiments.problems.kernel_speed.trimul import Inputs
from pallas_kernels import gpu, matmul, rms_norm
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score

# Calls per program, so that a lap is much longer than a GPU launch. On a CPU one call is long.
GPU_CALLS, CPU_CALLS = 8, 1


class _Timed:
  """Base class of both environments: choices of fields, judged by a race.

  Attributes:
    name, is_maximised, published, language: as in `discovery.Environment`.
    fields: fields of an artefact.
    laps: laps of `verify`.
  """

  def __init__(self, name: str, fields: Sequence[Field], laps: int):
    if laps < 3 or laps % 2 == 0:
      raise ValueError(f"{name}: got laps={laps}, expected an odd number, at least 3; take {LAPS}.")
    self.name = name
    self.is_maximised = True
    # Published results are times on other machines, not ratios.
    self.published: tuple[Published, ...] = ()
    self.fields = tuple(fields)
    self.laps = laps
    self.language = FieldEdits(self.fields)

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    """Races an artefact; `Race.reason` says why it is invalid or cannot run here."""
    raise NotImplementedError

  def start(self, seed: int) -> Artefact:
    raise NotImplementedError

  def verify(self, artefact: Artefact) -> Score:
    """Verifies any object; the value is a measured time ratio and differs between calls."""
    found = self.measure(artefact, laps=self.laps)
    if found.reason:
      return environment.invalid(found.reason)
    return Score(is_valid=True, value=found.speed_up, reward=found.speed_up)

  def confirm(self, artefact: Artefact, *, laps: int = CONFIRMING_LAPS) -> Score:
    """Races again for longer; the value is the lower quartile of the laps' ratios.

    A record counts only if this value beats the previous one, which single lucky laps do not reach.
    """
    found = self.measure(artefact, laps=laps)
    if found.reason:
      return environment.invalid(found.reason)
    return Score(is_valid=True, value=found.lower_quartile, reward=found.lower_quartile)

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields the best result of a coordinate search: fields in random order, every choice raced.

    A choice is accepted if it wins a race, and then a second race against a new race of the best.
    """
    rng = np.random.default_rng([seed, 1])
    best = self.start(seed)
    value = self.verify(best).value
    while True:
      for place in rng.permutation(len(self.fields)):
        field = self.fields[place]
        for choice in field.choices:
          if choice == best[field.name]:
            continue
          tried = {**best, field.name: choice}
          first = self.verify(tried).value
          if environment.is_better(self, first, value):
            second, again = self.verify(tried).value, self.verify(best).value
            value = again
            if environment.is_better(self, second, again):
              best, value = tried, second
          yield best

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields random artefacts, each improved by the better of two choices of one field."""
    rng = np.random.default_rng([seed, 2])
    while True:
      drawn = {field.name: field.choices[rng.integers(len(field.choices))] for field in self.fields}
      field = self.fields[rng.integers(len(self.fields))]
      other = {**drawn, field.name: field.choices[rng.integers(len(field.choices))]}
      values = [self.verify(artefact).value for artefact in (drawn, other)]
      yield other if environment.is_better(self, values[1], values[0]) else drawn

  def picture(self, artefact: Artefact) -> Any:
    """Returns a Figure of the ratios of a new race and their median."""
    from matplotlib import figure

    found = self.measure(artefact, laps=self.laps)
    drawing = figure.Figure(figsize=(6, 3.5), layout="constrained")
    axis = drawing.subplots()
    axis.plot(range(1, 1 + len(found.ratios)), found.ratios, "o")
    if found.ratios:
      axis.axhline(found.speed_up)
    axis.axhline(1.0, linestyle=":", color="grey")
    axis.set(xlabel="lap", ylabel="times as fast as the reference", title=self.name)
    return drawing

  def describe(self, artefact: Artefact, score: Score) -> str:
    listed = "\n".join(
      f"  {field.name}: {field.meaning}; one of {list(field.choices)}" for field in self.fields
    )
    return (
      f"{self.name} on {jax.devices()[0].device_kind}. Choose the fields of a schedule so that the"
      " program built from it is as fast as possible and right on inputs that were never seen."
      f" The value is the reference's time over the program's, median of {self.laps} laps on fresh"
      f" inputs.\nFields:\n{listed}\nNow: {artefact}\nIts value: {score.value:.4f}.\n"
      "Write Python that defines improve(artefact, seconds, seed) and returns a better dict of all"
      " fields; plain data, within `seconds`."
    )


class TriMulSpeed(_Timed):
  """The environment of schedules of the triangle multiplication, on JAX's default device."""

  def __init__(self, size: int = 64, *, dim: int = 128, hidden: int = 128, laps: int = LAPS):
    """Sets the sizes.

    Args:
      size: n, a multiple of 8.
      dim, hidden: c and h; 8 divides h.
      laps: laps of `verify`.

    Raises:
      ValueError: if a size is not divisible into chunks, or the number of laps is not odd.
    """
    for name, value in (("size", size), ("hidden", hidden), ("dim", dim)):
      if value < 8 or value % 8:
        raise ValueError(
          f"TriMulSpeed.{name}: got {value}, expected a positive multiple of 8, which the chunks"
          " divide; round it up."
        )
    super().__init__(f"trimul_{size}_{dim}_{hidden}", FIELDS, laps)
    self._draw = functools.partial(trimul.draw, size=size, dim=dim, hidden=hidden)

  def start(self, seed: int) -> Artefact:
    """Returns the plain program as a schedule: about as fast as the reference."""
    return dataclasses.asdict(Schedule())

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    reason = rules.complaint(artefact, FIELDS)
    if reason:
      return Race(reason=reason)
    schedule = Schedule(**artefact)
    # A new jit, so that a long search does not keep every program in memory.
    return self.race(jax.jit(functools.partial(trimul.trimul, schedule)), laps=laps, seed=seed,
      tolerance=schedules.tolerance_of(schedule, jax.default_backend()))  # fmt: skip

  def race(
    self,
    contestant: Callable[[Inputs], Any],
    *,
    laps: int,
    seed: int | None = None,
    tolerance: float = TOLERANCE,
  ) -> Race:
    """Races a function of `Inputs` against the reference, on inputs of all kinds in turn."""
    return rules.race(
      contestant,
      trimul.compiled_reference,
      lambda fresh, lap: self._draw(fresh, KINDS[lap % len(KINDS)]),
      laps=laps,
      tolerance=tolerance,
      seed=seed,
    )


class TileSpeed(_Timed):
  """The environment of tiles of one of our GPU kernels, raced against XLA.

  On a Hopper GPU the kernel runs; on a CPU `walked_matmul` or `walked_norm` does, with times that
  do not predict a GPU's. On other GPUs artefacts are invalid, with the reason. `check` tests
  whether tiles give the right result in the kernel, through the interpreter.
  """

  def __init__(
    self,
    kernel: str = "matmul",
    *,
    rows: int = 4096,
    columns: int = 4096,
    features: int = 4096,
    laps: int = LAPS,
  ):
    """Sets the kernel and its shapes.

    Args:
      kernel: "matmul" (x[rows, features] @ w[features, columns], bf16) or "rms_norm" (x[rows,
        features], bf16; `columns` is ignored).
      rows, columns, features: as above.
      laps: laps of `verify`.

    Raises:
      ValueError: if the kernel is unknown.
    """
    if kernel not in ("matmul", "rms_norm"):
      raise ValueError(f"TileSpeed.kernel: got {kernel!r}, expected 'matmul' or 'rms_norm'.")
    self._is_matmul = kernel == "matmul"
    shape = (rows, columns, features) if self._is_matmul else (rows, features)
    fields = tiles.MATMUL_FIELDS if self._is_matmul else tiles.NORM_FIELDS
    super().__init__("_".join([kernel, "tiles", *map(str, shape)]), fields, laps)
    self._columns = columns
    self._shape = (rows, features)

  def start(self, seed: int) -> Artefact:
    """Returns the kernel's default tiles on a GPU."""
    config = matmul.Config(swapped_rows=64) if self._is_matmul else rms_norm.Config()
    fields = dataclasses.asdict(config)
    return {field.name: fields[field.name] for field in self.fields}

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    reason = rules.complaint(artefact, self.fields)
    if reason:
      return Race(reason=reason)
    call, config = self._call(artefact, interpret=False)
    num_calls = GPU_CALLS
    if jax.default_backend() == "cpu":
      num_calls = CPU_CALLS
      walked = tiles.walked_matmul if isinstance(config, matmul.Config) else tiles.walked_norm
      call = functools.partial(walked, config)
    else:
      reason = self._support(config, self._shape[0], interpret=False)
      if reason:
        return Race(reason=f"{self.name}: {reason}")

    def program(function: Callable[..., jax.Array]) -> Callable[[Any], Any]:
      return jax.jit(lambda several: tuple(function(*inputs) for inputs in several))

    plain = jnp.dot if self._is_matmul else tiles.plain_norm
    return rules.race(
      program(call),
      program(plain),
      lambda fresh, lap: tuple(
        self._inputs(fresh + copy, self._shape[0]) for copy in range(num_calls)
      ),
      laps=laps,
      tolerance=TOLERANCE,
      seed=seed,
    )

  def check(self, artefact: Artefact, *, rows: int, seed: int) -> str:
    """Returns why tiles are wrong; "" if the interpreter on a CPU gives the reference's result.

    Args:
      artefact: any object.
      rows: number of rows; the interpreter is slow.
      seed: seed of the inputs.
    """
    reason = rules.complaint(artefact, self.fields)
    if reason:
      return reason
    call, config = self._call(artefact, interpret=True)
    reason = self._support(config, rows, interpret=True)
    if reason:
      return f"{self.name}: {reason}"
    inputs = self._inputs(seed, rows)
    module = matmul if self._is_matmul else rms_norm
    expected = module.reference(*inputs).astype(jnp.bfloat16)
    return rules.differs(call(*inputs), expected, TOLERANCE)[0]

  def _call(
    self, artefact: Artefact, *, interpret: bool
  ) -> tuple[Callable[..., jax.Array], matmul.Config | rms_norm.Config]:
    if self._is_matmul:
      tiles = matmul.Config(**artefact)
      return functools.partial(matmul.matmul, config=tiles, interpret=interpret), tiles
    rows = rms_norm.Config(**artefact)
    return functools.partial(rms_norm.rms_norm, config=rows, interpret=interpret), rows

  def _support(
    self, config: matmul.Config | rms_norm.Config, rows: int, *, interpret: bool
  ) -> str | None:
    # Checks the device first: without a GPU the shapes do not matter.
    reason = gpu.device_reason(interpret)
    if reason:
      return reason
    x = jax.ShapeDtypeStruct((rows, self._shape[1]), jnp.bfloat16)
    if isinstance(config, matmul.Config):
      w = jax.ShapeDtypeStruct((self._shape[1], self._columns), jnp.bfloat16)
      return matmul.is_supported(x, w, config=config, interpret=interpret)
    scale = jax.ShapeDtypeStruct((self._shape[1],), jnp.bfloat16)
    return rms_norm.is_supported(x, scale, config=config, interpret=interpret)

  def _inputs(self, seed: int, rows: int) -> tuple[jax.Array, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed % 2**32))
    features = self._shape[1]
    x = jax.random.normal(first, (rows, features), jnp.bfloat16)
    if self._is_matmul:
      w = jax.random.normal(second, (features, self._columns), jnp.float32)
      return x, (w / jnp.sqrt(jnp.float32(features))).astype(jnp.bfloat16)
    return x, 1 + jax.random.normal(second, (features,), jnp.bfloat16) / 8


def matmul_tiles(rows: int = 4096) -> TileSpeed:
  """Returns the environment of the matmul kernel's tiles."""
  return TileSpeed("matmul", rows=rows)


def rms_norm_tiles(rows: int = 4096) -> TileSpeed:
  """Returns the environment of the norm kernel's tiles."""
  return TileSpeed("rms_norm", rows=rows)
