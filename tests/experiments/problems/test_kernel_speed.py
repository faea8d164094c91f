"""Speed targets: every schedule is the same function, cheats are caught, and the clock is fair."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.problems import kernel_speed
from pallas_kernels import gpu, matmul, rms_norm
from seerjax.discovery import environment as environment_lib

SIZE, DIM, HIDDEN = 8, 16, 24
TINY = kernel_speed.TriMulSpeed(SIZE, dim=DIM, hidden=HIDDEN, laps=3)
PLAIN = TINY.start(0)
# The contraction wants features first; from there on nothing is laid out anew.
FEATURES = {
  **PLAIN, "layout": "features", "output_layout": "features", "contraction": "batched",
}  # fmt: skip
LANGUAGE = TINY.language


def drawn(seed: int, kind: str = "masked") -> kernel_speed.Inputs:
  return kernel_speed.draw(seed, kind, size=SIZE, dim=DIM, hidden=HIDDEN)


def by_definition(inputs: kernel_speed.Inputs) -> np.ndarray:
  """The formula in float64 numpy, entry by entry where that is simplest."""
  x, mask, scale, bias, w, scale2, bias2, last = (np.asarray(v, np.float64) for v in inputs)

  def norm(v: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(v.var(axis=-1, keepdims=True) + kernel_speed.NORM_EPSILON)
    return (v - v.mean(axis=-1, keepdims=True)) / deviation * scale + bias

  def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))

  y = norm(x, scale, bias)
  a = mask[:, :, None] * (y @ w[0]) * sigmoid(y @ w[2])
  b = mask[:, :, None] * (y @ w[1]) * sigmoid(y @ w[3])
  summed = np.zeros(a.shape)
  for i in range(len(x)):
    for j in range(len(x)):
      summed[i, j] = (a[i] * b[j]).sum(axis=0)
  return (norm(summed, scale2, bias2) * sigmoid(y @ w[4])) @ last


@pytest.mark.parametrize("kind", kernel_speed.KINDS)
def test_the_reference_is_the_definition(kind: str):
  inputs = drawn(1, kind)
  np.testing.assert_allclose(
    kernel_speed.reference(inputs), by_definition(inputs), atol=2e-5, rtol=2e-5
  )


def test_inputs_are_what_they_are_said_to_be():
  normal, masked, cauchy = (drawn(2, kind) for kind in kernel_speed.KINDS)
  assert np.asarray(normal.mask).all()
  assert 0 < np.asarray(masked.mask).mean() < 1
  assert np.abs(np.asarray(cauchy.x)).max() > 50 > np.abs(np.asarray(normal.x)).max()
  assert (np.asarray(drawn(3).x) != np.asarray(masked.x)).any()
  assert (np.asarray(drawn(3).projections) != np.asarray(masked.projections)).any()


@functools.cache
def expected(kind: str) -> np.ndarray:
  return np.asarray(kernel_speed.reference(drawn(5, kind)))


def check(schedule: kernel_speed.Schedule) -> None:
  tolerance = (
    kernel_speed.FLOAT32_TOLERANCE if schedule.is_float32 else 2 * kernel_speed.TOLERANCE
  )
  program = jax.jit(functools.partial(kernel_speed.trimul, schedule))
  for kind in kernel_speed.KINDS:
    got = program(drawn(5, kind))
    assert got.shape == (SIZE, SIZE, DIM) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected(kind), atol=tolerance, rtol=tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", range(5))
def test_every_choice_gives_the_references_result(place: int):
  # Five schedules, among which every choice of every field is found.
  chosen = {f.name: f.choices[place % len(f.choices)] for f in kernel_speed.FIELDS}
  check(kernel_speed.Schedule(**{**chosen, "projection_dtype": "float32"}))


@pytest.mark.long
@pytest.mark.parametrize("start", [PLAIN, FEATURES], ids=["rows", "features"])
@pytest.mark.parametrize(
  ("name", "choice"),
  [(field.name, choice) for field in kernel_speed.FIELDS for choice in field.choices],
)
def test_every_single_choice_gives_the_references_result(start, name: str, choice):
  check(kernel_speed.Schedule(**{**start, name: choice}))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["rows", "features"])
@pytest.mark.parametrize("projections", kernel_speed.FIELDS[0].choices)
def test_folded_norms_agree_with_all_groups(projections: str, layout: str):
  check(kernel_speed.Schedule(projections=projections, layout=layout, input_norm="folded"))


def test_a_schedule_scores_and_its_value_is_a_ratio():
  score = TINY.verify(PLAIN)
  assert score.is_valid and score.value == score.reward > 0
  found = TINY.measure(PLAIN, laps=5)
  assert len(found.ratios) == len(found.cpu_ratios) == 5
  assert found.speed_up == sorted(found.ratios)[2] and found.error < 1e-4
  assert found.lower_quartile <= found.speed_up
  assert found.cpu_speed_up > 0 and found.seconds > 0 and found.reference_seconds > 0
  assert TINY.confirm(PLAIN, laps=3).is_valid


def test_laps_have_fresh_inputs_and_the_contestants_take_turns():
  called: list[tuple[str, float]] = []

  def note(name: str):
    def function(inputs):
      called.append((name, float(inputs.x[0, 0, 0]) + float(inputs.projections[0, 0, 0])))
      return inputs.x

    return function

  found = kernel_speed.race(
    note("ours"), note("plain"), lambda seed, lap: drawn(seed), laps=3, tolerance=0.0
  )
  assert not found.reason and len(called) == 2 * (3 + len(kernel_speed.KINDS))
  pairs = list(zip(called[::2], called[1::2]))
  assert len({value for _, value in called}) == len(pairs)
  assert all(one[1] == two[1] for one, two in pairs)
  assert {one[0] for one, _ in pairs} == {"ours", "plain"}
  assert all(one[0] != two[0] for one, two in pairs)


class Cached:
  """A cheat: computes the first calls, and then returns what it has."""

  def __init__(self, num_honest: int):
    self._left = num_honest
    self._kept = None

  def __call__(self, inputs):
    if self._left:
      self._left -= 1
      self._kept = jax.jit(kernel_speed.reference)(inputs)
    return self._kept


def unmasked(inputs):
  return kernel_speed.reference(inputs._replace(mask=jnp.ones_like(inputs.mask)))


def incoming(inputs):
  """Sums over k of a[k, i] b[k, j], the other triangle."""
  turned = inputs._replace(x=inputs.x.swapaxes(0, 1), mask=inputs.mask.T)
  return kernel_speed.reference(turned)


# Each is the honest function but for one thing.
CHEATS = {
  "zeros": lambda inputs: jnp.zeros_like(inputs.x),
  "not finite": lambda inputs: kernel_speed.reference(inputs) * jnp.nan,
  "mask left out": unmasked,
  "other triangle": incoming,
  "one entry": lambda inputs: kernel_speed.reference(inputs).at[3, 4, 5].add(0.5),
  "scaled": lambda inputs: 1.1 * kernel_speed.reference(inputs),
  "keeps its first answer": Cached(1),
  "keeps once it is timed": Cached(len(kernel_speed.KINDS)),
}


@pytest.mark.parametrize("name", list(CHEATS))
def test_a_wrong_implementation_is_out(name: str):
  found = TINY.race(CHEATS[name], laps=3)
  assert "answer: got" in found.reason and "expected" in found.reason
  assert not found.ratios
  assert ("in a timed call" in found.reason) == (name == "keeps once it is timed")


def test_the_twin_of_the_wrong_ones_is_let_in():
  assert not TINY.race(Cached(1000), laps=3).reason


def test_a_program_that_breaks_is_out_and_a_broken_reference_is_an_error():
  def broken(inputs):
    raise RuntimeError("out of registers\nat line 3")

  found = TINY.race(broken, laps=3)
  assert found.reason == "program: got RuntimeError: out of registers, expected an answer"
  with pytest.raises(RuntimeError, match="out of registers"):
    kernel_speed.race(
      kernel_speed.reference, broken, lambda seed, lap: drawn(seed), laps=3, tolerance=0.0
    )


def test_environments_cross_processes():
  again = pickle.loads(pickle.dumps(TINY))
  assert again.name == TINY.name and again.start(0) == PLAIN
  assert not again.race(kernel_speed.reference, laps=3).reason


def test_float32_is_held_to_its_own_tolerance():
  def rough(inputs):
    return kernel_speed.reference(inputs) * 1.01

  assert not TINY.race(rough, laps=3).reason
  found = TINY.race(rough, laps=3, tolerance=kernel_speed.FLOAT32_TOLERANCE)
  assert "within 0.0001 absolute and relative" in found.reason


def test_only_float32_that_is_multiplied_as_such_is_held_to_it():
  plain = kernel_speed.Schedule()
  half = kernel_speed.Schedule(contraction_dtype="bfloat16")
  assert kernel_speed.tolerance_of(plain, "cpu") == kernel_speed.FLOAT32_TOLERANCE
  for schedule, backend in ((half, "cpu"), (plain, "gpu"), (plain, "tpu")):
    assert kernel_speed.tolerance_of(schedule, backend) == kernel_speed.TOLERANCE


def to_ten_bits(x: jax.Array) -> jax.Array:
  """Returns float32 with as many bits as TF32 has."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)


def test_two_programs_of_rounded_operands_are_further_apart_than_that():
  x, scale, w = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)
  # A norm's scale on one side of the matmul or the other, as with input_norm="folded".
  one = to_ten_bits(x * scale[0]) @ to_ten_bits(w)
  two = to_ten_bits(x) @ to_ten_bits(scale[0][:, None] * w)
  assert kernel_speed.differs(one, two, kernel_speed.FLOAT32_TOLERANCE)[0]
  assert not kernel_speed.differs(one, two, kernel_speed.TOLERANCE)[0]


@pytest.mark.parametrize(
  ("got", "reason"),
  [
    ((), "answer: got 0 arrays, expected 1"),
    (jnp.ones((2, 3)), r"answer: got [2, 3], expected [2, 2]"),
    (np.ones((2, 2), np.float32), "answer: got ndarray, expected [2, 2]"),
    (jnp.ones((2, 2), jnp.bfloat16), "answer: got bfloat16, expected float32"),
    (jnp.full((2, 2), 1.5), "answer: got 1.5 at (0, 0), expected 1 within 0.02 absolute and"),
  ],
)
def test_answers_of_another_form_are_wrong(got, reason: str):
  assert reason in kernel_speed.differs(got, jnp.ones((2, 2)), 0.02)[0]


def test_the_tolerance_is_absolute_and_relative():
  truth = jnp.array([0.0, 100.0])
  assert kernel_speed.differs(jnp.array([0.019, 102.0]), truth, 0.02) == ("", pytest.approx(2.0))
  assert kernel_speed.differs(jnp.array([0.021, 100.0]), truth, 0.02)[0]
  assert kernel_speed.differs(jnp.array([0.0, 102.1]), truth, 0.02)[0]


def test_infinity_is_borne_only_where_it_should_be():
  truth = jnp.array([jnp.inf, -jnp.inf])
  assert kernel_speed.differs(truth, truth, 0.02) == ("", 0.0)
  for wrong in ([2.0, -jnp.inf], [-jnp.inf, -jnp.inf], [jnp.nan, -jnp.inf]):
    assert kernel_speed.differs(jnp.array(wrong), truth, 0.02)[0]


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, "artefact: got None, expected a dict of projections, layout"),
    ({}, "artefact: got {}"),
    ({**PLAIN, "extra": 1}, "expected a dict of"),
    ({**PLAIN, "layout": "columns"}, "layout: got columns, expected one of rows, features"),
    ({**PLAIN, "row_chunks": 3}, "row_chunks: got 3, expected one of 1, 2, 4"),
    ({**PLAIN, "row_chunks": 10**5000}, "row_chunks: got int, expected one of"),
    ({**PLAIN, "row_chunks": True}, "row_chunks: got True"),
    ({**PLAIN, "row_chunks": 1.0}, "row_chunks: got 1.0"),
    ({**PLAIN, "sigmoid": ["tanh"]}, "sigmoid: got ['tanh'], expected one of logistic"),
  ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(artefact, reason: str):
  for judge in (TINY.verify, TINY.confirm):
    score = judge(artefact)
    assert not score.is_valid and reason in score.reason


@hypothesis.given(
  st.dictionaries(st.sampled_from([*PLAIN, 3]), st.one_of(st.none(), st.floats(), st.text()))
)
def test_nothing_makes_the_verifier_raise(artefact):
  assert not TINY.verify(artefact).is_valid
  assert not TINY.verify({**PLAIN, **dict.fromkeys(artefact), "layout": 1}).is_valid


def test_impossible_settings_are_refused():
  with pytest.raises(ValueError, match="Schedule.layout: got x, expected one of rows, features"):
    kernel_speed.Schedule(layout="x")
  with pytest.raises(ValueError, match="TriMulSpeed.size: got 12, expected a positive multiple"):
    kernel_speed.TriMulSpeed(12)
  with pytest.raises(ValueError, match="TriMulSpeed.hidden: got 0, expected a positive"):
    kernel_speed.TriMulSpeed(8, hidden=0)
  with pytest.raises(ValueError, match="got laps=4, expected an odd number, at least 3; take 9"):
    kernel_speed.TriMulSpeed(8, laps=4)
  with pytest.raises(ValueError, match="TileSpeed.kernel: got 'attention', expected 'matmul' or"):
    kernel_speed.TileSpeed("attention")


def test_fields_and_schedule_name_the_same():
  assert list(PLAIN) == [field.name for field in kernel_speed.FIELDS]
  for field in (*kernel_speed.FIELDS, *kernel_speed.MATMUL_FIELDS, *kernel_speed.NORM_FIELDS):
    assert 2 <= len(field.choices) <= kernel_speed.FieldEdits.NUM_CHOICES
  assert json.loads(json.dumps(PLAIN)) == PLAIN
  assert dataclasses.asdict(kernel_speed.Schedule()) == PLAIN


def test_edits_by_hand():
  # Fields are 1 to 13, choices 14 to 21.
  assert LANGUAGE.vocab_size == 24 and LANGUAGE.allowed[:3] == ((1, 14), (14, 22), (0, 14))
  assert LANGUAGE.prompt(FEATURES) == (0, 14, 15, 14, 14, 15, 14, 15, *[14] * 6)
  assert LANGUAGE.apply(PLAIN, [2, 15, 7, 15, 5, 15, 0], 0) == FEATURES
  # The third choice of two folds to the first.
  assert LANGUAGE.apply(FEATURES, [2, 16, 0], 0) == {**FEATURES, "layout": "rows"}
  assert PLAIN["layout"] == "rows"


@pytest.mark.parametrize(
  ("sentence", "message"),
  [
    ([], "FieldEdits.apply: got 0 tokens, expected 8, or pairs of a field and a choice"),
    ([0], "got 1 tokens, expected 8"),
    ([2, 15], "got 2 tokens, expected 8"),
    ([2, 0], "got 2 tokens"),
    ([2, 15] * 4 + [0], "got 9 tokens"),
    ([2, 22, 0], "got token 22 at place 1, expected 14 to 21; see `allowed`"),
    ([2, 15, 0, 15, 2, 15, 2, 15], "got token 0 at place 2, expected 1 to 13"),
  ],
)
def test_broken_sentences_are_refused(sentence, message: str):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(PLAIN, sentence, 0)


@hypothesis.given(
  st.tuples(*(st.integers(max(first, 1), past - 1) for first, past in LANGUAGE.allowed))
)
def test_every_sentence_makes_a_schedule(sentence):
  edited = LANGUAGE.apply(PLAIN, sentence, 0)
  kernel_speed.Schedule(**edited)
  assert LANGUAGE.apply(PLAIN, sentence, 1) == edited
  assert LANGUAGE.apply(PLAIN, [*sentence[:2], 0], 0) == LANGUAGE.apply(
    PLAIN, sentence[:2] * 4, 0
  )


@pytest.mark.few(1)
@pytest.mark.parametrize("baseline", ["classical", "polished_starts"])
def test_baselines_yield_schedules(baseline: str):
  made = TINY.classical(0) if baseline == "classical" else TINY.polished_starts(0)
  kernel_speed.Schedule(**next(made))


def test_it_is_an_environment_with_baselines():
  for environment in (TINY, kernel_speed.TileSpeed(), kernel_speed.TileSpeed("rms_norm")):
    assert isinstance(environment, environment_lib.Environment)
    assert isinstance(environment, environment_lib.Baselines)
    assert isinstance(environment, environment_lib.Timed)
    assert isinstance(environment.language, environment_lib.EditLanguage)
    start = environment.start(0)
    assert not kernel_speed.complaint(start, environment.fields)
    text = environment.describe(start, environment_lib.invalid("not timed"))
    assert "improve(artefact, seconds, seed)" in text and str(start) in text
  assert len(TINY.picture(PLAIN).axes[0].lines) == 3


needs_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="no CPU is the default")


@pytest.mark.parametrize("seed", range(4))
def test_walked_tiles_give_what_the_definition_gives(seed: int):
  random = np.random.default_rng(seed)
  environment = kernel_speed.TileSpeed(rows=67, columns=300, features=200)
  for _ in range(3):
    chosen = {
      field.name: field.choices[random.integers(len(field.choices))]
      for field in environment.fields
    }
    rows = int(random.integers(1, 300))
    x, w = environment._inputs(seed, rows)
    got = kernel_speed.walked_matmul(matmul.Config(**chosen), x, w)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert got.shape == (rows, 300) and got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1e-2, atol=2e-2)
    # The twin: one contraction step less is seen.
    assert kernel_speed.differs(got[:, :-1], expected[:, 1:], kernel_speed.TOLERANCE)[0]
  environment = kernel_speed.TileSpeed("rms_norm", rows=67, features=1100)
  for field in environment.fields:
    for choice in field.choices:
      x, scale = environment._inputs(seed, 67)
      tiles = rms_norm.Config(**{**environment.start(0), field.name: choice})
      got = kernel_speed.walked_norm(tiles, x, scale)
      expected = rms_norm.reference(x, scale).astype(x.dtype)
      assert kernel_speed.differs(got, expected, kernel_speed.TOLERANCE)[0] == ""


@needs_a_cpu
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_are_timed_on_a_cpu_by_their_walk(kernel: str):
  environment = kernel_speed.TileSpeed(kernel, rows=64, columns=128, features=1024)
  score = environment.verify(environment.start(0))
  assert score.is_valid and 0 < score.value < 100, score.reason


@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_that_are_none_are_refused(kernel: str):
  environment = kernel_speed.TileSpeed(kernel)
  assert "max_stages: got 9" in kernel_speed.TileSpeed().verify(
    {**kernel_speed.TileSpeed().start(0), "max_stages": 9}
  ).reason  # fmt: skip
  assert environment.check({}, rows=8, seed=0).startswith("artefact: got {}")


needs_interpreter = pytest.mark.skipif(
  gpu.device_reason(True) is not None, reason="JAX has no public GPU interpreter"
)


@pytest.mark.long
@needs_interpreter
def test_tiles_of_the_norm_are_right_in_the_interpreter():
  environment = kernel_speed.TileSpeed("rms_norm", rows=4, features=256)
  start = environment.start(0)
  assert environment.check(start, rows=4, seed=0) == ""
  wrong = kernel_speed.TileSpeed("rms_norm", rows=4, features=9000)
  assert "got 9000 features, expected a multiple of 8 from 8" in wrong.check(start, rows=4, seed=0)


@needs_interpreter
@pytest.mark.long
def test_tiles_of_the_matmul_are_right_in_the_interpreter():
  environment = kernel_speed.TileSpeed(rows=128, columns=256, features=128)
  for change in ({}, {"block_m": 64, "block_k": 128, "max_stages": 2}, {"swapped_rows": 64}):
    assert environment.check({**environment.start(0), **change}, rows=40, seed=1) == ""


@pytest.mark.skipif(gpu.device_reason(True) is None, reason="JAX has the interpreter")
def test_tiles_are_not_checked_without_the_interpreter():
  environment = kernel_speed.TileSpeed("rms_norm", rows=4, features=256)
  assert "expected JAX 0.11.1 or later" in environment.check(environment.start(0), rows=4, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm"])
def test_tiles_are_timed_on_a_gpu(kernel: str):
  environment = kernel_speed.TileSpeed(kernel)
  score = environment.verify(environment.start(0))
  assert score.is_valid and score.value > 0.2, score.reason
