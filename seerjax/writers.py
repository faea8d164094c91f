"""Two kinds of policy, one contract: who writes edits, and who writes programs.

  artefact --ask--> requests of a group --answers--> what was said --attempts--> verdicts

`Edits`: a small transformer says one sentence of the environment's language; the grammar is a mask
of ids by place. `Programs`: a language model thinks and writes a program, which a sandbox runs. A
model that thinks until its budget is spent is made to answer by a second request, whose prompt
holds what it thought and a notice: forced tokens are prompt, and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
import threading
from typing import NamedTuple, Protocol, runtime_checkable

from seerjax.discovery import edits, programs
from seerjax.discovery.environment import Artefact, Environment
from seerjax.discovery.programs import Attempt
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import groups
from seerjax.rollout.journal import Journal
from seerjax.sandbox import pool as pool_lib, sandbox as sandbox_lib
from seerjax.types import Completion, Request, SamplingParams

MIN_DESCRIPTION = 200  # Characters of a problem's description that a context must have room for.

Generate = Callable[[Sequence[Request]], Iterable[Completion]]


class Said(NamedTuple):
  """One request and its completion: a sequence that is learnt from."""

  request: Request
  completion: Completion


class Job(NamedTuple):
  """An attempt that was said and is to be made: where it started, and its sequences."""

  artefact: Artefact
  said: tuple[Said, ...]


@runtime_checkable
class Writer(Protocol):
  """What the circle asks of a policy besides its weights."""

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

  def answers(self, generate: Generate, requests: Sequence[Request]) -> list[tuple[Said, ...]]:
    """Returns what was said to each request, in their order: one sequence or more."""
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


class Edits:
  """Sentences of the environment's language, applied and judged by `edits.Judge`.

  A context manager: it ends the judge's workers.
  """

  def __init__(
    self, environment: Environment, group: Group, judge: edits.Judge, max_context: int
  ):
    """Makes a writer; `judge` has refused an environment without a language."""
    assert environment.language is not None
    self._language, self._group, self._judge = environment.language, group, judge
    self._max_prompt = max_context - len(self._language.allowed)
    self._sampling = SamplingParams(
      temperature=group.temperature,
      allowed=tuple(self._language.allowed),
      max_tokens=len(self._language.allowed),
      stop_token_ids=() if self._language.stop_token is None else (self._language.stop_token,),
    )

  def check(self, artefact: Artefact) -> None:
    """See `Writer`; a start has to be read whole."""
    num = len(self._language.prompt(artefact))
    if num > self._max_prompt:
      raise ValueError(
        f"EditLanguage: got a prompt of {num} ids and sentences of {len(self._language.allowed)},"
        f" expected a prompt of at most {self._max_prompt} within the context; raise"
        " --config.engine.max_context, or have the language's prompt say less."
      )

  def ask(
    self, artefact: Artefact, step: int, group: int, *, printed: str = ""
  ) -> list[Request]:
    """See `Writer`; no program made it."""
    del printed
    return [self.request(artefact, step, group, member) for member in range(self._group.size)]

  def request(self, artefact: Artefact, step: int, group: int, member: int) -> Request:
    """Returns the request of one member."""
    prompt = tuple(self._language.prompt(artefact))[: self._max_prompt]
    return self._group.request(prompt, self._sampling, step, group, member)

  def answers(self, generate: Generate, requests: Sequence[Request]) -> list[tuple[Said, ...]]:
    """See `Writer`."""
    return [(said,) for said in _in_order(generate, requests)]

  def attempts(self, jobs: Sequence[Job], journal: Journal | None = None) -> list[Attempt]:
    """See `Writer`; edits are applied again in less time than a disk needs."""
    del journal
    return self._judge.attempts(
      [
        edits.Job(job.artefact, job.said[0].completion.tokens, job.said[0].request.seed)
        for job in jobs
      ]
    )

  @property
  def cpu_seconds(self) -> float:
    """CPU seconds of attempts so far, in whatever process."""
    return self._judge.cpu_seconds

  @property
  def worker_seconds(self) -> float:
    """Those of them that other processes spent."""
    return self._judge.worker_seconds

  def __enter__(self) -> Edits:
    return self

  def __exit__(self, *_: object) -> None:
    self._judge.__exit__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig:
  """How programs are asked for and run.

  Attributes:
    thinking_tokens: of the first request.
    answer_tokens: of the second, for those that had not answered by then.
    answer_marker: with which this model's answer begins, such as "</think>"; "" if it has none.
    seconds: that a program is told it has.
    memory_mib: that it may take.
    num_workers: programs that run side by side.
    allow_weak_sandbox: run them even where network, files or other processes cannot be kept from
      them.
  """

  thinking_tokens: int = 512
  answer_tokens: int = 512
  answer_marker: str = ""
  seconds: float = 10.0
  memory_mib: int = 1024
  num_workers: int = 2
  allow_weak_sandbox: bool = False

  def __post_init__(self):
    for field in ("thinking_tokens", "answer_tokens", "memory_mib", "num_workers"):
      if vars(self)[field] < 1:
        raise ValueError(
          f"ProgramConfig.{field}: got {vars(self)[field]}, expected at least 1; raise it."
        )
    if not 0 < self.seconds < math.inf:
      raise ValueError(
        f"ProgramConfig.seconds: got {self.seconds}, expected a positive number; 10 is usual."
      )


class Programs:
  """Programs of a language model, run in a sandbox. A context manager: it ends its workers."""

  def __init__(
    self,
    environment: Environment,
    group: Group,
    config: ProgramConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_context: int,
  ):
    """Makes a writer.

    Raises:
      ValueError: where the sandbox cannot isolate and `allow_weak_sandbox` is off.
    """
    self._environment, self._group, self._config = environment, group, config
    self._tokenizer, self._max_context = tokenizer, max_context
    self.sandbox = sandbox_lib.Sandbox(allow_weak=config.allow_weak_sandbox)
    self._pool = pool_lib.Pool(config.num_workers, 2 * config.num_workers)
    # Beyond the question: the longest that forced tokens can be is that of a text without a marker.
    forced = programs.forced_answer_text("", answer_marker=config.answer_marker)
    self._reserved = (
      config.thinking_tokens
      + len(tokenizer.encode(forced))
      + config.answer_tokens
      + programs.SPARE_TOKENS
    )
    # Beyond what a program is told it has: to start, and to hand its result over.
    self._limits = sandbox_lib.Limits(
      wall_seconds=1.5 * config.seconds + 5,
      cpu_seconds=1.5 * config.seconds + 5,
      memory_bytes=config.memory_mib * 2**20,
    )
    self.cpu_seconds = 0.0

  def check(self, artefact: Artefact) -> None:
    """See `Writer`; there has to be room for `MIN_DESCRIPTION` characters, however few it has."""
    text = self._environment.describe(artefact, self._environment.verify(artefact))
    text = programs.shortened(text * (1 + MIN_DESCRIPTION // max(len(text), 1)), MIN_DESCRIPTION)
    num = len(self._question(text))
    if num + self._reserved > self._max_context:
      raise ValueError(
        f"ProgramConfig: got a context of {self._max_context} tokens, expected at least"
        f" {num + self._reserved}: {num} of a short question, {self._config.thinking_tokens} to"
        f" think, {self._config.answer_tokens} to answer, and some to spare; raise"
        " --config.engine.max_context (if the model has more), or lower"
        " --config.programs.thinking_tokens and --config.programs.answer_tokens."
      )

  def ask(
    self, artefact: Artefact, step: int, group: int, *, printed: str = ""
  ) -> list[Request]:
    """See `Writer`; of an artefact that is too long for the context a part is left out."""
    text = self._environment.describe(artefact, self._environment.verify(artefact))
    if printed:
      text += f"\n\nThe end of what the program that made it printed:\n\n{printed}"
    kept, most = len(text), self._max_context - self._reserved
    prompt = self._question(text)
    while len(prompt) > most and kept:
      # Tokens are longer here and shorter there: a little less than their share, until it fits.
      kept = max(0, min(kept * 7 // 8, kept * most // len(prompt)))
      prompt = self._question(programs.shortened(text, kept) if kept else "")
    sampling = self._sampling(self._config.thinking_tokens)
    return [
      self._group.request(prompt, sampling, step, group, member)
      for member in range(self._group.size)
    ]

  def _question(self, text: str) -> tuple[int, ...]:
    """Returns the tokens of a description and of how to answer."""
    said = f"{text}\n\n{programs.instructions()}"
    return tuple(self._tokenizer.chat_ids([{"role": "user", "content": said}]))

  def _sampling(self, max_tokens: int) -> SamplingParams:
    return SamplingParams(
      temperature=self._group.temperature,
      max_tokens=max_tokens,
      stop_token_ids=tuple(self._tokenizer.eos_ids),
    )

  def answers(self, generate: Generate, requests: Sequence[Request]) -> list[tuple[Said, ...]]:
    """See `Writer`."""
    first = _in_order(generate, requests)
    again: dict[int, Request] = {}
    for place, (request, completion) in enumerate(first):
      if self._needs_answer(completion):
        again[place] = self._second(request, completion)
    second = dict(zip(again, _in_order(generate, list(again.values()))))
    return [
      (said, second[place]) if place in second else (said,) for place, said in enumerate(first)
    ]

  def _needs_answer(self, completion: Completion) -> bool:
    return programs.needs_answer(
      len(completion.tokens),
      self._config.thinking_tokens,
      completion.text,
      answer_marker=self._config.answer_marker,
    )

  def _second(self, request: Request, completion: Completion) -> Request:
    """Returns the request that makes a model answer; its prompt holds all that came before."""
    forced = programs.forced_answer_text(completion.text, answer_marker=self._config.answer_marker)
    prompt = (*request.prompt, *completion.tokens, *self._tokenizer.encode(forced))
    room = programs.answer_budget(self._max_context, len(prompt))
    step, group, member = groups.place_of(request.request_id)
    sampling = self._sampling(min(room, self._config.answer_tokens))
    # A member beyond all others: its own name and its own noise.
    return self._group.request(prompt, sampling, step, group, member + self._group.size)

  def attempts(self, jobs: Sequence[Job], journal: Journal | None = None) -> list[Attempt]:
    """See `Writer`."""
    places = [groups.place_of(job.said[0].request.request_id) for job in jobs]
    found: dict[int, Attempt] = {}
    for i, place in enumerate(places):
      record = None if journal is None else journal.attempt(*place)
      if record is not None:
        found[i] = programs.from_record(record)
    writing = threading.Lock()  # Of the pool's threads one at a time.

    def make(i: int) -> Attempt:
      made = self._attempt(jobs[i])
      if journal is not None:
        with writing:
          journal.append_attempt(*places[i], programs.to_record(made))
      return made

    running = {i: self._pool.submit(make, i) for i in range(len(jobs)) if i not in found}
    made = {i: one.result() for i, one in running.items()}
    self.cpu_seconds += sum(one.cpu_seconds for one in made.values())
    return [found[i] if i in found else made[i] for i in range(len(jobs))]

  @property
  def worker_seconds(self) -> float:
    """All of them: programs run in processes of their own."""
    return self.cpu_seconds

  def _attempt(self, job: Job) -> Attempt:
    return programs.attempt(
      self.sandbox,
      self._environment,
      job.artefact,
      "".join(said.completion.text for said in job.said),
      seconds=self._config.seconds,
      seed=job.said[0].request.seed,
      limits=self._limits,
    )

  def __enter__(self) -> Programs:
    return self

  def __exit__(self, *_: object) -> None:
    self._pool.close()
    self.sandbox.close()


def _in_order(generate: Generate, requests: Sequence[Request]) -> list[Said]:
  said = {completion.request_id: completion for completion in generate(requests)}
  return [Said(request, said[request.request_id]) for request in requests]
