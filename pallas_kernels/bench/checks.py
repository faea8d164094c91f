"""Checks of the kernels' values and bits, which must pass before speed is reported.

There are four kinds of check. Agreement: with the definition, on random numbers, in f64 on the host
if that is small. Invariance: a row has the same bits alone, in a batch, permuted, with any number
of other rows, and when repeated. Claim: a field of `Config` that should not change bits, compared
with another value. Question: the same for a field without a claim; neither answer is a failure.
Sizes are those of the models' layers on a GPU, and tiny in the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.bench import (
  attention_checks,
  matmul_checks,
  row_checks,
)
from pallas_kernels.bench.check_sizes import Sizes
from pallas_kernels.bench.comparison import Check


def kernel_checks(sizes: Sizes) -> dict[str, Iterable[Check]]:
  """Returns each kernel's checks, most important first, as lazy iterators."""
  return {
    "matmul": matmul_checks.matmul_checks(sizes),
    "attention": attention_checks.attention_checks(sizes),
    "rms_norm": row_checks.rms_norm_checks(sizes),
    "token_logprobs": row_checks.token_logprobs_checks(sizes),
    "grouped_matmul": matmul_checks.grouped_matmul_checks(sizes),
  }
