"""The record of settings that decide bits: errors, and the fingerprint's distinctions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

import jax
import pytest

from pallas_kernels import device
from seerjax import numerics
from seerjax.numerics import NumericsConfig

TILED = NumericsConfig(backend="tiled", row_tile=16, reduction_shards=8)
# Digests of a CPU's fields at BITS_VERSION 7, without the fields of the machine.
RECORDED = {"tiled": "8d8712edc16dcf8a", "native": "a7868b977dcf8d55"}


def test_a_fingerprint_holds_every_field_and_what_xla_compiles_for():
  found = numerics.fingerprint(TILED)
  fields = {field.name for field in dataclasses.fields(NumericsConfig)}
  about = {"bits_version", "jax_version", "jaxlib_version", "xla_flags", "device_kind", "digest"}
  about |= {"x64", "matmul_precision", "disable_jit"}
  assert set(found) == (fields - {"expert_tile"}) | about
  assert found["jax_version"] == jax.__version__
  # Every CPU is "cpu" to JAX; two with other instructions are not the same to XLA.
  assert found["device_kind"].startswith("cpu ")
  other = numerics.fingerprint(dataclasses.replace(TILED, row_tile=32))
  assert other["digest"] != found["digest"]


def test_a_fingerprint_names_the_bits_of_its_implementation_alone():
  kernels = numerics.fingerprint(
    dataclasses.replace(TILED, backend="pallas", compute_dtype="bfloat16")
  )
  assert kernels["pallas_bits_version"] == str(numerics.PALLAS_BITS_VERSION)
  assert "native_bits_version" not in kernels
  assert "pallas_bits_version" not in numerics.fingerprint(TILED)


def test_a_fingerprint_names_layers_that_are_computed_again():
  kept, again = (numerics.fingerprint(TILED, remat) for remat in ("none", "layer"))
  assert kept == numerics.fingerprint(TILED) and "remat" not in kept
  assert again["remat"] == "layer" and again["digest"] != kept["digest"]
  with pytest.raises(ValueError, match="remat was None and is 'layer'"):
    numerics.require_same(kept, again, what="a run")


def test_a_fingerprint_names_the_slabs_that_a_model_decided():
  assert NumericsConfig().reduction_shards == 0
  with pytest.raises(ValueError, match=r"reduction_shards: got 0, .* models.decoder.decide"):
    numerics.fingerprint(dataclasses.replace(TILED, reduction_shards=0))


def test_a_fingerprint_names_the_rows_of_a_tile_that_a_platform_decided():
  # A CPU's defaults are unchanged; a TPU's fill its matrix unit.
  assert [numerics.row_tile_of(name) for name in ("cpu", "cuda", "tpu")] == [16, 16, 128]
  open_rows = dataclasses.replace(TILED, row_tile=0)
  with pytest.raises(ValueError, match=r"row_tile: got 0, .* models.decoder.decide"):
    numerics.fingerprint(open_rows)
  decided = numerics.with_row_tile(open_rows)
  assert numerics.fingerprint(decided) == numerics.fingerprint(TILED)
  named = dataclasses.replace(TILED, row_tile=128)
  assert numerics.with_row_tile(named) is named
  with pytest.raises(ValueError, match="row_tile was '16' and is '128'"):
    numerics.require_same(numerics.fingerprint(decided), numerics.fingerprint(named), what="a run")


def test_a_fingerprint_names_the_rows_of_an_experts_tile_for_models_with_experts():
  decided = numerics.with_expert_tile(TILED)
  assert decided.expert_tile == 8 and numerics.with_expert_tile(decided) is decided
  dense, found = map(numerics.fingerprint, (TILED, decided))
  assert "expert_tile" not in dense and found["expert_tile"] == "8"
  with pytest.raises(ValueError, match="expert_tile was None and is '8'"):
    numerics.require_same(dense, found, what="a run")


def test_other_numerics_are_refused_with_both_values():
  first, second = (numerics.fingerprint(dataclasses.replace(TILED, kv_split=n)) for n in (64, 128))
  numerics.require_same(first, first, what="a run")
  with pytest.raises(ValueError, match=r"a run: got .*\(kv_split was '64' and is '128'\)"):
    numerics.require_same(first, second, what="a run")


def test_on_a_gpu_a_fingerprint_names_what_compiles_and_drives_it():
  facts = device.Facts(
    kind="NVIDIA H200",
    compute_capability="9.0",
    ptxas=(13, 0, 88),
    plugin="jax-cuda13-plugin 0.11.2, jax-cuda13-pjrt 0.11.2",
    driver="580.159.04",
  )
  assert numerics.of_gpu(facts) == {
    "gpu_plugin": "jax-cuda13-plugin 0.11.2, jax-cuda13-pjrt 0.11.2",
    "gpu_ptxas": "13.0.88",
    "gpu_driver": "580.159.04",
  }
  unsaid = device.Facts(kind="NVIDIA H200", compute_capability="9.0")
  assert set(numerics.of_gpu(unsaid).values()) == {"unknown"}


def test_on_a_cpu_a_fingerprint_has_the_digest_of_its_own_fields_alone():
  """Stored fingerprints of CPU runs stay equal: they contain no GPU field."""
  for backend in ("tiled", "native"):
    left_open = dataclasses.replace(TILED, row_tile=0, backend=backend)
    found = numerics.fingerprint(numerics.with_row_tile(left_open))
    fixed = found | dict(jax_version="0", jaxlib_version="0", device_kind="cpu", xla_flags="")
    if backend == "native":
      fixed["numba_version"] = "0"
    del fixed["digest"]
    text = json.dumps(fixed, sort_keys=True).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == RECORDED[backend]


@pytest.mark.parametrize(
  ("setting", "value"),
  [
    ("jax_random_seed_offset", 7),
    ("jax_high_dynamic_range_gumbel", True),
    ("jax_threefry_partitionable", False),
    ("jax_accurate_erf_inv", True),
    ("jax_softmax_custom_jvp", True),
    ("jax_allow_f16_reductions", False),
    ("jax_disable_most_optimizations", True),
    ("jax_optimization_level", "O1"),
    ("jax_compiler_enable_remat_pass", False),
  ],
)
def test_settings_of_jax_that_move_bits_stand_in_the_fingerprint(setting: str, value: Any):
  config = numerics.NumericsConfig(reduction_shards=1, backend="tiled", row_tile=8)
  if setting not in jax.config.values:
    pytest.skip(f"JAX {jax.__version__} has no setting {setting}")
  usual = numerics.fingerprint(config)
  assert not set(usual) & set(numerics.JAX_SETTINGS)
  before = jax.config.values[setting]
  jax.config.update(setting, value)
  try:
    found = numerics.fingerprint(config)
  finally:
    jax.config.update(setting, before)
  assert found[setting] == str(value) and found["digest"] != usual["digest"]
  with pytest.raises(ValueError, match=f"{setting} was None and is '{value}'"):
    numerics.require_same(usual, found, what="a run")


@pytest.mark.parametrize("variable", [*numerics.VARIABLES, "XLA_FLAGS"])
def test_variables_that_move_bits_stand_in_the_fingerprint(variable: str, tmp_path):
  config = numerics.NumericsConfig(reduction_shards=1, backend="tiled", row_tile=8)
  usual = numerics.fingerprint(config)
  before = os.environ.get(variable)
  (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true")
  try:
    os.environ[variable] = str(tmp_path / "flags")  # XLA reads its flags of such a file.
    found = numerics.fingerprint(config)
  finally:
    del os.environ[variable]
    os.environ |= {} if before is None else {variable: before}
  if variable == "XLA_FLAGS":
    assert found["xla_flags"] == "--xla_cpu_enable_fast_math=true"
  else:
    assert found[variable] == str(tmp_path / "flags")
  assert found["digest"] != usual["digest"]
