"""Cases of `drawn_models` with requests that use adapters, and each reference completion.

A case has a base model and three to five adapters: two of one shape, the others with ranks from 1
to 16 and their own targets and scales. The reference runs a request alone in an engine
with `lora.attach` of its adapter, or with the plain base, on one device and 64 rows.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import drawn_models
from drawn_models import MAX_PROMPT, MAX_TOKENS, Case, Machine, Model
import jax
import jax.numpy as jnp
import model_cases
import numpy as np
from seen_inputs import SeesInputs
import tiny_model

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import engine as engine_lib, runner as runner_lib
from seerjax.kv import pages as pages_lib
from seerjax.models import adapters as adapters_lib, loading, lora, parameters
from seerjax.models.decoder import decide
from seerjax.types import Completion, Request

NAMES = ("poet", "judge", "clerk", "cook", "pilot")


def base_of(case: Case) -> Case:
  """Returns the case without the model-wide adapter, and with more concurrent requests.

  Every third model gets nine stacked layers, so that its program loops over them.
  """
  model, config = dataclasses.replace(case.model, rank=0), case.model.config
  if case.number // drawn_models.OF_A_MODEL % 3 == 2:
    config = config.changed(num_layers=parameters.UNROLLED_LAYERS + 1)
    model = dataclasses.replace(model, config=config)
  sizes = case.machine.sizes
  *_, last = sizes.batch_size_buckets
  sizes = dataclasses.replace(
    sizes,
    batch_size_buckets=(*sizes.batch_size_buckets[:-1], max(last, 8)),
    max_num_seqs=max(sizes.max_num_seqs, 4),
    num_pages=1 + 3 * -(-MAX_TOKENS // sizes.page_size),
  )
  machine = dataclasses.replace(case.machine, model=model, sizes=sizes)
  return dataclasses.replace(case, machine=machine, groups=4, group_size=3)


@functools.lru_cache(maxsize=8)
def named(model: Model, seed: int, generation: int) -> Mapping[str, adapters_lib.Scaled]:
  """Returns adapters by name; a later generation has other weights of the same shapes."""
  rng = np.random.default_rng((seed, 7))
  config = model.config
  smallest = min(
    config.hidden_size,
    config.layers[0].attention.num_heads * config.layers[0].attention.head_dim,
    config.layers[0].feed_forward.intermediate_size,
    16,
  )
  count = int(rng.integers(3, 6))
  shapes, scales = [], []
  for place in range(count):
    if place == 1:
      shapes.append(shapes[0])
    else:
      rank = 1 if rng.random() < 0.3 else int(rng.integers(1, smallest + 1))
      targets = tuple(name for name in lora.TARGETS if rng.random() < 0.6) or lora.TARGETS
      shapes.append((rank, targets))
    scales.append(float(rng.choice([0.25, 0.5, 1.0, 1.5, 3.0])))
  noise = np.random.default_rng((seed, 8, generation))

  def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.asarray((model.deviation * noise.standard_normal(shape.shape)).astype(np.float32))

  found = {}
  for name, (rank, targets), scale in zip(NAMES, shapes, scales, strict=False):
    layout = lora.shapes(config, model.numerics, rank, targets)
    found[name] = jax.tree.map(leaf, layout), scale + generation
  return found


def weights_of(model: Model, generation: int) -> Any:
  """Returns the base's weights; a later generation has others."""
  params = drawn_models.params_of(
    dataclasses.replace(model, weights_seed=model.weights_seed + generation)
  )
  is_deep = model.config.num_layers > parameters.UNROLLED_LAYERS
  return parameters.stacked(params) if is_deep else params


@functools.lru_cache(maxsize=2)
def _lone_runner(model: Model) -> runner_lib.Runner:
  mesh = parallel.make_mesh()
  return runner_lib.Runner(decide(model.config, model.numerics), mesh, max_programs=16)


@functools.lru_cache(maxsize=16)
def lone_engine(model: Model, seed: int, generation: int, adapter: str) -> engine_lib.Engine:
  """Returns the reference engine of one adapter; it holds no other adapter."""
  params = weights_of(model, generation)
  if adapter:
    params = lora.attach(params, *named(model, seed, generation)[adapter])
  return engine_lib.Engine(
    loading.Model(model.config, params, model.numerics),
    config=drawn_models.plain_sizes(model),
    key=numerics_lib.key(11),
    runner=_lone_runner(model),
  )


@functools.lru_cache(maxsize=256)
def alone(model: Model, seed: int, generation: int, request: Request) -> Completion:
  """Returns a request's completion from the reference engine of its adapter."""
  engine = lone_engine(model, seed, generation, request.adapter)
  return engine.generate([dataclasses.replace(request, adapter="")])[0]


class Counting(SeesInputs):
  """Counts the steps with rows of several adapters."""

  events: collections.Counter[str] = collections.Counter()

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    for rows, count in zip(inputs.adapters, inputs.batch.num_rows, strict=True):
      kinds = set(rows[:count].tolist())
      self.events["steps of several adapters"] += len(kinds - {0}) > 1
      self.events["steps of base and adapters"] += 0 in kinds and len(kinds) > 1
    return inputs


class Neighbours(Counting):
  """Twin: a row uses its neighbour's adapter."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    return inputs._replace(adapters=np.roll(inputs.adapters, 1, axis=1))


class Nameless(pages_lib.PagePool):
  """A page pool that ignores the adapter when it looks up a prefix."""

  def find(self, tokens, adapter=""):
    return super().find(tokens)

  def remember(self, tokens, pages, adapter=""):
    super().remember(tokens, pages)


class SharesPages(Counting):
  """Twin: pages are keyed without the adapter's name."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    pools = self.memory.pools
    pools[:] = [Nameless(pool.num_pages, pool.page_size) for pool in pools]


@functools.lru_cache(maxsize=4)
def _runner(machine: Machine) -> runner_lib.Runner:
  instances, shards = machine.mesh
  mesh = parallel.make_mesh(data_parallel_size=instances, tensor_parallel_size=shards)
  model = machine.model
  # Exactly one program per bucket: adapters that come and go compile no new one.
  return runner_lib.Runner(
    decide(model.config, model.numerics), mesh, len(machine.sizes.batch_size_buckets)
  )


class AdapterSchedule(model_cases.Schedule):
  """Runs a case with adapters from its first request to its last."""

  engine_kind: type[Counting] = Counting

  def drawn_requests(self) -> list[Request]:
    """Returns the requests; members of a group may use several adapters; many share a prompt."""
    rng = self.case.rng(4)
    names = ("", *named(self.case.model, self.case.seed, 0))
    shared = tuple(rng.integers(0, self.case.model.config.vocab_size, MAX_PROMPT).tolist())
    found = []
    for request in super().drawn_requests():
      if rng.random() < 0.6:
        length = int(rng.integers(MAX_PROMPT // 2, MAX_PROMPT + 1))
        request = dataclasses.replace(request, prompt=shared[:length])
      name = names[int(rng.integers(len(names)))]
      found.append(dataclasses.replace(request, adapter=name))
      self.events["of the base" if not name else "of an adapter"] += 1
    return found

  def alone(self, request: Request) -> Completion:
    return alone(self.case.model, self.case.seed, 0, request)

  def make_engine(self, **others: Any) -> engine_lib.Engine:
    machine = self.case.machine
    model = machine.model
    self.engine_kind.events = self.events
    return self.engine_kind(
      loading.Model(model.config, weights_of(model, 0), model.numerics),
      config=machine.sizes,
      key=numerics_lib.key(11),
      runner=_runner(machine),
      adapters=named(model, self.case.seed, 0),
      **others,
    )

  def run(self) -> dict[str, Completion]:
    """Runs the case, then swaps weights and adapters and repeats every request."""
    found = super().run()
    model, seed = self.case.model, self.case.seed
    self.engine.drafter = None
    self.engine.update_weights(weights_of(model, 1), 1)
    self.engine.set_adapters(named(model, seed, 1))
    again = self.engine.generate(list(self.requests.values()))
    for request, completion in zip(self.requests.values(), again, strict=True):
      wanted = alone(model, seed, 1, request)
      assert tiny_model.same(completion, wanted), (
        f"requests differ after a swap: {request}: got {completion}, expected {wanted}"
      )
      self.events["asked again after a swap"] += 1
    return found


class OfNeighbours(AdapterSchedule):
  """The schedule with `Neighbours`."""

  engine_kind = Neighbours


class OfSharedPages(AdapterSchedule):
  """The schedule with `SharesPages`."""

  engine_kind = SharesPages


def run_case(
  case: Case,
  events: collections.Counter[str],
  kind: type[AdapterSchedule] = AdapterSchedule,
) -> None:
  """Runs a case and compares every completion with its reference.

  Raises:
    AssertionError: if a bit differs, with the case and its adapters in notes.
  """
  case = base_of(case)
  try:
    model_cases.run_case(case, events, trains=False, schedule_kind=kind)
  except Exception as error:
    adapters = named(case.model, case.seed, 0)
    error.add_note(str({name: _described(*scaled) for name, scaled in adapters.items()}))
    raise
  adapters = named(case.model, case.seed, 0).values()
  ranks = [pair["a"].shape[-1] for one, _ in adapters for pair in one["layers"][0].values()]
  events["stacked layers"] += case.model.config.num_layers > parameters.UNROLLED_LAYERS
  events["of rank 1"] += ranks.count(1)
  events["of rank 5 and more"] += sum(rank >= 5 for rank in ranks)


def _described(adapter: lora.Adapter, scale: float) -> str:
  ranks = {target: pair["a"].shape[-1] for target, pair in adapter["layers"][0].items()}
  return f"{ranks} x {scale}"


def main(numbers: list[Any]) -> None:
  jax.config.update("jax_num_cpu_devices", 8)
  backend, *rest = numbers
  for seed, number in zip(rest[::2], rest[1::2], strict=True):
    counted: collections.Counter[str] = collections.Counter()
    case = drawn_models.implemented(drawn_models.draw(int(seed), int(number)), backend)
    print(case)
    run_case(case, counted)
    print(dict(counted), flush=True)


if __name__ == "__main__":
  import sys

  main(sys.argv[1:])
