"""The timed cases: layers of three models, with other implementations of the same function.

A case is one call of a kernel at one shape, the necessary bytes and operations, a target, and its
peers. Bytes count each input and output once.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention, gpu, grouped_matmul, matmul, rms_norm, token_logprobs
from pallas_kernels.bench import stock
from pallas_kernels.bench.timing import Contestant

# Positions per page of keys or values.
PAGE = 64
# Drafted tokens of a verification.
DRAFTS = 8


@dataclasses.dataclass(frozen=True)
class Bar:
  """The target of a case.

  Attributes:
    measure: "copy", the ratio of the time of a copy of the same bytes to the case's; "peak", the
      share of the best measured matmul rate; else the name of a peer, for the ratio of its time to
      the case's.
    least: minimum value.
  """

  measure: str
  least: float


COPY, PEAK = "copy", "peak"
CUBLAS, ONE_TOKEN = "jnp.dot (cuBLAS)", "one token"
ROWS_FROM_MEMORY = Bar(COPY, 0.80)
ROWS_FROM_TENSOR_CORE = Bar(CUBLAS, 0.85)
DECODE, PREFILL, NORM = Bar(COPY, 0.75), Bar(PEAK, 0.60), Bar(COPY, 0.85)
# At most 1.05 times the time of one token.
VERIFICATION = Bar(ONE_TOKEN, 1 / 1.05)


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of a kernel, and its peers."""

  kernel: str
  name: str
  ours: Contestant
  peers: tuple[Contestant, ...]
  num_bytes: float
  num_operations: float
  bar: Bar | None = None

  def expected_seconds(self, copy_bandwidth: float, matmul_peak: float) -> float:
    return max(self.num_bytes / copy_bandwidth, self.num_operations / matmul_peak)


@dataclasses.dataclass(frozen=True)
class Model:
  """Sizes of a model's layers; `window` is that of its windowed layers, which have sinks.

  With experts, a row uses `experts_per_row` of `num_experts`, and `intermediate` is that of one.
  """

  name: str
  hidden: int
  heads: int
  kv_heads: int
  head_dim: int
  intermediate: int
  vocabulary: int
  window: int | None = None
  num_experts: int = 0
  experts_per_row: int = 0

  @property
  def slabs(self) -> int:
    """Number of slabs of its weights in the engine, with whole heads and whole tiles."""
    sizes = (self.kv_heads, self.intermediate // matmul.MULTIPLE)
    return max(r for r in (1, 2, 4, 8) if not any(size % r for size in sizes))


QWEN3_8B = Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936)
QWEN3_30B = Model(
  "Qwen3-30B-A3B", 2048, 32, 4, 128, 768, 151936, num_experts=128, experts_per_row=8
)
GPT_OSS = Model(
  "gpt-oss-120b", 2880, 64, 8, 64, 2880, 201088, window=128, num_experts=128, experts_per_row=4
)
MODELS = (QWEN3_8B, QWEN3_30B, GPT_OSS)
# Rows of matmuls, in this order; below: (sequences, context) of decoding and of prefill.
MATMUL_ROWS = (4096, 1024, 64, 8, 1, 16)
NORM_ROWS = (4096, 64)
SCORED_ROWS = (64, 4096)
EXPERT_ROWS = (4096, 64)
DECODES = ((64, 8192), (16, 8192), (4, 8192), (1, 8192))
PREFILLS = ((4, 2048), (1, 8192))


def cases() -> Iterator[Case]:
  """Yields all cases, those with targets first, because time may not suffice for all."""
  for model in MODELS:
    for sequences, context in DECODES:
      yield decode(model, sequences, context)
      yield verification(model, sequences, context)
    for sequences, context in PREFILLS:
      yield prefill(model, sequences, context)
    for num_rows in MATMUL_ROWS:
      for layer in layers(model):
        yield product(model, layer, num_rows)
      yield gate_up(model, num_rows)
    for num_rows in NORM_ROWS:
      yield norm(model, num_rows)
      if model.window is None:  # Models with windows do not normalise queries and keys.
        yield norm_of_heads(model, num_rows)
    for num_rows in SCORED_ROWS:
      yield scores(model, num_rows)
    if model.num_experts:
      for num_rows in EXPERT_ROWS:
        yield experts(model, "gate", model.hidden, model.intermediate, num_rows)
        yield experts(model, "down", model.intermediate, model.hidden, num_rows)
  yield decode(GPT_OSS, 64, 8192, window=GPT_OSS.window)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def rows_text(count: int) -> str:
  return f"{count:,} row" + ("s" if count != 1 else "")


# ----- matmul


@dataclasses.dataclass(frozen=True)
class Layer:
  """A weight [k, n] as in the engine: in slabs of columns, or of the contraction."""

  name: str
  k: int
  n: int
  contracts: bool


def layers(model: Model) -> tuple[Layer, ...]:
  """Returns a model's weights except the SwiGLU pair."""
  wide = (model.heads + 2 * model.kv_heads) * model.head_dim
  return (
    Layer("qkv", model.hidden, wide, contracts=False),
    Layer("out", model.heads * model.head_dim, model.hidden, contracts=True),
    Layer("down", model.intermediate, model.hidden, contracts=True),
  )


def product(model: Model, layer: Layer, num_rows: int) -> Case:
  """Returns a product as called by the engine; contractions are added to the residual stream."""
  k, n, r = layer.k, layer.n, model.slabs
  x, stream = struct(num_rows, k), struct(num_rows, n)
  whole = (x, struct(k, n))
  few = num_rows <= 64

  def ours(name: str, config: matmul.Config) -> Contestant:
    if not layer.contracts:
      call = functools.partial(matmul.matmul, config=config)
      return Contestant(name, call, (x, struct(r, k, n // r)))
    # Intermediate features are separate slabs, those of heads are side by side.
    slabs = struct(r, num_rows, k // r) if layer.name == "down" else x
    return Contestant(
      name,
      lambda x, w, stream: matmul.contract_slabs(x, w, stream=stream, config=config),
      (slabs, struct(r, k // r, n), stream),
    )

  def dot(x: jax.Array, w: jax.Array, *stream: jax.Array) -> jax.Array:
    return sum(stream, jnp.dot(x, w))

  def of_torch(torch: Any, x: Any, w: Any, *stream: Any) -> Any:
    return sum(stream, torch.mm(x, w))

  inputs = (*whole, stream) if layer.contracts else whole
  return Case(
    "matmul",
    f"{model.name} {layer.name}, {rows_text(num_rows)}",
    ours("matmul", matmul.Config()),
    (
      Contestant(CUBLAS, dot, inputs),
      *((ours("matmul, tall", matmul.Config(swapped_rows=0)),) if few else ()),
      # This peer cannot add a stream.
      Contestant("Pallas hopper_matmul_mgpu", stock.matmul, whole),
      Contestant("torch.mm", of_torch, inputs, is_torch=True),
    ),
    2.0 * (num_rows * k + k * n + num_rows * n * (2 if layer.contracts else 1)),
    2.0 * num_rows * k * n,
    ROWS_FROM_MEMORY if few else ROWS_FROM_TENSOR_CORE if num_rows >= 1024 else None,
  )


def gate_up(model: Model, num_rows: int) -> Case:
  weight = struct(model.hidden, model.intermediate)
  x, r = struct(num_rows, model.hidden), model.slabs
  inputs = (x, weight, weight)
  few = num_rows <= 64

  def ours(name: str, config: matmul.Config) -> Contestant:
    call = functools.partial(matmul.swiglu, config=config)
    return Contestant(name, call, (x, struct(r, model.hidden, 2 * model.intermediate // r)))

  def of_torch(torch: Any, x: Any, gate: Any, up: Any) -> Any:
    return torch.nn.functional.silu(torch.mm(x, gate)) * torch.mm(x, up)

  return Case(
    "matmul",
    f"{model.name} gate_up, {rows_text(num_rows)}",
    ours("swiglu", matmul.Config()),
    (
      *((ours("swiglu, tall", matmul.Config(swapped_rows=0)),) if few else ()),
      Contestant(CUBLAS, lambda x, g, u: jax.nn.silu(jnp.dot(x, g)) * jnp.dot(x, u), inputs),
      Contestant("torch.mm", of_torch, inputs, is_torch=True),
    ),
    2.0 * (num_rows * model.hidden + 2 * weight.size + num_rows * model.intermediate),
    4.0 * num_rows * weight.size,
    ROWS_FROM_MEMORY if few else ROWS_FROM_TENSOR_CORE if num_rows >= 1024 else None,
  )


def experts(model: Model, name: str, k: int, n: int, num_rows: int) -> Case:
  """Returns a product of rows sorted by expert, with random group sizes."""
  rows = num_rows * model.experts_per_row
  chosen = np.random.default_rng(0).integers(0, model.num_experts, rows)
  sizes = np.bincount(chosen, minlength=model.num_experts).astype(np.int32)
  inputs = (struct(rows, k), sizes, struct(model.num_experts, k, n))
  weights = int((sizes > 0).sum()) * k * n
  return Case(
    "grouped_matmul",
    f"{model.name} experts' {name}, {rows_text(num_rows)}",
    Contestant("grouped_matmul", grouped_matmul.grouped_matmul, inputs),
    (
      Contestant("jax.lax.ragged_dot", lambda x, s, w: jax.lax.ragged_dot(x, w, s), inputs),
      Contestant("Pallas ragged_dot_mgpu", stock.ragged_dot, inputs),
    ),
    2.0 * (rows * k + weights + rows * n),
    2.0 * rows * k * n,
  )


# ----- attention


def paged(model: Model, sequences: int, context: int, new: int, tile: int) -> tuple[Any, ...]:
  """Returns attention's inputs for the last `new` positions of each sequence, in random pages."""
  width = -(-context // PAGE)
  starts = np.arange(0, new, tile, dtype=np.int32)
  num_segments = sequences * len(starts)
  rng = np.random.default_rng(0)
  table = rng.permutation(sequences * width).reshape(sequences, width).astype(np.int32)
  # numpy arrays, so that all copies of the inputs share them.
  integers: dict[str, Any] = {
    "positions": np.tile(np.arange(context - new, context, dtype=np.int32), sequences),
    "segment_start": (np.arange(sequences, dtype=np.int32)[:, None] * new + starts).reshape(-1),
    "segment_length": np.tile(np.minimum(new - starts, tile).astype(np.int32), sequences),
    "page_table": np.repeat(table, len(starts), axis=0),
    "num_segments": np.array(num_segments, np.int32),
  }
  segments = attention.Segments(**integers)
  group = model.heads // model.kv_heads
  pages = struct(model.kv_heads, sequences * width, PAGE, model.head_dim)
  return struct(sequences * new, model.kv_heads, group, model.head_dim), pages, pages, segments


def _config(model: Model, new: int) -> attention.Config:
  """Returns a Config with tile and stages (tuning fields) for `new` positions per sequence."""
  group = model.heads // model.kv_heads
  # One warpgroup's rows if they suffice.
  one = attention.ROWS // group
  tile = one if new <= one else min(attention.MAX_WARPGROUPS * one, attention.Config().query_tile)
  return fitting(model, attention.Config(query_tile=tile))


def fitting(model: Model, config: attention.Config) -> attention.Config:
  """Returns `config` with fewer blocks in flight if shared memory requires it."""
  group, sinks = model.heads // model.kv_heads, model.window is not None
  needed = config.shared_memory_bytes(group, model.head_dim, PAGE, sinks)
  if needed <= gpu.SHARED_MEMORY_LIMIT_BYTES or config.stages == 1:
    return config
  return fitting(model, dataclasses.replace(config, stages=config.stages - 1))


def attended(
  name: str,
  model: Model,
  sequences: int,
  context: int,
  new: int,
  config: attention.Config,
  window: int | None = None,
) -> Contestant:
  """Returns the kernel on the last `new` positions of each sequence; sinks as in the model."""
  inputs = paged(model, sequences, context, new, config.query_tile)
  call = functools.partial(attention.attention, config=config, window=window)
  if model.window is None:
    return Contestant(name, call, inputs)
  sinks = struct(model.kv_heads, model.heads // model.kv_heads, dtype=jnp.float32)
  return Contestant(
    name, lambda q, k, v, segments, sinks: call(q, k, v, segments, sinks=sinks), (*inputs, sinks)
  )


def _attention_bytes(model: Model, sequences: int, context: int, new: int) -> float:
  keys = 2 * sequences * context * model.kv_heads * model.head_dim
  return 2.0 * (keys + 2 * sequences * new * model.heads * model.head_dim)


def _attention_operations(model: Model, sequences: int, context: int, new: int) -> float:
  seen = new * (context - new) + new * (new + 1) / 2
  return 4.0 * sequences * seen * model.heads * model.head_dim


def _dense(
  model: Model, sequences: int, context: int, new: int, dtype: Any = jnp.bfloat16
) -> tuple[Any, ...]:
  keys = struct(sequences, context, model.kv_heads, model.head_dim, dtype=dtype)
  return struct(sequences, new, model.heads, model.head_dim, dtype=dtype), keys, keys


def _dense_peers(
  model: Model, sequences: int, context: int, new: int
) -> tuple[Contestant, Contestant]:
  """Returns attention over contiguous keys, without sinks: cuDNN's and PyTorch's."""
  is_causal = new == context
  inputs = _dense(model, sequences, context, new)

  def of_torch(torch: Any, q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=is_causal, enable_gqa=True)

  cudnn = functools.partial(
    jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn"
  )
  return (
    Contestant("cuDNN", lambda q, k, v: cudnn(q, k, v), inputs),
    Contestant("torch SDPA", of_torch, inputs, is_torch=True),
  )


def decode(model: Model, sequences: int, context: int, window: int | None = None) -> Case:
  config = _config(model, 1)
  other = "sequential" if config.mode == "parallel" else "parallel"
  otherwise = fitting(model, dataclasses.replace(config, mode=other))
  name = f"{model.name} decode, {sequences} x {context}"
  seen = context if window is None else window
  peers = () if window else _dense_peers(model, sequences, context, 1)
  return Case(
    "attention",
    name if window is None else f"{name}, window {window}",
    attended(config.mode, model, sequences, context, 1, config, window),
    (
      attended(other, model, sequences, context, 1, otherwise, window),
      *peers,
    ),
    _attention_bytes(model, sequences, seen, 1),
    _attention_operations(model, sequences, seen, 1),
    DECODE if sequences == 64 and window is None else None,
  )


def verification(model: Model, sequences: int, context: int) -> Case:
  """Returns the verification of a token and its drafts, compared with the token alone."""
  new = 1 + DRAFTS
  config = _config(model, new)
  return Case(
    "attention",
    f"{model.name} verification of {DRAFTS} drafts, {sequences} x {context}",
    attended("verification", model, sequences, context, new, config),
    (attended(ONE_TOKEN, model, sequences, context, 1, _config(model, 1)),),
    _attention_bytes(model, sequences, context, new),
    _attention_operations(model, sequences, context, new),
    VERIFICATION,
  )


def prefill(model: Model, sequences: int, context: int) -> Case:
  config = _config(model, context)
  half = _dense(model, sequences, context, context, jnp.float16)
  return Case(
    "attention",
    f"{model.name} prefill, {sequences} x {context}",
    attended(config.mode, model, sequences, context, context, config),
    (
      *_dense_peers(model, sequences, context, context),
      # This peer always computes in float16.
      Contestant("Pallas attention_mgpu, float16", stock.attention, half),
    ),
    _attention_bytes(model, sequences, context, context),
    _attention_operations(model, sequences, context, context),
    PREFILL,
  )


# ----- rms_norm, token_logprobs


def norm(model: Model, num_rows: int) -> Case:
  inputs = (struct(num_rows, model.hidden), struct(model.hidden))

  def of_torch(torch: Any, x: Any, scale: Any) -> Any:
    return torch.nn.functional.rms_norm(x, (model.hidden,), scale, 1e-6)

  return Case(
    "rms_norm",
    f"{model.name} norm, {rows_text(num_rows)}",
    Contestant("rms_norm", rms_norm.rms_norm, inputs),
    (
      Contestant("XLA", lambda x, scale: rms_norm.reference(x, scale).astype(x.dtype), inputs),
      Contestant("torch rms_norm", of_torch, inputs, is_torch=True),
    ),
    2.0 * (2 * num_rows * model.hidden + model.hidden),
    4.0 * num_rows * model.hidden,
    NORM if num_rows >= 1024 else None,
  )


def norm_of_heads(model: Model, num_rows: int) -> Case:
  """Returns the norm of queries and keys of all slabs per head, as called by the engine."""
  r, heads = model.slabs, (model.heads, model.kv_heads)
  arrays = tuple(struct(r, num_rows, count // r, model.head_dim) for count in heads)
  scale = struct(model.head_dim)

  def of_xla(q: jax.Array, k: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    return [rms_norm.reference(x, s).astype(x.dtype) for x, s in zip((q, k), scales)]

  return Case(
    "rms_norm",
    f"{model.name} queries' and keys' norm, {rows_text(num_rows)}",
    Contestant(
      "rms_norm_each",
      lambda q, k, *scales: rms_norm.rms_norm_each((q, k), scales),
      (*arrays, scale, scale),
    ),
    (Contestant("XLA", of_xla, (*arrays, scale, scale)),),
    2.0 * (2 * num_rows * sum(heads) * model.head_dim + 2 * model.head_dim),
    4.0 * num_rows * sum(heads) * model.head_dim,
    NORM if num_rows >= 1024 else None,
  )


def scores(model: Model, num_rows: int) -> Case:
  rng = np.random.default_rng(0)
  inputs = (
    struct(num_rows, model.hidden),
    struct(model.vocabulary, model.hidden),
    rng.integers(0, model.vocabulary, num_rows).astype(np.int32),
    np.ones(num_rows, np.float32),
    np.zeros((num_rows, 2), np.uint32),
  )
  sampled = (*inputs[:2], np.full(num_rows, -1, np.int32), *inputs[3:])

  def of_xla(hidden: jax.Array, table: jax.Array, targets: jax.Array, *_: jax.Array) -> jax.Array:
    logits = jnp.dot(hidden, table.T, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return chosen - jax.scipy.special.logsumexp(logits, axis=1)

  return Case(
    "token_logprobs",
    f"{model.name} scores of {num_rows} targets",
    Contestant("token_logprobs", token_logprobs.token_logprobs, inputs),
    (
      Contestant("XLA, logits in memory", of_xla, inputs),
      Contestant("token_logprobs, sampled", token_logprobs.token_logprobs, sampled),
    ),
    2.0 * (num_rows + model.vocabulary) * model.hidden + 24.0 * num_rows,
    2.0 * num_rows * model.vocabulary * model.hidden,
  )
