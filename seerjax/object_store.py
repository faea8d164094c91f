"""Folders in an object store, by `etils.epath`: published by a marker that is written last.

  gs://bucket/run/step_00000012/state/...     objects, one a file, each whole or not there
  gs://bucket/run/step_00000012/MARKER        written when all others are there, removed first

A store has no atomic rename: a folder that was copied in part looks like any other, except that its
marker is missing. Readers therefore look for the marker; a folder without one does not exist.

Google's and Amazon's stores are strongly consistent: the next reader sees everything written.
`gs://` needs the package gcsfs, `s3://` s3fs (through fsspec); these packages read the credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
import pathlib
import re
import shutil

from etils import epath

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


def is_remote(place: str | os.PathLike) -> bool:
  """Returns whether a place is in an object store: "gs://bucket/run"."""
  return "://" in os.fspath(place)


def require_two_slashes(place: str | os.PathLike) -> None:
  """Refuses a store's URL that lost one of its slashes in `pathlib`."""
  text = os.fspath(place)
  if re.match(r"[a-z][a-z0-9]+:/(?!/)", text):
    raise ValueError(
      f"got {text!r}, expected two slashes after the colon, or a directory: pathlib removes one;"
      " pass it as a string."
    )


def open_place(place: str) -> epath.Path:
  """Returns a place of a store, as soon as that store can be spoken to.

  Raises:
    ValueError: if there is no such kind of store, or its package is not installed.
  """
  scheme = place.partition("://")[0]
  try:
    path = epath.Path(place)
    path.exists()
  except KeyError as error:
    raise ValueError(
      f"checkpoints: got {place!r}, expected a URL that etils.epath supports, gs:// or s3://; pass"
      " one, or a directory."
    ) from error
  except ImportError as error:
    raise ValueError(
      f"checkpoints: got {place!r} without support for {scheme}:// ({error}), expected the package"
      f" {PACKAGES.get(scheme, 'of its kind')}; pip install {PACKAGES.get(scheme, 'it')}."
    ) from error
  return path


def files(folder: epath.Path) -> Iterator[tuple[str, epath.Path]]:
  """Yields the files of a folder and its subfolders, with paths relative to the folder."""
  if not folder.exists():
    return
  for path in folder.iterdir():
    if path.is_dir():
      for name, file in files(path):
        yield f"{path.name}/{name}", file
    else:
      yield path.name, path


def publish(source: pathlib.Path, folder: epath.Path, marker: str) -> None:
  """Copies a directory into a folder, the file named `marker` last."""
  remove(folder, marker)  # What a copy that was cut off has left.
  names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
  for name in sorted(names, key=lambda name: (name == marker, name)):
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source / name, "rb") as ours, target.open("wb") as theirs:
      shutil.copyfileobj(ours, theirs, 1 << 22)


def fetch(folder: epath.Path, target: pathlib.Path, prefix: str) -> None:
  """Copies the files of a folder below `prefix` into a directory."""
  for name, file in files(folder / prefix):
    path = target / prefix / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as theirs, open(path, "wb") as ours:
      shutil.copyfileobj(theirs, ours, 1 << 22)


def unpublish(folder: epath.Path, marker: str) -> epath.Path:
  """Takes a folder's marker away, and leaves it under another name, which is returned."""
  aside = folder / f"damaged_{marker}"
  if (folder / marker).exists():
    aside.write_bytes((folder / marker).read_bytes())
    (folder / marker).unlink()
  return aside


def remove(folder: epath.Path, marker: str) -> None:
  """Removes a folder, the file named `marker` first: half a folder is never published."""
  (folder / marker).unlink(missing_ok=True)
  for _, file in [*files(folder)]:
    file.unlink(missing_ok=True)
