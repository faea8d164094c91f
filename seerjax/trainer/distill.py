"""A draft learns from its target's own answers.

    answers of the target --(likely, of the target, once)--> batches by length --step--> the draft

Either from the tokens that the target sampled, by cross-entropy, or from what it might have said
there, by forward KL to its distribution: of each position the `k` likeliest tokens with their
log-probabilities, and one entry for all others together. Both have the same minimum, the target's
own distribution; the second sees more of it in every token, and costs one forward pass of the
target over the answers.

Nothing here is compared bit by bit, so it runs `untiled`, plain XLA; documents are batched by
length, one a row, so that a position means the same here as it does in the engine.

Source: forward KL on the target's own samples: Zhou et al. 2023 (DistillSpec),
https://arxiv.org/abs/2310.08461.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from seerjax import fields, numerics as numerics_lib
from seerjax.array_typing import Array, Float, Int
from seerjax.models import config as model_config, flax_module, parameters

LEAST_REST = 1e-6  # Of probability: what is left to all other tokens, at least.


class Answers(NamedTuple):
  """Prompts and the target's answers to them, one behind the other (numpy).

  Attributes:
    tokens: i32[n], each prompt and behind it its answer.
    starts: i32[m + 1], where each begins, and where the last ends.
    prompt_lengths: i32[m].
  """

  tokens: np.ndarray
  starts: np.ndarray
  prompt_lengths: np.ndarray

  def __len__(self) -> int:
    return len(self.prompt_lengths)


def answers_of(texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Answers:
  """Returns prompts and answers (tokens each) as one record.

  Raises:
    ValueError: if there is no answer.
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
      "distill: got no answers, expected at least one with a token; let the target answer some"
      " prompts first."
    )


class Likely(NamedTuple):
  """What a target might have said, by token of the answers (numpy).

  Attributes:
    ids: i32[n, k], of the tokens that are likeliest to come next.
    logprobs: f32[n, k], of these, in nats, temperature 1.
  """

  ids: np.ndarray
  logprobs: np.ndarray


class Batch(NamedTuple):
  """Documents of one length.

  Attributes:
    tokens: i32[b, t], zeros behind a document's end.
    weights: f32[b, t], of each token as a target; 0 for what is not learnt.
    ids: i32[b, t, k], likely tokens behind each; k is 0 where sampled tokens are learnt.
    logprobs: f32[b, t, k], of these.
  """

  tokens: Int[Array, "b t"]
  weights: Float[Array, "b t"]
  ids: Int[Array, "b t k"]
  logprobs: Float[Array, "b t k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
  """Budget and optimiser.

  Attributes:
    num_tokens: tokens of all batches together, padding included.
    tokens_per_batch: rows of a batch times their length.
    learning_rate: peak, after a linear warm-up over the first 2 %; cosine to a hundredth of it.
    weight_decay: of AdamW.
    prompt_weight: weight of prompt tokens in the loss; answer tokens weigh 1.
    lengths: of documents, padding included, ascending; one compiled program each. Longer documents
      are left out.
    seed: of weights and of the order of documents.
  """

  num_tokens: int = 5_000_000
  tokens_per_batch: int = 3072
  learning_rate: float = 4e-3
  weight_decay: float = 0.05
  prompt_weight: float = 0.1
  lengths: tuple[int, ...] = (80, 128, 256)
  seed: int = 0

  def __post_init__(self):
    fields.check(self)
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
    if not 0 < self.learning_rate < math.inf:
      raise ValueError(
        f"DistillConfig.learning_rate: got {self.learning_rate}, expected a positive number; 4e-3"
        " is usual."
      )
    for field in ("prompt_weight", "weight_decay"):
      if not 0 <= vars(self)[field] <= 1:
        raise ValueError(
          f"DistillConfig.{field}: got {vars(self)[field]}, expected a number between 0 and 1;"
          f" {vars(DistillConfig)[field]} is usual."
        )

  @property
  def num_steps(self) -> int:
    """Batches, about: those of a length that does not divide `tokens_per_batch` are smaller."""
    return self.num_tokens // self.tokens_per_batch


# Batches.


def _length_of(count: int, lengths: Sequence[int]) -> int | None:
  """Returns the padded length of a document of `count` tokens; None if it is too long."""
  return next((length for length in lengths if count <= length), None)


def batches(
  answers: Answers, likely: Likely | None, config: DistillConfig
) -> Iterator[Batch]:
  """Yields batches without end, the documents in a new order each time (numpy).

  Raises:
    ValueError: if there is no answer that is short enough.
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
  # Any: the record is typed as device arrays, and this one is made on the host.
  fields: dict[str, Any] = dict(tokens=tokens, weights=weights, ids=ids, logprobs=logprobs)
  return Batch(**fields)


# The forward pass.


def numerics_for(length: int) -> numerics_lib.NumericsConfig:
  """Returns plain XLA with one segment a row."""
  tile = 1 << (length - 1).bit_length()
  return numerics_lib.with_row_tile(
    numerics_lib.NumericsConfig(
      implementation="untiled", query_tile=tile, kv_split=64, reduction_shards=1
    )
  )


def likely_of(
  params: parameters.Params,
  model: model_config.TransformerConfig,
  answers: Answers,
  *,
  lengths: Sequence[int] = DistillConfig.lengths,
  count: int = 16,
  rows: int = 32,
) -> Likely:
  """Returns what a target might have said at every place of its answers.

  Args:
    params: its weights, f32, of one slab (`numerics_for`).
    model: its shape.
    answers: of it; longer ones than the last of `lengths` get none.
    lengths: of documents, padding included.
    count: k, tokens of each place.
    rows: documents that go through it together.

  Raises:
    ValueError: if there is no answer, or `count` is not in the vocabulary.
  """
  _require_answers(len(answers))
  if not 1 <= count < model.vocab_size:
    raise ValueError(
      f"distill: got count={count} likely tokens, expected 1 <= count < {model.vocab_size}, the"
      " vocabulary; 16 are usual."
    )

  @jax.jit
  def of_rows(tokens: Array) -> tuple[Array, Array]:
    numerics = numerics_for(tokens.shape[1])
    logits = flax_module.logits_of(params, tokens, config=model, numerics=numerics)
    logprobs, ids = lax.top_k(jax.nn.log_softmax(logits), count)
    return ids.astype(jnp.int32), logprobs

  size = len(answers.tokens)
  ids, logprobs = np.zeros((size, count), np.int32), np.zeros((size, count), np.float32)
  padded = np.asarray([_length_of(int(n), lengths) or 0 for n in np.diff(answers.starts)])
  for length in lengths:
    documents = np.flatnonzero(padded == length)
    for begin in range(0, len(documents), rows):
      chosen = documents[begin : begin + rows]
      tokens = np.zeros((rows, length), np.int32)
      for row, index in enumerate(chosen):
        first, last = answers.starts[index], answers.starts[index + 1]
        tokens[row, : last - first] = answers.tokens[first:last]
      found = jax.device_get(of_rows(tokens))
      for row, index in enumerate(chosen):
        first, last = answers.starts[index], answers.starts[index + 1]
        ids[first:last] = found[0][row, : last - first]
        logprobs[first:last] = found[1][row, : last - first]
  return Likely(ids, logprobs)


def losses_of(logits: Float[Array, "b t v"], batch: Batch) -> Float[Array, "b t"]:
  """Returns each token's loss as what follows the token before it, f32[b, t], in nats.

  Of sampled tokens that is the cross-entropy; of likely ones (k > 0) the forward KL divergence of
  the distribution with k + 1 entries, the last of which is all other tokens. The first token's loss
  is 0: nothing stands before it.
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


# Learning.


def make_optimizer(config: DistillConfig) -> optax.GradientTransformation:
  """Returns AdamW under a clipped norm, warmed up and cooled down over the budget."""
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

  It takes the place of the state that it began from. Metrics are f32[]: the loss, and of the
  answers' tokens the loss and the share of which the draft's likeliest token is the one said.
  """

  def loss(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
    numerics = numerics_for(batch.tokens.shape[1])
    logits = flax_module.logits_of(params, batch.tokens, config=model, numerics=numerics)
    losses = losses_of(logits, batch)
    answers = (batch.weights == 1.0).astype(jnp.float32)
    said = jnp.pad(jnp.argmax(logits[:, :-1], axis=-1), ((0, 0), (1, 0))) == batch.tokens
    total = jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)
    mean = lambda values: jnp.sum(values * answers) / jnp.maximum(jnp.sum(answers), 1.0)
    return total, dict(loss=total, answer_loss=mean(losses), answer_hits=mean(said))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, dict[str, Array]]:
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics

  return step
