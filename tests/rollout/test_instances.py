"""What instances have free is kept true."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax.rollout.instances import Decision, Instances


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["admit", "release", "see"]), st.integers(0, 5)),
    max_size=30,
  )
)
def test_the_room_of_instances_is_kept_true(changes):
  instances = Instances.empty(3, page_size=4, num_pages=9, max_running=2)
  for instance, kind, pages in changes:
    if kind == "admit":
      instances.admit(Decision("a", instance, 1, pages, False, 0))
    elif kind == "release":
      instances.release(instance, pages)
    else:
      instances.see(instance, free_pages=pages, max_running=pages % 4)
    assert instances.room == [
      free if running < most else 0
      for free, running, most in zip(
        instances.free_pages, instances.num_running, instances.max_running, strict=True
      )
    ]


def test_instances_of_nothing_are_refused():
  with pytest.raises(ValueError, match="page_size=0, num_pages=1, max_running=1, expected"):
    Instances.empty(1, page_size=0, num_pages=1, max_running=1)
