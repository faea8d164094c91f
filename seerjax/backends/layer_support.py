"""Names what of a model only some backends compute: attention rules, norms, caps, experts."""

from __future__ import annotations

from seerjax.backends.protocol import FullShape
from seerjax.layer_kinds import Experts


def only_tiled(shape: FullShape | None) -> str:
  """Returns the first property that only the tiled backend computes, for messages; "" if none."""
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
    for name, value, usual in (
      ("window", layer.attention.window, None),
      ("soft_cap", layer.attention.soft_cap, None),
      ("scale", layer.attention.scale, None),
      ("has_sinks", layer.attention.has_sinks, False),
      ("activation", layer.feed_forward.activation, "silu"),
      ("norm_placement", layer.norm_placement, "pre"),
    ):
      if value != usual:
        return f"layer {index} has {name}={value!r}"
  return ""


def beyond_dense(shape: FullShape | None) -> str:
  """Returns the first layer with experts, or `only_tiled`, for messages; "" if there is neither."""
  for index, layer in enumerate(() if shape is None else shape.layers):
    if isinstance(layer.feed_forward, Experts):
      return f"layer {index} has num_experts={layer.feed_forward.routing.num_experts!r}"
  return only_tiled(shape)
