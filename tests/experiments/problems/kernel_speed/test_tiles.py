"""Tiled kernels compute the definition, on a CPU and in the interpreter."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from experiments.problems import kernel_speed
from experiments.problems.kernel_speed import rules, tiles
from pallas_kernels import gpu, matmul, rms_norm

needs_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="no CPU is the default")


@pytest.mark.parametrize("seed", range(4))
def test_walked_tiles_give_what_the_definition_gives(seed: int):
  random = np.random.default_rng(seed)
  environment = kernel_speed.TileSpeed(rows=67, columns=300, features=200)
  for _ in range(3):
    chosen = {
      field.name: field.choices[random.integers(len(field.choices))] for field in environment.fields
    }
    rows = int(random.integers(1, 300))
    x, w = environment._inputs(seed, rows)
    got = tiles.walked_matmul(matmul.Config(**chosen), x, w)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert got.shape == (rows, 300) and got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1e-2, atol=2e-2)
    # The twin: one contraction step less is seen.
    assert rules.differs(got[:, :-1], expected[:, 1:], rules.TOLERANCE)[0]
  environment = kernel_speed.TileSpeed("rms_norm", rows=67, features=1100)
  for field in environment.fields:
    for choice in field.choices:
      x, scale = environment._inputs(seed, 67)
      config = rms_norm.Config(**{**environment.start(0), field.name: choice})
      got = tiles.walked_norm(config, x, scale)
      expected = rms_norm.reference(x, scale).astype(x.dtype)
      assert rules.differs(got, expected, rules.TOLERANCE)[0] == ""


@needs_a_cpu
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_are_timed_on_a_cpu_by_their_walk(kernel: str):
  environment = kernel_speed.TileSpeed(kernel, rows=64, columns=128, features=1024)
  score = environment.verify(environment.start(0))
  assert score.is_valid and 0 < score.value < 100, score.reason


@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_that_are_none_are_refused(kernel: str):
  environment = kernel_speed.TileSpeed(kernel)
  assert "max_stages: got 9" in kernel_speed.TileSpeed().verify(
    {**kernel_speed.TileSpeed().start(0), "max_stages": 9}
  ).reason  # fmt: skip
  assert environment.check({}, rows=8, seed=0).startswith("artefact: got {}")


needs_interpreter = pytest.mark.skipif(
  gpu.device_reason(True) is not None, reason="JAX has no public GPU interpreter"
)


@pytest.mark.long
@needs_interpreter
def test_tiles_of_the_norm_are_right_in_the_interpreter():
  environment = kernel_speed.TileSpeed("rms_norm", rows=4, features=256)
  start = environment.start(0)
  assert environment.check(start, rows=4, seed=0) == ""
  wrong = kernel_speed.TileSpeed("rms_norm", rows=4, features=9000)
  assert "got 9000 features, expected a multiple of 8 from 8" in wrong.check(start, rows=4, seed=0)


@needs_interpreter
@pytest.mark.long
def test_tiles_of_the_matmul_are_right_in_the_interpreter():
  environment = kernel_speed.TileSpeed(rows=128, columns=256, features=128)
  for change in ({}, {"block_m": 64, "block_k": 128, "max_stages": 2}, {"swapped_rows": 64}):
    assert environment.check({**environment.start(0), **change}, rows=40, seed=1) == ""


@pytest.mark.skipif(gpu.device_reason(True) is None, reason="JAX has the interpreter")
def test_tiles_are_not_checked_without_the_interpreter():
  environment = kernel_speed.TileSpeed("rms_norm", rows=4, features=256)
  assert "expected JAX 0.11.1 or later" in environment.check(environment.start(0), rows=4, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_are_timed_on_a_gpu(kernel: str):
  environment = kernel_speed.TileSpeed(kernel)
  score = environment.verify(environment.start(0))
  assert score.is_valid and score.value > 0.2, score.reason
