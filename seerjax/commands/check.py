"""Checks a task, a problem of discovery or a model before a run, and prints its findings.

    seerjax check --config.task=my_module:MyTask             or a reward, with --config.task_path
    seerjax check --config.problem=path/to/my_problem.py
    seerjax check --config.model=DIRECTORY

Several at once are checked one after the other; with a model, a task's prompts are counted in its
tokens, otherwise in nano's. It samples, so it may miss a mistake. Exit status: 0 without errors,
2 with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import sys
from typing import Any

from absl import flags, logging

from seerjax import fields, numerics as numerics_lib
from seerjax.commands import flags as flags_lib, problems
from seerjax.discovery import problem_check
from seerjax.discovery.problem_check import Finding
from seerjax.models import huggingface, loading, tokenizer as tokenizer_lib
from seerjax.models.tokenizer import Tokenizer
from seerjax.rollout import groups
from seerjax.run import command_line, learning_rates
from seerjax.tasks import loading as tasks_loading
from seerjax.types import Task

SPLITS = ("train", "heldout")
TEXTS = ("", " ", "42", "\\boxed{42}", "</think>", "0" * 5000, "\ud83d\ude00 \x00", "[[[[((((")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
  """Names of the task, problem and model to check; empty names are left out.

  Attributes:
    task: name of a task, as in `RunConfig`.
    task_path: data file or directory of the task, if it needs one.
    task_options: options of the task's generator, as in `RunConfig`.
    problem: name of a problem, as in `DiscoverConfig`.
    model: name, directory or file of a model.
    seed: determines which problems, starts and texts are tried.
    num_problems: problems of each split that are tried.
  """

  task: str = ""
  task_path: str = ""
  task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  problem: str = ""
  model: str = ""
  seed: int = 0
  num_problems: int = 100

  def __post_init__(self):
    fields.check(self, num_problems=fields.at_least(1))


def check_task(task: Task, tokenizer: Tokenizer, config: CheckConfig) -> Iterator[str]:
  """Yields the findings about a task: a line per split, and warnings.

  Raises:
    ValueError: if a run would fail: a split has no problems, a problem differs when it is requested
      again, two problems have the same id, or a verdict raises or is not finite.
  """
  for split in SPLITS:
    total = groups.num_problems(task, split)
    indices = [
      groups.problem_index(place, total, config.seed)
      for place in range(min(config.num_problems, total))
    ]
    asked = [groups.problem_of(task, split, index) for index in indices]
    for index, problem in zip(indices, asked, strict=True):
      if groups.problem_of(task, split, index) != problem:
        raise ValueError(
          f"{task.name}: got two different problems from problem({split!r}, {index}), expected the"
          " same one each time; draw it from the index alone."
        )
    if len({problem.problem_id for problem in asked}) < len(asked):
      raise ValueError(
        f"{task.name}: got two problems of one problem_id in split {split!r}, expected unique ids;"
        " write the index into problem_id."
      )
    lengths = sorted(len(groups.prompt_tokens(problem, tokenizer)) for problem in asked)
    verdicts = [
      groups.judge(task, problem, text)
      for problem in asked[:10]
      for text in (*TEXTS, problem.answer, problem.solution)
    ]
    rewards = [verdict.reward for verdict in verdicts]
    yield (
      f"task {task.name}, {split}: {total:,} problems; {len(asked)} prompts have"
      f" {lengths[0]} to {lengths[-1]} tokens; {len(rewards)} texts, answers included, get rewards"
      f" from {min(rewards):g} to {max(rewards):g}"
    )
    if min(rewards) == max(rewards):
      yield (
        f"warning: {task.name}, {split}: got one reward for all texts tried, expected different"
        " ones for an answer and for nonsense; look at the verdict."
      )
  yield f"task {task.name}: no errors"


def check_model(name: str) -> Iterator[str]:
  """Yields the findings about a model, weights included.

  Raises:
    FileNotFoundError: if there is no such model.
    ValueError: naming the fault in its files.
  """
  path = loading.path_of(name)
  numerics = numerics_lib.NumericsConfig()
  _, shape = huggingface.load(path, numerics)
  tokenizer = tokenizer_lib.load(path)
  heads = shape.layers[0].attention
  yield (
    f"model {name}: {learning_rates.num_parameters(shape) / 1e6:,.1f} M parameters in"
    f" {shape.num_layers} layers, {heads.num_heads} heads ({heads.num_kv_heads} of keys and"
    f" values), a vocabulary of {shape.vocab_size:,}, a context of {shape.max_model_len:,}"
  )
  yield (
    f"tokenizer: {tokenizer.vocab_size:,} ids, ends at {list(tokenizer.eos_ids)},"
    f" {'a' if tokenizer.chat_template else 'no'} chat template"
  )
  if not tokenizer.chat_template:
    yield (
      "warning: got no chat template, expected one, because tasks and chats write prompts by it;"
      " add chat_template.jinja, or take the model's Instruct version."
    )
  if not tokenizer.eos_ids:
    yield (
      "warning: got no end-of-text token, expected one, because answers would run to max_tokens;"
      " add eos_token_id to generation_config.json."
    )
  yield f"model {name}: no errors"


def report_problem(name: str, findings: list[Finding]) -> tuple[list[str], bool]:
  """Returns (lines about the findings on a problem, whether there is an error)."""
  num_errors = sum(finding.level == "error" for finding in findings)
  lines = [str(finding) for finding in findings]
  lines.append(f"problem {name}: {num_errors} errors, {len(findings) - num_errors} warnings")
  return lines, num_errors > 0


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  logging.set_verbosity(logging.WARNING)
  is_wrong = False
  with command_line.refusals():
    command_line.check_arguments(argv)
    config = flags_lib.from_flags(CheckConfig, args.config)
    if not (config.task or config.problem or config.model):
      raise ValueError(
        "seerjax check: got nothing to check, expected a task, a problem or a model; write"
        " --config.task=NAME, --config.problem=NAME or --config.model=DIRECTORY."
      )
    if config.model:
      for line in check_model(config.model):
        print(line, flush=True)
    if config.task:
      task = tasks_loading.load(
        config.task, path=config.task_path or None, options=config.task_options
      )
      tokenizer = tokenizer_lib.load(loading.path_of(config.model or "nano"))
      for line in check_task(task, tokenizer, config):
        print(line, flush=True)
    if config.problem:
      factory = problems.factory_of(
        args.problems, config.problem, allow_weak_sandbox=args.allow_weak_sandbox
      )
      # In a separate process: the file may hang on import.
      findings = problem_check.check_apart(factory, config.seed, seconds=args.seconds)
      lines, is_wrong = report_problem(config.problem, findings)
      print("\n".join(lines))
  sys.exit(2 if is_wrong else 0)


def define_flags() -> CheckConfig:
  """Defines the flags of the command."""
  default = CheckConfig()
  flags_lib.define_config(default)
  problems.define_flag()
  flags.DEFINE_float("seconds", 600.0, "Time limit of a problem's check.", lower_bound=1.0)
  flags.DEFINE_bool(
    "allow_weak_sandbox", False, "Whether to run programs without isolation from files or network."
  )
  return default
