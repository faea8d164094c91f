"""Test-time training: the results of a run, and that interruptions change no bit of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import refusals
import tiny_model
import tiny_problem

from seerjax import checkpoint, metrics, models, ttt
from seerjax.discovery import (
  archive as archive_lib,
  attempts as attempts_lib,
  config as discovery_config,
  edits,
  environment as environment_lib,
  loading,
  numbers as numbers_lib,
  objective as objective_lib,
  puct,
  record as record_lib,
  setup as setup_lib,
  starts as starts_lib,
  tiny_policy as tiny_policy_lib,
)
from seerjax.discovery.attempts import Attempt, Sampled, SampledSequence
from seerjax.discovery.config import DiscoverConfig, ProgramConfig, TinyConfig
from seerjax.discovery.edit_policy import EditPolicy
from seerjax.discovery.objective import ObjectiveConfig
from seerjax.engine import engine as engine_lib
from seerjax.models import config as model_config, parameters, tokenizer as tokenizer_lib
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.rollout import policies
from seerjax.run import (
  directory as directory_lib,
  policy as policy_lib,
  programs as programs_lib,
  status,
  stops,
)
from seerjax.run.config import TrainerConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.trainer import advantages, entropic, losses, optimizer as optimizer_lib
from seerjax.types import Request

CONFIG = DiscoverConfig(
  problem=tiny_problem.PATH,
  seed=3,
  num_steps=4,
  prompts_per_step=4,
  group_size=4,
  checkpoint_every=2,
  tiny=TinyConfig(hidden_size=32, num_layers=1, warm_sentences=48, warm_passes=1),
  numerics=tiny_model.ONE_SLAB,
  engine=engine_lib.EngineConfig(
    page_size=8, num_pages=40, max_num_seqs=16, max_model_len=16, batch_size_buckets=(16,)
  ),
  # Chunks end within sentences.
  scheduler=policies.LongestGroupFirst(chunk_tokens=2),
  trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=8),
  optimizer=optimizer_lib.OptimizerConfig(learning_rate=0.01),
)
PER_STEP = 16  # Attempts of a step.
NO_WARM_START = dataclasses.replace(CONFIG.tiny, warm_sentences=0)
# Metrics that depend on the clock.
TIMES = ("search/cpu_seconds", "train/seconds")


@functools.cache
def model() -> model_config.TransformerConfig:
  return tiny_policy_lib.tiny_policy(CONFIG, tiny_problem.Row()).model


@functools.cache
def programs(data_parallel_size: int) -> Programs:
  """Compiled once for all runs."""
  config = dataclasses.replace(CONFIG, data_parallel_size=data_parallel_size)
  return programs_lib.make_programs(config.shared(tiny_problem.Row()), model())


TWO_STEPS = dict(num_steps=2)


def discover(
  directory, environment=None, *, config=CONFIG, say=lambda line: None, compiled=programs, **changes
):
  """Runs with these changes of the config, and of how a run starts."""
  starts = ("resume", "accept_new_data", "accept_new_numerics")
  start = {name: changes.pop(name) for name in starts if name in changes}
  config = dataclasses.replace(config, **changes)
  environment = tiny_problem.Row() if environment is None else environment
  own = compiled and compiled(config.data_parallel_size)
  return ttt.discover(config, environment, pathlib.Path(directory), log=say, programs=own, **start)


def rows_of(directory, *, without=TIMES):
  rows = metrics.read(pathlib.Path(directory) / "metrics.jsonl")
  return [{name: row[name] for name in row if name not in without} for row in rows]


def best_of(directory):
  return json.loads((pathlib.Path(directory) / "best.json").read_text())


def same_bits(found, expected) -> bool:
  """Whether two trees are equal, bit for bit."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def is_same_run(directory, found, whole) -> bool:
  """Whether a run's results, weights and files equal the uninterrupted run's."""
  expected_directory, expected, _ = whole
  return (
    same_bits(found.state, expected.state)
    and archive_lib.to_json(found.archive) == archive_lib.to_json(expected.archive)
    and rows_of(directory) == rows_of(expected_directory)
    and (found.artefact, found.score) == (expected.artefact, expected.score)
    and best_of(directory) == best_of(expected_directory)
  )


def flipped(params, name="embed"):
  """Returns weights with one flipped mantissa bit."""
  weights = np.array(params[name])
  weights.view(np.uint32)[0, 0] ^= np.uint32(1 << 20)
  return {**params, name: jnp.asarray(weights)}


def abstract_state():
  params = tiny_policy_lib.tiny_policy(CONFIG, tiny_problem.Row()).params
  state = programs(1).trainer.init(params)
  return jax.eval_shape(lambda: dict(state=state, base=params))


def restored_from(directory, step=None):
  return checkpoint.restore(
    pathlib.Path(directory) / "checkpoints",
    abstract_state(),
    fingerprint=decide(model(), CONFIG.numerics).fingerprint(),
    step=step,
  )


def interrupt():
  raise KeyboardInterrupt


class Crash(BaseException):
  """An exception that no code of the library expects or may catch."""


def crash():
  raise Crash


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run: (directory, result, environment)."""
  directory, environment = tmp_path_factory.mktemp("whole") / "run", tiny_problem.Row()
  return directory, discover(directory, environment), environment


def stopped_in(whole, directory, step, stop):
  """Returns an environment that stops at the sixth attempt of a step, counted from 1."""
  before = whole[2].language.num_applied - (CONFIG.num_steps - step + 1) * PER_STEP
  return tiny_problem.Row(language=tiny_problem.Digits(stop_at=before + 6, stop=stop))


@pytest.fixture(scope="module")
def crashed(whole, tmp_path_factory):
  """A run that died in its fourth step, after the checkpoint of its second."""
  directory = tmp_path_factory.mktemp("crashed") / "run"
  with pytest.raises(Crash):
    discover(directory, stopped_in(whole, directory, 4, crash))
  assert checkpoint.steps(directory / "checkpoints") == (0, 2)
  assert [row["step"] for row in rows_of(directory)] == [1, 2, 3]
  return directory


@pytest.fixture
def crashed_copy(crashed, tmp_path):
  return pathlib.Path(shutil.copytree(crashed, tmp_path / "copy"))


# Results and outputs of a run.


def test_a_run_writes_its_files_and_finds_something_better(whole):
  directory, found, environment = whole
  assert {path.name for path in directory.iterdir()} == {
    "best.json", "checkpoints", "config.json", "metrics.jsonl", "status.json", "summary.json",
    "tensorboard",
  }  # fmt: skip
  rows = rows_of(directory)
  assert [row["step"] for row in rows] == [1, 2, 3, 4]
  summary = json.loads((directory / "summary.json").read_text())
  starts = [state.value for state in found.archive.states if state.is_seed]
  assert len(starts) == 4 and summary["start"] == max(starts)
  assert found.score.value == summary["best"] == rows[-1]["search/best"] > summary["start"]
  assert rows[-1]["search/gain"] == summary["best"] - summary["start"]
  assert found.score == environment.verify(found.artefact)
  best = [row["search/best"] for row in rows]
  assert best == sorted(best)
  config = json.loads((directory / "config.json").read_text())
  assert config["seed"] == 3 and config["fingerprint"] == summary["numerics"]
  assert summary["attempts"] == 4 * PER_STEP and summary["optimizer_steps"] == 4
  assert summary["tokens"] == rows[-1]["search/tokens"]
  # Sentences of two tokens, if they stop early, or three.
  assert 2 * 4 * PER_STEP < summary["tokens"] < 3 * 4 * PER_STEP
  assert len(found.archive.states) == rows[-1]["search/archive_size"] > 4
  assert found.archive.num_expansions == 16


def test_the_best_is_on_disk_with_the_way_to_it(whole):
  directory, found, environment = whole
  best = best_of(directory)
  assert best["artefact"] == found.artefact and best["value"] == found.score.value
  lineage = best["lineage"]
  # Steps count from 1, as in the metrics; the start belongs to no step.
  steps = [state["step"] for state in lineage]
  assert steps == sorted(steps) and steps[0] == 0 < steps[-1] == best["step"] <= 4
  assert best["step"] == found.summary["found_in_step"]
  assert rows_of(directory)[best["step"] - 1]["search/best"] == best["value"]
  assert lineage[-1]["value"] == best["value"]
  assert len(lineage) == found.summary["lineage"] > 1
  # The tree around it: all that descends from the same start, each after its parent.
  tree = best["tree"]
  assert tree[0]["parent"] is None and tree[0]["step"] == 0
  ids = [state["id"] for state in tree]
  assert ids == sorted(ids) and {state["parent"] for state in tree[1:]} <= {*ids}
  assert {(one["step"], one["value"]) for one in lineage} <= {
    (one["step"], one["value"]) for one in tree
  }
  # Every step of the way can be taken again, seeds of random amounts aside.
  language = environment.language
  state = archive_lib.best(found.archive)
  way = archive_lib.lineage(found.archive, state.state_id)
  for before, after in itertools.pairwise(way):
    if after.tokens[0] == tiny_problem.WRITE:
      assert language.apply(before.artefact, after.tokens, 0) == after.artefact


def test_what_sampled_is_what_learns_to_the_bit_in_every_step(whole):
  rows = rows_of(whole[0])
  assert {row["rollout_train/kl"] for row in rows} == {0.0}
  assert {row["rollout_train/max_abs_logprob_gap"] for row in rows} == {0.0}
  # Before the first update it also equals the base, afterwards not.
  assert rows[0]["objective/kl_to_base"] == 0.0
  assert all(row["objective/kl_to_base"] != 0.0 for row in rows[1:])
  assert all(row["train/grad_norm"] > 0 for row in rows)


def test_what_a_step_says_of_the_search_is_what_the_archive_holds(whole):
  _, found, _ = whole
  for row in rows_of(whole[0]):
    states = [s for s in found.archive.states if s.step < row["step"]]
    assert row["search/archive_size"] == len(states)
    assert row["search/best"] == max(state.value for state in states)
    trees = {state.seed_tree for state in states if not state.is_seed}
    assert row["search/seed_trees_alive"] == len(trees)
    assert 0 < row["search/valid_rate"] <= 1
    values = [row[f"search/value_{name}"] for name in ("p10", "median", "p90")]
    assert values == sorted(values) and values[-1] <= row["search/best"]


def test_every_start_is_judged_and_groups_start_as_the_search_says(whole):
  _, found, _ = whole
  # In the first step all states are seeds, and each starts one group.
  seeds = archive_lib.start(
    [
      archive_lib.Child(artefact=s.artefact, value=s.value, reward=s.reward)
      for s in found.archive.states
      if s.is_seed
    ]
  )
  assert sorted(puct.select(seeds, 4, CONFIG.search, CONFIG.seed)) == [0, 1, 2, 3]
  assert all(s.visits > 0 for s in found.archive.states if s.is_seed)


# Interruptions change no bit of a run.


def test_a_run_that_died_goes_on_to_the_same_bits(whole, crashed_copy):
  heard = []
  found = discover(crashed_copy, resume=True, say=heard.append)
  assert heard[0] == "resumed after step 2 of 4"
  assert is_same_run(crashed_copy, found, whole)
  # Seconds of both processes count; of what died, up to its checkpoint.
  seconds = [row["search/cpu_seconds"] for row in rows_of(crashed_copy, without=())]
  assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3] == found.summary["cpu_seconds"]
  assert found.summary["tokens"] == whole[1].summary["tokens"]


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize(
  ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_after_a_stop_the_run_goes_on_to_the_same_bits(whole, tmp_path, number, name):
  # A shell's background jobs ignore SIGINT.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  environment = stopped_in(whole, tmp_path, 4, lambda: os.kill(os.getpid(), number))
  why = f"stopped by {name} after step 3 of 4; --resume continues"
  try:
    with pytest.raises(stops.Interrupted, match=why) as caught:
      discover(tmp_path / "run", environment, checkpoint_every=10)
  finally:
    signal.signal(signal.SIGINT, before)
  assert caught.value.status == 128 + number
  found = status.read(tmp_path / "run")
  assert found is not None
  assert (found["state"], found["why"], found["step"]) == ("stopped", why, 3)
  assert checkpoint.latest_step(tmp_path / "run" / "checkpoints") == 3
  assert is_same_run(tmp_path / "run", discover(tmp_path / "run", resume=True), whole)


def test_another_bit_of_one_weight_is_another_run(whole, crashed_copy):
  # Twin: the comparison above does detect a change.
  before = restored_from(crashed_copy)
  state = before.state["state"]
  other = state._replace(params=flipped(state.params))
  shutil.rmtree(crashed_copy / "checkpoints")
  checkpoint.save(
    crashed_copy / "checkpoints",
    before.step,
    before.state | {"state": other},
    host_state=before.host_state,
    fingerprint=decide(model(), CONFIG.numerics).fingerprint(),
  )
  found = discover(crashed_copy, resume=True)
  assert not is_same_run(crashed_copy, found, whole)
  assert not same_bits(found.state, whole[1].state)


def test_the_best_on_disk_never_gets_worse(crashed_copy):
  # A process that died later had found more than its checkpoint contains.
  better = best_of(crashed_copy) | dict(value=126.0, artefact=[5] * 6)
  (crashed_copy / "best.json").write_text(json.dumps(better))
  discover(crashed_copy, resume=True)
  assert best_of(crashed_copy) == better


def test_the_best_is_on_disk_before_anything_is_sampled(tmp_path):
  environment = tiny_problem.Row(language=tiny_problem.Digits(stop_at=1, stop=crash))
  with pytest.raises(Crash):
    discover(tmp_path / "run", environment, tiny=NO_WARM_START)
  best = best_of(tmp_path / "run")
  starts = [environment.verify(state.artefact).value for state in seeds_of(environment)]
  assert best["value"] == environment.verify(best["artefact"]).value == max(starts)
  assert [state["step"] for state in best["lineage"]] == [0]
  assert checkpoint.steps(tmp_path / "run" / "checkpoints") == (0,)


def seeds_of(environment):
  return starts_lib.first_archive(CONFIG, environment).states


def test_a_run_that_has_ended_changes_nothing_when_resumed_and_can_go_on(whole, tmp_path):
  copy = pathlib.Path(shutil.copytree(whole[0], tmp_path / "copy"))
  environment = tiny_problem.Row()
  found = discover(copy, environment, resume=True)
  assert environment.language.num_applied == 0
  assert is_same_run(copy, found, whole)
  longer = discover(copy, resume=True, num_steps=5)
  assert [row["step"] for row in rows_of(copy)] == [1, 2, 3, 4, 5]
  assert longer.score.value >= found.score.value


@pytest.mark.long
def test_two_instances_change_no_bit(whole, tmp_path):
  found = discover(tmp_path / "run", data_parallel_size=2)
  assert is_same_run(tmp_path / "run", found, whole)


@pytest.mark.long
def test_a_worker_process_changes_no_bit(tmp_path):
  environment = loading.load(tiny_problem.PATH)
  runs = [
    discover(tmp_path / str(workers), environment, num_workers=workers, num_steps=2)
    for workers in (0, 1)
  ]
  assert is_same_run(tmp_path / "1", runs[1], (tmp_path / "0", runs[0], environment))


MORTAL = """
import os

from tiny_problem import *


class Dies(Digits):
  def apply(self, artefact, tokens, seed):
    if self.num_applied == 40:
      os._exit(3)
    return super().apply(artefact, tokens, seed)


LANGUAGE = Dies()
"""


@pytest.mark.long
def test_what_was_done_before_a_worker_died_is_saved(tmp_path):
  problem = tmp_path / "mortal.py"
  problem.write_text(MORTAL)
  config = dict(problem=str(problem), tiny=NO_WARM_START, checkpoint_every=10)
  with pytest.raises(edits.WorkerDied, match="--resume continues after the last complete step"):
    discover(tmp_path / "run", loading.load(str(problem)), num_workers=1, **config)
  # Two steps of sixteen attempts; the run died in the third.
  assert checkpoint.steps(tmp_path / "run" / "checkpoints") == (0, 2)
  found = discover(tmp_path / "run", resume=True, **config)
  assert found.summary["attempts"] == 4 * PER_STEP


# Choices.


@pytest.mark.thorough
def test_without_training_it_searches_and_leaves_the_weights_alone(whole, tmp_path):
  found = discover(tmp_path / "run", train=False, num_steps=2)
  first = restored_from(whole[0], 2).state["base"]
  assert same_bits(found.state.params, first)
  # The twin: with training they move.
  assert not same_bits(whole[1].state.params, first)
  assert found.summary["optimizer_steps"] == 0
  assert found.score.value > found.summary["start"]
  rows = rows_of(tmp_path / "run")
  assert not any(name.startswith(("train/", "contract/", "objective/")) for name in rows[0])
  # The first step samples from the same weights, whatever is learnt from it.
  whole_rows = rows_of(whole[0])
  assert {n: v for n, v in whole_rows[0].items() if n in rows[0]} == rows[0]


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("reuse", puct.REUSE)
def test_every_rule_of_reuse_runs(tmp_path, reuse):
  found = discover(
    tmp_path / "run",
    num_steps=2,
    train=False,
    tiny=NO_WARM_START,
    search=puct.SearchConfig(reuse=reuse, epsilon=0.5),
  )
  assert found.archive.num_expansions == 8
  parents = {state.parent for state in found.archive.states if state.step == 1}
  ids = {state.state_id for state in found.archive.states if state.is_seed}
  if reuse == "none":
    assert parents <= ids
  if reuse == "sequential":
    assert len(parents) <= 1


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", objective_lib.OBJECTIVES)
def test_every_objective_learns(tmp_path, kind):
  objective = ObjectiveConfig(kind=kind, kl_coefficient=0.1 if kind == "constant" else 0.0)
  found = discover(tmp_path / "run", num_steps=1, tiny=NO_WARM_START, objective=objective)
  (row,) = rows_of(tmp_path / "run")
  assert row["rollout_train/max_abs_logprob_gap"] == row["rollout_train/kl"] == 0.0
  assert row["train/grad_norm"] > 0 and found.summary["optimizer_steps"] == 1
  # Shown for every kind; the first weights sampled.
  assert (row["objective/beta"] > 0) == (kind in ("adaptive", "constant"))
  assert row["objective/kl_to_base"] == 0.0


def test_lower_is_better_where_the_problem_says_so(tmp_path):
  environment = tiny_problem.Row(is_maximised=False)
  found = discover(tmp_path / "run", environment, train=False, num_steps=2, tiny=NO_WARM_START)
  assert found.score.value < found.summary["start"]
  assert best_of(tmp_path / "run")["value"] == found.score.value
  lineage = [state["value"] for state in best_of(tmp_path / "run")["lineage"]]
  assert lineage[-1] == found.score.value < lineage[0]
  rows = rows_of(tmp_path / "run")
  assert rows[-1]["search/best"] == found.score.value
  assert rows[-1]["search/gain"] == found.summary["start"] - found.score.value > 0
  # The value is the distance to the maximum; the archive stores it with the opposite sign.
  assert archive_lib.best(found.archive).value == -found.score.value


class Lucky(tiny_problem.Row):
  """A timed problem: measured values exceed the true ones."""

  def verify(self, artefact):
    score = super().verify(artefact)
    luck = random.Random(str(artefact)).uniform(0, 40)
    return dataclasses.replace(score, value=score.value + luck)

  def confirm(self, artefact):
    return super().verify(artefact)


@pytest.mark.thorough
def test_of_a_timed_problem_the_best_is_what_a_longer_verdict_confirms(tmp_path):
  environment = Lucky()
  found = discover(tmp_path / "run", environment, train=False, tiny=NO_WARM_START)
  leaders = archive_lib.leaders(found.archive, record_lib.NUM_CONFIRMED)
  worth = [environment.confirm(state.artefact).value for state in leaders]
  assert worth[0] < max(worth)  # The first is first by luck.
  assert found.score == environment.confirm(found.artefact)
  assert best_of(tmp_path / "run")["value"] == found.score.value >= max(worth)


# Islands; stuck ones are replanted.

RESTLESS = dataclasses.replace(
  CONFIG,
  num_steps=7,
  search=puct.SearchConfig(islands=CONFIG.prompts_per_step, patience=1),
)


@pytest.mark.thorough
def test_an_island_that_is_stuck_is_planted_anew_and_the_best_is_kept(tmp_path):
  environment = tiny_problem.Row()
  whole = discover(tmp_path / "whole", environment, config=RESTLESS)
  rows = rows_of(tmp_path / "whole")
  planted = sum(row["search/replanted"] for row in rows)
  assert planted > 0 and whole.archive.roots != tuple(range(RESTLESS.prompts_per_step))
  for before, row in itertools.pairwise(rows):
    # Learning is kept.
    assert row["search/best"] >= before["search/best"] and row["objective/kl_to_base"] != 0.0
  assert {row["rollout_train/max_abs_logprob_gap"] for row in rows} == {0.0}
  best = best_of(tmp_path / "whole")
  assert best["value"] == rows[-1]["search/best"] == whole.summary["best"] == whole.score.value
  assert whole.artefact == best["artefact"]
  # A killed process has recorded the best state and the replanting.
  stop_at = environment.language.num_applied - PER_STEP + 6
  stopped = tiny_problem.Row(language=tiny_problem.Digits(stop_at=stop_at, stop=crash))
  with pytest.raises(Crash):
    discover(tmp_path / "died", stopped, config=RESTLESS)
  found = discover(tmp_path / "died", config=RESTLESS, resume=True)
  assert is_same_run(tmp_path / "died", found, (tmp_path / "whole", whole, environment))


# A policy that writes programs.


@functools.cache
def author() -> Policy:
  """Returns a model with random weights; its texts are not programs."""
  tokenizer = tokenizer_lib.load(pathlib.Path(models.__file__).parent / "nano")
  config = dataclasses.replace(
    tiny_model.SMALLEST, vocab_size=tokenizer.vocab_size, max_model_len=1024
  )
  params = parameters.init(jax.random.key(0), config, AUTHOR.numerics)
  return Policy(config, params, tokenizer)


AUTHOR = dataclasses.replace(
  CONFIG,
  model="random",
  num_steps=3,
  prompts_per_step=2,
  checkpoint_every=10,
  lora_rank=2,
  programs=ProgramConfig(thinking_tokens=5, answer_tokens=4, allow_weak_sandbox=True),
  engine=engine_lib.EngineConfig(
    page_size=16, num_pages=600, max_num_seqs=8, max_model_len=1024, batch_size_buckets=(64,)
  ),
  trainer=TrainerConfig(rows_per_micro_batch=4096, sequences_per_micro_batch=8),
)


class Describes(tiny_problem.Row):
  """Crashes at the n-th call of `describe`."""

  left = math.inf

  def describe(self, artefact, score):
    object.__setattr__(self, "left", self.left - 1)
    if self.left < 0:
      raise Crash
    return super().describe(artefact, score)


def write_programs(directory, left=math.inf, **changes):
  environment = Describes()
  object.__setattr__(environment, "left", left)
  say = lambda line: None
  return ttt.discover(AUTHOR, environment, directory, policy=author(), log=say, **changes)


@pytest.mark.long
def test_a_language_models_run_that_died_goes_on_from_its_journal(tmp_path):
  whole = write_programs(tmp_path / "whole")
  rows = rows_of(tmp_path / "whole")
  assert {row["rollout_train/max_abs_logprob_gap"] for row in rows} == {0.0}
  assert {row["search/valid_rate"] for row in rows} == {0.0}
  # Two groups per step; it dies in the third. Such slow steps may have been saved midway.
  with pytest.raises(Crash):
    write_programs(tmp_path / "died", left=5)
  path = tmp_path / "died" / "journal.jsonl"
  before = path.read_bytes()
  found = write_programs(tmp_path / "died", resume=True)
  assert same_bits(found.state, whole.state)
  assert rows_of(tmp_path / "died") == rows
  # Existing records stay, and each sequence and attempt is recorded once.
  assert path.read_bytes().startswith(before)
  records = [json.loads(line)["record"] for line in path.read_text().splitlines()]
  attempts = [r for r in records if r["kind"] == "attempt"]
  # A sequence may have several chunks, of two tokens each.
  whole_ones = [r for r in records[1:] if r["kind"] != "chunk"]
  places = [(r["kind"], r["step"], r["group"], r["member"]) for r in whole_ones]
  assert len(attempts) == 3 * 2 * 4 and len({*places}) == len(places)
  assert {r["attempt"]["status"] for r in attempts} == {"malformed"}


@pytest.mark.long
def test_adapters_learn_from_both_sequences_of_an_attempt_to_the_bit():
  environment, policy = Describes(), author()
  run = AUTHOR.shared(environment)
  compiled = programs_lib.make_programs(run, policy.model)
  state = compiled.trainer.init(policy_lib.first_params(run.weights, policy))
  base = programs_lib.base_weights(run, policy)
  engine = engine_lib.Engine(
    Model(
      policy.model,
      policy_lib.running_weights(run.weights, state.params, base),
      AUTHOR.numerics,
      policy.tokenizer,
    ),
    config=AUTHOR.engine,
    key=jax.random.key(AUTHOR.seed),
    runner=compiled.runner,
  )
  archive, every = starts_lib.first_archive(AUTHOR, environment), []
  with setup_lib.writer_of(AUTHOR, environment, policy, Describes) as writer:
    for step in range(2):
      found = ttt.sample(AUTHOR, engine, writer, archive, step)
      # A model that has thought to the end answers in a second sequence.
      assert {len(sequences) for group in found.sequences for sequences in group} == {2}
      # Its texts are no programs; assign different values all the same.
      worth = [[attempt(1.0 + member) for member in range(AUTHOR.group_size)] for _ in found.starts]
      state, numbers = ttt.learn(
        AUTHOR, run.weights, compiled.trainer, state, found._replace(attempts=worth), base
      )
      weights = policy_lib.running_weights(run.weights, state.params, base)
      engine.update_weights(weights, policy_version=step + 1)
      every.append(numbers)
  for numbers in every:
    assert numbers["rollout_train/kl"] == numbers["rollout_train/max_abs_logprob_gap"] == 0.0
    assert numbers["train/grad_norm"] > 0
  assert every[0]["objective/kl_to_base"] == 0.0 != every[1]["objective/kl_to_base"]


# One step, by hand.


@pytest.fixture(scope="module")
def sampled():
  """The attempts of a first step, and its weights: (sampled, state, base)."""
  environment = tiny_problem.Row()
  policy = tiny_policy_lib.tiny_policy(CONFIG, environment)
  state = programs(1).trainer.init(policy.params)
  base = parameters.compute_params(policy.params, CONFIG.numerics)
  engine = engine_lib.Engine(
    Model(policy.model, base, CONFIG.numerics),
    config=CONFIG.engine,
    key=jax.random.key(CONFIG.seed),
    runner=programs(1).runner,
  )
  with setup_lib.writer_of(CONFIG, environment, policy, tiny_problem.Row) as writer:
    archive = starts_lib.first_archive(CONFIG, environment)
    found = ttt.judge(writer, archive, ttt.sample(CONFIG, engine, writer, archive, 0))
  return found, state, base


def pack(groups, values):
  return programs_lib.pack(
    CONFIG.engine, CONFIG.trainer, programs(1).trainer.decoder, groups, values
  )


def learn(sampled, state, base, objective=CONFIG.objective):
  config = dataclasses.replace(CONFIG, objective=objective)
  weights = config.shared(tiny_problem.Row()).weights
  state = jax.tree.map(jnp.copy, state)  # An update donates its input state.
  return ttt.learn(config, weights, programs(1).trainer, state, sampled, base)


def test_requests_say_where_they_belong_and_attempts_follow_from_them(sampled):
  found, _, _ = sampled
  environment = tiny_problem.Row()
  states = starts_lib.first_archive(CONFIG, environment).states
  names, seeds = [], set()
  for group, (start, reward, sequences, attempts) in enumerate(zip(*found, strict=True)):
    assert reward == states[start].reward
    for member, ((one,), attempt) in enumerate(zip(sequences, attempts, strict=True)):
      names.append(one.request.request_id)
      assert names[-1] == one.completion.request_id == f"0/{group}/{member}"
      assert one.request.prompt == environment.language.prompt(states[start].artefact)
      seeds.add(one.request.seed)
      job = edits.Job(states[start].artefact, one.completion.tokens, one.request.seed)
      assert repr(attempt) == repr(edits.attempt(environment, job))
      for token, (low, high) in zip(one.completion.tokens, environment.language.allowed):
        assert low <= token < high
  assert len(set(names)) == len(seeds) == PER_STEP


def test_the_gap_is_zero_with_the_weights_that_sampled(sampled):
  _, numbers = learn(*sampled)
  assert numbers["rollout_train/kl"] == numbers["rollout_train/max_abs_logprob_gap"] == 0.0
  assert numbers["objective/kl_to_base"] == 0.0


def test_one_bit_of_a_weight_opens_the_gap(sampled):
  found, state, base = sampled
  _, numbers = learn(found, state._replace(params=flipped(state.params)), base)
  assert numbers["rollout_train/max_abs_logprob_gap"] > 0.0
  # And one of the base's its own.
  _, numbers = learn(found, state, flipped(base))
  assert numbers["rollout_train/max_abs_logprob_gap"] == 0.0 != numbers["objective/kl_to_base"]


def test_a_step_learns_what_the_best_of_each_group_did(sampled):
  found, state, _ = sampled
  objective = dataclasses.replace(CONFIG.objective, kl_coefficient=0.0)
  values, _ = objective_lib.objective_of(objective, found)
  after, _ = learn(found, state, None, objective)
  assert after.step == 1 and state.step == 0
  weights = parameters.compute_params(after.params, CONFIG.numerics)
  groups = attempts_lib.as_groups(attempts_lib.sequences(found))
  batch = pack(groups, values.reshape(-1, 1))
  moved = programs(1).trainer.scores(weights, batch).logprob - batch.behaviour_logprobs
  assert np.sum((moved * batch.advantages)[np.asarray(batch.loss_mask)]) > 0


def test_forced_tokens_get_no_gradient(sampled):
  found, _, base = sampled
  # As in the second request of `ProgramPolicy`: thinking and the notice after it are prompt.
  thought = attempts_lib.sequences(found)[0]
  before = (*thought.request.prompt, *thought.completion.tokens, 9, 10, 11)
  answer = sequence("0/0/4", (1, 2))
  answer = answer._replace(request=dataclasses.replace(answer.request, prompt=before))
  groups = attempts_lib.as_groups([thought, answer])
  batch = pack(groups, np.ones((2, 1), np.float32))
  mask = np.asarray(batch.loss_mask)
  assert batch.targets[mask].tolist() == [*thought.completion.tokens, 1, 2]

  def gradient(batch):
    found, _, _ = programs(1).trainer.gradient(base, batch, losses.denominators(batch), None)
    return jax.tree.leaves(found)

  # Advantages of tokens that were not sampled exist, and affect no bit.
  forced = batch._replace(advantages=np.where(mask, np.float32(0), batch.advantages))
  assert np.any(forced.advantages[np.asarray(batch.targets) == 10])
  assert not any(np.any(leaf) for leaf in gradient(forced))
  assert any(np.any(leaf) for leaf in gradient(batch))


def attempt(value: float, reward: float | None = None) -> Attempt:
  if math.isnan(value):
    return Attempt(artefact=None, score=environment_lib.invalid("no"), status="invalid")
  reward = value if reward is None else reward
  score = environment_lib.Score(is_valid=True, value=value, reward=reward)
  return Attempt(artefact=[value], score=score, status="ok")


def sequence(name: str = "0/0/0", tokens: tuple[int, ...] = (1, 2)) -> SampledSequence:
  completion = made_rollouts.completion(name, tokens, logprobs=[0.0] * len(tokens))
  return SampledSequence(Request(request_id=name, prompt=(3,)), completion)


def step_of(*groups, starts=None, start_rewards=None) -> Sampled:
  """Returns a step with attempts of these values."""
  return Sampled(
    starts=tuple(range(len(groups))) if starts is None else starts,
    start_rewards=(0.0,) * len(groups) if start_rewards is None else start_rewards,
    sequences=[
      [(sequence(f"0/{g}/{m}", (g, m)),) for m in range(len(group))]
      for g, group in enumerate(groups)
    ],
    attempts=[[attempt(value) for value in group] for group in groups],
  )


GROUPS = ((1.0, 2.0, 3.0, 6.0), (5.0, 5.0, 5.0, 5.0), (math.nan, 1.0, 1.5, 2.0))
REWARDS = np.nan_to_num(np.asarray(GROUPS))


def test_the_adaptive_objective_is_the_entropic_one_and_says_so():
  values, numbers = objective_lib.objective_of(ObjectiveConfig(), step_of(*GROUPS))
  expected = entropic.entropic(REWARDS)
  np.testing.assert_array_equal(values, expected.advantages)
  assert values.dtype == np.float32 and not values[1].any()
  assert numbers == {
    "objective/beta": np.mean(expected.beta),
    "objective/divergence": np.mean(expected.kl),
    "objective/effective_samples": np.mean(expected.effective_samples),
    "objective/degenerate_groups": 1.0,
  }
  # Beta moves the tilted group ln 2 from the even one, in both entries that differ.
  np.testing.assert_allclose(expected.kl, [math.log(2), 0, math.log(2)], atol=1e-9)


def test_a_constant_beta_by_hand():
  config = ObjectiveConfig(kind="constant", beta=2.0)
  values, numbers = objective_lib.objective_of(config, step_of(GROUPS[0]))
  e = [math.exp(2 * (reward - 6) / 5) for reward in GROUPS[0]]
  expected = [x / ((sum(e) - x) / 3) - 1 for x in e]
  np.testing.assert_allclose(values[0], expected, rtol=1e-6)
  assert numbers["objective/beta"] == 2.0


def test_what_is_invalid_counts_as_zero_or_not_at_all():
  group = (math.nan, math.nan, 4.0, 5.0, 6.0, 9.0)
  config = ObjectiveConfig(kind="constant", valid_only=True)
  values, _ = objective_lib.objective_of(config, step_of(group))
  expected = entropic.entropic(np.asarray([[4.0, 5.0, 6.0, 9.0]]), beta=2.0).advantages
  np.testing.assert_array_equal(values[0], [-1, -1, *expected[0]])
  values, _ = objective_lib.objective_of(ObjectiveConfig(kind="constant"), step_of(group))
  expected = entropic.entropic(np.asarray([[0, 0, 4.0, 5.0, 6.0, 9.0]]), beta=2.0).advantages
  np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", objective_lib.OBJECTIVES)
def test_only_gains_over_the_start_may_be_paid_for(kind):
  config = ObjectiveConfig(kind=kind, gains_only=True)
  group = (math.nan, 1.0, 4.0, 5.0, 9.0)
  values, _ = objective_lib.objective_of(config, step_of(group, group, start_rewards=(4.0, 9.0)))
  nothing = math.nan
  gains = step_of((nothing, nothing, nothing, 1.0, 5.0), (nothing,) * 5)
  expected, _ = objective_lib.objective_of(ObjectiveConfig(kind=kind), gains)
  np.testing.assert_array_equal(values, expected)
  assert values[0, 4] > values[0, 3] > values[0, 2] == values[0, 0] and not values[1].any()


def test_advantages_can_be_cut_off():
  values, _ = objective_lib.objective_of(ObjectiveConfig(), step_of(*GROUPS))
  cut, _ = objective_lib.objective_of(ObjectiveConfig(max_advantage=1.5), step_of(*GROUPS))
  assert values.max() > 1.5
  np.testing.assert_array_equal(cut, np.minimum(values, np.float32(1.5)))


def test_mean_and_grpo_are_the_plain_ones():
  values, numbers = objective_lib.objective_of(ObjectiveConfig(kind="mean"), step_of(*GROUPS))
  np.testing.assert_array_equal(values[0], [-2, -1, 0, 3])
  # Nothing is tilted: all four count.
  untilted = {
    "objective/beta": 0.0,
    "objective/divergence": 0.0,
    "objective/effective_samples": 4.0,
    "objective/degenerate_groups": 1.0,
  }
  assert numbers == untilted
  values, numbers = objective_lib.objective_of(ObjectiveConfig(kind="grpo"), step_of(*GROUPS))
  np.testing.assert_array_equal(values, advantages.grpo(REWARDS))
  assert numbers == untilted


@pytest.mark.parametrize("is_maximised", [True, False])
def test_the_best_two_of_each_group_enter_the_archive_by_the_problems_sign(is_maximised):
  environment = tiny_problem.Row(is_maximised=is_maximised)
  sign = 1 if is_maximised else -1
  archive = archive_lib.start(
    [archive_lib.Child(artefact=[9.0, i], value=-9.0, reward=1.0) for i in range(2)]
  )
  step = step_of((3.0, 7.0, math.nan, 5.0), (math.nan,))
  after = starts_lib.archived(environment, archive, step, 6)
  new = after.states[2:]
  assert [state.artefact for state in new] == [[7.0], [5.0]] if is_maximised else [[3.0], [5.0]]
  assert [state.value for state in new] == [sign * state.artefact[0] for state in new]
  assert [state.reward for state in new] == [state.artefact[0] for state in new]
  assert {(state.parent, state.step) for state in new} == {(0, 6)}
  assert [state.tokens for state in new] == ([(0, 1), (0, 3)] if is_maximised else [(0, 0), (0, 3)])
  # A group without anything valid counts as an expansion too.
  assert after.num_expansions == 2 and [state.visits for state in after.states[:2]] == [1, 1]
  best = environment_lib.signed(environment, archive_lib.best(after).value)
  assert best == (7.0 if is_maximised else 3.0)


def test_groups_of_one_are_in_the_order_of_what_was_said():
  names = ("1/0/1", "0/5/2", "0/10/0")
  groups = attempts_lib.as_groups([sequence(name) for name in names])
  assert [group.group_index for group in groups] == [0, 1, 2]
  assert [group.rollouts[0].request.request_id for group in groups] == list(names)
  assert all(len(group.rollouts) == 1 for group in groups)


@pytest.mark.thorough
def test_the_warm_start_teaches_to_say_valid_sentences():
  environment = tiny_problem.Row()
  tiny = dataclasses.replace(CONFIG.tiny, warm_sentences=512, warm_passes=2)
  config = dataclasses.replace(CONFIG, tiny=tiny)
  policy, heard = tiny_policy_lib.tiny_policy(config, environment), []
  weights = config.shared(environment).weights
  state = programs(1).trainer.init(policy.params)
  # Sentences that it has never seen: some can be applied, and digits of 6 never can.
  random, valid, never = np.random.default_rng(77), [], []
  with setup_lib.writer_of(config, environment, policy, tiny_problem.Row) as writer:
    assert isinstance(writer, EditPolicy)
    trainer = programs(1).trainer
    learnt = tiny_policy_lib.warm_start(
      weights, config, environment, writer, trainer, state, heard.append
    )
    while len(valid) < 32 or len(never) < 32:
      artefact = environment.start(int(random.integers(1000)))
      tokens = edits.random_sentence(environment.language, random)
      request = writer.ask(artefact, 0, 0)[0]
      one = sequence(tokens=tokens)._replace(request=request)
      if edits.attempt(environment, edits.Job(artefact, tokens, 0)).score.is_valid:
        valid.append(one)
      elif tokens[-1] == tiny_problem.FIRST_AMOUNT + 6:
        never.append(one)
  assert heard[0].startswith("warm start: 512 valid sentences of ")

  def logprob(sequences: list[SampledSequence], params: parameters.Params) -> float:
    """Nats a token."""
    groups = attempts_lib.as_groups(sequences)
    ones = np.ones((len(sequences), 1), np.float32)
    batch = pack(groups, ones)
    scores = programs(1).trainer.scores(parameters.compute_params(params, config.numerics), batch)
    return float(np.mean(scores.logprob[np.asarray(batch.loss_mask)]))

  assert logprob(valid, learnt) > logprob(valid, policy.params) + 0.01
  assert logprob(never, learnt) < logprob(never, policy.params) - 0.5


def test_the_tiny_policy_follows_from_the_seed_and_reads_the_vocabulary():
  environment = tiny_problem.Row()
  first, again, other = (
    tiny_policy_lib.tiny_policy(dataclasses.replace(CONFIG, seed=seed), environment)
    for seed in (3, 3, 4)
  )
  assert first.model.vocab_size == 16 and first.model.hidden_size == 32
  assert same_bits(first.params, again.params) and not same_bits(first.params, other.params)


def test_signs_there_and_back():
  for environment in (tiny_problem.Row(), tiny_problem.Row(is_maximised=False)):
    assert environment_lib.signed(environment, environment_lib.signed(environment, 2.5)) == 2.5
  assert environment_lib.signed(tiny_problem.Row(is_maximised=False), 2.5) == -2.5


# Errors.

SHORT = dataclasses.replace(CONFIG.engine, max_model_len=8)


@refusals.table(
  (lambda run: discover(run, tiny_problem.Row(language=None)),
   "digits: got a problem without an edit language, expect"),
  (lambda run: discover(run, tiny_problem.Row(begin=(6,) * 6)),
   "digits: got an invalid start (got the digit 6, expected 0 to 5), expected a valid one; fix"
   " its `start`, and try `seerjax check`"),
  (lambda run: discover(run, search=puct.SearchConfig(capacity=4)),
   "got capacity=4 for 4 seeds, expected more"),
  (lambda run: discover(run, num_workers=-1),
   "DiscoverConfig.num_workers: got -1, expected at l"),
  (lambda run: discover(run, optimizer=optimizer_lib.OptimizerConfig(learning_rate=0.02)),
   "discover.programs: got programs for a different config or model"),
  (lambda run: discover(run, engine=SHORT, compiled=None),
   "got a prompt of 6 ids and sentences of 3, expected a prom"),
  (lambda run: discover(run, resume=True),
   "got no checkpoint to resume, expected one under ", "check"),
)  # fmt: skip
def test_what_cannot_run_is_refused_before_any_file(row, tmp_path):
  refusals.check(row, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_the_directory_of_a_run_is_refused(whole):
  with pytest.raises(ValueError, match=r"got the directory of another run \(a checkpoint after st"):
    discover(whole[0])


def test_other_settings_are_refused_with_both_values_and_nothing_is_touched(crashed_copy):
  before = {path: path.read_bytes() for path in crashed_copy.rglob("*") if path.is_file()}
  expected = (
    r"--resume: got other settings \(group_size was 4 and is 8; seed was 3 and is 5\), expected"
    " those of the run; set them as in its config.json, or choose another --workdir"
  )
  with pytest.raises(ValueError, match=expected):
    discover(crashed_copy, resume=True, seed=5, group_size=8)
  after = {path: path.read_bytes() for path in crashed_copy.rglob("*") if path.is_file()}
  assert before == after


def test_a_model_of_another_size_is_refused_by_its_setting(crashed_copy):
  tiny = dataclasses.replace(CONFIG.tiny, hidden_size=48)
  with pytest.raises(ValueError, match=r"settings \(tiny.hidden_size was 32 and is 48\)"):
    discover(crashed_copy, tiny=tiny, resume=True, compiled=None)


def check_settings(before, now):
  directory_lib.check_settings(before, now, free=discovery_config.NOT_COMPARED)


def test_of_nested_settings_those_that_differ_are_named():
  settings = discovery_config.settings_of(CONFIG)
  objective = dataclasses.replace(CONFIG.objective, kl_coefficient=0.25)
  other = discovery_config.settings_of(dataclasses.replace(CONFIG, objective=objective))
  expected = r"got other settings \(objective.kl_coefficient was 0.1 and is 0.25\), expected"
  with pytest.raises(ValueError, match=expected):
    check_settings(settings, other)


@pytest.mark.parametrize(
  "text, reason",
  [
    ("{", "JSONDecodeError: Expecting"),
    ("[1]", "TypeError: "),
    ('{"value": 3.0, "artefact": 1}', "ValueError: it has no lineage, step, tree"),
    ('{"value": NaN}', "ValueError: its value is nan"),
  ],
)
def test_a_damaged_best_is_refused_by_its_name(crashed_copy, text, reason):
  (crashed_copy / "best.json").write_text(text)
  before = rows_of(crashed_copy)
  with pytest.raises(ValueError, match=rf"best.json: got a damaged file \({reason}.*or remove it"):
    discover(crashed_copy, resume=True)
  assert rows_of(crashed_copy) == before
  (crashed_copy / "best.json").unlink()
  discover(crashed_copy, resume=True, num_steps=2)
  assert record_lib.read_best(crashed_copy)["step"] <= 2


class Fickle(tiny_problem.Row):
  """A problem that finds everything invalid after four calls."""

  judged: list[int] = []

  def verify(self, artefact):
    self.judged.append(1)
    return environment_lib.invalid("no more") if len(self.judged) > 4 else super().verify(artefact)


class Impatient(tiny_problem.Row):
  """Interrupts its fifth verification, when the start is written."""

  judged: list[int] = []

  def verify(self, artefact):
    self.judged.append(1)
    return interrupt() if len(self.judged) == 5 else super().verify(artefact)


def test_ctrl_c_before_there_is_a_best_can_be_resumed(tmp_path):
  with pytest.raises(stops.Interrupted, match="after step 0 of"):
    discover(tmp_path / "run", Impatient(), tiny=NO_WARM_START)
  assert checkpoint.steps(tmp_path / "run" / "checkpoints") == (0,)
  assert not (tmp_path / "run" / "best.json").exists()
  discover(tmp_path / "run", tiny=NO_WARM_START, resume=True, num_steps=1)
  assert record_lib.read_best(tmp_path / "run")["step"] <= 1


def test_the_best_of_another_run_is_refused_and_kept(whole, tmp_path):
  # Its weights are gone; the user kept the artefact.
  kept = shutil.copy(whole[0] / "best.json", tmp_path)
  with pytest.raises(ValueError, match=r"best.json: got the best artefact of another run"):
    discover(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
  assert pathlib.Path(kept).read_bytes() == (whole[0] / "best.json").read_bytes()


def test_a_verdict_that_is_taken_back_is_refused_and_writes_no_best(tmp_path):
  message = r"got an artefact that was valid before and is not now \(no more"
  with pytest.raises(ValueError, match=message):
    discover(tmp_path / "run", Fickle(), tiny=NO_WARM_START)
  assert not (tmp_path / "run" / "best.json").exists()


def test_another_text_of_the_problem_is_refused_or_recorded(tmp_path):
  problem = pathlib.Path(shutil.copy(tiny_problem.PATH, tmp_path / "mine.py"))
  config = dict(problem=str(problem), num_steps=1, tiny=NO_WARM_START)
  discover(tmp_path / "run", **config)
  problem.write_text(problem.read_text() + "\n# Changed.\n")
  message = r"got data that differ from the run's \(problem was '\w{16}' and is .*--accept_new_data"
  with pytest.raises(ValueError, match=message):
    discover(tmp_path / "run", resume=True, **config)
  heard: list[str] = []
  found = discover(
    tmp_path / "run", resume=True, accept_new_data=True, say=heard.append, **(config | TWO_STEPS)
  )
  assert any("OTHER DATA OR CODE from step 2 on: problem was" in line for line in heard)
  first, second = found.summary["data"]
  assert (first["step"], second["step"]) == (0, 1) and first["digests"] != second["digests"]
  discover(tmp_path / "run", resume=True, **(config | TWO_STEPS))


@pytest.mark.thorough
def test_a_defect_of_the_language_is_said_once_and_the_run_goes_on(tmp_path):
  heard = []
  environment = tiny_problem.Row(language=tiny_problem.Digits(stop_at=3, stop=lambda: 1 / 0))
  found = discover(tmp_path / "run", environment, num_steps=2, tiny=NO_WARM_START, say=heard.append)
  assert (
    heard[-1] == "step 1: 1 sentences failed, the first: apply raised ZeroDivisionError: "
    "division by zero"
  )
  assert found.summary["attempts"] == 2 * PER_STEP


def test_a_step_without_anything_valid_is_remarked_on():
  none = step_of((math.nan,) * 4, (math.nan,) * 4)
  policy = tiny_policy_lib.tiny_policy(CONFIG, tiny_problem.Row())
  with setup_lib.writer_of(CONFIG, tiny_problem.Row(), policy, tiny_problem.Row) as writer:
    assert numbers_lib.remark_on(writer, none) == "none of 8 attempts is valid, the first: no"
    assert numbers_lib.remark_on(writer, step_of((math.nan, 1.0), (math.nan,) * 2)) == ""


@pytest.mark.thorough
def test_other_numerics_are_taken_if_that_is_said_and_refused_if_not(crashed_copy):
  numerics = dataclasses.replace(CONFIG.numerics, query_tile=2 * CONFIG.numerics.query_tile)
  other = dict(numerics=numerics, num_steps=3, resume=True, compiled=None)
  with pytest.raises(ValueError, match="query_tile"):
    discover(crashed_copy, **other)
  found = discover(crashed_copy, accept_new_numerics=True, **other)
  assert found.summary["optimizer_steps"] == 3


def test_settings_that_change_no_bit_are_free():
  settings = discovery_config.settings_of(CONFIG)
  for name in discovery_config.FREE_SETTINGS:
    assert name in settings
    check_settings(settings, settings | {name: "another"})
  # The fingerprint covers the numerics, and a flag may accept a difference.
  check_settings(settings, settings | {"numerics": "another"})
  for name in sorted(set(settings) - {*discovery_config.FREE_SETTINGS, "numerics"}):
    with pytest.raises(ValueError, match=rf"other settings \({name} was .* and is 'another'"):
      check_settings(settings, settings | {name: "another"})
