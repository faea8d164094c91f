"""MMLU and CommonsenseQA: letters as models write them, and the published files."""

from __future__ import annotations

import csv
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.tasks import multiple_choice

MMLU_ROWS = [
  ["What is 2 + 2?", "3", "4", "5", "22", "B"],
  ['A "quoted", two-line\nquestion', "a, b", "c", "d", "", "D"],
]
CSQA_ROW = {
  "answerKey": "B",
  "id": "1",
  "question": {
    "question_concept": "sit",
    "stem": "Where does one sit?",
    "choices": [{"label": letter, "text": text} for letter, text in zip("ABCDE", "vwxyz")],
  },
}
CSQA_FLAT = {
  "id": "2",
  "question": "Where does one lie?",
  "question_concept": "lie",
  "choices": {"label": [*"ABCDE"], "text": [*"vwxyz"]},
  "answerKey": "E",
}


def write_csv(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("w", encoding="utf-8", newline="") as file:
    csv.writer(file).writerows(rows)


@pytest.mark.parametrize(
  ("text", "letter"),
  [
    ("#### B", "B"),
    ("It is A.\n#### (C)", "C"),
    ("#### A\nno:\n#### B", "B"),
    ("#### D) Paris", "D"),
    ("#### D. Paris", "D"),
    ("#### **B**", "B"),
    ("#### Berlin", None),
    ("A\n####", None),
    ("#### b", None),
    ("so \\boxed{C}", "C"),
    ("so \\boxed{\\text{(D)}}", "D"),
    ("The answer is B.", "B"),
    ("the answer is (C) because", "C"),
    ("Answer: D", "D"),
    ("answer is A? No, the answer is: E", None),
    ("B", "B"),
    (" (B). ", "B"),
    ("B is right", None),
    ("", None),
    ("I", "I"),
  ],
)
def test_letters_by_hand(text, letter):
  assert multiple_choice.extract(text) == letter


@hypothesis.given(st.text(max_size=200), st.text("ABZ#().: \nanswer is\\boxed{}", max_size=80))
def test_verdict_never_raises(words, pieces):
  problem = multiple_choice.Problem(problem_id="p", prompt="?", answer="B")
  for text in (words, pieces, f"#### {pieces}", f"\\boxed{{{words}", f"{words} answer is {pieces}"):
    verdict = multiple_choice.verdict(problem, text)
    assert verdict.well_formed or not verdict.correct


def test_mmlu_is_read_as_published(tmp_path):
  write_csv(tmp_path / "test" / "history_test.csv", MMLU_ROWS)
  write_csv(tmp_path / "val" / "history_val.csv", MMLU_ROWS[1:])
  write_csv(tmp_path / "dev" / "algebra_dev.csv", MMLU_ROWS[:1])
  task = tasks.load("mmlu", path=tmp_path)
  assert (task.name, task.num_problems("train"), task.num_problems("heldout")) == ("mmlu", 2, 2)
  first, second = (task.problem("heldout", index) for index in range(2))
  assert first.problem_id == "mmlu-test-history_test-0"
  assert first.prompt == (
    "What is 2 + 2?\nA) 3\nB) 4\nC) 5\nD) 22\n"
    "End with a line that says #### and then the letter of the right choice."
  )
  assert second.question.startswith('A "quoted", two-line\nquestion\nA) a, b')
  assert task.problem("train", 0).problem_id == "mmlu-dev-algebra_dev-0"
  assert task.verdict(first, "#### B").correct and not task.verdict(first, "#### C").correct
  assert task.verdict(first, first.solution).correct


def test_one_file_of_mmlu_is_parted(tmp_path):
  write_csv(tmp_path / "all.csv", MMLU_ROWS * 5)
  task = multiple_choice.load_mmlu(tmp_path / "all.csv", instruction="")
  assert (task.num_problems("train"), task.num_problems("heldout")) == (9, 1)
  assert task.problem("heldout", 0).answer == "D"


def test_commonsense_qa_is_read_as_published(tmp_path):
  for name, row in zip(multiple_choice.CSQA_FILES, (CSQA_ROW, CSQA_FLAT)):
    (tmp_path / name).write_text(json.dumps(row))
  task = tasks.load("commonsense_qa", path=tmp_path)
  assert task.num_problems("train") == task.num_problems("heldout") == 1
  first, second = task.problem("train", 0), task.problem("heldout", 0)
  assert first.question == "Where does one sit?\nA) v\nB) w\nC) x\nD) y\nE) z"
  assert (first.answer, second.answer) == ("B", "E")
  assert task.verdict(second, "The answer is E.").correct


def test_one_file_of_commonsense_qa_may_be_either_way(tmp_path):
  path = tmp_path / "both.jsonl"
  path.write_text(f"{json.dumps(CSQA_ROW)}\n{json.dumps(CSQA_FLAT)}\n")
  task = multiple_choice.load_commonsense_qa(path)
  assert [task.problem("train", index).answer for index in range(2)] == ["B", "E"]
