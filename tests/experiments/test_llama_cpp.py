"""Rows and streams passed to llama.cpp by hand; where installed, it gives equal completions."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from experiments import llama_cpp, peer_models
from seerjax import numerics as numerics_lib
from seerjax.commands import generate
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

needs_llama = pytest.mark.skipif(
  not llama_cpp.is_installed(), reason="llama.cpp is not installed (launch/peers.sh)"
)
PROMPTS = [(5, 6, 7), (9, 8)]


class Counting:
  """A model that predicts (last token + length of the stream) modulo 11."""

  vocab_size = 11

  def __init__(self, num_streams: int):
    self.streams: list[list[int]] = [[] for _ in range(num_streams)]
    self.widths: list[int] = []

  def forget(self) -> None:
    self.streams = [[] for _ in self.streams]

  def copy(self, source: int, target: int) -> None:
    self.streams[target] = list(self.streams[source])

  def forward(self, tokens, positions, sequences, is_read) -> np.ndarray:
    self.widths.append(len(tokens))
    logits = []
    for token, position, sequence in zip(tokens, positions, sequences, strict=True):
      assert position == len(self.streams[sequence])
      self.streams[sequence].append(int(token))
      logits.append(10.0 * np.eye(11)[(int(token) + len(self.streams[sequence])) % 11])
    return np.asarray(logits, np.float32)[np.asarray(is_read)]


def expected(prompt: tuple[int, ...], length: int) -> list[int]:
  tokens = list(prompt)
  for _ in range(length):
    tokens.append((tokens[-1] + len(tokens)) % 11)
  return tokens[len(prompt) :]


def test_answers_have_their_lengths_and_the_living_stay_neighbours():
  lengths = np.array([[1, 4, 2], [3, 3, 1]])
  model = Counting(lengths.size)
  for _ in range(2):  # The second time everything is forgotten first.
    model.widths.clear()
    answers = llama_cpp.answer(model, PROMPTS, lengths, None)
    wanted = [expected(PROMPTS[group], length) for group in (0, 1) for length in lengths[group]]
    assert answers == wanted
    # Each prompt once; then the four, three and one answers that are longer than 1, 2 and 3.
    assert model.widths == [3, 2, 4, 3, 1]


def test_samples_follow_the_softmax():
  logits = np.log(np.tile(np.array([[0.2, 0.3, 0.5]], np.float32), (20_000, 1)))
  drawn = llama_cpp.sample(logits, np.random.default_rng(0))
  np.testing.assert_allclose(np.bincount(drawn) / len(drawn), [0.2, 0.3, 0.5], atol=0.02)


def test_another_versions_layout_is_refused():
  words = [0] * 128
  for place, default in llama_cpp.CONTEXT_WORDS.values():
    words[place] = default
  llama_cpp.check_defaults(words)
  words[7] = 9
  with pytest.raises(RuntimeError, match="got 9 in place of the default n_threads, expected 4"):
    llama_cpp.check_defaults(words)


@pytest.mark.skipif(llama_cpp.is_installed(), reason="llama.cpp is installed")
def test_without_the_package_one_reads_how_to_install_it(tmp_path: pathlib.Path):
  with pytest.raises(ModuleNotFoundError, match="got no package xllamacpp.*launch/peers.sh"):
    llama_cpp.Model(tmp_path / "none", num_sequences=1, context=8, num_threads=1)


@needs_llama
def test_a_file_that_is_no_model_is_refused(tmp_path: pathlib.Path):
  (tmp_path / "none.gguf").write_text("no")
  with pytest.raises(ValueError, match="got a file that llama.cpp does not load"):
    llama_cpp.Model(tmp_path / "none.gguf", num_sequences=1, context=8, num_threads=1)


@needs_llama
@pytest.mark.thorough
def test_it_computes_the_model_that_we_compute(tmp_path: pathlib.Path):
  policy, numerics = generate.load("nano")
  prompts = [generate.prompt_tokens(policy, f"What is {n} plus {n + 3}?") for n in (2, 11, 40)]
  engine = engine_lib.Engine(
    Model(policy.model, parameters.compute_params(policy.params, numerics), numerics),
    config=engine_lib.EngineConfig(
      page_size=32, num_pages=33, max_num_seqs=4, max_model_len=256, batch_size_buckets=(8, 128)
    ),
    key=numerics_lib.key(0),
  )
  sampling = SamplingParams(temperature=0.0, max_tokens=24)
  ours = engine.generate(
    [Request(request_id=str(i), prompt=p, sampling=sampling) for i, p in enumerate(prompts)]
  )
  ours = sorted(ours, key=lambda completion: completion.request_id)
  peer_models.write_gguf("nano", tmp_path / "nano.gguf")
  model = llama_cpp.Model(
    tmp_path / "nano.gguf", num_sequences=3, context=256, num_threads=1, flash=False, kv="f32"
  )
  theirs = llama_cpp.answer(model, prompts, np.full((3, 1), 24), None)
  assert theirs == [list(completion.tokens) for completion in ours]
  model.forget()
  for stream, (prompt, completion) in enumerate(zip(prompts, ours, strict=True)):
    logits = llama_cpp.prefill(model, prompt, stream).astype(np.float64)
    logprob = logits[completion.tokens[0]] - np.logaddexp.reduce(logits)
    np.testing.assert_allclose(logprob, completion.raw_logprobs[0], atol=1e-4)
  model.close()
