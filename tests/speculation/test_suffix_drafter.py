"""Suffix drafters, and that no drafter in an engine can change a completion."""

from __future__ import annotations

import random
from typing import NamedTuple

import hypothesis
from hypothesis import given, strategies as st
from made_drafters import JunkDrafter, OracleDrafter
import numpy as np
import pytest
import refusals

from seerjax.engine.drafting import DraftQuery, verify
from seerjax.speculation import budget
from seerjax.speculation.history import History
from seerjax.speculation.suffix_drafter import LEAD_IN, SuffixDrafter
from seerjax.speculation.suffix_tree import SpeculationArgs

PROMPT = [90, 91, 92, 93, 94, 95, 96, 97, 98, 99]
# Step times where sixteen rows cost as much as one.
TIMES = budget.StepTimes(rows=(1, 16, 32, 512), seconds=(1.0, 1.0, 2.0, 32.0))


class Request(NamedTuple):
  request_id: str
  group_id: str
  prompt: list[int]
  text: list[int]


def run(drafter, requests, *, max_draft=8, batch=4, chooses=None):
  """Decodes requests as an engine would; returns ({request: completion}, number of steps)."""
  waiting, answers = list(requests), {}
  running: list[Request] = []
  steps = 0
  while waiting or running:
    while waiting and len(running) < batch:
      running.append(waiting.pop(0))
      answers[running[-1].request_id] = []
    if chooses is not None:
      chooses.shuffle(running)
    queries = [
      DraftQuery(
        r.request_id,
        r.group_id,
        [*r.prompt, *answers[r.request_id]],
        len(r.prompt),
        min(max_draft, len(r.text) - len(answers[r.request_id]) - 1),
      )
      for r in running
    ]
    held = [list(query.tokens) for query in queries]
    drafts = drafter.draft(queries) or [[]] * len(queries)
    assert [query.tokens for query in queries] == held
    assert len(drafts) == len(queries)
    for request, query, paths in zip(list(running), queries, drafts):
      assert sum(map(len, paths)) <= query.max_draft
      paths = [path for path in paths if path]
      answer = answers[request.request_id]
      rest = request.text[len(answer) :]
      # The target continues `rest` while its input follows `rest`.
      sampled = [
        [rest[k] if list(path[:k]) == rest[:k] else -1 for k in range(len(path) + 1)]
        for path in paths or [()]
      ]
      verified = verify(paths or [()], sampled)
      answer.extend(verified.tokens)
      names = (request.request_id, request.group_id)
      if paths:
        drafter.observe(*names, len(paths[verified.path]), verified.num_accepted)
      if len(answer) == len(request.text):
        drafter.finish(*names, [*request.prompt, *answer], len(request.prompt))
        running.remove(request)
    steps += 1
  return answers, steps


def requests_of(*texts, group="g"):
  return [Request(f"{group}/{i}", group, PROMPT, list(text)) for i, text in enumerate(texts)]


def test_a_sibling_that_says_the_same_takes_few_steps():
  text = list(range(40))
  drafter = SuffixDrafter(budget=None)
  answers, steps = run(drafter, requests_of(text, text), batch=1)
  assert answers == {"g/0": text, "g/1": text}
  # Forty alone; then nine tokens a step, from the prompt's end on.
  assert steps <= 40 + 5 + 3
  assert drafter.acceptance.length_by_references[0] == 1.0
  assert drafter.acceptance.length_by_references[1] > 5


def test_groups_and_requests_without_one_do_not_see_each_other():
  text = list(range(40))
  strangers = [*requests_of(text, group="g"), *requests_of(text, group="h")]
  assert run(SuffixDrafter(budget=None), strangers, batch=1)[1] == 80
  alone = [Request("a", "", PROMPT, text), Request("b", "", PROMPT, text)]
  drafter = SuffixDrafter(budget=None)
  assert run(drafter, alone, batch=1)[1] == 80
  assert drafter.group_ids == ()


def test_what_the_prompt_says_is_drafted():
  text = [*PROMPT[2:9], 1, *PROMPT[2:9]]
  answers, steps = run(SuffixDrafter(budget=None), requests_of(text))
  assert answers["g/0"] == text and steps < len(text) - 4


@pytest.mark.thorough
@given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=25)
def test_no_drafter_changes_what_is_said(seed):
  rng = random.Random(seed)
  pieces = [[rng.randrange(6) for _ in range(rng.randrange(1, 9))] for _ in range(4)]
  requests = [
    Request(
      f"r{n}",
      rng.choice(["g", "h", ""]),
      PROMPT[: rng.randrange(1, 10)],
      [token for _ in range(rng.randrange(1, 8)) for token in rng.choice(pieces)],
    )
    for n in range(8)
  ]
  expected = {request.request_id: request.text for request in requests}
  plain = sum(map(len, expected.values()))
  config = budget.BudgetConfig(policy=rng.choice(budget.POLICIES))
  for drafter in (
    SuffixDrafter(budget=None),
    SuffixDrafter(SpeculationArgs(top_k=3, max_spec_tokens=5), budget=None),
    SuffixDrafter(budget=budget.Budget(TIMES, config), is_probe=lambda name: name < "r3"),
    SuffixDrafter(max_bytes=1, budget=None),
    JunkDrafter(seed, vocab_size=6, max_paths=3),
    OracleDrafter(expected, vocab_size=6),
    OracleDrafter(expected, vocab_size=6, error_rate=0.4, seed=seed),
    OracleDrafter(expected, vocab_size=6, error_rate=1.0, num_right=2),
  ):
    answers, steps = run(
      drafter, requests, batch=rng.randrange(1, 9), chooses=rng, max_draft=rng.randrange(10)
    )
    assert answers == expected
    assert steps <= plain


def test_equal_questions_get_equal_drafts():
  rng = random.Random(0)
  texts = [[rng.randrange(5) for _ in range(60)] for _ in range(6)]
  runs = []
  for _ in range(2):
    drafter = SuffixDrafter(budget=budget.Budget(TIMES))
    runs.append((run(drafter, requests_of(*texts)), drafter.acceptance))
  assert runs[0] == runs[1]


def test_an_oracle_is_always_right_and_an_adversary_just_as_long_as_it_likes():
  text = list(range(37))
  (request,) = requests_of(text)
  assert run(OracleDrafter({"g/0": text}, vocab_size=64), [request], max_draft=5)[1] == 7
  adversary = OracleDrafter({"g/0": text}, vocab_size=64, error_rate=1.0, num_right=2)
  run(adversary, [request], max_draft=5)
  assert {accepted for _, _, accepted in adversary.observations} == {2}


def test_junk_is_the_same_for_the_same_seed():
  queries = [DraftQuery(f"r{n}", "g", PROMPT, 10, 12) for n in range(50)]
  one, two = (JunkDrafter(seed, vocab_size=9, max_paths=3).draft(queries) for seed in (1, 1))
  assert one == two != JunkDrafter(2, vocab_size=9, max_paths=3).draft(queries)
  assert {len(paths) for paths in one} == {0, 1, 2, 3}


def test_it_goes_on_from_whatever_it_was_told():
  drafter = SuffixDrafter(budget=None)
  # `finish` for a request never drafted for, and `draft` from the middle of a completion.
  drafter.finish("a", "g", [*PROMPT, 1, 2, 3, 4, 5], 10)
  assert drafter.draft([DraftQuery("b", "g", [*PROMPT, 1, 2], 10, 8)]) == [[(3, 4, 5)]]
  # One that was run elsewhere meanwhile, and a name that comes again with another text.
  assert drafter.draft([DraftQuery("b", "g", [*PROMPT, 1, 2, 3, 4], 10, 8)]) == [[(5,)]]
  assert drafter.draft([DraftQuery("a", "g", [*PROMPT, 7], 10, 8)]) == [[]]
  assert drafter.draft([DraftQuery("c", "g", [*PROMPT, 1, 2], 10, 8)]) == [[(3, 4)]]


def test_the_budget_rules_each_class():
  times = budget.StepTimes(rows=(1, 4, 5, 512), seconds=(1.0, 1.0, 3.0, 512.0))
  text = [*range(30)] * 4
  lengths = set()

  class Watched(SuffixDrafter):
    def draft(self, queries):
      drafts = super().draft(queries)
      lengths.update(
        (query.request_id, len(path)) for query, paths in zip(queries, drafts) for path in paths
      )
      return drafts

  drafter = Watched(budget=budget.Budget(times), is_probe=lambda name: name == "g/0")
  run(drafter, requests_of(text, text), batch=2)
  # Four rows for two requests: two drafted tokens, and the high class gets both.
  assert max(length for name, length in lengths if name == "g/0") >= 2
  plain = budget.Budget(budget.StepTimes(rows=(1, 512), seconds=(1.0, 512.0)))
  off = SuffixDrafter(budget=plain)
  _, steps = run(off, requests_of(text, text), batch=2)
  assert not plain.is_on and steps > 100


@pytest.mark.thorough
def test_old_groups_are_forgotten_first():
  drafter = SuffixDrafter(max_bytes=400_000, budget=None)
  rng = random.Random(1)
  for number in range(12):
    texts = [[rng.randrange(50) for _ in range(400)] for _ in range(2)]
    run(drafter, requests_of(*texts, group=str(number)), batch=2)
  assert drafter.num_bytes <= 400_000
  assert 0 < len(drafter.group_ids) < 12
  assert list(drafter.group_ids) == [str(n) for n in range(12)][-len(drafter.group_ids) :]
  drafter.drop_group("11")
  assert "11" not in drafter.group_ids


@refusals.table(
  (lambda: SuffixDrafter(SpeculationArgs(top_k=0), budget=None), "SpeculationArgs.top_k: got 0"),
  (lambda: SuffixDrafter(budget=None).drop_group("g"), "group 'g': got an unknown group"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)


def steps_of_groups(drafter: SuffixDrafter, texts, num_steps: int = 3) -> list[int]:
  """Returns the steps of groups with one prompt, one group after the other."""
  counts = []
  for step in range(num_steps):
    before = drafter.acceptance.num_steps
    _, count = run(drafter, requests_of(*texts, group=f"g{step}"), batch=2)
    assert drafter.acceptance.num_steps > before
    counts.append(count)
  return counts


def test_a_prompt_that_comes_again_is_drafted_from_its_answers():
  rng = random.Random(1)
  texts = [[rng.randrange(50) for _ in range(40)] for _ in range(2)]
  with_history = SuffixDrafter(history=History(), budget=None)
  first, *again = steps_of_groups(with_history, texts)
  without = steps_of_groups(SuffixDrafter(budget=None), texts)
  assert without == [first] * 3 and max(again) < first / 2
  # Siblings alone are counted as such.
  assert set(with_history.acceptance.by_references) == {1}
  # Another prompt, and another drafter, which starts empty.
  other = [Request(f"x/{i}", "x", [*PROMPT, 3], text) for i, text in enumerate(texts)]
  assert run(with_history, other, batch=2)[1] == first
  # A request without a group finds them, too: its group is its own.
  alone = [Request("alone", "", PROMPT, texts[0])]
  assert run(with_history, alone)[1] < len(texts[0]) / 2


def test_what_is_remembered_is_the_answer_and_what_leads_to_it():
  history = History()
  drafter = SuffixDrafter(history=history, budget=None)
  drafter.finish("a", "g", [*PROMPT, 1, 2], len(PROMPT))
  drafter.finish("b", "g", PROMPT, len(PROMPT))  # An empty completion.
  (text,) = history.texts(PROMPT)
  assert text.dtype == np.int32 and text.tolist() == [*PROMPT[-LEAD_IN:], 1, 2]
  drafter.drop_group("g")
  assert len(history) == 1


def test_what_a_sibling_says_elsewhere_is_drafted_from_as_far_as_it_was_heard():
  def query(tokens):
    return DraftQuery("here", "g", PROMPT + tokens, len(PROMPT), 4)

  drafter = SuffixDrafter(budget=None)
  assert not drafter.hear("there", "g", PROMPT, 3, [4])  # The tokens before it are missing.
  assert drafter.hear("there", "g", PROMPT, 0, [1, 2, 3, 4])
  assert drafter.draft([query([1, 2])])[0][0] == (3, 4)
  assert drafter.hear("there", "g", PROMPT, 4, [5, 6, 7])
  assert drafter.hear("there", "g", PROMPT, 3, [4, 5])  # A repetition adds no tokens.
  assert not drafter.hear("there", "g", PROMPT, 9, [10])
  assert drafter.hear("there", "g", PROMPT, 5, [6, 7, 8])
  assert drafter.draft([query([1, 2, 3, 4])])[0][0] == (5, 6, 7, 8)
  assert drafter.num_references("here", "g") == 1
  # It arrives here, and continues elsewhere.
  both = [query([1, 2, 3, 4]), DraftQuery("there", "g", [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8], 10, 4)]
  drafter.draft(both)
  assert drafter.hear("there", "g", PROMPT, 8, [9, 11])
  assert drafter.draft([query([6, 7, 8])])[0][0] == (9, 11)
  drafter.finish("there", "g", [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11], len(PROMPT))
  assert drafter.draft([query([6, 7, 8])])[0][0] == (9, 11)


def rows_of(drafter, texts) -> int:
  """Returns how many rows 32 requests at a time take to say `texts`, drafts included."""
  drafted = [0]

  class Counted:
    """Counts drafted tokens."""

    def draft(self, queries):
      paths = drafter.draft(queries)
      drafted[0] += sum(len(path) for one in paths for path in one)
      return paths

    observe, finish = drafter.observe, drafter.finish

  run(Counted(), requests_of(*texts), batch=32)
  return sum(map(len, texts)) + drafted[0]


def test_without_a_table_drafts_that_rarely_hold_cost_next_to_nothing():
  rng = random.Random(0)
  # Pairs of tokens come again, and what follows them is another token nearly always.
  texts = [[rng.randrange(12) for _ in range(80)] for _ in range(32)]
  plain = sum(map(len, texts))
  assert rows_of(SuffixDrafter(budget=None), texts) > 2 * plain
  assert rows_of(SuffixDrafter(), texts) < 1.02 * plain


def test_without_a_table_drafts_that_hold_are_made():
  text = list(range(200))
  for drafter in (
    SuffixDrafter(),
    SuffixDrafter(budget=budget.BudgetConfig(num_speculative_tokens=4)),
  ):
    answers, steps = run(drafter, requests_of(text, text, text), batch=1)
    assert answers == {f"g/{n}": text for n in range(3)}
    assert steps < 200 + 2 * 200 / 2
