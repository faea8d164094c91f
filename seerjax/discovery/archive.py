"""What a search has found: states, who came from whom, and how often each was expanded.

An *expansion* is one group of attempts from one state. It admits its best new children:

  n(s)   expansions of s or of any of its descendants    `State.visits`
  m(s)   best value of a direct child, kept or not       `State.best_child`
  T      expansions in all                               `Archive.num_expansions`

Each group counts once, however many attempts it holds, and also if none of them was valid. m goes
to the parent only, n to all its ancestors.

An archive never changes: `record_step` takes one and returns the next, so that it can be
published together with the weights at once. Ids are given out in ascending order and never
again; hence a lower id is an older state. Beyond the capacity the states of the lowest values
depart, the roots of living trees never. Those that still have living descendants are remembered:
lineages stay whole, and their visits go on counting.

A search may close a tree that gives nothing any more and plant another in its place (`replant`).
What closed trees hold departs first; the best of all stays.

  seeds   0       1        values 5 and 4
          |       |
          2       3        two expansions; then 2 is expanded: n(0) = 2, n(2) = 1, T = 3
         / \\
        4   5

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175. Counts
grow by expansions, as printed there; its published code counts attempts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
from typing import Any

from seerjax import fields

# JSON: None, bool, int, float (finite), str, list and dict of these.
Artefact = Any

FORMAT = "seerjax.search.archive/3"  # A name of the format, not of a module: it stays.
MAX_VALUE = 1e300  # So that the range of two values is finite.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Child:
  """Something valid that was found, before it is admitted; a seed likewise.

  Attributes:
    artefact: JSON data; tuples become lists.
    value: HIGHER IS BETTER; of a problem that minimises, negated.
    reward: what the policy is trained with; only carried along.
    tokens: the ids, or the text, that made it; () for a seed.
    printed: the end of what the program that made it printed; "" if none did.
  """

  artefact: Artefact
  value: float
  reward: float
  tokens: tuple[int, ...] | str = ()
  printed: str = ""

  def __post_init__(self):
    fields.check(self, unbounded=("value", "reward"))
    for field, number in (("value", self.value), ("reward", self.reward)):
      if not -MAX_VALUE <= number <= MAX_VALUE:
        raise ValueError(
          f"Child.{field}: got {number}, expected a finite number up to {MAX_VALUE} in size; leave"
          " what is invalid out of the children, an expansion counts without any too."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """One artefact of the archive.

  Attributes:
    state_id: never given to another.
    parent: id of the state that it was made from; None of a seed.
    seed_tree: id of the seed that it descends from, its own if it is one.
    step: when it was found; of a seed, the step before its tree could grow.
    value: higher is better.
    reward: as found.
    tokens: that made it from its parent.
    text: the artefact as canonical JSON: keys sorted, no spaces, shortest exact floats.
    digest: SHA-256 of `text`, in hex; equal artefacts have equal ones.
    visits: n, expansions of it or of a descendant.
    best_child: m, the best value of a direct child; None before there is one.
    printed: by the program that made it.
  """

  state_id: int
  parent: int | None
  seed_tree: int
  step: int
  value: float
  reward: float
  tokens: tuple[int, ...] | str
  text: str
  digest: str
  visits: int = 0
  best_child: float | None = None
  printed: str = ""

  @property
  def artefact(self) -> Artefact:
    """The artefact, made afresh each time: changing it changes no archive."""
    return json.loads(self.text)

  @property
  def is_seed(self) -> bool:
    return self.parent is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
  """All states; made by `start`, continued by `record_step`.

  Attributes:
    states: the living ones, oldest first.
    departed: evicted ones that living ones descend from, oldest first; never selected again.
    num_expansions: T.
    next_id: of the next state.
    roots: ids of the seeds whose trees grow, in the order of the groups; others are closed.
    keep_children: most children that an expansion admits.
    capacity: most living states, seeds included.
  """

  states: tuple[State, ...]
  departed: tuple[State, ...] = ()
  num_expansions: int = 0
  next_id: int
  roots: tuple[int, ...]
  keep_children: int = 2
  capacity: int = 1000


def start(
  seeds: Sequence[Child], *, keep_children: int = 2, capacity: int = 1000
) -> Archive:
  """Returns an archive of seeds alone.

  Seeds may be equal: where there is one place to begin, there are as many copies of it as groups.

  Args:
    seeds: at least one.
    keep_children: most children that an expansion admits; 2 is published.
    capacity: most living states; 1000 is published.

  Raises:
    ValueError: if there is no seed, no child may be kept, the seeds alone fill the archive, or an
      artefact is not JSON.
  """
  if not seeds:
    raise ValueError(
      "archive.start: got no seeds, expected at least one; call Environment.start once a group."
    )
  if keep_children < 1:
    raise ValueError(
      f"archive.start: got keep_children={keep_children}, expected at least 1; 2 is published (for"
      " no reuse set SearchConfig.reuse='none')."
    )
  if capacity <= len(seeds):
    raise ValueError(
      f"archive.start: got capacity={capacity} for {len(seeds)} seeds, expected more than the"
      " seeds, which are never dropped; raise SearchConfig.capacity, 1000 is published."
    )
  states = tuple(_admit(seed, state_id, None, step=-1) for state_id, seed in enumerate(seeds))
  return Archive(
    states=states,
    next_id=len(states),
    roots=tuple(range(len(states))),
    keep_children=keep_children,
    capacity=capacity,
  )


def record_step(
  archive: Archive, expansions: Sequence[tuple[int, Sequence[Child]]], *, step: int
) -> Archive:
  """Returns the archive after the expansions of one step, in their order.

  Of each expansion the best `keep_children` enter, the first in the group among equals; passed over
  are children that are there already, living or from an earlier expansion of this step. States
  depart once at the end, so a parent cannot vanish while its own group is still to come.

  Args:
    archive: before the step.
    expansions: (id of a living state, its valid children), once for each group; a state may occur
      in several, and there may be no children.
    step: of the run, kept with the new states.

  Raises:
    ValueError: if a parent does not live, or an artefact that would enter is not JSON.
  """
  records = {state.state_id: state for state in (*archive.departed, *archive.states)}
  living = {state.state_id for state in archive.states}
  known = {state.digest for state in archive.states}
  next_id = archive.next_id
  for parent_id, children in expansions:
    if parent_id not in living or parent_id >= archive.next_id:
      raise ValueError(
        f"archive.record_step: got parent {parent_id}, expected the id of one of the"
        f" {len(archive.states)} living states; expand what `puct.select` returned for this very"
        " archive."
      )
    for state_id in _upwards(records, parent_id):
      state = records[state_id]
      records[state_id] = dataclasses.replace(state, visits=state.visits + 1)
    parent = records[parent_id]
    if children:
      found = [float(child.value) for child in children]
      best_child = max(found if parent.best_child is None else [parent.best_child, *found])
      records[parent_id] = dataclasses.replace(parent, best_child=best_child)
    num_admitted = 0
    for child in sorted(children, key=lambda child: -child.value):
      if num_admitted == archive.keep_children:
        break
      state = _admit(child, next_id, parent, step=step)
      if state.digest in known:
        continue
      records[next_id] = state
      living.add(next_id)
      known.add(state.digest)
      next_id += 1
      num_admitted += 1
  return _evicted(
    dataclasses.replace(
      archive, num_expansions=archive.num_expansions + len(expansions), next_id=next_id
    ),
    records,
    living,
  )


def record_expansion(
  archive: Archive, parent: int, children: Sequence[Child], *, step: int
) -> Archive:
  """Returns the archive after one expansion: `record_step` of a single group."""
  return record_step(archive, [(parent, children)], step=step)


def best(archive: Archive) -> State:
  """Returns the living state of the highest value, the oldest of equals; it never departs."""
  return max(archive.states, key=_merit)


def leaders(archive: Archive, num: int) -> tuple[State, ...]:
  """Returns the best living states, the best first and of equals the oldest; up to `num`."""
  return tuple(sorted(archive.states, key=_merit, reverse=True)[:num])


def _merit(state: State) -> tuple[float, int]:
  return state.value, -state.state_id


def stuck_roots(
  archive: Archive, step: int, *, islands: int, patience: int
) -> tuple[int, ...]:
  """Returns the roots of the islands that held their best before the last steps began.

  Args:
    archive: after the step.
    step: of the run, the last one that was recorded.
    islands: root i is of island i modulo their number.
    patience: steps; 0 gives none.
  """
  if patience < 1:
    return ()
  stuck = []
  for island in range(islands):
    roots = archive.roots[island::islands]
    trees = (state for state in archive.states if state.seed_tree in roots)
    _, found_in = max((state.value, -state.step) for state in trees)
    if step + found_in >= patience:
      stuck += roots
  return tuple(stuck)


def replant(archive: Archive, root: int, seed: Child, *, step: int) -> Archive:
  """Returns the archive with a tree closed, and another seed planted in its place.

  Nothing departs for it: until the next step, a full archive holds it beyond its capacity.

  Args:
    archive: after a step.
    root: of the tree.
    seed: of the new one.
    step: of the run, the last one that was recorded.

  Raises:
    ValueError: if no tree that grows has this root, or the seed's artefact is not JSON.
  """
  if root not in archive.roots:
    raise ValueError(
      f"archive.replant: got root {root}, expected one of {archive.roots}; close a tree that grows."
    )
  planted = _admit(seed, archive.next_id, None, step=step)
  return dataclasses.replace(
    archive,
    states=(*archive.states, planted),
    next_id=archive.next_id + 1,
    roots=tuple(planted.state_id if one == root else one for one in archive.roots),
  )


def lineage(archive: Archive, state_id: int) -> tuple[State, ...]:
  """Returns the way to a state: its seed first, itself last; departed ancestors are there too.

  Raises:
    ValueError: if the archive does not hold that state.
  """
  records = {state.state_id: state for state in (*archive.departed, *archive.states)}
  if state_id not in records:
    raise ValueError(
      f"archive.lineage: got state {state_id}, expected one of the {len(archive.states)} living"
      f" states or {len(archive.departed)} departed ancestors; it may have been evicted."
    )
  return tuple(records[i] for i in _upwards(records, state_id))[::-1]


def family(archive: Archive, state_id: int) -> tuple[State, ...]:
  """Returns what is known of a state's tree: all that descend from its seed, oldest first.

  Raises:
    ValueError: if the archive does not hold that state.
  """
  seed = lineage(archive, state_id)[0].state_id
  members = [state for state in (*archive.departed, *archive.states) if state.seed_tree == seed]
  return tuple(sorted(members, key=lambda state: state.state_id))


def seeds(archive: Archive) -> tuple[State, ...]:
  """Returns the living seeds, oldest first."""
  return tuple(state for state in archive.states if state.is_seed)


def num_seed_trees_alive(archive: Archive) -> int:
  """Returns how many seeds have living descendants: 1 says that all of the search is one family."""
  return len({state.seed_tree for state in archive.states if not state.is_seed})


def ancestors(archive: Archive) -> dict[int, frozenset[int]]:
  """Returns for each living state the ids of all its ancestors, departed ones included."""
  above: dict[int, frozenset[int]] = {}
  # Parents are older than their children, so they come first.
  every = sorted((*archive.departed, *archive.states), key=lambda state: state.state_id)
  for state in every:
    above[state.state_id] = (
      frozenset() if state.parent is None else above[state.parent] | {state.parent}
    )
  return {state.state_id: above[state.state_id] for state in archive.states}


def to_json(archive: Archive) -> str:
  """Returns the archive as text; `from_json` gives back an equal one, bit for bit."""
  fields = dataclasses.asdict(archive)
  for record in (*fields["states"], *fields["departed"]):
    record["artefact"] = json.loads(record.pop("text"))
    del record["digest"]
  # Python writes the shortest digits that read back as the same float.
  return json.dumps({"format": FORMAT, **fields}, allow_nan=False)


def from_json(text: str) -> Archive:
  """Returns the archive that `to_json` wrote.

  Raises:
    ValueError: if the text is no JSON, of another format, or no archive that holds together.
  """
  try:
    fields = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(_damaged(str(error))) from error
  written = fields.pop("format", None) if isinstance(fields, dict) else None
  if written != FORMAT:
    raise ValueError(
      f"archive.from_json: got format {written!r}, expected {FORMAT!r}; read it with the release"
      " that wrote it."
    )
  try:
    for name in ("states", "departed"):
      fields[name] = tuple(_read(record) for record in fields[name])
    fields["roots"] = tuple(fields["roots"])
    archive = Archive(**fields)
    flaw = _flaw(archive)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(_damaged(repr(error))) from error
  if flaw:
    raise ValueError(_damaged(flaw))
  return archive


def _read(record: dict[str, Any]) -> State:
  """Returns a state as `to_json` wrote it."""
  canonical = _canonical(record.pop("artefact"))
  tokens = record.pop("tokens")
  return State(
    **record,
    tokens=tokens if isinstance(tokens, str) else tuple(tokens),
    text=canonical,
    digest=_digest(canonical),
  )


def _flaw(archive: Archive) -> str:
  """Returns what about an archive no step could have left behind; "" if there is nothing."""
  known: set[int] = set()
  for state in sorted((*archive.departed, *archive.states), key=lambda state: state.state_id):
    numbers = state.value, state.reward, state.best_child or 0.0
    # Python's JSON also reads NaN and Infinity.
    if not all(-MAX_VALUE <= number <= MAX_VALUE for number in numbers):
      return f"state {state.state_id} has value, reward and best_child {numbers}"
    if state.parent is not None and state.parent not in known:
      return f"state {state.state_id} has parent {state.parent}, which is not there"
    if state.state_id in known:
      return f"state {state.state_id} is there twice"
    known.add(state.state_id)
  if not {*archive.roots} <= {state.state_id for state in seeds(archive)}:
    return f"roots {archive.roots} are not all living seeds"
  if max(known, default=0) >= archive.next_id:
    return f"next_id {archive.next_id} was given already"
  return ""


def _damaged(flaw: str) -> str:
  return (
    f"archive.from_json: got a damaged archive ({flaw}), expected what to_json wrote; resume from"
    " another checkpoint."
  )


def _admit(child: Child, state_id: int, parent: State | None, *, step: int) -> State:
  """Returns the state that a child becomes."""
  canonical = _canonical(child.artefact)
  tokens = child.tokens
  return State(
    state_id=state_id,
    parent=None if parent is None else parent.state_id,
    seed_tree=state_id if parent is None else parent.seed_tree,
    step=step,
    value=float(child.value),
    reward=float(child.reward),
    tokens=tokens if isinstance(tokens, str) else tuple(int(token) for token in tokens),
    text=canonical,
    digest=_digest(canonical),
    printed=child.printed,
  )


def _evicted(archive: Archive, records: Mapping[int, State], living: set[int]) -> Archive:
  """Returns the archive with its states chosen anew: roots, the best, trees that grow, the rest."""
  roots = {*archive.roots}
  others = [i for i in living if i not in roots]
  others.sort(key=lambda i: (-records[i].value, i))
  first, rest = others[:1], others[1:]
  rest.sort(key=lambda i: records[i].seed_tree not in roots)  # Stable: by value in both parts.
  kept = {*roots, *(first + rest)[: archive.capacity - len(roots)]}
  remembered: set[int] = set()
  for state_id in kept:
    for above in _upwards(records, state_id):
      if above in remembered:
        break  # And so is everything above it.
      remembered.add(above)
  return dataclasses.replace(
    archive,
    states=tuple(records[i] for i in sorted(kept)),
    departed=tuple(records[i] for i in sorted(remembered - kept)),
  )


def _upwards(records: Mapping[int, State], state_id: int) -> Iterator[int]:
  """Yields the ids from a state up to its seed, both included."""
  above: int | None = state_id
  while above is not None:
    yield above
    above = records[above].parent


def _digest(canonical: str) -> str:
  return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _canonical(artefact: Artefact) -> str:
  """Returns an artefact as the one text that all equal ones have, or refuses what is not JSON."""

  def check(value: Any, place: str) -> None:
    if isinstance(value, dict):
      for key, inner in value.items():
        if not isinstance(key, str):
          refuse(f"the key {key!r}", place)
        check(inner, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
      for index, inner in enumerate(value):
        check(inner, f"{place}[{index}]")
    elif isinstance(value, float):
      if not math.isfinite(value):
        refuse(str(value), place)
    elif not (value is None or isinstance(value, bool | int | str)):
      refuse(type(value).__name__, place)

  def refuse(got: str, place: str) -> None:
    raise ValueError(
      f"{place}: got {got}, expected JSON (None, bool, int, finite float, str, lists and dicts with"
      " string keys); convert arrays with .tolist()."
    )

  check(artefact, "artefact")
  return json.dumps(artefact, sort_keys=True, separators=(",", ":"))
