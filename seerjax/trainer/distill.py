"""Distillation of a draft model on its target's own completions.

    completions --(top-k of the target, computed once)--> batches by length --step--> the draft

The draft is trained either on the sampled tokens, by cross-entropy, or on the target's
distribution, by forward KL: for each position the `k` most likely tokens with their
log-probabilities, plus one entry for all other tokens. Both have the same minimum, the target's
distribution. The second gets more information from every token, and costs one forward pass of the
target over the completions.

Nothing here needs equal bits, so it runs `untiled`, plain XLA. Documents are batched by length, one
per row, so that positions are the same as in the engine.

Source: forward KL on the target's own samples: Zhou et al. 2023 (DistillSpec),
https://arxiv.org/abs/2310.08461.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import fields, numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int
from seerjax.models import (
  config as model_config,
  decoder as decoder_lib,
  flax_module,
)

LEAST_REST = 1e-6  # Minimum probability of the entry for all other tokens.


class Answers(NamedTuple):
  """Prompts and the target's completions, concatenated (numpy).

  Attributes:
    tokens: i32[n], each prompt followed by its completion.
    starts: i32[m + 1], start of each, and the end of the last.
    prompt_lengths: i32[m].
  """

  tokens: np.ndarray
  starts: np.ndarray
  prompt_lengths: np.ndarray

  def __len__(self) -> int:
    return len(self.prompt_lengths)


def answers_of(texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Answers:
  """Returns (prompt, completion) token pairs as one record; empty completions are dropped.

  Raises:
    ValueError: if no completion is left.
  """
  texts = [(prompt, answer) for prompt, answer in texts if len(answer)]
  _require_answers(len(texts))
  lengths = [len(prompt) + len(answer) for prompt, answer in texts]
  return Answers(
    np.concatenate([np.asarray([*prompt, *answer], np.int32) for prompt, answer in texts]),
    np.cumsum([0, *lengths], dtype=np.int32),
    np.asarray([len(prompt) for prompt, _ in texts], np.int32),
  )


def _require_answers(count: int) -> None:
  if not count:
    raise ValueError(
      "distill: got no answers, expected at least one with a token; generate responses with the"
      " target first."
    )


class Likely(NamedTuple):
  """The target's most likely tokens at each position of `Answers` (numpy).

  Attributes:
    ids: i32[n, k], the most likely next tokens.
    logprobs: f32[n, k], their log-probabilities, in nats, at temperature 1; the engine returns both
      for a scored prompt (`Engine.add_request`).
  """

  ids: np.ndarray
  logprobs: np.ndarray


class Batch(NamedTuple):
  """Documents of one padded length.

  Attributes:
    tokens: i32[b, t], zeros after a document's end.
    weights: f32[b, t], loss weight of each token as a target; 0 for none.
    ids: i32[b, t, k], likely next tokens at each position; k is 0 when training on sampled tokens.
    logprobs: f32[b, t, k], their log-probabilities.
  """

  tokens: Int[Array, "b t"]
  weights: Float[Array, "b t"]
  ids: Int[Array, "b t k"]
  logprobs: Float[Array, "b t k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
  """Budget and optimiser of a distillation.

  Attributes:
    num_tokens: total tokens of all batches, including padding.
    tokens_per_batch: rows of a batch times their length.
    learning_rate: peak rate, after a linear warm-up over the first 2 %; cosine decay to 1/100.
    weight_decay: weight decay of AdamW.
    prompt_weight: loss weight of prompt tokens; completion tokens have weight 1.
    lengths: padded document lengths, ascending; one compiled program each. Longer documents are
      dropped.
    seed: seed of weights and of the order of documents.
  """

  num_tokens: int = 5_000_000
  tokens_per_batch: int = 3072
  learning_rate: float = 4e-3
  weight_decay: float = 0.05
  prompt_weight: float = 0.1
  lengths: tuple[int, ...] = (80, 128, 256)
  seed: int = 0

  def __post_init__(self):
    fields.check(
      self,
      learning_rate=fields.positive("4e-3 is usual"),
      prompt_weight=fields.between(0, 1, f"{DistillConfig.prompt_weight} is usual"),
      weight_decay=fields.between(0, 1, f"{DistillConfig.weight_decay} is usual"),
    )
    lengths = self.lengths
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
      raise ValueError(
        f"DistillConfig.lengths: got {lengths}, expected ascending lengths of at least 2;"
        f" {DistillConfig.lengths} are usual."
      )
    if self.tokens_per_batch < lengths[-1] or self.num_tokens < self.tokens_per_batch:
      raise ValueError(
        f"DistillConfig: got num_tokens={self.num_tokens}, tokens_per_batch="
        f"{self.tokens_per_batch}, expected at least one batch, of at least the longest document's"
        f" {lengths[-1]} tokens; {DistillConfig.num_tokens} and {DistillConfig.tokens_per_batch}"
        " are usual."
      )

  @property
  def num_steps(self) -> int:
    """Approximate number of batches; some are smaller if their length does not divide the size."""
    return self.num_tokens // self.tokens_per_batch


# Batches.


def _length_of(count: int, lengths: Sequence[int]) -> int | None:
  """Returns the padded length of a document of `count` tokens; None if it is too long."""
  return next((length for length in lengths if count <= length), None)


def batches(answers: Answers, likely: Likely | None, config: DistillConfig) -> Iterator[Batch]:
  """Yields batches indefinitely, with a new document order in each epoch (numpy).

  Raises:
    ValueError: if no completion is short enough.
  """
  counts = np.diff(answers.starts)
  is_fitting = (counts > answers.prompt_lengths) & (counts <= config.lengths[-1])
  fitting = np.flatnonzero(is_fitting & (counts > 1))
  _require_answers(len(fitting))
  order = np.random.default_rng(config.seed)
  waiting: dict[int, list[int]] = {}
  while True:
    for index in order.permutation(fitting):
      length = _length_of(int(counts[index]), config.lengths)
      assert length is not None
      here = waiting.setdefault(length, [])
      here.append(int(index))
      if len(here) == config.tokens_per_batch // length:
        yield _batch(answers, likely, waiting.pop(length), length, config.prompt_weight)


def _batch(
  answers: Answers, likely: Likely | None, documents: list[int], length: int, prompt_weight: float
) -> Batch:
  shape = (len(documents), length)
  count = 0 if likely is None else likely.ids.shape[1]
  tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  ids, logprobs = np.zeros((*shape, count), np.int32), np.zeros((*shape, count), np.float32)
  for row, index in enumerate(documents):
    first, last = answers.starts[index], answers.starts[index + 1]
    size, prompt = last - first, answers.prompt_lengths[index]
    tokens[row, :size] = answers.tokens[first:last]
    weights[row, 1:prompt] = prompt_weight
    weights[row, prompt:size] = 1.0
    if likely is not None:
      ids[row, :size], logprobs[row, :size] = likely.ids[first:last], likely.logprobs[first:last]
  # Any: the record is typed as device arrays, and this one is created on the host.
  fields: dict[str, Any] = dict(tokens=tokens, weights=weights, ids=ids, logprobs=logprobs)
  return Batch(**fields)


# The forward pass.


def numerics_for(length: int) -> numerics_lib.NumericsConfig:
  """Returns numerics for plain XLA with one segment per row."""
  tile = 1 << (length - 1).bit_length()
  return numerics_lib.with_row_tile(
    numerics_lib.NumericsConfig(backend="untiled", query_tile=tile, kv_split=64, reduction_shards=1)
  )


def decoder_for(model: model_config.TransformerConfig, length: int) -> decoder_lib.Decoder:
  """Returns the decoder of sequences of a padded length; see `numerics_for`."""
  return decoder_lib.decide(model, numerics_for(length))


def losses_of(logits: Float[Array, "b t v"], batch: Batch) -> Float[Array, "b t"]:
  """Returns each token's loss as the successor of the token before it, f32[b, t], in nats.

  For sampled tokens this is the cross-entropy; for likely tokens (k > 0) the forward KL divergence
  of the distribution with k + 1 entries; the last entry covers all other tokens. The first
  token's loss is 0, since nothing precedes it.
  """
  logprobs = jax.nn.log_softmax(logits[:, :-1])
  if not batch.ids.shape[2]:
    found = -jnp.take_along_axis(logprobs, batch.tokens[:, 1:, None], axis=2)[..., 0]
  else:
    ids, target = batch.ids[:, :-1], batch.logprobs[:, :-1]
    mine = jnp.take_along_axis(logprobs, ids, axis=2)
    rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(target), axis=2), LEAST_REST)
    my_rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(mine), axis=2), LEAST_REST)
    found = jnp.sum(jnp.exp(target) * (target - mine), axis=2)
    found += rest * (jnp.log(rest) - jnp.log(my_rest))
  return jnp.pad(found, ((0, 0), (1, 0)))


# Training.


def make_optimizer(config: DistillConfig) -> optax.GradientTransformation:
  """Returns AdamW with gradient clipping, warm-up and cosine decay over the budget."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, max(config.num_steps // 50, 1), config.num_steps,
    config.learning_rate / 100,
  )  # fmt: skip
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay),
  )


Step = Callable[[Any, Any, Batch], tuple[Any, Any, dict[str, Array]]]


def make_step(
  model: model_config.TransformerConfig, optimizer: optax.GradientTransformation
) -> Step:
  """Returns the compiled `(params, opt_state, batch) -> (params, opt_state, metrics)`.

  Weights and optimiser state are donated. Metrics are f32[]: the loss; and over completion tokens,
  the loss and the share that equals the draft's most likely token.
  """

  def loss(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
    decoder = decoder_for(model, batch.tokens.shape[1])
    logits = flax_module.logits_of(params, batch.tokens, decoder=decoder)
    losses = losses_of(logits, batch)
    answers = (batch.weights == 1.0).astype(jnp.float32)
    hits = jnp.pad(jnp.argmax(logits[:, :-1], axis=-1), ((0, 0), (1, 0))) == batch.tokens
    total = jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)
    mean = lambda values: jnp.sum(values * answers) / jnp.maximum(jnp.sum(answers), 1.0)
    return total, dict(loss=total, answer_loss=mean(losses), answer_hits=mean(hits))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, dict[str, Array]]:
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics

  return step
