"""Reads launches and host waits from the text of XLA's program for a GPU.

A program is a list of computations, each a list of instructions in execution order. An instruction
of the entry is one launch, except those that only name data in memory. For a loop with an unknown
trip count, and for a branch, the host reads a predicate from the device each time.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import re

# Opcodes that launch nothing on the device.
NAMES = (
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
  "partition-id", "replica-id", "copy-done", "async-done", "add-dependency",
)  # fmt: skip
KERNEL = "mosaic_gpu"
NUM_BYTES = {
  "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
  "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program.

  Attributes:
    name: unique in its computation.
    opcode: XLA's opcode.
    shape: shape of the result, such as "bf16[64,4096]"; for a tuple, of all its parts.
    operands: names of instructions.
    rest: attributes, as text.
  """

  name: str
  opcode: str
  shape: tuple[str, ...]
  operands: tuple[str, ...]
  rest: str


@dataclasses.dataclass(frozen=True)
class Start:
  """A launch on the device: one of our kernels, or one of XLA's.

  Attributes:
    name: XLA's name.
    is_ours: whether it is a Mosaic GPU kernel.
    inputs: shapes of the inputs.
    outputs: shapes of the outputs.
    num_times: launches per run of the program; a loop of unknown length counts one iteration.
  """

  name: str
  is_ours: bool
  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  num_times: int = 1


@dataclasses.dataclass(frozen=True)
class Program:
  """The launches of one run.

  Attributes:
    starts: launches outside of branches, in order.
    unknown_loops: names of loops with a trip count known only on the device.
    branches: names of conditionals.
  """

  starts: tuple[Start, ...]
  unknown_loops: tuple[str, ...]
  branches: tuple[str, ...]

  @property
  def num_ours(self) -> int:
    return sum(start.num_times for start in self.starts if start.is_ours)

  @property
  def num_others(self) -> int:
    return sum(start.num_times for start in self.starts if not start.is_ours)

  @property
  def num_host_reads(self) -> int:
    """Places where the host waits for a predicate: loops of unknown length, and branches."""
    return len(self.unknown_loops) + len(self.branches)


def read(text: str) -> Program:
  """Parses XLA's text of a program.

  Raises:
    ValueError: if the text has no entry computation.
  """
  computations, entry = parse(text)
  if not entry:
    raise ValueError(f"program.read: got no ENTRY in {text[:200]!r}, expected XLA's text.")
  loops: list[str] = []
  branches: list[str] = []
  starts = tuple(_starts(entry, 1, computations, loops, branches))
  return Program(starts, tuple(loops), tuple(branches))


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns the instructions of every computation by name, and the name of the entry."""
  computations: dict[str, list[Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    heading = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
    if heading:
      current = computations.setdefault(heading[2], [])
      entry = heading[2] if heading[1] else entry
    elif current is not None and (found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)):
      current.append(_instruction(found[1], found[2]))
  return computations, entry


def _instruction(name: str, text: str) -> Instruction:
  shape, text = _split_type(text)
  opcode, _, text = text.partition("(")
  end = _closing(text)
  operands = tuple(re.findall(r"%([\w.\-]+)", text[:end]))
  parts = tuple(re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\]", shape))
  return Instruction(name, opcode.strip(), parts, operands, text[end + 1 :])


def _split_type(text: str) -> tuple[str, str]:
  """Splits an instruction's text after its type, which may be a tuple."""
  if text.startswith("("):
    end = _closing(text[1:]) + 2
    return text[:end], text[end:].lstrip()
  shape, _, rest = text.partition(" ")
  return shape, rest


def _closing(text: str) -> int:
  """Returns the index of the closing parenthesis, for an opening one before the text."""
  depth = 1
  for place, character in enumerate(text):
    depth += (character == "(") - (character == ")")
    if depth == 0:
      return place
  return len(text)


def _starts(
  computation: str,
  num_times: int,
  computations: dict[str, list[Instruction]],
  loops: list[str],
  branches: list[str],
) -> Iterator[Start]:
  instructions = computations[computation]
  shapes = {instruction.name: instruction.shape for instruction in instructions}
  for one in instructions:
    called = re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", one.rest)
    if one.opcode in NAMES:
      continue
    if one.opcode == "conditional":
      branches.append(one.name)
    elif one.opcode == "while":
      known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.rest)
      if known is None:
        loops.append(one.name)
      rounds = num_times * (int(known[1]) if known else 1)
      yield from _starts(called[0], rounds, computations, loops, branches)
    elif one.opcode == "call" or one.opcode.startswith("async-start"):
      yield from _starts(called[0], num_times, computations, loops, branches)
    else:
      inner = computations.get(called[0], []) if called and one.opcode == "fusion" else []
      is_ours = any(KERNEL in item.rest.partition(",")[2][:200] for item in (one, *inner))
      inputs = tuple(shape for name in one.operands for shape in shapes.get(name, ()))
      yield Start(one.name, is_ours, inputs, one.shape, num_times)


def num_bytes(shape: str) -> int:
  """Returns the bytes of an array such as "bf16[64,4096]"; 0 for types without data."""
  dtype, _, sizes = shape.partition("[")
  total = NUM_BYTES.get(dtype, 0)
  for size in sizes.rstrip("]").split(","):
    total *= int(size) if size else 1
  return total
