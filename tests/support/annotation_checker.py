"""The checker of annotations that tests/conftest.py hangs into every import of ours."""

from __future__ import annotations

import beartype

# An int is welcome where a float is asked for, as in PEP 484.
checker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
