"""The annotation checker that tests/conftest.py installs for every import of the library."""

from __future__ import annotations

import importlib.util
from typing import Any

# A lent device machine has no beartype; launch/test.sh always has it.
HAS_BEARTYPE = importlib.util.find_spec("beartype") is not None


def checker(function: Any) -> Any:
  """Wraps a function so that calls check its annotations, where beartype is installed."""
  if not HAS_BEARTYPE:
    return function
  import beartype

  # An int is accepted where a float is expected, as in PEP 484.
  return beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))(function)
