"""A step of the engine in which every row decodes: its program, and what it takes.

One instance on one device. Each row is a sequence of its own, at the last position of its context.
`engine_step` times it on a GPU; `gpu_step` compiles it for one, from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

from seerjax.engine import runner
from seerjax.models import config as model_config, kv_layout, parameters
from seerjax.numerics import NumericsConfig
from seerjax.ops import sampling
from seerjax.types import SamplingParams, TokenBatch

PAGE_SIZE = 64


def program(
  model: model_config.TransformerConfig, numerics: NumericsConfig
) -> Callable[..., Any]:
  """Returns `runner.instance_step` of (weights, pages, inputs, key).

  As `Runner.step` has it of a backend that waits for predicates: copies are another program's, and
  no row is special.
  """
  return functools.partial(
    runner.instance_step, config=model, numerics=numerics, axis=None, is_plain=True
  )


def inputs(
  model: model_config.TransformerConfig, rows: int, context: int, *, max_context: int = 0
) -> runner.StepInputs:
  """Returns the inputs of one instance, made on the host.

  Args:
    model: whose tokens there are.
    rows: sequences that decode together, each in pages of its own from page 1 on.
    context: positions that each of them sees.
    max_context: positions that a sequence's table of pages has room for; `context` where less.
  """
  width = pages_of(context)
  row = np.arange(rows, dtype=np.int32)
  table = 1 + row[:, None] * width + np.arange(width, dtype=np.int32)
  last = np.full(rows, context - 1, np.int32)
  more = max(pages_of(max_context) - width, 0)
  # Any: the records are typed as device arrays, and these are made on the host.
  batch: dict[str, Any] = dict(
    tokens=row % model.vocab_size,
    positions=last,
    slots=table[:, -1] * PAGE_SIZE + last % PAGE_SIZE,
    num_rows=np.int32(rows),
    segment_start=row,
    segment_length=np.ones(rows, np.int32),
    page_table=np.pad(table, ((0, 0), (0, more))),
    num_segments=np.int32(rows),
  )
  step: dict[str, Any] = dict(
    batch=TokenBatch(**batch),
    sample_rows=row,
    sampling=sampling.sampling_rows([SamplingParams(temperature=1.0)] * rows),
    seeds=row.astype(np.uint32),
    positions=last + 1,
    num_samples=np.int32(rows),
    copies=np.zeros((0, 2), np.int32),
    num_copies=np.int32(0),
  )
  return runner.StepInputs(**step)


def pages_of(context: int) -> int:
  """Returns how many pages hold so many positions."""
  return -(-context // PAGE_SIZE)


def weights(model: model_config.TransformerConfig, numerics: NumericsConfig) -> parameters.Params:
  """Returns the shapes of the weights, in the layout and dtype that run."""
  masters = parameters.shapes(model, numerics.reduction_shards)
  return jax.eval_shape(lambda masters: parameters.compute_params(masters, numerics), masters)


def pages(
  model: model_config.TransformerConfig, numerics: NumericsConfig, num_pages: int
) -> kv_layout.Pages:
  """Returns empty pages; within `jax.eval_shape` no more than their shapes."""
  return kv_layout.empty_pages(model, numerics, num_pages=num_pages, page_size=PAGE_SIZE)
