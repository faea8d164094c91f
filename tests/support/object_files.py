"""An object store on this machine's disk, for `objects://`: flat names, and no renaming.

Each object is a file of one folder, named by the quoted object name; there are no subfolders, only
common prefixes. An object exists once its writer has closed it. The process dies (SIGKILL) when it
starts to write an object with a name that ends in $OBJECTS_DIE_AT.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import io
import os
import pathlib
import signal
from typing import Any
import urllib.parse

from etils import epath

SCHEME = "objects://"


@epath.register_path_cls(SCHEME)
class Objects(epath.Path):
  """A location in the store: objects:///a/folder/of/this/machine!a/name."""

  def __fspath__(self) -> str:
    return SCHEME + str(pathlib.PurePosixPath(*self.parts[1:]))

  def _split(self) -> tuple[pathlib.Path, str]:
    folder, _, name = self.__fspath__().removeprefix(SCHEME).partition("!")
    return pathlib.Path("/", folder), name.strip("/")

  def _file(self) -> pathlib.Path:
    folder, name = self._split()
    return folder / urllib.parse.quote(name, safe="")

  def _names(self) -> Iterator[str]:
    folder, name = self._split()
    beginning = f"{name}/" if name else ""
    for file in sorted(folder.iterdir()):
      other = urllib.parse.unquote(file.name)
      if not file.name.startswith(".") and other.startswith(beginning):
        yield other.removeprefix(beginning)

  def exists(self) -> bool:
    return self._file().is_file() or self.is_dir()

  def is_dir(self) -> bool:
    return any(True for _ in self._names())

  def iterdir(self) -> Iterator[Any]:
    for name in dict.fromkeys(name.partition("/")[0] for name in self._names()):
      yield self / name

  def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
    pass  # Directories do not exist here.

  @contextlib.contextmanager
  def _writer(self) -> Iterator[io.BytesIO]:
    end = os.environ.get("OBJECTS_DIE_AT")
    if end and self._split()[1].endswith(end):
      os.kill(os.getpid(), signal.SIGKILL)
    content = io.BytesIO()
    yield content
    hidden = self._file().with_name(f".{os.getpid()}")
    hidden.write_bytes(content.getvalue())
    os.replace(hidden, self._file())

  def open(self, mode: str = "r", **options: Any) -> Any:
    if mode == "wb":
      return self._writer()
    return self._file().open(mode, **options)

  def read_bytes(self) -> bytes:
    return self._file().read_bytes()

  def read_text(self, encoding: str | None = None) -> str:
    return self._file().read_text(encoding)

  def write_bytes(self, data: bytes) -> int:
    with self._writer() as file:
      return file.write(data)

  def unlink(self, missing_ok: bool = False) -> None:
    self._file().unlink(missing_ok=missing_ok)

  def rename(self, target: Any) -> Any:
    raise AssertionError("a store renames nothing")

  replace = rename
