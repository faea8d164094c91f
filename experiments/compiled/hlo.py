"""Reads loops and the compiler's cycle estimates from the text of a compiled XLA program.

The text is `Compiled.as_text()`, after all passes. A loop's trip count is known if its condition
compares a counter with a constant. TPU programs contain a cycle estimate for instructions that take
time; it is the compiler's own, used to choose tilings, and not a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = .*?[\]\})] ([a-z][a-z\-]*)\((.*)$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NUMBER = re.compile(r"^(-?\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Loop:
  """One loop of a program.

  Attributes:
    body: name of the loop body.
    trips: trip count, None if the compiler does not know it.
  """

  body: str
  trips: int | None


@dataclasses.dataclass(frozen=True)
class _Line:
  """An instruction: name, opcode, and the text from its operands on."""

  name: str
  opcode: str
  rest: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    return _NAME.findall(self.rest.partition(")")[0])

  def named(self, attribute: str) -> list[str]:
    """Returns the names of computations in an attribute."""
    found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.rest)
    return _NAME.findall(found.group(1)) if found else []


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    computations: instructions by name of computation.
    entry: name of the entry computation.
  """

  computations: Mapping[str, tuple[_Line, ...]]
  entry: str

  def loops(self) -> list[Loop]:
    """Returns all loops, in the order of the text."""
    return [
      Loop(line.named("body")[0], self._trips(line.named("condition")[0]))
      for lines in self.computations.values()
      for line in lines
      if line.opcode == "while"
    ]

  def cycles(self, unknown_trips: int) -> int:
    """Returns the compiler's estimate of one run, in device cycles.

    Args:
      unknown_trips: assumed trip count of loops of unknown length.

    A conditional counts its most expensive branch. Instructions without an estimate count zero.
    """
    return self._cycles(self.entry, unknown_trips)

  def _cycles(self, name: str, unknown_trips: int) -> int:
    total = 0
    for line in self.computations[name]:
      if line.opcode == "while":
        trips = self._trips(line.named("condition")[0])
        trips = unknown_trips if trips is None else trips
        total += trips * self._cycles(line.named("body")[0], unknown_trips)
      elif line.opcode == "conditional":
        branches = line.named("branch_computations")
        branches += line.named("true_computation") + line.named("false_computation")
        total += max(self._cycles(branch, unknown_trips) for branch in branches)
      elif line.opcode == "call":
        total += self._cycles(line.named("to_apply")[0], unknown_trips)
      elif found := _CYCLES.search(line.rest):
        total += int(found.group(1))
    return total

  def _trips(self, condition: str) -> int | None:
    """Returns the constant with which a loop's counter is compared, or None.

    It assumes that the counter starts at zero and grows by one, which holds for all our loops.
    """
    lines = {line.name: line for line in self.computations[condition]}
    root = next(line for line in lines.values() if line.is_root)
    # The comparison may be fused; its operands are not.
    if root.opcode not in ("compare", "fusion"):
      return None
    for name in root.operands:
      bound = lines.get(name)
      if bound is not None and bound.opcode == "constant":
        number = _NUMBER.match(bound.rest)
        return int(number.group(1)) if number else None
    return None


def parsed(text: str) -> Program:
  """Parses the text of a program.

  Raises:
    ValueError: if the text has no entry computation.
  """
  computations: dict[str, tuple[_Line, ...]] = {}
  entry, name, lines = "", "", []
  for row in text.splitlines():
    if head := _COMPUTATION.match(row):
      name, lines = head.group(2), []
      entry = name if head.group(1) else entry
    elif row.startswith("}"):
      computations[name] = tuple(lines)
    elif name and (found := _INSTRUCTION.match(row)):
      lines.append(_Line(found.group(2), found.group(3), found.group(4), bool(found.group(1))))
  if not entry:
    raise ValueError(
      "hlo.parsed: got text without an ENTRY computation, expected a whole compiled program; pass"
      " Compiled.as_text()."
    )
  return Program(computations, entry)
