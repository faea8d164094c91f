"""Writes a run's metrics, and masked reductions to compute them.

The metrics of a step are one flat dict of scalars named `room/thing` ("train/loss",
"rollout/reward_mean"), and of arrays of counts. The writer sends each dict to three places:

  metrics.jsonl   one JSON object per line, with counts as lists; reports and resumes read this file
  the console     one line per step, or a progress bar on a terminal; scalars only
  tensorboard/    TensorBoard events; scalars only

Only process 0 writes. On other processes the same calls do nothing, so callers need no condition.

metrics.jsonl is strict JSON (RFC 8259, https://www.rfc-editor.org/rfc/rfc8259), which has no NaN:
non-finite values are the strings "NaN", "Infinity" and "-Infinity", which `read` converts back.
"""

# Protocol buffer classes are created at run time, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import shutil
import time
from typing import Any, Literal

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2

from seerjax.array_typing import Array, Shaped

FILE_NAME = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_.]+)+")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # No space, quota, file size limit.

Scalar = Any  # int, float, bool, or anything with shape () that float() accepts.


# Masked reductions.


def masked_sum(
  values: Shaped[Array, "..."], mask: Shaped[Array, "..."], *, axis: int | None = None
) -> Array:
  """Returns the sum of `values` where `mask` is True, in f32; 0.0 where the mask is empty.

  The masked reductions are for reported metrics. Losses and norms affect the bits of the weights
  and therefore use the trainer's fixed summation tree.

  Args:
    values: [...], any real dtype; masked-out values have no effect, NaN included.
    mask: bool[...], same shape.
    axis: reduced axis, or None for all.

  Returns:
    f32[...] without `axis`.

  Raises:
    ValueError: if the shapes differ or the mask is not boolean.
  """
  _check_mask("masked_sum", values, mask)
  return jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0), axis=axis)


def masked_mean(
  values: Shaped[Array, "..."], mask: Shaped[Array, "..."], *, axis: int | None = None
) -> Array:
  """Returns the mean of `values` where `mask` is True, in f32; 0.0 where the mask is empty.

  Arguments, result and errors as in `masked_sum`.
  """
  _check_mask("masked_mean", values, mask)
  count = jnp.sum(mask, axis=axis, dtype=jnp.int32).astype(jnp.float32)
  return masked_sum(values, mask, axis=axis) / jnp.maximum(count, 1.0)


def masked_max(
  values: Shaped[Array, "..."],
  mask: Shaped[Array, "..."],
  *,
  axis: int | None = None,
  empty: float = 0.0,
) -> Array:
  """Returns the maximum of `values` where `mask` is True, in f32; `empty` where the mask is empty.

  A NaN at an unmasked position makes the result NaN. Arguments otherwise as in `masked_sum`.
  """
  _check_mask("masked_max", values, mask)
  highest = jnp.max(jnp.where(mask, values.astype(jnp.float32), -jnp.inf), axis=axis)
  return jnp.where(jnp.any(mask, axis=axis), highest, empty)


def _check_mask(function: str, values: Array, mask: Array) -> None:
  if values.shape != mask.shape:
    raise ValueError(
      f"{function}: got values of shape {values.shape} and a mask of shape {mask.shape}, expected"
      " equal shapes; broadcast the mask explicitly."
    )
  if mask.dtype != jnp.bool_:
    raise ValueError(
      f"{function}: got a mask of dtype {mask.dtype}, expected bool; compare it with 0."
    )


# Strict JSON.


def encode(value: Any) -> Any:
  """Returns `value` with non-finite floats as strings, and numpy and JAX scalars as Python numbers.

  Raises:
    ValueError: if any part of it is neither JSON nor a scalar.
  """
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, float):
    if math.isfinite(value):
      return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
  if isinstance(value, Mapping):
    return {str(key): encode(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [encode(item) for item in value]
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return encode(dataclasses.asdict(value))
  if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.shape == ():
    return encode(np.asarray(value).astype(_host_dtype(value.dtype)).item())
  raise ValueError(
    f"metrics.encode: got {type(value).__name__} {_short(value)}, expected JSON values or scalars;"
    " reduce arrays to a scalar first."
  )


def _host_dtype(dtype: Any) -> Any:
  # bfloat16 items are not Python floats; float32 holds each of them exactly.
  return np.float32 if dtype == jnp.bfloat16 else dtype


def _short(value: Any) -> str:
  text = repr(value).replace("\n", " ")
  return text if len(text) <= 60 else text[:57] + "..."


def decode_number(value: Any) -> Any:
  """Returns the float that "NaN", "Infinity" or "-Infinity" stands for, anything else unchanged."""
  return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
  """Writes `summary` as strict JSON, atomically; on process 0 only.

  The text is written to a temporary file in the same directory, flushed to disk, and renamed, so a
  reader never sees a partial file.

  Raises:
    OSError: if the disk is full; an existing file is untouched.
    ValueError: if a value is neither JSON nor a scalar.
  """
  path = pathlib.Path(path)
  text = json.dumps(encode(summary), indent=2, allow_nan=False) + "\n"
  if jax.process_index() != 0:
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  neighbour = path.with_name(f".{path.name}.incoming")
  try:
    with open(neighbour, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(neighbour, path)
  except OSError as error:
    neighbour.unlink(missing_ok=True)
    raise disk_error("write_summary", path, error) from error


def disk_error(what: str, path: pathlib.Path, error: OSError) -> OSError:
  """Returns `error`; a full-disk error gets the path, the free space and the remedy added."""
  if error.errno not in FULL_DISK:
    return error
  free = shutil.disk_usage(path.parent).free
  return OSError(
    error.errno,
    f"{what}: got '{os.strerror(error.errno)}' writing {path} ({free} bytes free), expected room"
    " for it; free some space and resume: all earlier results are kept",
  )


# Reading.


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of a metrics file, each a dict with "step"; skips a torn last line.

  Raises:
    ValueError: if a line before the last is not a JSON object with a step.
  """
  path = pathlib.Path(path)
  return [values for values, _ in _lines(path, path.read_bytes())]


def _lines(path: pathlib.Path, data: bytes) -> list[tuple[dict[str, Any], int]]:
  """Returns (values, offset of the line's end) for every complete line of `data`."""
  result = []
  start = 0
  while (newline := data.find(b"\n", start)) >= 0:
    try:
      values = json.loads(data[start:newline])
      int(values["step"])
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f"{path}: got {_short(data[start:newline])} as line {len(result) + 1}, expected a JSON"
        " object with a step; fix or remove that line."
      ) from error
    start = newline + 1
    result.append(({name: decode_number(value) for name, value in values.items()}, start))
  return result


# Writing.


class Writer:
  """Appends metrics to a run's directory. Use as a context manager, or call `close`.

  After a kill, `Writer(directory, resume_step=k)` restores metrics.jsonl to its state after step
  `k`: a torn last line and all lines of later steps are dropped, so the resumed file equals that of
  an uninterrupted run. Write all metrics of a step before its checkpoint.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    resume_step: int | None = None,
    console: Literal["auto", "line", "progress", "off"] = "auto",
    console_digits: Mapping[str, int] | None = None,
    total_steps: int | None = None,
    tensorboard: bool = True,
    stream: rich.console.Console | None = None,
  ):
    """Opens the run's files.

    Args:
      directory: the run's directory; created if missing.
      resume_step: last step to keep; None for a new run.
      console: "line" prints one line per `write`, "progress" draws a bar, "auto" draws a bar on a
        terminal and prints lines elsewhere.
      console_digits: metrics shown on the console, in order, with their significant digits; all
        metrics with four digits if None.
      total_steps: end of the progress bar.
      tensorboard: whether to write TensorBoard events.
      stream: console to write to; standard output by default.

    Raises:
      ValueError: if a new run finds an existing metrics file, or the file is corrupt before its
        last line.
      OSError: if the directory is not writable.
    """
    self.path = pathlib.Path(directory) / FILE_NAME
    self._is_writer = jax.process_index() == 0
    self._console_digits = console_digits
    self._warned: set[str] = set()
    self._last_step = -1
    self._offset = 0
    self._descriptor: int | None = None
    self._events: record_writer.RecordWriter | None = None
    self._progress: rich.progress.Progress | None = None
    self._console: rich.console.Console | None = None
    if not self._is_writer:
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      self._truncate(resume_step)
    except BaseException:
      self.close()
      raise
    if tensorboard:
      events = self.path.parent / TENSORBOARD_DIRECTORY
      events.mkdir(exist_ok=True)
      # One file per start: TensorBoard drops events of earlier files that are at or after the first
      # step of the new session.
      name = f"events.out.tfevents.{time.time_ns():020d}.seerjax"
      self._events = record_writer.RecordWriter(str(events / name))
      self._event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
      if resume_step is not None:
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._event(
          event_pb2.Event(wall_time=time.time(), step=resume_step + 1, session_log=session)
        )
    if console != "off":
      self._console = stream or rich.console.Console(soft_wrap=True, highlight=False)
      if console == "progress" or (console == "auto" and self._console.is_terminal):
        self._progress = rich.progress.Progress(
          rich.progress.TextColumn("step {task.completed}"),
          rich.progress.BarColumn(),
          rich.progress.TimeElapsedColumn(),
          rich.progress.TextColumn("{task.description}", markup=False),
          rich.progress.TextColumn("{task.fields[note]}", markup=False, style="dim"),
          console=self._console,
        )
        self._task = self._progress.add_task(
          "", total=total_steps, completed=resume_step or 0, note=""
        )
        self._progress.start()

  @property
  def offset(self) -> int:
    """Size in bytes of the complete lines of metrics.jsonl."""
    return self._offset

  def write(self, step: int, values: Mapping[str, Scalar | np.ndarray]) -> None:
    """Appends the metrics of one step.

    Args:
      step: step number, at least that of the previous call.
      values: values by `room/thing`, each a number, an array of shape (), or a numpy array of
        counts, i[n].

    Raises:
      ValueError: for a decreasing step, a malformed name, or a value that is neither.
      OSError: if the disk is full; the file then ends with its last complete line, and the same
        step may be written again.
    """
    if step < self._last_step:
      raise ValueError(
        f"metrics.write: got step {step} after step {self._last_step}, expected non-decreasing"
        " steps; open the writer with resume_step to drop later steps."
      )
    scalars, counts = {}, {}
    for name, value in values.items():
      is_counts = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
      (counts if is_counts else scalars)[name] = value
    for name in values:
      if not NAME.fullmatch(name):
        raise ValueError(
          f"metrics.write: got the name {name!r}, expected room/thing in lower case, such as"
          " 'train/loss'; rename it."
        )
    texts = {name: encode(value) for name, value in scalars.items()}
    numbers = {name: decode_number(texts[name]) for name in sorted(texts)}
    lists = {name: value.tolist() for name, value in counts.items()}
    line = {"step": int(step)} | dict(sorted((texts | lists).items()))
    for name, value in numbers.items():
      if isinstance(value, str) or value is None or isinstance(value, (dict, list)):
        raise ValueError(
          f"metrics.write: got {_short(scalars[name])} for {name!r}, expected a number; text"
          " belongs"
          " in the summary."
        )
      if not math.isfinite(value) and name not in self._warned:
        self._warned.add(name)
        logging.warning(
          "%s is %s at step %d; further such values are not reported", name, value, step
        )
    if not self._is_writer:
      self._last_step = step
      return
    self._append((json.dumps(line, allow_nan=False) + "\n").encode())
    self._last_step = step
    if self._events is not None:
      summary = summary_pb2.Summary(
        value=[
          summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
      )
      self._event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
    self._show(step, numbers)

  def print(self, text: str) -> None:
    """Prints a line above the progress bar or on the console, if there is one."""
    if self._console is not None:
      self._console.print(text, markup=False)

  def note(self, text: str) -> bool:
    """Shows the current activity next to the progress bar; returns False if there is no bar."""
    progress = self._progress  # Another thread may close it.
    if progress is None:
      return False
    progress.update(self._task, note=text)
    return True

  def close(self) -> None:
    """Closes the files and the progress bar; may be called twice."""
    if self._progress is not None:
      self._progress.stop()
      self._progress = None
    if self._events is not None:
      self._events.close()
      self._events = None
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _truncate(self, resume_step: int | None) -> None:
    data = self.path.read_bytes()
    if data and resume_step is None:
      raise ValueError(
        f"{self.path}: got an existing file of {len(data)} bytes, expected none at the start of a"
        " new run; resume that run, or choose another directory."
      )
    for values, end in _lines(self.path, data):
      if values["step"] > (-1 if resume_step is None else resume_step):
        break
      self._offset, self._last_step = end, values["step"]
    assert self._descriptor is not None
    os.ftruncate(self._descriptor, self._offset)
    os.fsync(self._descriptor)

  def _append(self, line: bytes) -> None:
    if self._descriptor is None:
      raise ValueError(
        f"metrics.write: got a closed writer of {self.path}, expected an open one; write before"
        " close."
      )
    try:
      done = 0
      while done < len(line):
        done += os.pwrite(self._descriptor, line[done:], self._offset + done)
      os.fsync(self._descriptor)
    except OSError as error:
      os.ftruncate(self._descriptor, self._offset)  # Remove the torn line.
      raise disk_error("metrics.write", self.path, error) from error
    self._offset += len(line)

  def _event(self, event: event_pb2.Event) -> None:
    # Bypasses tensorboardX's queue: its thread hides a full disk and then blocks.
    assert self._events is not None
    try:
      self._events.write(event.SerializeToString())
      self._events.flush()
    except OSError as error:
      raise disk_error("metrics.write", self.path.parent / TENSORBOARD_DIRECTORY, error) from error

  def _show(self, step: int, numbers: Mapping[str, float]) -> None:
    if self._console is None:
      return
    digits = dict.fromkeys(numbers, 4) if self._console_digits is None else self._console_digits
    shown = {name: f"{numbers[name]:.{digits[name]}g}" for name in digits if name in numbers}
    text = "  ".join(f"{name.split('/')[-1]} {number}" for name, number in shown.items())
    if self._progress is not None:
      if text:
        self._progress.update(self._task, description=text)
      self._progress.update(self._task, completed=step)
    elif text:
      self._console.print(f"step {step}  {text}", markup=False)
