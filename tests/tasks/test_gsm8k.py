"""GSM8K: the original file format, and answers as people and models write them."""

from __future__ import annotations

from fractions import Fraction
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.tasks import gsm8k

ROWS = [
  {
    "question": "Ida has 2 boxes of 600 pins and 34 more. How many pins has she?",
    "answer": "The boxes hold 2*600=<<2*600=1200>>1200 pins.\nIn all 1200+34=1234.\n#### 1,234",
  },
  {"question": "Half of 5 apples?", "answer": "5/2=2.5\n#### 2.5"},
]


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("#### 1,234", 1234),
    ("#### $1,234.50", Fraction(2469, 2)),
    ("#### -3", -3),
    ("#### -$3.50", Fraction(-7, 2)),
    ("#### $-3.50", Fraction(-7, 2)),
    ("#### \u22125", -5),
    ("#### 20%", 20),
    ("#### 3/4", Fraction(3, 4)),
    ("####15", 15),
    ("#### 15.", 15),
    ("#### .5", Fraction(1, 2)),
    ("#### 15 apples\nI hope that helps, all 3 of you", 15),
    ("#### 5 + 7 = 12", 12),
    ("#### 7\nwait\n#### 8", 8),
    ("#### \\boxed{9}", 9),
    ("####\n19", 19),
    ("#### 12 of the 15 eggs", 12),
    ("so 12.\n#### 12,5", None),
    ("so 12.\n#### 1,00,000", None),
    ("so 12.\n#### 12,34,567", None),
    ("so 12.\n#### 1.2.3", None),
    ("so 12.\n#### 13, 12", None),
    ("so 12.\n#### 12 13", None),
    ("so 12.\n#### 10\u201312", None),
    ("so 12.\n#### 12 - 15", None),
    ("so 12.\n#### 12:30", None),
    ("so 12.\n#### 5 + 7", None),
    ("so 12.\n#### 12 \\times 2", None),
    ("so 12.\n#### 12 = 5 + 7", None),
    ("so 12.\n#### 3 1/2", None),
    ("so 12.\n#### 1/2/3", None),
    ("so 12.\n#### 12^2", None),
    ("so 12.\n#### 12\u00b2", None),
    ("so 12.\n#### 12\u00bd", None),
    ("so 12.\n#### \u201312", -12),
    ("so 12.\n#### \u201412", -12),
    ("so 12.\n#### 12e3", 12000),
    ("so 12.\n#### 12E+3", 12000),
    ("so 12.\n#### 1.25e-1", Fraction(1, 8)),
    ("so 12.\n#### 1e99999", None),
    ("so 12.\n#### 1e41", None),
    ("so 12.\n#### 12eggs", 12),
    ("so 12.\n#### nan", None),
    ("so 12.\n#### the value above", None),
    ("so 12.\n#### \\boxed{nan}", None),
    ("so 12.\n#### \\boxed{13, 12}", None),
    ("so 12.\n#### ?\n12", None),
    ("so 12, or 12,5", None),
    ("\\boxed{13, 12}", None),
    ("12 \\boxed{13 or 12}", None),
    ("12 \\boxed{nan}", None),
    ("12 \\boxed{5 + 7}", None),
    ("12 \\boxed{12,5}", None),
    ("12 \\boxed{}", 12),
    ("\\boxed{5 + 7 = 12}", 12),
    ("#### none, but earlier 7", 7),
    ("first 7, so\n####", 7),
    ("so \\boxed{1{,}234} it is 5", 1234),
    ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
    ("\\boxed{-\\dfrac{3}{4}}", Fraction(-3, 4)),
    ("\\boxed{\\$12.50}", Fraction(25, 2)),
    ("\\boxed{x = 12}", 12),
    ("\\boxed{1} and \\boxed{\\text{all } 2}", 2),
    ("\\boxed{7", 7),
    ("The answer is 42.", 42),
    ("The answer is -42", -42),
    ("12-7", 7),
    ("12 - 7", 7),
    ("- 5 apples", 5),
    ("between 3 and 1,000,000", 1_000_000),
    ("1,2,3", None),
    ("1, 2, 3", 3),
    ("5/0", None),
    ("about 12.5% of it", None),
    ("so 12.5% of it", Fraction(25, 2)),
    ("no number", None),
    ("", None),
    ("٣", None),
    ("9" * 41, None),
    ("9" * 30_000, None),
    ("\x00 4 \x00", 4),
  ],
)
def test_extract_by_hand(text, value):
  assert gsm8k.extract(text) == value


# Each is another number than 12, or none.
NOT_TWELVE = (
  "12k", "12K", "12M", "$12m", "12 thousand", "12 million", "12 dozen", "12 hundred",
  "12!", "12 squared", "12^2", "2^{12}", "\\sqrt{12}", "\u221a12", "12\\sqrt{2}",
  "square root of 12",
  "12\\pi", "12\u03c0", "12i", "12e", "12x", "x12", "0x12", "12_8", "12_{8}", "log 12",
  "12th", "12 th", "12-th", "12 thirds", "12 and a half", "12'000", "12_000", "12 000", "12,5",
  "$12.5.3", "12/0", "12-", "12 -", "12+", "12?", "-12", "\u00b112", "minus 12", "negative 12",
  "not 12", "isn't 12", "never 12", "!= 12", "\\neq 12",
  ">12", "> 12", "x >= 12", "<12", "\u226412", "at least 12", "more than 12", "fewer than 12",
  "~12", "\u224812", "\\approx 12", "about 12", "approximately 12", "nearly 12",
  "twice 12", "half of 12", "12 x 2", "12 times 2", "12 plus 7", "12 over 3", "12 mod 5",
  "12 or 13", "12 and 13", "12 to 13", "12..15", "12\u202615", "12 minutes and 30 seconds",
)  # fmt: skip
TWELVE = (
  "12", "12.", "12.0", "012", "+12", "$12", "$12.00", "\\$12", "\u20ac12", "US$12", "USD 12",
  "USD12",
  "Rs12", "12 USD", "12 apples", "12eggs", "12cm", "12 cm", "12m", "12\\text{ cm}", "12 km/h",
  "12am", "12-year-old", "12%", "12\\%", "12 percent", "12\u00b0", "12^\\circ", "**12**", "_12_",
  "<b>12</b>", "<answer>12</answer>", "(12)", "$12$", '"12"', "x = 12", "5 + 7 = 12", "=> 12",
  "-> 12", "the answer is 12", "12 (twelve)", "12/1", "24/2", "1.2e1", "12:", "12,",
)  # fmt: skip
PLACES = (
  "so.\n#### {}", "so \\boxed{{{}}}", "so \\boxed {}", "#### \\boxed{{{}}}", "The answer is {}"
)  # fmt: skip


@pytest.mark.parametrize("form", PLACES)
def test_what_is_another_number_is_not_taken_for_the_one_in_it(form: str):
  problem = gsm8k.Problem(problem_id="p", prompt="?", answer="12")
  task = gsm8k.Gsm8k(train=(problem,), heldout=())
  taken = [text for text in NOT_TWELVE if task.verdict(problem, form.format(text)).reward]
  assert not taken


@pytest.mark.parametrize("form", PLACES)
def test_what_published_graders_take_in_another_dress_is_taken(form: str):
  # Without braces a box ends where its formula does.
  dresses = [text for text in TWELVE if not (form == PLACES[2] and "$1" in text)]
  missed = [text for text in dresses if gsm8k.extract(form.format(text)) != 12]
  assert not missed


@hypothesis.given(st.text(max_size=300), st.text("0123456789,.$%/-#{}\\boxedfrac \n", max_size=300))
def test_verdict_never_raises(words, pieces):
  problem = gsm8k.Problem(problem_id="p", prompt="?", answer="7")
  task = gsm8k.Gsm8k(train=(problem,), heldout=())
  for text in (words, pieces, words + pieces, f"#### {pieces}", f"\\boxed{{{pieces}", pieces * 80):
    verdict = task.verdict(problem, text)
    assert verdict.well_formed or not verdict.correct


@hypothesis.given(st.integers(-(10**12), 10**12))
def test_integers_are_read_back_in_every_dress(number):
  for text in (f"#### {number}", f"#### {number:,}", f"so \\boxed{{{number:,}}}.", f"is {number}."):
    assert gsm8k.extract(text) == number


def test_the_table_of_rules_is_true_of_its_examples():
  for example, value in (
    ("1234", 1234), ("1,234", 1234), ("1{,}234", 1234), ("12,5", None), ("1,00,000", None),
    ("12.50", Fraction(25, 2)), (".5", Fraction(1, 2)), ("12.", 12), ("1.2.3", None),
    ("3/4", Fraction(3, 4)), ("\\frac{3}{4}", Fraction(3, 4)), ("5/0", None), ("1/2/3", None),
    ("12e3", 12000), ("-3", -3), ("-$3.50", Fraction(-7, 2)), ("$-3.50", Fraction(-7, 2)),
    ("20%", 20), ("15 apples", 15), ("$1,234.50", Fraction(2469, 2)),
  ):  # fmt: skip
    assert example in (gsm8k.__doc__ or "")
    for text in (f"12\n#### {example}", f"#### \\boxed{{{example}}}", f"it is {example}"):
      assert gsm8k.extract(text) == value, text
  for example in ("13, 12", "10-12", "12 13", "5 + 7", "3 1/2", "nan", "the value above"):
    assert f'"{example}"' in (gsm8k.__doc__ or "")
    assert gsm8k.extract(f"12\n#### {example}") is None


def test_a_directory_gives_both_splits(tmp_path):
  write(tmp_path / "train.jsonl", ROWS)
  write(tmp_path / "test.jsonl", ROWS[1:])
  task = tasks.load("gsm8k", path=tmp_path)
  assert (task.num_problems("train"), task.num_problems("heldout")) == (2, 1)
  problem = task.problem("train", 0)
  assert (problem.problem_id, problem.answer, problem.num_steps) == ("gsm8k-train-0", "1234", 2)
  assert problem.prompt == f"{ROWS[0]['question']}\n{gsm8k.INSTRUCTION}"
  assert task.problem("heldout", 0).answer == "5/2"
  for index in range(2):
    problem = task.problem("train", index)
    assert task.verdict(problem, problem.solution).correct
  assert task.verdict(task.problem("train", 0), "It is 1234 pins").correct
  assert not task.verdict(task.problem("train", 0), "#### 1235").correct
  assert not task.verdict(task.problem("train", 0), "none").well_formed


def test_one_file_is_split_every_tenth(tmp_path):
  rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(20)]
  write(tmp_path / "all.jsonl", rows)
  task = gsm8k.load(tmp_path / "all.jsonl", instruction="")
  assert [task.problem("heldout", i).answer for i in range(2)] == ["9", "19"]
  assert task.num_problems("train") == 18
  assert task.problem("train", 3).prompt == "3?"
