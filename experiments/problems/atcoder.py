"""Published results of AtCoder's heuristic contests: totals over the contest's own 150 inputs.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 4.
"""

from __future__ import annotations

from seerjax.discovery import environment

NUM_INPUTS = 150


def published(*totals: tuple[int, str, int]) -> tuple[environment.Published, ...]:
  """Returns means over the contest's inputs, which are not comparable with ours.

  Args:
    totals: (total points, author, year), best first.
  """
  return tuple(
    environment.Published(
      value=total / NUM_INPUTS,
      who=who,
      year=year,
      source="arXiv 2601.16175; mean over the contest's 150 inputs, which are not ours",
      is_comparable=False,
    )
    for total, who, year in totals
  )
