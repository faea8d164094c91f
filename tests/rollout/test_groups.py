"""Seeds, problems and groups depend on the index, not on the order of completions."""

from __future__ import annotations

import dataclasses
import pathlib
import random

from hypothesis import given, strategies as st
import made_rollouts
import numpy as np
import pytest

from seerjax.models import tokenizer as tokenizer_lib
from seerjax.rollout import groups as groups_lib
from seerjax.types import Problem, Rollout, Verdict

TOKENIZER = tokenizer_lib.load(pathlib.Path(tokenizer_lib.__file__).parent / "nano")
CONFIG = groups_lib.RolloutConfig(prompts_per_step=3, group_size=2, max_tokens=4, temperature=0.5)
PROBLEMS = [Problem(problem_id=f"p{index}", prompt=f"{index} + 1?") for index in range(3)]


class Length:
  """Rewards by length; two characters raise, three get no number."""

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
  return made_rollouts.completion(request.request_id, (request.seed % 512,), text=text)


def sample(generate, *, known=lambda *_: None, on_rollout=lambda *_: None):
  return groups_lib.sample_groups(
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
  assert groups_lib.request_seed(0) == 2334269327
  assert groups_lib.request_seed(0, 0, 0, 0) == 4189645723
  assert groups_lib.request_seed(7, 12, 3, 5) == 1633619230
  assert groups_lib.request_seed(0, -1, 0, 0) == 4140740485


def test_seeds_tell_places_apart():
  places = [(0, s, g, m) for s in range(20) for g in range(20) for m in range(8)]
  seeds = {groups_lib.request_seed(*place) for place in places}
  assert len(seeds) == len(places)
  assert all(0 <= seed < 2**32 for seed in seeds)
  assert groups_lib.request_seed(1, 23) != groups_lib.request_seed(12, 3)


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 10**6))
def test_every_problem_comes_once_before_any_comes_twice(count, seed, start):
  first = start * count
  indices = [groups_lib.problem_index(first + place, count, seed) for place in range(count)]
  assert sorted(indices) == list(range(count))


def test_the_order_of_problems_never_changes():
  assert [groups_lib.problem_index(place, 10, 3) for place in range(12)] == [
    5, 2, 9, 6, 3, 0, 7, 4, 1, 8, 5, 2
  ]  # fmt: skip
  orders = {tuple(groups_lib.problem_index(p, 97, seed) for p in range(97)) for seed in range(20)}
  assert len(orders) > 15


def test_a_groups_requests_share_a_prompt_and_differ_in_seed():
  requests = groups_lib.group_requests(
    PROBLEMS[0], group=5, step=3, config=CONFIG, tokenizer=TOKENIZER, seed=1
  )
  assert [request.request_id for request in requests] == ["3/5/0", "3/5/1"]
  assert [request.seed for request in requests] == [
    groups_lib.request_seed(1, 3, 5, member) for member in range(2)
  ]
  assert len({request.prompt for request in requests}) == 1
  assert {request.group_id for request in requests} == {"3/5"}
  sampling = requests[0].sampling
  assert sampling.temperature == 0.5 and sampling.max_tokens == 4
  assert sampling.stop_token_ids == tuple(TOKENIZER.eos_ids)
  assert TOKENIZER.decode(requests[0].prompt).find("0 + 1?") >= 0


def test_a_problem_may_be_a_conversation():
  messages = (
    dict(role="system", content="Be brief."), dict(role="user", content="a?"),
    dict(role="assistant", content="b<|im_end|>"), dict(role="user", content="c?"),
  )  # fmt: skip
  problem = dataclasses.replace(PROBLEMS[0], messages=messages)
  tokens = groups_lib.prompt_tokens(problem, TOKENIZER)
  assert tokens == tuple(TOKENIZER.chat_ids(messages))
  assert TOKENIZER.decode(tokens, skip_special_tokens=False) == TOKENIZER.chat(messages)
  assert tokens.count(TOKENIZER.eos_ids[0]) == 4


def test_stop_strings_are_those_of_every_request():
  config = dataclasses.replace(CONFIG, stop=("\n\n", "So"))
  assert config.sampling(TOKENIZER.eos_ids).stop == ("\n\n", "So")


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
    known=lambda group, member, _: whole[group, member] if (group, member) in places else None,
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


def test_what_an_error_ended_is_named_after_the_others_are_kept():
  kept = []

  def generate(requests):
    for request in requests:
      one = completion(request)
      if request.request_id in ("2/4/1", "2/5/0"):
        one = dataclasses.replace(one, finish_reason="error", error=f"{request.request_id} broke")
      yield one

  with pytest.raises(
    ValueError, match=r"got 2 request\(s\) that ended with an error, expected none.* 2/4/1 broke$"
  ):
    sample(generate, on_rollout=lambda group, member, *_: kept.append((group, member)))
  assert kept == [(4, 0), (5, 1), (6, 0), (6, 1)]


class Answered:
  """A task with given problems and given verdicts."""

  name = "answered"

  def __init__(self, verdict=None, problems=()):
    self.given, self.problems = verdict, problems

  def num_problems(self, split):
    return len(self.problems)

  def problem(self, split, index):
    return self.problems[index]

  def verdict(self, problem, text):
    return self.given


@pytest.mark.parametrize("text", [None, 3.0, b"x"])
def test_a_text_that_is_none_is_named(text, unchecked_annotations):
  message = rf"length: got a text of type {type(text).__name__} for problem 'p0', expected a string"
  with pytest.raises(ValueError, match=message):
    groups_lib.judge(Length(), PROBLEMS[0], text)


def test_rewards_of_numpy_are_numbers(unchecked_annotations):
  verdict = Verdict(reward=np.float32(0.5), correct=True, well_formed=True)  # pyright: ignore
  assert groups_lib.judge(Answered(verdict), PROBLEMS[0], "x") is verdict


def check_prompts(task, *, count=3, max_tokens=4, context=100):
  groups_lib.check_prompts(
    task,
    "train",
    count,
    tokenizer=TOKENIZER,
    max_tokens=max_tokens,
    context=context,
    context_name="EngineConfig.max_model_len",
    seed=0,
  )


def test_the_longest_prompt_that_is_asked_must_leave_room():
  long = Problem(problem_id="long", prompt="1 " * 30)
  task = Answered(problems=(PROBLEMS[0], long, PROBLEMS[1]))
  length = len(groups_lib.prompt_tokens(long, TOKENIZER))
  check_prompts(task, context=length + 4)
  message = (
    rf"answered: got a prompt of {length} tokens \(problem 'long' of split 'train'\) and max_tokens"
    rf" 4, expected a sum of at most {length + 3} \(EngineConfig.max_model_len\); raise it, or"
  )
  with pytest.raises(ValueError, match=message):
    check_prompts(task, count=1000, context=length + 3)
  # Problems that the run does not use may be longer.
  first = groups_lib.problem_index(0, 3, 0)
  others = [PROBLEMS[0] if place == first else long for place in range(3)]
  check_prompts(Answered(problems=others), count=1, context=length + 3)


def test_a_task_without_problems_is_refused():
  message = r"answered: got 0 problems in split 'train', expected at least 1; add prob"
  with pytest.raises(ValueError, match=message):
    check_prompts(Answered())
  with pytest.raises(ValueError, match=message):
    groups_lib.num_problems(Answered(), "train")
  with pytest.raises(ValueError, match=r"problem_index: got num_problems=0, expected at least 1"):
    groups_lib.problem_index(0, 0, 0)


def of_parts(**parts) -> Verdict:
  return Verdict.of_parts(parts, correct=False, well_formed=True)


@pytest.mark.parametrize(
  ("parts", "weights", "expected"),
  [
    (dict(format=1.0, correct=0.0), {}, 1.0),
    (dict(format=1.0, correct=1.0), dict(format=0.2), 1.2),
    (dict(format=1.0, correct=1.0), dict(format=0.2, correct=3), 3.2),
    (dict(format=1.0, correct=1.0), dict(format=0), 1.0),
    (dict(length=0.5), dict(length=-2.0), -1.0),
    # Summed in the order of the names; in the mapping's order 1.0 would be lost in 1e16.
    (dict(b=1.0, c=1e14, a=-1e14), {}, (-1e14 + 1.0) + 1e14),
    (dict(c=0.1, b=0.2, a=0.3), {}, (0.3 + 0.2) + 0.1),
  ],
)
def test_the_reward_is_the_weighted_sum_of_the_parts_in_the_order_of_their_names(
  parts, weights, expected
):
  verdict = groups_lib.judge(Answered(of_parts(**parts)), PROBLEMS[0], "x", weights)
  assert verdict.reward == expected  # To the bit.
  assert dict(verdict.parts) == parts and list(verdict.parts) == sorted(parts)


@pytest.mark.parametrize(
  ("reward", "parts", "weights", "message"),
  [
    (1.0, {"format": 1.0}, {"fromat": 2}, r"reward_weights: got weights of \['fromat'\] for a ver"),
    (1.0, {}, {"format": 0.2}, r"got weights of \['format'\] for a verdict with the parts \[\]"),
    (1.0, {"a": 0.5}, {}, "got reward 1.0 with parts that sum to 0.5, expected that sum"),
    *(
      (1.0, parts, {}, "got the parts .*, expected finite numbers")
      for parts in [
        {"Format": 1.0},
        {"a b": 1.0},
        {"": 1.0},
        {1: 1.0},
        {"a": "1"},
        {"a": float("nan")},
        {"a": float("-inf")},
        {"a": 1e15},
        {"a": True},
        {"a": None},
        [("a", 1.0)],
        ("a",),
      ]
    ),
  ],
)
def test_parts_and_weights_that_cannot_be_are_named(
  reward, parts, weights, message, unchecked_annotations
):
  verdict = Verdict(reward=reward, correct=True, well_formed=True, parts=parts)
  with pytest.raises(ValueError, match=message):
    groups_lib.judge(Answered(verdict), PROBLEMS[0], "x", weights)
