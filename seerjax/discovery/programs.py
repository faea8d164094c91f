"""How a model that writes programs changes an artefact.

The model is told the problem (`Environment.describe`) and how to answer (`instructions`). It thinks
and ends with one program; that program runs in the sandbox on the artefact, what it returns comes
back as JSON, and the environment judges it. A program cannot report its own score.

  text -> read_program -> sandbox: improve(artefact, seconds, seed) -> JSON -> verify -> Attempt

A model that thinks until its budget is spent is made to answer, in two requests:

  1  prompt                                              -> thinking, `thinking_budget` tokens
  2  prompt + thinking + tokens of `forced_answer_text`  -> answer, `answer_budget` tokens

The forced tokens are prompt of the second request. So they are no part of any completion, have no
log-probability of the policy, and get no gradient.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 3 and
appendix; there the forced tokens of one completion carried a mask.
"""

from __future__ import annotations

import ast
import warnings

from seerjax.discovery import environment as environment_lib
from seerjax.discovery.attempts import Attempt
from seerjax.discovery.environment import Artefact, Environment
from seerjax.sandbox.sandbox import Limits, Sandbox
from seerjax.tasks import code_blocks

FUNCTION = "improve"
ARGUMENTS = ("artefact", "seconds", "seed")
MAX_PROGRAM = 65_536  # Characters.
MAX_MESSAGE = 2_000  # Characters of what a failed program printed that are kept.
# Tokens that stay free at the end of the context, so that no answer runs into its very last one.
SPARE_TOKENS = 50
_NOTICE = "\n\n(No tokens are left to think with. The answer follows now: the program.)\n\n"


def instructions() -> str:
  """Returns how a model is to answer; it follows `Environment.describe` in the prompt."""
  return f"""Write a Python program that makes a better artefact of the one above. End your answer
with exactly one fenced block, which defines this function:

```python
def {FUNCTION}({", ".join(ARGUMENTS)}):
  # artefact: the one above, as plain data (numbers, strings, lists, dicts).
  # seconds: a float; return before so many seconds are over. seed: an int, for random draws.
  return artefact
```

Rules:
- Return plain data of the form described above, finite; arrays of numpy come back as lists.
- The standard library, numpy and scipy may be imported. There is no network, no file that outlives
  the program, and one CPU core. The end of what is printed is shown to whoever goes on from here.
- The artefact is judged anew from what is returned; a score that the program states is not read.
- The last block marked `python` counts, in at most {MAX_PROGRAM} characters.
"""


def shortened(text: str, most: int) -> str:
  """Returns a text of at most about `most` characters: one that is longer lacks its middle.

  A description begins with the rules; it is an artefact that grows. The program is given all of it.
  """
  if len(text) <= most:
    return text
  head, tail = 2 * most // 3, most // 3
  gap = f"\n[{len(text) - head - tail} characters are left out here; `artefact` holds all]\n"
  return text[:head] + gap + text[len(text) - tail :]


def read_program(text: str) -> str:
  """Returns the source in the last fenced block of a text that is marked "python" (or "py").

  Nothing is executed: the source is parsed, and it must define `improve(artefact, seconds, seed)`.

  Raises:
    ValueError: if there is no such block, it is not closed, is too long, is no Python, or does not
      define the function; with the reason.
  """
  source, is_open = code_blocks.last_python(text)
  if source is None:
    raise ValueError(
      "got no block that begins with ```python, expected one at the end of the answer; write it."
    )
  if is_open:
    raise ValueError(
      "got a block of Python that is not closed, expected ``` at its end; write less before it."
    )
  if len(source) > MAX_PROGRAM:
    raise ValueError(
      f"got a program of {len(source)} characters, expected at most {MAX_PROGRAM}; shorten it."
    )
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Of the program's own "\d", say.
      tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    what = error.msg if isinstance(error, SyntaxError) else type(error).__name__
    raise ValueError(
      f"got a program that is no Python ({what}{line}), expected Python; mend it."
    ) from None
  functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
  found = [function for function in functions if function.name == FUNCTION]
  expected = f"def {FUNCTION}({', '.join(ARGUMENTS)})"
  if not found:
    names = ", ".join(function.name for function in functions) or "none"
    raise ValueError(
      f"got the functions {names[:200]}, expected {expected} at the top level; define it."
    )
  arguments = found[-1].args
  plain = arguments.args[: len(arguments.args) - len(arguments.defaults)]
  required = {argument.arg for argument in (*arguments.posonlyargs, *plain)}
  for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
    required |= set() if default else {argument.arg}
  known = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
  # They are given by name; further ones must have a default.
  if not required <= set(ARGUMENTS) <= known or arguments.posonlyargs:
    try:
      got = ast.unparse(arguments)[:200]
    except RecursionError:  # It goes deeper than parsing does.
      got = "..."
    raise ValueError(f"got {FUNCTION}({got}), expected {expected}; change its arguments.")
  return source


def attempt(
  sandbox: Sandbox,
  environment: Environment,
  artefact: Artefact,
  text: str,
  *,
  seconds: float,
  seed: int,
  limits: Limits,
) -> Attempt:
  """Returns what a model's text makes of an artefact.

  Args:
    sandbox: that the program runs in.
    environment: of the artefact.
    artefact: valid.
    text: of the model, with a program in it.
    seconds: that the program is told it has, less than `limits.wall_seconds`.
    seed: that the program is given.
    limits: of the sandbox; they end a program that overruns its seconds.

  Raises:
    ValueError: if `seconds` does not lie within the limit: every program would be cut off.
  """
  if not 0 < seconds < limits.wall_seconds:
    raise ValueError(
      f"programs.attempt: got seconds={seconds}, expected 0 < seconds < limits.wall_seconds ="
      f" {limits.wall_seconds}; a program needs a little longer than it is told, to start and to"
      " hand over its result."
    )
  try:
    source = read_program(text)
  except ValueError as error:
    score = environment_lib.invalid(f"malformed: {error}")
    return Attempt(artefact=None, score=score, status="malformed", message=str(error))
  arguments = dict(artefact=artefact, seconds=seconds, seed=seed)
  result, outcome = sandbox.run_python(source, FUNCTION, arguments, limits=limits)
  printed = (outcome.stdout + b"\n" + outcome.stderr).decode(errors="replace").strip()
  printed = printed[-MAX_MESSAGE:]
  status = outcome.status
  if status == "ok":
    score = environment_lib.verified(environment, result)
    status = "ok" if score.is_valid else "invalid"
  else:
    last = (printed.splitlines() or ["it printed nothing"])[-1][:300]
    score = environment_lib.invalid(f"{status} after {outcome.wall_seconds:.1f} s: {last}")
  return Attempt(
    artefact=result if status == "ok" else None,
    score=score,
    status=status,
    message=printed,
    cpu_seconds=outcome.cpu_seconds,
  )


def needs_answer(
  tokens_used: int, thinking_budget: int, text: str, *, answer_marker: str = ""
) -> bool:
  """Returns whether the model ran out of tokens before its program was complete.

  Args:
    tokens_used: of the first request's completion.
    thinking_budget: its `max_tokens`. A model that used fewer stopped of its own accord.
    text: of the completion.
    answer_marker: with which this model's answer begins, such as "</think>"; "" if its thinking is
      not set apart. A block before it is thinking, not an answer.
  """
  source, is_open = code_blocks.last_python(_answer(text, answer_marker))
  return tokens_used >= thinking_budget and (source is None or is_open)


def forced_answer_text(text: str, *, answer_marker: str = "") -> str:
  """Returns what stands between the first request's completion and the answer: forced tokens.

  It is "" where the answer has begun already, and is merely to be gone on with. Else it is a short
  notice, and the marker.

  Args:
    text: of the first request's completion.
    answer_marker: as in `needs_answer`; for the models with channels, the whole turn, such as
      "<|end|><|start|>assistant<|channel|>final<|message|>".
  """
  has_begun = bool(answer_marker) and answer_marker in text
  is_open = not answer_marker and code_blocks.last_python(text)[1]
  return "" if has_begun or is_open else _NOTICE + answer_marker


def answer_budget(max_context: int, prompt_tokens: int) -> int:
  """Returns the second request's `max_tokens`, at least 0; its prompt holds the forced tokens."""
  return max(max_context - prompt_tokens - SPARE_TOKENS, 0)


def _answer(text: str, answer_marker: str) -> str:
  """Returns what follows the last marker; "" if it is not in the text yet."""
  if not answer_marker:
    return text
  return text.rpartition(answer_marker)[2] if answer_marker in text else ""
