"""References of sleep: a request alone in a plain engine, and a sleeper that has one to itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import sleep_plans
import sleep_prompts
import tiny_model
import word_engine

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import Engine
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.sleep import runner as sleep_lib
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.runner import RunnerConfig
from seerjax.sleep.thinkers import Call
from seerjax.types import Completion, Request


@functools.cache
def params(numerics, seed: int):
  if numerics == word_engine.NUMERICS:
    return word_engine.params(seed)
  master = parameters.init(numerics_lib.key(seed), word_engine.CONFIG, numerics)
  return parameters.compute_params(jax.tree.map(lambda leaf: leaf * 5, master), numerics)


@functools.cache
def programs(numerics, mesh: tuple[int, int]) -> runner_lib.Runner:
  if numerics == word_engine.NUMERICS and mesh == (1, 1):
    return word_engine.runner()
  made = parallel.make_mesh(data_parallel_size=mesh[0], tensor_parallel_size=mesh[1])
  return runner_lib.Runner(decide(word_engine.CONFIG, numerics), made, max_programs=64)


def make_engine(
  numerics, mesh, weights: int, *, config=sleep_plans.SIZES, kind=Engine, **others
) -> Engine:
  model = Model(word_engine.CONFIG, params(numerics, weights), numerics, word_engine.TOKENIZER)
  return kind(
    model, config=config, key=numerics_lib.key(11), runner=programs(numerics, mesh), **others
  )


@functools.cache
def plain_engine(numerics, weights: int) -> Engine:
  alone = dataclasses.replace(sleep_plans.SIZES, max_num_seqs=1, enable_prefix_caching=False)
  return make_engine(numerics, (1, 1), weights, config=alone)


@functools.cache
def alone(numerics, weights: int, request: Request) -> Completion:
  """Returns the completion of a request that runs alone in a plain engine."""
  plain = dataclasses.replace(request, request_id="alone", group_id="", namespace="")
  return plain_engine(numerics, weights).generate([plain])[0]


def config_of(plan: sleep_plans.Plan) -> RunnerConfig:
  return RunnerConfig(
    num_jobs=plan.num_jobs,
    sleep_tokens=5,
    temperature=0.9,
    parallel_temperature=0.7,
    seed=4,
    num_anticipated=int(plan.has_drafts),
    answer_tokens=6,
  )


@functools.cache
def rewrite_alone(
  numerics, weights: int, context_id: str, text: str, job: int, num_jobs: int
) -> tuple[str, int]:
  """Returns (text, tokens) of a job; its calls run alone in a plain engine, one by one."""
  config = config_of(sleep_plans.Plan(0, 0, 0, num_jobs, False, False, ()))
  thinker = EngineThinker(plain_engine(numerics, weights))
  notes, total, is_finished = "", 0, False
  for number in range(config.max_rethinks):
    call = Call(
      messages=sleep_prompts.user(f"{text}{notes}"),
      max_tokens=config.sleep_tokens,
      temperature=config.parallel_temperature if job else config.temperature,
      seed=sleep_lib.job_seed(config.seed, context_id, job, number),
    )
    answer = thinker.complete(**{f.name: getattr(call, f.name) for f in dataclasses.fields(call)})
    total += answer.num_tokens
    notes, is_finished = sleep_plans.PROMPTS.read(answer.text, notes)
    if is_finished:
      break
  return notes, total


NUMERICS = {
  "f32": word_engine.NUMERICS,
  "bf16": tiny_model.BFLOAT16,
  "native f32": tiny_model.NATIVE,
  "native bf16": tiny_model.NATIVE_BFLOAT16,
}
