"""What lies in a store: keys made of content, and bytes that describe themselves.

    key    digest of (fingerprint, digest of the weights, any namespace, tokens that these are of)
    value  MAGIC, length of the header, CRC-32 of all that follows, header (JSON), arrays

The keys and values of tokens are a pure function of weights and numerics (DESIGN: the contract), so
a process may read what another wrote, and two processes whose weights differ in one bit never meet,
whatever they call their policy_version.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import json
import math
import struct
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from seerjax import numerics as numerics_lib
from seerjax.engine.kv.manifest import Part
from seerjax.models import config as model_config

MAGIC = b"SEERKV01"
ALIGNMENT = 64  # Bytes.
_HEAD = struct.Struct("<8sQI")  # MAGIC, bytes of the header, CRC-32 of header and arrays.
_DIGEST_BYTES = 20


class Identity(NamedTuple):
  """Whose keys and values these are.

  Attributes:
    fingerprint: digest of the numerics' fingerprint, the model, and the layout of pages.
    weights: digest of the running weights, adapters included.
    policy_version: of the engine that writes; read by nothing, for people who look into a store.
    namespace: digest of the name of whose they are, "" for no name.
  """

  fingerprint: str
  weights: str
  policy_version: int
  namespace: str = ""

  def key(self, tokens: Sequence[int]) -> str:
    """Returns the key of the keys and values of `tokens`, the first of which is at position 0."""
    space = f"{self.namespace}/" if self.namespace else ""
    head = f"{self.fingerprint}/{self.weights}/{space}".encode()
    return _hex(hashlib.blake2b(head + np.asarray(tokens, np.int32).tobytes(), digest_size=20))


def _hex(digest: Any) -> str:
  return digest.hexdigest()


def name_digest(name: str) -> str:
  """Returns what stands for a namespace in a store that others may read; "" for no name."""
  if not name:
    return ""
  return _hex(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES))


def fingerprint_digest(
  model: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig, pages: Any
) -> str:
  """Returns the digest of all but the weights that pages follow from.

  Args:
    model: shape of the model.
    numerics: what decides bits.
    pages: pytree of f[i, k, m, ...] on their mesh; how many there are does not count.
  """
  leaves, structure = jax.tree.flatten(pages)
  shards = leaves[0].sharding.shard_shape(leaves[0].shape)
  layout = [(leaf.shape[1:2], leaf.shape[3:], leaf.dtype.name) for leaf in leaves]
  parts = (numerics_lib.fingerprint(numerics), repr(model), str(structure), layout, shards[1])
  text = json.dumps(parts, sort_keys=True)
  return _hex(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES))


def weights_digest(params: Any) -> str:
  """Returns the digest of weights on their mesh, by path; it reads every byte of them."""
  digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
    if not isinstance(leaf, jax.Array):
      leaf = jnp.asarray(leaf)
    shards = {str(shard.index): shard.data for shard in leaf.addressable_shards}  # One of copies.
    for index in sorted(shards):
      digest.update(index.encode())
      digest.update(np.ascontiguousarray(shards[index]).view(np.uint8).data)
  return _hex(digest)


def parts_of(arrays: Any) -> tuple[Part, ...]:
  """Returns what a manifest says of a request's arrays (numpy), in their order."""
  return tuple(
    Part(leaf.shape, leaf.dtype.name, zlib.crc32(np.ascontiguousarray(leaf).tobytes()))
    for leaf in jax.tree.leaves(arrays)
  )


def packed(arrays: Any, identity: Identity) -> bytes:
  """Returns a request's arrays, in lists of lists of lists of numpy, as bytes that say so."""
  header = json.dumps(
    {
      "fingerprint": identity.fingerprint,
      "weights": identity.weights,
      "policy_version": identity.policy_version,
      "namespace": identity.namespace,
      "arrays": jax.tree.map(lambda array: f"{array.dtype.name}{list(array.shape)}", arrays),
    }
  ).encode()
  # Arrays begin where any dtype may.
  header += b" " * (-(_HEAD.size + len(header)) % ALIGNMENT)
  body = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays))
  crc = zlib.crc32(body, zlib.crc32(header))
  return b"".join((_HEAD.pack(MAGIC, len(header), crc), header, body))


def unpacked(data: bytes, identity: Identity) -> Any:
  """Returns the arrays of `packed`; None if bytes were changed, or are of another identity."""
  if len(data) < _HEAD.size:
    return None
  magic, length, crc = _HEAD.unpack_from(data)
  rest = memoryview(data)[_HEAD.size :]
  if magic != MAGIC or zlib.crc32(rest) != crc:
    return None
  header = json.loads(bytes(rest[:length]))
  theirs = (header["fingerprint"], header["weights"], header.get("namespace", ""))
  if theirs != (identity.fingerprint, identity.weights, identity.namespace):
    return None
  offset = length

  def read(description: str) -> np.ndarray:
    nonlocal offset
    name, _, shape_text = description.partition("[")
    shape = tuple(json.loads(f"[{shape_text}"))
    array = np.frombuffer(rest, jnp.dtype(name), math.prod(shape), offset).reshape(shape)
    offset += array.nbytes
    return array

  return jax.tree.map(read, header["arrays"])
