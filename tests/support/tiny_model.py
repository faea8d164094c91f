"""Two-layer models and small engines; all tests of a process share their compiled programs."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import layer_kinds, numerics as numerics_lib, parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import (
  config as model_config,
  flax_module,
  parameters,
  tokenizer as tokenizer_lib,
)
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.ops import rotary
from seerjax.types import SamplingParams

# Other small models of the tests state how they differ from this one.
CONFIG = model_config.TransformerConfig(
  vocab_size=64,
  hidden_size=32,
  layers=layer_kinds.uniform(
    LayerConfig(
      attention=Grouped(
        num_heads=16,
        num_kv_heads=8,
        head_dim=8,
        has_qk_norms=True,
        rotary=rotary.RotaryConfig(head_dim=8),
      ),
      feed_forward=Gated(intermediate_size=32),
    ),
    2,
  ),
)
# Single steps and one page layout, for unit tests that inspect them; whole runs use the default.
NUMERICS = numerics_lib.NumericsConfig(
  backend="tiled",
  row_tile=4,
  query_tile=4,
  slot_tile=2,
  kv_split=16,
  reduction_shards=8,
)
BFLOAT16 = dataclasses.replace(NUMERICS, compute_dtype="bfloat16")
NATIVE = dataclasses.replace(NUMERICS, backend="native")
NATIVE_BFLOAT16 = dataclasses.replace(BFLOAT16, backend="native")
BACKENDS = {
  "f32": NUMERICS,
  "bf16": BFLOAT16,
  "native f32": NATIVE,
  "native bf16": NATIVE_BFLOAT16,
}

# Sizes that are not powers of two, where permitted.
ODD = CONFIG.changed(
  vocab_size=48,
  hidden_size=24,
  head_dim=6,
  rotary=rotary.RotaryConfig(head_dim=6),
  max_model_len=64,
)

# A windowed layer and a full one, with rotary embeddings of their own, and all that has a rule.
RULES = dataclasses.replace(
  ODD,
  layers=tuple(
    ODD.layers[0].changed(
      rotary=rotary.RotaryConfig(head_dim=6, base=base),
      window=window,
      soft_cap=soft_cap,
      scale=0.3,
      has_sinks=has_sinks,
      activation="gelu_tanh",
      norm_placement="pre_and_post",
    )
    for base, window, soft_cap, has_sinks in ((100.0, 7, 2.0, True), (1e4, None, None, False))
  ),
  norm_weights="1 + w",
  embedding_scale=24**0.5,
  logit_soft_cap=4.0,
)

# The smallest possible decoder, in one slab, with numerics of one slab.
SMALLEST = CONFIG.changed(
  vocab_size=32, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1
)
ONE_SLAB = numerics_lib.NumericsConfig(
  row_tile=8, query_tile=4, slot_tile=2, kv_split=16, reduction_shards=1
)


@functools.cache
def params(numerics: numerics_lib.NumericsConfig, seed: int = 0) -> parameters.Params:
  """Random weights, large enough for distributions that are neither flat nor certain."""
  master = parameters.init(numerics_lib.key(seed), CONFIG, numerics)
  return parameters.compute_params(jax.tree.map(lambda leaf: leaf * 5, master), numerics)


@functools.cache
def random_master(
  config: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> parameters.Params:
  """f32 weights large enough that every part matters, norms around one; compiles nothing."""
  rng = np.random.default_rng(3)
  has_ones = config.norm_weights == "w"

  def leaf(path, shape):
    noise = 0.15 * rng.standard_normal(shape.shape)
    return jnp.asarray((noise + (has_ones and "norm" in path[-1].key)).astype(np.float32))

  layout = parameters.shapes(config, numerics.reduction_shards)
  return jax.tree_util.tree_map_with_path(leaf, layout)


@functools.cache
def random_params(
  config: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> parameters.Params:
  """`random_master` in the compute dtype."""
  return parameters.compute_params(random_master(config, numerics), numerics)


def random_tokens(
  config: model_config.TransformerConfig, batch_size: int, length: int, seed: int = 0
) -> jax.Array:
  """i32[b, t] of the model's vocabulary."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, config.vocab_size, (batch_size, length)), jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def logits_of(
  params: parameters.Params,
  tokens: jax.Array,
  config: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> jax.Array:
  """Returns f32[b, t, v] of whole sequences: one program per shape, model and numerics."""
  return flax_module.logits_of(params, tokens, decoder=decide(config, numerics))


@functools.cache
def runner(
  numerics: numerics_lib.NumericsConfig, data_parallel_size: int = 1, tensor_parallel_size: int = 1
) -> runner_lib.Runner:
  """One runner for all engines of one kind; the engine tests check how often they trace."""
  mesh = parallel.make_mesh(
    data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size
  )
  return runner_lib.Runner(decide(CONFIG, numerics), mesh, max_programs=64)


def make_engine(
  config: engine_lib.EngineConfig,
  numerics: numerics_lib.NumericsConfig = NUMERICS,
  *,
  data_parallel_size: int = 1,
  tensor_parallel_size: int = 1,
  kind: type[engine_lib.Engine] = engine_lib.Engine,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  **others: Any,
) -> engine_lib.Engine:
  """Returns an empty engine of `kind`, with other arguments of `Engine`."""
  usual = dict(
    key=numerics_lib.key(11), runner=runner(numerics, data_parallel_size, tensor_parallel_size)
  )
  model = Model(CONFIG, params(numerics), numerics, tokenizer)
  return kind(model, config=config, **(usual | others))


# One request at a time, prompts in chunks of 16, no prefix reuse, single steps.
ALONE = engine_lib.EngineConfig(
  page_size=16,
  num_pages=5,
  max_num_seqs=1,
  max_model_len=64,
  batch_size_buckets=(16,),
  enable_prefix_caching=False,
  decode_steps_per_call=1,
)


@functools.cache
def alone(numerics: numerics_lib.NumericsConfig, prompt, sampling, seed: int):
  """Returns the completion of a request that runs alone in a plain engine."""
  engine = _plain_engine(numerics)
  request = engine_lib.Request(request_id="alone", prompt=prompt, sampling=sampling, seed=seed)
  return engine.generate([request])[0]


@functools.cache
def _plain_engine(numerics: numerics_lib.NumericsConfig) -> engine_lib.Engine:
  return make_engine(ALONE, numerics)


def answer(numerics: numerics_lib.NumericsConfig, request: engine_lib.Request):
  """Returns the completion of this request alone in a plain engine."""
  return alone(numerics, request.prompt, request.sampling, request.seed)


def random_requests(count: int, max_tokens: int = 20) -> list[engine_lib.Request]:
  """Requests of random prompts, the same ones for every count."""
  rng = np.random.default_rng(5)
  return [
    engine_lib.Request(
      request_id=str(index),
      prompt=tuple(rng.integers(0, 64, int(rng.integers(4, 30))).tolist()),
      sampling=SamplingParams(max_tokens=max_tokens),
      seed=index,
    )
    for index in range(count)
  ]


def num_differing(completions, numerics: numerics_lib.NumericsConfig = NUMERICS) -> int:
  """Returns how many completions of `random_requests` have not the bits of each alone."""
  found = {completion.request_id: completion for completion in completions}
  requests = random_requests(len(completions))
  return sum(not same(found[one.request_id], answer(numerics, one)) for one in requests)


def generate_amid(
  config: engine_lib.EngineConfig,
  numerics: numerics_lib.NumericsConfig,
  change: Callable[[jax.Array, Any], Any],
) -> list:
  """Returns completions of four requests; `change` gives unwritten memory other values each step.

  Args:
    config, numerics: the engine's.
    change: given bool[n, s], the written slots of each page, and the engine's pages,
      returns its new pages.
  """
  engine = make_engine(config, numerics)
  for request in random_requests(4):
    engine.add_request(request)
  while engine.num_unfinished:
    engine.step()
    is_written = np.zeros((config.num_pages, config.page_size), bool)
    for sequence in engine._requests.running[0]:
      positions = np.arange(sequence.num_written)
      pages = np.asarray(sequence.pages)[positions // config.page_size]
      is_written[pages, positions % config.page_size] = True
    engine.memory.pages = change(jnp.asarray(is_written), engine.memory.pages)
  return engine.poll()


def bits(values: np.ndarray) -> list[int]:
  """Maps f32[t] to bit patterns, so that == means equal bits (and NaN equals itself)."""
  return np.asarray(values, np.float32).view(np.uint32).tolist()


def same(left, right, first: int = 0) -> bool:
  """Whether tokens and both log-probabilities of `left` and `right` equal from `first` on."""
  return (
    left.tokens == right.tokens[first:]
    and bits(left.behaviour_logprobs) == bits(right.behaviour_logprobs[first:])
    and bits(left.raw_logprobs) == bits(right.raw_logprobs[first:])
    and left.finish_reason == right.finish_reason
  )
