"""What a draft would have given a run that is over, from its journal alone: frozen, and learning.

    python docs/results/speculation/drafts_of_a_run.py RUN DRAFT [GROUPS [RATE]]

Every answer was drawn with noise that follows from its seed and place, so that a draft's tokens at
each place follow from the journal: a chain of N holds as far as they are what was said, and no
policy has to be run. The learning draft is taught by the run's own `DraftLearner` after each step,
as with `--config.speculation.draft.learn=True`; GROUPS of each step count (all by default). The
draft draws at the policy's temperature. Then the suffix tree: the second half of each group's
members is drafted for, with the first half as answers of an earlier step, and without.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.engine.drafting import DraftQuery
from seerjax.models import flax_module, huggingface, parameters
from seerjax.models.loading import Model
from seerjax.rollout import journal
from seerjax.run.draft_learning import DraftLearner
from seerjax.speculation.draft_model import DraftModelConfig, ModelDrafter
from seerjax.speculation.draft_program import numerics_of
from seerjax.speculation.history import History
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.trainer import distill
from seerjax.types import RolloutGroup

LENGTH, ROWS, MOST = 256, 32, 4  # Of a document; documents at once; N.


def groups_by_step(path: pathlib.Path, num_groups: int) -> list[list[RolloutGroup]]:
  found: dict[int, dict[int, dict[int, journal.Entry]]] = {}
  for entry in journal.read(path)[1]:
    found.setdefault(entry.step, {}).setdefault(entry.group, {})[entry.member] = entry
  steps = []
  for _, groups in sorted(found.items()):
    steps.append(
      [
        RolloutGroup(
          group_index=index,
          problem=None,  # pyright: ignore[reportArgumentType]
          rollouts=tuple(entry.rollout for _, entry in sorted(members.items())),
        )
        for index, members in sorted(groups.items())[:num_groups]
      ]
    )
  return steps


class Chains:
  """How many tokens a step says with a draft's chains."""

  def __init__(self, config, key):
    numerics = distill.numerics_for(LENGTH)

    @jax.jit
    def drafted(params, tokens, seeds):
      logits = flax_module.logits_of(params, tokens, config=config, numerics=numerics)
      places = jnp.arange(1, LENGTH + 1)

      def of_row(logits, seed):
        def draw(place):
          folded = jax.random.fold_in(jax.random.fold_in(key, seed), place)
          with numerics_lib.pinned_randomness():
            return jax.random.gumbel(folded, logits.shape[-1:], jnp.float32)

        return jnp.argmax(logits + jax.vmap(draw)(places), axis=-1)

      return jax.vmap(of_row)(logits, seeds)

    self._drafted = drafted

  def __call__(self, params, groups) -> tuple[float, float]:
    """Returns tokens a step, the bonus included, and the share of places at which one is right."""
    rollouts = [one for group in groups for one in group.rollouts]
    rollouts = [r for r in rollouts if len(r.request.prompt) + len(r.completion.tokens) <= LENGTH]
    steps = said = right = 0
    for begin in range(0, len(rollouts), ROWS):
      part = rollouts[begin : begin + ROWS]
      tokens, seeds = np.zeros((ROWS, LENGTH), np.int32), np.zeros(ROWS, np.uint32)
      for row, one in enumerate(part):
        text = [*one.request.prompt, *one.completion.tokens]
        tokens[row, : len(text)], seeds[row] = text, one.request.seed
      found = np.asarray(self._drafted(params, tokens, seeds))
      for row, one in enumerate(part):
        first, count = len(one.request.prompt), len(one.completion.tokens)
        is_right = found[row, first - 1 : first - 1 + count] == one.completion.tokens
        right += int(is_right.sum())
        place = 0
        while place < count:
          held = 0
          while held < MOST and place + held < count - 1 and is_right[place + held]:
            held += 1
          place += held + 1
          steps += 1
        said += count
    return said / steps, right / said


def of_texts(steps) -> None:
  for name in ("with what the first half said", "without"):
    drafter = SuffixDrafter(history=History(), budget=None)
    for step in steps:
      for index, group in enumerate(step):
        prompt, half = list(group.rollouts[0].request.prompt), len(group.rollouts) // 2
        if name != "without":
          for one in group.rollouts[:half]:
            drafter.history.add(prompt, [*prompt[-8:], *one.completion.tokens])
        drafter_steps(drafter, f"{id(step)}/{index}", prompt, group.rollouts[half:])
    found = drafter.acceptance
    print(f"suffix tree {name}: {found.length:.2f} tokens a step, {found.rate:.0%} of drafts right")


def drafter_steps(drafter, name, prompt, rollouts) -> None:
  said = [0] * len(rollouts)
  texts = [[*prompt] for _ in rollouts]
  while any(n < len(r.completion.tokens) for n, r in zip(said, rollouts)):
    live = [i for i, r in enumerate(rollouts) if said[i] < len(r.completion.tokens)]
    queries = [
      DraftQuery(
        f"{name}/{i}", name, texts[i], len(prompt), len(rollouts[i].completion.tokens) - said[i]
      )
      for i in live
    ]
    drafts = drafter.draft(queries) or [()] * len(live)
    for i, paths in zip(live, drafts):
      rest = rollouts[i].completion.tokens[said[i] :]
      path = paths[0][: len(rest) - 1] if paths else ()
      held = 0
      while held < len(path) and path[held] == rest[held]:
        held += 1
      if path:
        drafter.observe(f"{name}/{i}", name, len(path), held)
      texts[i] += rest[: held + 1]
      said[i] += held + 1
      if said[i] == len(rollouts[i].completion.tokens):
        drafter.finish(f"{name}/{i}", name, texts[i], len(prompt))


def main() -> None:
  run, draft = map(pathlib.Path, sys.argv[1:3])
  num_groups = int(sys.argv[3]) if len(sys.argv) > 3 else sys.maxsize
  steps = groups_by_step(run / journal.FILE_NAME, num_groups)
  prompts = [group.rollouts[0].request.prompt for step in steps for group in step]
  print(f"{len(steps)} steps, {len(prompts)} groups, {len(set(prompts))} prompts", flush=True)
  of_texts(steps[:4])
  config = huggingface.load_config(draft)
  numerics = numerics_of(numerics_lib.NumericsConfig(), config, 2 * LENGTH)
  masters, config = huggingface.load(draft, numerics, allow_int8=True)
  made = Model(config, parameters.compute_params(masters, numerics), numerics)
  rate = float(sys.argv[4]) if len(sys.argv) > 4 else DraftModelConfig.learning_rate
  how = DraftModelConfig(num_slots=1, row_buckets=(8,), learn=True, learning_rate=rate)
  learner = DraftLearner(ModelDrafter(made, context=2 * LENGTH, config=how))
  frozen, chains = learner.state.params, Chains(config, numerics_lib.key(0))
  print("step  frozen: tokens a step, right  learning: tokens a step, right", flush=True)
  for step, groups in enumerate(steps):
    before = chains(frozen, groups)
    now = chains(learner.state.params, groups) if step else before
    print(f"{step + 1:4d}  {before[0]:.3f} {before[1]:.4f}  {now[0]:.3f} {now[1]:.4f}", flush=True)
    learner.learn(groups, step)


if __name__ == "__main__":
  main()
