"""Every settings record refuses values of wrong types in every field, with the field's name.

Records are found in the source, so that new records and fields are tested without a change here.
"""

# Values of wrong types are what this file is about.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import types
import typing
from typing import Any, Literal

import numpy as np
import pytest

from seerjax import fields
from seerjax.run.config import RunConfig
from seerjax.trainer.losses import LossConfig
from seerjax.trainer.optimizer import OptimizerConfig
from seerjax.types import Request, SamplingParams

ROOT = pathlib.Path(__file__).parents[1]

# Records of one token's or one step's numbers: checked where they enter (`engine.checks`).
MADE_BY_US = {"seerjax.types.Completion"}
# Numbers that may be infinite or NaN; the record's own checks refuse impossible values.
UNBOUNDED = {
  "Child.reward", "Child.value", "LossConfig.clip_low", "LossConfig.clip_high",
  "LossConfig.tis_cap", "OptimizerConfig.max_gradient_norm", "SamplingParams.logit_bias",
  "Score.reward", "Score.value",
}  # fmt: skip


@functools.cache
def record_names() -> list[str]:
  """Returns all frozen keyword-only dataclasses that refuse something, or are named a config."""
  found = []
  for path in sorted((ROOT / "seerjax").rglob("*.py")):
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for node in ast.parse(path.read_text()).body:
      if not isinstance(node, ast.ClassDef):
        continue
      is_frozen = any("frozen=True, kw_only=True" in ast.unparse(d) for d in node.decorator_list)
      refuses = any(
        isinstance(part, ast.FunctionDef) and part.name == "__post_init__" for part in node.body
      )
      if is_frozen and (refuses or node.name.endswith("Config")):
        found.append(f"{module}.{node.name}")
  return [name for name in found if name not in MADE_BY_US]


def imported(name: str) -> type:
  module, _, cls = name.rpartition(".")
  return vars(importlib.import_module(module))[cls]


def right(hint: Any) -> Any:
  """Returns a value of an annotation's type, in range or not: types are checked first."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  plain = {int: 1, float: 1.0, str: "text", bool: True, Any: None, np.ndarray: np.zeros(1)}
  if hint in plain:
    return plain[hint]
  if origin is Literal:
    return args[0]
  if origin in (typing.Union, types.UnionType):
    return right(args[0])
  if origin is tuple:
    return () if args[-1] is Ellipsis else tuple(map(right, args))
  if dataclasses.is_dataclass(hint):
    return object.__new__(hint)
  if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
    return {}
  raise AssertionError(f"got the annotation {hint}, expected one of a field; add it here.")


class Strange:
  """A value of no type that any setting has."""


def wrong(hint: Any) -> list[Any]:
  """Returns values that an annotation refuses."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint in (Any, object):
    return []
  if origin in (typing.Union, types.UnionType):
    kinds = [{repr(value): value for value in wrong(arg)} for arg in args]
    common = set(kinds[0]).intersection(*kinds[1:])
    return [value for name, value in kinds[0].items() if name in common]
  strange = [Strange(), [Strange()], {"a": 1}, b"text", 1 + 2j]
  if hint is not type(None):
    strange.append(None)
  if hint is int:
    return [*strange, "3", 1.5, True, math.nan, math.inf, np.float32(2), np.bool_(True), (1,)]
  if hint is float:
    return [*strange, "0.5", True, math.nan, np.float32("nan"), 10**400, (0.5,)]
  if hint is str:
    return [*strange, 3, 1.5, True, ("text",)]
  if hint is bool:
    return [*strange, 0, 1, "no", "False", 0.0]
  if origin is Literal:
    return [*strange, "another", 7, True]
  if origin is tuple and args[-1] is Ellipsis:
    inner = [value for value in wrong(args[0]) if not isinstance(value, Strange)]
    return [*strange, 3, "text", *((value,) for value in inner), *([value] for value in inner)]
  if origin is tuple:
    rest = tuple(map(right, args[1:]))
    return [*strange, 3, (), (*map(right, args), 1), *((one, *rest) for one in wrong(args[0]))]
  if dataclasses.is_dataclass(hint):
    return [*strange, 3, "text", (), hint]
  if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
    keys = [{1: right(args[1])}, {None: right(args[1])}]
    return [
      *(value for value in strange if not isinstance(value, dict)), 3, "text", *keys,
      *({"a": value} for value in wrong(args[1])),
    ]  # fmt: skip
  return strange


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("name", record_names())
def test_a_field_of_a_wrong_type_is_refused_by_name(name: str):
  cls = imported(name)
  hints = typing.get_type_hints(cls)
  init = [field for field in dataclasses.fields(cls) if field.init]
  needed = {
    field.name: right(hints[field.name])
    for field in init
    if field.default is field.default_factory is dataclasses.MISSING
  }
  problems = []
  for field in init:
    values = wrong(hints[field.name])
    if hints[field.name] is float:
      values += [math.inf, -math.inf]
    if f"{cls.__name__}.{field.name}" in UNBOUNDED:
      values = [value for value in values if "nan" not in repr(value) and "inf" not in repr(value)]
    for value in values:
      try:
        cls(**{**needed, field.name: value})
        problems.append(f"{field.name}={value!r} was accepted")
      except ValueError as error:
        text = str(error)
        if not text.startswith(f"{cls.__name__}.{field.name}: got ") or "expected" not in text:
          problems.append(f"{field.name}={value!r}: {text}")
      except Exception as error:  # Anything else is no refusal.
        problems.append(f"{field.name}={value!r}: {type(error).__name__}: {error}")
  assert not problems, "\n".join(problems)


def test_the_walk_finds_the_records():
  names = {name.rpartition(".")[2] for name in record_names()}
  assert names > {"EngineConfig", "RunConfig", "SamplingParams", "KVPoolConfig", "ServeConfig"}
  assert len(record_names()) >= 50


@pytest.mark.usefixtures("unchecked_annotations")
def test_numbers_of_numpy_and_lists_become_plain():
  config = RunConfig(seed=np.int64(3), lora_alpha=np.float32(2), lora_rank=np.uint8(4))
  assert (type(config.seed), type(config.lora_alpha), type(config.lora_rank)) == (int, float, int)
  json.dumps(dataclasses.asdict(config))
  ids = [3, np.int32(4)]
  request = Request(request_id="a", prompt=ids)
  ids.append(5)
  assert request.prompt == (3, 4) and {type(token) for token in request.prompt} == {int}
  assert hash(request) == hash(dataclasses.replace(request))
  nested = SamplingParams(allowed_token_ranges=[[1, 2]] * 256)
  assert nested.allowed_token_ranges == ((1, 2),) * 256


def test_numbers_may_be_infinite_where_a_record_says_so():
  assert OptimizerConfig(max_gradient_norm=math.inf).max_gradient_norm == math.inf
  assert LossConfig(clip_high=math.inf).clip_high == math.inf
  with pytest.raises(ValueError, match="max_gradient_norm: got nan, expected a positive"):
    OptimizerConfig(max_gradient_norm=math.nan)


class Door:
  """A class with checked methods."""

  @fields.checked
  def __init__(self, size: int, *, name: str = "a"):
    self.size, self.name = size, name

  @fields.checked
  def ask(
    self,
    texts: Sequence[str] = (),
    each: Iterable[int | str] | str = (),
    *,
    on_end: Callable[[], None] | None = None,
    share: float | None = None,
    sizes: Mapping[str, int] | None = None,
    anything: Any = None,
  ) -> tuple[Any, ...]:
    """Returns what it was given."""
    return texts, each, on_end, share, sizes, anything


@pytest.mark.parametrize(
  "ask, expected",
  [
    (lambda: Door("3"), "Door.size: got '3', expected a whole number; write 3."),
    (lambda: Door(3, name=4), "Door.name: got 4, expected text; write '4'."),
    (lambda: Door(3).ask("text"), "Door.ask: texts: got 'text', expected a sequence of texts"),
    (lambda: Door(3).ask(["a", 1]), "Door.ask: texts: got 1 in ['a', 1], expected a sequence"),
    (lambda: Door(3).ask(each=[1.5]), "Door.ask: each: got 1.5 in [1.5], expected an iterable of"),
    (lambda: Door(3).ask(on_end=3), "Door.ask: on_end: got 3, expected a function or None; its"),
    (lambda: Door(3).ask(share=math.inf), "Door.ask: share: got inf, expected a finite number or"),
    (lambda: Door(3).ask(sizes={"a": "b"}), "Door.ask: sizes: got 'b' in {'a': 'b'}, expected a"),
    (lambda: Door(3).ask(sizes=[("a", 1)]), "Door.ask: sizes: got [('a', 1)], expected a mapping"),
  ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(ask: Callable[[], Any], expected: str):
  with pytest.raises(ValueError) as caught:
    ask()
  assert str(caught.value).startswith(expected)


def test_arguments_of_the_right_types_arrive_as_they_are():
  once = iter([1])
  given: dict[str, Any] = {"sizes": {"a": 1}, "on_end": print, "share": 1, "anything": Strange}
  assert Door(np.int64(3)).ask(["a"], once, **given) == (
    ["a"], once, print, 1, given["sizes"], Strange
  )  # fmt: skip
  with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
    Door(3).ask(other=3)
  with pytest.raises(TypeError, match="positional argument"):
    Door(3).ask([], [], 3)
