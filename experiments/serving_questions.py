"""Workload of `experiments.serving`: prompts, lengths, seeds, and each server's request body."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import random
from typing import Any, NamedTuple

import numpy as np

from experiments import engine_throughput

CONTEXT = 768  # Positions of prompt and completion.
NO_END = -1e6  # A bias that excludes a token.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The workload.

  Attributes:
    model: "nano" or a Hugging Face directory.
    askings: repetitions of the prompt of part (a).
    requests_per_client: requests per client in part (b), at least 8 in all.
    max_tokens: maximum length.
    seed: seed of all draws.
    num_threads: threads of llama.cpp.
  """

  model: str = "nano"
  askings: int = 1000
  requests_per_client: int = 4
  max_tokens: int = 384
  seed: int = 0
  num_threads: int = 2


class Question(NamedTuple):
  """One request.

  Attributes:
    prompt: token ids.
    text: the same as text.
    max_tokens: maximum tokens of the completion.
    temperature: 0 is greedy.
    seed: sampling seed.
  """

  prompt: tuple[int, ...]
  text: str
  max_tokens: int
  temperature: float
  seed: int


def prompts(settings: Settings, count: int) -> list[tuple[tuple[int, ...], str]]:
  """Returns prompts as ids and as text: word problems as user turns."""
  from seerjax.models import loading, tokenizer as tokenizer_lib

  workload = engine_throughput.Workload(model=settings.model, num_prompts=count, seed=settings.seed)
  tokenizer = tokenizer_lib.load(loading.path_of(settings.model))
  found = [tuple(ids) for ids in engine_throughput.prompts(workload)]
  return [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in found]


def timed_questions(settings: Settings, clients: int) -> list[Question]:
  """Returns the requests of `clients` clients."""
  count = max(8, settings.requests_per_client * clients)
  rng = np.random.default_rng([settings.seed, clients])
  lengths = np.clip(np.rint(np.exp(rng.normal(4.35, 0.88, count))), 1, settings.max_tokens)
  return [
    Question(ids, text, int(length), 1.0, seed)
    for seed, ((ids, text), length) in enumerate(
      zip(prompts(settings, count), lengths, strict=True)
    )
  ]


def body(
  kind: str,
  question: Question,
  *,
  model: str,
  is_streamed: bool,
  is_forced: bool,
  ends: Sequence[int],
) -> bytes:
  """Returns the body of an equivalent request for each kind of server.

  Args:
    kind: kind of the peer.
    question: the request.
    model: "nano" or a Hugging Face directory.
    is_streamed: whether to stream the response.
    is_forced: whether the completion has a forced length and no log-probabilities; else it may stop
      by itself and has them.
    ends: ids that end a completion.
  """
  fields: dict[str, Any] = dict(
    max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed
  )
  if is_streamed:
    fields["stream"] = True
  if kind == "ours":
    fields |= dict(prompt=question.prompt)
    if is_forced:
      fields["logit_bias"] = {str(token): NO_END for token in ends}
    else:
      fields["logprobs"] = 0
    if is_streamed:
      fields["stream_options"] = {"include_usage": True}
  elif kind == "llama.cpp":
    # Turns off the filters that llama.cpp applies by default.
    fields |= dict(
      prompt=question.prompt, top_k=0, top_p=1, min_p=0, samplers=["temperature"],
      ignore_eos=is_forced,
    )  # fmt: skip
    if not is_forced:
      fields["logprobs"] = 1
  else:  # transformers: takes only text, and sampling settings in its own configuration.
    is_sampled = question.temperature > 0
    how = dict(do_sample=is_sampled, max_new_tokens=question.max_tokens, eos_token_id=[*ends])
    if is_sampled:
      how |= dict(temperature=question.temperature, top_k=0)
    fields |= dict(
      prompt=question.text, model=directory_of(model), generation_config=json.dumps(how)
    )
  return json.dumps(fields).encode()


def directory_of(model: str) -> str:
  """Returns the directory of a model."""
  from seerjax.models import loading

  return str(loading.path_of(model))


def same_questions(settings: Settings, temperature: float) -> tuple[Question, list[Question]]:
  """Returns the repeated request of part (a), and the other requests."""
  found = prompts(settings, 65)
  rng = random.Random(settings.seed)
  others = [
    Question(ids, text, rng.randint(4, 96), rng.choice((0.0, 0.7, 1.0)), 0)
    for ids, text in found[1:]
  ]
  ids, text = found[0]
  return Question(ids, text, 48, temperature, 7), others
