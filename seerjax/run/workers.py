"""Cluster workers that sample a run's steps, each with its own engine.

    weights -- publish --> workers <-- orders, results --> ClusterRollout <-> the run's journal

The run's own engine is used for everything else (evaluations). It also defines the required
numerics, key and weights: a worker that differs in any of them is rejected.
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
from seerjax.kv import pool as kv_pool_lib, stores
from seerjax.models import config as model_config, parameters
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer
from seerjax.rollout import policy_loading
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
  """Picklable factory of a run's workers; they have no weights until the run publishes some.

  Attributes:
    config: configuration of the run, with model-dependent values and engine sizes filled in.
    model: shape of the model.
    tokenizer: the run's tokenizer.
  """

  config: RunConfig
  model: model_config.TransformerConfig
  tokenizer: Tokenizer

  def __call__(self, number: int) -> EngineWorker:
    """Creates a worker in its own process, with one device per model shard."""
    config = dataclasses.replace(self.config, data_parallel_size=1)
    parallel.start(parallel.SliceConfig(), num_devices=config.tensor_parallel_size)
    return self.on(programs_lib.make_programs(config.shared, self.model).runner, number)

  def on(self, runner: runner_lib.Runner, number: int) -> EngineWorker:
    """Creates a worker that uses existing compiled programs."""
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
  """The workers that sample a run's steps."""

  def __init__(self, config: RunConfig, workers: Workers, engine: engine_lib.Engine):
    """Wraps the workers; call `publish` before the first rollout.

    Args:
      config: configuration of the run.
      workers: workers used by this run only.
      engine: the run's own engine.
    """
    self._config, self._workers = config, workers
    self._engine = EngineWorker(engine, name="the run's own engine")
    self._before = sampling.Counted(0, 0, 0)  # Counts of all rollouts before the current one.
    self._rollout: ClusterRollout | None = None

  def counted(self) -> sampling.Counted:
    """Returns the token counts of all rollouts so far."""
    if self._rollout is None:
      return self._before
    counts, before = self._rollout.counts, self._before
    return sampling.Counted(
      before.sampled_tokens + sum(self._rollout.trace.rows),
      before.drafted_tokens + counts["drafted"],
      before.accepted_tokens + counts["accepted"],
    )

  def text(self) -> str:
    """Returns a progress text on the workers; "" if no rollout has started."""
    return "" if self._rollout is None else self._rollout.text(self._config.cluster.workers)

  def publish(self, weights: parameters.Params, policy_version: int) -> None:
    """Sends the workers the weights of the run's own engine, without waiting."""
    published = weights_lib.publish(
      weights,
      self._workers.put,
      weight_transfer_chunk_bytes=self._config.weight_transfer_chunk_bytes,
    )
    self._workers.load(published, policy_version)

  def source(self, journal: Journal) -> sampling.Source:
    """Returns the source that samples on the workers."""
    return sampling.Source(lambda requests: self.rollout(journal), self.counted, self.text)

  def rollout(self, journal: Journal) -> ClusterRollout:
    """Returns a rollout on the workers that continues from the journal."""
    self._before = self.counted()
    self._rollout = ClusterRollout(
      self._workers,
      policy_loading.load(self._config.scheduler),
      journal,
      expected=self._engine.report(),
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
  """Starts the workers of `RunConfig.cluster`; returns None if it has none.

  Args:
    config: configuration of the run, as for `WorkerOfRun`.
    model: shape of the model.
    tokenizer: the run's tokenizer.
    runner: programs of the run's own engine, shared with engines in this process.
    engine: the run's own engine.
    enter: registers a context manager that is closed when the run ends.

  Raises:
    ImportError: if Ray is needed but not installed.
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
