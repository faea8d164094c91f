"""GGUF files against llama.cpp: equal numbers of every kind, equal ids, equal completions.

Where llama.cpp is not installed (launch/peers.sh), these tests skip.
"""

from __future__ import annotations

import ctypes

import gguf_cases
from gguf_cases import Record, raw
import numpy as np
import pytest

from experiments import llama_cpp
from experiments.throughput import engine as engine_throughput, real as real_speed
from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import gguf_file, gguf_write, loading, tokenizer as tokenizer_lib
from seerjax.types import Request, SamplingParams

pytestmark = pytest.mark.skipif(
  not llama_cpp.is_installed(), reason="llama.cpp is not installed (launch/peers.sh)"
)
# llama.cpp's functions that turn rows of a kind into float32, and a block's (numbers, bytes).
TO_FLOAT = {
  "F16": ("ggml_fp16_to_fp32_row", 1, 2),
  "BF16": ("ggml_bf16_to_fp32_row", 1, 2),
  "Q4_0": ("dequantize_row_q4_0", 32, 18),
  "Q4_1": ("dequantize_row_q4_1", 32, 20),
  "Q5_0": ("dequantize_row_q5_0", 32, 22),
  "Q8_0": ("dequantize_row_q8_0", 32, 34),
  "Q4_K": ("dequantize_row_q4_K", 256, 144),
  "Q5_K": ("dequantize_row_q5_K", 256, 176),
  "Q6_K": ("dequantize_row_q6_K", 256, 210),
}
LENGTH = 24


@pytest.mark.parametrize("kind", TO_FLOAT)
def test_a_tensor_of_every_kind_is_llama_cpps_to_the_bit(kind, tmp_path, seed):
  function, length, size = TO_FLOAT[kind]
  blocks = np.random.default_rng(seed).integers(0, 256, (64, 8 * size), np.uint8)
  record = Record((64, 8 * length), kind, blocks.tobytes())
  (tmp_path / "m.gguf").write_bytes(raw({}, {"x": record}))
  ours = gguf_file.File(tmp_path / "m.gguf").read("x")
  theirs = np.empty((64, 8 * length), np.float32)
  convert = getattr(llama_cpp.library(), function)
  convert.restype = None
  convert.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
  convert(blocks.ctypes.data, theirs.ctypes.data, theirs.size)
  numbers = np.isfinite(theirs)
  assert numbers.mean() > 0.5 and np.array_equal(np.isfinite(ours), numbers)
  assert np.array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))


@pytest.mark.parametrize("form", gguf_cases.FORMS)
def test_texts_have_the_ids_that_llama_cpp_gives_them(form, tmp_path):
  config = gguf_cases.LLAMA
  tokenizer = gguf_cases.tokenizer(form)
  gguf_write.save(tmp_path / "m.gguf", gguf_cases.weights(config), config, tokenizer=tokenizer)
  model = llama_cpp.Model(tmp_path / "m.gguf", num_sequences=1, context=64, num_threads=1)
  ours = tokenizer_lib.load(tmp_path / "m.gguf")
  differing = [text for text in gguf_cases.TEXTS if model.encode(text) != ours.encode(text)]
  model.close()
  # It composes no characters, which Qwen's own tokenizer does before anything else.
  assert differing == ([gguf_cases.TEXTS[2]] if form == "qwen2" else [])


def test_sentence_pieces_have_the_ids_that_llama_cpp_gives_them(tmp_path):
  entries, records = gguf_cases.parts()
  file = tmp_path / "m.gguf"
  file.write_bytes(raw(gguf_cases.with_sentence_pieces(entries), records))
  model = llama_cpp.Model(file, num_sequences=1, context=64, num_threads=1)
  ours = tokenizer_lib.load(file)
  texts = (*gguf_cases.TEXTS, *gguf_cases.sentence_pieces()[0])
  for text in texts:
    assert model.encode(text) == ours.encode(text)
  model.close()


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*gguf_cases.CONFIGS, "gemma3"])
def test_llama_cpp_answers_as_we_do_from_what_we_wrote(case, tmp_path, seed):
  """Ten prompts; each answer's tokens, and what we say of them, by its logits."""
  config = (gguf_cases.CONFIGS | {"gemma3": gguf_cases.GEMMA3})[case]
  gguf_write.save(
    tmp_path / "m.gguf",
    gguf_cases.weights(config),
    config,
    tokenizer=gguf_cases.tokenizer("qwen2"),
  )
  backend = "tiled" if case == "gemma3" else "native"  # Only tiles compute windows.
  loaded = loading.load_model(tmp_path / "m.gguf", numerics_lib.NumericsConfig(backend=backend))
  engine = engine_lib.Engine(
    loaded,
    config=engine_lib.EngineConfig(max_num_seqs=16, max_model_len=128),
    key=numerics_lib.key(0),
  )
  # llama.cpp looks gelu up in a table of float16. A window of one position less differs by 2.
  tolerance = 5e-3 if case == "gemma3" else 2e-4
  rng = np.random.default_rng(seed)
  prompts = [tuple(rng.integers(0, 390, 7 + 5 * i).tolist()) for i in range(10)]
  sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH)
  ours = engine.generate(
    [
      Request(request_id=f"{i}", prompt=prompt, sampling=sampling)
      for i, prompt in enumerate(prompts)
    ]
  )
  by_id = {completion.request_id: completion for completion in ours}
  model = llama_cpp.Model(
    tmp_path / "m.gguf", num_sequences=10, context=128, num_threads=1, flash=False, kv="f32"
  )
  for place, prompt in enumerate(prompts):
    completion = by_id[f"{place}"]
    tokens = [*prompt, *completion.tokens]
    rows = np.arange(len(tokens))
    logits = model.forward(
      np.asarray(tokens), rows, np.full(len(tokens), place), rows >= len(prompt) - 1
    ).astype(np.float64)[:-1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    chosen = logprobs[np.arange(LENGTH), completion.tokens]
    np.testing.assert_allclose(chosen, completion.raw_logprobs, atol=tolerance)
    # Greedy tokens, but where two are as likely to the last digits.
    assert (logprobs.max(axis=1) - chosen < tolerance).all()
  model.close()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_experiments_give_llama_cpp_any_family(family, tmp_path):
  directory = gguf_cases.saved(tmp_path / "model", gguf_cases.CONFIGS[family])
  workload = engine_throughput.Workload(model=str(directory), num_prompts=2, num_threads=1)
  lengths = np.array([[1, 4], [3, 2]])
  answer = engine_throughput.llama_answer(
    workload, [(5, 6, 7), (9, 8)], lengths, engine_throughput.PEERS["llama-cpp"]
  )
  assert answer() == lengths.sum()
  real_speed.llama_answer(directory, "bfloat16")(2, 8, 3)
  assert gguf_file.File(tmp_path / "model-bf16.gguf").tensors["blk.1.ffn_up.weight"].kind == "BF16"
