"""Whether rows really are invariant here: measured on this backend before a run relies on it.

A tiny decoder of two layers runs the same positions in different company, and the hidden rows and
scores that differ are counted:

    whole     three tiles of rows under `value_and_grad`   the yardstick, as the trainer sees them
    tiles     two tiles under it; one tile after another   batches of other sizes, prompts in chunks
    alone     one sequence in a batch of its own
    decode    one row at a time, over pages                as the engine continues a prompt

Sequences lie across the end of the first split (what comes before them are pages of zeros), so that
merging is measured too. Two programs are compiled for it, which takes seconds. What depends on a
model's own sizes, buckets and noise shows in that model alone: `measure_model` asks a run's own.
Both can show that a backend is unfit; that it is fit is what the tests of the contract show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib, parallel
from seerjax.backends import choice
from seerjax.engine import engine as engine_lib, runner as runner_lib, sizes
from seerjax.models import config as model_config, head, kv_layout, parameters, transformer
from seerjax.models.loading import Model
from seerjax.ops import logprobs, rotary, sampling
from seerjax.trainer import losses, step as step_lib
from seerjax.types import (
  Completion,
  Problem,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  TokenBatch,
  TokenScores,
  TrainBatch,
  Verdict,
)

SEQUENCE = 6  # Positions of one sequence.
MODEL_TOKENS = 4  # Tokens that each request of `measure_model` says.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """What a measurement saw.

  Attributes:
    num_values: numbers that were compared.
    num_differing: of them, whose bits were not those of the same row in the largest batch.
    by_comparison: (name, differing, compared) of each comparison.
  """

  num_values: int
  num_differing: int
  by_comparison: tuple[tuple[str, int, int], ...]

  @property
  def is_invariant(self) -> bool:
    """No bit differs."""
    return self.num_differing == 0

  def __str__(self) -> str:
    counted = f"{self.num_differing} of {self.num_values} values differ"
    if self.is_invariant:
      return f"rows are invariant: {counted}"
    where = ", ".join(f"{name} {bad} of {all_}" for name, bad, all_ in self.by_comparison if bad)
    return f"rows are NOT invariant: {counted} ({where})"


def _model(
  numerics: numerics_lib.NumericsConfig, width: int
) -> model_config.TransformerConfig:
  """Returns a small model whose heads have `width` features."""
  heads = max(numerics.reduction_shards or 8, 2)
  return model_config.TransformerConfig(
    vocab_size=2 * width * heads,
    # A width at which XLA:CPU sums a row of 8 to 31 unlike one of more: of 72 or 256 features all
    # rows agreed, untiled too, and nothing would have been measured.
    hidden_size=128,
    intermediate_size=max(width, 12) * heads,
    num_layers=2,
    num_heads=2 * heads,
    num_kv_heads=heads,
    head_dim=width,
    rotary=rotary.RotaryConfig(head_dim=width),
    is_tied=False,
  )


def _params(
  config: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> parameters.Params:
  """Weights from numpy (nothing to compile), large enough that every part matters."""
  rng = np.random.default_rng(0)

  def leaf(path, shape):
    noise = 0.15 * rng.standard_normal(shape.shape, np.float32)
    return jnp.asarray(noise + np.float32("norm" in path[-1].key), numerics.dtype)

  layout = parameters.shapes(config, numerics.reduction_shards)
  return jax.tree_util.tree_map_with_path(leaf, layout)


def _first_position(numerics: numerics_lib.NumericsConfig) -> int:
  """Returns where sequences begin: half of each is before the end of the first split."""
  return max(0, numerics.kv_split - SEQUENCE // 2)


def _splits(numerics: numerics_lib.NumericsConfig) -> int:
  return -(-(_first_position(numerics) + SEQUENCE) // numerics.kv_split)


def _rows(
  tokens: np.ndarray,
  first: int,
  num_rows: int,
  capacity: int,
  numerics: numerics_lib.NumericsConfig,
) -> TokenBatch:
  """Rows `first` to `first + num_rows` of sequences laid side by side, in a batch of `capacity`.

  A page is a split; sequence j owns `width` of them from 1 + j * width.
  """
  width = _splits(numerics)
  row = np.arange(first, first + num_rows)
  sequence, position = row // SEQUENCE, _first_position(numerics) + row % SEQUENCE
  page = 1 + sequence * width + position // numerics.kv_split
  is_start = (position % numerics.query_tile == 0) | (row % SEQUENCE == 0) | (row == first)
  starts = np.flatnonzero(is_start)

  def padded(values: np.ndarray) -> np.ndarray:
    missing = [(0, capacity - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values.astype(np.int32), missing)

  # Any: the records are typed as device arrays, and this one is made on the host.
  fields: dict[str, Any] = dict(
    tokens=padded(tokens[row]),
    positions=padded(position),
    slots=padded(page * numerics.kv_split + position % numerics.kv_split),
    num_rows=np.int32(num_rows),
    segment_start=padded(starts),  # A row has a segment of its own at most.
    segment_length=padded(np.diff(np.append(starts, num_rows))),
    page_table=padded(1 + sequence[starts][:, None] * width + np.arange(width)[None, :]),
    num_segments=np.int32(len(starts)),
  )
  return TokenBatch(**fields)


@functools.cache
def measure(numerics: numerics_lib.NumericsConfig) -> Finding:
  """Counts the bits that a row's company changes. Measured once for each numerics in a process.

  Args:
    numerics: any that can run here; an implementation without kernels refuses as `forward` does.

  Returns:
    Finding.
  """
  # Kernels multiply tiles.
  config = _model(numerics, choice.backend_of(numerics).smallest_width)
  numerics = model_config.numerics_for(config, numerics)
  backend = choice.backend_of(numerics)
  params = _params(config, numerics)
  tile = numerics.row_tile
  total = 3 * tile
  num_sequences = -(-total // SEQUENCE)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, config.vocab_size, num_sequences * SEQUENCE)

  def batch_of(first: int, num_rows: int, capacity: int) -> TokenBatch:
    return _rows(tokens, first, num_rows, capacity, numerics)

  def scored(weights, rows, one):
    # The head without its sampling, whose sort and noise take longer to compile than all else.
    hidden, targets = rows
    logits = head.logits_rows(backend, config, None, weights, hidden, one)
    return logprobs.score_rows(logits, logits / jnp.float32(0.7), targets, one, numerics)

  def scores_of(params, hidden, targets, num_rows):
    if not backend.holds_logits:
      # One kernel samples and scores.
      count = targets.shape[0]
      drawn_by = sampling.sampling_rows([SamplingParams(temperature=0.7)] * count)
      _, scores = head.sample_and_score(
        params, hidden, targets, jax.tree.map(jnp.asarray, drawn_by),
        jnp.zeros(count, jnp.uint32), jnp.zeros(count, jnp.int32), num_rows,
        numerics_lib.key(0), config=config, numerics=numerics, backend=backend,
      )  # fmt: skip
      return scores
    weights = {"final_norm": params["final_norm"], "head": params["head"]}
    return backend.map_rows(scored, weights, (hidden, targets), num_rows)

  def run(params, pages, batch: TokenBatch):
    hidden, pages = transformer.forward(
      params, batch, pages, config=config, numerics=numerics, backend=backend
    )
    targets = (batch.tokens * 7 + 3) % config.vocab_size
    return hidden, scores_of(params, hidden, targets, batch.num_rows), pages

  def loss(params, pages, batch):
    hidden, scores, _ = run(params, pages, batch)
    # All that is returned is used: what XLA could remove would change the program around it.
    value = jnp.mean(scores.logprob) + jnp.mean(scores.raw_logprob) + jnp.mean(scores.entropy)
    return value, (hidden, scores)

  forward = jax.jit(run)
  backward = jax.jit(jax.value_and_grad(loss, has_aux=True))
  width = _splits(numerics)
  empty = kv_layout.empty_pages(
    config,
    numerics,
    num_pages=1 + num_sequences * width,
    page_size=numerics.kv_split,
    backend=backend,
  )

  def numbers(hidden, scores: TokenScores, count: int) -> np.ndarray:
    """f32[count, d + 3]."""
    columns = [np.asarray(hidden, np.float32), *(np.asarray(s)[:, None] for s in scores)]
    return np.concatenate(columns, axis=1)[:count]

  def under_gradient(num_rows: int) -> np.ndarray:
    (_, (hidden, scores)), _ = backward(params, empty, batch_of(0, num_rows, total))
    return numbers(hidden, scores, num_rows)

  def in_steps(num_rows: int, step: int) -> np.ndarray:
    parts, pages = [], empty
    for first in range(0, num_rows, step):
      count = min(step, num_rows - first)
      hidden, scores, pages = forward(params, pages, batch_of(first, count, tile))
      parts.append(numbers(hidden, scores, count))
    return np.concatenate(parts)

  whole = under_gradient(total)
  found = {
    "two tiles": under_gradient(2 * tile),
    "tile by tile": in_steps(total, tile),
    "alone": in_steps(min(SEQUENCE, tile), tile),
    "decode": in_steps(SEQUENCE, 1),
  }
  # `!=` and not bits: a NaN, too, must not pass.
  compared = tuple(
    (name, int(np.sum(part != whole[: len(part)])), part.size) for name, part in found.items()
  )
  return Finding(
    num_values=sum(count for _, _, count in compared),
    num_differing=sum(bad for _, bad, _ in compared),
    by_comparison=compared,
  )


def measure_model(
  model: model_config.TransformerConfig,
  params: parameters.Params,
  *,
  numerics: numerics_lib.NumericsConfig,
  config: engine_lib.EngineConfig,
  runner: runner_lib.Runner | None = None,
  trainer: step_lib.Trainer | None = None,
  pack: Callable[[Sequence[RolloutGroup], np.ndarray], TrainBatch] | None = None,
) -> Finding:
  """Counts the bits that company, bucket and gradient change of what a run's own model says.

  A few short requests are sampled, noise included, each alone and step by step in the smallest row
  bucket, then side by side in every bucket, in the run's visits; the trainer then scores what they
  sampled, under the gradient. With the run's `runner` and `trainer` nothing is compiled that the
  run does not need.

  Args:
    model: shape of the model.
    params: that are going to be run (`parameters.compute_params`).
    numerics: the run's.
    config: the run's engine.
    runner: of the run; its own if None.
    trainer: of the run; None compares engines alone.
    pack: makes the trainer's batches, `(groups, advantages f32[b, g])`; needed with a trainer.

  Raises:
    ValueError: as `Engine`.
  """
  numerics = model_config.numerics_for(model, numerics)
  config = sizes.with_buckets(config, model, numerics)
  context = min(config.max_context, model.max_context)
  requests = _requests(model, numerics, context)
  if runner is None:
    runner = runner_lib.Runner(model, numerics, parallel.make_mesh(), len(config.row_buckets))

  def answers(requests: Sequence[Request], bucket: int, steps: int) -> list[Completion]:
    buckets = tuple(sorted({bucket, config.row_buckets[-1]}))
    engine = engine_lib.Engine(
      Model(model, params, numerics),
      config=dataclasses.replace(config, row_buckets=buckets, steps_per_visit=steps),
      key=numerics_lib.key(0),
      runner=runner,
    )
    return engine.generate(requests)

  alone = [answers([request], config.row_buckets[0], 1)[0] for request in requests]
  compared, smaller = [], 0
  for bucket in config.row_buckets:
    # Where no run's decoding rows need the bucket, its visits are no program of the run's.
    steps = config.steps_per_visit if max(1, config.max_sequences) > smaller else 1
    found = answers(requests, bucket, steps)
    compared.append((f"bucket {bucket}", _num_differing(found, alone), _num_values(alone)))
    smaller = bucket
  if trainer is not None:
    assert pack is not None
    verdict = Verdict(reward=0.0, correct=False, well_formed=True)
    rollouts = [
      Rollout(request=request, completion=completion, verdict=verdict)
      for request, completion in zip(requests, alone, strict=True)
    ]
    problem = Problem(problem_id="self_test", prompt="")
    group = RolloutGroup(group_index=0, problem=problem, rollouts=tuple(rollouts))
    batch = pack([group], np.zeros((1, len(rollouts)), np.float32))
    reference = None
    if trainer.loss.kl_coefficient:
      reference = np.asarray(trainer.scores(params, batch).logprob)
    _, _, scores = trainer.gradient(params, batch, losses.denominators(batch), None, reference)
    mask = np.asarray(batch.loss_mask)
    bad = int(np.sum((scores.logprob != batch.behaviour_logprobs)[mask]))
    bad += int(np.sum((scores.raw_logprob != batch.raw_logprobs)[mask]))
    compared.append(("trainer", bad, 2 * int(mask.sum())))
  return Finding(
    num_values=sum(count for _, _, count in compared),
    num_differing=sum(bad for _, bad, _ in compared),
    by_comparison=tuple(compared),
  )


def _requests(
  model: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig, context: int
) -> list[Request]:
  """A few requests of lengths about the query tile, each with sampling of its own."""
  rng = np.random.default_rng(2)
  tile = numerics.query_tile
  kinds = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=3))
  requests = []
  for index, length in enumerate((1, tile, tile + 1, 2 * tile + 1)):
    prompt = rng.integers(0, model.vocab_size, max(1, min(length, context - MODEL_TOKENS)))
    sampling = dataclasses.replace(
      kinds[index % len(kinds)], max_tokens=min(MODEL_TOKENS, context - len(prompt))
    )
    requests.append(
      Request(
        request_id=str(index), prompt=tuple(prompt.tolist()), sampling=sampling, seed=index
      )
    )
  return requests


def _num_values(completions: Sequence[Completion]) -> int:
  return sum(3 * len(completion.tokens) for completion in completions)


def _num_differing(found: Sequence[Completion], wanted: Sequence[Completion]) -> int:
  """Returns how many tokens and log-probabilities differ; all that follow another token do."""
  count = 0
  for one, other in zip(found, wanted, strict=True):
    for left, right in (
      (one.tokens, other.tokens),
      (one.behaviour_logprobs, other.behaviour_logprobs),
      (one.raw_logprobs, other.raw_logprobs),
    ):
      same = np.asarray(left) == np.asarray(right)
      count += int(np.sum(~same))
  return count


def require_model(finding: Finding, numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses a model whose own bits depend on company here.

  Args:
    finding: of `measure_model`.
    numerics: that were measured.

  Raises:
    ValueError: with the finding.
  """
  numerics = choice.decided(numerics)
  if not finding.is_invariant:
    raise ValueError(
      f"self_test: got a model of which, in {numerics.implementation} {numerics.compute_dtype} on"
      f" {jax.devices()[0].device_kind}, {finding}; expected 0 that differ. Set"
      " NumericsConfig.implementation='tiled' or another row_tile, or, where there is that flag,"
      " pass --bitwise=False to go on without equal bits."
    )


def check_model(
  model: model_config.TransformerConfig,
  params: parameters.Params,
  *,
  numerics: numerics_lib.NumericsConfig,
  config: engine_lib.EngineConfig,
  runner: runner_lib.Runner,
  trainer: step_lib.Trainer | None = None,
  pack: Callable[[Sequence[RolloutGroup], np.ndarray], TrainBatch] | None = None,
  say: Callable[[str], None] = print,
  bitwise: bool = True,
) -> None:
  """Says what `measure_model` finds of the model at hand, before anything is sampled of it.

  Args:
    model: as for `measure_model`, like the rest up to `pack`.
    params: weights in compute dtype.
    numerics: what decides bits.
    config: sizes of the engine.
    runner: compiled programs.
    trainer: whose forward is asked too, or None.
    pack: what makes its batches.
    say: takes one line for people.
    bitwise: whether to refuse a model whose bits depend on company.

  Raises:
    ValueError: with `bitwise`, as `require_model`.
  """
  finding = measure_model(
    model, params, numerics=numerics, config=config, runner=runner, trainer=trainer, pack=pack
  )
  say(f"of this run's model: {finding}")
  if bitwise:
    require_model(finding, numerics)


def describe(numerics: numerics_lib.NumericsConfig) -> str:
  """Returns one line: where we are, what runs, and what the measurement found."""
  numerics, devices = choice.decided(numerics), jax.devices()
  return (
    f"{devices[0].platform} ({devices[0].device_kind}, {len(devices)}"
    f" device{'s' if len(devices) > 1 else ''}), JAX {jax.__version__},"
    f" {numerics.implementation} {numerics.compute_dtype}: {measure(numerics)}"
  )


def require(numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses numerics whose rows are not invariant here.

  Raises:
    ValueError: with the finding.
  """
  numerics = choice.decided(numerics)
  finding = measure(numerics)
  if not finding.is_invariant:
    raise ValueError(
      f"self_test: got implementation={numerics.implementation!r} on"
      f" {jax.devices()[0].device_kind}, where {finding}; expected 0 that differ. Set"
      " NumericsConfig.implementation='tiled', or pass --bitwise=False to go on without equal bits."
    )
