"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    PEFT, for each: A [rank, inputs], B [outputs, rank]         ours
    q_proj, k_proj, v_proj   <->   qkv       a f32[d, rank], b f32[r, rank, columns]
    gate_proj, up_proj       <->   gate_up
    o_proj                   <->   out       a f32[r, inputs / r, rank], b f32[rank, d]
    down_proj                <->   down

Each expert has modules of its own, mlp.experts.0.gate_proj and so on. `load` also reads the form in
which PEFT saves adapters of the stacked experts of transformers 5: all experts in one A and one B.

This library shares A among the products that read one input. `save` writes a copy of A for each of
them. `load` concatenates different A along the rank; each product has its own rows of B and zeros
for the others, which gives the same product.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
import math
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from seerjax import fields, numerics as numerics_lib
from seerjax.layer_kinds import Experts
from seerjax.models import config as model_config, config_fields, huggingface, lora, parameters

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"
# The PEFT modules of each of our targets, side by side in its columns.
MODULES = {
  "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
  "out": ("self_attn.o_proj",),
  "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
  "down": ("mlp.down_proj",),
}
# Those of one expert, after its number.
EXPERT_MODULES = {"expert_gate_up": ("gate_proj", "up_proj"), "expert_down": ("down_proj",)}
# The stacked parameter of all experts, and the module that has its A and B: PEFT wraps the first
# one in the other, and one alone is "mlp.experts".
STACKED = {"expert_gate_up": "gate_up_proj", "expert_down": "down_proj"}
INNER, OUTER = "mlp.experts.base_layer", "mlp.experts"
# Fields of PEFT 0.18, by their meaning here. A field of a later PEFT that is in no list is refused
# if it is set.
# Fields that `load` reads.
READ = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules")
# Fields that do not affect x A B, or only together with a field of `PLAIN` that is set.
WITHOUT_EFFECT = (
  "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "lora_dropout",
  "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
  # It describes the initialisation of A and B. Their trained values are in the file, and the base
  # weights did not change.
  "eva_config",
)  # fmt: skip
# Fields that change the computation, with the values (besides `NOTHING`) for which the adapter is
# x A B on the named base.
PLAIN: dict[str, tuple[Any, ...]] = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "use_rslora": (True,),
  # Other initialisations (pissa, olora, corda, loftq, lora_ga) change the base weights.
  "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
  "alora_invocation_tokens": (),
  "arrow_config": (),
  "corda_config": (),
  "ensure_weight_tying": (),
  "fan_in_fan_out": (),
  "layer_replication": (),
  "layers_to_transform": (),
  "loftq_config": (),
  "lora_bias": (),
  "lora_ga_config": (),
  "megatron_config": (),
  "modules_to_save": (),
  "target_parameters": (),
  "trainable_token_indices": (),
  "use_bdlora": (),
  "use_dora": (),
  "use_qalora": (),
}
NOTHING = (None, False, "", [], {})


@fields.checked
def save(
  directory: str | os.PathLike[str],
  adapter: lora.Adapter,
  config: model_config.TransformerConfig,
  *,
  scale: float,
  base: str = "",
  overwrite: bool = False,
) -> None:
  """Writes an adapter that PEFT and `load` read; equal adapters give equal bytes.

  Args:
    directory: created atomically.
    adapter: f32 masters, of any `reduction_shards`.
    config: shape of the base model.
    scale: scale of the low-rank term (`RunConfig.lora_alpha / RunConfig.lora_rank`).
    base: name or path of the base model, for PEFT's AutoPeftModel.
    overwrite: replace an existing adapter directory.

  Raises:
    FileExistsError: if the directory is not empty and may not be replaced.
    ValueError: if the adapter has other layers than the model, ranks that the format cannot
      express, or a scale that is not positive.
  """
  directory = pathlib.Path(os.path.abspath(directory))
  if not 0 < scale < math.inf:
    raise ValueError(
      f"peft.save: got scale={scale}, expected a positive number; it is lora_alpha / lora_rank."
    )
  layers = parameters.unstacked(adapter)["layers"]
  if len(layers) != config.num_layers:
    raise ValueError(
      f"peft.save: got an adapter of {len(layers)} layers, expected the model's"
      f" {config.num_layers}; it was made for another model."
    )
  huggingface.check_target(directory, overwrite, CONFIG_FILE)
  directory.parent.mkdir(parents=True, exist_ok=True)
  tensors: dict[str, np.ndarray] = {}
  ranks: dict[str, int] = {}
  for index, layer in enumerate(layers):
    for target, pair in layer.items():
      for module, a, b in _theirs(target, pair, config, index):
        name = f"{PREFIX}.{index}.{module}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
        short, rank = module.rpartition(".")[2], a.shape[-1]
        if ranks.setdefault(short, rank) != rank:
          raise ValueError(
            f"peft.save: got ranks {ranks[short]} and {rank} of modules named {short}, expected one"
            " rank, as adapter_config.json has one by name; make MLPs and experts alike."
          )
  usual = collections.Counter(ranks.values()).most_common(1)[0][0]
  others = {name: rank for name, rank in ranks.items() if rank != usual}
  settings = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": usual,
    "lora_alpha": scale * usual,
    "rank_pattern": others,
    "alpha_pattern": {name: scale * rank for name, rank in others.items()},
    "target_modules": sorted(ranks),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  with huggingface.whole_directory(directory) as partial:
    safetensors.numpy.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    huggingface.write_json(partial / CONFIG_FILE, settings)


@fields.checked
def load(
  directory: str | os.PathLike[str],
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> tuple[lora.Adapter, float]:
  """Reads an adapter in PEFT's format: (f32 masters, scale), for `lora.attach` and `lora.merge`.

  If the modules of a target have different A, the target's rank is the sum of their ranks.

  Args:
    directory: holds adapter_config.json and adapter_model.safetensors.
    config: shape of the base model.
    numerics: `reduction_shards` decides the layout.

  Raises:
    FileNotFoundError: if one of the two files is missing.
    ValueError: naming the field or tensor that is wrong or not supported.
  """
  directory = pathlib.Path(directory)
  shards = model_config.slabs_for(config, numerics)
  path = directory / WEIGHTS_FILE
  for file in (directory / CONFIG_FILE, path):
    if not file.is_file():
      raise FileNotFoundError(
        f"{file}: got no such file, expected a PEFT adapter; check the path, and save it as"
        " safetensors."
      )
  settings = config_fields.read_object(directory / CONFIG_FILE)
  stacked = _stacked_targets(directory / CONFIG_FILE, settings, config)
  has_read = ("target_parameters",) if stacked else ()
  _check_plain(directory / CONFIG_FILE, settings, (*READ, *has_read))
  tensors = _tensors(path)
  adapter: lora.Adapter = {"layers": [{} for _ in range(config.num_layers)]}
  scales: dict[str, float] = {}
  adapted: set[str] = set()
  for index, layer in enumerate(adapter["layers"]):
    for target in _targets(config, index):
      inputs, of_each = _inputs(target, config, index), []
      if (module := stacked.get(target)) and f"{PREFIX}.{index}.{module}.lora_A.weight" in tensors:
        outputs = sum(_modules(target, config, index)[0].values())
        pairs = _experts_pairs(path, tensors, f"{PREFIX}.{index}.{module}", config, index,
                               inputs, outputs)  # fmt: skip
        of_each = [{STACKED[target]: pair} for pair in pairs]
        rank = pairs[0][0].shape[0]
        scales[STACKED[target]] = _scale(
          directory / CONFIG_FILE, settings, f"mlp.experts.{STACKED[target]}", rank
        )
        widths = [outputs]
      else:
        for modules in _modules(target, config, index):
          parts = {
            module: _pair(path, tensors, f"{PREFIX}.{index}.{module}", inputs, width)
            for module, width in modules.items()
          }
          of_each.append(parts)
          widths = list(modules.values())
          for module, pair in parts.items():
            if pair is not None:
              adapted.add(f"model.layers.{index}.{module}")
              scales[module.rpartition(".")[2]] = _scale(
                directory / CONFIG_FILE, settings, module, pair[0].shape[0]
              )
      if any(part is not None for parts in of_each for part in parts.values()):
        parts = [list(parts.values()) for parts in of_each]
        copies = config.layers[index].attention.copies(shards) if target == "qkv" else 1
        layer[target] = _ours(target, parts, widths, inputs, shards, copies)
  if tensors:
    raise ValueError(
      f"{path}: got the tensor {min(tensors)}, expected lora_A and lora_B of"
      f" {_described(config)} in {config.num_layers} layers; it was made for another model, or"
      " adapts unsupported modules."
    )
  kinds = [set(layer) for layer in adapter["layers"]]
  found = set().union(*kinds)
  wanted = [found & set(_targets(config, index)) for index in range(config.num_layers)]
  if not found or kinds != wanted:
    index = next((i for i, kind in enumerate(kinds) if kind != wanted[i]), 0)
    raise ValueError(
      f"{path}: got adapters of {sorted(kinds[0])} in layer 0 and different ones elsewhere,"
      f" expected the same in every layer that has them, but layer {index} has"
      f" {sorted(kinds[index])}; adapt all layers the same way."
    )
  _check_targets(directory / CONFIG_FILE, settings, config, adapted)
  if len(set(scales.values())) != 1:
    raise ValueError(
      f"{directory / CONFIG_FILE}: alpha_pattern: got scales {scales}, expected a single scale for"
      " all modules; set lora_alpha in proportion to the rank."
    )
  return jax.tree.map(jnp.asarray, adapter), next(iter(scales.values()))


def _targets(config: model_config.TransformerConfig, index: int) -> tuple[str, ...]:
  """Returns the targets of a layer."""
  part = config.layers[index].feed_forward
  if not isinstance(part, Experts):
    return lora.TARGETS
  if part.shared_size:
    raise NotImplementedError(
      f"peft: got a layer of shared_size={part.shared_size}, expected experts without a shared MLP,"
      " as the families that have one are not supported; use another model."
    )
  return ("qkv", "out", *lora.EXPERT_TARGETS)


def _modules(
  target: str, config: model_config.TransformerConfig, index: int
) -> list[dict[str, int]]:
  """Returns the number of outputs of each PEFT module of a layer's target, for each expert."""
  attention, part = config.layers[index].attention, config.layers[index].feed_forward
  d = config.hidden_size
  if target in EXPERT_MODULES:
    assert isinstance(part, Experts)
    width = d if target == "expert_down" else part.expert_size
    return [
      {f"mlp.experts.{expert}.{name}": width for name in EXPERT_MODULES[target]}
      for expert in range(part.routing.num_experts)
    ]
  queries = attention.num_heads * attention.head_dim
  keys = attention.num_kv_heads * attention.head_dim
  inner = part.row_features
  widths = {"qkv": (queries, keys, keys), "out": (d,), "gate_up": (inner, inner), "down": (d,)}
  return [dict(zip(MODULES[target], widths[target], strict=True))]


def _inputs(target: str, config: model_config.TransformerConfig, index: int) -> int:
  if target in (*lora.COLUMN_TARGETS, "expert_gate_up"):
    return config.hidden_size
  kind = config.layers[index]
  if target == "out":
    return kind.attention.num_heads * kind.attention.head_dim
  part = kind.feed_forward
  return part.expert_size if isinstance(part, Experts) else part.intermediate_size


def _described(config: model_config.TransformerConfig) -> list[str]:
  """Returns the modules of all layers, for messages; of experts, those of the last one."""
  found: dict[str, None] = {}
  for index in range(config.num_layers):
    for target in _targets(config, index):
      last = _modules(target, config, index)[-1]
      found |= dict.fromkeys(last)
  return [name.replace("experts.", "experts.0 to ") for name in found]


def _theirs(
  target: str, pair: dict[str, Any], config: model_config.TransformerConfig, index: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """Yields (module, A [inputs, rank], B [rank, outputs]) of a target of a layer."""
  a, b = (np.asarray(pair[name], np.float32) for name in ("a", "b"))
  rank = a.shape[-1]
  if target in lora.EXPERT_TARGETS:
    each = list(zip(a.reshape(-1, *a.shape[2:]), b.reshape(-1, 1, *b.shape[2:]), strict=True))
  else:
    each = [(a, b) if target in lora.COLUMN_TARGETS else (a.reshape(-1, rank), b[None])]
  shared = config.layers[index].attention.copies(len(each[0][1])) if target == "qkv" else 1
  for modules, (wide, slabs) in zip(_modules(target, config, index), each, strict=True):
    first = 0
    for place, (module, width) in enumerate(modules.items()):
      copies = shared if place else 1  # Keys and values may be in several slabs.
      local = width * copies // slabs.shape[0]
      # [r, rank, columns] -> [rank, r columns]
      part = np.swapaxes(slabs[::copies, :, first : first + local], 0, 1).reshape(rank, width)
      first += local
      yield module, wide, part


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
      for name, kind in kinds.items():
        if kind not in huggingface.READABLE_DTYPES:
          raise ValueError(
            f"{path}: {name}: got dtype {kind}, expected one of {huggingface.READABLE_DTYPES}; save"
            " it unquantised."
          )
      found = {name: file.get_tensor(name).astype(np.float32) for name in kinds}
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: got an incomplete safetensors file ({error}), expected a complete one; it may be"
      " truncated, save it again."
    ) from error
  for name, tensor in found.items():
    if not np.isfinite(tensor).all():
      raise ValueError(
        f"{path}: {name}: got entries that are NaN or infinite, expected finite ones; the file is"
        " corrupt, or its training diverged."
      )
  return found


def _pair(
  path: pathlib.Path, tensors: dict[str, np.ndarray], name: str, inputs: int, outputs: int
) -> tuple[np.ndarray, np.ndarray] | None:
  """Pops one module's A [rank, inputs] and B [outputs, rank] from the tensors; None if absent."""
  a, b = (tensors.pop(f"{name}.lora_{half}.weight", None) for half in "AB")
  if a is None and b is None:
    return None
  if a is None or b is None:
    raise ValueError(f"{path}: {name}: got one of lora_A and lora_B, expected both; save it again.")
  rank = a.shape[0]
  if a.shape != (rank, inputs) or b.shape != (outputs, rank):
    raise ValueError(
      f"{path}: {name}: got lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected [rank,"
      f" {inputs}] and [{outputs}, rank]; it was made for another model."
    )
  return a, b


def _experts_pairs(
  path: pathlib.Path,
  tensors: dict[str, np.ndarray],
  name: str,
  config: model_config.TransformerConfig,
  index: int,
  inputs: int,
  outputs: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Pops the A and B of stacked experts; returns those of each expert, as `_pair` does."""
  part = config.layers[index].feed_forward
  assert isinstance(part, Experts)
  count = part.routing.num_experts
  a, b = (tensors.pop(f"{name}.lora_{half}.weight", None) for half in "AB")
  if a is None or b is None:
    raise ValueError(f"{path}: {name}: got one of lora_A and lora_B, expected both; save it again.")
  rank = a.shape[0] // count
  if a.shape != (count * rank, inputs) or b.shape != (outputs, count * rank) or not rank:
    raise ValueError(
      f"{path}: {name}: got lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected [{count} *"
      f" rank, {inputs}] and [{outputs}, {count} * rank]; it was made for another model."
    )
  of_each = np.moveaxis(b.reshape(outputs, rank, count), -1, 0)
  return list(zip(a.reshape(count, rank, inputs), of_each, strict=True))


def _ours(
  target: str,
  of_each: Sequence[Sequence[tuple[np.ndarray, np.ndarray] | None]],
  widths: list[int],
  inputs: int,
  shards: int,
  copies: int,
) -> dict[str, np.ndarray]:
  """Returns one target's {"a", "b"} in slabs, joined from its modules, of each expert if it has.

  The modules after the first are in `copies` slabs each.
  """
  own = [[part for part in parts if part is not None] for parts in of_each]
  is_shared = all(np.array_equal(part[0], known[0][0]) for known in own for part in known)
  ranks = [
    max((part[0].shape[0] for part in module if part is not None), default=0)
    for module in zip(*of_each, strict=True)
  ]
  joined = [_joined(parts, widths, ranks, is_shared, inputs) for parts in of_each]
  if target in lora.EXPERT_TARGETS:
    a = np.stack([whole.T for whole, _ in joined])
    b = np.stack([np.concatenate(columns, axis=-1) for _, columns in joined])
    return {name: x.reshape(shards, -1, *x.shape[1:]) for name, x in (("a", a), ("b", b))}
  ((whole, columns),) = joined
  a = whole.T
  if target not in lora.COLUMN_TARGETS:
    return {"a": a.reshape(shards, -1, a.shape[1]), "b": columns[0]}
  # [rank, r columns] -> [r, rank, columns]
  all_copies = [1] + [copies] * (len(columns) - 1)
  slabs = [
    np.repeat(np.swapaxes(part.reshape(len(part), shards // count, -1), 0, 1), count, axis=0)
    for part, count in zip(columns, all_copies, strict=True)
  ]
  return {"a": a, "b": np.concatenate(slabs, axis=-1)}


def _joined(
  parts: Sequence[tuple[np.ndarray, np.ndarray] | None],
  widths: list[int],
  ranks: list[int],
  is_shared: bool,
  inputs: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Returns A [rank, inputs] of all modules and B [rank, outputs] of each; what lacks is zero."""
  rank = max(ranks) if is_shared else sum(ranks)
  whole = np.zeros((rank, inputs), np.float32)
  columns, first = [], 0
  for part, width, own_rank in zip(parts, widths, ranks, strict=True):
    own = np.zeros((rank, width), np.float32)
    if part is not None:
      place = slice(0, own_rank) if is_shared else slice(first, first + own_rank)
      whole[place], own[place] = part[0], part[1].T
    first += own_rank
    columns.append(own)
  return whole, columns


def _stacked_targets(
  path: pathlib.Path, settings: dict[str, Any], config: model_config.TransformerConfig
) -> dict[str, str]:
  """Returns the PEFT module of each target that is adapted for stacked experts.

  Raises:
    ValueError: naming a parameter that is not one of the experts of the model.
  """
  if not any(isinstance(layer.feed_forward, Experts) for layer in config.layers):
    return {}
  names = settings.get("target_parameters") or []
  known = {
    prefix + name: target
    for target, name in STACKED.items()
    for prefix in ("", "experts.", "mlp.experts.")
  }
  found = {}
  for name in _names(path, "target_parameters", names):
    if name not in known:
      raise ValueError(
        f"{path}: target_parameters: got {name!r}, expected some of"
        f" {[f'mlp.experts.{one}' for one in STACKED.values()]}, in every layer; adapt only these."
      )
    found[known[name]] = OUTER
  if len(found) == len(STACKED):
    found["expert_gate_up"] = INNER
  return found


def _check_plain(path: pathlib.Path, settings: dict[str, Any], read: tuple[str, ...]) -> None:
  """Refuses settings with which an adapter is not exactly x A B, but for those that are read.

  Raises:
    ValueError: naming the field.
  """
  if "peft_type" not in settings:
    raise ValueError(
      f"{path}: peft_type: got nothing, expected 'LORA'; check that it is PEFT's file."
    )
  for field, value in settings.items():
    if field in read or field in WITHOUT_EFFECT:
      continue
    allowed = PLAIN.get(field, ())
    right = allowed if field == "peft_type" else (*allowed, *NOTHING)
    if any(type(value) is type(one) and value == one for one in right):  # 0 is not False.
      continue
    expected = " or ".join(map(repr, allowed or (None,)))
    raise ValueError(
      f"{path}: {field}: got {fields.shown(value)}, expected {expected}; only plain low-rank"
      " adapters are implemented."
    )


def _check_targets(
  path: pathlib.Path,
  settings: dict[str, Any],
  config: model_config.TransformerConfig,
  adapted: set[str],
) -> None:
  """Refuses target modules that differ from the adapted weights.

  Args:
    path: path of the settings.
    settings: "target_modules" and "exclude_modules" are read with PEFT's rules.
    config: shape of the base model.
    adapted: modules that have tensors, such as "model.layers.0.mlp.up_proj".

  Raises:
    ValueError: naming the field, and a name without a match.
  """
  targets, excluded = settings.get("target_modules"), settings.get("exclude_modules")
  if targets is None:
    return
  modules = [
    f"model.layers.{index}.{module}"
    for index in range(config.num_layers)
    for target in _targets(config, index)
    for names in _modules(target, config, index)
    for module in names
  ]
  chosen: set[str] = set()
  for name in [targets] if isinstance(targets, str) else _names(path, "target_modules", targets):
    found = {module for module in modules if _fits(path, module, name, isinstance(targets, str))}
    if not found:
      raise ValueError(
        f"{path}: target_modules: got {name!r}, which names no supported tensor, expected some of"
        f" {sorted({module.rpartition('.')[2] for module in modules})}; use the matching model, or"
        " remove the name."
      )
    chosen |= found
  is_text = isinstance(excluded, str)
  for name in [excluded] if is_text else _names(path, "exclude_modules", excluded or []):
    chosen = {module for module in chosen if not _fits(path, module, name, is_text)}
  if chosen != adapted:
    odd = min(chosen ^ adapted)
    has = "no tensors" if odd in chosen else "tensors"
    raise ValueError(
      f"{path}: target_modules: got {fields.shown(targets)} and {has} for {odd}, expected the"
      " targets that have weights; the two files do not belong together."
    )


def _names(path: pathlib.Path, field: str, names: Any) -> list[str]:
  if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
    raise ValueError(
      f"{path}: {field}: got {fields.shown(names)}, expected text or a list of it; save it again."
    )
  return names


def _fits(path: pathlib.Path, module: str, name: str, is_pattern: bool) -> bool:
  """Returns whether a module matches a name or a regular expression under PEFT's rules."""
  if not is_pattern:
    return module == name or module.endswith(f".{name}")
  try:
    return name == "all-linear" or bool(re.fullmatch(name, module))
  except re.error as error:
    raise ValueError(
      f"{path}: target_modules: got {name!r}, expected a regular expression ({error}); correct it."
    ) from error


def _scale(path: pathlib.Path, settings: dict[str, Any], module: str, rank: int) -> float:
  """Returns PEFT's scale of one module: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
  short = module.rpartition(".")[2]
  found: dict[str, Any] = {}
  for field, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
    by_module = settings.get(pattern) or {}
    if not isinstance(by_module, dict):
      raise ValueError(
        f"{path}: {pattern}: got {fields.shown(by_module)}, expected an object by module; save it"
        " again."
      )
    # PEFT names stacked parameters by a regular expression.
    by_module = {name.removeprefix(r".*\."): value for name, value in by_module.items()}
    names = [name.rpartition(".")[2] for names in MODULES.values() for name in names]
    names += [STACKED["expert_gate_up"]] * bool(settings.get("target_parameters"))
    if unknown := sorted(set(by_module) - set(names)):
      raise ValueError(
        f"{path}: {pattern}: got {unknown}, expected some of {names}; give every layer the same."
      )
    found[field] = by_module.get(short, settings.get(field))
  if found["r"] != rank:
    raise ValueError(
      f"{path}: r: got {found['r']} for {module}, expected the {rank} rows of its lora_A; the two"
      " files do not belong together."
    )
  alpha = found["lora_alpha"]
  if not fields.is_number(alpha) or not 0 < alpha < math.inf:
    raise ValueError(
      f"{path}: lora_alpha: got {alpha!r}, expected a positive number; save it again."
    )
  return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
