"""Circle packing: place n circles in the unit square to maximise the sum of their radii.

  maximise  Σ r_i     subject to   r_i > 0,   r_i <= x_i, y_i <= 1 - r_i,
                                   (x_i - x_j)² + (y_i - y_j)² >= (r_i + r_j)²   for i < j

An artefact is a list of n lists [x, y, r]. Floats are fractions, so the rules are checked in
integers, without tolerance: an overlap of one unit in the last place is an overlap.

`rules` has the verifier, `geometry` measures, `descent` and `optimise` are the polish tool, `edits`
the language, `environment` the problem.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.1;
Novikov et al. 2025 (AlphaEvolve), https://arxiv.org/abs/2506.13131, appendix B.12.
"""

from __future__ import annotations

from experiments.problems.circle_packing.edits import CircleLanguage
from experiments.problems.circle_packing.environment import CirclePacking

__all__ = ["CircleLanguage", "CirclePacking"]
