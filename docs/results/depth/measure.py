"""Compiles one step of a forward by depth, layers in a row and in a loop, and times it.

Command: PYTHONPATH=. python docs/results/depth/measure.py row-16-256 loop-16-256
A word is KIND-LAYERS-WIDTH.
"""

from __future__ import annotations

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.models import config as model_config, kv_layout, parameters, transformer
from seerjax.ops import rotary
from seerjax.types import TokenBatch

jax.config.update("jax_enable_compilation_cache", False)
PLACES = np.arange(64)
PAGES = 8  # Of a sequence, of 32 positions.


def batch(n: int) -> TokenBatch:
  """Returns n sequences that decode the token at position 100."""
  live = n > PLACES
  table = np.where(live[:, None], 1 + PLACES[:, None] * PAGES + np.arange(PAGES), 0)
  fields = (
    PLACES % 500, np.where(live, 100, 0), np.where(live, table[:, 3] * 32 + 4, 0), n,
    np.where(live, PLACES, 0), live, table, n,
  )  # fmt: skip
  return TokenBatch(*(jnp.asarray(field, jnp.int32) for field in fields))


numerics = numerics_lib.NumericsConfig(query_tile=4, slot_tile=8, kv_split=64)
for word in sys.argv[1:]:
  kind, depth, width = word.split("-")
  d = int(width)
  config = model_config.TransformerConfig(
    vocab_size=512,
    hidden_size=d,
    intermediate_size=3 * d,
    num_layers=int(depth),
    num_heads=16,
    num_kv_heads=8,
    head_dim=d // 16,
    has_qk_norms=True,
    rotary=rotary.RotaryConfig(head_dim=d // 16),
  )
  layout = parameters.shapes(config, 8)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf, rng=rng: jnp.asarray(0.05 * rng.standard_normal(leaf.shape, np.float32)), layout
  )
  params = parameters.stacked(params) if kind == "loop" else params
  pages = kv_layout.empty_pages(config, numerics, num_pages=400, page_size=32)
  run = jax.jit(
    functools.partial(transformer.forward, config=config, numerics=numerics), donate_argnums=2
  )
  begin = time.process_time()
  lowered = run.lower(params, batch(1), pages)
  traced = time.process_time()
  program = lowered.compile()
  compiled = time.process_time()
  memory = program.memory_analysis()
  steps = []
  for n in (1, 16, 48):
    times = []
    for _ in range(9):
      start = time.process_time()
      _, pages = jax.block_until_ready(program(params, batch(n), pages))
      times.append(1e3 * (time.process_time() - start))
    steps.append(f"{min(times):.1f}")
  print(
    f"| {kind} | {depth} | {d} | {traced - begin:.1f} | {compiled - traced:.1f} |"
    f" {len(program.as_text()) / 1e6:.2f} | {memory.temp_size_in_bytes / 2**20:.1f} |"
    f" {memory.alias_size_in_bytes / 2**20:.0f} | {' / '.join(steps)} |",
    flush=True,
  )
