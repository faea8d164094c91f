"""Families of models, one file each, and the one list of them.

A family outside this package is a `Family` of a module of your own, by "my_module:FAMILY".
"""

from __future__ import annotations

from seerjax.backends import layer_support
from seerjax.layer_kinds import Experts, Gated
from seerjax.models.config import TransformerConfig
from seerjax.models.families import gemma3, llama, mistral, qwen3, qwen3_moe, qwen25
from seerjax.models.families.base import Family as Family, Gguf as Gguf
from seerjax.tasks import loading

# Where several describe a shape, the first one is meant.
FAMILIES: tuple[Family, ...] = (
  qwen3.FAMILY,
  qwen25.FAMILY,
  llama.FAMILY,
  mistral.FAMILY,
  qwen3_moe.FAMILY,
  gemma3.FAMILY,
)


def names() -> tuple[str, ...]:
  """Returns the `model_type` of every family."""
  return tuple(family.model_type for family in FAMILIES)


def named(name: str) -> Family:
  """Returns the family of a `model_type`, or the one that "my_module:FAMILY" names.

  Raises:
    ValueError: if there is none.
  """
  for family in FAMILIES:
    if family.model_type == name:
      return family
  if ":" not in name:
    raise ValueError(
      f"family: got {name!r}, expected one of {names()}, or a Family of a module of your own, such"
      " as 'my_module:FAMILY'; check the name."
    )
  found = loading.imported(
    name, caller="family", example="my_module:FAMILY", expected="a Family of models.families"
  )
  if not isinstance(found, Family):
    raise ValueError(
      f"family: got {type(found).__name__} from {name!r}, expected a Family of models.families;"
      " name another attribute."
    )
  return found


def of(config: TransformerConfig) -> Family:
  """Returns the family as which a model is saved: its own, or the first that describes it.

  Raises:
    NotImplementedError: if layers differ in more than their experts, and no family has such ones.
    ValueError: if no family describes the shape.
  """
  own = (named(config.family),) if config.family else ()
  for family in (*own, *FAMILIES):
    if family.describes(config):
      return family
  kinds = dict.fromkeys(layer.feed_forward for layer in config.layers)
  has_experts = any(isinstance(kind, Experts) for kind in kinds)
  # Layers with and without experts may alternate, so the rest is compared.
  rest = config.changed(feed_forward=Gated(intermediate_size=1)) if has_experts else config
  if found := layer_support.beyond_dense(rest):
    raise ValueError(
      f"TransformerConfig: {found}, expected one of {names()}; transformers has no config.json for"
      " this model."
    )
  kind = rest.only_kind("config.json").attention
  parts = f" with {' and '.join(map(str, kinds))}" if has_experts else ""
  raise ValueError(
    f"TransformerConfig: got has_qk_norms={kind.has_qk_norms} and"
    f" has_qkv_biases={kind.has_qkv_biases}{parts}, expected the combination of one of {names()};"
    " transformers has no config.json for this model."
  )
