"""Invalid settings of policies are refused."""

from __future__ import annotations

import pytest

from seerjax.rollout.policies import (
  ByPrefix,
  ContextAware,
  Divided,
  LongestGroupFirst,
)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: Divided(chunk_tokens=0), "Divided: got chunk_tokens=0"),
    (lambda: ContextAware(min_pull_tokens=-1), "ContextAware: got .* min_pull_tokens=-1"),
    (
      lambda: LongestGroupFirst(min_correlation=-2),
      r"got min_correlation=-2, expected a value in \[-1, 2\]",
    ),
    (lambda: LongestGroupFirst(min_correlation=2.5), "got min_correlation=2.5"),
    (lambda: ByPrefix(max_spread=-1), "got max_spread=-1, expected at least 0"),
  ],
)
def test_settings_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
