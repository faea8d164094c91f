"""A custom problem: vehicles of equal size, one depot, and the shortest tours to all customers.

Copy this file and change it. Four functions define a discovery problem: `start`, `describe`,
`verify` and `picture`; everything else here is a helper. With `LANGUAGE`, a tiny policy can learn
to edit the tours; without it, a language model writes programs. Nothing is imported from SeerJAX.

  seerjax discover --config.problem=examples/vehicle_routing.py
  python examples/vehicle_routing.py            # random edits only, as a first check

The artefact is plain data: the tours as lists of customers, `[[3, 17, 8], [5, 1], ...]`. Distances
are integers (Euclidean, rounded, as in CVRPLIB), so that lengths are exact.

Takes about five seconds on one CPU core. The last line reads `better than the start: True`.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
import sys

import numpy as np

Tours = list[list[int]]

NAME = "vehicle_routing_75"
IS_MAXIMISED = False  # `verify` returns a length: shorter is better.
NUM_CUSTOMERS = 75
CAPACITY = 60  # Parcels per vehicle.
SIDE = 1000  # Side of the square with all places; the unit of length is 1.


def _instance() -> tuple[list[tuple[int, int]], list[int], list[list[int]]]:
  """Returns places, parcels and distances; index 0 is the depot, in the centre."""
  draws = np.random.Generator(np.random.PCG64(2026))
  places = [(SIDE // 2, SIDE // 2)]
  places += [(int(x), int(y)) for x, y in draws.integers(0, SIDE + 1, (NUM_CUSTOMERS, 2))]
  parcels = [0] + [int(n) for n in draws.integers(1, 11, NUM_CUSTOMERS)]
  return places, parcels, [[round(math.dist(a, b)) for b in places] for a in places]


PLACES, PARCELS, DISTANCE = _instance()


def start(seed: int) -> Tours:
  """Returns greedy tours, which continue to the nearest customer that still fits.

  Seed 0 also starts with the nearest customer; other seeds start with a random one.
  """
  waiting = set(range(1, NUM_CUSTOMERS + 1))
  first = int(np.random.default_rng(seed).integers(1, NUM_CUSTOMERS + 1)) if seed else 0
  tours = []
  while waiting:
    tour, here, room = [], 0, CAPACITY
    while fitting := [c for c in waiting if PARCELS[c] <= room]:
      here = first or min(fitting, key=lambda c: (DISTANCE[here][c], c))
      first = 0
      tour.append(here)
      waiting.remove(here)
      room -= PARCELS[here]
    tours.append(tour)
  return tours


def describe(tours: Tours, value: float) -> str:
  """Returns the prompt for a model that writes programs."""
  return f"""Shorten delivery tours. A vehicle holds {CAPACITY} parcels; each tour begins and ends
at the depot (number 0). Every customer from 1 to {NUM_CUSTOMERS} is on exactly one tour, and no
vehicle may be overloaded. The artefact is a list of tours, each a list of customers in driving
order, without the depot. The total length counts; shorter is better. The distance of two places
is the Euclidean one, rounded to an integer: round(math.dist(a, b)).
Places (x, y) by number: {PLACES}
Parcels by number: {PARCELS}
The tours now, of total length {value:.0f}: {tours}
"""


def verify(tours: object) -> int | tuple[None, str]:
  """Returns the exact total length, or (None, reason) for invalid tours."""
  if not isinstance(tours, list) or not 1 <= len(tours) <= NUM_CUSTOMERS:
    return None, f"got no list of 1 to {NUM_CUSTOMERS} tours"
  seen = set()
  for tour in tours:
    if not isinstance(tour, list) or not 1 <= len(tour) <= NUM_CUSTOMERS:
      return None, "got a tour that is no list of customers, or an empty one; leave it out"
    for customer in tour:
      # In Python, True is an int; an int may also have a thousand digits.
      if type(customer) is not int or not 1 <= customer <= NUM_CUSTOMERS:
        return None, f"got a customer that is no integer from 1 to {NUM_CUSTOMERS}"
      if customer in seen:
        return None, f"got customer {customer} twice"
      seen.add(customer)
    if (load := _load(tour)) > CAPACITY:
      return None, f"got a tour with {load} parcels, expected at most {CAPACITY}"
  if len(seen) < NUM_CUSTOMERS:
    return None, f"got {len(seen)} customers, expected all {NUM_CUSTOMERS}"
  return sum(map(_length, tours))


def picture(tours: Tours):
  """Returns a matplotlib Figure of the tours."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(6, 6))
  axes = figure.add_subplot()
  for tour in tours:
    x, y = zip(*(PLACES[c] for c in (0, *tour, 0)), strict=True)
    axes.plot(x, y, marker="o", markersize=4)
  axes.plot(*PLACES[0], "ks", markersize=9)
  axes.set(title=f"{len(tours)} tours, total length {sum(map(_length, tours))}", aspect="equal")
  return figure


# Optional from here on: a reward function, and an edit language.


def reward(value: float) -> float:
  """Returns the quantity to maximise: positive, about 1, higher for shorter tours."""
  return 10_000 / (1 + value)


def _load(tour: Sequence[int]) -> int:
  return sum(PARCELS[c] for c in tour)


def _length(tour: Sequence[int]) -> int:
  return sum(DISTANCE[a][b] for a, b in zip([0, *tour], [*tour, 0], strict=True))


def _in_order(tours: Tours) -> Tours:
  """Returns the tours in canonical form, because direction and order do not matter."""
  return sorted(min(list(tour), tour[::-1]) for tour in tours)


def _reversed_best(tour: list[int]) -> list[int]:
  """Returns the shortest tour with one part reversed (2-opt), or the tour itself."""
  ends = [(i, j) for i in range(len(tour)) for j in range(i + 2, len(tour) + 1)]
  return min([tour, *(tour[:i] + tour[i:j][::-1] + tour[j:] for i, j in ends)], key=_length)


def _moved_best(first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
  """Returns the shortest pair of tours with at most one customer moved from first to second."""
  options = [(first, second)]
  for i, customer in enumerate(first):
    if _load(second) + PARCELS[customer] <= CAPACITY:
      left = first[:i] + first[i + 1 :]
      options += [(left, second[:j] + [customer] + second[j:]) for j in range(len(second) + 1)]
  return min(options, key=lambda pair: _length(pair[0]) + _length(pair[1]))


def _polished(tours: Tours) -> Tours:
  """Returns one or two tours after the best reversals and moves; at most three rounds."""
  for _ in range(3):
    before = tours
    tours = [_reversed_best(tour) for tour in tours]
    if len(tours) == 2:
      first, second = _moved_best(*tours)
      second, first = _moved_best(second, first)
      tours = [first, second]
    if tours == before:
      break
  return tours


class Edits:
  """Sentences of up to four edits with three tokens each: operation, customer a, customer b.

    MOVE     moves a behind b, on the same tour or another
    BEFORE   moves a before b
    SWAP     exchanges a and b
    TURN     on one tour: reverses the part from a to b; on two tours: exchanges the parts after a
             and after b
    ALONE    gives a its own vehicle (b is ignored)
    POLISH   applies the best reversals and moves to the tours of a and b, in at most three rounds

  An edit that would overload a vehicle, or has no effect (a is b), is skipped. A sentence that does
  not change the tours is refused; otherwise a policy learns to leave good tours unchanged.
  """

  MOVE, BEFORE, SWAP, TURN, ALONE, POLISH, STOP = range(NUM_CUSTOMERS, NUM_CUSTOMERS + 7)
  NEXT_TOUR = STOP + 1  # Used in the prompt only. Customer c is token c - 1.
  NUM_EDITS = 4

  vocab_size = (NEXT_TOUR // 8 + 1) * 8  # 88; must be divisible by 8.
  stop_token = STOP
  # The first edit is mandatory; each later one may be replaced by the end of the sentence.
  allowed = ((MOVE, STOP), (0, NUM_CUSTOMERS), (0, NUM_CUSTOMERS)) + (
    (MOVE, STOP + 1), (0, NUM_CUSTOMERS), (0, NUM_CUSTOMERS)
  ) * (NUM_EDITS - 1)  # fmt: skip

  def prompt(self, artefact: Tours) -> tuple[int, ...]:
    """Returns the customers in driving order, with a separator after each tour."""
    return tuple(token for tour in artefact for token in (*(c - 1 for c in tour), self.NEXT_TOUR))

  def apply(self, artefact: Tours, tokens: Sequence[int], seed: int) -> Tours:
    """Returns the edited tours in canonical form; does not modify the given ones."""
    words = [token for token in tokens if token != self.STOP]
    fits = [low <= token < high for token, (low, high) in zip(words, self.allowed)]
    if len(words) % 3 or not all(fits) or len(fits) < len(words):
      raise ValueError(f"got {tokens}, expected edits of three tokens each; follow `allowed`")
    before = tours = _in_order(artefact)
    for verb, a, b in zip(words[::3], words[1::3], words[2::3], strict=True):
      edited = [tour for tour in self._edit(tours, verb, a + 1, b + 1) if tour]
      if all(_load(tour) <= CAPACITY for tour in edited):
        tours = edited
    if (after := _in_order(tours)) == before:
      raise ValueError("got a sentence that leaves the tours as they were; edit something")
    return after

  def _edit(self, old: Tours, verb: int, a: int, b: int) -> Tours:
    tours = [list(tour) for tour in old]
    of_a = next(tour for tour in tours if a in tour)
    of_b = next(tour for tour in tours if b in tour)
    i, j = of_a.index(a), of_b.index(b)
    if verb == self.ALONE:
      of_a.remove(a)
      tours.append([a])
    elif verb == self.POLISH:
      tours = [tour for tour in tours if tour is not of_a and tour is not of_b]
      tours += _polished([of_a] if of_a is of_b else [of_a, of_b])
    elif a == b:
      pass
    elif verb in (self.MOVE, self.BEFORE):
      of_a.remove(a)
      of_b.insert(of_b.index(b) + (verb == self.MOVE), a)
    elif verb == self.SWAP:
      of_a[i], of_b[j] = b, a
    elif of_a is of_b:  # TURN
      i, j = min(i, j), max(i, j)
      of_a[i : j + 1] = of_a[i : j + 1][::-1]
    else:
      of_a[i + 1 :], of_b[j + 1 :] = of_b[j + 1 :], of_a[i + 1 :]
    return tours


LANGUAGE = Edits()


def main() -> bool:
  """Keeps random sentences that shorten the tours; returns whether there was one."""
  draws = np.random.default_rng(0)
  best = start(0)
  first = least = sum(map(_length, best))
  for i in range(4000):
    tokens = [int(draws.integers(low, high)) for low, high in LANGUAGE.allowed]
    if LANGUAGE.STOP in tokens:
      tokens = tokens[: tokens.index(LANGUAGE.STOP) + 1]
    try:
      tours = LANGUAGE.apply(best, tokens, i)
    except ValueError:  # The sentence changes nothing.
      continue
    value = verify(tours)
    if isinstance(value, int) and value < least:
      best, least = tours, value
  print(f"nearest customer first: {first}; after 4000 random sentences: {least}")
  print("\n".join(map(str, best)))
  return least < first


if __name__ == "__main__":
  is_better = main()
  print("better than the start:", is_better)
  sys.exit(not is_better)
