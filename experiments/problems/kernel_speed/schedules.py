"""Schedules of the triangle multiplication, as data."""

from __future__ import annotations

import dataclasses

from experiments.problems.kernel_speed import rules
from experiments.problems.kernel_speed.rules import FLOAT32_TOLERANCE, TOLERANCE, Field

FIELDS: tuple[Field, ...] = (
  Field("projections", ("separate", "pairs", "sides", "four", "five"), "what shares one matmul"),
  Field("layout", ("rows", "features"), "of the projections: [n * n, h], or its transpose"),
  Field("input_norm", ("two_pass", "one_pass", "dot", "folded"), "how y comes about"),
  Field("row_chunks", (1, 2, 4), "pieces of the n * n rows, projected one after the other"),
  Field("contraction", ("einsum", "batched", "transposed"), "form of the sum over k"),
  Field("hidden_chunks", (1, 2, 4), "pieces of h, contracted one after the other"),
  Field("output_layout", ("rows", "features"), "of the sum over k, from there on"),
  Field("output_norm", ("two_pass", "one_pass", "dot"), "sums of the second norm"),
  Field("output_chunks", (1, 2, 4), "pieces of the rows after the sum over k"),
  Field("sigmoid", ("logistic", "tanh", "exp"), "formula"),
  Field("barriers", ("none", "contraction", "all"), "where fusion must stop"),
  Field("projection_dtype", ("float32", "bfloat16"), "of both operands; sums are float32"),
  Field("contraction_dtype", ("float32", "bfloat16"), "of both operands; sums are float32"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """A schedule of `trimul`; the defaults are the plain program. `FIELDS` lists the choices.

  Attributes:
    projections: "separate", "pairs" (values; gates), "sides" (left with its gate; right with its),
      "four" or "five" (the output gate too).
    layout: "rows" keeps features last; "features" puts them first, as the contraction needs them.
    input_norm: "two_pass", "one_pass" (mean square minus squared mean), "dot" (sums by a matmul
      with ones), or "folded": x is the matmuls' input, and their results are centred and scaled.
    row_chunks: chunks of the projections.
    contraction: "einsum" of [n, n, h]; "batched", one matmul per feature; "transposed", the same
      with the right operand in layout [h, k, j].
    hidden_chunks: chunks of the contraction.
    output_layout, output_norm, output_chunks: the same for the part after the contraction.
    sigmoid: "logistic", "tanh" as (1 + tanh(x / 2)) / 2, "exp" as 1 / (1 + exp(-x)).
    barriers: "none"; "contraction", before and after the contraction; "all", also after the first
      norm.
    projection_dtype, contraction_dtype: "float32" or "bfloat16".
  """

  projections: str = "separate"
  layout: str = "rows"
  input_norm: str = "two_pass"
  row_chunks: int = 1
  contraction: str = "einsum"
  hidden_chunks: int = 1
  output_layout: str = "rows"
  output_norm: str = "two_pass"
  output_chunks: int = 1
  sigmoid: str = "logistic"
  barriers: str = "none"
  projection_dtype: str = "float32"
  contraction_dtype: str = "float32"

  def __post_init__(self):
    reason = rules.complaint(dataclasses.asdict(self), FIELDS)
    if reason:
      raise ValueError(f"Schedule.{reason}; see `FIELDS`.")

  @property
  def is_float32(self) -> bool:
    return self.projection_dtype == self.contraction_dtype == "float32"


def tolerance_of(schedule: Schedule, backend: str) -> float:
  """Returns the absolute and relative tolerance of a schedule's results.

  By default XLA multiplies float32 in TF32 on GPUs and in bfloat16 on TPUs, so two programs of the
  same function differ by more than `FLOAT32_TOLERANCE`.
  """
  return FLOAT32_TOLERANCE if schedule.is_float32 and backend == "cpu" else TOLERANCE
