"""No tree of drafts changes a bit of a completion, and each tree node takes one row.

Trees of every kind (combs, expansions, best nodes, merged ones, wide at their end; right, wrong,
junk; in the long blocks also those of a suffix tree and a draft model) are verified under
preemption, cancelling, pauses, spills, migration, kills and weight updates. Models, numerics,
buckets, pages of 2 to 32 positions and meshes are drawn (`tree_cases`). Tokens and both
log-probabilities are compared by bit with the request alone, without drafts, by the program that
has a table of key copies and by the one without. Event counts are printed, and an event with count
0 is a failure.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import functools

import drawn_models
from drawn_models import MAX_TOKENS
import made_drafters
import numpy as np
import pytest
import tiny_model
import tree_cases
from tree_cases import CountedEngine
import tree_drafts as tree_lib

from seerjax.engine import runner as runner_lib
from seerjax.types import Request, SamplingParams

BLOCKS = 21  # Of twelve cases, each with two sets of weights: more than 500 per backend.
RARE = ("trees cut for pages", "trees cut for copies")  # May be missing in so few cases.
SMALL_EVENTS = tuple(event for event in tree_cases.EVENTS if event not in RARE)
NUMERICS = tiny_model.BACKENDS
ALL = pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)


def asked(name: str, prompt: Sequence[int], max_tokens: int, *, seed: int = 0) -> Request:
  sampling = SamplingParams(max_tokens=max_tokens)
  return Request(request_id=name, prompt=tuple(prompt), sampling=sampling, seed=seed)


# Everyday run: one program in addition to those of the other files.
DAILY_EVENTS = (
  "trees of three leaves",
  "shared nodes",
  "side paths",
  "copies across a page border",
  "copies across a split border",
)


def daily_engine(kind: type[CountedEngine] = CountedEngine) -> CountedEngine:
  # Single steps: visits of several would be another program.
  # Pages of whole completions, so that a draft may reach to the end.
  sizes = dataclasses.replace(tree_cases.SMALL, decode_steps_per_call=1, reserved_tokens=0)
  engine = tiny_model.make_engine(sizes, tiny_model.NATIVE, kind=kind)
  assert isinstance(engine, CountedEngine)
  engine.events = collections.Counter()
  return engine


def num_differing(
  seed: int, number: int, events: collections.Counter[str], kind: type[CountedEngine]
) -> int:
  """Runs a case's requests at once, some preempted; returns how many differ from those alone."""
  case = tree_cases.small(seed, number, tiny_model.NATIVE)
  alone = {
    one.request_id: tiny_model.answer(tiny_model.NATIVE, one)
    for one in drawn_models.requests_of(case)
  }
  engine, rng = daily_engine(kind), case.rng(5)
  tokens_of = {name: completion.tokens for name, completion in alone.items()}
  engine.drafter = tree_cases.TreeDrafter(tokens_of, 64, seed + number, 0.8)
  for one in drawn_models.requests_of(case):
    engine.add_request(one)
  while engine.num_unfinished:
    engine.step()
    live = [name for name in tokens_of if name in engine._requests.live]
    if live and rng.random() < 0.1:
      engine.chunks.preempt(live[int(rng.integers(len(live)))])
  events.update(engine.events)
  events["side paths"] += engine.counters.side_paths
  events["accepted tokens"] += engine.counters.accepted_tokens
  return sum(not tiny_model.same(one, alone[one.request_id]) for one in engine.poll())


def test_no_tree_changes_a_bit(seed, tell_events):
  events = collections.Counter()
  assert [num_differing(seed, number, events, CountedEngine) for number in range(5)] == [0] * 5
  tell_events("trees of every day", events, DAILY_EVENTS)


class CopiesNothing(CountedEngine):
  """Twin: key copies are omitted."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    return inputs._replace(
      key_copies=inputs.key_copies._replace(count=np.zeros_like(inputs.key_copies.count))
    )


def test_keys_that_are_not_copied_are_noticed(seed):
  events = collections.Counter()
  assert any(num_differing(seed, number, events, CopiesNothing) for number in range(5))


class Fixed(made_drafters.Observed):
  """Drafts one fixed tree, for the first request only."""

  def __init__(self, tree: tree_lib.Tree):
    super().__init__()
    self.tree = tree

  def draft(self, queries):
    first = min(query.request_id for query in queries)
    return [self.tree.paths() if query.request_id == first else [] for query in queries]


@pytest.mark.parametrize(
  "tree, field, held_back, num_kept",
  [
    # 40 rows: the last token and the other request take two of them.
    (tree_lib.expand((2, 3, 9)).filled([[*range(9)]] * 3), "cut_for_rows", 0, 38),
    # 160 places of the table: a sibling at depth 12 takes 12, for the last token and 11 more.
    (tree_lib.comb([*range(12)], [()] * 11 + [range(20, 60)]), "cut_for_copies", 0, 12 + 160 // 12),
    # 5 pages are left: a sibling at depth 5 takes three, for positions 3 to 8, since the first path
    # takes none.
    (tree_lib.comb([*range(5)], [()] * 4 + [range(20, 30)]), "cut_for_pages", 5, 5 + 1),
  ],
)
def test_a_tree_that_does_not_fit_loses_its_last_leaves_and_never_a_request(
  tree, field, held_back, num_kept
):
  requests = [asked(name, (1, 2, 3), 30, seed=place) for place, name in enumerate("ab")]
  engine = daily_engine()
  for one in requests:
    engine.add_request(one)
  engine.step()
  pool, held = engine.memory.pools[0], []
  if held_back:
    held = pool.take(pool.num_available - held_back)
  free = pool.num_available
  engine.drafter = Fixed(tree)
  rows = engine.counters.rows
  engine.step()
  assert engine.counters.rows - rows == 2 + num_kept
  cuts = ("cut_for_rows", "cut_for_copies", "cut_for_pages")
  assert {name: getattr(engine.counters, name) for name in cuts} == {
    name: int(name == field) for name in cuts
  }
  assert pool.num_available == free
  engine.drafter = None
  while engine.num_unfinished:
    engine.step()
  for found, one in zip(sorted(engine.poll(), key=lambda c: c.request_id), requests, strict=True):
    alone = tiny_model.answer(tiny_model.NATIVE, one)
    assert tiny_model.same(found, alone)
  for page in held:
    pool.release(page)


@pytest.mark.thorough
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", NUMERICS)
def test_no_tree_of_the_tiny_model_changes_a_bit(dtype, seed, tell_events):
  events = collections.Counter()
  for number in range(6):
    tree_cases.run_case(
      tree_cases.small(seed, number, NUMERICS[dtype]), events, changes_weights=False
    )
  tell_events(f"trees of the tiny model, {dtype}", events, SMALL_EVENTS)


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_no_tree_of_this_session_changes_a_bit(backend, seed, tell_events):
  events = collections.Counter()
  first = tree_cases.OF_A_MODEL * (BLOCKS + seed % 4)
  for number in range(first, first + 3):
    tree_cases.run_case(tree_cases.draw(seed, number, backend), events)
  # Not every machine has enough rows for a tree of three leaves.
  expected = ("drafted tokens", "weights changed", "comparisons")
  tell_events(f"trees of a fresh model, {backend}", events, expected)


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("backend", ["native", "tiled"])
def test_no_tree_of_five_hundred_schedules_changes_a_bit(block, backend, seed, tell_events):
  events = collections.Counter()
  first = tree_cases.OF_A_MODEL * block
  for number in range(first, first + tree_cases.OF_A_MODEL):
    tree_cases.run_case(tree_cases.draw(seed, number, backend), events)
  expected = ("trees of three leaves", "shared nodes", "key copies", "side paths adopted")
  expected += (f"drafted: {tree_cases.MERGED}",)
  tell_events(f"trees, block {block}, {backend}", events, expected)


class Watched(runner_lib.Runner):
  """Records what every step sampled: tokens and both log-probabilities, by sample."""

  @functools.cached_property
  def sampled(self) -> list[list[np.ndarray]]:
    return []

  def step(self, params, pages, inputs, key):
    pages, tokens, scores = super().step(params, pages, inputs, key)
    kept = (tokens, scores.logprob, scores.raw_logprob)
    self.sampled.append([np.asarray(part)[0] for part in kept])
    return pages, tokens, scores


class EveryNode(CountedEngine):
  """Records what every step scheduled, and the tokens before it."""

  def _inputs(self, scheduled):
    self.seen.append([(piece, tuple(piece.sequence.tokens)) for piece in scheduled[0]])
    return super()._inputs(scheduled)


@pytest.mark.thorough
@ALL
def test_every_node_of_a_tree_samples_what_its_path_samples_alone(numerics, seed):
  case = tree_cases.small(seed, 0, numerics)
  machine = dataclasses.replace(
    case.machine, sizes=dataclasses.replace(case.machine.sizes, decode_steps_per_call=1)
  )
  engine = drawn_models.make_engine(machine, Watched, EveryNode)
  engine.events, engine.seen = collections.Counter(), []
  runner = drawn_models.runner_of(machine, Watched)
  before = len(runner.sampled)
  engine.drafter = tree_cases.TreeDrafter({"a": (), "b": ()}, 64, seed, 0.0)
  rng = np.random.default_rng(seed)
  requests = [
    asked(name, rng.integers(0, 64, 9).tolist(), 18, seed=place) for place, name in enumerate("ab")
  ]
  engine.generate(requests)
  compared = 0
  for pieces, found in zip(engine.seen, runner.sampled[before:], strict=True):
    first = 0
    for piece, context in pieces:
      for path in piece.paths:
        for place, row in enumerate((0, *path.rows)):
          prompt, seed_of = context + path.tokens[:place], piece.sequence.request.seed
          if len(prompt) < MAX_TOKENS and compared < 300:
            alone = drawn_models.alone(case.model, asked("one", prompt, 1, seed=seed_of))
            wanted = [alone.tokens, alone.behaviour_logprobs, alone.raw_logprobs]
            got = [part[first + row] for part in found]
            assert tiny_model.bits(got) == tiny_model.bits([part[0] for part in wanted])
            compared += 1
      first += piece.num_samples
  assert compared == 300


def test_a_step_computes_the_last_token_and_every_node_once(seed):
  """A comb of 4 and depth 8 has 33 rows; with one segment per path it would have 141."""
  rng = np.random.default_rng(seed)

  class Combs(made_drafters.Observed):
    """Drafts combs of distinct tokens."""

    rows_as_paths = 0

    def draft(self, queries):
      main, *others = rng.permutation(64)[:32].reshape(4, 8).tolist()
      paths = tree_lib.comb(main, list(zip(*others, strict=True))).paths()
      most = queries[0].max_draft
      deep = [path for path in paths[1:] if len(path) <= most]
      self.rows_as_paths += sum(1 + len(path) for path in (paths[0][:most], *deep))
      return [paths]

  engine = daily_engine()
  engine.drafter = Combs()
  engine.generate([asked("a", (1, 2, 3), 30)])
  counters = engine.counters
  # In addition to the first 2 positions of the prompt, which are computed once.
  assert counters.rows == 2 + counters.steps + counters.drafted_tokens
  assert counters.rows <= 0.35 * engine.drafter.rows_as_paths
  assert counters.key_copies > 0 and not counters.cut_for_rows + counters.cut_for_copies


# Twins.


class CopiesOneSlotOff(CountedEngine):
  """Twin: a copy is written one slot too far."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    slots = inputs.key_copies.slots + (inputs.key_copies.slots > 0).astype(np.int32)
    return inputs._replace(key_copies=inputs.key_copies._replace(slots=slots))


class WritesSiblingsInARow(CountedEngine):
  """Twin: a sibling's key is written after its sibling's and not at its own position."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    for instance, row, _, _ in own_rows(scheduled):
      inputs.batch.slots[instance, row] += 1
    return inputs


class DrawsByRow(CountedEngine):
  """Twin: a sibling's noise depends on its row."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    for instance, _, sample, position in own_rows(scheduled):
      inputs.positions[instance, sample] = position
    return inputs


class KeepsRejectedKeys(CountedEngine):
  """Twin: a rejected draft's key stays in the slot of the accepted token's key."""

  rejected: frozenset[tuple[str, int]] = frozenset()

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    rejected = set()
    for instance, pieces in enumerate(scheduled):
      for piece in pieces:
        name, end = piece.sequence.request.request_id, len(piece.sequence.tokens)
        if (name, end - 1) in self.rejected and piece.count == 1:
          inputs.batch.slots[instance, piece.first_row] = 0  # Redirected to the dump page.
        main = piece.paths[0].tokens if piece.paths else ()
        rejected |= {(name, end + place) for place in range(len(main))}
    self.rejected = frozenset(rejected)
    return inputs


class AdoptsWithoutAncestors(CountedEngine):
  """Twin: a sequence adopts a path's pages without the keys that were copied to them."""

  def step(self):
    self.tried = []
    updates = super().step()
    for sequence, path, first in self.tried:
      if path.scratch[0] in sequence.pages:
        size = self.config.page_size
        positions = np.arange(first, first + len(path.copied))
        page, slot = path.page_row[positions // size], positions % size
        (keys, values), *others = self.memory.pages
        values = values.at[0, :, page, slot].set(0)
        self.memory.pages = ((keys, values), *others)
    return updates

  def _inputs(self, scheduled):
    for pieces in scheduled:
      for piece in pieces:
        end = len(piece.sequence.tokens)
        for path in piece.paths[1:]:
          first = end + path.num_shared - len(path.copied)
          self.tried.append((piece.sequence, path, first))
    return super()._inputs(scheduled)


def own_rows(scheduled):
  """Yields, for each row owned by a further path: instance, row, sample, and the position that the
  sample would have if positions followed rows."""
  for instance, pieces in enumerate(scheduled):
    sample = 0
    for piece in pieces:
      end, last = len(piece.sequence.tokens), piece.first_row + piece.count - 1
      for path in piece.paths[1:]:
        for row in path.rows[path.num_shared :]:
          yield instance, last + row, sample + row, end + row
      sample += piece.num_samples


@pytest.mark.thorough
@pytest.mark.parametrize(
  "broken",
  [
    CopiesNothing,
    CopiesOneSlotOff,
    WritesSiblingsInARow,
    DrawsByRow,
    KeepsRejectedKeys,
    AdoptsWithoutAncestors,
  ],
)
@pytest.mark.parametrize("dtype", ["f32", "native f32"])
def test_a_tree_that_is_computed_otherwise_is_noticed(broken, dtype, seed):
  def run() -> None:
    for number in range(12):
      case = tree_cases.small(seed, number, NUMERICS[dtype])
      tree_cases.run_case(case, collections.Counter(), engine=broken, changes_weights=False)

  with pytest.raises(AssertionError, match="requests differ"):
    run()
