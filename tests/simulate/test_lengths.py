"""Generated lengths have the requested mean and correlation; traces are read or refused."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from seerjax.simulate import lengths as lengths_lib
from seerjax.simulate.lengths import LengthsConfig

SMALL = LengthsConfig(
  num_groups=400, group_size=8, mean_tokens=2000, max_tokens=10_000, sigma=0.8, rho=0.5
)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_mean_cap_and_likeness_are_those_asked_for(rho):
  # Far from the cap, which would make lengths more alike than they were drawn.
  config = LengthsConfig(
    num_groups=400, group_size=8, mean_tokens=2000, max_tokens=10**6, sigma=0.5, rho=rho
  )
  found = lengths_lib.generate(config, 0)
  assert found.shape == (400, 8)
  assert found.mean() == pytest.approx(2000, rel=0.05)
  assert np.log(found).std() == pytest.approx(0.5, rel=0.05)
  assert lengths_lib.within_share(found) == pytest.approx(rho, abs=0.05)


def test_the_mean_is_that_of_the_clipped_lengths():
  found = lengths_lib.generate(SMALL, 1)
  assert found.mean() == pytest.approx(2000, rel=0.05)
  assert found.min() >= 1 and found.max() == 10_000


def test_a_seed_gives_its_lengths():
  np.testing.assert_array_equal(lengths_lib.generate(SMALL, 3), lengths_lib.generate(SMALL, 3))
  assert (lengths_lib.generate(SMALL, 3) != lengths_lib.generate(SMALL, 4)).any()


def test_likeness_by_hand():
  assert lengths_lib.within_share(np.array([[5, 5], [9, 9]])) == 1.0
  assert lengths_lib.within_share(np.array([[7, 7], [7, 7]])) == 1.0
  # Group means are equal: all variance is within, and the estimate is its least, -1 / (n - 1).
  assert lengths_lib.within_share(np.array([[2, 8], [8, 2]])) == pytest.approx(-1.0)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_likeness_needs_two_groups_of_two(shape):
  with pytest.raises(ValueError, match=f"got {shape[0]} groups of {shape[1]}, expected at least 2"):
    lengths_lib.within_share(np.ones(shape, int))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_groups": 0}, "LengthsConfig.num_groups: got 0, expected at least 1"),
    ({"sigma": 0}, "LengthsConfig.sigma: got 0, expected a positive number"),
    ({"rho": 1.5}, "LengthsConfig.rho: got 1.5, expected 0 to 1"),
    ({"mean_tokens": 10_000}, "expected a mean between 1 and the cap"),
  ],
)
def test_populations_that_cannot_be_are_refused(changes, message):
  settings = dict(
    num_groups=4, group_size=2, mean_tokens=2000, max_tokens=10_000, sigma=0.8, rho=0.5
  )
  with pytest.raises(ValueError, match=message):
    LengthsConfig(**{**settings, **changes})


def test_a_trace_is_read(tmp_path: pathlib.Path):
  path = tmp_path / "trace.jsonl"
  path.write_text(
    '{"step": 0, "ranks": [0], "local_index": 1, "input": 90, "output": [3, 4], "n_sampling": 2}\n'
    "\n"
    '{"output": [5, 6]}\n'
  )
  np.testing.assert_array_equal(lengths_lib.read_trace(path), [[3, 4], [5, 6]])


def turns(group: object, *tokens: object, validate: bool = False, step: int = 0) -> str:
  rows = [dict(turn=i, completion_tokens=count, cached_tokens=7) for i, count in enumerate(tokens)]
  return json.dumps(dict(step=step, prompt_group_id=group, validate=validate, turns=rows))


def test_a_trace_of_several_turns_is_read_group_by_group(tmp_path: pathlib.Path):
  path = tmp_path / "turns.jsonl"
  lines = [
    turns(5, 40, 0, 131),
    turns(3, 29),
    turns(3, 77, validate=True),
    turns(3, 1, 2, 3, 4),
    turns(5, 8),
    turns(5, 9, step=1),
    turns(5, 10, step=1),
  ]
  path.write_text("\n".join(lines))
  np.testing.assert_array_equal(lengths_lib.read_trace(path), [[171, 8], [29, 10], [9, 10]])


GOOD = '{"output": [5, 6]}'
# Lines of a trace, and pieces of the message that refuses each.
BAD = [
  *(([GOOD, line], r"in line 2, expected JSON with a list 'output' of posit")
    for line in ('{"output": [1, 0]}', '{"output": [1, 2.5]}', '{"output": []}', '{"input": 1}',
                 "no", "[1, 2]")),
  ([GOOD, '{"output": [1]}'], "got 1 lengths for the prompt that starts in line 2, exp"),
  ([""], "got no line, expected one per prompt"),
  *(([turns(0, 3), line], "in line 2, expected JSON .*all lines in the same form; fix or")
    for line in (turns(0, 0), turns(0, -1, 3), turns("a", 3), turns(0, 2.5), turns(0),
                 '{"output": [5]}')),
  # Groups that are cut off.
  ([turns(0, 3), turns(0, 4), turns(1, 5)],
   "got 1 lengths for the prompt that starts in line 3, exp"),
]  # fmt: skip


@pytest.mark.parametrize("lines, message", BAD)
def test_a_trace_of_another_form_is_refused(tmp_path: pathlib.Path, lines, message: str):
  path = tmp_path / "trace.jsonl"
  path.write_text("\n".join(lines))
  with pytest.raises(ValueError, match=message):
    lengths_lib.read_trace(path)
