"""A policy from outside schedules a rollout: the program of its guide, found by its name."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import pathlib
import re
import sys

import moving_requests
import pytest
import tiny_model

from seerjax.discovery.config import DiscoverConfig
from seerjax.rollout import policy_loading
from seerjax.rollout.divided import DividedRollout
from seerjax.rollout.policies import LongestGroupFirst, Policy
from seerjax.run.config import RunConfig

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "policy.md"
OTHERS = """
from seerjax.rollout.policies import Divided

class NeedsMore(Divided):
  def __init__(self, tokens):
    super().__init__(chunk_tokens=tokens)

number = 3
"""


@pytest.fixture
def outside(tmp_path: pathlib.Path) -> Iterator[None]:
  """A folder on the path with the guide's module, shortest_first, and with other_policies."""
  program = re.search(r"```python\n# shortest_first.py\n(.*?)```", GUIDE.read_text(), re.S)
  assert program is not None
  (tmp_path / "shortest_first.py").write_text(program[1])
  (tmp_path / "other_policies.py").write_text(OTHERS)
  sys.path.append(str(tmp_path))
  yield
  sys.path.remove(str(tmp_path))
  for name in ("shortest_first", "other_policies"):
    sys.modules.pop(name, None)


def run(policy: Policy):
  """Returns the completions of a rollout by request, and its spans."""
  rollout = DividedRollout(moving_requests.make_engine((2, 1)), policy)
  found = {one.request_id: one for one in rollout.run(moving_requests.asked())}
  return found, rollout.trace.spans


def test_a_policy_from_outside_gives_equal_tokens(outside):
  policy = policy_loading.load("shortest_first:ShortestFirst")
  assert type(policy).__name__ == "ShortestFirst" and policy == type(policy)()
  assert policy_loading.load("shortest_first:SHORT_CHUNKS") == dataclasses.replace(
    policy, chunk_tokens=64
  )
  usual, _ = run(LongestGroupFirst(chunk_tokens=5))
  found, spans = run(dataclasses.replace(policy, chunk_tokens=5))
  assert usual.keys() == found.keys()
  assert all(tiny_model.same(found[name], usual[name], 0) for name in usual)
  assert max(span.num_tokens for span in spans) == 5


def test_a_policy_is_its_own_name():
  policy = LongestGroupFirst(chunk_tokens=7)
  assert policy_loading.load(policy) is policy


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("no_such_module:Mine", "scheduler: got .* cannot be imported .*expected 'my_module:MyPolicy'"),
    ("shortest_first:Absent", "has no 'Absent', expected a scheduling policy; it has .*Shortest"),
    (
      "other_policies:number",
      "got 'other_policies:number', a int, expected a scheduling policy; m",
    ),
    ("other_policies:NeedsMore", "got TypeError .* without arguments, expected a policy; give its"),
  ],
)
def test_names_of_other_things_are_refused(outside, name, message):
  with pytest.raises(ValueError, match=message):
    policy_loading.load(name)


@pytest.mark.parametrize("config", [RunConfig, DiscoverConfig])
def test_configs_take_a_record_or_a_name(config):
  for good in (LongestGroupFirst(), "my_module:Mine"):
    assert config(scheduler=good).scheduler == good
  for bad in ("Mine", ":Mine", "my_module:"):
    with pytest.raises(ValueError, match=f"{config.__name__}.scheduler: got '{bad}', expected 'my"):
      config(scheduler=bad)
