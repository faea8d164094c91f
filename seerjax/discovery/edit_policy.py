"""Policy of a small transformer that writes sentences of the environment's edit language.

The grammar is a mask of token ids for each position in a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from seerjax import types
from seerjax.discovery import (
  attempts as attempts_lib,
  edits,
)
from seerjax.discovery.attempts import Attempt, Generate, SampledSequence
from seerjax.discovery.environment import Artefact, Environment
from seerjax.rollout.journal import Journal
from seerjax.types import (
  Request,
  SamplingParams,
)


class EditPolicy:
  """Samples sentences of the edit language; `edits.Judge` applies and judges them.

  A context manager; leaving it ends the judge's workers.
  """

  def __init__(
    self,
    environment: Environment,
    group: attempts_lib.Group,
    judge: edits.Judge,
    max_model_len: int,
  ):
    """Initialises the policy; `judge` has already required an edit language."""
    assert environment.language is not None
    self._language, self._group, self._judge = environment.language, group, judge
    self._max_prompt = max_model_len - len(self._language.allowed)
    self._sampling = SamplingParams(
      temperature=group.temperature,
      allowed_token_ranges=tuple(self._language.allowed),
      max_tokens=len(self._language.allowed),
      stop_token_ids=() if self._language.stop_token is None else (self._language.stop_token,),
    )

  def check(self, artefact: Artefact) -> None:
    """Implements `Writer`; a start must fit as a whole."""
    num = len(self._language.prompt(types.copied(artefact)))
    if num > self._max_prompt:
      raise ValueError(
        f"EditLanguage: got a prompt of {num} ids and sentences of {len(self._language.allowed)},"
        f" expected a prompt of at most {self._max_prompt} within the context; raise"
        " --config.engine.max_model_len, or shorten the language's prompt."
      )

  def ask(self, artefact: Artefact, step: int, group: int, *, printed: str = "") -> list[Request]:
    """Implements `Writer`; `printed` is unused, because no program made the artefact."""
    del printed
    return [self.request(artefact, step, group, member) for member in range(self._group.size)]

  def request(self, artefact: Artefact, step: int, group: int, member: int) -> Request:
    """Returns the request of one member."""
    prompt = tuple(self._language.prompt(types.copied(artefact)))[: self._max_prompt]
    return self._group.request(prompt, self._sampling, step, group, member)

  def answers(
    self, generate: Generate, requests: Sequence[Request]
  ) -> list[tuple[SampledSequence, ...]]:
    """Implements `Writer`."""
    return [(sequence,) for sequence in attempts_lib.in_order(generate, requests)]

  def attempts(
    self, jobs: Sequence[attempts_lib.Job], journal: Journal | None = None
  ) -> list[Attempt]:
    """Implements `Writer`; the journal is unused: applying edits again is faster."""
    del journal
    return self._judge.attempts(
      [
        edits.Job(job.artefact, job.sequences[0].completion.tokens, job.sequences[0].request.seed)
        for job in jobs
      ]
    )

  @property
  def cpu_seconds(self) -> float:
    """CPU seconds of attempts so far, in all processes."""
    return self._judge.cpu_seconds

  @property
  def worker_seconds(self) -> float:
    """The part of `cpu_seconds` spent in other processes."""
    return self._judge.worker_seconds

  def __enter__(self) -> EditPolicy:
    return self

  def __exit__(self, *_: object) -> None:
    self._judge.__exit__()
