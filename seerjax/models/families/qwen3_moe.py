"""Qwen3-MoE: Qwen3's attention; all layers, or some, have experts in place of the MLP.

Experts are separate tensors, and on load also the stacked ones that transformers 5 holds in memory.

Sizes: the config.json of each of Qwen/Qwen3-*-A* on the Hub. Contexts beyond theirs use YaRN; the
config.json of such checkpoints has it.
"""

from __future__ import annotations

from typing import Any

from seerjax import fields as fields_lib, layer_kinds
from seerjax.layer_kinds import Experts, Gated, Grouped, LayerConfig
from seerjax.models.config import TransformerConfig
from seerjax.models.config_fields import Fields
from seerjax.models.families import base
from seerjax.ops import rotary
from seerjax.ops.routing import RoutingConfig

ATTENTION = {"has_qk_norms": True}
# More experts than all layers of any published model have; a model has tensors of each.
MAX_EXPERTS = 2**17


def read(fields: Fields) -> TransformerConfig:
  """Returns the shape that a config.json describes."""
  base.refuse_unsupported(fields, "attention_bias", "mlp_bias")
  if fields.flag("use_sliding_window"):  # Of every layer here, unlike in Qwen3.
    raise fields.refuse("use_sliding_window", "false", base.UNSUPPORTED)
  return base.read_equal_attention(fields, ATTENTION, _feed_forwards(fields))


def _feed_forwards(fields: Fields) -> list[Gated | Experts]:
  """Returns the part after attention of every layer."""
  num_layers, count_field = fields.layers("num_hidden_layers"), _count_field(fields)
  num_experts, num_chosen = fields.whole(count_field), fields.whole("num_experts_per_tok")
  if num_experts * num_layers > MAX_EXPERTS:
    raise fields.refuse(
      count_field, f"at most {MAX_EXPERTS} in all {num_layers} layers", "correct the file"
    )
  if num_chosen > num_experts:
    raise fields.refuse("num_experts_per_tok", f"at most {num_experts} experts", "correct the file")
  experts = Experts(
    routing=RoutingConfig(
      num_experts=num_experts,
      num_chosen=num_chosen,
      is_renormalised=fields.flag("norm_topk_prob"),
    ),
    expert_size=fields.whole("moe_intermediate_size"),
  )
  dense = fields.get("mlp_only_layers") or []
  if not isinstance(dense, list) or not all(map(fields_lib.is_whole, dense)):
    raise fields.refuse("mlp_only_layers", "a list of whole numbers", "correct the file")
  step, without = fields.whole("decoder_sparse_step", 1), set(dense)
  has_experts = [(index + 1) % step == 0 and index not in without for index in range(num_layers)]
  if all(has_experts):
    return [experts] * num_layers
  gated = Gated(intermediate_size=fields.whole("intermediate_size"))
  return [experts if has else gated for has in has_experts]


def _count_field(fields: Fields) -> str:
  """Returns the field with the number of experts, which transformers 5 may name differently."""
  names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None]
  if len(names) == 2 and fields.whole(names[0]) != fields.whole(names[1]):
    raise fields.refuse(
      names[0], f"the {fields.get(names[1])} of {names[1]}", "remove one of the two"
    )
  return names[0] if names else "num_experts"


def written(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of config.json that describe a shape."""
  parts = [layer.feed_forward for layer in config.layers]
  own = next(part for part in parts if isinstance(part, Experts))
  gated = {index: part for index, part in enumerate(parts) if isinstance(part, Gated)}
  inner = next((part.intermediate_size for part in gated.values()), own.row_features)
  return base.write_equal_attention(config) | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "intermediate_size": inner,
    "mlp_only_layers": [*gated],
    "moe_intermediate_size": own.expert_size,
    "norm_topk_prob": own.routing.is_renormalised,
    "num_experts": own.routing.num_experts,
    "num_experts_per_tok": own.routing.num_chosen,
    "sliding_window": None,
    "use_sliding_window": False,
  }


def describes(config: TransformerConfig) -> bool:
  """Returns whether some layers have experts, all alike, and others one kind of MLP."""
  parts = dict.fromkeys(layer.feed_forward for layer in config.layers)
  experts = [part for part in parts if isinstance(part, Experts)]
  gated = [part for part in parts if isinstance(part, Gated)]
  if len(experts) != 1 or len(gated) > 1:
    return False
  rule = experts[0].routing
  routing = RoutingConfig(
    num_experts=rule.num_experts, num_chosen=rule.num_chosen, is_renormalised=rule.is_renormalised
  )
  rest = gated[0] if gated else Gated(intermediate_size=1)
  is_plain = experts[0] == Experts(routing=routing, expert_size=experts[0].expert_size)
  return is_plain and base.has_equal_layers(config.changed(feed_forward=rest), ATTENTION)


def _size(hidden: int, expert: int, layers: int, heads: int) -> TransformerConfig:
  attention = Grouped(
    num_heads=heads,
    num_kv_heads=4,
    head_dim=128,
    rotary=rotary.RotaryConfig(head_dim=128, base=1_000_000.0),
    **ATTENTION,
  )
  routing = RoutingConfig(num_experts=128, num_chosen=8, is_renormalised=True)
  experts = Experts(routing=routing, expert_size=expert)
  return TransformerConfig(
    vocab_size=151_936,
    hidden_size=hidden,
    layers=layer_kinds.uniform(LayerConfig(attention=attention, feed_forward=experts), layers),
    norm_eps=1e-6,
    is_tied=False,
    max_model_len=40_960,
    family="qwen3_moe",
  )


FAMILY = base.Family(
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  read=read,
  written=written,
  describes=describes,
  attention=ATTENTION,
  sizes={
    "qwen3-30b-a3b": _size(2048, 768, 48, 32),
    "qwen3-235b-a22b": _size(4096, 1536, 94, 64),
  },
)
