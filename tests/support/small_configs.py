"""Small model configs of every family and every kind of RoPE scaling, as in checkpoints."""

from __future__ import annotations

import dataclasses

import tiny_model

from seerjax.ops import rotary

QWEN3 = dataclasses.replace(
  tiny_model.CONFIG,
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
QWEN2 = dataclasses.replace(QWEN3, has_qk_norms=False, has_qkv_biases=True, is_tied=True)
LLAMA = dataclasses.replace(
  QWEN3,
  has_qk_norms=False,
  norm_eps=1e-5,
  rotary=rotary.RotaryConfig(
    head_dim=4, base=1000.0, scaling="llama3", factor=8.0, original_context=16
  ),
)
YARN = dataclasses.replace(
  QWEN3,
  rotary=rotary.RotaryConfig(
    head_dim=4, base=1e6, scaling="yarn", factor=4.0, original_context=16, attention_factor=1.25
  ),
)
LINEAR = dataclasses.replace(
  QWEN3, rotary=rotary.RotaryConfig(head_dim=4, scaling="linear", factor=2.0)
)
CONFIGS = dict(qwen3=QWEN3, qwen2=QWEN2, llama=LLAMA, yarn=YARN, linear=LINEAR)
