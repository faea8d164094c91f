"""Free capacity of instances is tracked correctly."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

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


def test_an_instance_that_comes_has_room_and_one_that_is_gone_has_none_again():
  instances = Instances(4, [], [], [], [])
  assert [instances.add(num_pages=pages, max_running=2) for pages in (9, 5)] == [0, 1]
  instances.admit(Decision("a", 0, 1, 3, True, 0))
  assert instances.room == [6, 5] and instances.num_running == [1, 0]
  instances.close(0)
  assert instances.room == [0, 5] and instances.num_running == [0, 0]
  assert instances.add(num_pages=7, max_running=1) == 2
  assert instances.room == [0, 5, 7] and instances.num_pages == [0, 5, 7]
