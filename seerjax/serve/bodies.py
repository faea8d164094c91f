"""Parses JSON bodies of clients; each field is taken once and validated by name.

Unknown fields are accepted without effect if none of their values could change a response's text
(`WITHOUT_EFFECT`), and refused otherwise. A null field counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import math
from typing import Any, NoReturn

from seerjax.serve import schemas
from seerjax.serve.refusals import Refusal, refuse, shown

MAX_DEPTH = 64  # Nesting of lists and objects.
# Fields of OpenAI's and vLLM's protocols that concern accounts, caches, queues or other model
# families, and cannot change the text here. They are listed in a response header, or refused with
# `ServeConfig.strict_fields`.
WITHOUT_EFFECT = frozenset({
  "cache_salt", "kv_transfer_params", "metadata", "moderation", "prediction", "priority",
  "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning",
  "reasoning_effort", "request_id", "safety_identifier", "service_tier", "store",
  "stream_options.include_obfuscation", "verbosity",
})  # fmt: skip
# Fields of these protocols that are accepted only with values that have no effect.
NEUTRAL = {
  "add_generation_prompt": (True,),
  "add_special_tokens": (False,),
  "best_of": (1,),
  "continue_final_message": (False,),
  "function_call": ("auto", "none"),
  "ignore_eos": (False,),
  "include_reasoning": (True,),
  "include_stop_str_in_output": (False,),
  "length_penalty": (1,),
  "logprobs_mode": ("processed_logprobs",),
  "min_tokens": (0,),
  "modalities": (["text"],),
  "return_token_ids": (False,),
  "return_tokens_as_token_ids": (False,),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True,),
  "suffix": ("",),
  "use_beam_search": (False,),
}


def parsed(body: bytes) -> dict[str, Any]:
  """Returns a body as an object.

  Raises:
    Refusal: if the body is not a JSON object, repeats a name, has a number such as NaN, or is
      nested deeper than `MAX_DEPTH`.
  """

  def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      names = [name for name, _ in pairs]
      twice = next(name for name in names if names.count(name) > 1)
      refuse(None, f"the name {shown(twice)} twice in one object", "once", "keep one of them")
    return found

  def no_number(word: str) -> NoReturn:
    refuse(None, word, "a finite number, as JSON requires", "send a finite number")

  try:
    value = json.loads(
      body, object_pairs_hook=once, parse_constant=no_number, parse_float=schemas.number
    )
  except RecursionError:
    refuse(None, "JSON nested too deeply", f"at most {MAX_DEPTH} levels", "flatten it")
  except (ValueError, UnicodeDecodeError) as error:
    refuse(None, f"invalid JSON ({error})", "one JSON object", "correct it")
  if not isinstance(value, dict):
    refuse(None, f"a JSON {type(value).__name__}", "one JSON object", 'send {"model": ...}')
  if _depth(value) > MAX_DEPTH:
    refuse(None, "JSON nested too deeply", f"at most {MAX_DEPTH} levels", "flatten it")
  return value


def _depth(value: Any) -> int:
  depth, level = 0, [value]
  while level:
    depth += 1
    level = [
      inner
      for outer in level
      for inner in (outer.values() if isinstance(outer, dict) else outer)
      if isinstance(inner, dict | list)
    ]
  return depth


class Fields:
  """The fields of one body; each may be taken once.

  Attributes:
    ignored: names of fields that `finish` accepted without effect.
  """

  def __init__(self, body: Mapping[str, Any], where: str = ""):
    self._left = {name: value for name, value in body.items() if value is not None}
    self._where = f"{where}." if where else ""
    self.ignored: list[str] = []

  def take(self, name: str, default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Takes a field's validated value, or the default if the field is absent."""
    if name not in self._left:
      return default
    return check(self._where + name, self._left.pop(name))

  def require(self, name: str, check: Callable[[str, Any], Any], fix: str) -> Any:
    """Takes a field's validated value; refuses a body without the field."""
    if name not in self._left:
      refuse(self._where + name, "nothing", "a value", fix)
    return check(self._where + name, self._left.pop(name))

  def finish(self, supported: Sequence[str]) -> None:
    """Refuses fields that are left, except those that cannot change the text."""
    for name, value in self._left.items():
      where = self._where + name[:80]
      if where in WITHOUT_EFFECT:
        self.ignored.append(where)
        continue
      if name in NEUTRAL and any(value == one for one in NEUTRAL[name]):
        continue
      if name in NEUTRAL:
        only = " or ".join(json.dumps(one) for one in NEUTRAL[name])
        refuse(where, shown(value), f"{only}, since other values are not supported", "leave it out")
      raise Refusal(
        f"{where}: got a field that is not supported, expected one of {', '.join(supported)};"
        " leave it out.",
        param=where,
        code="unsupported_parameter",
      )


def _kind(value: Any) -> str:
  names = {
    bool: "a boolean", int: "a whole number", float: "a number", schemas.Inexact: "a number",
    str: "text",
  }  # fmt: skip
  return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def boolean(name: str, value: Any) -> bool:
  """Returns the value if it is true or false; refuses others."""
  if not isinstance(value, bool):
    refuse(name, f"{shown(value)} ({_kind(value)})", "true or false", "write one of them")
  return value


def text(name: str, value: Any) -> str:
  """Returns the value if it is text; refuses others."""
  if not isinstance(value, str):
    refuse(name, f"{shown(value)} ({_kind(value)})", "text", "write it in quotes")
  return value


def whole(least: int, most: int, fix: str) -> Callable[[str, Any], int]:
  """Returns a check that accepts whole numbers from `least` to `most`."""

  def check(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
      refuse(name, f"{shown(value)} ({_kind(value)})", f"a whole number, {least} to {most}", fix)
    if not least <= value <= most:
      refuse(name, shown(value), f"{least} to {most}", fix)
    return value

  return check


def number(
  is_good: Callable[[float], bool], expected: str, fix: str
) -> Callable[[str, Any], float]:
  """Returns a check that accepts finite numbers for which `is_good` holds."""

  def check(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
      refuse(name, f"{shown(value)} ({_kind(value)})", f"a number, {expected}", fix)
    try:
      found = float(value)
    except OverflowError:  # A JSON integer may be too large for a float.
      found = math.inf
    if not math.isfinite(found) or not is_good(found):
      refuse(name, shown(value), expected, fix)
    return found

  return check


def json_object(name: str, value: Any) -> dict[str, Any]:
  """Returns the value if it is an object; refuses others."""
  if not isinstance(value, dict):
    refuse(name, f"{shown(value)} ({_kind(value)})", "an object", "write {...}")
  return value


def json_list(name: str, value: Any) -> list[Any]:
  """Returns the value if it is a list; refuses others."""
  if not isinstance(value, list):
    refuse(name, f"{shown(value)} ({_kind(value)})", "a list", "write [...]")
  return value
