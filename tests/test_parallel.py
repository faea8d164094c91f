"""Errors of a slice of processes, before and after the processes find each other."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import parallel

CPU_INFO = pathlib.Path("/proc/cpuinfo")
MULTIPLIES_AND_ADDS = CPU_INFO.is_file() and " fma " in CPU_INFO.read_text()
ROOT = pathlib.Path(__file__).parents[1]


def test_devices_that_processes_cannot_share_evenly_are_refused():
  config = parallel.SliceConfig(num_processes=2, coordinator="127.0.0.1:9")
  with pytest.raises(ValueError, match="got 3 devices .* for 2 processes, expected the same"):
    parallel.start(config, num_devices=3)


def test_a_process_whose_first_is_not_there_says_so():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  config = parallel.SliceConfig(num_processes=2, process_id=1, coordinator=address, start_seconds=1)
  with pytest.raises(ValueError, match="process 1 of 2 found nothing within 1 s .*start all proc"):
    parallel.start(config, num_devices=8)


def test_a_first_process_whose_port_another_has_says_so():
  with socket.socket() as taken:
    taken.bind(("", 0))
    taken.listen()
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = parallel.SliceConfig(num_processes=2, coordinator=address)
    with pytest.raises(ValueError, match="where process 0 cannot listen .*choose another"):
      parallel.start(config, num_devices=8)


def start(fields: str, **environment: str) -> str:
  """Starts a process of a slice; returns the last line of its output."""
  code = (
    "from seerjax import parallel\n"
    "try:\n"
    f"  parallel.start(parallel.SliceConfig({fields}), num_devices=2)\n"
    "except ValueError as refusal:\n"
    "  print(refusal)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.strip().splitlines()[-1]


@pytest.mark.thorough
def test_another_number_of_processes_than_the_launcher_started_is_refused():
  output = start(
    "num_processes=2, launcher='slurm'",
    SLURM_JOB_ID="77", SLURM_STEP_NODELIST="127.0.0.1", SLURM_NTASKS="1", SLURM_PROCID="0",
    SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="1",
  )  # fmt: skip
  assert "got 1 processes from 'slurm', expected num_processes=2" in output


@pytest.mark.parametrize("piece_bytes", [1, 100, 2**20])
@pytest.mark.parametrize(
  ("before", "after"),
  [
    (jax.P("model", None, "instance"), jax.P("model")),
    (jax.P(None, ("model", "instance")), jax.P(None, "model")),
    (jax.P(None, None, ("model", "instance")), jax.P()),
    (jax.P(None, None, ("model", "instance")), jax.P("model")),
  ],
)
def test_what_is_shared_out_comes_together_in_pieces_of_any_size(before, after, piece_bytes):
  mesh = parallel.make_mesh(data_parallel_size=3, tensor_parallel_size=2)
  place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
  whole = np.random.default_rng(1).standard_normal((4, 12, 18)).astype(jnp.bfloat16)
  leaf = jax.device_put(whole, place(before))
  found = parallel.put(leaf, place(after), piece_bytes=piece_bytes)
  assert found.sharding == place(after)
  for shard in found.addressable_shards:
    assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
  assert parallel.put(found, place(after)) is found
  assert parallel.bytes_a_device(leaf) == whole.nbytes // 6
  assert parallel.on_host({"w": leaf})["w"].tobytes() == whole.tobytes()


def test_rounded_values_keep_every_bit(seed):
  words = np.random.default_rng(seed).integers(0, 2**32, 4096, dtype=np.uint32)
  special = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32).view(np.uint32)
  words = np.concatenate([words, special, np.arange(16, dtype=np.uint32)])
  tree = {"f32": words.view(np.float32), "i32": words.view(np.int32), "f16": words.view(np.float16)}
  found = jax.jit(parallel.rounded)(tree)
  for name, values in tree.items():
    assert np.asarray(found[name]).tobytes() == values.tobytes()


def test_rounded_values_have_a_gradient(seed):
  x, weights = np.random.default_rng(seed).standard_normal((2, 33)).astype(np.float32)
  found = jax.jit(jax.grad(lambda x: jnp.sum(parallel.rounded(x) * weights)))(x)
  assert np.asarray(found).tobytes() == weights.tobytes()


@pytest.mark.parametrize("shape", [(20,), (8, 20), (257, 3)])
def test_a_rounded_product_is_not_one_operation_with_its_sum(shape, seed):
  rng = np.random.default_rng(seed)
  x, y, z = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
  expected = (x * y + z).tobytes()  # NumPy rounds twice.
  found = jax.jit(lambda x, y, z: parallel.rounded(x * y) + z)(x, y, z)
  assert np.asarray(found).tobytes() == expected


@pytest.mark.skipif(not MULTIPLIES_AND_ADDS, reason="the processor has no multiply-add")
def test_twin_a_product_that_is_left_to_the_compiler_is_rounded_with_its_sum(seed):
  rng = np.random.default_rng(seed)
  x, y, z = (rng.standard_normal(4096).astype(np.float32) for _ in range(3))
  found = np.asarray(jax.jit(lambda x, y, z: x * y + z)(x, y, z))
  assert found.tobytes() != (x * y + z).tobytes()
