"""The compiled engine step: copy pages, run rows, sample; and several decode steps in one visit.

There is one program per row bucket, and one more for visits of several decode steps. Row, segment,
sample and copy counts are traced, so a bucket costs memory, not time: unused rows are not computed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from seerjax.engine import sizes
from seerjax.kv import page_moves as page_moves_lib
from seerjax.models import (
  adapters as adapters_lib,
  head,
  kv_layout,
  parameters,
  transformer,
  weights,
)
from seerjax.models.decoder import Decoder
from seerjax.ops import sampling
from seerjax.types import KeyCopies, PageRows, SamplingRows, TokenBatch, TokenScores

# Number of a request's stop ids that are checked on the device; the host checks the others at the
# end of the visit.
MAX_STOP_IDS = 4
# Most top tokens that a step returns after a sample.
MAX_TOP = 16


class ScoreInputs(NamedTuple):
  """Inputs of a step that scores prompts or returns top tokens; with an instance axis as well.

  Attributes:
    forced: i32[i, b], the token that is scored, -1 to sample one.
    top_rows: i32[i, b], samples that return their top tokens, b for padding.
    num_top: i32[i], number of top tokens of each.
  """

  forced: Int[Array, "i b"]
  top_rows: Int[Array, "i b"]
  num_top: Int[Array, "i"]


class StepInputs(NamedTuple):
  """Inputs of one step; every field has a leading instance axis (numpy on the way in).

  Attributes:
    batch: rows and segments.
    sample_rows: i32[i, b], rows to sample after; any row may be sampled, so b is n.
    sampling: sampling parameters by sample.
    seeds: u32[i, b], request seeds by sample.
    positions: i32[i, b], position of the sampled token.
    num_samples: i32[i], number of samples.
    copies: i32[i, c, 2], (from, to) pages copied before anything is written; none if there are
      several kinds of pages, which the engine copies itself.
    num_copies: i32[i], number of page copies.
    key_copies: draft rows with keys that are also written to further paths' pages; None if the step
      cannot have any.
    adapters: i32[i, n], adapter index of each row, 0 for none; None if the weights have no adapters
      by row.
    scores: prompts that are scored, and top tokens; None if there are none.
    kinds: slots and page tables of the second and further kinds of pages.
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
  scores: ScoreInputs | None = None
  kinds: tuple[PageRows, ...] = ()


class VisitInputs(NamedTuple):
  """Inputs of several decode steps; every field has a leading instance axis.

  Attributes:
    step: the first step; row, segment and sample j belong to the same decoding sequence.
    remaining: i32[i, n], tokens that each row may sample before its chunk ends; 0 for padding.
    stops: i32[i, n, e], ids that end a row's response, -1 for none.
    num_steps: i32[i], maximum steps; at most `MAX_STEPS_PER_VISIT`.
    leads: i32[i, n], 1 for rows that keep the visit going; other rows decode only as long as one of
      these does.
  """

  step: StepInputs
  remaining: Int[Array, "i n"]
  stops: Int[Array, "i n e"]
  num_steps: Int[Array, "i"]
  leads: Int[Array, "i n"]


class Reading(NamedTuple):
  """Scores of a step with the top tokens after the samples of `ScoreInputs.top_rows`.

  Attributes:
    scores: f32[i, b], scores of the sampled and the forced tokens.
    ids: i32[i, b, k], the top tokens, as returned by `head.top_logprobs`.
    top: f32[i, b, k], scores of the first `ScoreInputs.num_top` of them.
  """

  scores: TokenScores
  ids: Array
  top: TokenScores


class _Layout(NamedTuple):
  """Layout of a step's or visit's inputs within one row of 32-bit words.

  Shapes exclude the instance axis.
  """

  tree: Any
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]


def pack(inputs: Any) -> tuple[np.ndarray, _Layout]:
  """Packs a record of arrays, such as `StepInputs`, into one i32[i, w]; also returns its layout.

  One transfer costs the same for one array as for another, and the transfers of twenty arrays take
  almost as long as a step of few rows.
  """
  leaves, tree = jax.tree.flatten(inputs)
  leaves = [np.ascontiguousarray(leaf) for leaf in leaves]
  words = [leaf.reshape(leaf.shape[0], -1).view(np.int32) for leaf in leaves]
  layout = _Layout(
    tree, tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype.str for leaf in leaves)
  )
  return np.concatenate(words, axis=1), layout


def unpack(words: Int[Array, "w"], layout: _Layout) -> Any:
  """Returns one instance's inputs, bit for bit as they were given to `pack`."""
  leaves, place = [], 0
  for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
    size = math.prod(shape)
    part = words[place : place + size].reshape(shape)
    leaves.append(lax.bitcast_convert_type(part, jnp.dtype(dtype)))
    place += size
  return jax.tree.unflatten(layout.tree, leaves)


def _num_penalties(inputs: StepInputs) -> int:
  """Returns the number of penalty entries per sample; 0 if no sample has penalties."""
  ids = inputs.sampling.penalty_ids
  return 0 if ids is None else ids.shape[-1]


def instance_step(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  decoder: Decoder,
) -> tuple[kv_layout.Pages, Int[Array, "b"], TokenScores]:
  """Runs one step of one instance (no instance axis): pages, sampled tokens i32[b], scores."""
  pages = kv_layout.copy_pages(pages, inputs.copies, inputs.num_copies)
  return _run_rows(params, pages, inputs, key, decoder=decoder)[:3]


def instance_reading(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  decoder: Decoder,
) -> tuple[kv_layout.Pages, Int[Array, "b"], Reading]:
  """Works like `instance_step`, and returns the top tokens after the samples that want them."""
  pages = kv_layout.copy_pages(pages, inputs.copies, inputs.num_copies)
  pages, tokens, scores, hidden = _run_rows(params, pages, inputs, key, decoder=decoder)
  # The rows of top tokens may be special even where the step's own are not.
  of_top = decoder.for_rows(is_plain=False)
  # Only their rows are computed: other samples of the step cost no more than without tops.
  assert inputs.scores is not None
  rows, size = inputs.scores.top_rows, hidden.shape[0]
  wanted, of_wanted = jax.tree.map(
    lambda leaf: leaf.at[rows].get(mode="clip"), (hidden, inputs.sampling)
  )
  num_rows = jnp.sum(rows < size, dtype=jnp.int32)
  count = min(MAX_TOP, decoder.shape.vocab_size)
  top = head.likeliest_scores(
    params, wanted, of_wanted, num_rows, count, inputs.scores.num_top, decoder=of_top
  )
  spread = lambda leaf: jnp.zeros_like(leaf).at[rows].set(leaf, mode="drop")
  return pages, tokens, Reading(scores, *jax.tree.map(spread, top))


def _run_rows(
  params: parameters.Params,
  pages: kv_layout.Pages,
  inputs: StepInputs,
  key: PRNGKeyArray,
  *,
  decoder: Decoder,
) -> tuple[kv_layout.Pages, Int[Array, "b"], TokenScores, Array]:
  """Works like `instance_step` after its page copies; also returns sampled hidden rows f[b, d]."""
  hidden, pages = transformer.forward(
    params,
    inputs.batch,
    pages,
    decoder=decoder,
    key_copies=inputs.key_copies,
    adapters=inputs.adapters,
    kinds=inputs.kinds,
  )
  sampled = hidden[inputs.sample_rows]
  sampled_ids = jnp.full(inputs.sample_rows.shape, -1, jnp.int32)
  tokens, scores = head.sample_and_score(
    params,
    sampled,
    sampled_ids if inputs.scores is None else inputs.scores.forced,
    inputs.sampling,
    inputs.seeds,
    inputs.positions,
    inputs.num_samples,
    key,
    decoder=decoder,
  )
  return pages, tokens, scores, sampled


class _Decoding(NamedTuple):
  """Loop state of a visit.

  Attributes:
    count: i32[], steps done.
    pages: pages of the instance.
    tokens: i32[n], each row's last token.
    positions: i32[n], position of that token.
    is_live: bool[n], whether the row is still decoding.
    sampled: i32[t, n], tokens by step, -1 where a row did not decode.
    scores: f32[t, n], scores of these tokens.
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
  decoder: Decoder,
) -> tuple[kv_layout.Pages, Int[Array, "t n"], TokenScores]:
  """Runs several decode steps of one instance (no instance axis), with the bits of single steps.

  A row's next token is fed back, and the slot of its key is read from its row of the page table. A
  row that sampled a stop id, or the last token of its chunk, is dead from then on: it writes to the
  dump page and attends to nothing. The loop ends when all leading rows are dead. All devices of the
  model axis hold the same rows and leave the loop together; instances exchange nothing in it.

  Returns:
    (pages, tokens i32[t, n], scores f32[t, n]) by step; tokens are -1 where a row was dead or the
    visit was over.
  """
  step, batch = inputs.step, inputs.step.batch
  page_size = kv_layout.page_size_of(pages, decoder)
  num_rows, num_segments = batch.tokens.shape[0], batch.segment_start.shape[0]
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  segments = jnp.arange(num_segments, dtype=jnp.int32)
  of_rows = lambda table: table[jnp.minimum(rows, num_segments - 1)]
  tables = of_rows(batch.page_table), *(of_rows(kind.page_table) for kind in step.kinds)
  row_of_segment = jnp.minimum(segments, num_rows - 1)

  def again(now: _Decoding) -> Array:
    return (now.count < inputs.num_steps) & jnp.any(now.is_live & (inputs.leads > 0))

  def decode(now: _Decoding) -> _Decoding:
    place = now.positions // page_size
    slots = []
    for table in tables:
      page = jnp.take_along_axis(table, place[:, None], axis=1)[:, 0]
      own = page * page_size + now.positions % page_size
      slots.append(jnp.where(now.is_live, own, 0))
    is_attended = now.is_live[row_of_segment] & (segments < batch.num_segments)
    one_step = step._replace(
      batch=batch._replace(
        tokens=now.tokens,
        positions=now.positions,
        slots=slots[0],
        segment_length=is_attended.astype(jnp.int32),
      ),
      positions=now.positions + 1,
      kinds=tuple(
        kind._replace(slots=own) for kind, own in zip(step.kinds, slots[1:], strict=True)
      ),
    )
    pages, tokens, scores, _ = _run_rows(params, now.pages, one_step, key, decoder=decoder)
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

  # Allocated for the maximum number of steps, so that no step count needs a program of its own.
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
    decoder: the model as it was decided; its slabs are spread over the mesh's model axis.
    mesh: `parallel.make_mesh`.
    max_programs: number of row buckets; more traces than that for one page shape mean an
      unintended retrace and fail. Engines that share a runner may hold different numbers of pages.
  """

  decoder: Decoder
  mesh: jax.sharding.Mesh
  max_programs: int

  def __post_init__(self):
    object.__setattr__(self, "decoder", self.decoder.on(self.mesh))

  @property
  def data_parallel_size(self) -> int:
    """Number of instances of the mesh."""
    return self.mesh.shape[parallel.INSTANCE_AXIS]

  def require_is_of(
    self,
    decoder: Decoder,
    mesh: jax.sharding.Mesh | None,
  ) -> None:
    """Refuses an engine with another model, numerics, or mesh (if given) than this runner's.

    Raises:
      ValueError: with the runner's configuration.
    """
    own, same = self.decoder, mesh in (None, self.mesh)
    if (own.shape, own.numerics) != (decoder.shape, decoder.numerics) or not same:
      raise ValueError(
        f"Engine.runner: got a runner of {own.numerics} for a model of {own.shape.num_layers}"
        f" layers on {self.mesh.size} device(s), expected the engine's own model, numerics and"
        " mesh; share a Runner only between equal engines."
      )

  @functools.cached_property
  def page_moves(self) -> page_moves_lib.PageMoves:
    """Programs that move pages, compiled once for all engines that share this runner."""
    return page_moves_lib.PageMoves(self.mesh)

  def _sharding(self, *spec: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P(*spec))

  def place_params(
    self, params: parameters.Params, *, what: str = "Runner.place_params: params"
  ) -> parameters.Params:
    """Returns the weights on the mesh: slabs sharded over `model`, replicated over instances.

    Raises:
      ValueError: if the weights have the wrong model, layout or dtype, or are not finite; `what`
        names the argument in the message.
    """
    weights.check(params, self.decoder, dtype=self.decoder.numerics.dtype, what=what)
    numerics_lib.require_finite(
      params, what=what, remedy="they cannot be sampled from: go back to an earlier checkpoint"
    )
    return parameters.placed(params, self.mesh)

  def place_adapters(
    self,
    params: parameters.Params,
    named: Mapping[str, Any],
    *,
    what: str = "Runner.place_adapters: adapters",
  ) -> adapters_lib.Chosen:
    """Returns adapters on the mesh, `adapters.Scaled` by name, for selection by row.

    Raises:
      ValueError: if an adapter does not fit the weights or is not finite; `what` names the argument
        in the message.
    """
    adapters_lib.check(params, named, what=what)
    pads = self.decoder.backend.traits.pads_adapters
    chosen = adapters_lib.stacked(params, named, pads=pads)
    return chosen._replace(forms=adapters_lib.placed(chosen.forms, self.mesh))

  def empty_pages(self, num_pages: int | Sequence[int], page_size: int) -> Any:
    """Returns zeroed pages f[i, k, m, ...] of every layer, as `kv_layout.empty_pages` has them."""
    one = jax.eval_shape(
      lambda: kv_layout.empty_pages(
        self.decoder,
        num_pages=num_pages,
        page_size=page_size,
        tensor_parallel_size=self.mesh.shape[parallel.MODEL_AXIS],
      )
    )
    shape, sharding = (self.data_parallel_size,), self._page_sharding
    return jax.tree.map(lambda s: jnp.zeros(shape + s.shape, s.dtype, device=sharding), one)

  @property
  def _page_sharding(self) -> jax.sharding.NamedSharding:
    """Sharding of pages before and after a step. It is explicit because otherwise the second step
    would be compiled again for an equivalent sharding with another spelling."""
    return self._sharding(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)

  @functools.cached_property
  def _step_program(self):
    return self._compiled(instance_step)

  @functools.cached_property
  def _masked_step_program(self):
    # For steps in which some row has a mask; the program without masks does not change.
    return self._compiled(instance_step)

  @functools.cached_property
  def _penalised_step_programs(self) -> dict[int, Any]:
    # For steps in which some row has penalties, by the number of entries; as for masks.
    return {}

  @functools.cached_property
  def _reading_programs(self) -> dict[int, Any]:
    # For steps with `ScoreInputs`, by the number of penalty entries; as for masks.
    return {}

  @functools.cached_property
  def _visit_program(self):
    return self._compiled(instance_visit)

  def _compiled(self, of_instance: Callable[..., Any]):
    """Returns the program of all instances, compiled once for each row bucket."""
    num_traces = collections.Counter()

    def step(params, pages, words, key, layout, is_plain):
      # Adapters of other shapes need other programs, like pages of another size.
      forms = jax.tree.map(lambda leaf: leaf.shape, params.get("adapters", ()))
      size = jax.tree.leaves(pages)[0].shape, is_plain, str(forms), layout.tree
      num_traces[size] += 1
      # JAX's caches know the kernel interpreter only after its first run.
      most = self.max_programs + self.decoder.numerics.is_interpreted
      count = num_traces[size]
      assert count <= most, (
        f"engine step: got trace {count}, expected one for each of {most} row buckets; an input"
        " changed its shape or type"
      )
      pages = jax.tree.map(lambda leaf: leaf[0], pages)
      decoder = self.decoder.for_rows(is_plain=is_plain)
      out = of_instance(params, pages, unpack(words[0], layout), key, decoder=decoder)
      pages, *found = jax.tree.map(lambda leaf: leaf[None], out)
      return pages, *parallel.to_all_processes(found, self.mesh)

    by_instance = jax.P(parallel.INSTANCE_AXIS)
    page_spec = jax.P(parallel.INSTANCE_AXIS, parallel.MODEL_AXIS)

    def spread(params, pages, words, key, layout, is_plain):
      # Replication over `model` is kept by us: all devices add the gathered slabs in the same
      # order.
      return jax.shard_map(
        functools.partial(step, layout=layout, is_plain=is_plain),
        mesh=self.mesh,
        # From the actual weights, because they may include adapters.
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
  ) -> tuple[Any, Any, Reading]:
    """Works like `step`, for inputs with `scores`; compiled on first use.

    Returns:
      (pages, tokens i32[i, b], scores and the top tokens), on the devices.
    """
    pages, inputs, is_plain = self._decided(pages, inputs)
    words, layout = self._packed(inputs)
    width = _num_penalties(inputs)
    program = self._reading_programs.get(width)
    if program is None:
      program = self._reading_programs[width] = self._compiled(instance_reading)
    return program(params, pages, words, key, layout, is_plain)

  @functools.cached_property
  def _turns(self) -> Iterator[int]:
    return itertools.count()

  def _packed(self, inputs: Any) -> tuple[np.ndarray, _Layout]:
    """Returns `pack(inputs)` after checking that all processes of the mesh have equal inputs."""
    if parallel.spans_processes(self.mesh):
      leaves = jax.tree_util.tree_leaves_with_path(inputs)
      agreement.compare(
        f"engine step {next(self._turns)}",
        {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
      )
    return pack(inputs)

  def _decided(self, pages: Any, inputs: StepInputs) -> tuple[Any, StepInputs, bool]:
    """Returns pages, inputs and `is_plain` such that the host does not wait for predicates.

    On a backend that `waits_for_predicates`, the page copies are made here, by programs of their
    own, and the step gets no room for any. It also gets no room for key copies if there are none,
    since they would be extra rows of a scatter; a step with key copies is a program of its own. For
    other backends, nothing changes.
    """
    if not self.decoder.backend.traits.waits_for_predicates:
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
    """Runs several decode steps; compiled on first use. `pages` is donated.

    Returns:
      (pages, tokens i32[i, t, n], scores f32[i, t, n]), on the devices; see `instance_visit`.
    """
    pages, step, is_plain = self._decided(pages, inputs.step)
    words, layout = self._packed(inputs._replace(step=step))
    return self._visit_program(params, pages, words, key, layout, is_plain)
