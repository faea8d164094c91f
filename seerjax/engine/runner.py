"""The compiled engine step: copy pages, run rows, sample.

One program per row bucket. Row, segment, sample and copy counts are traced, so a bucket costs
memory, not time: what is not used is not computed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Int, PRNGKeyArray
from seerjax.backends import choice
from seerjax.backends.protocol import Backend
from seerjax.engine.kv import page_moves as page_moves_lib
from seerjax.models import config as model_config, head, kv_layout, parameters, transformer, weights
from seerjax.types import SamplingRows, TokenBatch, TokenScores


class StepInputs(NamedTuple):
  """One step of every instance; a leading instance axis on every field (numpy on the way in).

  Attributes:
    batch: rows and segments.
    sample_rows: i32[i, b], row whose next token is sampled; any row may be, so b is n.
    sampling: by sample.
    seeds: u32[i, b], request seeds by sample.
    positions: i32[i, b], position of the token that is sampled.
    num_samples: i32[i].
    copies: i32[i, c, 2], (from, to) pages copied before anything is written.
    num_copies: i32[i].
  """

  batch: TokenBatch
  sample_rows: Int[Array, "i b"]
  sampling: SamplingRows
  seeds: Array
  positions: Int[Array, "i b"]
  num_samples: Int[Array, "i"]
  copies: Int[Array, "i c 2"]
  num_copies: Int[Array, "i"]


class _Layout(NamedTuple):
  """Where the parts of a `StepInputs` lie in a row of words: shapes without the instance axis."""

  tree: Any
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]


def pack(inputs: StepInputs) -> tuple[np.ndarray, _Layout]:
  """Returns all inputs as one i32[i, w], and how to read it.

  A transfer costs as much for one array as for another, and a step of few rows is hardly longer
  than those of its twenty arrays.
  """
  leaves, tree = jax.tree.flatten(inputs)
  leaves = [np.ascontiguousarray(leaf) for leaf in leaves]
  words = [leaf.reshape(leaf.shape[0], -1).view(np.int32) for leaf in leaves]
  layout = _Layout(
    tree, tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype.name for leaf in leaves)
  )
  return np.concatenate(words, axis=1), layout


def unpack(words: Int[Array, "w"], layout: _Layout) -> StepInputs:
  """Returns one instance's inputs, bit for bit, as `pack` took them."""
  leaves, place = [], 0
  for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
    size = math.prod(shape)
    part = words[place : place + size].reshape(shape)
    leaves.append(lax.bitcast_convert_type(part, jnp.dtype(dtype)))
    place += size
  return jax.tree.unflatten(layout.tree, leaves)


def instance_step(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  backend: Backend | None = None,
) -> tuple[kv_layout.Pages, Int[Array, "b"], TokenScores]:
  """One step of one instance (no instance axis): new pages, sampled tokens i32[b], their scores."""
  pages = kv_layout.copy_pages(pages, inputs.copies, inputs.num_copies)
  hidden, pages = transformer.forward(
    params, inputs.batch, pages, config=config, numerics=numerics, axis=axis, backend=backend
  )
  tokens, scores = head.sample_and_score(
    params,
    hidden[inputs.sample_rows],
    jnp.full(inputs.sample_rows.shape, -1, jnp.int32),
    inputs.sampling,
    inputs.seeds,
    inputs.positions,
    inputs.num_samples,
    key,
    config=config,
    numerics=numerics,
    axis=axis,
    backend=backend,
  )
  return pages, tokens, scores


@dataclasses.dataclass(frozen=True)
class Runner:
  """Places weights and pages on the mesh and runs steps.

  Attributes:
    config: shape of the model.
    numerics: what decides bits.
    mesh: `parallel.make_mesh`.
    max_programs: row buckets; one trace more for the pages of one size is a retrace by mistake,
      and fails. Engines that share a runner may hold different numbers of pages.
    backend: what runs the stages of the forward; None is the one that the numerics name.
  """

  config: model_config.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  mesh: jax.sharding.Mesh
  max_programs: int
  backend: Backend | None = None

  @functools.cached_property
  def stages(self) -> Backend:
    """What runs the stages: `backend`, or the one that the numerics name."""
    numerics = model_config.numerics_for(self.config, self.numerics)
    return self.backend or choice.backend_of(numerics)

  @property
  def num_instances(self) -> int:
    """Instances of the mesh."""
    return self.mesh.shape[parallel.INSTANCE_AXIS]

  def require_is_of(
    self,
    model: model_config.TransformerConfig,
    numerics: numerics_lib.NumericsConfig,
    mesh: jax.sharding.Mesh | None,
  ) -> None:
    """Refuses an engine of another model or numerics, or of another mesh if it names one.

    Raises:
      ValueError: with what this runner was made for.
    """
    if (self.config, self.numerics) != (model, numerics) or mesh not in (None, self.mesh):
      raise ValueError(
        f"Engine.runner: got one of {self.numerics} for a model of"
        f" {self.config.num_layers} layers on {self.mesh.size} device(s), expected the engine's"
        " own model, numerics and mesh; share a Runner only between equals."
      )

  @property
  def _axis(self) -> str | None:
    return parallel.MODEL_AXIS if self.mesh.shape[parallel.MODEL_AXIS] > 1 else None

  @functools.cached_property
  def page_moves(self) -> page_moves_lib.PageMoves:
    """Programs that carry pages, compiled once for all engines that share this runner."""
    return page_moves_lib.PageMoves(self.mesh)

  def _sharding(self, *spec: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P(*spec))

  def place_params(
    self, params: parameters.Params, *, what: str = "Runner.place_params: params"
  ) -> parameters.Params:
    """Returns the weights on the mesh: slabs over `model`, copies for every instance.

    Raises:
      ValueError: if they are not the model's in the numerics' layout and dtype, or not finite;
        `what` is the argument, for the message.
    """
    weights.check(params, self.config, self.numerics, dtype=self.numerics.dtype, what=what)
    numerics_lib.require_finite(
      params, what=what, remedy="nothing may be sampled from them: go back to an earlier checkpoint"
    )
    specs = parameters.specs_of(params)
    return jax.tree.map(
      lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(self.mesh, spec)),
      params,
      specs,
      is_leaf=lambda leaf: isinstance(leaf, jax.Array | np.ndarray),
    )

  def empty_pages(self, num_pages: int, page_size: int) -> Any:
    """Returns zeroed pages f[i, k, m, ...] of every layer, as `kv_layout.empty_pages` has them."""
    one = jax.eval_shape(
      lambda: kv_layout.empty_pages(
        self.config,
        self.numerics,
        num_pages=num_pages,
        page_size=page_size,
        backend=self.stages,
      )
    )
    shape, sharding = (self.num_instances,), self._page_sharding
    return jax.tree.map(lambda s: jnp.zeros(shape + s.shape, s.dtype, device=sharding), one)

  @property
  def _page_sharding(self) -> jax.sharding.NamedSharding:
    """Of pages, before a step and after it: were it left open, the second step would be compiled
    once more for pages whose sharding is spelled another way."""
    return self._sharding(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)

  @functools.cached_property
  def _program(self):
    local = functools.partial(
      instance_step,
      config=self.config,
      numerics=self.numerics,
      axis=self._axis,
      backend=self.stages,
    )

    num_traces = collections.Counter()

    def step(params, pages, words, key, layout):
      size = jax.tree.leaves(pages)[0].shape
      num_traces[size] += 1
      # The interpreter of kernels is known to JAX's caches only once it has run.
      count, most = num_traces[size], self.max_programs + self.numerics.is_interpreted
      assert count <= most, (
        f"engine step: got trace {count}, expected one for each of {most} row buckets; an input"
        " changed its shape or type"
      )
      pages = jax.tree.map(lambda leaf: leaf[0], pages)
      out = local(params, pages, unpack(words[0], layout), key)
      return jax.tree.map(lambda leaf: leaf[None], out)

    by_instance = jax.P(parallel.INSTANCE_AXIS)
    page_spec = jax.P(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)

    def spread(params, pages, words, key, layout):
      # Replication over `model` is ours to keep: gathered slabs are added in one order on all.
      return jax.shard_map(
        functools.partial(step, layout=layout),
        mesh=self.mesh,
        # Of these very weights: adapters may be among them.
        in_specs=(parameters.specs_of(params), page_spec, by_instance, jax.P()),
        out_specs=(page_spec, by_instance, by_instance),
        check_vma=False,
      )(params, pages, words, key)

    return jax.jit(
      spread if self.mesh.size > 1 else step,
      static_argnums=(4,),
      donate_argnums=(1,),
      out_shardings=(self._page_sharding, None, None),
    )

  def step(
    self, params: parameters.Params, pages: Any, inputs: StepInputs, key: PRNGKeyArray
  ) -> tuple[Any, Any, TokenScores]:
    """Runs one step. `pages` is donated.

    Returns:
      (pages, tokens i32[i, b], scores f32[i, b]), on the devices.
    """
    words, layout = pack(inputs)
    return self._program(params, pages, words, key, layout)
