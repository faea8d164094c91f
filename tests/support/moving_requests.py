"""Requests of many pages, run in chunks while a test moves their pages."""

from __future__ import annotations

import functools

import tiny_model

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.numerics import NumericsConfig
from seerjax.types import Request, SamplingParams

SIZES = EngineConfig(
  page_size=4, num_pages=40, max_num_seqs=4, max_model_len=64, batch_size_buckets=(16,)
)


@functools.cache
def answers(numerics: NumericsConfig = tiny_model.NUMERICS) -> dict:
  engine = make_engine((1, 1), numerics=numerics)
  return {completion.request_id: completion for completion in engine.generate(asked())}


def make_engine(mesh, sizes=SIZES, numerics=tiny_model.NUMERICS, **others) -> Engine:
  return tiny_model.make_engine(
    sizes, numerics, data_parallel_size=mesh[0], tensor_parallel_size=mesh[1], **others
  )


def asked() -> list[Request]:
  """Returns a group of three requests and two single ones, all with many pages."""
  return [
    Request(
      request_id=f"r/{index}",
      prompt=tuple(range(5, 15)) if index < 3 else tuple(range(index, 30)),
      sampling=SamplingParams(max_tokens=24),
      seed=index,
      group_id="g" if index < 3 else "",
    )
    for index in range(5)
  ]


def run(engine: Engine, at_pause, chunk_tokens=5) -> dict:
  """Runs all requests of `asked` in chunks; calls `at_pause(id)` before each resumption."""
  for one in asked():
    engine.add_request(one, chunk_tokens=chunk_tokens)
  found = {}
  for _ in range(300):
    engine.step()
    found |= {completion.request_id: completion for completion in engine.poll()}
    for request_id in engine.chunks.poll_paused():
      instance = at_pause(request_id)
      engine.chunks.resume(request_id, chunk_tokens=chunk_tokens, instance=instance)
    if not engine.num_unfinished:
      break
  free = [engine.chunks.free_pages(instance) for instance in range(engine.data_parallel_size)]
  assert free == [engine.config.num_pages - 1] * engine.data_parallel_size
  assert engine.memory.kv_pool.num_host_pages == 0
  return found


def assert_same(found: dict, numerics: NumericsConfig = tiny_model.NUMERICS) -> None:
  wanted = answers(numerics)
  assert found.keys() == wanted.keys()
  assert all(tiny_model.same(found[name], wanted[name], 0) for name in found)
