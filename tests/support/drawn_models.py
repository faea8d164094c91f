"""Whole test cases drawn from (seed, number): a model, numerics, engine sizes and requests.

    numbers 0 to 11    the first model, with its numerics, weights and trainer layout
    numbers 0 to 5     its first machine: engine sizes and mesh
    number 0           requests, tiers, drafts and a schedule

Expensive compilations thus serve several cases: the reference and the trainer serve `OF_A_MODEL`
cases, an engine's programs `OF_A_MACHINE`. With a pretrained model (`pretrained`, `draw_of`) all
cases use that model, and prompts are texts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import layer_kinds, numerics as numerics_lib, parallel
from seerjax.backends import layer_support
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.engine.engine import EngineConfig
from seerjax.kv import page_moves
from seerjax.layer_kinds import Experts, Gated, Grouped, LayerConfig
from seerjax.models import (
  config as model_config,
  families,
  huggingface,
  loading,
  lora,
  parameters,
  shared_heads,
  tokenizer as tokenizer_lib,
)
from seerjax.models.decoder import decide
from seerjax.ops import rotary
from seerjax.ops.routing import RoutingConfig
from seerjax.tasks import word_problems
from seerjax.types import Completion, Request, SamplingParams

OF_A_MODEL, OF_A_MACHINE = 12, 6  # Numbers of cases.
PLAIN_FAMILIES = ("qwen3", "qwen2", "llama", "mistral")  # Of equal layers without experts.
MAX_PROMPT, MAX_ANSWER = 30, 18
MAX_TOKENS = MAX_PROMPT + MAX_ANSWER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model with its numerics and its trainer's packing.

  Attributes:
    weights_seed: seed of the weights.
    deviation: standard deviation of the weights; norms are around one.
    rank: rank of the adapter; 0 has none.
    alpha: the adapter's scale is alpha / rank.
    targets: weights that have an adapter.
    train_rows: rows of a micro-batch, in row tiles.
    train_page_size: positions per page of the trainer.
    train_instances: instances of the trainer's mesh.
    directory: directory of pretrained weights, which replace drawn ones; "" has none.
  """

  config: model_config.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  weights_seed: int
  deviation: float
  rank: int
  alpha: float
  targets: tuple[str, ...]
  train_rows: int
  train_page_size: int
  train_instances: int
  directory: str = ""

  def __str__(self) -> str:
    c, n = self.config, self.numerics
    kind = c.layers[0].attention
    parts = ", ".join(str(part) for part in dict.fromkeys(one.feed_forward for one in c.layers))
    scaling = "" if kind.rotary.scaling == "none" else f", {kind.rotary.scaling}"
    adapter = f", rank {self.rank} alpha {self.alpha} on {self.targets}" if self.rank else ""
    return (
      f"{family_of(c)} of vocabulary {c.vocab_size}, hidden {c.hidden_size}, {parts}"
      f", {c.num_layers} layer(s), {kind.num_heads}/{kind.num_kv_heads} heads of"
      f" {kind.head_dim}{scaling}, {'tied' if c.is_tied else 'with a head'}, deviation"
      f" {self.deviation}, weights {self.directory or self.weights_seed}{adapter};"
      f" {n.backend} {n.compute_dtype}, tiles"
      f" {n.row_tile} {n.query_tile} {n.slot_tile}, split {n.kv_split}, {n.reduction_shards}"
      f" slab(s); trainer of {self.train_rows} rows, pages of {self.train_page_size},"
      f" {self.train_instances} instance(s)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """The engine that runs a model.

  Attributes:
    model: the model and its numerics.
    sizes: the engine's sizes.
    mesh: (instances, model shards).
  """

  model: Model
  sizes: EngineConfig
  mesh: tuple[int, int]

  def __str__(self) -> str:
    s = self.sizes
    return (
      f"{self.model}; buckets {s.batch_size_buckets}, {s.num_pages} pages of {s.page_size},"
      f" {s.max_num_seqs} sequences, context {s.max_model_len},"
      f" {'reuse' if s.enable_prefix_caching else 'no reuse'}, {self.mesh[0]} instance(s) of"
      f" {self.mesh[1]} device(s)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One case; its `str` contains everything drawn except requests and the schedule's steps.

  Attributes:
    seed: the session's seed.
    number: the case's number.
    machine: shared with neighbouring cases.
    group_size: members of a group, which have the same prompt.
    groups: number of groups.
    host_pages: pages of the pool in host memory.
    has_disk: whether the pool also has a disk store.
    chunk_tokens: tokens of a chunk; 0 runs each request to its end.
    right: share of correct drafted tokens; a negative share drafts nothing.
    rates: probability of each kind of disturbance per step.
    suffix_paths: maximum paths of a draft from the group's texts; 0 drafts from known answers.
  """

  seed: int
  number: int
  machine: Machine
  group_size: int
  groups: int
  host_pages: int
  has_disk: bool
  chunk_tokens: int
  right: float
  rates: dict[str, float]
  suffix_paths: int = 0

  @property
  def model(self) -> Model:
    """The machine's model."""
    return self.machine.model

  def __str__(self) -> str:
    tier = f"{self.host_pages} host pages{' and a disk' if self.has_disk else ''}"
    rates = ", ".join(f"{name} {rate:g}" for name, rate in self.rates.items() if rate)
    drafts = f"drafts {self.right:g} right" if self.right >= 0 else "no drafts"
    if self.suffix_paths:
      drafts = f"suffix drafts of {self.suffix_paths} path(s)"
    return (
      f"case {self.number} of seed {self.seed}: {self.machine}, {self.groups} groups of"
      f" {self.group_size}, chunks of {self.chunk_tokens}, {drafts}, {tier},"
      f" {rates or 'undisturbed'}"
    )

  def rng(self, what: int) -> np.random.Generator:
    """Returns a generator that yields the same numbers for the same `what`."""
    return np.random.default_rng((self.seed, self.number, 3 + what))


def family_of(config: model_config.TransformerConfig) -> str:
  """Returns the family of a model, or what of it no family of ours has."""
  different = layer_support.beyond_dense(config) or layer_kinds.difference(config.layers)
  return different or families.of(config).model_type


def has_experts(config: model_config.TransformerConfig) -> bool:
  """Returns whether a layer of a model has experts."""
  return any(isinstance(layer.feed_forward, Experts) for layer in config.layers)


def with_experts(case: Case) -> Case:
  """Returns the case with experts in some of its model's layers, one kind drawn per model.

  The first layer stays dense in half of the models with several layers.
  """
  rng = np.random.default_rng((case.seed, case.number // OF_A_MODEL, 7))
  model, config = case.model, case.model.config
  slabs = model.numerics.reduction_shards
  num_experts = slabs * _pick(rng, *(count for count in (1, 2, 3, 6) if slabs * count > 2), 8)
  scoring = _pick(rng, "softmax", "softmax", "softmax_of_chosen", "sigmoid")
  num_groups = _pick(rng, *(g for g in (1, 1, 2, 4) if num_experts % g == 0 and num_experts > g))
  num_chosen = int(rng.integers(1, min(5, num_experts) + 1))
  least = -(-num_chosen * num_groups // num_experts)
  kind = Experts(
    routing=RoutingConfig(
      num_experts=num_experts,
      num_chosen=num_chosen,
      scoring=scoring,
      is_renormalised=scoring != "softmax_of_chosen" and rng.random() < 0.5,
      num_groups=num_groups,
      num_chosen_groups=int(rng.integers(least, num_groups + 1)),
      scale=_pick(rng, 1.0, 2.5),
      has_bias=rng.random() < 0.3,
      has_correction_bias=scoring == "sigmoid" and rng.random() < 0.7,
    ),
    expert_size=int(rng.integers(1, 33)),
    shared_size=_pick(rng, 0, 0, slabs * int(rng.integers(1, 9))),
  )
  first = int(config.num_layers > 1 and rng.random() < 0.5)
  layers = tuple(
    layer.changed(feed_forward=kind) if index >= first else layer
    for index, layer in enumerate(config.layers)
  )
  model = dataclasses.replace(
    model,
    config=dataclasses.replace(config, layers=layers),
    numerics=dataclasses.replace(model.numerics, expert_tile=_pick(rng, 0, 2, 4, 8)),
  )
  known = lora.targets_of(model.config)
  targets = (*model.targets, *(name for name in lora.EXPERT_TARGETS if rng.random() < 0.7))
  sizes = [size for size in (kind.expert_size, kind.shared_size) if size]
  model = dataclasses.replace(
    model,
    targets=tuple(name for name in targets if name in known) or known,
    rank=min(model.rank, *sizes),
  )
  return dataclasses.replace(case, machine=dataclasses.replace(case.machine, model=model))


def with_windows(case: Case) -> Case:
  """Returns the case with windows, sinks, caps and scales in its model, drawn once per model."""
  rng = np.random.default_rng((case.seed, case.number // OF_A_MODEL, 8))
  model = case.model
  layers = tuple(
    layer.changed(
      window=_pick(rng, None, int(rng.integers(1, MAX_TOKENS))),
      soft_cap=_pick(rng, None, 1.0, 5.0),
      scale=_pick(rng, None, 0.2),
      has_sinks=bool(rng.integers(2)),
    )
    for layer in model.config.layers
  )
  # At least one layer has a window, whatever was drawn.
  layers = (layers[0].changed(window=int(rng.integers(1, 24))), *layers[1:])
  model = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers))
  return dataclasses.replace(case, machine=dataclasses.replace(case.machine, model=model))


def with_rules(case: Case) -> Case:
  """Returns the case with windows, sinks, caps and norms of all placements in its model.

  They are drawn once per model, layer by layer where layers may differ.
  """
  rng = np.random.default_rng((case.seed, case.number // OF_A_MODEL, 6))
  case = with_windows(case)
  model, config = case.model, case.model.config
  norm_placement = _pick(rng, "pre", "pre_and_post")
  activation = _pick(rng, "silu", "gelu_tanh")
  layers = tuple(
    layer.changed(
      norm_placement=norm_placement,
      # Experts have silu alone.
      **({} if isinstance(layer.feed_forward, Experts) else dict(activation=activation)),
    )
    for layer in config.layers
  )
  config = dataclasses.replace(
    config,
    layers=layers,
    norm_weights=_pick(rng, "w", "1 + w"),
    embedding_scale=_pick(rng, None, config.hidden_size**0.5),
    logit_soft_cap=_pick(rng, None, 3.0, 30.0),
  )
  model = dataclasses.replace(model, config=config)
  return dataclasses.replace(case, machine=dataclasses.replace(case.machine, model=model))


def with_shared_heads(case: Case) -> Case:
  """Returns the case with more slabs than key/value heads, and often more devices.

  In some models with several layers, layers differ in their number of key/value heads. Sinks and
  windows are drawn too, once per model.
  """
  rng = np.random.default_rng((case.seed, case.number // OF_A_MODEL, 11))
  model, config = case.model, case.model.config
  slabs = _pick(rng, 2, 4, 8, 8)
  fewer = [count for count in (1, 1, 2, 4) if count < slabs]
  group, heads = _pick(rng, 1, 1, 2, 3), _pick(rng, *fewer)
  inner = slabs * int(rng.integers(max(1, 6 // slabs), 2 + 90 // slabs))
  flags = dict(
    has_sinks=rng.random() < 0.3, window=_pick(rng, None, None, int(rng.integers(1, MAX_TOKENS)))
  )
  are_mixed = rng.random() < 0.3
  layers = tuple(
    layer.changed(
      num_heads=slabs * group,
      num_kv_heads=_pick(rng, *fewer, slabs) if are_mixed and index else heads,
      intermediate_size=inner,
      **flags,
    )
    for index, layer in enumerate(config.layers)
  )
  config = dataclasses.replace(
    config,
    vocab_size=slabs * (1 + 2 * int(rng.integers(1 + 10 // slabs, 50 // slabs))),
    layers=layers,
  )
  numerics = dataclasses.replace(model.numerics, reduction_shards=slabs)
  smallest = min(config.hidden_size, slabs * group * layers[0].attention.head_dim, inner)
  rank = min(model.rank, smallest)
  model = dataclasses.replace(model, config=config, numerics=numerics, rank=rank)
  of_machine = np.random.default_rng((case.seed, case.number // OF_A_MACHINE, 12))
  shards = _pick(of_machine, *(count for count in (1, 2, 4, 8) if count <= slabs))
  instances = min(case.machine.mesh[0], 8 // shards)
  machine = dataclasses.replace(case.machine, model=model, mesh=(instances, shards))
  return dataclasses.replace(case, machine=machine)


def with_short_windows(case: Case) -> Case:
  """Works like `with_windows`, with windows and splits so short that pages are given back."""
  rng = np.random.default_rng((case.seed, case.number // OF_A_MACHINE, 10))
  case = with_windows(case)
  model, sizes = case.model, case.machine.sizes
  of_model = np.random.default_rng((case.seed, case.number // OF_A_MODEL, 9))
  # Mostly two kinds of pages; the first layer decides whether one of them is without a window.
  windows = [_pick(of_model, None, None, 24), int(of_model.integers(1, 13))]
  windows += [_pick(of_model, *windows, int(of_model.integers(1, 21))) for _ in range(2)]
  count = max(2, model.config.num_layers)
  kinds = (*model.config.layers, model.config.layers[-1])[:count]
  config = dataclasses.replace(
    model.config,
    layers=tuple(kind.changed(window=at) for kind, at in zip(kinds, windows, strict=False)),
  )
  split = _pick(of_model, 2, 4, 8)
  numerics = dataclasses.replace(model.numerics, kv_split=split)
  page_size = _divisor(rng, split)
  pages = 1 + int(-(-MAX_TOKENS // page_size) * _pick(rng, 1.0, 1.5, 3.0))
  model = dataclasses.replace(
    model, config=config, numerics=numerics, train_page_size=_divisor(of_model, split)
  )
  sizes = dataclasses.replace(sizes, page_size=page_size, num_pages=pages)
  machine = dataclasses.replace(case.machine, model=model, sizes=sizes)
  # Its own pages are smaller than those that were drawn, so more of them are in host memory.
  host_pages = _room(sizes) if case.host_pages == _room(case.machine.sizes) else case.host_pages
  return dataclasses.replace(case, machine=machine, host_pages=max(host_pages, _room(sizes)))


def _pick(rng: np.random.Generator, *choices: Any) -> Any:
  return choices[int(rng.integers(len(choices)))]


def draw_model(rng: np.random.Generator) -> Model:
  """Returns a model of any family; no tile divides its sizes where slabs permit."""
  slabs = _pick(rng, 1, 1, 2, 2, 4, 8)
  num_kv_heads = slabs * _pick(rng, 1, 1, 2, 3) if slabs < 4 else slabs
  group = _pick(rng, 1, 1, 2, 3, 4) if num_kv_heads < 4 else _pick(rng, 1, 2)
  head_dim = 2 * _pick(rng, 1, 2, 3, 4, 5, 7, 8, 9)
  scaling = _pick(rng, "none", "none", "none", "linear", "llama3", "yarn")
  scaled = dict(factor=_pick(rng, 2.0, 4.0), original_context=16) if scaling != "none" else {}
  hidden_size = int(rng.integers(4, 129))
  if rng.random() < 0.5:  # Sizes at which XLA's vectors are full.
    hidden_size = 8 * max(1, hidden_size // 8)
  kv_split = _pick(rng, 1, 4, 8, 16, 16, 32, 64)
  numerics = numerics_lib.NumericsConfig(
    row_tile=_pick(rng, 1, 2, 4, 8, 16, 16, 32, 64),
    query_tile=_pick(rng, 1, 2, 4, 8, 16),
    slot_tile=_pick(rng, 1, 2, 4, 8, 16),
    kv_split=kv_split,
    reduction_shards=slabs,
    compute_dtype=_pick(rng, "float32", "float32", "bfloat16"),
    backend="tiled",
  )
  family = families.named(_pick(rng, *PLAIN_FAMILIES))
  config = model_config.TransformerConfig(
    # Odd numbers of columns per slab.
    vocab_size=slabs * (1 + 2 * int(rng.integers(10 // slabs, 50 // slabs))),
    hidden_size=hidden_size,
    layers=layer_kinds.uniform(
      LayerConfig(
        attention=Grouped(
          num_heads=num_kv_heads * group,
          num_kv_heads=num_kv_heads,
          head_dim=head_dim,
          rotary=rotary.RotaryConfig(
            head_dim=head_dim, base=_pick(rng, 1e3, 1e4, 1e6), scaling=scaling, **scaled
          ),
          **family.attention,
        ),
        feed_forward=Gated(
          intermediate_size=slabs * int(rng.integers(max(1, 6 // slabs), 2 + 90 // slabs))
        ),
      ),
      _pick(rng, 1, 2, 2, 3, 4),
    ),
    norm_eps=_pick(rng, 1e-6, 1e-5),
    is_tied=bool(rng.integers(2)),
    max_model_len=128,
  )
  rank = _pick(rng, 0, 0, 0, 1, 2, 3, 4, 5)
  smallest = min(
    config.hidden_size,
    config.layers[0].attention.num_heads * head_dim,
    config.layers[0].feed_forward.intermediate_size,
  )
  targets = tuple(name for name in lora.TARGETS if rng.random() < 0.7) or lora.TARGETS
  tiles = -(-int(rng.integers(MAX_TOKENS - 1, 161)) // numerics.row_tile)
  return Model(
    config=config,
    numerics=numerics,
    weights_seed=int(rng.integers(1000)),
    deviation=_pick(rng, 0.1, 0.15, 0.25, 0.4),
    rank=min(rank, smallest),
    alpha=_pick(rng, 1.0, 3.0, 8.0),
    targets=targets,
    train_rows=tiles * numerics.row_tile,
    train_page_size=_divisor(rng, kv_split),
    train_instances=_pick(rng, 1, 1, 2, 3),
  )


def _divisor(rng: np.random.Generator, power: int) -> int:
  """Returns a power of two up to `power`, seldom a tiny one."""
  return power >> _pick(rng, *(p for p in (0, 0, 1, 2, 3) if power >> p))


def draw_machine(rng: np.random.Generator, model: Model) -> Machine:
  """Returns one or two buckets of any number of rows, little memory, and up to 8 devices."""
  numerics = model.numerics
  last = int(rng.integers(1, 41)) if rng.random() < 0.9 else 64
  buckets = (last,)
  if last > 2 and rng.random() < 0.2:
    buckets = (int(rng.integers(1, last)), last)
  shards = _pick(rng, *(s for s in (1, 1, 2, 4, 8) if numerics.reduction_shards % s == 0))
  instances = _pick(rng, *(i for i in (1, 1, 1, 2, 3, 4, 5, 6, 7) if i * shards <= 8))
  page_size = _divisor(rng, numerics.kv_split)
  of_a_request = -(-MAX_TOKENS // page_size)
  return Machine(
    model=model,
    sizes=EngineConfig(
      page_size=page_size,
      num_pages=1 + int(of_a_request * _pick(rng, 1.0, 1.5, 3.0)),
      max_num_seqs=min(last, int(rng.integers(1, 7))),
      max_model_len=_pick(rng, MAX_TOKENS, MAX_TOKENS, 80, 112),
      batch_size_buckets=buckets,
      enable_prefix_caching=rng.random() < 0.8,
    ),
    mesh=(instances, shards),
  )


def draw(seed: int, number: int, machine: Machine | None = None) -> Case:
  """Returns the case of a number, on its own machine or on a given one."""
  if machine is None:
    model = draw_model(np.random.default_rng((seed, number // OF_A_MODEL, 0)))
    machine = draw_machine(np.random.default_rng((seed, number // OF_A_MACHINE, 1)), model)
  rng = np.random.default_rng((seed, number, 2))
  # The focus of the case, in addition to what else it draws: tiers, kills, drafts, or anything.
  about = number % OF_A_MACHINE % 4
  disturbed = about < 3 or rng.random() < 0.5
  rate = lambda *choices: _pick(rng, *choices) if disturbed else 0.0
  drawn = Case(
    seed=seed,
    number=number,
    machine=machine,
    group_size=_pick(rng, 1, 2, 3),
    groups=int(rng.integers(2, 4)),
    host_pages=_pick(rng, 4, 8, 64),
    has_disk=rng.random() < 0.5,
    chunk_tokens=_pick(rng, 0, 2, 3, 5),
    right=_pick(rng, -1.0, 0.5, 0.8, 0.95),
    rates=dict(
      resume=_pick(rng, 0.3, 0.6, 1.0),
      pause=rate(0.0, 0.1, 0.3),
      spill=rate(0.0, 0.5, 0.8),
      migrate=rate(0.0, 0.3),
      damage=rate(0.0, 0.5, 0.9),
      preempt=rate(0.0, 0.05, 0.15),
      cancel=rate(0.0, 0.03),
      kill=rate(0.0, 0.0, 0.06),
    ),
  )
  match about:
    case 0:
      rates = drawn.rates | dict(resume=0.2, spill=0.9, damage=0.4, kill=0.0)
      # Room for one request only, so that the next request displaces it.
      return dataclasses.replace(
        drawn, host_pages=_room(machine.sizes), has_disk=True, chunk_tokens=2, groups=3,
        group_size=2, rates=rates,
      )  # fmt: skip
    case 1:
      return dataclasses.replace(drawn, rates=drawn.rates | dict(kill=0.1, preempt=0.15))
    case 2:
      return dataclasses.replace(drawn, right=_pick(rng, 0.6, 0.8, 0.95))
  return drawn


def pretrained(
  directory: str, compute_dtype: str, backend: numerics_lib.Backend = "native"
) -> Model:
  """Returns a pretrained model with its default numerics, except for two fields."""
  config = huggingface.load_config(directory)
  asked = numerics_lib.NumericsConfig(compute_dtype=compute_dtype, backend=backend)
  numerics = decide(config, asked).numerics
  return Model(
    config=config,
    numerics=numerics,
    weights_seed=0,
    deviation=0.0,
    rank=0,
    alpha=1.0,
    targets=lora.TARGETS,
    train_rows=-(-2 * MAX_TOKENS // numerics.row_tile) * numerics.row_tile,
    train_page_size=min(numerics.kv_split, 16),
    train_instances=1,
    directory=directory,
  )


def draw_of(model: Model, seed: int, number: int) -> Case:
  """Returns the numbered case of a pretrained model, with few steps because they are expensive.

  Every other machine has two instances. Two of three cases with drafts take them from the texts of
  a group.
  """
  rng = np.random.default_rng((seed, number // OF_A_MACHINE, 1))
  page_size = _pick(rng, 8, 16, 32)
  sizes = EngineConfig(
    page_size=page_size,
    num_pages=1 + int(-(-MAX_TOKENS // page_size) * _pick(rng, 1.0, 1.5, 3.0)),
    max_num_seqs=int(rng.integers(2, 7)),
    max_model_len=_pick(rng, MAX_TOKENS, 80),
    batch_size_buckets=_pick(rng, (8,), (15,), (6, 32), (64,)),
    enable_prefix_caching=rng.random() < 0.8,
  )
  mesh = (1 + number // OF_A_MACHINE % 2, 1)
  case = draw(seed, number, Machine(model=model, sizes=sizes, mesh=mesh))
  rng = case.rng(4)
  return dataclasses.replace(
    case,
    rates=case.rates | dict(resume=max(0.6, case.rates["resume"])),
    chunk_tokens=2 * case.chunk_tokens,
    suffix_paths=_pick(rng, 0, 1, 3) if case.right >= 0 else 0,
  )


def implemented(case: Case, backend: numerics_lib.Backend) -> Case:
  """Returns the case with another backend in place of tiles."""
  model = case.model
  numerics = dataclasses.replace(model.numerics, backend=backend)
  model = dataclasses.replace(model, numerics=numerics)
  return dataclasses.replace(case, machine=dataclasses.replace(case.machine, model=model))


def _room(sizes: EngineConfig) -> int:
  """Returns the number of host pages that hold one request of any length."""
  pages = page_moves.rounds([0] * -(-MAX_TOKENS // sizes.page_size))
  return sum(page_moves.bucket_for(len(part)) for part in pages)


@functools.lru_cache(maxsize=4)
def _tokenizer(directory: str) -> tokenizer_lib.Tokenizer:
  return tokenizer_lib.load(directory)


def _text_tokens(rng: np.random.Generator, directory: str) -> list[int]:
  """Returns the tokens of a word problem."""
  problem = word_problems.WordProblems().problem("train", int(rng.integers(1000)))
  return _tokenizer(directory).encode(problem.question)


def requests_of(case: Case) -> list[Request]:
  """Returns groups with one prompt each and sampling per member; some prompts share a prefix.

  With drafts from texts, members of a group have equal requests and seeds, so that drafts are
  accepted.
  """
  rng, vocab_size = case.rng(1), case.model.config.vocab_size
  start = tuple(rng.integers(0, vocab_size, 12).tolist())
  found = []
  for group in range(case.groups):
    length = int(rng.integers(1, MAX_PROMPT + 1))
    prompt = tuple(rng.integers(0, vocab_size, length).tolist())
    if case.model.directory:
      prompt = tuple(_text_tokens(rng, case.model.directory)[:length])
    if rng.random() < 0.5:
      prompt = (start + prompt)[:MAX_PROMPT]
    for member in range(case.group_size):
      drawn = draw_sampling(rng, vocab_size), int(rng.integers(2**32))
      if case.suffix_paths and member:
        drawn = found[-1].sampling, found[-1].seed
      found.append(
        Request(
          request_id=f"{group}/{member}",
          prompt=prompt,
          sampling=drawn[0],
          seed=drawn[1],
          group_id=f"group {group}" if case.group_size > 1 else "",
        )
      )
  return found


def draw_sampling(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
  """Returns sampling parameters, some with filters, a bias or a grammar."""
  max_tokens = int(rng.integers(1, MAX_ANSWER + 1))
  biases = rng.choice(vocab_size, 3, replace=False).tolist() if rng.random() < 0.3 else []
  allowed: tuple[tuple[int, int], ...] = ()
  if rng.random() < 0.25:
    lows = rng.integers(0, vocab_size, max_tokens).tolist()
    allowed = tuple((low, int(rng.integers(low + 1, vocab_size + 1))) for low in lows)
  is_filtered = rng.random() < 0.4
  # A separate generator, so that the other draws do not depend on it.
  own = rng.spawn(1)[0]
  penalties = {}
  if own.random() < 0.3:
    penalties = dict(
      presence_penalty=_pick(own, 0.0, 0.7, 2.0),
      frequency_penalty=_pick(own, 0.0, 0.3, -0.4),
      repetition_penalty=_pick(own, 1.0, 1.3, 0.8),
    )
  return SamplingParams(
    temperature=_pick(rng, 1.0, 1.0, 0.0, 0.6, 1.7),
    top_k=_pick(rng, 0, 1, 7) if is_filtered else 0,
    top_p=_pick(rng, 1.0, 0.9, 0.5) if is_filtered else 1.0,
    min_p=_pick(rng, 0.0, 0.05, 0.3) if is_filtered else 0.0,
    logit_bias=tuple((token, float(rng.uniform(-6, 6))) for token in biases),
    allowed_token_ranges=allowed,
    **penalties,
    max_tokens=max_tokens,
    stop_token_ids=(int(rng.integers(vocab_size)),) if rng.random() < 0.3 else (),
  )


def has_ties(model: Model) -> bool:
  """Returns whether the first two experts of each layer have equal scores in all rows."""
  return has_experts(model.config) and model.weights_seed % 3 == 0


@functools.lru_cache(maxsize=4)
def params_of(model: Model) -> parameters.Params:
  """Returns weights in the compute dtype, with an adapter with a nonzero B."""
  if model.directory:
    return loading.load_model(model.directory, model.numerics).params
  rng = np.random.default_rng(model.weights_seed)
  has_ones = model.config.norm_weights == "w"

  def leaf(path, shape):
    noise = model.deviation * rng.standard_normal(shape.shape)
    if path[-1].key.startswith("router") and has_ties(model):
      noise[..., 1] = noise[..., 0]
    return jnp.asarray((noise + (has_ones and "norm" in path[-1].key)).astype(np.float32))

  layout = parameters.shapes(model.config, model.numerics.reduction_shards)
  slabs = model.numerics.reduction_shards
  own = lambda tree: shared_heads.filled(tree, model.config, slabs)
  master = own(jax.tree_util.tree_map_with_path(leaf, layout))
  params = jax.tree.map(lambda leaf: leaf.astype(model.numerics.dtype), master)
  if not model.rank:
    return params
  shapes = lora.shapes(model.config, model.numerics, model.rank, model.targets)
  adapter = own(jax.tree_util.tree_map_with_path(leaf, shapes))
  return lora.attach(params, adapter, model.alpha / model.rank)


def runner_of(
  machine: Machine, kind: type[runner_lib.Runner] = runner_lib.Runner
) -> runner_lib.Runner:
  """Returns compiled programs that all engines of a machine share, whatever their weights."""
  return _runner_of(
    dataclasses.replace(
      machine, model=dataclasses.replace(machine.model, weights_seed=0, deviation=0.0)
    ),
    kind,
  )


@functools.lru_cache(maxsize=4)
def _runner_of(machine: Machine, kind: type[runner_lib.Runner]) -> runner_lib.Runner:
  instances, shards = machine.mesh
  mesh = parallel.make_mesh(data_parallel_size=instances, tensor_parallel_size=shards)
  model = machine.model
  return kind(
    decide(model.config, model.numerics), mesh, max_programs=len(machine.sizes.batch_size_buckets)
  )


def make_engine(
  machine: Machine,
  kind: type[runner_lib.Runner] = runner_lib.Runner,
  engine: type[engine_lib.Engine] = engine_lib.Engine,
  **others,
) -> engine_lib.Engine:
  """Returns an empty engine."""
  return engine(
    loading.Model(machine.model.config, params_of(machine.model), machine.model.numerics),
    config=machine.sizes,
    key=numerics_lib.key(11),
    runner=runner_of(machine, kind),
    **others,
  )


def plain_sizes(model: Model) -> EngineConfig:
  """Returns sizes of the reference engine: one request at a time, whole prompts in 64 rows."""
  page_size = min(model.numerics.kv_split, 16)
  return EngineConfig(
    page_size=page_size,
    num_pages=2 - MAX_TOKENS // -page_size,
    max_num_seqs=1,
    max_model_len=MAX_TOKENS,
    batch_size_buckets=(64,),
    enable_prefix_caching=False,
  )


@functools.lru_cache(maxsize=4)
def plain_engine(
  model: Model, kind: type[runner_lib.Runner] = runner_lib.Runner
) -> engine_lib.Engine:
  """Returns the reference engine, on one device."""
  return make_engine(Machine(model=model, sizes=plain_sizes(model), mesh=(1, 1)), kind)


@functools.lru_cache(maxsize=128)
def alone(
  model: Model, request: Request, kind: type[runner_lib.Runner] = runner_lib.Runner
) -> Completion:
  """Returns a request's completion from the reference engine."""
  return plain_engine(model, kind).generate([request])[0]
