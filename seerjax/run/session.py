"""A run's life in its directory, which every loop that trains enters.

    with Session(directory, num_steps=..., resume=..., log=...) as run:
                                         a directory that will not do is refused, Ctrl-C is heard
      run.hold_to(settings, ...)         what a run to resume must have begun with
      found = run.restore(like, ...)     what its latest checkpoint holds, None of a new run
      run.open(...)                      status.json, journal, config.json, metrics.jsonl
      run.begin(state, host_state)       the first checkpoint: from here on a stop saves
      while run.step < num_steps:
        with run.next_step() as put_off_stops:
          ...                            `put_off_stops` before the first update of the weights
          run.finish_step(state, host_state, numbers)
        run.save_if_due(every=...)

A checkpoint holds the state (a tree of arrays) and the host state (JSON) of the last whole step,
the run's clock, and which settings its model chose. Ctrl-C and SIGTERM end the `with` as one
`stops.Interrupted`, when that step has been saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import pathlib
import time
from typing import Any

import jax

from seerjax import agreement, checkpoint, metrics
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  directory as directory_lib,
  progress as progress_lib,
  status as status_lib,
  stops as stops_lib,
  summary,
)
from seerjax.tasks import digests
from seerjax.trainer import state as state_lib

# Names the step of the best checkpoint, by which metric it is, and the metric's value.
BEST_FILE_NAME = "best_checkpoint.json"
# Of a checkpoint's parts, none.
NO_PARTS: Mapping[str, Any] = {}
# Returns what a checkpoint holds besides arrays, as JSON; asked when one is due.
HostState = Callable[[], Mapping[str, Any]]


class Session:
  """One run of this process; see above.

  Attributes:
    directory: of the run.
    num_steps: that the run is going to have.
    step: whole steps so far.
    progress: what people are told, and what the run is at.
    clock: of all processes of the run.
    data_epochs: digests of the data (`tasks.digests`), each with the step from which on they hold.
    journal: finished rollouts, once open; None of a run without one.
    writer: of metrics.jsonl, once open.
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
    """Takes what holds for every run; nothing is touched before `open`.

    Args:
      directory: of the run.
      num_steps: that the run is going to have.
      resume: carry on from the latest checkpoint.
      accept_new_numerics: resume under another fingerprint, as a new epoch.
      accept_new_data: resume with other data, as a new epoch.
      log: takes lines for people.
      keep_checkpoints: how many of the newest are kept.
    """
    self.directory = pathlib.Path(directory)
    self.num_steps = num_steps
    self.step = 0
    self.journal: journal_lib.Journal | None = None
    self.data_epochs: list[dict[str, Any]] = []
    self._resume, self._accept_new_numerics = resume, accept_new_numerics
    self._accept_new_data = accept_new_data
    self._log, self._keep_checkpoints = log, keep_checkpoints
    self._fingerprint: dict[str, str] = {}
    self._settings: Mapping[str, Any] = {}
    self._free: Sequence[str] = ()
    self._sizes: Mapping[str, Any] = {}
    self._state: Any = None
    self._parts: Mapping[str, Any] = NO_PARTS
    self._host_state: HostState = dict
    self._saved_at = 0.0
    self._best: int | None = None  # The step of the best checkpoint, which is kept.

  def __enter__(self) -> Session:
    with contextlib.ExitStack() as stack:
      self._stops = stack.enter_context(stops_lib.heard())
      if jax.process_count() > 1:
        # Processes that run one program stop at one place: between two steps.
        stack.enter_context(self._stops.put_off())
      self.progress = stack.enter_context(progress_lib.Progress(self._log))
      self.clock = summary.RunClock()
      directory_lib.check_directory(self.directory, resume=self._resume)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error: Any) -> None:
    self._stack.__exit__(*error)

  def enter(self, part: contextlib.AbstractContextManager[Any]) -> Any:
    """Enters a part of the loop's own, to be left with the session, before its files."""
    return self._stack.enter_context(part)

  def hold_to(
    self,
    settings: Mapping[str, Any],
    *,
    free: Sequence[str],
    data: Mapping[str, str],
  ) -> None:
    """Takes the run's settings; a checkpoint that tells its own must have the same ones.

    Args:
      settings: of the run, JSON, with what was left to the model decided.
      free: names of settings that a resume may change.
      data: digests of what is read besides (`tasks.digests`).

    Raises:
      ValueError: naming those that differ with both values.
    """
    agreement.compare("settings of the run", settings)
    agreement.compare("data of the run", dict(data))
    self._settings, self._free = settings, free
    if self._resume:
      host_state = checkpoint.read_host_state(self.directory / "checkpoints")
      stored = host_state.get("config")
      if stored is not None:  # Else the journal tells.
        directory_lib.check_settings(stored, settings, free=free)
      # A run that does not tell its data began before they were recorded.
      self.data_epochs = host_state.get("data", [])
    self._hold_to_data(dict(data))

  def _hold_to_data(self, data: dict[str, str]) -> None:
    """Takes the digests of the data; a checkpoint that tells its own must have the same ones.

    Raises:
      ValueError: naming those that differ with both values, unless new data are accepted.
    """
    step = checkpoint.latest_step(self.directory / "checkpoints") or 0
    stored = self.data_epochs[-1]["digests"] if self.data_epochs else data
    if not self._accept_new_data:
      digests.require_same(stored, data, what="--resume")
    if changed := digests.differences(stored, data):
      self.progress.say(
        f"OTHER DATA OR CODE from step {step + 1} on: {'; '.join(changed)}. Rewards and accuracies"
        " before and after may be of unlike problems or judges."
      )
    if changed or not self.data_epochs:
      self.data_epochs = [*self.data_epochs, {"step": step, "digests": data}]

  def restore(
    self, like: Callable[[], Any], *, fingerprint: Mapping[str, str]
  ) -> checkpoint.Restored | None:
    """Returns what the latest checkpoint holds, None of a new run.

    Args:
      like: returns a state of the run's shapes, which lies where this one shall.
      fingerprint: of the run's numerics.

    Raises:
      ValueError: if the checkpoint is of other shapes or of other numerics.
    """
    self._fingerprint = dict(fingerprint)
    agreement.compare("numerics of the run", self._fingerprint)
    if not self._resume:
      return None
    restored = checkpoint.restore(
      self.directory / "checkpoints",
      jax.tree.map(_abstract, like()),
      fingerprint=fingerprint,
      accept_new_numerics=self._accept_new_numerics,
    )
    self.step = restored.step
    self.clock.carry_on(restored.host_state["clock"])
    self.progress.say(f"resumed after step {self.step} of {self.num_steps}")
    return restored

  def restored_part(self, name: str, like: Callable[[], Any]) -> Any:
    """Returns a part of the checkpoint that was restored; None of a new run, or one without it.

    Args:
      name: of the part.
      like: returns a tree of its shapes; it is traced, nothing is computed.

    Raises:
      ValueError: if the part is of other shapes.
    """
    if not self._resume:
      return None
    return checkpoint.restore_part(
      self.directory / "checkpoints", name, jax.eval_shape(like), step=self.step
    )

  def open(
    self,
    *,
    sizes: Mapping[str, Any],
    console_digits: Mapping[str, int],
    has_journal: bool = True,
  ) -> None:
    """Opens the run's files.

    Args:
      sizes: what the model decided, for a resume.
      console_digits: what the progress bar shows.
      has_journal: whether rollouts are kept.

    Raises:
      ValueError: if another process is at the directory, or the journal is of other settings.
    """
    self._sizes = sizes
    self._status = self.enter(status_lib.kept(self.directory, step=self.step))
    self.enter(self.progress.beaten(self._status.beat))
    data = self.data_epochs[-1]["digests"]
    if has_journal:
      self.journal = self.enter(
        journal_lib.Journal(
          self.directory / journal_lib.FILE_NAME,
          fingerprint=self._fingerprint,
          settings={
            name: value for name, value in self._settings.items() if name not in self._free
          },
          accept_new_numerics=self._accept_new_numerics,
          data=digests.data_of(data),
          accept_new_data=self._accept_new_data,
          # It counts steps from 0: what step `step` sampled is not of a whole step yet.
          resume_step=self.step - 1,
        )
      )
    for sentence in directory_lib.missing_records(self.directory, self.step, self.journal):
      self.progress.say(sentence)
    metrics.write_summary(
      self.directory / "config.json",
      {**self._settings, "fingerprint": self._fingerprint, "data": data},
    )
    self.writer = self.enter(
      metrics.Writer(
        self.directory,
        resume_step=self.step if self._resume else None,
        total_steps=self.num_steps,
        console_digits=console_digits,
      )
    )
    self.enter(self.progress.shown(self.writer.note))

  def begin(
    self, state: Any, host_state: HostState, parts: Mapping[str, Any] = NO_PARTS
  ) -> None:
    """Saves a new run's first checkpoint; from here on a stop saves the last whole step."""
    self._state, self._host_state, self._parts = state, host_state, parts
    self._stack.push(self._stopped)
    self.save()
    self._saved_at = time.monotonic()

  @contextlib.contextmanager
  def next_step(self) -> Iterator[Callable[[], object]]:
    """Within, the next step is taken.

    Yields:
      What puts a stop off until the step is whole, to be called when its first update comes.
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
    """Writes a step's numbers; from here on its state is what a checkpoint would hold.

    Call it within `next_step`, so that the two go together whenever a stop comes. `parts` are trees
    of arrays that a resumed run may do without (`restored_part`).
    """
    self.writer.write(self.step + 1, numbers)
    self.progress.has_printed()
    self._state, self._host_state, self._parts = state, host_state, parts
    self.step += 1
    self._status.step = self.step

  def save_if_due(self, *, every: int, max_seconds: float | None = None) -> None:
    """Saves the last whole step if it is due.

    Args:
      every: steps; the run's last one is due as well.
      max_seconds: age of the last checkpoint, beyond which the next is due.
    """
    is_old = False
    if max_seconds is not None:
      is_old = agreement.from_first(lambda: time.monotonic() - self._saved_at > max_seconds)
    if self.step % every == 0 or self.step == self.num_steps or is_old:
      self.save()
      self._saved_at = time.monotonic()

  def keep_best(self, metric: str) -> None:
    """Keeps the checkpoint of the best evaluation so far, and saves it if it is the last step's.

    Which one that is follows from metrics.jsonl alone (`directory.best_step`), so that a resumed
    run keeps the same one. `best_checkpoint.json` names it.

    Args:
      metric: by which evaluations are compared, the higher the better; "" keeps none.

    Raises:
      ValueError: if the last evaluation has no such metric.
    """
    if not metric:
      return
    found = agreement.from_first(
      lambda: directory_lib.best_step(self.directory, metric, self.step)
    )
    if found is None:
      return
    self._best, value = found
    if self._best == self.step:
      self.save()
    metrics.write_summary(
      self.directory / BEST_FILE_NAME, {"step": self._best, "metric": metric, "value": value}
    )

  def save(self) -> None:
    """Saves the last whole step, if it is not saved yet."""
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
          "sizes": self._sizes,
          "data": self.data_epochs,
        },
        fingerprint=self._fingerprint,
        accept_new_numerics=self._accept_new_numerics,
        # Each process of a slice has them whole; the first one's are written.
        parts=self._parts if jax.process_count() == 1 else jax.device_get(self._parts),
        keep_latest=self._keep_checkpoints,
        keep_steps=() if self._best is None else (self._best,),
      )

  def _stopped(self, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Saves the last whole step where a signal ends the run, and says so."""
    del kind, trace
    if not isinstance(error, KeyboardInterrupt):
      return
    if not state_lib.is_given_up(self._state):  # A second one, in the middle of an update.
      self.save()
    raise stops_lib.Interrupted(
      f"stopped by {stops_lib.name_of(error)} after step {self.step} of {self.num_steps}; --resume"
      " goes on",
      stops_lib.status_of(error),
    ) from None


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns shape, dtype and place of an array, or of its shape."""
  is_placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
  return jax.ShapeDtypeStruct(
    leaf.shape, leaf.dtype, sharding=leaf.sharding if is_placed else None
  )
