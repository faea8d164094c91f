"""Axis names and named array types.

    n   flat token rows of one batch        s   segments
    b   requests (or sequences)             g   members of a group
    t   positions of one sequence           v   vocabulary
    d   hidden features                     h   query heads
    k   key/value heads                     c   features of one head
    i   instances                           p   pages of one page-table row
    r   logical reduction slabs             j   key/value heads that pages store

In docstrings, a dtype and a shape are one word: `f32[n, d]`, `i32[s, p]`, `bool[n]`.
"""

from jax import Array
from jaxtyping import Bool, Float, Int, PRNGKeyArray, Shaped
import numpy as np

Rows = Float[Array, "n d"]
Tokens = Int[Array, "n"]
Positions = Int[Array, "n"]
TokenLogprobs = Float[Array, "n"]
Queries = Float[Array, "n h c"]
KeyValues = Float[Array, "n k c"]
PageTable = Int[Array, "s p"]
GroupRewards = Float[np.ndarray, "b g"]

__all__ = [
  "Array",
  "Bool",
  "Float",
  "GroupRewards",
  "Int",
  "KeyValues",
  "PRNGKeyArray",
  "PageTable",
  "Positions",
  "Queries",
  "Rows",
  "Shaped",
  "TokenLogprobs",
  "Tokens",
]
