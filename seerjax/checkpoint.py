"""Everything a run is, on disk: arrays through Orbax, the rest as one JSON file beside them.

  checkpoints/
    step_00000012/          published: complete, on disk, never changed again
      checkpoint.json       format, step, host state, numerics fingerprints, leaves, checksums
      state/                Orbax: every array, named by its path in the tree
      PART/                 as `state`, of a part that another run may do without (`parts`)
    .incoming_00000016/     a save that is going on, or was killed; never read
    damaged_step_00000016/  what `set_aside_damaged` has found; never read

A save fills `.incoming_*`, waits for the disk, and gives the directory its name in one rename, so
that a reader sees a whole checkpoint or none. A restore checks, before any array is read, the
fingerprint, the checksum of every file, and every leaf's shape and dtype.

The directory is on a local or shared POSIX file system, or in an object store (gs://, s3://), and
has one run at a time writing to it. It may also be a file that names such a place: a run whose
`checkpoints` is such a file keeps them there. In a store a checkpoint is published by its
`checkpoint.json`, which is written last (`object_store`); on its way there and back it lies in the
directory for temporary files.

Only the write itself is collective: on several hosts every process calls `save` and `restore`
alike.
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
  """Files of a checkpoint are not what was saved."""


class Epoch(NamedTuple):
  """A stretch of a run under one numerics fingerprint.

  Attributes:
    step: the step after which it began.
    fingerprint: see `numerics.fingerprint`.
  """

  step: int
  fingerprint: dict[str, str]


class Restored(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    step: it was saved at.
    state: pytree of arrays, bit for bit.
    host_state: JSON, as it was given.
    epochs: all numerics of the run so far, the one of this checkpoint last.
  """

  step: int
  state: Any
  host_state: dict[str, Any]
  epochs: tuple[Epoch, ...]


def steps(directory: str | os.PathLike) -> tuple[int, ...]:
  """Returns the steps that have a published checkpoint, ascending; empty without a directory."""
  place = _open(directory)
  if not place.is_dir():
    return ()
  found = [(_PUBLISHED.fullmatch(path.name), path) for path in place.iterdir()]
  return tuple(sorted(int(match[1]) for match, path in found if match and _is_published(path)))


def latest_step(directory: str | os.PathLike) -> int | None:
  """Returns the highest step with a published checkpoint, None if there is none."""
  return max(steps(directory), default=None)


def set_aside_damaged(directory: str | os.PathLike) -> list[str]:
  """Takes damaged checkpoints out of a restore's way, newest first, while there is one before.

  A damaged one gets another name, under which people find it; the last one left is not touched,
  whatever it is.

  Args:
    directory: of all the run's checkpoints; one process alone may do so.

  Returns:
    A sentence for each.
  """
  place = _open(directory)
  said = []
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
      said.append(
        f"DAMAGED CHECKPOINT of step {step}: {error} It was renamed {aside.name}, and the run"
        f" resumes from step {before}."
      )
  return said


def _set_aside(path: Place) -> Place:
  """Gives a checkpoint a name that is none of a step's, and returns it; in a store, its marker."""
  if isinstance(path, epath.Path):
    return object_store.unpublish(path, DESCRIPTION)
  for number in range(1, 10**6):
    aside = path.with_name(f"damaged_{path.name}" + (f"_{number}" if number > 1 else ""))
    if not aside.exists():
      os.rename(path, aside)
      _sync(path.parent)
      return aside
  raise AssertionError("a million damaged checkpoints of one step")


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
  """Publishes a checkpoint, then removes those that are no longer kept.

  Args:
    directory: of all the run's checkpoints.
    step: of this one.
    state: pytree of arrays: parameters, optax state, typed PRNG keys.
    host_state: what is no array (data position, counters, metrics offset, config), as JSON.
    fingerprint: of the run's numerics.
    accept_new_numerics: if the checkpoint before has another fingerprint, keep both.
    parts: by name, further pytrees of arrays, which `restore` leaves alone; see `restore_part`.
    keep_latest: how many of the newest are kept, at least 1.
    keep_every: steps that are multiples of it are kept as well; 0 for none.
    keep_steps: further steps that are kept, such as that of the best evaluation.

  Returns:
    The published directory, or where it is in a store.

  Raises:
    ValueError: if the step is there already, the host state would not survive JSON, a leaf is no
      array or not finite, or the fingerprint differs from the checkpoint's before (both values are
      named).
    OSError: if the disk is full; earlier checkpoints are untouched.
    KeyboardInterrupt: on Ctrl-C, when the checkpoint is whole; on a second one at once.
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
      f"checkpoint.save: got step {step}, which {target} holds already, expected a new step; resume"
      " from the latest one, or choose another directory."
    )
  _require_json(host_state, "host_state")
  trees = {ARRAYS: _leaves(state, "checkpoint.save: state")}
  for name, part in (parts or {}).items():
    if name in (ARRAYS, DESCRIPTION) or not name.isidentifier():
      raise ValueError(
        f"checkpoint.save: got a part {name!r}, expected a name of letters other than {ARRAYS!r};"
        " rename it."
      )
    trees[name] = _leaves(part, f"checkpoint.save: {name}")
  for name, leaves in trees.items():
    numerics.require_finite(
      leaves,
      what=f"checkpoint.save: {name} of step {step}",
      remedy="go on from the last checkpoint, with a lower learning rate where training diverged",
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
        f"checkpoint.save: got {place} from {jax.process_count()} processes, expected one: they"
        " have no directory in common to fill first; keep checkpoints on a shared disk, and copy"
        " them from there."
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
  """Fills `incoming`, gives it its name, and removes what is no longer kept; see `save`."""
  target = _path(directory, step)
  try:
    if jax.process_index() == 0:
      directory.mkdir(parents=True, exist_ok=True)
      for path in directory.iterdir():
        if path.name.startswith(_HIDDEN):
          shutil.rmtree(path)
      incoming.mkdir()
    _barrier("checkpoint_directory")
    # A flat dict: what is on disk does not depend on how containers are spelled. Orbax takes no
    # arrays without elements; for those the description is enough.
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
  """Returns a checkpoint's host state, of whatever shapes its arrays are.

  Args:
    directory: of all the run's checkpoints.
    step: which one; the latest by default.

  Raises:
    ValueError: as `restore`, if it is not there, or its description is damaged.
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
  """Reads a checkpoint back, bit for bit.

  Args:
    directory: of all the run's checkpoints.
    abstract_state: pytree of arrays or `jax.ShapeDtypeStruct`; where a leaf has a sharding, the
      array is placed by it, else on the first device. numpy leaves come back as numpy arrays.
    fingerprint: of this run's numerics.
    step: which one; the latest by default.
    accept_new_numerics: take the checkpoint under another fingerprint; the result's epochs end with
      this run's, and so do those of later saves that accept it too.

  Returns:
    See `Restored`.

  Raises:
    ValueError: if the checkpoint is not there, truncated or altered (the file is named), of other
      numerics (both values are named), of other leaves, shapes or dtypes (each leaf is named), or
      not finite.
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
  """Reads a part of a checkpoint back, bit for bit; None if it was saved without.

  Args:
    directory: of all the run's checkpoints.
    name: of the part.
    abstract: as `restore` takes a state.
    step: which one; the latest by default.

  Raises:
    ValueError: as `restore`, but for the numerics.
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
  """Returns the arrays of a tree of a checkpoint, all checked before any is read."""
  wanted = _leaves(abstract_tree, f"checkpoint.restore: {tree}")
  _require_equal_leaves(path, stored, wanted)
  if isinstance(path, epath.Path):  # A tree of it is fetched, and no more.
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
  """Returns where a step's checkpoint is, the latest one's by default, or refuses."""
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
  """Within, a first Ctrl-C waits for the end: Orbax's threads would outlive the loop they talk to,
  and say so at length. A second one, and handlers of the caller's own, are as ever."""
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
  """Raises what Orbax says of a disk as OSError, without the tracebacks of its threads."""
  # Of all loggers only this one's filters see what it is given; adding it twice is adding it once.
  logging.getLogger("absl").addFilter(_is_not_of_a_thread)
  try:
    yield
  except ValueError as error:
    found = re.search(r"Failed to write.*|Failed writing.*", str(error))
    if found is None:
      raise
    raise OSError(
      f"{directory}: got {found[0][:300]!r} while step {step} was saved, expected room for it; free"
      " some, and resume: earlier checkpoints are whole."
    ) from None


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
  """Drops what Orbax's threads log of an exception: the same one is raised where they are awaited.

  It stays for good, because a save that was given up leaves threads behind.
  """
  return "_SignalingThread.run() raised" not in str(record.msg)


def _path(directory: Any, step: int) -> Any:
  return directory / f"step_{step:08d}"


def _open(directory: str | os.PathLike) -> Place:
  """Returns where checkpoints lie: the directory, or the place that a file in its stead names."""
  if object_store.is_remote(directory):
    return object_store.open_place(os.fspath(directory))
  object_store.require_two_slashes(directory)
  path = pathlib.Path(directory).resolve()
  if path.is_file():
    named = path.read_text().strip()
    if not object_store.is_remote(named):
      raise ValueError(
        f"{path}: got a file that says {named[:80]!r}, expected a directory, or a file with a place"
        " such as gs://bucket/run; write that, or remove the file."
      )
    return object_store.open_place(named)
  return path


def _is_published(path: Place) -> bool:
  """Returns whether a checkpoint is there: a directory of its name, in a store its marker."""
  return (path / DESCRIPTION).exists() if isinstance(path, epath.Path) else path.is_dir()


@contextlib.contextmanager
def _local_copy(path: Place, tree: str = "") -> Iterator[pathlib.Path]:
  """Yields a directory with a tree of a checkpoint, all by default: itself where it is one."""
  if not isinstance(path, epath.Path):
    yield path
    return
  with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
    copy = pathlib.Path(name) / path.name
    object_store.fetch(path, copy, tree)
    yield copy


def _leaves(tree: Any, what: str) -> dict[str, Any]:
  """Returns the leaves by their path, "params/layers/0/weight"."""
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
  """Returns the epochs of the checkpoint before `step`, with this one's if it is another."""
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
  """Refuses what would come back from JSON as something else: tuples, int keys, NaN, arrays."""
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
    f"checkpoint.save: got {type(value).__name__} {value!r} at {where}, expected JSON that comes"
    " back"
    " equal (str, bool, int, finite float, None, list, dict); convert it."
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
      f"{path}: got other leaves than this run has ({'; '.join(differing[:8])}{more}); build the"
      " model and the optimiser as the run that saved it did."
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
  """Returns what to do about a damaged checkpoint."""
  others = [step for step in steps(path.parent) if _path(path.parent, step) != path]
  if not others:
    return "there is no other; take it from a copy, or start a new run."
  return f"remove {path}, and the run resumes from step {max(others)}."


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
      # Out of sight in one rename: half a checkpoint is never seen, not even while it goes.
      removed = directory / f".removed_{step:08d}"
      os.rename(_path(directory, step), removed)
      shutil.rmtree(removed)


def _barrier(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
