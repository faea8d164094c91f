"""Times functions against each other on a GPU, without distortion by launches or caches.

A contestant is a function with the shapes of its inputs. One compiled program calls it on several
copies of its inputs in sequence: enough copies that no input stays in L2 and that one launch from
Python lasts long. Programs of all contestants take turns; results are the median of the turns with
minimum and maximum. Inputs are normal random numbers, because a GPU multiplies zeros faster;
integers (page tables) are shared by the copies, as among the layers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Bounds of the inputs of all copies together: several times the 50 or 60 MB of L2.
LEAST_BYTES = 400_000_000
MOST_BYTES = 4_000_000_000
MOST_COPIES = 64
# Minimum time of one program, and target time of one turn of a contestant.
PROGRAM_SECONDS = 2e-3
TURN_SECONDS = 10e-3
LEAST_TURNS, MOST_TURNS = 3, 9


@dataclasses.dataclass(frozen=True)
class Contestant:
  """One function and its inputs.

  Attributes:
    name: name in tables.
    call: function of the inputs; of the module torch and the inputs if `is_torch`.
    inputs: a tuple of trees; a `jax.ShapeDtypeStruct` is drawn, a numpy array is used as it is.
    is_torch: whether the function uses PyTorch.
  """

  name: str
  call: Callable[..., Any]
  inputs: tuple[Any, ...]
  is_torch: bool = False


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of one call, or the reason why there are none."""

  name: str
  median: float = 0.0
  least: float = 0.0
  most: float = 0.0
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
  """Measured limits of this GPU: bytes read and written per second, and operations per second."""

  copy_bandwidth: float
  matmul_peak: float


@dataclasses.dataclass(frozen=True)
class Program:
  """A program: `launch` starts `num_calls` calls, `wait` waits for the result of `launch`."""

  launch: Callable[[], Any]
  wait: Callable[[Any], Any]
  num_calls: int

  def seconds(self, num_launches: int) -> float:
    """Returns the seconds of one call, measured over `num_launches` launches."""
    started = time.perf_counter()
    out = None
    for _ in range(num_launches):
      out = self.launch()
    self.wait(out)
    return (time.perf_counter() - started) / (num_launches * self.num_calls)


def num_copies(num_bytes: float, expected_seconds: float) -> int:
  """Returns the number of copies of inputs (and outputs) in one program.

  Args:
    num_bytes: bytes of one copy.
    expected_seconds: minimum seconds of one call.
  """
  least = max(LEAST_BYTES / num_bytes, PROGRAM_SECONDS / expected_seconds)
  most = min(MOST_BYTES / num_bytes, MOST_COPIES)
  return max(1, round(min(least, most)))


def reason_of(error: BaseException) -> str:
  """Returns an error as one line of at most 200 characters."""
  lines = str(error).strip().splitlines() or ["no message"]
  return f"{type(error).__name__}: {lines[0]}"[:200]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def draw(inputs: Any, seed: int) -> Any:
  """Returns the tree with every `jax.ShapeDtypeStruct` replaced by normal random numbers."""
  leaves, tree = jax.tree.flatten(inputs)
  keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
  return tree.unflatten(
    [
      _normal(key, x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
      for key, x in zip(keys, leaves)
    ]
  )


def shapes_of(inputs: Any) -> Any:
  """Returns the tree with every array replaced by its shape."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)


def program_of(contestant: Contestant, copies: int) -> Program:
  """Compiles the program of a contestant and runs it once.

  Raises:
    Exception: of any kind, if the contestant cannot run here.
  """
  program = (_torch_program if contestant.is_torch else _jax_program)(contestant, copies)
  program.wait(program.launch())
  return program


def _jax_program(contestant: Contestant, copies: int) -> Program:
  leaves, tree = jax.tree.flatten(contestant.inputs)
  shared = {i: jnp.asarray(x) for i, x in enumerate(leaves) if isinstance(x, np.ndarray)}
  sets = []
  for seed in range(copies):
    drawn = jax.tree.leaves(draw([x for x in leaves if not isinstance(x, np.ndarray)], seed))
    sets.append([shared[i] if i in shared else drawn.pop(0) for i in range(len(leaves))])
  # Lowers the kernel once for any number of copies, and keeps shared inputs shared.
  call = jax.jit(contestant.call)
  own = [[x for i, x in enumerate(s) if i not in shared] for s in sets]

  @jax.jit
  def run(shared: dict[int, jax.Array], own: list[list[jax.Array]]) -> list[Any]:
    out = []
    for arrays in own:
      rest = iter(arrays)
      inputs = [shared[i] if i in shared else next(rest) for i in range(len(leaves))]
      out.append(call(*tree.unflatten(inputs)))
    return out

  return Program(lambda: run(shared, own), jax.block_until_ready, copies)


def _torch_program(contestant: Contestant, copies: int) -> Program:
  torch = importlib.import_module("torch")
  names = {jnp.dtype(jnp.bfloat16): torch.bfloat16, jnp.dtype(jnp.float32): torch.float32}
  sets = [
    [
      torch.randn(x.shape, device="cuda", dtype=torch.float32).to(names[jnp.dtype(x.dtype)])
      for x in jax.tree.leaves(contestant.inputs)
    ]
    for _ in range(copies)
  ]
  contestant.call(torch, *sets[0])
  torch.cuda.synchronize()
  # A graph launches all calls at once, like a compiled program.
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    out = [contestant.call(torch, *inputs) for inputs in sets]
  # The lambda keeps `out` and `sets` alive as long as the graph.
  return Program(lambda: (graph.replay(), out, sets), lambda _: torch.cuda.synchronize(), copies)


def race(
  contestants: Sequence[Contestant], num_bytes: float, expected_seconds: float, seconds: float
) -> list[Timing]:
  """Times contestants in turn; a failing one has a reason and does not affect the others.

  Args:
    contestants: contestants for the same work.
    num_bytes: bytes that one call has to read and write.
    expected_seconds: minimum seconds of one call.
    seconds: limit of all turns together, without compilation.
  """
  copies = num_copies(num_bytes, expected_seconds)
  programs, launches, reasons = {}, {}, {}
  for contestant in contestants:
    try:
      program = program_of(contestant, copies)
      # The first turn is a warm-up that determines the number of launches per turn.
      once = program.seconds(1) * program.num_calls
      launches[contestant.name] = max(1, round(TURN_SECONDS / once))
      programs[contestant.name] = program
    # A contestant's error is only recorded in the table.
    except Exception as error:
      reasons[contestant.name] = reason_of(error)
  one_round = sum(
    TURN_SECONDS + programs[name].seconds(1) * programs[name].num_calls for name in programs
  )
  turns = round(min(max(seconds / max(one_round, 1e-9), LEAST_TURNS), MOST_TURNS))
  times = {name: [] for name in programs}
  for _ in range(turns):
    for name, program in programs.items():
      times[name].append(program.seconds(launches[name]))
  return [
    Timing(c.name, reason=reasons[c.name])
    if c.name in reasons
    else Timing(c.name, statistics.median(times[c.name]), min(times[c.name]), max(times[c.name]))
    for c in contestants
  ]


def measure_machine(copy_bytes: int = 1 << 31, sizes: Sequence[int] = (4096, 8192)) -> Machine:
  """Returns this GPU's bandwidth on a large copy, and the best rate of `jnp.dot` in bfloat16.

  Args:
    copy_bytes: bytes read, and as many written.
    sizes: values of m, n and k of the products.
  """
  shape = (copy_bytes // 2,)
  source = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
  # A copy by a kernel and one by the copy engine; the faster one counts.
  copies = [Contestant("negative", lambda x: -x, source), Contestant("copy", jnp.copy, source)]
  timings = race(copies, 2 * copy_bytes, 1.0, 1.0)
  products = [
    race(
      [Contestant(str(size), jnp.dot, (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),) * 2)],
      6 * size * size,
      2 * size**3 / 1e15,
      1.0,
    )[0]
    for size in sizes
  ]
  for timing in (*timings, *products):
    if timing.reason:
      raise RuntimeError(f"cannot measure this machine: {timing.name}: {timing.reason}")
  return Machine(
    copy_bandwidth=2 * copy_bytes / min(t.median for t in timings),
    matmul_peak=max(2 * size**3 / t.median for size, t in zip(sizes, products)),
  )
