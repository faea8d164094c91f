"""Meshes, processes that share one, the fixed reduction tree, and placement of arrays.

The mesh has two axes. `instance` replicates the weights and splits the requests: each instance has
its own pages. `model` splits every slab dimension (`NumericsConfig.reduction_shards` logical slabs
over 1, 2, 4 or 8 devices); partial sums are added in one order, on whichever device, so the number
of devices changes no bit.

The devices of a mesh may belong to several processes, on one machine or on several: all run one
program together, a *slice* (`start`). Each process then runs the same lines on the same numbers;
values that only one process can know are broadcast by the first (`agreement`).
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import time
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from seerjax import fields
from seerjax.array_typing import Array, Shaped

MAX_INSTANCES = 1024  # Creating this many CPU devices takes a second; the time grows quadratically.
MODEL_SHARDS = (1, 2, 4, 8)  # Valid sizes of the model axis.
INSTANCE_AXIS = "instance"
MODEL_AXIS = "model"
PIECE_BYTES = 2**26  # Maximum bytes of a piece of weights in flight.
# Minimum bytes of an array that devices add in shares, since a second collective has a cost.
SHARED_OUT_BYTES = 2**18
# Whether XLA:CPU honours `lax.optimization_barrier`: that of JAX 0.10.2 drops barriers before it
# fuses, and rounds according to the fusion; that of 0.12 does not.
BARRIERS_HOLD = jax.__version_info__ >= (0, 12)
# Launchers that may provide a slice's processes, by JAX's names.
Launcher = Literal["", "slurm", "ompi", "k8s", "gcetpu", "gketpu"]
LAUNCHERS = ("", "slurm", "ompi", "k8s", "gcetpu", "gketpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceConfig:
  """Processes with devices of one mesh. None of it changes a bit.

  Attributes:
    num_processes: number of processes of the slice, always required; 1 is this process alone.
    process_id: index of this process, from 0, in the order of its devices.
    coordinator: "host:port" on which process 0 listens, reachable by all others.
    launcher: launcher that started the processes and provides the other two fields: "slurm", "ompi"
      (Open MPI's mpirun), "k8s" (an indexed Job or JobSet), "gcetpu" or "gketpu" (a TPU's
      metadata); "" if they are given here.
    start_seconds: how long processes wait for each other at the start.
    heartbeat_seconds: time without a heartbeat after which a process is considered dead, and the
      others end.
  """

  num_processes: int = 1
  process_id: int = 0
  coordinator: str = ""
  launcher: Launcher = ""
  start_seconds: int = 300
  heartbeat_seconds: int = 30

  def __post_init__(self):
    by_hand = "leave it empty and give num_processes, process_id and coordinator"
    fields.check(
      self,
      launcher=fields.one_of(LAUNCHERS, by_hand),
      start_seconds=fields.at_least(1, "leave it out"),
      heartbeat_seconds=fields.at_least(1, "leave it out"),
    )
    if self.num_processes < 1 or not 0 <= self.process_id < self.num_processes:
      raise ValueError(
        f"SliceConfig: got process_id={self.process_id} of num_processes={self.num_processes},"
        " expected 0 <= process_id < num_processes; number processes from 0."
      )
    host, _, port = self.coordinator.rpartition(":")
    is_address = bool(host) and port.isdigit() and 0 < int(port) < 2**16
    if not self.launcher and self.num_processes > 1 and not is_address:
      raise ValueError(
        f"SliceConfig.coordinator: got {self.coordinator!r}, expected 'host:port' of process 0,"
        f" reachable from all {self.num_processes} processes; use 127.0.0.1:9123 on one machine."
      )


def start(config: SliceConfig, *, num_devices: int) -> None:
  """Joins the slice's processes, before the first use of a device.

  Args:
    config: the processes.
    num_devices: devices of the whole mesh; on a CPU, virtual devices are created, an equal share in
      each process.

  Raises:
    ValueError: if the devices do not divide evenly, process 0 cannot listen at its address or is
      not there in time, or the launcher has started another number of processes.
  """
  count = config.num_processes
  if num_devices % count:
    raise ValueError(
      f"parallel.start: got {num_devices} devices (data_parallel_size x tensor_parallel_size) for"
      f" {count}"
      " processes, expected the same number for each; lower --num_processes, or raise"
      " --config.data_parallel_size."
    )
  if count > 1 and not config.launcher:
    _require_address(config)
  jax.config.update("jax_num_cpu_devices", num_devices // count)
  if count == 1:
    return
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # One program at a time on a CPU's devices: the collectives of two programs could get mixed up.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # JAX's service would intercept SIGTERM, with which we end a run after its step.
  jax.config.update("jax_enable_preemption_service", False)
  timeouts: dict[str, Any] = dict(
    initialization_timeout=config.start_seconds,
    heartbeat_timeout_seconds=config.heartbeat_seconds,
  )
  given: dict[str, Any] = dict(cluster_detection_method=config.launcher)
  if not config.launcher:
    given = dict(
      coordinator_address=config.coordinator,
      num_processes=config.num_processes,
      process_id=config.process_id,
      cluster_detection_method="deactivate",
    )
  jax.distributed.initialize(**given, **timeouts)
  if jax.process_count() != count:
    raise ValueError(
      f"parallel.start: got {jax.process_count()} processes from {config.launcher!r}, expected"
      f" num_processes={count}; pass the number of started processes."
    )


def _require_address(config: SliceConfig) -> None:
  """Refuses an unusable address, at which JAX would end the process without a message.

  Raises:
    ValueError: if process 0 cannot listen there, or does not in time.
  """
  host, _, port = config.coordinator.rpartition(":")
  if not config.process_id:
    with socket.socket() as own:
      own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        own.bind(("", int(port)))
      except OSError as error:
        raise ValueError(
          f"SliceConfig.coordinator: got {config.coordinator!r}, where process 0 cannot listen"
          f" ({error.strerror}), expected a free port on its machine; choose another."
        ) from error
    return
  until = time.monotonic() + config.start_seconds
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=config.start_seconds).close()
      return
    except OSError as error:
      if time.monotonic() > until:
        raise ValueError(
          f"SliceConfig.coordinator: got {config.coordinator!r}, where process {config.process_id}"
          f" of {config.num_processes} found nothing within {config.start_seconds} s ({error}),"
          " expected process 0 there; start all processes together, with the same address."
        ) from error
      time.sleep(0.2)


def spans_processes(mesh: jax.sharding.Mesh) -> bool:
  """Returns whether some devices of a mesh belong to another process."""
  return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def put(
  leaf: Any, sharding: jax.sharding.NamedSharding, *, piece_bytes: int = PIECE_BYTES
) -> Array:
  """Returns an array on a mesh.

  Args:
    leaf: array that every process has, and places its own part of; or an array that is sharded over
      more devices of the same mesh.
    sharding: target sharding.
    piece_bytes: maximum bytes per device that are gathered at once.
  """
  assert isinstance(sharding.mesh, jax.sharding.Mesh)  # Not an abstract mesh.
  before = leaf.sharding if isinstance(leaf, jax.Array) else None
  if isinstance(before, jax.sharding.NamedSharding) and before.mesh == sharding.mesh:
    if before.is_equivalent_to(sharding, leaf.ndim):
      return leaf
    old, new = (_names(leaf, place.spec) for place in (before, sharding))
    others = [axis for axis in range(leaf.ndim) if old[axis] != new[axis]]
    for axis in others:
      if old[axis][: len(new[axis])] != new[axis]:
        continue
      if len(others) == 1:
        return _widened(leaf, sharding, axis, piece_bytes)
      # One dimension at a time: the gathered array may then be sharded along another one.
      old[axis] = new[axis]
      place = jax.sharding.NamedSharding(sharding.mesh, jax.P(*(some or None for some in old)))
      leaf = _widened(leaf, place, axis, piece_bytes)
      return put(leaf, sharding, piece_bytes=piece_bytes)
  if not spans_processes(sharding.mesh):
    return jax.device_put(leaf, sharding)
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
  whole = np.asarray(leaf)
  return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _names(leaf: Array, spec: jax.P) -> list[tuple[str, ...]]:
  """Returns the mesh axes that shard each dimension of an array, outermost first."""
  entries = (*spec, *(None,) * (leaf.ndim - len(spec)))
  return [names_of(entry) for entry in entries]


def names_of(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes in one entry of a `jax.P`, outermost first."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _widened(
  leaf: Array, sharding: jax.sharding.NamedSharding, axis: int, piece_bytes: int
) -> Array:
  """Returns an array with dimension `axis` sharded over fewer devices, gathered in pieces."""
  mesh, before = sharding.mesh, leaf.sharding
  assert isinstance(before, jax.sharding.NamedSharding)
  names = _names(leaf, before.spec)[axis][len(_names(leaf, sharding.spec)[axis]) :]
  count = int(np.prod([mesh.shape[name] for name in names]))
  shard = before.shard_shape(leaf.shape)
  bytes_of_row = int(np.prod(shard)) // shard[axis] * count * leaf.dtype.itemsize
  length = min(shard[axis], max(1, piece_bytes // max(bytes_of_row, 1)))
  whole = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
  for start in range(0, shard[axis], length):
    # The last piece overlaps the previous one.
    first = jnp.int32(min(start, shard[axis] - length))
    whole = _with_piece(whole, leaf, first, before, sharding, axis, names, length)
  return jax.block_until_ready(whole)  # Gathers of two arrays must not be in flight together.


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), donate_argnums=(0,))
def _with_piece(
  whole: Array,
  parts: Array,
  start: Array,
  before: jax.sharding.NamedSharding,
  after: jax.sharding.NamedSharding,
  axis: int,
  names: tuple[str, ...],
  length: int,
) -> Array:
  """Returns `whole` with rows `start` to `start + length` of each device's part of `parts`."""

  def local(whole: Array, part: Array, start: Array) -> Array:
    piece = lax.dynamic_slice_in_dim(part, start, length, axis)
    piece = lax.all_gather(piece, names, axis=axis)
    by_part = whole.reshape(*part.shape[:axis], -1, *part.shape[axis:])
    starts = [start if place == axis + 1 else jnp.int32(0) for place in range(by_part.ndim)]
    return lax.dynamic_update_slice(by_part, piece, starts).reshape(whole.shape)

  specs = (after.spec, before.spec, jax.P())
  spread = jax.shard_map(
    local, mesh=after.mesh, in_specs=specs, out_specs=after.spec, check_vma=False
  )
  return spread(whole, parts, start)


def bytes_a_device(tree: Any) -> int:
  """Returns the bytes per device of a pytree's arrays, or of shapes with shardings."""

  def one(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape)) * leaf.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def on_host(tree: Any) -> Any:
  """Returns a pytree's arrays in host memory, in every process of the slice that calls this."""

  def one(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
      everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.P())
      leaf = put(leaf, everywhere).addressable_data(0)
    return np.asarray(leaf)

  return jax.tree.map(one, tree)


def spec_of_results(mesh: jax.sharding.Mesh) -> jax.P:
  """Returns the spec of program results that the host reads; see `to_all_processes`."""
  return jax.P() if spans_processes(mesh) else jax.P(INSTANCE_AXIS)


def to_all_processes(results: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns this instance's f[1, ...] as all instances' f[i, ...] if a mesh spans processes.

  Call it within `shard_map`; all leaves go in one collective.
  """
  return gather_slabs(results, INSTANCE_AXIS) if spans_processes(mesh) else results


def make_mesh(
  *, data_parallel_size: int = 1, tensor_parallel_size: int = 1, first: int = 0
) -> jax.sharding.Mesh:
  """Returns the mesh of `data_parallel_size * tensor_parallel_size` devices from `first` on.

  Instances are outermost.

  Raises:
    ValueError: if there are too few devices, or a size is less than one.
  """
  if data_parallel_size < 1 or tensor_parallel_size < 1 or first < 0:
    raise ValueError(
      f"make_mesh: got data_parallel_size={data_parallel_size},"
      f" tensor_parallel_size={tensor_parallel_size}, first={first},"
      " expected at least 1, 1 and 0; one device is data_parallel_size=1, tensor_parallel_size=1."
    )
  needed = data_parallel_size * tensor_parallel_size
  devices = jax.devices()[first:]
  if needed > len(devices):
    raise ValueError(
      f"make_mesh: got data_parallel_size={data_parallel_size} x"
      f" tensor_parallel_size={tensor_parallel_size} = {needed}"
      f" devices, expected at most {len(devices)}, the available devices; lower either, or on CPU"
      " start with jax.config.update('jax_num_cpu_devices', n)."
    )
  grid = np.asarray(devices[:needed]).reshape(data_parallel_size, tensor_parallel_size)
  return jax.sharding.Mesh(grid, (INSTANCE_AXIS, MODEL_AXIS))


def require_sizes(
  data_parallel_size: int, tensor_parallel_size: int, reduction_shards: int, *, what: str
) -> None:
  """Refuses invalid sizes of a mesh, independent of the available devices.

  Args:
    data_parallel_size: number of replicas of the model.
    tensor_parallel_size: devices per replica.
    reduction_shards: slabs that these devices share; 0 if the model decides.
    what: prefix of the field's name in a message.

  Raises:
    ValueError: naming the field.
  """
  if not 1 <= data_parallel_size <= MAX_INSTANCES:
    bound, fix = (
      ("at least 1", "raise")
      if data_parallel_size < 1
      else (f"at most {MAX_INSTANCES} (one per device)", "lower")
    )
    raise ValueError(
      f"{what}data_parallel_size: got {data_parallel_size}, expected {bound}; {fix} it."
    )
  if tensor_parallel_size not in MODEL_SHARDS:
    raise ValueError(
      f"{what}tensor_parallel_size: got {tensor_parallel_size}, expected one of {MODEL_SHARDS}; 1"
      " is usual if the"
      " model fits one device."
    )
  if reduction_shards and tensor_parallel_size > reduction_shards:
    raise ValueError(
      f"{what}tensor_parallel_size: got {tensor_parallel_size}, expected at most"
      f" NumericsConfig.reduction_shards={reduction_shards} (a device has at least one slab); lower"
      " it."
    )


def local_slabs(reduction_shards: int, tensor_parallel_size: int) -> int:
  """Returns how many logical slabs one device of the model axis holds.

  Raises:
    ValueError: if the devices do not divide the slabs.
  """
  if reduction_shards % tensor_parallel_size:
    raise ValueError(
      f"model axis: got {tensor_parallel_size} devices, expected a divisor of"
      f" reduction_shards={reduction_shards}; use fewer devices on the model axis."
    )
  return reduction_shards // tensor_parallel_size


def rounded(tree: Any) -> Any:
  """Returns a pytree's arrays rounded by themselves, independent of the ops that read them.

  Otherwise, depending on the shape of an array, a compiler may fuse a product with the sum that
  uses it into one operation.
  """
  return lax.optimization_barrier(tree) if BARRIERS_HOLD else jax.tree.map(_apart, tree)


def _as_its_bits(x: Array) -> Array:
  """Returns f32 values via their bits, so that no product is fused with a sum."""
  if x.dtype != jnp.float32:
    return x
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  # The low bits of a square are 000, 001 or 100, never 101. No known compiler sees that.
  square = bits * bits
  none = (square >> 2) & square & jnp.uint32(1)
  return lax.bitcast_convert_type(bits ^ none, jnp.float32)


@jax.custom_vjp
def _apart(x: Array) -> Array:
  return _as_its_bits(x)


_apart.defvjp(lambda x: (_as_its_bits(x), None), lambda _, cotangent: (_as_its_bits(cotangent),))


def after(tree: Any, anchor: Any) -> Any:
  """Returns a pytree's values, which become available only after all leaves of `anchor` (floats).

  It orders collectives. On a CPU, all gathers of a program share one name (their channel is always
  1): of two independent gathers, one device's first could be matched with another device's second.
  """
  late = jnp.int32(0)
  for leaf in jax.tree.leaves(anchor):
    if leaf.size:
      first = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(())
      late = late | lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
  # Never negative, which XLA does not know: 0 for any value, NaN included.
  is_there = jnp.minimum(late & jnp.int32(0x7FFFFFFF), 0) == 0
  # Barriers on both sides, so that values are rounded as they are without this function.
  tree = lax.optimization_barrier(tree)
  tree = jax.tree.map(lambda leaf: jnp.where(is_there, leaf, jnp.zeros((), leaf.dtype)), tree)
  return lax.optimization_barrier(tree)


def gather_slabs(slabs: Any, axis: str | None) -> Any:
  """Returns all slabs in order, `[r, ...]` to `[r * devices, ...]`; the identity on one device.

  All leaves of a pytree go in one collective: independent collectives would be in flight together.
  The gradient is sliced to this device's slabs: every device has equal cotangents of all slabs, and
  adding them would count each of them once per device.
  """
  leaves, structure = jax.tree.flatten(slabs)
  if not leaves:
    return slabs
  return structure.unflatten(_held(leaves) if axis is None else _gathered(axis, leaves))


def gather_kept(slabs: Any, axis: str | None) -> Any:
  """Works like `gather_slabs`, for values that a gradient needs: cotangents wait for the gather."""
  leaves, structure = jax.tree.flatten(slabs)
  return structure.unflatten(_held(leaves) if axis is None else _gathered_first(axis, leaves))


def held(x: Array) -> Array:
  """Returns x; its cotangent has a barrier, so that its producer is not fused with its readers."""
  return _held([x])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axis: str, leaves: list[Array]) -> list[Array]:
  if len(leaves) == 1:
    return [lax.all_gather(leaves[0], axis, axis=0, tiled=True)]
  assert len({leaf.shape[0] for leaf in leaves}) == 1, "slabs of several numbers in one gathering"
  is_alike = len({leaf.dtype for leaf in leaves}) == 1
  dtype = leaves[0].dtype if is_alike else jnp.uint16  # All our dtypes are multiples of 16 bits.
  words = [_words_of(leaf, dtype) for leaf in leaves]
  whole = lax.all_gather(jnp.concatenate(words, axis=1), axis, axis=0, tiled=True)
  found, first = [], 0
  for leaf, word in zip(leaves, words, strict=True):
    part = whole[:, first : first + word.shape[1]]
    first += word.shape[1]
    found.append(_from_words(part, (whole.shape[0], *leaf.shape[1:]), leaf.dtype))
  return found


def _words_of(leaf: Array, dtype: Any) -> Array:
  """Returns the bits of `[r, ...]` as `[r, w]` of a dtype that is not wider."""
  return lax.bitcast_convert_type(leaf, dtype).reshape(leaf.shape[0], -1)


def _from_words(words: Array, shape: tuple[int, ...], dtype: Any) -> Array:
  """Inverts `_words_of`."""
  size = jnp.dtype(dtype).itemsize // words.dtype.itemsize
  return lax.bitcast_convert_type(words.reshape(*shape, *((size,) if size > 1 else ())), dtype)


def _gathered_backward(axis: str, _: None, cotangents: list[Array]) -> tuple[list[Any]]:
  has_none = lambda leaf: leaf.dtype == jax.dtypes.float0
  return ([None if has_none(leaf) else _own_cotangent(axis, leaf) for leaf in cotangents],)


@jax.custom_vjp
def _held(leaves: list[Array]) -> list[Array]:
  """Returns the leaves; their cotangents have a barrier, like a gather's, and are rounded alike."""
  return leaves


def _held_backward(_: None, cotangents: list[Array]) -> tuple[list[Any]]:
  has_none = lambda leaf: leaf.dtype == jax.dtypes.float0
  return ([None if has_none(leaf) else lax.optimization_barrier(leaf) for leaf in cotangents],)


_held.defvjp(lambda leaves: (leaves, None), _held_backward)


def _own_cotangent(axis: str, whole: Array) -> Array:
  """Returns this device's slabs of cotangents that every device has."""
  # Without the barrier, the slice would be fused with the cotangent's producer.
  whole = lax.optimization_barrier(whole)
  size = whole.shape[0] // lax.axis_size(axis)
  return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * jnp.int32(size), size, 0)


_gathered.defvjp(lambda axis, leaves: (_gathered(axis, leaves), None), _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_first(axis: str, leaves: list[Array]) -> list[Array]:
  return _gathered(axis, leaves)


def _gathered_first_forward(axis: str, leaves: list[Array]) -> tuple[list[Array], Array]:
  found = _gathered(axis, leaves)
  return found, found[0]


def _gathered_first_backward(axis: str, found: Array, cotangents: list[Array]) -> Any:
  return ([_own_cotangent(axis, leaf) for leaf in after(cotangents, found)],)


_gathered_first.defvjp(_gathered_first_forward, _gathered_first_backward)


def tree_sum(slabs: Shaped[Array, "r ..."]) -> Shaped[Array, "..."]:
  """Adds a power of two of slabs as one balanced binary tree: ((0+1)+(2+3))+((4+5)+(6+7))."""
  return _tree_sum(slabs.shape[0], slabs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tree_sum(count: int, slabs: Array) -> Array:
  while slabs.shape[0] > 1:
    slabs = slabs[0::2] + slabs[1::2]
  return slabs[0]


# Every slab gets the cotangent itself; the transposed tree would add zeros to it.
_tree_sum.defvjp(
  lambda count, slabs: (_tree_sum(count, slabs), None),
  lambda count, _, cotangent: (jnp.broadcast_to(cotangent[None], (count, *cotangent.shape)),),
)


def sum_slabs(slabs: Any, axis: str | None) -> Any:
  """Returns the sums of all slabs of all devices, as `tree_sum` adds them in float32.

  The slabs of a device are a branch of the tree: the device adds them first, and one partial per
  device is gathered. For a large array, each device adds only a share of the elements, and the
  shares are gathered: with eight devices, that is a quarter of the traffic and an eighth of the
  additions. Every element is added in the same order either way.

  Args:
    slabs: pytree of `[r, ...]`, the slabs of this device.
    axis: mesh axis of the slabs, None on one device.

  Returns:
    Pytree of f32[...].
  """
  leaves, structure = jax.tree.flatten(slabs)
  if not leaves:
    return slabs
  if not BARRIERS_HOLD:
    # The whole tree on every device: ops that read a sum are fused with equal additions on any
    # mesh.
    whole = [leaf.astype(jnp.float32) for leaf in gather_slabs(leaves, axis)]
    return structure.unflatten([tree_sum(leaf) for leaf in whole])
  counts = tuple(leaf.shape[0] for leaf in leaves)
  leaves = [leaf.astype(jnp.float32) for leaf in leaves]
  return structure.unflatten(_sum_slabs(axis, counts, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_slabs(axis: str | None, counts: tuple[int, ...], leaves: list[Array]) -> list[Array]:
  own = [_tree_sum(count, leaf) for count, leaf in zip(counts, leaves, strict=True)]
  if axis is None:
    return own
  devices, size = lax.axis_size(axis), own[0].size
  if len(own) == 1 and size % devices == 0 and size * own[0].dtype.itemsize >= SHARED_OUT_BYTES:
    shares = own[0].reshape(devices, -1)
    shares = lax.all_to_all(shares, axis, split_axis=0, concat_axis=0, tiled=True)
    share = lax.all_gather(_tree_sum(devices, shares), axis, tiled=True)
    return [share.reshape(own[0].shape)]
  whole = _gathered(axis, [part[None] for part in own])
  return [_tree_sum(devices, part) for part in whole]


def _sum_slabs_backward(
  axis: str | None, counts: tuple[int, ...], _: None, cotangents: list[Array]
) -> tuple[list[Array]]:
  # Every slab gets the sum's cotangent, with a barrier like a gather's.
  spread = [
    jnp.broadcast_to(leaf[None], (count, *leaf.shape))
    for count, leaf in zip(counts, cotangents, strict=True)
  ]
  return (lax.optimization_barrier(spread),)


_sum_slabs.defvjp(
  lambda axis, counts, leaves: (_sum_slabs(axis, counts, leaves), None), _sum_slabs_backward
)


def tree_sum_list(values: list[Array]) -> Array:
  """Works like `tree_sum`, for any number of arrays: an odd one waits for the next round."""
  while len(values) > 1:
    paired = [a + b for a, b in zip(values[0::2], values[1::2], strict=False)]
    values = paired + values[len(paired) * 2 :]
  return values[0]
