"""Archive of a search: states, their parents, and how often each was expanded.

An *expansion* is one group of attempts from one state. Its best new children are added:

  n(s)   expansions of s or of any of its descendants    `State.visits`
  m(s)   best value of a direct child, kept or not       `State.best_child`
  T      total expansions                                `Archive.num_expansions`

A group counts as one expansion, whatever its size and even if no attempt was valid. m is updated in
the parent only, n in all ancestors.

An archive is immutable: `record_step` returns a new one, so that it can be published together with
the weights. Ids ascend and are never reused, so a lower id is an older state. Above the capacity,
the states with the lowest values are evicted, but never the roots of growing trees. Evicted states
with living descendants are remembered, so that lineages stay complete and visits keep counting.

A search may close a stuck tree and plant another in its place (`replant`). States of closed trees
are evicted first; the best state of all stays.

  seeds   0       1        values 5 and 4
          |       |
          2       3        two expansions; then 2 is expanded: n(0) = 2, n(2) = 1, T = 3
         / \\
        4   5

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175. Counts are of
expansions, as in the paper; its code counts attempts.
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

FORMAT = "seerjax.search.archive/3"  # Identifies the format, not a module; must not change.
MAX_VALUE = 1e300  # Keeps the range of two values finite.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Child:
  """A valid result before it is added; also a seed.

  Attributes:
    artefact: JSON data; tuples become lists.
    value: HIGHER IS BETTER; negated for problems that minimise.
    reward: training reward; only stored.
    tokens: the token ids, or the text, that made it; () for a seed.
    printed: end of the output of the program that made it; "" without one.
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
          " invalid attempts out of the children; an expansion without children counts, too."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """An artefact in the archive.

  Attributes:
    state_id: unique id, never reused.
    parent: id of the state that it was made from; None for a seed.
    seed_tree: id of the seed that it descends from; its own id for a seed.
    step: step in which it was found; for a seed, the step before its tree could grow.
    value: higher is better.
    reward: reward when it was found.
    tokens: tokens or text that made it from its parent.
    text: the artefact as canonical JSON: keys sorted, no spaces, shortest exact floats.
    digest: SHA-256 of `text`, in hex; equal for equal artefacts.
    visits: n, expansions of the state or of a descendant.
    best_child: m, the best value of a direct child; None before there is one.
    printed: output of the program that made it.
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
    """The artefact as a fresh copy, which may be modified."""
    return json.loads(self.text)

  @property
  def is_seed(self) -> bool:
    return self.parent is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
  """Archive of all states; made by `start`, extended by `record_step`.

  Attributes:
    states: living states, oldest first.
    departed: evicted ancestors of living states, oldest first; never selected again.
    num_expansions: T, the number of expansions so far.
    next_id: id of the next state.
    roots: ids of the seeds of growing trees, in the order of the groups; other trees are closed.
    keep_children: most children that an expansion adds.
    capacity: most living states, seeds included.
  """

  states: tuple[State, ...]
  departed: tuple[State, ...] = ()
  num_expansions: int = 0
  next_id: int
  roots: tuple[int, ...]
  keep_children: int = 2
  capacity: int = 1000


def start(seeds: Sequence[Child], *, keep_children: int = 2, capacity: int = 1000) -> Archive:
  """Returns an archive of seeds.

  Seeds may be equal: if there is only one starting point, it is repeated once per group.

  Args:
    seeds: at least one.
    keep_children: most children that an expansion adds; 2 is published.
    capacity: most living states; 1000 is published.

  Raises:
    ValueError: if there are no seeds, `keep_children` is below 1, the seeds alone fill the archive,
      or an artefact is not JSON.
  """
  if not seeds:
    raise ValueError(
      "archive.start: got no seeds, expected at least one; call Environment.start once per group."
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

  Each expansion adds its best `keep_children` children, on ties the first in the group. Children
  equal to a living state, or to one added earlier in this step, are skipped. Eviction happens once
  at the end, so a parent cannot be evicted before its own group is recorded.

  Args:
    archive: archive before the step.
    expansions: (id of a living state, its valid children) for each group; a state may occur several
      times, and children may be empty.
    step: step of the run, stored with new states.

  Raises:
    ValueError: if a parent is not alive, or a child to be added is not JSON.
  """
  records = {state.state_id: state for state in (*archive.departed, *archive.states)}
  living = {state.state_id for state in archive.states}
  known = {state.digest for state in archive.states}
  next_id = archive.next_id
  for parent_id, children in expansions:
    if parent_id not in living or parent_id >= archive.next_id:
      raise ValueError(
        f"archive.record_step: got parent {parent_id}, expected the id of one of the"
        f" {len(archive.states)} living states; expand what `puct.select` returned for this"
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
  """Returns the archive after one expansion; `record_step` for a single group."""
  return record_step(archive, [(parent, children)], step=step)


def best(archive: Archive) -> State:
  """Returns the living state with the highest value, oldest on ties; it is never evicted."""
  return max(archive.states, key=_merit)


def leaders(archive: Archive, num: int) -> tuple[State, ...]:
  """Returns up to `num` best living states, best first, oldest first on ties."""
  return tuple(sorted(archive.states, key=_merit, reverse=True)[:num])


def _merit(state: State) -> tuple[float, int]:
  return state.value, -state.state_id


def stuck_roots(archive: Archive, step: int, *, islands: int, patience: int) -> tuple[int, ...]:
  """Returns the roots of the islands without a new best state in the last `patience` steps.

  Args:
    archive: archive after the step.
    step: the last recorded step of the run.
    islands: number of islands; root i belongs to island i modulo this.
    patience: number of steps; 0 returns no roots.
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
  """Returns the archive with one tree closed and a new seed in its place.

  Nothing is evicted: until the next step, a full archive exceeds its capacity by one.

  Raises:
    ValueError: if `root` is not the root of a growing tree, or the seed's artefact is not JSON.
  """
  if root not in archive.roots:
    raise ValueError(
      f"archive.replant: got root {root}, expected one of {archive.roots}; close the tree of one of"
      " them."
    )
  planted = _admit(seed, archive.next_id, None, step=step)
  return dataclasses.replace(
    archive,
    states=(*archive.states, planted),
    next_id=archive.next_id + 1,
    roots=tuple(planted.state_id if one == root else one for one in archive.roots),
  )


def lineage(archive: Archive, state_id: int) -> tuple[State, ...]:
  """Returns the path from a state's seed to the state, evicted ancestors included.

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
  """Returns the known states of a state's tree, oldest first.

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
  """Returns the number of seeds with living descendants; 1 means that one family took over."""
  return len({state.seed_tree for state in archive.states if not state.is_seed})


def ancestors(archive: Archive) -> dict[int, frozenset[int]]:
  """Returns, for each living state, the ids of all its ancestors, evicted ones included."""
  above: dict[int, frozenset[int]] = {}
  # Parents have lower ids than their children, so they come first.
  every = sorted((*archive.departed, *archive.states), key=lambda state: state.state_id)
  for state in every:
    above[state.state_id] = (
      frozenset() if state.parent is None else above[state.parent] | {state.parent}
    )
  return {state.state_id: above[state.state_id] for state in archive.states}


def to_json(archive: Archive) -> str:
  """Returns the archive as text; inverted exactly by `from_json`."""
  fields = dataclasses.asdict(archive)
  for record in (*fields["states"], *fields["departed"]):
    record["artefact"] = json.loads(record.pop("text"))
    del record["digest"]
  # Python writes the shortest digits that parse back to the same float.
  return json.dumps({"format": FORMAT, **fields}, allow_nan=False)


def from_json(text: str) -> Archive:
  """Parses an archive that `to_json` wrote.

  Raises:
    ValueError: if the text is not JSON, of another format, or an inconsistent archive.
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
  """Parses a state that `to_json` wrote."""
  canonical = _canonical(record.pop("artefact"))
  tokens = record.pop("tokens")
  return State(
    **record,
    tokens=tokens if isinstance(tokens, str) else tuple(tokens),
    text=canonical,
    digest=_digest(canonical),
  )


def _flaw(archive: Archive) -> str:
  """Returns a violated invariant of an archive; "" if there is none."""
  known: set[int] = set()
  for state in sorted((*archive.departed, *archive.states), key=lambda state: state.state_id):
    numbers = state.value, state.reward, state.best_child or 0.0
    # Python's JSON parser also accepts NaN and Infinity.
    if not all(-MAX_VALUE <= number <= MAX_VALUE for number in numbers):
      return f"state {state.state_id} has value, reward and best_child {numbers}"
    if state.parent is not None and state.parent not in known:
      return f"state {state.state_id} has parent {state.parent}, which does not exist"
    if state.state_id in known:
      return f"state {state.state_id} occurs twice"
    known.add(state.state_id)
  if not {*archive.roots} <= {state.state_id for state in seeds(archive)}:
    return f"roots {archive.roots} are not all living seeds"
  if max(known, default=0) >= archive.next_id:
    return f"next_id {archive.next_id} is already in use"
  return ""


def _damaged(flaw: str) -> str:
  return (
    f"archive.from_json: got a damaged archive ({flaw}), expected the output of to_json; resume"
    " from another checkpoint."
  )


def _admit(child: Child, state_id: int, parent: State | None, *, step: int) -> State:
  """Returns the state for a child."""
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
  """Returns the archive after eviction; keeps roots, the best, growing trees, then the rest."""
  roots = {*archive.roots}
  others = [i for i in living if i not in roots]
  others.sort(key=lambda i: (-records[i].value, i))
  first, rest = others[:1], others[1:]
  rest.sort(key=lambda i: records[i].seed_tree not in roots)  # Stable: keeps the order by value.
  kept = {*roots, *(first + rest)[: archive.capacity - len(roots)]}
  remembered: set[int] = set()
  for state_id in kept:
    for above in _upwards(records, state_id):
      if above in remembered:
        break  # Its ancestors are remembered, too.
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
  """Returns the canonical JSON of an artefact; raises ValueError if it is not JSON."""

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
