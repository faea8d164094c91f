"""Settings, splits, indices and files that tasks refuse."""

from __future__ import annotations

from collections.abc import Callable
import json
import pathlib
from typing import Any

import pytest

from seerjax.tasks import (
  code_tests,
  competition_math,
  gsm8k,
  jsonl,
  multiple_choice,
  stateful_files,
  swe_features,
)
from seerjax.tasks.countdown import Countdown
from seerjax.tasks.draws import Draws
from seerjax.tasks.file_task import FileTask
from seerjax.tasks.function_task import function_task
from seerjax.tasks.gsm8k import Gsm8k
from seerjax.tasks.puzzles import Puzzles, PuzzlesConfig
from seerjax.tasks.splits import Splits
from seerjax.tasks.sudoku import Sudoku, SudokuConfig
from seerjax.tasks.swe_features import SWEConfig
from seerjax.tasks.word_problems import WordProblems, WordProblemsConfig
from seerjax.types import Problem, Verdict

ONE = (Problem(problem_id="p", prompt="?"),)
NOTHING = Verdict(reward=0.0, correct=False, well_formed=False)
GRADE = Gsm8k(train=ONE, heldout=())
OWN = FileTask(name="mine", train=ONE, heldout=ONE, judge=lambda problem, text: NOTHING)


@pytest.mark.parametrize(
  ("act", "message"),
  [
    (lambda: SudokuConfig(size=5),
     r"SudokuConfig.size: got 5, expected one of \(4, 6, 8, 9\); 4 is the size"),
    (lambda: SudokuConfig(min_empty=0.7),
     "got min_empty=0.7, max_empty=0.6, expected 0 < min_empty <= max_empty"),
    (lambda: PuzzlesConfig(max_people=1), "PuzzlesConfig.max_people: got 1, expected 2 to 10"),
    (lambda: PuzzlesConfig(max_people=11), "PuzzlesConfig.max_people: got 11, expected 2 to 10"),
    (lambda: WordProblemsConfig(max_operand=3), "max_operand: got 3, expected at least 4"),
    (lambda: WordProblemsConfig(max_total=79),
     r"max_total: got 79, expected at least 2 \* max_operand = 2 \* 40"),
    (lambda: SWEConfig(min_files=0), "SWEConfig.min_files: got 0, expected at least 1; raise it."),
    (lambda: SWEConfig(num_questions=0), "SWEConfig.num_questions: got 0, expected at least 1"),
    (lambda: SWEConfig(max_files=2), "SWEConfig.max_files: got 2, expected at least min_files = 3"),
    (lambda: SWEConfig(timeout_seconds=0.0),
     "SWEConfig.timeout_seconds: got 0.0, expected a positive number"),
    (lambda: Draws("x").below(0), "got limit=0, expected at least 1"),
    (lambda: Sudoku().num_problems("test"), "sudoku: got split 'test', expected one of"),
    (lambda: Sudoku().problem("heldout", 30_000), "got problem index 30000 of split 'heldout'"),
    (lambda: Puzzles().num_problems("test"), "puzzles: got split 'test', expected one of"),
    (lambda: Puzzles().problem("train", -1), "got problem index -1 of split 'train'"),
    (lambda: Countdown().num_problems("test"), "countdown: got split 'test', expected one of"),
    (lambda: Countdown().problem("heldout", 30_000), "got problem index 30000 of split 'heldout'"),
    (lambda: WordProblems().problem("test", 0), "word_problems: got split 'test', expected one of"),
    (lambda: WordProblems().problem("train", -1),
     "got problem index -1 of split 'train', expected 0 <="),
    (lambda: WordProblems().questions("train", 100_000),
     "got problem index 100000 of split 'train'"),
    (lambda: GRADE.num_problems("test"), "gsm8k: got split 'test', expected one of"),
    (lambda: GRADE.problem("train", 2), "gsm8k: got problem index 2 of split 'train'"),
    (lambda: OWN.num_problems("test"), "got split 'test', expected one of"),
    (lambda: OWN.problem("train", 2), "got problem index 2 of split 'train', expected 0 <= index"),
    (lambda: Splits(name="mine", train=ONE, heldout=ONE).problems("test"),
     r"mine: got split 'test', expected one of \('train', 'held"),
    (lambda: Splits(name="mine", train=ONE, heldout=ONE).problem("heldout", 1),
     "mine: got problem index 1 of split 'heldout', expected"),
  ],
)  # fmt: skip
def test_settings_splits_and_indices_are_refused(act: Callable[[], Any], message: str):
  with pytest.raises(ValueError, match=message):
    act()


@pytest.mark.parametrize(
  ("load", "file", "message"),
  [
    (lambda path: jsonl.read_rows(path, ("prompt",)), "absent.jsonl",
     "absent.jsonl: got no such file, expected JSON"),
    (gsm8k.load, "absent.jsonl", r"absent\.jsonl: got no such file"),
    (gsm8k.load, ".", r"test\.jsonl: got no such file, expected JSON lines"),
    (code_tests.load, ".", "test.jsonl: got no such file, expected JSON lines"),
    (multiple_choice.load_mmlu, ".",
     "got 2 questions of auxiliary_train, dev, val and 0 of test, expected .csv files in"),
    (multiple_choice.load_mmlu, "no.csv", "no.csv: got no such file, expected CSV lines of a"),
    (multiple_choice.load_commonsense_qa, ".", "train_rand_split.jsonl: got no such file"),
    (competition_math.load, "dev", "train: got no <subject>/<number>.json, expected"),
    (competition_math.load, "no.jsonl", "no.jsonl: got no such file, expected JSON lines"),
    (stateful_files.load, "dev", "got a folder without .json files, expected GSM"),
    (swe_features.load, "nowhere", "nowhere: got no such folder, expected a git repos"),
  ],
)  # fmt: skip
def test_missing_files_are_refused(tmp_path: pathlib.Path, load, file: str, message: str):
  # Something of each published folder is there: two rows for training, and an empty folder.
  row = {"question": "?", "answer": "#### 1", "prompt": "a", "tests": "assert f() == 1"}
  (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
  (tmp_path / "dev" / "train").mkdir(parents=True)
  (tmp_path / "dev" / "a.csv").write_text("q,1,2,3,4,A\n" * 2)
  with pytest.raises(FileNotFoundError, match=message):
    load(tmp_path / file)


GSM8K = {"question": "Half of 5 apples?", "answer": "5/2=2.5\n#### 2.5"}
CODE = {"prompt": "a", "tests": ["assert add(1, 2) == 3"]}
MATH = {"problem": "What is half of $1$?", "solution": "It is $\\boxed{\\frac{1}{2}}$."}
CSQA = {
  "id": "2",
  "question": "Where does one lie?",
  "question_concept": "lie",
  "choices": {"label": [*"ABCDE"], "text": [*"vwxyz"]},
  "answerKey": "E",
}
# By the file's name: what reads it, the good lines at its start, and bad ends with their messages.
FILES: dict[str, tuple[Callable[[pathlib.Path], Any], list[Any], list[tuple[Any, str]]]] = {
  "rows.jsonl": (
    lambda path: jsonl.read_rows(path, ("prompt",)),
    [],
    [
      (b'{"prompt": "a"}\n{"prompt"', "line 2: got text that is not JSON"),
      ([1], "line 1: got a JSON list, expected an object"),
      (b'\n{"text": "a"}', r"line 2: got the keys \('text',\), expected 'prompt' among them"),
      ({"prompt": ""}, "line 1: got prompt='', expected a non-empty string"),
      ({"prompt": 5}, "line 1: got prompt=5, expected a non-empty string"),
      (b"\n \n", "got an empty file, expected at least one row"),
      (b'{"prompt": "\xff"}', "got bytes that are not UTF-8 at offset 12"),
      (b"[" * 100_000, "line 1: got text that is not JSON"),
    ],
  ),
  "gsm8k.jsonl": (
    gsm8k.load,
    [GSM8K, GSM8K],
    [
      (b'{"question": "a"', "line 3: got text that is not JSON"),
      ({"question": "a"}, r"line 3: got the keys \('question',\), expected 'answer' among them"),
      ({"question": "", "answer": "#### 1"}, "line 3: got question='', expected a non-empty"),
      ({"question": "a", "answer": "seven"}, "row 3: got the answer 'seven', expected it to end"),
      ({"question": "a", "answer": "#### seven"}, "row 3: got the answer '#### seven', expected"),
    ],
  ),
  "code.jsonl": (
    code_tests.load,
    [CODE, b""],
    [
      ({"prompt": "b"},
       "code.jsonl, line 3: got tests=null, expected a text or a list of texts; write 'tests'"),
      ({"prompt": "b", "tests": []}, "line 3: got no tests, expected at least one assertion"),
      ({"prompt": "b", "tests": "  # none"}, "line 3: got no tests"),
      ({"prompt": "b", "tests": [1]},
       r"line 3: got tests=\[1\], expected a text or a list of texts"),
      ({"prompt": "b", "tests": {"a": 1}},
       'line 3: got tests={"a": 1}, expected a text or a list of texts'),
      ({"prompt": "b", "tests": "assert add("},
       r"line 3: got tests that are not valid Python \('\(' was never"),
      (CODE | {"prompt": 5}, "line 3: got prompt=5, expected a non-empty string"),
    ],
  ),
  "own.jsonl": (
    lambda path: function_task("mine", path, lambda prompt, text: 1.0),
    [],
    [
      ({"text": "a"},
       r"row 1: got the keys \('text',\) and messages=None, expected \"prompt\", or"),
      ({"messages": "a"}, "row 1: got the keys .* and messages='a', expected \"prompt\", or"),
      ({"messages": [{"content": "a"}]}, 'row 1: got the keys .* expected "prompt", or'),
      ({"messages": [{"role": "user"}]},
       "row 1: got messages that do not end with a user message, expected"),
      ({"messages": [{"role": "system", "content": "a"}]},
       "row 1: got messages that do not end with a user"),
      ({"prompt": " "}, "row 1: got prompt=' ', expected a non-empty string; repair or"),
      ({"prompt": 5}, "row 1: got prompt=5, expected a non-empty string; repair or remove"),
    ],
  ),
  "x.csv": (
    multiple_choice.load_mmlu,
    [],
    [
      (b"q,1,2,3,4,A\nq,1,2,3,A\n", "x.csv, line 2: got 5 columns, the first 'q', expected a"),
      (b"q,1,2,3,4,A\n\n,1,2,3,4,A\n", "x.csv, line 3: got 6 columns, the first '', expected"),
      (b'"q\nr",1,2,3,4,A\nq,1,2,3,4,E\n', "x.csv, line 3: got the answer 'E', expected one"),
      (b"q,1,2,3,4,AB\n", "x.csv, line 1: got the answer 'AB', expected one letter of ABCD"),
      (b'q,1,2,3,4,A\n"q" r,1,2,3,4,A\n', "x.csv, line 2: got text that is not CSV"),
      (b"q\xff,1,2,3,4,A\n", "x.csv: got bytes that are not UTF-8 at offset 1"),
      (b"\n", "x.csv: got an empty file, expected at least one row"),
    ],
  ),
  "csqa.jsonl": (
    multiple_choice.load_commonsense_qa,
    [CSQA],
    [
      (CSQA | {"answerKey": ""}, "line 2: got answerKey='', expected a non-empty string"),
      (CSQA | {"answerKey": "F"}, "line 2: got the answer 'F', expected one letter of ABCDE"),
      (CSQA | {"choices": 5}, "line 2: got the question 'Where does one lie.*choices=5, exp"),
      (CSQA | {"choices": []}, "line 2: got the question 'Where does one lie.*choices="),
      (CSQA | {"choices": {"label": ["B"], "text": ["x"]}}, "line 2: .* choices lettered from 'A'"),
      (CSQA | {"question": " "}, "line 2: got the question ' ' and choices="),
      (CSQA | {"question": {"stem": "?", "choices": [5]}}, r"line 2: .*choices=\[5\], expected"),
    ],
  ),
  "math.jsonl": (
    competition_math.load,
    [MATH],
    [
      (MATH | {"solution": 5},
       "line 2: got problem=.* that ends with '5', expected a text and an answer"),
      (MATH | {"answer": ["1"]}, "line 2: got problem=.* the answer \"\\['1'\\]\" and a solution"),
      (MATH | {"answer": True}, "line 2: got problem=.* the answer 'True' and a solution"),
      (MATH | {"problem": ""}, "line 2: got problem='', expected a non-empty string"),
    ],
  ),
  "train/algebra/1.json": (
    lambda path: competition_math.load(path.parents[2]),
    [],
    [
      (b"{", "1.json: got text that is not JSON"),
      (b"\xff", "1.json: got text that is not JSON"),
      ([1], "1.json: got a JSON list, expected an object with 'problem' and 'solution'"),
      ({"solution": "\\boxed{1}"}, "1.json: got problem='', the answer '' and a"),
    ],
  ),
}  # fmt: skip


@pytest.mark.parametrize(
  ("file", "bad", "message"),
  [(file, *end) for file, (_, _, ends) in FILES.items() for end in ends],
)
def test_lines_that_cannot_be_used_are_refused(tmp_path: pathlib.Path, file, bad, message: str):
  load, good, _ = FILES[file]
  path = tmp_path / file
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in [*good, bad])
  path.write_bytes(b"\n".join(lines))
  with pytest.raises(ValueError, match=message):
    load(path)
