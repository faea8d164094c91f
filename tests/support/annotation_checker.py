"""The checker of annotations that tests/conftest.py hangs into every import of ours."""

from __future__ import annotations

import importlib.util
from typing import Any

# A lent machine has no beartype; launch/test.sh always does.
HAS_BEARTYPE = importlib.util.find_spec("beartype") is not None


def checker(function: Any) -> Any:
  """Has a function check its annotations when it is called, where beartype is installed."""
  if not HAS_BEARTYPE:
    return function
  import beartype

  # An int is welcome where a float is asked for, as in PEP 484.
  return beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))(function)
