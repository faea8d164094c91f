"""A run whose steps are sampled by the workers of a cluster, each with an engine of its own.

    weights -- publish --> workers <-- orders, results --> ClusterRollout <-> the run's journal

The run's own engine answers what else is asked (evaluations), and says what workers have to be: one
whose numerics, key or weights are not the run's is not taken.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses

import jax
import jax.numpy as jnp

from seerjax import numerics as numerics_lib, parallel
from seerjax.cluster import config as cluster_config, weights as weights_lib
from seerjax.cluster.driver import ClusterRollout, Workers
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.ray_workers import RayWorkers
from seerjax.cluster.worker import EngineWorker
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.engine.kv import pool as kv_pool_lib, stores
from seerjax.models import config as model_config, parameters
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer
from seerjax.rollout.journal import Journal
from seerjax.run import (
  drafter as drafter_lib,
  policy as policy_lib,
  programs as programs_lib,
  sampling,
)
from seerjax.run.config import RunConfig


@dataclasses.dataclass(frozen=True)
class WorkerOfRun:
  """Makes a worker of a run, without weights until the run publishes some. It may be pickled.

  Attributes:
    config: the run, whose model has decided what it left open and whose engine has its sizes.
    model: its shape.
    tokenizer: of the run.
  """

  config: RunConfig
  model: model_config.TransformerConfig
  tokenizer: Tokenizer

  def __call__(self, number: int) -> EngineWorker:
    """Makes one in a process of its own, of which it takes a device for each model shard."""
    config = dataclasses.replace(self.config, num_instances=1)
    parallel.start(parallel.SliceConfig(), num_devices=config.model_shards)
    return self.on(programs_lib.make_programs(config, self.model).runner, number)

  def on(self, runner: runner_lib.Runner, number: int) -> EngineWorker:
    """Makes one on programs that are there."""
    config = self.config
    shapes = policy_lib.running_shapes(config.weights, self.model)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    tiers = kv_pool_lib.config_of(config.kv_pool, runner.mesh)
    engine = engine_lib.Engine(
      Model(self.model, nothing, config.numerics, self.tokenizer),
      config=config.engine,
      key=numerics_lib.key(config.seed),
      runner=runner,
      kv_pool=kv_pool_lib.KVPool(tiers, stores.open_store(tiers)),
    )
    drafter_lib.RunDrafts(config.speculation).begin(engine)
    return EngineWorker(engine, name=f"worker {number}")


class RunWorkers:
  """The workers of a run, which sample its steps."""

  def __init__(self, config: RunConfig, workers: Workers, engine: engine_lib.Engine):
    """Takes them; `publish` comes before the first rollout.

    Args:
      config: the run.
      workers: which do nothing else.
      engine: the run's own.
    """
    self._config, self._workers = config, workers
    self._engine = EngineWorker(engine, name="the run's own engine")
    self._before = sampling.Counted(0, 0, 0)  # Of the rollouts before the one of now.
    self._rollout: ClusterRollout | None = None

  def counted(self) -> sampling.Counted:
    """Returns what the chunks of all rollouts so far have brought."""
    if self._rollout is None:
      return self._before
    counts, before = self._rollout.counts, self._before
    return sampling.Counted(
      before.sampled_tokens + sum(self._rollout.trace.rows),
      before.drafted_tokens + counts["drafted"],
      before.accepted_tokens + counts["accepted"],
    )

  def text(self) -> str:
    """Returns how many workers are up and what they do, for people; "" between two rollouts."""
    return "" if self._rollout is None else self._rollout.text(self._config.cluster.workers)

  def publish(self, weights: parameters.Params, policy_version: int) -> None:
    """Has the workers run the weights that the run's own engine runs; nothing waits for it."""
    published = weights_lib.publish(
      weights, self._workers.put, publish_bytes=self._config.publish_bytes
    )
    self._workers.load(published, policy_version)

  def rollout(self, journal: Journal) -> ClusterRollout:
    """Returns a rollout on the workers, which goes on from what the journal holds."""
    self._before = self.counted()
    self._rollout = ClusterRollout(
      self._workers, self._config.scheduler, journal, expected=self._engine.report()
    )
    return self._rollout


def opened(
  config: RunConfig,
  model: model_config.TransformerConfig,
  tokenizer: Tokenizer,
  runner: runner_lib.Runner,
  engine: engine_lib.Engine,
  enter: Callable[[contextlib.AbstractContextManager], object],
) -> RunWorkers | None:
  """Returns the workers that `RunConfig.cluster` asks for; None if it asks for none.

  Args:
    config: the run, as `WorkerOfRun` takes it.
    model: its shape.
    tokenizer: of the run.
    runner: of the run's own engine, which engines of the same process share.
    engine: the run's own.
    enter: takes what ends with the run.

  Raises:
    ImportError: if Ray is needed and not installed.
    ConnectionError: if there is no Ray cluster at the address.
  """
  cluster = config.cluster
  if not cluster.workers:
    return None
  make = WorkerOfRun(config, model, tokenizer)
  if cluster.address == cluster_config.LOCAL:
    workers = LocalWorkers([make.on(runner, number) for number in range(cluster.workers)])
  else:
    workers = RayWorkers(
      make,
      count=cluster.workers,
      address=cluster.address,
      patience=cluster.patience_seconds,
    )
    enter(contextlib.closing(workers))
  return RunWorkers(config, workers, engine)
