"""Stateful problems from a user's own files: where they are split, and errors."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from seerjax.tasks import stateful, stateful_files


def write(path: pathlib.Path, *rows: Any) -> pathlib.Path:
  path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
  return path


@pytest.mark.parametrize(
  "text, question",
  [
    ("Ana has 2.5 kg. She buys 1.5 kg. How many kg has she?", "How many kg has she?"),
    ("A pen is $1.50. If Mr. Lee buys 2.5 dozen, what does he pay?",
     "If Mr. Lee buys 2.5 dozen, what does he pay?"),
    ("Ben runs. How far? Round to 0.5 km.", "How far? Round to 0.5 km."),
    ("Is it late? No. Ben sleeps at 9 p.m. When does he wake?", "When does he wake?"),
    ("Let $x=1.5$. Find $x+1$.", "Find $x+1$."),
    ('She said "Stop!" Then she left. "How many?" he asked', '"How many?" he asked'),
    ("How many days has a week?", "How many days has a week?"),
    ("Ana has 2 cups, e.g. Large ones. 3 break. How many are left?", "How many are left?"),
  ],
)  # fmt: skip
def test_the_cut_stands_before_the_sentence_that_asks(text: str, question: str):
  context, found = stateful_files.split_question(text)
  assert found == question
  assert f"{context} {found}".strip() == text


GSM = {
  "question": "Ana has 2.5 kg of nuts. She eats 0.5 kg. How many kg are left?",
  "answer": "2.5-0.5=2\n#### 2",
  # As in the published set, which was split at every dot.
  "stateful_gsm_symbolic_context": "Ana has 2. 5 kg of nuts. She eats 0.",
  "stateful_gsm_symbolic_question": "5 kg. How many kg are left?",
}
AIME = {
  "stateful_aime_context": "Let $n$ be 7.",
  "stateful_aime_question": "Find $n$.",
  "answer": "007",
}


def test_published_splits_are_kept_or_made_again(tmp_path: pathlib.Path):
  path = write(tmp_path / "p2.jsonl", GSM, GSM | {"question": "It is 9. How late is it?"})
  kept = stateful_files.load(path)
  (context,) = kept.contexts("test")
  assert context.text == GSM["stateful_gsm_symbolic_context"]
  assert len(kept.questions("test", 0)) == 2 == kept.num_problems("test")
  again = stateful_files.load(path, split_again=True)
  assert [c.text for c in again.contexts("test")] == [
    "Ana has 2.5 kg of nuts. She eats 0.5 kg.", "It is 9.",
  ]  # fmt: skip
  problem = again.problem("test", 0)
  assert problem == again.questions("test", 0)[0]
  assert problem.answer == "2" and problem.question == "How many kg are left?"
  assert again.verdict(problem, "so it is\n#### 2 kg").correct
  assert not again.verdict(problem, "3").correct
  assert not again.verdict(problem, "no idea").well_formed
  assert isinstance(again, stateful.StatefulTask)
  assert again.wake_prompt("Q?", "C.") == f"C.\nQ?\n{stateful_files.gsm8k.INSTRUCTION}"
  assert again.sleep_prompt(context).startswith(f"{context.text}\nQuestions about this will")
  assert again.facts(context) == ""


def test_answers_are_numbers_as_text_or_as_json(tmp_path: pathlib.Path):
  path = write(tmp_path / "aime.jsonl", AIME, AIME | {"answer": 8}, "", AIME | {"answer": "1/2"})
  task = stateful_files.load(path)
  assert [p.answer for p in task.questions("test", 0)] == ["7", "8", "1/2"]
  assert task.verdict(task.problem("test", 0), "It is $\\boxed{7}$").correct


def test_templates_are_read_from_their_folder(tmp_path: pathlib.Path):
  for number in range(2):
    row = {"question": f"Ana has {number}. How many?", "answer": f"#### {number}", "id_orig": 3}
    write(tmp_path / f"{number:04d}.json", row | {"question_annotated": "{name,Ana} has"})
  task = stateful_files.load(tmp_path)
  assert [c.text for c in task.contexts("test")] == ["Ana has 0.", "Ana has 1."]


def test_what_only_asks_is_left_out_and_named(tmp_path: pathlib.Path):
  alone = {"question": "What is 2 plus 2?", "answer": "#### 4"}
  path = write(tmp_path / "rows.jsonl", {"question": "It is 1. Why?", "answer": "1"}, alone)
  task = stateful_files.load(path)
  assert task.num_problems("test") == 1
  (sentence,) = task.left_out
  assert sentence.startswith(f"{path}, line 2: got 'What is 2 plus 2?', which has no context")


@pytest.mark.parametrize(
  "rows, message",
  [
    (["{"], "line 1: got text that is not JSON"),
    ([GSM, "", [1]], "line 3: got a JSON list, expected an object"),
    ([{"answer": "1"}], "line 1: got the keys ('answer',), expected 'question' among them; see"),
    ([GSM, {"stateful_aime_context": "C."}], "line 2: got the keys ('stateful_aime_context',)"),
    ([AIME | {"stateful_aime_context": " ."}], "line 1: got stateful_aime_context=' .', expected"),
    ([AIME | {"answer": "many"}], "line 1: got answer='many', expected a number, alone or after"),
    ([AIME, AIME | {"answer": True}], "line 2: got answer='True', expected a number, alone or"),
    ([{"question": "Why?", "answer": "1"}], "got no row with a context, expected at least one"),
  ],
)
def test_bad_rows_are_refused_by_file_and_line(tmp_path: pathlib.Path, rows, message: str):
  path = write(tmp_path / "rows.jsonl", *rows)
  with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(message)}"):
    stateful_files.load(path)


def test_bad_folders_and_splits_are_refused(tmp_path: pathlib.Path):
  (tmp_path / "a.json").write_text("{")
  with pytest.raises(ValueError, match=r"a\.json: got a file that is not JSON"):
    stateful_files.load(tmp_path)
  (tmp_path / "a.json").write_text("[]")
  with pytest.raises(ValueError, match=r"a\.json: got a JSON list, expected an object with"):
    stateful_files.load(tmp_path)
  task = stateful_files.load(write(tmp_path / "rows.jsonl", GSM))
  with pytest.raises(ValueError, match="rows: got split 'train', expected one of \\('test',\\)"):
    task.contexts("train")
  with pytest.raises(ValueError, match="rows: got problem index 1 of split 'test'"):
    task.questions("test", 1)
  with pytest.raises(ValueError, match="rows: got problem index 9 of split 'test'"):
    task.problem("test", 9)
