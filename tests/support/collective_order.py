"""Finds collectives of a compiled program that have no order between them, from its HLO text."""

from __future__ import annotations

import re

COLLECTIVES = re.compile(
  r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
CALLED = re.compile(
  r"(?:body|condition|true_computation|false_computation|to_apply)=(%?[\w.\-]+)"
  r"|branch_computations=\{([^}]*)\}"
)
NAME = re.compile(r"%?[\w.\-]+")


def computations(text: str) -> dict[str, list[tuple[str, str]]]:
  """Returns the instructions (name, text) of each computation, in order."""
  found: dict[str, list[tuple[str, str]]] = {}
  current: list[tuple[str, str]] | None = None
  for line in text.splitlines():
    if head := re.match(r"(?:ENTRY )?(%?[\w.\-]+) \(.*\{$", line):
      current = found[head.group(1)] = []
    elif line.startswith("}"):
      current = None
    elif current is not None and (entry := re.match(r"\s+(?:ROOT )?(%?[\w.\-]+) = (.*)", line)):
      current.append((entry.group(1), entry.group(2).split(", metadata=")[0]))
  return found


def unordered(text: str) -> tuple[list[tuple[str, str]], int]:
  """Returns pairs of collectives, or of loops and branches that contain some, without an order.

  Args:
    text: HLO of a compiled program.

  Returns:
    (pairs of names, number of instructions that gather or add between devices).
  """
  program = computations(text)
  known: dict[str, bool] = {}

  def exchanges(body: str) -> bool:
    if COLLECTIVES.search(body):
      return True
    called = [one or many for one, many in CALLED.findall(body)]
    return any(has_some(name) for names in called for name in NAME.findall(names))

  def has_some(name: str) -> bool:
    if name not in known:
      known[name] = any(exchanges(body) for _, body in program.get(name, ()))
    return known[name]

  pairs, count = [], 0
  for instructions in program.values():
    waits_for: dict[str, set[str]] = {}
    exchanging: list[str] = []
    for name, body in instructions:
      operands = [operand for operand in NAME.findall(body) if operand in waits_for]
      waits_for[name] = set(operands).union(*(waits_for[operand] for operand in operands))
      if exchanges(body):
        pairs += [(other, name) for other in exchanging if other not in waits_for[name]]
        exchanging.append(name)
    count += len(exchanging)
  return pairs, count
