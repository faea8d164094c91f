"""Runs cases of `drawn_models` with all comparisons; as a script, repeats single cases.

    python tests/support/model_cases.py [DIRECTORY DTYPE] SEED NUMBER [SEED NUMBER ...]

prints what was drawn (for a pretrained model, if a directory is given), the events, a digest of the
completions and the digest of the numerics fingerprint.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
import functools
import hashlib
import pathlib
import sys
import tempfile
from typing import Any

import drawn_models
from drawn_models import Case, Model
from guessing import Guesser
import jax
import made_rollouts
import numpy as np
import tiny_model
import trainers

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.pool import PIN_STEPS, KVPool, KVPoolConfig
from seerjax.layer_kinds import Experts
from seerjax.models.decoder import decide
from seerjax.ops import sampling as sampling_lib
from seerjax.run import routes as routes_lib
from seerjax.speculation import suffix_drafter, suffix_tree
from seerjax.trainer import losses, packing, step
from seerjax.types import Completion, Request, Rollout

MAX_STEPS = 3000
MAX_DISTURBED = 1000
MOST_REQUESTS = 16  # Of a case; whole passes of eight sequences.
MAX_IDLE = 100  # Consecutive steps without a new token.
EVENTS = (
  "chunks",
  "paused",
  "preempted",
  "spilled",
  "came from the host",
  "came from the disk",
  "files damaged",
  "damage noticed",
  "killed",
  "resumed in the middle",
  "drafted tokens",
  "accepted tokens",
  "greedy",
  "filtered",
  "biased",
  "grammars",
  "penalised",
)
OF_DRAFTS = ("drafted tokens", "accepted tokens")
OF_WINDOWS = ("pages given back by windows", "windows that begin inside a split")


class Schedule:
  """One case from its first request to its last; `run` returns completions by request."""

  def __init__(
    self,
    case: Case,
    folder: pathlib.Path,
    events: collections.Counter[str],
    kind: type[runner_lib.Runner],
  ):
    self.case, self.folder, self.events, self.kind = case, folder, events, kind
    self.rng = case.rng(2)
    self.now = 0
    requests = self.drawn_requests()
    self.live: dict[str, Request] = {}
    self.found: dict[str, Completion] = {}
    wait = int(self.rng.integers(0, 4))
    self.todo: list[tuple[int, Request, Completion | None]] = [
      (int(self.rng.integers(0, wait + 1)) * index, request, None)
      for index, request in enumerate(requests)
    ]
    self.requests = {request.request_id: request for request in requests}
    known = case.right >= 0 and not case.suffix_paths
    self.guesser: Any = self.drafter() if known else None
    self.damaged: set[pathlib.Path] = set()
    self._begin()

  def _begin(self) -> None:
    """Starts afresh, as a new process would: only files on the disk survive."""
    case = self.case
    # A new process takes over the files that an earlier one left on the disk.
    store = DiskStore(self.folder, max_bytes=10**8) if case.has_disk else None
    self.left = {path.name for path in self._files()}
    self.pool = KVPool(KVPoolConfig(host_pages=case.host_pages), store)
    self.damaged.clear()
    if case.suffix_paths:
      args = suffix_tree.SpeculationArgs(top_k=case.suffix_paths, min_token_prob=0.01)
      self.guesser = suffix_drafter.SuffixDrafter(args, budget=None)
    self.engine = self.make_engine(drafter=self.guesser, kv_pool=self.pool)
    self._shorten_windows()

  def _shorten_windows(self) -> None:
    """Leaves few pages for layers with windows: enough for one request, or a few more."""
    windows = self.engine.memory.windows
    for pools in windows.pools:
      for kind, pool in zip(windows.kinds[1:], pools, strict=True):
        positions = kind.window + self.case.model.numerics.kv_split
        left = 1 - -positions // pool.page_size + int(self.rng.integers(4))
        pool.take(max(0, pool.num_available - left))
    self.left_in_windows = [[pool.num_available for pool in pools] for pools in windows.pools]

  def drawn_requests(self) -> list[Request]:
    """Returns the requests."""
    return drawn_models.requests_of(self.case)

  def drafter(self) -> Any:
    """Returns a drafter that is often right."""
    answers = {name: self.alone(request).tokens for name, request in self.requests.items()}
    return Guesser(answers, int(self.rng.integers(2**32)), right=self.case.right)

  def alone(self, request: Request) -> Completion:
    """Returns a request's completion alone."""
    return drawn_models.alone(self.case.model, request)

  def make_engine(self, **others: Any) -> engine_lib.Engine:
    """Returns an empty engine."""
    return drawn_models.make_engine(self.case.machine, self.kind, **others)

  def _files(self) -> list[pathlib.Path]:
    """Returns the files of the disk store, which has a folder per process."""
    return sorted(self.folder.glob("*/*.kv"), key=lambda path: path.name)

  def run(self) -> dict[str, Completion]:
    idle = 0
    for self.now in range(MAX_STEPS):
      now = self.now
      due = [entry for entry in self.todo if entry[0] <= now]
      self.todo = [entry for entry in self.todo if entry[0] > now]
      for _, request, partial in due:
        self._submit(request, partial)
      self._disturb(now)
      self._resume()
      idle = 0 if self.engine.step() else idle + 1
      if idle > MAX_IDLE:
        self._make_room()
        idle = 0
      for completion in self.engine.poll():
        self.found[completion.request_id] = completion
        del self.live[completion.request_id]
      if not self.todo and not self.live:
        self._end()
        return self.found
    raise AssertionError(f"got {len(self.live)} unfinished requests after {MAX_STEPS} steps")

  def _make_room(self) -> None:
    """Preempts one request, as a scheduler does: paused requests may hold each other's pages."""
    holding = [name for name in sorted(self.live) if self.engine.chunks.held_pages(name)]
    if holding:
      self.engine.chunks.preempt(holding[-1])
      self.events["waited for each other"] += 1

  def _submit(self, request: Request, partial: Completion | None = None) -> None:
    rng, case = self.rng, self.case
    instance = int(rng.integers(case.machine.mesh[0])) if rng.random() < 0.3 else None
    self.engine.add_request(
      request, resume_from=partial, instance=instance, chunk_tokens=case.chunk_tokens or None
    )
    self.live[request.request_id] = request
    self.events["resumed in the middle"] += partial is not None
    self.events["chunked prompts"] += (
      len(request.prompt) > case.machine.sizes.batch_size_buckets[-1]
    )

  def _happens(self, kind: str) -> bool:
    # Disturbances stop after a while; otherwise a case might make no progress.
    is_over = self.now > MAX_DISTURBED
    return kind == "resume" if is_over else self.rng.random() < self.case.rates[kind]

  def _some(self, names: list[str]) -> str:
    return names[int(self.rng.integers(len(names)))]

  def _disturb(self, now: int) -> None:
    engine = self.engine
    if self.live and self._happens("pause"):
      self.events["paused"] += 1
      engine.chunks.pause(self._some(sorted(self.live)))
    if self.live and self._happens("preempt"):
      before = engine.counters.preemptions
      engine.chunks.preempt(self._some(sorted(self.live)))
      self.events["preempted"] += engine.counters.preemptions - before
    if self.live and self._happens("cancel"):
      name = self._some(sorted(self.live))
      engine.abort_request(name)
      self.todo.append((now + int(self.rng.integers(1, 6)), self.live.pop(name), None))
      self.events["cancelled"] += 1
    if self.live and self._happens("kill"):
      self.events["killed"] += 1
      partials = {name: engine.progress(name) for name in sorted(self.live)}
      self._count()
      self._begin()
      for name, progress in partials.items():
        self._submit(self.live[name], progress if progress.tokens else None)

  def _resume(self) -> None:
    """Migrates, spills and damages paused requests, and resumes most of them."""
    engine, rng = self.engine, self.rng
    instances = self.case.machine.mesh[0]
    self.events["chunks"] += len(engine.chunks.poll_paused())
    for name in engine.chunks.poll_paused():
      if self._happens("migrate"):
        engine.chunks.migrate(name, int(rng.integers(instances)))
    if engine.chunks.poll_paused() and self._happens("spill"):
      self.events["spilled"] += len(engine.chunks.spill(engine.chunks.poll_paused()))
    files = self._files()
    if files and self._happens("damage"):
      path = files[int(rng.integers(len(files)))]
      if path not in self.damaged:
        self._damage(path)
    for name in engine.chunks.poll_paused():
      if self._happens("resume"):
        instance = int(rng.integers(instances)) if rng.random() < 0.2 else None
        engine.chunks.resume(name, chunk_tokens=self.case.chunk_tokens or None, instance=instance)

  def _damage(self, path: pathlib.Path) -> None:
    """Flips one bit of a file, cuts the file in half, or deletes it."""
    data = bytearray(path.read_bytes())
    kind = int(self.rng.integers(4))
    if not data:  # The request was paused before its first step.
      return
    if kind < 2:
      place = int(self.rng.integers(len(data)))
      data[place] ^= 1 << int(self.rng.integers(8))
      path.write_bytes(data)
    elif kind == 2:
      path.write_bytes(data[: len(data) // 2])
    else:
      path.unlink()
    self.damaged.add(path)
    self.events["files damaged"] += 1

  def _count(self) -> None:
    """Adds an engine's counters; called once per engine, when it is abandoned."""
    counters = self.engine.counters
    for event, count in (
      ("drafted tokens", counters.drafted_tokens),
      ("accepted tokens", counters.accepted_tokens),
      ("side paths", counters.side_paths),
      ("positions reused", counters.reused_tokens),
      ("pages copied", counters.page_copies),
      ("pages given back by windows", counters.passed_pages),
      ("steps", counters.steps),
      ("tokens", counters.sampled_tokens),
      ("pages migrated", self.engine.counters.migrated_pages),
      ("came from the host", self.pool.host.requests_out),
      ("came from the disk", self.pool.store.requests_out),
      ("damage noticed", self.pool.store.requests_lost),
    ):
      self.events[event] += count

  def _end(self) -> None:
    self._count()
    engine, usable = self.engine, self.case.machine.sizes.num_pages - 1
    free = [engine.chunks.free_pages(instance) for instance in range(engine.data_parallel_size)]
    assert free == [usable] * engine.data_parallel_size, f"got free pages {free}, expected {usable}"
    pools = engine.memory.windows.pools
    assert [[pool.num_available for pool in own] for own in pools] == self.left_in_windows
    assert not self.pool.num_host_pages
    for _ in range(PIN_STEPS):  # Pins that no request needs expire after this many steps.
      self.pool.advance()
    assert {path.name for path in self._files()} <= self.left, "a file was put and not removed"


def run_case(
  case: Case,
  events: collections.Counter[str],
  *,
  kind: type[runner_lib.Runner] = runner_lib.Runner,
  trains: bool = True,
  schedule_kind: Callable[..., Schedule] = Schedule,
) -> dict[str, Completion]:
  """Runs a case with all comparisons and returns completions by request.

  Args:
    case: from `drawn_models.draw`.
    events: counts what happened, and the comparisons.
    kind: kind of the engine's runner; the reference uses the library's.
    trains: whether the trainer is compared with the engine as well.
    schedule_kind: class that runs the case.

  Raises:
    AssertionError: if a bit differs, with the case in a note.
  """
  with tempfile.TemporaryDirectory() as folder:
    try:
      schedule = schedule_kind(case, pathlib.Path(folder), events, kind)
      found = schedule.run()
      differing = []
      for name, request in schedule.requests.items():
        wanted = schedule.alone(request)
        events["comparisons"] += 3 * len(wanted.tokens)
        if not tiny_model.same(found[name], wanted):
          differing.append(f"{request}: got {found[name]}, expected {wanted}")
        count_request(request, events)
        _count_windows(case.model, request, wanted, events)
      assert not differing, f"{len(differing)} of {len(found)} requests differ: {differing[0]}"
      if drawn_models.has_experts(case.model.config):
        _count_routes(case.model, schedule.requests, found, events)
      if trains:
        _compare_with_trainer(case, schedule.requests, found, events)
    except Exception as error:
      error.add_note(str(case))
      raise
  count_case(case, events)
  return found


def expected_of(cases: list[Case], expected: tuple[str, ...]) -> list[str]:
  """Returns the events that these cases must meet; steps of a few rows have no room for drafts."""
  has_room = any(case.machine.sizes.batch_size_buckets[-1] > 4 for case in cases)
  return [event for event in expected if has_room or event not in OF_DRAFTS]


def is_noticed(cases: Iterable[Case], **others: Any) -> bool:
  """Returns whether some case of the given ones differs."""
  for case in cases:
    try:
      run_case(case, collections.Counter(), trains=False, **others)
    except AssertionError as error:
      if "requests differ" not in str(error):
        raise
      return True
  return False


def count_request(request: Request, events: collections.Counter[str]) -> None:
  sampling = request.sampling
  events["requests"] += 1
  events["greedy"] += sampling.temperature == 0
  events["filtered"] += bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0
  events["biased"] += bool(sampling.logit_bias)
  events["grammars"] += bool(sampling.allowed_token_ranges)
  events["penalised"] += sampling.has_penalties


def _count_windows(
  model: Model, request: Request, completion: Completion, events: collections.Counter[str]
) -> None:
  """Counts rows of a response with a window that begins inside a split, for each window."""
  rows = range(len(request.prompt), len(request.prompt) + len(completion.tokens))
  for window in {layer.attention.window for layer in model.config.layers} - {None}:
    firsts = (row - window + 1 for row in rows)
    inside = sum(first > 0 and first % model.numerics.kv_split != 0 for first in firsts)
    events["windows that begin inside a split"] += inside


EXPERT_EVENTS = ("experts with no row", "experts with one row", "experts with all rows")


def _count_routes(
  model: Model,
  requests: dict[str, Request],
  found: dict[str, Completion],
  events: collections.Counter[str],
) -> None:
  """Counts experts by how many tokens of a request chose them, and choices between equals."""
  whole = [(*one.prompt, *found[name].tokens) for name, one in requests.items()]
  tokens = np.zeros((MOST_REQUESTS, drawn_models.MAX_TOKENS), np.int32)
  for place, one in enumerate(whole):
    tokens[place, : len(one)] = one
  ids = routes_lib.whole_routes(
    drawn_models.params_of(model), tokens, decide(model.config, model.numerics)
  )
  num_experts = next(
    layer.feed_forward.routing.num_experts
    for layer in model.config.layers
    if isinstance(layer.feed_forward, Experts)
  )
  for layer in ids:
    for place, one in enumerate(whole):
      counts = np.bincount(layer[place, : len(one)].ravel(), minlength=num_experts)
      events["experts with no row"] += int((counts == 0).sum())
      events["experts with one row"] += int((counts == 1).sum())
      events["experts with all rows"] += int((counts == len(one)).sum())
      if drawn_models.has_ties(model):
        has = [(layer[place, : len(one)] == expert).any(axis=-1) for expert in (0, 1)]
        events["choices between equals"] += int((has[0] != has[1]).sum())
        assert not (has[1] & ~has[0]).any(), "of two equal experts the lower one is chosen first"


def count_case(case: Case, events: collections.Counter[str]) -> None:
  events["cases"] += 1
  events[drawn_models.family_of(case.model.config)] += 1
  events[case.model.numerics.compute_dtype] += 1
  events["suffix drafts"] += case.suffix_paths == 1
  events["suffix trees"] += case.suffix_paths > 1
  events["adapters"] += bool(case.model.rank)
  events["odd buckets"] += sum(bucket % 2 for bucket in case.machine.sizes.batch_size_buckets)
  events["several instances"] += case.machine.mesh[0] > 1
  events["model shards"] += case.machine.mesh[1] > 1
  fewest = min(layer.attention.num_kv_heads for layer in case.model.config.layers)
  events["key heads shared by slabs"] += fewest < case.model.numerics.reduction_shards
  events["key heads shared by devices"] += fewest < case.machine.mesh[1]


@functools.lru_cache(maxsize=4)
def _trainer(model: Model) -> step.Trainer:
  mesh = parallel.make_mesh(data_parallel_size=model.train_instances)
  return trainers.make(mesh=mesh, decoder=decide(model.config, model.numerics), **_layout(model))


def _layout(model: Model) -> dict[str, int]:
  return dict(
    page_size=model.train_page_size,
    rows_per_micro_batch=model.train_rows,
    max_num_seqs=5,
    max_sequence_tokens=drawn_models.MAX_TOKENS,
  )


def _compare_with_trainer(
  case: Case,
  requests: dict[str, Request],
  found: dict[str, Completion],
  events: collections.Counter[str],
) -> None:
  """Packs groups in another order and scores them under a gradient."""
  model, rng = case.model, case.rng(3)
  groups = [
    made_rollouts.group(
      place,
      *(
        Rollout(
          request=requests[f"{group}/{member}"],
          completion=found[f"{group}/{member}"],
          verdict=made_rollouts.NOTHING,
        )
        for member in range(case.group_size)
      ),
    )
    for place, group in enumerate(rng.permutation(case.groups).tolist())
  ]
  advantages = rng.standard_normal((case.groups, case.group_size)).astype(np.float32)
  batch = packing.pack(
    groups,
    advantages,
    decoder=decide(model.config, model.numerics),
    num_biases=sampling_lib.MAX_LOGIT_BIAS,
    **_layout(model),
  )
  gradient, _, scores = _trainer(model).gradient(
    drawn_models.params_of(model), batch, losses.denominators(batch), None
  )
  mask = np.asarray(batch.loss_mask)
  for name, ours, engines in (
    ("behaviour_logprobs", scores.logprob, batch.behaviour_logprobs),
    ("raw_logprobs", scores.raw_logprob, batch.raw_logprobs),
  ):
    ours, engines = tiny_model.bits(ours[mask]), tiny_model.bits(engines[mask])
    events["comparisons"] += len(ours)
    differing = sum(a != b for a, b in zip(ours, engines, strict=True))
    assert not differing, f"trainer: {differing} of {len(ours)} {name} differ from the engine's"
  assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))
  events["micro-batches"] += len(mask)


def digest_of(case: Case, events: collections.Counter[str]) -> str:
  """Runs a case without the trainer; returns the SHA-256 of all completions."""
  found = run_case(case, events, trains=False)
  digest = hashlib.sha256()
  for name in sorted(found):
    completion = found[name]
    digest.update(repr((name, completion.tokens)).encode())
    digest.update(completion.behaviour_logprobs.tobytes() + completion.raw_logprobs.tobytes())
  return digest.hexdigest()


def main(arguments: list[str]) -> None:
  jax.config.update("jax_num_cpu_devices", 8)
  model = None
  if not arguments[0].isdigit():
    model = drawn_models.pretrained(arguments[0], arguments[1])
    arguments = arguments[2:]
  for seed, number in zip(map(int, arguments[::2]), map(int, arguments[1::2]), strict=True):
    counted: collections.Counter[str] = collections.Counter()
    one = drawn_models.draw_of(model, seed, number) if model else drawn_models.draw(seed, number)
    print(one)
    run_case(one, counted)
    print(dict(counted))
    print(digest_of(one, counted), numerics_lib.fingerprint(one.model.numerics)["digest"])


if __name__ == "__main__":
  main(sys.argv[1:])
