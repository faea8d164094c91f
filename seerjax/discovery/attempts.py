"""What is asked of a policy, what it answers, and what comes of it.

  artefact --ask--> requests of a group --answers--> sequences --attempts--> verdicts

Two policies keep this contract (`Writer`): `edit_policy.EditPolicy` and
`program_policy.ProgramPolicy`.
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

# Sequences are learnt from by their attempt's score; verdicts of their own have no say.
UNJUDGED = Verdict(reward=0.0, correct=False, well_formed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """What came of one text of a model.

  Attributes:
    artefact: plain data, valid; None if there is none.
    score: of the artefact, by the environment; invalid with a reason if there is none.
    status: "ok"; "malformed" (no program to run), "invalid" (it returned no answer), or how it
      failed, as `sandbox.Outcome.status` has it.
    message: why there is no program to run, or the end of what it printed (its errors last).
    cpu_seconds: that the program used; 0 if none ran.
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
  """Returns an attempt as JSON; `from_record` gives back an equal one."""
  score = dataclasses.asdict(attempt.score)
  if not attempt.score.is_valid:
    del score["value"]  # NaN is no JSON.
  return dataclasses.asdict(attempt) | {"score": score}


def from_record(record: Mapping[str, Any]) -> Attempt:
  """Returns the attempt that `to_record` was given."""
  score = Score(**{"value": math.nan} | record["score"])
  return Attempt(**{**record, "score": score})


class SampledSequence(NamedTuple):
  """One request and its completion: a sequence that is learnt from."""

  request: Request
  completion: Completion


class Job(NamedTuple):
  """An attempt that is to be made of what was sampled: where it started, and its sequences."""

  artefact: Artefact
  sequences: tuple[SampledSequence, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """How a group is asked.

  Attributes:
    size: members.
    temperature: of sampling.
    seed: of the run.
  """

  size: int
  temperature: float
  seed: int

  def request(
    self, prompt: tuple[int, ...], sampling: SamplingParams, step: int, group: int, member: int
  ) -> Request:
    """Returns a member's request; its name and its noise follow from its place alone."""
    return Request(
      request_id=f"{step}/{group}/{member}",
      prompt=prompt,
      sampling=sampling,
      seed=groups.request_seed(self.seed, step, group, member),
      group_id=f"{step}/{group}",
    )


@runtime_checkable
class Writer(Protocol):
  """What the loop asks of a policy besides its weights."""

  def check(self, artefact: Artefact) -> None:
    """Refuses a start that cannot be asked about, before anything is sampled.

    Raises:
      ValueError: if the context is too short for it.
    """
    ...

  def ask(
    self, artefact: Artefact, step: int, group: int, *, printed: str = ""
  ) -> list[Request]:
    """Returns a group's requests, by member; names and seeds follow from their place alone.

    Args:
      artefact: valid, from which the group starts.
      step: of the run.
      group: of the step.
      printed: by the program that made the artefact.
    """
    ...

  def answers(
    self, generate: Generate, requests: Sequence[Request]
  ) -> list[tuple[SampledSequence, ...]]:
    """Returns what answers each request, in their order: one sequence or more."""
    ...

  def attempts(self, jobs: Sequence[Job], journal: Journal | None = None) -> list[Attempt]:
    """Returns what comes of each job, in their order.

    Args:
      jobs: to be made.
      journal: keeps what is dear to make; what it holds is not made again.
    """
    ...

  @property
  def cpu_seconds(self) -> float:
    """CPU seconds of attempts so far, in whatever process but a verifier's helpers."""
    ...

  @property
  def worker_seconds(self) -> float:
    """Those of them that other processes spent."""
    ...


class Sampled(NamedTuple):
  """A step's attempts by group, then by member.

  Attributes:
    starts: for each group, the state it started from.
    start_rewards: and what that state was worth.
    sequences: for each attempt, the sequences of which it was made.
    attempts: and what came of it; empty before `ttt.judge`.
  """

  starts: tuple[int, ...]
  start_rewards: tuple[float, ...]
  sequences: list[list[tuple[SampledSequence, ...]]]
  attempts: Sequence[Sequence[Attempt]] = ()


def sequences(sampled: Sampled) -> list[SampledSequence]:
  """Returns all sequences of a step, by group, then by member."""
  return [one for group in sampled.sequences for sequences in group for one in sequences]


def as_groups(sampled: Sequence[SampledSequence]) -> list[RolloutGroup]:
  """Returns sequences as groups of one, whose advantages are known already."""
  return [
    RolloutGroup(
      group_index=index,
      problem=Problem(problem_id=request.request_id, prompt=""),
      rollouts=(Rollout(request=request, completion=completion, verdict=UNJUDGED),),
    )
    for index, (request, completion) in enumerate(sampled)
  ]


def in_order(generate: Generate, requests: Sequence[Request]) -> list[SampledSequence]:
  """Returns each request with its completion, in the order of the requests."""
  completions = {completion.request_id: completion for completion in generate(requests)}
  return [SampledSequence(request, completions[request.request_id]) for request in requests]
