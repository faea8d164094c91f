"""Selects the states that the next groups start from: PUCT on the archive, and baselines.

  score(s) = Q(s) + c S P(s) sqrt(1 + T) / (1 + n(s))

  Q   m(s), the best value of a direct child; the state's own value while it has none
  S   highest minus lowest value of all states except seeds (of all states if there are only seeds),
      at least 1e-6
  P   (M - rank) / sum of the same, over M living states, rank 0 the best: a linear prior
  n   expansions of s or of any descendant;  T  total expansions

"puct" takes states in order of score, and skips ancestors and descendants of states already taken:
one state per lineage, though siblings and cousins may be taken together. Roots of growing trees are
never evicted, so each tree offers at least one state, and a batch is full if there are at least as
many seeds as groups; otherwise the call is refused. Groups and seeds may be divided into islands;
each island scores only its own trees, so that no family can take all groups.

The rules have no state. `select` is a pure function of (archive, num, config, seed); random draws
depend on (seed, T), and T grows with every step.

Source: Yuksekgonul et al. 2026 (TTT-Discover), https://arxiv.org/abs/2601.16175: compared with
AlphaZero, a maximum replaces the mean, ranks replace the policy, and visits count descendants. The
paper defines the range over all states; its code excludes seeds, which is the default here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math

import numpy as np

from seerjax import fields
from seerjax.array_typing import Float
from seerjax.discovery import archive as archives
from seerjax.discovery.archive import Archive, State

REUSE = ("puct", "epsilon_greedy", "greedy", "none", "sequential")
MIN_RANGE = 1e-6  # In units of the value; as published.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
  """Settings for keeping and selecting states.

  Attributes:
    reuse: "puct": the scores above, one state per lineage.
      "epsilon_greedy": like "greedy", but each group starts with probability `epsilon` from a
        uniformly drawn state.
      "greedy": the best states, one per group.
      "none": seeds only, in turn; found states are never reused.
      "sequential": all groups from the best state so far (Sequential Best-of-N).
    c: weight of exploration in PUCT; 1 is published.
    epsilon: for "epsilon_greedy"; the paper compares with 0.1; 0.2 ranked first, within noise,
      among 30 search methods (harness-generalization, 2026).
    keep_children: most children that an expansion adds, for `archive.start`.
    capacity: most living states, for `archive.start`.
    range_over_seeds: whether S includes the values of seeds.
    islands: labelled deviation from the paper, for "puct": number of independent searches; group i
      belongs to island i modulo this number. 1 is published.
    patience: labelled deviation from the paper, for "puct": steps without a better state after
      which an island's trees are closed and replaced by new ones; the policy keeps its weights. 0
      never does that, as published.
  """

  reuse: str = "puct"
  c: float = 1.0
  epsilon: float = 0.2
  keep_children: int = 2
  capacity: int = 1000
  range_over_seeds: bool = False
  islands: int = 1
  patience: int = 0

  def __post_init__(self):
    fields.check(
      self,
      reuse=fields.one_of(REUSE),
      c=fields.at_least(0, "1 is published, 0 never explores"),
      epsilon=fields.between(0, 1, "0.2 is usual"),
      keep_children=fields.at_least(1, "2 is published"),
      capacity=fields.at_least(2, "1000 is published"),
    )
    if (
      self.islands < 1
      or self.patience < 0
      or (self.reuse != "puct" and (self.islands, self.patience) != (1, 0))
    ):
      raise ValueError(
        f"SearchConfig: got islands={self.islands}, patience={self.patience} with"
        f" reuse={self.reuse!r}, expected at least 1 and 0, and exactly 1 and 0 unless reuse is"
        " 'puct', since only 'puct' has islands and restarts; set --config.search.islands=1 and"
        " --config.search.patience=0."
      )


def select(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns the ids of the states that the next `num` groups start from, one per group.

  Args:
    archive: archive with at least `num` seeds.
    num: number of groups.
    config: selects the rule by `reuse`.
    seed: seed of the run, at least 0; used only by "epsilon_greedy".

  Raises:
    ValueError: if `num < 1`, there are fewer seeds than groups, or the seed is negative.
  """
  if not 1 <= num <= len(archive.roots):
    raise ValueError(
      f"puct.select: got num={num} groups for {len(archive.roots)} seeds, expected at least 1 and"
      " no more than the seeds (each seed tree offers one lineage); start the archive with one seed"
      " for each group."
    )
  if seed < 0:
    raise ValueError(f"puct.select: got seed={seed}, expected at least 0; pass the run's seed.")
  match config.reuse:
    case "puct":
      return by_score(archive, num, config, seed)
    case "epsilon_greedy":
      return epsilon_greedy(archive, num, config, seed)
    case "greedy":
      return greedy(archive, num, config, seed)
    case "none":
      return seeds_in_turn(archive, num, config, seed)
    case _:
      return sequential(archive, num, config, seed)


def scores(
  states: Sequence[State], num_expansions: int, config: SearchConfig
) -> Float[np.ndarray, "m"]:
  """Returns the PUCT score of each state as f64[m]; `num_expansions` is T."""
  values = np.asarray([state.value for state in states], np.float64)
  exploited = np.asarray(
    [state.value if state.best_child is None else state.best_child for state in states], np.float64
  )
  visits = np.asarray([state.visits for state in states], np.float64)
  num = len(states)
  prior = np.empty(num, np.float64)
  prior[_best_first(values, values)] = np.arange(num, 0, -1) / (num * (num + 1) / 2)
  is_found = np.asarray([not state.is_seed for state in states], np.bool_)
  ranged = values[is_found] if is_found.any() and not config.range_over_seeds else values
  spread = max(float(ranged.max() - ranged.min()), MIN_RANGE)
  bonus = config.c * spread * prior * math.sqrt(1 + num_expansions)
  return exploited + bonus / (1 + visits)


def by_score(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns, for each island, the states with the highest scores, one per lineage.

  Ties are broken by value, then by age, older first.

  Raises:
    ValueError: if there are more islands than groups.
  """
  del seed
  if config.islands > num:
    raise ValueError(
      f"SearchConfig.islands: got {config.islands} for {num} groups, expected at most one per"
      " group; lower it, or raise prompts_per_step."
    )
  above = archives.ancestors(archive)
  taken = [0] * num
  for island in range(config.islands):
    roots = archive.roots[island :: config.islands]
    mine = slice(island, num, config.islands)
    taken[mine] = _of_island(archive, roots, len(taken[mine]), above, config)
  return tuple(taken)


def _of_island(
  archive: Archive,
  roots: Sequence[int],
  num: int,
  above: Mapping[int, frozenset[int]],
  config: SearchConfig,
) -> list[int]:
  """Returns `num` states of the trees with these roots, one per lineage."""
  states = [state for state in archive.states if state.seed_tree in roots]
  # The visits of a root count all expansions in its tree.
  num_expansions = sum(state.visits for state in states if state.is_seed)
  values = np.asarray([state.value for state in states], np.float64)
  taken: list[int] = []
  blocked: set[int] = set()  # Ancestors of the states taken.
  for place in _best_first(scores(states, num_expansions, config), values):
    state_id = states[place].state_id
    if state_id in blocked or not above[state_id].isdisjoint(taken):
      continue
    taken.append(state_id)
    blocked |= above[state_id]
    if len(taken) == num:
      break
  assert len(taken) == num, "every seed tree offers a state"
  return taken


def epsilon_greedy(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns the states of `greedy`, each replaced with probability epsilon by a random one."""
  random = np.random.default_rng([seed, archive.num_expansions])
  is_random = random.random(num) < config.epsilon
  anyone = random.integers(len(archive.states), size=num)
  return tuple(
    archive.states[place].state_id if explores else state_id
    for explores, place, state_id in zip(is_random, anyone, greedy(archive, num, config, seed))
  )


def greedy(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns the `num` best states, older first on ties; several may share a lineage."""
  del config, seed
  values = np.asarray([state.value for state in archive.states], np.float64)
  return tuple(archive.states[place].state_id for place in _best_first(values, values)[:num])


def seeds_in_turn(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns seeds in turn, continuing after the expansions so far."""
  del config, seed
  ids = archive.roots
  return tuple(ids[(archive.num_expansions + group) % len(ids)] for group in range(num))


def sequential(archive: Archive, num: int, config: SearchConfig, seed: int) -> tuple[int, ...]:
  """Returns the best state so far, `num` times."""
  del config, seed
  return (archives.best(archive).state_id,) * num


def _best_first(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Returns indices by descending key, then by descending value, then oldest first."""
  # A stable sort keeps the order of equal keys.
  by_value = np.argsort(-values, kind="stable")
  return by_value[np.argsort(-keys[by_value], kind="stable")]
