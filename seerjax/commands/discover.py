"""Test-time training: trains on a single problem and keeps the best artefact ever found.

    seerjax discover --config.problem=path/to/my_problem.py      after `seerjax check`

  a class:                 --config.problem=my_module:MyProblem, or my_module:MyProblem:26
  a shipped problem:       bash launch/local.sh discover --config.problem=apple_machines:0, in a
                             checkout; experiments/problems/names.py has the names
  a model writes programs: --preset=paper --config.model=PATH   (50 x 8 x 64, a context of 32,768)
  baselines, at equal CPU: --compare
  continue after a kill:   the same command with --resume

On one instance of AHC058 a tiny transformer, trained from scratch, makes 25,600 attempts from a
plain start within ten minutes on two CPU cores; the sampler's log-probabilities equal the
trainer's, to the bit. Numbers: docs/results/ttt.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import pathlib
import sys
import time

from absl import flags, logging
import jax
import numpy as np

from seerjax import metrics, numerics, ttt
from seerjax.commands import flags as flags_lib, problems, train
from seerjax.discovery import (
  archive as archive_lib,
  edits,
  environment as environment_lib,
  puct,
  record as record_lib,
  starts as starts_lib,
  tiny_policy as tiny_policy_lib,
)
from seerjax.discovery.config import DiscoverConfig, ProgramConfig, TinyConfig
from seerjax.discovery.environment import Artefact, Environment
from seerjax.discovery.objective import ObjectiveConfig
from seerjax.engine import engine as engine_lib
from seerjax.models.decoder import decide
from seerjax.reports import discovery_report
from seerjax.rollout import groups, policies
from seerjax.run import (
  command_line,
  directory as directory_lib,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  self_test,
  stops,
)
from seerjax.run.config import TrainerConfig
from seerjax.trainer import optimizer as optimizer_lib

# The paper's number of attempts in four times as many steps, so that starts are as recent as
# possible: the search alone was about twice as fast this way (docs/results/ttt.md).
FLAGSHIP = DiscoverConfig(
  num_steps=200,
  group_size=16,
  num_workers=2,  # An attempt takes about 20 ms.
  checkpoint_every=20,
  # The grammar leaves little to learn in advance, and each warm-up sentence costs an attempt.
  tiny=TinyConfig(warm_sentences=256),
  # One search tree after another, each until it stops improving: the best setting tried (ttt.md).
  search=puct.SearchConfig(patience=8),
  # With the published reward it learns not to change good plans (ttt.md).
  objective=ObjectiveConfig(gains_only=True, divergence=1.5, kl_coefficient=0.3),
  engine=dataclasses.replace(DiscoverConfig().engine, max_num_seqs=128, batch_size_buckets=(128,)),
  trainer=TrainerConfig(rows_per_micro_batch=2048, sequences_per_micro_batch=64),
)

# Published settings for a language model that writes programs; prompt and reasoning take 26,000
# tokens.
PAPER = DiscoverConfig(
  model="Qwen/Qwen3-8B",
  checkpoint_every=1,
  programs=ProgramConfig(thinking_tokens=20_000, answer_tokens=6_700),
  numerics=numerics.NumericsConfig(),
  engine=engine_lib.EngineConfig(max_model_len=32_768),
  scheduler=policies.LongestGroupFirst(),
  trainer=TrainerConfig(remat="layer"),
  optimizer=optimizer_lib.OptimizerConfig(learning_rate=4e-5, b2=0.95, max_gradient_norm=math.inf),
)
PRESETS = {"flagship": FLAGSHIP, "paper": PAPER}


def random_policy(
  config: DiscoverConfig, environment: Environment
) -> Iterator[tuple[Artefact, float]]:
  """Runs the same search with uniformly random sentences; yields the start, then each group's best.

  Without a transformer it makes many more attempts at equal CPU time.

  Yields:
    (artefact, its value in the problem's unit); for a group without a valid attempt, its start.
  """
  language = environment.language
  assert language is not None
  archive = starts_lib.first_archive(config, environment)
  first = archive_lib.best(archive)
  yield first.artefact, environment_lib.signed(environment, first.value)
  with edits.Judge(environment, lambda: environment) as judge:
    step = 0
    while True:
      starts = puct.select(archive, config.prompts_per_step, config.search, config.seed)
      by_id = {state.state_id: state for state in archive.states}
      random = np.random.default_rng([config.seed, 2, step])
      expansions = []
      for group, start in enumerate(starts):
        jobs = [
          edits.Job(
            by_id[start].artefact,
            edits.random_sentence(language, random),
            groups.request_seed(config.seed, step, group, member),
          )
          for member in range(config.group_size)
        ]
        found = [
          archive_lib.Child(
            artefact=one.artefact,
            value=environment_lib.signed(environment, one.score.value),
            reward=one.score.reward,
          )
          for one in judge.attempts(jobs)
          if one.score.is_valid
        ]
        expansions.append((start, found))
        # Yields after each group, because a group of slow edits takes a while.
        best = max(found or [by_id[start]], key=lambda one: one.value)
        yield best.artefact, environment_lib.signed(environment, best.value)
      archive = archive_lib.record_step(archive, expansions, step=step)
      archive = starts_lib.replanted(config, environment, archive, step)
      step += 1


def improvements_within(
  environment: Environment, found_by: Iterator[tuple[Artefact, float]], cpu_seconds: float
) -> list[tuple[float, float]]:
  """Returns the improvements that an iterator yields within some CPU seconds.

  Args:
    environment: the problem; if its values are timings, an improvement has to be confirmed.
    found_by: iterator of (artefact, value).
    cpu_seconds: limit in CPU seconds of this process.

  Returns:
    (CPU seconds since the start, value) of each improvement, the best last; [] if none was valid.
  """
  begin, found = time.process_time(), []
  for artefact, value in found_by:
    elapsed, before = time.process_time() - begin, found[-1][1] if found else math.nan
    is_better = environment_lib.is_better(environment, value, before)
    if isinstance(environment, environment_lib.Timed) and is_better:
      value = environment_lib.record_score(environment, artefact).value
    if environment_lib.is_better(environment, value, before):
      found.append((elapsed, value))
    if elapsed >= cpu_seconds:
      break
  return found


def rival_names(environment: Environment) -> tuple[str, ...]:
  """Returns the names of the baselines of a problem."""
  has_own = isinstance(environment, environment_lib.Baselines)
  names = ("classical", "tool_from_random_starts") if has_own else ()
  return names if environment.language is None else (*names, "random_edits")


def rival(
  config: DiscoverConfig, environment: Environment, name: str, cpu_seconds: float
) -> list[tuple[float, float]]:
  """Returns the improvements that one of `rival_names` finds within some CPU seconds."""
  if name == "random_edits":
    found_by = random_policy(config, environment)
  else:
    assert isinstance(environment, environment_lib.Baselines)
    source = environment.classical if name == "classical" else environment.polished_starts
    found_by = ((one, environment.verify(one).value) for one in source(config.seed))
  return improvements_within(environment, found_by, cpu_seconds)


def best_of(improvements: list[tuple[float, float]]) -> float:
  """Returns the value of the last improvement; NaN if there is none."""
  return improvements[-1][1] if improvements else math.nan


def rivals(
  config: DiscoverConfig,
  environment: Environment,
  cpu_seconds: float,
  factory: Callable[[], Environment],
) -> dict[str, float]:
  """Returns the best value that each baseline finds in the same CPU time, by name.

  `factory` makes the environment again in another process. With workers, as many baselines run in
  parallel: cores that share caches and clock are slower while all are busy, as they are while the
  policy runs.
  """
  names = rival_names(environment)
  if not config.num_workers:
    return {name: best_of(rival(config, environment, name, cpu_seconds)) for name in names}
  with concurrent.futures.ProcessPoolExecutor(
    config.num_workers, multiprocessing.get_context("spawn"), initializer=edits.follow_parent
  ) as pool:
    found = pool.map(_rival_by_name, [(config, factory, name, cpu_seconds) for name in names])
    try:
      return dict(zip(names, found, strict=True))
    except KeyboardInterrupt:
      for process in multiprocessing.active_children():
        process.kill()  # Children ignore Ctrl-C and would run for minutes.
      raise


def _rival_by_name(job: tuple[DiscoverConfig, Callable[[], Environment], str, float]) -> float:
  config, factory, name, cpu_seconds = job
  return best_of(rival(config, factory(), name, cpu_seconds))


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file of a checkpoint.
  with command_line.refusals():
    discover(argv)


def discover(argv: list[str]) -> None:
  """Runs the configuration of the flags and prints the result."""
  args = flags.FLAGS
  directory = pathlib.Path(args.workdir)
  say = functools.partial(print, flush=True)
  command_line.check_arguments(argv)
  config = flags_lib.from_flags(DiscoverConfig, args.config)
  jax.config.update("jax_num_cpu_devices", config.data_parallel_size)
  if args.allow_weak_sandbox:
    programs = dataclasses.replace(config.programs, allow_weak_sandbox=True)
    config = dataclasses.replace(config, programs=programs)
  allow_weak = config.programs.allow_weak_sandbox
  factory = problems.factory_of(args.problems, config.problem, allow_weak_sandbox=allow_weak)
  environment = factory()
  if args.compare and not rival_names(environment):
    raise ValueError(
      f"--compare: got {environment.name}, which has neither a language of edits nor baselines,"
      " expected one of the two; leave the flag out."
    )
  directory_lib.check_directory(directory, resume=args.resume)
  if config.model == "tiny":
    policy, chosen = tiny_policy_lib.tiny_policy(config, environment), config.numerics
  else:
    train.say_memory(config.shared(environment), config.model)  # Before gigabytes are loaded.
    policy = policy_lib.load_policy(config.model, config.numerics)
    chosen = decide(policy.model, config.numerics).numerics
  print(self_test.describe(chosen), flush=True)
  shared = directory_lib.with_stored_sizes(
    config.shared(environment), directory, resume=args.resume
  )
  programs = programs_lib.make_programs(shared, policy.model)
  with progress_lib.Progress(say) as progress, progress.phase("evaluating the model twice"):
    train.check_model(policy, programs, say=say, bitwise=args.bitwise, learns=config.train)
  try:
    found = ttt.discover(
      config,
      environment,
      directory,
      factory=factory,
      policy=policy,
      resume=args.resume,
      accept_new_numerics=args.accept_new_numerics,
      accept_new_data=args.accept_new_data,
      log=say,
      programs=programs,
    )
  except stops.Interrupted as stopped:
    print(stopped)
    if (directory / record_lib.BEST).is_file():
      print(f"report   {discovery_report.render(directory, environment)}")
    sys.exit(stopped.status)
  except KeyboardInterrupt as stop:
    print("stopped before the first step, or after the last; nothing that was saved is lost")
    sys.exit(stops.status_of(stop))
  numbers = dict(found.summary)
  if args.compare:
    print(f"others, with {numbers['cpu_seconds']:.0f} CPU seconds each:", flush=True)
    try:
      numbers["rivals"] = rivals(config, environment, numbers["cpu_seconds"], factory)
    except stops.Terminated:
      raise
    except KeyboardInterrupt:
      print("stopped, and left out; --resume --compare has them run again")
  # Devices are held for the whole run, whether busy or not.
  is_gpu = jax.default_backend() != "cpu"
  numbers["gpu_seconds"] = numbers["seconds"] * config.data_parallel_size if is_gpu else 0.0
  if args.price or args.gpu_price:
    spent = args.price * numbers["cpu_seconds"] + args.gpu_price * numbers["gpu_seconds"]
    numbers["price"] = spent / 3600
  metrics.write_summary(directory / "summary.json", numbers)
  page = discovery_report.render(directory, environment)
  for name in (
    "problem", "start", "best", "certificate", "attempts", "found_in_step", "lineage", "tokens",
    "cpu_seconds", "judge_cpu_seconds", "gpu_seconds", "seconds", "compile_seconds",
    "peak_memory_gib", "price",
  ):  # fmt: skip
    if name in numbers:
      print(f"{name:24s} {numbers[name]}")
  for name, value in numbers.get("rivals", {}).items():
    print(f"{name:24s} {value}")
  for one in environment.published[:3]:
    where = "" if one.is_comparable else "; of other inputs"
    print(f"published                {one.value:.10g} ({one.who}, {one.year}{where})")
  print(f"report   {page}\nartefact {directory / record_lib.BEST}")
  print(f"numbers  {directory / 'summary.json'}")


def define_flags() -> DiscoverConfig:
  """Defines the flags of the command."""
  preset = flags_lib.define_presets(PRESETS, "runs/ttt_discover")
  problems.define_flag()
  flags.DEFINE_bool("resume", False, "Whether to resume from the latest checkpoint in --workdir.")
  flags.DEFINE_bool(
    "accept_new_numerics", False, "Whether to resume under a different fingerprint."
  )
  flags.DEFINE_bool("accept_new_data", False, "Whether to resume with a changed problem file.")
  flags.DEFINE_bool("bitwise", True, "Whether to refuse to start if rows are not invariant.")
  flags.DEFINE_bool(
    "allow_weak_sandbox", False, "Whether to run programs without isolation from files or network."
  )
  flags.DEFINE_bool("compare", False, "Whether to run the baselines afterwards, at equal CPU time.")
  flags.DEFINE_float("price", 0.0, "Price of a CPU hour; 0 reports none.", lower_bound=0.0)
  flags.DEFINE_float(
    "gpu_price", 0.0, "Price of an accelerator hour; 0 reports none.", lower_bound=0.0
  )
  return preset
