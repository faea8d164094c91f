"""What the text of a compiled program says of its loops and of its compiler's estimates.

The text is XLA's, after every pass (`Compiled.as_text()`). A loop's trip count is known where the
condition compares a counter with a constant. TPU programs write an estimate of cycles beside what
takes any; it is the compiler's own, by which it chooses tilings, and no measurement.
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
    body: name of what it repeats.
    trips: how often, None where the compiler does not know.
  """

  body: str
  trips: int | None


@dataclasses.dataclass(frozen=True)
class _Line:
  """An instruction: its name, its opcode, and the text from its operands on."""

  name: str
  opcode: str
  rest: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    return _NAME.findall(self.rest.partition(")")[0])

  def named(self, attribute: str) -> list[str]:
    """Returns the computations that an attribute names."""
    found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.rest)
    return _NAME.findall(found.group(1)) if found else []


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    computations: the instructions of each, by its name.
    entry: name of the one that the program begins with.
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
    """Returns the compiler's estimate of one run, in cycles of the device.

    Args:
      unknown_trips: how often a loop of unknown length is taken to run.

    Of the branches of a condition the dearest counts. What the compiler gives no estimate for
    counts nothing.
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
    """Returns the constant that a loop's counter is compared with, or None.

    A counter begins at zero and grows by one: such are all loops of ours.
    """
    lines = {line.name: line for line in self.computations[condition]}
    root = next(line for line in lines.values() if line.is_root)
    # The comparison may have been fused; its operands have not.
    if root.opcode not in ("compare", "fusion"):
      return None
    for name in root.operands:
      bound = lines.get(name)
      if bound is not None and bound.opcode == "constant":
        number = _NUMBER.match(bound.rest)
        return int(number.group(1)) if number else None
    return None


def parsed(text: str) -> Program:
  """Returns a program read from its text.

  Raises:
    ValueError: if the text has no entry, as that of a program does.
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
