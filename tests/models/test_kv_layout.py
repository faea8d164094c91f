"""Pages follow the axes that their backend names; no other code knows the layout."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_model

from seerjax.backends.tiled import Tiled
from seerjax.models import kv_layout, parameters
from seerjax.models.decoder import decide

NUMERICS = tiny_model.NUMERICS


@dataclasses.dataclass(frozen=True)
class KeysTurned(Tiled):
  """Keys f[k, m, c, z], values f[k, m, z, c]."""

  traits = dataclasses.replace(Tiled.traits, page_axes=("cz", "zc"))


@pytest.mark.parametrize("num_layers", [2, parameters.UNROLLED_LAYERS + 1])
@pytest.mark.parametrize("backend", [Tiled(NUMERICS), KeysTurned(NUMERICS)])
def test_pages_of_layers_and_pools_have_the_axes_that_the_backend_names(num_layers, backend):
  config = tiny_model.CONFIG.changed(num_layers=num_layers)
  decoder = decide(config, NUMERICS, backend=backend)
  pages = kv_layout.empty_pages(decoder, num_pages=5, page_size=4)
  is_pool = num_layers > parameters.UNROLLED_LAYERS
  layers = (num_layers,) if is_pool else ()
  of_a_page = {
    "zc": (4, config.layers[0].attention.head_dim),
    "cz": (config.layers[0].attention.head_dim, 4),
  }
  wanted = [
    (config.layers[0].attention.num_kv_heads, 5, *layers, *of_a_page[axes])
    for axes in backend.traits.page_axes
  ]
  assert len(pages) == (1 if is_pool else num_layers)
  assert all([leaf.shape for leaf in layer] == wanted for layer in pages)
  assert kv_layout.is_pool(pages, decoder) == is_pool
  assert kv_layout.page_size_of(pages, decoder) == 4


def test_scratch_pages_have_the_axes_that_the_backend_names_and_a_shards_heads():
  config, scratch = tiny_model.CONFIG, kv_layout.ScratchPages(5, 4)
  heads, features = config.layers[0].attention.num_kv_heads, config.layers[0].attention.head_dim
  tiled, turned = (
    decide(config, NUMERICS, backend=backend) for backend in (Tiled(NUMERICS), KeysTurned(NUMERICS))
  )
  assert kv_layout.scratch_of_layer(tiled, scratch, 1, 0) == ((heads, 5, 4, features),) * 2
  assert kv_layout.scratch_of_layer(turned, scratch, 2, 0) == (
    (heads // 2, 5, features, 4),
    (heads // 2, 5, 4, features),
  )
  assert kv_layout.page_size_of(scratch, turned) == 4
  assert not kv_layout.is_pool(scratch, turned)
