"""Every `raise` of the modules outside rooms, with its message."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest
import refusals

from experiments.compiled import hlo
from seerjax import checkpoint, metrics, parallel, xla_flags

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@refusals.table(
  # Metrics.
  (lambda: metrics.masked_mean(jnp.zeros(2), jnp.zeros(3, bool)),
   "masked_mean: got values of shape (2,) and a mask of"),
  (lambda: metrics.masked_max(jnp.zeros(2), jnp.zeros(2)),
   "masked_max: got a mask of dtype float32, expected bool"),
  # Object stores.
  (lambda: checkpoint.steps(pathlib.Path("gs://bucket/run")),
   "expected two slashes", "pass it as a string"),
  (lambda: checkpoint.steps("s3:/bucket/run"), "expected two slashes", "pass it as a string"),
  # Parallel.
  (lambda: parallel.SliceConfig(launcher="mpi"),
   "SliceConfig.launcher: got 'mpi', expected one of"),
  (lambda: parallel.SliceConfig(num_processes=0),
   "got process_id=0 of num_processes=0, expected 0 <="),
  (lambda: parallel.SliceConfig(num_processes=2, process_id=2),
   "got process_id=2 of num_processes=2, expected 0 <="),
  (lambda: parallel.SliceConfig(start_seconds=0),
   "SliceConfig.start_seconds: got 0, expected at least 1"),
  (lambda: parallel.SliceConfig(heartbeat_seconds=0),
   "SliceConfig.heartbeat_seconds: got 0, expected at least 1"),
  (lambda: parallel.SliceConfig(num_processes=2),
   "SliceConfig.coordinator: got '', expected 'host:port' of process 0"),
  (lambda: parallel.SliceConfig(num_processes=2, coordinator="here"),
   "SliceConfig.coordinator: got 'here', expected"),
  (lambda: parallel.SliceConfig(num_processes=2, coordinator="here:0"),
   "SliceConfig.coordinator: got 'here:0', expec"),
  # TPU programs.
  (lambda: hlo.parsed("HloModule jit_f"),
   "hlo.parsed: got text without an ENTRY computation, expec"),
  # XLA flags.
  (lambda: xla_flags.with_gpu_flags("--xla_gpu_autotune_level=4"),
   "XLA_FLAGS: got --xla_gpu_autotune_level=4, expected --xla_gpu_autotune_level=0 on a GPU"),
  (lambda: xla_flags.with_gpu_flags("--xla_gpu_deterministic_ops=false"),
   "got --xla_gpu_deterministic_ops=false, expected --xla_gpu_deterministic_ops=true on a GPU"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
