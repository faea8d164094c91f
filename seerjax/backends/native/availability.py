"""Checks whether native handlers run here: the layout of XLA's frames, and the bits of a product.

Both are checked before a program calls a handler, since a handler cannot fail: a frame of another
layout would be misread, and another compiler's fused multiply-add would change a bit.
"""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.backends.native import header

# Expected digest from `_first_bits`; a test computes it in NumPy.
EXPECTED = "bf1eaa7bdc3f849c"


def reason_against() -> str | None:
  """Returns why native handlers cannot run in this process, or None if they can."""
  platform = jax.default_backend()
  if platform != "cpu":
    return f"JAX's backend is {platform}, and native handlers run on the CPU only"
  if jax.config.jax_disable_jit:
    return "JAX_DISABLE_JIT is set"
  return _reason()


@functools.cache
def _reason() -> str | None:
  try:
    difference = header.differing_record(header.text())
  except OSError as error:
    return f"XLA's FFI header cannot be read ({error})"
  if difference is not None:
    return f"XLA's FFI struct {difference} differs from the supported one"
  try:
    got = _first_bits()
  except Exception as error:  # A missing compiler, or one that does not support this machine.
    return f"numba could not compile a handler here ({type(error).__name__}: {error})"
  if got != EXPECTED:
    return f"a test product gave different bits here (digest {got}, expected {EXPECTED})"
  return None


def first_operands() -> tuple[np.ndarray, np.ndarray]:
  """Returns f32[3, 21] and f32[21, 19], the operands of the checked product."""
  numbers = np.arange(21 * 22, dtype=np.float32) * np.float32(0.7548777) % np.float32(1)
  return numbers[: 3 * 21].reshape(3, 21) - np.float32(0.4), numbers[3 * 21 :].reshape(21, 19)


def digest_of(product: np.ndarray, exp: np.ndarray, log: np.ndarray) -> str:
  """Returns a digest of three arrays' bits."""
  parts = [np.ascontiguousarray(part, np.float32).tobytes() for part in (product, exp, log)]
  return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _first_bits() -> str:
  # Imported here: a missing numba is a reason, not an error.
  from seerjax.backends.native import first_product

  x, w = first_operands()
  shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
  run = jax.jit(lambda x, w: first_product.HANDLER([shape] * 3, x, w))
  with jax.ensure_compile_time_eval():  # May be called while another program is traced.
    return digest_of(*(np.asarray(part) for part in run(x, w)))
