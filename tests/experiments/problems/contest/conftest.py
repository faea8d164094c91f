"""A sandbox for the contest programs of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seerjax.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
  with Sandbox(allow_weak=True) as one:
    yield one
