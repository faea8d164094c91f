"""The compiled engine step: copy pages, run rows, sample; and many of them in one visit.

One program per row bucket, and one more where rows that decode stay on the devices for several
steps. Row, segment, sample and copy counts are traced, so a bucket costs memory, not time: what is
not used is not computed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import agreement, numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Int, PRNGKeyArray
from seerjax.backends import choice
from seerjax.backends.protocol import Backend
from seerjax.engine import sizes
from seerjax.engine.kv import page_moves as page_moves_lib
from seerjax.models import (
  adapters as adapters_lib,
  config as model_config,
  head,
  kv_layout,
  parameters,
  transformer,
  weights,
)
from seerjax.ops import sampling
from seerjax.types import KeyCopies, SamplingRows, TokenBatch, TokenScores

# Stop ids of a request that end its row on the device; the host knows of more at the visit's end.
MAX_STOP_IDS = 4


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
    key_copies: rows of drafts whose keys further paths read in their own pages, too; None where
      there can be none.
    adapters: i32[i, n], of each row, 0 for none; None where the weights have none by row.
  """

  batch: TokenBatch
  sample_rows: Int[Array, "i b"]
  sampling: SamplingRows
  seeds: Array
  positions: Int[Array, "i b"]
  num_samples: Int[Array, "i"]
  copies: Int[Array, "i c 2"]
  num_copies: Int[Array, "i"]
  key_copies: KeyCopies | None = None
  adapters: Any = None


class VisitInputs(NamedTuple):
  """Several decode steps of every instance; a leading instance axis on every field, as there.

  Attributes:
    step: the first step; row, segment and sample j are those of one sequence, which decodes.
    remaining: i32[i, n], tokens that each row may sample before its chunk ends; 0 for padding.
    stops: i32[i, n, e], ids that end a row's answer, -1 for none.
    num_steps: i32[i], steps at most; no more than `MAX_STEPS_PER_VISIT`.
    leads: i32[i, n], 1 for rows that the visit goes on for; others decode as long as one of these.
  """

  step: StepInputs
  remaining: Int[Array, "i n"]
  stops: Int[Array, "i n e"]
  num_steps: Int[Array, "i"]
  leads: Int[Array, "i n"]


class Reading(NamedTuple):
  """Scores of a step that also says what is likeliest after each sampled row.

  Attributes:
    scores: f32[i, b], of the sampled tokens.
    ids: i32[i, b, k], the likeliest tokens, as `head.likeliest` has them.
    top: f32[i, b, k], of these.
  """

  scores: TokenScores
  ids: Array
  top: TokenScores


class _Layout(NamedTuple):
  """Where the parts of a step's or visit's inputs lie in a row of words.

  Shapes are those without the instance axis.
  """

  tree: Any
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]


def pack(inputs: Any) -> tuple[np.ndarray, _Layout]:
  """Returns a record of arrays, `StepInputs` or another, as one i32[i, w], and how to read it.

  A transfer costs as much for one array as for another, and a step of few rows is hardly longer
  than those of its twenty arrays.
  """
  leaves, tree = jax.tree.flatten(inputs)
  leaves = [np.ascontiguousarray(leaf) for leaf in leaves]
  words = [leaf.reshape(leaf.shape[0], -1).view(np.int32) for leaf in leaves]
  layout = _Layout(
    tree, tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype.str for leaf in leaves)
  )
  return np.concatenate(words, axis=1), layout


def unpack(words: Int[Array, "w"], layout: _Layout) -> Any:
  """Returns one instance's inputs, bit for bit, as `pack` took them."""
  leaves, place = [], 0
  for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
    size = math.prod(shape)
    part = words[place : place + size].reshape(shape)
    leaves.append(lax.bitcast_convert_type(part, jnp.dtype(dtype)))
    place += size
  return jax.tree.unflatten(layout.tree, leaves)


def _num_penalties(inputs: StepInputs) -> int:
  """Returns the entries of each sample's penalties; 0 if none has any."""
  ids = inputs.sampling.penalty_ids
  return 0 if ids is None else ids.shape[-1]


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
  is_plain: bool = False,
) -> tuple[kv_layout.Pages, Int[Array, "b"], TokenScores]:
  """One step of one instance (no instance axis): new pages, sampled tokens i32[b], their scores.

  `is_plain` is that of `head.sample_and_score`.
  """
  pages = kv_layout.copy_pages(pages, inputs.copies, inputs.num_copies)
  run_rows = functools.partial(
    _run_rows, config=config, numerics=numerics, axis=axis, backend=backend, is_plain=is_plain
  )
  return run_rows(params, pages, inputs, key)[:3]


def instance_reading(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  backend: Backend | None = None,
  is_plain: bool = False,
  num_top: int,
) -> tuple[kv_layout.Pages, Int[Array, "b"], Reading]:
  """As `instance_step`, and what is likeliest after each sampled row."""
  shape: Any = dict(config=config, numerics=numerics, axis=axis, backend=backend)
  pages = kv_layout.copy_pages(pages, inputs.copies, inputs.num_copies)
  pages, tokens, scores, hidden = _run_rows(
    params, pages, inputs, key, is_plain=is_plain, **shape
  )
  top = head.likeliest_scores(
    params, hidden, inputs.sampling, inputs.num_samples, num_top, **shape
  )
  return pages, tokens, Reading(scores, *top)


def _run_rows(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  backend: Backend | None,
  is_plain: bool,
) -> tuple[kv_layout.Pages, Int[Array, "b"], TokenScores, Array]:
  """As `instance_step`, once pages are copied, and the hidden rows f[b, d] that were sampled."""
  hidden, pages = transformer.forward(
    params,
    inputs.batch,
    pages,
    config=config,
    numerics=numerics,
    axis=axis,
    backend=backend,
    key_copies=inputs.key_copies,
    adapters=inputs.adapters,
  )
  sampled = hidden[inputs.sample_rows]
  tokens, scores = head.sample_and_score(
    params,
    sampled,
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
    is_plain=is_plain,
  )
  return pages, tokens, scores, sampled


class _Decoding(NamedTuple):
  """What a visit carries from step to step.

  Attributes:
    count: i32[], steps done.
    pages: of the instance.
    tokens: i32[n], each row's last token.
    positions: i32[n], where it stands.
    is_live: bool[n], whether the row decodes on.
    sampled: i32[t, n], tokens by step, -1 where a row did not decode.
    scores: f32[t, n] of these.
  """

  count: Array
  pages: kv_layout.Pages
  tokens: Int[Array, "n"]
  positions: Int[Array, "n"]
  is_live: Array
  sampled: Array
  scores: TokenScores


def instance_visit(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: VisitInputs,
  key: PRNGKeyArray,
  *,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  backend: Backend,
  is_plain: bool = False,
) -> tuple[kv_layout.Pages, Int[Array, "t n"], TokenScores]:
  """Several decode steps of one instance (no instance axis), each with the bits of a step alone.

  A row's next token is fed back, and its key's slot read off its row of the page table. A row that
  sampled a stop id, or the last token of its chunk, is dead from then on: it writes the dump page
  and attends to nothing. The loop ends when all rows that lead are dead; all devices of the model
  axis hold the same rows and leave it together, and nothing in it is exchanged between instances.

  Returns:
    (pages, tokens i32[t, n], scores f32[t, n]) by step; tokens are -1 where a row was dead, or
    the visit over.
  """
  step, batch = inputs.step, inputs.step.batch
  run_rows = functools.partial(
    _run_rows, config=config, numerics=numerics, axis=axis, backend=backend, is_plain=is_plain
  )
  page_size = kv_layout.page_size_of(pages, backend)
  num_rows, num_segments = batch.tokens.shape[0], batch.segment_start.shape[0]
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  segments = jnp.arange(num_segments, dtype=jnp.int32)
  tables = batch.page_table[jnp.minimum(rows, num_segments - 1)]
  row_of_segment = jnp.minimum(segments, num_rows - 1)

  def again(now: _Decoding) -> Array:
    return (now.count < inputs.num_steps) & jnp.any(now.is_live & (inputs.leads > 0))

  def decode(now: _Decoding) -> _Decoding:
    place = now.positions // page_size
    page = jnp.take_along_axis(tables, place[:, None], axis=1)[:, 0]
    slots = page * page_size + now.positions % page_size
    is_attended = now.is_live[row_of_segment] & (segments < batch.num_segments)
    one_step = step._replace(
      batch=batch._replace(
        tokens=now.tokens,
        positions=now.positions,
        slots=jnp.where(now.is_live, slots, 0),
        segment_length=is_attended.astype(jnp.int32),
      ),
      positions=now.positions + 1,
    )
    pages, tokens, scores, _ = run_rows(params, now.pages, one_step, key)
    tokens = jnp.where(now.is_live, tokens, -1)
    keep = lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, now.count, 0)
    is_stop = jnp.any(inputs.stops == tokens[:, None], axis=1)
    is_live = now.is_live & (now.count + 1 < inputs.remaining) & ~is_stop
    return _Decoding(
      now.count + 1,
      pages,
      jnp.where(is_live, tokens, now.tokens),
      jnp.where(is_live, now.positions + 1, now.positions),
      is_live,
      keep(now.sampled, tokens),
      jax.tree.map(keep, now.scores, scores),
    )

  # Whole for every number of steps, so that none is a program of its own.
  shape = (sizes.MAX_STEPS_PER_VISIT, num_rows)
  nothing = jnp.zeros(shape, jnp.float32)
  begin = _Decoding(
    jnp.int32(0),
    kv_layout.copy_pages(pages, step.copies, step.num_copies),
    batch.tokens,
    batch.positions,
    inputs.remaining > 0,
    jnp.full(shape, -1, jnp.int32),
    TokenScores(nothing, nothing, nothing),
  )
  end = lax.while_loop(again, decode, begin)
  return end.pages, end.sampled, end.scores


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

  def __post_init__(self):
    # With what they leave open decided, so that two of them compare.
    decided = model_config.numerics_for(self.config, self.numerics)
    object.__setattr__(self, "numerics", decided)

  @functools.cached_property
  def stages(self) -> Backend:
    """What runs the stages: `backend`, or the one that the numerics name."""
    return self.backend or choice.backend_of(self.numerics)

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
    return parameters.placed(params, self.mesh)

  def place_adapters(
    self,
    params: parameters.Params,
    named: Mapping[str, Any],
    *,
    what: str = "Runner.place_adapters: adapters",
  ) -> adapters_lib.Chosen:
    """Returns adapters on the mesh, `adapters.Scaled` by name, for rows to choose among.

    Raises:
      ValueError: if one is not of these weights, or not finite; `what` is the argument.
    """
    adapters_lib.check(params, named, what=what)
    chosen = adapters_lib.stacked(params, named, pads=self.stages.pads_adapters)
    return chosen._replace(forms=adapters_lib.placed(chosen.forms, self.mesh))

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
  def _step_program(self):
    return self._compiled(instance_step)

  @functools.cached_property
  def _masked_step_program(self):
    # Of steps in which some row has a mask: the others' programs do not know that there are any.
    return self._compiled(instance_step)

  @functools.cached_property
  def _penalised_step_programs(self) -> dict[int, Any]:
    # Of steps in which some row is penalised, by the entries of penalties: as for masks.
    return {}

  @functools.cached_property
  def _reading_programs(self) -> dict[tuple[int, int], Any]:
    # Of steps in which some row is read, by the number of tokens that are told and the entries of
    # penalties: as for masks.
    return {}

  @functools.cached_property
  def _visit_program(self):
    return self._compiled(instance_visit)

  def _compiled(self, of_instance: Callable[..., Any]):
    """Returns the program of all instances, compiled once for each row bucket."""
    local = functools.partial(
      of_instance,
      config=self.config,
      numerics=self.numerics,
      axis=self._axis,
      backend=self.stages,
    )
    num_traces = collections.Counter()

    def step(params, pages, words, key, layout, is_plain):
      # Adapters of other shapes are other programs, as pages of another size are.
      forms = jax.tree.map(lambda leaf: leaf.shape, params.get("adapters", ()))
      size = jax.tree.leaves(pages)[0].shape, is_plain, str(forms), layout.tree
      num_traces[size] += 1
      # The interpreter of kernels is known to JAX's caches only once it has run.
      count, most = num_traces[size], self.max_programs + self.numerics.is_interpreted
      assert count <= most, (
        f"engine step: got trace {count}, expected one for each of {most} row buckets; an input"
        " changed its shape or type"
      )
      pages = jax.tree.map(lambda leaf: leaf[0], pages)
      out = local(params, pages, unpack(words[0], layout), key, is_plain=is_plain)
      pages, *found = jax.tree.map(lambda leaf: leaf[None], out)
      return pages, *parallel.to_all_processes(found, self.mesh)

    by_instance = jax.P(parallel.INSTANCE_AXIS)
    page_spec = jax.P(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)

    def spread(params, pages, words, key, layout, is_plain):
      # Replication over `model` is ours to keep: gathered slabs are added in one order on all.
      return jax.shard_map(
        functools.partial(step, layout=layout, is_plain=is_plain),
        mesh=self.mesh,
        # Of these very weights: adapters may be among them.
        in_specs=(parameters.specs_of(params), page_spec, by_instance, jax.P()),
        out_specs=(page_spec, *2 * [parallel.spec_of_results(self.mesh)]),
        check_vma=False,
      )(params, pages, words, key)

    return jax.jit(
      spread if self.mesh.size > 1 else step,
      static_argnums=(4, 5),
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
    pages, inputs, is_plain = self._decided(pages, inputs)
    words, layout = self._packed(inputs)
    is_masked = inputs.sampling.mask is not None
    program = self._masked_step_program if is_masked else self._step_program
    if width := _num_penalties(inputs):
      program = self._penalised_step_programs.get(width)
      if program is None:
        program = self._penalised_step_programs[width] = self._compiled(instance_step)
    return program(params, pages, words, key, layout, is_plain)

  def read(
    self,
    params: parameters.Params,
    pages: Any,
    inputs: StepInputs,
    key: PRNGKeyArray,
    num_top: int,
  ) -> tuple[Any, Any, Reading]:
    """As `step`, and what is likeliest after each sampled row; compiled when it is first called.

    Returns:
      (pages, tokens i32[i, b], scores and the `num_top` likeliest), on the devices.
    """
    pages, inputs, is_plain = self._decided(pages, inputs)
    words, layout = self._packed(inputs)
    num_top = min(num_top, self.config.vocab_size)
    kind = num_top, _num_penalties(inputs)
    program = self._reading_programs.get(kind)
    if program is None:
      program = self._compiled(functools.partial(instance_reading, num_top=num_top))
      self._reading_programs[kind] = program
    return program(params, pages, words, key, layout, is_plain)

  @functools.cached_property
  def _turns(self) -> Iterator[int]:
    return itertools.count()

  def _packed(self, inputs: Any) -> tuple[np.ndarray, _Layout]:
    """Returns `pack` of inputs, once all processes of the mesh have the same ones."""
    if parallel.spans_processes(self.mesh):
      leaves = jax.tree_util.tree_leaves_with_path(inputs)
      agreement.compare(
        f"engine step {next(self._turns)}",
        {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
      )
    return pack(inputs)

  def _decided(self, pages: Any, inputs: StepInputs) -> tuple[Any, StepInputs, bool]:
    """Returns pages, inputs and `is_plain` of a step that may read no number of a device's back.

    Its copies are made, and the step is left no room for any; nor for copies of keys where there
    are none, which are rows more of a scatter: a step with some is a program of its own. Nothing is
    decided for a backend whose steps read numbers anyway.
    """
    if not self.stages.waits_for_predicates:
      return pages, inputs, False
    for copies in page_moves_lib.copy_rounds(inputs.copies, inputs.num_copies):
      pages = self.page_moves.copy(pages, copies)
    rows = np.arange(inputs.sample_rows.shape[1])
    is_live = rows[None, :] < np.asarray(inputs.num_samples)[:, None]
    is_special = sampling.is_special(inputs.sampling) & is_live
    without = inputs._replace(
      copies=inputs.copies[:, :0], num_copies=np.zeros_like(inputs.num_copies)
    )
    if inputs.key_copies is not None and not np.any(inputs.key_copies.count):
      without = without._replace(key_copies=None)
    return pages, without, not bool(np.any(is_special))

  def visit(
    self, params: parameters.Params, pages: Any, inputs: VisitInputs, key: PRNGKeyArray
  ) -> tuple[Any, Any, TokenScores]:
    """Runs several steps of rows that decode; compiled when it is first called. `pages` is donated.

    Returns:
      (pages, tokens i32[i, t, n], scores f32[i, t, n]), on the devices; see `instance_visit`.
    """
    pages, step, is_plain = self._decided(pages, inputs.step)
    words, layout = self._packed(inputs._replace(step=step))
    return self._visit_program(params, pages, words, key, layout, is_plain)
