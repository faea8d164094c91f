"""Small model configs of every family and every kind of RoPE scaling, as in checkpoints."""

from __future__ import annotations

import tiny_model

from seerjax.layer_kinds import Experts
from seerjax.ops import rotary
from seerjax.ops.routing import RoutingConfig

QWEN3 = tiny_model.CONFIG.changed(
  vocab_size=12,
  hidden_size=6,
  intermediate_size=8,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  rotary=rotary.RotaryConfig(head_dim=4, base=1000.0),
  is_tied=False,
  max_model_len=64,
)
QWEN2 = QWEN3.changed(has_qk_norms=False, has_qkv_biases=True, is_tied=True)
LLAMA = QWEN3.changed(
  has_qk_norms=False,
  norm_eps=1e-5,
  rotary=rotary.RotaryConfig(
    head_dim=4, base=1000.0, scaling="llama3", factor=8.0, original_context=16
  ),
)
MISTRAL = LLAMA.changed(rotary=QWEN3.layers[0].attention.rotary, family="mistral")
YARN = QWEN3.changed(
  rotary=rotary.RotaryConfig(
    head_dim=4, base=1e6, scaling="yarn", factor=4.0, original_context=16, attention_factor=1.25
  )
)
LINEAR = QWEN3.changed(rotary=rotary.RotaryConfig(head_dim=4, scaling="linear", factor=2.0))
QWEN3_MOE = QWEN3.changed(
  layers=(
    QWEN3.layers[0].changed(
      feed_forward=Experts(
        routing=RoutingConfig(num_experts=4, num_chosen=2, is_renormalised=True), expert_size=3
      )
    ),
    QWEN3.layers[1],
  )
)
CONFIGS = dict(
  qwen3_moe=QWEN3_MOE, qwen3=QWEN3, qwen2=QWEN2, llama=LLAMA, mistral=MISTRAL, yarn=YARN,
  linear=LINEAR,
)  # fmt: skip
