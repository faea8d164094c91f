"""Named adapters for one set of base weights; each row of a batch uses one of them or none.

    named   = {"poet": (adapter, scale), ...}            from `peft.load` or training
    chosen  = stacked(named, params, pads=...)           once
    forward({**params, "adapters": chosen.forms}, batch, pages, adapters=rows, ...)

`lora.attach`, one adapter for all rows, is the reference: a row has the same bits here. Adapters of
one shape are stacked, so that a program does not depend on which of them are used, and replacing
adapters by others of the same shapes needs no new program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import fields, numerics as numerics_lib, parallel
from seerjax.array_typing import Array
from seerjax.backends.adapters import Form, RowAdapters
from seerjax.backends.protocol import Backend
from seerjax.models import lora, parameters
from seerjax.models.parameters import Params
from seerjax.ops import tiles

# An adapter's f32 masters, and the scale of its low-rank term.
Scaled = tuple[lora.Adapter, float]


class Chosen(NamedTuple):
  """Stacked adapters from which rows choose.

  Attributes:
    forms: stacked adapters, in the base weights' dtype.
    index_of: adapter index by name; "" is 0, the base weights.
  """

  forms: tuple[Form, ...]
  index_of: Mapping[str, int]


NONE = Chosen((), {"": 0})


def check(params: Params, named: Mapping[str, Any], *, what: str) -> None:
  """Refuses adapters that do not fit these weights.

  Args:
    params: base weights without an attached adapter.
    named: `Scaled` by name.
    what: the argument, for the message.

  Raises:
    ValueError: naming the adapter.
  """
  if any(name.endswith("_lora") for layer in _layers(params) for name in layer):
    raise ValueError(
      f"{what}: got named adapters for weights that already contain one, expected weights of the"
      " base alone; use the weights from before lora.attach."
    )
  for name, scaled in named.items():
    own = f"{what}[{name!r}]"
    if not name:
      raise ValueError(
        f"{own}: got an empty name, expected at least one character, because '' is the base; rename"
        " it."
      )
    if not isinstance(scaled, tuple) or len(scaled) != 2:
      raise ValueError(
        f"{own}: got {type(scaled).__name__}, expected (adapter, scale); pass the result of"
        " peft.load."
      )
    adapter, scale = scaled
    if not isinstance(adapter, dict) or not isinstance(adapter.get("layers"), list):
      raise ValueError(
        f"{own}: got {type(adapter).__name__}, expected {{'layers': [...]}} with one dict per"
        " layer; pass the result of lora.init or peft.load."
      )
    for index, layer in enumerate(adapter["layers"]):
      _check_layer(f"{own}: layers[{index}]", layer)
    _check_targets(own, params, adapter["layers"])
    try:
      lora.check(params, adapter, scale)
      numerics_lib.require_finite(
        adapter, what="adapter", remedy="they cannot be sampled from: save the adapter again"
      )
    except ValueError as error:
      raise ValueError(f"{own}: {error}") from error


def _check_targets(what: str, params: Params, layers: list[Any]) -> None:
  """Refuses targets that a model does not have, or that only some of its layers adapt.

  Raises:
    ValueError: with `what` as its prefix.
  """
  found = {target for layer in layers for target in layer}
  unknown, own = sorted(found - set(lora.ALL_TARGETS)), _layers(params)
  wanted = [found & set(own[index % len(own)]) for index in range(len(layers))]
  if unknown or not found or any(map(lambda names, layer: names - set(layer), wanted, layers)):
    got = f"the unknown targets {unknown}" if unknown else "none, or different ones per layer"
    raise ValueError(
      f"{what}: got {got}, expected some of {lora.ALL_TARGETS}, the same in every layer that has"
      " them; adapt only these."
    )


def _check_layer(what: str, layer: Any) -> None:
  """Refuses a layer that is not a dict of pairs of float matrices.

  Raises:
    ValueError: with `what` as its prefix.
  """
  if not isinstance(layer, dict):
    raise ValueError(
      f"{what}: got {fields.shown(layer)}, expected a dict by target; pass the result of peft.load."
    )
  for target, pair in layer.items():
    own = f"{what}[{target!r}]"
    if not isinstance(pair, dict) or set(pair) != {"a", "b"}:
      raise ValueError(
        f"{own}: got {fields.shown(pair)}, expected {{'a': ..., 'b': ...}}; save it again."
      )
    for name, leaf in pair.items():
      is_array = isinstance(leaf, np.ndarray | jax.Array)
      if not is_array or not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.ndim not in (2, 3, 4):
        got = f"{leaf.dtype}{list(leaf.shape)}" if is_array else fields.shown(leaf)
        raise ValueError(
          f"{own}[{name!r}]: got {got}, expected float32 with 2 to 4 axes; convert it, or pass the"
          " result of peft.load."
        )


def stacked(params: Params, named: Mapping[str, Scaled], *, pads: bool) -> Chosen:
  """Returns the adapters stacked by shape.

  Args:
    params: base weights; they decide the dtype, and whether layers are stacked.
    named: adapters by name, checked.
    pads: whether different ranks are padded into one array (`Traits.pads_adapters`).
  """
  groups: dict[Any, list[str]] = {}
  for name, (adapter, _) in named.items():
    ranks = tuple(sorted(_ranks(adapter).items()))
    groups.setdefault(() if pads else ranks, []).append(name)
  names = [name for group in groups.values() for name in group]
  forms = tuple(_form(params, [named[name] for name in group]) for group in groups.values())
  return Chosen(forms, {"": 0} | {name: 1 + place for place, name in enumerate(names)})


def _form(params: Params, group: list[Scaled]) -> Form:
  own, is_stacked = _layers(params), parameters.is_stacked(params)
  of_each = [_ranks(adapter) for adapter, _ in group]
  targets = [target for target in lora.ALL_TARGETS if any(target in ranks for ranks in of_each)]
  ranks = {target: [one.get(target, 0) for one in of_each] for target in targets}

  def part(target: str, name: str, index: int) -> Array:
    """Returns f[e, ...] of one layer."""
    most = max(ranks[target])
    axis = -1 if name == "a" else -2
    known = [a["layers"][index][target][name] for a, _ in group if target in a["layers"][index]]
    found = []
    for adapter, _ in group:
      pair = adapter["layers"][index].get(target)
      if pair is None:
        shape = list(known[0].shape)
        shape[axis] = most
        found.append(np.zeros(shape, np.float32))
        continue
      leaf = np.asarray(pair[name], np.float32)
      widths = [(0, 0)] * leaf.ndim
      widths[axis] = (0, most - leaf.shape[axis])
      found.append(np.pad(leaf, widths))
    # Rounded like in `lora.attach`.
    return jnp.asarray(np.stack(found)).astype(own[index % len(own)][target].dtype)

  layers = [
    {f"{target}_lora": {name: part(target, name, index) for name in ("a", "b")}
     for target in targets if any(target in a["layers"][index] for a, _ in group)}
    for index in range(len(group[0][0]["layers"]))
  ]  # fmt: skip
  return Form(
    layers=parameters.stacked({"layers": layers})["layers"] if is_stacked else layers,
    scales=jnp.asarray([scale for _, scale in group], jnp.float32),
    ranks={f"{target}_lora": jnp.asarray(ranks[target], jnp.int32) for target in targets},
  )


def _ranks(adapter: lora.Adapter) -> dict[str, int]:
  """Returns the largest rank of each target."""
  ranks: dict[str, int] = {}
  for layer in adapter["layers"]:
    for name, pair in layer.items():
      ranks[name] = max(ranks.get(name, 0), pair["a"].shape[-1])
  return ranks


def _layers(params: Params) -> list[Params]:
  """Returns the weights of each layer; of stacked layers, which have equal names, all at once."""
  layers = params["layers"]
  return [layers] if isinstance(layers, dict) else layers


class Rows(NamedTuple):
  """The adapters of a batch's rows, in all layers.

  Attributes:
    forms: stacked adapters of all layers.
    is_stacked: whether the layers are stacked.
    rows: i32[n], adapter index of each row.
    shares: as in `RowAdapters`.
  """

  forms: tuple[Form, ...]
  is_stacked: bool
  rows: Array
  shares: tiles.Shares | None

  def of_layer(self, index: Array | int) -> RowAdapters:
    """Returns the adapters of one layer."""
    if self.is_stacked:
      return RowAdapters(self.forms, jnp.int32(index), self.rows, self.shares)
    forms = tuple(form._replace(layers=form.layers[index]) for form in self.forms)
    return RowAdapters(forms, None, self.rows, self.shares)


def of_rows(params: Params, rows: Array, num_rows: Array, backend: Backend) -> Rows:
  """Returns the adapter inputs of the stages of every layer.

  Args:
    params: weights with "adapters".
    rows: i32[n], adapter index of each row; 0 is the base weights.
    num_rows: i32[], valid rows.
    backend: backend of the stages.
  """
  forms = params["adapters"]
  shares = None
  if backend.traits.shares_out_rows:
    count = 1 + sum(form.count for form in forms)
    shares = tiles.shared_out(rows, count, num_rows, tiles.tile_rows(backend.numerics))
  return Rows(forms, parameters.is_stacked(params), rows, shares)


def parts(scaled: Scaled) -> Any:
  """Returns an adapter as a pytree of arrays, its scale included."""
  adapter, scale = scaled
  return {"adapter": adapter, "scale": np.asarray(scale, np.float32)}


def placed(forms: tuple[Form, ...], mesh: jax.sharding.Mesh) -> tuple[Form, ...]:
  """Returns the forms on a mesh: slabs over `model`, the rest replicated."""
  specs = parameters.specs_of({"layers": [], "adapters": forms})["adapters"]
  return jax.tree.map(
    lambda leaf, spec: parallel.put(leaf, jax.sharding.NamedSharding(mesh, spec)), forms, specs
  )
