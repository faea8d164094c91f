"""Compares a separate draft model with a draft layer on the target's hidden states.

Claim: measures whether a draft layer that reads the target's last hidden state (EAGLE's idea)
accepts more tokens than a separate draft model trained on the same tokens of the target's
completions. Both are trained on these tokens with the same optimiser and batches; then each drafts
chains along held-out completions, with the target's noise, so that a drafted token is accepted if
it equals the completion's token.
Command: bash launch/local.sh experiments.draft_kinds --workdir=runs/draft_kinds
Hardware: 2 CPU cores, about 10 minutes. Numbers: docs/results/speculation_targets.md

  target -- completions, temperature 1, train and held-out --> answers.npz, heldout.npz
  model  -- trained (trainer.distill)        -->  acceptance by position, tokens per step
  layer  -- trained (trainer.feature_draft)  -->  the same; from the second token on it reads its
                                                  own hidden states

Each part is kept in --workdir and reused; a table is printed and written there.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import itertools
import pathlib
from typing import Any, NamedTuple

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import distill_draft
from seerjax import numerics as numerics_lib
from seerjax.array_typing import Array
from seerjax.models import flax_module, huggingface, loading, parameters, presets
from seerjax.run import command_line, presets as run_presets
from seerjax.trainer import distill, feature_draft

# Tokens of a chain; documents per batch; tokens to which documents are padded.
LENGTH, ROWS, PADDED = 8, 16, 128

# (tokens [b, t], last known position i32[b], noise f32[b, t, v]) -> next ids i32[b, LENGTH].
Drafts = Callable[[Array, Array, Array], Array]


class Found(NamedTuple):
  """Acceptance counts of a draft's chains.

  Attributes:
    steps: verification steps of the target, one per chain.
    said: generated tokens of all completions.
    reached: by position, chains whose earlier tokens were all accepted.
    held: by position, chains whose token was accepted there.
  """

  steps: int
  said: int
  reached: np.ndarray
  held: np.ndarray


def noise_of(seeds: Array, vocab_size: int) -> Array:
  """Returns the engine's sampling noise f32[b, t, v] for the token at each position."""
  key = numerics_lib.key(0)

  def draw(seed: Array, place: Array) -> Array:
    folded = jax.random.fold_in(jax.random.fold_in(key, seed), place)
    with numerics_lib.pinned_randomness():
      return jax.random.gumbel(folded, (vocab_size,), jnp.float32)

  return jax.vmap(lambda seed: jax.vmap(lambda p: draw(seed, p))(jnp.arange(PADDED)))(seeds)


def of_model(params: parameters.Params, model: Any) -> Drafts:
  """Returns the drafter of a separate draft model.

  The model reads the completion's tokens instead of its own drafts: both are equal up to the first
  rejected token, and later tokens do not count.
  """

  @jax.jit
  def drafts(tokens: Array, last: Array, noise: Array) -> Array:
    logits = flax_module.logits_of(
      params, tokens, config=model, numerics=distill.numerics_for(PADDED)
    )
    drawn = jnp.argmax(logits[:, :-1] + noise[:, 1:], axis=-1)  # The token at position + 1.
    places = jnp.minimum(last[:, None] + jnp.arange(LENGTH)[None], PADDED - 2)
    return jnp.take_along_axis(drawn, places, axis=1)

  return drafts


def of_layer(draft: parameters.Params, target: parameters.Params, model: Any) -> Drafts:
  """Returns the drafter of a draft layer.

  The target's hidden states are known for all positions before the last token.
  """

  @jax.jit
  def drafts(tokens: Array, last: Array, noise: Array) -> Array:
    hidden = feature_draft.target_rows(target, tokens, model=model)
    everyone = jnp.arange(tokens.shape[0])

    def again(hidden: Array, ahead: Array) -> tuple[Array, Array]:
      place = jnp.minimum(last + ahead, PADDED - 2)
      rows = feature_draft.rows_of(draft, target, hidden, tokens, model=model)
      own = rows[everyone, place]
      logits = feature_draft.logits_of(target, own, model=model)
      drawn = jnp.argmax(logits + noise[everyone, place + 1], axis=-1)
      return hidden.at[everyone, place].set(own), drawn

    return jax.lax.scan(again, hidden, jnp.arange(LENGTH))[1].T

  return drafts


def chains(drafts: Drafts, answers: distill.Answers, vocab_size: int) -> Found:
  """Replays each completion step by step with a draft's chains; a document's index is its seed."""
  counts, prompts = np.diff(answers.starts), answers.prompt_lengths
  fitting = [index for index in range(len(answers)) if counts[index] < PADDED]
  reached, held = np.zeros(LENGTH, np.int64), np.zeros(LENGTH, np.int64)
  steps = said = 0
  noises = jax.jit(functools.partial(noise_of, vocab_size=vocab_size))
  for begin in range(0, len(fitting), ROWS):
    part = fitting[begin : begin + ROWS]
    tokens, last = np.zeros((ROWS, PADDED), np.int32), np.zeros(ROWS, np.int32)
    end, seeds = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.uint32)
    for row, index in enumerate(part):
      first = answers.starts[index]
      tokens[row, : counts[index]] = answers.tokens[first : first + counts[index]]
      last[row], end[row], seeds[row] = prompts[index] - 1, counts[index] - 1, index
    noise = noises(jnp.asarray(seeds))
    said += int((end - last).sum())
    while (last < end).any():
      found = np.asarray(drafts(jnp.asarray(tokens), jnp.asarray(last), noise))
      for row in np.flatnonzero(last < end):
        most = min(LENGTH, int(end[row] - last[row]) - 1)  # The target always adds the last token.
        place = 0
        while place < most:
          reached[place] += 1
          if found[row, place] != tokens[row, last[row] + 1 + place]:
            break
          held[place] += 1
          place += 1
        last[row] += place + 1
        steps += 1
  return Found(steps, said, reached, held)


def heldout_answers(target: loading.Model, count: int) -> distill.Answers:
  """Returns the target's completions of held-out problems; a request's seed is its index."""
  problems = distill_draft.problems(1, "heldout")
  return distill_draft.answered(target, count, problems)


def table(found: dict[str, tuple[Found, int, float]], num_tokens: int) -> str:
  """Returns a table with one row per kind.

  Args:
    found: by kind, (acceptance counts, the draft's parameters, its last training accuracy).
    num_tokens: tokens of the training completions.
  """
  lines = [
    f"Each of {num_tokens:,} tokens of the target's answers; chains of {LENGTH}, temperature 1.",
    "",
    "| kind | own parameters | tokens per step | accepted at position 1, 2, ... (reached) |",
    "|---|---|---|---|",
  ]
  for name, (one, size, _) in found.items():
    places = ", ".join(
      f"{held / max(reached, 1):.3f} ({reached:,})" for held, reached in zip(one.held, one.reached)
    )
    lines.append(f"| {name} | {size:,} | {one.said / one.steps:.2f} | {places} |")
  return "\n".join(lines)


def num_parameters(params: parameters.Params) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    directory = pathlib.Path(args.workdir)
    directory.mkdir(parents=True, exist_ok=True)
    config = distill.DistillConfig(num_tokens=args.num_tokens, lengths=(80, PADDED), seed=args.seed)
    path = loading.path_of("nano")

    @functools.cache
    def engine_target() -> loading.Model:
      return loading.load_model(path, run_presets.main_job().numerics)

    answers, heldout = (
      distill_draft.kept(directory / f"{name}.npz", distill.Answers, make)
      for name, make in (
        ("answers", lambda: distill_draft.answered(
          engine_target(), args.num_problems, distill_draft.problems(args.seed))),
        ("heldout", lambda: heldout_answers(engine_target(), args.num_heldout)),
      )
    )  # fmt: skip
    target, model = huggingface.load(path, distill.numerics_for(PADDED))
    own = presets.get("nano-draft")
    key, optimizer = numerics_lib.key(args.seed), distill.make_optimizer(config)
    kinds: dict[str, tuple[Any, distill.Step, Callable[[Any], Drafts]]] = {
      "a separate model (nano-draft)": (
        parameters.init(key, own, distill.numerics_for(PADDED)),
        distill.make_step(own, optimizer),
        lambda params: of_model(params, own),
      ),
      "a layer on hidden rows": (
        feature_draft.init(key, model),
        feature_draft.make_step(target, model, optimizer),
        lambda params: of_layer(params, target, model),
      ),
    }
    found = {}
    for name, (params, step, make) in kinds.items():
      state, hits = optimizer.init(params), 0.0
      batches = itertools.islice(distill.batches(answers, None, config), config.num_steps)
      for index, batch in enumerate(batches):
        params, state, metrics = step(params, state, batch)
        if index % 10 == 9 or index + 1 == config.num_steps:
          hits = float(metrics["answer_hits"])
          print(f"{name}: batch {index + 1} of {config.num_steps}, right {hits:.3f}", flush=True)
      found[name] = chains(make(params), heldout, model.vocab_size), num_parameters(params), hits
      print(f"{name}: {found[name]}", flush=True)
    text = table(found, config.num_steps * config.tokens_per_batch)
    (directory / "table.md").write_text(text + "\n")
  print(f"\n{text}\n\nwritten to {directory / 'table.md'}")


if __name__ == "__main__":
  flags.DEFINE_string(
    "workdir", "runs/draft_kinds", "Output directory for responses and the table."
  )
  flags.DEFINE_integer(
    "num_problems", 2048, "Number of training problems that the target answers.", lower_bound=1
  )
  flags.DEFINE_integer(
    "num_heldout", 64, "Number of held-out problems for measuring the drafts.", lower_bound=1
  )
  flags.DEFINE_integer(
    "num_tokens", 300_000, "Training budget in tokens per kind, including padding.", lower_bound=1
  )
  flags.DEFINE_integer("seed", 0, "Seed of weights, problems and document order.")
  app.run(main)
