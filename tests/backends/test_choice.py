"""The resolution of "auto", and errors for implementations that cannot run here."""

from __future__ import annotations

import logging
import re

import jax
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.backends import choice
from seerjax.backends.native import availability
from seerjax.models import decoder
from seerjax.numerics import NumericsConfig


@pytest.fixture
def no_compiler():
  """A process in which JAX compiles nothing, one of the reasons against native handlers."""
  choice._say_once.cache_clear()
  with jax.disable_jit():
    yield


def test_the_machine_decides_what_is_left_to_it():
  decided = choice.decided(NumericsConfig(row_tile=4))
  assert availability.reason_against() is None
  assert decided == NumericsConfig(row_tile=4, backend="native")
  assert choice.decided(decided) is decided


def test_where_handlers_cannot_run_it_is_tiled_and_one_line_says_why(no_compiler, caplog):
  with caplog.at_level(logging.WARNING):
    first, second = (choice.decided(NumericsConfig(row_tile=tile)) for tile in (4, 8))
  assert first == NumericsConfig(row_tile=4, backend="tiled")
  assert second.backend == "tiled"
  lines = [record.getMessage() for record in caplog.records if "backend" in record.msg]
  assert lines == ["NumericsConfig.backend='auto' is 'tiled' here: JAX_DISABLE_JIT is set."]


def test_native_by_name_is_refused_where_it_cannot_run(no_compiler):
  with pytest.raises(ValueError, match="got 'native', but JAX_DISABLE_JIT is set; expected a mach"):
    choice.decided(NumericsConfig(backend="native"))


def shape_with(**changes):
  return tiny_model.CONFIG.changed(**changes)


PROPERTIES = (
  (dict(window=7), "layer 0 has window=7"),
  (dict(soft_cap=2.0), "layer 0 has soft_cap=2.0"),
  (dict(scale=0.5), "layer 0 has scale=0.5"),
  (dict(has_sinks=True), "layer 0 has has_sinks=True"),
  (dict(activation="gelu_tanh"), "layer 0 has activation='gelu_tanh'"),
  (dict(norm_placement="pre_and_post"), "layer 0 has norm_placement='pre_and_post'"),
  (dict(norm_weights="1 + w"), "the model has norm_weights='1 + w'"),
  (dict(embedding_scale=2.0), "the model has embedding_scale=2.0"),
  (dict(logit_soft_cap=2.0), "the model has logit_soft_cap=2.0"),
)


@pytest.mark.parametrize(("changes", "found"), PROPERTIES)
def test_native_handlers_run_what_the_kernels_refuse_by_name(changes, found):
  shape = shape_with(**changes)
  assert choice.decided(NumericsConfig(), shape).backend == "native"
  numerics = NumericsConfig(
    backend="pallas_interpreted", compute_dtype="bfloat16", reduction_shards=8
  )
  why = f"but {re.escape(found)}, which the kernels do not compute"
  with pytest.raises(ValueError, match=f"got 'pallas_interpreted', {why}"):
    choice.decided(numerics, shape)


def test_a_backend_has_the_numerics_that_were_decided():
  decided = NumericsConfig(backend="native", row_tile=16)
  assert decoder.without_model(NumericsConfig()).numerics == decided


def test_what_is_left_to_the_machine_has_no_fingerprint():
  with pytest.raises(ValueError, match=r"backend: got 'auto', .* models.decoder.dec"):
    numerics_lib.fingerprint(NumericsConfig())
