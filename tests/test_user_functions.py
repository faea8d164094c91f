"""User functions may modify their arguments, or keep what they return: no bit changes.

There is one row per kind of function. Each call ruins its own copy of the arguments; the next call
receives the same arguments as the first.
"""

from __future__ import annotations

from collections.abc import Callable
import copy
import dataclasses
import json
import pathlib
import time
from typing import Any, NamedTuple

import made_rollouts
import pytest
import small_run
import tiny_problem

from seerjax import rl, types
from seerjax.discovery import attempts, edits, environment as environment_lib, starts
from seerjax.discovery.config import DiscoverConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.reports import discovery_report
from seerjax.rollout import groups
from seerjax.run import evaluation
from seerjax.sleep import thinkers
from seerjax.tasks.file_task import FileTask
from seerjax.tasks.function_task import function_task
from seerjax.types import Completion, Problem, Verdict

# A report's other fields and a ruined start are not what their annotations say.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")
NUM_CALLS = 3
TOKENIZER = tokenizer_lib.load(small_run.NANO)
MESSAGES = [
  {"role": "user", "content": "One?", "more": [1]}, {"role": "assistant", "content": "Two."},
  {"role": "user", "content": "Three?"},
]  # fmt: skip
ROW = {"messages": MESSAGES, "answer": "4", "tests": [{"in": [1, 2]}, {"in": [3]}], "level": 2}
ARTEFACT = [0, 1, 2, 0, 1, 2]


class Ruiner:
  """Records a copy of each argument, and then empties the argument."""

  def __init__(self):
    self.seen: list[Any] = []

  def __call__(self, given: Any) -> None:
    self.seen.append(copy.deepcopy(given))
    self.ruin(given)

  def ruin(self, given: Any) -> None:
    if isinstance(given, dict):
      for value in given.values():
        self.ruin(value)
      given.clear()
    elif isinstance(given, list | tuple):
      for value in given:
        self.ruin(value)
      if isinstance(given, list):
        given.clear()


class Conversations:
  """A task that returns the same conversation object every time."""

  name = "conversations"

  def __init__(self, ruin: Ruiner):
    self.ruin = ruin
    self.kept = Problem(problem_id="0", prompt="Three?", messages=tuple(copy.deepcopy(MESSAGES)))

  def num_problems(self, split: str) -> int:
    return 1

  def problem(self, split: str, index: int) -> Problem:
    return self.kept

  def verdict(self, problem: Problem, text: str) -> Verdict:
    self.ruin(problem.messages)
    return Verdict(reward=0.0, correct=False, well_formed=True)


class Row(tiny_problem.Row):
  """A digits problem that ruins its arguments."""

  def __init__(self, ruin: Ruiner):
    super().__init__()
    object.__setattr__(self, "ruin", ruin)

  def describe(self, artefact: Any, score: environment_lib.Score) -> str:
    self.ruin(artefact)
    return "Six digits."

  def verify(self, artefact: Any) -> environment_lib.Score:
    found = super().verify(artefact)
    self.ruin(artefact)
    return found

  def confirm(self, artefact: Any) -> environment_lib.Score:
    return self.verify(artefact)

  def picture(self, artefact: Any) -> Any:
    self.ruin(artefact)


class Kept(tiny_problem.Row):
  """A problem that returns the same list as every start, and keeps modifying it."""

  kept = [*ARTEFACT]

  def start(self, seed: int) -> Any:
    self.kept[0] = seed % 3
    return self.kept


class Ruined(tiny_problem.Digits):
  """A language that ruins its arguments, and returns its own objects."""

  def __init__(self, ruin: Ruiner):
    super().__init__()
    self.ruin, self.kept = ruin, []

  def prompt(self, artefact: Any) -> tuple[int, ...]:
    found = super().prompt(artefact)
    self.ruin(artefact)
    return found

  def apply(self, artefact: Any, tokens: Any, seed: int) -> Any:
    self.kept[:] = super().apply([*artefact], tokens, seed)
    self.ruin(artefact)
    return self.kept


def prompts_of(path: pathlib.Path) -> str:
  (path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
  return str(path / "rows.jsonl")


def rewarded(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  def reward(prompt: str, text: str, row: Any) -> float:
    ruin(row)
    return 1.0

  task = function_task("own", prompts_of(path), reward)
  return [groups.judge(task, task.train[0], "a").reward for _ in range(NUM_CALLS)]


def judged(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  def judge(problem: Problem, text: str) -> Verdict:
    ruin(problem.messages)
    return Verdict(reward=0.0, correct=False, well_formed=True)

  problem = Problem(problem_id="0", prompt="a", messages=tuple(copy.deepcopy(MESSAGES)))
  task = FileTask(name="own", train=(problem,), heldout=(problem,), judge=judge)
  prompts = []
  for _ in range(NUM_CALLS):
    prompts.append(groups.prompt_tokens(task.problem("train", 0), TOKENIZER))
    task.verdict(problem, "a")
  return prompts


def answered(requests: Any) -> list[Completion]:
  return [made_rollouts.completion(request.request_id, (5,), text="a") for request in requests]


def sampled(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  task = Conversations(ruin)
  found = groups.sample_groups(
    [groups.problem_of(task, "train", 0) for _ in range(2)], first_group=0, step=0,
    generate=answered, task=task, config=groups.RolloutConfig(group_size=2), tokenizer=TOKENIZER,
    seed=0, known=lambda *_: None, on_rollout=lambda *_: None,
  )  # fmt: skip
  return [(group.problem, rollout.request.prompt) for group in found for rollout in group.rollouts]


def evaluated(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  task = Conversations(ruin)
  found = [
    evaluation.first_answer(
      evaluation.EvaluationConfig(), generate=answered, task=task, tokenizer=TOKENIZER,
      max_tokens=4, seed=0,
    )
    for _ in range(NUM_CALLS)
  ]  # fmt: skip
  return [one.problem for one in found]


def posed(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  task = Conversations(ruin)
  problem = groups.problem_of(task, "train", 0)
  found = []
  for _ in range(NUM_CALLS):
    found.append(groups.prompt_tokens(problem, TOKENIZER))
    ruin.seen.append(0)
    ruin.ruin(task.kept.messages)  # The task may modify its own objects.
  return found


def verified(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  artefact = [*ARTEFACT]
  return [environment_lib.verified(Row(ruin), artefact) for _ in range(NUM_CALLS)]


def described(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  artefact = [*ARTEFACT]
  return [(environment_lib.described(Row(ruin), artefact), [*artefact]) for _ in range(NUM_CALLS)]


def confirmed(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  artefact = [*ARTEFACT]
  return [environment_lib.record_score(Row(ruin), artefact) for _ in range(NUM_CALLS)]


def pictured(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  artefact, environment = [*ARTEFACT], Row(ruin)
  rest: Any = dict.fromkeys(FOUND_REST)
  found = discovery_report.Found(environment=environment, artefact=artefact, **rest)
  for _ in range(NUM_CALLS):
    discovery_report.artefact_picture(found)
  return [artefact] * NUM_CALLS


FOUND_REST = {field.name for field in dataclasses.fields(discovery_report.Found)} - {
  "environment", "artefact"
}  # fmt: skip


def attempted(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  job = edits.Job([*ARTEFACT], (tiny_problem.WRITE, tiny_problem.FIRST_PLACE + 5, 14), 0)
  environment = dataclasses.replace(tiny_problem.Row(), language=Ruined(ruin))
  return [(edits.attempt(environment, job).artefact, [*job.artefact]) for _ in range(NUM_CALLS)]


def prompted(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  environment = dataclasses.replace(tiny_problem.Row(), language=Ruined(ruin))
  judge = edits.Judge(environment, lambda: environment)
  group = attempts.Group(size=NUM_CALLS, temperature=1.0, seed=0)
  policy = EditPolicy(environment, group, judge, 64)
  return [request.prompt for request in policy.ask([*ARTEFACT], 0, 0)]


def started(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  ruin.seen += [0] * NUM_CALLS
  config = DiscoverConfig(problem="digits", prompts_per_step=NUM_CALLS)
  environment = Kept()
  before = [starts.seed_of(config, environment, place) for place in range(NUM_CALLS)]
  again = [copy.deepcopy(one) for one in before]
  environment.start(1 + int(again[0].artefact[0]))
  assert [one.artefact for one in before] == [one.artefact for one in again]
  assert all(environment.verify(one.artefact).value == one.value for one in before)
  return [0] * NUM_CALLS


class Thinker:
  """A thinker that ruins the messages it receives."""

  def __init__(self, ruin: Ruiner):
    self.ruin = ruin

  def complete(self, messages: Any, *, max_tokens: int, temperature: float, seed: int) -> Any:
    self.ruin(messages)
    raise thinkers.NoAnswer("ruined")


def thought(ruin: Ruiner, path: pathlib.Path) -> list[Any]:
  messages = tuple(copy.deepcopy(MESSAGES))
  call = thinkers.Call(messages=messages, max_tokens=4, temperature=0.0, seed=0)
  found = []
  for _ in range(NUM_CALLS):
    found.append(call.key)
    thinkers.answer_of(Thinker(ruin), call)
  return found


class Kind(NamedTuple):
  """A kind of function: a callable that runs it `NUM_CALLS` times and returns the results."""

  name: str
  run: Callable[[Ruiner, pathlib.Path], list[Any]]


KINDS = (
  Kind("a reward pops from its row", rewarded),
  Kind("a judge of a file's task empties its messages", judged),
  Kind("a verdict empties its messages, in a step", sampled),
  Kind("a verdict empties its messages, in an evaluation", evaluated),
  Kind("a task empties a problem that it has posed", posed),
  Kind("verify empties the artefact", verified),
  Kind("describe empties the artefact", described),
  Kind("confirm empties the artefact", confirmed),
  Kind("picture empties the artefact", pictured),
  Kind("apply empties the artefact, and keeps its own", attempted),
  Kind("prompt empties the artefact", prompted),
  Kind("start gives one list, again and again", started),
  Kind("a thinker empties the conversation", thought),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_function_that_ruins_what_it_is_given_changes_nothing(kind: Kind, tmp_path):
  ruin = Ruiner()
  found = kind.run(ruin, tmp_path)
  assert len(ruin.seen) >= NUM_CALLS <= len(found)
  assert all(one == ruin.seen[0] for one in ruin.seen)
  assert all(one == found[0] for one in found)


def test_a_copy_shares_nothing_and_costs_less_than_a_deep_copy():
  tag = {1, 2}
  problem = Problem(problem_id="0", prompt="a", messages=tuple(MESSAGES))
  given = {"a": [ROW, (1, [2], b"c")], "b": tag, "c": problem}
  found = types.copied(given)
  assert found == given
  assert found["b"] is not tag and found["c"].messages[0] is not MESSAGES[0]
  assert found["a"][0] is not ROW and found["a"][1][1] is not given["a"][1][1]
  assert types.copied(small_run.Vowels().problem("train", 0)).prompt == "0?"
  # A row of a long conversation, as rewards with three arguments get it with each answer.
  row = {"messages": [dict(role="user", content="word") for _ in range(200)], "ids": [1] * 9999}
  ours, theirs = (
    min(timed(function, row) for _ in range(5)) for function in (types.copied, copy.deepcopy)
  )
  assert ours < theirs


def timed(function: Callable[[Any], Any], value: Any) -> float:
  begin = time.process_time()
  function(value)
  return time.process_time() - begin


def test_what_cannot_be_copied_is_no_artefact():
  within: list[Any] = []
  within.append(within)
  score = environment_lib.verified(tiny_problem.Row(), within)
  assert not score.is_valid and "got data that cannot be copied (RecursionError)" in score.reason


@pytest.mark.thorough  # Every day, tests/run/test_hidden_inputs.py has such a function too.
@pytest.mark.usefixtures("programs_on_disk")
def test_what_hears_of_each_step_cannot_change_the_run(tmp_path):
  numbers_seen = []

  def on_step(step: int, state: Any, numbers: Any) -> None:
    numbers_seen.append(dict(numbers))
    numbers.clear()
    state.params.clear()

  result = rl.train(
    dataclasses.replace(small_run.CONFIG, num_steps=1), small_run.policy(), small_run.Vowels(),
    tmp_path / "run", log=lambda line: None, programs=small_run.programs_of(small_run.CONFIG),
    on_step=on_step,
  )  # fmt: skip
  assert "rollout_train/kl" in numbers_seen[0]
  assert result.state.params
