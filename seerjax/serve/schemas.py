"""JSON schemas of strangers as sources of grammars, and the form in which tools are called.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>

The form is that of the chat templates which mark calls (`parts`); where a template marks none, the
answer has it nevertheless. Numbers that the library would read as others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import decimal
import json
import math
from typing import Any

from seerjax.serve import parts
from seerjax.serve.refusals import refuse, shown

# As chat templates write arguments (`tojson`).
_CALL_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LEAST, _MOST = -(2**63), 2**63 - 1  # i64
_SURE_DIGITS = 15  # So many a float keeps.


class Inexact(float):
  """A number that was written with digits which a float does not keep.

  Attributes:
    written: how.
  """

  written: str


def number(written: str) -> float:
  """Returns a number of JSON; `Inexact` where a float would be written as another number."""
  value = float(written)
  digits = written.partition("e")[0].partition("E")[0]
  if len(digits) <= _SURE_DIGITS and 1e-300 < abs(value) < 1e300:
    return value
  with decimal.localcontext(prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
    try:
      is_exact = math.isfinite(value) and decimal.Decimal(repr(value)) == decimal.Decimal(written)
    except decimal.InvalidOperation:  # An exponent beyond any.
      is_exact = False
  if is_exact:
    return value
  found = Inexact(value)
  found.written = written
  return found


def source(name: str, schema: Mapping[str, Any]) -> str:
  """Returns a schema as JSON.

  Args:
    name: of the field that it came in.
    schema: as `json` reads it, floats by `number`.

  Raises:
    Refusal: if it has a number, at any depth, that f64 and i64 do not both hold as it is written.
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
          "numbers that 64-bit floats and integers hold as they are written",
          "round it, or ask for text", code="inexact_number",
        )  # fmt: skip
    level = inner
  return json.dumps(schema)


def calls(name: str, functions: Sequence[Mapping[str, Any]], *, is_one: bool) -> str:
  """Returns the grammar of calls: one, or one after the other.

  Args:
    name: of the field that asked for them.
    functions: that may be called, each with its name and the schema of its parameters, if any.
    is_one: whether one call is all.

  Raises:
    Refusal: as `source`.
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
