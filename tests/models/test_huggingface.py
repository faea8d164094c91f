"""Model directories: our files are read back, and foreign files are checked by name."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small_configs import CONFIGS, QWEN2, QWEN3
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers

from seerjax import numerics as numerics_lib
from seerjax.models import huggingface, parameters, tokenizer as tokenizer_lib

NUMERICS = numerics_lib.NumericsConfig(reduction_shards=2)


def random_params(config, shards=2, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: rng.standard_normal(s.shape).astype(np.float32), parameters.shapes(config, shards)
  )


def assert_equal_trees(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def contents(directory):
  return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


@pytest.fixture
def saved(tmp_path):
  """A small Qwen3 directory in float32."""
  huggingface.save(tmp_path / "model", random_params(QWEN3), QWEN3, dtype="float32")
  return tmp_path / "model"


def edit_weights(directory, change):
  path = directory / "model.safetensors"
  tensors = {name: array.copy() for name, array in safetensors.numpy.load_file(path).items()}
  safetensors.numpy.save_file(change(tensors) or tensors, path)


# There and back.


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_comes_back_as_it_was(name, tmp_path):
  params = random_params(CONFIGS[name])
  huggingface.save(tmp_path / "model", params, CONFIGS[name], dtype="float32")
  found, config = huggingface.load(tmp_path / "model", NUMERICS)
  assert config == CONFIGS[name]
  assert_equal_trees(found, params)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_save_load_save_gives_equal_bytes(name, dtype, tmp_path):
  huggingface.save(tmp_path / "1", random_params(CONFIGS[name]), CONFIGS[name], dtype=dtype)
  params, config = huggingface.load(tmp_path / "1", NUMERICS)
  huggingface.save(tmp_path / "2", params, config, dtype=dtype)
  assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_mode_that_the_umask_says(mask, mode, tmp_path):
  before = os.umask(mask)
  try:
    huggingface.save(tmp_path / "model", random_params(QWEN3), QWEN3)
  finally:
    os.umask(before)
  assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {mode}


def test_bfloat16_loses_nothing_on_the_way_in_and_rounds_to_even_on_the_way_out(tmp_path):
  params = random_params(QWEN3)
  huggingface.save(tmp_path / "model", params, QWEN3)
  found, _ = huggingface.load(tmp_path / "model", NUMERICS)
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
  assert_equal_trees(found, rounded)
  half, _ = huggingface.load(tmp_path / "model", NUMERICS, ml_dtypes.bfloat16)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
  assert_equal_trees(jax.tree.map(lambda x: np.asarray(x, np.float32), half), rounded)


def test_the_layout_is_the_published_one_by_hand(tmp_path):
  # Two slabs: slab 0 holds key/value head 0 with query heads 0 and 1.
  params = random_params(QWEN3)
  huggingface.save(tmp_path / "model", params, QWEN3, dtype="float32")
  tensors = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
  layer, prefix = params["layers"][1], "model.layers.1."
  q = tensors[prefix + "self_attn.q_proj.weight"]  # [4 heads * 4, 6]
  k = tensors[prefix + "self_attn.k_proj.weight"]  # [2 heads * 4, 6]
  v = tensors[prefix + "self_attn.v_proj.weight"]
  np.testing.assert_array_equal(layer["qkv"][1, :, :8], q[8:].T)
  np.testing.assert_array_equal(layer["qkv"][1, :, 8:12], k[4:].T)
  np.testing.assert_array_equal(layer["qkv"][0, :, 12:], v[:4].T)
  out = tensors[prefix + "self_attn.o_proj.weight"]  # [6, 16]
  np.testing.assert_array_equal(layer["out"][1], out[:, 8:].T)
  up = tensors[prefix + "mlp.up_proj.weight"]  # [8, 6]
  np.testing.assert_array_equal(layer["gate_up"][0, :, 4:], up[:4].T)
  np.testing.assert_array_equal(layer["down"][1], tensors[prefix + "mlp.down_proj.weight"][:, 4:].T)
  np.testing.assert_array_equal(params["head"].reshape(12, 6), tensors["lm_head.weight"])


def test_the_number_of_slabs_changes_no_byte(tmp_path):
  params = random_params(QWEN3)
  huggingface.save(tmp_path / "2", params, QWEN3)
  one, config = huggingface.load(tmp_path / "2", dataclasses.replace(NUMERICS, reduction_shards=1))
  assert one["layers"][0]["qkv"].shape[0] == 1
  huggingface.save(tmp_path / "1", one, config)
  assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_shards_and_index_hold_the_same_weights(tmp_path):
  params = random_params(QWEN3)
  huggingface.save(tmp_path / "model", params, QWEN3, dtype="float32", max_shard_bytes=700)
  names = sorted(contents(tmp_path / "model"))
  count = len(names) - 2  # Without config.json and the index.
  assert count > 3
  assert f"model-00001-of-{count:05d}.safetensors" in names
  index = json.loads((tmp_path / "model" / huggingface.INDEX_FILE).read_text())
  total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert index["metadata"]["total_size"] == total
  found, config = huggingface.load(tmp_path / "model", NUMERICS)
  assert_equal_trees(found, params)
  huggingface.save(tmp_path / "2", found, config, dtype="float32", max_shard_bytes=700)
  assert contents(tmp_path / "model") == contents(tmp_path / "2")


def word_tokenizer(directory, **generation):
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"<unk>": 0, "<end>": 1, "yes": 2}, unk_token="<unk>")
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  directory.mkdir()
  backend.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
  if generation:
    (directory / "generation_config.json").write_text(json.dumps(generation))
  return tokenizer_lib.load(directory)


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": [2, 1], "temperature": 0.6}])
def test_the_tokenizer_and_its_stop_ids_travel_along(generation, tmp_path):
  tokenizer = word_tokenizer(tmp_path / "words", **generation)
  huggingface.save(tmp_path / "1", random_params(QWEN3), QWEN3, tokenizer=tokenizer)
  found = tokenizer_lib.load(tmp_path / "1")
  assert found.eos_ids == tokenizer.eos_ids == ((2, 1) if generation else (1,))
  written = json.loads((tmp_path / "1" / "generation_config.json").read_text())
  assert written == (generation or {"eos_token_id": [1]})
  config_eos = json.loads((tmp_path / "1" / "config.json").read_text())["eos_token_id"]
  assert config_eos == ([2, 1] if generation else 1)
  params, config = huggingface.load(tmp_path / "1", NUMERICS)
  huggingface.save(tmp_path / "2", params, config, tokenizer=found)
  assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_head_that_repeats_the_embedding_is_no_surprise(tmp_path):
  params = random_params(QWEN2)
  huggingface.save(tmp_path / "model", params, QWEN2, dtype="float32")

  def repeat(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

  edit_weights(tmp_path / "model", repeat)
  found, _ = huggingface.load(tmp_path / "model", NUMERICS)
  assert_equal_trees(found, params)

  def change(tensors):
    tensors["lm_head.weight"][3, 2] += 1

  edit_weights(tmp_path / "model", change)
  with pytest.raises(ValueError, match="lm_head.weight: got other values than model.embed_tokens"):
    huggingface.load(tmp_path / "model", NUMERICS)


def test_buffers_of_old_checkpoints_are_ignored(saved):
  def add(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

  edit_weights(saved, add)
  huggingface.load(saved, NUMERICS)


# Places and formats of writing.


def test_a_directory_with_files_is_kept(saved):
  before = contents(saved)
  with pytest.raises(FileExistsError, match="got a directory with files in it, expected none"):
    huggingface.save(saved, random_params(QWEN3, seed=1), QWEN3)
  assert contents(saved) == before


def test_overwrite_replaces_the_whole_model_and_leaves_nothing_beside_it(saved):
  huggingface.save(saved, random_params(QWEN3), QWEN3, max_shard_bytes=700, overwrite=True)
  assert "model.safetensors" not in contents(saved)
  huggingface.load(saved, NUMERICS)
  assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_overwrite_keeps_what_is_no_model(tmp_path):
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes" / "diary.txt").write_text("dear diary")
  with pytest.raises(FileExistsError, match="without config.json, expected a model directory"):
    huggingface.save(tmp_path / "notes", random_params(QWEN3), QWEN3, overwrite=True)
  (tmp_path / "file").write_text("")
  with pytest.raises(FileExistsError, match="got a file, expected no file there"):
    huggingface.save(tmp_path / "file", random_params(QWEN3), QWEN3, overwrite=True)


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path):
  (tmp_path / "empty").mkdir()
  huggingface.save(tmp_path / "empty", random_params(QWEN3), QWEN3)
  huggingface.save(tmp_path / "a" / "b" / "c", random_params(QWEN3), QWEN3)
  assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b" / "c")


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path):
  # Arrays of a petabyte that take no memory.
  config = dataclasses.replace(QWEN3, vocab_size=2**46)
  params = jax.tree.map(
    lambda s: np.broadcast_to(np.float32(0), s.shape), parameters.shapes(config, 1)
  )
  with pytest.raises(OSError, match=r"got [\d.]+ GiB of free space, expected at least 1572864"):
    huggingface.save(tmp_path / "model", params, config)
  assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_no_rest(tmp_path):
  tokenizer = dataclasses.replace(
    word_tokenizer(tmp_path / "words"), files={"no/such/directory/tokenizer.json": b"{}"}
  )
  with pytest.raises(FileNotFoundError, match="no/such/directory"):
    huggingface.save(tmp_path / "model", random_params(QWEN3), QWEN3, tokenizer=tokenizer)
  assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_parameters_of_another_shape_are_refused(tmp_path):
  wide = dataclasses.replace(QWEN3, hidden_size=7)
  with pytest.raises(ValueError, match=r"params\['embed'\]: got \(12, 6\), expected \(12, 7\)"):
    huggingface.save(tmp_path / "model", random_params(QWEN3), wide)
  tied = dataclasses.replace(QWEN3, is_tied=True)
  with pytest.raises(ValueError, match=r"params\['head'\]: got \(2, 6, 6\), expected nothing"):
    huggingface.save(tmp_path / "model", random_params(QWEN3), tied)


def test_another_dtype_is_refused(tmp_path):
  with pytest.raises(ValueError, match="dtype='float16', expected one of"):
    huggingface.save(tmp_path / "model", random_params(QWEN3), QWEN3, dtype="float16")


# Weights.


def test_a_missing_config_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="config.json: got no such file"):
    huggingface.load(tmp_path, NUMERICS)


def test_slabs_that_do_not_divide_the_model_are_refused(saved):
  numerics = dataclasses.replace(NUMERICS, reduction_shards=8)
  with pytest.raises(ValueError, match="got 8, expected a divisor of num_kv_heads=2"):
    huggingface.load(saved, numerics)


def test_a_missing_tensor_is_named(saved):
  def remove(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]

  edit_weights(saved, remove)
  with pytest.raises(ValueError, match="got no tensor model.layers.1.mlp.up_proj.weight, expected"):
    huggingface.load(saved, NUMERICS)


def test_many_missing_tensors_are_counted(saved):
  kept = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
  edit_weights(saved, lambda tensors: {name: tensors[name] for name in kept})
  with pytest.raises(
    ValueError, match="got no tensor lm_head.weight, .* and 18 more, expected all"
  ):
    huggingface.load(saved, NUMERICS)


def test_an_unexpected_tensor_is_named(saved):
  def add(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((8, 6), np.float32)

  edit_weights(saved, add)
  with pytest.raises(ValueError, match="got the tensors model.layers.2.mlp.up_proj.weight"):
    huggingface.load(saved, NUMERICS)


def replace(name, array):
  def change(tensors):
    assert name in tensors
    tensors[name] = array

  return change


def test_a_tensor_of_another_shape_is_named(saved):
  edit_weights(saved, replace("model.norm.weight", np.zeros((5,), np.float32)))
  with pytest.raises(ValueError, match=r"model.norm.weight: got shape \(5,\), expected \(6,\)"):
    huggingface.load(saved, NUMERICS)
  # The same number of entries in another shape.
  edit_weights(saved, replace("model.norm.weight", np.zeros((2, 3), np.float32)))
  with pytest.raises(ValueError, match=r"model.norm.weight: got shape \(2, 3\), expected \(6,\)"):
    huggingface.load(saved, NUMERICS)


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_a_tensor_of_another_dtype_is_named(saved, dtype):
  edit_weights(saved, replace("model.norm.weight", np.zeros(6, dtype)))
  with pytest.raises(ValueError, match=r"model.norm.weight: got dtype [IF]\d+, expected one of"):
    huggingface.load(saved, NUMERICS)


def test_float16_is_read_without_loss(saved):
  values = np.asarray([1, 0.5, 65504, -(2**-14), 0.1, 0], np.float16)
  edit_weights(saved, replace("model.norm.weight", values))
  found, _ = huggingface.load(saved, NUMERICS)
  np.testing.assert_array_equal(found["final_norm"], values.astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_named(saved, value):
  def poison(tensors):
    tensors["model.layers.0.mlp.down_proj.weight"][2, 3] = value

  edit_weights(saved, poison)
  with pytest.raises(
    ValueError, match="model.layers.0.mlp.down_proj.weight: got 1 entries that are NaN or infinite"
  ):
    huggingface.load(saved, NUMERICS)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
  path = saved / "model.safetensors"
  content = path.read_bytes()[:keep]
  path.write_bytes(content)
  with pytest.raises(
    ValueError, match=rf"model.safetensors: got an incomplete safe.* {len(content)} bytes"
  ):
    huggingface.load(saved, NUMERICS)


def test_a_file_with_more_behind_it_is_refused(saved):
  path = saved / "model.safetensors"
  path.write_bytes(path.read_bytes() + b"more")
  with pytest.raises(ValueError, match="incomplete safetensors file"):
    huggingface.load(saved, NUMERICS)


def test_pickles_are_never_read(saved):
  (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
  with pytest.raises(ValueError, match=r"pickles only \(pytorch_model.bin\).* convert to safetens"):
    huggingface.load(saved, NUMERICS)
  (saved / "pytorch_model.bin").unlink()
  with pytest.raises(FileNotFoundError, match="got neither model.safetensors nor model"):
    huggingface.load(saved, NUMERICS)


@pytest.fixture
def sharded(tmp_path):
  huggingface.save(
    tmp_path / "sharded", random_params(QWEN3), QWEN3, dtype="float32", max_shard_bytes=3000
  )
  return tmp_path / "sharded"


def edit_index(directory, change):
  path = directory / huggingface.INDEX_FILE
  index = json.loads(path.read_text())
  change(index["weight_map"])
  path.write_text(json.dumps(index))


@pytest.mark.parametrize(
  "name",
  [
    "../secret.safetensors",
    "/etc/a.safetensors",
    "a/b.safetensors",
    "..\\a.safetensors",
    "weights.bin",
    "..safetensors",
    ".safetensors",
    "a\n.safetensors",
    "",
    7,
    None,
  ],
)
def test_an_index_that_points_elsewhere_is_refused(sharded, name):
  edit_index(sharded, lambda files: files.update({"model.norm.weight": name}))
  message = re.escape(f"weight_map['model.norm.weight']: got {name!r}, expected the plain name")
  with pytest.raises(ValueError, match=message):
    huggingface.load(sharded, NUMERICS)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
  (sharded / huggingface.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
  with pytest.raises(ValueError, match="weight_map: got .*, expected an object of tensor names"):
    huggingface.load(sharded, NUMERICS)


def test_a_missing_shard_is_named(sharded):
  first = min(sharded.glob("model-*.safetensors"))
  first.unlink()
  with pytest.raises(FileNotFoundError, match=f"{first.name}: got no such file, expected"):
    huggingface.load(sharded, NUMERICS)


def test_an_index_that_places_a_tensor_in_another_shard_is_refused(sharded):
  names = sorted(path.name for path in sharded.glob("model-*.safetensors"))
  edit_index(sharded, lambda files: files.update({"model.norm.weight": names[0]}))
  with pytest.raises(ValueError, match="got .*model.norm.weight.*do not belong together"):
    huggingface.load(sharded, NUMERICS)


def test_a_tensor_that_only_the_index_knows_is_refused(sharded):
  first = min(path.name for path in sharded.glob("model-*.safetensors"))
  edit_index(sharded, lambda files: files.update({"model.ghost.weight": first}))
  with pytest.raises(ValueError, match="got no tensor 'model.ghost.weight', expected it by"):
    huggingface.load(sharded, NUMERICS)


# The Hub.


def test_a_local_directory_wins(saved):
  assert huggingface.resolve(saved) == saved
  assert huggingface.resolve(str(saved)) == saved


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "../x", "~/none"])
def test_what_is_neither_a_directory_nor_an_id_is_refused(name):
  with pytest.raises(FileNotFoundError, match="which is not a directory, expected a model"):
    huggingface.resolve(name)


# In processes of their own: offline mode and installed packages are facts of a process.


def resolve_elsewhere(prelude, tmp_path, **variables):
  code = f"""
{prelude}
from seerjax.models import huggingface
try:
  huggingface.resolve("seerjax/no-such-model")
except Exception as error:
  print(type(error).__name__, error)
"""
  environment = dict(os.environ, HF_HOME=str(tmp_path), JAX_PLATFORMS="cpu", **variables)
  root = pathlib.Path(huggingface.__file__).parents[2]
  return subprocess.run(
    [sys.executable, "-c", code],
    env=environment,
    cwd=root,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  ).stdout


@pytest.mark.thorough
def test_offline_is_said_clearly(tmp_path):
  said = resolve_elsewhere("", tmp_path, HF_HUB_OFFLINE="1")
  assert said.startswith("FileNotFoundError resolve: got no files of 'seerjax/no-")
  assert "pass the path of a download" in said


@pytest.mark.thorough
def test_a_proxy_that_refuses_is_said_clearly(tmp_path):
  # A bare handler supports no method, so it answers CONNECT with 501.
  with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
    threading.Thread(target=server.serve_forever).start()
    proxy = f"http://127.0.0.1:{server.server_port}"
    try:
      said = resolve_elsewhere("", tmp_path, HTTPS_PROXY=proxy, https_proxy=proxy)
    finally:
      server.shutdown()
  assert said.startswith("FileNotFoundError resolve: got no files of 'seerjax/no-")
  assert "from the Hub (ProxyError: 501 " in said


@pytest.mark.thorough
def test_a_missing_hub_package_is_said_clearly(tmp_path):
  said = resolve_elsewhere("import sys; sys.modules['huggingface_hub'] = None", tmp_path)
  assert said.startswith("ImportError resolve: got the Hub id 'seerjax/no-such-model' without")
  assert "pip install huggingface_hub" in said
