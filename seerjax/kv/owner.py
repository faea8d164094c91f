"""Owners of keys and values: pages written for one owner are never found for another.

An adapter's keys and values differ in their bits from those of the base weights. Those of two
namespaces do not; they are kept apart because prefill latency would reveal to one namespace which
prompts another has sent.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol, runtime_checkable


class Owner(NamedTuple):
  """The adapter and namespace under which a page is cached.

  Attributes:
    adapter: name of the adapter that wrote the page, "" for the base weights.
    namespace: namespace of the request, "" for the shared default.
  """

  adapter: str = ""
  namespace: str = ""

  @property
  def start(self) -> bytes:
    """Seed of the digests of the first page: empty for the base weights without a namespace."""
    if self.namespace:
      named = repr(tuple(self)).encode("utf-8", "surrogatepass")
      return hashlib.blake2b(named, digest_size=16, person=b"namespace").digest()
    return hashlib.blake2b(self.adapter.encode(), digest_size=16).digest() if self.adapter else b""


BASE = Owner()


@runtime_checkable
class Owned(Protocol):
  """Fields of a request that determine the owner; a protocol, since `seerjax.types` imports JAX."""

  @property
  def adapter(self) -> str: ...

  @property
  def namespace(self) -> str: ...


def of(request: Owned) -> Owner:
  """Returns the owner of a request's keys and values."""
  return Owner(request.adapter, request.namespace)
