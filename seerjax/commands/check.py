"""Checks a task, a problem of discovery or a model before a run, and prints its findings.

    seerjax check --config.task=my_module:MyTask             or a reward, with --config.task_path
    seerjax check --config.problem=path/to/my_problem.py
    seerjax check --config.model=DIRECTORY [--config.text=FILE] [--config.python=PYTHON]

A model is read, run and measured: its needs on this machine, equal bits in every batch and in the
trainer, its perplexity on a text, and its logits, greedy tokens and sets of experts compared with
those of `transformers` if this Python or another one has it. Several at once are checked one after
the other; with a model, a task's prompts are counted in its tokens, otherwise in nano's. It
samples, so it may miss a mistake. Exit status: 0 without errors, 2 with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import pathlib
import sys
from typing import Any

from absl import flags, logging

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.commands import flags as flags_lib, problems, train
from seerjax.discovery import problem_check
from seerjax.discovery.problem_check import Finding
from seerjax.engine import engine as engine_lib, sizes
from seerjax.models import families, loading, tokenizer as tokenizer_lib
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer
from seerjax.rollout import groups
from seerjax.rollout.groups import RolloutConfig
from seerjax.run import (
  command_line,
  learning_rates,
  parity,
  policy as policy_lib,
  programs as programs_lib,
  self_test,
)
from seerjax.run.config import RunConfig
from seerjax.tasks import loading as tasks_loading
from seerjax.types import Task

SELF_TEST_CONTEXT = 128  # Positions of a sequence of the self-test.
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
    text: text file on which the model's perplexity is computed.
    python: Python interpreter that has transformers and torch; empty is this one, if it has them.
    seed: determines which problems, starts and texts are tried.
    num_problems: problems of each split that are tried.
  """

  task: str = ""
  task_path: str = ""
  task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  problem: str = ""
  model: str = ""
  text: str = ""
  python: str = ""
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
  """Yields the findings about a model's files, weights included.

  Raises:
    FileNotFoundError: if there is no such model.
    ValueError: naming the fault in its files.
  """
  model = loading.load_model(name)
  shape, tokenizer = model.config, model.tokenizer
  assert tokenizer is not None, "a model directory has a tokenizer"
  heads = shape.layers[0].attention
  yield (
    f"model {name}: {learning_rates.num_parameters(shape) / 1e6:,.1f} M parameters in"
    f" {shape.num_layers} layers, {heads.num_heads} heads ({heads.num_kv_heads} of keys and"
    f" values), a vocabulary of {shape.vocab_size:,}, a context of {shape.max_model_len:,}; it is"
    f" saved as {families.of(shape).model_type}"
  )
  yield needs(model)
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


def needs(model: Model) -> str:
  """Returns the memory, devices and batch of a model on this machine, as one line."""
  decoder, mib = model.decoder, 2**20
  count = learning_rates.num_parameters(model.config)
  page = engine_lib.EngineConfig().page_size
  context = model.config.max_model_len
  config = engine_lib.EngineConfig(max_model_len=context)
  free = sizes.free_bytes(parallel.make_mesh())
  fitted = sizes.fitted(config, decoder, free_bytes=free)
  slabs = model.numerics.reduction_shards
  devices = [str(one) for one in range(1, slabs + 1) if slabs % one == 0]
  return (
    f"needs: {4 * count / mib:,.0f} MiB of weights in float32, {2 * count / mib:,.0f} in bfloat16;"
    f" {sizes.page_bytes(decoder, page_size=page) // page:,} bytes of keys and values a token in"
    f" {model.numerics.compute_dtype}; devices: {', '.join(devices)}; here an engine runs"
    f" {fitted.max_num_seqs} sequences at once, with pages for"
    f" {sizes.most_tokens(fitted.num_pages, fitted.page_size):,} tokens"
  )


def check_numbers(name: str, text: str, python: str) -> Iterator[str]:
  """Yields what running a model finds: equal bits, perplexity, agreement with `transformers`.

  Args:
    name: name, directory or file of a model.
    text: a text file, or "".
    python: interpreter that has transformers and torch; "" is this one, if it has them.

  Raises:
    FileNotFoundError: if there is no such model or text.
    ValueError: if its samples have unequal bits, the text is too short, or transformers failed.
  """
  path = loading.path_of(name)
  numerics = numerics_lib.NumericsConfig()
  config = RunConfig(
    model=str(path),
    numerics=numerics,
    rollout=RolloutConfig(max_tokens=self_test.MODEL_TOKENS),
    engine=engine_lib.EngineConfig(max_model_len=SELF_TEST_CONTEXT),
  )
  policy = policy_lib.load_policy(config.model, numerics)
  programs = programs_lib.make_programs(config.shared, policy.model)
  found: list[str] = []
  train.check_model(policy, programs, say=found.append)
  yield from found
  model = loading.load_model(name, numerics)
  if model.config.routings:
    yield f"routes: {parity.route_disagreements(model)}"
  if text:
    value, count = parity.perplexity(model, pathlib.Path(text).read_text())
    yield f"perplexity of {text}: {value:.2f} over {count:,} tokens"
  if path.is_file():
    yield "transformers: left out, since it does not read GGUF files as we do; export a directory"
  elif python or parity.has_transformers():
    yield f"transformers: {parity.compare(model, path, python)}"
  else:
    yield (
      "transformers: left out, since this Python lacks it or torch; pass --config.python=PYTHON of"
      " one that has both"
    )


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
      for lines in (
        check_model(config.model), check_numbers(config.model, config.text, config.python),
      ):  # fmt: skip
        for line in lines:
          print(line, flush=True)
      print(f"model {config.model}: no errors", flush=True)
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
