"""Adapters are exchanged with PEFT; foreign files are checked by name."""

from __future__ import annotations

import dataclasses
import json

from equal_trees import assert_equal_bits
import jax
import numpy as np
import pytest
import safetensors.numpy
from small_configs import CONFIGS, QWEN3, QWEN3_MOE

from seerjax import numerics as numerics_lib
from seerjax.models import huggingface, lora, parameters, peft

NUMERICS = numerics_lib.NumericsConfig(reduction_shards=2)


def random_adapter(config, shards=2, rank=3, targets=None):
  rng = np.random.default_rng(0)
  numerics = dataclasses.replace(NUMERICS, reduction_shards=shards)
  shapes = lora.shapes(config, numerics, rank, targets)
  return jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32), shapes)


@pytest.fixture
def saved(tmp_path):
  peft.save(tmp_path / "adapter", random_adapter(QWEN3), QWEN3, scale=0.5)
  return tmp_path / "adapter"


def edit(directory, change):
  path = directory / "adapter_model.safetensors"
  tensors = dict(safetensors.numpy.load_file(path))
  safetensors.numpy.save_file(change(tensors) or tensors, path)


def configure(directory, **changes):
  path = directory / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_comes_back_as_it_was_in_any_number_of_slabs(name, tmp_path):
  config = CONFIGS[name]
  peft.save(tmp_path / "2", random_adapter(config), config, scale=0.5)
  found, scale = peft.load(tmp_path / "2", config, NUMERICS)
  assert scale == 0.5
  assert_equal_bits(found, random_adapter(config))
  one, _ = peft.load(tmp_path / "2", config, dataclasses.replace(NUMERICS, reduction_shards=1))
  peft.save(tmp_path / "1", one, config, scale=scale)
  for file in ("adapter_config.json", "adapter_model.safetensors"):
    assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_stacked_adapters_are_saved_as_their_masters_are(saved, tmp_path):
  stacked = parameters.stacked(random_adapter(QWEN3))
  peft.save(tmp_path / "other", stacked, QWEN3, scale=0.5)
  file = "adapter_model.safetensors"
  assert (tmp_path / "other" / file).read_bytes() == (saved / file).read_bytes()


def test_a_product_of_theirs_is_a_product_of_ours(saved):
  tensors = safetensors.numpy.load_file(saved / "adapter_model.safetensors")
  pair, inner = (
    random_adapter(QWEN3)["layers"][1]["gate_up"],
    QWEN3.layers[0].feed_forward.intermediate_size,
  )
  x = np.random.default_rng(1).standard_normal((4, QWEN3.hidden_size)).astype(np.float32)
  name = "base_model.model.model.layers.1.mlp.up_proj.lora_"
  theirs = x @ tensors[name + "A.weight"].T @ tensors[name + "B.weight"].T
  by_slab = [x @ pair["a"] @ slab[:, inner // 2 :] for slab in pair["b"]]  # Gate, then up.
  np.testing.assert_allclose(theirs, np.concatenate(by_slab, axis=1), rtol=1e-4, atol=1e-4)


@pytest.fixture
def experts(tmp_path):
  peft.save(tmp_path / "experts", random_adapter(QWEN3_MOE), QWEN3_MOE, scale=0.5)
  return tmp_path / "experts"


def test_a_product_of_their_expert_is_a_product_of_ours(experts):
  tensors = safetensors.numpy.load_file(experts / "adapter_model.safetensors")
  layer, part = random_adapter(QWEN3_MOE)["layers"][0], QWEN3_MOE.layers[0].feed_forward
  x = np.random.default_rng(1).standard_normal((4, QWEN3_MOE.hidden_size)).astype(np.float32)
  name = "base_model.model.model.layers.0.mlp.experts.3"
  for target, module, rows, columns in (
    ("expert_gate_up", "up_proj", x, slice(part.expert_size, None)),
    ("expert_down", "down_proj", x[:, : part.expert_size], slice(None)),
  ):
    a, b = (tensors[f"{name}.{module}.lora_{half}.weight"] for half in "AB")
    own = {half: layer[target][half][1, 1] for half in "ab"}  # Two experts in each of two slabs.
    expected = rows @ own["a"] @ own["b"][:, columns]
    np.testing.assert_allclose(rows @ a.T @ b.T, expected, rtol=1e-4, atol=1e-4)


def test_adapters_of_stacked_experts_are_read_as_those_of_each(experts):
  """As PEFT saves them over transformers 5: gate and up have one A, and B has the experts last."""
  prefix, count, rank = "base_model.model.model.layers.0.mlp.experts", 4, 3

  def change(tensors):
    for module, names in (("base_layer.", ("gate_proj", "up_proj")), ("", ("down_proj",))):
      halves = {half: [] for half in "AB"}
      for expert in range(count):
        own = {half: [tensors.pop(f"{prefix}.{expert}.{name}.lora_{half}.weight")
                      for name in names] for half in "AB"}  # fmt: skip
        halves["A"].append(own["A"][0])
        halves["B"].append(np.concatenate(own["B"]))
      a, b = (np.stack(halves[half]) for half in "AB")  # [E, rank, inputs], [E, outputs, rank]
      tensors[f"{prefix}.{module}lora_A.weight"] = a.reshape(count * rank, -1)
      flat = np.ascontiguousarray(np.moveaxis(b, 0, -1).reshape(-1, rank * count))
      tensors[f"{prefix}.{module}lora_B.weight"] = flat

  edit(experts, change)
  stacked = ["mlp.experts.gate_up_proj", "down_proj"]
  rest = r".*self_attn\.\w+|.*layers\.1\.mlp\.\w+"
  configure(experts, target_modules=rest)
  configure(experts, target_parameters=stacked, rank_pattern={r".*\.gate_up_proj": 3})
  found, scale = peft.load(experts, QWEN3_MOE, NUMERICS)
  assert scale == 0.5
  assert_equal_bits(found, random_adapter(QWEN3_MOE))
  configure(experts, target_parameters=["mlp.w"])
  with pytest.raises(
    ValueError, match="target_parameters: got 'mlp.w', expected some of .*_up_pro"
  ):
    peft.load(experts, QWEN3_MOE, NUMERICS)
  configure(experts, target_parameters=stacked, rank_pattern={r".*\.gate_up_proj": 2})
  with pytest.raises(
    ValueError, match="r: got 2 for mlp.experts.gate_up_proj, expected the 3 rows"
  ):
    peft.load(experts, QWEN3_MOE, NUMERICS)
  configure(experts, rank_pattern={})
  name = f"{prefix}.base_layer.lora_A.weight"
  edit(experts, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
  with pytest.raises(
    ValueError, match=r"base_layer: got lora_A \[11, 6\] and .*expected \[4 \* ra"
  ):
    peft.load(experts, QWEN3_MOE, NUMERICS)


def test_unlike_a_stand_side_by_side_and_what_is_missing_is_zero(saved):
  """As trained by PEFT: each module has its own A, and k_proj has none."""
  prefix = "base_model.model.model.layers"
  rng = np.random.default_rng(2)

  def change(tensors):
    for index in range(QWEN3.num_layers):
      for half in "AB":
        del tensors[f"{prefix}.{index}.self_attn.k_proj.lora_{half}.weight"]
      name = f"{prefix}.{index}.self_attn.v_proj.lora_A.weight"
      tensors[name] = rng.standard_normal(tensors[name].shape).astype(np.float32)

  edit(saved, change)
  with pytest.raises(ValueError, match="target_modules: got .* and no tensors for"):
    peft.load(saved, QWEN3, NUMERICS)
  configure(saved, exclude_modules=["k_proj"])
  tensors = safetensors.numpy.load_file(saved / "adapter_model.safetensors")
  found, _ = peft.load(saved, QWEN3, NUMERICS)
  pair = jax.tree.map(np.asarray, found["layers"][0]["qkv"])
  assert pair["a"].shape == (QWEN3.hidden_size, 6)
  products = np.concatenate([pair["a"] @ slab for slab in pair["b"]], axis=1)
  own = products.reshape(QWEN3.hidden_size, 2, -1)  # By slab: queries, keys, values.
  queries, keys = (
    heads * QWEN3.layers[0].attention.head_dim // 2
    for heads in (QWEN3.layers[0].attention.num_heads, QWEN3.layers[0].attention.num_kv_heads)
  )
  assert not own[:, :, queries : queries + keys].any()
  for module, part in (("q_proj", own[:, :, :queries]), ("v_proj", own[:, :, queries + keys :])):
    a, b = (tensors[f"{prefix}.0.self_attn.{module}.lora_{half}.weight"] for half in "AB")
    np.testing.assert_allclose(part.reshape(len(part), -1), (b @ a).T, rtol=1e-4, atol=1e-4)


def test_ranks_that_differ_by_target_travel_with_one_scale(tmp_path):
  wide, narrow = random_adapter(QWEN3, rank=4), random_adapter(QWEN3, rank=2)
  layers = [
    {**one, "out": other["out"]}
    for one, other in zip(wide["layers"], narrow["layers"], strict=True)
  ]
  peft.save(tmp_path / "adapter", {"layers": layers}, QWEN3, scale=2.0)
  settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert settings["r"] == 4 and settings["lora_alpha"] == 8.0
  assert settings["rank_pattern"] == {"o_proj": 2} and settings["alpha_pattern"] == {"o_proj": 4.0}
  found, scale = peft.load(tmp_path / "adapter", QWEN3, NUMERICS)
  assert scale == 2.0
  assert_equal_bits(found, {"layers": layers})


def test_a_rank_stabilised_scale_is_read(saved):
  configure(saved, use_rslora=True, lora_alpha=6.0)
  assert peft.load(saved, QWEN3, NUMERICS)[1] == 6.0 / 3**0.5


@pytest.mark.parametrize(
  "changes",
  [
    dict(use_dora=False, use_qalora=False, use_rslora=False, lora_bias=None, fan_in_fan_out=None),
    dict(modules_to_save=[], layers_to_transform=[], loftq_config={}, trainable_token_indices=None),
    dict(init_lora_weights=True), dict(init_lora_weights=False), dict(init_lora_weights=None),
    dict(init_lora_weights="gaussian"), dict(init_lora_weights="eva", eva_config={"rho": 2.0}),
    dict(init_lora_weights="orthogonal"),
    dict(megatron_core="megatron.core", qalora_group_size=16, layers_pattern="layers"),
    dict(peft_version="0.18.0", task_type="CAUSAL_LM", auto_mapping={"a": "b"}, lora_dropout=0.1),
    dict(later=None, later_flag=False, later_text="", later_list=[], later_config={}),
    dict(target_modules="all-linear"), dict(target_modules=r".*\.(self_attn|mlp)\.\w+_proj"),
    dict(target_modules=None), dict(exclude_modules=["lm_head"]), dict(exclude_modules="lm_head"),
  ],
)  # fmt: skip
def test_settings_that_change_nothing_are_let_in(saved, changes):
  before, scale = peft.load(saved, QWEN3, NUMERICS)
  configure(saved, **changes)
  found, again = peft.load(saved, QWEN3, NUMERICS)
  assert_equal_bits(found, before)
  assert again == scale


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(peft_type="LOHA"), "peft_type: got 'LOHA', expected 'LORA'; only plain"),
    (dict(peft_type=None), "peft_type: got None, expected 'LORA'"),
    (dict(use_dora=True), "use_dora: got True, expected None; only plain"),
    (dict(use_qalora=True), "use_qalora: got True, expected None"),
    (dict(use_bdlora=True), "use_bdlora: got True, expected None"),
    (dict(use_rslora="yes"), "use_rslora: got 'yes', expected True"),
    (dict(bias="all"), "bias: got 'all', expected 'none'"),
    (dict(bias="lora_only"), "bias: got 'lora_only', expected 'none'"),
    (dict(lora_bias=True), "lora_bias: got True, expected None"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out: got True, expected None"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save: got .'lm_head'., expected None"),
    (dict(init_lora_weights="pissa"), "init_lora_weights: got 'pissa', expected True or"),
    (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights: got 'pissa_niter_16', expected"),
    (dict(init_lora_weights="olora"), "init_lora_weights: got 'olora', expected True or"),
    (dict(init_lora_weights="corda"), "init_lora_weights: got 'corda', expected True or"),
    (dict(init_lora_weights="loftq"), "init_lora_weights: got 'loftq', expected True or"),
    (dict(init_lora_weights="lora_ga"), "init_lora_weights: got 'lora_ga', expected True"),
    (dict(init_lora_weights="PISSA"), "init_lora_weights: got 'PISSA', expected True"),
    (dict(init_lora_weights=3), "init_lora_weights: got 3, expected True"),
    (dict(loftq_config={"loftq_bits": 4}), "loftq_config: got .'loftq_bits': 4., expected None"),
    (dict(corda_config={"corda_method": "kpm"}), "corda_config: got .*, expected None"),
    (dict(lora_ga_config={"a": 1}), "lora_ga_config: got .*, expected None"),
    (dict(arrow_config={"top_k": 2}), "arrow_config: got .*, expected None"),
    (dict(megatron_config={"a": 1}), "megatron_config: got .*, expected None"),
    (dict(layer_replication=[[0, 2]]), r"layer_replication: got \[\[0, 2\]\], expected None"),
    (dict(layers_to_transform=[0]), r"layers_to_transform: got \[0\], expected None"),
    (dict(layers_to_transform=0), "layers_to_transform: got 0, expected None"),
    (dict(trainable_token_indices=[5]), r"trainable_token_indices: got \[5\], expected None"),
    (dict(target_parameters=["mlp.w"]), "target_parameters: got .*, expected None"),
    (dict(alora_invocation_tokens=[1]), "alora_invocation_tokens: got .*, expected None"),
    (dict(ensure_weight_tying=True), "ensure_weight_tying: got True, expected None"),
    (dict(use_a_later_method=True), "use_a_later_method: got True, expected None; only"),
    (dict(later_scale=0.5), "later_scale: got 0.5, expected None; only"),
    (dict(later_config={"a": None}), "later_config: got .*, expected None; only"),
    (dict(target_modules=["q_proj", "wte"]), "target_modules: got 'wte', which names no supp"),
    (dict(target_modules=["proj"]), "target_modules: got 'proj', which names no supp"),
    (dict(target_modules=["q_proj"]), "target_modules: got .'q_proj'. and tensors for"),
    (dict(target_modules="all_linear"), "target_modules: got 'all_linear', which names no supp"),
    (dict(target_modules="(q"), "target_modules: got '.q', expected a regular expression"),
    (dict(target_modules=[3]), "target_modules: got .3., expected text or a list of it"),
    (dict(target_modules=5), "target_modules: got 5, expected text or a list of it"),
    (dict(exclude_modules=["q_proj"]), "target_modules: got .* and tensors for .*q_proj"),
    (dict(exclude_modules=3), "exclude_modules: got 3, expected text or a list of it"),
    (dict(rank_pattern=[1]), "rank_pattern: got .1., expected an object by module"),
    (dict(lora_alpha=True), "lora_alpha: got True, expected a positive number"),
    (dict(r=4), "r: got 4 for self_attn.q_proj, expected the 3 rows of its lora_A; the two files"),
    (dict(lora_alpha="much"), "lora_alpha: got 'much', expected a positive number"),
    (dict(alpha_pattern={"o_proj": 9.0}), "alpha_pattern: got scales .* expected a single scale"),
    (dict(rank_pattern={"layers.0.q": 9}), "rank_pattern: got .'layers.0.q'., expected some of"),
  ],
)
def test_settings_that_we_do_not_compute_are_refused(saved, changes, message):
  configure(saved, **changes)
  with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
    peft.load(saved, QWEN3, NUMERICS)


def _drop(tensors):
  del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]


def _reshape(tensors):
  name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
  tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])


def _damage(tensors):
  tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] = np.nan


def _quantise(tensors):
  name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
  tensors[name] = tensors[name].astype(np.int8)


def _add(tensors):
  tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((3, 4), np.float32)


def _halve(tensors):
  return {name: tensor for name, tensor in tensors.items() if ".layers.1.mlp" not in name}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_drop, "layers.0.mlp.up_proj: got one of lora_A and lora_B, expected both"),
    (_reshape, r"layers.0.mlp.up_proj: got lora_A \[3, .*expected \[rank, .*another model"),
    (_damage, "up_proj.lora_A.weight: got entries that are NaN or infinite"),
    (_quantise, "up_proj.lora_A.weight: got dtype I8, expected one of .*unquantised"),
    (_add, "got the tensor base_model.model.lm_head.lora_A.weight, expected lora_A and lora_B"),
    (_halve, "got adapters of .* in layer 0 and different ones elsewhere, expected the same"),
  ],
)
def test_tensors_that_do_not_fit_are_refused(saved, change, message):
  edit(saved, change)
  with pytest.raises(ValueError, match=message):
    peft.load(saved, QWEN3, NUMERICS)


_EXPERT = "base_model.model.model.layers.0.mlp.experts"


def _move(tensors):
  for name in [name for name in tensors if f"{_EXPERT}.3." in name]:
    tensors[name.replace("experts.3", "experts.4")] = tensors.pop(name)


def _reshape_an_expert(tensors):
  name = f"{_EXPERT}.2.down_proj.lora_B.weight"
  tensors[name] = np.ascontiguousarray(tensors[name][:-1])


def _widen_an_expert(tensors):
  for half, axis in (("A", 0), ("B", 1)):
    name = f"{_EXPERT}.1.down_proj.lora_{half}.weight"
    tensors[name] = np.concatenate([tensors[name]] * 2, axis=axis)


def _without_experts(tensors):
  return {name: tensor for name, tensor in tensors.items() if "mlp.experts" not in name}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (_move, "got the tensor .*experts.4.*, expected .*'mlp.experts.0 to 3.gate_proj'.* 2 layers"),
    (
      _reshape_an_expert,
      r"experts.2.down_proj: got lora_A \[3, 3\] and lora_B \[5, 3\], expected .*6",
    ),
    (_widen_an_expert, "r: got 3 for mlp.experts.1.down_proj, expected the 6 rows of its lora_A"),
    (_without_experts, "target_modules: got .* and no tensors for model.layers.0.mlp.experts"),
  ],
)
def test_tensors_of_experts_that_do_not_fit_are_refused(experts, change, message):
  edit(experts, change)
  with pytest.raises(ValueError, match=message):
    peft.load(experts, QWEN3_MOE, NUMERICS)


def test_an_adapter_of_experts_is_refused_by_a_model_without_them(experts):
  with pytest.raises(
    ValueError, match="got the tensor .*mlp.experts.0.down_proj.*, expected lora_A"
  ):
    peft.load(experts, QWEN3, NUMERICS)


def test_what_is_no_adapter_is_refused(saved, tmp_path):
  configure(saved, peft_type="LORA")
  settings = json.loads((saved / "adapter_config.json").read_text())
  del settings["peft_type"]
  (saved / "adapter_config.json").write_text(json.dumps(settings))
  with pytest.raises(ValueError, match="peft_type: got nothing, expected 'LORA'"):
    peft.load(saved, QWEN3, NUMERICS)
  (saved / "adapter_model.safetensors").write_bytes(b"half")
  configure(saved, peft_type="LORA")
  with pytest.raises(ValueError, match="incomplete safetensors file .*save it again"):
    peft.load(saved, QWEN3, NUMERICS)
  (saved / "adapter_model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="adapter_model.safetensors: got no such file"):
    peft.load(saved, QWEN3, NUMERICS)
  with pytest.raises(FileExistsError, match="got a directory with files in it"):
    peft.save(saved, random_adapter(QWEN3), QWEN3, scale=0.5)
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "notes.txt").write_text("mine")
  with pytest.raises(FileExistsError, match="without adapter_config.json, expected an adapter"):
    peft.save(tmp_path / "other", random_adapter(QWEN3), QWEN3, scale=0.5, overwrite=True)
  with pytest.raises(ValueError, match="scale=0, expected a positive number; it is lora_alpha"):
    peft.save(tmp_path / "new", random_adapter(QWEN3), QWEN3, scale=0)
  deeper = QWEN3.changed(num_layers=QWEN3.num_layers + 1)
  with pytest.raises(ValueError, match="got an adapter of . layers, expected the model's"):
    peft.save(tmp_path / "new", random_adapter(QWEN3), deeper, scale=0.5)
  assert not (tmp_path / "new").exists()
  assert huggingface.CONFIG_FILE not in {path.name for path in saved.iterdir()}
