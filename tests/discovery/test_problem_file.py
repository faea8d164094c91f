"""Own problems: required contents of the file, the resulting problem, and the checker."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
import functools
import json
import math
import pathlib
import random
import textwrap

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.discovery import problem_check, problem_file
from seerjax.discovery.environment import Environment, Published, Score

# Maximise the product of numbers in 0..1 with a sum of at most 1: a fully sound problem.
SOUND = """
import random

NAME = "product"

def start(seed):
  draws = random.Random(seed)
  return [draws.uniform(0.1, 0.3) for _ in range(3)]

def describe(artefact, value):
  return f"Numbers with a large product, sum at most 1. Now {artefact}: {value}"

def verify(artefact):
  if not isinstance(artefact, list) or len(artefact) != 3:
    return None, "expected three numbers"
  for x in artefact:
    if type(x) not in (int, float) or not 0 < x <= 1:
      return None, "expected numbers in 0..1"
  if not sum(artefact) <= 1:
    return None, "expected a sum of at most 1"
  return artefact[0] * artefact[1] * artefact[2]

def picture(artefact):
  from matplotlib.figure import Figure
  return Figure()
"""

VALUE = "return artefact[0] * artefact[1] * artefact[2]"
FRACTIONS = ("import random", "import random\nimport numpy as np\nfrom fractions import Fraction")
LANGUAGE = """
class Language:
  vocab_size = 8
  allowed = ((0, 3), (3, 5))
  stop_token = None

  def prompt(self, artefact):
    return tuple(min(int(8 * x), 7) for x in artefact)

  def apply(self, artefact, tokens, seed):
    place, direction = tokens
    changed = list(artefact)
    changed[place] *= 0.99 if direction == 3 else 1.01
    return changed

LANGUAGE = Language()
"""


@pytest.fixture
def written(tmp_path: pathlib.Path):
  """Writes a file and returns its path; `changes` are (old, new) in the sound one."""

  def write(*changes: tuple[str, str], more: str = "", name: str = "mine.py") -> pathlib.Path:
    source = SOUND
    for old, new in changes:
      assert old in source, old
      source = source.replace(old, new)
    path = tmp_path / name
    path.write_text(source + textwrap.dedent(more))
    return path

  return write


def scored(written, returned: str, *changes: tuple[str, str], more: str = "") -> Score:
  """Returns the score of three numbers by a file with a `verify` that returns this."""
  path = written((VALUE, f"return {returned}"), *changes, more=more)
  return problem_file.load(path).verify([0.1, 0.3, 0.1])


def levels(findings: list[problem_check.Finding]) -> list[str]:
  return [finding.level for finding in findings]


def test_a_file_becomes_an_environment(written):
  environment = problem_file.load(written())
  assert isinstance(environment, Environment)
  assert (environment.name, environment.is_maximised) == ("product", True)
  assert (environment.published, environment.language) == ((), None)
  artefact = environment.start(3)
  assert artefact == environment.start(3) != environment.start(4)
  score = environment.verify([0.5, 0.25, 0.25])
  assert (score.is_valid, score.value, score.reward) == (True, 1 / 32, 1 + 1 / 32)
  assert environment.verify([0.5, 0.5, 0.5]).reason == "expected a sum of at most 1"
  assert "0.03125" in environment.describe([0.5, 0.25, 0.25], score)
  assert environment.picture(artefact).axes == []


def test_attributes_are_read(written):
  path = written(
    ('NAME = "product"', "IS_MAXIMISED = False"),
    more="""
    PUBLISHED = [(0.037, "somebody", 1999, "https://example.org")]
    def reward(value):
      return 10 - value
    """
    + textwrap.indent(LANGUAGE, "    "),
    name="its_own-name.py",
  )
  environment = problem_file.load(path)
  assert (environment.name, environment.is_maximised) == ("its_own-name", False)
  assert environment.published == (Published(0.037, "somebody", 1999, "https://example.org"),)
  assert environment.language is not None and environment.language.vocab_size == 8
  assert environment.verify([0.5, 0.25, 0.25]).reward == 10 - 1 / 32


def test_a_file_may_import_its_neighbour_and_declare_dataclasses(written, tmp_path):
  (tmp_path / "neighbour_of_mine.py").write_text("LIMIT = 1")
  path = written(
    ("import random", "from __future__ import annotations\nimport dataclasses\nimport random"),
    more="""
    import neighbour_of_mine
    @dataclasses.dataclass
    class Record:
      number: int = neighbour_of_mine.LIMIT
    """,
  )
  assert problem_file.load(path).name == "product"


def test_two_files_of_one_name_stay_apart(written, tmp_path):
  (tmp_path / "sub").mkdir()
  first = problem_file.load(written(('"product"', '"first"')))
  second = problem_file.load(written(('"product"', '"second"'), name="sub/mine.py"))
  assert (first.name, second.name) == ("first", "second")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ([("def start", "def begin")], "got no function start, expected all of start, describe, ver"),
    ([("def start(", "def a("), ("def picture(", "def b(")], "got no function start, picture"),
    ([("def verify(artefact)", "def verify()")], r"got verify\(\), expected verify\(artefact\)"),
    ([("describe(artefact, value)", "describe(a)")], r"got describe\(a\), expected describe\(art"),
    ([('"product"', '"a/b"')], "got NAME='a/b', expected letters, digits and _ . -"),
    ([('NAME = "product"', "IS_MAXIMISED = 1")], "got IS_MAXIMISED=1, expected True if higher"),
    ([('NAME = "product"', "PUBLISHED = [3.0]")], "got 3.0 in PUBLISHED, expected tuples of"),
    ([('NAME = "product"', "PUBLISHED = 3.0")], "got 3.0 in PUBLISHED, expected tuples of"),
    ([('NAME = "product"', "LANGUAGE = 3")], "got LANGUAGE=3 without vocab_size, allowed, stop"),
    ([("import random", "import no_such_module_here")], "ModuleNotFoundError: No module named"),
    ([("import random", "import sys; sys.exit(3)")], "got SystemExit: 3 while importing it"),
    ([("import random", "import random)")], "syntax error in line 2 .unmatched"),
  ],
)
def test_a_file_of_another_form_is_refused(written, changes, message):
  with pytest.raises(ValueError, match=message):
    problem_file.load(written(*changes))


def test_a_language_that_is_a_class_is_refused(written):
  with pytest.raises(ValueError, match="without an instance, expected an object with vocab_size"):
    problem_file.load(written(more=LANGUAGE.replace("Language()", "Language")))


def test_a_missing_file_and_one_of_another_kind_are_refused(written, tmp_path):
  with pytest.raises(FileNotFoundError, match="got no such file, expected Python with the functio"):
    problem_file.load(tmp_path / "nowhere.py")
  with pytest.raises(ValueError, match="got a file that ends with '.txt', expected '.py'; rename"):
    problem_file.load(written(name="mine.txt"))


@pytest.mark.parametrize(
  ("returned", "value", "certificate"),
  [
    ("0.25", 0.25, ""),
    ("3", 3.0, ""),
    ("np.float64(0.25)", 0.25, ""),
    ("np.int32(7)", 7.0, ""),
    ("2**53 + 1", 2.0**53, "9007199254740993"),
    ("Fraction(1, 3)", 1 / 3, "1/3"),
    ("Fraction(1, 4)", 0.25, ""),
    ("(0.25, '')", 0.25, ""),
    ("{'value': 0.25}", 0.25, ""),
    ("{'value': 0.25, 'reason': '', 'certificate': 'by hand'}", 0.25, "by hand"),
  ],
)
def test_verify_may_return_a_number_in_several_forms(written, returned, value, certificate):
  score = scored(written, returned, FRACTIONS)
  assert (score.is_valid, score.value, score.certificate) == (True, value, certificate)


@pytest.mark.parametrize(
  ("returned", "reason"),
  [
    ("(None, 'too long')", "too long"),
    ("(3.0, 'too long')", "too long"),
    ("{'value': None, 'reason': 'too long'}", "too long"),
    ("None", "verify returned NoneType, expected a finite number up to 1e+300 in size, or (None, "),
    ("True", "verify returned bool, expected a finite number"),
    ("'0.3'", "verify returned str, expected a finite number"),
    ("0.3j", "verify returned complex, expected a finite number"),
    ("float('nan')", "verify returned nan, expected a finite number"),
    ("float('inf')", "verify returned inf, expected a finite number"),
    ("10**400", "verify returned inf, expected a finite number"),
    ("-1e301", "verify returned -1e+301, expected a finite number up to 1e+300 in size"),
    ("(0.3, 3)", "verify returned a reason or certificate that is not text"),
    ("{'value': 0.3, 'valid': True}", "verify returned dict, expected a finite number"),
    ("1 / 0", "verify raised ZeroDivisionError: division by zero"),
    ("random.no_such_name", "verify raised AttributeError: module 'random' has no attribute"),
    ("exit(3)", "verify raised SystemExit: 3"),
    ("verify(artefact)", "verify raised RecursionError"),
  ],
)
def test_whatever_else_verify_does_makes_the_artefact_invalid(written, returned, reason):
  score = scored(written, returned)
  assert not score.is_valid
  assert score.reason.startswith(reason)


@pytest.mark.parametrize(
  ("body", "reason"),
  [
    ("return -1", "reward returned -1.0 for the value 0.25, expected a positive number up to 1e+"),
    ("return 1e301", "reward returned 1e+301 for the value 0.25, expected a positive number up to"),
    ("return float('nan')", "reward returned nan for the value 0.25"),
    ("return 1 / 0", "reward raised ZeroDivisionError: division by zero for the value 0.25"),
    ("return 'much'", "reward raised ValueError: could not convert string to float"),
  ],
)
def test_a_reward_that_is_none_makes_the_artefact_invalid(written, body, reason):
  score = scored(written, "0.25", more=f"def reward(value):\n  {body}\n")
  assert score.reason.startswith(reason)


@hypothesis.given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.booleans())
def test_the_reward_of_a_value_is_positive_and_never_falls(first, second, is_maximised):
  low, high = sorted((first, second), reverse=not is_maximised)
  rewards = [problem_file.reward_of(value, is_maximised) for value in (low, high)]
  assert 0 < rewards[0] <= rewards[1] < math.inf


def test_the_reward_of_a_value_by_hand():
  assert [problem_file.reward_of(x, True) for x in (-3.0, 0.0, 4.0)] == [0.25, 1.0, 5.0]
  assert [problem_file.reward_of(x, False) for x in (-3.0, 0.0, 4.0)] == [4.0, 1.0, 0.2]


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    ({"a": [1, 2.0, None, True, "x", {}]}, ""),
    ([math.nan], "artefact[0]: got nan, expected a number below 1e+300 in size"),
    ({"a": [0, -math.inf]}, "artefact['a'][1]: got -inf, expected a number below"),
    ([10**400], "artefact[0]: got a huge integer, expected a number below"),
    ([10**5000], "artefact[0]: got a huge integer, expected a number below"),
    ([1j], "artefact[0]: got complex, expected plain data"),
    ([(1, 2)], "artefact[0]: got tuple, expected plain data"),
    (np.zeros(3), "artefact: got ndarray, expected plain data"),
    ([np.float64(1)], "artefact[0]: got float64, expected plain data"),
    (b"x", "artefact: got bytes, expected plain data"),
    ({"a": {3: 4}}, "artefact['a']: got a key of type int, expected strings as keys"),
  ],
)
def test_what_is_plain_data_by_hand(artefact, reason):
  assert problem_file.not_plain(artefact).startswith(reason)
  assert bool(problem_file.not_plain(artefact)) == bool(reason)


def test_lists_without_end_are_no_plain_data():
  loop: list = []
  loop.extend([loop, loop])
  deep: list = []
  for _ in range(10_000):
    deep = [deep]
  for endless in (loop, deep):
    assert problem_file.not_plain(endless).startswith("artefact: got lists nested deeper than 64")
  many = [0] * 1000
  for _ in range(4):
    many = [many] * 30  # 810 million numbers, if they were all visited.
  assert problem_file.not_plain(many).startswith("artefact: got more than 1000000 items")


@hypothesis.given(
  st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
  )
)
def test_plain_data_is_equal_to_itself_after_json(artefact):
  if not problem_file.not_plain(artefact):
    assert json.loads(json.dumps(artefact, allow_nan=False)) == artefact


def test_a_start_that_is_no_plain_data_is_refused(written):
  path = written(("return [draws.uniform(0.1, 0.3) for _ in range(3)]", "return (0.1, 0.1, 0.1)"))
  with pytest.raises(
    ValueError, match="start\\(5\\) did not return plain data: artefact: got tuple"
  ):
    problem_file.load(path).start(5)


def test_a_description_that_is_no_text_is_refused(written):
  environment = problem_file.load(written(('return f"Num', "return 3\n  f'Num"), ('{value}"', "'")))
  artefact = environment.start(0)
  with pytest.raises(ValueError, match="describe returned int, expected text; return a str."):
    environment.describe(artefact, environment.verify(artefact))


def test_nothing_is_found_in_a_sound_file(written):
  for more in ("", LANGUAGE):
    assert problem_check.check(problem_file.load(written(more=more)), 0) == []


START = "return [draws.uniform(0.1, 0.3) for _ in range(3)]"
CHECK = """    if type(x) not in (int, float) or not 0 < x <= 1:
      return None, "expected numbers in 0..1"
"""


@pytest.mark.parametrize(
  ("changes", "level", "sentence"),
  [
    ([("Random(seed)", "Random()")], "error", "start: got two different artefacts of start(0)"),
    ([(START, "return 1 / 0")], "error", "start: start(0) raised ZeroDivisionError: division by"),
    ([(START, "return 3, 4")], "error", "start: start(0) raised ValueError: "),
    ([(START, "return [1, 1, 1]")], "error", "start: start(0) is invalid (expected a sum of at"),
    # A run's seeds are large.
    ([(START, "return [0.1, 0.2, 0.3 if seed < 100 else 7]")], "error", "is invalid (expected num"),
    ([(VALUE, "return random.random()")], "error", "verify: got two different scores of start(0)"),
    ([(VALUE, "artefact.sort(); " + VALUE)], "error", "verify: it changed start(0), expected it"),
    ([(CHECK, "    pass\n")], "error", "verify: it failed on "),
    ([("type(x) not in (int, float) or ", "")], "error", "verify: it failed on "),
    ([(CHECK, "    pass\n"), ("sum(artefact) <= 1", "True"), (VALUE, "return len(str(artefact))")],
     "error", "verify: it accepts "),
    ([("<= 1:\n      ", "< 1e308:\n      "), ("sum(artefact) <= 1", "True")],
     "warning", ") gain a factor of 1000, expected no easy record"),
    ([(VALUE, "return float(artefact[0] > 0.2)")], "warning", "verify: got 2 different values of"),
    ([(VALUE, "return 5")], "warning", "verify: got 1 different values of "),
    ([(VALUE, VALUE + " / 1e20")], "warning", "reward: got 1 different rewards of "),
    ([(VALUE, VALUE + " * 1e20")], "warning", "reward: got at most "),
    ([(VALUE, "return -1e20 + 1e10 * artefact[0]")], "warning", "which is tiny, expected 1e-06 to"),
    ([('return f"Num', "return 3\n  f'Num"), ("{value}\"", "'")], "error",
     "describe: it raised ValueError: "),
    ([('return f"Num', "return ''\n  f'Num"), ("{value}\"", "'")], "error",
     "describe: it returned an empty text; expected the problem"),
    ([("def describe(artefact, value):", "def describe(artefact, value, known=[]):\n"
       "  known.append(artefact)\n  assert artefact == known[0]")],
     "error", "describe: it raised AssertionError on a list of 3; expected text"),
    ([(VALUE, "assert artefact[0] > 0.2; " + VALUE)], "error", "start: start(1) is invalid (ver"),
    ([(VALUE, "assert artefact[0] >= 0.11; " + VALUE), (START, "return [0.11, 0.2, 0.3]")],
     "error", "artefacts near the starts (verify raised AssertionError), expected a number"),
    ([("Now {artefact}: {value}", "Now {value}")], "warning", "describe: got one text for two"),
    ([("Now {artefact}: {value}", "{10**5 * str(artefact)}")], "warning", "describe: got "),
    ([("return Figure()", "return 3")], "warning", "picture: it returned 3; expected a matplotlib"),
    ([("return Figure()", "return Figure(no=1)")], "warning", "picture: it raised "),
  ],
)  # fmt: skip
def test_the_checker_finds(written, changes, level, sentence):
  findings = problem_check.check(problem_file.load(written(*changes)), 0)
  assert any(f.level == level and sentence in f.sentence for f in findings), findings
  assert str(findings[0]) == f"{findings[0].level}: {findings[0].sentence}"


def test_the_checker_finds_a_reward_that_falls(written):
  path = written(more="def reward(value):\n  return 1 / value\n")
  findings = problem_check.check(problem_file.load(path), 0)
  assert levels(findings) == ["error", "error"]
  # One hostile product underflows.
  assert "reward raised ZeroDivisionError: float division by zero" in findings[0].sentence
  assert findings[1].sentence.startswith("reward: got ")
  assert "a higher reward for a better value (is_maximised is True)" in findings[1].sentence


@pytest.mark.parametrize(
  ("old", "new", "level", "sentence"),
  [
    ("vocab_size = 8", "vocab_size = 9", "error", "got vocab_size=9, expected a multiple of 8"),
    ("vocab_size = 8", "vocab_size = '8'", "error", "got vocab_size='8', expected a multiple of 8"),
    (
      "(3, 5)",
      "(3,)",
      "error",
      "got allowed=((0, 3), (3,)), expected (low, high) with",
    ),
    (
      "(3, 5)",
      "(3.0, 5)",
      "error",
      "got allowed=((0, 3), (3.0, 5)), expected (low, high) with",
    ),
    (
      "stop_token = None",
      "stop_token = '3'",
      "error",
      "got stop_token='3', which no position allows",
    ),
    (
      "(3, 5)",
      "(3, 9)",
      "error",
      "got allowed=((0, 3), (3, 9)), expected (low, high) with",
    ),
    ("((0, 3), (3, 5))", "()", "error", "got allowed=(), expected (low, high)"),
    ("stop_token = None", "stop_token = 7", "error", "got stop_token=7, which no position allows"),
    ("return tuple(min", "return tuple(3 + min", "warning", ""),
    ("return tuple(min(int(8 * x), 7)", "return tuple(8", "error", "got the prompt (8, 8, 8), exp"),
    ("for x in artefact)", "for x in [])", "error", "got the prompt (), expected at least one id"),
    ("for x in artefact)", "for x in 40 * artefact)", "error", "got a prompt of 120 ids, expected"),
    ("return tuple(min", "return 1 / 0 and (min", "error", "prompt raised ZeroDivisionError: divi"),
    ("= list(artefact)", "= artefact", "error", "apply changed its artefact for ("),
    ("return changed", "return tuple(changed)", "error", "apply did not return plain data for ("),
    ("1.01", "random.random()", "error", "got two different artefacts of apply for ("),
    ("return changed", "return changed[5]", "error", "apply raised IndexError: list index out of"),
    ("return changed", "raise ValueError('no')", "warning", "apply refused 96 of 96 random sent"),
    ("return changed", "return changed[:2]", "warning", "96 of 96 random sentences make an inval"),
  ],
)
def test_the_checker_finds_what_breaks_a_language(written, old, new, level, sentence):
  assert old in LANGUAGE
  findings = problem_check.check(problem_file.load(written(more=LANGUAGE.replace(old, new))), 0)
  if not sentence:  # The prompt may be any ids.
    assert findings == []
  else:
    assert any(f.level == level and f"language: {sentence}" in f.sentence for f in findings)


def test_the_checker_finds_a_prompt_that_is_no_tuple(written):
  old = "return tuple(min(int(8 * x), 7) for x in artefact)"
  assert old in LANGUAGE
  new = "import numpy as np; return np.array([1, 2])"
  findings = problem_check.check(problem_file.load(written(more=LANGUAGE.replace(old, new))), 0)
  assert "language: got the prompt " in findings[0].sentence
  assert "expected a tuple of ids; return tuple(map(int, ids))" in findings[0].sentence


def test_a_problem_that_is_timed_need_not_repeat_its_values(written):
  draws = random.Random(0)

  class Timed(problem_file.OwnProblem):
    def verify(self, artefact):
      score = super().verify(artefact)
      luck = draws.random() / 100
      return dataclasses.replace(score, value=score.value + luck) if score.is_valid else score

  class Confirmed(Timed):
    def confirm(self, artefact):
      return super().verify(artefact)

  sound = problem_file.load(written())
  # Twin: a problem that does not declare itself timed.
  findings = problem_check.check(Timed(**vars(sound)), 0)
  assert any("got two different scores of start(" in f.sentence for f in findings)
  findings = problem_check.check(Confirmed(**vars(sound)), 0)
  assert not any("got two different scores" in f.sentence for f in findings)


def test_a_file_that_does_not_load_is_found(written):
  path = written(("def start", "def begin"))
  (finding,) = problem_check.check_apart(functools.partial(problem_file.load, path), 0, seconds=300)
  assert finding.level == "error" and "got no function start, expected all of" in finding.sentence


@pytest.mark.parametrize(
  "change, sentence",
  [
    ("import os; os._exit(0)", "starts: got a process that ended with status 0, expected every fu"),
    pytest.param(
      "while True: pass",
      "starts: did not end within 15 seconds, expected less time; look for",
      marks=pytest.mark.thorough,
    ),
  ],
)
def test_a_problem_that_ends_its_process_or_hangs_is_found(written, change, sentence):
  path = written((VALUE, change))
  (finding,) = problem_check.check_apart(functools.partial(problem_file.load, path), 0, seconds=15)
  assert finding.level == "error" and finding.sentence.startswith(sentence)


def test_a_sound_problem_passes_in_a_process_of_its_own(written):
  factory = functools.partial(problem_file.load, written())
  assert problem_check.check_apart(factory, 0, seconds=300) == []


def test_a_verifier_that_raises_is_found_in_any_environment(written):
  class Raising(problem_file.OwnProblem):
    def verify(self, artefact):
      return super().verify([float(x) for x in artefact])

  sound = problem_file.load(written())
  assert isinstance(sound, problem_file.OwnProblem)
  findings = problem_check.check(Raising(**vars(sound)), 0)
  assert levels(findings) == ["error"]
  assert findings[0].sentence.startswith("verify: it raised on ")
  assert "None: TypeError: 'NoneType' object is not iterable" in findings[0].sentence


def test_hostile_artefacts_are_many_kinds_at_many_places():
  start = {"rows": [[1, 2], [3, 4]], "name": "x", "on": True, "note": None}
  cases = list(problem_check.hostile(start, random.Random(0)))
  names = [what for what, _, _ in cases]
  assert {"nan", "1j", "a list that contains itself", "nan at artefact['rows'][1][0]"} <= set(names)
  assert "True at artefact['rows'][0][0]" in names
  assert len(cases) > 150
  # Anything but plain data is invalid.
  assert not any(may for _, artefact, may in cases if problem_file.not_plain(artefact))
  assert start == {"rows": [[1, 2], [3, 4]], "name": "x", "on": True, "note": None}


def test_a_sentence_ends_with_the_stop_token(written):
  more = LANGUAGE.replace("stop_token = None", "stop_token = 2")
  language = problem_file.load(written(more=more))
  assert language.language is not None
  draws = random.Random(0)
  sentences = {problem_check.sentence(language.language, draws) for _ in range(200)}
  assert sentences == {(2,), (0, 3), (0, 4), (1, 3), (1, 4)}


def test_a_value_as_a_fraction_is_exact(written):
  score = scored(written, "Fraction(artefact[0]) * Fraction(artefact[1])", FRACTIONS)
  assert Fraction(score.certificate) == Fraction(0.1) * Fraction(0.3) != Fraction(score.value)


def test_a_fraction_of_thousands_of_digits_is_exact(written):
  # Python refuses to print this many decimals.
  score = scored(written, "Fraction(10**5000 + 1, 10**5000)", FRACTIONS)
  assert (score.is_valid, score.value) == (True, 1.0)
  top, bottom = (int(text, 16) for text in score.certificate.split("/"))
  assert Fraction(top, bottom) == Fraction(10**5000 + 1, 10**5000)


def test_a_number_that_is_no_float_is_a_defect(written):
  odd = "import random\nclass Odd(int):\n  def __float__(self): raise KeyError(1)"
  score = scored(written, "Odd(3)", ("import random", odd))
  assert score.reason == "verify returned a number that raised KeyError"
