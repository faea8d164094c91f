"""Denoising: counts are dealt binomially, pipelines are data, and every number is recomputed."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import pickle
import subprocess
import sys
import tempfile
import zipfile

import h5py
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import sparse

from experiments.problems import denoising
from seerjax.discovery import environment as environment_lib

ENVIRONMENT = denoising.Denoising()
LANGUAGE = ENVIRONMENT.language
MAGIC = {
  "steps": [
    {"op": "normalise"},
    {"op": "sqrt"},
    {"op": "diffuse", "neighbours": 5, "times": 2, "decay": 1.0},
    {"op": "invert"},
  ]
}
# One of each operation, in an order that is a pipeline.
EVERY_STEP = {
  "normalise": [{"op": "normalise"}],
  "sqrt": [{"op": "sqrt"}],
  "log": [{"op": "log"}],
  "invert": [{"op": "log"}, {"op": "invert"}],
  "svd": [{"op": "sqrt"}, {"op": "svd", "rank": 8}],
  "diffuse": [{"op": "diffuse", "neighbours": 40, "times": 6, "decay": 0.5}],
  "genes": [{"op": "genes", "neighbours": 60, "weight": 0.5}],
  "alra": [{"op": "alra", "rank": 8, "quantile": 0.05}],
  "nmf": [{"op": "nmf", "rank": 4, "iterations": 10}],
  "shrink": [{"op": "shrink", "strength": 0.1}],
  "blend": [{"op": "blend", "source": "mean", "weight": 0.1}],
  "save": [{"op": "save"}, {"op": "sqrt"}, {"op": "blend", "source": "saved", "weight": 0.5}],
  "rescale": [{"op": "rescale"}],
  "power": [{"op": "power", "exponent": 0.9}],
}


@functools.cache
def small() -> denoising.Denoising:
  """A thin set of 150 cells x 40 genes, for what runs many pipelines."""
  rng = np.random.default_rng(0)
  whole = denoising.simulate(5, num_cells=150, num_genes=40).counts
  counts = rng.binomial(whole.astype(int), 0.15)
  with tempfile.TemporaryDirectory() as folder:
    np.savez(f"{folder}/small.npz", counts=counts)
    return denoising.Denoising(f"{folder}/small.npz")


def sentences():
  whole = st.tuples(*(st.integers(first, past - 1) for first, past in LANGUAGE.allowed))
  return st.one_of(whole, whole.map(lambda tokens: (*tokens[:6], LANGUAGE.stop_token)))


def test_mse_by_hand():
  # Cells of one molecule a gene and of two: both normalise to 5000 a gene.
  same = denoising.mse(np.array([[1.0, 1.0]]), np.array([[2.0, 2.0]]))
  assert same == 0
  got = denoising.mse(np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 3.0], [5.0, 0.0]]))
  log = math.log1p
  expected = ((log(5000) - log(2500)) ** 2 + (log(5000) - log(7500)) ** 2) / 4
  assert got == pytest.approx(expected, rel=1e-12)


def test_poisson_by_hand():
  # Train had 8 molecules, these are 4: expectations are halved.
  got = denoising.poisson(np.array([[2.0, 6.0]]), np.array([[1.0, 3.0]]), 8.0)
  assert got == pytest.approx(((1 - math.log(1)) + (3 - 3 * math.log(3))) / 2, abs=1e-6)
  unseen = denoising.poisson(np.array([[8.0, 0.0]]), np.array([[3.0, 1.0]]), 8.0)
  assert unseen == pytest.approx((4 - 3 * math.log(4) - math.log(1e-6)) / 2, abs=1e-5)


def test_parts_add_up_and_are_binomial():
  counts = np.full((200, 100), 40.0)
  train, validation, heldout = denoising.split(counts, 3)
  assert (train + validation + heldout == counts).all()
  for part, share in ((train, 0.6), (validation, 0.2), (heldout, 0.2)):
    # 20,000 draws: five standard errors of a mean and of a variance.
    variance = 40 * share * (1 - share)
    assert part.mean() == pytest.approx(40 * share, abs=5 * math.sqrt(variance / 20_000))
    assert part.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / 20_000))
    assert (part == np.floor(part)).all() and part.min() >= 0
  assert np.corrcoef(train.ravel(), validation.ravel())[0, 1] == pytest.approx(
    -math.sqrt(0.6 * 0.2 / (0.4 * 0.8)), abs=0.03
  )


def test_the_split_and_the_simulated_set_follow_the_seed_alone():
  again, other = denoising.Denoising(), denoising.Denoising(seed=1)
  assert (again.train == ENVIRONMENT.train).all()
  assert (again.validation == ENVIRONMENT.validation).all()
  assert (other.train != ENVIRONMENT.train).any()
  assert again.verify(MAGIC) == ENVIRONMENT.verify(MAGIC)
  assert pickle.loads(pickle.dumps(again)).verify(MAGIC) == ENVIRONMENT.verify(MAGIC)


def test_simulated_counts_have_the_moments_of_a_negative_binomial():
  counts, truth, order = denoising.simulate(7)
  assert counts.shape == (denoising.SIMULATED_CELLS, denoising.SIMULATED_GENES)
  assert sorted(order) == list(range(len(counts)))
  assert truth is not None
  # Variance of gamma-Poisson: mean + mean^2 / 5.
  standardised = (counts - truth) / np.sqrt(truth + truth**2 / 5)
  assert standardised.mean() == pytest.approx(0, abs=0.02)
  assert standardised.var() == pytest.approx(1, abs=0.05)


def test_the_start_is_valid_plain_and_exactly_on_the_bar():
  start = ENVIRONMENT.start(0)
  score = ENVIRONMENT.verify(start)
  assert score.is_valid and [step["op"] for step in start["steps"]] == ["normalise", "shrink"]
  denoised = ENVIRONMENT.denoise(start)
  total = ENVIRONMENT.train.sum()
  assert denoising.poisson(denoised, ENVIRONMENT.validation, total) == ENVIRONMENT.poisson_limit
  assert json.loads(json.dumps(start)) == start


def test_diffusion_beats_the_start_on_every_part_and_on_the_truth():
  start = ENVIRONMENT.start(0)
  assert ENVIRONMENT.verify(MAGIC).value < 0.8 * ENVIRONMENT.verify(start).value
  assert ENVIRONMENT.heldout(MAGIC) < 0.8 * ENVIRONMENT.heldout(start)
  assert ENVIRONMENT.against_truth(MAGIC) < 0.5 * ENVIRONMENT.against_truth(start)
  assert ENVIRONMENT.poisson_share(MAGIC) > ENVIRONMENT.poisson_share(start) > 0


def test_a_found_pipeline_beats_the_best_diffusion_on_heldout_counts():
  # The best of `classical`'s whole grid by validation, and what a policy found in 6 steps.
  diffusion = [
    {"op": "normalise"},
    {"op": "sqrt"},
    {"op": "diffuse", "neighbours": 7, "times": 1, "decay": 2.0},
    {"op": "invert"},
  ]
  found = [
    {"op": "sqrt"},
    {"op": "normalise"},
    {"op": "diffuse", "neighbours": 7, "times": 2, "decay": 8.0},
    {"op": "power", "exponent": 1.1},
  ]
  scores = [ENVIRONMENT.verify({"steps": steps}) for steps in (diffusion, found)]
  assert [round(score.value, 3) for score in scores] == [1.760, 1.542]
  heldout = [ENVIRONMENT.heldout({"steps": steps}) for steps in (diffusion, found)]
  assert heldout[1] < 0.9 * heldout[0]
  # It is ahead by lying below the truth, as the module's first lines say.
  truth = [ENVIRONMENT.against_truth({"steps": steps}) for steps in (diffusion, found)]
  assert truth[1] > truth[0]


def test_value_and_reward_are_those_of_the_formulas():
  score = ENVIRONMENT.verify(MAGIC)
  value = denoising.mse(ENVIRONMENT.denoise(MAGIC), ENVIRONMENT.validation)
  assert (score.value, score.reward) == (value, 1 / (1e-8 + value))
  assert score.value != ENVIRONMENT.heldout(MAGIC)


@pytest.mark.parametrize("name", list(EVERY_STEP))
def test_every_step_keeps_cells_sums_and_finite_counts(name: str):
  artefact = {"steps": EVERY_STEP[name]}
  denoised = ENVIRONMENT.denoise(artefact)
  assert np.isfinite(denoised).all() and denoised.min() >= 0
  np.testing.assert_allclose(denoised.sum(axis=1), ENVIRONMENT.train.sum(axis=1), rtol=1e-9)
  assert (ENVIRONMENT.denoise(artefact) == denoised).all()


def test_every_operation_has_a_test():
  assert list(EVERY_STEP) == [operation.name for operation in denoising.OPERATIONS]


@pytest.mark.parametrize("name", ["normalise", "sqrt", "log", "invert"])
def test_scale_and_undone_transforms_change_nothing(name: str):
  denoised = ENVIRONMENT.denoise({"steps": EVERY_STEP[name]})
  np.testing.assert_allclose(denoised, ENVIRONMENT.train, rtol=1e-9, atol=1e-9)


def test_shrink_by_hand():
  # Cells of 4 and 2 molecules (median 3), genes' shares 1/2 each.
  train = np.array([[3.0, 1.0], [0.0, 2.0]])
  denoised = denoising.run([{"op": "shrink", "strength": 1.0}], train)
  sizes = np.array([[4 / 3], [2 / 3]])
  np.testing.assert_allclose(
    denoised, (sizes * train + np.array([[2.0, 2.0], [1.0, 1.0]])) / (sizes + 1)
  )


def test_blend_by_hand():
  train = np.array([[3.0, 1.0], [0.0, 2.0]])
  denoised = denoising.run([{"op": "blend", "source": "mean", "weight": 0.5}], train)
  np.testing.assert_allclose(denoised, [[2.5, 1.5], [0.5, 1.5]])


def test_alra_restores_zeros_and_keeps_what_was_seen():
  denoised = denoising.run([{"op": "alra", "rank": 8, "quantile": 0.0}], ENVIRONMENT.train)
  low = denoising.run([{"op": "svd", "rank": 8}], ENVIRONMENT.train)
  seen = ENVIRONMENT.train > 0
  assert (denoised[seen] > 0).all()
  assert (denoised[~seen] == 0).mean() > (low[~seen] == 0).mean()


def test_full_rank_svd_and_long_nmf_give_back_the_counts():
  counts = np.random.default_rng(0).poisson(5.0, (12, 6)).astype(float)
  np.testing.assert_allclose(denoising.run([{"op": "svd", "rank": 8}], counts), counts, atol=1e-9)
  wide = counts.T.copy()
  np.testing.assert_allclose(denoising.run([{"op": "svd", "rank": 8}], wide), wide, atol=1e-9)
  product = np.outer([1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 2.0, 2.0])
  nmf = [{"op": "nmf", "rank": 1, "iterations": 30}]
  np.testing.assert_allclose(denoising.run(nmf, product), product, rtol=1e-9)


@pytest.mark.parametrize("shape", [(40, 10), (10, 40)])
def test_diffusion_averages_and_keeps_what_is_constant(shape: tuple[int, int]):
  x = np.random.default_rng(1).normal(size=shape)
  smooth = denoising.diffuse(x, 4, 3, 2.0)
  assert smooth.var(axis=0).sum() < x.var(axis=0).sum()
  assert (smooth.max(axis=0) <= x.max(axis=0) + 1e-12).all()
  constant = np.full(shape, 3.0)
  np.testing.assert_allclose(denoising.diffuse(constant, 4, 3, 2.0), constant)


def test_diffusion_by_hand():
  # Two pairs far apart: with one neighbour and a hard kernel, partners are averaged only.
  x = np.array([[0.0, 0.0], [0.0, 1.0], [100.0, 0.0], [100.0, 1.0]])
  smooth = denoising.diffuse(x, 1, 1, 16.0)
  share = math.exp(-1) / (1 + math.exp(-1))
  np.testing.assert_allclose(smooth[:, 1], [share, 1 - share, share, 1 - share], atol=1e-9)
  np.testing.assert_allclose(smooth[:, 0], x[:, 0], atol=1e-9)


def step(op: str, **knobs):
  return {"steps": [{"op": op, **knobs}]}


@pytest.mark.parametrize(
  ("artefact", "reason"),
  [
    (None, 'artefact: got None, expected {"steps": [...]}'),
    ([], "artefact: got []"),
    ({"steps": [], "matrix": []}, "artefact: got {'steps': [], 'matrix': []}"),
    ({"steps": []}, "steps: got 0 steps, expected a list of 1 to 8"),
    ({"steps": "log"}, "steps: got str, expected a list"),
    ({"steps": [{"op": "log"}] * 9}, "steps: got 9 steps"),
    ({"steps": ["log"]}, 'steps[0]: got log, expected a dict whose "op" is one of normalise'),
    ({"steps": [{"op": ["log"]}]}, "steps[0]: got {'op': ['log']}"),
    (step("magic"), "steps[0]: got {'op': 'magic'}"),
    (step("svd"), "steps[0]: got the fields op, expected op, rank"),
    (step("log", rank=3), "steps[0]: got the fields op, rank, expected op"),
    (step("svd", rank=0), "steps[0].rank: got 0, expected an integer from 1 to 48"),
    (step("svd", rank=10**5000), "steps[0].rank: got int, expected an integer from 1 to 48"),
    (step("svd", rank=True), "steps[0].rank: got True, expected an integer"),
    (step("svd", rank=2.0), "steps[0].rank: got 2.0, expected an integer"),
    (step("svd", rank="2"), "steps[0].rank: got 2, expected an integer"),
    (step("power", exponent=math.nan), "steps[0].exponent: got nan, expected a number from 0.6"),
    (step("power", exponent=1j), "steps[0].exponent: got 1j, expected a number"),
    (step("blend", source="test", weight=0.5), "steps[0].source: got test, expected one of raw"),
    (step("blend", source=[], weight=0.5), "steps[0].source: got [], expected one of raw"),
    (step("blend", source="saved", weight=0.5), "steps[0]: got a blend with what is saved"),
    (step("invert"), "steps[0]: got invert, expected a sqrt or log before it"),
    (step("normalise"), "pipeline: got a Poisson number of"),
    (step("shrink", strength=20.0), "nats, expected at most"),
  ],
)
def test_what_is_no_answer_is_refused_with_the_reason(artefact, reason: str):
  score = ENVIRONMENT.verify(artefact)
  assert not score.is_valid and reason in score.reason


@hypothesis.given(st.recursive(
  st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3)
  | st.dictionaries(st.sampled_from(["steps", "op", "rank"]), inner, max_size=3),
  max_leaves=8,
))  # fmt: skip
def test_nothing_makes_the_verifier_raise(artefact):
  assert not ENVIRONMENT.verify(artefact).is_valid
  assert not ENVIRONMENT.verify({"steps": [artefact]}).is_valid


def test_reports_refuse_what_is_no_pipeline():
  with pytest.raises(ValueError, match="Denoising: steps: got 0 steps"):
    ENVIRONMENT.heldout({"steps": []})


def test_the_edit_language_keeps_its_form():
  assert LANGUAGE.vocab_size % 8 == 0 and LANGUAGE.vocab_size <= 128
  assert max(past for _, past in LANGUAGE.allowed) <= LANGUAGE.vocab_size
  longest = {"steps": [dict(MAGIC["steps"][2]) for _ in range(denoising.MAX_STEPS)]}
  for artefact in (ENVIRONMENT.start(0), MAGIC, longest):
    ids = LANGUAGE.prompt(artefact)
    assert 1 <= len(ids) <= 100 and all(0 <= token < LANGUAGE.vocab_size for token in ids)
  assert LANGUAGE.prompt(MAGIC) != LANGUAGE.prompt(ENVIRONMENT.start(0))


def tokens(verb: str, place: int, op: str = "normalise", levels=(5, 5, 5)):
  names = [operation.name for operation in denoising.OPERATIONS]
  offsets = [first for first, _ in LANGUAGE.allowed[1:6]]
  numbers = [place, names.index(op), *levels]
  verb_id = 1 + denoising.PipelineEdits.VERBS.index(verb)
  return [verb_id, *(first + number for first, number in zip(offsets, numbers))]


def test_edits_by_hand():
  stop = [LANGUAGE.stop_token]
  first, second, third, last = MAGIC["steps"]
  svd = {"op": "svd", "rank": 1}
  for sentence, expected in [
    (tokens("insert", 4, "svd", (0, 0, 0)) + stop, [*MAGIC["steps"], svd]),
    (tokens("insert", 0, "svd", (0, 9, 9)) + stop, [svd, *MAGIC["steps"]]),
    (tokens("replace", 1, "svd", (0, 0, 0)) + stop, [first, svd, third, last]),
    (tokens("delete", 3) + stop, [first, second, third]),
    (
      tokens("nudge", 2, levels=(15, 8, 0)) + stop,
      [first, second, {**third, "neighbours": 6, "times": 2, "decay": 0.5}, last],
    ),
    (tokens("delete", 3) + tokens("delete", 0), [second, third]),
    # Places beyond the end fold into the pipeline.
    (tokens("delete", 7) + stop, [first, second, third]),
  ]:
    before = json.dumps(MAGIC)
    assert LANGUAGE.apply(MAGIC, sentence, 0) == {"steps": expected}
    assert json.dumps(MAGIC) == before


def test_polishing_never_makes_a_pipeline_worse():
  environment = small()
  polished = environment.language.apply(MAGIC, [*tokens("polish", 2), LANGUAGE.stop_token], 0)
  assert environment.verify(polished).value < environment.verify(MAGIC).value
  assert environment.language.apply(MAGIC, [*tokens("polish", 0), LANGUAGE.stop_token], 0) == MAGIC


@hypothesis.given(sentences(), sentences())
def test_sentences_make_pipelines_or_say_why_not(one, two):
  language = small().language
  artefact = small().start(0)
  for sentence in (one, two):
    try:
      edited = language.apply(artefact, sentence, 0)
    except ValueError:
      continue
    assert language.apply(artefact, sentence, 1) == edited
    assert json.loads(json.dumps(edited)) == edited
    if denoising.complaint(edited):
      # The order of transforms is all that a sentence can get wrong.
      assert "invert" in denoising.complaint(edited) or "save" in denoising.complaint(edited)
    else:
      artefact = edited


@pytest.mark.parametrize(
  ("sentence", "message"),
  [
    ([], "PipelineEdits.apply: got 0 tokens, expected 12, or 6 and then the stop token 0"),
    ([0], "got 1 tokens, expected 12"),
    (tokens("delete", 0), "got 6 tokens, expected 12"),
    ([*tokens("delete", 0)[:3], 0], "got 4 tokens, expected 12"),
    ([*tokens("delete", 0), *tokens("delete", 0), 0], "got 13 tokens, expected 12"),
    ([79, *tokens("delete", 0)[1:], 0], "got token 79 at place 0, expected 1 to 5; see `allowed`"),
    ([*tokens("delete", 0), 0, *tokens("delete", 0)[1:]], "got token 0 at place 6, expected 1 to"),
  ],
)
def test_broken_sentences_are_refused(sentence, message: str):
  with pytest.raises(ValueError, match=message):
    LANGUAGE.apply(MAGIC, sentence, 0)


def test_pipelines_neither_overflow_nor_vanish():
  whole = {"steps": [{"op": "log"}] * denoising.MAX_STEPS}
  with pytest.raises(ValueError, match="got an insertion into 8 steps, expected at most 8"):
    LANGUAGE.apply(whole, [*tokens("insert", 0), 0], 0)
  with pytest.raises(ValueError, match="got the deletion of the only step"):
    LANGUAGE.apply({"steps": [{"op": "log"}]}, [*tokens("delete", 0), 0], 0)


def test_baselines_yield_valid_and_repeatable_pipelines():
  environment = small()
  for baseline in (environment.classical, environment.polished_starts):
    one, two = baseline(3), baseline(3)
    found = [next(one) for _ in range(4)]
    assert found == [next(two) for _ in range(4)]
    assert all(environment.verify(artefact).is_valid for artefact in found)
  best = (artefact for artefact, _ in zip(environment.classical(0), range(24)))
  values = [environment.verify(artefact).value for artefact in best]
  assert values == sorted(values, reverse=True)
  assert values[-1] < environment.verify(environment.start(0)).value


def test_it_is_an_environment_with_baselines():
  assert isinstance(ENVIRONMENT, environment_lib.Environment)
  assert isinstance(ENVIRONMENT, environment_lib.Baselines)
  assert isinstance(LANGUAGE, environment_lib.EditLanguage)
  text = ENVIRONMENT.describe(MAGIC, ENVIRONMENT.verify(MAGIC))
  assert "improve(artefact, seconds, seed)" in text and str(MAGIC) in text
  for operation in denoising.OPERATIONS:
    assert f"  {operation.name}: " in text
  drawing = ENVIRONMENT.picture(MAGIC)
  assert len(drawing.axes) == 4
  assert f"held-out molecules {ENVIRONMENT.heldout(MAGIC):.4f};" in drawing.get_suptitle()


def test_counts_come_from_npz(tmp_path):
  counts = np.random.default_rng(0).poisson(3.0, (60, 30))
  counts[:, 7] = 0
  np.savez(tmp_path / "cells.npz", counts=counts)
  environment = denoising.Denoising(tmp_path / "cells.npz", seed=4)
  assert environment.name == "denoising_cells"
  # The gene that nobody has is left out.
  assert environment.train.shape == (60, 29)
  assert (environment.counts.counts == np.delete(counts, 7, axis=1)).all()
  assert environment.verify(environment.start(0)).is_valid
  assert len(environment.picture(environment.start(0)).axes) == 3
  with pytest.raises(ValueError, match="got denoising_cells, expected a simulated set"):
    environment.against_truth(environment.start(0))


def refused_counts():
  good = np.full((20, 10), 3.0)
  negative, half, empty = good.copy(), good.copy(), good.copy()
  negative[2, 3] = -1
  half[1, 1] = 0.5
  empty[5] = 0
  unknown = good.copy()
  unknown[0, 0] = math.nan
  large, thin = good.copy(), 10 * good
  large[0, 0] = 2**40
  thin[:, 3:] = 0
  return [
    (negative, "got -1.0 at cell 2, gene 3 in .*expected whole numbers of molecules from 0 to"),
    (half, "got 0.5 at cell 1, gene 1 .*give raw counts, not normalised ones"),
    (unknown, "got nan at cell 0, gene 0"),
    (empty, "got 0 molecules of cell 5 .*expected at least 20; remove empty cells"),
    (large, "got 1099511627776.0 at cell 0, gene 0 .*molecules from 0 to 2147483647"),
    (thin, "got molecules of 3 genes in .*expected 4 at least; give genes that cells have"),
    (good[0], r"got counts\[10\] .*expected cells x genes"),
    (good[:3], r"got counts\[3, 10\]"),
    (good.astype(complex), "got dtype complex128 .*expected integers or whole floats"),
    (np.zeros((5000, 4001), np.int8), r"got an array of \[5000, 4001\] .*at most 20000000 entries"),
  ]


@pytest.mark.parametrize(("counts", "message"), refused_counts())
def test_what_are_no_counts_is_refused(counts, message: str, tmp_path):
  np.savez_compressed(tmp_path / "bad.npz", counts=counts)
  with pytest.raises(ValueError, match=f"denoising.load: {message}"):
    denoising.load(tmp_path / "bad.npz")


def test_files_that_are_none_of_ours_are_refused(tmp_path):
  np.savez(tmp_path / "other.npz", matrix=np.ones((5, 5)))
  with pytest.raises(ValueError, match=r"got arrays \['matrix'\] .*expected 'counts'"):
    denoising.load(tmp_path / "other.npz")
  with pytest.raises(ValueError, match="got 'cells.csv', expected a name that ends in .npz or"):
    denoising.load(tmp_path / "cells.csv")


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="none.npz', expected a file; correct the path"):
    denoising.load(tmp_path / "none.npz")


def test_a_truncated_file_is_refused(tmp_path):
  path = tmp_path / "cells.npz"
  np.savez_compressed(path, counts=np.random.default_rng(0).poisson(3.0, (30, 12)))
  whole = path.read_bytes()
  for size in (0, 10, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match="which does not read .*expected a whole .npz of counts"):
      denoising.load(path)


def test_a_file_with_other_bytes_in_it_is_refused_or_read_as_it_was(tmp_path):
  path = tmp_path / "cells.npz"
  counts = np.random.default_rng(0).poisson(3.0, (30, 12))
  np.savez_compressed(path, counts=counts)
  whole, messages = path.read_bytes(), []
  for place in range(0, len(whole), 3):
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    try:
      assert (denoising.load(path).counts == counts).all()  # Dates, for one, are not looked at.
    except ValueError as error:
      messages.append(str(error))
  assert len(messages) > len(whole) // 6
  assert all(message.startswith("denoising.load: got ") for message in messages)


def test_the_array_that_was_checked_is_the_one_that_is_read(tmp_path):
  counts = np.random.default_rng(0).poisson(3.0, (30, 12))
  np.savez(tmp_path / "cells.npz", counts=counts)
  archive = zipfile.ZipFile(tmp_path / "cells.npz", "a")
  with archive, archive.open("counts", "w") as member:  # numpy would take this one for "counts".
    np.save(member, counts + 1)
  assert (denoising.load(tmp_path / "cells.npz").counts == counts).all()


def test_a_pipeline_that_overflows_is_refused(tmp_path):
  counts = (np.random.default_rng(0).random((20, 15)) * 2**31).astype(np.int64)
  np.savez(tmp_path / "large.npz", counts=counts)
  environment = denoising.Denoising(tmp_path / "large.npz")
  steps = [{"op": "power", "exponent": 1.5}] * 7 + [{"op": "svd", "rank": 3}]
  assert "far from overflow" in environment.verify({"steps": steps}).reason


def test_pickled_objects_are_refused(tmp_path):
  np.savez(tmp_path / "cells.npz", counts=np.array([[object()] * 5] * 5))
  with pytest.raises(ValueError, match="got dtype object in .*expected integers or whole floats"):
    denoising.load(tmp_path / "cells.npz")


def test_an_array_that_would_fill_the_memory_is_refused_unread(tmp_path):
  header = {"descr": "|i1", "fortran_order": False, "shape": (10**6, 10**6)}
  path = tmp_path / "cells.npz"
  with zipfile.ZipFile(path, "w") as archive, archive.open("counts.npy", "w") as member:
    np.lib.format.write_array_header_1_0(member, header)
  with pytest.raises(ValueError, match=r"got an array of \[1000000, 1000000\] .*take fewer cells"):
    denoising.load(path)


def test_h5ad_without_h5py_says_what_to_install(tmp_path):
  # In a process of its own, where the package cannot be found.
  program = """
import sys
sys.modules["h5py"] = None
from experiments.problems import denoising
denoising.load(sys.argv[1])
"""
  path = tmp_path / "cells.h5ad"
  path.touch()
  done = subprocess.run(
    [sys.executable, "-c", program, path],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
    check=False,
  )
  assert "h5py is not installed; run `pip install h5py`" in done.stderr


def write_sparse(path, matrix, **changes) -> None:
  """Writes X as AnnData does, but for what is said otherwise."""
  parts = {name: getattr(matrix, name) for name in ("data", "indices", "indptr")} | changes
  shape = parts.pop("shape", matrix.shape)
  with h5py.File(path, "w") as file:
    for name, part in parts.items():
      file[f"X/{name}"] = part
    file["X"].attrs["shape"] = shape
    file["X"].attrs["encoding-type"] = f"{matrix.format}_matrix"


def test_h5ad_files_that_are_none_of_ours_are_refused(tmp_path):
  path = tmp_path / "cells.h5ad"
  matrix = sparse.csr_matrix(np.full((6, 5), 9))
  with h5py.File(path, "w") as file:
    file["obs"] = np.ones(5)
  with pytest.raises(ValueError, match="which does not read .*expected a whole .h5ad of counts"):
    denoising.load(path)
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match="which does not read"):
    denoising.load(path)
  # Where an index leads, `toarray` writes.
  write_sparse(path, matrix, indices=matrix.indices + 1000)
  with pytest.raises(ValueError, match="which does not read .*indices"):
    denoising.load(path)
  write_sparse(path, matrix, shape=(10**6, 10**6))
  with pytest.raises(ValueError, match=r"got an array of \[1000000, 1000000\]"):
    denoising.load(path)


@pytest.mark.parametrize("form", ["dense", "csr_matrix", "csc_matrix", "layer"])
def test_counts_come_from_h5ad(form: str, tmp_path):
  counts = np.random.default_rng(1).poisson(3.0, (30, 12))
  path = tmp_path / "cells.h5ad"
  match form:
    case "dense" | "layer":
      with h5py.File(path, "w") as file:
        file["X"] = counts if form == "dense" else np.log1p(counts)
        if form == "layer":
          file["layers/counts"] = counts
    case _:
      write_sparse(path, getattr(sparse, form)(counts))
  assert (denoising.load(tmp_path / "cells.h5ad").counts == counts).all()
