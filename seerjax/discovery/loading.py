"""Finds a problem of discovery by name, "circle_packing:26", or by the path of a file of yours."""

from __future__ import annotations

from seerjax.discovery.environment import Environment

# Name -> what its number says, and the number where none is given.
NUMBERS = {
  "apple_machines": ("instance", 0),
  "apple_machines_plain": ("instance", 0),
  "purse_seine": ("instance", 0),
  "purse_seine_plain": ("instance", 0),
  "circle_packing": ("circles", 26),
  "minimum_overlap": ("steps", 51),
  "first_autocorrelation": ("steps", 300),
  "second_autocorrelation": ("steps", 100),
  "trimul": ("positions", 64),
  "pallas_matmul": ("rows", 4096),
  "pallas_rms_norm": ("rows", 4096),
  "purse_seine_programs": ("cases", 8),
  "apple_machines_programs": ("cases", 8),
}
# Of the polish that ends a sentence about AHC058: five searches of 400 simulations, 15 ms.
POLISH_STEPS, POLISH_ROUNDS = 400, 4


def load(name: str, *, allow_weak_sandbox: bool = False) -> Environment:
  """Returns a problem.

  Args:
    name: one of `NUMBERS`, with ":" and a number or without ("..._plain" does not polish;
      "..._programs" are solved in C++ or Python, by a language model alone); "denoising", or
      "denoising:PATH" for counts of your own; or the path of a Python file (`own_problem.load`).
    allow_weak_sandbox: of "..._programs": see `sandbox.Sandbox`.

  Raises:
    ValueError: naming what was expected.
  """
  # Imported here: each brings libraries of its own, and a worker process needs one of them.
  if name.endswith(".py"):
    from seerjax.discovery import problem_file

    return problem_file.load(name)
  kind, _, rest = name.partition(":")
  if kind == "denoising":
    from seerjax.tasks import denoising

    return denoising.Denoising(path=rest)
  if kind not in NUMBERS:
    raise ValueError(
      f"problem: got {name!r}, expected one of {sorted([*NUMBERS, 'denoising'])}, with a number as"
      " in 'circle_packing:32', or the path of a Python file that ends with '.py'; correct"
      " --config.problem."
    )
  what, usual = NUMBERS[kind]
  if rest and not (rest.isascii() and rest.isdecimal()):
    raise ValueError(
      f"problem: got {name!r}, expected a number of {what} behind the colon; {kind}:{usual} is"
      " usual."
    )
  number = int(rest) if rest else usual
  match kind:
    case "apple_machines":
      from seerjax.tasks import apple_machines

      return apple_machines.AppleMachines(
        number, with_polish=True, polish_steps=POLISH_STEPS, polish_rounds=POLISH_ROUNDS
      )
    case "apple_machines_plain":
      from seerjax.tasks import apple_machines

      return apple_machines.AppleMachines(number)
    case "purse_seine":
      from seerjax.tasks import purse_seine

      return purse_seine.PurseSeine(number)
    case "purse_seine_plain":
      from seerjax.tasks import purse_seine

      return purse_seine.PurseSeine(number, with_polish=False)
    case "circle_packing":
      from seerjax.tasks import circle_packing

      return circle_packing.CirclePacking(num_circles=number)
    case "minimum_overlap":
      from seerjax.tasks import minimum_overlap

      return minimum_overlap.MinimumOverlap(num_steps=number)
    case "first_autocorrelation":
      from seerjax.tasks import autocorrelation

      return autocorrelation.FirstAutocorrelation(num_steps=number)
    case "second_autocorrelation":
      from seerjax.tasks import autocorrelation

      return autocorrelation.SecondAutocorrelation(num_steps=number)
    case "trimul":
      from seerjax.tasks import kernel_speed

      return kernel_speed.TriMulSpeed(number)
    case "pallas_matmul" | "pallas_rms_norm":
      from seerjax.tasks import kernel_speed

      kernel = "matmul" if kind == "pallas_matmul" else "rms_norm"
      return kernel_speed.TileSpeed(kernel, rows=number)
    case _:
      from seerjax.sandbox import sandbox
      from seerjax.tasks import contest

      contests = {
        "purse_seine_programs": contest.PurseSeineContest(),
        "apple_machines_programs": contest.AppleMachinesContest(),
      }
      box = sandbox.Sandbox(allow_weak=allow_weak_sandbox)
      return contest.ContestSolutions(contests[kind], sandbox=box, num_cases=number)
