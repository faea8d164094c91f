"""Cases with tree-shaped drafts: random draws, a drafter of every kind of tree, and the counts.

A case is a case of `drawn_models` with enough rows and pages for trees, pages of 2 to 32 positions
and up to two instances of two devices. It runs the schedule of `model_cases`, and then repeats all
requests with other weights.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

from drafting_models import DrawnSources
import drawn_models
from drawn_models import MAX_TOKENS, Case, Machine, Model
from made_drafters import Observed
import model_cases
import numpy as np
from seen_inputs import SeesInputs
import tiny_model
import tree_drafts as tree_lib

from seerjax import numerics as numerics_lib
from seerjax.engine import runner as runner_lib
from seerjax.engine.drafting import DraftQuery
from seerjax.engine.engine import EngineConfig
from seerjax.models import loading
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import DraftProgram, decoder_of
from seerjax.speculation.history import History
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Completion

MESHES = ((1, 1), (2, 1), (1, 2), (2, 2))  # (instances, model shards)
# Settings of the tiny model: splits of four pages, and pages for trees of any shape.
SMALL = EngineConfig(
  page_size=4, num_pages=241, max_num_seqs=3, max_model_len=MAX_TOKENS, batch_size_buckets=(40,)
)
OF_A_MODEL = drawn_models.OF_A_MODEL  # Cases that share a model, its reference and its machine.
MERGED_FROM = 9  # Cases of a model from this one on draft by a suffix tree and a draft model.
MERGED = "suffix tree and model"
DRAFT = DraftModelConfig(width=3, num_slots=3, batch_size_buckets=(24,))
KINDS = (
  "comb",
  "expanded",
  "best",
  "merged",
  "wide at its end",
  "junk",
  "always wrong",
  "right, then wrong",
  "one path",
  "no ids",
)
EVENTS = (
  "trees of three leaves",
  "shared nodes",
  "copies across a page border",
  "copies across a split border",
  "copies of settled positions",
  "side paths adopted",
  "trees cut for pages",
  "trees cut for rows",
  "trees cut for copies",
  "accepted tokens",
)


def small(seed: int, number: int, numerics: numerics_lib.NumericsConfig) -> Case:
  """Returns a case of the tiny model on one small machine, so that many cases share programs."""
  model = Model(
    config=tiny_model.CONFIG,
    numerics=numerics,
    weights_seed=1,
    deviation=0.25,
    rank=0,
    alpha=1.0,
    targets=(),
    train_rows=64,
    train_page_size=8,
    train_instances=1,
  )
  case = drawn_models.draw(seed, number)
  machine = Machine(model=model, sizes=SMALL, mesh=(1, 1))
  return dataclasses.replace(case, machine=machine, right=0.8, chunk_tokens=(0, 9)[number % 2])


def draw(seed: int, number: int, backend: str) -> Case:
  """Returns the case of a number; `OF_A_MODEL` numbers from a multiple of it on share programs."""
  block = number // OF_A_MODEL
  rng = np.random.default_rng((seed, block, 77))
  # Slabs for the mesh: a model of one slab runs on one device.
  shards_wanted = MESHES[block % 4][1]
  model = _drawn_model(rng, shards_wanted, backend)
  machine = _drawn_machine(rng, model, (MESHES[block % 4][0], shards_wanted))
  case = drawn_models.draw(seed, number)
  return dataclasses.replace(
    case,
    machine=machine,
    right=float(rng.choice([0.6, 0.8, 0.95])),
    has_disk=number % 3 == 0,
    chunk_tokens=int(rng.choice([0, 0, 4, 9])),
  )


def _drawn_model(rng: np.random.Generator, shards: int, backend: str) -> Model:
  while True:
    model = drawn_models.draw_model(rng)
    if model.numerics.reduction_shards % shards == 0:
      break
  numerics = dataclasses.replace(
    model.numerics,
    kv_split=int(rng.choice([4, 8, 16, 16, 32])),
    backend=backend,
  )
  # Scanned layers, now and then.
  layers = 9 if rng.random() < 0.2 else model.config.num_layers
  config = model.config.changed(num_layers=layers)
  return dataclasses.replace(model, config=config, numerics=numerics)


def _drawn_machine(rng: np.random.Generator, model: Model, mesh: tuple[int, int]) -> Machine:
  split = model.numerics.kv_split
  page_size = int(rng.choice([size for size in (2, 4, 8, 16, 32) if size <= split]))
  last = int(rng.integers(14, 65))
  buckets = (last,) if rng.random() < 0.7 else (int(rng.integers(3, last)), last)
  of_a_request = -(-MAX_TOKENS // page_size)
  return Machine(
    model=model,
    sizes=EngineConfig(
      page_size=page_size,
      # Few pages: a path's own pages do not fit. Many: whole trees fit.
      num_pages=1 + int(of_a_request * rng.choice([1.3, 2.5, 12.0])),
      max_num_seqs=int(rng.integers(1, 5)),
      max_model_len=int(rng.choice([MAX_TOKENS, MAX_TOKENS, 80])),
      batch_size_buckets=buckets,
      enable_prefix_caching=bool(rng.random() < 0.8),
    ),
    mesh=mesh,
  )


class TreeDrafter(Observed):
  """Drafts trees of varying kinds around the request's true completion.

  The right token is at any place among its siblings, so that side paths win, and is sometimes
  missing. Depends on the seed and the queries only.

  Attributes:
    kinds: how often each kind was drafted.
  """

  def __init__(
    self, answers: Mapping[str, Sequence[int]], vocab_size: int, seed: int, right: float
  ):
    super().__init__()
    self.answers, self.vocab_size, self.right = answers, vocab_size, right
    self.kinds: collections.Counter[str] = collections.Counter()
    self._rng = np.random.default_rng(seed)

  def draft(self, queries: Sequence[DraftQuery]) -> list[list[tuple[int, ...]]]:
    return [self._paths(query) for query in queries]

  def finish(self, request_id, group_id, tokens, num_prompt) -> None:
    """Ignored: requests repeat under other weights, and killed ones never end."""

  def _paths(self, query: DraftQuery) -> list[tuple[int, ...]]:
    rng = self._rng
    num_sampled = len(query.tokens) - query.num_prompt
    rest = list(self.answers[query.request_id][num_sampled:])
    kind = str(rng.choice(KINDS))
    self.kinds[kind] += 1
    drawn = lambda: self._drawn(kind, rest)
    if kind == "merged":
      return tree_lib.merge([self._drawn(str(rng.choice(KINDS[:3])), rest) for _ in "ab"]).paths()
    paths = drawn().paths()
    if kind == "no ids" and paths:
      place = int(rng.integers(len(paths)))
      at = int(rng.integers(len(paths[place])))
      bad = (-1, self.vocab_size, 2**31 - 1)[int(rng.integers(3))]
      paths[place] = (*paths[place][:at], bad, *paths[place][at + 1 :])
    return paths

  def _drawn(self, kind: str, rest: list[int]) -> tree_lib.Tree:
    rng = self._rng
    depth = int(rng.integers(1, 10))
    if kind == "wide at its end":
      depth = min(int(rng.integers(6, 16)), max(len(rest) - 1, 1))
      widths = [0] * (depth - 1) + [int(rng.integers(12, 40))]
    elif kind in ("one path", "right, then wrong"):
      widths = [0] * depth
    else:
      widths = rng.integers(0, 4, depth).tolist()
    depth = len(widths)
    table = [self._candidates(kind, rest, place, 1 + width) for place, width in enumerate(widths)]
    if kind == "expanded":
      few = [min(1 + width, 3) for width in widths[:4]]
      candidates = [row[: max(few)] + [row[0]] * (max(few) - len(row)) for row in table[:4]]
      return tree_lib.expand(few).filled(np.asarray(candidates, np.int32))
    if kind == "best":
      most = max(map(len, table))
      scores = np.log(rng.dirichlet(np.ones(most), depth))
      candidates = [row + [row[0]] * (most - len(row)) for row in table]
      shape = tree_lib.best_first(scores, int(rng.integers(1, 24)))
      return shape.filled(np.asarray(candidates, np.int32))
    return tree_lib.comb([row[0] for row in table], [row[1:] for row in table])

  def _candidates(self, kind: str, rest: list[int], place: int, count: int) -> list[int]:
    """Returns ids that may be at a place, with the right one at any index or missing."""
    rng = self._rng
    found = rng.integers(0, self.vocab_size, count).tolist()
    if place >= len(rest) or kind == "junk":
      return found
    if kind == "always wrong":
      others = self.vocab_size - 1
      return [(rest[place] + 1 + token % others) % self.vocab_size for token in found]
    if kind == "right, then wrong":
      return [rest[place] if place < 3 else (rest[place] + 1) % self.vocab_size]
    if rng.random() < self.right:
      # Only the main path of a comb continues, so it is right more often than not.
      found[0 if rng.random() < 0.6 else int(rng.integers(count))] = rest[place]
    return found


class MergedDrafter(HybridDrafter):
  """Drafts by the group's suffix tree and a draft model of the target's shape, in drawn turns.

  Attributes:
    kinds: how often both drafted for one request.
  """

  kinds: collections.Counter[str]

  @classmethod
  def of(cls, case: Case, seed: int) -> MergedDrafter:
    one_slab = dataclasses.replace(case.model.numerics, reduction_shards=1)
    model = dataclasses.replace(case.model, numerics=one_slab, rank=0)
    context = case.machine.sizes.max_model_len
    draft = Machine(model=model, sizes=case.machine.sizes, mesh=(1, 1))
    program = draft_program_of(
      dataclasses.replace(draft, model=dataclasses.replace(model, weights_seed=0, deviation=0.0))
    )
    drafter = ModelDrafter(
      loading.Model(model.config, drawn_models.params_of(model), program.decoder.numerics),
      context=context,
      key=numerics_lib.key(11),
      config=DRAFT,
      program=program,
    )
    suffix = SuffixDrafter(history=History(), budget=None)
    merged = cls(suffix, drafter, DrawnSources(seed, max_width=DRAFT.width))
    merged.kinds = collections.Counter()
    return merged

  def _merged(self, request_id, choice, by_suffix, by_model):
    self.kinds[MERGED] += bool(by_suffix and by_model)
    return super()._merged(request_id, choice, by_suffix, by_model)


@functools.lru_cache(maxsize=2)
def draft_program_of(machine: Machine) -> DraftProgram:
  """Returns a draft model's programs, which are independent of the weights."""
  config, context = machine.model.config, machine.sizes.max_model_len
  return DraftProgram(
    decoder=decoder_of(machine.model.numerics, config, context),
    context=context,
    num_slots=DRAFT.num_slots,
    width=DRAFT.width,
    batch_size_buckets=DRAFT.batch_size_buckets,
  )


class CountedEngine(SeesInputs):
  """Counts properties of the trees, and compares rows with the distinct prefixes of paths.

  Attributes:
    events: set by the schedule.
  """

  events: collections.Counter[str]

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    size, split = self.config.page_size, self.numerics.kv_split
    for instance, pieces in enumerate(scheduled):
      rows = 0
      for piece in pieces:
        nodes = {path.tokens[:k] for path in piece.paths for k in range(1, len(path.tokens) + 1)}
        rows += piece.count + len(nodes)
        self.events["drafted trees"] += bool(piece.paths)
        self.events["trees of three leaves"] += len(piece.paths) >= 3
        self.events["shared nodes"] += sum(path.num_shared for path in piece.paths)
        for path in piece.paths[1:]:
          last = len(piece.sequence.tokens) - 1 + path.num_shared
          first = last - len(path.copied) + 1
          self.events["copies across a page border"] += first // size != last // size
          self.events["copies across a split border"] += first // split != last // split
          self.events["copies of settled positions"] += path.copied[0] < 0
      assert int(inputs.batch.num_rows[instance]) == rows, "a node is computed more than once"
      if inputs.key_copies is not None:
        num_copies = sum(piece.num_copies for piece in pieces)
        assert int(inputs.key_copies.count[instance]) == num_copies
    return inputs


class Schedule(model_cases.Schedule):
  """One case with trees as drafts; `again` repeats all requests with other weights."""

  def __init__(
    self,
    case: Case,
    folder: pathlib.Path,
    events: collections.Counter[str],
    kind: type[runner_lib.Runner],
    engine: type[CountedEngine],
  ):
    self.engine_kind = engine
    self.policy_version = 0
    super().__init__(case, folder, events, kind)

  def drafter(self) -> TreeDrafter | MergedDrafter:
    if self.case.number % OF_A_MODEL >= MERGED_FROM:
      return MergedDrafter.of(self.case, int(self.rng.integers(2**32)))
    answers = {name: self.alone(request).tokens for name, request in self.requests.items()}
    vocab_size = self.case.model.config.vocab_size
    seed = int(self.rng.integers(2**32))
    return TreeDrafter(answers, vocab_size, seed, self.case.right)

  def make_engine(self, **others: Any) -> CountedEngine:
    engine = super().make_engine(
      engine=self.engine_kind, policy_version=self.policy_version, **others
    )
    assert isinstance(engine, CountedEngine)
    engine.events = self.events
    return engine

  def again(self) -> dict[str, Completion]:
    """Publishes other weights to the engine, repeats all requests, and returns completions."""
    model = self.case.model
    other = dataclasses.replace(model, weights_seed=model.weights_seed + 1)
    self.case = dataclasses.replace(
      self.case, machine=dataclasses.replace(self.case.machine, model=other)
    )
    self.policy_version += 1
    self.engine.update_weights(drawn_models.params_of(other), self.policy_version)
    self.events["weights changed"] += 1
    self.guesser = self.engine.drafter = self.drafter()
    counters = self.engine.counters
    for counted in (counters, counters.host, counters.store):  # Already added to the events.
      for field in dataclasses.fields(counted):
        if isinstance(getattr(counted, field.name), int):
          setattr(counted, field.name, 0)
    self.found = {}
    self.todo = [(0, request, None) for request in self.requests.values()]
    return self.run()

  def _count(self) -> None:
    super()._count()
    counters = self.engine.counters
    for event, count in (
      ("side paths adopted", counters.side_paths),
      ("key copies", counters.key_copies),
      ("trees cut for pages", counters.cut_for_pages),
      ("trees cut for rows", counters.cut_for_rows),
      ("trees cut for copies", counters.cut_for_copies),
    ):
      self.events[event] += count
    for kind in (*KINDS, MERGED):
      self.events[f"drafted: {kind}"] += self.guesser.kinds.pop(kind, 0)


def run_case(
  case: Case,
  events: collections.Counter[str],
  *,
  engine: type[CountedEngine] = CountedEngine,
  kind: type[runner_lib.Runner] = runner_lib.Runner,
  changes_weights: bool = True,
) -> None:
  """Runs a case and compares every request with its completion alone, without drafts.

  Args:
    case: from `draw` or `small`.
    events: counts what happened.
    engine: class of the engine under test.
    kind: class of the engine's runner.
    changes_weights: whether all requests repeat with other weights; completions are then also
      compared with programs that have no table of copies.

  Raises:
    AssertionError: if a bit differs, with the case in a note.
  """
  with tempfile.TemporaryDirectory() as folder:
    try:
      schedule = Schedule(case, pathlib.Path(folder), events, kind, engine)
      references = (WithoutCopies,) if changes_weights else ()
      _compare(schedule, schedule.run(), references)
      if changes_weights:
        _compare(schedule, schedule.again(), references)
    except Exception as error:
      error.add_note(str(case))
      raise
  model_cases.count_case(case, events)
  events[f"pages of {case.machine.sizes.page_size}"] += 1
  events["schedules"] += 1 + changes_weights
  events[f"instances {case.machine.mesh[0]}, model shards {case.machine.mesh[1]}"] += 1
  events["scanned layers"] += case.model.config.num_layers > 8


class WithoutCopies(runner_lib.Runner):
  """An engine with programs that have no table of key copies."""

  def step(self, params, pages, inputs, key):
    return super().step(params, pages, inputs._replace(key_copies=None), key)


def _compare(
  schedule: Schedule, found: dict[str, Completion], references: tuple[type[runner_lib.Runner], ...]
) -> None:
  differing = []
  for name, request in schedule.requests.items():
    # Each request alone, by the program with an empty table of copies and by the one without a
    # table: XLA may fuse two programs differently.
    for kind in (runner_lib.Runner, *references):
      wanted = drawn_models.alone(schedule.case.model, request, kind)
      schedule.events["comparisons"] += 3 * len(wanted.tokens)
      if not tiny_model.same(found[name], wanted):
        differing.append(f"{request}: got {found[name]}, expected {wanted} of {kind.__name__}")
    model_cases.count_request(request, schedule.events)
  assert not differing, f"{len(differing)} of {len(found)} requests differ: {differing[0]}"
