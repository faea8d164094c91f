"""Requests in, completions out: ends, streams, groups, memory, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny_model
from word_engine import (
  CONFIG,
  NUMERICS,
  SIZES,
  TOKENIZER,
  make_engine,
  params,
  request,
  run,
  runner,
  tokens_from,
)

from seerjax import parallel
from seerjax.engine import runner as runner_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models.loading import Model
from seerjax.types import Request, SamplingParams

# How requests end.


def test_a_completion_ends_at_max_tokens():
  completion = make_engine().generate([request(max_tokens=5)])[0]
  assert len(completion.tokens) == 5 and completion.finish_reason == "length"
  assert completion.behaviour_logprobs.shape == completion.raw_logprobs.shape == (5,)
  assert completion.behaviour_logprobs.dtype == np.float32
  assert (completion.behaviour_logprobs < 0).all()


def test_a_stop_id_is_kept_and_ends():
  free = make_engine().generate([request()])[0]
  stop = free.tokens[4]
  first = free.tokens.index(stop)
  completion = make_engine().generate([request(stop_token_ids=(stop, 511))])[0]
  assert completion.tokens == free.tokens[: first + 1] and completion.finish_reason == "stop"


def test_a_stop_id_as_the_last_allowed_token_is_a_stop():
  free = make_engine().generate([request(max_tokens=1)])[0]
  completion = make_engine().generate([request(max_tokens=1, stop_token_ids=free.tokens)])[0]
  assert completion.tokens == free.tokens and completion.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_string_is_cut_from_the_text_and_never_streamed(seed):
  free = make_engine().generate([request(seed=seed, max_tokens=30)])[0]
  # Four characters from its middle, none of which stands for half a character.
  places = range(len(free.text) // 3, len(free.text) - 4)
  windows = (free.text[place : place + 4] for place in places)
  stop = next(window for window in windows if "\ufffd" not in window)
  pieces, seen = [], []

  def watch(updates):
    for update in updates:
      pieces.append(update.text)
      seen.extend(update.tokens)

  stops = (stop, "never in there")
  engine = make_engine()
  one = request(seed=seed, max_tokens=30, stop_strings=stops)
  [completion] = engine.generate([one], on_step=watch)
  assert completion.finish_reason == "stop"
  assert completion.text == free.text[: free.text.find(stop)]
  # Tokens are kept whole: the last one completes the stop string.
  assert completion.tokens == free.tokens[: len(completion.tokens)] == tuple(seen)
  assert stop in TOKENIZER.decode(completion.tokens)
  assert stop not in TOKENIZER.decode(completion.tokens[:-1])
  assert "".join(pieces) == completion.text


def test_what_may_become_a_stop_string_is_held_back_and_comes_when_it_does_not():
  free = make_engine().generate([request(max_tokens=20)])[0]
  texts = []
  [completion] = make_engine().generate(
    [request(max_tokens=20, stop_strings=("x" * 6,))],
    on_step=lambda updates: texts.extend(update.text for update in updates),
  )
  assert completion.text == free.text == "".join(texts)
  said = ""
  for index, text in enumerate(texts[:-1]):
    said += text
    assert len(said) <= max(len(TOKENIZER.decode(free.tokens[: index + 1])) - 5, 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_stream_is_the_text_and_the_text_is_the_tokens(seed):
  engine, streamed, tokens, reasons = make_engine(), {}, {}, {}

  def watch(updates):
    for update in updates:
      streamed[update.request_id] = streamed.get(update.request_id, "") + update.text
      tokens[update.request_id] = tokens.get(update.request_id, ()) + update.tokens
      reasons[update.request_id] = update.finish_reason

  requests = [request(str(index), seed=10 * seed + index, max_tokens=16) for index in range(4)]
  for completion in engine.generate(requests, on_step=watch):
    name = completion.request_id
    assert streamed[name] == completion.text == TOKENIZER.decode(completion.tokens)
    assert tokens[name] == completion.tokens and reasons[name] == completion.finish_reason


def test_without_a_tokenizer_there_is_no_text():
  completion = make_engine(tokenizer=None).generate([request()])[0]
  assert completion.text == "" and len(completion.tokens) == 12


def test_a_forbidden_token_is_not_said_and_a_favoured_one_is():
  greedy = make_engine().generate([request(temperature=0.0, max_tokens=3)])[0]
  first = greedy.tokens[0]
  other = make_engine().generate(
    [request(temperature=0.0, max_tokens=3, logit_bias=((first, -1e6),))]
  )[0]
  assert first not in other.tokens
  favoured = make_engine().generate([request(max_tokens=3, logit_bias=((9, 1e6),))])[0]
  assert favoured.tokens == (9, 9, 9)
  np.testing.assert_array_equal(favoured.behaviour_logprobs, 0.0)  # Certain,
  assert (favoured.raw_logprobs < -0.1).all()  # but not by the model.


def test_two_biases_of_one_token_add_up():
  twice = make_engine().generate([request(logit_bias=((9, 1.5), (9, 2.0)))])[0]
  once = make_engine().generate([request(logit_bias=((9, 3.5),))])[0]
  assert tiny_model.same(twice, once)


# Submitting, stepping, polling.


def test_generate_answers_in_the_order_given_and_poll_in_the_order_finished():
  lengths = {"a": 9, "b": 2, "c": 5}
  requests = [request(name, max_tokens=count) for name, count in lengths.items()]
  assert [c.request_id for c in make_engine().generate(requests)] == ["a", "b", "c"]
  engine = make_engine()
  for one in requests:
    engine.submit(one)
  order = []
  while engine.num_unfinished:
    engine.step()
    order += [completion.request_id for completion in engine.poll()]
  assert order == ["b", "c", "a"] and engine.poll() == []


def test_generate_leaves_the_completions_of_others_to_poll():
  engine = make_engine()
  engine.submit(request("early", max_tokens=1))
  run_early = engine.step()
  engine.submit(request("other", max_tokens=3))
  [completion] = engine.generate([request("mine", max_tokens=8)])
  assert completion.request_id == "mine" and run_early[0].finish_reason == "length"
  assert [c.request_id for c in engine.poll()] == ["early", "other"]


def test_generate_does_not_take_an_older_completion_of_the_same_name():
  engine = make_engine()
  engine.submit(request("a", max_tokens=1))
  engine.step()
  [completion] = engine.generate([request("a", max_tokens=4)])
  assert len(completion.tokens) == 4
  assert [len(c.tokens) for c in engine.poll()] == [1]


def test_generate_submits_all_or_none():
  engine = make_engine()
  with pytest.raises(ValueError, match="'b': got an empty prompt"):
    engine.generate([request("a"), request("b", ())])
  assert engine.num_unfinished == 0
  assert len(engine.generate([request("a")])) == 1


def test_generate_of_nothing_is_nothing_and_a_step_of_nothing_says_nothing():
  engine = make_engine()
  assert engine.generate([]) == [] and engine.step() == [] and engine.counters.steps == 0


def test_generate_returns_without_what_was_cancelled_meanwhile():
  engine = make_engine()

  def cancel(updates):
    if engine.counters.steps == 3:
      engine.cancel("a")

  completions = engine.generate([request("a"), request("b")], on_step=cancel)
  assert [c.request_id for c in completions] == ["b"]


def test_a_cancelled_request_leaves_nothing_behind():
  engine = make_engine(dataclasses.replace(SIZES, reuse_prefixes=False))
  for name in "abcde":
    engine.submit(request(name))
  engine.step()
  for name in "abe":  # "e" still waits.
    engine.cancel(name)
  completions = run(engine)
  assert sorted(completions) == ["c", "d"] and engine.counters.preemptions == 0
  assert engine.memory.pools[0].num_available == 8
  assert len(engine.generate([request("a")])) == 1  # The name is free again.


def test_a_preempted_request_says_the_same():
  wanted = make_engine().generate([request("a"), request("b", seed=1)])
  engine = make_engine()
  engine.submit(request("a"))
  engine.submit(request("b", seed=1))
  for _ in range(4):
    engine.step()
  engine.preempt("a")
  engine.preempt("a")  # It waits already: nothing happens.
  assert engine.counters.preemptions == 1
  completions = run(engine)
  assert tiny_model.same(completions["a"], wanted[0])
  assert tiny_model.same(completions["b"], wanted[1])


# Memory.


def test_members_of_a_group_share_the_pages_of_their_prompt():
  prompt = tokens_from(3, 19)
  members = [
    request(str(index), prompt, seed=index, group="g", max_tokens=5) for index in range(4)
  ]
  engine = make_engine()
  completions = engine.generate(members)
  # The first writes 19; the others find 18: two full pages, and two positions of the third.
  assert engine.counters.reused_tokens == 3 * 18 and engine.counters.page_copies == 3
  assert engine.counters.rows == 19 + 3 * 1 + 4 * 4
  assert engine.counters.sampled_tokens == 20
  plain = make_engine(dataclasses.replace(SIZES, reuse_prefixes=False))
  for ours, alone in zip(completions, plain.generate(members), strict=True):
    assert tiny_model.same(ours, alone)
  assert plain.counters.reused_tokens == plain.counters.page_copies == 0
  assert plain.counters.rows == 4 * 19 + 4 * 4


def test_the_next_turn_finds_the_last():
  engine = make_engine()
  [first] = engine.generate([request("a", tokens_from(1, 10), max_tokens=10)])
  prompt = tokens_from(1, 10) + first.tokens + (4, 4)
  [second] = engine.generate([request("b", prompt, max_tokens=4)])
  # The last token said was never read back, so its position is not written.
  assert engine.counters.reused_tokens == 19
  assert tiny_model.same(second, make_engine().generate([request("b", prompt, max_tokens=4)])[0])


def test_when_pages_run_out_requests_wait_and_all_finish():
  requests = [
    request(str(index), tokens_from(index, 20), seed=index, max_tokens=13) for index in range(7)
  ]
  engine = make_engine()
  completions = engine.generate(requests)
  assert engine.counters.waits > 0 and engine.counters.preemptions == 0
  for one, completion in zip(requests, completions, strict=True):
    assert tiny_model.same(completion, make_engine().generate([one])[0])


def test_new_weights_drop_every_page():
  prompt = tokens_from(2, 30)
  engine = make_engine()
  old = engine.generate([request("a", prompt)])[0]
  engine.set_params(params(1), 1)
  reused = engine.counters.reused_tokens
  new = engine.generate([request("a", prompt)])[0]
  assert engine.counters.reused_tokens == reused
  fresh = make_engine(seed=1).generate([request("a", prompt)])[0]
  assert tiny_model.same(new, fresh) and not tiny_model.same(new, old)
  assert (old.policy_version, new.policy_version, engine.policy_version) == (0, 1, 1)
  # The twin: pages of the old weights would be noticed.
  stale = make_engine()
  stale.generate([request("a", prompt)])
  stale._params = stale._runner.place_params(params(1))
  assert not tiny_model.same(stale.generate([request("a", prompt)])[0], fresh)


# Nobody waits for ever.


def test_a_request_that_needs_the_page_it_would_copy_gets_it():
  engine = make_engine()
  engine.generate([request("a", tokens_from(1, 30), max_tokens=34)])
  # All 8 pages are idle now. "b" needs all 8, and the first of them starts as its own does.
  prompt = tokens_from(1, 3) + tokens_from(200, 30)
  engine.submit(request("b", prompt, max_tokens=31))
  assert len(run(engine)["b"].tokens) == 31
  assert engine.counters.page_copies == 0


def test_a_request_that_shares_full_pages_and_needs_all_the_rest_gets_them():
  engine = make_engine()
  engine.generate([request("a", tokens_from(1, 30), max_tokens=34)])
  prompt = tokens_from(1, 20) + tokens_from(200, 12)
  engine.submit(request("b", prompt, max_tokens=32))
  assert len(run(engine)["b"].tokens) == 32
  assert engine.counters.reused_tokens == 16


@pytest.mark.parametrize("what", ["cancel", "preempt"])
def test_siblings_held_back_go_on_without_the_one_they_waited_for(what):
  engine = make_engine()
  for index in range(4):
    engine.submit(request(str(index), tokens_from(3, 40), seed=index, group="g", max_tokens=3))
  engine.step()  # 16 of 40 positions of "0"; the others are held back.
  assert [len(engine._requests.running[0]), len(engine._requests.waiting[0])] == [1, 3]
  (engine.cancel if what == "cancel" else engine.preempt)("0")
  assert len(run(engine)) == (3 if what == "cancel" else 4)


def test_a_group_whose_members_differ_in_their_prompts_finishes():
  engine = make_engine()
  for index in range(4):
    engine.submit(request(str(index), tokens_from(index, 20), group="g", max_tokens=3))
  assert len(run(engine)) == 4


def test_a_large_request_is_not_overtaken_for_ever():
  engine = make_engine()
  engine.submit(request("first", tokens_from(9, 10), max_tokens=20))
  engine.submit(request("large", tokens_from(1, 30), max_tokens=34))
  served = []
  for index in range(30):
    engine.submit(request(f"small {index}", tokens_from(index, 4), max_tokens=4))
    engine.step()
    served += [completion.request_id for completion in engine.poll()]
  while engine.num_unfinished:
    engine.step()
    served += [completion.request_id for completion in engine.poll()]
  assert served[:2] == ["first", "large"] and len(served) == 32


def test_preempting_one_in_every_step_holds_nobody_else_up():
  engine = make_engine()
  for index in range(3):
    engine.submit(request(str(index), seed=index))
  finished = []
  for _ in range(40):
    engine.step()
    finished += [completion.request_id for completion in engine.poll()]
    if "0" not in finished:
      engine.preempt("0")
  assert {"1", "2"} <= set(finished)


# Programs and sizes.


def test_nothing_is_traced_after_the_first_step_of_each_bucket():
  own = runner_lib.Runner(tiny_model.CONFIG, NUMERICS, parallel.make_mesh(), max_programs=1)
  sizes = EngineConfig(page_size=8, num_pages=9, max_sequences=2, max_context=32, row_buckets=(8,))

  def engine(config):
    return Engine(
      Model(tiny_model.CONFIG, tiny_model.params(NUMERICS), NUMERICS),
      config=config,
      key=jax.random.key(3),
      runner=own,
    )

  one = engine(sizes)
  one.generate([request()])
  one.set_params(tiny_model.params(NUMERICS, 1), 1)
  # Filters, biases, lengths, other weights, another engine, more sequences: the same program.
  one.generate([request("b", tokens_from(0, 5)[:1], top_k=3, logit_bias=((1, 1.0),)), request("c")])
  engine(dataclasses.replace(sizes, max_sequences=3)).generate([request()])
  with pytest.raises(
    AssertionError, match="engine step: got trace 2, expected one for each of 1 row buckets"
  ):
    engine(dataclasses.replace(sizes, row_buckets=(9,))).generate([request()])


def test_the_plan_says_what_was_allocated():
  assert make_engine().plan() == (
    "1 instance(s), each 9 pages of 8 positions (64 tokens of context) and 4 sequences; steps of"
    " 4, 16 rows in arrays of 8, 16; 0.1 MiB of pages, 0.2 MiB of weights"
  )



def test_requests_go_to_the_instance_with_the_fewest_and_groups_stay_together():
  mesh = parallel.make_mesh(num_instances=2)
  engine = Engine(
    Model(CONFIG, params(), NUMERICS),
    config=SIZES,
    key=jax.random.key(0),
    mesh=mesh,
  )
  for name, group in (("a", "g"), ("b", "g"), ("c", ""), ("d", "h"), ("e", "h"), ("f", "g")):
    engine.submit(request(name, group=group))
  places = [[s.request.request_id for s in waiting] for waiting in engine._requests.waiting]
  assert places == [["a", "b", "f"], ["c", "d", "e"]]


# What is refused.


@pytest.mark.parametrize(
  "one, message",
  [
    (request("r", ()), r"request 'r': got an empty prompt, expected one token or more; add a BOS"),
    (request("r", (3, 512)), r"got token ids from 3 to 512, expected 0 to 511; encode with this"),
    (request("r", (-1,)), r"got token ids from -1 to -1, expected 0 to 511"),
    (dataclasses.replace(request(), seed=2**32), r"got seed 4294967296, expected 0 <= seed < 2"),
    (dataclasses.replace(request(), seed=-1), r"got seed -1, expected 0 <= seed"),
    (
      request("r", range(64), max_tokens=1),
      r"got a prompt of 64 tokens, expected fewer than the context of 64; .* model's is 4096\)",
    ),
    (
      request("r", range(60), max_tokens=5),
      r"got 60 prompt tokens and max_tokens 5, expected a sum of at most the context of 64; lower",
    ),
    (request("r", logit_bias=((512, 1.0),)), r"got logit_bias \(512, 1.0\), expected a token id"),
    (
      request("r", max_tokens=1, allowed=((7, 513),)),
      r"got a grammar that allows ids up to 512, expected at most 511; write",
    ),
    (request("r", logit_bias=((-1, 1.0),)), r"got logit_bias \(-1, 1.0\), .* 0 to 511 and a bias"),
    (
      request("r", logit_bias=((1, float("-inf")),)),
      r"got logit_bias \(1, -inf\), .* a bias from -1e\+06 to 1e\+06; the lowest forbids a token",
    ),
    (request("r", logit_bias=((1, float("nan")),)), r"got logit_bias \(1, nan\)"),
    (
      request("r", logit_bias=tuple((token, 1.0) for token in range(17))),
      r"SamplingParams.logit_bias: got 17 entries, expected at most 16; bias fewer",
    ),
  ],
)
def test_a_request_that_cannot_run_is_refused(one, message):
  engine = make_engine()
  with pytest.raises(ValueError, match=message):
    engine.submit(one)
  assert engine.num_unfinished == 0 and not engine._requests.waiting[0]


def test_a_request_of_the_whole_context_is_taken():
  engine = make_engine()
  engine.submit(request("r", range(59), max_tokens=5))
  assert len(run(engine)["r"].tokens) == 5


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
  engine = make_engine(dataclasses.replace(SIZES, num_pages=4))
  engine.submit(request("fits", range(20), max_tokens=5))  # 24 positions.
  with pytest.raises(
    ValueError,
    match=r"request 'r': got a need of 4 pages of 8 positions, expected at most 3; it can never",
  ):
    engine.submit(request("r", range(20), max_tokens=6))


def test_a_second_request_of_one_name_is_refused_while_the_first_runs():
  engine = make_engine()
  engine.submit(request("a"))
  with pytest.raises(ValueError, match="request 'a': got an id that is still running, expected a"):
    engine.submit(request("a"))
  run(engine)
  engine.submit(request("a"))


def test_stop_strings_without_a_tokenizer_are_refused():
  with pytest.raises(ValueError, match="stop_strings without a tokenizer, expected a model that"):
    make_engine(tokenizer=None).submit(request(stop_strings=("x",)))


def test_new_weights_while_requests_run_are_refused():
  engine = make_engine()
  engine.submit(request())
  with pytest.raises(ValueError, match="set_params: got 1 unfinished requests, expected none"):
    engine.set_params(params(1), 1)
  assert engine.policy_version == 0


@pytest.mark.parametrize("what", ["preempt", "cancel"])
def test_an_unknown_request_is_refused(what):
  engine = make_engine()
  engine.submit(request("a"))
  with pytest.raises(
    ValueError, match=rf"Engine.{what}: got request 'z', expected one of the 1 that are unfinished"
  ):
    (engine.preempt if what == "preempt" else engine.cancel)("z")


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("max_sequences", -1, r"EngineConfig.max_sequences: got -1, expected at least 0; 0 asks"),
    ("num_pages", -1, r"EngineConfig.num_pages: got -1, expected at least 0; 0 asks the free"),
    ("row_buckets", (-3,), r"row_buckets: got \(-3,\), expected ascending positive"),
    ("row_buckets", (16, 4), r"row_buckets: got \(16, 4\), expected ascending"),
    ("row_buckets", (4, 4), r"row_buckets: got \(4, 4\), expected ascending"),
    ("row_buckets", (0, 4), r"row_buckets: got \(0, 4\), expected ascending"),
    ("row_buckets", (2, 3), r"row_buckets: got at most 3 rows, expected at least max_sequences=4"),
  ],
)
def test_sizes_that_cannot_be_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SIZES, **{field: value})


@pytest.mark.parametrize("page_size", [3, 32])
def test_pages_that_do_not_fill_a_split_are_refused(page_size):
  with pytest.raises(
    ValueError, match=rf"EngineConfig.page_size: got {page_size}, expected a divisor of kv_split=16"
  ):
    make_engine(dataclasses.replace(SIZES, page_size=page_size))


def test_slabs_that_do_not_divide_the_model_are_refused():
  numerics = dataclasses.replace(NUMERICS, reduction_shards=16)
  with pytest.raises(ValueError, match="reduction_shards: got 16, expected a divisor of num_kv_"):
    Engine(Model(CONFIG, params(), numerics), config=SIZES, key=jax.random.key(0))


@pytest.mark.parametrize("what", ["model", "numerics", "mesh"])
def test_a_runner_made_for_something_else_is_refused(what):
  model = dataclasses.replace(CONFIG, num_layers=3) if what == "model" else CONFIG
  numerics = tiny_model.BFLOAT16 if what == "numerics" else NUMERICS
  mesh = parallel.make_mesh(num_instances=2) if what == "mesh" else None
  with pytest.raises(
    ValueError, match=r"Engine.runner: got one of .* for a model of 2 layers on 1 device\(s\)"
  ):
    Engine(
      Model(model, params(), numerics),
      config=SIZES,
      key=jax.random.key(0),
      mesh=mesh,
      runner=runner(),
    )


def test_pages_that_were_given_back_and_taken_again_move_no_bit():
  engine = tiny_model.make_engine(tiny_model.ALONE)
  short = SamplingParams(max_tokens=6)
  requests = [
    Request(request_id=str(seed), prompt=(1, 2, 3), sampling=short, seed=seed) for seed in range(2)
  ]
  expected = engine.generate(requests)
  held = engine.memory.pages
  engine.give_back_pages()
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held)) and engine.plan()
  found = engine.generate(requests)
  assert all(tiny_model.same(a, b) for a, b in zip(found, expected, strict=True))
  engine.give_back_pages()
  engine.submit(requests[0])
  with pytest.raises(ValueError, match="give_back_pages: got 1 unfinished requests, expected"):
    engine.give_back_pages()
