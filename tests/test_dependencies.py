"""Permitted imports between rooms (DESIGN: the house), read from the source of every module.

Imports inside functions and imports for type checkers count as well: a shared record belongs in
`types`, and a neighbour is passed in as a callable.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import import_graph
from import_graph import imports, room_of
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("seerjax", "pallas_kernels")

# Each step may import the steps before it.
STEPS: tuple[tuple[str, ...], ...] = (
  (
    "array_typing",
    "agreement",
    "compiled",
    "fields",
    "host_memory",
    "object_store",
    "pallas_kernels",
    "records",
    "xla_flags",
  ),
  ("numerics", "types"),
  ("parallel", "metrics", "ops", "checkpoint", "tasks", "sandbox"),
  ("layer_kinds",),
  ("backends",),
  ("models",),
  ("kv",),
  ("engine", "trainer"),
  ("speculation", "rollout"),
  ("run", "sleep", "simulate", "cluster"),
  ("serve",),
  ("discovery",),
  ("reports",),
  ("rl", "ttt"),
  ("recipes",),
  ("commands",),
  ("experiments",),
  ("launch",),
)
# The only imports within a step. Engine and trainer do not import each other.
PEERS = {
  "tasks": {"sandbox"},
  "types": {"numerics"},
  "ops": {"parallel"},
  "checkpoint": {"parallel", "metrics"},
  "rollout": {"speculation"},
  "run": {"cluster"},
}
# Packages of the extra `problems`: only code outside the wheel may need them.
EXTRAS = {"scipy", "highspy"}
ROOMS = tuple(room for step in STEPS for room in step)
# The simulator and the engine share these modules, so they do not import JAX.
HOST_ONLY = (
  "engine/step_times.py",
  "rollout/buffer.py",
  "rollout/instances.py",
  "rollout/likeness.py",
  "rollout/routing.py",
  "rollout/scheduler.py",
  "sleep/planner.py",
  "speculation/suffix_tree.py",
  "speculation/suffix_drafts.py",
  "speculation/suffix_kernels.py",
  "speculation/suffix_nodes.py",
  "speculation/group_trees.py",
  "speculation/budget.py",
  "speculation/draft_lengths.py",
  "speculation/history.py",
)
POLICIES = "rollout/policies/"
HOST_ONLY_IMPORTS = {"numpy", "numba", "seerjax"}
HOST_ONLY_ROOMS = {"compiled", "fields", "types"}
CLOCKS = {"time", "datetime"}
# These rooms read no clock; the wait between two tries of an HTTP call affects no result.
CLOCKLESS = ("rollout", "sleep", "speculation")
WAITS = "sleep/endpoint.py"
# The benchmark: the program, and what it times, checks and asks.
BENCH = "pallas_kernels/bench/"


def allowed_rooms(room: str) -> set[str]:
  """Returns the rooms that `room` may import, itself included."""
  step = next(i for i, rooms in enumerate(STEPS) if room in rooms)
  return {r for rooms in STEPS[:step] for r in rooms} | PEERS.get(room, set()) | {room}


def complaints(source: str, path: str) -> list[str]:
  """Returns errors about the imports and look-ups of one module, as sentences.

  Args:
    source: source of the module.
    path: path from the root of the repository, such as "seerjax/ops/tiles.py".
  """
  module = path.removesuffix(".py").replace("/", ".")
  tree = ast.parse(source)
  names = imports(tree, module)
  tops = {name.split(".")[0] for name in names}
  room = room_of(module)
  within = path.removeprefix("seerjax/")
  found = []

  def complain(got: set[str], expected: str, fix: str) -> None:
    if got:
      found.append(f"{path}: got {', '.join(sorted(got))}; expected {expected}; {fix}.")

  if path == "seerjax/__init__.py":
    room = "experiments"  # The front module exports from every room of the library.
  if room not in ROOMS:
    complain(
      {f"the room {room!r}"},
      f"one of {', '.join(ROOMS)}",
      "put the module into one of them, or give its room a step in tests/test_dependencies.py",
    )
    return found
  ours = {n for n in names if n.split(".")[0] in (*PACKAGES, "experiments") and n != "seerjax"}
  stray = {room_of(name) for name in ours} & set(ROOMS) - allowed_rooms(room)
  complain(
    {f"an import of {name!r}" for name in stray},
    f"imports of {', '.join(sorted(allowed_rooms(room)))} only",
    "move the shared record to seerjax/types.py, or pass a callable in",
  )
  if path.startswith(("seerjax/", "pallas_kernels/")):
    complain(
      {f"an import of {name!r}" for name in tops & {*EXTRAS, "experiments"}},
      f"no import of {', '.join(sorted(EXTRAS))} or experiments",
      "the library is installed without them: move what needs them to experiments/",
    )
  if room != "cluster":
    complain(
      {"Ray"} & {"Ray" for text in ("import ray", "from ray", '"ray"', "'ray'") if text in source},
      "Ray in seerjax/cluster alone",
      "reach other processes through cluster.driver.Workers",
    )
  if room == "pallas_kernels":
    # The benchmark is a program of its own, with flags, tables and other numbers to compare with.
    known = {"jax", "pallas_kernels", *sys.stdlib_module_names}
    known |= {"absl", "numpy"} if path.startswith(BENCH) else set()
    complain(
      tops - known,
      "imports of jax and the standard library only",
      "kernels are used without SeerJAX: write it with jax.numpy",
    )
  if within in HOST_ONLY or within.startswith(POLICIES):
    light = tuple(import_graph.dotted(f"seerjax/{one}") for one in (*HOST_ONLY, POLICIES))
    light = tuple(f"{one.rstrip('.')}." for one in light)
    heavy = {n for n in ours if not f"{n}.".startswith(light)}
    rooms = {room_of(n) for n in heavy} & set(ROOMS) - HOST_ONLY_ROOMS
    complain(
      (tops - HOST_ONLY_IMPORTS - sys.stdlib_module_names) | rooms,
      "imports of numpy, numba and seerjax.types only",
      "the simulator runs these lines without JAX: pass numbers in",
    )
  if room in CLOCKLESS and within != WAITS:
    complain(
      {f"the clock {name!r}" for name in tops & CLOCKS},
      "no clock",
      "a decision may only follow step numbers and exchanged numbers: measure in the caller, and"
      " broadcast",
    )
  private = {n for n in names if n == "jax._src" or n.startswith("jax._src.")}
  defaults = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src"):
      private.add(ast.unparse(node))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
      if len(node.args) + len(node.keywords) > 2:
        defaults.add(f"{ast.unparse(node)} in line {node.lineno}")
  complain(private, "public names of JAX", "JAX changes the private ones without notice")
  complain(
    defaults,
    "attributes that are known to exist",
    "read the field, or make the absent case a value of it",
  )
  return found


def sources() -> list[pathlib.Path]:
  return [p for name in (*PACKAGES, "experiments") for p in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path: pathlib.Path):
  found = complaints(path.read_text(), path.relative_to(ROOT).as_posix())
  assert not found, "\n".join(found)


def test_no_modules_import_one_another():
  assert import_graph.circles(import_graph.graph()) == []


def test_every_room_stands_in_one_step():
  assert len(ROOMS) == len(set(ROOMS))
  for room, others in PEERS.items():
    step = next(rooms for rooms in STEPS if room in rooms)
    assert others <= set(step)
    assert not any(room in PEERS.get(other, set()) for other in others), f"{room} is in a ring"


@pytest.mark.parametrize(
  "path, source, expected",
  [
    ("seerjax/ops/norms.py", "def f():\n  from seerjax import engine",
     "seerjax/ops/norms.py: got an import of 'engine'; expected imports of"),
    ("seerjax/trainer/step.py", "import seerjax.engine.pages", "got an import of 'engine'"),
    ("seerjax/engine/engine.py", "from seerjax.trainer import step", "got an import of 'trainer'"),
    ("seerjax/kv/pins.py", "from seerjax.engine import sequence", "got an import of 'engine'"),
    ("seerjax/kv/pool.py", "def f():\n  import seerjax.trainer.step", "got an import of 'trainer'"),
    ("seerjax/models/lora.py", "from ..engine import pages", "move the shared record to"),
    ("seerjax/rl.py", "from experiments import grpo", "got an import of 'experiments'"),
    ("seerjax/__init__.py", "def f():\n  from experiments.problems import names",
     "got an import of 'experiments'; expected no import of highspy, scipy or experiments"),
    ("seerjax/discovery/archive.py", "def f():\n  import scipy.optimize",
     "got an import of 'scipy'; expected no import of highspy, scipy or experiments"),
    ("seerjax/tasks/gsm8k.py", "from highspy import Highs", "got an import of 'highspy'"),
    ("seerjax/types.py", "from seerjax.ops import tiles", "or pass a callable in."),
    ("seerjax/helpers.py", "", "got the room 'helpers'; expected one of array_typing"),
    ("pallas_kernels/matmul.py", "import numpy as np", "expected imports of jax and the standard"),
    ("pallas_kernels/matmul.py", "from seerjax import types", "got an import of 'types'"),
    ("seerjax/rollout/scheduler.py", "import jax.numpy as jnp", "got jax; expected imports of"),
    ("seerjax/rollout/scheduler.py", "from seerjax import ops", "expected imports of numpy, numba"),
    ("seerjax/rollout/policies/own.py", "import jax.numpy as jnp", "got jax; expected imports of"),
    ("seerjax/speculation/budget.py", "from seerjax.engine import sizes", "got engine; expected"),
    ("seerjax/speculation/budget.py", "import time", "got the clock 'time'; expected no clock"),
    ("seerjax/sleep/contexts.py", "import time", "got the clock 'time'; expected no clock"),
    ("seerjax/sleep/planner.py", "import jax", "expected imports of numpy, numba and"),
    ("seerjax/rollout/divided.py", "from datetime import datetime", "got the clock 'datetime'"),
    ("seerjax/rl.py", "def f():\n  import ray", "got Ray; expected Ray in seerjax/cluster alone"),
    ("seerjax/rl.py", "ray = import_module('ray')", "got Ray; expected Ray in seerjax/cluster"),
    ("seerjax/ops/tiles.py", "from jax._src import core", "expected public names of JAX"),
    ("seerjax/ops/tiles.py", "import jax\njax._src.core.x", "got jax._src"),
    ("seerjax/ops/tiles.py", "x = getattr(a, 'b', None)",
     "got getattr(a, 'b', None) in line 1; expected attributes that are known to exist"),
  ],
)  # fmt: skip
def test_what_breaks_the_house_is_named(path: str, source: str, expected: str):
  found = complaints(source, path)
  assert any(expected in sentence for sentence in found), found


@pytest.mark.parametrize(
  "path, source",
  [
    ("seerjax/ops/norms.py", "import jax\nfrom seerjax import numerics, parallel\ngetattr(a, 'b')"),
    ("seerjax/rl.py", "from seerjax import engine, trainer, rollout"),
    ("seerjax/cluster/ray_workers.py", "ray = importlib.import_module('ray')"),
    ("seerjax/speculation/budget.py", "from seerjax.engine.step_times import StepTimes"),
    ("seerjax/rollout/scheduler.py", "import heapq\nimport numpy as np\nfrom seerjax import types"),
    ("pallas_kernels/bench/__main__.py", "from absl import app\nimport jax\nimport time"),
    ("pallas_kernels/bench/checks.py", "import numpy as np\nfrom pallas_kernels import matmul"),
  ],
)
def test_what_keeps_the_house_is_let_in(path: str, source: str):
  assert complaints(source, path) == []


@pytest.mark.thorough
def test_importing_everything_touches_no_device():
  program = f"""
import importlib, pathlib
root = pathlib.Path({str(ROOT)!r})
for package in {PACKAGES!r}:
  for path in sorted((root / package).rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] != "__main__":  # Programs have flags.
      importlib.import_module(".".join(p for p in parts if p != "__init__"))
import jax
# Refused, or without effect, once a backend exists.
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["3"]


def test_importing_the_package_alone_imports_no_jax():
  program = "import sys, seerjax, pallas_kernels; print(sys.modules.keys() & {'jax', 'numpy'})"
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ["set()"]
