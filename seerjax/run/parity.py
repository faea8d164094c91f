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
from seerjax.run import routes as routes_lib, transformers_side
from seerjax.types import Request, SamplingParams

NUM_TOKENS = 64  # Greedy tokens of each prompt.
MARGIN = 1e-5  # Least difference of two probabilities that decides which expert is chosen.
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
    routes: sets of experts that are compared; None for a model without experts.
  """

  logit_gap: float
  num_equal: int
  num_tokens: int
  routes: Routes | None = None

  def __str__(self) -> str:
    line = (
      f"logits differ by at most {self.logit_gap:.1e} of the largest, {self.num_equal} of"
      f" {self.num_tokens} greedy tokens are equal"
    )
    return line if self.routes is None else f"{line}, {self.routes}"


class Routes(NamedTuple):
  """Sets of experts of tokens in layers, compared with those of `transformers`.

  Attributes:
    num_equal: equal sets.
    num_compared: sets that are compared.
    num_close: sets that are left out, as the last chosen and the first other expert have
      probabilities that differ by less than `MARGIN` in `transformers`.
  """

  num_equal: int
  num_compared: int
  num_close: int

  def __str__(self) -> str:
    share = 100 * self.num_equal / max(self.num_compared, 1)
    return (
      f"{share:.2f} % of {self.num_compared:,} sets of experts are equal ({self.num_close:,} with a"
      f" margin below {MARGIN:g} are left out)"
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
  found = Finding(float(max(gaps)), num_equal, NUM_TOKENS * len(prompts))
  if not model.config.routings:
    return found
  return found._replace(routes=compare_routes(model, prompts, theirs))


def compare_routes(
  model: Model, prompts: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> Routes:
  """Compares sets of experts with those of `transformers`.

  Args:
    model: the model.
    prompts: i64[t] ids of each prompt.
    theirs: f32[l, t, E] of each prompt, logits of the routers, under its name and ".routers".
  """
  answers = _padded(prompts)
  ours = routes_lib.whole_routes(model.params, answers.tokens, model.decoder)
  rules = list(model.config.routings.values())
  num_equal = num_compared = num_close = 0
  for place, (name, ids) in enumerate(prompts.items()):
    for layer, rule in enumerate(rules):
      logits = theirs[f"{name}.routers"][layer].astype(np.float64)
      scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
      order = np.argsort(-scores, axis=-1, kind="stable")
      expected = np.sort(order[:, : rule.num_chosen], axis=-1)
      is_clear = np.ones(len(ids), bool)
      if rule.num_chosen < rule.num_experts:
        ranked = np.take_along_axis(scores / scores.sum(axis=-1, keepdims=True), order, axis=-1)
        is_clear = ranked[:, rule.num_chosen - 1] - ranked[:, rule.num_chosen] >= MARGIN
      is_equal = np.all(ours[layer, place, : len(ids)] == expected, axis=-1)
      num_equal += int(np.sum(is_equal & is_clear))
      num_compared += int(np.sum(is_clear))
      num_close += int(np.sum(~is_clear))
  return Routes(num_equal, num_compared, num_close)


def route_disagreements(model: Model) -> str:
  """Returns how many routes of the engine differ from the trainer's, as one line."""
  answers = _padded(_prompts(model))
  batched = routes_lib.compare(model.params, answers, model.decoder)
  alone = routes_lib.compare_alone(model.params, answers, model.decoder)
  return (
    f"{batched.num_differing} of {batched.num_routes:,} sets of experts differ between decoding in"
    f" a batch and the trainer's pass, {alone.num_differing} between decoding alone and that pass"
    " (expected: 0)"
  )


def _padded(prompts: Mapping[str, np.ndarray]) -> routes_lib.Answers:
  longest = max(map(len, prompts.values()))
  tokens = [np.pad(ids, (0, longest - len(ids))) for ids in prompts.values()]
  return routes_lib.Answers(
    np.stack(tokens).astype(np.int32), np.asarray([len(ids) for ids in prompts.values()])
  )


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
