"""A run that samples on cluster workers learns the same as with its own engine."""

from __future__ import annotations

import collections

import jax
import pytest
import small_run
from small_run import assert_equal_bits, records_of, rows_of, train

from seerjax.cluster.config import ClusterConfig
from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.worker import EngineWorker
from seerjax.engine import engine as engine_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import journal as journal_lib
from seerjax.run import workers as workers_lib
from seerjax.types import Request, SamplingParams

TWO = ClusterConfig(workers=2, address="local")


def rollouts_of(directory) -> list[dict]:
  """Returns what a run's journal holds of whole rollouts, in one order."""
  found = [record for record in records_of(directory) if record["kind"] == "rollout"]
  return sorted(found, key=lambda one: (one["step"], one["group"], one["member"]))


@pytest.mark.thorough
def test_a_run_on_two_workers_goes_on_in_its_own_engine_to_the_same_bits(tmp_path, tell_events):
  directory, alone, _ = small_run.whole_run()
  events = collections.Counter()
  first = train(tmp_path, cluster=TWO, num_steps=2)
  assert first.summary["optimizer_steps"] == 2
  for record in records_of(tmp_path):
    if record["kind"] == "event":
      events[record["event"]["event"]] += 1
  ended = train(tmp_path, resume=True)  # Its last two steps without workers.
  assert_equal_bits(ended.state, alone.state)
  # The run of two steps has ended with an evaluation of its own.
  rows = [row for row in rows_of(tmp_path) if row["step"] != 2 or "rollout_train/kl" in row]
  assert rows == rows_of(directory)
  assert rollouts_of(tmp_path) == rollouts_of(directory)
  events["rollouts"] += len(rollouts_of(tmp_path))
  tell_events("run on workers", events, ("joined", "ended", "rollouts"))


# Twin: a run that sends its workers no new weights.

SIX = SamplingParams(max_tokens=6)
REQUESTS = [
  Request(request_id=f"0/0/{index}", prompt=(1, 2, 3), seed=index, sampling=SIX)
  for index in range(4)
]


def params_of(scale: float) -> parameters.Params:
  """Returns weights with matrices scaled by `scale` from the policy's initial ones."""
  params = parameters.compute_params(small_run.policy().params, small_run.NUMERICS)
  return jax.tree.map(lambda leaf: leaf * scale if leaf.ndim > 1 else leaf, params)


def engine_of(scale: float) -> engine_lib.Engine:
  tokenizer = small_run.policy().require_tokenizer()
  return engine_lib.Engine(
    Model(small_run.MODEL, params_of(scale), small_run.NUMERICS, tokenizer),
    config=small_run.CONFIG.engine,
    key=jax.random.key(0),
    runner=small_run.runner(1, small_run.NUMERICS, False),
  )


def forgotten(path) -> tuple[engine_lib.Engine, ClusterRollout]:
  """Returns a run's own engine, which has learnt, and a rollout of workers that have not."""
  own = engine_of(1)
  workers = LocalWorkers([EngineWorker(engine_of(0), name="worker 0")])
  of_run = workers_lib.RunWorkers(small_run.CONFIG, workers, own)
  of_run.publish(params_of(1), 0)
  own.update_weights(params_of(-2), policy_version=0)
  return own, of_run.rollout(path)


def test_workers_of_other_weights_are_not_taken(tmp_path):
  with journal_lib.Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}) as journal:
    _, rollout = forgotten(journal)
    expected = r"worker 0 was refused: weights: got '\w+', expected '\w+'; load the weights"
    with pytest.raises(ConnectionError, match=expected):
      list(rollout.run(REQUESTS))


def test_a_twin_that_takes_them_says_other_things(tmp_path):
  with journal_lib.Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}) as journal:
    own, rollout = forgotten(journal)
    rollout._first = None
    found = {one.request_id: one for one in rollout.run(REQUESTS)}
  wanted = own.generate(REQUESTS)
  assert not any(found[one.request_id].has_bits_of(one) for one in wanted)
