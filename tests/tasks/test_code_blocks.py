"""Extracting the last Python block of a text."""

from __future__ import annotations

import pytest

from seerjax.tasks import code_blocks


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("", (None, False)),
    ("x = 1", (None, False)),
    ("```\nx = 1\n```", (None, False)),
    ("```python\nx = 1\n```", ("x = 1\n", False)),
    ("so\n```py\nx = 1\n```\nthen\n```Python3\ny = 2\n```\nend", ("y = 2\n", False)),
    ("```python\nx = 1\n```\n```text\nno\n```", ("x = 1\n", False)),
    ("```python\nx = 1\n```\n```python\ny =", ("y =", True)),
    ("``` stray\n```python\nx = 1\n```", ("x = 1\n", False)),
    ("````python\n```\nx = 1\n````", ("```\nx = 1\n", False)),
  ],
)
def test_the_last_block_by_hand(text, expected):
  assert code_blocks.last_python(text) == expected
