"""Model directories: our files are read back, and foreign files are checked by name."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

from equal_trees import assert_equal_bits
import jax
import ml_dtypes
import numpy as np
import pytest
import refusals
import safetensors.numpy
from small_configs import CONFIGS, QWEN2, QWEN3
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers

from seerjax import numerics as numerics_lib
from seerjax.models import huggingface, parameters, tokenizer as tokenizer_lib

NUMERICS = numerics_lib.NumericsConfig(reduction_shards=2)
NORM, FIRST_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"
UP, DOWN = "model.layers.{}.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def random_params(config, shards=2, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: rng.standard_normal(s.shape).astype(np.float32), parameters.shapes(config, shards)
  )


def contents(directory):
  return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


@pytest.fixture
def saved(tmp_path):
  """A small Qwen3 directory in float32."""
  huggingface.save(tmp_path / "model", random_params(QWEN3), QWEN3, dtype="float32")
  return tmp_path / "model"


def weights_of(directory):
  return directory / "model.safetensors"


def load(directory):
  return huggingface.load(directory, NUMERICS)


def load_edited(directory, change):
  """Loads the directory with the tensors that `change` returns."""
  old = safetensors.numpy.load_file(weights_of(directory))
  tensors = {name: array.copy() for name, array in old.items()}
  safetensors.numpy.save_file(change(tensors), weights_of(directory))
  return load(directory)


def load_written(directory, content):
  """Loads the directory with this content as its weights."""
  weights_of(directory).write_bytes(content)
  return load(directory)


def with_entry(name, place, value):
  def change(tensors):
    tensors[name][place] = value
    return tensors

  return change


# There and back.


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_comes_back_as_it_was(name, tmp_path):
  params = random_params(CONFIGS[name])
  huggingface.save(tmp_path / "model", params, CONFIGS[name], dtype="float32")
  found, config = load(tmp_path / "model")
  assert config == CONFIGS[name]
  assert_equal_bits(found, params)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_save_load_save_gives_equal_bytes(name, dtype, tmp_path):
  huggingface.save(tmp_path / "1", random_params(CONFIGS[name]), CONFIGS[name], dtype=dtype)
  params, config = load(tmp_path / "1")
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
  found, _ = load(tmp_path / "model")
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
  assert_equal_bits(found, rounded)
  half, _ = huggingface.load(tmp_path / "model", NUMERICS, ml_dtypes.bfloat16)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
  assert_equal_bits(jax.tree.map(lambda x: np.asarray(x, np.float32), half), rounded)


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
  found, config = load(tmp_path / "model")
  assert_equal_bits(found, params)
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
  params, config = load(tmp_path / "1")
  huggingface.save(tmp_path / "2", params, config, tokenizer=found)
  assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_a_head_that_repeats_the_embedding_is_no_surprise(tmp_path):
  params = random_params(QWEN2)
  huggingface.save(tmp_path / "model", params, QWEN2, dtype="float32")
  head, embedding = "lm_head.weight", "model.embed_tokens.weight"
  found, _ = load_edited(tmp_path / "model", lambda t: t | {head: t[embedding].copy()})
  assert_equal_bits(found, params)
  with pytest.raises(ValueError, match="lm_head.weight: got other values than model.embed_tokens"):
    load_edited(tmp_path / "model", with_entry(head, (3, 2), 9.0))


def test_buffers_of_old_checkpoints_are_ignored(saved):
  buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
  load_edited(saved, lambda tensors: tensors | {buffer: np.ones(2, np.float32)})


# Places and formats of writing.


def test_a_directory_with_files_is_kept(saved):
  before = contents(saved)
  with pytest.raises(FileExistsError, match="got a directory with files in it, expected none"):
    huggingface.save(saved, random_params(QWEN3, seed=1), QWEN3)
  assert contents(saved) == before


def test_overwrite_replaces_the_whole_model_and_leaves_nothing_beside_it(saved):
  huggingface.save(saved, random_params(QWEN3), QWEN3, max_shard_bytes=700, overwrite=True)
  assert "model.safetensors" not in contents(saved)
  load(saved)
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


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(hidden_size=7), r"params\['embed'\]: got \(12, 6\), expected \(12, 7\)"),
    (dict(is_tied=True), r"params\['head'\]: got \(2, 6, 6\), expected nothing"),
  ],
)
def test_parameters_of_another_shape_are_refused(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    huggingface.save(tmp_path, random_params(QWEN3), QWEN3.changed(**changes))


# Weights.


@refusals.table(
  (lambda d: huggingface.load(d, dataclasses.replace(NUMERICS, reduction_shards=8)),
   "got 8, expected a divisor of num_heads="),
  (lambda d: load_edited(d, lambda t: {name: t[name] for name in t if name != UP.format(1)}),
   "got no tensor model.layers.1.mlp.up_proj.weight, expected"),
  (lambda d: load_edited(d, lambda t: {name: t[name] for name in (NORM, FIRST_NORM)}),
   "got no tensor lm_head.weight, ", " and 18 more, expected all"),
  (lambda d: load_edited(d, lambda t: t | {UP.format(2): np.zeros((8, 6), np.float32)}),
   "got the tensors model.layers.2.mlp.up_proj.weight"),
  (lambda d: load_edited(d, lambda t: t | {NORM: np.zeros((5,), np.float32)}),
   "model.norm.weight: got shape (5,), expected (6,)"),
  # The same number of entries in another shape.
  (lambda d: load_edited(d, lambda t: t | {NORM: np.zeros((2, 3), np.float32)}),
   "model.norm.weight: got shape (2, 3), expected (6,)"),
  (lambda d: load_edited(d, lambda t: t | {NORM: np.zeros(6, np.int8)}),
   "model.norm.weight: got dtype I8, expected one of"),
  (lambda d: load_edited(d, lambda t: t | {NORM: np.zeros(6, np.float64)}),
   "model.norm.weight: got dtype F64, expected one of"),
  (lambda d: load_edited(d, with_entry(DOWN, (2, 3), np.nan)),
   "model.layers.0.mlp.down_proj.weight: got 1 entries that are NaN or infinite"),
  (lambda d: load_edited(d, with_entry(DOWN, (2, 3), np.inf)),
   "model.layers.0.mlp.down_proj.weight: got 1 entries that are NaN or infinite"),
  (lambda d: load_written(d, weights_of(d).read_bytes() + b"more"), "incomplete safetensors file"),
  (lambda d: (weights_of(d).rename(d / "pytorch_model.bin"), load(d)),
   "pickles only (pytorch_model.bin)", " convert to safetens"),
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(row, saved):
  refusals.check(row, saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
  content = weights_of(saved).read_bytes()[:keep]
  message = rf"model.safetensors: got an incomplete safe.* {len(content)} bytes"
  with pytest.raises(ValueError, match=message):
    load_written(saved, content)


def test_float16_is_read_without_loss(saved):
  values = np.asarray([1, 0.5, 65504, -(2**-14), 0.1, 0], np.float16)
  found, _ = load_edited(saved, lambda tensors: tensors | {NORM: values})
  np.testing.assert_array_equal(found["final_norm"], values.astype(np.float32))


@pytest.fixture
def sharded(tmp_path):
  huggingface.save(
    tmp_path / "sharded", random_params(QWEN3), QWEN3, dtype="float32", max_shard_bytes=3000
  )
  return tmp_path / "sharded"


def load_indexed(directory, **files):
  """Loads the directory with these entries of its index."""
  path = directory / huggingface.INDEX_FILE
  index = json.loads(path.read_text())
  index["weight_map"].update(files)
  path.write_text(json.dumps(index))
  load(directory)


@pytest.mark.parametrize(
  "name",
  [
    "../secret.safetensors", "/etc/a.safetensors", "a/b.safetensors", "..\\a.safetensors",
    "weights.bin", "..safetensors", ".safetensors", "a\n.safetensors", "", 7, None,
  ],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(sharded, name):
  message = f"weight_map['model.norm.weight']: got {name!r}, expected the plain name"
  refusals.check((lambda: load_indexed(sharded, **{NORM: name}), message))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(sharded, weight_map):
  (sharded / huggingface.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
  with pytest.raises(ValueError, match="weight_map: got .*, expected an object of tensor names"):
    load(sharded)


def test_an_index_and_shards_that_differ_are_refused(sharded):
  first = min(sharded.glob("model-*.safetensors"))
  before = (sharded / huggingface.INDEX_FILE).read_bytes()
  with pytest.raises(ValueError, match="got .*model.norm.weight.*do not belong together"):
    load_indexed(sharded, **{NORM: first.name})
  (sharded / huggingface.INDEX_FILE).write_bytes(before)
  with pytest.raises(ValueError, match="got no tensor 'model.ghost.weight', expected it by"):
    load_indexed(sharded, **{"model.ghost.weight": first.name})
  first.unlink()
  with pytest.raises(FileNotFoundError, match=f"{first.name}: got no such file, expected"):
    load(sharded)


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
  message = resolve_elsewhere("", tmp_path, HF_HUB_OFFLINE="1")
  assert message.startswith("FileNotFoundError resolve: got no files of 'seerjax/no-")
  assert "pass the path of a download" in message


@pytest.mark.thorough
def test_a_proxy_that_refuses_is_said_clearly(tmp_path):
  # A bare handler supports no method, so it answers CONNECT with 501.
  with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
    threading.Thread(target=server.serve_forever).start()
    proxy = f"http://127.0.0.1:{server.server_port}"
    try:
      message = resolve_elsewhere("", tmp_path, HTTPS_PROXY=proxy, https_proxy=proxy)
    finally:
      server.shutdown()
  assert message.startswith("FileNotFoundError resolve: got no files of 'seerjax/no-")
  assert "from the Hub (ProxyError: 501 " in message


@pytest.mark.thorough
def test_a_missing_hub_package_is_said_clearly(tmp_path):
  message = resolve_elsewhere("import sys; sys.modules['huggingface_hub'] = None", tmp_path)
  assert message.startswith("ImportError resolve: got the Hub id 'seerjax/no-such-model' without")
  assert "pip install huggingface_hub" in message
