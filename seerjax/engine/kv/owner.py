"""Whose keys and values are: what was written for one owner is never found by another.

An adapter's keys and values differ from the base's in their bits. Those of two namespaces do not;
they are kept apart because how fast a prompt is read would tell one what another has asked.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol, runtime_checkable


class Owner(NamedTuple):
  """Who may find a page.

  Attributes:
    adapter: by whose weights it was written, "" for the base.
    namespace: for whom, "" for all that name none.
  """

  adapter: str = ""
  namespace: str = ""

  @property
  def start(self) -> bytes:
    """What stands before the first page in digests: nothing for the base without a namespace."""
    if self.namespace:
      named = repr(tuple(self)).encode("utf-8", "surrogatepass")
      return hashlib.blake2b(named, digest_size=16, person=b"namespace").digest()
    return hashlib.blake2b(self.adapter.encode(), digest_size=16).digest() if self.adapter else b""


BASE = Owner()


@runtime_checkable
class Owned(Protocol):
  """What a request says of itself; `seerjax.types`, where requests are, imports JAX."""

  @property
  def adapter(self) -> str: ...

  @property
  def namespace(self) -> str: ...


def of(request: Owned) -> Owner:
  """Returns whose a request's keys and values are."""
  return Owner(request.adapter, request.namespace)
