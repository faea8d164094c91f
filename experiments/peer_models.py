"""A model as the files that other programs read, written in processes of their own.

Claim: none; the experiments that measure llama.cpp and transformers beside us give them these.

What such a process takes is not in the memory of the one that is measured.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# By which llama.cpp cuts texts where it has no pre-tokenizer that cuts as the model's own (nano's).
NEAREST_CUT = "qwen2"


def write_gguf(model: str | os.PathLike[str], path: pathlib.Path, kind: str = "F32") -> None:
  """Writes a model as a GGUF file with its tokenizer.

  Args:
    model: a name, a directory or a GGUF file.
    path: of the file, which is made.
    kind: of its matrices.

  Raises:
    ValueError: with what that process said, if it could not.
  """
  _export(model, path, f"--gguf={kind}", f"--gguf_pre={NEAREST_CUT}")


def as_directory(model: str, workdir: pathlib.Path) -> str:
  """Returns a model's name for programs that read no GGUF files as we do.

  Of a GGUF file it is a directory of the same numbers in float32, written once; of others their
  own.

  Raises:
    ValueError: with what the process that writes it said, if it could not.
  """
  path = pathlib.Path(model)
  if path.suffix.lower() != ".gguf":
    return model
  directory = workdir / path.stem
  if not directory.exists():
    _export(model, directory, "--dtype=float32")
  return str(directory)


def _export(model: str | os.PathLike[str], out: pathlib.Path, *flags: str) -> None:
  modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
  done = subprocess.run(
    [
      sys.executable, "-P", "-m", "experiments.export", f"--model={model}", f"--out={out}", *flags
    ],
    env={**os.environ, "PYTHONPATH": modules, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )  # fmt: skip
  if done.returncode:
    raise ValueError(f"{out}: {done.stderr.strip()[-2000:]}")
