"""JAX's process-wide defaults change no bit: they are pinned, or covered by the fingerprint.

The reference bits were drawn under JAX's own defaults; other defaults must give the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import lora, parameters
from seerjax.models.loading import Model
from seerjax.ops import sampling
from seerjax.types import Request, SamplingParams

DEFAULTS = list(itertools.product(("threefry2x32", "rbg", "unsafe_rbg"), (True, False)))


def seeded_digest() -> str:
  """Returns the SHA of everything drawn from a seed: noise, initial weights, adapters."""
  numerics, model = tiny_model.NUMERICS, tiny_model.CONFIG
  key = numerics_lib.key(11)
  rows = jnp.arange(5, dtype=jnp.uint32), jnp.arange(5, dtype=jnp.int32), jnp.ones(5, bool)
  noise = jax.jit(lambda key: sampling.noise_rows(key, *rows, 64))(key)
  drawn = noise, parameters.init(key, model, numerics), lora.init(key, model, numerics, 3)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(drawn):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


@functools.cache
def digest_under_jax_defaults() -> str:
  with jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True):
    return seeded_digest()


@pytest.mark.parametrize("backend, partitionable", DEFAULTS)
def test_what_is_drawn_from_a_seed_follows_no_default_of_the_process(backend, partitionable):
  with jax.default_prng_impl(backend), jax.threefry_partitionable(partitionable):
    assert seeded_digest() == digest_under_jax_defaults()
    key = numerics_lib.key(11)
    assert jax.random.key_data(key).tolist() == [0, 11]
    with numerics_lib.pinned_randomness():
      assert jax.random.bits(key, (3,)).tolist() == [901010416, 80514922, 3124326316]


def answers_digest() -> str:
  """Returns the SHA of four completions, alone and together, and of the seeded values."""
  digest = hashlib.sha256(seeded_digest().encode())
  requests = [
    Request(
      request_id=str(index),
      prompt=tuple(range(3 + index)),
      sampling=SamplingParams(max_tokens=12, temperature=0.9),
      seed=index,
    )
    for index in range(4)
  ]
  sizes = engine_lib.EngineConfig(
    page_size=8, num_pages=17, max_num_seqs=4, max_model_len=32, batch_size_buckets=(16,)
  )

  def answers(requests):
    return tiny_model.make_engine(sizes).generate(requests)

  alone = [answers([request])[0] for request in requests]
  assert all(one.has_bits_of(other) for one, other in zip(answers(requests), alone, strict=True))
  for one in alone:
    digest.update(repr(one.tokens).encode() + one.behaviour_logprobs.tobytes())
  return digest.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize("backend, partitionable", DEFAULTS[1:])
def test_processes_of_other_defaults_say_the_same(backend, partitionable):
  environment = os.environ | {
    "JAX_DEFAULT_PRNG_IMPL": backend,
    "JAX_THREEFRY_PARTITIONABLE": str(partitionable),
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
  }
  done = subprocess.run(
    [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split()[-1] == answers_digest()


@pytest.mark.parametrize(
  "make, got",
  [
    (lambda: jax.random.key(0, impl="rbg"), "a key of rbg"),
    (lambda: jax.random.key(0, impl="unsafe_rbg"), "a key of unsafe_rbg"),
    (lambda: jax.random.PRNGKey(0), "not a typed key"),
    (lambda: 0, "0, not a typed key"),
  ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_a_key_whose_noise_depends_on_the_batch_is_refused(make, got):
  key = make()
  wanted = f"got .*{got}.*expected a threefry2x32 key.*make it with seerjax.numerics.key"
  numerics, model = tiny_model.NUMERICS, tiny_model.CONFIG
  with pytest.raises(ValueError, match=f"(?s)Engine.key: {wanted}"):
    engine_lib.Engine(Model(model, tiny_model.params(numerics), numerics), key=key)
  with pytest.raises(ValueError, match=f"(?s)parameters.init: key: {wanted}"):
    parameters.init(key, model, numerics)
  with pytest.raises(ValueError, match=f"(?s)lora.init: key: {wanted}"):
    lora.init(key, model, numerics, 2)


def test_what_cannot_be_pinned_is_in_the_fingerprint():
  default = numerics_lib.fingerprint(tiny_model.NUMERICS)
  assert (default["x64"], default["matmul_precision"]) == ("False", "None")
  with jax.enable_x64(True):
    assert numerics_lib.fingerprint(tiny_model.NUMERICS)["x64"] == "True"
  with jax.default_matmul_precision("bfloat16"):
    assert numerics_lib.fingerprint(tiny_model.NUMERICS)["matmul_precision"] == "bfloat16"
  with jax.disable_jit():
    assert numerics_lib.fingerprint(tiny_model.NUMERICS)["disable_jit"] == "True"


if __name__ == "__main__":
  print(answers_digest())
