"""The record of what decides bits: what it refuses, and what its fingerprint tells apart."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from seerjax import numerics
from seerjax.numerics import NumericsConfig

TILED = NumericsConfig(implementation="tiled")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(implementation="fast"), "implementation: got 'fast', expected one of .*'tiled' runs"),
    (dict(compute_dtype="float16"), "compute_dtype: got 'float16', expected one of .*'float32'"),
    (dict(row_tile=12), "row_tile: got 12, expected a power of two; the defaults are"),
    (dict(kv_split=0), "kv_split: got 0, expected a power of two"),
  ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_impossible_numerics_are_refused(change, message):
  with pytest.raises(ValueError, match=f"NumericsConfig.{message}"):
    NumericsConfig(**change)


def test_a_fingerprint_holds_every_field_and_what_xla_compiles_for():
  found = numerics.fingerprint(TILED)
  fields = {field.name for field in dataclasses.fields(NumericsConfig)}
  about = {"bits_version", "jax_version", "jaxlib_version", "xla_flags", "device_kind", "digest"}
  about |= {"x64", "matmul_precision", "disable_jit"}
  assert set(found) == fields | about
  assert found["jax_version"] == jax.__version__
  # Every CPU is "cpu" to JAX; two with other instructions are not the same to XLA.
  assert found["device_kind"].startswith("cpu ")
  other = numerics.fingerprint(NumericsConfig(row_tile=32, implementation="tiled"))
  assert other["digest"] != found["digest"]


def test_a_fingerprint_names_layers_that_are_computed_again():
  kept, again = (numerics.fingerprint(TILED, remat) for remat in ("none", "layer"))
  assert kept == numerics.fingerprint(TILED) and "remat" not in kept
  assert again["remat"] == "layer" and again["digest"] != kept["digest"]
  with pytest.raises(ValueError, match="remat was None and is 'layer'"):
    numerics.require_same(kept, again, what="a run")


def test_a_fingerprint_names_the_slabs_that_a_model_decided():
  assert NumericsConfig(reduction_shards=0).reduction_shards == 0
  with pytest.raises(ValueError, match=r"reduction_shards: got 0, .* models.config.numerics_for"):
    numerics.fingerprint(NumericsConfig(reduction_shards=0, implementation="tiled"))


def test_other_numerics_are_refused_with_both_values():
  first, second = (numerics.fingerprint(dataclasses.replace(TILED, kv_split=n)) for n in (64, 128))
  numerics.require_same(first, first, what="a run")
  with pytest.raises(ValueError, match=r"a run: got .*\(kv_split was '64' and is '128'\)"):
    numerics.require_same(first, second, what="a run")
