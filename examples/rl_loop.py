"""The loop of `seerjax.train` by hand: sample, judge, learn, publish, to the same bits.

    task --problems--> requests --engine--> completions --task--> verdicts --> advantages
                                  ^                                                |
                                  +-- update_weights <-- update <-- gradient <-- pack <+

`grpo` is a whole run of GRPO on word problems. Problems and request seeds depend only on the run's
seed and the step, a completion only on weights, prompt and its request's seed, and the packed batch
only on the completions. `seerjax.train` samples the same requests in chunks, with drafts and in
another order; with the same config it ends with weights and moments of equal bits, which
`tests/test_rl_loop.py` checks. It adds a journal, checkpoints, evaluations, mini-batches, dynamic
sampling, adapters, KL penalties and workers.

  python examples/rl_loop.py

Takes about half a minute on two CPU cores, mostly compilation. Each line's KL is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import itertools

import numpy as np

import seerjax
from seerjax import EngineConfig, Rollout, RolloutGroup, RunConfig, numerics
from seerjax.models import parameters
from seerjax.models.loading import Model
from seerjax.rollout import groups as groups_lib
from seerjax.run import policy as policy_lib, programs as programs_lib
from seerjax.tasks.word_problems import WordProblems
from seerjax.trainer import advantages, losses, optimizer as optimizer_lib, step as step_lib
from seerjax.types import TrainState

CONFIG = RunConfig(
  num_steps=4,
  numerics=numerics.NumericsConfig(query_tile=4, kv_split=64),
  # One bucket and one step a visit: the engine compiles one program.
  engine=EngineConfig(
    max_num_seqs=32, max_model_len=256, batch_size_buckets=(32,), decode_steps_per_call=1
  ),
  rollout=groups_lib.RolloutConfig(prompts_per_step=8, group_size=8, max_tokens=96),
  loss=losses.grpo(),
  optimizer=optimizer_lib.OptimizerConfig(learning_rate=2e-4),
)


def grpo(
  config: RunConfig,
  model: Model,
  task: seerjax.Task,
  programs: programs_lib.Programs | None = None,
  log: Callable[[str], None] = print,
) -> TrainState:
  """Returns weights and moments after `config.num_steps` steps of GRPO on all weights.

  `programs` are compiled programs from `make_programs` for an equal config and model, if any.

  Raises:
    ValueError: if the config asks for a part of `seerjax.train` that is not here.
  """
  plain = dict(num_mini_batches=1, dynamic_sampling_rounds=1, overlong_buffer=0)
  is_elsewhere = (
    config.off_policy.oversample > 1 or config.off_policy.max_policy_lag or config.cluster.workers
  )
  is_plain = config.trainer == dataclasses.replace(config.trainer, **plain)
  if config.keeps_base or is_elsewhere or not is_plain:
    raise ValueError(
      "grpo: got a RunConfig with adapters, a KL penalty, mini-batches, rounds, an overlong buffer,"
      " stale samples or workers, expected none of them; call seerjax.train."
    )
  own = programs_lib.make_programs(config.shared, model.config)
  # With what the model and the machine decide.
  config = dataclasses.replace(config, **own.config.parts)
  policy = policy_lib.policy_of(model).with_chat(config.chat)
  tokenizer = policy.require_tokenizer()
  programs = programs or own
  trainer = programs.trainer
  state = trainer.init(policy.params)  # f32 masters and moments.
  # Engine and trainer run the same weights.
  weights = parameters.compute_params(state.params, config.numerics)
  engine = seerjax.Engine(
    Model(model.config, weights, config.numerics, tokenizer),
    config=config.engine,
    key=numerics.key(config.seed),
    runner=programs.runner,
  )
  num_groups, num_problems = config.rollout.prompts_per_step, task.num_problems("train")

  for step in range(config.num_steps):
    # Sample: each group's members differ in their seeds alone.
    places = range(step * num_groups, (step + 1) * num_groups)
    indices = [groups_lib.problem_index(place, num_problems, config.seed) for place in places]
    problems = [task.problem("train", index) for index in indices]
    requests = [
      groups_lib.group_requests(
        problem, group=group, step=step, config=config.rollout, tokenizer=tokenizer,
        seed=config.seed,
      )
      for group, problem in enumerate(problems)
    ]  # fmt: skip
    completions = iter(engine.generate(itertools.chain.from_iterable(requests)))

    # Judge: a completion's advantage is its reward, standardised within its group.
    groups = []
    for group, problem in enumerate(problems):
      members = [
        Rollout(
          request=request,
          completion=(completion := next(completions)),
          verdict=groups_lib.judge(task, problem, completion.text, config.rollout.reward_weights),
        )
        for request in requests[group]
      ]
      groups.append(RolloutGroup(group_index=group, problem=problem, rollouts=tuple(members)))
    rewards = np.stack([group.rewards for group in groups])
    values = advantages.for_algorithm(config.loss.algorithm, rewards)

    # Learn: the trainer scores the completions anew, and the gap to the sampler's scores is 0.
    batch = programs_lib.pack(config.engine, config.trainer, trainer.decoder, groups, values)
    gradient, _, scores = trainer.gradient(weights, batch, losses.denominators(batch), None)
    state, norms = trainer.update(state, gradient)
    gap = step_lib.rollout_gap(scores, batch)
    assert set(gap.values()) == {0.0}
    log(
      f"step {step + 1}: reward {rewards.mean():.3f}, KL of sampler and trainer {gap['kl']},"
      f" norm of the gradient {norms['grad_norm']:.3f}"
    )

    # Publish: the next step samples from the new weights.
    weights = parameters.compute_params(state.params, config.numerics)
    engine.update_weights(weights, policy_version=step + 1)
  return state


if __name__ == "__main__":
  grpo(CONFIG, seerjax.load_model("nano", CONFIG.numerics), WordProblems())
