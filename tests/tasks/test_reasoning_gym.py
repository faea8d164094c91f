"""Every reasoning-gym generator: its problems, correct answers, and verdicts of hostile texts."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from seerjax.rollout import groups
from seerjax.tasks import digests, loading, reasoning_gym as task_lib

package = pytest.importorskip(
  "reasoning_gym", reason="reasoning-gym is not installed", exc_type=ImportError
)

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = json.loads((pathlib.Path(__file__).parent / "reasoning_gym_golden.json").read_text())
KNOWN = sorted(package.factory.DATASETS)
# Puzzles with a scorer and no reference answer.
WITHOUT_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
GENERATORS = [name for name in KNOWN if name not in task_lib.REFUSED]
PLACES = (("train", 1), ("train", 299_999), ("heldout", 29_999))
HOSTILE = {
  "a null byte": "\x00",
  "digits": "9" * 4_000,
  "many digits": "9" * 100_000,
  "brackets": "[" * 4_000,
  "parentheses": "(" * 2_000 + ")" * 2_000,
  "objects": '{"a":' * 700 + "1" + "}" * 700,
  "a list": "[" + "1," * 1_999 + "1]",
  "signs": "-" * 3_000 + "1",
  "negations": "¬" * 3_000 + "A",
  "code": "__import__('os').system('touch PATH')",
  "a local variable": "oracle_answer",
  "a lambda": "(lambda: 24)()",
  "a power": "9**9**9**9",
  "a factorial": "99999999!",
  "an exponent": "1e999999999",
  "a move": "R9999999999",
  "moves": "R9999 " * 600,
  "not a number": "nan",
  "not a complex number": "nan+nanj",
  "infinity": "-inf",
  "a division": "1/0",
  "null": "null",
  "an object": "{}",
  "half a pair": "\ud800",
  "emoji": "\u202e\U0001f600é" * 800,
  "lines": "\n" * 4_000 + "x",
}


def tagged(answer: str) -> str:
  return f"I think.\n<answer>{answer}</answer>"


def digest_of(problems: Any) -> str:
  text = json.dumps([[problem.prompt, problem.answer] for problem in problems])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.few(12)
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_generator_poses_and_judges(generator: str, tmp_path: pathlib.Path):
  task = loading.load(f"reasoning_gym.{generator}")
  try:
    problems = [task.problem(split, index) for split, index in PLACES]
    # Each session has another PYTHONHASHSEED.
    assert digest_of(problems) == GOLDEN[generator]
    for problem in problems:
      verdict = groups.judge(task, problem, tagged(problem.answer))
      if generator not in WITHOUT_ANSWER:
        assert verdict.correct and verdict.well_formed and verdict.reward == 1.0
      assert groups.judge(task, problem, "").reward == 0.0
    for name, text in HOSTILE.items():
      started = time.process_time()
      answer = tagged(text.replace("PATH", str(tmp_path / "made")))
      verdict = groups.judge(task, problems[0], answer)
      assert 0 <= verdict.reward < 1, name
      assert time.process_time() - started < 1, name  # What the sandbox runs has its own limit.
    assert not (tmp_path / "made").exists()
  finally:
    task.close()


def test_generators_are_known_or_refused():
  assert set(GOLDEN) == set(GENERATORS)
  assert set(task_lib.REFUSED) <= set(KNOWN)
  for generator, reason in task_lib.REFUSED.items():
    message = f"reasoning_gym.{generator}: got a generator that cannot be used, because {reason};"
    with pytest.raises(ValueError, match=re.escape(message)):
      loading.load(f"reasoning_gym.{generator}")


def test_every_scorer_that_evaluates_texts_is_guarded():
  """Detects a package version that evaluates texts in another place."""
  folder = pathlib.Path(package.__file__).parent
  guarded = {*task_lib._LITERALS, *task_lib._FORMULAS, *task_lib.REFUSED}
  found = {}
  for name, (dataset, _) in package.factory.DATASETS.items():
    source = pathlib.Path(sys.modules[dataset.__module__].__file__ or "").read_text()
    calls = {
      ast.unparse(node.func).rpartition(".")[2]
      for node in ast.walk(ast.parse(source))
      if isinstance(node, ast.Call)
    }
    if calls & {"eval", "exec", "compile_command", "parse_expr", "sympify", "__import__"}:
      found[name] = calls
  # These evaluate what the package itself wrote: problems, operators and fractions.
  own = {"basic_arithmetic", "bitwise_arithmetic", "number_sorting", "propositional_logic"}
  assert set(found) - guarded <= own, folder
  assert guarded - set(task_lib.REFUSED) <= set(found)


@pytest.mark.parametrize(
  ("text", "answer", "is_tagged"),
  [
    ("<answer>12</answer>", "12", True),
    ("<answer>1</answer> no, <answer> 2\n3 </answer>.", "2\n3", True),
    ("It is\n\n  12 \n \n", "12", False),
    ("So.\nThe final answer is 12.", "12", False),
    ("The answer is: **12**.", "12", False),
    ("Answer: Monday", "Monday", False),
    ("3 + 4 = 7, so 3 + 4 + 5 = 12.", "12", False),
    ("It is half past nine: 09:30", "09:30", False),
    ("this island", "this island", False),
    ("The answer is", "", False),
    ("<answer>12", "<answer>12", False),
    ("</answer>12<answer>", "</answer>12<answer>", False),
    ("", "", False),
    (" \n", "", False),
  ],
)
def test_an_answer_is_read_from_its_tags_or_the_last_line(text: str, answer: str, is_tagged: bool):
  assert task_lib.read_answer(text) == (answer, is_tagged)


def test_partial_credit_is_a_part_of_the_reward():
  task = loading.load("reasoning_gym.chain_sum")
  problem = task.problem("train", 0)
  for text, reward, correct, well_formed in (
    (tagged(problem.answer), 1.0, True, True),
    (problem.answer, 1.0, True, False),
    (tagged(f"= {problem.answer}"), len(problem.answer) / (2 + len(problem.answer)), False, True),
    (tagged("x"), 0.0, False, True),
    ("", 0.0, False, False),
    (tagged("9" * 100_000), 0.0, False, False),
  ):
    verdict = groups.judge(task, problem, text)
    assert (verdict.reward, verdict.correct, verdict.well_formed) == (reward, correct, well_formed)
    assert verdict.parts == {"correct": float(correct), "partial": reward * (not correct)}
    weighted = groups.judge(task, problem, text, {"partial": 0.0})
    assert weighted.reward == float(correct)


def test_splits_share_no_question_even_where_there_are_few():
  task = loading.load("reasoning_gym.gcd", options={"max_value": 4})
  asked = {
    split: {task.problem(split, index).question for index in range(60)} for split in task_lib.SIZES
  }
  assert not asked["train"] & asked["heldout"]
  assert len(asked["heldout"]) < 30  # They repeat.
  other = loading.load("reasoning_gym.gcd", options={"max_value": 4, "seed": 127})
  assert [other.problem("train", i) for i in range(9)] != [
    task.problem("train", i) for i in range(9)
  ]


def test_options_and_package_are_what_a_resume_is_held_to():
  sums = loading.load("reasoning_gym.chain_sum")
  stored = digests.of_task(sums)
  assert stored["package"] == f"reasoning-gym {package_version()}"
  assert stored == digests.of_task(loading.load("reasoning_gym.chain_sum"))
  other = digests.of_task(loading.load("reasoning_gym.chain_sum", options={"max_terms": 3}))
  with pytest.raises(ValueError, match="got data that differ from the run's .problems was"):
    digests.require_same(stored, other, what="--resume")
  older = stored | {"package": "reasoning-gym 0.1.24"}
  message = f"package was 'reasoning-gym 0.1.24' and is 'reasoning-gym {package_version()}'"
  with pytest.raises(ValueError, match=message):
    digests.require_same(older, stored, what="--resume")
  assert digests.of_set("sums", sums)["sums.package"] == stored["package"]


def package_version() -> str:
  lines = (ROOT / "launch" / "locks" / "environments-3.13.txt").read_text().splitlines()
  return next(line for line in lines if line.startswith("reasoning-gym==")).partition("==")[2]


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("chain_sums", {}, "expected reasoning_gym.GENERATOR with one of ab, .*did you mean"),
    ("chain_sum", {"max_term": 3}, "got the option 'max_term', expected one of .*'max_terms'"),
    ("chain_sum", {"size": 3}, "got the option 'size', expected one of min_terms"),
    ("chain_sum", {"max_terms": 1}, r"got AssertionError \(max_terms must be >= min_terms\) for"),
    ("chain_sum", {"max_terms": "x"}, "got TypeError .* expected options that yield problems"),
    ("chain_sum", {"seed": 128}, "got the option seed=128, expected a whole number from 0 to 127"),
    ("chain_sum", {"seed": 0.5}, "got the option seed=0.5, expected a whole number"),
    ("count_bits", {"max_n": 1}, "got ValueError .*split 'train' .*too few different questions"),
    ("count_bits", {"min_n": 3, "max_n": 3}, "got ValueError .*split 'heldout' among 64"),
  ],
)
def test_options_that_give_no_problems_are_refused(name: str, options: dict, message: str):
  with pytest.raises(ValueError, match=f"reasoning_gym.{name}.*{message}"):
    loading.load(f"reasoning_gym.{name}", options=options)


def test_options_belong_to_generators():
  with pytest.raises(ValueError, match="countdown: got the options .'seed': 1., expected none"):
    loading.load("countdown", options={"seed": 1})
  with pytest.raises(ValueError, match="got path 'x', expected none because its problems are"):
    loading.load("reasoning_gym.gcd", path="x")
  task = loading.load_set('reasoning_gym.gcd={"max_value": 9}')
  assert task.problem("train", 0) == loading.load(
    "reasoning_gym.gcd", options={"max_value": 9}
  ).problem("train", 0)
  assert loading.load_set("countdown").name == "countdown"
  for text in ("reasoning_gym.gcd=9", "reasoning_gym.gcd={"):
    with pytest.raises(ValueError, match="reasoning_gym.gcd: got .* as its options, expected"):
      loading.load_set(text)


def test_a_scorer_that_raises_is_counted():
  task = loading.load("reasoning_gym.calendar_arithmetic", options={"tasks": ["count_days"]})
  problem = next(one for i in range(99) if (one := task.problem("train", i)).answer != "0")
  assert groups.judge(task, problem, tagged("9" * 4_000)).reward == 0.0
  assert task.faults == {"OverflowError": 1}


def test_without_the_package_its_c_dependency_is_named():
  script = """
    import sys
    sys.modules["pycosat"] = None  # As where it could not be built.
    from seerjax.tasks import loading
    try:
      loading.load("reasoning_gym.gcd")
    except ValueError as error:
      print(error)
  """
  command = [sys.executable, "-c", textwrap.dedent(script)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
  assert "which cannot be imported (import of pycosat halted" in done.stdout
  assert "the extra 'environments' (pip install 'seerjax[environments]'" in done.stdout
  assert "pycosat has no wheels and is built from C" in done.stdout


@pytest.mark.thorough
def test_problems_do_not_depend_on_the_process():
  script = """
    import sys
    sys.path.insert(0, "tests/tasks")
    import test_reasoning_gym as here
    unlike = []
    for name in here.GENERATORS:
      task = here.loading.load(f"reasoning_gym.{name}")
      # In another order than the stored digests were made in.
      found = [task.problem(*place) for place in reversed(here.PLACES)]
      task.close()
      if here.digest_of(reversed(found)) != here.GOLDEN[name]:
        unlike.append(name)
    # Not on standard output, on which the package's compiler of "bf" prints dots.
    sys.exit(f"unlike: {unlike}" if unlike else 0)
  """
  for seed in ("0", "1"):
    done = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True,
      env=os.environ | {"PYTHONHASHSEED": seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
