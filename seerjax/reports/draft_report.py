"""Report on speculative decoding: drafts of each step, accepted tokens, and the target's tokens.

  step 3   ' pens' ' each'            accepted both, followed by the target's own token
           ' pens' ' and'             second token rejected
                   ' in'              its sibling rejected, too

The report is one self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import os
import pathlib
from typing import Any, NamedTuple

from seerjax.reports import page
from seerjax.reports.page import escape

Path = tuple[int, ...]


class Drafted(NamedTuple):
  """Drafts of one request in one step.

  Attributes:
    position: tokens in the sequence so far, prompt included.
    paths: drafted token ids, most likely path first.
  """

  position: int
  paths: tuple[Path, ...]


class Step(NamedTuple):
  """Result of one step.

  Attributes:
    paths: drafted token ids; empty if the target decoded without a draft.
    added: tokens added; the last one is the target's own. Without a draft all are the target's, and
      may come from several decode steps in one visit.
  """

  paths: tuple[Path, ...]
  added: Path

  @property
  def num_held(self) -> int:
    """Number of accepted draft tokens: all added tokens but the last, if there was a draft."""
    return len(self.added) - 1 if self.paths else 0


class Transcript(NamedTuple):
  """A response and its drafts, as text.

  Attributes:
    title: heading.
    prompt: text of the prompt.
    steps: (paths, added tokens) of each step, as pieces of text.
  """

  title: str
  prompt: str
  steps: tuple[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]], ...]


def steps_of(drafts: Sequence[Drafted], tokens: Sequence[int], num_prompt: int) -> list[Step]:
  """Returns the steps of a response.

  Args:
    drafts: drafts of the request, in order. If a position occurs twice, because the first draft was
      not used, the last one counts.
    tokens: token ids of prompt and response.
    num_prompt: length of the prompt.

  A draft for which the engine had no room was not used either: all tokens of its step, and of the
  following steps without a draft, are the target's own.
  """
  at = {one.position: one.paths for one in drafts if num_prompt <= one.position < len(tokens)}
  starts = sorted({num_prompt, *at})
  steps = []
  for start, end in itertools.pairwise([*starts, len(tokens)]):
    added = tuple(tokens[start:end])
    paths = tuple(path for path in at.get(start, ()) if path)
    if not any(path[: len(added) - 1] == added[:-1] for path in paths):
      paths = ()
    steps.append(Step(paths, added))
  return steps


def transcript(
  title: str, prompt: str, steps: Sequence[Step], decode: Callable[[Sequence[int]], str]
) -> Transcript:
  """Returns a response as text; `decode` is called with one token at a time."""
  pieces = [
    (tuple(_pieces(path, decode) for path in step.paths), _pieces(step.added, decode))
    for step in steps
  ]
  return Transcript(title, prompt, tuple(pieces))


def _pieces(ids: Path, decode: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
  return tuple(decode([token]) for token in ids)


def read(value: Sequence[Any]) -> Transcript:
  """Returns a transcript from its JSON form."""
  title, prompt, steps = value
  pieces = [(tuple(map(tuple, paths)), tuple(added)) for paths, added in steps]
  return Transcript(title, prompt, tuple(pieces))


def section(found: Transcript) -> str:
  """Returns a transcript as HTML: the response, then each step."""
  answer, rows = [], []
  for number, (paths, added) in enumerate(found.steps, 1):
    num_held = len(added) - 1 if paths else 0
    for place, piece in enumerate(added):
      answer.append(_token("held" if place < num_held else "own", piece, f"step {number}"))
    rows.append(
      f'<div class="step"><i>{number}</i><div>{_line(added, ["held"] * num_held)}'
      f"{''.join(_guesses(paths, added[:num_held]))}</div></div>"
    )
  num_tokens = sum(len(added) for _, added in found.steps)
  facts = f"{num_tokens} tokens in {len(found.steps)} steps"
  return (
    f'<article class="good"><div class="facts"><b>{escape(found.title)}</b>'
    f'<span>{escape(facts)}</span></div><pre class="prompt">{escape(found.prompt)}</pre>'
    f'<pre class="drafts">{"".join(answer)}</pre>'
    f'<details><summary>Step by step</summary><div class="drafts">{"".join(rows)}</div></details>'
    "</article>"
  )


def _guesses(paths: Sequence[tuple[str, ...]], held: tuple[str, ...]) -> list[str]:
  """Returns a line for each path; a prefix shared with an earlier path is laid out but hidden."""
  lines: list[str] = []
  before: list[tuple[str, ...]] = []
  for path in paths:
    shared = max((_num_shared(path, other) for other in before), default=0)
    before.append(path)
    holds = _num_shared(path, held)
    kinds = ["held"] * holds + ["missed"] * (len(path) - holds)
    if shared < len(path):  # Otherwise an earlier path contains it.
      lines.append(_line(path, ["shared"] * shared + kinds[shared:]))
  return lines


def _num_shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
  pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
  return sum(1 for _ in pairs)


def _line(pieces: Sequence[str], kinds: Sequence[str]) -> str:
  """Returns a line of tokens; tokens without a kind are the target's own."""
  tokens = itertools.zip_longest(kinds, pieces, fillvalue="own")
  return f"<pre>{''.join(itertools.starmap(_token, tokens))}</pre>"


def _token(kind: str, piece: str, title: str = "") -> str:
  shown = escape(piece.replace("\n", "\u21b5") or "\u2205")  # An end token has no text.
  line = "\n" if title and "\n" in piece else ""  # Keep the line breaks of a response.
  hint = f' title="{escape(title)}"' if title else ""
  return f'<span class="{kind}"{hint}>{shown}</span>{line}'


def html(title: str, transcripts: Sequence[Transcript]) -> str:
  """Returns the HTML page."""
  steps = [step for found in transcripts for step in found.steps]
  num_tokens = sum(len(pieces) for _, pieces in steps)
  num_guessed = sum(1 for paths, _ in steps if paths)
  num_held = sum(len(pieces) - 1 for paths, pieces in steps if paths)
  tiles = [
    (page.number(num_tokens), "tokens generated", f"{len(transcripts)} answers"),
    (page.number(len(steps)), "steps", f"{num_guessed} of them with drafts"),
    (page.number(1 + num_held / max(num_guessed, 1), 3), "tokens per step", "that had a draft"),
  ]
  keys = (
    '<p class="lead drafts"><span class="held">drafted and accepted</span> <span'
    ' class="missed">drafted and rejected</span> <span class="own">sampled by the target</span>'
    " \u00b7 with or without drafts, a response is bit-identical</p>"
  )
  head = page.header("drafts", title, tiles)
  return page.html_page(title, [head, keys, *map(section, transcripts)])


def write(
  directory: str | os.PathLike[str], title: str, transcripts: Sequence[Transcript]
) -> pathlib.Path:
  """Writes report.html into a directory and returns its path."""
  path = pathlib.Path(directory) / page.FILE_NAME
  path.write_text(html(title, transcripts), encoding="utf-8")
  return path
