"""Changes an artefact by a program that a language model wrote.

The prompt describes the problem (`Environment.describe`) and the answer format (`instructions`).
The model reasons and ends with one program; the program runs in the sandbox on the artefact, its
result comes back as JSON, and the environment judges it. A program cannot report its own score.

  text -> read_program -> sandbox: improve(artefact, seconds, seed) -> JSON -> verify -> Attempt

A model that exhausts its thinking budget is forced to answer, in two requests:

  1  prompt                                              -> thinking, `thinking_budget` tokens
  2  prompt + thinking + tokens of `forced_answer_text`  -> answer, `answer_budget` tokens

The forced tokens are part of the second prompt. They belong to no completion, have no
log-probability of the policy, and get no gradient.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175, section 3 and
appendix; there the forced tokens are part of one completion, with a mask.
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
MAX_MESSAGE = 2_000  # Characters kept of a failed program's output.
# Tokens kept free at the end of the context, so that no answer reaches its last token.
SPARE_TOKENS = 50
_NOTICE = "\n\n(No tokens are left to think with. The answer follows now: the program.)\n\n"


def instructions() -> str:
  """Returns the answer format, which follows `Environment.describe` in the prompt."""
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
  """Returns a text cut in the middle to about `most` characters.

  Descriptions start with the rules, and the artefact makes them long. The program gets the whole
  artefact.
  """
  if len(text) <= most:
    return text
  head, tail = 2 * most // 3, most // 3
  gap = f"\n[{len(text) - head - tail} characters are left out here; `artefact` holds all]\n"
  return text[:head] + gap + text[len(text) - tail :]


def read_program(text: str) -> str:
  """Returns the source of the last fenced block marked "python" (or "py").

  The source is parsed, not executed; it must define `improve(artefact, seconds, seed)`.

  Raises:
    ValueError: if there is no such block, or it is unclosed, too long, not valid Python, or does
      not define the function; has the reason.
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
      warnings.simplefilter("ignore")  # The program's own warnings, for example about "\d".
      tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    what = error.msg if isinstance(error, SyntaxError) else type(error).__name__
    raise ValueError(
      f"got a program that is no Python ({what}{line}), expected Python; fix it."
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
  # Arguments are passed by name; additional parameters must have defaults.
  if not required <= set(ARGUMENTS) <= known or arguments.posonlyargs:
    try:
      got = ast.unparse(arguments)[:200]
    except RecursionError:  # Unparsing recurses deeper than parsing.
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
  """Runs the program in a model's text on an artefact, and judges the result.

  Args:
    sandbox: runs the program.
    environment: environment of the artefact.
    artefact: valid artefact.
    text: text of the model that contains a program.
    seconds: time limit passed to the program, less than `limits.wall_seconds`.
    seed: seed passed to the program.
    limits: limits of the sandbox, which end a program that exceeds `seconds`.

  Raises:
    ValueError: if `seconds` is not below the wall limit, which would cut off every program.
  """
  if not 0 < seconds < limits.wall_seconds:
    raise ValueError(
      f"programs.attempt: got seconds={seconds}, expected 0 < seconds < limits.wall_seconds ="
      f" {limits.wall_seconds}; a program needs extra time to start and to return its result."
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
    tokens_used: tokens of the first request's completion.
    thinking_budget: `max_tokens` of that request. A model that used fewer stopped by itself.
    text: text of the completion.
    answer_marker: text that starts an answer of this model, such as "</think>"; "" if reasoning is
      not delimited. A code block before the marker is reasoning.
  """
  source, is_open = code_blocks.last_python(_answer(text, answer_marker))
  return tokens_used >= thinking_budget and (source is None or is_open)


def forced_answer_text(text: str, *, answer_marker: str = "") -> str:
  """Returns the forced text between the first completion and the answer.

  It is "" if the answer has already started and only needs to continue; otherwise a short notice
  and the marker.

  Args:
    text: text of the first request's completion.
    answer_marker: as in `needs_answer`; for models with channels the whole turn, such as
      "<|end|><|start|>assistant<|channel|>final<|message|>".
  """
  has_begun = bool(answer_marker) and answer_marker in text
  is_open = not answer_marker and code_blocks.last_python(text)[1]
  return "" if has_begun or is_open else _NOTICE + answer_marker


def answer_budget(max_model_len: int, prompt_tokens: int) -> int:
  """Returns `max_tokens` of the second request, at least 0; its prompt has the forced tokens."""
  return max(max_model_len - prompt_tokens - SPARE_TOKENS, 0)


def _answer(text: str, answer_marker: str) -> str:
  """Returns the text after the last marker; "" if there is no marker."""
  if not answer_marker:
    return text
  return text.rpartition(answer_marker)[2] if answer_marker in text else ""
