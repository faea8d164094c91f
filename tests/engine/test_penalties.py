"""Drafts, chunks, preemption, batches and visits change no bit of requests with penalties."""

from __future__ import annotations

import dataclasses
import functools

from guessing import Guesser
import numpy as np
import pytest
import tiny_model

from seerjax import parallel
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import EngineConfig
from seerjax.models.decoder import decide
from seerjax.types import Request, SamplingParams

SIZES = EngineConfig(
  page_size=8,
  num_pages=60,
  max_num_seqs=4,
  max_model_len=64,
  batch_size_buckets=(24,),
  decode_steps_per_call=4,
)
PENALISED = SamplingParams(
  presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=12
)
REQUESTS = [
  Request(request_id=name, prompt=prompt, sampling=sampling, seed=seed)
  for seed, (name, prompt, sampling) in enumerate([
    ("all", (5, 9, 9, 31, 7), PENALISED),
    ("greedy", (40, 2, 2), dataclasses.replace(PENALISED, temperature=0.0, presence_penalty=0.0)),
    ("filtered", (1, 2, 3, 4), dataclasses.replace(PENALISED, top_k=9, logit_bias=((7, 2.0),))),
    ("plain", (8, 8, 8), SamplingParams(max_tokens=12)),
  ])
]  # fmt: skip


alone = functools.partial(tiny_model.answer, tiny_model.NATIVE)


def test_penalties_change_an_answer():
  for request in REQUESTS[:3]:
    neutral = dataclasses.replace(
      request.sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
    )
    free = alone(dataclasses.replace(request, sampling=neutral))
    assert alone(request).tokens != free.tokens


def drafted(**others):
  """Returns what the requests say together, in chunks, with drafts, one of them preempted."""
  guesser = Guesser({one.request_id: alone(one).tokens for one in REQUESTS}, 3, right=0.9)
  running = tiny_model.make_engine(SIZES, tiny_model.NATIVE, drafter=guesser, **others)
  for request in REQUESTS:
    running.add_request(request, chunk_tokens=8)
  found, steps = {}, 0
  while running.num_unfinished:
    running.step()
    steps += 1
    if steps == 3:
      running.chunks.preempt("all")
    for name in running.chunks.poll_paused():
      running.chunks.resume(name, chunk_tokens=8)
    found |= {one.request_id: one for one in running.poll()}
  assert running.counters.accepted_tokens
  return found


def test_company_drafts_and_preemption_change_no_bit():
  found = drafted()
  for request in REQUESTS:
    assert tiny_model.same(found[request.request_id], alone(request)), request


def test_an_answer_that_goes_on_elsewhere_has_its_bits():
  request = REQUESTS[0]
  whole = alone(request)
  partial = dataclasses.replace(
    whole, request_id="all", tokens=whole.tokens[:5], finish_reason="",
    behaviour_logprobs=whole.behaviour_logprobs[:5], raw_logprobs=whole.raw_logprobs[:5],
  )  # fmt: skip
  running = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  running.add_request(request, resume_from=partial)
  while running.num_unfinished:
    running.step()
  (found,) = running.poll()
  assert tiny_model.same(found, whole)


def test_a_request_without_penalties_keeps_several_steps_a_visit():
  running = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  running.add_request(REQUESTS[3])
  visits = 0
  while running.num_unfinished:
    running.step()
    visits += 1
  assert visits < REQUESTS[3].sampling.max_tokens


class ForgetsDrafts(runner_lib.Runner):
  """Twin: every draft position has the penalties of the position before the draft."""

  def step(self, params, pages, inputs, key):
    rows = inputs.sampling
    if rows.penalty_ids is not None:
      _, first, same = np.unique(inputs.seeds[0], return_index=True, return_inverse=True)
      names = ("penalty_ids", "penalty_values", "repetition")
      forgets = {name: rows._asdict()[name][:, first[same]] for name in names}
      inputs = inputs._replace(sampling=rows._replace(**forgets))
    return super().step(params, pages, inputs, key)


@pytest.mark.thorough
def test_a_draft_whose_earlier_tokens_do_not_count_is_noticed():
  mesh = parallel.make_mesh(data_parallel_size=1)
  twin = ForgetsDrafts(decide(tiny_model.CONFIG, tiny_model.NATIVE), mesh, max_programs=64)
  found = drafted(runner=twin)
  assert any(not tiny_model.same(found[one.request_id], alone(one)) for one in REQUESTS[:3])
  assert tiny_model.same(found["plain"], alone(REQUESTS[3]))
