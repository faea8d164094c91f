"""Top tokens and scored prompts: bits of a separate forward pass, whatever else a step does."""

from __future__ import annotations

import dataclasses
import itertools

from made_drafters import OracleDrafter
import numpy as np
from plain_scores import PlainScores
import pytest
import tiny_model

from seerjax.engine.engine import EngineConfig
from seerjax.types import Request, SamplingParams

# Few pages and rows, so that prompts take several steps, and requests wait and are preempted.
SIZES = EngineConfig(
  page_size=8,
  num_pages=14,
  max_num_seqs=5,
  max_model_len=64,
  batch_size_buckets=(24,),
  reserved_tokens=4,
)
VOCABULARY = tiny_model.CONFIG.vocab_size
KINDS = [
  SamplingParams(max_tokens=20),
  SamplingParams(max_tokens=20, temperature=0.8, top_k=3),
  SamplingParams(max_tokens=20, temperature=0.7, frequency_penalty=1.5, presence_penalty=-0.5),
  SamplingParams(max_tokens=20, temperature=0.0),
  SamplingParams(max_tokens=20, logit_bias=((3, 4.0), (9, -5.0))),
]
# (num_top, prompt_top) of the requests.
WANTED = [(0, None), (3, None), (16, 2), (0, 0), (1, 5)]


def even(answer):
  """Allows ids that are even, then those that are odd, in turn."""
  words = np.zeros(-(-VOCABULARY // 32), np.uint32)
  for token in range(len(answer) % 2, VOCABULARY, 2):
    words[token // 32] |= np.uint32(1 << token % 32)
  return words


def make_requests(count):
  rng = np.random.default_rng(5)
  shared = tuple(rng.integers(0, VOCABULARY, 17).tolist())
  return [
    Request(
      request_id=str(i),
      prompt=shared[: 3 + 14 * (i % 2)] + tuple(rng.integers(0, VOCABULARY, i + 1).tolist()),
      sampling=KINDS[i % 5],
      seed=i,
    )
    for i in range(count)
  ]


def run(engine, requests, wanted, masked=()):
  """Returns the completions, tops and prompt scores of the requests, by id."""
  for request, (num_top, prompt_top) in zip(requests, wanted):
    mask = even if request.request_id in masked else None
    engine.add_request(request, mask=mask, num_top=num_top, prompt_top=prompt_top)
  done, tops, prompts = {}, {request.request_id: () for request in requests}, {}
  while engine.num_unfinished:
    for update in engine.step():
      tops[update.request_id] += update.tops
      if update.prompt is not None:
        assert update.request_id not in prompts
        prompts[update.request_id] = update.prompt
    done |= {completion.request_id: completion for completion in engine.poll()}
  return done, tops, prompts


@pytest.mark.thorough
@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", tiny_model.BACKENDS.values(), ids=tiny_model.BACKENDS.keys())
def test_tops_have_the_bits_of_a_pass_of_their_own_and_change_none(numerics):
  requests, masked = make_requests(10), {"6"}
  wanted = list(itertools.islice(itertools.cycle(WANTED), 10))
  plain, *_ = run(tiny_model.make_engine(SIZES, numerics), requests, [(0, None)] * 10, masked)
  texts = {name: found.tokens for name, found in plain.items()} | {"before": plain["3"].tokens}
  drafter = OracleDrafter(texts, vocab_size=VOCABULARY, error_rate=0.3)
  engine = tiny_model.make_engine(SIZES, numerics, drafter=drafter)
  # The prompt of a request is cached, and is scored all the same.
  engine.generate([dataclasses.replace(requests[3], request_id="before")])
  done, tops, prompts = run(engine, requests, wanted, masked)
  assert engine.counters.preemptions + engine.counters.displaced and engine.counters.accepted_tokens
  scores = PlainScores(tiny_model.CONFIG, numerics, tiny_model.params(numerics))
  for request, (num_top, prompt_top) in zip(requests, wanted):
    name, found = request.request_id, done[request.request_id]
    assert found.has_bits_of(plain[name])
    mask = even if name in masked else None
    if num_top:
      expected = scores.answer(request.prompt, found.tokens, request.sampling, num_top, mask)
      assert list(tops[name]) == expected
    else:
      assert tops[name] == ()
    if prompt_top is None:
      assert name not in prompts
    else:
      assert list(prompts[name]) == scores.prompt(request.prompt, prompt_top)
  assert engine.chunks.free_pages(0) == SIZES.num_pages - 1


def test_filters_cut_the_tops_and_a_prompt_of_one_token_has_no_scores():
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  one = Request(
    request_id="one", prompt=(5,), sampling=SamplingParams(max_tokens=4, top_k=2), seed=1
  )
  done, tops, prompts = run(engine, [one], [(5, 3)])
  assert [len(top) for top in tops["one"]] == [2] * 4 and prompts["one"] == ()
  for token, logprob, top in zip(done["one"].tokens, done["one"].behaviour_logprobs, tops["one"]):
    assert (token, logprob) in top and list(top) == sorted(top, key=lambda one: (-one[1], one[0]))


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(num_top=17), "request 'a': num_top: got 17, expected 0 to 16; no more are returned"),
    (dict(prompt_top=-1), "request 'a': prompt_top: got -1, expected 0 to 16; no more are ret"),
  ],
)
def test_more_tops_than_a_step_returns_are_refused(fields, message):
  engine = tiny_model.make_engine(SIZES, tiny_model.NATIVE)
  request = Request(request_id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=2))
  with pytest.raises(ValueError, match=message):
    engine.add_request(request, **fields)
  assert not engine.num_unfinished
