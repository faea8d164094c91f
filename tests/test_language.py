"""The tree's prose is plain English: few words of a private dialect, and summaries with a subject.

Prose is docstrings, comments and other strings of Python files, and whole pages and scripts. `MOST`
bounds the words that read as a private dialect ("beside others" for "with other jobs running",
"whose" for "with"). It may be lowered, never raised; a new use is rewritten instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HERE = pathlib.Path(__file__)
CODE = ("seerjax", "pallas_kernels", "experiments", "examples", "launch")
DOCS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# The most uses of a word in the prose of code, tests and pages. Some code remains in each count:
# prompts, on which sampled tokens depend, quoted titles, and names of fields in messages.
MOST = {
  "nobody": (3, 0, 0),
  "whoever": (1, 0, 0),
  "beside": (0, 0, 0),
  "told": (0, 0, 0),
  "said": (0, 1, 0),
  "begun": (0, 0, 0),
  "whose": (10, 6, 1),
  "is asked": (0, 0, 0),
  "of which": (3, 2, 2),
  "so many": (4, 0, 0),
  "what is": (10, 12, 3),
  # Programs do not hear, know or give way, and requests do not speak.
  "hears": (0, 1, 0),
  "gives way": (0, 0, 0),
  "speaks for": (0, 0, 0),
  "moves no bit": (0, 0, 0),
  "that nobody": (0, 0, 0),
  "who asks": (0, 0, 0),
  "may go": (0, 0, 0),
}
# A summary that begins so is a clause without a subject.
OPENINGS = re.compile(r"(?:What|Whose|Whom?|How|Which|Those|Nobody|Nothing|Theirs?|His)\b")


def strings_and_comments(source: str) -> str:
  """Returns the strings and comments of a Python file, without the values of f-strings."""
  kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
  found = []
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type in kinds:
      is_format = re.match("r?fr?[\"']", token.string, re.IGNORECASE)  # One token in Python 3.11.
      found.append(re.sub(r"\{[^{}]*\}", "{}", token.string) if is_format else token.string)
  return "\n".join(found)


def num_uses(word: str, text: str) -> int:
  """Returns how often a text uses a word; names such as `word` or x.word do not count."""
  pattern = word.replace(" ", r"\s+(?:#\s+)?")
  return len(re.findall(rf"(?<![\w`.]){pattern}(?![\w`(])", text, re.IGNORECASE))


def prose(*places: str) -> str:
  """Returns the prose of all files of these places."""
  texts = []
  for place in map(ROOT.joinpath, places):
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
      if path.suffix in (".py", ".md", ".sh", ".html") and path != HERE:
        text = path.read_text()
        texts.append(strings_and_comments(text) if path.suffix == ".py" else text)
  return "\n".join(texts)


def summaries(source: str) -> Iterator[tuple[int, str]]:
  """Yields (line, first line) of each docstring."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      if text := ast.get_docstring(node):
        yield node.body[0].lineno, text.splitlines()[0]


@pytest.mark.parametrize(("index", "places"), [(0, CODE), (1, ("tests",)), (2, DOCS)])
def test_words_of_a_private_dialect_are_rare(index: int, places: tuple[str, ...]):
  text = prose(*places)
  found = {word: num_uses(word, text) for word in MOST}
  above = {word: num for word, num in found.items() if num > MOST[word][index]}
  assert not above, f"got {above} in {places}, expected at most MOST; write plainer English"


def test_summaries_have_a_subject():
  found = []
  for place in (*CODE, "tests"):
    for path in sorted((ROOT / place).rglob("*.py")):
      for line, summary in summaries(path.read_text()):
        if OPENINGS.match(summary):
          found.append(f"{path.relative_to(ROOT)}:{line}: {summary}")
  assert not found, "\n".join(found)


def test_uses_are_counted_in_prose_only():
  source = 'said = 1  # Whose comment,\n# "whose" twice.\nx = f"what is {said} of `said`"\n'
  text = strings_and_comments(source)
  assert [num_uses(word, text) for word in ("whose", "said", "what is")] == [2, 0, 1]
  assert num_uses("of which", "all of\n  # which, of which") == 2
  [(line, summary)] = summaries('def f():\n  """What it does."""')
  assert (line, summary) == (2, "What it does.") and OPENINGS.match(summary)
