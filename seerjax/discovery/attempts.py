"""Interface between the discovery loop and a policy: requests, sequences and attempts.

  artefact --ask--> requests of a group --answers--> sequences --attempts--> verdicts

Two policies implement `Writer`: `edit_policy.EditPolicy` and `program_policy.ProgramPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seerjax import fields
from seerjax.discovery.environment import Artefact, Score
from seerjax.rollout import groups
from seerjax.rollout.journal import Journal
from seerjax.types import (
  Completion,
  Problem,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  Verdict,
)

Generate = Callable[[Sequence[Request]], Iterable[Completion]]

# Placeholder: sequences are trained on the score of their attempt, not on a verdict of their own.
UNJUDGED = Verdict(reward=0.0, correct=False, well_formed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """Outcome of one text of a model.

  Attributes:
    artefact: valid plain data; None if the attempt failed.
    score: the environment's score of the artefact; invalid, with a reason, if the attempt failed.
    status: "ok"; "malformed" (no program to run), "invalid" (no valid artefact returned), or a
      failure as in `sandbox.Outcome.status`.
    message: why there is no program to run, or the end of the program's output, errors last.
    cpu_seconds: CPU time of the program; 0 if none ran.
  """

  artefact: Artefact | None
  score: Score
  status: str
  message: str = ""
  cpu_seconds: float = 0.0

  def __post_init__(self):
    fields.check(self)
    if len({self.status == "ok", self.score.is_valid, self.artefact is not None}) > 1:
      raise ValueError(
        f"Attempt: got status={self.status!r}, is_valid={self.score.is_valid} and"
        f" {'no' if self.artefact is None else 'an'} artefact, expected a valid artefact exactly"
        " where the status is 'ok'; change the three together."
      )


def to_record(attempt: Attempt) -> dict[str, Any]:
  """Returns an attempt as JSON; inverted by `from_record`."""
  score = dataclasses.asdict(attempt.score)
  if not attempt.score.is_valid:
    del score["value"]  # JSON has no NaN.
  return dataclasses.asdict(attempt) | {"score": score}


def from_record(record: Mapping[str, Any]) -> Attempt:
  """Returns the attempt of a `to_record` record."""
  score = Score(**{"value": math.nan} | record["score"])
  return Attempt(**{**record, "score": score})


class SampledSequence(NamedTuple):
  """A request and its completion; the unit of training."""

  request: Request
  completion: Completion


class Job(NamedTuple):
  """An attempt to make: the artefact it starts from, and the sampled sequences."""

  artefact: Artefact
  sequences: tuple[SampledSequence, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Sampling settings of the groups.

  Attributes:
    size: members of a group.
    temperature: sampling temperature.
    seed: seed of the run.
  """

  size: int
  temperature: float
  seed: int

  def request(
    self, prompt: tuple[int, ...], sampling: SamplingParams, step: int, group: int, member: int
  ) -> Request:
    """Returns a member's request; its id and seed depend only on step, group and member."""
    return Request(
      request_id=f"{step}/{group}/{member}",
      prompt=prompt,
      sampling=sampling,
      seed=groups.request_seed(self.seed, step, group, member),
      group_id=f"{step}/{group}",
    )


@runtime_checkable
class Writer(Protocol):
  """The part of a policy other than its weights."""

  def check(self, artefact: Artefact) -> None:
    """Checks that a start fits the context, before anything is sampled.

    Raises:
      ValueError: if the context is too short.
    """
    ...

  def ask(self, artefact: Artefact, step: int, group: int, *, printed: str = "") -> list[Request]:
    """Returns a group's requests, by member; ids and seeds depend only on their position.

    Args:
      artefact: valid artefact that the group starts from.
      step: step of the run.
      group: index of the group in the step.
      printed: output of the program that made the artefact.
    """
    ...

  def answers(
    self, generate: Generate, requests: Sequence[Request]
  ) -> list[tuple[SampledSequence, ...]]:
    """Samples the requests; returns the sequences for each, in order: one or more."""
    ...

  def attempts(self, jobs: Sequence[Job], journal: Journal | None = None) -> list[Attempt]:
    """Makes the attempts, in the order of the jobs.

    Args:
      jobs: attempts to make.
      journal: stores attempts that are expensive to make; stored ones are not made again.
    """
    ...

  @property
  def cpu_seconds(self) -> float:
    """CPU seconds of attempts so far, in all processes except a verifier's helpers."""
    ...

  @property
  def worker_seconds(self) -> float:
    """The part of `cpu_seconds` spent in other processes."""
    ...


class Sampled(NamedTuple):
  """Attempts of a step, by group, then by member.

  Attributes:
    starts: for each group, the id of the state it started from.
    start_rewards: rewards of these states.
    sequences: for each attempt, its sequences.
    attempts: the attempts; empty before `ttt.judge`.
  """

  starts: tuple[int, ...]
  start_rewards: tuple[float, ...]
  sequences: list[list[tuple[SampledSequence, ...]]]
  attempts: Sequence[Sequence[Attempt]] = ()


def sequences(sampled: Sampled) -> list[SampledSequence]:
  """Returns all sequences of a step, by group, then by member."""
  return [one for group in sampled.sequences for sequences in group for one in sequences]


def as_groups(sampled: Sequence[SampledSequence]) -> list[RolloutGroup]:
  """Returns sequences as groups of one, for training with precomputed advantages."""
  return [
    RolloutGroup(
      group_index=index,
      problem=Problem(problem_id=request.request_id, prompt=""),
      rollouts=(Rollout(request=request, completion=completion, verdict=UNJUDGED),),
    )
    for index, (request, completion) in enumerate(sampled)
  ]


def in_order(generate: Generate, requests: Sequence[Request]) -> list[SampledSequence]:
  """Samples requests; returns each with its completion, in the order of the requests."""
  completions = {completion.request_id: completion for completion in generate(requests)}
  return [SampledSequence(request, completions[request.request_id]) for request in requests]
