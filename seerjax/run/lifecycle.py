"""The life of a run, the same for all training loops.

    with Life(directory, num_steps=..., resume=..., log=...) as run:
                                         checks the directory, handles Ctrl-C
      run.decide(config.shared, policy)  fills in settings from checkpoint, model and machine
      run.plan_memory(...)               refuses a run that does not fit
      run.hold_to(settings, ...)         checks settings against the run to resume
      found = run.restore(like)          reads the latest checkpoint; None for a new run
      engine = run.engine(weights)       the engine, with its first weights
      run.open(...)                      status.json, journal, config.json, metrics.jsonl
      run.begin(state, host_state)       first checkpoint; from here on a stop saves
      while run.step < num_steps:
        with run.next_step() as put_off_stops:
          ...                            call `put_off_stops` before the first weight update
          run.finish_step(state, host_state, numbers)
        run.save_if_due(every=...)
      run.finish(numbers, state)         summary.json

Bad input is refused before `open`, and until then no file is touched. A checkpoint contains the
state (a tree of arrays) and host state (JSON) of the last completed step, the run's clock, and the
model-dependent defaults. On Ctrl-C and SIGTERM the last completed step is saved, and the `with`
block raises `stops.Interrupted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import optax

from seerjax import agreement, checkpoint, metrics, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.kv import pool as kv_pool_lib
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  config as config_lib,
  directory as directory_lib,
  learning_rates,
  memory as memory_lib,
  policy as policy_lib,
  programs as programs_lib,
  progress as progress_lib,
  status as status_lib,
  stops as stops_lib,
  summary,
)
from seerjax.run.config import SharedConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.tasks import digests
from seerjax.trainer import losses, state as state_lib, step as step_lib
from seerjax.types import TrainState

# File with the step of the best checkpoint, the metric that selected it, and the metric's value.
BEST_FILE_NAME = "best_checkpoint.json"
# A checkpoint without optional parts.
NO_PARTS: Mapping[str, Any] = {}
# Returns the non-array state of a checkpoint, as JSON; called when a checkpoint is due.
HostState = Callable[[], Mapping[str, Any]]


class Life:
  """One run in this process; see the module docstring.

  Attributes:
    directory: the run's directory.
    num_steps: total number of steps of the run.
    resume: whether the run continues from its latest checkpoint.
    step: number of completed steps.
    progress: reports the current activity.
    clock: measures all processes of the run.
    given: the settings before any decision; a resume adds values of its checkpoint.
    config: `given` with nothing left open.
    policy: the policy, with the run's chat settings in its tokenizer, if it has one.
    programs: the run's compiled programs.
    fingerprint: the run's numerics fingerprint.
    memory: the memory plan.
    data_epochs: digests of the data (`tasks.digests`), each with the step from which they apply.
    journal: finished rollouts, once open; None for a run without a journal.
    writer: writer of metrics.jsonl, once open.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    *,
    num_steps: int,
    resume: bool = False,
    accept_new_numerics: bool = False,
    accept_new_data: bool = False,
    log: Callable[[str], None] = print,
    keep_checkpoints: int = 3,
  ):
    """Stores settings common to all runs; touches no file before `open`.

    Args:
      directory: the run's directory.
      num_steps: total number of steps of the run.
      resume: resume from the latest checkpoint.
      accept_new_numerics: resume under a different numerics fingerprint, as a new epoch.
      accept_new_data: resume with different data, as a new epoch.
      log: receives lines for display.
      keep_checkpoints: number of newest checkpoints to keep.
    """
    self.directory = pathlib.Path(directory)
    self.num_steps = num_steps
    self.step = 0
    self.journal: journal_lib.Journal | None = None
    self.data_epochs: list[dict[str, Any]] = []
    self.resume, self._accept_new_numerics = resume, accept_new_numerics
    self._accept_new_data = accept_new_data
    self._log, self._keep_checkpoints = log, keep_checkpoints
    self._settings: Mapping[str, Any] = {}
    self._free: Sequence[str] = ()
    self._state: Any = None
    self._parts: Mapping[str, Any] = NO_PARTS
    self._host_state: HostState = dict
    self._saved_at = 0.0
    self._best: int | None = None  # Step of the best checkpoint, which is kept.

  def __enter__(self) -> Life:
    with contextlib.ExitStack() as stack:
      self._stops = stack.enter_context(stops_lib.handled())
      if jax.process_count() > 1:
        # Processes of one SPMD program must stop at the same point: between two steps.
        stack.enter_context(self._stops.put_off())
      self.progress = stack.enter_context(progress_lib.Progress(self._log))
      self.clock = summary.RunClock()
      directory_lib.check_directory(self.directory, resume=self.resume)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error: Any) -> None:
    self._stack.__exit__(*error)

  def enter(self, part: contextlib.AbstractContextManager[Any]) -> Any:
    """Enters a context manager that is left with the run, before its files close."""
    return self._stack.enter_context(part)

  def decide(
    self,
    config: SharedConfig,
    policy: Policy,
    *,
    loss: step_lib.PolicyLoss = losses.policy_loss,
    optimizer: optax.GradientTransformation | None = None,
  ) -> None:
    """Sets `given`, `config`, `policy`, `programs` and `fingerprint`."""
    self.given = directory_lib.with_stored_sizes(config, self.directory, resume=self.resume)
    made = programs_lib.make_programs(self.given, policy.model, loss=loss, optimizer=optimizer)
    self.programs, self.config, self.policy = made, made.config, policy
    self.fingerprint = made.decoder.fingerprint(made.config.trainer.remat)
    if policy.tokenizer is not None:
      self.policy = policy.with_chat(self.given.chat)
      chat = self.policy.require_tokenizer().chat_config
      self.config = dataclasses.replace(self.config, chat=chat)

  def plan_memory(self, shared: Programs | None, refusal: str) -> None:
    """Plans the memory, and takes `shared` programs, if any, in place of the run's own.

    Raises:
      ValueError: `refusal`, if these are programs for something else; with all figures, if the run
        does not fit in free memory.
    """
    own, self.programs = self.programs, shared or self.programs
    if self.programs.made_for != own.made_for:
      raise ValueError(refusal)
    self.memory = memory_lib.memory_plan(own)

  def first_state(self) -> TrainState:
    """Returns the initial training state."""
    return policy_lib.initial_state(*self._of_state())

  def abstract_state(self) -> TrainState:
    """Returns shapes, dtypes and shardings of `first_state` without computing anything."""
    return policy_lib.abstract_state(*self._of_state())

  def _of_state(self) -> tuple[Any, ...]:
    trainer = self.programs.trainer
    return self.config.weights, self.policy, trainer.optimizer, trainer.mesh

  def engine(
    self, weights: parameters.Params, kv_pool: kv_pool_lib.KVPool | None = None
  ) -> engine_lib.Engine:
    """Returns the run's engine."""
    return engine_lib.Engine(
      Model(self.policy.model, weights, self.config.numerics, self.policy.tokenizer),
      config=self.memory.engine,
      key=numerics_lib.key(self.config.seed),
      policy_version=self.step,
      runner=self.programs.runner,
      kv_pool=kv_pool,
    )

  def rate_warning(self) -> str:
    """Returns one line if the learning rate is unusually high for the model, else ""."""
    rate, is_lora = self.config.optimizer.learning_rate, self.config.lora_rank > 0
    return learning_rates.warning(rate, self.policy.model, is_lora=is_lora)

  def hold_to(
    self,
    settings: Mapping[str, Any],
    *,
    free: Sequence[str],
    data: Mapping[str, str],
  ) -> None:
    """Sets the run's settings, and checks them against those stored in a checkpoint.

    Args:
      settings: settings of the run as JSON, with all defaults filled in.
      free: names of settings that may change on resume.
      data: digests of all other inputs (`tasks.digests`).

    Raises:
      ValueError: naming each difference with both values.
    """
    agreement.compare("settings of the run", settings)
    agreement.compare("data of the run", dict(data))
    self._settings, self._free = settings, free
    if self.resume:
      host_state = checkpoint.read_host_state(self.directory / "checkpoints")
      stored = host_state.get("config")
      if stored is not None:  # Otherwise the journal checks them.
        directory_lib.check_settings(stored, settings, free=free)
      # Checkpoints from earlier versions have no data digests.
      self.data_epochs = host_state.get("data", [])
    self._hold_to_data(dict(data))

  def _hold_to_data(self, data: dict[str, str]) -> None:
    """Sets the digests of the data, and checks them against those stored in a checkpoint.

    Raises:
      ValueError: naming each difference with both values, unless new data is accepted.
    """
    step = checkpoint.latest_step(self.directory / "checkpoints") or 0
    stored = self.data_epochs[-1]["digests"] if self.data_epochs else data
    if not self._accept_new_data:
      digests.require_same(stored, data, what="--resume")
    if changed := digests.differences(stored, data):
      self.progress.say(
        f"OTHER DATA OR CODE from step {step + 1} on: {'; '.join(changed)}. Rewards and accuracies"
        " before and after may not be comparable."
      )
    if changed or not self.data_epochs:
      self.data_epochs = [*self.data_epochs, {"step": step, "digests": data}]

  def restore(self, like: Callable[[], Any]) -> checkpoint.Restored | None:
    """Restores the latest checkpoint; returns None for a new run.

    `like` returns a state with the run's shapes and shardings.

    Raises:
      ValueError: if the checkpoint has other shapes or another fingerprint.
    """
    agreement.compare("numerics of the run", self.fingerprint)
    if not self.resume:
      return None
    restored = checkpoint.restore(
      self.directory / "checkpoints",
      jax.tree.map(_abstract, like()),
      fingerprint=self.fingerprint,
      accept_new_numerics=self._accept_new_numerics,
    )
    self.step = restored.step
    self.clock.carry_on(restored.host_state["clock"])
    self.progress.say(f"resumed after step {self.step} of {self.num_steps}")
    return restored

  def restored_part(self, name: str, like: Callable[[], Any]) -> Any:
    """Returns a part of the restored checkpoint; None for a new run or a missing part.

    Args:
      name: name of the part.
      like: returns a tree of its shapes; traced, not executed.

    Raises:
      ValueError: if the part has other shapes.
    """
    if not self.resume:
      return None
    return checkpoint.restore_part(
      self.directory / "checkpoints", name, jax.eval_shape(like), step=self.step
    )

  def open(self, *, console_digits: Mapping[str, int], has_journal: bool = True) -> None:
    """Opens the run's files.

    Args:
      console_digits: metrics shown by the progress bar.
      has_journal: whether rollouts are journalled.

    Raises:
      ValueError: if another process uses the directory, or the journal has other settings.
    """
    self._status = self.enter(status_lib.kept(self.directory, step=self.step))
    self.enter(self.progress.beaten(self._status.beat))
    data = self.data_epochs[-1]["digests"]
    if has_journal:
      self.journal = self.enter(
        journal_lib.Journal(
          self.directory / journal_lib.FILE_NAME,
          fingerprint=self.fingerprint,
          settings={
            name: value for name, value in self._settings.items() if name not in self._free
          },
          accept_new_numerics=self._accept_new_numerics,
          data=digests.data_of(data),
          accept_new_data=self._accept_new_data,
          # The journal counts steps from 0; step `step` is not complete yet.
          resume_step=self.step - 1,
        )
      )
    for sentence in directory_lib.missing_records(self.directory, self.step, self.journal):
      self.progress.say(sentence)
    metrics.write_summary(
      self.directory / "config.json",
      {**self._settings, "fingerprint": self.fingerprint, "data": data},
    )
    self.writer = self.enter(
      metrics.Writer(
        self.directory,
        resume_step=self.step if self.resume else None,
        total_steps=self.num_steps,
        console_digits=console_digits,
      )
    )
    self.enter(self.progress.shown(self.writer.note))

  def begin(self, state: Any, host_state: HostState, parts: Mapping[str, Any] = NO_PARTS) -> None:
    """Saves a new run's first checkpoint; from here on a stop saves the last completed step."""
    self._state, self._host_state, self._parts = state, host_state, parts
    self._stack.push(self._stopped)
    self.save()
    self._saved_at = time.monotonic()

  @contextlib.contextmanager
  def next_step(self) -> Iterator[Callable[[], object]]:
    """Runs the next step within the block.

    Yields:
      A function that defers stops until the step is complete; call it before the first update.
    """
    self.progress.begin_step(self.step + 1, self.num_steps)
    with contextlib.ExitStack() as whole:
      yield functools.partial(whole.enter_context, self._stops.put_off())
    if jax.process_count() > 1:
      self._stops.raise_together(agreement.most(self._stops.waiting))

  def finish_step(
    self,
    state: Any,
    host_state: HostState,
    numbers: Mapping[str, float],
    parts: Mapping[str, Any] = NO_PARTS,
  ) -> None:
    """Writes a step's metrics and makes its state the one that checkpoints save.

    Call it within `next_step`, so that no stop can separate the two. `parts` are trees of arrays
    that a resumed run may do without (`restored_part`).
    """
    self.writer.write(self.step + 1, numbers)
    self.progress.has_printed()
    self._state, self._host_state, self._parts = state, host_state, parts
    self.step += 1
    self._status.step = self.step

  def save_if_due(self, *, every: int, max_seconds: float | None = None) -> None:
    """Saves the last completed step if it is due.

    Args:
      every: steps between checkpoints; the last step is always due.
      max_seconds: also due if the last checkpoint is older than this.
    """
    is_old = False
    if max_seconds is not None:
      is_old = agreement.from_first(lambda: time.monotonic() - self._saved_at > max_seconds)
    if self.step % every == 0 or self.step == self.num_steps or is_old:
      self.save()
      self._saved_at = time.monotonic()

  def keep_best(self, metric: str) -> None:
    """Keeps the checkpoint of the best evaluation so far; saves it if that is the last step.

    The choice depends on metrics.jsonl only (`directory.best_step`), so a resumed run keeps the
    same checkpoint. `best_checkpoint.json` names it.

    Args:
      metric: metric to compare, higher is better; "" keeps none.

    Raises:
      ValueError: if the last evaluation has no such metric.
    """
    if not metric:
      return
    found = agreement.from_first(lambda: directory_lib.best_step(self.directory, metric, self.step))
    if found is None:
      return
    self._best, value = found
    if self._best == self.step:
      self.save()
    metrics.write_summary(
      self.directory / BEST_FILE_NAME, {"step": self._best, "metric": metric, "value": value}
    )

  def save(self) -> None:
    """Saves the last completed step, unless it is already saved."""
    directory = self.directory / "checkpoints"
    if checkpoint.latest_step(directory) == self.step:
      return
    with self._stops.put_off(), self.progress.phase("saving"):
      checkpoint.save(
        directory,
        self.step,
        self._state,
        host_state={
          **self._host_state(),
          "clock": self.clock.read(),
          "sizes": config_lib.chosen_sizes(self.config),
          "data": self.data_epochs,
        },
        fingerprint=self.fingerprint,
        accept_new_numerics=self._accept_new_numerics,
        # Every process of a slice has complete parts; the first process's are written.
        parts=self._parts if jax.process_count() == 1 else jax.device_get(self._parts),
        keep_latest=self._keep_checkpoints,
        keep_steps=() if self._best is None else (self._best,),
      )

  def finish(self, numbers: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Writes summary.json: `numbers`, and those of every run; returns its contents."""
    done = dict(optimizer_steps=int(state.step), numerics=self.fingerprint, data=self.data_epochs)
    metrics.write_summary(self.directory / "summary.json", {**numbers, **done})
    return {**numbers, **done}

  def _stopped(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Saves the last completed step if a signal ends the run, and raises `Interrupted`."""
    del kind, trace
    if not isinstance(error, KeyboardInterrupt):
      return
    if not state_lib.is_given_up(self._state):  # False after a second signal during an update.
      self.save()
    raise stops_lib.Interrupted(
      f"stopped by {stops_lib.name_of(error)} after step {self.step} of {self.num_steps}; --resume"
      " continues",
      stops_lib.status_of(error),
    ) from None


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns shape, dtype and sharding of an array or `ShapeDtypeStruct`."""
  is_placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if is_placed else None)
