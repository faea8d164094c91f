"""Steps repeated from a journal."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from small_run import CONFIG, NUMERICS, Vowels, assert_equal_bits, first_state, policy, programs_of

from seerjax import checkpoint, numerics as numerics_lib, rl
from seerjax.rollout import journal as journal_lib
from seerjax.run import programs as programs_lib, replay

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def known_of(directory):
  _, entries = journal_lib.read(directory / "journal.jsonl")
  rollouts = {(entry.step, entry.group, entry.member): entry.rollout for entry in entries}
  return lambda step, group, member: rollouts.get((step, group, member))


def learn_again(steps, known, *, state=None, config=CONFIG):
  task, lines = Vowels(), []
  state = first_state(config) if state is None else state
  trainer, base = programs_of(config).trainer, programs_lib.base_weights(config.shared, policy())
  state = replay.learn_again(
    lambda state, groups: rl.learn(config, trainer, state, groups, rl.judge(config, groups), base),
    config, task, policy().require_tokenizer(), state, steps, known, log=lines.append,
  )  # fmt: skip
  assert task.num_verdicts == 0
  assert [line.partition(",")[0] for line in lines] == [f"step {i + 1} learnt again" for i in steps]
  return state


@pytest.mark.thorough
@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_steps_are_learnt_again_to_the_same_bits(whole, data_parallel_size):
  directory, expected, _ = whole
  config = dataclasses.replace(CONFIG, data_parallel_size=data_parallel_size)
  middle = learn_again(range(2), known_of(directory), config=config)
  stored = checkpoint.restore(
    directory / "checkpoints",
    jax.eval_shape(lambda: middle),
    fingerprint=numerics_lib.fingerprint(NUMERICS),
    step=2,
  ).state
  assert_equal_bits(middle, stored)
  assert_equal_bits(
    learn_again(range(2, 4), known_of(directory), state=middle, config=config), expected.state
  )
  # Twin: an omitted step is detected.
  with pytest.raises(AssertionError):
    assert_equal_bits(learn_again(range(1), known_of(directory), config=config), stored)


@pytest.mark.thorough
def test_steps_with_rollouts_missing_are_not_learnt_again(whole):
  known = known_of(whole[0])

  def part(step, group, member):
    return None if (step, member) == (1, 1) else known(step, group, member)

  message = r"^journal: got no rollout 1/0/1, 1/1/1, expected all rollouts of step 2 .*;"
  with pytest.raises(ValueError, match=message):
    learn_again(range(2), part)
  nothing = dataclasses.replace(
    CONFIG, rollout=dataclasses.replace(CONFIG.rollout, prompts_per_step=5)
  )
  with pytest.raises(ValueError, match=r"rollout 0/0/0, .*, 0/3/1 and 2 more, expected all roll"):
    learn_again(range(1), lambda *_: None, config=nothing)
