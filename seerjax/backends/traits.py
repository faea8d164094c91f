"""Properties in which backends differ, as one flat record that other rooms read.

A backend states its record once, as its class attribute `traits`. Code outside `backends` reads a
trait and never checks a class or the name of a backend.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
  """Properties of a backend; the defaults are those of the tiled one.

  Attributes:
    smallest_width: minimum number of features of a head.
    holds_logits: whether `head` holds a row's logits in memory, so that they are available.
    holds_all_logits: whether those of all rows of a step exist at once.
    waits_for_predicates: whether the host waits if a loop or a branch depends on a number computed
      on the device. A step then avoids these: its page copies are programs of their own, run only
      if there are any, and the host, which knows the sampling parameters, sets
      `HeadStage.is_plain`.
    decode_steps_per_call: default for the maximum decode steps of an engine's visit. 8 gave 9 %
      more tokens per CPU second of nano, for one more program to compile per bucket.
    page_axes: axes of one page of one head in each of a layer's arrays f[k, m, ...]: z position, c
      feature. With ("zc", "zc"), keys and values are f[k, m, z, c]; with ("cz", "zc"), keys are
      f[k, m, c, z]. Code outside a backend that reads or allocates pages uses this
      (`models.kv_layout`).
    shares_pages_under_gradient: whether the gradient of `attend` reaches pages of another sequence
      of the batch.
    keeps_pages: whether a gradient keeps the pages of every layer, rather than of one at a time.
    keeps_gate_up: whether a gradient that recomputes nothing keeps gate and up of every layer, in
      float32.
    trains_on_slabs: whether the gradient's slabs may be on several devices.
    pads_adapters: whether adapters of different ranks are stacked in one array, padded with zeros.
      Then `RowAdapters` has one form. Otherwise each rank has its own products, since padding may
      change the program that XLA compiles for a product.
    shares_out_rows: whether `RowAdapters.shares` is used.
    reads_layers: whether a layer's weights are read in place from the weights of all layers.
      Otherwise a layer's single slab is sliced out before it is multiplied, which copies the
      weights.
  """

  smallest_width: int = 8
  holds_logits: bool = True
  holds_all_logits: bool = False
  waits_for_predicates: bool = False
  decode_steps_per_call: int = 1
  page_axes: tuple[str, ...] = ("zc", "zc")
  shares_pages_under_gradient: bool = True
  keeps_pages: bool = True
  keeps_gate_up: bool = False
  trains_on_slabs: bool = True
  pads_adapters: bool = False
  shares_out_rows: bool = True
  reads_layers: bool = False
