"""Every public entry point refuses arguments of wrong types, naming itself and the argument.

There is one row per entry point and argument, with a value that its type excludes. After all rows
the engine still gives the completions that it gave before.
"""

# Values of wrong types are what this file is about.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib, rl, ttt
from seerjax.discovery.config import DiscoverConfig
from seerjax.engine.beam import beam_search
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv.pool import KVPool
from seerjax.models import lora, peft
from seerjax.models.decoder import decide
from seerjax.models.loading import Model, load_model
from seerjax.rollout.divided import DividedRollout
from seerjax.rollout.policies import LongestGroupFirst
from seerjax.run.config import RunConfig
from seerjax.trainer import losses, optimizer as optimizer_lib, step
from seerjax.types import Request, SamplingParams

# As for a user: no annotation checker precedes the library's own errors.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

NUMERICS = tiny_model.ONE_SLAB
MODEL = Model(
  tiny_model.SMALLEST, tiny_model.random_params(tiny_model.SMALLEST, NUMERICS), NUMERICS
)
SIZES = EngineConfig(
  page_size=8,
  num_pages=9,
  max_num_seqs=4,
  max_model_len=64,
  batch_size_buckets=(8,),
  pinned_pages=4,
)
REQUEST = Request(request_id="x", prompt=(5, 6, 7), sampling=SamplingParams(max_tokens=3))
NO_TEXT = (None, 3, b"x", ["x"])
NO_COUNT = ("3", 1.5, True, None, [1])
NO_FLAG = ("no", 0, 1, None)
NO_FUNCTION = (3, "print", [print])
NO_MAPPING = (3, "ab", [("a", 1)], {1: 2})


@functools.cache
def engine() -> Engine:
  return Engine(MODEL, config=SIZES, key=numerics_lib.key(0))


def made(**changes: Any) -> Engine:
  given = {"model": MODEL, "config": SIZES} | changes
  return Engine(given.pop("model"), **given)


def trained(**changes: Any) -> Any:
  usual = {"config": RunConfig(), "model": None, "task": None, "directory": "run"}
  return rl.train(**(usual | changes))


def searched(**changes: Any) -> Any:
  usual = {"config": DiscoverConfig(), "environment": None, "directory": "run"}
  return ttt.discover(**(usual | changes))


def trainer(**changes: Any) -> step.Trainer:
  usual = {
    "decoder": MODEL.decoder, "loss": losses.LossConfig(), "num_pages": 4,
    "optimizer": optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(learning_rate=1e-4)),
    "mesh": engine().mesh, "page_size": 8,
  }  # fmt: skip
  return step.Trainer(**(usual | changes))


def saved(**changes: Any) -> None:
  usual = {"directory": "nowhere", "adapter": {}, "config": MODEL.config, "scale": 1.0}
  peft.save(**(usual | changes))


# (how it is called, the beginning of the message, wrong values of the argument)
ROWS: list[tuple[Callable[[Any], Any], str, tuple[Any, ...]]] = [
  (lambda v: made(model=v), "Engine.model", ("nano", None, MODEL.config)),
  (lambda v: made(config=v), "Engine.config", ({}, None, 3)),
  (lambda v: made(mesh=v), "Engine.mesh", ("cpu", 1)),
  (lambda v: made(policy_version=v), "Engine.policy_version", ("a", 1.5, True, None, -1)),
  (lambda v: made(runner=v), "Engine.runner", ("a", 3)),
  (lambda v: made(drafter=v), "Engine.drafter", ("suffix", 3)),
  (lambda v: made(kv_pool=v), "Engine.kv_pool", ("disk", 3)),
  (lambda v: made(adapters=v), "Engine.adapters", NO_MAPPING),
  (lambda v: made(step_times=v), "Engine.step_times", (0.1, "fast")),
  (lambda v: engine().add_request(v), "Engine.add_request: request", ("text", None, (1, 2))),
  (lambda v: engine().add_request(REQUEST, resume_from=v),
   "Engine.add_request: resume_from", (3, "a")),
  (lambda v: engine().add_request(REQUEST, instance=v),
   "Engine.add_request: instance", ("0", 0.5, False)),
  (lambda v: engine().add_request(REQUEST, chunk_tokens=v),
   "Engine.add_request: chunk", ("2", 2.5, True)),
  (lambda v: engine().add_request(REQUEST, mask=v),
   "Engine.add_request: mask", (np.ones(1, np.uint32), 3)),
  (lambda v: engine().add_request(REQUEST, is_background=v),
   "Engine.add_request: is_background", NO_FLAG),
  (lambda v: engine().add_request(REQUEST, kv=v), "Engine.add_request: kv", ("a", {})),
  (lambda v: engine().check(v), "Engine.check: request", ("text", None)),
  (lambda v: engine().generate(v), "Engine.generate: requests", (3, None, REQUEST, [3], [None])),
  (lambda v: engine().generate([REQUEST], sampling=v), "Engine.generate: sampling", ({}, 0.5)),
  (lambda v: engine().generate([REQUEST], on_step=v), "Engine.generate: on_step", NO_FUNCTION),
  (lambda v: engine().top_logprobs(v, [()], 1), "Engine.top_logprobs: request", ("a", None)),
  (lambda v: engine().top_logprobs(REQUEST, v, 1), "Engine.top_logprobs: answers",
   (3, None, "ab", [1], [("a",)])),
  (lambda v: engine().top_logprobs(REQUEST, [()], v), "Engine.top_logprobs: count", NO_COUNT),
  (lambda v: engine().top_logprobs(REQUEST, [()], 1, drafts=v), "Engine.top_logprobs: drafts",
   (3, "a", [1], [[1]])),
  (lambda v: engine().top_logprobs(REQUEST, [()], 1, instance=v),
   "Engine.top_logprobs: inst", NO_COUNT),
  (lambda v: engine().top_logprobs(REQUEST, [()], 1, on_step=v),
   "Engine.top_logprobs: on", NO_FUNCTION),
  (lambda v: engine().set_adapters(v), "Engine.set_adapters: adapters", (*NO_MAPPING, None)),
  (lambda v: engine().update_weights(v, 1), "Engine.update_weights: params", (3, None, [1])),
  (lambda v: engine().update_weights({}, v), "Engine.update_weights: policy_version", NO_COUNT),
  (lambda v: engine().chunks.pin(v), "Chunks.pin: tokens",
   ("a", 3, None, [1.5] * 8, ["a"] * 8, [10**9] * 8, [-1] * 8, [True] * 8)),
  (lambda v: engine().chunks.pin([1] * 8, adapter=v), "Chunks.pin: adapter", NO_TEXT),
  (lambda v: engine().chunks.pin([1] * 8, namespace=v), "Chunks.pin: namespace", NO_TEXT),
  (lambda v: engine().chunks.unpin(v), "Chunks.unpin: tokens", ("a", 3, None, [1.5])),
  (lambda v: engine().chunks.resume(v), "Chunks.resume: request_id", NO_TEXT),
  (lambda v: engine().chunks.resume("x", chunk_tokens=v), "Chunks.resume: chunk_tokens",
   ("2", 2.5)),
  (lambda v: engine().chunks.pause(v), "Chunks.pause: request_id", NO_TEXT),
  (lambda v: engine().abort_request(v), "Engine.abort_request: request_id", NO_TEXT),
  (lambda v: engine().chunks.preempt(v), "Chunks.preempt: request_id", NO_TEXT),
  (lambda v: engine().progress(v), "Engine.progress: request_id", NO_TEXT),
  (lambda v: engine().chunks.spill(v), "Chunks.spill: request_ids", ("x", 3, None, [3])),
  (lambda v: engine().chunks.migrate("x", v), "Chunks.migrate: instance", NO_COUNT),
  (lambda v: engine().chunks.pull_prefix(v, 0, 0), "Chunks.pull_prefix: tokens", ("a", 3, [1.5])),
  (lambda v: engine().chunks.free_pages(v), "Chunks.free_pages: instance", NO_COUNT),
  (lambda v: engine().chunks.pages_for(v), "Chunks.pages_for: num_tokens", NO_COUNT),
  (lambda v: engine().idle_step(v, 1), "Engine.idle_step: num_requests", NO_COUNT),
  (lambda v: beam_search(v, REQUEST, 1), "beam_search: engine", ("a", None)),
  (lambda v: beam_search(engine(), REQUEST, v), "beam_search: width", NO_COUNT),
  (lambda v: load_model(v), "load_model: name_or_path", (3, None, b"nano")),
  (lambda v: load_model("nano", v), "load_model: numerics", ("float32", {})),
  (lambda v: KVPool(v), "KVPool.config", ({}, None, "disk")),
  (lambda v: KVPool(store=v), "KVPool.store", ("disk", 3)),
  (lambda v: DividedRollout(v, LongestGroupFirst()), "DividedRollout.engine", ("a", None)),
  (lambda v: DividedRollout(engine(), v), "DividedRollout.policy", ("fcfs", None, {})),
  (lambda v: DividedRollout(engine(), LongestGroupFirst(), resume_from=v),
   "DividedRollout.resume_from", (3, [1], {"a": 1})),
  (lambda v: DividedRollout(engine(), LongestGroupFirst(), on_chunk=v),
   "DividedRollout.on_chunk", (*NO_FUNCTION, None)),
  (lambda v: trained(config=v), "train: config", ({}, None, "x")),
  (lambda v: trained(model=v), "train: model", (3, None, MODEL.config)),
  (lambda v: trained(model="nano", task=v), "train: task", ("x", None, 3)),
  (lambda v: searched(config=v), "discover: config", ({}, None, RunConfig())),
  (lambda v: searched(environment=v), "discover: environment", ("x", None, 3)),
  (lambda v: decide(v, NUMERICS), "decide: shape", ("nano", None)),
  (lambda v: decide(MODEL.config, v), "decide: asked", ("float32", None)),
  (lambda v: trainer(decoder=v), "Trainer.decoder", ("nano", None, MODEL.config)),
  (lambda v: trainer(loss=v), "Trainer.loss", ("grpo", None, {})),
  (lambda v: trainer(num_pages=v), "Trainer.num_pages", NO_COUNT),
  (lambda v: trainer(page_size=v), "Trainer.page_size", NO_COUNT),
  (lambda v: trainer(mesh=v), "Trainer.mesh", ("cpu", None)),
  (lambda v: trainer(remat=v), "Trainer.remat", ("some", None, True)),
  (lambda v: trainer(policy_loss=v), "Trainer.policy_loss", ("grpo", None)),
  (lambda v: peft.load(v, MODEL.config, NUMERICS), "load: directory", (3, None)),
  (lambda v: peft.load("a", v, NUMERICS), "load: config", ({}, None)),
  (lambda v: saved(scale=v), "save: scale", ("1", None, math.nan, True)),
  (lambda v: saved(overwrite=v), "save: overwrite", NO_FLAG),
]  # fmt: skip


@functools.cache
def answer() -> Any:
  return engine().generate([REQUEST])[0]


@pytest.mark.parametrize("call, beginning, values", ROWS, ids=[row[1] for row in ROWS])
def test_a_wrong_type_is_refused_at_its_door(call, beginning, values):
  expected = answer()
  for value in values:
    with pytest.raises(ValueError) as refused:
      call(value)
    text = str(refused.value)
    assert text.startswith(beginning) and ": got " in text and ", expected " in text, (value, text)
  assert engine().num_unfinished == 0 and not engine().chunks.pins
  assert engine().generate([REQUEST])[0].has_bits_of(expected)


def test_the_table_is_as_long_as_it_should_be():
  assert sum(len(values) for _, _, values in ROWS) >= 200


def adapter(**changes: Any) -> Any:
  """Returns an adapter of the model, with changes to its first pair."""
  whole = lora.init(numerics_lib.key(1), MODEL.config, NUMERICS, rank=2)
  first = dict(whole["layers"][0])
  first["qkv"] = {**first["qkv"], **changes}
  return {"layers": [first, *whole["layers"][1:]]}


A = adapter()["layers"][0]["qkv"]["a"]


@pytest.mark.parametrize(
  "scaled, expected",
  [
    ((adapter(a=A.astype(jnp.int32)), 1.0), "layers[0]['qkv']['a']: got int32[16, 2], expected"),
    ((adapter(a=np.asarray(A).tolist()), 1.0), "layers[0]['qkv']['a']: got [["),
    ((adapter(a=None), 1.0), "layers[0]['qkv']['a']: got None, expected float32"),
    ((adapter(a=A[0]), 1.0), "layers[0]['qkv']['a']: got float32[2], expected float32 with 2"),
    ((adapter(a=A[None]), 1.0), "layers[0]['qkv'] with a (1, 16, 2) and b"),
    ((adapter(a=A.astype(bool)), 1.0), "layers[0]['qkv']['a']: got bool[16, 2]"),
    ((adapter(a=A.at[0, 0].set(math.nan)), 1.0), "adapter"),
    ((adapter(c=A), 1.0), "layers[0]['qkv']: got a dict, expected {'a': ..., 'b': ...}"),
    (({"layers": [3, 3]}, 1.0), "layers[0]: got 3, expected a dict by target"),
    (({"layers": [{"qkv": A}, {}]}, 1.0), "layers[0]['qkv']: got an ArrayImpl, expected {'a'"),
    (({"layers": [{"nothing": {"a": A, "b": A}}] * 2}, 1.0), "got the unknown targets ['nothing']"),
    (({"layers": []}, 1.0), "got none, or different ones per layer"),
    ((adapter(), "1"), "lora scale: got '1', expected a finite number"),
    ((adapter(), None), "lora scale: got None, expected a finite number"),
    ((adapter(), math.nan), "lora scale: got nan, expected a finite number"),
    ((adapter(), True), "lora scale: got True, expected a finite number"),
    ([adapter(), 1.0], "got list, expected (adapter, scale)"),
    (adapter(), "got dict, expected (adapter, scale)"),
  ],
)
def test_an_adapter_that_cannot_be_is_refused_by_its_place(scaled: Any, expected: str):
  with pytest.raises(ValueError) as refused:
    engine().set_adapters({"poet": scaled})
  assert str(refused.value).startswith("Engine.set_adapters['poet']: ")
  assert expected in str(refused.value)
  assert engine().adapters == ()


def test_an_engine_without_weights_says_so():
  bare = made(config=dataclasses.replace(SIZES, num_pages=3, max_model_len=16))
  expected = bare.generate([REQUEST])[0]
  bare.release_weights()
  for call in (
    lambda: bare.add_request(REQUEST),
    lambda: bare.check(REQUEST),
    lambda: bare.generate([REQUEST]),
    lambda: bare.top_logprobs(REQUEST, [()], 1),
    lambda: beam_search(bare, REQUEST, 1),
    lambda: bare.idle_step(1, 1),
    lambda: bare.set_adapters({"poet": (adapter(), 1.0)}),
  ):
    with pytest.raises(
      ValueError, match="got an engine without weights .* call Engine.update_weights"
    ):
      call()
  assert bare.step() == [] and bare.num_unfinished == 0
  bare.update_weights(MODEL.params, 0)
  assert bare.generate([REQUEST])[0].has_bits_of(expected)


def test_a_path_may_be_text(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="train: model: got None, expected text or a path"):
    trained(directory=str(tmp_path))
