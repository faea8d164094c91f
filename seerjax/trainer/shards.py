"""Sharding of training state on a mesh: f32 masters, moments and sums of gradients.

    slab      f32[r, a, b]   r over `model`, the larger of a and b over `instance`
    no slab   f32[a, b]      the larger of a and b over both, `model` first

The embedding does not count as a slab here, although its rows are sharded over `model`: the
vocabulary is its larger dimension.

A dimension that is not divisible by the number of devices is replicated. Each device updates its
part of an array element by element; only norms need all parts. A norm is summed by a tree that
depends only on shapes, so the mesh does not affect its bits:

    squares -> halves added along all but the larger dimension -> f32[r, a] of each array
      one collective -> halves added along a: f32 of each (array, slab) -> halves of these added
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import optax

from seerjax import parallel
from seerjax.array_typing import Array
from seerjax.models import parameters

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
INSTANCE, MODEL = parallel.INSTANCE_AXIS, parallel.MODEL_AXIS
# Primitives that operate on each element independently.
ELEMENTWISE = frozenset((
  "abs", "add", "and", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf",
  "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
  "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "rsqrt", "select_n", "sign",
  "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
PRODUCTS = ("mul", "div", "square", "integer_pow")
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat")


def specs(params: Any, mesh: Mesh) -> Any:
  """Returns the specs of the masters of weights or adapters, with layers listed or stacked."""
  of_layers = 1 if parameters.is_stacked(params) else 0

  def spec(path: Any, leaf: Any, is_slab: bool) -> jax.P:
    first = of_layers if path[0].key == "layers" else 0
    return _spec(leaf.shape, first, is_slab, mesh)

  return jax.tree_util.tree_map_with_path(spec, params, parameters.have_slabs(params))


def whole(params: Any) -> Any:
  """Returns specs that replicate everything on every device."""
  return jax.tree.map(lambda _: jax.P(), params)


def _spec(shape: tuple[int, ...], first: int, is_slab: bool, mesh: Mesh) -> jax.P:
  """Returns the spec of one array; dimensions before `first` are never sharded."""
  entries: list[Any] = [None] * len(shape)
  names = (MODEL, INSTANCE)
  if is_slab:
    entries[first], names, first = MODEL, (INSTANCE,), first + 1
  split = _larger(shape, first)
  if split is not None:
    for some in (names, *((name,) for name in names)):
      if shape[split] % math.prod(mesh.shape[name] for name in some) == 0:
        entries[split] = some if len(some) > 1 else some[0]
        break
  return jax.P(*entries)


def _larger(shape: tuple[int, ...], first: int) -> int | None:
  """Returns the largest dimension from `first` on (ties: the first); None for a scalar."""
  axes = range(first, len(shape))
  return max(axes, key=lambda axis: shape[axis], default=None)


def of_optimizer(optimizer: optax.GradientTransformation, state: Any, of_params: Any) -> Any:
  """Returns the specs of an optimiser state; arrays shaped like masters are sharded like them.

  Args:
    optimizer: an optax chain.
    state: result of `optimizer.init`, or its shapes.
    of_params: result of `specs`.
  """
  return optax.tree.map_params(
    optimizer, lambda _, spec: spec, state, of_params, transform_non_params=lambda _: jax.P()
  )


def bytes_of(tree: Any, of_tree: Any, mesh: Mesh) -> int:
  """Returns the bytes of a tree on one device.

  Args:
    tree: arrays or their shapes.
    of_tree: the spec of each, `jax.P`.
    mesh: mesh of the specs.
  """
  place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
  sizes = jax.tree.map(
    lambda leaf, spec: math.prod(place(spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize,
    tree,
    of_tree,
  )
  return sum(jax.tree.leaves(sizes))


# The norm of sharded arrays.


def norm(
  tree: Any,
  of_tree: Any = None,
  mesh: Mesh | None = None,
  *,
  behind: Array | None = None,
) -> Array:
  """Returns the norm of all elements, f32[], with equal bits on any mesh (see the module).

  Args:
    tree: f32 arrays shaped like masters, layers listed; with a mesh, this device's parts of them,
      within `shard_map`.
    of_tree: the spec of each, from `specs`; None if they are whole.
    mesh: mesh of the specs.
    behind: value that the collective must wait for if another collective may be in flight.
  """
  slabs = jax.tree.leaves(parameters.have_slabs(tree))
  leaves = jax.tree.leaves(tree)
  places = [()] * len(leaves) if of_tree is None else jax.tree.leaves(of_tree, is_leaf=is_spec)
  rows = []
  for leaf, is_slab, place in zip(leaves, slabs, places, strict=True):
    names = [parallel.names_of(entry) for entry in (*place, *(None,) * (leaf.ndim - len(place)))]
    counts = [math.prod(mesh.shape[name] for name in some) if mesh else 1 for some in names]
    shape = [size * count for size, count in zip(leaf.shape, counts, strict=True)]
    of_slabs = 1 if is_slab else 0
    split = _larger(tuple(shape), of_slabs)
    kept = [axis for axis in (0 if of_slabs else None, split) if axis is not None]
    squares = parallel.rounded(lax.square(leaf))  # Otherwise rounded together with the sum.
    for axis in reversed([axis for axis in range(leaf.ndim) if axis not in kept]):
      squares = _folded(squares, axis)
    sizes = [1] * (2 - len(kept)) + [shape[axis] for axis in kept]
    squares = squares.reshape([1] * (2 - len(kept)) + [leaf.shape[axis] for axis in kept])
    if mesh is not None:
      shared = [()] * (2 - len(kept)) + [names[axis] for axis in kept]
      squares = _among_zeros(squares, sizes, shared, mesh)
    rows.append(squares)
  if mesh is not None:
    rows = _of_all(rows, behind)
  return lax.sqrt(_folded(jnp.concatenate([_folded(one, 1) for one in rows]), 0))


def is_spec(value: Any) -> bool:
  """Whether a pytree node is a partition spec (treated as a leaf)."""
  return isinstance(value, jax.P)


def _folded(x: Array, axis: int) -> Array:
  """Sums one dimension by halves: a binary tree, independent of the other dimensions."""
  while (size := x.shape[axis]) > 1:
    half = (size + 1) // 2
    low = lax.slice_in_dim(x, 0, half, axis=axis)
    high = lax.slice_in_dim(x, half, size, axis=axis)
    missing = [(0, 2 * half - size if place == axis else 0, 0) for place in range(x.ndim)]
    x = low + lax.pad(high, jnp.zeros((), x.dtype), missing)
  return lax.squeeze(x, (axis,))


def _among_zeros(part: Array, sizes: list[int], shared: list[tuple[str, ...]], mesh: Mesh) -> Array:
  """Places this device's part into zeros f32[r, a]; of replicated parts only the first counts."""
  starts, is_first = [], jnp.bool_(True)
  for size, names in zip(part.shape, shared, strict=True):
    index = jnp.int32(0)
    for name in names:
      index = index * mesh.shape[name] + lax.axis_index(name)
    starts.append(index * size)
  for name in set(mesh.axis_names) - {name for names in shared for name in names}:
    is_first &= lax.axis_index(name) == 0
  part = jnp.where(is_first, part, jnp.zeros_like(part))
  return lax.dynamic_update_slice(jnp.zeros(sizes, part.dtype), part, starts)


def _of_all(rows: list[Array], behind: Array | None) -> list[Array]:
  """Combines f32[r, a] of all devices; summed as integers, which keeps every bit in any order."""
  flat = jnp.concatenate([one.reshape(-1) for one in rows])
  if behind is not None:
    flat = parallel.after(flat, behind)
  words = lax.psum(lax.bitcast_convert_type(flat, jnp.uint32), (INSTANCE, MODEL))
  flat, found, first = lax.bitcast_convert_type(words, jnp.float32), [], 0
  for one in rows:
    found.append(flat[first : first + one.size].reshape(one.shape))
    first += one.size
  return found


# Sharded optimisers: equal bits to whole arrays, where the optimiser permits.


def rounded_apart(function: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a function so that each product and quotient is rounded separately.

  A compiler may fuse a product with the sum that uses it, and choose which of two products to fuse
  by array shape, which differs between meshes.
  """

  def run(*args: Any) -> Any:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    found = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)

  return run


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

  def read(of: Any) -> Any:
    return of.val if isinstance(of, core.Literal) else values[of]

  for equation in jaxpr.eqns:
    primitive, inputs = equation.primitive, list(map(read, equation.invars))
    if primitive.name in CALLS and (inner := _inner(equation)) is not None:
      found = _run(inner.jaxpr, inner.consts, inputs)
    else:
      found = primitive.bind(*inputs, **equation.params)
      found = list(found) if primitive.multiple_results else [found]
    if primitive.name in PRODUCTS:
      found = parallel.rounded(found)
    values.update(zip(equation.outvars, found, strict=True))
  return list(map(read, jaxpr.outvars))


def _inner(equation: Any) -> Any:
  """Returns the closed jaxpr that an equation calls; None if it calls none."""
  found = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
  return found if hasattr(found, "consts") else None


def is_elementwise(optimizer: optax.GradientTransformationExtraArgs, params: Any) -> bool:
  """Whether an optimiser's update is elementwise and independent of array shapes.

  Args:
    optimizer: optimiser that accepts `gradient_norm`.
    params: shapes of the trained weights.
  """
  doubled = jax.tree.map(lambda x: jax.ShapeDtypeStruct([2 * n for n in x.shape], x.dtype), params)
  steps = [_steps_of(optimizer, shapes) for shapes in (params, doubled)]
  return None not in steps and steps[0] == steps[1]


def _steps_of(optimizer: optax.GradientTransformationExtraArgs, params: Any) -> list[Any] | None:
  """Returns the operations of an update, with constants; None if it is not elementwise."""
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
  state = jax.eval_shape(optimizer.init, params)

  def update(gradient: Any, state: Any, params: Any) -> Any:
    return optimizer.update(gradient, state, params, gradient_norm=jnp.float32(1))

  try:
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
      return list(_steps(jax.make_jaxpr(update)(params, state, params).jaxpr))
  except _NotElementwise:
    return None


class _NotElementwise(Exception):
  pass


def _steps(jaxpr: Any) -> Any:
  for equation in jaxpr.eqns:
    name, values = equation.primitive.name, (*equation.invars, *equation.outvars)
    if name in CALLS and (inner := _inner(equation)) is not None:
      yield from _steps(inner.jaxpr)
      continue
    shapes = {value.aval.shape for value in values} - {()}
    is_filled = name == "broadcast_in_dim" and not equation.invars[0].aval.shape
    if shapes and not is_filled and (name not in ELEMENTWISE or len(shapes) > 1):
      raise _NotElementwise
    yield name, [str(value.val) for value in equation.invars if hasattr(value, "val")]
