"""A backend needs only its protocol: one that wraps the tiled backend keeps the contract.

The engine and the trainer run on a record that has the protocol's methods and nothing else, so any
other use of a backend would fail here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import made_rollouts
import numpy as np
import pytest
import tiny_model
import trainers

from seerjax import parallel
from seerjax.backends import protocol, tiled
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.models.decoder import decide
from seerjax.trainer import losses, packing, step
from seerjax.types import Request, SamplingParams

NUMERICS = tiny_model.NUMERICS
STAGES = ("attention_inputs", "write_pages", "attend", "after_attention", "head")
SIZES = engine_lib.EngineConfig(
  page_size=8, num_pages=40, max_num_seqs=6, max_model_len=64, batch_size_buckets=(24,)
)
LAYOUT = dict(page_size=8, rows_per_micro_batch=96, max_num_seqs=5, max_sequence_tokens=64)
REQUESTS = tuple(
  Request(
    request_id=str(index),
    prompt=tuple(range(1, 5 + 6 * index)),
    sampling=SamplingParams(max_tokens=12, temperature=0.7, top_k=9 * (index % 2)),
    seed=index,
  )
  for index in range(4)
)


@dataclasses.dataclass(frozen=True)
class Wrapping:
  """A backend that calls the tiled backend's methods and counts the stages.

  Its key pages have another layout, so that other code cannot depend on the layout.
  """

  numerics: object
  calls: collections.Counter = dataclasses.field(compare=False)

  @property
  def _inner(self):
    return tiled.Tiled(self.numerics)

  @property
  def traits(self):
    return dataclasses.replace(self._inner.traits, page_axes=("cz", "zc"))

  def whole_rows(self, count):
    return self._inner.whole_rows(count)

  def whole_segments(self, count):
    return self._inner.whole_segments(count)

  def map_rows(self, function, weights, rows, num_rows, *, gradient_of=None):
    return self._inner.map_rows(function, weights, rows, num_rows, gradient_of=gradient_of)

  def map_slabs(self, function, shared, slabs, one, axis):
    return self._inner.map_slabs(function, shared, slabs, one, axis)

  def dot(self, x, w):
    return self._inner.dot(x, w)

  def dot_rows(self, x, table):
    return self._inner.dot_rows(x, table)

  def contract(self, x, w, one, axis):
    return self._inner.contract(x, w, one, axis)

  def rms_norm_rows(self, *arguments):
    return self._inner.rms_norm_rows(*arguments)

  def turns(self, *arguments):
    return self._inner.turns(*arguments)

  def attention_inputs(self, *arguments):
    self.calls["attention_inputs"] += 1
    return self._inner.attention_inputs(*arguments)

  def write_pages(self, pages, *arguments):
    self.calls["write_pages"] += 1
    return turned(self._inner.write_pages(turned(pages), *arguments))

  def attend(self, q, pages, *arguments):
    self.calls["attend"] += 1
    return self._inner.attend(q, turned(pages), *arguments)

  def attend_own(self, q, pages, values, batch, *arguments):
    pages = self.write_pages(pages, values, batch.slots, batch.num_rows)
    return self.attend(q, pages, batch, *arguments)

  def after_attention(self, *arguments):
    self.calls["after_attention"] += 1
    return self._inner.after_attention(*arguments)

  def mixture(self, *arguments):
    return self._inner.mixture(*arguments)

  def head(self, *arguments):
    self.calls["head"] += 1
    return self._inner.head(*arguments)


def turned(pages):
  """Swaps the last axes of a layer's key pages: f[k, m, c, z] to f[k, m, z, c] or back."""
  keys, values = pages
  return jnp.swapaxes(keys, 2, 3), values


def decided(backend=None):
  """Returns the model as decided, with a backend other than that of its numerics."""
  return decide(tiny_model.CONFIG, NUMERICS, backend=backend)


def sampled(backend) -> list:
  """Returns completions of a new engine, which traces its programs anew."""
  mesh = parallel.make_mesh(data_parallel_size=1)
  runner = runner_lib.Runner(decided(backend), mesh, max_programs=2)
  return tiny_model.make_engine(SIZES, NUMERICS, runner=runner).generate(REQUESTS)


@functools.cache
def expected() -> list:
  """Returns completions of the tiled backend."""
  return tiny_model.make_engine(SIZES, NUMERICS).generate(REQUESTS)


def packed(completions, backend):
  group = made_rollouts.of_pairs(zip(REQUESTS, completions, strict=True))
  advantages = np.asarray([[-1.0, 1.0, -1.0, 1.0]], np.float32)
  return packing.pack([group], advantages, decoder=decided(backend), **LAYOUT)


def trainer_of(backend):
  """Returns a new trainer, which traces its programs anew."""
  return trainers.make(decoder=decided(backend), **LAYOUT)


def scores_under_gradient(batch, backend, program="_gradient"):
  """Returns scores of a new trainer, from the program that also computes the gradient."""
  trainer = trainer_of(backend)
  params = tiny_model.params(NUMERICS)
  scores = trainer.gradient(params, batch, losses.denominators(batch), None)[2]
  assert program in vars(trainer)
  return scores


@pytest.mark.long
def test_a_backend_that_only_wraps_the_tiled_one_passes_the_contract():
  wanted = expected()
  calls = collections.Counter()
  backend = Wrapping(NUMERICS, calls)
  found = sampled(backend)
  assert all(tiny_model.same(one, other) for one, other in zip(found, wanted, strict=True))
  assert all(calls[name] for name in STAGES), f"got {dict(calls)}"
  calls.clear()
  batch = packed(found, backend)
  scores = scores_under_gradient(batch, backend)
  assert all(calls[name] for name in STAGES), f"got {dict(calls)}"
  assert set(step.rollout_gap(scores, batch).values()) == {0.0}


class Waiting(Wrapping):
  """A backend that behaves as if the host blocked to read a number from the device."""

  @property
  def traits(self):
    return dataclasses.replace(super().traits, waits_for_predicates=True)


@pytest.mark.thorough
def test_a_backend_that_waits_for_predicates_is_told_where_no_row_is_special():
  wanted = expected()
  backend = Waiting(NUMERICS, collections.Counter())
  batch = packed(wanted, backend)
  usual = scores_under_gradient(batch, backend)  # Some rows are filtered.
  assert set(step.rollout_gap(usual, batch).values()) == {0.0}
  sampling = batch.sampling._replace(top_k=np.zeros_like(batch.sampling.top_k))
  plain = batch._replace(sampling=sampling)
  found = scores_under_gradient(plain, backend, "_plain_gradient")
  jax.tree.map(
    np.testing.assert_array_equal,
    found,
    scores_under_gradient(plain, Wrapping(NUMERICS, collections.Counter())),
  )


def test_the_wrapping_backend_has_the_protocols_members_alone():
  names = {name for name in dir(Wrapping) if not name.startswith("_")} | {"numerics"}
  members = {*vars(protocol.Backend), *vars(protocol.Operations), *protocol.Backend.__annotations__}
  assert names == {name for name in members if not name.startswith("_")}


@pytest.mark.thorough
def test_a_stage_of_another_backend_moves_bits():
  class Doubling(Wrapping):
    def after_attention(self, *arguments):
      return super().after_attention(*arguments) * np.float32(1 + 2**-20)

  wanted = expected()
  found = sampled(Doubling(NUMERICS, collections.Counter()))
  assert not all(tiny_model.same(one, other) for one, other in zip(found, wanted))
