"""Turns clients' JSON schemas and tools into sources of grammars.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>

This is the format of the chat templates that mark calls (see `parts`); it is also used where a
template marks none. Numbers that the grammar library would not read exactly are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import decimal
import json
import math
from typing import Any

from seerjax.serve import parts
from seerjax.serve.refusals import refuse, shown

# The separators that chat templates use for arguments (`tojson`).
_CALL_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LEAST, _MOST = -(2**63), 2**63 - 1  # i64
_SURE_DIGITS = 15  # A float keeps this many digits.


class Inexact(float):
  """A number with more digits than a float keeps.

  Attributes:
    written: its source text.
  """

  written: str


def number(written: str) -> float:
  """Returns a JSON number as a float; as `Inexact` if a float does not represent it exactly."""
  value = float(written)
  digits = written.partition("e")[0].partition("E")[0]
  if len(digits) <= _SURE_DIGITS and 1e-300 < abs(value) < 1e300:
    return value
  with decimal.localcontext(prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
    try:
      is_exact = math.isfinite(value) and decimal.Decimal(repr(value)) == decimal.Decimal(written)
    except decimal.InvalidOperation:  # The exponent is out of range.
      is_exact = False
  if is_exact:
    return value
  found = Inexact(value)
  found.written = written
  return found


def source(name: str, schema: Mapping[str, Any]) -> str:
  """Returns a schema as JSON.

  Args:
    name: name of the request field, for messages.
    schema: parsed by `json`, with floats parsed by `number`.

  Raises:
    Refusal: if a number at any depth is not exact in both f64 and i64.
  """
  level: list[Any] = [schema]
  while level:
    inner: list[Any] = []
    for value in level:
      if isinstance(value, dict):
        inner += value.values()
      elif isinstance(value, list):
        inner += value
      elif isinstance(value, Inexact) or (
        isinstance(value, int) and not (_LEAST <= value <= _MOST and int(float(value)) == value)
      ):
        written = value.written if isinstance(value, Inexact) else str(value)
        refuse(
          name, f"the number {shown(written)[1:-1]}",
          "numbers that 64-bit floats or integers represent exactly",
          "round it, or request text", code="inexact_number",
        )  # fmt: skip
    level = inner
  return json.dumps(schema)


def calls(name: str, functions: Sequence[Mapping[str, Any]], *, is_one: bool) -> str:
  """Returns the grammar of one tool call, or of a sequence of calls.

  Args:
    name: name of the request field, for messages.
    functions: functions that may be called, with name and optional schema of parameters.
    is_one: whether to allow exactly one call.

  Raises:
    Refusal: as in `source`.
  """
  lines = ["%llguidance {}", "start: call" if is_one else 'start: call ("\\n" call)*']
  names = [f"f{place}" for place in range(len(functions))]
  begin, end = json.dumps(f"{parts.CALL}\n"), json.dumps(f"\n{parts.END_CALL}")
  lines.append(f"call: {begin} ({' | '.join(names)}) {end}")
  for own, function in zip(names, functions, strict=True):
    parameters = function.get("parameters") or {"type": "object", "properties": {},
                                                "additionalProperties": False}  # fmt: skip
    schema = source(name, {**parameters, "x-guidance": _CALL_OPTIONS})
    head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    lines.append(f'{own}: {json.dumps(head)} %json {schema} "}}"')
  return "\n".join(lines)
