"""The sides of the price of experts compute one function, and chosen experts are counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.throughput import experts
from seerjax import numerics as numerics_lib
from seerjax.layer_kinds import Experts
from seerjax.models import presets
from seerjax.models.decoder import decide
from seerjax.ops.routing import RoutingConfig

KIND = Experts(
  routing=RoutingConfig(num_experts=8, num_chosen=3, is_renormalised=True), expert_size=10
)


def decoder_of(backend):
  return decide(
    experts.layer_of("nano-moe", KIND), numerics_lib.NumericsConfig(backend=backend, expert_tile=4)
  )


@pytest.mark.parametrize("num_rows", [1, 7])
def test_all_sides_compute_the_same_rows(num_rows):
  expected = np.asarray(experts.call_of(decoder_of("tiled"), num_rows)())[:num_rows]
  native = np.asarray(experts.call_of(decoder_of("native"), num_rows)())[:num_rows]
  np.testing.assert_allclose(native, expected, rtol=0, atol=1e-4)
  # This side leaves out the projection of attention, which has small weights.
  ragged = np.asarray(experts.ragged_call(decoder_of("native"), num_rows)())
  np.testing.assert_allclose(ragged, expected, rtol=0, atol=0.3)
  assert np.std(
    expected - np.asarray(experts.rows_of(decoder_of("native"), num_rows)[0])[:num_rows]
  )


def test_chosen_experts_are_counted():
  decoder = decoder_of("native")
  assert experts.num_touched(decoder, 1) == 3
  assert 3 < experts.num_touched(decoder, 64) <= 8


def test_layers_are_those_of_their_presets():
  for preset in experts.LAYERS:
    layer = experts.layer_of(preset, presets.get(preset).layers[0].feed_forward)
    assert layer.hidden_size == presets.get(preset).hidden_size and layer.num_layers == 1
    assert dataclasses.asdict(layer.layers[0].feed_forward) == dataclasses.asdict(
      presets.get(preset).layers[0].feed_forward
    )
