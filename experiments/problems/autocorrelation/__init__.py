"""The first and second autocorrelation inequality: functions with a flat self-convolution.

f >= 0 on [-1/4, 1/4] has n equal steps of heights a, and c = a * a (2n - 1 numbers) is their full
convolution; f*f is linear between its nodes, so both constants are rational in the heights:

  AC1, minimise   C1 = 2n max(c) / (sum a)^2                        of max f*f / (integral of f)^2
  AC2, maximise   C2 = (2 sum c_k^2 + sum c_k c_(k+1)) / 3 / (sum c max(c))
                                                            of |f*f|_2^2 / (|f*f|_1 |f*f|_inf)

Neither depends on the scale of a, and neither changes if each step is divided into k equal ones. A
constant has C1 = 2 and C2 = 2/3. Sums are exact (or certified bounds, for very many heights of very
different size). The language is that of `step_functions`; its tools work on up to 1,000 steps.

`rules` has the constants, `anneal` the compiled annealer, `edits` the language with its tools,
`environment` the problems.

Sources: Matolcsi & Vinuesa 2010, https://arxiv.org/abs/0907.1379 (both problems, and linear
programs for the first); Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175.
"""

from __future__ import annotations

from experiments.problems.autocorrelation.environment import (
  FirstAutocorrelation,
  SecondAutocorrelation,
)

__all__ = ["FirstAutocorrelation", "SecondAutocorrelation"]
