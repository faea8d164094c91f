"""A fingerprint changes with each of its parts, and with nothing else."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import word_engine

from seerjax import numerics as numerics_lib
from seerjax.models.loading import Model
from seerjax.models.tokenizer import ChatConfig
from seerjax.run import policy as policy_lib
from seerjax.serve import identity, sleeping

KEY = numerics_lib.key(3)
TOKENIZER = word_engine.TOKENIZER


def model(**others) -> Model:
  made = Model(word_engine.CONFIG, word_engine.params(), word_engine.NUMERICS, TOKENIZER)
  return dataclasses.replace(made, **others)


def one_bit_off():
  """The weights, with the lowest bit of one number of one leaf flipped."""
  leaves, tree = jax.tree.flatten(word_engine.params())
  whole = np.array(leaves[-1])
  bits = whole.reshape(-1)[:1].view(f"uint{8 * whole.dtype.itemsize}")
  bits ^= 1
  leaves[-1] = jax.numpy.asarray(whole)
  return jax.tree.unflatten(tree, leaves)


def other(**fields):
  return model(tokenizer=dataclasses.replace(TOKENIZER, **fields))


def one_word_more():
  backend = type(TOKENIZER.backend).from_str(TOKENIZER.backend.to_str())
  backend.add_tokens(["seerjax"])
  return other(backend=backend)


CHANGES = {
  "numerics": lambda: model(numerics=dataclasses.replace(word_engine.NUMERICS, row_tile=8)),
  "shape": lambda: model(config=dataclasses.replace(word_engine.CONFIG, norm_eps=1e-5)),
  "weights": lambda: model(params=one_bit_off()),
  "words": one_word_more,
  "template": lambda: other(chat_template=TOKENIZER.chat_template + " "),
  "ends": lambda: other(eos_ids=(*TOKENIZER.eos_ids, 5)),
  "system": lambda: other(chat_config=ChatConfig(system="Be brief.")),
  "no tokenizer": lambda: model(tokenizer=None),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_fingerprint_moves_with_each_part(part: str):
  assert identity.fingerprint(CHANGES[part](), KEY) != identity.fingerprint(model(), KEY)


def test_a_fingerprint_moves_with_the_moment_of_a_template_that_reads_the_clock():
  # The lines of a server's start: its own moment, another day's, and another zone's.
  moments = ("2026-11-27T12:00:00+00:00", "2026-11-28T12:00:00+00:00", "2026-11-27T12:00:00+05:00")
  clock = dataclasses.replace(TOKENIZER, chat_template="{{ strftime_now('%d %b %Y') }}")
  served = [policy_lib.chatting(clock, ChatConfig(now=now)) for now in (*moments, moments[0])]
  found = [identity.fingerprint(model(tokenizer=tokenizer), KEY) for tokenizer in served]
  assert len(set(found)) == 3 and found[0] == found[3]
  # Contexts that a server has slept on outlive its restart.
  contexts = {sleeping.identity_of(model(tokenizer=one), "w") for one in served}
  assert len(contexts) == 1


def test_a_fingerprint_moves_with_the_key_and_defaults_alone():
  usual = identity.fingerprint(model(), KEY)
  assert usual.startswith("fp_") and len(usual) == 23
  # The same parts, made again.
  again = jax.tree.map(lambda leaf: leaf.copy(), word_engine.params())
  assert identity.fingerprint(model(params=again), numerics_lib.key(3)) == usual
  assert identity.fingerprint(model(), numerics_lib.key(4)) != usual
  assert identity.fingerprint(model(), KEY, defaults={"temperature": 0.5}) != usual
