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


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"q,1,2,3,4,A\nq,1,2,3,A\n", "x.csv, line 2: got 5 columns, the first 'q', expected a"),
    (b"q,1,2,3,4,A\n\n,1,2,3,4,A\n", "x.csv, line 3: got 6 columns, the first '', expected"),
    (b'"q\nr",1,2,3,4,A\nq,1,2,3,4,E\n', "x.csv, line 3: got the answer 'E', expected one"),
    (b"q,1,2,3,4,AB\n", "x.csv, line 1: got the answer 'AB', expected one letter of ABCD"),
    (b'q,1,2,3,4,A\n"q" r,1,2,3,4,A\n', "x.csv, line 2: got text that is not CSV"),
    (b"q\xff,1,2,3,4,A\n", "x.csv: got bytes that are not UTF-8 at offset 1"),
    (b"\n", "x.csv: got an empty file, expected at least one row"),
  ],
)
def test_lines_of_mmlu_that_cannot_be_used_are_refused(tmp_path, content, message):
  (tmp_path / "x.csv").write_bytes(content)
  with pytest.raises(ValueError, match=message):
    multiple_choice.load_mmlu(tmp_path / "x.csv")


def test_missing_files_of_mmlu_are_refused(tmp_path):
  write_csv(tmp_path / "dev" / "a.csv", MMLU_ROWS)
  message = "got 2 questions of auxiliary_train, dev, val and 0 of test, expected .csv files in"
  with pytest.raises(FileNotFoundError, match=message):
    multiple_choice.load_mmlu(tmp_path)
  with pytest.raises(FileNotFoundError, match="no.csv: got no such file, expected CSV lines of a"):
    multiple_choice.load_mmlu(tmp_path / "no.csv")


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


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({**CSQA_FLAT, "answerKey": ""}, "line 2: got answerKey='', expected a non-empty string"),
    ({**CSQA_FLAT, "answerKey": "F"}, "line 2: got the answer 'F', expected one letter of ABCDE"),
    ({**CSQA_FLAT, "choices": 5}, "line 2: got the question 'Where does one lie.*choices=5, exp"),
    ({**CSQA_FLAT, "choices": []}, "line 2: got the question 'Where does one lie.*choices="),
    (
      {**CSQA_FLAT, "choices": {"label": ["B"], "text": ["x"]}},
      "line 2: .* choices lettered from 'A'",
    ),
    ({**CSQA_FLAT, "question": " "}, "line 2: got the question ' ' and choices="),
    ({**CSQA_ROW, "question": {"stem": "?", "choices": [5]}}, r"line 2: .*choices=\[5\], expected"),
  ],
)
def test_lines_of_commonsense_qa_that_cannot_be_used_are_refused(tmp_path, row, message):
  path = tmp_path / "csqa.jsonl"
  path.write_text(f"{json.dumps(CSQA_FLAT)}\n{json.dumps(row)}\n")
  with pytest.raises(ValueError, match=message):
    multiple_choice.load_commonsense_qa(path)


def test_a_missing_file_of_commonsense_qa_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="train_rand_split.jsonl: got no such file"):
    multiple_choice.load_commonsense_qa(tmp_path)
