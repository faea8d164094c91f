"""Single-cell denoising: find the pipeline that predicts molecules which it has not seen.

A cell's molecules were counted gene by gene, and few of them were caught. Each molecule is dealt at
random to one of three parts, so that for one cell and gene

  (train, validation, heldout) ~ Multinomial(count; 0.6, 0.2, 0.2)

and the parts are independent given the cell's true expression. A pipeline sees train alone. With
y the part that judges, x the denoised counts and N(v) = log(1 + 1e4 v / (sum of its cell)):

  MSE      mean of (N(x) - N(y))^2                                     minimised, `Score.value`
  Poisson  mean of z - y log(z + 1e-6),  z = x (total of y / total of train), in nats: at most
           that of the plain start, or the pipeline is no answer

The Poisson number of Open Problems is another function, so theirs and ours do not compare. The MSE
alone can be gamed: y is noisy, N is concave, and so the expression that is least far from
N(y) lies below the true one (of simulated cells, the truth itself is no winner). The second number
holds against that. Published tables ask for 0.97 of the way from train (0) to y (1); how far one
can go depends on the data, so here the bar is what shrinking each cell towards the mean cell gives,
at its best strength; that is also where search starts, since train itself has the likelihood of
one who is sure that what he has not seen is not there.

An artefact is a pipeline: {"steps": [{"op": "log"}, {"op": "svd", "rank": 8}, ...]}. The verifier
runs it on train and recomputes everything; equal pipelines have equal scores. Search reads
validation; `heldout` is for the report, once.

Source: Batson, Royer & Webber 2019, molecular cross-validation, https://doi.org/10.1101/786269;
Open Problems in Single-Cell Analysis, denoising, https://openproblems.bio; van Dijk et al. 2018
(MAGIC), https://doi.org/10.1016/j.cell.2018.05.061; Linderman et al. 2022 (ALRA),
https://doi.org/10.1038/s41467-021-27729-z; TTT-Discover, https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import importlib
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from seerjax.discovery import environment as environment_lib
from seerjax.discovery.environment import Artefact, Published, Score

# Shares of the molecules; the rest is held out.
TRAIN_SHARE, VALIDATION_SHARE = 0.6, 0.2
# Molecules of one cell after normalisation, and what keeps a logarithm finite.
TARGET_SUM = 1e4
POISSON_EPSILON = 1e-6
MAX_STEPS = 8
# Cells x genes that fit into memory several times over.
MAX_ENTRIES = 20_000_000
LEAST_MOLECULES = 20
MAX_COUNT = 2**31 - 1  # Of one cell and gene.
# Principal components in which cells are neighbours.
EMBEDDING_RANK = 20
# Largest value that is exponentiated back, as log(1 + v).
MAX_LOG = 50.0
SIMULATED_CELLS, SIMULATED_GENES = 500, 200


class Parameter(NamedTuple):
  """One knob of a step.

  Attributes:
    name: in the step's dict.
    choices: ascending numbers, all integers or all floats; or words. Edits take these; a program
      may take any number of the kind between the first and the last.
    meaning: for people and models.
  """

  name: str
  choices: tuple[Any, ...]
  meaning: str

  def complaint(self, value: Any) -> str:
    """Returns why a value is refused; "" if it is not."""
    first, last = self.choices[0], self.choices[-1]
    if isinstance(first, str):
      fits = isinstance(value, str) and value in self.choices
      expected = f"one of {', '.join(map(str, self.choices))}"
    else:
      kinds = int if isinstance(first, int) else int | float
      fits = isinstance(value, kinds) and not isinstance(value, bool) and first <= value <= last
      expected = f"{'an integer' if isinstance(first, int) else 'a number'} from {first} to {last}"
    return "" if fits else f"{self.name}: got {environment_lib.shown(value)}, expected {expected}"

  def level(self, value: Any) -> int:
    """Returns the place of the choice that is nearest to an accepted value."""
    if isinstance(value, str):
      return list(self.choices).index(value)
    return int(np.argmin([abs(float(choice) - value) for choice in self.choices]))


class Operation(NamedTuple):
  """One kind of step: its knobs (three at most), and what it does."""

  name: str
  parameters: tuple[Parameter, ...]
  meaning: str


_RANK = Parameter("rank", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48), "components")
_WEIGHT = Parameter(
  "weight",
  (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
  "share of what is mixed in",
)

# The order is that of the ids in `PipelineEdits`.
OPERATIONS: tuple[Operation, ...] = (
  Operation("normalise", (), "gives every cell the same number of molecules, the median one"),
  Operation("sqrt", (), "takes square roots; undone by `invert`, or at the end"),
  Operation("log", (), "takes log(1 + x); undone by `invert`, or at the end"),
  Operation("invert", (), "undoes the last sqrt or log"),
  Operation("svd", (_RANK,), "keeps the leading principal components"),
  Operation(
    "diffuse",
    (
      Parameter("neighbours", (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 30, 40), "cells"),
      Parameter("times", (1, 2, 3, 4, 5, 6), "steps of the walk"),
      Parameter("decay", (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0), "exponent of the kernel"),
    ),
    "averages each cell with its neighbours by a random walk on their graph (MAGIC)",
  ),
  Operation(
    "genes",
    (
      Parameter("neighbours", (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60), "genes"),
      _WEIGHT,
    ),
    "moves each gene to the average of those it correlates with",
  ),
  Operation(
    "alra",
    (_RANK, Parameter("quantile", (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2), "of the noise")),
    "low rank, zeros restored where a gene is within its own noise (ALRA)",
  ),
  Operation(
    "nmf",
    (_RANK, Parameter("iterations", (4, 7, 10, 14, 18, 22, 26, 30), "multiplicative updates")),
    "factors into non-negative programs under the Poisson likelihood",
  ),
  Operation(
    "shrink",
    (
      Parameter(
        "strength",
        (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0),
        "prior molecules, in median cells",
      ),
    ),
    "shrinks a cell to the mean of the genes, small cells more (Poisson-gamma posterior)",
  ),
  Operation(
    "blend",
    (Parameter("source", ("raw", "mean", "saved"), "what is mixed in"), _WEIGHT),
    "mixes in the raw counts, the mean of the genes, or what `save` kept",
  ),
  Operation("save", (), "keeps a copy for `blend`; the latest counts"),
  Operation("rescale", (), "gives every gene the total that it has in the raw counts"),
  Operation(
    "power",
    (
      Parameter(
        "exponent",
        (0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.98, 1.02, 1.05, 1.075, 1.1, 1.15, 1.2, 1.3, 1.5),
        "1 changes nothing",
      ),
    ),
    "raises to a power: below 1 contrasts shrink, above 1 they grow",
  ),
)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


class Counts(NamedTuple):
  """Molecules by cell and gene, and what is known of them.

  Attributes:
    counts: f64[c, g], whole numbers.
    truth: f64[c, g], expected molecules of a simulated set; None of a real one.
    order: i64[c], cells as a picture shows them.
  """

  counts: np.ndarray
  truth: np.ndarray | None
  order: np.ndarray


def simulate(
  seed: int, *, num_cells: int = SIMULATED_CELLS, num_genes: int = SIMULATED_GENES
) -> Counts:
  """Draws negative-binomial counts whose truth is known.

  Half of the cells lie on two branches of a trajectory with a common root, the others are of four
  types. Ten programs of genes rise and fall with them. A cell's library is log-normal (median 1500
  molecules, deviation 0.4 of its logarithm); each entry is gamma (shape 5) around the truth, then
  Poisson.
  """
  rng = np.random.default_rng([seed, num_cells, num_genes])
  num_types, num_programs, dispersion = 4, 10, 5.0
  base = rng.normal(0.0, 1.2, num_genes)
  loadings = rng.gamma(0.6, 1.0, (num_programs, num_genes)) * rng.choice(
    (-1.0, 1.0), (num_programs, num_genes), p=(0.3, 0.7)
  )
  activity = np.zeros((num_cells, num_programs))
  half = num_cells // 2
  progress = rng.random(half)
  branch = rng.integers(0, 2, half)
  # Programs 0 and 1 belong to a branch each; 2 to 4 come and go on the way.
  late = np.clip(2 * progress - 0.6, 0.0, None)
  activity[np.arange(half), branch] = late
  for program, centre in ((2, 0.1), (3, 0.4), (4, 0.75)):
    activity[:half, program] = np.exp(-(((progress - centre) / 0.2) ** 2))
  types = rng.integers(0, num_types, num_cells - half)
  activity[half:, 5:] = rng.gamma(2.0, 0.4, (num_types, num_programs - 5))[types]
  rates = np.exp(base + activity @ loadings)
  rates /= rates.sum(axis=1, keepdims=True)
  libraries = 1500 * np.exp(rng.normal(0.0, 0.4, (num_cells, 1)))
  truth = libraries * rates
  counts = rng.poisson(truth * rng.gamma(dispersion, 1 / dispersion, truth.shape))
  groups = np.concatenate([branch, 2 + types])
  order = np.lexsort((np.concatenate([progress, np.zeros(len(types))]), groups))
  return Counts(counts.astype(np.float64), truth, order)


def load(path: str | os.PathLike[str]) -> Counts:
  """Reads counts of cells by genes.

  Args:
    path: an `.npz` with the array "counts"[c, g]; or an `.h5ad` whose "layers/counts", else "X",
      holds them, dense or as compressed sparse rows (needs h5py).

  Raises:
    ValueError: if they are no such counts, or do not read; the message says which entry and what to
      change. What says that it is too large is not read.
    FileNotFoundError: if there is no such file.
    ModuleNotFoundError: for an `.h5ad` without h5py.
  """
  file = pathlib.Path(path)
  readers = {".npz": _read_npz, ".h5ad": _read_h5ad}
  if file.suffix not in readers:
    raise ValueError(
      f"denoising.load: got {file.name!r}, expected a name that ends in .npz or .h5ad; convert"
      " the file."
    )
  if not file.is_file():
    raise FileNotFoundError(
      f"denoising.load: got {str(file)!r}, expected a file; correct the path behind 'denoising:'."
    )
  try:
    counts = readers[file.suffix](file)
  except (_Refused, ModuleNotFoundError):
    raise
  except Exception as error:  # Of zipfile, zlib, NumPy, SciPy or HDF5, whatever the bytes led to.
    raise ValueError(
      f"denoising.load: got {file}, which does not read ({error}), expected a whole {file.suffix}"
      " of counts; write it anew."
    ) from error
  return checked(counts, str(file))


class _Refused(ValueError):
  """Counts that are read well enough to say what is wrong with them."""


def _check_header(shape: Sequence[int], dtype: np.dtype, name: str) -> None:
  """Refuses an array that had better not be read."""
  if dtype.kind not in "iuf":
    raise _Refused(
      f"denoising.load: got dtype {dtype} in {name}, expected integers or whole floats; convert"
      " them."
    )
  if math.prod(shape) > MAX_ENTRIES:
    raise _Refused(
      f"denoising.load: got an array of {list(shape)} in {name}, expected at most {MAX_ENTRIES}"
      " entries; take fewer cells, or the most variable genes."
    )


def _read_npz(file: pathlib.Path) -> np.ndarray:
  with np.load(file, allow_pickle=False) as archive:
    if "counts" not in archive:
      raise _Refused(
        f"denoising.load: got arrays {sorted(archive)} in {file}, expected 'counts' (cells x"
        " genes); write it with numpy.savez(path, counts=...)."
      )
    # A few kilobytes may unpack to a terabyte of zeros.
    with archive.zip.open("counts.npy") as member:
      npy = np.lib.format
      is_first = npy.read_magic(member) == (1, 0)
      read_header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
      shape, _, dtype = read_header(member)
      _check_header(shape, dtype, str(file))
    return archive["counts.npy"]  # The very member; another may be called "counts".


def _read_h5ad(file: pathlib.Path) -> np.ndarray:
  try:
    h5py = importlib.import_module("h5py")
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"denoising.load: got {file.name!r}, which h5py reads, and h5py is not installed; run"
      " `pip install h5py`, or save the counts as .npz."
    ) from error
  with h5py.File(file, "r") as data:
    node = data["layers/counts" if "layers/counts" in data else "X"]
    if not isinstance(node, h5py.Group):
      _check_header(node.shape, node.dtype, str(file))
      return np.asarray(node)
    shape = tuple(int(size) for size in node.attrs["shape"])
    parts = [node[name] for name in ("data", "indices", "indptr")]
    for one in (shape, *(part.shape for part in parts)):
      _check_header(one, parts[0].dtype, str(file))
    kind = node.attrs["encoding-type"]
    compressed = sparse.csc_matrix if kind == "csc_matrix" else sparse.csr_matrix
    matrix = compressed(tuple(np.asarray(part) for part in parts), shape=shape)
    matrix.check_format(full_check=True)  # `toarray` believes the indices, and writes there.
    return matrix.toarray()


def checked(counts: np.ndarray, name: str) -> Counts:
  """Returns counts without the genes that no cell has; refuses what are no counts.

  Args:
    counts: [c, g], of any real dtype.
    name: of the source, for messages.

  Raises:
    ValueError: as `load`.
  """

  def refuse(got: str, expected: str, fix: str):
    raise ValueError(f"denoising.load: got {got} in {name}, expected {expected}; {fix}.")

  if counts.ndim != 2 or min(counts.shape, default=0) < 4:
    refuse(f"counts{list(counts.shape)}", "cells x genes, 4 of each at least", "give a matrix")
  _check_header(counts.shape, counts.dtype, name)
  values = counts.astype(np.float64)
  wrong = np.argwhere(~((values >= 0) & (values <= MAX_COUNT) & (values == np.floor(values))))
  if len(wrong):
    cell, gene = wrong[0]
    refuse(
      f"{values[cell, gene]} at cell {cell}, gene {gene}",
      f"whole numbers of molecules from 0 to {MAX_COUNT}",
      "give raw counts, not normalised ones",
    )
  values = values[:, values.sum(axis=0) > 0]
  if values.shape[1] < 4:
    refuse(f"molecules of {values.shape[1]} genes", "4 at least", "give genes that cells have")
  libraries = values.sum(axis=1)
  if (libraries < LEAST_MOLECULES).any():
    cell = int(np.argmin(libraries))
    refuse(
      f"{libraries[cell]:.0f} molecules of cell {cell}",
      f"at least {LEAST_MOLECULES}",
      "remove empty cells",
    )
  centred = _log_normalised(values)
  centred -= centred.mean(axis=0)
  order = np.argsort(_leading(centred, 1)[0][:, 0], kind="stable")
  return Counts(values, None, order)


def split(counts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Deals molecules to (train, validation, heldout), f64[c, g] each; they add up to `counts`."""
  rng = np.random.default_rng([seed, 0x5EED])
  whole = counts.astype(np.int64)
  train = rng.binomial(whole, TRAIN_SHARE)
  validation = rng.binomial(whole - train, VALIDATION_SHARE / (1 - TRAIN_SHARE))
  parts = (train, validation, whole - train - validation)
  return tuple(part.astype(np.float64) for part in parts)  # pyright: ignore[reportReturnType]


def mse(denoised: np.ndarray, observed: np.ndarray) -> float:
  """Returns the mean square distance after normalisation to `TARGET_SUM` and log(1 + x)."""
  return float(np.mean((_log_normalised(denoised) - _log_normalised(observed)) ** 2))


def poisson(denoised: np.ndarray, observed: np.ndarray, train_total: float) -> float:
  """Returns the mean negative log-likelihood (nats, up to log y!) of observed molecules.

  Args:
    denoised: f64[c, g], on the scale of train.
    observed: f64[c, g].
    train_total: molecules of train.
  """
  expected = denoised * (observed.sum() / train_total)
  return float(np.mean(expected - observed * np.log(expected + POISSON_EPSILON)))


class PipelineEdits:
  """Up to two edits of six tokens: verb, place, operation, and a level for each of three knobs.

    verb       insert  before the place          place       0..7, folded into the pipeline
               replace the step there            operation   of `OPERATIONS`
               nudge   its knobs by -1, 0 or 1   levels      0..15, folded into the knob's choices
               delete  it
               polish  its knobs one by one, as long as the validation MSE falls

  Tokens that a verb has no use for are ignored.
  """

  VERBS = ("insert", "replace", "nudge", "delete", "polish")
  NUM_EDITS = 2
  NUM_LEVELS = 16
  NUM_KNOBS = 3

  def __init__(self, environment: Denoising):
    self._environment = environment
    self._place = 1 + len(self.VERBS)
    self._operation = self._place + MAX_STEPS
    self._levels = tuple(
      self._operation + len(OPERATIONS) + knob * self.NUM_LEVELS for knob in range(self.NUM_KNOBS)
    )

  @property
  def vocab_size(self) -> int:
    return -(-(self._levels[-1] + self.NUM_LEVELS) // 8) * 8

  @property
  def allowed(self) -> tuple[tuple[int, int], ...]:
    rest = (
      (self._place, self._operation),
      (self._operation, self._levels[0]),
      *((first, first + self.NUM_LEVELS) for first in self._levels),
    )
    # Something has to change, so that the first edit may not be the stop.
    return ((1, self._place), *rest, (0, self._place), *rest)

  @property
  def stop_token(self) -> int | None:
    return 0

  def prompt(self, artefact: Artefact) -> tuple[int, ...]:
    ids = [0]
    for step in artefact["steps"]:
      operation = _BY_NAME[step["op"]]
      ids.append(self._operation + OPERATIONS.index(operation))
      for first, parameter in zip(self._levels, operation.parameters):
        ids.append(first + parameter.level(step[parameter.name]))
    return tuple(ids)

  def apply(self, artefact: Artefact, tokens: Sequence[int], seed: int) -> Artefact:
    width = len(self.allowed) // self.NUM_EDITS
    kept = list(tokens)
    if len(kept) < len(self.allowed) and len(kept) % width == 1 and kept[-1] == self.stop_token:
      kept.pop()
    if not kept or len(kept) % width or (len(kept) == len(tokens) != len(self.allowed)):
      raise ValueError(
        f"PipelineEdits.apply: got {len(tokens)} tokens, expected {len(self.allowed)}, or {width}"
        " and then the stop token 0; finish the sentence."
      )
    for place, (token, (first, past)) in enumerate(zip(kept, self.allowed)):
      # The stop stands last only, and there it is gone.
      least = max(first, 1)
      if not least <= token < past:
        raise ValueError(
          f"PipelineEdits.apply: got token {token} at place {place}, expected {least} to"
          f" {past - 1}; see `allowed`."
        )
    steps = [dict(step) for step in artefact["steps"]]
    for start in range(0, len(kept), width):
      steps = self._edit(steps, kept[start : start + width])
    return {"steps": steps}

  def _edit(self, steps: list[dict[str, Any]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    verb = self.VERBS[tokens[0] - 1]
    place = tokens[1] - self._place
    levels = [token - first for token, first in zip(tokens[3:], self._levels)]
    operation = OPERATIONS[tokens[2] - self._operation]
    at = place % (len(steps) + (verb == "insert"))
    match verb:
      case "insert":
        if len(steps) == MAX_STEPS:
          raise ValueError(
            f"PipelineEdits.apply: got an insertion into {MAX_STEPS} steps, expected at most"
            f" {MAX_STEPS} steps; delete or replace one."
          )
        return [*steps[:at], _step(operation, levels), *steps[at:]]
      case "replace":
        return [*steps[:at], _step(operation, levels), *steps[at + 1 :]]
      case "nudge":
        moved = dict(steps[at])
        for parameter, level in zip(_BY_NAME[moved["op"]].parameters, levels):
          # Thirds of the levels: down, as it is, up.
          moved[parameter.name] = _shifted(parameter, moved[parameter.name], level * 3 // 16 - 1)
        return [*steps[:at], moved, *steps[at + 1 :]]
      case "delete":
        if len(steps) == 1:
          raise ValueError(
            "PipelineEdits.apply: got the deletion of the only step, expected two steps at least;"
            " replace it."
          )
        return [*steps[:at], *steps[at + 1 :]]
      case _:
        return self._environment.polish(steps, at)


def _step(operation: Operation, levels: Sequence[int]) -> dict[str, Any]:
  step: dict[str, Any] = {"op": operation.name}
  for parameter, level in zip(operation.parameters, levels):
    # Fewer choices than levels share them evenly, so that near levels stay near.
    step[parameter.name] = parameter.choices[level * len(parameter.choices) // 16]
  return step


def _shifted(parameter: Parameter, value: Any, shift: int) -> Any:
  if shift == 0:
    return value
  level = parameter.level(value) + shift
  return parameter.choices[min(max(level, 0), len(parameter.choices) - 1)]


class Denoising:
  """The environment: pipelines over one data set.

  Attributes:
    name, is_maximised, published, language: as `discovery.Environment`.
    counts: of the data set; `counts.truth` where it is simulated.
    train, validation: f64[c, g]; what search may see.
    poisson_limit: nats; a pipeline's Poisson number is at most this.
  """

  def __init__(self, path: str | os.PathLike[str] = "", *, seed: int = 0):
    """Loads or simulates the data and deals its molecules.

    Args:
      path: as `load`; "" for the simulated set.
      seed: of the simulation and of the split.

    Raises:
      ValueError, ModuleNotFoundError: as `load`.
    """
    self.is_maximised = False
    # What is published holds for other counts and splits, which would have to be downloaded.
    self.published: tuple[Published, ...] = ()
    self.counts = load(path) if path else simulate(seed)
    label = pathlib.Path(path).stem if path else "simulated"
    self.name = f"denoising_{label}"
    self.train, self.validation, self._heldout = split(self.counts.counts, seed)
    self._total = float(self.train.sum())
    self.language = PipelineEdits(self)
    plain = [
      [{"op": "normalise"}, {"op": "shrink", "strength": strength}]
      for strength in _BY_NAME["shrink"].parameters[0].choices
    ]
    likelihoods = [self._poisson(run(steps, self.train)) for steps in plain]
    self._plain = plain[int(np.argmin(likelihoods))]
    self.poisson_limit = min(likelihoods)

  def start(self, seed: int) -> Artefact:
    """Returns normalised counts, shrunk to the mean cell as much as the likelihood likes best."""
    return {"steps": [dict(step) for step in self._plain]}

  def verify(self, artefact: Artefact) -> Score:
    reason = complaint(artefact)
    if reason:
      return environment_lib.invalid(reason)
    try:
      with np.errstate(over="ignore", invalid="ignore"):  # What is not finite is refused below.
        denoised = run(artefact["steps"], self.train)
    except np.linalg.LinAlgError as error:
      return environment_lib.invalid(
          f"steps: {error}; expected numbers that stay far from overflow"
        )
    reason = self._refusal(denoised)
    if reason:
      return environment_lib.invalid(reason)
    value = mse(denoised, self.validation)
    return Score(is_valid=True, value=value, reward=1 / (1e-8 + value))

  def poisson_share(self, artefact: Artefact) -> float:
    """Returns how much of the way from train (0) to validation itself (1) the likelihood goes.

    Raises:
      ValueError: if the artefact is no pipeline.
    """
    worst = self._poisson(self.train)
    best = self._poisson(self.validation * (self._total / self.validation.sum()))
    return (worst - self._poisson(self.denoise(artefact))) / (worst - best)

  def heldout(self, artefact: Artefact) -> float:
    """Returns the MSE on molecules that neither train nor search has seen.

    Raises:
      ValueError: if the artefact is no pipeline.
    """
    return mse(self.denoise(artefact), self._heldout)

  def against_truth(self, artefact: Artefact) -> float:
    """Returns the MSE against the true expression of a simulated set.

    Raises:
      ValueError: if the artefact is no pipeline, or the data has no known truth.
    """
    if self.counts.truth is None:
      raise ValueError(
        f"Denoising.against_truth: got {self.name}, expected a simulated set; nothing tells the"
        " truth of a measured one: use `heldout`."
      )
    return mse(self.denoise(artefact), self.counts.truth)

  def denoise(self, artefact: Artefact) -> np.ndarray:
    """Returns what a pipeline makes of train, f64[c, g], each cell with the molecules it has there.

    Raises:
      ValueError: if the artefact is no pipeline.
    """
    reason = complaint(artefact)
    if reason:
      raise ValueError(f"Denoising: {reason}; see `OPERATIONS`.")
    return run(artefact["steps"], self.train)

  def polish(self, steps: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    """Moves each knob of one step to the neighbouring choice as long as the score improves.

    At most two moves a knob, hence twelve pipelines are tried at most.
    """
    best = [dict(step) for step in steps]
    score = self.verify({"steps": best})
    for parameter in _BY_NAME[best[at]["op"]].parameters:
      for direction in (-1, 1):
        improved = False
        for _ in range(2):
          moved = dict(best[at])
          moved[parameter.name] = _shifted(parameter, moved[parameter.name], direction)
          if moved == best[at]:
            break
          tried = [*best[:at], moved, *best[at + 1 :]]
          outcome = self.verify({"steps": tried})
          if not environment_lib.is_better(self, outcome.value, score.value):
            break
          best, score, improved = tried, outcome, True
        if improved:
          break
    return best

  def classical(self, seed: int) -> Iterator[Artefact]:
    """Yields the best MAGIC-style diffusion so far, over a shuffled grid of its knobs.

    normalise, square root (or logarithm), principal components or not, diffusion with the given
    neighbours, steps and decay, back, genes rescaled (MAGIC's own last step) or not.
    """
    diffusion = _BY_NAME["diffuse"]
    grid = [
      [
        {"op": "normalise"},
        {"op": transform},
        *([{"op": "svd", "rank": rank}] if rank else []),
        {"op": "diffuse", "neighbours": neighbours, "times": times, "decay": decay},
        {"op": "invert"},
        *([{"op": "rescale"}] if is_rescaled else []),
      ]
      for transform in ("sqrt", "log")
      for rank in (0, 20, 48)
      for neighbours in diffusion.parameters[0].choices
      for times in diffusion.parameters[1].choices
      for decay in diffusion.parameters[2].choices[1:6:2]
      for is_rescaled in (False, True)
    ]
    rng = np.random.default_rng([seed, 1])
    best = self.start(seed)
    score = self.verify(best)
    while True:
      for place in rng.permutation(len(grid)):
        candidate = {"steps": [dict(step) for step in grid[place]]}
        outcome = self.verify(candidate)
        if environment_lib.is_better(self, outcome.value, score.value):
          best, score = candidate, outcome
        yield best

  def polished_starts(self, seed: int) -> Iterator[Artefact]:
    """Yields random pipelines, polished step by step.

    They have two to five steps; where none of a dozen is an answer, the plain start is polished.
    """
    rng = np.random.default_rng([seed, 2])
    while True:
      steps = self.start(seed)["steps"]
      # Most random pipelines are no answers; a dozen tries keep an item within a second.
      for _ in range(12):
        tried = [{"op": "normalise"}]
        for _ in range(rng.integers(1, 5)):
          operation = OPERATIONS[rng.integers(len(OPERATIONS))]
          tried.append(_step(operation, rng.integers(0, 16, 3).tolist()))
        if self.verify({"steps": tried}).is_valid:
          steps = tried
          break
      for at in range(len(steps)):
        steps = self.polish(steps, at)
      yield {"steps": steps}

  def describe(self, artefact: Artefact, score: Score) -> str:
    cells, genes = self.train.shape
    listed = "\n".join(
      f"  {operation.name}: {operation.meaning}"
      + "".join(
        f"\n      {parameter.name}: {parameter.meaning}, "
        + (
          f"one of {', '.join(map(str, parameter.choices))}"
          if isinstance(parameter.choices[0], str)
          else f"{parameter.choices[0]} to {parameter.choices[-1]}"
        )
        for parameter in operation.parameters
      )
      for operation in OPERATIONS
    )
    return (
      f"Single-cell denoising, {cells} cells x {genes} genes. Molecules were dealt at random to"
      f" train ({TRAIN_SHARE:.0%}), validation and a part that you never see. A pipeline of 1 to"
      f" {MAX_STEPS} steps runs on train; its output is made non-negative and each cell is scaled"
      " to its train molecules.\n"
      f"Minimise the MSE to validation after normalising cells to {TARGET_SUM:.0f} and log(1 + x)."
      " The mean Poisson negative log-likelihood of validation (its total given) must be at most"
      f" {self.poisson_limit:.6f} nats, else the pipeline is invalid.\n"
      f"Steps, each a dict with \"op\" and its knobs:\n{listed}\n"
      f"Now: {artefact}\n"
      f"Its MSE: {score.value:.6f}.\n"
      "Write Python that defines improve(artefact, seconds, seed) and returns a better pipeline,"
      ' {"steps": [...]}; plain data, within `seconds`.'
    )

  def picture(self, artefact: Artefact) -> Any:
    """Returns heatmaps of cells by genes: train, denoised and, if simulated, the truth.

    Above them stands the MSE on what was held out, which search has not seen.
    """
    from matplotlib import figure

    panels = [("train", self.train), ("denoised", self.denoise(artefact))]
    if self.counts.truth is not None:
      panels.append(("truth", self.counts.truth))
    means = _log_normalised(self.train).mean(axis=0)
    genes = np.argsort(-means, kind="stable")
    drawing = figure.Figure(figsize=(4 * len(panels), 4.5), layout="constrained")
    axes = drawing.subplots(1, len(panels), sharey=True)
    top = float(_log_normalised(panels[-1][1]).max())
    for axis, (title, matrix) in zip(axes, panels):
      values = _log_normalised(matrix)[self.counts.order][:, genes]
      axis.imshow(values, aspect="auto", vmin=0, vmax=top, interpolation="nearest")
      axis.set(title=title, xlabel="genes")
    axes[0].set_ylabel("cells")
    found, plain = (self.heldout(one) for one in (artefact, self.start(0)))
    drawing.suptitle(f"MSE on held-out molecules {found:.4f}; the plain start's {plain:.4f}")
    drawing.colorbar(axes[0].images[0], ax=axes, label="log(1 + molecules in 10,000)")
    return drawing

  def _poisson(self, denoised: np.ndarray) -> float:
    return poisson(denoised, self.validation, self._total)

  def _refusal(self, denoised: np.ndarray) -> str:
    if not np.isfinite(denoised).all():
      return "pipeline: got values that are not finite, expected finite counts"
    if not (denoised.max() <= self._total and denoised.min() >= 0):
      return f"pipeline: got {denoised.max():.3g} molecules, expected 0 to {self._total:.0f}"
    likelihood = self._poisson(denoised)
    if not likelihood <= self.poisson_limit:
      return (
        f"pipeline: got a Poisson number of {likelihood:.5f} nats, expected at most"
        f" {self.poisson_limit:.5f}, the plain start's; keep seen genes above zero, and the scale"
      )
    return ""


def complaint(artefact: Any) -> str:
  """Returns why something is no pipeline; "" if it is one."""
  if not isinstance(artefact, dict) or set(artefact) != {"steps"}:
    return f'artefact: got {environment_lib.shown(artefact)}, expected {{"steps": [...]}}'
  steps = artefact["steps"]
  if not isinstance(steps, list) or not 1 <= len(steps) <= MAX_STEPS:
    got = f"{len(steps)} steps" if isinstance(steps, list) else type(steps).__name__
    return f"steps: got {got}, expected a list of 1 to {MAX_STEPS}"
  num_transforms, is_saved = 0, False
  for place, step in enumerate(steps):
    where = f"steps[{place}]"
    op = step.get("op") if isinstance(step, dict) else None
    operation = _BY_NAME.get(op) if isinstance(op, str) else None
    if operation is None:
      names = ", ".join(_BY_NAME)
      got = environment_lib.shown(step)
      return f'{where}: got {got}, expected a dict whose "op" is one of {names}'
    expected = {"op", *(parameter.name for parameter in operation.parameters)}
    if set(step) != expected:
      got = ", ".join(sorted(map(environment_lib.shown, step)))
      return f"{where}: got the fields {got}, expected {', '.join(sorted(expected))}"
    for parameter in operation.parameters:
      reason = parameter.complaint(step[parameter.name])
      if reason:
        return f"{where}.{reason}"
    num_transforms += (op in ("sqrt", "log")) - (op == "invert")
    if num_transforms < 0:
      return f"{where}: got invert, expected a sqrt or log before it that is not undone yet"
    is_saved |= op == "save"
    if op == "blend" and step["source"] == "saved" and not is_saved:
      return f"{where}: got a blend with what is saved, expected a save before it"
  return ""


@dataclasses.dataclass(frozen=True)
class _State:
  """What a pipeline holds: a matrix, and the transforms that lie on it."""

  x: np.ndarray
  transforms: tuple[str, ...] = ()

  def plain(self) -> np.ndarray:
    """Returns f64[c, g] >= 0 with every transform undone."""
    x = self.x
    for transform in reversed(self.transforms):
      x = _undone(x, transform)
    return np.maximum(x, 0.0)


def run(steps: Sequence[dict[str, Any]], train: np.ndarray) -> np.ndarray:
  """Returns what an accepted pipeline makes of counts, f64[c, g] >= 0, with their cells' sums."""
  libraries = train.sum(axis=1, keepdims=True)
  # 1 for a cell without molecules, which stays without.
  size = np.where(libraries > 0, libraries, 1.0) / np.median(libraries)
  state = _State(train)
  saved = state
  for step in steps:
    if step["op"] == "save":
      saved = state
    else:
      state = _taken(step, state, saved, train, size)
  plain = state.plain()
  sums = plain.sum(axis=1, keepdims=True)
  return plain * np.divide(libraries, sums, out=np.zeros_like(sums), where=sums > 0)


def _taken(
  step: dict[str, Any], state: _State, saved: _State, train: np.ndarray, size: np.ndarray
) -> _State:
  """Returns the state after one step; `size`, f64[c, 1], is the library in median cells."""
  x = state.x
  match step["op"]:
    case "normalise":
      plain = state.plain()
      sums = plain.sum(axis=1, keepdims=True)
      target = np.median(train.sum(axis=1))
      return _with_plain(
        state, plain * np.divide(target, sums, out=np.zeros_like(sums), where=sums > 0)
      )
    case "sqrt" | "log":
      return _State(_done(x, step["op"]), (*state.transforms, step["op"]))
    case "invert":
      return _State(_undone(x, state.transforms[-1]), state.transforms[:-1])
    case "svd":
      mean = x.mean(axis=0)
      return dataclasses.replace(state, x=_low_rank(x - mean, step["rank"]) + mean)
    case "diffuse":
      return dataclasses.replace(
        state, x=diffuse(x, step["neighbours"], step["times"], step["decay"])
      )
    case "genes":
      smooth = _genes(x, step["neighbours"])
      return dataclasses.replace(state, x=(1 - step["weight"]) * x + step["weight"] * smooth)
    case "alra":
      return dataclasses.replace(state, x=_alra(x, step["rank"], step["quantile"]))
    case "nmf":
      return dataclasses.replace(state, x=_nmf(np.maximum(x, 0), step["rank"], step["iterations"]))
    case "shrink":
      plain = state.plain()
      sums = plain.sum(axis=1, keepdims=True)
      prior = sums * _gene_means(train)
      return _with_plain(
        state, (size * plain + step["strength"] * prior) / (size + step["strength"])
      )
    case "blend":
      plain = state.plain()
      sources = {"raw": train, "mean": _gene_means(train), "saved": saved.plain()}
      source = np.broadcast_to(sources[step["source"]], plain.shape)
      sums = source.sum(axis=1, keepdims=True)
      ratio = np.divide(
        plain.sum(axis=1, keepdims=True), sums, out=np.zeros_like(sums), where=sums > 0
      )
      other = _with_plain(state, source * ratio)
      return dataclasses.replace(state, x=(1 - step["weight"]) * x + step["weight"] * other.x)
    case "rescale":
      plain = state.plain()
      # The genes' share of cells of one size: large cells count no more than others.
      wanted = (train / size).sum(axis=0)
      sums = plain.sum(axis=0)
      return _with_plain(
        state, plain * np.divide(wanted, sums, out=np.zeros_like(sums), where=sums > 0)
      )
    case _:  # power
      return _with_plain(state, state.plain() ** step["exponent"])


def _with_plain(state: _State, plain: np.ndarray) -> _State:
  """Returns a state with these plain values under the transforms of another."""
  x = plain
  for transform in state.transforms:
    x = _done(x, transform)
  return _State(x, state.transforms)


def _done(x: np.ndarray, transform: str) -> np.ndarray:
  positive = np.maximum(x, 0.0)
  return np.sqrt(positive) if transform == "sqrt" else np.log1p(positive)


def _undone(x: np.ndarray, transform: str) -> np.ndarray:
  positive = np.maximum(x, 0.0)
  return positive**2 if transform == "sqrt" else np.expm1(np.minimum(positive, MAX_LOG))


def _gene_means(train: np.ndarray) -> np.ndarray:
  """Returns each gene's share of all molecules, f64[1, g]."""
  return train.sum(axis=0, keepdims=True) / train.sum()


def _log_normalised(counts: np.ndarray) -> np.ndarray:
  sums = counts.sum(axis=1, keepdims=True)
  return np.log1p(counts * np.divide(TARGET_SUM, sums, out=np.zeros_like(sums), where=sums > 0))


def _leading(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the leading singular vectors, scaled: x ~ left @ right, f64[c, k] and f64[k, g].

  By the eigenvectors of the smaller Gram matrix: its half precision is far below the noise.
  """
  if x.shape[1] <= x.shape[0]:
    vectors = np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :rank]
    return x @ vectors, vectors.T
  vectors = np.linalg.eigh(x @ x.T)[1][:, ::-1][:, :rank]
  return vectors, vectors.T @ x


def _low_rank(x: np.ndarray, rank: int) -> np.ndarray:
  left, right = _leading(x, rank)
  return left @ right


def diffuse(x: np.ndarray, neighbours: int, times: int, decay: float) -> np.ndarray:
  """Returns P^times x, f64[c, g]: rows averaged along random walks between similar rows.

    K_ij = exp(-(|e_i - e_j| / s_i)^decay), s_i the distance to neighbour number `neighbours`,
           over the 3 * neighbours nearest rows; 1 for i = j
    P    = (K + K^T) with rows that sum to 1

  Args:
    x: f64[c, g].
    neighbours: of a row.
    times: length of the walk.
    decay: how sharply the kernel falls.

  Source: van Dijk et al. 2018 (MAGIC), methods.
  """
  num_cells = len(x)
  centred = x - x.mean(axis=0)
  left, right = _leading(centred, EMBEDDING_RANK)
  # Whichever side holds the singular values, rows of `right` are orthogonal.
  embedding = left * np.linalg.norm(right, axis=1)
  near = min(neighbours, num_cells - 1)
  kept = min(3 * near, num_cells - 1)
  squares = (embedding**2).sum(axis=1)
  columns, weights = [], []
  for start in range(0, num_cells, 1024):
    rows = embedding[start : start + 1024]
    distances = squares[start : start + 1024, None] + squares - 2 * rows @ embedding.T
    distances[np.arange(len(rows)), start + np.arange(len(rows))] = -1.0
    found = np.argpartition(distances, kept, axis=1)[:, : kept + 1]
    chosen = np.take_along_axis(distances, found, axis=1)
    order = np.argsort(chosen, axis=1, kind="stable")
    found = np.take_along_axis(found, order, axis=1)
    # The first is the row itself.
    apart = np.sqrt(np.maximum(np.take_along_axis(chosen, order, axis=1), 0.0))
    width = np.maximum(apart[:, near : near + 1], 1e-12)
    columns.append(found)
    weights.append(np.exp(-np.minimum((apart / width), 1e3) ** decay))
  rows = np.repeat(np.arange(num_cells), kept + 1)
  kernel = sparse.csr_matrix(
    (np.concatenate(weights).ravel(), (rows, np.concatenate(columns).ravel())),
    shape=(num_cells, num_cells),
  )
  kernel = sparse.csr_matrix(kernel + kernel.T)
  walk = sparse.csr_matrix(sparse.diags(1 / np.asarray(kernel.sum(axis=1)).ravel()) @ kernel)
  for _ in range(times):
    x = walk @ x
  return x


def _genes(x: np.ndarray, neighbours: int) -> np.ndarray:
  """Returns each gene as its correlated genes predict it, f64[c, g]."""
  mean, deviation = x.mean(axis=0), x.std(axis=0)
  deviation = np.where(deviation > 1e-12, deviation, 1.0)
  scaled = (x - mean) / deviation
  correlation = scaled.T @ scaled / len(x)
  np.fill_diagonal(correlation, 0.0)
  kept = min(neighbours, x.shape[1] - 1)
  found = np.argpartition(-np.abs(correlation), kept - 1, axis=1)[:, :kept]
  weights = np.zeros_like(correlation)
  values = np.take_along_axis(correlation, found, axis=1)
  np.put_along_axis(weights, found, values, axis=1)
  # Signs turn the anticorrelated; the sum of magnitudes makes it an average.
  total = np.abs(weights).sum(axis=1)
  return mean + deviation * (scaled @ weights.T) / np.maximum(total, 1e-12)


def _alra(x: np.ndarray, rank: int, quantile: float) -> np.ndarray:
  """Returns the low rank of x >= 0 with a gene's values within its own noise set to 0.

  Source: Linderman et al. 2022, steps 2 and 3 of the algorithm.
  """
  x = np.maximum(x, 0.0)
  low = _low_rank(x, rank)
  # What is below zero is noise, which is taken to be as large above it.
  threshold = np.abs(np.minimum(np.quantile(low, quantile, axis=0), 0.0))
  seen, kept = x > 0, low > threshold

  def moments(values: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = np.maximum(where.sum(axis=0), 1)
    mean = np.where(where, values, 0.0).sum(axis=0) / count
    square = np.where(where, (values - mean) ** 2, 0.0).sum(axis=0) / count
    return mean, np.sqrt(square)

  (wanted, wide), (mean, deviation) = moments(x, seen), moments(low, kept)
  factor = np.divide(wide, deviation, out=np.ones_like(wide), where=deviation > 1e-9)
  scaled = np.where(kept, (low - mean) * factor + wanted, 0.0)
  return np.where((scaled <= 0) & seen, x, np.maximum(scaled, 0.0))


def _nmf(x: np.ndarray, rank: int, iterations: int) -> np.ndarray:
  """Returns left @ right >= 0, fitted by multiplicative updates of the Poisson likelihood.

  Source: Lee & Seung 2001, Algorithms for non-negative matrix factorization, theorem 2.
  """
  rng = np.random.default_rng([rank, *x.shape])
  scale = np.sqrt(max(x.mean(), 1e-12) / rank)
  left = scale * (0.5 + rng.random((x.shape[0], rank)))
  right = scale * (0.5 + rng.random((rank, x.shape[1])))
  for _ in range(iterations):
    left *= (x / (left @ right + 1e-12)) @ right.T / (right.sum(axis=1) + 1e-12)
    right *= left.T @ (x / (left @ right + 1e-12)) / (left.sum(axis=0)[:, None] + 1e-12)
  return left @ right
