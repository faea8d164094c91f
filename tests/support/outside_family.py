"""A family outside the library: other names in config.json, and an MLP of its own in each layer."""

from __future__ import annotations

from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import huggingface_layout
from seerjax.models.config import TransformerConfig
from seerjax.models.families import Family
from seerjax.ops import rotary


def read(fields):
  c, count = fields.whole("width_of_head"), fields.whole("heads")
  attention = Grouped(
    num_heads=count, num_kv_heads=count, head_dim=c, rotary=rotary.RotaryConfig(head_dim=c)
  )
  return TransformerConfig(
    vocab_size=fields.whole("words"),
    hidden_size=fields.whole("width"),
    layers=tuple(
      LayerConfig(attention=attention, feed_forward=Gated(intermediate_size=size))
      for size in fields.get("inner_widths")
    ),
    max_model_len=128,
  )


def written(config):
  attention = config.layers[0].attention
  return dict(
    words=config.vocab_size,
    width=config.hidden_size,
    heads=attention.num_heads,
    width_of_head=attention.head_dim,
    inner_widths=[layer.feed_forward.intermediate_size for layer in config.layers],
  )


def tensors(config):
  return [
    (path, leaf._replace(tensors=tuple((f"tiny.{name}", shape) for name, shape in leaf.tensors)))
    for path, leaf in huggingface_layout.plan(config)
  ]


FAMILY = Family(
  model_type="tiny",
  architecture="TinyForCausalLM",
  read=read,
  written=written,
  describes=lambda config: config.is_tied,
  tensors=tensors,
)
NO_FAMILY = "Tiny"
