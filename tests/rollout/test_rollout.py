"""Seeds and problems by place, groups by index, whatever the order in which answers come."""

from __future__ import annotations

import pathlib
import random

from hypothesis import given, strategies as st
import numpy as np
import pytest

from seerjax.models import tokenizer as tokenizer_lib, transformer
from seerjax.rollout import rollout
from seerjax.types import Completion, Problem, Rollout, Verdict

TOKENIZER = tokenizer_lib.load(pathlib.Path(transformer.__file__).parent / "nano")
CONFIG = rollout.RolloutConfig(groups_per_step=3, group_size=2, max_tokens=4, temperature=0.5)
PROBLEMS = [Problem(problem_id=f"p{index}", prompt=f"{index} + 1?") for index in range(3)]


class Length:
  """Rewards by length; two characters cannot be judged, three are worth no number."""

  name = "length"

  def num_problems(self, split: str) -> int:
    return len(PROBLEMS)

  def problem(self, split: str, index: int) -> Problem:
    return PROBLEMS[index]

  def verdict(self, problem: Problem, text: str) -> Verdict:
    if len(text) == 2:
      raise RuntimeError("no")
    reward = float("inf") if len(text) == 3 else float(len(text))
    return Verdict(reward=reward, correct=False, well_formed=True)


def completion(request, text="x"):
  zeros = np.zeros(1, np.float32)
  return Completion(
    request_id=request.request_id,
    tokens=(request.seed % 512,),
    behaviour_logprobs=zeros,
    raw_logprobs=zeros,
    text=text,
    finish_reason="stop",
    policy_version=0,
  )


def sample(generate, *, known=lambda group, member: None, on_rollout=lambda *_: None):
  return rollout.sample_groups(
    PROBLEMS,
    first_group=4,
    step=2,
    generate=generate,
    task=Length(),
    config=CONFIG,
    tokenizer=TOKENIZER,
    seed=9,
    known=known,
    on_rollout=on_rollout,
  )


def answers(requests):
  return [completion(request) for request in requests]


def contents(groups):
  return [
    (group.group_index, group.problem.problem_id)
    + tuple((r.request.request_id, r.completion.tokens, r.verdict) for r in group.rollouts)
    for group in groups
  ]


def test_seeds_never_change():
  # Golden: other values would give every run other samples.
  assert rollout.request_seed(0) == 2334269327
  assert rollout.request_seed(0, 0, 0, 0) == 4189645723
  assert rollout.request_seed(7, 12, 3, 5) == 1633619230
  assert rollout.request_seed(0, -1, 0, 0) == 4140740485


def test_seeds_tell_places_apart():
  places = [(0, s, g, m) for s in range(20) for g in range(20) for m in range(8)]
  seeds = {rollout.request_seed(*place) for place in places}
  assert len(seeds) == len(places)
  assert all(0 <= seed < 2**32 for seed in seeds)
  assert rollout.request_seed(1, 23) != rollout.request_seed(12, 3)


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 10**6))
def test_every_problem_comes_once_before_any_comes_twice(count, seed, start):
  first = start * count
  indices = [rollout.problem_index(first + place, count, seed) for place in range(count)]
  assert sorted(indices) == list(range(count))


def test_the_order_of_problems_never_changes():
  assert [rollout.problem_index(place, 10, 3) for place in range(12)] == [
    5, 2, 9, 6, 3, 0, 7, 4, 1, 8, 5, 2
  ]  # fmt: skip
  orders = {tuple(rollout.problem_index(p, 97, seed) for p in range(97)) for seed in range(20)}
  assert len(orders) > 15


def test_a_groups_requests_share_a_prompt_and_differ_in_seed():
  requests = rollout.group_requests(
    PROBLEMS[0], group=5, step=3, config=CONFIG, tokenizer=TOKENIZER, seed=1
  )
  assert [request.request_id for request in requests] == ["3/5/0", "3/5/1"]
  assert [request.seed for request in requests] == [
    rollout.request_seed(1, 3, 5, member) for member in range(2)
  ]
  assert len({request.prompt for request in requests}) == 1
  assert {request.group_id for request in requests} == {"3/5"}
  sampling = requests[0].sampling
  assert sampling.temperature == 0.5 and sampling.max_tokens == 4
  assert sampling.stop_token_ids == tuple(TOKENIZER.eos_ids)
  assert TOKENIZER.decode(requests[0].prompt).find("0 + 1?") >= 0


@given(st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_the_order_of_completion(source: random.Random):
  expected = contents(sample(answers))
  assert [entry[:2] for entry in expected] == [(4, "p0"), (5, "p1"), (6, "p2")]
  assert [rollout_[0] for rollout_ in expected[0][2:]] == ["2/4/0", "2/4/1"]

  def shuffled(requests):
    finished = answers(requests)
    source.shuffle(finished)
    return finished

  assert contents(sample(shuffled)) == expected


@given(st.sets(st.tuples(st.integers(4, 6), st.integers(0, 1))))
def test_what_is_known_is_not_sampled_again(places):
  whole = {
    (group.group_index, member): each
    for group in sample(answers)
    for member, each in enumerate(group.rollouts)
  }
  asked, kept = [], []

  def generate(requests):
    asked.extend(request.request_id for request in requests)
    return reversed(answers(requests))

  groups = sample(
    generate,
    known=lambda group, member: whole[group, member] if (group, member) in places else None,
    on_rollout=lambda group, member, problem, each: kept.append((group, member)),
  )
  assert contents(groups) == contents(sample(answers))
  assert set(kept) == set(whole) - places and len(kept) == len(asked) == 6 - len(places)
  assert not {f"2/{group}/{member}" for group, member in places} & set(asked)


def test_each_rollout_is_kept_before_the_next_is_awaited():
  kept: list[Rollout] = []

  def generate(requests):
    for count, request in enumerate(requests):
      assert len(kept) == count
      yield completion(request)

  sample(generate, on_rollout=lambda group, member, problem, each: kept.append(each))
  assert len(kept) == 6


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "xx",
      r"length: got RuntimeError \(no\) while judging problem 'p1', text 'xx', expected a Ver",
    ),
    ("xxx", r"length: got reward inf for problem 'p1', text 'xxx', expected a finite number"),
  ],
)
def test_what_cannot_be_judged_is_named_and_what_was_is_kept(text, message):
  kept = []

  def generate(requests):
    return [completion(r, text if r.request_id == "2/5/1" else "x") for r in requests]

  with pytest.raises(ValueError, match=message):
    sample(generate, on_rollout=lambda group, member, *_: kept.append((group, member)))
  assert kept == [(4, 0), (4, 1), (5, 0)]


@pytest.mark.parametrize("changes", [dict(groups_per_step=0), dict(group_size=1)])
def test_a_config_that_cannot_be_is_refused(changes):
  with pytest.raises(ValueError, match=r"RolloutConfig: got groups_per_step=.*expected at least 1"):
    rollout.RolloutConfig(**changes)
