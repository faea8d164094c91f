"""What `experiments.serving` asks: prompts, lengths, seeds, and the body that each server takes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import random
from typing import Any, NamedTuple

import numpy as np

from experiments import engine_throughput

CONTEXT = 768  # Positions of a prompt and its answer.
NO_END = -1e6  # A bias that no token survives.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What is asked.

  Attributes:
    model: "nano" or a Hugging Face directory.
    askings: of the question of part (a).
    requests_per_client: of part (b); 8 together at least.
    max_tokens: the longest answer.
    seed: of all that is drawn.
    num_threads: of llama.cpp.
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
    text: the same, as text.
    max_tokens: of the answer.
    temperature: 0 is greedy.
    seed: of its noise.
  """

  prompt: tuple[int, ...]
  text: str
  max_tokens: int
  temperature: float
  seed: int


def prompts(settings: Settings, count: int) -> list[tuple[tuple[int, ...], str]]:
  """Returns prompts as ids and as text: word problems as user turns."""
  from seerjax.models import loading, tokenizer as tokenizer_lib

  workload = engine_throughput.Workload(
    model=settings.model, num_prompts=count, seed=settings.seed
  )
  tokenizer = tokenizer_lib.load(loading.path_of(settings.model))
  found = [tuple(ids) for ids in engine_throughput.prompts(workload)]
  return [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in found]


def timed_questions(settings: Settings, clients: int) -> list[Question]:
  """Returns what so many clients ask."""
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
  """Returns a request's body, as each server is asked for the same.

  Args:
    kind: of the peer.
    question: what is asked.
    model: "nano" or a Hugging Face directory.
    is_streamed: whether the answer comes in pieces.
    is_forced: whether the answer has its length, and no log-probabilities are asked for; else it
      ends as it likes, and they are.
    ends: ids that end an answer.
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
    # No filter: what it does by default it need not do here.
    fields |= dict(
      prompt=question.prompt, top_k=0, top_p=1, min_p=0, samplers=["temperature"],
      ignore_eos=is_forced,
    )  # fmt: skip
    if not is_forced:
      fields["logprobs"] = 1
  else:  # It takes text alone, and how to sample from a configuration of its own.
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
  """Returns the question, and those that are asked beside it."""
  found = prompts(settings, 65)
  rng = random.Random(settings.seed)
  others = [
    Question(ids, text, rng.randint(4, 96), rng.choice((0.0, 0.7, 1.0)), 0)
    for ids, text in found[1:]
  ]
  ids, text = found[0]
  return Question(ids, text, 48, temperature, 7), others
