"""Penalties against their definition in NumPy, under a gradient, slab by slab and at any width."""

import jax
import jax.numpy as jnp
import numpy as np

from seerjax.ops import penalties, sampling
from seerjax.types import SamplingParams

VOCABULARY = 24
PARAMS = [
  SamplingParams(),
  SamplingParams(presence_penalty=1.5),
  SamplingParams(frequency_penalty=-0.7),
  SamplingParams(repetition_penalty=1.3),
  SamplingParams(repetition_penalty=0.7, presence_penalty=-2.0, frequency_penalty=0.4),
]
PROMPT, ANSWER = (3, 3, 5, 23), (5, 0, 5, 9, 5)


def definition(logits, params, prompt, answer):
  """The formulas of Hugging Face and OpenAI, one token at a time, in float64."""
  found = np.asarray(logits, np.float64).copy()
  for token in {*prompt, *answer}:
    factor = params.repetition_penalty
    found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
  for token in {*answer}:
    found[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
  return found


def rows_of(params, prompt=PROMPT, answer=ANSWER, width=penalties.SHORTEST):
  fields = penalties.empty((len(params),), width)
  for row, one in enumerate(params):
    penalties.write(fields, (row,), one, penalties.entries(one, prompt, answer))
  return sampling.sampling_rows(params)._replace(**fields)


def logits_of(seed=0):
  rng = np.random.default_rng(seed)
  return (3 * rng.standard_normal((len(PARAMS), VOCABULARY))).astype(np.float32)


def test_penalised_logits_are_those_of_the_definition():
  logits = logits_of()
  found = np.asarray(jax.jit(sampling.scaled_rows)(logits, rows_of(PARAMS), jnp.int32(0)))
  for row, params in enumerate(PARAMS):
    expected = definition(logits[row], params, PROMPT, ANSWER)
    np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(found[0], logits[0])
  assert np.any(found[1:] != logits[1:], axis=1).all()


def test_neither_the_width_of_a_list_nor_a_slab_nor_a_gradient_moves_a_bit():
  logits, rows = logits_of(1), rows_of(PARAMS)
  scaled = jax.jit(sampling.scaled_rows)
  expected = np.asarray(scaled(logits, rows, jnp.int32(0)))
  wide = scaled(logits, rows_of(PARAMS, width=1024), jnp.int32(0))
  slabs = [scaled(logits[:, at : at + 8], rows, jnp.int32(at)) for at in range(0, VOCABULARY, 8)]

  def squares(logits):
    found = sampling.scaled_rows(logits, rows, jnp.int32(0))
    return jnp.sum(found**2), found

  trained = jax.jit(jax.value_and_grad(squares, has_aux=True))
  (_, under_gradient), gradient = trained(jnp.asarray(logits))
  for found in (wide, np.concatenate(slabs, axis=1), under_gradient):
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), expected.view(np.int32))
  # The gradient of f(z)^2 is 2 f(z) f'(z), where f' is the factor of the repetition penalty.
  slope = np.where(logits > 0, 1 / rows.repetition[:, None], rows.repetition[:, None])
  slope[:, [token for token in range(VOCABULARY) if token not in (*PROMPT, *ANSWER)]] = 1
  np.testing.assert_allclose(gradient, 2 * expected * slope, rtol=1e-5, atol=1e-6)


def test_a_prompt_counts_for_repetition_alone_and_an_empty_answer_has_no_presence():
  no_answer = penalties.entries(PARAMS[1], PROMPT, ())
  assert not len(no_answer.ids)
  repeated = penalties.entries(PARAMS[4], PROMPT, (5,))
  assert repeated.ids.tolist() == [3, 5, 23]
  np.testing.assert_allclose(repeated.values, [0, 0.4 - 2.0, 0])


def test_widths_are_few():
  widths = {penalties.width_for(count) for count in range(1, 5000)}
  assert widths == {256, 1024, 4096, 16384}


def test_a_long_prompt_is_counted_where_its_tokens_are_penalised():
  for params in PARAMS:
    most = penalties.most_entries(params, len(PROMPT), len(ANSWER))
    assert len(penalties.entries(params, PROMPT, ANSWER).ids) <= most
  presence = SamplingParams(presence_penalty=1.0)
  assert penalties.most_entries(presence, 30000, 100) == 100


def test_penalties_along_an_answer_are_those_of_each_place():
  for params in PARAMS[1:]:
    found = list(penalties.entries_along(params, PROMPT, ANSWER))
    assert len(found) == len(ANSWER)
    for place, one in enumerate(found):
      for prompt in (PROMPT, penalties.distinct(PROMPT)):
        expected = penalties.entries(params, prompt, ANSWER[:place])
        for left, right in zip(one, expected, strict=True):
          assert left.dtype == right.dtype and left.tobytes() == right.tobytes()
