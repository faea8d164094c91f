"""Names what of a model only the tiled backend computes: attention rules, norms, caps, experts."""

from __future__ import annotations

from seerjax.backends.protocol import FullShape
from seerjax.layer_kinds import Experts


def only_tiled(shape: FullShape | None) -> str:
  """Returns the first such property of a model, for messages; "" if there is none."""
  if shape is None:
    return ""
  for name, value, usual in (
    ("norm_weights", shape.norm_weights, "w"),
    ("embedding_scale", shape.embedding_scale, None),
    ("logit_soft_cap", shape.logit_soft_cap, None),
  ):
    if value != usual:
      return f"the model has {name}={value!r}"
  for index, layer in enumerate(shape.layers):
    part = layer.feed_forward
    for name, value, usual in (
      ("num_experts", part.routing.num_experts if isinstance(part, Experts) else None, None),
      ("window", layer.attention.window, None),
      ("soft_cap", layer.attention.soft_cap, None),
      ("scale", layer.attention.scale, None),
      ("has_sinks", layer.attention.has_sinks, False),
      ("activation", part.activation, "silu"),
      ("norm_placement", layer.norm_placement, "pre"),
    ):
      if value != usual:
        return f"layer {index} has {name}={value!r}"
  return ""
