"""Builds the program and inputs of an engine step in which every row decodes.

It uses one instance on one device. Each row is a separate sequence at the last position of its
context. `engine_step` times the step on a GPU; `gpu_step` compiles it for a GPU from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

from seerjax.engine import runner
from seerjax.models import config as model_config, kv_layout, parameters
from seerjax.models.decoder import decide
from seerjax.numerics import NumericsConfig
from seerjax.ops import sampling
from seerjax.types import SamplingParams, TokenBatch

PAGE_SIZE = 64


def program(model: model_config.TransformerConfig, numerics: NumericsConfig) -> Callable[..., Any]:
  """Returns `runner.instance_step` as a function of (weights, pages, inputs, key).

  It equals the program of `Runner.step` for a backend on which predicates stall the host: page
  copies are a separate program, and no row is special.
  """
  return functools.partial(
    runner.instance_step, decoder=decide(model, numerics).for_rows(is_plain=True)
  )


def inputs(
  model: model_config.TransformerConfig, rows: int, context: int, *, max_model_len: int = 0
) -> runner.StepInputs:
  """Returns the inputs of one instance, as host arrays.

  Args:
    model: the model; provides the vocabulary size.
    rows: number of sequences, each with its own pages, from page 1 on.
    context: positions that each sequence attends to.
    max_model_len: capacity of a sequence's page table in positions, at least `context`.
  """
  width = pages_of(context)
  row = np.arange(rows, dtype=np.int32)
  table = 1 + row[:, None] * width + np.arange(width, dtype=np.int32)
  last = np.full(rows, context - 1, np.int32)
  more = max(pages_of(max_model_len) - width, 0)
  # Any: the records are typed as device arrays, but these are host arrays.
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
  """Returns the number of pages for `context` positions."""
  return -(-context // PAGE_SIZE)


def weights(model: model_config.TransformerConfig, numerics: NumericsConfig) -> parameters.Params:
  """Returns the shapes of the weights, in the layout and dtype used at run time."""
  masters = parameters.shapes(model, numerics.reduction_shards)
  return jax.eval_shape(lambda masters: parameters.compute_params(masters, numerics), masters)


def pages(
  model: model_config.TransformerConfig, numerics: NumericsConfig, num_pages: int
) -> kv_layout.Pages:
  """Returns empty pages; inside `jax.eval_shape`, only their shapes."""
  return kv_layout.empty_pages(decide(model, numerics), num_pages=num_pages, page_size=PAGE_SIZE)
