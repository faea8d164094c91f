"""Compares a model with `transformers`, and computes its perplexity on a text.

`transformers` runs in a process of its own, by whichever Python has it (`transformers_side`), so a
check needs neither torch in this process nor this library in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import importlib.util
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from seerjax.engine import engine as engine_lib
from seerjax.models import flax_module, parameters
from seerjax.models.decoder import Decoder
from seerjax.models.loading import Model
from seerjax.run import transformers_side
from seerjax.types import Request, SamplingParams

NUM_TOKENS = 64  # Greedy tokens of each prompt.
WINDOW = 512  # Tokens of a text that see one another.
TEXTS = (
  "The capital of France is",
  "def fibonacci(n):\n",
  "Once upon a time, in 1984, there was a",
  "12 + 30 = 42, and 7 * 6 =",
)


class Finding(NamedTuple):
  """Result of a comparison with `transformers`.

  Attributes:
    logit_gap: largest difference of two logits, relative to the largest logit.
    num_equal: greedy tokens that are equal up to the first difference, over all prompts.
    num_tokens: greedy tokens of all prompts.
  """

  logit_gap: float
  num_equal: int
  num_tokens: int

  def __str__(self) -> str:
    return (
      f"logits differ by at most {self.logit_gap:.1e} of the largest, {self.num_equal} of"
      f" {self.num_tokens} greedy tokens are equal"
    )


def has_transformers() -> bool:
  """Returns whether this Python has transformers and torch."""
  return all(importlib.util.find_spec(name) for name in ("transformers", "torch"))


def compare(model: Model, directory: str | os.PathLike[str], python: str = "") -> Finding:
  """Compares logits and greedy answers with those of `transformers`, both in float32.

  Args:
    model: the model in float32, loaded from `directory`.
    directory: a Hugging Face directory.
    python: interpreter that has transformers and torch; "" is this one.

  Raises:
    ValueError: with the output of the other process, if it failed.
  """
  prompts = _prompts(model)
  theirs = _their_answers(directory, prompts, python or sys.executable)
  gaps, num_equal = [], 0
  ours = _logits(model, prompts)
  for name, answer in _greedy(model, prompts).items():
    expected = theirs[f"{name}.logits"]
    gaps.append(np.max(np.abs(ours[name] - expected)) / np.max(np.abs(expected)))
    is_equal = np.asarray(answer) == theirs[f"{name}.tokens"]
    num_equal += len(answer) if is_equal.all() else int(np.argmin(is_equal))
  return Finding(float(max(gaps)), num_equal, NUM_TOKENS * len(prompts))


def perplexity(model: Model, text: str) -> tuple[float, int]:
  """Returns the perplexity of a text and how many of its tokens were scored.

  The text is cut into windows of `WINDOW` tokens; the first token of each is not scored.

  Raises:
    ValueError: if the text has less than two tokens.
  """
  assert model.tokenizer is not None, "a model directory has a tokenizer"
  tokens = np.asarray(model.tokenizer.encode(text), np.int32)
  if len(tokens) < 2:
    raise ValueError(
      f"perplexity: got a text of {len(tokens)} tokens, expected at least 2; pass a longer file."
    )
  width = min(WINDOW, model.config.max_model_len)
  total, count = 0.0, 0
  program = jax.jit(functools.partial(_logprobs, decoder=model.decoder))
  for first in range(0, len(tokens), width):
    window = tokens[first : first + width]
    padded = np.pad(window, (0, width - len(window)))[None]
    found = np.asarray(program(model.params, padded), np.float64)[: len(window) - 1]
    total, count = total + found.sum(), count + len(found)
  return math.exp(-total / count), count


def _logprobs(
  params: parameters.Params, tokens: Int[Array, "b t"], *, decoder: Decoder
) -> Float[Array, " u"]:
  """Returns f32[u], log-probabilities of all tokens but the first, of one sequence of i32[1, t]."""
  logits = flax_module.logits_of(params, tokens, decoder=decoder)[0, :-1]
  every = jax.nn.log_softmax(logits.astype(jnp.float32))
  return jnp.take_along_axis(every, tokens[0, 1:, None], axis=1)[:, 0]


def _prompts(model: Model) -> dict[str, np.ndarray]:
  """Returns i64[t] ids of each text, short enough for the model's context."""
  assert model.tokenizer is not None, "a model directory has a tokenizer"
  longest = max(1, model.config.max_model_len - NUM_TOKENS - 1)
  encoded = [model.tokenizer.encode(text)[:longest] for text in TEXTS]
  return {f"prompt{index}": np.asarray(ids, np.int64) for index, ids in enumerate(encoded)}


def _their_answers(
  directory: str | os.PathLike[str], prompts: Mapping[str, np.ndarray], python: str
) -> dict[str, np.ndarray]:
  with tempfile.TemporaryDirectory() as work:
    questions, answers = pathlib.Path(work, "questions.npz"), pathlib.Path(work, "answers.npz")
    np.savez(questions, allow_pickle=False, **prompts)
    done = subprocess.run(
      [
        python, "-P", transformers_side.__file__, os.fspath(directory), str(questions),
        str(answers), str(NUM_TOKENS),
      ],
      capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
      raise ValueError(
        f"transformers on {directory}: got exit status {done.returncode}, expected 0; its last"
        f" lines: {done.stderr.strip()[-1500:]}"
      )
    with np.load(answers) as found:
      return dict(found)


def _logits(model: Model, prompts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns f32[t, v] of each prompt."""
  longest = max(map(len, prompts.values()))
  padded = np.stack([np.pad(ids, (0, longest - len(ids))) for ids in prompts.values()])
  program = jax.jit(functools.partial(flax_module.logits_of, decoder=model.decoder))
  found = np.asarray(program(model.params, padded.astype(np.int32)), np.float32)
  return {name: rows[: len(prompts[name])] for name, rows in zip(prompts, found, strict=True)}


def _greedy(model: Model, prompts: Mapping[str, np.ndarray]) -> dict[str, Sequence[int]]:
  """Returns the greedy tokens of each prompt, by the engine."""
  context = max(map(len, prompts.values())) + NUM_TOKENS
  engine = engine_lib.Engine(
    model,
    config=engine_lib.EngineConfig(
      max_model_len=min(context, model.config.max_model_len), max_num_seqs=len(prompts)
    ),
  )
  sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
  requests = [
    Request(request_id=name, prompt=tuple(ids.tolist()), sampling=sampling)
    for name, ids in prompts.items()
  ]
  return {one.request_id: one.tokens for one in engine.generate(requests)}
