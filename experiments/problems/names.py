"""Short names of these problems, such as "circle_packing:26", and what the library loads for them.

  "circle_packing:26" -> "experiments.problems.circle_packing:CirclePacking:26" -> an environment
"""

from __future__ import annotations

from collections.abc import Mapping
import types
from typing import Any, NamedTuple

from seerjax.discovery import loading
from seerjax.discovery.environment import Environment

# Of the polish that ends a sentence about AHC058: five searches of 400 simulations, 15 ms.
POLISH = {"with_polish": True, "polish_steps": 400, "polish_rounds": 4}
DENOISING = "denoising:Denoising"


class Name(NamedTuple):
  """What a short name stands for.

  Attributes:
    target: module of this folder, and class.
    what: its number says.
    usual: the number where none is given.
    arguments: further ones of the class.
  """

  target: str
  what: str
  usual: int
  arguments: Mapping[str, Any] = types.MappingProxyType({})


# What ends in "_plain" does not polish; what ends in "_programs" is solved in C++ or Python, by a
# language model alone.
NAMES: Mapping[str, Name] = types.MappingProxyType({
  "apple_machines": Name("apple_machines:AppleMachines", "instance", 0, POLISH),
  "apple_machines_plain": Name("apple_machines:AppleMachines", "instance", 0),
  "purse_seine": Name("purse_seine:PurseSeine", "instance", 0),
  "purse_seine_plain": Name(
    "purse_seine:PurseSeine", "instance", 0, {"with_polish": False}
  ),
  "circle_packing": Name("circle_packing:CirclePacking", "circles", 26),
  "minimum_overlap": Name("minimum_overlap:MinimumOverlap", "steps", 51),
  "first_autocorrelation": Name(
    "autocorrelation:FirstAutocorrelation", "steps", 300
  ),
  "second_autocorrelation": Name(
    "autocorrelation:SecondAutocorrelation", "steps", 100
  ),
  "trimul": Name("kernel_speed:TriMulSpeed", "positions", 64),
  "pallas_matmul": Name("kernel_speed:matmul_tiles", "rows", 4096),
  "pallas_rms_norm": Name("kernel_speed:rms_norm_tiles", "rows", 4096),
  "purse_seine_programs": Name("contest:purse_seine_programs", "cases", 8),
  "apple_machines_programs": Name("contest:apple_machines_programs", "cases", 8),
})


def load(name: str, *, allow_weak_sandbox: bool = False) -> Environment:
  """Returns a problem.

  Args:
    name: one of `NAMES`, with ":" and a number or without; "denoising", or "denoising:PATH" for
      counts of your own; or what `loading.load` takes.
    allow_weak_sandbox: of "..._programs": see `sandbox.Sandbox`.

  Raises:
    ValueError: naming what was expected.
  """
  kind, _, rest = name.partition(":")
  if name.endswith(".py"):
    return loading.load(name)
  if kind == "denoising":
    return loading.load(f"{__package__}.{DENOISING}", path=rest)
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
  return loading.load(f"{__package__}.{known.target}:{rest or known.usual}", **arguments)
