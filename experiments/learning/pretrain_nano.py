"""Pretrains the nano model on synthetic word problems and countdown.

Claim: 1.1 M parameters, from scratch, reach 35-65 % on held-out word problems and end nearly every
answer by themselves, within a budget of tokens that two CPU cores process in about half an hour.
The remaining problems are left to reinforcement learning.
Command: the two commands of the model card (seerjax/models/nano/README.md), one after the other.
Hardware: 2 CPU cores, 15 to 30 minutes each. Numbers: docs/results/nano.md

`--grow_from` starts from a smaller model (`models.growth`); random weights of the larger size would
take hours.

Runs `untiled`, since nothing here is compared bit by bit. Documents are batched by length, one per
row, so that positions are the same as in the engine.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import functools
import pathlib
import time
from typing import cast

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress

from experiments import measure
from experiments.learning import nano_corpus
from seerjax import checkpoint, numerics as numerics_lib
from seerjax.layer_kinds import Experts
from seerjax.models import (
  config as model_config,
  flax_module,
  growth,
  huggingface,
  loading,
  parameters,
  presets,
  tokenizer as tokenizer_lib,
)
from seerjax.models.decoder import decide

STEPS_PER_CHECKPOINT = 25
STEPS_PER_LINE = 10
LENGTHS = (64, 96, 128, 192, 256, 384)  # Longer documents (fewer than 0.1 %) are left out.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
  """Budget and optimiser.

  Attributes:
    num_tokens: tokens of all batches together, padding included.
    tokens_per_batch: rows of a batch times their length.
    learning_rate: peak, after a linear warm-up over the first 2 %; cosine to a tenth of it.
    prompt_weight: weight of prompt tokens in the loss; answer tokens weigh 1.
    brief_rate: share of word problems answered with the last line only.
    large_rate: share of word problems with operands up to 99.
    keeps_embeddings: whether to freeze the embeddings, so that words absent from a later training
      keep their meaning.
    keeps_unseen: whether a step leaves the embeddings of tokens absent from its batch unchanged;
      Adam would move them as far as others, because the loss lowers their probability.
    seed: seed of weights and documents.
  """

  num_tokens: int = 14_000_000
  tokens_per_batch: int = 3072
  learning_rate: float = 3e-3
  prompt_weight: float = 0.1
  brief_rate: float = nano_corpus.BRIEF_RATE
  large_rate: float = nano_corpus.LARGE_RATE
  keeps_embeddings: bool = False
  keeps_unseen: bool = False
  seed: int = 0

  def __post_init__(self):
    if self.num_tokens < self.tokens_per_batch or self.tokens_per_batch < LENGTHS[-1]:
      raise ValueError(
        f"PretrainConfig: got num_tokens={self.num_tokens}, tokens_per_batch="
        f"{self.tokens_per_batch}, expected at least one batch, of at least the longest document's"
        f" {LENGTHS[-1]} tokens; {PretrainConfig.num_tokens} and {PretrainConfig.tokens_per_batch}"
        " are usual."
      )
    if not 0 < self.learning_rate < float("inf"):
      raise ValueError(
        f"PretrainConfig.learning_rate: got {self.learning_rate}, expected a positive number; 3e-3"
        " is usual."
      )
    for field in ("prompt_weight", "brief_rate", "large_rate"):
      if not 0 <= vars(self)[field] <= 1:
        raise ValueError(
          f"PretrainConfig.{field}: got {vars(self)[field]}, expected a share between 0 and 1;"
          f" {vars(PretrainConfig)[field]} is usual."
        )


# (prompt, answer) pairs.
Documents = Iterator[tuple[str, str]]


def batches(
  tokenizer: tokenizer_lib.Tokenizer, config: PretrainConfig, documents: Documents
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields batches of documents: (tokens i32[b, t], loss weights f32[b, t] of the tokens)."""
  waiting: dict[int, list[tuple[list[int], int]]] = collections.defaultdict(list)
  end = tokenizer.encode(nano_corpus.END)
  for prompt, solution in documents:
    head = tokenizer.chat_ids([{"role": "user", "content": prompt}])
    ids = head + tokenizer.encode(solution) + end
    length = next((length for length in LENGTHS if len(ids) <= length), None)
    if length is None:
      continue
    waiting[length].append((ids, len(head)))
    if len(waiting[length]) == config.tokens_per_batch // length:
      tokens = np.zeros((len(waiting[length]), length), np.int32)
      weights = np.zeros(tokens.shape, np.float32)
      for row, (ids, head_length) in enumerate(waiting.pop(length)):
        tokens[row, : len(ids)] = ids
        weights[row, 1:head_length] = config.prompt_weight
        weights[row, head_length : len(ids)] = 1.0
      yield tokens, weights


def numerics_for(length: int) -> numerics_lib.NumericsConfig:
  """Returns the numerics of plain XLA with one segment per row, and large tiles of experts."""
  tile = 1 << (length - 1).bit_length()
  return numerics_lib.with_row_tile(
    numerics_lib.NumericsConfig(
      backend="untiled", expert_tile=64, query_tile=tile, kv_split=64, reduction_shards=1
    )
  )


def make_step(
  model: model_config.TransformerConfig,
  optimizer: optax.GradientTransformation,
  *,
  keeps_unseen: bool = False,
):
  """Returns the compiled `(params, opt_state, tokens, weights) -> (params, opt_state, metrics)`.

  With `keeps_unseen`, rows of `embed` for tokens outside `tokens` are not updated.
  """

  def loss(params, tokens, weights):
    numerics = numerics_for(tokens.shape[1])
    logits = flax_module.logits_of(params, tokens, decoder=decide(model, numerics))[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = weights[:, 1:]
    answers = (weights == 1.0).astype(jnp.float32)
    hits = (jnp.argmax(logits, axis=-1) == tokens[:, 1:]).astype(jnp.float32)
    metrics = dict(
      answer_loss=jnp.sum(losses * answers) / jnp.sum(answers),
      answer_hits=jnp.sum(hits * answers) / jnp.sum(answers),
    )
    return jnp.sum(losses * weights) / jnp.sum(weights), metrics

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, tokens, weights):
    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, tokens, weights)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    if keeps_unseen:
      is_seen = jnp.zeros(model.vocab_size, bool).at[tokens.reshape(-1)].set(True)
      updates = cast(dict[str, jax.Array], updates)
      updates = {**updates, "embed": jnp.where(is_seen[:, None], updates["embed"], 0.0)}
    return optax.apply_updates(params, updates), opt_state, metrics

  return step


def _is_embedding(params: parameters.Params) -> dict[str, bool]:
  return {name: name == "embed" for name in params}


def pretrain(
  config: PretrainConfig,
  model: model_config.TransformerConfig,
  start: str,
  directory: pathlib.Path,
  documents: Documents | None = None,
  grow_from: str = "",
) -> None:
  """Trains on `num_tokens` tokens and writes `directory`/model; resumes an earlier call.

  Args:
    config: budget and optimiser.
    model: shape of the model.
    start: a model directory to start from instead of random weights, or "".
    directory: output directory of checkpoints and the result.
    documents: endless documents; nano's corpus if None.
    grow_from: a smaller model, by name or directory, to grow to the shape, or "".

  Raises:
    FileNotFoundError: if there is no model to grow from.
    ValueError: if the result already exists, the smaller model cannot grow to the shape, or both
      `grow_from` and `start` are given.
  """
  if start and grow_from:
    raise ValueError(
      f"--grow_from: got {grow_from} and --start={start}, expected one of them; a model starts from"
      " its own weights or those of a smaller model."
    )
  if (directory / "model").exists():
    raise ValueError(
      f"--workdir: got {directory}, which holds a finished model, expected none or checkpoints to"
      " resume; choose another, or remove it."
    )
  numerics = numerics_for(LENGTHS[0])
  tokenizer = tokenizer_lib.load(pathlib.Path(huggingface.__file__).parent / "nano")
  num_steps = config.num_tokens // config.tokens_per_batch
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, num_steps // 50, num_steps, config.learning_rate / 10
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
  )
  if config.keeps_embeddings:
    optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), _is_embedding))
  documents = documents or nano_corpus.documents(
    config.seed, brief_rate=config.brief_rate, large_rate=config.large_rate
  )
  if start:
    params, model = huggingface.load(start, numerics)
  elif grow_from:
    params, small = huggingface.load(loading.path_of(grow_from), numerics)
    has_experts = isinstance(model.layers[0].feed_forward, Experts)
    grow = growth.upcycle if has_experts else growth.grow
    params = grow(params, small, model, seed=config.seed)
  else:
    params = parameters.init(numerics_lib.key(config.seed), model, numerics)
  opt_state, first = optimizer.init(params), 0
  fingerprint = numerics_lib.fingerprint(numerics)
  checkpoints = directory / "checkpoints"
  if (latest := checkpoint.latest_step(checkpoints)) is not None:
    abstract = jax.eval_shape(lambda: (params, opt_state))
    restored = checkpoint.restore(checkpoints, abstract, fingerprint=fingerprint)
    (params, opt_state), first = restored.state, latest
    print(f"resumed at step {first} of {num_steps}")
  step = make_step(model, optimizer, keeps_unseen=config.keeps_unseen)
  started, seen = time.monotonic(), 0
  columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[note]}")
  with rich.progress.Progress(*columns) as progress:
    bar = progress.add_task("pretrain", total=num_steps, completed=first, note="")
    for index, (tokens, weights) in enumerate(batches(tokenizer, config, documents)):
      if index >= num_steps:
        break
      if index < first:
        continue
      params, opt_state, metrics = step(params, opt_state, tokens, weights)
      seen += tokens.size
      if (index + 1) % STEPS_PER_LINE == 0:
        rate = seen / (time.monotonic() - started)
        note = " ".join(f"{name} {float(value):.3f}" for name, value in metrics.items())
        progress.update(bar, completed=index + 1, note=f"{note} {rate:,.0f} tok/s")
        if not progress.console.is_terminal:
          print(f"step {index + 1} of {num_steps}: {note} {rate:,.0f} tok/s", flush=True)
      if (index + 1) % STEPS_PER_CHECKPOINT == 0:
        checkpoint.save(
          checkpoints, index + 1, (params, opt_state), host_state={}, fingerprint=fingerprint
        )
  huggingface.save(directory / "model", params, model, dtype="bfloat16", tokenizer=tokenizer)
  seconds = time.monotonic() - started
  print(f"wrote {directory / 'model'} after {seen:,} tokens in {seconds:,.0f} s")


def main(args: flags.FlagValues) -> None:
  config = PretrainConfig(
    num_tokens=args.num_tokens,
    learning_rate=args.learning_rate,
    brief_rate=args.brief_rate,
    large_rate=args.large_rate,
    seed=args.seed,
  )
  pretrain(
    config,
    presets.get(args.preset),
    args.start,
    pathlib.Path(args.workdir),
    grow_from=args.grow_from,
  )


if __name__ == "__main__":
  flags.DEFINE_string(
    "workdir", "runs/pretrain_nano", "Output directory for checkpoints and the model."
  )
  flags.DEFINE_integer(
    "num_tokens", PretrainConfig.num_tokens, "Training budget in tokens.", lower_bound=1
  )
  flags.DEFINE_float("learning_rate", PretrainConfig.learning_rate, "Peak learning rate.")
  flags.DEFINE_float(
    "brief_rate", PretrainConfig.brief_rate, "Share of answers without intermediate steps."
  )
  flags.DEFINE_float(
    "large_rate", PretrainConfig.large_rate, "Share of problems with numbers up to 99."
  )
  flags.DEFINE_enum(
    "preset",
    "nano",
    ["nano", "nano-10m", "nano-gpu", "nano-moe"],
    "Preset of the model's shape, unless --start sets it.",
  )
  flags.DEFINE_string("start", "", "Model directory to continue from, with a new schedule.")
  flags.DEFINE_string("grow_from", "", "Smaller model to grow to --preset as the initial model.")
  flags.DEFINE_integer("seed", 0, "Seed of weights and documents.")
  measure.command(main)
