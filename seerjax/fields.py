"""Checks the types of settings and arguments against their annotations.

A record calls `check(self)` first in its `__post_init__`, with a `Rule` for each field that has a
range or choices, and a public function is decorated with `checked`. Errors read
`Class.field: got 1.5, expected a whole number; write 1.`, and are raised before any work starts.
The record or function itself checks what neither expresses, such as combinations, and may rely on
the types there.

An annotation is read once and becomes a function that returns the value or refuses it. numpy
numbers become Python numbers, so that a record can be stored as JSON, and a list given for a tuple
becomes a tuple, so that the record can be hashed and no caller can change it afterwards. A boolean
is not a number, and infinity and NaN are numbers only where a record allows them.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import functools
import inspect
import math
import numbers
import os
import pathlib
import types
import typing
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

# Maximum length of a value in a message, in characters.
MAX_SHOWN = 100
# Python prints no integer of more than 4,300 digits, so no message could show it.
MAX_WHOLE = 10**4000

_NONE: Mapping[str, str] = types.MappingProxyType({})


class _Kind(NamedTuple):
  """The check of an annotation.

  Attributes:
    expected: description of the type, such as "a whole number".
    settle: returns the value as it is stored; raises `_Wrong` for a value of another type.
    fix: returns the correct spelling of a wrong value, "" if it is unknown.
  """

  expected: str
  settle: Callable[[Any], Any]
  fix: Callable[[Any], str] = lambda value: ""


class Rule(NamedTuple):
  """The values that a field may have, beyond its type.

  Attributes:
    expected: description of these values, such as "at least 1".
    is_right: returns whether a value of the field's type is one of them.
    fix: what to change.
  """

  expected: str
  is_right: Callable[[Any], bool]
  fix: str


def at_least(least: float, fix: str = "raise it") -> Rule:
  return Rule(f"at least {least}", lambda value: value >= least, fix)


def between(least: float, most: float, fix: str) -> Rule:
  return Rule(f"{least} to {most}", lambda value: least <= value <= most, fix)


def positive(fix: str) -> Rule:
  return Rule("a positive number", lambda value: value > 0, fix)


def one_of(choices: Collection[Any], fix: str = "choose one") -> Rule:
  return Rule(f"one of {tuple(choices)}", lambda value: value in choices, fix)


def or_none(rule: Rule) -> Rule:
  return Rule(
    f"{rule.expected}, or None", lambda value: value is None or rule.is_right(value), rule.fix
  )


SEED = Rule("0 <= seed < 2**63", lambda value: 0 <= value < 2**63, "choose a smaller one")


class _Wrong(Exception):
  """A value of a type that its annotation excludes; the argument is the innermost wrong value."""


def is_whole(value: Any) -> bool:
  """Returns whether a value is an integer, of Python or numpy; True and False are not."""
  return type(value) is int or (isinstance(value, numbers.Integral) and not is_truth(value))


def is_number(value: Any) -> bool:
  """Returns whether a value is a real number, of Python or numpy; it may be infinite or NaN."""
  return type(value) is float or (isinstance(value, numbers.Real) and not is_truth(value))


def is_truth(value: Any) -> bool:
  """Returns whether a value is True or False, of Python or numpy."""
  # numpy's booleans share no base class with Python's, and this module does not import numpy.
  return isinstance(value, bool) or (
    type(value).__module__ == "numpy" and (type(value).__name__ in ("bool", "bool_"))
  )


def shown(value: Any) -> str:
  """Returns a value for a message: in full if it is plain and short, otherwise its type."""
  if not _is_plain(value):
    return _with_article(type(value).__name__)
  try:
    text = repr(value)
  except ValueError:  # Python prints no integer of thousands of digits.
    return "a number with thousands of digits"
  return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _is_plain(value: Any) -> bool:
  inner = value.values() if isinstance(value, dict) else value
  return (
    isinstance(value, str | bytes | None)
    or is_number(value)
    or is_truth(value)
    or (isinstance(value, tuple | list | dict) and all(map(_is_plain, inner)))
  )


def check(
  record: Any, *, unbounded: tuple[str, ...] = (), fixes: Mapping[str, str] = _NONE, **rules: Rule
) -> None:
  """Refuses a record with a field of another type than its annotation, or against its rule.

  Args:
    record: a dataclass instance, frozen or not.
    unbounded: names of fields with numbers that may be infinite or NaN, subject to the record's own
      checks.
    fixes: advice by field, if it is more specific than what the annotation gives.
    rules: by field, what its annotation cannot express.

  Raises:
    ValueError: with the class and the field as its prefix.
  """
  cls = type(record)
  for name, kind, fallback in _kinds_of_record(cls, unbounded):
    value = vars(record)[name]
    settled = _settled(f"{cls.__name__}.{name}", value, kind, fallback, fixes.get(name, ""))
    if settled is not value:
      object.__setattr__(record, name, settled)
  for name, rule in rules.items():
    value = vars(record)[name]
    if not rule.is_right(value):
      raise ValueError(
        f"{cls.__name__}.{name}: got {shown(value)}, expected {rule.expected}; {rule.fix}."
      )


def checked(function: Callable[P, R]) -> Callable[P, R]:
  """Decorates a function to refuse arguments of other types than annotated.

  The wrapper raises ValueError with the function and the argument as its prefix.
  """
  what = function.__qualname__
  call: Callable[..., R] = function
  prefix = f"{what.removesuffix('__init__')}" if what.endswith(".__init__") else f"{what}: "

  @functools.cache
  def kinds() -> tuple[tuple[str, ...], dict[str, tuple[_Kind, Any]]]:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return tuple(one.name for one in named if one.kind is not one.KEYWORD_ONLY), {
      one.name: (_kind(hints[one.name], False), one.default) for one in named if one.name in hints
    }

  def settled(name: str, value: Any) -> Any:
    entry = kinds()[1].get(name)
    # Defaults are not checked, and Python itself refuses unknown names.
    return value if entry is None else _settled(f"{prefix}{name}", value, *entry)

  @functools.wraps(function)
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
    names = kinds()[0]
    positional: list[Any] = [settled(name, value) for name, value in zip(names, args)]
    named: dict[str, Any] = {name: settled(name, value) for name, value in kwargs.items()}
    return call(*positional, *args[len(names) :], **named)

  return wrapper


def checked_methods(cls: C) -> C:
  """Decorates a class so that its public methods and its constructor are `checked`."""
  for name, function in list(vars(cls).items()):
    if isinstance(function, types.FunctionType) and (name == "__init__" or name[0] != "_"):
      setattr(cls, name, checked(function))
  return cls


def _settled(what: str, value: Any, kind: _Kind, fallback: Any, fix: str = "") -> Any:
  try:
    return kind.settle(value)
  except _Wrong as wrong:
    (inner,) = wrong.args
    got = shown(value) if inner is value else f"{shown(inner)} in {shown(value)}"
    fix = (
      fix
      or kind.fix(value)
      or (
        "give one"
        if fallback is dataclasses.MISSING or fallback is inspect.Parameter.empty
        else f"its default is {shown(fallback)}"
      )
    )
    raise ValueError(f"{what}: got {got}, expected {kind.expected}; {fix}.") from None


@functools.cache
def _kinds_of_record(cls: type, unbounded: tuple[str, ...]) -> list[tuple[str, _Kind, Any]]:
  hints = typing.get_type_hints(cls)
  return [
    (field.name, _kind(hints[field.name], field.name in unbounded), field.default)
    for field in dataclasses.fields(cls)
    if field.init
  ]


def _kind(hint: Any, is_unbounded: bool) -> _Kind:
  """Returns the check of an annotation; one that this module cannot read accepts everything."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is float:
    return _number(is_unbounded)
  if hint in _PLAIN:
    return _PLAIN[hint]
  if hint is None or hint is type(None):
    return _Kind("None", functools.partial(_instance, type(None)))
  if origin is typing.Annotated:
    return _kind(args[0], is_unbounded)
  if origin is Literal:
    return _one_of(args)
  if origin in (typing.Union, types.UnionType):
    return _union([_kind(arg, is_unbounded) for arg in args])
  if origin is tuple:
    return _tuple(args, is_unbounded)
  if origin in (collections.abc.Callable, Callable) or hint is Callable:
    return _Kind("a function", _function)
  if origin is not None and isinstance(origin, type):
    return _container(origin, args, is_unbounded)
  if isinstance(hint, type) and not _is_of_jaxtyping(hint):
    return _class(hint)
  return _Kind("anything", lambda value: value)


def _is_of_jaxtyping(hint: type) -> bool:
  # Arrays are checked by code that knows their dtype and shape.
  return type(hint).__module__.partition(".")[0] == "jaxtyping"


def _whole(value: Any) -> Any:
  if not is_whole(value) or abs(value) >= MAX_WHOLE:
    raise _Wrong(value)
  return value if type(value) is int else int(value)


def _fix_whole(value: Any) -> str:
  try:
    number = float(value)
    return f"write {int(number)}" if abs(number) < 2**53 else ""
  except (TypeError, ValueError, OverflowError):
    return ""


def _truth(value: Any) -> bool:
  if not is_truth(value):
    raise _Wrong(value)
  return bool(value)


def _instance(kind: Any, value: Any) -> Any:
  if not isinstance(value, kind):
    raise _Wrong(value)
  return value


def _function(value: Any) -> Any:
  if not callable(value):
    raise _Wrong(value)
  return value


def _fix_text(value: Any) -> str:
  return f"write {str(value)!r}" if is_number(value) else ""


def _path(value: Any) -> pathlib.Path:
  if not isinstance(value, str | os.PathLike):
    raise _Wrong(value)
  return pathlib.Path(value)


_PLAIN: dict[Any, _Kind] = {
  pathlib.Path: _Kind("a path", _path),
  int: _Kind("a whole number", _whole, _fix_whole),
  bool: _Kind("True or False", _truth, lambda value: "write True or False"),
  str: _Kind("text", functools.partial(_instance, str), _fix_text),
  Any: _Kind("anything", lambda value: value),
  object: _Kind("anything", lambda value: value),
}


def _number(is_unbounded: bool) -> _Kind:
  def settle(value: Any) -> Any:
    if not is_number(value):
      raise _Wrong(value)
    plain = value if type(value) in (int, float) else float(value)
    try:
      is_finite = math.isfinite(plain)
    except OverflowError:  # An integer that no float holds.
      raise _Wrong(value) from None
    if not (is_unbounded or is_finite):
      raise _Wrong(value)
    return plain

  def fix(value: Any) -> str:
    try:
      return f"write {float(value)}" if math.isfinite(float(value)) else ""
    except (TypeError, ValueError, OverflowError):
      return ""

  return _Kind("a number" if is_unbounded else "a finite number", settle, fix)


def _one_of(choices: tuple[Any, ...]) -> _Kind:
  def settle(value: Any) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
      raise _Wrong(value)
    return value

  return _Kind(f"one of {choices}", settle, lambda value: "choose one")


def _union(kinds: list[_Kind]) -> _Kind:
  def settle(value: Any) -> Any:
    innermost = value
    for kind in kinds:
      try:
        return kind.settle(value)
      except _Wrong as wrong:
        innermost = innermost if wrong.args[0] is value else wrong.args[0]
    raise _Wrong(innermost)

  def fix(value: Any) -> str:
    return next((found for kind in kinds for found in (kind.fix(value),) if found), "")

  expected = [kind.expected for kind in kinds]
  return _Kind(" or ".join(dict.fromkeys(expected)), settle, fix)


def _tuple(args: tuple[Any, ...], is_unbounded: bool) -> _Kind:
  if len(args) == 2 and args[1] is Ellipsis:
    inner = _kind(args[0], is_unbounded)
    is_int = args[0] is int

    def settle_all(value: Any) -> tuple[Any, ...]:
      if not isinstance(value, tuple | list):
        raise _Wrong(value)
      if is_int and set(map(type, value)) <= {int}:  # Fast path: prompts are long.
        return value if type(value) is tuple else tuple(value)
      return _same(value, [inner.settle(one) for one in value])

    def fix(value: Any) -> str:
      return f"write ({shown(value)},)" if _is_settled(inner, value) else ""

    return _Kind(f"a tuple of {_plural(inner.expected)}", settle_all, fix)
  inner_kinds = [_kind(arg, is_unbounded) for arg in args]

  def settle_each(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != len(inner_kinds):
      raise _Wrong(value)
    return _same(value, [kind.settle(one) for kind, one in zip(inner_kinds, value)])

  return _Kind(f"({', '.join(kind.expected for kind in inner_kinds)})", settle_each)


def _same(value: Any, inner: list[Any]) -> tuple[Any, ...]:
  """Returns a tuple of `inner`; the given one if it is a tuple and no element was changed."""
  if isinstance(value, tuple) and all(a is b for a, b in zip(value, inner)):
    return value
  return tuple(inner)


def _is_settled(kind: _Kind, value: Any) -> bool:
  try:
    kind.settle(value)
  except _Wrong:
    return False
  return True


def _plural(expected: str) -> str:
  for one, many in (
    ("a whole number", "whole numbers"), ("a finite number", "finite numbers"),
    ("a number", "numbers"), ("text", "texts"), ("a tuple of", "tuples of"),
  ):  # fmt: skip
    if expected.startswith(one):
      return many + expected.removeprefix(one)
  return expected


def _container(origin: type, args: tuple[Any, ...], is_unbounded: bool) -> _Kind:
  """Returns the check of a mapping, a sequence or another class with parameters."""
  kinds = [_kind(arg, is_unbounded) for arg in args]
  if issubclass(origin, Mapping):
    key, item = kinds

    def settle_mapping(value: Any) -> Any:
      if not isinstance(value, Mapping):
        raise _Wrong(value)
      for name, one in value.items():
        key.settle(name)
        item.settle(one)
      return value

    return _Kind(f"a mapping from {key.expected} to {item.expected}", settle_mapping)
  if not issubclass(origin, Iterable):
    return _class(origin)
  is_read_once = not issubclass(origin, collections.abc.Collection)
  inner = kinds[0]

  def settle(value: Any) -> Any:
    # A string is a sequence of strings, but is rarely intended as one.
    if not isinstance(value, origin) or isinstance(value, str | bytes):
      raise _Wrong(value)
    if is_read_once and not isinstance(value, tuple | list):
      return value  # Reading it would use it up.
    for one in value:
      inner.settle(one)
    return value

  def fix(value: Any) -> str:
    one = shown(value) if _is_plain(value) else "..."
    return f"write [{one}]" if _is_settled(inner, value) else ""

  expected = f"{_with_article(origin.__name__.lower())} of {_plural(inner.expected)}"
  return _Kind(expected, settle, fix)


def _class(cls: type) -> _Kind:
  def settle(value: Any) -> Any:
    try:
      is_one = isinstance(value, cls)
    except TypeError:  # A protocol that is not runtime-checkable.
      return value
    if not is_one:
      raise _Wrong(value)
    return value

  def fix(value: Any) -> str:
    if Protocol in cls.__mro__:
      parts = [*vars(cls).get("__annotations__", {}), *vars(cls)]
      return f"it needs {', '.join(part for part in parts if part[0] != '_')}"
    return f"write {cls.__name__}(...)" if dataclasses.is_dataclass(cls) else ""

  return _Kind("a path" if cls is os.PathLike else _with_article(cls.__name__), settle, fix)


def _with_article(noun: str) -> str:
  return f"an {noun}" if noun[0].lower() in "aeio" else f"a {noun}"
