"""Names what of a model not every backend computes: attention rules, norms, caps, experts."""

from __future__ import annotations

from collections.abc import Callable

from seerjax.backends.protocol import FullShape
from seerjax.layer_kinds import Experts, LayerConfig

# (Field, value, the usual one) each.
_Fields = list[tuple[str, object, object]]


def only_tiled(shape: FullShape | None) -> str:
  """Returns the first property that only the tiled backend computes, for messages; "" if none."""
  return _of_model(shape) or _of_layers(shape, _of_rows)


def beyond_dense(shape: FullShape | None) -> str:
  """Returns the first property that a plain dense model lacks, for messages; "" if there is none.

  The kernels compute plain dense models alone.
  """
  for index, layer in enumerate(() if shape is None else shape.layers):
    if isinstance(layer.feed_forward, Experts):
      return f"layer {index} has num_experts={layer.feed_forward.routing.num_experts!r}"
  return _of_model(shape) or _of_layers(shape, lambda layer: _of_attention(layer) + _of_rows(layer))


def _of_attention(layer: LayerConfig) -> _Fields:
  """Returns what the attention between rows is."""
  kind = layer.attention
  return [
    ("window", kind.window, None),
    ("soft_cap", kind.soft_cap, None),
    ("scale", kind.scale, None),
    ("has_sinks", kind.has_sinks, False),
  ]


def _of_rows(layer: LayerConfig) -> _Fields:
  """Returns what each row computes."""
  return [
    ("activation", layer.feed_forward.activation, "silu"),
    ("norm_placement", layer.norm_placement, "pre"),
  ]


def _of_model(shape: FullShape | None) -> str:
  if shape is None:
    return ""
  for name, value, usual in (
    ("norm_weights", shape.norm_weights, "w"),
    ("embedding_scale", shape.embedding_scale, None),
    ("logit_soft_cap", shape.logit_soft_cap, None),
  ):
    if value != usual:
      return f"the model has {name}={value!r}"
  return ""


def _of_layers(shape: FullShape | None, fields: Callable[[LayerConfig], _Fields]) -> str:
  for index, layer in enumerate(() if shape is None else shape.layers):
    for name, value, usual in fields(layer):
      if value != usual:
        return f"layer {index} has {name}={value!r}"
  return ""
