"""A draft model changes no bit, whatever its weights and the schedule, and drafts the same in every
process.

Schedules are drawn: kinds of drafts, widths, lengths, page sizes, sampling, and the disturbances of
each visit. Every completion is compared with the same request alone in an engine without drafts.
Event counts are printed, and an event with count 0 is a failure.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import random
import subprocess
import sys

import drafting_models
from drafting_models import DrawnSources
import pytest
import tiny_model

from seerjax.speculation.draft_model import ModelDrafter
from seerjax.speculation.history import History
from seerjax.speculation.hybrid_drafter import HybridDrafter
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.types import Request, SamplingParams

KINDS = ("same", "rounded", "other", "nan")
SAMPLING = (
  dict(temperature=0.0),
  dict(temperature=0.6),
  dict(temperature=1.0),
  dict(temperature=1.0, top_k=5),
  dict(temperature=0.9, top_p=0.8, min_p=0.05),
  dict(temperature=1.0, logit_bias=((3, 4.0), (9, -1e6))),
  dict(temperature=1.0, allowed_token_ranges=((0, 40), (10, 64), (5, 7)) * 8),
)
EVENTS = (
  "requests", "drafted", "accepted", "rejected", "side paths", "slots evicted", "read again",
  "without slot", "rows caught up", "not finite", "preempted", "cancelled", "paused", "spilled",
  "names used again", "new weights", "merged with a suffix tree", "drafted by a suffix tree",
)  # fmt: skip


@functools.cache
def alone(numerics, prompt, settings, seed: int, version: int):
  engine = drafting_models.make_engine(numerics)
  if version:
    engine.update_weights(tiny_model.params(numerics, 1), 1)
  request = Request(
    request_id="alone", prompt=prompt, sampling=SamplingParams(**dict(settings)), seed=seed
  )
  return engine.generate([request])[0]


def drawn_request(chooses: random.Random, name: str) -> Request:
  settings = chooses.choice(SAMPLING)
  start = chooses.randrange(4)
  return Request(
    request_id=name,
    prompt=tuple((start + 5 * place) % 64 for place in range(chooses.choice((2, 7, 19)))),
    sampling=SamplingParams(**settings, max_tokens=chooses.choice((6, 17))),
    seed=chooses.randrange(3),
    group_id=f"group {start}",
  )


def settings_of(sampling: SamplingParams):
  return tuple(vars(sampling).items())


def run_schedule(seed: int, numerics, mesh, page_sizes, events: collections.Counter) -> None:
  """Runs one drawn schedule and compares every completion."""
  chooses = random.Random(seed)
  page_size = chooses.choice(page_sizes)
  num_pages = 1 + chooses.choice((160, 240)) // page_size
  sizes = dataclasses.replace(drafting_models.SIZES, page_size=page_size, num_pages=num_pages)
  engine = drafting_models.make_engine(numerics, sizes, mesh)
  config = dataclasses.replace(
    drafting_models.CONFIG, length=chooses.choice((1, 4, 7)), width=chooses.choice((1, 3))
  )
  kind, is_alone = chooses.choice(KINDS), chooses.random() < 0.5
  drafter = engine.drafter = (
    drafting_models.drafter(kind, numerics, config)
    if is_alone
    else Merged.of(kind, numerics, config, seed, events)
  )
  names = [f"r{index}" for index in range(chooses.choice((1, 5, 8)))]
  asked: dict[str, Request] = {}
  for name in names:
    asked[name] = drawn_request(chooses, name)
    engine.add_request(asked[name], chunk_tokens=chooses.choice((None, 5)))
  events["requests"] += len(names)
  done = {}
  for _ in range(400):
    if not engine.num_unfinished:
      break
    engine.step()
    done |= {completion.request_id: completion for completion in engine.poll()}
    paused = engine.chunks.poll_paused()
    events["paused"] += len(paused)
    for name in paused:
      if chooses.random() < 0.3:
        events["spilled"] += len(engine.chunks.spill([name]))
      engine.chunks.resume(name, chunk_tokens=chooses.choice((None, 5)))
    live = [name for name in names if name not in done]
    if live and chooses.random() < 0.2:
      engine.chunks.preempt(chooses.choice(live))
      events["preempted"] += 1
    if live and chooses.random() < 0.05:
      name = chooses.choice(live)
      engine.abort_request(name)
      asked[name] = drawn_request(chooses, name)
      engine.add_request(asked[name])
      events["cancelled"] += 1
      events["names used again"] += 1
  assert done.keys() == asked.keys()
  for name, request in asked.items():
    wanted = alone(numerics, request.prompt, settings_of(request.sampling), request.seed, 0)
    assert done[name].has_bits_of(wanted), (seed, name)
  if chooses.random() < 0.5:  # Update the target's weights, not the draft's.
    engine.update_weights(tiny_model.params(numerics, 1), 1)
    request = drawn_request(chooses, "later")
    (found,) = engine.generate([request])
    wanted = alone(numerics, request.prompt, settings_of(request.sampling), request.seed, 1)
    assert found.has_bits_of(wanted), seed
    events["new weights"] += 1
  if isinstance(drafter, HybridDrafter):
    events["drafted by a suffix tree"] += drafter.suffix.acceptance.num_drafted
    drafter = drafter.model
  count(drafter, events)


class Merged(HybridDrafter):
  """Counts the drafts of both sources."""

  events: collections.Counter

  @classmethod
  def of(cls, kind, numerics, config, seed: int, events: collections.Counter) -> Merged:
    model = drafting_models.drafter(kind, numerics, config)
    suffix = SuffixDrafter(history=History(), budget=None)
    merged = cls(suffix, model, DrawnSources(seed, max_width=config.width))
    merged.events = events
    return merged

  def _merged(self, request_id, choice, by_suffix, by_model):
    self.events["merged with a suffix tree"] += bool(by_suffix and by_model)
    return super()._merged(request_id, choice, by_suffix, by_model)


def count(drafter: ModelDrafter, events: collections.Counter) -> None:
  acceptance, counters = drafter.acceptance, drafter.counters
  events["drafted"] += acceptance.num_drafted
  events["accepted"] += acceptance.num_accepted
  events["rejected"] += acceptance.num_drafted - acceptance.num_accepted
  events["side paths"] += counters.side_paths
  events["slots evicted"] += drafter.slots.num_evicted
  events["read again"] += drafter.slots.num_read_again
  events["without slot"] += counters.without_slot
  events["rows caught up"] += counters.rows_read
  events["not finite"] += counters.not_finite


def run_schedules(numerics, seeds, mesh=(1, 1), page_sizes=(4, 16)) -> None:
  events = collections.Counter()
  for seed in seeds:
    run_schedule(seed, numerics, mesh, page_sizes, events)
  print(", ".join(f"{event} {events[event]}" for event in EVENTS))
  assert all(events[event] for event in EVENTS), events


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["native", pytest.param("tiled", marks=pytest.mark.long)])
def test_a_draft_model_moves_no_bit(backend):
  numerics = dataclasses.replace(drafting_models.ONE_SLAB, backend=backend)
  run_schedules(numerics, range(8))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_a_draft_model_moves_no_bit_in_many_schedules(backend, dtype):
  numerics = dataclasses.replace(drafting_models.ONE_SLAB, backend=backend, compute_dtype=dtype)
  run_schedules(numerics, range(1000, 1130), page_sizes=(2, 4, 8, 16))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)  # (instances, model shards)
@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_a_draft_model_moves_no_bit_on_several_devices(backend, mesh):
  numerics = dataclasses.replace(drafting_models.ONE_SLAB, backend=backend, reduction_shards=2)
  run_schedules(numerics, range(2000, 2020), mesh)


def digest(make_drafter) -> str:
  """Returns a digest of all drafts of a run in which some drafts are rejected."""
  engine = drafting_models.make_engine()
  drafter, drafts = make_drafter("rounded"), []
  draft = drafter.draft

  class Kept:
    observe, finish = drafter.observe, drafter.finish

    def draft(self, queries):
      drafts.append([[list(path) for path in paths] for paths in draft(queries)])
      return drafts[-1]

  engine.drafter = Kept()
  chooses = random.Random(7)
  engine.generate([drawn_request(chooses, f"r{index}") for index in range(6)])
  assert drafter.acceptance.num_drafted > drafter.acceptance.num_accepted > 0
  return hashlib.sha256(json.dumps(drafts).encode()).hexdigest()


@pytest.mark.long
def test_two_processes_draft_the_same():
  code = (
    f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n"
    "import importlib.util\n"
    f"spec = importlib.util.spec_from_file_location('drafts', {__file__!r})\n"
    "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
    "print(module.digest(module.drafting_models.drafter))\n"
    "print(module.digest(module.drafting_models.hybrid))"
  )
  found = [
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for _ in range(2)
  ]
  assert len({done.stdout for done in found}) == 1
  assert [len(line) for line in found[0].stdout.split()] == [64, 64]
