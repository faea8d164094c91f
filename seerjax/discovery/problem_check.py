"""Tests a problem for mistakes before a run: `seerjax check`.

It tests determinism, the scale and resolution of rewards, robustness of the verifier, JSON, texts
and pictures. It samples, so it may miss a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import copy
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import random
import signal
import time
from typing import Any, Literal, NamedTuple

import numpy as np
import rich.progress

from seerjax.discovery import environment as environment_lib, problem_file
from seerjax.discovery.environment import Artefact, EditLanguage, Environment, Score

MAX_PROMPT = 100  # Tokens for an artefact; see `EditLanguage.prompt`.
MAX_DESCRIPTION = 100_000  # Characters.
REWARD_SCALE = (1e-6, 1e6)  # Rewards outside it are reported as tiny or huge.
_NUM_STARTS = 8
_NUM_SAMPLES = 96


class Finding(NamedTuple):
  """A finding of `check`.

  Attributes:
    level: "error" if it breaks a run or permits cheating, "warning" if it reduces the value of a
      run.
    sentence: got, expected, and what to change.
  """

  level: Literal["error", "warning"]
  sentence: str

  def __str__(self) -> str:
    return f"{self.level}: {self.sentence}"


def check_apart(factory: Callable[[], Environment], seed: int, *, seconds: float) -> list[Finding]:
  """Runs `check` in a separate process, because a problem may hang or end its process.

  Args:
    factory: makes the environment in that process, to which it is pickled.
    seed: see `check`.
    seconds: time limit; exceeding it is a finding, and ends the process.
  """
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_check_and_send, args=(factory, seed, sender), daemon=True)
  process.start()
  sender.close()
  end, stage = time.monotonic() + seconds, "loading"
  columns = rich.progress.SpinnerColumn(), *rich.progress.Progress.get_default_columns()[:1]
  with rich.progress.Progress(
    *columns, rich.progress.TimeElapsedColumn(), transient=True
  ) as progress:
    shown = progress.add_task(stage, total=None)
    try:
      while receiver.poll(max(end - time.monotonic(), 0.0)):
        message = receiver.recv()
        if isinstance(message, list):
          return message
        stage = message
        progress.update(shown, description=stage)
    except EOFError:
      process.join()
      return [
        Finding(
          "error",
          f"{stage}: got a process that ended with status {process.exitcode}, expected every"
          " function to return; remove os._exit, and look for a crash in C.",
        )
      ]
    finally:
      process.kill()
      process.join()
      receiver.close()
  return [
    Finding(
      "error",
      f"{stage}: did not end within {seconds:g} seconds, expected less time; look for an infinite"
      " loop, make the problem faster, or raise --seconds.",
    )
  ]


def _check_and_send(
  factory: Callable[[], Environment],
  seed: int,
  sender: multiprocessing.connection.Connection,
) -> None:
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback.
  try:
    environment = factory()
  except (ValueError, OSError, ImportError) as error:  # The message names the fix.
    sender.send([Finding("error", str(error))])
    return
  sender.send(check(environment, seed, begin=sender.send))


def check(
  environment: Environment, seed: int, *, begin: Callable[[str], None] = lambda stage: None
) -> list[Finding]:
  """Returns the findings about an environment; empty if there are none.

  It tests for: starts that are invalid, not plain data, or not determined by their seed; a verifier
  that is not deterministic, modifies the artefact, raises, or accepts malicious input as valid; a
  reward that falls as the value improves, has only two values, or is far from 1; a description that
  does not depend on the artefact; an invalid picture; a language with sentences that violate
  `EditLanguage`.

  Args:
    environment: any environment.
    seed: seed of the starts and of random tests.
    begin: called with the name of each stage.
  """
  begin("starts")
  draws = random.Random(f"check {seed}")
  findings = _Findings()
  starts = _check_starts(environment, seed, findings)
  if findings:
    return list(findings)  # The other tests need valid starts.
  scored = [(artefact, environment.verify(artefact)) for artefact in starts]
  begin("artefacts near the starts")
  if environment.language is None:
    nudged = [_nudged(starts[i % len(starts)], draws) for i in range(_NUM_SAMPLES)]
    scored += [(artefact, _score(environment, artefact)) for artefact in nudged]
  else:
    scored += _check_language(environment, environment.language, starts, draws, findings)
  defects = [score.reason for _, score in scored if score.reason.startswith(problem_file.DEFECTS)]
  if defects:
    findings.error(
      f"verify: it failed on {len(defects)} of {len(scored)} artefacts near the starts"
      f" ({defects[0]}), expected a number or (None, reason); fix it."
    )
  valid = [(artefact, score) for artefact, score in scored if score.is_valid]
  begin("description and picture")
  _check_words(environment, [artefact for artefact, _ in valid], findings)
  begin("hostile artefacts")
  _check_hostile(environment, starts[0], draws, findings)
  _check_rewards(environment, valid, findings)
  return list(findings)


def _text(artefact: Artefact) -> str:
  return json.dumps(artefact, sort_keys=True)


def _tried(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
  """Returns (result, "") or (None, description of the exception)."""
  try:
    return function(*arguments), ""
  except (Exception, SystemExit) as error:
    return None, problem_file.named(error)


class _Findings(list[Finding]):
  def error(self, sentence: str) -> None:
    self.append(Finding("error", sentence))

  def warning(self, sentence: str) -> None:
    self.append(Finding("warning", sentence))


def _score(environment: Environment, artefact: Artefact) -> Score:
  score, raised = _tried(environment.verify, artefact)
  return environment_lib.invalid(f"verify raised {raised}") if raised else score


def _check_starts(environment: Environment, seed: int, findings: _Findings) -> list[Artefact]:
  """Returns the starts of several seeds; stops at the first invalid one."""
  starts = []
  # A run draws its seeds from the whole range below 2**32.
  far = random.Random(f"starts {seed}")
  seeds = [seed + i if i < _NUM_STARTS // 2 else far.randrange(2**32) for i in range(_NUM_STARTS)]
  for each in seeds:
    artefact, raised = _tried(environment.start, each)
    if raised:
      findings.error(f"start: start({each}) raised {raised}; expected an artefact, fix it.")
      return starts
    if reason := problem_file.not_plain(artefact):
      findings.error(f"start: start({each}) is not equal to itself after JSON: {reason}.")
      return starts
    kept = _text(artefact)
    again, raised = _tried(environment.start, each)
    if raised or problem_file.not_plain(again) or _text(again) != kept:
      findings.error(
        f"start: got two different artefacts of start({each}), expected equal ones; take all random"
        " numbers from np.random.default_rng(seed)."
      )
    score, raised = _tried(environment.verify, artefact)
    if raised:
      findings.error(f"verify: it raised {raised} on start({each}); expected a score, fix it.")
      return starts
    if _text(artefact) != kept:
      findings.error(
        f"verify: it changed start({each}), expected it to leave the artefact unchanged; work on a"
        " copy."
      )
    elif not score.is_valid:
      findings.error(
        f"start: start({each}) is invalid ({score.reason}), expected a valid artefact; fix start,"
        " verify or reward."
      )
    elif not _is_repeated(environment, score, json.loads(kept)):
      findings.error(
        f"verify: got two different scores of start({each}), expected equal ones; use no random"
        " numbers, no clock, and no state between calls."
      )
    if findings:
      return starts
    starts.append(artefact)
  return starts


def _is_repeated(environment: Environment, score: Score, artefact: Artefact) -> bool:
  """Returns whether an artefact gets an equal score again; equal validity if it is timed."""
  again = environment.verify(artefact)
  if isinstance(environment, environment_lib.Timed):
    return again.is_valid == score.is_valid
  return repr(again) == repr(score)


def _check_words(environment: Environment, valid: Sequence[Artefact], findings: _Findings) -> None:
  artefact = valid[0]
  score = environment.verify(artefact)
  text, raised = _tried(environment.describe, artefact, score)
  if raised or not text.strip():
    got = f"raised {raised}" if raised else "returned an empty text"
    findings.error(f"describe: it {got}; expected the problem as text, fix it.")
  elif len(text) > MAX_DESCRIPTION:
    findings.warning(
      f"describe: got {len(text)} characters, expected at most {MAX_DESCRIPTION}; shorten the"
      " artefact in it (programs get the whole artefact)."
    )
  else:
    # With an equal score, the texts can differ only because of the artefacts.
    other = next((each for each in valid if _text(each) != _text(artefact)), artefact)
    described, raised = _tried(environment.describe, other, score)
    if raised:
      findings.error(f"describe: it raised {raised} on {_short(other)}; expected text, fix it.")
    elif described == text and other is not artefact:
      findings.warning(
        "describe: got one text for two different artefacts, expected a text that depends on the"
        " artefact; print the artefact, or its main parts."
      )
  figure, raised = _tried(environment.picture, artefact)
  if raised or not hasattr(figure, "savefig"):
    got = f"raised {raised}" if raised else f"returned {_short(figure)}"
    findings.warning(
      f"picture: it {got}; expected a matplotlib.figure.Figure; without it, reports have no"
      " picture."
    )


def _check_hostile(
  environment: Environment, start: Artefact, draws: random.Random, findings: _Findings
) -> None:
  accepted, raising, defective, gains = [], [], [], []
  reward = environment.verify(start).reward
  tried = list(hostile(start, draws))
  for what, artefact, may_be_valid in tried:
    score, raised = _tried(environment.verify, artefact)
    if raised:
      raising.append(f"{what}: {raised}")
    elif score.reason.startswith(problem_file.DEFECTS):
      defective.append(f"{what}: {score.reason}")
    elif score.is_valid and not may_be_valid:
      accepted.append(what)
    elif score.is_valid and score.reward > 1000 * reward:
      gains.append(f"{what}: reward {score.reward:.3g}, the start has {reward:.3g}")

  def listed(cases: list[str]) -> str:
    these = "; ".join(cases[:3]) + ("; ..." if len(cases) > 3 else "")
    return f"{len(cases)} of {len(tried)} hostile artefacts ({these})"

  if accepted:
    findings.error(
      f"verify: it accepts {listed(accepted)} as valid, expected (None, reason); check type, length"
      " and range of everything in the artefact, positively (`if not 0 <= x <= 1: return None,"
      " ...`), so that NaN fails too."
    )
  if raising:
    findings.error(
      f"verify: it raised on {listed(raising)}, expected a score; return `invalid(reason)` before"
      " computing with such data."
    )
  if defective:
    findings.error(
      f"verify: it failed on {listed(defective)}, expected (None, reason); check type and length"
      " before computing."
    )
  if gains:
    findings.warning(
      f"verify: {listed(gains)} gain a factor of 1000, expected no easy record; reject numbers out"
      " of range if they are not valid answers."
    )


def _check_language(
  environment: Environment,
  language: EditLanguage,
  starts: Sequence[Artefact],
  draws: random.Random,
  findings: _Findings,
) -> list[tuple[Artefact, Score]]:
  """Returns scored results of random sentences, applied to the starts and to earlier results.

  A violation of `EditLanguage` is an error and stops the test.
  """
  size, allowed, stop = language.vocab_size, language.allowed, language.stop_token
  if not _is_integer(size) or size < 8 or size % 8:
    findings.error(f"language: got vocab_size={size!r}, expected a multiple of 8; round it up.")
    if not _is_integer(size):
      return []
  is_whole = isinstance(allowed, tuple | list) and all(
    isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_integer, pair))
    for pair in allowed
  )
  if not is_whole or not allowed or any(not 0 <= low < high <= size for low, high in allowed):
    findings.error(
      f"language: got allowed={allowed}, expected (low, high) with 0 <= low < high <= {size} for"
      " each place; fix it."
    )
    return []
  if stop is not None and not (
    _is_integer(stop) and any(low <= stop < high for low, high in allowed)
  ):
    findings.error(
      f"language: got stop_token={stop!r}, which no position allows; allow it at one, or make it"
      " None."
    )
  valid = list(starts)
  scored = []
  for i in range(_NUM_SAMPLES):
    tokens = sentence(language, draws)
    complaint, result = _tried_sentence(language, draws.choice(valid), tokens, i)
    if complaint:
      findings.error(f"language: {complaint}")
      return scored
    if result is not None:
      scored.append((result, _score(environment, result)))
      valid += [result] if scored[-1][1].is_valid else []
  refused = _NUM_SAMPLES - len(scored)
  if 2 * refused > _NUM_SAMPLES:
    findings.warning(
      f"language: apply refused {refused} of {_NUM_SAMPLES} random sentences, expected at most"
      " half; skip an edit that cannot be applied instead of rejecting the whole sentence."
    )
  num_invalid = len(scored) + len(starts) - len(valid)
  if 2 * num_invalid > len(scored):
    findings.warning(
      f"language: {num_invalid} of {len(scored)} random sentences make an invalid artefact,"
      " expected at most half; have `apply` skip an edit that breaks a rule."
    )
  return scored


def _is_integer(item: Any) -> bool:
  return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _tried_sentence(
  language: EditLanguage, artefact: Artefact, tokens: tuple[int, ...], seed: int
) -> tuple[str, Artefact | None]:
  """Returns ("", new artefact, or None if refused), or (the violation, None)."""
  prompt, raised = _tried(language.prompt, artefact)
  if not raised and (
    not isinstance(prompt, tuple | list)
    or not all(isinstance(token, int | np.integer) for token in prompt)
  ):
    got = _short(prompt)
    return f"got the prompt {got}, expected a tuple of ids; return tuple(map(int, ids)).", None
  if raised or not prompt or not all(0 <= token < language.vocab_size for token in prompt):
    got = f"prompt raised {raised}" if raised else f"got the prompt {prompt}"
    return f"{got}, expected at least one id and all below {language.vocab_size}; fix it.", None
  if len(prompt) > MAX_PROMPT:
    return f"got a prompt of {len(prompt)} ids, expected at most {MAX_PROMPT}; shorten it.", None
  kept = _text(artefact)
  results = []
  for given in (artefact, json.loads(kept)):
    try:
      results.append(language.apply(given, tokens, seed))
    except ValueError:
      results.append(None)
    except (Exception, SystemExit) as error:
      got = problem_file.named(error)
      return f"apply raised {got} for {tokens}, expected no exception but ValueError.", None
  if _text(artefact) != kept:
    return f"apply changed its artefact for {tokens}, expected a new one; copy it first.", None
  for result in results:
    if reason := problem_file.not_plain(result):
      return f"apply did not return plain data for {tokens}: {reason}.", None
  if _text(results[0]) != _text(results[1]):
    return (
      f"got two different artefacts of apply for {tokens}, expected equal ones; take all random"
      " numbers from np.random.default_rng(seed), and limit tools by counts, not by time.",
      None,
    )
  return "", results[0]


def _check_rewards(
  environment: Environment, valid: Sequence[tuple[Artefact, Score]], findings: _Findings
) -> None:
  sign = 1 if environment.is_maximised else -1
  scores = sorted((score for _, score in valid), key=lambda score: sign * score.value)
  for worse, better in itertools.pairwise(scores):
    if worse.reward > better.reward:
      findings.error(
        f"reward: got {better.reward:.6g} for the value {better.value:.6g} and {worse.reward:.6g}"
        f" for the worse value {worse.value:.6g}, expected a higher reward for a better value"
        f" (is_maximised is {environment.is_maximised}); fix one of the two."
      )
      break
  values = {score.value for score in scores}
  rewards = {score.reward for score in scores}
  num_artefacts = len({_text(artefact) for artefact, _ in valid})
  if num_artefacts >= _NUM_STARTS and len(values) <= 2:
    findings.warning(
      f"verify: got {len(values)} different values of {num_artefacts} different artefacts"
      f" ({', '.join(f'{value:.6g}' for value in sorted(values))}), expected a continuous measure;"
      " score how close an artefact comes, or the search gets no signal."
    )
  elif 2 * len(rewards) < len(values):
    findings.warning(
      f"reward: got {len(rewards)} different rewards of {len(values)} different values, expected as"
      " many; rounding hides the differences: use a suitable unit in reward(value)."
    )
  low, high = REWARD_SCALE
  if not low <= max(rewards) <= high:
    size = "tiny" if max(rewards) < low else "huge"
    findings.warning(
      f"reward: got at most {max(rewards):.3g}, which is {size}, expected {low:g} to {high:g}; use"
      " a suitable unit in reward(value), such as 1000 / value."
    )


def sentence(language: EditLanguage, draws: random.Random) -> tuple[int, ...]:
  """Returns a sentence drawn uniformly at each position, up to the stop token if it is drawn."""
  tokens = []
  for low, high in language.allowed:
    tokens.append(draws.randrange(low, high))
    if tokens[-1] == language.stop_token:
      break
  return tuple(tokens)


def hostile(artefact: Artefact, draws: random.Random) -> Iterator[tuple[str, Any, bool]]:
  """Yields (description, malicious artefact, whether a verifier may accept it).

  The first ones are unrelated data; the others are the given artefact with one change, at up to
  eight numbers or texts and six lists or dicts.
  """
  kind = type(artefact)
  deep: list = []
  for _ in range(10_000):
    deep = [deep]
  loop: list = []
  loop.append(loop)
  for what, alien, like in (
    ("None", None, ()), ("True", True, ()), ("0", 0, (int, float)), ("-1", -1, (int, float)),
    ("nan", math.nan, ()), ("inf", math.inf, ()), ("1j", 1j, ()), ("b''", b"", ()),
    ("''", "", (str,)), ("a long text", "x" * 100_000, (str,)), ("[]", [], (list,)),
    ("{}", {}, (dict,)), ("[None]", [None], ()), ("['1']", ["1"], ()), ("[nan]", [math.nan], ()),
    ("10,000 zeros", [0] * 10_000, (list,)), ("an array of nan", np.full(3, np.nan), ()),
    ("an array of bool", np.ones(3, bool), ()), ("a set", {1}, ()), ("an object", object(), ()),
    ("a list 10,000 deep", deep, ()), ("a list that contains itself", loop, ()),
  ):  # fmt: skip
    yield what, alien, kind in like
  leaves, containers = _places(artefact)
  for place in _some(leaves, 8, draws):
    old = _at(artefact, place)
    changes: list[tuple[Any, bool]] = [(math.nan, False), (math.inf, False), (-math.inf, False)]
    changes += [(1j, False), (np.zeros(2), False), (b"1", False)]
    is_optional = old is None
    changes += [([old], is_optional), ({}, is_optional)]
    if type(old) in (int, float):
      changes += [(None, False), ("1", False), (True, False), (10**400, False), (-(10**400), False)]
      changes += [(x, True) for x in (0, -1, 0.5, old + 1, -old, 10**30, 1e299, -1e299, 5e-324)]
    elif type(old) is str:
      changes += [(None, False), (0, False), ("", True), ("x" * 100_000, True), ("\ud800", True)]
    elif type(old) is bool:
      changes += [(None, False), ("True", False), (2, False), (not old, True)]
    for new, may_be_valid in changes:
      what = f"{_short(new)} at {problem_file.where(place)}"
      yield what, _with(artefact, place, new), may_be_valid
  for place in _some(containers, 6, draws):
    old = _at(artefact, place)
    emptied, wrong = ([], {}) if type(old) is list else ({}, [])
    changes = [(None, False), (0, False), ("[]", False), (wrong, False), (emptied, True)]
    if type(old) is list and old:
      changes += [(old[1:], True), (old + old[:1], True), (old[:1] * 10_000, True)]
      changes += [(old[::-1], True), (old + old, True)]
    elif type(old) is dict:
      changes += [(dict(list(old.items())[1:]), True), ({**old, "": None}, True)]
    for new, may_be_valid in changes:
      what = f"{_short(new)} at {problem_file.where(place)}"
      yield what, _with(artefact, place, new), may_be_valid


def _short(item: Any) -> str:
  if type(item) in (list, dict):
    return f"a {type(item).__name__} of {len(item)}"
  if type(item) is int and abs(item) > 10**18:
    return "a huge integer"
  return " ".join(repr(item).split())[:20]


def _places(artefact: Artefact) -> tuple[list[tuple[str | int, ...]], list[tuple[str | int, ...]]]:
  """Returns the paths of an artefact's numbers and texts, and of its lists and dicts."""
  leaves: list[tuple[str | int, ...]] = []
  containers: list[tuple[str | int, ...]] = []
  todo: list[tuple[tuple[str | int, ...], Any]] = [((), artefact)]
  while todo:
    place, item = todo.pop()
    if isinstance(item, list | dict):
      containers.append(place)
      entries = item.items() if isinstance(item, dict) else enumerate(item)
      todo.extend(((*place, key), entry) for key, entry in entries)
    else:
      leaves.append(place)
  return leaves, containers


def _some(places: list[tuple[str | int, ...]], most: int, draws: random.Random) -> list:
  """Returns the first, the last, and random places in between."""
  if len(places) <= most:
    return places
  return [places[0], places[-1], *draws.sample(places[1:-1], most - 2)]


def _at(artefact: Artefact, place: Sequence[str | int]) -> Any:
  for key in place:
    artefact = artefact[key]
  return artefact


def _with(artefact: Artefact, place: Sequence[str | int], new: Any) -> Any:
  """Returns a copy of the artefact with one place replaced."""
  if not place:
    return new
  changed = copy.deepcopy(artefact)
  _at(changed, place[:-1])[place[-1]] = new
  return changed


def _nudged(artefact: Artefact, draws: random.Random) -> Artefact:
  """Returns a variant of an artefact, with a number moved or two list entries swapped."""
  leaves, containers = _places(artefact)
  numbers = [place for place in leaves if type(_at(artefact, place)) in (int, float)]
  lists = [place for place in containers if len(_at(artefact, place)) > 1]
  lists = [place for place in lists if type(_at(artefact, place)) is list]
  if numbers and (not lists or draws.random() < 0.5):
    place = draws.choice(numbers)
    old = _at(artefact, place)
    step = draws.choice((-1, 1)) if type(old) is int else draws.gauss(0, 0.01) * (abs(old) + 0.01)
    return _with(artefact, place, old + step)
  if lists:
    place = draws.choice(lists)
    entries = list(_at(artefact, place))
    first, second = draws.sample(range(len(entries)), 2)
    entries[first], entries[second] = entries[second], entries[first]
    return _with(artefact, place, entries)
  return artefact
