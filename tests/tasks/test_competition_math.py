r"""MATH: parsing of \boxed{...}, equality of answers, and refused files."""

from __future__ import annotations

from fractions import Fraction
import json

import hypothesis
from hypothesis import strategies as st
import pytest

from seerjax import tasks
from seerjax.tasks import competition_math

ROW = {
  "problem": "What is half of $1$?",
  "solution": "It is $\\boxed{\\frac{1}{2}}$.",
  "level": "Level 1",
  "type": "Prealgebra",
}


@pytest.mark.parametrize(
  ("one", "other"),
  [
    (r"\frac12", "0.5"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"\tfrac 1 2", ".5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{-1}{-2}", "0.50"),
    ("1,234", "1234"),
    ("1{,}234", r"1,\!234"),
    (r"\$12.50", "12.5"),
    (r"5\text{ cm}", "5"),
    (r"5\mbox{ cm}^2", "5"),
    (r"90^\circ", r"90^{\circ}"),
    (r"50\%", "50"),
    ("x=3", "3."),
    ("f(x) = 2x", "2x"),
    (r"(0,\frac{1}{2})", r"\left( 0, .5 \right)"),
    ("[1, 2)", r"\left[1,2\right)"),
    ("1, 2", "2,1"),
    ("(1,2),(3,4)", "(3,4), (1,2)"),
    (r"\{1, 2\}", r"\{2,1.0\}"),
    (r"\{3\}", r"\{ \frac{6}{2} \}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(A)}", "(A)"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"2\sqrt{3}+\frac ab", r"2 \sqrt3 + \frac{a}{b}"),
    (r"\frac\pi2", r"\frac\pi 2"),
    (r"(1,2)\cup(3,4)", r"(1,2) \cup (3,4)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("\u22123", "-3"),
  ],
)
def test_what_is_equal_by_hand(one, other):
  assert competition_math.are_equal(one, other)
  assert competition_math.are_equal(other, one)


@pytest.mark.parametrize(
  ("one", "other"),
  [
    ("", ""),
    ("1", "2"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "1,2"),
    ("1,2", "1,2,2"),
    ("1,1,2", "1,2,2"),
    (r"\{3\}", "3"),
    ("x+1", "1+x"),
    ("2^3", "8"),
    (r"3\frac12", r"\frac{7}{2}"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("1/0", "0"),
    ("--5", "5"),
    ("-+5", "-5"),
    ("1.2.3", "1.2"),
    ("12,34", "1234"),
    (r"\frac{1}{2", r"\frac{1}{2}"),
    ("5x", "5"),
    ("a" * 1_001, "a" * 1_001),
    ("9" * 41, "9" * 41 + ".0"),
  ],
)
def test_what_is_not_equal_by_hand(one, other):
  assert not competition_math.are_equal(one, other)
  assert not competition_math.are_equal(other, one)


@hypothesis.given(st.fractions(max_denominator=99).filter(lambda x: abs(x) < 10**9))
def test_fractions_are_equal_in_every_dress(value):
  above, below = value.numerator, value.denominator
  forms = [f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"\\dfrac {{{above}}} {{{below}}}"]
  forms.append(f"{'-' * (above < 0)}\\frac{{{abs(above)}}}{{{below}}}")
  forms += [f"{above:,}", f"{above}.0"] if below == 1 else []
  for form in forms:
    assert competition_math.exact(competition_math.normal_form(form)) == value
    assert competition_math.are_equal(forms[0], form)
    assert not competition_math.are_equal(form, f"{above + below}/{below}")


PIECES = st.lists(
  st.sampled_from(
    ["\\frac", "\\sqrt", "\\text", "\\left", "\\right", "\\boxed{", "\\{", "\\}", "\\\\"]
    + [*"{}()[],.12x=-/$ ", "^\\circ"]
  ),
  max_size=24,
)


@hypothesis.given(PIECES, PIECES, st.text(max_size=100))
def test_equality_is_symmetric_and_nothing_raises(one, other, words):
  a, b = "".join(one), " ".join(other)
  equal = competition_math.are_equal(a, b)
  assert equal == competition_math.are_equal(b, a)
  assert competition_math.are_equal(a, a) == bool(competition_math.normal_form(a))
  problem = competition_math.Problem(problem_id="p", prompt="?", answer=a)
  for text in (words, a, f"\\boxed{{{b}", f"{words}\\boxed{{{b}}}"):
    verdict = competition_math.verdict(problem, text)
    assert verdict.well_formed or not verdict.correct


@pytest.mark.parametrize(
  ("text", "reward", "well_formed"),
  [
    ("so \\boxed{\\frac{1}{2}}.", 1.0, True),
    ("first \\boxed{3}, no: \\boxed{0.5}", 1.0, True),
    ("\\boxed{3}", 0.0, True),
    ("\\boxed{}", 0.0, False),
    ("\\boxed{\\frac{1}{2}", 0.0, False),
    ("#### 0.5", 0.0, False),
    ("", 0.0, False),
  ],
)
def test_verdict_by_hand(text, reward, well_formed):
  problem = competition_math.Problem(problem_id="p", prompt="?", answer="\\frac{1}{2}")
  verdict = competition_math.verdict(problem, text)
  assert (verdict.reward, verdict.well_formed) == (reward, well_formed)


def test_the_published_folders_are_read(tmp_path):
  for split, name, answer in (("train", "10", "3"), ("train", "2", "4"), ("test", "1", "5")):
    folder = tmp_path / split / "algebra"
    folder.mkdir(parents=True, exist_ok=True)
    row = {**ROW, "solution": f"First \\boxed{{1}}, then \\boxed{{{answer}}}"}
    (folder / f"{name}.json").write_text(json.dumps(row, indent=4))
  task = tasks.load("math", path=tmp_path)
  assert [task.problem("train", index).answer for index in range(2)] == ["4", "3"]
  assert task.num_problems("heldout") == 1
  problem = task.problem("heldout", 0)
  assert problem.problem_id == "math-algebra-1" and problem.answer == "5"
  assert problem.prompt == (
    "What is half of $1$?\nThink step by step, and put the final answer into \\boxed{}."
  )
  assert task.verdict(problem, "\\boxed{5}").correct


def test_lines_are_read_and_an_answer_of_their_own_counts(tmp_path):
  path = tmp_path / "test.jsonl"
  rows = [{**ROW, "answer": "0.5"}] + [ROW] * 9
  path.write_text("\n".join(map(json.dumps, rows)))
  task = competition_math.load(path, instruction="")
  assert (task.num_problems("train"), task.num_problems("heldout")) == (9, 1)
  assert task.problem("train", 0).answer == "0.5"
  assert task.problem("heldout", 0).prompt == ROW["problem"]
  assert Fraction(task.problem("train", 0).answer) == Fraction(1, 2)


WITHOUT = (
  "No box.", "\\boxed{ }", "\\boxed{}", "\\boxed{1", "\\boxed", "\\fbox{}", "\\boxedtext{1}", "",
)  # fmt: skip


def test_rows_without_an_answer_are_left_out_by_name(tmp_path, caplog):
  path = tmp_path / "math.jsonl"
  rows = [ROW, *(ROW | {"solution": solution} for solution in WITHOUT), ROW]
  path.write_text("\n".join(map(json.dumps, rows)))
  with caplog.at_level("WARNING"):
    task = competition_math.load(path)
  assert [problem.problem_id for problem in task.train] == ["math-math-1", "math-math-10"]
  (line,) = caplog.messages
  assert "math.jsonl: got 8 of 10 rows without an answer" in line
  assert "line 2, line 3, line 4, line 5, line 6 and 3 more. They are left out." in line
  path.write_text(json.dumps(ROW | {"solution": "No box."}))
  message = r"got 1 of 1 rows without .*: line 1, expected at least one"
  with pytest.raises(ValueError, match=message):
    competition_math.load(path)


@pytest.mark.parametrize(
  ("solution", "answer"),
  [
    ("so $\\boxed 9$.", "9"),
    ("so $x = \\boxed 2$ and $y=3$", "2"),
    ("$$\\boxed  49.$$", "49"),
    ("\\[ \\boxed 7 \\]", "7"),
    ("\\(\\boxed -3\\)", "-3"),
    ("thus \\boxed 12\nand no more", "12"),
    ("$\\boxed\\frac{1}{2}$", "\\frac{1}{2}"),
    ("$\\boxed {5}$", "5"),
    ("$\\fbox{8}$", "8"),
    ("$\\fbox 6$", "6"),
    ("\\boxed{1}, no: $\\fbox{2}$", "2"),
    ("$\\fbox{1}$, no: \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
  ],
)
def test_boxes_are_read_as_they_are_published(tmp_path, solution: str, answer: str):
  path = tmp_path / "math.jsonl"
  path.write_text(json.dumps(ROW | {"solution": solution}))
  task = competition_math.load(path)
  assert task.train[0].answer == answer
  # A text's box is read alike.
  assert task.verdict(task.train[0], solution).correct


def test_an_answer_may_be_a_number(tmp_path):
  path = tmp_path / "aime.jsonl"
  path.write_text(json.dumps({"problem": "?", "answer": 204}))
  assert competition_math.load(path).train[0].answer == "204"
