"""Rollouts on several workers give one engine's completions when workers die, halt or join."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import pickle
import re

import cluster_cases
from cluster_cases import Case, Halting, Mortal, alone, asked, assert_alone, make_engine, on_store
import pytest
import tiny_model

from seerjax.cluster import records
from seerjax.cluster.driver import ClusterRollout
from seerjax.cluster.local_workers import LocalWorkers
from seerjax.cluster.worker import EngineWorker
from seerjax.numerics import NumericsConfig
from seerjax.rollout.buffer import State
from seerjax.rollout.journal import Journal
from seerjax.rollout.policies import ByRoom, Divided, GroupFCFS
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Request

KINDS = (
  "to die before its orders", "to die in a chunk", "to die with its answer", "to halt", "strangers",
  "joined", "refused", "lost", "ended", "again", "late", "moved",
  "of 1 workers", "of 2 workers", "of 3 workers", "exported", "adopted",
)  # fmt: skip
NATIVE = tiny_model.NATIVE


def fuzz(
  numerics: NumericsConfig,
  seeds: range,
  kind: type[Case] = Case,
  directory: pathlib.Path | None = None,
) -> collections.Counter[str]:
  """Runs drawn cases, every other one with a store if there is a directory for them."""
  events: collections.Counter[str] = collections.Counter()
  for seed in seeds:
    case = kind(seed, numerics, directory=directory if seed % 2 else None)
    try:
      case.run()
    except BaseException as error:
      error.add_note(f"{kind.__name__} of seed {seed} under {numerics.backend}")
      raise
    events += case.events
  print(dict(sorted(events.items())))
  return events


def workers_of(*workers: Mortal | EngineWorker) -> LocalWorkers:
  return LocalWorkers(workers)


def made(name: str = "w", **others) -> EngineWorker:
  return EngineWorker(make_engine(NATIVE, **others), name=name)


def doomed(num_calls: int, steps: int = 10**6) -> Mortal:
  worker = Mortal(make_engine(NATIVE), name="doomed")
  worker.dies_at = num_calls, steps
  return worker


def test_one_two_and_three_workers_say_what_one_engine_says(tmp_path):
  events = fuzz(NATIVE, range(12), directory=tmp_path)
  assert all(events[kind] for kind in KINDS), [kind for kind in KINDS if not events[kind]]


@pytest.mark.thorough
def test_so_do_tiled_workers():
  assert fuzz(tiny_model.NUMERICS, range(20, 24))["lost"]


@pytest.mark.long
@pytest.mark.parametrize("numerics", [tiny_model.NUMERICS, NATIVE], ids=["tiled", "native"])
def test_many_drawn_clusters(numerics, tmp_path):
  events = fuzz(numerics, range(100, 300), directory=tmp_path)
  assert all(events[kind] for kind in KINDS), [kind for kind in KINDS if not events[kind]]


def test_pages_of_a_worker_that_died_are_taken_from_the_store(tmp_path):
  def worker(kind: type[EngineWorker], name: str) -> EngineWorker:
    return kind(make_engine(NATIVE, kv_pool=on_store(tmp_path)), name=name)

  dying, other = worker(Mortal, "dying"), worker(EngineWorker, "other")
  dying.dies_at = 3, -1
  rollout = ClusterRollout(workers_of(dying, other), Divided(chunk_tokens=4))
  assert_alone(run(rollout, asked()))
  counters = other.engine.counters
  assert rollout.counts["moved"] > 0 and counters.imports.adopted > 0
  assert other.report().counters["imports.adopted"] == counters.imports.adopted
  # No received token was computed again.
  assert counters.imports.gone == counters.imports.stale == counters.imports.damaged == 0


def test_pages_of_requests_that_are_over_are_in_no_store_and_one_worker_exports_none(tmp_path):
  def workers(count: int) -> list[EngineWorker]:
    pools = [on_store(tmp_path / str(count)) for _ in range(count)]
    return [EngineWorker(make_engine(NATIVE, kv_pool=pool)) for pool in pools]

  def after(rollout: ClusterRollout) -> int:
    for completion in rollout.run(asked()):
      found[completion.request_id] = completion
      most.append(len([*tmp_path.glob("*/*/*.kv")]))
      live = sum(item.state is not State.FINISHED for item in rollout.buffer)
      assert most[-1] <= live + 3  # Pages of just finished requests are freed with the next orders.
    return len([*tmp_path.glob("*/*/*.kv")])

  found, most = {}, []
  two = ClusterRollout(workers_of(*workers(2)), Divided(chunk_tokens=4, routing=ByRoom()))
  left = after(two)
  assert two.counts["moved"] > 0 and max(most) > 0 and left <= 1
  assert_alone(found)
  alone, found, most = workers(1), {}, []
  after(ClusterRollout(workers_of(*alone), Divided(chunk_tokens=4)))
  assert_alone(found)
  assert alone[0].engine.counters.imports.exported == 0


# Twins that must fail: each makes a mistake that one of the rules prevents.


class Believing(ClusterRollout):
  """Accepts a late result as that of the current chunk."""

  def _take(self, event):
    if isinstance(event, records.Answered) and event.worker not in self._members:
      for result in event.results:
        running = self._running.get(result.completion.request_id)
        if running is not None:
          self._end(running.worker, dataclasses.replace(result, chunk=running.chunk))
      event = dataclasses.replace(event, results=())
    super()._take(event)


class Welcoming(Case):
  """Accepts workers with other weights."""

  def run(self, journal=None):
    kept = dict(records.SHARED)
    records.SHARED.pop("weights")
    try:
      return super().run(journal)
    finally:
      records.SHARED.clear()
      records.SHARED.update(kept)


def test_a_twin_that_takes_other_weights_says_other_things():
  with pytest.raises((AssertionError, ValueError)):
    fuzz(NATIVE, range(12), Welcoming)


@pytest.mark.thorough
def test_a_twin_that_takes_late_results_goes_back():
  def runs(kind: type[ClusterRollout]) -> None:
    for late in range(1, 60, 3):
      assert_alone(run(kind(halting(late), Divided(chunk_tokens=3)), asked()))

  runs(ClusterRollout)
  with pytest.raises(ValueError, match=r"buffer: got \d+ generated tokens|all its tokens"):
    runs(Believing)


class Forgetful(EngineWorker):
  """Resumes from the local state, although the request has continued elsewhere."""

  def _stands_at(self, request_id, start):
    return request_id in self.engine.chunks.poll_paused()


@pytest.mark.parametrize("kind", [EngineWorker, Forgetful])
def test_a_request_that_comes_back_goes_on_where_it_has_come_elsewhere(kind):
  request = next(one for one in asked() if one.sampling.max_tokens > 12)
  here, there = kind(make_engine(NATIVE)), made()
  so_far = None
  for chunk, worker in enumerate((here, there, here)):
    order = records.ChunkOrder(chunk=chunk, request=request, resume_from=so_far, max_tokens=4)
    [result] = worker.run([order])
    so_far = result.completion
  wanted = alone(NATIVE, 7)[request.request_id]
  assert so_far is not None and so_far.tokens == wanted.tokens[: len(so_far.tokens)]
  assert (len(so_far.tokens) == 12) == (kind is EngineWorker)


# Events of a rollout, one by one.


def halting(late: int = 6) -> Halting:
  workers = Halting([made("slow"), made("quick")])
  workers.halts[0] = 0, late
  return workers


def run(rollout: ClusterRollout, requests: list[Request]) -> dict:
  return {one.request_id: one for one in rollout.run(requests)}


def test_a_late_answer_is_dropped_by_its_chunk_number():
  rollout = ClusterRollout(halting(), Divided(chunk_tokens=4))
  assert_alone(run(rollout, asked()))
  assert rollout.counts["late"] > 0 and rollout.counts["lost"] == 1
  assert rollout.counts["joined"] == 3  # The slow worker rejoined.


class Prompt(LocalWorkers):
  """Has its responses, even the last, before the driver blocks."""

  def events(self, *, blocks):
    return super().events(blocks=True)


def test_a_rollout_whose_last_answer_is_not_waited_for_ends():
  workers = Prompt([made(), made()])
  assert_alone(run(ClusterRollout(workers, Divided(chunk_tokens=4)), asked()))


def test_chunks_of_a_dead_worker_run_again_and_the_journal_has_the_order(tmp_path):
  with Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}) as journal:
    rollout = ClusterRollout(workers_of(doomed(2), made()), Divided(chunk_tokens=4), journal)
    assert_alone(run(rollout, asked()))
    events = list(journal.events())
  assert [event["event"] for event in events[:2]] == ["joined", "joined"]
  again = {(event["request"], event["chunk"]) for event in events if event["event"] == "again"}
  ended = [event["chunk"] for event in events if event["event"] == "ended"]
  assert again and len(set(ended)) == len(ended) and not {chunk for _, chunk in again} & {*ended}
  [lost] = [event for event in events if event["event"] == "lost"]
  assert lost == {"event": "lost", "worker": 0, "why": "OSError: killed with its answer"}
  # One bar per chunk, including chunks lost without a token.
  spans = rollout.trace.spans
  assert len(spans) == len(ended) + len(again)
  assert sum(span.num_tokens == 0 for span in spans) == len(again)


def test_a_rollout_whose_workers_all_die_resumes_from_its_journal_on_others(tmp_path):
  def book() -> Journal:
    return Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={})

  found = {}

  def until_all_are_dead(journal: Journal) -> None:
    rollout = ClusterRollout(workers_of(doomed(4), doomed(5)), Divided(chunk_tokens=4), journal)
    found.update((completion.request_id, completion) for completion in rollout.run(asked()))

  expected = r"got no worker, expected at least one \(0 of 2 in this process are left\); start"
  with book() as journal, pytest.raises(ConnectionError, match=expected):
    until_all_are_dead(journal)
  left = [request for request in asked() if request.request_id not in found]
  with book() as journal:
    rollout = ClusterRollout(workers_of(made()), Divided(chunk_tokens=7), journal)
    num_chunks = sum(len(journal.chunks(*map(int, one.request_id.split("/")))) for one in left)
    found |= run(rollout, left)
  assert num_chunks > 0
  assert_alone(found)


def test_a_rollout_that_is_stopped_goes_on_elsewhere():
  workers = workers_of(made(), made())
  rollout, found = ClusterRollout(workers, Divided(chunk_tokens=4)), {}
  for completion in rollout.run(asked()):
    found[completion.request_id] = completion
    if len(found) == 2:
      break
  finished, partials = rollout.stop()
  found |= {one.request_id: one for one in finished}
  assert partials and not partials.keys() & found.keys()
  assert all(worker.engine.num_unfinished == 0 for worker in workers._workers.values())
  left = [request for request in asked() if request.request_id not in found]
  # The same workers, again.
  found |= run(ClusterRollout(workers, Divided(chunk_tokens=4), resume_from=partials), left)
  assert_alone(found)


@pytest.mark.parametrize(
  "others, expected",
  [
    (dict(weights_seed=1), r"weights: got '\w+', expected '\w+'; load the weights"),
    (
      dict(numerics=tiny_model.NUMERICS),
      r"fingerprint: got .*'backend': 'tiled.*expected .*'backend': 'native",
    ),
    (dict(policy_version=3), "policy_version: got 3, expected 0; load the weights"),
  ],
)
def test_what_differs_is_not_taken_and_the_rollout_goes_on(others, expected, caplog):
  others = {"numerics": NATIVE} | others
  stranger = EngineWorker(make_engine(others.pop("numerics"), **others), name="stranger")
  rollout = ClusterRollout(workers_of(made(), stranger), Divided(chunk_tokens=8))
  assert_alone(run(rollout, asked()))
  assert rollout.counts["refused"] == 1
  assert [message for message in caplog.messages if "worker 1 (stranger) is rejected" in message]
  found = records.difference(made().report(), stranger.report())
  assert re.search(expected, found), found


def test_a_bad_request_is_refused_before_anything_runs():
  bad = Request(request_id="bad", prompt=())
  workers = workers_of(made())
  with pytest.raises(ValueError, match=r"request 'bad': got an empty prompt"):
    run(ClusterRollout(workers, Divided()), [*asked(), bad])
  assert workers._workers[0].engine.counters.steps == 0


def test_a_busy_engine_is_refused():
  engine = make_engine(NATIVE)
  engine.add_request(asked()[0])
  with pytest.raises(ValueError, match=r"EngineWorker: got an engine with 1 unfinished requests"):
    EngineWorker(engine)


def test_whole_requests_are_refused():
  with pytest.raises(ValueError, match=r"policy: got GroupFCFS, expected a policy that runs"):
    ClusterRollout(workers_of(), GroupFCFS())


def test_records_hold_no_array_of_jax_and_may_be_sent():
  worker = made()
  report = worker.join()
  order = records.ChunkOrder(chunk=1, request=asked()[0], resume_from=None, max_tokens=3)
  [result] = worker.run([order])
  for record in (order, result, report):
    again = pickle.loads(pickle.dumps(record))
    assert type(again) is type(record)
  assert result.chunk == 1 and len(result.completion.tokens) == 3
  texts = [pickle.dumps(record) for record in (order, result)]
  assert not any(name in text for text in texts for name in (b"jaxlib", b"jax._src"))
  assert cluster_cases.alone(NATIVE, 7)[order.request.request_id].tokens[:3] == (
    result.completion.tokens
  )


# Drafts.


def drafting(kind: type[EngineWorker] = EngineWorker, name: str = "w") -> EngineWorker:
  return kind(make_engine(NATIVE, drafter=SuffixDrafter(budget=None)), name=name)


class Deaf(EngineWorker):
  """Drops every other text of siblings."""

  def run(self, orders, forget=()):
    texts = lambda order: order.texts if order.chunk % 2 else ()
    orders = [dataclasses.replace(order, texts=texts(order)) for order in orders]
    return super().run(orders, forget)


@pytest.mark.parametrize("kind", [EngineWorker, Deaf])
def test_workers_draft_from_texts_of_siblings_elsewhere_and_lost_ones_cost_no_bit(kind):
  workers = [drafting(kind, f"w{number}") for number in range(3)]
  rollout = ClusterRollout(workers_of(*workers), Divided(chunk_tokens=4))
  requests = [
    dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, temperature=0.0))
    for one in asked(num_groups=2, members=6)  # More than one worker runs at once.
  ]
  found = run(rollout, requests)
  wanted = {one.request_id: one for one in make_engine(NATIVE).generate(requests)}
  assert all(found[name].has_bits_of(wanted[name]) for name in wanted)
  assert rollout.counts["sent"] > 0 and not rollout._texts  # Dropped with their groups.
  assert not any(member.known for member in rollout._members.values())
  assert all(worker.engine.drafter is not None for worker in workers)  # None of them failed.
  for kind in ("drafted", "accepted"):
    counted = [getattr(worker.engine.counters, f"{kind}_tokens") for worker in workers]
    assert rollout.counts[kind] == sum(counted) > 0


def test_it_says_how_many_workers_are_up_and_what_they_do():
  rollout = ClusterRollout(workers_of(made("a"), doomed(2), made("c")), Divided(chunk_tokens=4))
  assert rollout.text(3) == "0 of 3 workers up"
  lines = []
  for completion in rollout.run(asked()):
    lines.append(rollout.text(3))
    assert completion.tokens
  assert re.fullmatch(
    r"3 of 3 workers up(, \d \((a|doomed|c)\) (runs \d+ chunks|waits)){3}", lines[0]
  ) or lines[0].endswith(", 1 lost so far"), lines[0]
  assert lines[-1].startswith("2 of 3 workers up, 0 (a) ") and lines[-1].endswith(", 1 lost so far")
  assert "doomed" not in lines[-1] and any("runs" in line for line in lines)


@pytest.mark.thorough
def test_of_many_workers_some_are_named():
  workers = workers_of(*(made(f"w{number}") for number in range(6)))
  rollout = ClusterRollout(workers, Divided(chunk_tokens=4))
  assert run(rollout, asked())
  text = rollout.text(8)
  assert text.startswith("6 of 8 workers up, 0 (w0) ") and "(w4)" not in text
  assert re.search(r", [012] of 2 others run$", text)
