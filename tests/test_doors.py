"""Every public entry point refuses malformed input with a sentence, and the engine still works.

There is one row per malformed input. The error states what was given, what was expected and what to
change, in this order; after it, one small engine that all rows share completes a request with the
same bits.

Faults that only a step can meet (drafter, tokenizer, device) are tested in engine/test_errors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import importlib
import itertools
import json
import pathlib
import shutil
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import tiny_model

from experiments.problems import names
from seerjax import checkpoint, metrics, parallel, rl, ttt
from seerjax.discovery import archive, environment as environment_lib, loading, problem_file, puct
from seerjax.discovery.config import DiscoverConfig, ProgramConfig, TinyConfig
from seerjax.discovery.objective import ObjectiveConfig
from seerjax.engine import timing
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv import pages, pool as kv_pool, stores
from seerjax.models import config as model_config, huggingface, lora, tokenizer as tokenizer_lib
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.numerics import NumericsConfig
from seerjax.ops import rotary
from seerjax.rollout import (
  divided,
  groups as groups_lib,
  instances as instances_lib,
  journal,
  policies,
)
from seerjax.run import evaluation, off_policy, programs as programs_lib
from seerjax.run.config import RunConfig, TrainerConfig
from seerjax.run.policy import Policy
from seerjax.run.programs import Programs
from seerjax.speculation import budget, history
from seerjax.tasks import loading as tasks_loading
from seerjax.tasks.function_task import FunctionTask, function_task
from seerjax.trainer import advantages, entropic, losses, optimizer as optimizer_lib, packing
from seerjax.types import (
  Completion,
  Problem,
  Request,
  Rollout,
  RolloutGroup,
  SamplingParams,
  Verdict,
)

# As for a user: no annotation checker precedes the library's own errors.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

NAN, INF = float("nan"), float("inf")
NANO = pathlib.Path(huggingface.__file__).parent / "nano"
TOKENIZER = tokenizer_lib.load(NANO)
MODEL = tiny_model.SMALLEST.changed(vocab_size=512, num_layers=1)  # Nano's words.
NUMERICS = tiny_model.ONE_SLAB
SIZES = EngineConfig(
  page_size=8, num_pages=9, max_num_seqs=4, max_model_len=64, batch_size_buckets=(8,)
)
RUN = RunConfig(
  num_steps=1,
  numerics=NUMERICS,
  engine=SIZES,
  rollout=groups_lib.RolloutConfig(prompts_per_step=1, group_size=2, max_tokens=4),
  trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=4),
  evaluation=evaluation.EvaluationConfig(num_problems=1),
)


# Valid defaults for the rows; each row changes one thing.


def f32(*values: float) -> np.ndarray:
  return np.asarray(values, np.float32)


def problem(**changes) -> Problem:
  return Problem(**({"problem_id": "a", "prompt": "b"} | changes))


def request(name="x", prompt=(5, 6, 7), *, seed=0, group_id="", **sampling) -> Request:
  sampling = SamplingParams(**({"max_tokens": 6} | sampling))
  return Request(request_id=name, prompt=prompt, sampling=sampling, seed=seed, group_id=group_id)


def completion(**changes) -> Completion:
  usual = dict(
    request_id="x", tokens=(1, 2), behaviour_logprobs=f32(-1, -1), raw_logprobs=f32(-1, -1),
    text="", finish_reason="", policy_version=0,
  )  # fmt: skip
  return Completion(**(usual | changes))


def words(**changes) -> SamplingParams:
  return SamplingParams(**({"max_tokens": 1} | changes))


def model(**changes) -> model_config.TransformerConfig:
  return MODEL.changed(**changes)


def rotary_config(**changes) -> rotary.RotaryConfig:
  return rotary.RotaryConfig(**({"head_dim": 8} | changes))


def step_times(**changes) -> budget.StepTimes:
  usual = dict(rows=(1, 2), seconds=(0.1, 0.2), draft_seconds=0.0, drafting_seconds=0.0)
  return budget.StepTimes(**(usual | changes))


def verdict(reward: Any) -> Verdict:
  return Verdict(reward=reward, correct=False, well_formed=True)


def groups(*rollouts: Rollout) -> list[RolloutGroup]:
  return [RolloutGroup(group_index=0, problem=problem(), rollouts=rollouts)]


def one_group() -> list[RolloutGroup]:
  done = completion(finish_reason="stop")
  return groups(Rollout(request=request(), completion=done, verdict=verdict(1.0)))


def raising(error: BaseException) -> Callable[..., Any]:
  def function(*_: Any) -> Any:
    raise error

  return function


class Own:
  """A user's task with some parts replaced."""

  name = "own"

  def __init__(self, **parts: Callable[..., Any]):
    self.parts = parts

  def num_problems(self, split):
    return self.parts.get("num_problems", lambda split: 1)(split)

  def problem(self, split, index):
    return self.parts.get("problem", lambda split, index: problem())(split, index)

  def verdict(self, problem, text):
    return self.parts.get("verdict", lambda problem, text: verdict(1.0))(problem, text)


def judged(reward: Any) -> Verdict:
  """Judges by a task with a verdict that returns this reward, or raises it."""
  is_error = isinstance(reward, BaseException)
  own_verdict = raising(reward) if is_error else lambda *_: verdict(reward)
  return groups_lib.judge(Own(verdict=own_verdict), problem(), "text")


class Doors:
  """The context of the rows: the shared engine, a folder, and files to damage."""

  def __init__(self, engine: Engine, folder: pathlib.Path, exported: pathlib.Path):
    self.engine, self.folder, self.exported = engine, folder, exported

  def made(self, **changes) -> Engine:
    numerics = changes.pop("numerics", NUMERICS)
    config = dataclasses.replace(SIZES, **changes)
    params = tiny_model.random_params(MODEL, NUMERICS)
    return Engine(Model(MODEL, params, numerics), config=config, key=jax.random.key(0))

  def submit(self, *arguments, **sampling) -> None:
    self.engine.add_request(request(*arguments, **sampling))

  def resume(self, partial: Any = None, sampling=None, **changes) -> None:
    partial = completion(**changes) if partial is None else partial
    self.engine.add_request(request(**(sampling or {})), resume_from=partial)

  def paused(self) -> Engine:
    self.engine.add_request(request("p"), chunk_tokens=2)
    while not self.engine.chunks.poll_paused():
      self.engine.step()
    return self.engine

  def running(self) -> Engine:
    self.engine.add_request(request())
    return self.engine

  def file(self, content: str | bytes, name: str = "file.jsonl") -> pathlib.Path:
    path = self.folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

  def module(self, source: str, attribute: str = "Task") -> Any:
    """Loads a user's task of this source."""
    self.file(source, "own_task.py")
    importlib.invalidate_caches()
    sys.path.append(str(self.folder))
    try:
      return tasks_loading.load(f"own_task:{attribute}")
    finally:
      sys.path.remove(str(self.folder))
      sys.modules.pop("own_task", None)

  def rewarded(self, reward: Callable[..., Any]) -> Verdict:
    """Judges by a bare reward function."""
    task = function_task("own", self.file('{"prompt": "a"}'), reward)
    return groups_lib.judge(task, task.problem("train", 0), "text")

  def damaged(self, name: str, content: bytes | int | None) -> pathlib.Path:
    """Returns a model directory with a file of other content, cut to a length, or gone."""
    directory = self.folder / "model"
    shutil.copytree(self.exported, directory)
    path = directory / name
    if content is None:
      path.unlink()
    else:
      path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    return directory

  def configured(self, **changes) -> pathlib.Path:
    """Returns a model directory with other fields in its config.json; None leaves one out."""
    config = json.loads((self.exported / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    return self.damaged("config.json", json.dumps(kept).encode())

  def weights(self, directory: pathlib.Path) -> Any:
    return huggingface.load(directory, NUMERICS)

  def save(self, params: Any = None, config=MODEL, name: str = "out", **changes) -> None:
    params = tiny_model.random_master(MODEL, NUMERICS) if params is None else params
    huggingface.save(self.folder / name, params, config, **changes)

  def train(self, task: Any = None, *, directory: Any = "run", programs=None, **changes) -> Any:
    policy = Policy(MODEL, tiny_model.random_master(MODEL, NUMERICS), TOKENIZER)
    resume = changes.pop("resume", False)
    return rl.train(
      dataclasses.replace(RUN, **changes), policy, Own() if task is None else task,
      self.folder / directory, resume=resume, programs=programs, log=lambda line: None,
    )  # fmt: skip

  def discover(self, name: str = "circle_packing:5", *, resume=False, **changes) -> Any:
    environment = names.load(name) if name else None
    config = DiscoverConfig(**changes)
    return ttt.discover(config, environment, self.folder / "run", resume=resume)

  def own(self, source: str) -> Any:
    return problem_file.load(self.file(source, "own.py"))

  def writer(self, step: int = 0, **numbers: Any) -> None:
    with metrics.Writer(self.folder / "run", console="off", tensorboard=False) as writer:
      writer.write(1, {"a/b": 1})
      writer.write(step, {name.replace("__", "/"): value for name, value in numbers.items()})

  def saved(self, state: Any = None, *, step: int = 0, host_state=None, **changes) -> None:
    state = {"a": jnp.zeros(2)} if state is None else state
    checkpoint.save(
      self.folder / "checkpoints", step, state, host_state=host_state or {}, fingerprint={},
      **changes,
    )  # fmt: skip

  def journal(self, content: bytes = b"", **settings: Any) -> None:
    path = self.file(content, "journal.jsonl") if content else self.folder / "journal.jsonl"
    journal.Journal(path, fingerprint={}, settings=settings).close()

  def packed(self, of=None, values=((0.0,),), **changes) -> Any:
    sizes = dict(decoder=decide(MODEL, NUMERICS), page_size=8, rows_per_micro_batch=64) | changes
    return packing.pack(one_group() if of is None else of, np.asarray(values), **sizes)


# Short names for rows.
TENSORS, TEMPLATE, GENERATION = "model.safetensors", "chat_template.jinja", "generation_config.json"
EIGHT_SLABS = dataclasses.replace(NUMERICS, reduction_shards=8)
GSM8K = '{"question": "a", "answer": "b"}'
MADE = "class Task:\n  def __init__(self): {}\n"
TOKENS = tuple(TOKENIZER.encode("x y"))[:5]


def stored(path: pathlib.Path) -> Any:
  return stores.open_store(kv_pool.KVPoolConfig(disk=str(path)))


def run(**changes) -> RunConfig:
  return dataclasses.replace(RUN, **changes)


def longer() -> groups_lib.RolloutConfig:
  return dataclasses.replace(RUN.rollout, max_tokens=5000)


def mini_batches() -> TrainerConfig:
  return dataclasses.replace(RUN.trainer, num_mini_batches=2)


def rows_of(count: int) -> TrainerConfig:
  return dataclasses.replace(RUN.trainer, rows_per_micro_batch=count)


def pages_of(size: int) -> EngineConfig:
  return dataclasses.replace(SIZES, page_size=size)


def others() -> Programs:
  return programs_lib.make_programs(run(lora_rank=2).shared, MODEL)


LONGEST = policies.LongestGroupFirst


def ours() -> policies.LongestGroupFirst:
  return policies.LongestGroupFirst(chunk_tokens=4)


def rolled(engine: Engine, *asked: Request) -> list[Completion]:
  return list(divided.DividedRollout(engine, ours()).run(asked))


def instances(count: int) -> instances_lib.Instances:
  return instances_lib.Instances.empty(count, page_size=1, num_pages=1, max_running=1)


def score(is_valid: bool, value: float, reward: float) -> environment_lib.Score:
  return environment_lib.Score(is_valid=is_valid, value=value, reward=reward)


def prompts(path: pathlib.Path) -> FunctionTask:
  return function_task("own", path, lambda prompt, text: 1.0)


def counted(num_problems: Callable[..., Any]) -> int:
  return groups_lib.num_problems(Own(num_problems=num_problems), "train")


def posed(pose: Callable[..., Any]) -> Problem:
  return groups_lib.problem_of(Own(problem=pose), "train", 0)


def words_of(directory: pathlib.Path) -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.load(directory)


def chatted(directory: pathlib.Path) -> str:
  return words_of(directory).chat([{"role": "user", "content": "a"}])


class Row(NamedTuple):
  """A malformed input, and pieces of the sentence that refuses it."""

  name: str
  call: Callable[[Doors], Any]
  got: str
  expected: str
  fix: str
  error: type[Exception] = ValueError
  places: list[tuple[str, ...]] = []


# Fields of a record or a config: (made by, fields, values of each, expected, what to change).
FIELDS: list[tuple[Callable[..., Any], str, list[Any], str, str]] = [
  (SamplingParams, "temperature", [-1.0, 1e-35, 1e-30, 9.9e-5, 1.1e4, 1e39],
   "expected 0 or 0.0001 <= temperature <= 10000", "0 is"),
  (SamplingParams, "temperature presence_penalty", [NAN], "expected a finite number", "default"),
  (SamplingParams, "top_k", [-1, 2**31], "expected 0 <= top_k < 2**31", "0 keeps every token"),
  (SamplingParams, "top_p", [0.0, 1.5, 1e-50], "expected 0 < top_p <= 1", "1 keeps every"),
  (SamplingParams, "min_p", [-0.1, 1.1], "expected 0 <= min_p <= 1", "0 drops no token"),
  (SamplingParams, "presence_penalty", [2.5],
   "expected -2 <= presence_penalty <= 2", "0 penalises"),
  (SamplingParams, "frequency_penalty", [-2.01], "expected -2 <= frequency_penalty <= 2", "0"),
  (SamplingParams, "frequency_penalty", [[1]], "expected a finite number", "default"),
  (SamplingParams, "repetition_penalty", [0.0, -1],
   "expected 0.0001 <= repetition_penalty <= 10000", "1 penal"),
  (SamplingParams, "repetition_penalty", [INF, None], "expected a finite number", "default"),
  (SamplingParams, "max_tokens", [0, -3], "expected max_tokens >= 1", "raise it"),
  (SamplingParams, "stop", [("",), ("a", "")],
   "expected strings of at least one character", "drop it"),
  (SamplingParams, "stop", ["end"], "expected a tuple of texts", "write ('end',)."),
  (SamplingParams, "stop", [("a", 3)], "expected a tuple of texts", "its default is ()."),
  (SamplingParams, "logit_bias", [((5,),)],
   "expected a tuple of (a whole number, a number)", "its default is ()."),
  (SamplingParams, "stop_token_ids", [(-1,), (2**31,)],
   "expected token ids from 0 on", "encode with the"),
  (words, "allowed_token_ranges", [((5, 5),), ((-1, 5),), ((7, 5),), ((0, 2**31),)],
   "expected pairs 0 <= low < high", "allow at least one id"),
  (problem, "num_steps", [-1], "expected at least 0", "0 if unknown"),
  (completion, "raw_logprobs", [f32(-1), np.array([-1.0, -1.0]), [-1.0, -1.0], None],
   "expected float32[2], one for each", "keep the engine's"),
  (completion, "finish_reason", ["done", "error"],
   "expected one of ('', 'stop',", "set both to match"),
  (completion, "behaviour_logprobs", [f32(-1, -1, -1)],
   "expected float32[2], one for", "keep the engine's"),
  (EngineConfig, "page_size", [0, -8], "expected at least 1", "32 is usual"),
  (EngineConfig, "page_size", [2**31], "expected at most 2147483647", "32 is usual"),
  (EngineConfig, "num_pages max_num_seqs", [-1], "expected at least 0", "0 derives it from the"),
  (EngineConfig, "num_pages max_num_seqs", [2**31, 2**40],
   "expected at most 2147483647", "0 derives it from the"),
  (EngineConfig, "max_model_len", [0, -5, 1], "expected at least 2", "1024 is usual"),
  (EngineConfig, "max_model_len", [2**40], "expected at most 2147483647", "1024 is usual"),
  (EngineConfig, "background_rows", [-1], "expected at least 0", "0 takes the first row bucket"),
  (EngineConfig, "pinned_pages", [-1], "expected at least 0", "0 takes a quarter of the pages"),
  (EngineConfig, "background_slack", [-0.1], "expected at least 0", "take 5 % longer"),
  (EngineConfig, "decode_steps_per_call", [-1, 33], "expected 0 to 32", "0 lets the"),
  (EngineConfig, "batch_size_buckets", [(0,), (8, 4), (8, 8), (2**40,), (-4, 8), (0, 4)],
   "expected ascending positive", "(64, 512) is usual"),
  (NumericsConfig, "row_tile kv_split reduction_shards", [3, -4, 12],
   "expected a power of two", "the defaults are row_tile=0"),
  (NumericsConfig, "kv_split query_tile", [0],
   "expected a power of two", "the defaults are row_tile=0"),
  (NumericsConfig, "kv_split slot_tile", [100, 5],
   "expected a power of two", "the defaults are row_tile=0"),
  (NumericsConfig, "compute_dtype", ["float16", "x"],
   "expected one of ('float32',", "'float32' is"),
  (NumericsConfig, "backend", ["fast"], "expected one of ('auto', 'tiled',", "'tiled' runs"),
  (kv_pool.KVPoolConfig, "host_pages", [-1], "expected at least 0", "0 keeps no KV in host"),
  (kv_pool.KVPoolConfig, "store_bytes", [-1], "expected at least 0", "set it to the size that the"),
  (model, "vocab_size num_kv_heads max_model_len", [0, -1],
   "expected at least 1", "check config.json"),
  (model, "hidden_size num_heads intermediate_size", [0],
   "expected at least 1", "check config.json"),
  (model, "layers", [()], "expected at least 1 layer", "check config.json"),
  (model, "head_dim", [6], "expected head_dim=6", "make them equal"),
  (model, "norm_eps", [0.0, -1.0], "expected 0 < norm_eps < 1", "1e-6 is usual"),
  (rotary_config, "head_dim", [0, 1, 3, 7, -2], "expected an even number", "check head_dim in"),
  (rotary_config, "base", [0.0, -1.0], "expected a positive number", "check rope_theta and"),
  (rotary_config, "scaling", ["ntk", "dynamic"], "expected one of ('none',", "choose one"),
  (rotary_config, "factor", [0.0], "expected a positive number", "check rope_theta and"),
  (rotary_config, "original_context", [0], "expected a positive number", "check rope_theta and"),
  (groups_lib.RolloutConfig, "prompts_per_step", [0],
   "expected at least 1", "32 is usual"),
  (groups_lib.RolloutConfig, "group_size", [1, 0],
   "expected at least 2", "compare its members, and 8 are usual"),
  (groups_lib.RolloutConfig, "temperature", [-1.0, -0.5], "expected 0 or 0.0001 <=", "is"),
  (groups_lib.RolloutConfig, "temperature", [NAN], "expected a finite number", "default"),
  (groups_lib.RolloutConfig, "max_tokens", [0], "expected max_tokens >= 1", "raise it"),
  (groups_lib.RolloutConfig, "top_p", [0.0], "expected 0 < top_p <= 1", "1 keeps every"),
  (groups_lib.RolloutConfig, "top_k", [-1], "expected 0 <= top_k < 2**31", "0 keeps every token"),
  (groups_lib.RolloutConfig, "min_p", [1.5, 2.0], "expected 0 <= min_p <= 1", "0 drops no token"),
  (groups_lib.RolloutConfig, "stop", [("",)], "expected strings of at", "drop it"),
  (groups_lib.RolloutConfig, "reward_weights",
   [{"Format": 1.0}, {"a b": 1.0}, {"": 1.0}, {"a": NAN}, {"a": INF}, {"a": "1"}, {"a": None},
    {"a": True}, [("a", 1.0)]], "expected ", ""),
  (TrainerConfig, "num_mini_batches dynamic_sampling_rounds", [0, -1],
   "expected at least 1", "1 is usual"),
  (TrainerConfig, "rows_per_micro_batch sequences_per_micro_batch", [-1],
   "expected at least 0", "derives it from the"),
  (RunConfig, "seed", [-1, 2**63, 2**65], "expected 0 <= seed < 2**63", "choose a smaller one"),
  (RunConfig, "seed", [1.5, True], "expected a whole number", "write 1."),
  (RunConfig, "seed", ["7"], "expected a whole number", "write 7."),
  (RunConfig, "num_steps lora_rank", [-1], "expected at least 0", "raise it"),
  (RunConfig, "data_parallel_size checkpoint_every", [0, -2], "expected at least 1", "raise it"),
  (RunConfig, "data_parallel_size", [100000], "expected at most 1024 (one per device)", "lower it"),
  (RunConfig, "lora_alpha", [0.0, -1.0], "expected a positive number", "16 is usual"),
  (RunConfig, "lora_alpha", ["16"], "expected a finite number", "write 16.0."),
  (RunConfig, "lora_alpha", [NAN], "expected a finite number", "its default is 16.0."),
  (RunConfig, "task", [3], "expected text", "write '3'."),
  (RunConfig, "engine", [{"page_size": 8}],
   "expected an EngineConfig", "write EngineConfig(...)."),
  (losses.LossConfig, "algorithm", ["ppo"], "expected one of ('grpo',", "'grpo' is usual"),
  (losses.LossConfig, "clip_low", [-0.1, 1.5, NAN],
   "expected 0 to 1", "0.2 is usual, 1"),
  (losses.LossConfig, "clip_high", [-1.0, -0.1, NAN],
   "expected at least 0", "0.2 is usual, inf never clips"),
  (losses.LossConfig, "aggregation", ["sum", "mean"], "expected one of", "'token_mean' is"),
  (losses.LossConfig, "kl_coefficient", [-1.0], "expected at least 0", "0 is off"),
  (losses.LossConfig, "kl_estimator", ["k4", "k9"],
   "expected one of ('k1', 'k2', 'k3')", "'k3' is usual"),
  (losses.LossConfig, "entropy_bonus", [-1.0], "expected at least 0", "0 is off"),
  (losses.LossConfig, "entropy_bonus", [INF], "expected a finite number", "its"),
  (losses.LossConfig, "tis_cap", [0.0, -1.0, NAN],
   "expected tis_cap > 0 or None", "2 is usual, None is off"),
  (optimizer_lib.OptimizerConfig, "learning_rate", [-1.0],
   "expected a positive number, or", "1e-6 is usual"),
  (optimizer_lib.OptimizerConfig, "warmup_steps", [-1], "expected at least 0", "0 is none"),
  (optimizer_lib.OptimizerConfig, "b1", [-0.1, 1.0], "expected 0 <= b1 < 1", "0.9 is usual"),
  (optimizer_lib.OptimizerConfig, "b2", [1.0, 2.0], "expected 0 <= b2 < 1", "0.95 is usual"),
  (optimizer_lib.OptimizerConfig, "weight_decay", [-1.0], "expected at least 0", "0 is off"),
  (optimizer_lib.OptimizerConfig, "max_gradient_norm", [0.0, -1.0, NAN],
   "expected a positive number", "1.0 is usual, inf"),
  (evaluation.EvaluationConfig, "num_problems", [0], "expected at least 1", "1024 is usual"),
  (evaluation.EvaluationConfig, "every", [-1], "expected at least 0", "is usual"),
  (evaluation.EvaluationConfig, "temperature", [-1.0], "expected 0", "is"),
  (policies.Divided, "chunk_tokens", [0],
   "expected at least 1", "the source uses 8192"),
  (policies.ContextAware, "min_pull_tokens", [-1],
   "expected at least 0", "the source uses 512"),
  (LONGEST, "chunk_tokens", [0], "expected at least 1", "the source uses 8192"),
  (LONGEST, "min_pull_tokens", [-1], "expected at least 0", "the source uses 512"),
  (LONGEST, "min_correlation", [-1.5, -2, 2.5], "expected -1 to 2", "0.5 is usual, 2"),
  (policies.ByPrefix, "max_spread", [-1], "expected at least 0", "32 for example"),
  (off_policy.OffPolicyConfig, "max_policy_lag", [2, -1],
   "expected 0 or 1, and 1 to 16", "1 and 1.0, or 0"),
  (off_policy.OffPolicyConfig, "oversample", [0.5],
   "expected 0 or 1, and 1 to 16", "or 0 and 2.0, are"),
  (off_policy.OffPolicyConfig, "oversample", [100.0],
   "expected 0 or 1, and 1 to 16", "1 and 1.0, or 0"),
  (budget.BudgetConfig, "policy", ["x", "mbb"],
   "expected one of ('mba', 'mba_paper')", "choose one"),
  (budget.BudgetConfig, "num_speculative_tokens", [0], "expected at least 1", "8 is usual"),
  (budget.BudgetConfig, "priority", [0.5], "expected at least 1", "2 is usual"),
  (history.HistoryConfig, "max_bytes", [-1], "expected at least 0", "67108864"),
  (history.HistoryConfig, "max_age", [0], "expected at least 1", "is usual"),
  (step_times, "rows", [(), (2, 1), (0, 1), (1, 2, 3)],
   "expected ascending counts of at least 1", "measure each bucket once"),
  (step_times, "seconds", [(0.0, 0.1)], "expected positive times", "measure again"),
  (step_times, "draft_seconds drafting_seconds", [-1.0],
   "expected positive times", "measure again"),
  (puct.SearchConfig, "reuse", ["x"], "expected one of ('puct', 'epsilon_greedy',", "choose one"),
  (puct.SearchConfig, "c", [-1.0], "expected at least 0", "1 is published, 0 never"),
  (puct.SearchConfig, "epsilon", [-1.0, 2.0], "expected 0 to 1", "0.2 is usual"),
  (puct.SearchConfig, "keep_children", [0], "expected at least 1", "2 is published"),
  (puct.SearchConfig, "capacity", [1], "expected at least 2", "1000 is published"),
  (puct.SearchConfig, "islands", [0], "expected at least 1 and 0,", "set"),
  (puct.SearchConfig, "patience", [-1], "expected at least 1 and 0,", "set"),
  (TinyConfig, "hidden_size", [0, 12, 60],
   "expected num_heads to be a multiple", "64, 8 and 2 are usual"),
  (TinyConfig, "num_layers", [0],
   "expected num_heads to be a multiple", "and at least one layer; 64, 8 and 2 are usual"),
  (TinyConfig, "num_heads", [0, 3, 4],
   "expected num_heads to be a multiple", "64, 8 and 2 are usual"),
  (TinyConfig, "warm_sentences warm_passes", [-1],
   "expected at least 0", "0 starts from random weights"),
  (ObjectiveConfig, "kind", ["x", "best"],
   "expected one of ('adaptive', 'constant',", "choose one"),
  (ObjectiveConfig, "divergence", [0.0], "expected a positive number", "ln 2 nats is published"),
  (ObjectiveConfig, "beta", [-1.0], "expected at least 0", "2 is published"),
  (ObjectiveConfig, "max_advantage kl_coefficient", [-1.0, -0.1],
   "expected at least 0", "0 is off"),
  (ObjectiveConfig, "max_advantage kl_coefficient", [NAN, INF],
   "expected a finite number", "default"),
  (DiscoverConfig, "seed", [-1], "expected 0 <= seed < 2**63", "choose a smaller one"),
  (DiscoverConfig, "seed", [2**63], "expected 0 <= seed < 2**63", "choose a smaller one"),
  (DiscoverConfig, "num_steps prompts_per_step checkpoint_every", [0],
   "expected at least 1", "raise it"),
  (DiscoverConfig, "group_size", [1, 3], "expected at least 4", "raise it"),
  (DiscoverConfig, "temperature", [0.0],
   "expected 0.0001 <=", "(attempts of a group have to differ); 1 is usual"),
  (DiscoverConfig, "temperature", [INF], "expected a finite number", "default"),
  (DiscoverConfig, "num_workers lora_rank", [-1], "expected at least 0", "raise it"),
  (DiscoverConfig, "data_parallel_size", [0, 100000], "expected 1 to 1024", "one per device"),
  (DiscoverConfig, "lora_alpha", [0.0], "expected a positive number", "32 is usual"),
  (ProgramConfig, "thinking_tokens answer_tokens memory_mib num_workers", [0],
   "expected at least 1", "raise it"),
  (ProgramConfig, "seconds", [0.0], "expected a positive number", "10 is usual"),
]  # fmt: skip

# Pieces of the message that several rows share: the expected value, and the change to make.
NO_OTHER = ("expected 0 to 0", "the mesh has no other")
NO_NUMBER = ("expected a finite number below 1e+15 in", "fix the task and resume: earlier")
NO_ID = ("expected 0 to 511", "encode with this model's tokenizer")
UNKNOWN = ("expected one of the 0 that are", "it may have finished (see poll)")
NO_SIZE = ("expected a whole number of at least 1", "correct the file")
NO_MESH = ("expected at least 1, 1 and 0", "one device is data_parallel_size=1,")
NO_VERDICT = ("expected a Verdict for any text", "fix the task and resume: earlier")
NO_REWARD = ("expected a finite float", "fix the task and resume: earlier")
INCOMPLETE = ("expected a complete one", "it may be truncated, download it")
NO_BIAS = ("expected a token id from 0 to 511 and a", "the lowest bias forbids a token")
NO_CHUNK = ("expected at least 1", "None runs to the end")
FINISHED = ("expected an unfinished completion", "use it as it is")
NO_LOGPROB = ("expected a finite number of at most 0", "pass the values that the engine returned")
NO_RANK = ("expected 1 <= rank <= 16, the smallest", "8 to 64 is usual")
NO_MODULE = ("expected 'my_module:MyTask'", "run from the folder of my_module.py")
# Other public functions.
ROWS = [
  Row("at most one token per position",
      lambda d: words(max_tokens=2, allowed_token_ranges=((0, 5),)),
      "max_tokens: got 2 with 1 positions in `allowed_token_ranges`",
      "expected at most one token per position", "lower it"),
  Row("a request named 5", lambda d: request(5),
      "got 5", "expected text", "write '5'"),
  Row("a group named 7", lambda d: request(group_id=7),
      "got 7", "expected text", "write '7'"),
  Row("text as a prompt", lambda d: request(prompt="abc"),
      "got 'abc'", "expected a tuple of whole numbers", "encode text with the tokenizer, and"),
  Row("an array as a prompt", lambda d: request(prompt=np.arange(3)),
      "Request.prompt: got a ndarray",
      "expected a tuple of whole numbers", "encode text with the tokenizer, and"),
  Row("no sampling", lambda d: Request(request_id="a", prompt=(1,), sampling=None),
      "got None", "expected a SamplingParams", "write SamplingParams(...)"),
  Row("half a seed", lambda d: request(seed=1.5),
      "got 1.5", "expected a whole number", "write 1"),
  Row("an error without its finish reason", lambda d: completion(error="x"),
      "got finish_reason='' with error='x'",
      "expected one of ('', 'stop', 'length',", "set both to match"),
  Row("an empty prompt", lambda d: d.submit(prompt=()),
      "request 'x': got an empty prompt", "expected at least one token", "add a BOS token"),
  Row("an id above the vocabulary", lambda d: d.submit(prompt=(600,)),
      "got token ids from 600 to 600", "expected 0 to 511", "encode with this model's tokenizer"),
  Row("a negative id", lambda d: d.submit(prompt=(3, -1)), "got token ids from -1 to 3", *NO_ID),
  Row("half an id", lambda d: d.submit(prompt=(1.5,)),
      "got 1.5 in (1.5,)", "expected a tuple of whole numbers", "encode text with the"),
  Row("a word as an id", lambda d: d.submit(prompt=("a",)),
      "got 'a' in ('a',)", "expected a tuple of whole numbers", "encode text with the"),
  Row("a negative seed", lambda d: d.submit(seed=-1),
      "got seed -1", "expected 0 <= seed < 2**32", "take it modulo 2**32"),
  Row("a seed of 33 bits", lambda d: d.submit(seed=2**32),
      "got seed 4294967296", "expected 0 <= seed < 2**32", "take it modulo 2**32"),
  Row("a prompt of the whole context", lambda d: d.submit(prompt=(1,) * 64),
      "got a prompt of 64 tokens", "expected fewer than the context of 64",
      "shorten it or raise EngineConfig.max_model_len (the model allows 4096)"),
  Row("no room for the answer", lambda d: d.submit(max_tokens=63),
      "got 3 prompt tokens and max_tokens 63",
      "expected a sum of at most 64, the context", "lower SamplingParams.max_tokens or"),
  Row("a stop id above the vocabulary", lambda d: d.submit(stop_token_ids=(512,)),
      "got token ids from 512 to 512", "expected 0 to 511", "encode with this model's tokenizer"),
  Row("a bias above the vocabulary", lambda d: d.submit(logit_bias=((512, 1.0),)),
      "got logit_bias (512, 1.0)", *NO_BIAS),
  Row("a bias below the vocabulary", lambda d: d.submit(logit_bias=((-1, 1.0),)),
      "got logit_bias (-1, 1.0)", *NO_BIAS),
  Row("a bias of NaN", lambda d: d.submit(logit_bias=((5, NAN),)),
      "got logit_bias (5, nan)", *NO_BIAS),
  Row("a bias of infinity", lambda d: d.submit(logit_bias=((5, -INF),)),
      "got logit_bias (5, -inf)",
      "expected a token id from 0 to 511 and a bias from -1e+06 to 1e+06",
      "the lowest bias forbids a token"),
  Row("17 biases", lambda d: d.submit(logit_bias=((1, 1.0),) * 17),
      "SamplingParams.logit_bias: got 17 entries", "expected at most 16", "bias fewer tokens"),
  Row("a grammar above the vocabulary", lambda d: d.submit(allowed_token_ranges=((0, 513),) * 6),
      "got a grammar that allows ids up to 512",
      "expected at most 511", "write SamplingParams.allowed_token_ranges for"),
  Row("one request to generate", lambda d: d.engine.generate(request()),
      "got a Request", "expected text or an iterable of", "write [...]"),
  Row("two of one name", lambda d: d.engine.generate([request(), request()]),
      "got the id of a running request", "expected a new id", "rename it"),
  Row("a chunk of 0", lambda d: d.engine.add_request(request(), chunk_tokens=0),
      "request 'x': chunk_tokens: got 0", "expected at least 1", "None runs to the end"),
  Row("half a chunk", lambda d: d.engine.add_request(request(), chunk_tokens=2.5),
      "got 2.5", "expected a whole number or None", "write 2"),
  Row("instance -1", lambda d: d.engine.add_request(request(), instance=-1), "got -1", *NO_OTHER),
  Row("an absent instance", lambda d: d.engine.add_request(request(), instance=1),
      "request 'x': instance: got 1", "expected 0 to 0", "the mesh has no other"),
  Row("half an instance", lambda d: d.engine.add_request(request(), instance=0.5),
      "got 0.5", "expected a whole number or None", "write 0"),
  Row("resumed for 0", lambda d: d.paused().chunks.resume("p", chunk_tokens=0), "got 0", *NO_CHUNK),
  Row("resumed for -3", lambda d: d.paused().chunks.resume("p", chunk_tokens=-3),
      "got -3", *NO_CHUNK),
  Row("resumed for 2.5", lambda d: d.paused().chunks.resume("p", chunk_tokens=2.5),
      "got 2.5", "expected a whole number or None", "write 2"),
  Row("resumed on an absent instance", lambda d: d.paused().chunks.resume("p", instance=7),
      "got 7", "expected 0 to 0", "the mesh has no other"),
  Row("resumed on instance -1", lambda d: d.paused().chunks.resume("p", instance=-1),
      "got -1", *NO_OTHER),
  Row("moved to an absent instance", lambda d: d.paused().chunks.migrate("p", 1),
      "got 1", *NO_OTHER),
  Row("moved to instance -1", lambda d: d.paused().chunks.migrate("p", -1), "got -1", *NO_OTHER),
  Row("free pages of instance -1", lambda d: d.engine.chunks.free_pages(-1), "got -1", *NO_OTHER),
  Row("free pages of an absent instance", lambda d: d.engine.chunks.free_pages(1),
      "got 1", *NO_OTHER),
  Row("awaited pages of instance -1", lambda d: d.engine.chunks.awaited_pages(-1),
      "got -1", *NO_OTHER),
  Row("resumed, unknown", lambda d: d.engine.chunks.resume("unknown"),
      "got request 'unknown'", *UNKNOWN),
  Row("cancelled, unknown", lambda d: d.engine.abort_request("unknown"),
      "Engine.abort_request: got request 'unknown'", *UNKNOWN),
  Row("paused, unknown", lambda d: d.engine.chunks.pause("unknown"),
      "got request 'unknown'", *UNKNOWN),
  Row("preempted, unknown", lambda d: d.engine.chunks.preempt("unknown"),
      "Chunks.preempt: got request 'unknown'", *UNKNOWN),
  Row("asked after, unknown", lambda d: d.engine.progress("unknown"),
      "Engine.progress: got request 'unknown'", *UNKNOWN),
  Row("spilled, unknown", lambda d: d.engine.chunks.spill(["unknown"]),
      "got request 'unknown'", *UNKNOWN),
  Row("spilled by letters", lambda d: d.paused().chunks.spill("p"),
      "got 'p'", "expected an iterable of texts", "write ['p']"),
  Row("resumed while it runs", lambda d: d.running().chunks.resume("x"),
      "Chunks.resume: got request 'x', which is not paused",
      "expected one of the 0 paused requests", "its chunk is still running"),
  Row("moved while it runs", lambda d: d.running().chunks.migrate("x", 0),
      "got request 'x', which is not paused",
      "expected one of the 0 paused requests", "its chunk is still running"),
  Row("no rows to time", lambda d: timing.step_seconds(d.engine, [(0, 1)]),
      "requests: got 0", "expected at least 1", "a step has at least one"),
  Row("fewer rows than requests to time", lambda d: timing.step_seconds(d.engine, [(2, 1)]),
      "rows: got 1", "expected at least 2", "each request has at least one row"),
  Row("timed never", lambda d: timing.step_seconds(d.engine, [(1, 1)], repeats=0),
      "got 0", "expected at least 1", "6 is usual"),
  Row("timed while it runs", lambda d: timing.step_seconds(d.running(), [(1, 1)]),
      "got 1 unfinished requests", "expected none", "measure before adding requests"),
  Row("pulled to nowhere", lambda d: d.engine.chunks.pull_prefix([1, 2], 0, 9),
      "target: instance: got 9", "expected 0 to 0", "the mesh has no other"),
  Row("a step of too many rows", lambda d: d.engine.idle_step(1, 10**6),
      "got 1000000", "expected 1 to 8", "the last row bucket is the maximum"),
  Row("a step of more requests than rows", lambda d: d.engine.idle_step(3, 2),
      "num_requests: got 3", "expected 1 to 2", "each request has at least one row"),
  Row("a visit of drafts", lambda d: d.engine.idle_step(1, 2, 4),
      "num_steps: got 4", "expected 1 to 1", "draft rows are verified in one step"),
  Row("pages of no token", lambda d: d.engine.chunks.pages_for(0),
      "got 0 tokens", "expected at least 1", "a prompt has at least one"),
  Row("new weights while it runs", lambda d: d.running().update_weights({}, 1),
      "update_weights: got 1 unfinished requests",
      "expected none", "finish or cancel them (a completion comes from"),
  Row("a negative version", lambda d: d.engine.update_weights({}, -1),
      "got -1", "expected at least 0", "count updates"),
  Row("a named version", lambda d: d.engine.update_weights({}, "one"),
      "got 'one'", "expected a whole number", "give one"),
  Row("resumed from another request", lambda d: d.resume(request_id="y"),
      "got a completion of request 'y'", "expected one of this", "pass the completion with"),
  Row("resumed with other weights", lambda d: d.resume(policy_version=3),
      "got 2 tokens sampled by policy_version 3",
      "expected 0, the engine's (a completion", "restart it from its prompt"),
  Row("resumed after its end", lambda d: d.resume(finish_reason="stop"),
      "got 2 of 6 tokens sampled, finish_reason 'stop'", *FINISHED),
  Row("resumed at full length", lambda d: d.resume(sampling={"max_tokens": 2}),
      "got 2 of 2 tokens sampled, finish_reason ''", *FINISHED),
  Row("resumed with NaN", lambda d: d.resume(raw_logprobs=f32(NAN, -1)),
      "got resume_from.raw_logprobs of nan at position 0", *NO_LOGPROB),
  Row("resumed with a positive log-probability", lambda d: d.resume(raw_logprobs=f32(-1, 0.5)),
      "got resume_from.raw_logprobs of 0.5 at position 1", *NO_LOGPROB),
  Row("resumed with an impossible token", lambda d: d.resume(behaviour_logprobs=f32(-1, -INF)),
      "got resume_from.behaviour_logprobs of -inf at position 1", *NO_LOGPROB),
  Row("resumed above the vocabulary", lambda d: d.resume(tokens=(1, 600)),
      "got token ids from 1 to 600", "expected 0 to 511", "encode with this model's tokenizer"),
  Row("resumed with a negative id", lambda d: d.resume(tokens=(1, -2)),
      "got token ids from -2 to 1", *NO_ID),
  Row("resumed with half an id", lambda d: d.resume(tokens=(1, 2.5)),
      "got 2.5 (float) among the token ids",
      "expected whole numbers", "encode with this model's tokenizer"),
  Row("resumed after a stop id", lambda d: d.resume(sampling={"stop_token_ids": (2,)}),
      "got the stop id 2 at position 1 of the completion", *FINISHED),
  Row("resumed against the grammar",
      lambda d: d.resume(sampling={"allowed_token_ranges": ((0, 2),) * 6}),
      "got token 2 at position 1 of the completion",
      "expected 0 to 1, which its grammar", "pass tokens that this request sampled"),
  Row("resumed after a stop string", lambda d: d.resume(tokens=TOKENS, sampling={"stop": ("x",)}),
      "got float32[2] for 3 tokens",
      "expected float32[3], one for each", "keep the engine's array,"),
  Row("resumed with text", lambda d: d.resume("abc"),
      "got 'abc'", "expected a Completion or None", "write Completion(...)"),
  Row("more pages than memory", lambda d: d.made(num_pages=2**30),
      "got 1073741824 pages of 8 positions",
      "expected at most", "lower it, or set 0 to use what fits"),
  Row("more rows than memory", lambda d: d.made(batch_size_buckets=(2**30,)),
      "got 1073741824 rows of at least 160 bytes",
      "expected no more than the free memory", "lower the last bucket or"),
  Row("sequences without rows", lambda d: d.made(max_num_seqs=9),
      "got at most 8 rows", "expected at least max_num_seqs=9 (each", "raise the last bucket"),
  Row("pages of no split", lambda d: d.made(page_size=3),
      "EngineConfig.page_size: got 3",
      "expected a divisor of kv_split=16", "a split is read page by page"),
  Row("pages above a split", lambda d: d.made(page_size=64),
      "EngineConfig.page_size: got 64",
      "expected a divisor of kv_split=16", "a split is read page by page"),
  Row("the reserved page alone", lambda d: d.made(num_pages=1),
      "got 1", "expected at least 2 (page 0 is reserved)", "raise EngineConfig.num_pages"),
  Row("slabs that do not divide", lambda d: d.made(numerics=EIGHT_SLABS),
      "reduction_shards: got 8",
      "expected a divisor of num_heads=2", "use reduction_shards=2 for this"),
  Row("no instance", lambda d: parallel.make_mesh(data_parallel_size=0),
      "got data_parallel_size=0, tensor_parallel_size=1, first=0", *NO_MESH),
  Row("instance -1 of a mesh", lambda d: parallel.make_mesh(data_parallel_size=-1),
      "got data_parallel_size=-1, tensor_parallel_size=1, first=0", *NO_MESH),
  Row("no model shard", lambda d: parallel.make_mesh(tensor_parallel_size=0),
      "got data_parallel_size=1, tensor_parallel_size=0, first=0", *NO_MESH),
  Row("device -1", lambda d: parallel.make_mesh(first=-1),
      "got data_parallel_size=1, tensor_parallel_size=1, first=-1", *NO_MESH),
  Row("more devices than there are", lambda d: parallel.make_mesh(data_parallel_size=100),
      "got data_parallel_size=100 x tensor_parallel_size=1 = 100",
      "expected at most 8, the available", "lower either, or on CPU start with"),
  Row("slabs that no devices share", lambda d: parallel.local_slabs(8, 3),
      "got 3 devices",
      "expected a divisor of reduction_shards=8", "use fewer devices on the model axis"),
  Row("two stores", lambda d: kv_pool.KVPoolConfig(disk="a", mooncake="b:1"),
      "got disk='a' and mooncake='b:1'", "expected at most one store", "leave one out"),
  Row("a store in a file", lambda d: stored(d.file("")),
      "got ", "expected a directory", "choose another KVPoolConfig.disk"),
  Row("a pool of one page", lambda d: pages.PagePool(1, 8),
      "got 1", "expected at least 2 (page 0 is reserved)", "raise EngineConfig.num_pages"),
  Row("pages that are not there", lambda d: pages.PagePool(3, 8).take(5),
      "got a request for 5 pages", "expected at most 2", "wait until requests finish"),
  Row("an answer above the context", lambda d: run(rollout=longer()),
      "got 5000", "expected at most 63, because prompt and", "lower it, or raise those"),
  Row("more mini-batches than groups", lambda d: run(trainer=mini_batches()),
      "got 2", "expected at most", "lower it or sample more groups"),
  Row("a rival on one device",
      lambda d: run(off_policy=off_policy.OffPolicyConfig(max_policy_lag=1)),
      "got 1 with data_parallel_size=1",
      "expected 2 or more (half of them sample", "raise RunConfig.data_parallel_size"),
  Row("two ways not to wait",
      lambda d: off_policy.OffPolicyConfig(max_policy_lag=1, oversample=2.0),
      "got max_policy_lag=1 and oversample=2.0",
      "expected at most one of them", "both avoid waiting for long"),
  Row("a length that is not named", lambda d: losses.LossConfig(aggregation="constant_length"),
      "max_tokens: got 0", "expected max_tokens >= 1 with", "pass SamplingParams.max_tokens"),
  Row("GSPO with a cap", lambda d: losses.LossConfig(algorithm="gspo", tis_cap=2.0),
      "tis_cap: got 2.0", "expected None with algorithm='gspo'", "set tis_cap=None or another"),
  Row("no instances to schedule", lambda d: instances(0),
      "got data_parallel_size=0, page_size=1, num_pages=1,", "expected", " at least 1 of each"),
  Row("a mean with a cut", lambda d: ObjectiveConfig(kind="mean", max_advantage=2.0),
      "got kind='mean' with ", "expected neither", "they belong to 'adaptive' and"),
  Row("more islands than groups",
      lambda d: DiscoverConfig(prompts_per_step=2, search=puct.SearchConfig(islands=3)),
      "got search.islands=3 and prompts_per_step=2",
      "expected at least one group per island", "raise"),
  Row("a seed of thousands of digits", lambda d: RunConfig(seed=10**5000),
      "RunConfig.seed: got a number with thousands of digits", "expected a whole number", ""),
  Row("a visit that took NaN", lambda d: step_times(visits=((1, 8, NAN),)),
      "StepTimes.visits: got nan in ((1, 8, nan),)", "expected ", "a finite number"),
  Row("paths without a decode row", lambda d: step_times(paths=((2, 1, 1.0),)),
      "StepTimes.paths: got 2 requests with 1 rows", "expected ", "count the decode row, too"),
  Row("a visit of no step", lambda d: step_times(visits=((1, 0, 1.0),)),
      "StepTimes.visits: got 1 requests and 0 steps", "expected at least 1 ", "leave out"),
  Row("a mean with a deviation", lambda d: ObjectiveConfig(kind="mean", valid_only=True),
      "got kind='mean' with valid_only=True,",
      "expected neither", "they belong to 'adaptive' and"),
  Row("an adapter of no rank", lambda d: lora.shapes(MODEL, NUMERICS, 0), "got 0", *NO_RANK),
  Row("an adapter above its model", lambda d: lora.shapes(MODEL, NUMERICS, 10**6),
      "got 1000000", "expected 1 <= rank <= 16, the smallest", "8 to 64 is usual"),
  Row("an adapter of nothing", lambda d: lora.shapes(MODEL, NUMERICS, 2, ("nothing",)),
      "got ('nothing',)", "expected at least one of ('qkv', 'out',", "all of them are usual"),
  Row("a state of NaN", lambda d: archive.Child(value=NAN, reward=1.0, tokens=(), artefact=[]),
      "got nan", "expected a finite number up to 1e+300", "leave invalid attempts out of the"),
  Row("a score of NaN", lambda d: score(True, NAN, 1.0),
      "got value=nan, reward=1.0 of a valid artefact",
      "expected a finite value and a positive", "fix the verifier, or return"),
  Row("an infinite reward of a score", lambda d: score(True, 1.0, INF),
      "got value=1.0, reward=inf of a valid artefact",
      "expected a finite value and a positive", "fix the verifier, or return"),
  Row("invalid without a reason", lambda d: score(False, NAN, 0.0),
      "got value=nan, reward=0.0, reason='' of an",
      "expected NaN, 0 and a reason", "return `invalid(reason)`"),
  Row("no such problem", lambda d: loading.load("nothing"),
      "got 'nothing'", "expected 'my_module:MyProblem'", "correct --config.problem"),
  Row("no such short name", lambda d: names.load("nothing"),
      "got 'nothing'", "expected one of ['apple_machines',", "correct --config.problem"),
  Row("a problem of x circles", lambda d: names.load("circle_packing:x"),
      "got 'circle_packing:x'",
      "expected a number of circles behind the", "circle_packing:26 is usual"),
  Row("a problem of -1 circles", lambda d: names.load("circle_packing:-1"),
      "got 'circle_packing:-1'",
      "expected a number of circles behind the", "circle_packing:26 is usual"),
  # User tasks and rewards.
  Row("a syntax error in a task", lambda d: d.module("def f(:\n"),
      "got 'own_task:Task', but", "expected Python", "fix that line"),
  Row("a task that raises at import", lambda d: d.module("raise RuntimeError('boom')"),
      "got 'own_task:Task', but",
      "expected one with only definitions", "fix it, or move other code under if"),
  Row("a task that exits at import", lambda d: d.module("import sys; sys.exit(3)"),
      "got 'own_task:Task', but",
      "expected one with only definitions", "fix it, or move other code under if"),
  Row("a task without its library", lambda d: d.module("import nowhere_at_all"),
      "got 'own_task:Task', but", *NO_MODULE),
  Row("a task that raises when made", lambda d: d.module(MADE.format("raise KeyError('no')")),
      "got KeyError ('no') from Task()", "expected a task", "fix it, or set --config.task_path"),
  Row("a task that exits when made", lambda d: d.module(MADE.format("raise SystemExit(1)")),
      "got SystemExit (1) from Task()", "expected a task", "fix it, or set --config.task_path"),
  Row("a task with arguments", lambda d: d.module("class Task:\n  def __init__(self, a): pass"),
      "got TypeError (Task.__init__() missing 1",
      "expected a task", "fix it, or set --config.task_path"),
  Row("no task", lambda d: d.module("class Task: pass"),
      "got 'own_task:Task' without",
      "expected a task with name,", "see seerjax.types.Task"),
  Row("a number as a task", lambda d: d.module("Task = 5"),
      "got 'own_task:Task' without",
      "expected a task with name,", "see seerjax.types.Task"),
  Row("no such attribute", lambda d: d.module("x = 5"),
      "got 'own_task:Task', but",
      "expected a task class, a task or a", "it has ['x']"),
  Row("a reward without prompts", lambda d: d.module("def Task(prompt, text): return 1.0"),
      "got a bare reward function and no path",
      "expected a JSON-lines file with \"prompt\"", "set --config.task_path"),
  Row("no such module", lambda d: tasks_loading.load("no_such_module:Task"),
      "got 'no_such_module:Task', but module", *NO_MODULE),
  Row("no module", lambda d: tasks_loading.load(":Task"),
      "got ':Task', but module '' cannot be imported", *NO_MODULE),
  Row("no such task", lambda d: tasks_loading.load("nothing"),
      "got name 'nothing'",
      "expected 'code', 'math', 'countdown',", "check the spelling of --config.task"),
  Row("no name of a task", lambda d: tasks_loading.load(""),
      "got name ''",
      "expected 'code', 'math', 'countdown',", "check the spelling of --config.task"),
  Row("a path for drawn problems", lambda d: tasks_loading.load("word_problems", path="x"),
      "got path 'x'",
      "expected none because its problems are", "drop --config.task_path or choose"),
  Row("GSM8K without a path", lambda d: tasks_loading.load("gsm8k"),
      "got no path", "expected the original JSON lines", "set --config.task_path to the"),
  Row("GSM8K elsewhere", lambda d: tasks_loading.load("gsm8k", path=d.folder / "no"),
      "got no such file",
      "expected JSON lines with the keys", "set --config.task_path to the file", FileNotFoundError),
  Row("GSM8K without answers", lambda d: tasks_loading.load("gsm8k", path=d.file(GSM8K)),
      "got the answer 'b'",
      "expected it to end with '#### <number>'", "use the original files, or repair"),
  Row("no prompts", lambda d: prompts(d.file("")),
      "got an empty file", "expected at least one row", "check the export"),
  Row("prompts that are no JSON", lambda d: prompts(d.file("{")),
      "got text that is not JSON (Expecting property",
      "expected one JSON object per line", "repair or remove that"),
  Row("a list of prompts", lambda d: prompts(d.file("[1]")),
      "got a JSON list", "expected an object with the keys", "repair or remove that"),
  Row("prompts of another name", lambda d: prompts(d.file('{"x": 1}')),
      "got the keys ('x',)", "expected \"prompt\"", "repair or remove that"),
  Row("a number as a prompt", lambda d: prompts(d.file('{"prompt": 5}')),
      "got prompt=5", "expected a non-empty string", "repair or remove that"),
  Row("an empty prompt of a file", lambda d: prompts(d.file('{"prompt": ""}')),
      "got prompt=''", "expected a non-empty string", "repair or remove that"),
  Row("prompts that are no text", lambda d: prompts(d.file(b"\xff\xfe")),
      "got bytes that are not UTF-8 at offset 0",
      "expected UTF-8 JSON lines", "re-encode the file"),
  Row("a directory of prompts", lambda d: prompts(d.folder),
      "got no such file",
      "expected JSON lines with the keys", "set --config.task_path to the file", FileNotFoundError),
  Row("prompts elsewhere", lambda d: prompts(d.folder / "no"),
      "got no such file",
      "expected JSON lines with the keys", "set --config.task_path to the file", FileNotFoundError),
  Row("a verdict that exits", lambda d: judged(SystemExit(1)),
      "got SystemExit (1) while judging problem 'a',", *NO_VERDICT),
  Row("a verdict that raises", lambda d: judged(KeyError("k")),
      "got KeyError ('k') while judging problem 'a',", *NO_VERDICT),
  Row("a reward of NaN", lambda d: judged(NAN),
      "got reward nan for problem 'a', text 'text'", *NO_NUMBER),
  Row("an infinite reward", lambda d: judged(-INF),
      "got reward -inf for problem 'a', text 'text'", *NO_NUMBER),
  Row("a reward that float32 cannot hold", lambda d: judged(1e39),
      "got reward 1e+39 for problem 'a', text 'text'", *NO_NUMBER),
  Row("a reward that no float can hold", lambda d: judged(10**400), "got reward", *NO_NUMBER),
  Row("a reward as text", lambda d: judged("1"),
      "got reward '1' for problem 'a', text 'text'", *NO_NUMBER),
  Row("no reward", lambda d: judged(None),
      "got reward None for problem 'a', text 'text'", *NO_NUMBER),
  Row("an imaginary reward", lambda d: judged(1j),
      "got reward 1j for problem 'a', text 'text'", *NO_NUMBER),
  Row("no verdict", lambda d: groups_lib.judge(Own(verdict=lambda *_: 1.0), problem(), "t"),
      "got 1.0 (float) for problem 'a', text 't'",
      "expected a Verdict", "fix the task and resume: earlier"),
  Row("None as a verdict", lambda d: groups_lib.judge(Own(verdict=lambda *_: None), problem(), "t"),
      "got None (NoneType) for problem 'a', text 't'",
      "expected a Verdict", "fix the task and resume: earlier"),
  Row("no text to judge", lambda d: groups_lib.judge(Own(), problem(), None),
      "got a text of type NoneType for problem 'a'", "expected a string", "pass Completion.text"),
  Row("a reward function that exits", lambda d: d.rewarded(raising(SystemExit(1))),
      "got SystemExit (1) while judging problem", *NO_VERDICT),
  Row("a reward function that raises", lambda d: d.rewarded(raising(KeyError("k"))),
      "got KeyError ('k') while judging problem", *NO_VERDICT),
  Row("a reward function of NaN", lambda d: d.rewarded(lambda *_: NAN),
      "got ValueError (own: got reward nan (float) for", *NO_REWARD),
  Row("a reward function of 1e39", lambda d: d.rewarded(lambda *_: 1e39),
      "got reward 1e+39 for problem 'own-0', text", *NO_NUMBER),
  Row("a reward function of 1e400", lambda d: d.rewarded(lambda *_: 10**400),
      "got ValueError (own: got reward", *NO_REWARD),
  Row("a reward function of text", lambda d: d.rewarded(lambda *_: "1"),
      "got ValueError (own: got reward '1' (str) for", *NO_REWARD),
  Row("a reward function of nothing", lambda d: d.rewarded(lambda *_: None),
      "got ValueError (own: got reward None (NoneType)", *NO_REWARD),
  Row("a count that exits", lambda d: counted(raising(SystemExit(1))),
      "got SystemExit (1) from num_problems('train')", "expected a whole number", "fix the task"),
  Row("a count that raises", lambda d: counted(raising(KeyError("k"))),
      "got KeyError ('k') from num_problems('train')", "expected a whole number", "fix the task"),
  Row("no problems", lambda d: counted(lambda split: 0),
      "got 0 problems in split 'train'",
      "expected at least 1", "add problems, or choose another task"),
  Row("a count as text", lambda d: counted(lambda split: "5"),
      "got '5' (str) from num_problems('train')",
      "expected a whole number of at least 1", "return len(...) of the problems"),
  Row("half a count", lambda d: counted(lambda split: 1.5),
      "got 1.5 (float) from num_problems('train')",
      "expected a whole number of at least 1", "return len(...) of the problems"),
  Row("a problem that exits", lambda d: posed(raising(SystemExit(1))),
      "got SystemExit (1) from problem('train', 0)",
      "expected a Problem", "fix the task and resume: earlier"),
  Row("a problem that raises", lambda d: posed(raising(KeyError("k"))),
      "got KeyError ('k') from problem('train', 0)",
      "expected a Problem", "fix the task and resume: earlier"),
  Row("no problem", lambda d: posed(lambda *_: None),
      "got None (NoneType) from problem('train', 0)", "expected a Problem", "return"),
  Row("problem -1", lambda d: tasks_loading.load("word_problems").problem("train", -1),
      "got problem index -1 of split 'train'",
      "expected 0 <= index < 300000", "take the index modulo"),
  Row("no such split", lambda d: tasks_loading.load("word_problems").problem("test", 0),
      "got split 'test'", "expected one of ('train', 'heldout',", "'train' is usual"),
  Row("a problem of your own in no Python", lambda d: d.own("def f(:"),
      "got a syntax error in line 1 (invalid syntax)", "expected Python", "fix that line"),
  Row("a problem of your own that raises", lambda d: d.own("raise RuntimeError('a')"),
      "got RuntimeError: a while importing it",
      "expected a file that can be imported", "`python "),
  Row("a problem of your own that exits", lambda d: d.own("raise SystemExit"),
      "got SystemExit while importing it", "expected a file that can be imported", "`python "),
  Row("a problem of your own without parts", lambda d: d.own("NAME = 5"),
      "got no function start, describe, verify, picture",
      "expected all of start, describe,", "define it, or start from a copy of"),
  Row("a problem of your own elsewhere", lambda d: problem_file.load(d.folder / "no.py"),
      "got no such file",
      "expected Python with the functions", "set --config.problem to its path", FileNotFoundError),
  Row("a problem of your own in text", lambda d: problem_file.load(d.file("", "a.txt")),
      "got a file that ends with '.txt'", "expected '.py'", "rename it"),
  # Models and tokenizers.
  Row("no config", lambda d: d.weights(d.damaged("config.json", None)),
      "got no such file",
      "expected a Hugging Face model directory", "check the path", FileNotFoundError),
  Row("an empty config", lambda d: d.weights(d.damaged("config.json", b"")),
      "got text that is not JSON (Expecting value:", "expected an object", "download it again"),
  Row("a list as a config", lambda d: d.weights(d.damaged("config.json", b"[]")),
      "config.json: got a JSON list", "expected an object", "download it again"),
  Row("a config that is no text", lambda d: d.weights(d.damaged("config.json", b"\xff\xfe")),
      "config.json: got bytes that are not UTF-8 at offset 0",
      "expected text", "download it again"),
  Row("no weights", lambda d: d.weights(d.damaged(TENSORS, None)),
      "got neither model.safetensors nor",
      "expected the weights", "check the path, or download them", FileNotFoundError),
  Row("empty weights", lambda d: d.weights(d.damaged(TENSORS, b"")),
      "got an incomplete safetensors file", *INCOMPLETE),
  Row("cut weights", lambda d: d.weights(d.damaged(TENSORS, 5000)),
      "got an incomplete safetensors file", *INCOMPLETE),
  Row("a cut header", lambda d: d.weights(d.damaged(TENSORS, 100)),
      "got an incomplete safetensors file", *INCOMPLETE),
  Row("weights of junk", lambda d: d.weights(d.damaged(TENSORS, b"\xff" * 100)),
      "got an incomplete safetensors file", *INCOMPLETE),
  Row("another width", lambda d: d.weights(d.configured(hidden_size=24)),
      "got shape (512, 16)",
      "expected (512, 24) by config.json", "the two files do not belong together"),
  Row("no layer", lambda d: d.weights(d.configured(num_hidden_layers=0)), "got 0", *NO_SIZE),
  Row("layers that are not there", lambda d: d.weights(d.configured(num_hidden_layers=5)),
      "got no tensor", "expected all 57 of config.json", "download it again, or check"),
  Row("a negative vocabulary", lambda d: d.weights(d.configured(vocab_size=-1)),
      "got -1", "expected a whole number of at least 1", "correct the file"),
  Row("another vocabulary", lambda d: d.weights(d.configured(vocab_size=100)),
      "got shape (512, 16)",
      "expected (100, 16) by config.json", "the two files do not belong together"),
  Row("another family",
      lambda d: d.weights(d.configured(model_type="gpt2", architectures=["GPT2"])),
      "got ['GPT2']", "expected one of ['Gemma3ForCausalLM', 'LlamaForCausalLM',",
      "other architectures are not impl"),
  Row("a width as text", lambda d: d.weights(d.configured(hidden_size="16")), "got '16'", *NO_SIZE),
  Row("no heads", lambda d: d.weights(d.configured(num_attention_heads=0)), "got 0", *NO_SIZE),
  Row("an odd head", lambda d: d.weights(d.configured(head_dim=7)),
      "got 7", "expected an even number (features turn", "check head_dim in config.json"),
  Row("no epsilon", lambda d: d.weights(d.configured(rms_norm_eps=0)),
      "got 0", "expected a positive number", "correct the file"),
  Row("no context", lambda d: d.weights(d.configured(max_position_embeddings=0)),
      "got 0", "expected a whole number of at least 1", "correct the file"),
  Row("a missing width", lambda d: d.weights(d.configured(hidden_size=None)),
      "got nothing", "expected a whole number of at least 1", "correct the file"),
  Row("tied perhaps", lambda d: d.weights(d.configured(tie_word_embeddings="yes")),
      "got 'yes'", "expected true or false", "correct the file"),
  Row("another activation", lambda d: d.weights(d.configured(hidden_act="gelu")),
      "got 'gelu'", "expected 'silu'", "choose another checkpoint"),
  Row("no tokenizer", lambda d: words_of(d.damaged("tokenizer.json", None)),
      "got no such file",
      "expected a Hugging Face model directory", "check the path, or", FileNotFoundError),
  Row("an empty tokenizer", lambda d: words_of(d.damaged("tokenizer.json", b"")),
      "got a file that `tokenizers` cannot read", "expected tokenizer JSON", "download it again"),
  Row("a tokenizer of nothing", lambda d: words_of(d.damaged("tokenizer.json", b"{}")),
      "got a file that `tokenizers` cannot read", "expected tokenizer JSON", "download it again"),
  Row("a tokenizer's broken config", lambda d: words_of(d.damaged("tokenizer_config.json", b"{")),
      "got text that is not JSON (Expecting property", "expected an object", "download it again"),
  Row("a template that is no text", lambda d: words_of(d.damaged(TEMPLATE, b"\xff")),
      "got bytes that are not UTF-8 at offset 0", "expected text", "download it again"),
  Row("a template that is no Jinja", lambda d: chatted(d.damaged(TEMPLATE, b"{% if %}")),
      "got TemplateSyntaxError from the chat template",
      "expected text", "correct the messages, or the"),
  Row("a template that raises", lambda d: chatted(d.damaged(TEMPLATE, b"{{ 1 / 0 }}")),
      "got ZeroDivisionError inside the chat template",
      "expected text", "check that the messages have the"),
  Row("an end as text", lambda d: words_of(d.damaged(GENERATION, b'{"eos_token_id": "a"}')),
      "got eos_token_id='a'", "expected a token id or a list of them", "correct the file"),
  Row("a chat of nothing", lambda d: TOKENIZER.chat([]),
      "got no messages", "expected at least one", "pass [{\"role\": \"user\", \"content\":"),
  Row("a message without content", lambda d: TOKENIZER.chat([{"role": "user", "content": None}]),
      "got an empty user message at index 0",
      "expected at least one character", "a prompt must not be empty"),
  Row("a negative id to decode", lambda d: TOKENIZER.decode([3, -1]),
      "got ids from -1 to 3", "expected 0 to 2**32 - 1", "pass encoded or sampled ids"),
  Row("a model there already", lambda d: (d.save(), d.save()),
      "got a directory with files in it",
      "expected none", "choose another path, or pass", FileExistsError),
  Row("a model in int4", lambda d: d.save(dtype="int4"),
      "got dtype='int4'", "expected one of ('float32', 'bfloat16', 'int8')",
      "'bfloat16' is usual"),
  Row("a model without weights", lambda d: d.save({}),
      "got nothing", "expected (512, 16) with 1 slabs", "pass the configuration of these"),
  Row("a model of more layers", lambda d: d.save(config=model(num_layers=5)),
      "got nothing", "expected (16,) with 1 slabs", "pass the configuration of these"),
  Row("shards of no byte", lambda d: d.save(max_shard_bytes=0),
      "got max_shard_bytes=0", "expected at least 1", "5 GB is usual"),
  Row("a model over a file", lambda d: (d.file("", "f"), d.save(name="f", overwrite=True)),
      "got a file", "expected no file there", "choose another path", FileExistsError),
  Row("no name of a model", lambda d: huggingface.resolve(""),
      "got '', which is not a directory",
      "expected a model directory, a GGUF", "check the path", FileNotFoundError),
  Row("a file as a model", lambda d: huggingface.resolve(d.file("")),
      "got '", "expected a model directory, a GGUF", "check the path", FileNotFoundError),
  # Runs.
  Row("a run without a task", lambda d: d.train("vowels"),
      "got 'vowels'", "expected a Task", "it needs name, num_problems, problem"),
  Row("a run to resume that is not there", lambda d: d.train(resume=True),
      "got no checkpoint to resume", "expected one under ", "start a new run without --resume,"),
  Row("a run in a file", lambda d: d.train(directory=d.file("")),
      "got a file", "expected a run's directory, or no file", "choose another --workdir"),
  Row("a run of an empty task", lambda d: d.train(Own(num_problems=lambda split: 0)),
      "got 0 problems in split 'train'",
      "expected at least 1", "add problems, or choose another task"),
  Row("a run with programs of another", lambda d: d.train(programs=others()),
      "got programs of another config or model",
      "expected make_programs of this", "share them only between equal runs"),
  Row("a run on more devices than there are", lambda d: d.train(data_parallel_size=50),
      "got data_parallel_size=50 x tensor_parallel_size=1 = 50",
      "expected at most 8, the available", "lower either, or on CPU start with"),
  Row("a run of too large an adapter", lambda d: d.train(lora_rank=10**4), "got 10000", *NO_RANK),
  Row("a run of pages of no split", lambda d: d.train(engine=pages_of(3)),
      "got page_size=3", "expected a divisor of", "a split is read page by page, 16 is"),
  Row("a run of rows of no tile", lambda d: d.train(trainer=rows_of(63)),
      "got rows_per_micro_batch=63", "expected a positive multiple of", "use 64"),
  Row("a search without a problem", lambda d: d.discover(""),
      "got None", "expected an Environment", "it needs"),
  Row("a search to resume that is not there", lambda d: d.discover(resume=True),
      "got no checkpoint to resume", "expected one under", "start a new run without --resume"),
  Row("a search by a model without its policy", lambda d: d.discover(
      model="x", lora_rank=0,
      programs=ProgramConfig(thinking_tokens=8, answer_tokens=8)),
      "got 'x' and a policy without a tokenizer", "expected one", "pass the model's tokenizer"),
  Row("a number of another form", lambda d: d.writer(1, BadName=1),
      "got the name 'BadName'", "expected room/thing in lower case, such", "rename it"),
  Row("text as a number", lambda d: d.writer(1, a__b="text"),
      "got 'text' for 'a/b'", "expected a number", "text belongs in the summary"),
  Row("many numbers as one", lambda d: d.writer(1, a__b=np.zeros(3)),
      "got ndarray array([0., 0., 0.])",
      "expected JSON values or scalars", "reduce arrays to a scalar first"),
  Row("a step that goes back", lambda d: d.writer(0, a__b=1),
      "got step 0 after step 1",
      "expected non-decreasing steps", "open the writer with resume_step to"),
  Row("numbers that are no object", lambda d: metrics.read(d.file("[]\n")),
      "got b'[]' as line 1", "expected a JSON object with a step", "fix or remove that line"),
  Row("numbers that are no text", lambda d: metrics.read(d.file(b"\xff\n")),
      "got b'\\xff' as line 1", "expected a JSON object with a step", "fix or remove that line"),
  Row("a checkpoint that keeps none", lambda d: d.saved(keep_latest=0),
      "got keep_latest=0 and keep_every=0",
      "expected at least 1 and at least 0", "keep_latest=3, keep_every=0 are"),
  Row("a checkpoint of NaN on the host", lambda d: d.saved(host_state={"a": NAN}),
      "got float nan at host_state['a']", "expected JSON that round-trips", "convert it"),
  Row("a checkpoint of text", lambda d: d.saved({"a": "text"}),
      "got str 'text' at 'a'", "expected an array", "put it into host_state, or make it"),
  Row("a checkpoint before the first", lambda d: d.saved(step=-1),
      "got step -1", "expected at least 0", "count steps from 0"),
  Row("no checkpoint", lambda d: checkpoint.restore(d.folder, {}, fingerprint={}),
      "got step None of ", "expected one of ()", "choose another step or directory,"),
  Row("another file as a journal", lambda d: d.journal(b"hello\n"),
      "got {} as the first record",
      "expected a journal's header of format 1", "choose another file, or start a new"),
  Row("a journal of NaN", lambda d: d.journal(a=NAN),
      "got settings that are not JSON (Out of range",
      "expected strings, finite numbers, lists", "convert them first"),
  Row("a directory as a journal", lambda d: journal.Journal(d.folder, fingerprint={}, settings={}),
      "got a directory",
      "expected the journal's file, or none yet", "add a name such as journal.jsonl"),
  Row("no journal", lambda d: journal.read(d.folder / "no.jsonl"),
      "got no such file",
      "expected a journal", "pass the journal.jsonl of a run's", FileNotFoundError),
  Row("an empty journal", lambda d: journal.read(d.file("")),
      "got {} as the first record",
      "expected a journal's header of format 1", "choose another file, or start a new"),
  Row("a batch of nothing", lambda d: d.packed([]),
      "got no groups", "expected at least one", "skip the step instead"),
  Row("a batch of an empty group", lambda d: d.packed(groups(), np.zeros((1, 0))),
      "got 1 group(s) without rollouts", "expected at least one in each", "leave them out"),
  Row("advantages of others", lambda d: d.packed(values=np.zeros((1, 2))),
      "got 1 rollouts in group_index 0",
      "expected 2 as advantages of shape (1,", "complete the group or leave it out"),
  Row("an advantage of NaN", lambda d: d.packed(values=((NAN,),)),
      "got advantage nan for group_index 0, member 0",
      "expected a finite number", "check its reward"),
  Row("a batch of rows of no tile", lambda d: d.packed(rows_per_micro_batch=63),
      "got rows_per_micro_batch=63", "expected a positive multiple of", "use 64"),
  Row("a batch of no sequence", lambda d: d.packed(max_num_seqs=0),
      "got max_num_seqs=0", "expected max_num_seqs >= 1", "None derives it"),
  Row("a group of one", lambda d: advantages.grpo([[1.0]]),
      "got rewards of shape (1, 1)",
      "expected at least 2 rollouts on the", "set RolloutConfig.group_size >= 2,"),
  Row("rewards of NaN", lambda d: advantages.grpo([[1.0, NAN]]),
      "got reward nan for group 0, member 1",
      "expected a finite float32", "fix the task's verdict for that"),
  Row("rewards of no group", lambda d: advantages.grpo([1.0, 2.0]),
      "got rewards of shape (2,)",
      "expected [b, g], one row per prompt", "stack RolloutGroup.rewards"),
  Row("rewards beyond float32", lambda d: advantages.grpo([[1.0, 1e39]]),
      "got reward 1e+39 for group 0, member 1",
      "expected a finite float32", "fix the task's verdict for that"),
  Row("no such advantage", lambda d: advantages.for_algorithm("x", [[1.0, 2.0]]),
      "got 'x'", "expected 'grpo', 'dr_grpo', 'dapo',", "set LossConfig.algorithm to one of"),
  Row("a tilted group of one", lambda d: entropic.entropic(np.asarray([[1.0]])),
      "got groups of 1 rewards",
      "expected at least 4, because advant", "set RolloutConfig.group_size to 8"),
  Row("a rollout on a busy engine", lambda d: divided.DividedRollout(d.running(), ours()),
      "DividedRollout: got an engine with 1 unfinished requests",
      "expected none (the scheduler needs all", "finish or cancel them"),
  Row("a rollout of what cannot be", lambda d: rolled(d.engine, request(prompt=(9999,))),
      "got token ids from 9999 to 9999", *NO_ID),
]  # fmt: skip


def field_rows() -> Iterator[Row]:
  """Yields the rows of `FIELDS`, one for each field and value."""
  for made_by, fields, values, expected, fix in FIELDS:
    for field, value in itertools.product(fields.split(), values):
      one = {field: value}

      def call(_: Doors, made_by=made_by, one=one) -> Any:
        return made_by(**one)

      name = f"{made_by.__name__}.{field}={value!r}"
      yield Row(name, call, "got ", expected, fix, places=places_of(made_by, field, value))


def places_of(made_by: Callable[..., Any], field: str, value: Any) -> list[tuple[str, ...]]:
  """Returns what the message names: one text of each tuple."""
  is_plain = isinstance(value, int | float | str | tuple)
  parts = [value, *value] if isinstance(value, tuple) else [value]
  shown = [f"{part!r}" for part in parts] if is_plain else [""]
  owners = [(made_by.__name__, "SamplingParams")] if isinstance(made_by, type) else []
  return [*owners, tuple(f"{field}{how}{text}" for how in (": got ", "=") for text in shown)]


ALL = [*field_rows(), *ROWS]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> pathlib.Path:
  directory = tmp_path_factory.mktemp("exported") / "model"
  params = tiny_model.random_master(MODEL, NUMERICS)
  huggingface.save(directory, params, MODEL, tokenizer=TOKENIZER, dtype="float32")
  return directory


@pytest.fixture(scope="module")
def shared() -> tuple[Engine, Completion]:
  """The engine of all rows, and its completion before any."""
  params = tiny_model.random_params(MODEL, NUMERICS)
  engine = Engine(Model(MODEL, params, NUMERICS, TOKENIZER), config=SIZES, key=jax.random.key(3))
  [answer] = engine.generate([request("probe", (9, 8, 7), seed=5, max_tokens=2)])
  return engine, answer


@pytest.mark.parametrize("row", ALL, ids=[row.name for row in ALL])
def test_what_is_malformed_is_refused_with_a_sentence(row, shared, exported, tmp_path):
  engine, answer = shared
  with pytest.raises(row.error) as refusal:
    row.call(Doors(engine, tmp_path, exported))
  message = str(refusal.value)
  refusals.require(message, [row.got, row.expected, row.fix])
  assert all(any(text in message for text in texts) for texts in row.places), message
  for name in ("x", "p"):  # Requests that a row started.
    with contextlib.suppress(ValueError):
      engine.abort_request(name)
  assert engine.num_unfinished == 0
  [again] = engine.generate([request("probe", (9, 8, 7), seed=5, max_tokens=2)])
  assert again.has_bits_of(answer) and again.finish_reason == answer.finish_reason


def test_the_table_is_as_long_as_it_should_be():
  known = [row.name for row in ALL]
  assert len(known) == len({*known}) >= 150
