"""Writes a model in the formats of other programs, in separate processes.

Claim: none; used by experiments that compare us with llama.cpp and transformers. Separate processes
keep the memory of the conversion out of the measured process.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from experiments import peer_process

# The llama.cpp pre-tokenizer to use if none splits text as the model's own does (nano's).
NEAREST_CUT = "qwen2"


def write_gguf(model: str | os.PathLike[str], path: pathlib.Path, kind: str = "F32") -> None:
  """Writes a model as a GGUF file with its tokenizer.

  Args:
    model: a name, a directory or a GGUF file.
    path: the file to create.
    kind: type of its matrices.

  Raises:
    ValueError: with the output of the process, if it failed.
  """
  _export(model, path, f"--gguf={kind}", f"--gguf_pre={NEAREST_CUT}")


def as_directory(model: str, workdir: pathlib.Path) -> str:
  """Returns a model name for programs that cannot read GGUF files as we do.

  For a GGUF file this is a directory with the same values in float32, written once; for others the
  name itself.

  Raises:
    ValueError: with the output of the writing process, if it failed.
  """
  path = pathlib.Path(model)
  if path.suffix.lower() != ".gguf":
    return model
  directory = workdir / path.stem
  if not directory.exists():
    _export(model, directory, "--dtype=float32")
  return str(directory)


def _export(model: str | os.PathLike[str], out: pathlib.Path, *flags: str) -> None:
  done = subprocess.run(
    [
      sys.executable, "-P", "-m", "seerjax.commands", "export",
      f"--model={model}", f"--out={out}", *flags,
    ],
    env=peer_process.environment(),
    capture_output=True,
    text=True,
  )  # fmt: skip
  if done.returncode:
    raise ValueError(f"{out}: {done.stderr.strip()[-2000:]}")
