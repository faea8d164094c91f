"""One decoder for Qwen3, Qwen2.5 and Llama 3: parameters, and the one forward.

    embed -> [ attention inputs -> write pages -> attend -> after attention ] x layers -> head

`forward` serves prefill chunks, decoding, verification and training: flat token rows, a segment
table and pages go in; hidden rows and pages come out. `head` turns hidden rows into tokens and
scores; the engine lets it sample, the trainer hands it the tokens, and both run one tile program.

Up to `UNROLLED_LAYERS` layers follow one another in the program; of a deeper model the weights that
run are stacked, and one layer's program is looped over (`stacked`), to the same bits. Then the keys
of all layers lie in one pool, a page's layers side by side, and the layer's number is part of the
page's: what a loop carries is written where it lies, and no layer's pages are ever cut out.

Parameters are a plain pytree. Every dimension that the `model` mesh axis may shard has its logical
slabs in front (r = `reduction_shards`): one slab holds whole key/value heads with their queries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import token_logprobs
from seerjax import numerics as numerics_lib, parallel
from seerjax.array_typing import Array, Float, Int, PRNGKeyArray
from seerjax.ops import attention, linear, logprobs, norms, rotary, sampling, tiles
from seerjax.types import SamplingRows, TokenBatch, TokenScores

Params = dict[str, Any]
# Keys and values: a pair f[k, m, z, c] a layer, or one pair f[k, m, l, z, c] of all layers.
Pages = tuple[tuple[Array, Array], ...]

# What a gradient keeps of the forward pass.
Remat = Literal["none", "layer"]
REMATS = ("none", "layer")

FAMILIES = ("qwen3", "qwen2", "llama")
# Layers of a model whose program repeats them; time to compile and size grow with each.
UNROLLED_LAYERS = 8
# A layer's products over slabs, which are most of its weights.
SLABS = ("qkv", "out", "gate_up", "down")
# Rows whose logits a gradient holds at once where a filter has to see them whole.
FILTERED_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape of one decoder.

  Attributes:
    family: "qwen3" (norms on queries and keys), "qwen2" (biases on q, k, v) or "llama".
    vocab_size: rows of the embedding.
    hidden_size: d.
    intermediate_size: features inside the gated MLP.
    num_layers: decoder blocks.
    num_heads: query heads.
    num_kv_heads: key/value heads; `num_heads / num_kv_heads` queries share one.
    head_dim: c.
    norm_eps: of every RMS norm.
    rotary: of every layer.
    is_tied: the head reads the embedding table.
    max_context: positions the model was made for; longer prompts are refused.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  norm_eps: float = 1e-6
  rotary: rotary.RotaryConfig
  is_tied: bool = True
  max_context: int = 4096

  def __post_init__(self):
    if self.family not in FAMILIES:
      raise ValueError(
        f"TransformerConfig.family: got {self.family!r}, expected one of {FAMILIES}; other families"
        " are not built yet."
      )
    for field in (
      "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
      "max_context",
    ):  # fmt: skip
      if vars(self)[field] < 1:
        raise ValueError(
          f"TransformerConfig.{field}: got {vars(self)[field]}, expected at least 1; check"
          " config.json."
        )
    if not 0 < self.norm_eps < 1:
      raise ValueError(
        f"TransformerConfig.norm_eps: got {self.norm_eps}, expected 0 < norm_eps < 1; 1e-6 is"
        " usual."
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"TransformerConfig.num_heads: got {self.num_heads} query heads for {self.num_kv_heads}"
        " key/value heads, expected a multiple; check config.json."
      )
    if self.rotary.head_dim != self.head_dim:
      raise ValueError(
        f"TransformerConfig.rotary.head_dim: got {self.rotary.head_dim}, expected"
        f" head_dim={self.head_dim}; make them equal."
      )

  @property
  def group(self) -> int:
    """Query heads of one key/value head."""
    return self.num_heads // self.num_kv_heads


def largest_shards(config: TransformerConfig) -> int:
  """Returns the largest power of two, at most 8, that divides every sharded dimension."""
  sizes = (config.num_kv_heads, config.intermediate_size, config.vocab_size)
  return max(r for r in (1, 2, 4, 8) if all(size % r == 0 for size in sizes))


def numerics_for(
  config: TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> numerics_lib.NumericsConfig:
  """Returns the numerics with as many slabs as the model allows, where it is left to the model.

  Raises:
    ValueError: for a number of slabs that does not divide the model, naming the dimension and both
      numbers.
  """
  if not numerics.reduction_shards:
    return dataclasses.replace(numerics, reduction_shards=largest_shards(config))
  shards = numerics.reduction_shards
  for field in ("num_kv_heads", "intermediate_size", "vocab_size"):
    size = dataclasses.asdict(config)[field]
    if size % shards:
      raise ValueError(
        f"NumericsConfig.reduction_shards: got {shards}, expected a divisor of {field}={size};"
        f" use reduction_shards={largest_shards(config)} for this model, or 0, which finds it."
      )
  return numerics


def shapes(config: TransformerConfig, reduction_shards: int) -> Params:
  """Returns every parameter's shape (f32), as `jax.ShapeDtypeStruct`s: the layout of `Params`."""
  r, d, c = reduction_shards, config.hidden_size, config.head_dim
  q_columns = config.num_heads // r * c
  kv_columns = config.num_kv_heads // r * c
  inner = config.intermediate_size // r

  def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  layer = {
    "attention_norm": f32(d),
    "qkv": f32(r, d, q_columns + 2 * kv_columns),  # Columns: queries, keys, values of the slab.
    "out": f32(r, q_columns, d),
    "mlp_norm": f32(d),
    "gate_up": f32(r, d, 2 * inner),  # Columns: gate, up of the slab.
    "down": f32(r, inner, d),
  }
  if config.family == "qwen2":
    layer["qkv_bias"] = f32(r, q_columns + 2 * kv_columns)
  if config.family == "qwen3":
    layer["query_norm"] = f32(c)
    layer["key_norm"] = f32(c)
  params = {
    "embed": f32(config.vocab_size, d),
    "layers": [dict(layer) for _ in range(config.num_layers)],
    "final_norm": f32(d),
  }
  if not config.is_tied:
    params["head"] = f32(r, config.vocab_size // r, d)
  return params


def init(
  key: PRNGKeyArray, config: TransformerConfig, numerics: numerics_lib.NumericsConfig
) -> Params:
  """Returns f32 master weights: normal with deviation 0.02, norms at one, biases at zero.

  Args:
    key: of `numerics.key`; consumed.
    config: shape.
    numerics: `reduction_shards` decides the layout; the same key gives other values under another.

  Raises:
    ValueError: if slabs do not divide the model, or the key is of another kind.
  """
  numerics = numerics_for(config, numerics)
  numerics_lib.require_key(key, what="transformer.init: key")
  layout = shapes(config, numerics.reduction_shards)
  paths, structure = jax.tree_util.tree_flatten_with_path(layout)
  residual_scale = (2 * config.num_layers) ** -0.5

  def leaf(index: int, path, shape) -> Array:
    name = path[-1].key
    if name.endswith("norm"):
      return jnp.ones(shape.shape, shape.dtype)
    if name == "qkv_bias":
      return jnp.zeros(shape.shape, shape.dtype)
    scale = 0.02 * (residual_scale if name in ("out", "down") else 1.0)
    with numerics_lib.pinned_randomness():
      noise = jax.random.normal(jax.random.fold_in(key, index), shape.shape, shape.dtype)
    return jnp.float32(scale) * noise

  leaves = [leaf(index, path, shape) for index, (path, shape) in enumerate(paths)]
  return structure.unflatten(leaves)


@functools.partial(jax.jit, static_argnums=(1,))
def compute_params(master: Params, numerics: numerics_lib.NumericsConfig) -> Params:
  """Returns the weights that engine and trainer both run: the master's, rounded once.

  More than `UNROLLED_LAYERS` layers are `stacked`.
  """
  params = jax.tree.map(lambda leaf: leaf.astype(numerics.dtype), master)
  return stacked(params) if len(params["layers"]) > UNROLLED_LAYERS else params


def is_stacked(params: Params) -> bool:
  """Whether the layers are one dict of `[l, ...]`, over which `forward` loops."""
  return isinstance(params["layers"], dict)


def stacked(params: Params) -> Params:
  """Returns weights, or adapters, whose equal layers are one dict, every leaf `[l, ...]`."""
  if is_stacked(params):
    return params
  return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def unstacked(params: Params) -> Params:
  """Returns weights, gradients or adapters with a list of layers, as the masters have them."""
  if not is_stacked(params):
    return params
  layers = params["layers"]
  count = jax.tree.leaves(layers)[0].shape[0]
  at = lambda index: jax.tree.map(lambda leaf: leaf[index], layers)
  return {**params, "layers": [at(index) for index in range(count)]}


def partition_specs(config: TransformerConfig, reduction_shards: int) -> Params:
  """Returns where each parameter lives on the mesh: slabs over `model`, the rest everywhere."""
  return specs_of(shapes(config, reduction_shards))


def specs_of(params: Params) -> Params:
  """As `partition_specs`, for weights that may be stacked, or have adapters beside them."""
  slabs = ("qkv", "qkv_bias", "out", "gate_up", "down", "head")
  of_layers = (None,) if is_stacked(params) else ()
  slabs_of_adapters = (
    ("qkv_lora", "b"), ("gate_up_lora", "b"), ("out_lora", "a"), ("down_lora", "a")
  )  # fmt: skip

  def spec(path, _):
    names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    is_slab = names[-1] in slabs or names[-2:] in slabs_of_adapters
    before = of_layers if names[0] == "layers" else ()
    return jax.P(*before, parallel.MODEL_AXIS) if is_slab else jax.P()

  return jax.tree_util.tree_map_with_path(spec, params)


def empty_pages(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  *,
  num_pages: int,
  page_size: int,
) -> Pages:
  """Returns zeroed pages of one instance; page 0 is the dump page of padding.

  A pair a layer, f[k, m, z, c], up to `UNROLLED_LAYERS`; beyond, one pair f[k, m, l, z, c].

  Raises:
    ValueError: if pages do not fill splits exactly.
  """
  check_page_size(page_size, numerics)
  shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)
  count = config.num_layers
  if count > UNROLLED_LAYERS:
    shape, count = (*shape[:2], count, *shape[2:]), 1
  return tuple(
    (jnp.zeros(shape, numerics.dtype), jnp.zeros(shape, numerics.dtype)) for _ in range(count)
  )


class ScratchPages(NamedTuple):
  """Pages that hold nothing before a step and that nobody reads after it: a layer makes its own.

  Attributes:
    num_pages: the dump page 0 among them.
    page_size: positions of one page.
  """

  num_pages: int
  page_size: int


def check_page_size(page_size: int, numerics: numerics_lib.NumericsConfig) -> None:
  """Refuses pages that do not fill splits exactly.

  Raises:
    ValueError: with both numbers.
  """
  if numerics.kv_split % page_size:
    raise ValueError(
      f"page_size: got {page_size}, expected a divisor of kv_split={numerics.kv_split}; a split is"
      " read page by page."
    )


def _attention_inputs(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
):
  """f[n, d] -> queries f[n, k, g, c], keys and values f[n, k, c] of the local slabs."""
  x, cos, sin = rows
  num_rows, c = x.shape[0], config.head_dim
  normed = norms.rms_norm_rows(x, weights["attention_norm"], config.norm_eps, numerics)

  def slab(shared, weights):
    # Norms and rotation of the heads belong in here: outside, the number of local heads would
    # shape their sums.
    normed, cos, sin, head_norms, low = shared
    qkv = linear.dot(normed, weights["qkv"], numerics)
    if low is not None:
      qkv = qkv + linear.dot(low, weights["qkv_lora"], numerics)
    qkv = qkv.astype(normed.dtype)
    if "qkv_bias" in weights:
      qkv = qkv + weights["qkv_bias"][None, :]
    num_kv_heads = qkv.shape[1] // (c * (config.group + 2))
    heads = qkv.reshape(num_rows, -1, c)
    first_key, first_value = num_kv_heads * config.group, num_kv_heads * (config.group + 1)
    q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
    if head_norms:
      q = norms.rms_norm_rows(q, head_norms["query_norm"], config.norm_eps, numerics)
      k = norms.rms_norm_rows(k, head_norms["key_norm"], config.norm_eps, numerics)
    q, k = rotary.rotate_rows(q, cos, sin), rotary.rotate_rows(k, cos, sin)
    return q.reshape(num_rows, num_kv_heads, config.group, c), k, v

  head_norms = {name: weights[name] for name in ("query_norm", "key_norm") if name in weights}
  slabs = {name: weights[name] for name in ("qkv", "qkv_bias") if name in weights}
  low = None
  if "qkv_lora" in weights:
    product = linear.dot(normed, weights["qkv_lora"]["a"], numerics)
    low = _low_rank(product, weights["qkv_lora"], x.dtype)
    slabs["qkv_lora"] = weights["qkv_lora"]["b"]
  shared = (normed, cos, sin, head_norms, low)
  by_slab = tiles.map_slabs(slab, shared, slabs, one, axis, numerics)
  # f[r, n, k / r, ...] -> f[n, k, ...]
  return jax.tree.map(
    lambda part: jnp.swapaxes(part, 0, 1).reshape(num_rows, -1, *part.shape[3:]), by_slab
  )


def _after_attention(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  one: Array,
) -> Array:
  """Output projection and gated MLP, each added to the residual stream: f[n, d] -> f[n, d]."""
  x, mixed = rows
  num_rows, num_slabs = x.shape[0], tiles.num_slabs(weights["out"])
  by_slab = jnp.swapaxes(mixed.reshape(num_rows, num_slabs, -1), 0, 1)
  if "out_lora" in weights:
    partials, low = tiles.map_slabs(
      lambda _, slab: tuple(linear.dot(slab[0], w, numerics) for w in slab[1:]),
      (),
      (by_slab, weights["out"], weights["out_lora"]["a"]),
      one,
      axis,
      numerics,
    )
    x = x + _adapted_sum(partials, low, weights["out_lora"], x.dtype, axis, numerics)
  else:
    x = x + linear.contract(by_slab, weights["out"], one, axis, numerics)
  normed = norms.rms_norm_rows(x, weights["mlp_norm"], config.norm_eps, numerics)
  return x + _mlp(normed, weights, one, axis, numerics)


def _mlp(
  x: Array,
  weights: Params,
  one: Array,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Array:
  """silu(x @ gate) * (x @ up) @ down, slab by slab in one loop."""
  slabs, low = {name: weights[name] for name in ("gate_up", "down")}, None
  if "gate_up_lora" in weights:
    adapter = weights["gate_up_lora"]
    low = _low_rank(linear.dot(x, adapter["a"], numerics), adapter, x.dtype)
    slabs["gate_up_lora"] = adapter["b"]
  if "down_lora" in weights:
    slabs["down_lora"] = weights["down_lora"]["a"]

  def slab(shared: tuple[Array, Array | None], weights: Params) -> Any:
    x, low = shared
    gate_up = linear.dot(x, weights["gate_up"], numerics)
    if low is not None:
      gate_up = gate_up + linear.dot(low, weights["gate_up_lora"], numerics)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    down = linear.dot(inner, weights["down"], numerics)
    if "down_lora" in weights:
      return down, linear.dot(inner, weights["down_lora"], numerics)
    return down

  partials = tiles.map_slabs(slab, (x, low), slabs, one, axis, numerics)
  if "down_lora" in weights:
    return _adapted_sum(partials[0], partials[1], weights["down_lora"], x.dtype, axis, numerics)
  return parallel.tree_sum(parallel.gather_slabs(partials, axis)).astype(x.dtype)


def _low_rank(product: Array, adapter: Params, dtype: jnp.dtype) -> Array:
  """f32[n, rank] x @ A to what meets B: scaled in float32, then rounded once."""
  return (product * adapter["scale"]).astype(dtype)


def _adapted_sum(
  partials: Array,
  low: Array,
  adapter: Params,
  dtype: jnp.dtype,
  axis: str | None,
  numerics: numerics_lib.NumericsConfig,
) -> Array:
  """Adds the slabs' partial x @ W and x @ A in the tree, then the low-rank term: f[n, d]."""
  whole, low = (
    parallel.tree_sum(parallel.gather_slabs(part, axis)) for part in (partials, low)
  )
  low_rank = linear.dot(_low_rank(low, adapter, dtype), adapter["b"], numerics)
  return (whole + low_rank).astype(dtype)


def forward(
  params: Params,
  batch: TokenBatch,
  pages: Pages | ScratchPages,
  *,
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None = None,
  remat: Remat = "none",
) -> tuple[Float[Array, "n d"], Pages]:
  """Runs every row through every layer.

  Args:
    params: `compute_params` of the master weights; under `shard_map` this device's slabs. Of
      stacked layers one program runs, in a loop.
    batch: rows and segments.
    pages: keys and values of all sequences (`empty_pages`); the rows' own are written before they
      are read. `ScratchPages` where these rows are all that there is: a gradient needs them where
      the layers of `empty_pages` lie in one pool.
    config: shape of the model.
    numerics: what decides bits.
    axis: mesh axis of the slabs, None on one device.
    remat: what a gradient keeps: "none" computes nothing again, "layer" keeps each layer's input
      alone and computes the layer again as it goes back. The values are the same bits.

  Returns:
    (hidden rows f[n, d] before the final norm, pages with the rows' keys and values, none of
    scratch pages).

  Raises:
    NotImplementedError: from a gradient through pages that all layers share.
    ValueError: for stacked layers with pages of single ones, or slabs that do not divide the model.
  """
  numerics = numerics_for(config, numerics)
  num_rows = batch.tokens.shape[0]
  batch = _whole_tiles(batch, numerics)
  is_scratch = isinstance(pages, ScratchPages)
  is_pool = not is_scratch and pages[0][0].ndim == 5
  cos, sin = rotary.table(batch.positions, batch.num_rows, config.rotary, numerics)
  page_size = pages.page_size if is_scratch else pages[0][0].shape[-2]
  segment_rows = attention.segment_rows(batch, numerics, page_size)
  inputs = functools.partial(_attention_inputs, config, numerics, axis)
  outputs = functools.partial(_after_attention, config, numerics, axis)

  def layer(x: Array, weights: Params, own: tuple[Array, Array], index: Array | int):
    """Runs layer `index`, with its pages f[k, m, z, c]; of a pool, m counts pages of a layer."""
    rows, own_batch = segment_rows, batch
    if is_pool:
      own_page = lambda page: page * config.num_layers + index
      page, offset = batch.slots // page_size, batch.slots % page_size
      slots = own_page(page) * page_size + offset
      own_batch = batch._replace(slots=slots, page_table=own_page(batch.page_table))
      rows = rows._replace(page_table=own_page(rows.page_table))
    q, k, v = tiles.map_rows(inputs, weights, (x, cos, sin), batch.num_rows, numerics)
    k_pages, v_pages = (
      attention.write_pages(whole, new, own_batch.slots, batch.num_rows, numerics)
      for whole, new in zip(own, (k, v), strict=True)
    )
    mixed = attention.attend(q, k_pages, v_pages, own_batch, rows, numerics)
    x = tiles.map_rows(outputs, weights, (x, mixed), batch.num_rows, numerics)
    return x, (k_pages, v_pages)

  def again(x: Array, weights: Params, own: tuple[Array, Array], index: int):
    # Pages that are all zero, as a gradient's are, are not made before the layer is.
    zero = tiles.late_zeros((), own[0].dtype, lax.stop_gradient(x))
    run = jax.checkpoint(functools.partial(layer, index=index))
    return run(x, weights, (own[0] + zero, own[1] + zero))

  x = params["embed"][batch.tokens]
  if is_scratch:
    x, pages = _with_scratch(config, numerics, axis, remat, pages, layer, x, params), ()
  elif is_pool:
    x, pages = _with_pool(config, layer, x, params, pages[0])
  elif is_stacked(params):
    raise ValueError(
      f"forward: got stacked layers and a pair of pages for each of {len(pages)}, expected one pool"
      " of them all; take empty_pages of the same model, or unstacked weights."
    )
  else:
    run_layer = again if remat == "layer" else layer
    new_pages = []
    for index, (weights, own) in enumerate(zip(params["layers"], pages, strict=True)):
      x, own = run_layer(x, weights, own, index)
      new_pages.append(own)
    pages = tuple(new_pages)
  return x[:num_rows], pages


def _whole_tiles(batch: TokenBatch, numerics: numerics_lib.NumericsConfig) -> TokenBatch:
  """Returns the batch in whole tiles of rows and segments, as the engine's and trainer's are."""
  rows = tiles.whole_rows(batch.tokens.shape[0], numerics)
  segments = tiles.whole_segments(batch.segment_start.shape[0], numerics)
  return batch._replace(
    tokens=tiles.padded(batch.tokens, rows),
    positions=tiles.padded(batch.positions, rows),
    slots=tiles.padded(batch.slots, rows),
    segment_start=tiles.padded(batch.segment_start, segments),
    segment_length=tiles.padded(batch.segment_length, segments),
    page_table=tiles.padded(batch.page_table, segments),
  )


def _with_scratch(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  remat: Remat,
  pages: ScratchPages,
  layer: Any,
  x: Array,
  params: Params,
) -> Array:
  """Runs `layer` after layer, each on fresh pages of its own."""
  check_page_size(pages.page_size, numerics)
  num_heads = config.num_kv_heads // (1 if axis is None else lax.axis_size(axis))
  shape = (num_heads, *pages, config.head_dim)

  def body(x: Array, weights: Params) -> tuple[Array, None]:
    if remat == "layer":
      fresh = tiles.late_zeros(shape, numerics.dtype, lax.stop_gradient(x))
    else:
      fresh = jnp.zeros(shape, numerics.dtype)
    return layer(x, weights, (fresh, fresh), 0)[0], None

  body = jax.checkpoint(body) if remat == "layer" else body
  if is_stacked(params):
    return lax.scan(body, x, params["layers"])[0]
  for weights in params["layers"]:
    x, _ = body(x, weights)
  return x


def _with_pool(
  config: TransformerConfig, layer: Any, x: Array, params: Params, pool: tuple[Array, Array]
) -> tuple[Array, Pages]:
  """Runs `layer` after layer on one pool of pages f[k, m, l, z, c], written in place."""
  shape = pool[0].shape
  assert shape[2] == config.num_layers, f"got pages of {shape[2]} layers of {config.num_layers}"
  flat = (shape[0], shape[1] * shape[2], *shape[3:])
  own = pool[0].reshape(flat), pool[1].reshape(flat)
  if is_stacked(params):
    # Slabs are read one by one where they are multiplied: a layer's slice would be a copy of it.
    layers = params["layers"]
    names = [n for n in SLABS if n in layers and layers[n].shape[1] > 1]
    rest = {name: leaf for name, leaf in layers.items() if name not in names}

    def body(carry: Any, turn: Any) -> tuple[Any, None]:
      weights, index = turn
      slabs = {name: tiles.LayerSlabs(layers[name], index) for name in names}
      return layer(carry[0], weights | slabs, carry[1], index), None

    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, own), _ = lax.scan(body, (x, own), (rest, indices))
  else:
    for index, weights in enumerate(params["layers"]):
      x, own = layer(x, weights, own, index)
  keys, values = own
  return _without_gradient(x), ((keys.reshape(shape), values.reshape(shape)),)


@jax.custom_vjp
def _without_gradient(x: Array) -> Array:
  return x


def _refuse_gradient(_, cotangent):
  raise NotImplementedError(
    f"forward: got a gradient f{list(cotangent.shape)} through pages that all layers share,"
    " expected one through ScratchPages (each layer would have kept all pages); pass those."
  )


_without_gradient.defvjp(lambda x: (x, None), _refuse_gradient)


def logits_rows(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  hidden: Array,
  one: Array,
) -> Float[Array, "n v"]:
  """Final norm and vocabulary product: f[n, d] -> f32[n, v]. For use on the rows of one tile."""
  normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
  slabs = weights["head"]  # f[r, v / r, d]
  slab = lambda x, rows: linear.dot_rows(x, rows, numerics)
  parts = tiles.map_slabs(slab, normed, slabs, one, axis, numerics)
  parts = parallel.gather_slabs(parts, axis)
  return jnp.swapaxes(parts, 0, 1).reshape(hidden.shape[0], -1)


def head(
  params: Params,
  hidden: Float[Array, "n d"],
  forced: Int[Array, "n"],
  sampling_rows: SamplingRows,
  seeds: Array,
  positions: Int[Array, "n"],
  num_rows: Array,
  key: PRNGKeyArray,
  *,
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None = None,
) -> tuple[Int[Array, "n"], TokenScores]:
  """Samples the next token of each row, or takes the given one, and scores it.

  The engine and the trainer both call this, and both use all of what it returns: an output that
  XLA could remove would change the program around it, and with it the bits.

  Args:
    params: as for `forward`.
    hidden: f[n, d], rows of `forward`.
    forced: i32[n], the token to score; -1 samples one.
    sampling_rows: how each row is processed.
    seeds: u32[n], each row's request seed.
    positions: i32[n], absolute position of the token that is sampled or scored.
    num_rows: i32[], valid rows.
    key: the run's sampling key; folded, never consumed.
    config: shape of the model.
    numerics: what decides bits.
    axis: mesh axis of the slabs, None on one device.

  Returns:
    (tokens i32[n], their scores). A gradient is that of the scores of forced tokens.
  """
  numerics = numerics_for(config, numerics)
  table = params.get("head")
  if table is None:
    whole = params["embed"].reshape(numerics.reduction_shards, -1, config.hidden_size)
    table = parallel.local_part(whole, axis)
  weights = {"final_norm": params["final_norm"], "head": table, "key": jax.random.key_data(key)}
  count = forced.shape[0]
  whole = tiles.whole_rows(count, numerics)
  hidden, forced, seeds, positions = tiles.padded((hidden, forced, seeds, positions), whole)
  sampling_rows = sampling.padded(sampling_rows, whole)
  is_wanted = (forced < 0) & (sampling_rows.temperature > 0)
  rows = (hidden, forced, sampling_rows, seeds, positions, is_wanted)
  run = _kernel_head if numerics.uses_kernels else _tiled_head
  out = run(config, numerics, axis, weights, rows, num_rows)
  return jax.tree.map(lambda leaf: leaf[:count], out)


def _tiled_head(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  num_rows: Array,
) -> tuple[Int[Array, "n"], TokenScores]:
  """`head`, tile by tile, each with its logits whole."""

  def tile(weights, rows, one):
    hidden, forced, sampling_rows, seeds, positions, is_wanted = rows
    logits = logits_rows(config, numerics, axis, weights, hidden, one)
    processed = sampling.processed_rows(logits, sampling_rows)
    key = numerics_lib.wrap_key(weights["key"])
    noise = sampling.noise_rows(key, seeds, positions, is_wanted, config.vocab_size)
    chosen = sampling.choose_rows(lax.stop_gradient(processed), noise)
    tokens = jnp.where(forced >= 0, forced, chosen)
    return tokens, logprobs.score_rows(logits, processed, tokens, one, numerics)

  def given(weights, rows, one):
    # What a gradient may reach: scores of given tokens. Drawing noise again would cost more than
    # the rest, at run time and at compile time.
    hidden, forced, sampling_rows, *_ = rows
    given_rows = (hidden, jnp.maximum(forced, 0), sampling_rows)
    return _given_scores(config, numerics, axis, weights, given_rows, one)

  return tiles.map_rows(tile, weights, rows, num_rows, numerics, gradient_of=given)


def _kernel_head(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: Any,
  num_rows: Array,
) -> tuple[Int[Array, "n"], TokenScores]:
  """`head` by one kernel, which holds no logits; a biased, filtered or restricted row is tiled.

  Which of the two a row takes follows its own parameters, never its neighbours'.
  """
  hidden, forced, parameters, seeds, positions, _ = rows
  key = numerics_lib.wrap_key(weights["key"])
  fold = lambda seed, position: jax.random.fold_in(jax.random.fold_in(key, seed), position)
  normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
  tokens, *scores = token_logprobs.token_logprobs(
    normed,
    # Every device of the axis scores whole rows: its slabs are the table's, its bits too.
    parallel.gather_slabs(weights["head"], axis),
    forced,
    parameters.temperature,
    jax.random.key_data(jax.vmap(fold)(seeds, positions)),
    config=token_logprobs.Config(shards=numerics.reduction_shards),
    interpret=numerics.is_interpreted,
  )
  is_special = sampling.is_filtered(parameters) | sampling.is_restricted(parameters)
  is_special |= jnp.any(parameters.bias_ids >= 0, axis=1)
  common = tokens, TokenScores(*scores)
  tiled = dataclasses.replace(numerics, implementation="tiled")
  special = lax.cond(
    jnp.any(is_special),
    lambda: _tiled_head(config, tiled, axis, weights, rows, num_rows),
    lambda: jax.tree.map(jnp.zeros_like, common),
  )
  return jax.tree.map(lambda a, b: jnp.where(is_special, a, b), special, common)


def _given_scores(
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  axis: str | None,
  weights: Params,
  rows: tuple[Array, Array, SamplingRows],
  one: Array,
) -> TokenScores:
  """Scores given tokens for a gradient: few logits are held at a time.

  Slab by slab of the vocabulary for many rows, or, where a filter has to see a row whole, few rows
  at a time.
  """

  def by_slab(rows):
    hidden, tokens, parameters = rows
    normed = norms.rms_norm_rows(hidden, weights["final_norm"], config.norm_eps, numerics)
    slabs = weights["head"]
    local, width, _ = slabs.shape
    start = 0 if axis is None else lax.axis_index(axis) * jnp.int32(local)

    def logits_of(slab, first):
      raw = linear.dot_rows(normed, slab, numerics)
      return raw, sampling.scaled_rows(raw, parameters, first)

    firsts = (start + jnp.arange(local, dtype=jnp.int32)) * jnp.int32(width)
    return logprobs.score_by_slab(logits_of, slabs, firsts, width, tokens, axis)

  def by_rows(rows):
    @jax.checkpoint
    def few(rows):
      hidden, tokens, parameters = rows
      logits = logits_rows(config, numerics, axis, weights, hidden, one)
      processed = sampling.processed_rows(logits, parameters)
      return logprobs.score_rows(logits, processed, tokens, one, numerics)

    return tiles.in_chunks(few, rows, FILTERED_ROWS)

  is_filtered = jnp.any(sampling.is_filtered(rows[2]))
  return lax.cond(is_filtered, by_rows, by_slab, rows)


class Transformer(nnx.Module):
  """The decoder as a Flax module, for those who build with NNX.

  Holds the master weights as `nnx.Param`s under `params`; `pure_params` gives the pytree that
  `forward`, the engine and the trainer take, and `set_params` takes one back:

    module -> pure_params() -> rl.train, ttt.discover -> state.params -> set_params() -> module

  """

  def __init__(
    self,
    config: TransformerConfig,
    numerics: numerics_lib.NumericsConfig,
    *,
    rngs: nnx.Rngs | None = None,
    params: Params | None = None,
  ):
    """Makes a module.

    Args:
      config: shape.
      numerics: what decides bits.
      rngs: whose stream `params` draws new weights.
      params: f32 master weights, such as `huggingface.load` gives; in place of `rngs`.

    Raises:
      ValueError: for neither or both, and for weights of another shape.
    """
    if (rngs is None) == (params is None):
      given = "neither" if rngs is None else "both"
      raise ValueError(
        f"Transformer: got {given} of rngs and params, expected one of them; rngs draw new weights."
      )
    self.config = config
    self.numerics = numerics = numerics_for(config, numerics)
    if params is None:
      assert rngs is not None
      params = init(rngs.params(), config, numerics)
    self._check(params)
    self.params = nnx.data(jax.tree.map(nnx.Param, params))

  def _check(self, params: Params) -> None:
    """Refuses weights of another model, dtype or layout."""
    layout = shapes(self.config, self.numerics.reduction_shards)
    expected = dict(jax.tree_util.tree_leaves_with_path(layout))
    got = dict(jax.tree_util.tree_leaves_with_path(params))
    for path in sorted({*expected, *got}, key=jax.tree_util.keystr):
      have, want = (
        f"{leaf.dtype.name}{list(leaf.shape)}" if leaf is not None else "nothing"
        for leaf in (got.get(path), expected.get(path))
      )
      if have != want:
        raise ValueError(
          f"Transformer.params{jax.tree_util.keystr(path)}: got {have}, expected {want}; pass"
          " master weights of this config and of these numerics."
        )

  def set_params(self, params: Params) -> None:
    """Takes master weights, trained elsewhere, into its `nnx.Param`s.

    Optimizers that were made of this module go on with them.

    Raises:
      ValueError: for weights of another shape; the module keeps its own.
    """
    self._check(params)

    def take(held: nnx.Param, leaf: Array) -> None:
      held[...] = jnp.asarray(leaf)

    jax.tree.map(take, self.params, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))

  def pure_params(self) -> Params:
    """Returns the master weights as a plain pytree."""
    return jax.tree.map(
      lambda leaf: leaf[...], self.params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
    )

  def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
    """Returns f32[b, t, v], logits of whole sequences."""
    return logits_of(
      compute_params(self.pure_params(), self.numerics),
      tokens,
      config=self.config,
      numerics=self.numerics,
    )


def sequences_batch(
  batch_size: int, length: int, numerics: numerics_lib.NumericsConfig, page_size: int
) -> tuple[TokenBatch, int]:
  """Returns (TokenBatch of equal whole sequences with tokens left zero, number of pages), numpy."""
  per_split = numerics.kv_split // page_size
  width = -(-length // numerics.kv_split) * per_split
  query_tile = numerics.query_tile
  per_sequence = -(-length // query_tile)
  rows = np.arange(batch_size * length, dtype=np.int32)
  sequence, position = rows // length, rows % length
  segment = np.arange(batch_size * per_sequence, dtype=np.int32)
  segment_sequence, first = segment // per_sequence, segment % per_sequence * query_tile
  # Any: the records are typed as device arrays, and this one is made on the host.
  fields: dict[str, Any] = dict(
    tokens=np.zeros_like(rows),
    positions=position,
    slots=((1 + sequence * width + position // page_size) * page_size + position % page_size),
    num_rows=np.int32(len(rows)),
    segment_start=segment_sequence * length + first,
    segment_length=np.minimum(length - first, query_tile).astype(np.int32),
    page_table=(
      1 + segment_sequence[:, None] * width + np.arange(width, dtype=np.int32)[None, :]
    ).astype(np.int32),
    num_segments=np.int32(len(segment)),
  )
  return TokenBatch(**fields), 1 + batch_size * width


def logits_of(
  params: Params,
  tokens: Int[Array, "b t"],
  *,
  config: TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
) -> Float[Array, "b t v"]:
  """Returns f32[b, t, v], logits of whole sequences of one length (`params` in compute dtype)."""
  numerics = numerics_for(config, numerics)
  batch_size, length = tokens.shape
  page_size = min(numerics.kv_split, 64)
  batch, num_pages = sequences_batch(batch_size, length, numerics, page_size)
  batch = jax.tree.map(jnp.asarray, batch)._replace(tokens=tokens.reshape(-1))
  pages = ScratchPages(num_pages, page_size)
  hidden, _ = forward(params, batch, pages, config=config, numerics=numerics)
  table = params.get("head")
  if table is None:
    table = params["embed"].reshape(numerics.reduction_shards, -1, config.hidden_size)
  weights = {"final_norm": params["final_norm"], "head": table}
  rows = functools.partial(logits_rows, config, numerics, None)
  logits = tiles.map_rows(rows, weights, hidden, batch.num_rows, numerics)
  return logits.reshape(batch_size, length, -1)
