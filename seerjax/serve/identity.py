"""Fingerprint of a served model: with equal ones, equal requests get bit-identical responses."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
import types
from typing import Any

import jax

from seerjax.array_typing import PRNGKeyArray
from seerjax.kv import values
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def fingerprint(
  model: Model,
  key: PRNGKeyArray,
  *,
  defaults: Mapping[str, Any] = NOTHING,
  weights: str = "",
) -> str:
  """Returns a digest of numerics, weights, tokenizer, template, sampling key and defaults.

  Args:
    model: the model as the engine runs it, adapters included.
    key: sampling key of the engine.
    defaults: sampling fields used where a request sets none.
    weights: digest of the weights; "" computes it from the model.
  """
  parts = {
    "numerics": model.decoder.fingerprint()["digest"],
    "model": repr(model.config),
    "weights": weights or values.weights_digest(model.params),
    "tokenizer": None if model.tokenizer is None else tokenizer_parts(model.tokenizer),
    "defaults": dict(defaults),
    "key": jax.random.key_data(key).tolist(),
  }
  text = json.dumps(parts, sort_keys=True)
  return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def tokenizer_parts(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns everything that determines how text is encoded and tokens are decoded."""
  backend = tokenizer.backend.to_str().encode()
  chat = tokenizer.chat_config
  return {
    "backend": hashlib.sha256(backend).hexdigest(),
    "template": tokenizer.chat_template,
    "special": dict(tokenizer.special_tokens),
    "ends": list(tokenizer.eos_ids),
    # The time shown to templates that read the clock; unset for the others.
    "chat": [chat.system, dict(chat.variables), *([chat.now] if chat.now else [])],
  }
