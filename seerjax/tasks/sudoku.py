"""Sudoku: fill a grid so that no row, column or box has a digit twice.

  prompt    "Fill in the sudoku, digits 1 to 4, boxes of 2 by 2.\\n1..4\\n..1.\\n.1..\\n4..1"
  solution  "r1c2=2 r1c3=3 ...\\n#### 1234 3412 2143 4321"

Every problem has exactly one solution. The checker uses the rules, not a stored solution: a grid is
correct if it keeps the givens and no unit repeats a digit. Solved grids selected by
`splits.is_heldout` occur in "heldout" only, whatever cells are given.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import re

from seerjax import fields
from seerjax.tasks import answers, built_in, splits
from seerjax.tasks.draws import Draws
from seerjax.types import Problem, Verdict

BOXES = {4: (2, 2), 6: (2, 3), 8: (2, 4), 9: (3, 3)}  # Rows and columns of a box, by size.
EMPTY = "."
MAX_ANSWER = 400  # Characters after the mark; longer answers are invalid.

Grid = tuple[int, ...]  # Row by row; 0 is empty.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SudokuConfig:
  """Size of the sudokus.

  Attributes:
    size: side length: 4, 6, 8 or 9.
    min_empty, max_empty: share of empty cells; fewer are emptied if the solution would otherwise
      not be unique.
  """

  size: int = 4
  min_empty: float = 0.25
  max_empty: float = 0.6

  def __post_init__(self):
    fields.check(self, size=fields.one_of(BOXES, "4 is the size that a small model can learn"))
    if not 0 < self.min_empty <= self.max_empty <= 1:
      raise ValueError(
        f"SudokuConfig: got min_empty={self.min_empty}, max_empty={self.max_empty}, expected 0 <"
        " min_empty <= max_empty <= 1; 0.25 and 0.6 are usual."
      )


@functools.cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
  """Returns the cells of each row, column and box."""
  rows, columns = BOXES[size]
  found: dict[tuple[str, int], list[int]] = {}
  for cell in range(size * size):
    row, column = divmod(cell, size)
    box = row // rows * (size // columns) + column // columns
    for unit in (("row", row), ("column", column), ("box", box)):
      found.setdefault(unit, []).append(cell)
  return tuple(map(tuple, found.values()))


@functools.cache
def _neighbours(size: int) -> tuple[tuple[int, ...], ...]:
  """Returns, for each cell, the other cells that share a unit with it."""
  found: list[set[int]] = [set() for _ in range(size * size)]
  for unit in units(size):
    for cell in unit:
      found[cell] |= set(unit) - {cell}
  return tuple(tuple(sorted(cells)) for cells in found)


def candidates(grid: Grid, cell: int, size: int) -> list[int]:
  """Returns the digits that no neighbour of a cell has, ascending."""
  taken = {grid[other] for other in _neighbours(size)[cell]}
  return [digit for digit in range(1, size + 1) if digit not in taken]


def solutions(grid: Grid, size: int, draws: Draws | None = None) -> Iterator[Grid]:
  """Yields all solutions of a grid.

  Args:
    grid: 0 for empty cells; given cells are not checked.
    size: side length.
    draws: shuffles the order in which digits are tried; ascending if None.
  """
  # Try the cell with the fewest candidates first, to find dead ends early.
  options = [
    (len(found), cell, found)
    for cell, digit in enumerate(grid)
    if not digit
    for found in [candidates(grid, cell, size)]
  ]
  if not options:
    yield grid
    return
  _, cell, digits = min(options)
  for digit in draws.sample(digits, len(digits)) if draws else digits:
    yield from solutions((*grid[:cell], digit, *grid[cell + 1 :]), size, draws)


def is_solved(grid: Grid, givens: Grid, size: int) -> bool:
  """Returns whether a full grid keeps the givens and has each digit once in every unit."""
  if any(given not in (0, digit) for given, digit in zip(givens, grid, strict=True)):
    return False
  digits = set(range(1, size + 1))
  return all({grid[cell] for cell in unit} == digits for unit in units(size))


def _without(grid: Grid, cell: int) -> Grid:
  return (*grid[:cell], 0, *grid[cell + 1 :])


def _is_only(grid: Grid, size: int) -> bool:
  found = solutions(grid, size)
  return next(found, None) is not None and next(found, None) is None


def _steps(givens: Grid, solved: Grid, size: int) -> list[int]:
  """Returns the empty cells in an order of solving: forced cells first."""
  grid, order = givens, []
  while 0 in grid:
    empty = [cell for cell, digit in enumerate(grid) if not digit]
    cell = next((c for c in empty if len(candidates(grid, c, size)) == 1), None)
    if cell is None:  # A digit with one place left in a unit; otherwise the first empty cell.
      cell = next((c for c in empty if _has_one_place(grid, c, solved[c], size)), empty[0])
    order.append(cell)
    grid = (*grid[:cell], solved[cell], *grid[cell + 1 :])
  return order


def _has_one_place(grid: Grid, cell: int, digit: int, size: int) -> bool:
  """Returns whether a cell is the only place for a digit in one of its units."""
  return any(
    all(
      other == cell or grid[other] or digit not in candidates(grid, other, size) for other in unit
    )
    for unit in units(size)
    if cell in unit
  )


def rows_text(grid: Grid, size: int, joint: str) -> str:
  """Returns the rows of a grid, such as "12.4", joined."""
  text = "".join(str(digit) if digit else EMPTY for digit in grid)
  return joint.join(text[start : start + size] for start in range(0, len(text), size))


def read_grid(text: str, size: int) -> Grid | None:
  """Parses a full grid, digits row by row, ignoring white space; None if it is invalid."""
  digits = "".join(text.split()) if len(text) <= MAX_ANSWER else ""
  if len(digits) != size * size or not re.fullmatch(f"[1-{size}]+", digits, re.ASCII):
    return None
  return tuple(map(int, digits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sudoku(splits.Drawn):
  """Sudoku puzzles as a task.

  The `answer` of a problem is its givens, row by row: "1..4 ..1. .1.. 4..1".
  """

  config: SudokuConfig = SudokuConfig()
  name: str = "sudoku"

  def drawn(self, split: str, index: int) -> Problem:
    """Returns problem `index`."""
    size = self.config.size
    draws = Draws(self.name, size, split, index)
    while True:
      solved = next(solutions((0,) * size**2, size, draws))
      if splits.is_heldout(rows_text(solved, size, " ")) == (split == "heldout"):
        break
    low, high = (
      max(1, int(share * size**2)) for share in (self.config.min_empty, self.config.max_empty)
    )
    wanted, givens = draws.between(low, high), solved
    for cell in draws.sample(range(size**2), size**2):
      fewer = _without(givens, cell)
      if _is_only(fewer, size):
        givens = fewer
      if givens.count(0) == wanted:
        break
    rows, columns = BOXES[size]
    question = (
      f"Fill in the sudoku, digits 1 to {size}, boxes of {rows} by {columns}.\n"
      f"{rows_text(givens, size, chr(10))}"
    )
    steps = _steps(givens, solved, size)
    places = [f"r{cell // size + 1}c{cell % size + 1}={solved[cell]}" for cell in steps]
    return Problem(
      problem_id=f"{self.name}-{size}-{split}-{index}",
      prompt=question,
      question=question,
      answer=rows_text(givens, size, " "),
      num_steps=len(steps),
      solution=f"{' '.join(places)}\n{answers.ANSWER_MARK} {rows_text(solved, size, ' ')}",
    )

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns reward 1 if the text has exactly one "#### <grid>", and it is a solution."""
    size, answer = self.config.size, answers.marked_answer(text)
    grid = None if answer is None else read_grid(answer, size)
    if grid is None:
      return answers.NO_ANSWER
    given = "".join(problem.answer.split())
    givens = tuple(0 if sign == EMPTY else int(sign) for sign in given)
    answer = rows_text(grid, size, " ")
    return answers.answered(answer, is_solved(grid, givens, size))


TASKS = {"sudoku": built_in.Source(Sudoku)}
