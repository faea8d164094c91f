"""A decoder with nothing left open: shape, numerics, backend, mesh axis and layout of its pages.

    settings: TransformerConfig, NumericsConfig ("auto" and zeros are open)
      -- decide, once --> Decoder --> forward, head, engine, trainer, scoring, drafts

Only `decide` looks up what the machine can run; code that has a `Decoder` decides nothing again.
Decoders are hashable, and equal ones are equal keys of compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.backends import choice
from seerjax.backends.protocol import Backend
from seerjax.layer_kinds import Experts
from seerjax.models import parameters
from seerjax.models.config import TransformerConfig, slabs_for


class PageLayout(NamedTuple):
  """Layout of the keys and values of all layers.

  Attributes:
    axes: axes of one page of one head in each of a layer's arrays (`Traits.page_axes`).
    num_pooled: number of layers that share pools, one for each kind of pages, a page's layers side
      by side; 0 if each layer has arrays of its own, as few layers or those with keys of different
      shapes do.
    windows: kinds of pages, by the window of their layers: None for layers without one, which come
      first, then windows in descending order.
  """

  axes: tuple[str, ...]
  num_pooled: int
  windows: tuple[int | None, ...] = (None,)


@dataclasses.dataclass(frozen=True)
class Decoder:
  """All decisions for one model on one machine; made by `decide`.

  Attributes:
    shape: shape of the model.
    numerics: all settings that determine bits, none of them open. The fingerprint names them.
    backend: backend of the forward's stages.
    axis: mesh axis of the slabs, None on one device.
    is_plain: no row of the head is biased, filtered or restricted, so the work for such rows is
      left out. The bits of other rows do not depend on it.
  """

  shape: TransformerConfig
  numerics: numerics_lib.NumericsConfig
  backend: Backend
  axis: str | None = None
  is_plain: bool = False

  def __post_init__(self):
    numerics_lib.require_decided(self.numerics, why="a Decoder has nothing open")

  @property
  def pages(self) -> PageLayout:
    """Layout of keys and values."""
    count = self.shape.num_layers
    is_pooled = count > parameters.UNROLLED_LAYERS and self.shape.shares_kv_shape
    windows = {kind.attention.window for kind in self.shape.layers}
    ordered = sorted(windows, key=lambda window: -math.inf if window is None else -window)
    return PageLayout(self.backend.traits.page_axes, count if is_pooled else 0, tuple(ordered))

  def on(self, mesh: jax.sharding.Mesh) -> Decoder:
    """Returns the decoder with its slabs spread over the model axis of a mesh."""
    axis = parallel.MODEL_AXIS if mesh.shape[parallel.MODEL_AXIS] > 1 else None
    return dataclasses.replace(self, axis=axis)

  def for_rows(self, *, is_plain: bool) -> Decoder:
    """Returns the decoder with the given `is_plain`."""
    return dataclasses.replace(self, is_plain=is_plain)

  def describe(self) -> str:
    """Returns one line, as runs and servers print it."""
    numerics = self.numerics
    return f"{numerics.compute_dtype} by {numerics.backend!r}, {numerics.reduction_shards} slabs"

  def fingerprint(self, remat: str = "none") -> dict[str, str]:
    """Returns `numerics.fingerprint` of the decided settings."""
    return numerics_lib.fingerprint(self.numerics, remat)


@fields.checked
def decide(
  shape: TransformerConfig,
  asked: numerics_lib.NumericsConfig,
  *,
  axis: str | None = None,
  backend: Backend | None = None,
) -> Decoder:
  """Returns the decoder of a model on this machine.

  Args:
    shape: shape of the model.
    asked: requested numerics; open settings are decided here.
    axis: mesh axis of the slabs, None on one device; see also `Decoder.on`.
    backend: backend to use instead of the one that the numerics name.

  Raises:
    ValueError: for a backend that cannot run this model here, or a number of slabs that
      does not divide the model, naming the dimension and both numbers.
  """
  numerics = numerics_for(shape, asked)
  return Decoder(shape, numerics, backend or choice.backend_of(numerics), axis)


def numerics_for(
  shape: TransformerConfig, asked: numerics_lib.NumericsConfig
) -> numerics_lib.NumericsConfig:
  """Returns the numerics with open settings decided for this machine and the model.

  "auto" becomes the backend for this machine, 0 rows of a tile become the platform's
  default, and 0 slabs become the largest number that the model allows. Raises as `decide`.
  """
  if any(isinstance(layer.feed_forward, Experts) for layer in shape.layers):
    asked = numerics_lib.with_expert_tile(asked)
  slabs = slabs_for(shape, asked)
  if not asked.reduction_shards:
    asked = dataclasses.replace(asked, reduction_shards=slabs)
  return choice.decided(asked, shape)


def without_model(asked: numerics_lib.NumericsConfig) -> Backend:
  """Returns the backend for this machine, with its numerics, where there is no model yet.

  The number of slabs stays as asked.

  Raises:
    ValueError: for a backend that cannot run here.
  """
  return choice.backend_of(choice.decided(asked))
