"""Resolves short names of problems, such as "circle_packing:26".

"circle_packing:26" -> circle_packing.CirclePacking(26) -> an environment
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import types
from typing import Any, NamedTuple

from seerjax.discovery import loading
from seerjax.discovery.environment import Environment

# The polish at the end of a sentence about AHC058: five searches of 400 simulations, 15 ms.
POLISH = {"with_polish": True, "polish_steps": 400, "polish_rounds": 4}


class Name(NamedTuple):
  """A short name.

  Attributes:
    what: meaning of its number.
    usual: default of the number.
    arguments: further arguments of the problem.
  """

  what: str
  usual: int
  arguments: Mapping[str, Any] = types.MappingProxyType({})


# Names ending in "_plain" do not polish; those ending in "_programs" are solved in C++ or Python,
# and need a language model.
NAMES: Mapping[str, Name] = types.MappingProxyType(
  {
    "apple_machines": Name("instance", 0, POLISH),
    "apple_machines_plain": Name("instance", 0),
    "purse_seine": Name("instance", 0),
    "purse_seine_plain": Name("instance", 0, {"with_polish": False}),
    "circle_packing": Name("circles", 26),
    "minimum_overlap": Name("steps", 51),
    "first_autocorrelation": Name("steps", 300),
    "second_autocorrelation": Name("steps", 100),
    "trimul": Name("positions", 64),
    "pallas_matmul": Name("rows", 4096),
    "pallas_rms_norm": Name("rows", 4096),
    "purse_seine_programs": Name("cases", 8),
    "apple_machines_programs": Name("cases", 8),
  }
)


def load(name: str, *, allow_weak_sandbox: bool = False) -> Environment:
  """Loads a problem.

  Args:
    name: one of `NAMES`, optionally with ":" and a number; "denoising", or "denoising:PATH" for
      your own counts; or any name that `loading.load` accepts.
    allow_weak_sandbox: for "..._programs"; see `sandbox.Sandbox`.

  Raises:
    ValueError: naming the expected value, or the package that the problem needs.
  """
  kind, _, rest = name.partition(":")
  if name.endswith(".py"):
    return loading.load(name)
  if kind == "denoising":
    return _maker(kind)(rest)
  if kind not in NAMES:
    if not kind or not rest.partition(":")[0].isidentifier():
      raise ValueError(
        f"problem: got {name!r}, expected one of {sorted([*NAMES, 'denoising'])}, with a number as"
        " in 'circle_packing:32', 'my_module:MyProblem', or the path of a Python file that ends"
        " with '.py'; correct --config.problem."
      )
    return loading.load(name)
  known = NAMES[kind]
  if rest and not (rest.isascii() and rest.isdecimal()):
    raise ValueError(
      f"problem: got {name!r}, expected a number of {known.what} behind the colon;"
      f" {kind}:{known.usual} is usual."
    )
  arguments = dict(known.arguments)
  if kind.endswith("_programs"):
    arguments["allow_weak_sandbox"] = allow_weak_sandbox
  return _maker(kind)(int(rest or known.usual), **arguments)


def _maker(kind: str) -> Callable[..., Environment]:
  """Imports only the problem of a name, because packages for others may not be installed."""
  try:
    return _imported(kind)
  except ModuleNotFoundError as error:
    raise ValueError(
      f"problem: got {kind!r}, which needs {error.name}, expected it to be installed; run"
      " `pip install '.[problems]'`."
    ) from error


def _imported(kind: str) -> Callable[..., Environment]:
  match kind:
    case "apple_machines" | "apple_machines_plain":
      from experiments.problems.apple_machines import AppleMachines

      return AppleMachines
    case "purse_seine" | "purse_seine_plain":
      from experiments.problems.purse_seine import PurseSeine

      return PurseSeine
    case "apple_machines_programs" | "purse_seine_programs":
      from experiments.problems import contest

      if kind == "apple_machines_programs":
        return contest.apple_machines_programs
      return contest.purse_seine_programs
    case "circle_packing":
      from experiments.problems.circle_packing import CirclePacking

      return CirclePacking
    case "minimum_overlap":
      from experiments.problems.minimum_overlap import MinimumOverlap

      return MinimumOverlap
    case "first_autocorrelation" | "second_autocorrelation":
      from experiments.problems import autocorrelation

      if kind == "first_autocorrelation":
        return autocorrelation.FirstAutocorrelation
      return autocorrelation.SecondAutocorrelation
    case "trimul":
      from experiments.problems.kernel_speed import TriMulSpeed

      return TriMulSpeed
    case "pallas_matmul":
      from experiments.problems.kernel_speed import matmul_tiles

      return matmul_tiles
    case "pallas_rms_norm":
      from experiments.problems.kernel_speed import rms_norm_tiles

      return rms_norm_tiles
    case "denoising":
      from experiments.problems.denoising import Denoising

      return Denoising
    case _:
      raise AssertionError(kind)
