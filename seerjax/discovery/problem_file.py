"""Turns a Python file with four functions into an `Environment`.

  start(seed) -> artefact            plain data to start from: numbers, strings, lists, dicts
  describe(artefact, value) -> str   problem, rules and this artefact, for a language model
  verify(artefact) -> value          a finite number; (None, reason) if invalid
  picture(artefact) -> Figure        a matplotlib figure

and, optionally, these attributes:

  NAME           name for logs and files; default: the file's name
  IS_MAXIMISED   whether higher values are better; default: True
  PUBLISHED      published values, best first: (value, who, year, source), ...; default: ()
  LANGUAGE       an edit language as `discovery.EditLanguage`; default: None, programs only
  reward(value)  quantity to maximise: positive, rises as the value improves; see `reward_of`

The file needs nothing from this library; `examples/vehicle_routing.py` is a complete one. It runs
with all rights of the user: only code written by a model is sandboxed.

`verify` may receive anything that a program returned. Data that is not plain (NaN, a complex
number, an array, a list that contains itself) is rejected before the call. An exception in `verify`
makes the artefact invalid ("verify raised ..."), so that a run continues; it is still a bug of the
file, and `check` reports it. A `Fraction` or an integer is kept as the certificate of the float
that it rounds to, if the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from fractions import Fraction
import hashlib
import importlib.util
import inspect
import math
import os
import pathlib
import re
import sys
import types
from typing import Any

import numpy as np

from seerjax.discovery import environment
from seerjax.discovery.environment import Artefact, EditLanguage, Environment, Published, Score

# The functions of a file, with their arguments.
REQUIRED = {
  "start": ("seed",),
  "describe": ("artefact", "value"),
  "verify": ("artefact",),
  "picture": ("artefact",),
}
MAX_DEPTH = 64  # Nesting of lists; also stops at a list that contains itself.
MAX_ITEMS = 1_000_000  # Total items of one artefact.
MAX_NUMBER = 1e300  # Absolute value; sums of a few larger numbers could overflow floats.
# Prefixes of the reason if the file is at fault, not the artefact.
DEFECTS = ("verify raised", "verify returned", "reward raised", "reward returned")
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_FORMS = (
  f"a finite number up to {environment.MAX_VALUE} in size, or (None, reason) for an invalid"
  " artefact"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnProblem:
  """The functions of a file, as an `Environment`.

  Attributes:
    name, is_maximised, published, language: see `Environment`.
    path: path of the file.
    functions: functions by name; includes "reward" if the file defines it.
  """

  name: str
  is_maximised: bool
  published: tuple[Published, ...]
  language: EditLanguage | None
  path: pathlib.Path
  functions: dict[str, Callable[..., Any]]

  def start(self, seed: int) -> Artefact:
    """Calls the file's `start`.

    Raises:
      ValueError: if the result is not plain data. Exceptions of the function propagate.
    """
    artefact = self.functions["start"](seed)
    if reason := not_plain(artefact):
      raise ValueError(f"{self.path}: start({seed}) did not return plain data: {reason}.")
    return artefact

  def describe(self, artefact: Artefact, score: Score) -> str:
    """Calls the file's `describe` with the artefact and its value.

    Raises:
      ValueError: if the result is not text. Exceptions of the function propagate.
    """
    text = self.functions["describe"](artefact, score.value)
    if not isinstance(text, str):
      raise ValueError(
        f"{self.path}: describe returned {type(text).__name__}, expected text; return a str."
      )
    return text

  def verify(self, artefact: Artefact) -> Score:
    """Judges any object with the file's `verify`; never raises."""
    if reason := not_plain(artefact):
      return environment.invalid(reason)
    try:
      returned = self.functions["verify"](artefact)
    except (Exception, SystemExit) as error:
      return environment.invalid(f"verify raised {named(error)}")
    value, reason, certificate = _read(returned)
    if reason:
      return environment.invalid(reason)
    if "reward" not in self.functions:
      reward = reward_of(value, self.is_maximised)
    else:
      try:
        reward = float(self.functions["reward"](value))
      except (Exception, SystemExit) as error:
        return environment.invalid(f"reward raised {named(error)} for the value {value}")
      if not 0 < reward <= environment.MAX_VALUE:
        return environment.invalid(
          f"reward returned {reward} for the value {value}, expected a positive number up to"
          f" {environment.MAX_VALUE}"
        )
    return Score(is_valid=True, value=value, reward=reward, certificate=certificate)

  def picture(self, artefact: Artefact) -> Any:
    """Calls the file's `picture`."""
    return self.functions["picture"](artefact)


def load(path: str | os.PathLike[str]) -> Environment:
  """Returns the environment that a user's file defines.

  The file's folder is appended to `sys.path`, so that it can import its neighbours.

  Args:
    path: path of the file, such as "examples/vehicle_routing.py".

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not valid Python, cannot be imported, lacks a function, or has a function
      or attribute of another form than described above.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path}: got no such file, expected Python with the functions {', '.join(REQUIRED)}; set"
      " --config.problem to its path (examples/vehicle_routing.py is one)."
    )
  if path.suffix != ".py":
    raise ValueError(
      f"{path}: got a file that ends with {path.suffix!r}, expected '.py'; rename it."
    )
  names = vars(_imported(path))
  missing = [name for name in REQUIRED if not callable(names.get(name))]
  if missing:
    raise ValueError(
      f"{path}: got no function {', '.join(missing)}, expected all of {', '.join(REQUIRED)}; define"
      " it, or start from a copy of examples/vehicle_routing.py."
    )
  functions = {name: names[name] for name in (*REQUIRED, "reward") if callable(names.get(name))}
  for name, function in functions.items():
    _check_arguments(path, name, function, REQUIRED.get(name, ("value",)))
  return OwnProblem(
    name=_name(path, names.get("NAME", path.stem)),
    is_maximised=_is_maximised(path, names.get("IS_MAXIMISED", True)),
    published=_published(path, names.get("PUBLISHED", ())),
    language=_language(path, names.get("LANGUAGE")),
    path=path,
    functions=functions,
  )


def reward_of(value: float, is_maximised: bool) -> float:
  """Returns the default reward of a value, for files without `reward`.

    x = value or, if lower is better, -value;   1 + x if x >= 0,   1 / (1 - x) if x < 0

  It is positive, smooth and strictly increasing. Values below about 1e-6 are lost in the 1, and
  costs above 1e6 give tiny rewards: such a file should define `reward`.
  """
  x = value if is_maximised else -value
  return 1.0 + x if x >= 0 else 1.0 / (1.0 - x)


def not_plain(artefact: Any) -> str:
  """Returns where and why an artefact is not plain data, or "" if it is.

  Plain are None, bool, int and float below `MAX_NUMBER` in size, str, list, and dict with str
  keys: exactly these types, so that an artefact equals itself after a JSON round trip.
  """
  todo: list[tuple[tuple[str | int, ...], Any]] = [((), artefact)]
  count = 1
  while todo:
    place, item = todo.pop()
    if type(item) in (int, float):
      if not -MAX_NUMBER < item < MAX_NUMBER:
        # Python refuses to print very long integers.
        got = item if type(item) is float else "a huge integer"
        return f"{where(place)}: got {got}, expected a number below {MAX_NUMBER} in size"
    elif type(item) in (list, dict):
      if len(place) >= MAX_DEPTH:
        return f"artefact: got lists nested deeper than {MAX_DEPTH}, expected less"
      count += len(item)
      if count > MAX_ITEMS:
        return f"artefact: got more than {MAX_ITEMS} items, expected fewer"
      if type(item) is dict:
        strange = next((key for key in item if type(key) is not str), None)
        if strange is not None:
          kind = type(strange).__name__
          return f"{where(place)}: got a key of type {kind}, expected strings as keys"
      entries = item.items() if type(item) is dict else enumerate(item)
      # Depth first, so that a list that contains itself hits the limit before memory fills up.
      todo.extend(((*place, key), entry) for key, entry in entries)
    elif item is not None and type(item) not in (bool, str):
      return (
        f"{where(place)}: got {type(item).__name__}, expected plain data (None, bool, int, float,"
        " str, list, dict; arrays by .tolist())"
      )
  return ""


def _imported(path: pathlib.Path) -> types.ModuleType:
  digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
  name = f"own_problem_{digest}_{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None  # True for files that end in .py.
  module = importlib.util.module_from_spec(spec)
  folder = str(path.resolve().parent)
  if folder not in sys.path:
    sys.path.append(folder)  # At the end, so that its files do not shadow installed packages.
  sys.modules[name] = module  # Dataclasses look up their module there.
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:
    del sys.modules[name]
    raise ValueError(
      f"{path}: got a syntax error in line {error.lineno} ({error.msg}), expected Python"
      f" {sys.version_info.major}.{sys.version_info.minor}; fix that line."
    ) from error
  except (Exception, SystemExit) as error:
    del sys.modules[name]
    raise ValueError(
      f"{path}: got {named(error)} while importing it, expected a file that can be imported; run"
      f" `python {path}` to see the line; a module that it imports may be missing."
    ) from error
  return module


def _check_arguments(
  path: pathlib.Path, name: str, function: Callable[..., Any], expected: tuple[str, ...]
) -> None:
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # Written in C, without a signature.
    return
  try:
    signature.bind(*expected)
  except TypeError:
    raise ValueError(
      f"{path}: got {name}{signature}, expected {name}({', '.join(expected)}); change its"
      " arguments, or give additional ones defaults."
    ) from None


def _name(path: pathlib.Path, name: Any) -> str:
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise ValueError(
      f"{path}: got NAME={name!r}, expected letters, digits and _ . - (file names contain it);"
      " change it."
    )
  return name


def _is_maximised(path: pathlib.Path, is_maximised: Any) -> bool:
  if not isinstance(is_maximised, bool):
    raise ValueError(
      f"{path}: got IS_MAXIMISED={is_maximised!r}, expected True if higher values are better, else"
      " False; change it."
    )
  return is_maximised


def _published(path: pathlib.Path, published: Any) -> tuple[Published, ...]:
  entries = []
  for entry in published if isinstance(published, tuple | list) else [published]:
    match entry:
      case (int() | float() as value, str() as who, int() as year, str() as source):
        entries.append(Published(float(value), who, year, source))
      case _:
        raise ValueError(
          f"{path}: got {entry!r} in PUBLISHED, expected tuples of (value, who, year, source) such"
          ' as (784.0, "Augerat et al.", 1995, "https://..."); change it.'
        )
  return tuple(entries)


def _language(path: pathlib.Path, language: Any) -> EditLanguage | None:
  if language is None or (isinstance(language, EditLanguage) and not isinstance(language, type)):
    return language
  members = ("vocab_size", "allowed", "stop_token", "prompt", "apply")
  missing = [member for member in members if not hasattr(language, member)]
  raise ValueError(
    f"{path}: got LANGUAGE={language!r} without {', '.join(missing) or 'an instance'}, expected an"
    f" object with {', '.join(members)}; see seerjax.discovery.environment.EditLanguage."
  )


def named(error: BaseException) -> str:
  """Returns "ValueError: message" as one short line."""
  try:
    message = " ".join(str(error).split())[:200]
  except Exception:  # The message may contain malicious objects.
    message = ""
  return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _read(returned: Any) -> tuple[float, str, str]:
  """Returns (value, reason, certificate) from the result of a `verify`."""
  value, reason, certificate = returned, "", ""
  if isinstance(returned, tuple) and len(returned) == 2:
    value, reason = returned
  elif isinstance(returned, dict) and {"value"} <= returned.keys() <= {
    "value", "reason", "certificate"
  }:  # fmt: skip
    value = returned["value"]
    reason, certificate = returned.get("reason", ""), returned.get("certificate", "")
  if not isinstance(reason, str) or not isinstance(certificate, str):
    return math.nan, "verify returned a reason or certificate that is not text", ""
  if reason:
    return math.nan, reason, ""
  number = int | float | Fraction | np.integer | np.floating
  if isinstance(value, bool) or not isinstance(value, number):
    return math.nan, f"verify returned {type(value).__name__}, expected {_FORMS}", ""
  try:
    rounded = float(value)
  except OverflowError:
    rounded = math.inf
  except Exception as error:
    return math.nan, f"verify returned a number that raised {type(error).__name__}", ""
  if not abs(rounded) <= environment.MAX_VALUE:
    return math.nan, f"verify returned {rounded}, expected {_FORMS}", ""
  if not certificate and isinstance(value, int | Fraction) and value != rounded:
    certificate = _exact(Fraction(value))
  return rounded, "", certificate


def _exact(value: Fraction) -> str:
  """Returns a fraction as text, in hexadecimal if it has too many digits for Python to print."""
  try:
    return str(value)
  except ValueError:
    return f"{hex(value.numerator)}/{hex(value.denominator)}"


def where(place: Sequence[str | int]) -> str:
  """Returns a path within an artefact, such as `artefact['routes'][3]`."""
  return "artefact" + "".join(f"[{str(key)[:40]!r}]" if isinstance(key, str) else f"[{key}]"
                              for key in place)  # fmt: skip
