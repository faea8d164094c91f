"""Saves and restores checkpoints: arrays through Orbax, all other state in one JSON file.

  checkpoints/
    step_00000012/          published: complete, on disk, never changed again
      checkpoint.json       format, step, host state, numerics fingerprints, leaves, checksums
      state/                Orbax: every array, named by its path in the tree
      PART/                 like `state`; an optional part (`parts`)
    .incoming_00000016/     a save in progress, or one that was killed; never read
    damaged_step_00000016/  renamed by `set_aside_damaged`; never read

A save fills `.incoming_*`, flushes it to disk, and publishes it with one rename, so that a reader
sees a complete checkpoint or none. Before a restore reads any array, it checks the fingerprint, the
checksum of every file, and the shape and dtype of every leaf.

The directory is on a local or shared POSIX file system or in an object store (gs://, s3://); only
one run at a time may write to it. It may also be a text file that contains such a location: if a
run's `checkpoints` is that file, its checkpoints are stored there. In an object store, a checkpoint
is published by `checkpoint.json`, which is written last (`object_store`); uploads and downloads are
staged in the directory for temporary files.

On several hosts every process must call `save` and `restore`, although only the write is
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import tempfile
import threading
from typing import Any, NamedTuple

from etils import epath
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from seerjax import metrics, numerics, object_store

FORMAT = 1
DESCRIPTION = "checkpoint.json"
ARRAYS = "state"

Place = pathlib.Path | epath.Path
_PUBLISHED = re.compile(r"step_(\d{8,})")
_HIDDEN = (".incoming_", ".removed_")


class Damage(ValueError):
  """Raised when files of a checkpoint differ from what was saved."""


class Epoch(NamedTuple):
  """Part of a run under one numerics fingerprint.

  Attributes:
    step: the step after which the epoch starts.
    fingerprint: see `numerics.fingerprint`.
  """

  step: int
  fingerprint: dict[str, str]


class Restored(NamedTuple):
  """A restored checkpoint.

  Attributes:
    step: step at which it was saved.
    state: pytree of arrays, bit for bit.
    host_state: JSON, as passed to `save`.
    epochs: all numerics epochs of the run so far, ending with this checkpoint's.
  """

  step: int
  state: Any
  host_state: dict[str, Any]
  epochs: tuple[Epoch, ...]


def steps(directory: str | os.PathLike) -> tuple[int, ...]:
  """Returns the steps with a published checkpoint, ascending; empty if there is no directory."""
  place = _open(directory)
  if not place.is_dir():
    return ()
  found = [(_PUBLISHED.fullmatch(path.name), path) for path in place.iterdir()]
  return tuple(sorted(int(match[1]) for match, path in found if match and _is_published(path)))


def latest_step(directory: str | os.PathLike) -> int | None:
  """Returns the highest step with a published checkpoint, None if there is none."""
  return max(steps(directory), default=None)


def set_aside_damaged(directory: str | os.PathLike) -> list[str]:
  """Renames damaged checkpoints, newest first, so that a restore uses the newest intact one.

  The oldest checkpoint is never renamed, even if it is damaged.

  Args:
    directory: directory of all checkpoints of the run; call from one process only.

  Returns:
    One sentence for each renamed checkpoint.
  """
  place = _open(directory)
  messages = []
  for step in reversed(steps(directory)[1:]):
    path = _path(place, step)
    try:
      files = _describe(path)["files"]
      with _local_copy(path) as copy:
        _require_whole(copy, files)
      break
    except Damage as error:
      aside = _set_aside(path)
      before = max(other for other in steps(directory))
      messages.append(
        f"DAMAGED CHECKPOINT of step {step}: {error} It was renamed to {aside.name}, and the run"
        f" resumes from step {before}."
      )
  return messages


def _set_aside(path: Place) -> Place:
  """Renames a checkpoint so that it no longer counts as one; returns the new path.

  In an object store, the marker file is renamed instead.
  """
  if isinstance(path, epath.Path):
    return object_store.unpublish(path, DESCRIPTION)
  for number in range(1, 10**6):
    aside = path.with_name(f"damaged_{path.name}" + (f"_{number}" if number > 1 else ""))
    if not aside.exists():
      os.rename(path, aside)
      _sync(path.parent)
      return aside
  raise AssertionError("a million damaged checkpoints for one step")


def save(
  directory: str | os.PathLike,
  step: int,
  state: Any,
  *,
  host_state: Mapping[str, Any],
  fingerprint: Mapping[str, str],
  accept_new_numerics: bool = False,
  parts: Mapping[str, Any] | None = None,
  keep_latest: int = 3,
  keep_every: int = 0,
  keep_steps: Collection[int] = (),
) -> Place:
  """Publishes a checkpoint, then removes checkpoints that are no longer kept.

  Args:
    directory: directory of all checkpoints of the run.
    step: step of this checkpoint.
    state: pytree of arrays: parameters, optax state, typed PRNG keys.
    host_state: all other state (data position, counters, metrics offset, config), as JSON.
    fingerprint: the run's numerics fingerprint.
    accept_new_numerics: allow a fingerprint that differs from the previous checkpoint's; both are
      recorded.
    parts: further pytrees of arrays by name, which `restore` ignores; see `restore_part`.
    keep_latest: number of newest checkpoints to keep, at least 1.
    keep_every: also keep steps that are multiples of this; 0 for none.
    keep_steps: further steps to keep, such as that of the best evaluation.

  Returns:
    The published directory, or its location in an object store.

  Raises:
    ValueError: if the step exists already, `host_state` would not survive JSON, a leaf is not an
      array or not finite, or the fingerprint differs from the previous checkpoint's (the message
      names both values).
    OSError: if the disk is full; earlier checkpoints are untouched.
    NotImplementedError: for an object store with more than one process.
    KeyboardInterrupt: on Ctrl-C, after the checkpoint is complete; on a second one immediately.
  """
  place = _open(directory)
  if keep_latest < 1 or keep_every < 0:
    raise ValueError(
      f"checkpoint.save: got keep_latest={keep_latest} and keep_every={keep_every}, expected at"
      " least 1 and at least 0; keep_latest=3, keep_every=0 are usual."
    )
  if step < 0:
    raise ValueError(f"checkpoint.save: got step {step}, expected at least 0; count steps from 0.")
  target = _path(place, step)
  if _is_published(target):
    raise ValueError(
      f"checkpoint.save: got step {step}, which {target} already holds, expected a new step; resume"
      " from the latest one, or choose another directory."
    )
  _require_json(host_state, "host_state")
  trees = {ARRAYS: _leaves(state, "checkpoint.save: state")}
  for name, part in (parts or {}).items():
    if name in (ARRAYS, DESCRIPTION) or not name.isidentifier():
      raise ValueError(
        f"checkpoint.save: got a part named {name!r}, expected letters only, and not {ARRAYS!r};"
        " rename it."
      )
    trees[name] = _leaves(part, f"checkpoint.save: {name}")
  for name, leaves in trees.items():
    numerics.require_finite(
      leaves,
      what=f"checkpoint.save: {name} of step {step}",
      remedy="continue from the last checkpoint, with a lower learning rate if training diverged",
    )
  epochs = _continue_epochs(place, step, dict(fingerprint), accept_new_numerics)

  is_kept = lambda one: one in keep_steps or bool(keep_every and one % keep_every == 0)
  with _interrupts_put_off():
    if not isinstance(place, epath.Path):
      incoming = place / f".incoming_{step:08d}"
      _publish(place, step, trees, host_state, epochs, incoming, keep_latest, is_kept)
      return target
    if jax.process_count() > 1:
      raise NotImplementedError(
        f"checkpoint.save: got {place} from {jax.process_count()} processes, expected one process:"
        " they have no shared directory to write to first; keep checkpoints on a shared disk, and"
        " copy them from there."
      )
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
      here = pathlib.Path(name)
      incoming = here / f".incoming_{step:08d}"
      _publish(here, step, trees, host_state, epochs, incoming, 1, lambda one: True)
      object_store.publish(_path(here, step), target, DESCRIPTION)
    _remove_old(place, keep_latest, is_kept)
  return target


def _publish(
  directory: pathlib.Path,
  step: int,
  trees: Mapping[str, Mapping[str, Any]],
  host_state: Mapping[str, Any],
  epochs: tuple[Epoch, ...],
  incoming: pathlib.Path,
  keep_latest: int,
  is_kept: Callable[[int], bool],
) -> None:
  """Fills `incoming`, publishes it, and removes old checkpoints; see `save`."""
  target = _path(directory, step)
  try:
    if jax.process_index() == 0:
      directory.mkdir(parents=True, exist_ok=True)
      for path in directory.iterdir():
        if path.name.startswith(_HIDDEN):
          shutil.rmtree(path)
      incoming.mkdir()
    _barrier("checkpoint_directory")
    # A flat dict, so that the files do not depend on how containers are spelled. Orbax rejects
    # empty arrays; the description suffices to restore them.
    with _orbax_errors(directory, step):
      for tree, leaves in trees.items():
        ocp.save(str(incoming / tree), {name: leaf for name, leaf in leaves.items() if leaf.size})
    _barrier("checkpoint_arrays")
    if jax.process_index() == 0:
      description = {
        "format": FORMAT,
        "step": int(step),
        "host_state": dict(host_state),
        "epochs": [epoch._asdict() for epoch in epochs],
        "leaves": _shape_words(trees[ARRAYS]),
        "parts": {name: _shape_words(tree) for name, tree in trees.items() if name != ARRAYS},
        "files": {
          str(path.relative_to(incoming)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
          for path in _files(incoming)
        },
      }
      description["sha256"] = _json_sha256(description)
      (incoming / DESCRIPTION).write_text(json.dumps(description, indent=1, allow_nan=False) + "\n")
      _to_disk(incoming)
      os.rename(incoming, target)
      _sync(directory)
      _remove_old(directory, keep_latest, is_kept)
  except BaseException as error:
    if jax.process_index() == 0:
      shutil.rmtree(incoming, ignore_errors=True)
    if isinstance(error, OSError):
      raise metrics.disk_error("checkpoint.save", directory, error) from error
    raise
  _barrier("checkpoint_published")


def read_host_state(directory: str | os.PathLike, step: int | None = None) -> dict[str, Any]:
  """Returns a checkpoint's host state without reading its arrays.

  Args:
    directory: directory of all checkpoints of the run.
    step: step to read; the latest by default.

  Raises:
    ValueError: if the checkpoint is missing or its description is damaged.
  """
  return _describe(_find(_open(directory), step))["host_state"]


def restore(
  directory: str | os.PathLike,
  abstract_state: Any,
  *,
  fingerprint: Mapping[str, str],
  step: int | None = None,
  accept_new_numerics: bool = False,
) -> Restored:
  """Restores a checkpoint, bit for bit.

  Args:
    directory: directory of all checkpoints of the run.
    abstract_state: pytree of arrays or `jax.ShapeDtypeStruct`. A leaf with a sharding determines
      the placement of its array; others go to the first device. numpy leaves are restored as numpy
      arrays.
    fingerprint: this run's numerics fingerprint.
    step: step to restore; the latest by default.
    accept_new_numerics: accept a checkpoint with another fingerprint; this run's is then appended
      to the epochs, as in later saves that also accept it.

  Returns:
    See `Restored`.

  Raises:
    ValueError: if the checkpoint is missing, truncated or altered (the message names the file), has
      another fingerprint (it names both), has other leaves, shapes or dtypes (it names each leaf),
      or is not finite.
  """
  path = _find(_open(directory), step)
  description = _describe(path)
  epochs = tuple(Epoch(**epoch) for epoch in description["epochs"])
  if epochs[-1].fingerprint != dict(fingerprint):
    if not accept_new_numerics:
      numerics.require_same(epochs[-1].fingerprint, dict(fingerprint), what=str(path))
    epochs += (Epoch(description["step"], dict(fingerprint)),)
  state = _arrays(path, ARRAYS, description["leaves"], description["files"], abstract_state)
  return Restored(description["step"], state, description["host_state"], epochs)


def restore_part(
  directory: str | os.PathLike, name: str, abstract: Any, *, step: int | None = None
) -> Any:
  """Restores one part of a checkpoint, bit for bit; None if it was saved without that part.

  Args:
    directory: directory of all checkpoints of the run.
    name: name of the part.
    abstract: pytree, like `abstract_state` of `restore`.
    step: step to restore; the latest by default.

  Raises:
    ValueError: as `restore`, except that numerics are not checked.
  """
  path = _find(_open(directory), step)
  description = _describe(path)
  if name not in description.get("parts", {}):
    return None
  return _arrays(path, name, description["parts"][name], description["files"], abstract)


def _arrays(
  path: Place,
  tree: str,
  stored: Mapping[str, str],
  files: Mapping[str, Mapping[str, Any]],
  abstract_tree: Any,
) -> Any:
  """Returns the arrays of one tree of a checkpoint; all files are checked before any is read."""
  wanted = _leaves(abstract_tree, f"checkpoint.restore: {tree}")
  _require_equal_leaves(path, stored, wanted)
  if isinstance(path, epath.Path):  # Only this tree is downloaded.
    files = {name: file for name, file in files.items() if name.startswith(f"{tree}/")}
  abstract = {name: _placed(leaf) for name, leaf in wanted.items() if np.prod(leaf.shape)}
  with _local_copy(path, tree) as copy:
    _require_whole(copy, files)
    arrays = jax.block_until_ready(ocp.load(str(copy / tree), abstract))
  for name, leaf in wanted.items():
    if name not in arrays:
      arrays[name] = (np if isinstance(leaf, np.ndarray) else jnp).zeros(leaf.shape, leaf.dtype)
  numerics.require_finite(arrays, what=str(path), remedy="resume from an earlier step")
  return jax.tree.unflatten(jax.tree.structure(abstract_tree), [arrays[name] for name in wanted])


def _find(directory: Place, step: int | None) -> Place:
  """Returns the path of a step's checkpoint (default: the latest); raises if there is none."""
  if step is None:
    step = latest_step(directory)
  if step is None or not _is_published(_path(directory, step)):
    raise ValueError(
      f"checkpoint.restore: got step {step} of {directory}, expected one of {steps(directory)};"
      " choose another step or directory, or start a new run."
    )
  return _path(directory, step)


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
  """Defers a first Ctrl-C until the block ends.

  Otherwise Orbax's threads outlive their event loop and log long tracebacks. A second Ctrl-C acts
  at once, and a caller's own signal handler is not replaced.
  """
  handler, waiting = signal.getsignal(signal.SIGINT), []
  is_main = threading.current_thread() is threading.main_thread()
  if handler is not signal.default_int_handler or not is_main:
    yield
    return

  def wait(number: int, frame: Any) -> None:
    if waiting:
      raise KeyboardInterrupt
    waiting.append(number)

  signal.signal(signal.SIGINT, wait)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
  if waiting:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _orbax_errors(directory: pathlib.Path, step: int) -> Iterator[None]:
  """Raises Orbax's disk errors as OSError, and hides the tracebacks of Orbax's threads."""
  # Filters apply only to the logger that a record is logged to, hence "absl". Adding the same
  # filter twice has no effect.
  logging.getLogger("absl").addFilter(_is_not_of_a_thread)
  try:
    yield
  except ValueError as error:
    found = re.search(r"Failed to write.*|Failed writing.*", str(error))
    if found is None:
      raise
    raise OSError(
      f"{directory}: got {found[0][:300]!r} while step {step} was saved, expected room for it; free"
      " some space, and resume: earlier checkpoints are intact."
    ) from None


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
  """Drops thread exceptions that Orbax logs; the awaiting caller raises the same exception.

  The filter is never removed, because an abandoned save leaves threads behind.
  """
  return "_SignalingThread.run() raised" not in str(record.msg)


def _path(directory: Any, step: int) -> Any:
  return directory / f"step_{step:08d}"


def _open(directory: str | os.PathLike) -> Place:
  """Resolves the checkpoint location: the directory itself, or the location named in a file."""
  if object_store.is_remote(directory):
    return object_store.open_place(os.fspath(directory))
  object_store.require_two_slashes(directory)
  path = pathlib.Path(directory).resolve()
  if path.is_file():
    named = path.read_text().strip()
    if not object_store.is_remote(named):
      raise ValueError(
        f"{path}: got a file with the text {named[:80]!r}, expected a directory, or a file with a"
        " URL such as gs://bucket/run; write one, or remove the file."
      )
    return object_store.open_place(named)
  return path


def _is_published(path: Place) -> bool:
  """Returns whether a checkpoint exists: its directory, or its marker in an object store."""
  return (path / DESCRIPTION).exists() if isinstance(path, epath.Path) else path.is_dir()


@contextlib.contextmanager
def _local_copy(path: Place, tree: str = "") -> Iterator[pathlib.Path]:
  """Yields a local directory with one tree of a checkpoint (default: all); downloads if remote."""
  if not isinstance(path, epath.Path):
    yield path
    return
  with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
    copy = pathlib.Path(name) / path.name
    object_store.fetch(path, copy, tree)
    yield copy


def _leaves(tree: Any, what: str) -> dict[str, Any]:
  """Returns a tree's leaves by path, such as "params/layers/0/weight"."""
  result = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if isinstance(leaf, np.generic):
      leaf = np.asarray(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
      raise ValueError(
        f"{what}: got {type(leaf).__name__} {leaf!r} at {name!r}, expected an array; put it into"
        " host_state, or make it an array."
      )
    if name in result:
      raise ValueError(
        f"{what}: got two leaves that are both named {name!r}, expected distinct paths; rename one."
      )
    result[name] = leaf
  return result


def _shape_words(leaves: Mapping[str, Any]) -> dict[str, str]:
  return {name: f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]" for name, leaf in leaves.items()}


def _placed(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray):
    return leaf
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _continue_epochs(
  directory: Place, step: int, fingerprint: dict[str, str], accept_new_numerics: bool
) -> tuple[Epoch, ...]:
  """Returns the previous checkpoint's epochs, plus a new one if the fingerprint differs."""
  before = max((other for other in steps(directory) if other < step), default=None)
  if before is None:
    return (Epoch(0, fingerprint),)
  path = _path(directory, before)
  epochs = tuple(Epoch(**epoch) for epoch in _describe(path)["epochs"])
  if epochs[-1].fingerprint == fingerprint:
    return epochs
  if not accept_new_numerics:
    numerics.require_same(epochs[-1].fingerprint, fingerprint, what=str(path))
  return (*epochs, Epoch(before, fingerprint))


def _require_json(value: Any, where: str) -> None:
  """Raises for values that JSON does not restore exactly: tuples, int keys, NaN, arrays."""
  if value is None or isinstance(value, (str, bool, int)):
    if type(value) in (str, bool, int, type(None)):
      return
  elif isinstance(value, float):
    if type(value) is float and np.isfinite(value):
      return
  elif isinstance(value, Mapping):
    for key, item in value.items():
      if not isinstance(key, str):
        raise ValueError(
          f"checkpoint.save: got the key {key!r} in {where}, expected a string; convert it."
        )
      _require_json(item, f"{where}[{key!r}]")
    return
  elif isinstance(value, list):
    for index, item in enumerate(value):
      _require_json(item, f"{where}[{index}]")
    return
  raise ValueError(
    f"checkpoint.save: got {type(value).__name__} {value!r} at {where}, expected JSON that"
    " round-trips (str, bool, int, finite float, None, list, dict); convert it."
  )


def _require_equal_leaves(
  path: Place, stored: Mapping[str, str], wanted: Mapping[str, Any]
) -> None:
  current = _shape_words(wanted)
  differing = [
    f"{name}: got {stored.get(name, 'nothing')}, expected {current.get(name, 'nothing')}"
    for name in sorted(set(stored) | set(current))
    if stored.get(name) != current.get(name)
  ]
  if differing:
    more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
    raise ValueError(
      f"{path}: got other leaves than those of this run ({'; '.join(differing[:8])}{more}); build"
      " the same model and optimiser as the run that saved it."
    )


def _describe(path: Place) -> dict[str, Any]:
  file = path / DESCRIPTION
  try:
    description = json.loads(file.read_text())
    digest = description.pop("sha256")
    found = _json_sha256(description)
  except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
    raise Damage(
      f"{file}: got a file that cannot be read ({error!r}), expected the description of a"
      f" checkpoint; the file is truncated or missing: {_remedy(path)}"
    ) from error
  if found != digest:
    raise Damage(
      f"{file}: got contents of sha256 {found[:16]}, expected {digest[:16]}; the file was altered:"
      f" {_remedy(path)}"
    )
  if description["format"] != FORMAT:
    raise ValueError(
      f"{file}: got format {description['format']}, expected {FORMAT}; use the version of seerjax"
      " that saved it."
    )
  return description


def _remedy(path: Place) -> str:
  """Returns advice for a damaged checkpoint."""
  others = [step for step in steps(path.parent) if _path(path.parent, step) != path]
  if not others:
    return "there is no other checkpoint; restore it from a copy, or start a new run."
  return f"remove {path} to resume from step {max(others)}."


def _require_whole(path: pathlib.Path, files: Mapping[str, Mapping[str, Any]]) -> None:
  for name, expected in files.items():
    file = path / name
    if not file.is_file():
      raise Damage(
        f"{file}: got no file, expected {expected['bytes']} bytes; the checkpoint is incomplete:"
        f" {_remedy(path)}"
      )
    size = file.stat().st_size
    if size != expected["bytes"]:
      raise Damage(
        f"{file}: got {size} bytes, expected {expected['bytes']}; the file is truncated:"
        f" {_remedy(path)}"
      )
    if (found := _sha256(file)) != expected["sha256"]:
      raise Damage(
        f"{file}: got contents of sha256 {found[:16]}, expected {expected['sha256'][:16]}; the file"
        f" was altered: {_remedy(path)}"
      )


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in directory.rglob("*") if path.is_file())


def _sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _json_sha256(value: Any) -> str:
  text = json.dumps(value, sort_keys=True, allow_nan=False)
  return hashlib.sha256(text.encode()).hexdigest()


def _to_disk(directory: pathlib.Path) -> None:
  for path in [*directory.rglob("*"), directory]:
    _sync(path)


def _sync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _remove_old(directory: Place, keep_latest: int, is_kept: Callable[[int], bool]) -> None:
  for step in steps(directory)[:-keep_latest]:
    if not is_kept(step):
      if isinstance(directory, epath.Path):
        object_store.remove(_path(directory, step), DESCRIPTION)
        continue
      # Hidden by one rename first, so that a half-deleted checkpoint is never seen.
      removed = directory / f".removed_{step:08d}"
      os.rename(_path(directory, step), removed)
      shutil.rmtree(removed)


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
