r"""Trains a model on a task with reinforcement learning; by default nano on word problems.

    seerjax train                             the main job: nano on word problems

  another model and task:  --config.model=PATH_OR_HUB_ID --config.task=gsm8k \
                             --config.task_path=DIRECTORY
  your own task or reward: --config.task=my_module:MyTask, or --config.task=my_module:reward
                             --config.task_path=prompts.jsonl
  your own loss:           --loss=my_module:my_loss, --advantages=my_module:my_advantages, functions
                             like losses.policy_loss and advantages.for_algorithm's
  several seeds:           --seeds=0,1,2: a directory each, then one table (`seerjax compare`)
  a measured run:          --recipe=arithmetic, or --recipe=my_module:my_config
  a run again:             --config_file=RUN/config.json, with other --config flags if you like
  continue after a kill:   the same command with --resume

In the main job held-out accuracy rises by ten points or more, within ten minutes on 2 CPU cores
with 3 GiB, installation included, while the sampler's log-probabilities equal, to the bit, those of
the trainer's packed program under `value_and_grad`: KL and gap are exactly 0.0 in every step.
Numbers: docs/results/grpo.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import shlex
import sys
from typing import Any, NamedTuple

from absl import flags, logging
import jax

from seerjax import agreement, metrics, parallel, rl
from seerjax.commands import compare, flags as flags_lib
from seerjax.models import config as model_config, gguf_file, huggingface, loading, presets
from seerjax.reports import run_report
from seerjax.rollout import groups
from seerjax.run import (
  command_line,
  config as config_lib,
  directory as directory_lib,
  evaluation,
  memory as memory_lib,
  policy as policy_lib,
  presets as run_presets,
  programs as programs_lib,
  progress as progress_lib,
  self_test,
  slices,
)
from seerjax.run.config import RunConfig, SharedConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.tasks import loading as tasks_loading
from seerjax.trainer import losses, step as step_lib
from seerjax.types import Task

# Train prompts that are checked in advance; a later one that is too long raises when it is used.
MOST_CHECKED = 10_000


def shape_of(name: str) -> model_config.TransformerConfig | None:
  """Returns the shape of a model without reading weights; None for a Hub id that is not known."""
  if name in loading.SHIPPED:
    return huggingface.load_config(loading.path_of(name))
  directory, published = pathlib.Path(name).expanduser(), name.rpartition("/")[2].lower()
  if gguf_file.is_named(directory) or (directory / "config.json").is_file():
    return huggingface.load_config(directory)
  return presets.get(published) if published in presets.CONFIGS else None


def say_memory(config: SharedConfig, name: str) -> None:
  """Prints the planned memory of a run, from the model's shape, before weights are read.

  Raises:
    ValueError: with the figures, if the run does not fit.
  """
  model = shape_of(name)
  if model is None:
    return  # The run reports its memory after the download.
  programs = programs_lib.make_programs(config, model)
  if line := config_lib.chosen(config, programs.config):
    print(line)
  print(memory_lib.memory_plan(programs).describe(), flush=True)


def on_these_devices(config: RunConfig) -> RunConfig:
  """Returns the config with at most as many instances as devices; prints a line if it has fewer."""
  found = len(jax.devices()) // config.tensor_parallel_size
  if config.data_parallel_size <= max(found, 1):
    return config
  print(
    f"data_parallel_size={config.data_parallel_size} of {config.tensor_parallel_size}, but"
    f" {len(jax.devices())}"
    f" device(s): continuing with {max(found, 1)}"
  )
  return dataclasses.replace(config, data_parallel_size=max(found, 1))


def check_prompts(config: RunConfig, task: Task, policy: Policy) -> None:
  """Rejects prompts that leave no room for a completion; `config` has nothing left open.

  Raises:
    ValueError: if a split has no problems, or naming the longest prompt.
  """
  asked = (
    config.num_steps * config.rollout.prompts_per_step * config.trainer.dynamic_sampling_rounds
  )
  # Limits on prompt plus completion, in evaluation and in training.
  engine = (config.engine.max_model_len, "EngineConfig.max_model_len")
  model = (policy.model.max_model_len, "the model's max_model_len")
  rows = (config.trainer.rows_per_micro_batch + 1, "TrainerConfig.rows_per_micro_batch + 1")
  heldout = [task, *evaluation.load_sets(config.evaluation).values()]
  for one, split, count, limits in (
    *((one, "heldout", config.evaluation.num_problems, (engine, model)) for one in heldout),
    (task, "train", min(asked, MOST_CHECKED), (engine, model, rows)),
  ):
    context, context_name = min(limits)
    groups.check_prompts(
      one,
      split,
      count,
      tokenizer=policy.require_tokenizer(),
      max_tokens=config.rollout.max_tokens,
      context=context,
      context_name=context_name,
      seed=config.seed,
    )


def prepare(
  config: RunConfig,
  directory: pathlib.Path,
  *,
  resume: bool,
  bitwise: bool,
  loss: step_lib.PolicyLoss = losses.policy_loss,
) -> tuple[Task, Policy, Programs]:
  """Returns a run's task, policy and programs; prints whether rows are invariant on this machine.

  Raises:
    ValueError: if the directory, the task, its prompts, the model or, with `bitwise`, this backend
      cannot be used.
    FileNotFoundError: if the task's file does not exist.
  """
  directory_lib.check_directory(directory, resume=resume)
  task = tasks_loading.load(config.task, path=config.task_path or None, options=config.task_options)
  if config.model != "nano":
    say_memory(config.shared, config.model)  # Before gigabytes are loaded.
  policy = policy_lib.load_policy(config.model, config.numerics)
  if policy.require_tokenizer().ignored_generation:
    print(policy_lib.ignored_settings(policy.require_tokenizer()), flush=True)
  shared = directory_lib.with_stored_sizes(config.shared, directory, resume=resume)
  programs = programs_lib.make_programs(shared, policy.model, loss=loss)
  decided = dataclasses.replace(config, **programs.config.parts)
  check_prompts(decided, task, policy.with_chat(shared.chat))
  print(self_test.describe(decided.numerics), flush=True)
  if bitwise:
    self_test.require(decided.numerics)
  return task, policy, programs


def check_model(
  policy: Policy,
  programs: Programs,
  *,
  say: Callable[[str], None] = print,
  bitwise: bool = True,
  learns: bool = True,
) -> None:
  """Checks and prints whether the run's model, buckets and trainer are invariant on this machine.

  Args:
    policy: the policy to sample.
    programs: programs of the run; the check compiles them.
    say: receives one line of output.
    bitwise: whether to raise if they are not invariant.
    learns: whether to check the trainer too.

  Raises:
    ValueError: with `bitwise`, if they are not invariant.
  """
  config, decoder = programs.config, programs.decoder
  params = policy_lib.first_params(config.weights, policy)
  self_test.check_model(
    decoder,
    policy_lib.running_weights(config.weights, params, programs_lib.base_weights(config, policy)),
    config=config.engine,
    runner=programs.runner,
    trainer=programs.trainer if learns else None,
    pack=functools.partial(programs_lib.pack, config.engine, config.trainer, decoder),
    say=say,
    bitwise=bitwise,
  )


def saved(rows: Sequence[Mapping[str, float]]) -> str:
  """Returns one line on the effect of scheduler and drafts, from the rows of metrics.jsonl."""
  total = {
    name: sum(int(row.get(f"schedule/{name}", 0)) for row in rows)
    for name in (
      "steps", "tail_steps", "drafted_tokens", "accepted_tokens", "migrations", "spills",
    )
  }  # fmt: skip
  return (
    f"{total['steps']:,} steps of the engine, {total['tail_steps']:,} of them for the last tenth of"
    f" a step's requests; {total['accepted_tokens']:,} tokens came from drafts and needed no"
    f" separate step ({total['drafted_tokens']:,} drafted); {total['migrations']:,} requests moved"
    f" to another instance with their KV pages, {total['spills']:,} to the host"
  )


def example(result: rl.Result) -> str:
  """Returns a readable text: the first held-out problem with its answers before and after."""
  lines = [f"one held-out problem, the first: {result.after.problem.prompt!r}"]
  for when, answer in (("before", result.before), ("after", result.after)):
    word = "right" if answer.verdict.correct else "wrong"
    lines.append(f"  {when} ({word}): {answer.completion.text.strip()!r}")
  return "\n".join(lines)


# Arguments that the scripts of launch/ add to a run; they are left out of suggested commands.
OF_SLICE = ("num_processes", "process_id", "coordinator")
OF_CLUSTER = (
  "config.cluster.workers", "config.cluster.address", "config.kv_pool.mooncake",
  "config.kv_pool.store_bytes",
)  # fmt: skip


def in_checkout() -> bool:
  """Returns whether the library is imported from a checkout, where launch/ starts the commands."""
  return (pathlib.Path(__file__).parents[2] / "launch" / "local.sh").is_file()


def started_with(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """Returns (how the command was started, the run's own arguments)."""
  given = dict(one.lstrip("-").split("=", 1) for one in arguments if "=" in one)
  own = lambda names: [one for one in arguments if one.lstrip("-").split("=")[0] not in names]
  if given.get("coordinator", "").startswith("127.0.0.1:"):
    return f"bash launch/processes.sh --num_processes={given['num_processes']}", own(OF_SLICE)
  if ":" in given.get("config.cluster.address", ""):
    return f"bash launch/cluster.sh --workers={given['config.cluster.workers']}", own(OF_CLUSTER)
  return "bash launch/local.sh" if in_checkout() else "seerjax", [*arguments]


def next_commands(config: RunConfig, directory: pathlib.Path, arguments: Sequence[str]) -> str:
  """Returns three commands to try after a run that was started with `arguments`."""
  here = "bash launch/local.sh" if in_checkout() else "seerjax"
  start, own = started_with(arguments)
  old = ("--resume", "--config.num_steps=")
  own = [one for one in own if not f"--{one.lstrip('-')}".startswith(old)]
  more = shlex.join([*own, "--resume", f"--config.num_steps={2 * config.num_steps}"])
  question = "Tom has 3 apples and buys 4. How many?"
  return "\n".join(
    (
      "next",
      f"  {here} generate --model={shlex.quote(str(directory / 'model'))}"
      f" --prompt={shlex.quote(question)}",
      f"  {here} replay --run={shlex.quote(str(directory))} --request=0/0/0",
      f"  {start} train {more}",
    )
  )


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file of a checkpoint.
  # Errors during the run are printed in one line too; --resume continues from --workdir.
  with command_line.refusals():
    learn(argv)


def learn(argv: list[str]) -> None:
  """Runs the configuration of the flags and prints the result."""
  args = flags.FLAGS
  directory = pathlib.Path(args.workdir)
  command_line.check_arguments(argv)
  config = flags_lib.from_flags(RunConfig, args.config)
  # Before the first use of a device.
  parallel.start(
    flags_lib.slice_of_flags(), num_devices=config.data_parallel_size * config.tensor_parallel_size
  )
  config = on_these_devices(config)
  seeds, own_parts = seeds_of(args.seeds), parts_of(args.loss, args.advantages)
  if not seeds:
    with slices.own_directory(directory) as own:
      run(config, own, own_parts, resume=args.resume)
    return
  places = {seed: directory / f"seed_{seed}" for seed in seeds}
  for seed, place in places.items():
    # A command that was killed may not have started the later seeds.
    has_begun = agreement.from_first(lambda place=place: (place / "config.json").is_file())
    if agreement.is_first():
      print(f"seed {seed}, in {place}", flush=True)
    with slices.own_directory(place) as own:
      run(dataclasses.replace(config, seed=seed), own, own_parts, resume=args.resume and has_begun)
  if agreement.is_first() and len(places) > 1:
    page = directory / "comparison.html"
    print(f"{compare.compare([*places.values()], page)}\npage     {page}")


def recipe_of(name: str) -> RunConfig:
  """Returns the configuration of a recipe: a file of `seerjax.recipes`, or module:function.

  Raises:
    ValueError: if there is none, or it returns no `RunConfig`.
  """
  whole = name if ":" in name else f"seerjax.recipes.{name}:config"
  function = tasks_loading.imported(
    whole, caller="--recipe", example="my_module:my_config", expected="a function"
  )
  if not callable(function):
    raise ValueError(
      f"--recipe: got {name!r}, a {type(function).__name__}, expected a function; name another."
    )
  found = function()
  if not isinstance(found, RunConfig):
    raise ValueError(
      f"--recipe: got an {type(found).__name__} from {name!r}, expected a RunConfig; return one."
    )
  return found


class Parts(NamedTuple):
  """Functions of the user that take the place of the library's; None keeps the library's.

  Attributes:
    loss: loss of one micro-batch, like `losses.policy_loss`.
    advantages: from rewards f32[b, g] to advantages.
  """

  loss: Callable[..., Any] | None = None
  advantages: Callable[..., Any] | None = None


def parts_of(loss: str, advantages: str) -> Parts:
  """Imports the functions that --loss and --advantages name as module:function; "" names none.

  Raises:
    ValueError: if one cannot be imported, or is no function.
  """
  found: list[Callable[..., Any] | None] = []
  for flag, name in (("--loss", loss), ("--advantages", advantages)):
    part = None
    if name:
      part = tasks_loading.imported(
        name, caller=flag, example=f"my_module:my_{flag[2:]}", expected="a function"
      )
      if not callable(part):
        raise ValueError(
          f"{flag}: got {name!r}, a {type(part).__name__}, expected a function; name another."
        )
    found.append(part)
  return Parts(*found)


def seeds_of(texts: Sequence[str]) -> tuple[int, ...]:
  """Returns the seeds of --seeds.

  Raises:
    ValueError: if one is no whole number of at least 0, or occurs twice.
  """
  if not all(text.isascii() and text.isdecimal() for text in texts) or len({*texts}) < len(texts):
    raise ValueError(
      f"--seeds: got {','.join(texts)}, expected different whole numbers; write --seeds=0,1,2."
    )
  return tuple(map(int, texts))


def run(config: RunConfig, directory: pathlib.Path, own: Parts, *, resume: bool) -> None:
  """Runs a configuration in a directory and prints the result.

  Args:
    config: the configuration.
    directory: the run's directory.
    own: functions that take the place of the library's.
    resume: whether to resume.
  """
  args = flags.FLAGS
  loss = losses.policy_loss if own.loss is None else own.loss
  say = functools.partial(print, flush=True)
  with progress_lib.Progress(say) as progress, progress.phase("getting ready"):
    task, policy, programs = prepare(
      config, directory, resume=resume, bitwise=args.bitwise, loss=loss
    )
  # Checked before the run, with the programs that the run will use.
  with progress_lib.Progress(say) as progress, progress.phase("evaluating the model twice"):
    check_model(policy, programs, say=say, bitwise=args.bitwise)
  result = rl.train(
    config,
    policy,
    slices.shared_task(task),
    directory,
    resume=resume,
    accept_new_numerics=args.accept_new_numerics,
    accept_new_data=args.accept_new_data,
    log=say,
    programs=programs,
    loss=loss,
    advantages=own.advantages,
  )
  learnt = policy_lib.exported_weights(config.weights, policy, result.state.params)
  if not agreement.is_first():
    return
  with progress_lib.Progress(say) as progress, progress.phase("writing the model and the report"):
    huggingface.save(
      directory / "model",
      learnt,
      policy.model,
      tokenizer=policy.tokenizer,
      overwrite=True,  # A resumed run replaces its earlier export.
    )
    page = run_report.render(directory)
  for name in (
    "accuracy_before", "accuracy_after", "gain_interval_95", "reward_before", "reward_after",
    "reward_gain_interval_95", "max_abs_logprob_gap", "kl_max",
    "tokens_per_second", "length_mean", "length_p99", "seconds", "compile_seconds",
    "peak_memory_gib", "optimizer_steps",
  ):  # fmt: skip
    if name in result.summary:  # A resumed run of an older version may lack the first mean reward.
      print(f"{name:24s} {result.summary[name]}")
  if "joules" in result.summary:
    print(f"{'joules':24s} {result.summary['joules']:.0f}")
  print(f"rollouts {saved(metrics.read(directory / 'metrics.jsonl'))}")
  print(example(result))
  print(f"report   {page}\nmodel    {directory / 'model'}\nnumbers  {directory / 'summary.json'}")
  print(next_commands(config, directory, sys.argv[1:]))


def define_config(workdir: str) -> RunConfig:
  """Defines --config, --config_file and --workdir; returns the configuration that --config changes.

  It is that of --config_file or --recipe, else the default for the model: nano's sizes and learning
  rate apply to nano only.
  """
  flags.DEFINE_string(
    "config_file", "", "JSON file that --config starts from, such as RUN/config.json of a run."
  )
  flags.DEFINE_string(
    "recipe", "", "Recipe that --config starts from: of seerjax/recipes, or module:function."
  )
  file = flags_lib.given(sys.argv[1:], "config_file", "")
  recipe = flags_lib.given(sys.argv[1:], "recipe", "")
  model = flags_lib.given(sys.argv[1:], "config.model", RunConfig().model)
  with command_line.refusals():
    if file and recipe:
      raise ValueError(
        "--recipe: got it with --config_file, expected one of the two; leave one out."
      )
    found = run_presets.of_model(model)
    if file:
      found = flags_lib.read(RunConfig, pathlib.Path(file))
    if recipe:
      found = recipe_of(recipe)
  return flags_lib.define_flags(found, workdir)


def define_flags() -> RunConfig:
  """Defines the flags of the command."""
  preset = define_config("runs/grpo")
  flags_lib.define_slice_flags()
  flags.DEFINE_bool("resume", False, "Whether to resume from the latest checkpoint in --workdir.")
  flags.DEFINE_bool(
    "accept_new_numerics", False, "Whether to resume under a different fingerprint."
  )
  flags.DEFINE_bool(
    "accept_new_data", False, "Whether to resume with problems that differ from the run's."
  )
  flags.DEFINE_list("seeds", [], "Seeds to run one after the other, each in --workdir/seed_N.")
  flags.DEFINE_string("loss", "", "Function that replaces the policy's loss, as module:function.")
  flags.DEFINE_string(
    "advantages", "", "Function from group rewards f32[b, g] to advantages, as module:function."
  )
  flags.DEFINE_bool("bitwise", True, "Whether to refuse to start if rows are not invariant.")
  return preset
