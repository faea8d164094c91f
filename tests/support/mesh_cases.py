"""Drawn models, trainers over (instance, model) meshes, and batches to train on."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import functools
import hashlib
from typing import Any

import jax
import made_rollouts
import numpy as np
import trainers

from seerjax import layer_kinds, numerics as numerics_lib, parallel, types
from seerjax.layer_kinds import Gated, Grouped, LayerConfig
from seerjax.models import config as model_config, lora, parameters, shared_heads
from seerjax.models.decoder import decide
from seerjax.ops import rotary, sampling
from seerjax.trainer import losses, optimizer as optimizer_lib, packing, step

MESHES = ((8, 1), (4, 2), (2, 4), (1, 8), (1, 2), (1, 4))
NORMS = ("query_norm", "key_norm")
# Every gradient is clipped, so that a changed bit of the norm changes the weights.
OPTIMIZER = optimizer_lib.OptimizerConfig(
  learning_rate=1e-2, weight_decay=0.1, max_gradient_norm=1e-3
)


@dataclasses.dataclass(frozen=True)
class Case:
  """One model and how it is trained.

  Attributes:
    config: the model's shape.
    numerics: the trainer's numerics.
    rank: rank of the adapters; 0 trains all weights.
    num_groups: number of groups, of two responses each.
    rows: rows of a micro-batch.
    remat: rematerialisation policy of the gradient.
    seed: seed of weights and responses.
  """

  config: model_config.TransformerConfig
  numerics: numerics_lib.NumericsConfig
  rank: int = 0
  num_groups: int = 3
  rows: int = 32
  remat: Any = "none"
  seed: int = 0

  @property
  def layout(self) -> dict[str, Any]:
    return dict(
      decoder=decide(self.config, self.numerics),
      page_size=4,
      rows_per_micro_batch=self.rows,
      max_num_seqs=3,
      max_sequence_tokens=25,
    )


def draw(rng: np.random.Generator, backend: Any, *, max_layers: int = 2) -> Case:
  """Returns a small model with any number of slabs; few widths are whole vectors."""
  pick = lambda *choices: choices[int(rng.integers(len(choices)))]
  slabs = pick(2, 4, 8, 8)
  heads = pick(slabs, slabs, 2 * slabs, slabs // 2, slabs // 2, max(1, slabs // 8))
  numerics = numerics_lib.NumericsConfig(
    backend=backend,
    row_tile=pick(2, 4, 8, 16),
    query_tile=pick(1, 2, 4, 8),
    slot_tile=pick(1, 2, 4),
    kv_split=pick(4, 8, 16, 32),
    reduction_shards=slabs,
    compute_dtype=pick("float32", "float32", "bfloat16"),
  )
  head_dim = 2 * int(rng.integers(4 if backend == "tiled" else 1, 6))
  config = model_config.TransformerConfig(
    vocab_size=slabs * (1 + 2 * int(rng.integers(2, 5))),
    hidden_size=int(rng.integers(5, 41)),
    layers=layer_kinds.uniform(
      LayerConfig(
        attention=Grouped(
          num_heads=max(heads, slabs) * pick(1, 2, 3),
          num_kv_heads=heads,
          head_dim=head_dim,
          has_qk_norms=bool(rng.integers(2)),
          has_qkv_biases=bool(rng.integers(2)),
          rotary=rotary.RotaryConfig(head_dim=head_dim),
        ),
        feed_forward=Gated(intermediate_size=slabs * int(rng.integers(1, 8))),
      ),
      int(rng.integers(1, 1 + max_layers)),
    ),
    is_tied=bool(rng.integers(2)),
    max_model_len=64,
  )
  smallest = min(
    config.hidden_size,
    config.layers[0].attention.num_heads * head_dim,
    config.layers[0].feed_forward.intermediate_size,
  )
  return Case(
    config,
    numerics,
    rank=min(pick(0, 0, 1, 2, 3), smallest),
    num_groups=int(rng.integers(2, 7)),
    rows=pick(32, 48),
    remat=pick("none", "none", "layer"),
    seed=int(rng.integers(2**20)),
  )


def shares_heads(case: Case) -> bool:
  """Returns whether slabs share key/value heads."""
  return case.config.layers[0].attention.num_kv_heads < case.numerics.reduction_shards


def meshes_of(case: Case) -> list[tuple[int, int]]:
  """Returns (instance, model) of the meshes that divide the model's slabs evenly."""
  return [mesh for mesh in MESHES if case.numerics.reduction_shards % mesh[1] == 0]


@functools.lru_cache(maxsize=8)
def trainer_of(case: Case, mesh: tuple[int, int] = (1, 1)) -> step.Trainer:
  """Returns a trainer on a mesh (instance, model)."""
  devices = parallel.make_mesh(data_parallel_size=mesh[0], tensor_parallel_size=mesh[1])
  usual = dict(
    loss=losses.dapo(), optimizer=optimizer_lib.make_optimizer(OPTIMIZER), remat=case.remat
  )
  return trainers.make(mesh=devices, **usual, **case.layout)


@functools.lru_cache(maxsize=4)
def weights_of(case: Case) -> tuple[Any, parameters.Params]:
  """Returns (f32 masters of the trained weights, the weights used in the forward pass)."""
  rng = np.random.default_rng(case.seed)

  def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> Any:
    noise = 0.2 * rng.standard_normal(shape.shape)
    return np.asarray(noise + ("norm" in path[-1].key), np.float32)

  shapes = parameters.shapes(case.config, case.numerics.reduction_shards)
  own = lambda tree: shared_heads.filled(tree, case.config, case.numerics.reduction_shards)
  master = own(jax.tree_util.tree_map_with_path(leaf, shapes))
  params = parameters.compute_params(master, case.numerics)
  if not case.rank:
    return master, params
  shapes = lora.shapes(case.config, case.numerics, case.rank)
  adapter = own(jax.tree_util.tree_map_with_path(leaf, shapes))
  return adapter, lora.attach(params, adapter, 2.0)


@functools.lru_cache(maxsize=4)
def batch_of(case: Case) -> types.TrainBatch:
  """Returns responses of random tokens, some of them filtered or biased."""
  rng = np.random.default_rng((case.seed, 1))
  vocabulary = case.config.vocab_size
  kinds = (
    types.SamplingParams(),
    types.SamplingParams(temperature=0.7),
    types.SamplingParams(top_k=vocabulary - 1, logit_bias=((1, 0.5),)),
  )
  groups = []
  for index in range(case.num_groups):
    prompt = rng.integers(0, vocabulary, int(rng.integers(1, 5))).tolist()
    answers = [rng.integers(0, vocabulary, int(rng.integers(2, 15))).tolist() for _ in range(2)]
    kind = kinds[int(rng.integers(len(kinds)))]
    rollouts = [made_rollouts.rollout(prompt, answer, sampling=kind) for answer in answers]
    groups.append(made_rollouts.group(index, *rollouts))
  values = rng.standard_normal((case.num_groups, 2)).astype(np.float32)
  return packing.pack(groups, values, num_biases=sampling.MAX_LOGIT_BIAS, **case.layout)


class Learnt(dict[str, bytes]):
  """Scores, gradient and updated weights by leaf, for comparison as bytes."""

  def differing(self, other: Mapping[str, bytes]) -> list[str]:
    """Returns the leaves that differ in any bit."""
    assert self.keys() == other.keys()
    return [name for name, bits in self.items() if bits != other[name]]

  @property
  def digest(self) -> str:
    """Returns the SHA-256 of all leaves."""
    return hashlib.sha256(b"".join(self.values())).hexdigest()


def learn(case: Case, mesh: tuple[int, int] = (1, 1), *, updates: bool = True) -> Learnt:
  """Takes one optimiser step on a mesh."""
  trainer, batch = trainer_of(case, mesh), batch_of(case)
  master, params = weights_of(case)
  gradient, metrics, scores = trainer.gradient(params, batch, losses.denominators(batch), None)
  found = {"scores": scores, "loss": metrics["loss"], "gradient": gradient}
  if updates:
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
      state, norms = trainer.update(trainer.init(master), gradient)
    found |= {"weights": state.params, "moments": state.opt_state, "norms": norms}
    slabs = case.numerics.reduction_shards
    shared_heads.check(jax.device_get(state.params), case.config, slabs, what="after the step")
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(found))
  assert all(np.isfinite(leaf).all() for _, leaf in leaves)
  return Learnt({jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves})


def compare(case: Case, mesh: tuple[int, int], events: collections.Counter[str]) -> None:
  """Asserts that training on a mesh gives the bits of one device, and counts the comparisons."""
  found, expected = learn(case, mesh), learn(case)
  differing = found.differing(expected)
  assert not differing, f"mesh {mesh}: {len(differing)} of {len(found)} differ: {differing}; {case}"
  events["comparisons"] += len(found)
  events[f"model axis of {mesh[1]}"] += 1
  events["several instances"] += mesh[0] > 1
  events["one slab a device"] += mesh[1] == case.numerics.reduction_shards
  heads = case.config.layers[0].attention.num_kv_heads
  events["key heads shared by slabs"] += shares_heads(case)
  events["key heads shared by devices"] += heads < mesh[1]
  events["adapters"] += case.rank > 0
  events["all weights"] += case.rank == 0
  events["tied"] += case.config.is_tied
  events["computed again"] += case.remat == "layer"
  events[case.numerics.compute_dtype] += 1
  sampled = batch_of(case).sampling
  events["filtered rows"] += int(np.sum(np.asarray(sampled.top_k) > 0))
  events["several micro-batches"] += batch_of(case).targets.shape[0] > 1
