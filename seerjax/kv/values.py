"""Format of the values in a KV store: content-derived keys, self-describing bytes.

    key    digest of (fingerprint, digest of the weights, namespace if any, tokens)
    value  MAGIC, length of the header, CRC-32 of header and arrays, header (JSON), arrays

The keys and values of tokens are a pure function of weights and numerics (DESIGN: the contract), so
a process may read what another process wrote. Two processes with weights that differ in one bit use
different store keys, even under the same policy_version.
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
from seerjax.kv.manifest import Part
from seerjax.models import config as model_config

MAGIC = b"SEERKV01"
ALIGNMENT = 64  # Bytes.
_HEAD = struct.Struct("<8sQI")  # MAGIC, bytes of the header, CRC-32 of header and arrays.
_DIGEST_BYTES = 20


class Identity(NamedTuple):
  """Everything but the tokens that determines the stored keys and values.

  Attributes:
    fingerprint: digest of the numerics fingerprint, the model, and the layout of pages.
    weights: digest of the running weights, adapters included.
    policy_version: policy version of the writing engine; informational, never compared.
    namespace: digest of the owner's namespace (`name_digest`), "" without one.
  """

  fingerprint: str
  weights: str
  policy_version: int
  namespace: str = ""

  def key(self, tokens: Sequence[int]) -> str:
    """Returns the store key for the keys and values of `tokens`, which start at position 0."""
    space = f"{self.namespace}/" if self.namespace else ""
    head = f"{self.fingerprint}/{self.weights}/{space}".encode()
    return _hex(hashlib.blake2b(head + np.asarray(tokens, np.int32).tobytes(), digest_size=20))


def _hex(digest: Any) -> str:
  return digest.hexdigest()


def name_digest(name: str) -> str:
  """Returns the digest that replaces a namespace in a shared store; "" for no name."""
  if not name:
    return ""
  return _hex(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES))


def fingerprint_digest(
  model: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig, pages: Any
) -> str:
  """Returns the digest of everything that determines the bits of pages, except the weights.

  Args:
    model: shape of the model.
    numerics: the numerics configuration.
    pages: pytree of f[i, k, m, ...] on their mesh; i and m do not affect the digest.
  """
  leaves, structure = jax.tree.flatten(pages)
  shards = leaves[0].sharding.shard_shape(leaves[0].shape)
  layout = [(leaf.shape[1:2], leaf.shape[3:], leaf.dtype.name) for leaf in leaves]
  parts = (numerics_lib.fingerprint(numerics), repr(model), str(structure), layout, shards[1])
  text = json.dumps(parts, sort_keys=True)
  return _hex(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES))


def weights_digest(params: Any) -> str:
  """Returns the digest of weights on their mesh, by path; it reads every byte of the weights."""
  digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
    if not isinstance(leaf, jax.Array):
      leaf = jnp.asarray(leaf)
    shards = {str(shard.index): shard.data for shard in leaf.addressable_shards}  # Replicas: one.
    for index in sorted(shards):
      digest.update(index.encode())
      digest.update(np.ascontiguousarray(shards[index]).view(np.uint8).data)
  return _hex(digest)


def parts_of(arrays: Any) -> tuple[Part, ...]:
  """Returns the manifest's description of a request's arrays (numpy), in their order."""
  return tuple(
    Part(leaf.shape, leaf.dtype.name, zlib.crc32(np.ascontiguousarray(leaf).tobytes()))
    for leaf in jax.tree.leaves(arrays)
  )


def packed(arrays: Any, identity: Identity) -> bytes:
  """Serializes a request's arrays (numpy, in three levels of lists) with a describing header."""
  header = json.dumps(
    {
      "fingerprint": identity.fingerprint,
      "weights": identity.weights,
      "policy_version": identity.policy_version,
      "namespace": identity.namespace,
      "arrays": jax.tree.map(lambda array: f"{array.dtype.name}{list(array.shape)}", arrays),
    }
  ).encode()
  # The body is aligned so that an array of any dtype may start there.
  header += b" " * (-(_HEAD.size + len(header)) % ALIGNMENT)
  body = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays))
  crc = zlib.crc32(body, zlib.crc32(header, _start(len(header))))
  return b"".join((_HEAD.pack(MAGIC, len(header), crc), header, body))


def _start(length: int) -> int:
  """Returns where a checksum starts: it covers the header's length too."""
  return zlib.crc32(str(length).encode())


def unpacked(data: bytes, identity: Identity) -> Any:
  """Returns the arrays of `packed`; None if they are corrupt or have another identity."""
  if len(data) < _HEAD.size:
    return None
  magic, length, crc = _HEAD.unpack_from(data)
  rest = memoryview(data)[_HEAD.size :]
  if magic != MAGIC or zlib.crc32(rest, _start(length)) != crc:
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
