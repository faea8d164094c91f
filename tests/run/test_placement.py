"""Placement flags: the resulting choice, and errors before weights are read."""

from __future__ import annotations

import jax
import pytest

from seerjax.models import loading
from seerjax.numerics import NumericsConfig
from seerjax.run import placement


def placed(
  data_parallel_size=1, tensor_parallel_size=1, model="nano", **numerics
) -> placement.Placement:
  found = NumericsConfig(**numerics)
  return placement.placed(
    model, found, data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size
  )


def test_what_is_decided_is_said():
  found = placed(2, 2, compute_dtype="bfloat16", backend="tiled")
  assert found.mesh.shape == {"instance": 2, "model": 2}
  assert (found.numerics.compute_dtype, found.numerics.reduction_shards) == ("bfloat16", 8)
  kind = jax.devices()[0].device_kind
  assert found.describe() == (
    f"runs in bfloat16 by 'tiled', 8 slabs, 2 instance(s) of 2 {kind} device(s)"
  )
  assert placed().numerics.backend in ("native", "tiled")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(compute_dtype="float16"), "compute_dtype: got 'float16', expected one of .*float32' is"),
    (dict(backend="cuda"), "backend: got 'cuda', expected one of .*; 'tiled' runs"),
    (dict(backend="pallas"), "got backend='pallas' in float32, expected compute_dt"),
    (
      dict(backend="pallas", compute_dtype="bfloat16"),
      "backend: got 'pallas', but .* expected a machine, a model",
    ),
    (dict(tensor_parallel_size=3), "--tensor_parallel_size: got 3, expected one of .*; 1 is usual"),
    (dict(tensor_parallel_size=0), "--tensor_parallel_size: got 0, expected one of"),
    (
      dict(tensor_parallel_size=2, reduction_shards=1),
      "tensor_parallel_size: got 2, expected at most .*=1",
    ),
    (dict(data_parallel_size=0), "--data_parallel_size: got 0, expected at least 1; raise it"),
    (
      dict(data_parallel_size=8, tensor_parallel_size=4),
      "= 32 devices, expected at most 8, the available",
    ),
    (dict(reduction_shards=16), "reduction_shards: got 16, expected a divisor of num_heads=8"),
  ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_what_cannot_be_is_refused_before_weights_are_read(fields, message, tmp_path):
  # A directory with a shape and no weights.
  (tmp_path / "config.json").write_bytes((loading.NANO / "config.json").read_bytes())
  with pytest.raises(ValueError, match=message):
    placed(model=str(tmp_path), **fields)
