"""Common parts of the kernels: the required device, shared-memory counts, race detection."""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels import gpu

INTERPRETER = hasattr(plgpu, "InterpretGPUParams")
needs_interpreter = pytest.mark.skipif(
  not INTERPRETER, reason="the GPU interpreter is public from JAX 0.11.1 on"
)


def copy_through(scratch: gpu.Scratch, *, wait: bool = True, interpret: bool = False):
  """Returns a kernel that copies f32[128] through shared memory, or reads it too early."""

  def body(x_ref, y_ref, buffer, loaded, **unused):
    plgpu.copy_gmem_to_smem(x_ref, buffer, loaded)
    if wait:
      plgpu.barrier_wait(loaded)
    y_ref[...] = buffer[...]
    if not wait:
      plgpu.barrier_wait(loaded)

  return gpu.kernel(
    body,
    name="copy_through",
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    scratch={"buffer": gpu.Buffer((128,), jnp.float32), "loaded": gpu.Barriers()} | dict(scratch),
    num_blocks=1,
    interpret=interpret,
  )


def test_a_cpu_is_refused():
  reason = gpu.device_reason(False)
  assert reason == (
    "got the platform 'cpu', expected an NVIDIA GPU of compute capability 9.0 (Hopper);"
    " run on an H100 or H200, or pass interpret=True to run the kernel slowly on a CPU"
  )


def test_another_gpu_is_refused():
  device = jax.sharding.AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    assert "got the abstract device 'NVIDIA B200', expected" in (gpu.device_reason(False) or "")


def test_an_h200_is_taken_from_any_machine():
  with gpu.h200():
    assert gpu.device_reason(False) is None
    assert gpu.num_multiprocessors(False) == 132


@pytest.mark.skipif(INTERPRETER, reason="JAX has the interpreter")
def test_interpreting_is_refused_where_jax_has_none():
  assert "expected JAX 0.11.1 or later" in (gpu.device_reason(True) or "")


@needs_interpreter
def test_interpreting_needs_no_gpu():
  assert gpu.device_reason(True) is None


def test_shared_memory_is_counted_as_it_is_allocated():
  # Mosaic accepts what the library accepts: a block that leaves one KiB free.
  x = jax.ShapeDtypeStruct((128,), jnp.float32)
  rows = (gpu.SHARED_MEMORY_LIMIT_BYTES - gpu.shared_memory_bytes({})) // 1024 - 4
  fits = {"large": gpu.Buffer((rows, 256), jnp.float32)}
  over = {"large": gpu.Buffer((rows + 3, 256), jnp.float32)}
  whole = {"buffer": gpu.Buffer((128,), jnp.float32), "loaded": gpu.Barriers()}
  assert gpu.shared_memory_reason(whole | fits, "rows") is None
  assert "mosaic_gpu" in gpu.lower_for_cuda(copy_through(fits), x)
  assert "expected at most 232448; make rows smaller" in (
    gpu.shared_memory_reason(whole | over, "rows") or ""
  )


def test_mosaic_refuses_too_much_shared_memory():
  x = jax.ShapeDtypeStruct((128,), jnp.float32)
  over = {"large": gpu.Buffer((227, 256), jnp.float32)}
  with pytest.raises(ValueError, match="exceeds available shared memory"):
    gpu.lower_for_cuda(copy_through(over), x)


@needs_interpreter
def test_a_copy_that_is_waited_for_is_no_race():
  x = jnp.arange(128.0)
  assert (copy_through({}, interpret=True)(x) == x).all()


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX 0.11 only prints a race")
def test_a_race_is_found_and_leaves_no_trace():
  x = jnp.arange(128.0)
  with pytest.raises(Exception, match="race"):
    jax.block_until_ready(copy_through({}, wait=False, interpret=True)(x))
  assert (copy_through({}, interpret=True)(x) == x).all()


def test_a_ring_is_as_deep_as_shared_memory_allows():
  ring = lambda stages: {"x": gpu.Buffer((stages, 1 << 15), jnp.float32)}  # 128 KiB a stage.
  small = lambda stages: {"x": gpu.Buffer((stages, 1 << 13), jnp.float32)}  # 32 KiB.
  assert gpu.deepest_ring(ring, 8) == 2  # Refused later, in a sentence.
  assert gpu.deepest_ring(small, 8) == 7
  assert gpu.deepest_ring(small, 5) == 5


def test_fields_that_cannot_work_are_refused():
  config = gpu.Barriers(num_arrivals=3, num_barriers=0)
  gpu.check_config(config, {"num_arrivals": (1, 3)}, {"num_barriers": 0})
  with pytest.raises(ValueError) as refused:
    gpu.check_config(config, {"num_arrivals": (1, 2)}, {})
  assert str(refused.value) == "got num_arrivals=3; expected one of (1, 2)."
  with pytest.raises(ValueError) as refused:
    gpu.check_config(config, {}, {"num_barriers": 1})
  assert str(refused.value) == "got num_barriers=0; expected at least 1."


def test_a_reason_is_raised_with_the_kernels_name():
  gpu.refuse("matmul", None)
  with pytest.raises(NotImplementedError) as refused:
    gpu.refuse("matmul", "got x, expected y; do z")
  assert str(refused.value) == "matmul: got x, expected y; do z."
