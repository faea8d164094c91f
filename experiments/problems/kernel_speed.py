"""Programs as a speed target: find the schedule that computes the same thing in less time.

`TriMulSpeed`: AlphaFold 3's outgoing triangle multiplication, on whatever device JAX has. With
x f32[n, n, c], mask m[n, n] and hidden size h,

  y = LayerNorm(x)
  a = m (y A) sigmoid(y A'),   b = m (y B) sigmoid(y B'),   g = sigmoid(y G)
  z[i, j] = (LayerNorm(sum over k of a[i, k] b[j, k]) g[i, j]) Z

An artefact is a `Schedule`, which is data: how the five projections are grouped, which axis lies
last, how sums of a norm are taken, and so on. `trimul` builds the program: what is searched is
never code. `TileSpeed` does the same for the tiles of our GPU kernels, against XLA; on a CPU, which
cannot run them, for the same tiles walked in the same order by XLA itself.

  value = median over laps of (time of the plain jitted reference / time of the schedule)

The rules of the race, so that only speed can win it:

  inputs    fresh for each lap, weights too, from unknown seeds: nothing can be kept from
            one call for the next
  answers   those of the timed calls themselves are compared, after the clock has stopped; one wrong
            answer, and the schedule is no answer
  clock     stops when the outputs are on the device (`block_until_ready`)
  company   schedule and reference take turns on the same inputs, first and second in alternation,
            so that a busy machine slows both; the ratio is taken lap by lap
  tolerance |got - expected| <= 2e-2 + 2e-2 |expected|, as published; and, where all is float32 on
            a CPU, 1e-4 in place of 2e-2 (other devices round what they multiply)

**This is the one exception to determinism: `verify` times.** Whether a schedule is right is as good
as certain, what it is worth is noisy. A record should count only after `confirm`, which races it
again for longer and takes the lower quartile: an elite kept for one lucky lap would stay for ever.

Source: Abramson et al. 2024 (AlphaFold 3), https://doi.org/10.1038/s41586-024-07487-w, supplement,
algorithm 12; TTT-Discover, https://arxiv.org/abs/2601.16175, for it as a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import secrets
import statistics
import time
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gpu, matmul, rms_norm
from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, Published, Score

TOLERANCE = 2e-2
FLOAT32_TOLERANCE = 1e-4
NORM_EPSILON = 1e-5
NUM_PROJECTIONS = 5
# Laps of `verify` and of `confirm`; odd, so that the median is a lap.
LAPS, CONFIRMING_LAPS = 9, 31
# Calls in one program: a lap lasts far longer than a GPU's launch. On a CPU one call is long.
GPU_CALLS, CPU_CALLS = 8, 1
# What inputs are drawn from: normal, or Cauchy of scale 2, whose outliers try the norms.
KINDS = ("normal", "masked", "cauchy")


class Field(NamedTuple):
  """One choice of a schedule: its name, what may be chosen (at most 8), and what it means."""

  name: str
  choices: tuple[Any, ...]
  meaning: str


FIELDS: tuple[Field, ...] = (
  Field("projections", ("separate", "pairs", "sides", "four", "five"), "what shares one matmul"),
  Field("layout", ("rows", "features"), "of the projections: [n * n, h], or its transpose"),
  Field("input_norm", ("two_pass", "one_pass", "dot", "folded"), "how y comes about"),
  Field("row_chunks", (1, 2, 4), "pieces of the n * n rows, projected one after the other"),
  Field("contraction", ("einsum", "batched", "transposed"), "form of the sum over k"),
  Field("hidden_chunks", (1, 2, 4), "pieces of h, contracted one after the other"),
  Field("output_layout", ("rows", "features"), "of the sum over k, from there on"),
  Field("output_norm", ("two_pass", "one_pass", "dot"), "sums of the second norm"),
  Field("output_chunks", (1, 2, 4), "pieces of the rows after the sum over k"),
  Field("sigmoid", ("logistic", "tanh", "exp"), "formula"),
  Field("barriers", ("none", "contraction", "all"), "where fusion must stop"),
  Field("projection_dtype", ("float32", "bfloat16"), "of both operands; sums are float32"),
  Field("contraction_dtype", ("float32", "bfloat16"), "of both operands; sums are float32"),
)
# Of left, right, left's gate, right's gate, output gate: what shares one matmul.
_GROUPS = {
  "separate": ((0,), (1,), (2,), (3,), (4,)),
  "pairs": ((0, 1), (2, 3), (4,)),
  "sides": ((0, 2), (1, 3), (4,)),
  "four": ((0, 1, 2, 3), (4,)),
  "five": ((0, 1, 2, 3, 4),),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """How `trimul` computes; the defaults are the plain program. See `FIELDS` for the choices.

  Attributes:
    projections: "separate", "pairs" (values; gates), "sides" (left with its gate; right with its),
      "four" or "five" (the output gate too).
    layout: "rows" keeps features last; "features" puts them first, as the contraction wants them.
    input_norm: "two_pass", "one_pass" (mean square minus squared mean), "dot" (sums by a matmul
      with ones), or "folded": x goes into the matmuls, whose results are centred and scaled.
    row_chunks: of the projections.
    contraction: "einsum" of [n, n, h]; "batched", one matmul for each feature; "transposed", the
      same with the right operand laid out as [h, k, j].
    hidden_chunks: of the contraction.
    output_layout, output_norm, output_chunks: of what comes after it.
    sigmoid: "logistic", "tanh" as (1 + tanh(x / 2)) / 2, "exp" as 1 / (1 + exp(-x)).
    barriers: "none"; "contraction", before and after it; "all", also after the first norm.
    projection_dtype, contraction_dtype: "float32" or "bfloat16".
  """

  projections: str = "separate"
  layout: str = "rows"
  input_norm: str = "two_pass"
  row_chunks: int = 1
  contraction: str = "einsum"
  hidden_chunks: int = 1
  output_layout: str = "rows"
  output_norm: str = "two_pass"
  output_chunks: int = 1
  sigmoid: str = "logistic"
  barriers: str = "none"
  projection_dtype: str = "float32"
  contraction_dtype: str = "float32"

  def __post_init__(self):
    reason = complaint(dataclasses.asdict(self), FIELDS)
    if reason:
      raise ValueError(f"Schedule.{reason}; see `FIELDS`.")

  @property
  def is_float32(self) -> bool:
    return self.projection_dtype == self.contraction_dtype == "float32"


def tolerance_of(schedule: Schedule, backend: str) -> float:
  """Returns how far from the reference a schedule's answers may be, absolutely and relatively.

  By default XLA multiplies float32 in TF32 on GPUs and in bfloat16 on TPUs: two programs of the
  same function then differ by more than `FLOAT32_TOLERANCE`.
  """
  return FLOAT32_TOLERANCE if schedule.is_float32 and backend == "cpu" else TOLERANCE


def complaint(artefact: Any, fields: Sequence[Field]) -> str:
  """Returns why something does not choose each field once; "" if it does."""
  names = [field.name for field in fields]
  if not isinstance(artefact, dict) or set(artefact) != set(names):
    return f"artefact: got {environment.shown(artefact)}, expected a dict of {', '.join(names)}"
  for field in fields:
    value = artefact[field.name]
    # True is 1 to `in`, and 1.0 as well.
    if not any(type(value) is type(choice) and value == choice for choice in field.choices):
      listed = ", ".join(map(str, field.choices))
      return f"{field.name}: got {environment.shown(value)}, expected one of {listed}"
  return ""


class Inputs(NamedTuple):
  """Arguments of the triangle multiplication.

  Attributes:
    x: f32[n, n, c].
    mask: f32[n, n] of 0 and 1.
    norm_scale, norm_bias: f32[c].
    projections: f32[5, c, h]: left, right, left's gate, right's gate, output gate.
    output_scale, output_bias: f32[h].
    output_projection: f32[h, c].
  """

  x: jax.Array
  mask: jax.Array
  norm_scale: jax.Array
  norm_bias: jax.Array
  projections: jax.Array
  output_scale: jax.Array
  output_bias: jax.Array
  output_projection: jax.Array


def draw(seed: int, kind: str, *, size: int, dim: int, hidden: int) -> Inputs:
  """Returns random arguments on the device.

  Args:
    seed: at least 0.
    kind: of `KINDS`; "normal" masks nothing, the others one pair in ten.
    size, dim, hidden: n, c, h.
  """
  rng = np.random.Generator(np.random.PCG64(seed))

  def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
    return jnp.asarray(mean + scale * rng.standard_normal(shape, dtype=np.float32), jnp.float32)

  if kind == "cauchy":
    # Tails far beyond these would only test overflow.
    tails = np.clip(2 * rng.standard_cauchy((size, size, dim)), -1e6, 1e6)
    x = jnp.asarray(tails, jnp.float32)
  else:
    x = normal(size, size, dim)
  kept = 1.0 if kind == "normal" else 0.9
  inputs = Inputs(
    x=x,
    mask=jnp.asarray(rng.random((size, size)) < kept, jnp.float32),
    norm_scale=normal(dim, scale=0.1, mean=1.0),
    norm_bias=normal(dim, scale=0.1),
    projections=normal(NUM_PROJECTIONS, dim, hidden, scale=dim**-0.5),
    output_scale=normal(hidden, scale=0.1, mean=1.0),
    output_bias=normal(hidden, scale=0.1),
    output_projection=normal(hidden, dim, scale=hidden**-0.5),
  )
  return jax.block_until_ready(inputs)


def reference(inputs: Inputs) -> jax.Array:
  """The definition, written plainly: f32[n, n, c]."""

  def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    normed = (x - mean) * lax.rsqrt(variance + NORM_EPSILON)
    return normed * scale[None, None, :] + bias[None, None, :]

  y = norm(inputs.x, inputs.norm_scale, inputs.norm_bias)
  left, right, left_gate, right_gate, gate = (y @ w for w in inputs.projections)
  left = left * inputs.mask[:, :, None] * jax.nn.sigmoid(left_gate)
  right = right * inputs.mask[:, :, None] * jax.nn.sigmoid(right_gate)
  summed = jnp.einsum("ikd,jkd->ijd", left, right)
  normed = norm(summed, inputs.output_scale, inputs.output_bias)
  return (normed * jax.nn.sigmoid(gate)) @ inputs.output_projection


# One for all environments: it compiles once for each size.
_compiled_reference = jax.jit(reference)


def trimul(schedule: Schedule, inputs: Inputs) -> jax.Array:
  """The same as `reference`, computed as the schedule says: f32[n, n, c]."""
  size, _, dim = inputs.x.shape
  rows, mask = inputs.x.reshape(size * size, dim), inputs.mask.reshape(size * size)
  parts = [
    _project(schedule, part, kept, inputs)
    for part, kept in zip(
      _pieces(rows, schedule.row_chunks, 0), _pieces(mask, schedule.row_chunks, 0)
    )
  ]
  axis = 0 if schedule.layout == "rows" else 1
  left, right, gate = (jnp.concatenate(pieces, axis=axis) for pieces in zip(*parts))
  summed, layout = _contract(schedule, left, right, size)
  summed = _oriented(summed, layout, schedule.output_layout)
  gate = _oriented(gate, schedule.layout, schedule.output_layout)
  axis = 0 if schedule.output_layout == "rows" else 1
  finished = [
    _finish(schedule, part, part_gate, inputs)
    for part, part_gate in zip(
      _pieces(summed, schedule.output_chunks, axis), _pieces(gate, schedule.output_chunks, axis)
    )
  ]
  return jnp.concatenate(finished, axis=0).reshape(size, size, dim)


def _project(
  schedule: Schedule, rows: jax.Array, mask: jax.Array, inputs: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns left, right and the open output gate, each in `schedule.layout`."""
  is_rows = schedule.layout == "rows"
  dtype = jnp.dtype(schedule.projection_dtype)
  is_folded = schedule.input_norm == "folded"
  form = "dot" if is_folded else schedule.input_norm
  mean, inverse = _moments(rows, form, 1)
  if is_folded:
    y = rows
  else:
    y = (rows - mean) * inverse * inputs.norm_scale[None, :] + inputs.norm_bias[None, :]
    if schedule.barriers == "all":
      y = lax.optimization_barrier(y)
  if not is_rows:
    mean, inverse = mean.reshape(1, -1), inverse.reshape(1, -1)

  def along(vector: jax.Array) -> jax.Array:
    """One number for each feature, beside `linear`'s result."""
    return vector[None, :] if is_rows else vector[:, None]

  def linear(weights: jax.Array) -> jax.Array:
    scaled = inputs.norm_scale[:, None] * weights if is_folded else weights
    pair = (y, scaled) if is_rows else (scaled, y)
    axes = ((1,), (0,)) if is_rows else ((0,), (1,))
    result = _dot(*pair, (axes, ((), ())), dtype)
    if not is_folded:
      return result
    centred = (result - mean * along(scaled.sum(axis=0))) * inverse
    return centred + along(inputs.norm_bias @ weights)

  results: list[Any] = [None] * NUM_PROJECTIONS
  for group in _GROUPS[schedule.projections]:
    weights = jnp.concatenate([inputs.projections[place] for place in group], axis=1)
    parts = _pieces(linear(weights), len(group), 1 if is_rows else 0)
    for place, part in zip(group, parts):
      results[place] = part
  kept = mask[:, None] if is_rows else mask[None, :]
  left = results[0] * kept * _sigmoid(results[2], schedule.sigmoid)
  right = results[1] * kept * _sigmoid(results[3], schedule.sigmoid)
  return left, right, _sigmoid(results[4], schedule.sigmoid)


def _contract(
  schedule: Schedule, left: jax.Array, right: jax.Array, size: int
) -> tuple[jax.Array, str]:
  """Returns sum over k of left[i, k] right[j, k], two axes, and the layout that it is in."""
  dtype = jnp.dtype(schedule.contraction_dtype)
  is_einsum, is_rows = schedule.contraction == "einsum", schedule.layout == "rows"
  if not is_einsum:
    left, right = (_oriented(x, schedule.layout, "features") for x in (left, right))
    is_rows = False
  if schedule.barriers != "none":
    left, right = lax.optimization_barrier((left, right))
  axis = 1 if is_rows else 0
  pieces = []
  for a, b in zip(
    _pieces(left, schedule.hidden_chunks, axis), _pieces(right, schedule.hidden_chunks, axis)
  ):
    if is_rows:
      shaped = (x.reshape(size, size, -1).astype(dtype) for x in (a, b))
      summed = jnp.einsum("ikd,jkd->ijd", *shaped, preferred_element_type=jnp.float32)
      pieces.append(summed.reshape(size * size, -1))
      continue
    a, b = a.reshape(-1, size, size), b.reshape(-1, size, size)
    if is_einsum:
      a, b = a.astype(dtype), b.astype(dtype)
      summed = jnp.einsum("dik,djk->ijd", a, b, preferred_element_type=jnp.float32)
      pieces.append(summed.reshape(size * size, -1))
      continue
    last = 2
    if schedule.contraction == "transposed":
      # Without the barrier XLA folds the transposition into the matmul again.
      b, last = lax.optimization_barrier(b.swapaxes(1, 2)), 1
    summed = _dot(a, b, (((2,), (last,)), ((0,), (0,))), dtype)
    pieces.append(summed.reshape(-1, size * size))
  layout = "rows" if is_einsum else "features"
  summed = jnp.concatenate(pieces, axis=1 if layout == "rows" else 0)
  return (summed if schedule.barriers == "none" else lax.optimization_barrier(summed)), layout


def _finish(
  schedule: Schedule, summed: jax.Array, gate: jax.Array, inputs: Inputs
) -> jax.Array:
  """Returns the second norm, gated and projected: f32[rows, c]."""
  is_rows = schedule.output_layout == "rows"
  features = 1 if is_rows else 0
  mean, inverse = _moments(summed, schedule.output_norm, features)
  scale = jnp.expand_dims(inputs.output_scale, 1 - features)
  bias = jnp.expand_dims(inputs.output_bias, 1 - features)
  gated = ((summed - mean) * inverse * scale + bias) * gate
  axes = (((features,), (0,)), ((), ()))
  return _dot(gated, inputs.output_projection, axes, jnp.dtype(schedule.projection_dtype))


def _moments(x: jax.Array, form: str, axis: int) -> tuple[jax.Array, jax.Array]:
  """Returns the mean and 1 / deviation along an axis of two, which stays with length 1."""
  if form == "dot":
    share = jnp.full((1, x.shape[axis]), 1 / x.shape[axis], x.dtype)
    sums = (lambda v: share @ v) if axis == 0 else (lambda v: v @ share.T)
    mean = sums(x)
    variance = sums((x - mean) ** 2)
  elif form == "one_pass":
    mean = x.mean(axis=axis, keepdims=True)
    variance = (x * x).mean(axis=axis, keepdims=True) - mean * mean
  else:
    mean = x.mean(axis=axis, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=axis, keepdims=True)
  return mean, lax.rsqrt(jnp.maximum(variance, 0.0) + NORM_EPSILON)


def _dot(a: jax.Array, b: jax.Array, axes: Any, dtype: Any) -> jax.Array:
  return lax.dot_general(
    a.astype(dtype), b.astype(dtype), axes, preferred_element_type=jnp.float32
  )


def _sigmoid(x: jax.Array, form: str) -> jax.Array:
  match form:
    case "tanh":
      return 0.5 * jnp.tanh(0.5 * x) + 0.5
    case "exp":
      return 1 / (1 + jnp.exp(-x))
    case _:
      return jax.nn.sigmoid(x)


def _oriented(x: jax.Array, layout: str, wanted: str) -> jax.Array:
  return x if layout == wanted else x.T


def _pieces(x: jax.Array, count: int, axis: int) -> list[jax.Array]:
  return [x] if count == 1 else jnp.split(x, count, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
  """What was measured of one contestant against the reference.

  Attributes:
    reason: why it is out; "" if every answer was right.
    ratios: by lap, wall time of the reference / of the contestant.
    cpu_ratios: by lap, the same of the process's CPU time.
    seconds: median wall time of the contestant.
    reference_seconds: median wall time of the reference.
    error: largest |got - expected| of all answers.
  """

  reason: str = ""
  ratios: tuple[float, ...] = ()
  cpu_ratios: tuple[float, ...] = ()
  seconds: float = 0.0
  reference_seconds: float = 0.0
  error: float = 0.0

  @property
  def speed_up(self) -> float:
    return statistics.median(self.ratios)

  @property
  def lower_quartile(self) -> float:
    return statistics.quantiles(self.ratios, n=4)[0]

  @property
  def cpu_speed_up(self) -> float:
    return statistics.median(self.cpu_ratios)


def race(
  contestant: Callable[[Any], Any],
  plain: Callable[[Any], Any],
  inputs_of: Callable[[int, int], Any],
  *,
  laps: int,
  tolerance: float,
  seed: int | None = None,
) -> Race:
  """Times a contestant against the reference by the rules above.

  Args:
    contestant: of the inputs; returns arrays on the device.
    plain: the reference; the same.
    inputs_of: of a seed and the lap's number, so that kinds can take turns.
    laps: that count; as many warming ones as there are `KINDS` come first, and are checked too.
    tolerance: absolute and relative.
    seed: None for an unknown one; a number only makes the inputs repeatable.
  """
  rng = np.random.Generator(np.random.PCG64(secrets.randbits(64) if seed is None else seed))
  warming = len(KINDS)
  kept, walls, cpus = [], ([], []), ([], [])
  for lap in range(-warming, laps):
    inputs = jax.block_until_ready(inputs_of(int(rng.integers(2**62)), lap))
    outputs: list[Any] = [None, None]
    for place in (0, 1) if lap % 2 else (1, 0):
      function = (contestant, plain)[place]
      cpu, wall = time.process_time(), time.perf_counter()
      try:
        outputs[place] = jax.block_until_ready(function(inputs))
      except Exception as error:
        # A kernel's tiles may ask for more than the machine has; the reference may not fail.
        if place:
          raise
        line = (str(error).splitlines() or [""])[0][:160]
        return Race(reason=f"program: got {type(error).__name__}: {line}, expected an answer")
      wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
      if lap >= 0:
        walls[place].append(wall)
        # Its clock may tick slower than a lap.
        cpus[place].append(max(cpu, 1e-6))
    kept.append(outputs)
    # What is wrong from the start need not be timed.
    if lap < 0:
      reason, error = differs(outputs[0], outputs[1], tolerance)
      if reason:
        return Race(reason=reason, error=error)
  worst = 0.0
  for got, expected in kept:
    reason, error = differs(got, expected, tolerance)
    worst = max(worst, error)
    if reason:
      return Race(reason=f"{reason}, in a timed call", error=worst)
  return Race(
    ratios=tuple(slow / fast for fast, slow in zip(*walls)),
    cpu_ratios=tuple(slow / fast for fast, slow in zip(*cpus)),
    seconds=statistics.median(walls[0]),
    reference_seconds=statistics.median(walls[1]),
    error=worst,
  )


def differs(got: Any, expected: Any, tolerance: float) -> tuple[str, float]:
  """Returns why an answer is wrong ("" if it is right) and the largest difference."""
  answers, truths = jax.tree.leaves(got), jax.tree.leaves(expected)
  if len(answers) != len(truths):
    return f"answer: got {len(answers)} arrays, expected {len(truths)}", 0.0
  worst = 0.0
  for answer, truth in zip(answers, truths):
    if not isinstance(answer, jax.Array) or answer.shape != truth.shape:
      shape = list(answer.shape) if isinstance(answer, jax.Array) else type(answer).__name__
      return f"answer: got {shape}, expected {list(truth.shape)}", 0.0
    if answer.dtype != truth.dtype:
      return f"answer: got {answer.dtype}, expected {truth.dtype}", 0.0
    a, b = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (answer, truth))
    # Equal infinities are no distance apart.
    apart = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=a != b))
    # In this form NaN is wrong; and a distance from infinity is none that could be borne.
    right = (apart <= tolerance + tolerance * np.abs(b)) & np.isfinite(apart)
    worst = max(worst, float(apart.max(initial=0.0)))
    if not right.all():
      place = tuple(int(index) for index in np.argwhere(~right)[0])
      return (
        f"answer: got {a[place]:.6g} at {place}, expected {b[place]:.6g} within {tolerance}"
        f" absolute and relative ({1 - right.mean():.2%} of the entries are off)",
        worst,
      )
  return "", worst


class FieldEdits:
  """Up to four pairs (field, choice); a choice beyond the field's last folds.

  The stop is 0, fields come next, then eight choices.
  """

  NUM_EDITS = 4
  NUM_CHOICES = 8

  def __init__(self, fields: Sequence[Field]):
    self._fields = tuple(fields)
    self._choice = 1 + len(self._fields)

  @property
  def vocab_size(self) -> int:
    return -(-(self._choice + self.NUM_CHOICES) // 8) * 8

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    choice = (self._choice, self._choice + self.NUM_CHOICES)
    # Something has to change, so that the first edit may not be the stop.
    return ((1, self._choice), choice) + ((0, self._choice), choice) * (self.NUM_EDITS - 1)

  @property
  def stop_token(self) -> int | None:
    return 0

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    levels = (field.choices.index(artefact[field.name]) for field in self._fields)
    return (0, *(self._choice + level for level in levels))

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    edited = dict(artefact)
    kept = list(tokens)
    if len(kept) < len(self.allowed) and len(kept) % 2 and kept[-1] == self.stop_token:
      kept.pop()
    if not kept or len(kept) % 2 or (len(kept) == len(tokens) != len(self.allowed)):
      raise ValueError(
        f"FieldEdits.apply: got {len(tokens)} tokens, expected {len(self.allowed)}, or pairs of a"
        " field and a choice and then the stop token 0; finish the sentence."
      )
    for place, (token, (first, past)) in enumerate(zip(kept, self.allowed)):
      # The stop stands last only, and there it is gone.
      least = max(first, 1)
      if not least <= token < past:
        raise ValueError(
          f"FieldEdits.apply: got token {token} at place {place}, expected {least} to {past - 1};"
          " see `allowed`."
        )
    for name, choice in zip(kept[::2], kept[1::2]):
      field = self._fields[name - 1]
      edited[field.name] = field.choices[(choice - self._choice) % len(field.choices)]
    return edited


class _Timed:
  """What both environments share: choices of fields, judged by a race.

  Attributes:
    name, is_maximised, published, language: as `discovery.Environment`.
    fields: of an artefact.
    laps: of `verify`.
  """

  def __init__(self, name: str, fields: Sequence[Field], laps: int):
    if laps < 3 or laps % 2 == 0:
      raise ValueError(f"{name}: got laps={laps}, expected an odd number, at least 3; take {LAPS}.")
    self.name = name
    self.is_maximised = True
    # What is published are times on other machines, and no ratios.
    self.published: tuple[Published, ...] = ()
    self.fields = tuple(fields)
    self.laps = laps
    self.language = FieldEdits(self.fields)

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    """Races an artefact; `Race.reason` says why it is none, or cannot run here."""
    raise NotImplementedError

  def start(self, seed: int) -> Artefact:
    raise NotImplementedError

  def verify(self, artefact: Artefact) -> Score:
    """Judges anything whatever; the value is timed, and so differs from call to call."""
    found = self.measure(artefact, laps=self.laps)
    if found.reason:
      return environment.invalid(found.reason)
    return Score(is_valid=True, value=found.speed_up, reward=found.speed_up)

  def confirm(self, artefact: Artefact, *, laps: int = CONFIRMING_LAPS) -> Score:
    """Races once more, for longer; the value is the lower quartile of the laps' ratios.

    A record counts if this still beats what it should: luck of single laps does not reach here.
    """
    found = self.measure(artefact, laps=laps)
    if found.reason:
      return environment.invalid(found.reason)
    return Score(is_valid=True, value=found.lower_quartile, reward=found.lower_quartile)

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields the best so far of a coordinate search: fields in random order, every choice raced.

    A choice is taken if it wins a race and then a second one against the best's own new race.
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
    """Yields random artefacts, each the better of two choices of one field."""
    rng = np.random.default_rng([seed, 2])
    while True:
      drawn = {field.name: field.choices[rng.integers(len(field.choices))] for field in self.fields}
      field = self.fields[rng.integers(len(self.fields))]
      other = {**drawn, field.name: field.choices[rng.integers(len(field.choices))]}
      values = [self.verify(artefact).value for artefact in (drawn, other)]
      yield other if environment.is_better(self, values[1], values[0]) else drawn

  def picture(self, artefact: Artefact) -> Any:
    """Returns the laps' ratios, raced anew, and their median."""
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
  """The environment: schedules of the triangle multiplication on this machine's default device."""

  def __init__(self, size: int = 64, *, dim: int = 128, hidden: int = 128, laps: int = LAPS):
    """Sets the sizes.

    Args:
      size: n, a multiple of 8.
      dim, hidden: c and h; 8 divides h.
      laps: of `verify`.

    Raises:
      ValueError: if a size has no such chunks, or laps cannot have a median lap.
    """
    for name, value in (("size", size), ("hidden", hidden), ("dim", dim)):
      if value < 8 or value % 8:
        raise ValueError(
          f"TriMulSpeed.{name}: got {value}, expected a positive multiple of 8, which the chunks"
          " divide; round it up."
        )
    super().__init__(f"trimul_{size}_{dim}_{hidden}", FIELDS, laps)
    self._draw = functools.partial(draw, size=size, dim=dim, hidden=hidden)

  def start(self, seed: int) -> Artefact:
    """Returns the plain program as a schedule: about as fast as the reference."""
    return dataclasses.asdict(Schedule())

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    reason = complaint(artefact, FIELDS)
    if reason:
      return Race(reason=reason)
    schedule = Schedule(**artefact)
    # A fresh jit, so that a long search does not keep every program.
    return self.race(jax.jit(functools.partial(trimul, schedule)), laps=laps, seed=seed,
      tolerance=tolerance_of(schedule, jax.default_backend()))  # fmt: skip

  def race(
    self,
    contestant: Callable[[Inputs], Any],
    *,
    laps: int,
    seed: int | None = None,
    tolerance: float = TOLERANCE,
  ) -> Race:
    """Races any function of `Inputs` against the reference, on inputs of all kinds in turn."""
    return race(
      contestant,
      _compiled_reference,
      lambda fresh, lap: self._draw(fresh, KINDS[lap % len(KINDS)]),
      laps=laps,
      tolerance=tolerance,
      seed=seed,
    )


MATMUL_FIELDS: tuple[Field, ...] = (
  Field("block_k", (64, 128), "elements of the contraction that are copied at once"),
  Field("swapped_rows", (0, 8, 16, 32, 64), "up to so many tokens take the swapped orientation"),
  Field("block_m", (64, 128), "tokens of a tall tile"),
  Field("block_n", (128, 256), "columns of a tall tile"),
  Field("swapped_block_n", (64, 128), "columns of a swapped tile"),
  Field("max_stages", (2, 3, 4, 5, 6, 7, 8), "depth of the ring"),
  Field("snake_width", (1, 2, 4, 8, 16, 32), "tiles along n that are walked together"),
)
NORM_FIELDS: tuple[Field, ...] = (
  Field("padding", (1024, 2048, 4096, 8192), "a row is padded to a multiple of so many features"),
  Field("blocks_per_multiprocessor", (1, 2, 4, 6, 8, 12, 16), "rows in flight"),
)


class TileSpeed(_Timed):
  """The environment: tiles of one of our GPU kernels, raced against XLA.

  On a Hopper GPU the kernel runs; on a CPU `walked_matmul` or `walked_norm` does, whose times say
  nothing of a GPU's. On other GPUs `verify` answers that it is no answer there, with the reason.
  `check` says whether tiles give the right result in the kernel, through the interpreter.
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
    """Chooses the kernel and its shapes.

    Args:
      kernel: "matmul" (x[rows, features] @ w[features, columns], bf16) or "rms_norm" (x[rows,
        features], bf16; `columns` is of no use).
      rows, columns, features: as above.
      laps: of `verify`.

    Raises:
      ValueError: if the kernel is another one.
    """
    if kernel not in ("matmul", "rms_norm"):
      raise ValueError(f"TileSpeed.kernel: got {kernel!r}, expected 'matmul' or 'rms_norm'.")
    self._is_matmul = kernel == "matmul"
    shape = (rows, columns, features) if self._is_matmul else (rows, features)
    fields = MATMUL_FIELDS if self._is_matmul else NORM_FIELDS
    super().__init__("_".join([kernel, "tiles", *map(str, shape)]), fields, laps)
    self._columns = columns
    self._shape = (rows, features)

  def start(self, seed: int) -> Artefact:
    """Returns the kernel's default tiles."""
    config = matmul.Config() if self._is_matmul else rms_norm.Config()
    fields = dataclasses.asdict(config)
    return {field.name: fields[field.name] for field in self.fields}

  def measure(self, artefact: Artefact, *, laps: int, seed: int | None = None) -> Race:
    reason = complaint(artefact, self.fields)
    if reason:
      return Race(reason=reason)
    call, config = self._call(artefact, interpret=False)
    num_calls = GPU_CALLS
    if jax.default_backend() == "cpu":
      num_calls = CPU_CALLS
      walked = walked_matmul if isinstance(config, matmul.Config) else walked_norm
      call = functools.partial(walked, config)
    else:
      reason = self._support(config, self._shape[0], interpret=False)
      if reason:
        return Race(reason=f"{self.name}: {reason}")

    def program(function: Callable[..., jax.Array]) -> Callable[[Any], Any]:
      return jax.jit(lambda several: tuple(function(*inputs) for inputs in several))

    plain = jnp.dot if self._is_matmul else _plain_norm
    return race(
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
    """Returns why tiles are wrong; "" if the interpreter, on a CPU, gives the reference's result.

    Args:
      artefact: anything.
      rows: few; the interpreter is slow.
      seed: of the inputs.
    """
    reason = complaint(artefact, self.fields)
    if reason:
      return reason
    call, config = self._call(artefact, interpret=True)
    reason = self._support(config, rows, interpret=True)
    if reason:
      return f"{self.name}: {reason}"
    inputs = self._inputs(seed, rows)
    module = matmul if self._is_matmul else rms_norm
    expected = module.reference(*inputs).astype(jnp.bfloat16)
    return differs(call(*inputs), expected, TOLERANCE)[0]

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
    # The device first: on a CPU no one should have to mend shapes.
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


def walked_matmul(tiles: matmul.Config, x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x @ w, bf16[m, n], tile by tile as the kernel walks it, in plain XLA.

  `max_stages` has no effect: nothing is copied ahead here.

  Args:
    tiles: of the kernel.
    x: bf16[m, k].
    w: bf16[k, n].
  """
  if x.shape[0] <= tiles.swapped_rows:
    # The few tokens lie along the width of a tile.
    swapped = dataclasses.replace(
      tiles, swapped_rows=0, block_m=tiles.swapped_block_n, block_n=128
    )
    return walked_matmul(swapped, w.T, x.T).T
  block_m, block_n, block_k = tiles.block_m, tiles.block_n, tiles.block_k
  rows, columns = x.shape[0], w.shape[1]
  x, w = _padded(x, (block_m, block_k)), _padded(w, (block_k, block_n))
  shape = x.shape[0] // block_m, w.shape[1] // block_n
  walk = [
    (i, j)
    for band in range(0, shape[1], tiles.snake_width)
    # Down one band, up the next.
    for i in (range(shape[0]) if band // tiles.snake_width % 2 == 0 else reversed(range(shape[0])))
    for j in range(band, min(band + tiles.snake_width, shape[1]))
  ]

  def tile(place: jax.Array) -> jax.Array:
    def add(step: jax.Array, total: jax.Array) -> jax.Array:
      left = lax.dynamic_slice(x, (place[0] * block_m, step * block_k), (block_m, block_k))
      right = lax.dynamic_slice(w, (step * block_k, place[1] * block_n), (block_k, block_n))
      return total + jnp.dot(left, right, preferred_element_type=jnp.float32)

    start = jnp.zeros((block_m, block_n), jnp.float32)
    return lax.fori_loop(0, x.shape[1] // block_k, add, start).astype(x.dtype)

  found = lax.map(tile, jnp.asarray(walk, jnp.int32))
  order = sorted(range(len(walk)), key=walk.__getitem__)
  whole = found[jnp.asarray(order)].reshape(*shape, block_m, block_n).swapaxes(1, 2)
  return whole.reshape(x.shape[0], w.shape[1])[:rows, :columns]


def walked_norm(tiles: rms_norm.Config, x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the norm of x, bf16[n, d], so many rows at a time as tiles say, in plain XLA.

  Args:
    tiles: of the kernel.
    x: bf16[n, d].
    scale: bf16[d].
  """
  at_once = tiles.blocks_per_multiprocessor
  padded = _padded(x, (at_once, tiles.padding))
  # Features that pad a row add nothing to its sum of squares; the mean is of the others.
  weight = padded.shape[1] / x.shape[1]
  scales = _padded(scale[None, :], (1, tiles.padding)).astype(jnp.float32)

  def norm(rows: jax.Array) -> jax.Array:
    wide = rows.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True) * weight
    return (wide / jnp.sqrt(mean + jnp.float32(1e-6)) * scales).astype(x.dtype)

  found = lax.map(norm, padded.reshape(-1, at_once, padded.shape[1]))
  return found.reshape(padded.shape)[: x.shape[0], : x.shape[1]]


def _padded(x: jax.Array, multiples: tuple[int, int]) -> jax.Array:
  """Returns a matrix with zeros up to multiples of rows and columns."""
  return jnp.pad(x, [(0, -size % multiple) for size, multiple in zip(x.shape, multiples)])


def _plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """What XLA makes of the definition."""
  return rms_norm.reference(x, scale).astype(x.dtype)
