"""Policy of a language model that writes programs, which run in a sandbox.

A model that exhausts its thinking budget is forced to answer by a second request, the prompt of
which has the reasoning so far and a notice: forced tokens are prompt, and get no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading

from seerjax.discovery import (
  attempts as attempts_lib,
  environment as environment_lib,
  programs,
)
from seerjax.discovery.attempts import Attempt, Generate, SampledSequence
from seerjax.discovery.config import ProgramConfig
from seerjax.discovery.environment import Artefact, Environment
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import groups
from seerjax.rollout.journal import Journal
from seerjax.sandbox import pool as pool_lib, sandbox as sandbox_lib
from seerjax.types import (
  Completion,
  Request,
  SamplingParams,
)

MIN_DESCRIPTION = 200  # Characters of a problem's description that must fit the context.


class ProgramPolicy:
  """Runs a language model's programs in a sandbox. A context manager that ends its workers."""

  def __init__(
    self,
    environment: Environment,
    group: attempts_lib.Group,
    config: ProgramConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_model_len: int,
  ):
    """Initialises the policy.

    Raises:
      ValueError: if the sandbox cannot isolate programs and `allow_weak_sandbox` is off.
    """
    self._environment, self._group, self._config = environment, group, config
    self._tokenizer, self._max_model_len = tokenizer, max_model_len
    self.sandbox = sandbox_lib.Sandbox(allow_weak=config.allow_weak_sandbox)
    self._pool = pool_lib.Pool(config.num_workers, 2 * config.num_workers)
    # Tokens besides the question. Forced text is longest for a completion without the marker.
    forced = programs.forced_answer_text("", answer_marker=config.answer_marker)
    self._reserved = (
      config.thinking_tokens
      + len(tokenizer.encode(forced))
      + config.answer_tokens
      + programs.SPARE_TOKENS
    )
    # More time than a program's `seconds` argument, for starting and returning a result.
    self._limits = sandbox_lib.Limits(
      wall_seconds=1.5 * config.seconds + 5,
      cpu_seconds=1.5 * config.seconds + 5,
      memory_bytes=config.memory_mib * 2**20,
    )
    self.cpu_seconds = 0.0

  def check(self, artefact: Artefact) -> None:
    """Implements `Writer`; always requires room for `MIN_DESCRIPTION` characters."""
    text = environment_lib.described(self._environment, artefact)
    text = programs.shortened(text * (1 + MIN_DESCRIPTION // max(len(text), 1)), MIN_DESCRIPTION)
    num = len(self._question(text))
    if num + self._reserved > self._max_model_len:
      raise ValueError(
        f"ProgramConfig: got a context of {self._max_model_len} tokens, expected at least"
        f" {num + self._reserved}: {num} for a short question, {self._config.thinking_tokens} for"
        f" thinking, {self._config.answer_tokens} for the answer, and a reserve; raise"
        " --config.engine.max_model_len (if the model has more), or lower"
        " --config.programs.thinking_tokens and --config.programs.answer_tokens."
      )

  def ask(self, artefact: Artefact, step: int, group: int, *, printed: str = "") -> list[Request]:
    """Implements `Writer`; a description that is too long for the context is shortened."""
    text = environment_lib.described(self._environment, artefact)
    if printed:
      text += f"\n\nThe end of what the program that made it printed:\n\n{printed}"
    kept, most = len(text), self._max_model_len - self._reserved
    prompt = self._question(text)
    while len(prompt) > most and kept:
      # Tokens per character vary: cut a little more than proportionally, until it fits.
      kept = max(0, min(kept * 7 // 8, kept * most // len(prompt)))
      prompt = self._question(programs.shortened(text, kept) if kept else "")
    sampling = self._sampling(self._config.thinking_tokens)
    return [
      self._group.request(prompt, sampling, step, group, member)
      for member in range(self._group.size)
    ]

  def _question(self, text: str) -> tuple[int, ...]:
    """Returns the prompt tokens for a description with the answer format."""
    question = f"{text}\n\n{programs.instructions()}"
    return tuple(self._tokenizer.chat_ids([{"role": "user", "content": question}]))

  def _sampling(self, max_tokens: int) -> SamplingParams:
    return SamplingParams(
      temperature=self._group.temperature,
      max_tokens=max_tokens,
      stop_token_ids=tuple(self._tokenizer.eos_ids),
    )

  def answers(
    self, generate: Generate, requests: Sequence[Request]
  ) -> list[tuple[SampledSequence, ...]]:
    """Implements `Writer`."""
    first = attempts_lib.in_order(generate, requests)
    again: dict[int, Request] = {}
    for place, (request, completion) in enumerate(first):
      if self._needs_answer(completion):
        again[place] = self._second(request, completion)
    second = dict(zip(again, attempts_lib.in_order(generate, list(again.values()))))
    return [
      (sequence, second[place]) if place in second else (sequence,)
      for place, sequence in enumerate(first)
    ]

  def _needs_answer(self, completion: Completion) -> bool:
    return programs.needs_answer(
      len(completion.tokens),
      self._config.thinking_tokens,
      completion.text,
      answer_marker=self._config.answer_marker,
    )

  def _second(self, request: Request, completion: Completion) -> Request:
    """Returns the request that forces an answer; its prompt has everything so far."""
    forced = programs.forced_answer_text(completion.text, answer_marker=self._config.answer_marker)
    prompt = (*request.prompt, *completion.tokens, *self._tokenizer.encode(forced))
    room = programs.answer_budget(self._max_model_len, len(prompt))
    step, group, member = groups.place_of(request.request_id)
    sampling = self._sampling(min(room, self._config.answer_tokens))
    # A member number beyond the group gives a distinct id and seed.
    return self._group.request(prompt, sampling, step, group, member + self._group.size)

  def attempts(
    self, jobs: Sequence[attempts_lib.Job], journal: Journal | None = None
  ) -> list[Attempt]:
    """Implements `Writer`."""
    places = [groups.place_of(job.sequences[0].request.request_id) for job in jobs]
    found: dict[int, Attempt] = {}
    for i, place in enumerate(places):
      record = None if journal is None else journal.attempt(*place)
      if record is not None:
        found[i] = attempts_lib.from_record(record)
    writing = threading.Lock()  # One thread of the pool writes at a time.

    def make(i: int) -> Attempt:
      made = self._attempt(jobs[i])
      if journal is not None:
        with writing:
          journal.append_attempt(*places[i], attempts_lib.to_record(made))
      return made

    running = {i: self._pool.submit(make, i) for i in range(len(jobs)) if i not in found}
    made = {i: one.result() for i, one in running.items()}
    self.cpu_seconds += sum(one.cpu_seconds for one in made.values())
    return [found[i] if i in found else made[i] for i in range(len(jobs))]

  @property
  def worker_seconds(self) -> float:
    """Equal to `cpu_seconds`, because programs run in separate processes."""
    return self.cpu_seconds

  def _attempt(self, job: attempts_lib.Job) -> Attempt:
    return programs.attempt(
      self.sandbox,
      self._environment,
      job.artefact,
      "".join(sequence.completion.text for sequence in job.sequences),
      seconds=self._config.seconds,
      seed=job.sequences[0].request.seed,
      limits=self._limits,
    )

  def __enter__(self) -> ProgramPolicy:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.close()
    self.sandbox.close()
