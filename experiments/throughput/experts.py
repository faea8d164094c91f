"""Times the part of a layer after attention with experts, compared with dense MLPs.

Claim: natively, a layer's experts take at most 1.3 times the larger of two bounds: a dense native
MLP with as many features as a row's experts have, and the bytes of the experts that rows chose, at
the speed of a copy.
Command: bash launch/local.sh experiments.throughput.experts
Hardware: 2 CPU cores, 6 GiB, nothing else running; 5 minutes. Numbers: docs/results/moe.md

Layers are those of nano-moe in float32 and of Qwen3-30B-A3B in bfloat16, with tiny attention
outputs, so that their projection costs nothing. Rows are random, and so are routers. The sides take
turns: native, tiled with tiles of 4, 8 and 16 rows of an expert, `lax.ragged_dot`, and native dense
MLPs of the active and of the whole size.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any

from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import measure
from experiments.throughput import real as real_speed
from seerjax import layer_kinds, numerics as numerics_lib
from seerjax.backends.protocol import Stage
from seerjax.layer_kinds import Experts, Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, experts, mlp, parameters, presets
from seerjax.models.decoder import Decoder, decide
from seerjax.ops import rotary, routing

LAYERS = {"nano-moe": "float32", "qwen3-30b-a3b": "bfloat16"}  # By preset, the compute dtype.
ROWS = (1, 16, 64)
EXPERT_TILES = (4, 8, 16)
AIM = 1.3
SECONDS = 0.05  # At least this long is one timing.

# Hidden rows f[n, d] of a call.
Call = Callable[[], jax.Array]


def layer_of(preset: str, feed_forward: Experts | Gated) -> model_config.TransformerConfig:
  """Returns one layer of a preset with another part after a tiny attention."""
  shape = presets.get(preset)
  attention = Grouped(
    num_heads=8, num_kv_heads=8, head_dim=2, rotary=rotary.RotaryConfig(head_dim=2)
  )
  layer = LayerConfig(attention=attention, feed_forward=feed_forward)
  return dataclasses.replace(shape, vocab_size=8, layers=layer_kinds.uniform(layer, 1), family="")


@functools.cache
def weights_of(decoder: Decoder) -> Any:
  """Returns the weights of the only layer of a decoder."""
  masters = parameters.init(numerics_lib.key(0), decoder.shape, decoder.numerics)
  return parameters.compute_params(masters, decoder.numerics)["layers"][0]


def rows_of(decoder: Decoder, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Returns hidden rows f[n, d] and attention outputs f[n, k, 1, c]."""
  draw = np.random.default_rng(num_rows)
  count = decoder.backend.whole_rows(num_rows)
  shapes = (count, decoder.shape.hidden_size), (count, 8, 1, 2)
  x, mixed = (jnp.asarray(draw.standard_normal(one), decoder.numerics.dtype) for one in shapes)
  return x, mixed


def call_of(decoder: Decoder, num_rows: int) -> Call:
  """Returns the part after attention of a backend, compiled."""
  shape, backend, rows = decoder.shape.layer_shape(0), decoder.backend, rows_of(decoder, num_rows)
  weights, count = weights_of(decoder), jnp.int32(num_rows)

  @jax.jit
  def run(weights: Any, rows: Any, count: jax.Array) -> jax.Array:
    if isinstance(shape.kind.feed_forward, Experts):
      return experts.after_attention(backend, shape, None, weights, rows, count)[0]
    return backend.after_attention(Stage(shape, None, mlp.output_rows), weights, rows, count)

  return lambda: run(weights, rows, count)


def ragged_call(decoder: Decoder, num_rows: int) -> Call:
  """Returns norm, router and experts by `lax.ragged_dot` on plain XLA, compiled."""
  kind = decoder.shape.layers[0].feed_forward
  assert isinstance(kind, Experts)
  rule, weights = kind.routing, weights_of(decoder)
  x = rows_of(decoder, num_rows)[0][:num_rows]
  flat = {
    name: weights[name].reshape(rule.num_experts, *weights[name].shape[2:])
    for name in ("expert_gate_up", "expert_down")
  }

  @jax.jit
  def run(flat: Any, router: Any, scale: jax.Array, x: jax.Array) -> jax.Array:
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    normed = (x * lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale[None, :]
    ids, chosen = routing.route_rows(normed, router, rule)
    picks = ids.reshape(-1)
    order = jnp.argsort(picks, stable=True)
    sizes = jnp.bincount(picks, length=rule.num_experts).astype(jnp.int32)
    product = functools.partial(
      lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32
    )
    gate, up = jnp.split(product(normed[order // rule.num_chosen], flat["expert_gate_up"]), 2, -1)
    out = product((jax.nn.silu(gate) * up).astype(x.dtype), flat["expert_down"])
    out = out * chosen.reshape(-1)[order][:, None]
    total = jnp.zeros(x.shape, jnp.float32).at[order // rule.num_chosen].add(out)
    return x + total.astype(x.dtype)

  router = routing.router_of(weights)
  return lambda: run(flat, router, weights["mlp_norm"], x)


def num_touched(decoder: Decoder, num_rows: int) -> int:
  """Returns how many experts the rows choose, all together."""
  kind = decoder.shape.layers[0].feed_forward
  assert isinstance(kind, Experts)
  found: list[Any] = []

  def watch(_: Any, rule: Any, weights: Any, normed: Any, ids: jax.Array, count: Any) -> tuple[()]:
    found.append(np.unique(np.asarray(ids)[:num_rows]).size)
    return ()

  shape = decoder.shape.layer_shape(0)
  experts.after_attention(
    decoder.backend, shape, None, weights_of(decoder), rows_of(decoder, num_rows),
    jnp.int32(num_rows), watch=watch,
  )  # fmt: skip
  return found[0]


def timed(call: Call) -> float:
  """Returns the seconds of a call, the mean of as many as fill `SECONDS`."""
  jax.block_until_ready(call())
  count, begin = 0, time.perf_counter()
  while count == 0 or time.perf_counter() - begin < SECONDS:
    jax.block_until_ready(call())
    count += 1
  return (time.perf_counter() - begin) / count


def table(preset: str, dtype: Any, rounds: int) -> str:
  """Measures a layer at each number of rows; returns a Markdown table."""
  kind = presets.get(preset).layers[0].feed_forward
  assert isinstance(kind, Experts)
  asked = numerics_lib.NumericsConfig(compute_dtype=dtype)
  named = lambda name, **others: dataclasses.replace(asked, backend=name, **others)
  native = decide(layer_of(preset, kind), named("native"))
  dense = lambda size: decide(layer_of(preset, Gated(intermediate_size=size)), named("native"))
  decoders = {
    "native": native,
    **{
      f"tiles of {tile}": decide(native.shape, named("tiled", expert_tile=tile))
      for tile in EXPERT_TILES
    },
    "dense, active size": dense(kind.row_features),
    "dense, whole size": dense(kind.all_features),
  }
  speed = real_speed.copy_bandwidth(2)
  expert_bytes = (
    3 * presets.get(preset).hidden_size * kind.expert_size * native.numerics.dtype.itemsize
  )
  lines = []
  for num_rows in ROWS:
    calls = {name: call_of(decoder, num_rows) for name, decoder in decoders.items()}
    calls["ragged_dot"] = ragged_call(native, num_rows)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
      for name in measure.in_turn(calls, turn):
        times[name].append(timed(calls[name]))
    middle = {name: float(np.median(values)) for name, values in times.items()}
    read = num_touched(native, num_rows) * expert_bytes / speed
    bound = max(middle["dense, active size"], read)
    lines.append(
      [
        f"{preset}, {dtype}", num_rows,
        *(f"{1e3 * middle[name]:.3f}" for name in calls), f"{1e3 * read:.3f}",
        f"**{middle['native'] / bound:.2f}**", measure.holds(middle["native"] <= AIM * bound),
        f"{min(middle[f'tiles of {tile}'] for tile in EXPERT_TILES) / middle['ragged_dot']:.2f}",
      ]
    )  # fmt: skip
  names = (
    "layer", "rows", *(f"{name}, ms" for name in calls), "bytes of the chosen experts, ms",
    "native, of the larger bound", f"at most {AIM}", "best tiles, of ragged_dot",
  )  # fmt: skip
  return measure.table(names, lines)


def main(args: flags.FlagValues) -> None:
  for preset in args.layers:
    measure.say(table(preset, LAYERS[preset], args.rounds))
    weights_of.cache_clear()


if __name__ == "__main__":
  flags.DEFINE_multi_enum("layers", [*LAYERS], [*LAYERS], "Presets to take a layer from.")
  flags.DEFINE_integer("rounds", 5, "Timings of each side, in turns.", lower_bound=1)
  measure.command(main)
