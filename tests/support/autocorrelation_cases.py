"""Small autocorrelation problems that several tests use."""

from __future__ import annotations

from experiments.problems import autocorrelation

FIRST = autocorrelation.FirstAutocorrelation(num_steps=24)
SECOND = autocorrelation.SecondAutocorrelation(num_steps=20)
ENVIRONMENTS = (FIRST, SECOND)
