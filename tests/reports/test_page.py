"""Formatting of numbers on a page."""

from __future__ import annotations

import pytest

from seerjax.reports import page as page_lib


@pytest.mark.parametrize(
  "value, text",
  [(5181348, "5\u202f181\u202f348"), (5181348.25, "5\u202f181\u202f348"), (0.38091, "0.3809")],
)
def test_a_large_number_has_its_thousands_apart_whole_or_not(value, text):
  assert page_lib.number(value) == text
