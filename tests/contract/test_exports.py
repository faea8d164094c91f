"""A request that moves between engines keeps its completion, whatever happens to its pages.

Drawn are engines of several sizes on one store, requests in chunks, and at the end of each chunk
the next engine, with or without the manifest of `Chunks.export_kv`. In transit, pages are damaged,
lost or described wrongly. Every completion is compared with one engine's, bit by bit; the fates of
the pages are counted, and a kind with count 0 is a failure.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib

from cluster_cases import SIZES, alone, asked, make_engine
import jax
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv import disk_store, values
from seerjax.kv.disk_store import DiskStore
from seerjax.kv.manifest import KVManifest
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.numerics import NumericsConfig
from seerjax.types import Completion, SamplingParams

KINDS = ("moves", "stays", "exported", "adopted", "stale", "damaged", "gone")
AS_IT_IS = ("as it is",) * 3
FATES = ("none", *AS_IT_IS, "damaged", "lost before", "lost after", "wrong")


class Case:
  """One drawn schedule of requests that move between engines."""

  def __init__(self, seed: int, numerics: NumericsConfig, directory: pathlib.Path):
    self.rng = rng = np.random.default_rng((seed, 5))
    self.seed, self.numerics, self.directory = seed, numerics, directory / str(seed)
    self.engines = [self.make_engine() for _ in range(int(rng.integers(2, 4)))]
    self.events: collections.Counter[str] = collections.Counter()

  def make_engine(self) -> Engine:
    num_pages, max_num_seqs = SIZES[int(self.rng.integers(len(SIZES)))]
    store = DiskStore(self.directory, max_bytes=10**8)
    pool = KVPool(KVPoolConfig(host_pages=int(self.rng.integers(0, 64))), store)
    return make_engine(self.numerics, num_pages=num_pages, max_num_seqs=max_num_seqs, kv_pool=pool)

  def run(self) -> collections.Counter[str]:
    """Runs the case.

    Raises:
      AssertionError: if a bit differs.
    """
    rng, engines = self.rng, self.engines
    self.requests = {one.request_id: one for one in asked(self.seed, num_groups=2)}
    found: dict[str, Completion] = {}
    for request in self.requests.values():
      engines[int(rng.integers(len(engines)))].add_request(request, chunk_tokens=self.chunk())
    for _ in range(5000):
      if not any(engine.num_unfinished for engine in engines):
        break
      engine = engines[int(rng.integers(len(engines)))]
      engine.step()
      found |= {one.request_id: one for one in engine.poll()}
      for name in engine.chunks.poll_paused():
        self.go_on(engine, name)
    wanted = alone(self.numerics, self.seed)
    assert found.keys() >= self.requests.keys(), "got requests that never ended"
    for name, one in found.items():
      same = one.has_bits_of(wanted[name]) and one.finish_reason == wanted[name].finish_reason
      assert same, (self.seed, name, one, wanted[name])
    for engine in engines:
      self.events += collections.Counter(dataclasses.asdict(engine.counters.imports))
    return self.events

  def chunk(self) -> int:
    return int(self.rng.integers(1, 9))

  def go_on(self, engine: Engine, name: str) -> None:
    """Resumes a paused request on this engine or on another one."""
    rng = self.rng
    if rng.random() < 0.3:
      engine.chunks.spill([name])
    if rng.random() < 0.4:
      self.events["stays"] += 1
      if rng.random() < 0.5:
        engine.chunks.export_kv(name)
      engine.chunks.resume(name, chunk_tokens=self.chunk())
      return
    self.events["moves"] += 1
    kv, so_far = engine.chunks.export_kv(name), engine.progress(name)
    engine.abort_request(name)
    fate = FATES[int(rng.integers(len(FATES)))]
    paths = [] if kv is None else [*self.directory.glob(f"*/{disk_store._file_name(kv.key)}")]
    if kv is None or fate == "none":
      kv = None
    elif fate == "damaged":
      kv = self.damage(kv, paths)
    elif fate == "wrong":
      kv = self.wrong(kv)
    elif fate == "lost before":
      for path in paths:
        path.unlink()
    others = [one for one in self.engines if one is not engine]
    target = others[int(rng.integers(len(others)))]
    target.add_request(self.requests[name], resume_from=so_far, chunk_tokens=self.chunk(), kv=kv)
    if fate == "lost after":
      for path in paths:
        path.unlink(missing_ok=True)

  def damage(self, kv: KVManifest, paths: list[pathlib.Path]) -> KVManifest:
    """Flips one bit of the page set."""
    for path in paths:
      data = bytearray(path.read_bytes())
      data[int(self.rng.integers(len(data)))] ^= 1 << int(self.rng.integers(8))
      path.write_bytes(data)
    return kv

  def wrong(self, kv: KVManifest) -> KVManifest:
    """Returns the manifest with one false field."""
    changes = (
      dict(weights_digest=kv.weights_digest[::-1]),
      dict(numerics_digest=kv.numerics_digest[::-1]),
      dict(num_written=kv.num_written + 1),
      dict(num_written=max(1, kv.num_written - 1)),
      dict(key=kv.key[::-1]),
      dict(parts=tuple(part._replace(crc32=part.crc32 ^ 1) for part in kv.parts)),
    )
    return dataclasses.replace(kv, **changes[int(self.rng.integers(len(changes)))])


def fuzz(numerics: NumericsConfig, seeds: range, directory: pathlib.Path, kind=Case) -> None:
  events: collections.Counter[str] = collections.Counter()
  for seed in seeds:
    try:
      events += kind(seed, numerics, directory).run()
    except BaseException as error:
      error.add_note(f"{kind.__name__} of seed {seed} under {numerics.backend}")
      raise
  print(numerics.backend, numerics.compute_dtype, dict(sorted(events.items())))
  assert all(events[kind] for kind in KINDS), [kind for kind in KINDS if not events[kind]]


def test_a_request_that_goes_from_engine_to_engine_has_the_bits_of_one_that_stays(tmp_path):
  fuzz(tiny_model.NATIVE, range(4), tmp_path)


@pytest.mark.thorough
def test_so_has_one_of_tiled_engines(tmp_path):
  fuzz(tiny_model.NUMERICS, range(20, 26), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
  "numerics",
  [
    tiny_model.NUMERICS, tiny_model.BFLOAT16, tiny_model.NATIVE, tiny_model.NATIVE_BFLOAT16
  ],
  ids=["tiled f32", "tiled bf16", "native f32", "native bf16"],
)  # fmt: skip
def test_many_drawn_ways(numerics, tmp_path):
  fuzz(numerics, range(100, 300), tmp_path)


@pytest.mark.thorough
def test_pages_of_a_head_that_devices_share_are_adopted_by_equal_meshes_alone(tmp_path):
  config = tiny_model.CONFIG.changed(num_heads=8, num_kv_heads=1)
  params = parameters.init(numerics_lib.key(3), config, tiny_model.NATIVE)
  model = Model(config, params, tiny_model.NATIVE)
  sizes = EngineConfig(page_size=4, num_pages=40, max_num_seqs=4, max_model_len=64)

  def engine_on(size: int) -> Engine:
    pool = KVPool(KVPoolConfig(host_pages=8), DiskStore(tmp_path, max_bytes=10**8))
    mesh = parallel.make_mesh(tensor_parallel_size=size)
    return Engine(model, config=sizes, key=numerics_lib.key(5), mesh=mesh, kv_pool=pool)

  engines = [engine_on(size) for size in (2, 2, 1, 4)]
  heads = [jax.tree.leaves(engine.memory.pages)[0].shape[1] for engine in engines]
  assert heads == [2, 2, 1, 4]
  (request,) = asked(7, num_groups=1, members=1)
  request = dataclasses.replace(request, sampling=SamplingParams(max_tokens=24))
  (wanted,) = engine_on(1).generate([request])
  kv = so_far = None
  for engine in engines:
    is_last = engine is engines[-1]
    engine.add_request(request, resume_from=so_far, chunk_tokens=None if is_last else 5, kv=kv)
    while not engine.chunks.poll_paused() and engine.num_unfinished:
      engine.step()
    if not is_last:
      name = request.request_id
      kv, so_far = engine.chunks.export_kv(name), engine.progress(name)
      engine.abort_request(name)
  (found,) = engines[-1].poll()
  assert found.has_bits_of(wanted)
  fates = [engine.counters.imports for engine in engines]
  assert [one.adopted for one in fates] == [0, 1, 0, 0]
  assert [one.stale for one in fates] == [0, 0, 1, 1]


class Forging(Case):
  """Twin: flips one bit of a written key and recomputes every CRC."""

  def damage(self, kv, paths):
    parts = kv.parts
    for path in paths:
      data = path.read_bytes()
      identity = values.Identity(kv.numerics_digest, kv.weights_digest, kv.policy_version)
      arrays = values.unpacked(data, identity)
      assert arrays is not None
      first = np.array(arrays[0][0][0])  # First page of the first layer's keys.
      first.reshape(-1).view(np.uint32)[0] ^= 1 << 23
      arrays[0][0][0] = first
      path.write_bytes(values.packed(arrays, identity))
      parts = values.parts_of(arrays)
    return dataclasses.replace(kv, parts=parts)


def test_a_twin_that_forges_the_crc_says_other_things(tmp_path):
  with pytest.raises(AssertionError, match="Completion"):
    fuzz(tiny_model.NATIVE, range(4), tmp_path, Forging)
