"""Names what of a model the kernels do not compute: attention rules, norms, caps, experts."""

from __future__ import annotations

from seerjax.backends.protocol import FullShape
from seerjax.layer_kinds import Experts


def beyond_dense(shape: FullShape | None) -> str:
  """Returns the first property that a plain dense model lacks, for messages; "" if there is none.

  The kernels compute plain dense models alone.
  """
  if shape is None:
    return ""
  for index, layer in enumerate(shape.layers):
    if isinstance(layer.feed_forward, Experts):
      return f"layer {index} has num_experts={layer.feed_forward.routing.num_experts!r}"
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
