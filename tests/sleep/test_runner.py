"""Background sleep in an engine: equal rewrites under any load, and removal of their state."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from sleep_prompts import PROMPTS
import twins
from word_engine import SIZES, make_engine, params, request, run, same, tokens_from

from seerjax.engine.drafting import DraftQuery
from seerjax.engine.engine import Engine
from seerjax.engine.step_times import StepTimes
from seerjax.sleep import planner, runner as runner_lib
from seerjax.sleep.contexts import Contexts, Identity
from seerjax.sleep.planner import PlannerConfig
from seerjax.sleep.runner import Runner, RunnerConfig
from seerjax.speculation.suffix_drafter import SuffixDrafter

NANO = Identity(weights="w", tokenizer="t", template="c")
FLAT = StepTimes(rows=(1, 64), seconds=(1.0, 1.0))
EAGER = PlannerConfig(num_trials=1000)  # Sleeps for every context, to see.
CONFIG = RunnerConfig(num_jobs=2, sleep_tokens=6, temperature=0.9, parallel_temperature=0.9, seed=4)
TEXTS = {"a": "Ana has 2.", "b": "Bo has 19.", "c": "Cy has 5."}
STEPS = 1


class Sleeping:
  """A registry in a directory, an engine, and a runner over both."""

  def __init__(
    self, directory: pathlib.Path, *, kind: type[Runner] = Runner, texts=TEXTS, prompts=PROMPTS,
    config=CONFIG, planner_config=EAGER, **others,
  ):  # fmt: skip
    self.registry = Contexts(directory, identity=NANO, on_drop=lambda d: self.runner.dropped(d))
    self.engine: Engine = make_engine(dataclasses.replace(SIZES, pinned_pages=4), **others)
    self.engine.step_times = FLAT
    self.runner = kind(
      self.engine, self.registry, prompts, config=config, planner_config=planner_config
    )
    for name, text in texts.items():
      self.register(name, text)

  def register(self, name: str, text: str, **fields):
    fields = {"step": self.registry.last_step} | fields
    return self.registry.register("mine", name, text, [*text.encode()], **fields)

  def sleep(self, visits: int = 300) -> list:
    """Sleeps for at most `visits` visits; returns completions of other requests."""
    others = []
    for _ in range(visits):
      self.runner.advance(["mine"], step=STEPS)
      if not self.runner.num_working and not self.engine.num_unfinished:
        break
      self.engine.step()
      others += self.runner.take(self.engine.poll(), step=STEPS)
    return others

  def sleep_until(self, num_kept: int) -> None:
    """Sleeps until `num_kept` rewrites are kept; others are still in progress."""
    self.sleep(visits=3)
    while self.runner.jobs.kept < num_kept:
      self.sleep(visits=1)

  def rewrites(self) -> dict:
    return {
      (name, one.job): (one.text, one.seed, one.num_tokens)
      for name in self.registry.names("mine", step=STEPS)
      for one in self.registry.rewrites("mine", name, step=STEPS)
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
  """Returns the rewrites of a runner on an otherwise idle engine."""
  case = Sleeping(tmp_path_factory.mktemp("alone"))
  case.sleep()
  assert case.runner.jobs.kept == case.runner.jobs.started == 6
  return case.rewrites()


@pytest.mark.thorough
@pytest.mark.parametrize("kind, is_same", [(Runner, True), (twins.FromTheClock, False)])
def test_rewrites_are_equal_under_load(alone, tmp_path, kind, is_same):
  case = Sleeping(tmp_path, kind=kind)
  loads = [request(f"f{i}", tokens_from(i, 20), seed=i, max_tokens=9) for i in range(5)]
  others = []
  for one in loads:
    case.engine.add_request(one)
    others += case.sleep(visits=4)
  others += case.sleep()
  assert len(alone) == 6 and (case.rewrites() == alone) == is_same
  assert case.engine.counters.background_rows > 0
  if is_same:
    for one, completion in zip(loads, sorted(others, key=lambda c: c.request_id), strict=True):
      assert same(completion, make_engine().generate([one])[0])


def test_a_killed_runner_loses_the_jobs_in_work_and_no_other(alone, tmp_path):
  case, kept = Sleeping(tmp_path), 0
  for num_kept in (0, 1, 2):
    case.sleep_until(num_kept)
    kept += case.runner.jobs.kept
    assert len(case.rewrites()) == kept
    case.registry.close()  # The lock goes with a process that is killed.
    case = Sleeping(tmp_path)
  case.sleep()
  assert case.rewrites() == alone and kept + case.runner.jobs.kept == 6 and kept > 0


def test_new_weights_cut_jobs_short_and_keep_what_was_written(alone, tmp_path):
  case = Sleeping(tmp_path)
  case.sleep_until(2)
  before = case.rewrites()
  case.runner.stop()
  assert case.runner.jobs.stopped > 0 and case.engine.num_unfinished == 0
  case.engine.update_weights(params(1), 1)
  case.sleep()
  after = case.rewrites()
  assert 0 < len(before) < 6 == len(after)
  assert all(after[key] == alone[key] for key in before)
  versions = {
    (name, one.job): one.policy_version
    for name in TEXTS
    for one in case.registry.rewrites("mine", name, step=STEPS)
  }
  assert versions == {key: int(key not in before) for key in after}


def test_pins_hold_the_start_of_questions_and_go_with_their_context(tmp_path):
  case = Sleeping(tmp_path, texts={"a": TEXTS["a"]})
  case.sleep()
  (pin,) = case.engine.chunks.pins
  assert pin.num_held >= 8
  notes = [text for (_, _), (text, _, _) in sorted(case.rewrites().items())]
  asked = case.runner._tokenizer.chat_ids(list(PROMPTS.wake("Who?", "", "\n".join(notes), 0)))
  for space, is_found in (("mine", True), ("theirs", False)):
    before = case.engine.counters.reused_tokens
    question = request(f"q of {space}", asked, max_tokens=2)
    case.engine.generate([dataclasses.replace(question, namespace=space)])
    assert (case.engine.counters.reused_tokens - before >= pin.num_held) == is_found
  case.engine.update_weights(params(1), 1)
  assert case.engine.chunks.pins[0].num_held == 0
  case.sleep()  # In idle rows.
  assert case.engine.chunks.pins[0].num_held == pin.num_held and case.runner.jobs.started == 2
  case.register("a", "Ana has 3.")
  assert case.engine.chunks.pins == ()


def test_an_edit_cuts_its_jobs_short_and_what_comes_late_is_not_taken(tmp_path):
  case = Sleeping(tmp_path, texts={"a": TEXTS["a"]})
  case.sleep(visits=3)
  assert case.runner.num_working == 2
  case.register("a", "Ana has 3.")
  assert case.runner.num_working == 0 == case.engine.num_unfinished
  case.sleep()
  rewrites = case.registry.rewrites("mine", "a", step=STEPS)
  assert [one.version for one in rewrites] == [2, 2] and case.runner.jobs.stopped == 2


def test_rewrites_are_drafts_of_their_contexts_questions_and_of_no_others(tmp_path):
  drafter = SuffixDrafter(budget=None)
  case = Sleeping(tmp_path, drafter=drafter, texts={"a": TEXTS["a"], "b": TEXTS["b"]})
  case.sleep()
  contexts = {name: case.registry.get("mine", name, step=STEPS) for name in ("a", "b")}
  groups = {name: runner_lib.group_of(context) for name, context in contexts.items()}
  known = {name: f"\0mine\0{group}" for name, group in groups.items()}
  assert set(known.values()) <= set(drafter.group_ids)
  text = case.registry.rewrites("mine", "a", step=STEPS)[0].text
  ids = case.runner._ids(text)
  bias = tuple((token, 30.0) for token in sorted(set(ids)))[:16]
  drafts = {}
  for group in (known["a"], known["b"], groups["a"], f"\0theirs\0{groups['a']}"):
    (drafts[group],) = drafter.draft([DraftQuery("d", group, ids[:6], 6, 4)]) or ((),)
    drafter.finish("d", group, ids[:6], 6)
  (path, *_) = drafts.pop(known["a"])
  assert list(path) == ids[6 : 6 + len(path)] and path
  assert not any(path in others for others in drafts.values())
  question = request("q", ids[:4], group=groups["a"], max_tokens=10, logit_bias=bias)
  case.engine.add_request(dataclasses.replace(question, namespace="mine"))
  found = run(case.engine)["q"]
  assert same(found, make_engine().generate([dataclasses.replace(question, group_id="")])[0])
  case.register("a", "Ana has 3.")
  assert known["a"] not in drafter.group_ids and known["b"] in drafter.group_ids


def test_anticipated_answers_are_drafts_of_the_questions_that_come(tmp_path):
  expected = {}
  for number in (1, 0):
    case = Sleeping(
      tmp_path / str(number),
      drafter=SuffixDrafter(budget=None),
      texts={"a": TEXTS["a"]},
      prompts=dataclasses.replace(PROMPTS, anticipated=lambda notes: ("Who?", "Now?")),
      config=dataclasses.replace(CONFIG, num_anticipated=number, answer_tokens=12),
    )
    case.sleep()
    assert case.runner.jobs.anticipated == number and case.runner.jobs.kept == 2
    context = case.registry.get("mine", "a", step=STEPS)
    notes = [text for _, (text, _, _) in sorted(case.rewrites().items())]
    ids = case.runner._wake_ids("Who?", "", "\n".join(notes))
    group = runner_lib.group_of(context)
    asked = request("q", ids, group=group, max_tokens=12, temperature=0.0)
    (found,) = case.engine.generate([dataclasses.replace(asked, namespace="mine")])
    expected[number] = (found, case.engine.counters.accepted_tokens)
    case.register("a", "Ana has 3.")
    assert not case.engine.drafter.group_ids
  assert same(expected[0][0], expected[1][0]) and expected[0][1] + 5 < expected[1][1]


def test_questions_are_scored_as_an_engine_says_them(tmp_path):
  case = Sleeping(tmp_path, texts={"a": TEXTS["a"]})
  context = case.registry.get("mine", "a", step=STEPS)
  case.runner.answered(context, 9, has_slept=False, question="How many pens?")
  assert case.runner.seen.full == {}  # It counts once its question is scored.
  case.sleep()
  account = case.runner._accounts[runner_lib._key_of(context)]
  assert case.runner.jobs.scored == 1 and len(account.scores) == 1
  ids = case.runner._wake_ids("How many pens?", context.text, "")
  text = case.runner._tokenizer.decode
  end = next(n for n in range(len(ids)) if text(ids[:n]).endswith("pens?"))
  # The space may be one with the word behind it.
  begin = max(n for n in range(len(ids)) if text(ids[:n]).rstrip().endswith(context.text))
  # Each token alone.
  scores = []
  for place in range(begin, end):
    forced = ((ids[place], ids[place] + 1),)
    one = request(
      str(place), ids[:place], max_tokens=1, allowed_token_ranges=forced, temperature=0.0
    )
    scores += make_engine().generate([one])[0].raw_logprobs.tolist()
  assert account.scores == [planner.predictability(np.asarray(scores, np.float32))]
  (kind,) = case.runner.seen.full
  assert kind == planner.kind_of(len(case.runner._ids(context.text)), account.predicted)


def test_a_question_whose_context_goes_meanwhile_counts_without_its_score(tmp_path):
  case = Sleeping(tmp_path, texts={"a": TEXTS["a"]})
  for act in (case.runner.stop, lambda: case.register("a", "Ana has 3.")):
    context = case.registry.get("mine", "a", step=STEPS)
    case.runner.answered(context, 9, has_slept=False, question="How many pens?")
    case.runner.answered(context, 7, has_slept=True, question=" ")
    act()
    assert case.engine.num_unfinished == 0 == case.runner.jobs.scored
  (full,), (short,) = case.runner.seen.full.values(), case.runner.seen.short.values()
  assert full == planner.Mean(2, 18) and short == planner.Mean(2, 14)


def test_a_restart_prepares_what_was_kept(tmp_path):
  case = Sleeping(tmp_path, drafter=SuffixDrafter(budget=None), texts={"a": TEXTS["a"]})
  case.sleep()
  groups, (pin,) = case.engine.drafter.group_ids, case.engine.chunks.pins
  case.registry.close()
  case = Sleeping(tmp_path, drafter=SuffixDrafter(budget=None), texts={})
  case.sleep()
  assert case.runner.jobs.started == 0 and case.engine.drafter.group_ids == groups
  assert case.engine.chunks.pins == (pin,)


def test_a_context_that_does_not_pay_is_left_alone(tmp_path):
  worth = PlannerConfig(num_trials=1, latency_price=1.0)
  case = Sleeping(tmp_path, texts={"a": TEXTS["a"]}, planner_config=worth)
  kind = planner.kind_of(4)
  seen = planner.saw_sleep(planner.Seen(), kind, 500)
  seen = planner.saw_answer(seen, kind, 10, has_slept=True)
  case.runner.seen = planner.saw_answer(seen, kind, 20, has_slept=False)
  context = case.registry.get("mine", "a", step=STEPS)
  case.sleep()
  assert case.runner.jobs.started == 0
  for _ in range(3):
    case.runner.answered(context, 20, has_slept=False)
  case.registry.forget("mine", "a", step=STEPS)
  (realised,) = case.runner.realised
  assert (realised.num_questions, realised.cost) == (3, 60.0)
  assert realised.predicted_break_even == 50.0 and case.runner.seen.questions == (3,)


def test_a_context_that_is_too_long_fails_once(tmp_path):
  case = Sleeping(tmp_path, texts={"a": "Ana has 2 pens. " * 20})
  case.sleep()
  assert case.runner.jobs.failed == 2 == case.runner.jobs.started


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(num_jobs=0), "num_jobs: got 0, expected at least 1; see"),
    (dict(max_rethinks=11), "max_rethinks: got 11, expected 1 to 10; see"),
    (dict(sleep_tokens=0), "sleep_tokens: got 0, expected at least 1; see"),
    (dict(num_at_once=0), "num_at_once: got 0, expected at least 1; see"),
    (dict(num_anticipated=-1), "num_anticipated: got -1, expected at least 0; see"),
    (dict(answer_tokens=0), "answer_tokens: got 0, expected at least 1; see"),
    (dict(verbosity=-1), "verbosity: got -1, expected at least 0; see"),
  ],
)
def test_budgets_that_are_none_are_refused(fields, message):
  with pytest.raises(ValueError, match=f"RunnerConfig.{message}"):
    RunnerConfig(**fields)


def test_a_verbosity_that_the_prompts_lack_is_refused(tmp_path):
  message = "got 1, expected a position below 1, the number of verbosities of"
  with Contexts(tmp_path, identity=NANO) as registry, pytest.raises(ValueError, match=message):
    Runner(make_engine(), registry, PROMPTS, config=RunnerConfig(verbosity=1))
