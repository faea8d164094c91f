"""The invariance experiments, at a size of seconds, and the twin that must show a difference."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import made_rollouts
import numpy as np
import pytest

from experiments.invariance import nano as invariance
from seerjax import metrics
from seerjax.commands import generate
from seerjax.rollout import groups
from seerjax.tasks import loading
from seerjax.types import Completion


def completion(tokens: tuple[int, ...], logprobs: list[float]) -> Completion:
  return made_rollouts.completion("probe", tokens, logprobs=logprobs, finish_reason="length")


def test_differences_by_hand():
  same = completion((1, 2, 3), [-1.0, -2.0, -3.0])
  other = completion((1, 2, 4), [-1.0, -2.0, -3.0])
  shorter = completion((1,), [-1.0])
  found = invariance.differences([same, same, other, shorter])
  assert found["completions"] == 4
  assert found["distinct_tokens"] == found["distinct_bits"] == 3
  assert found["most_common"] == 2
  assert found["first_divergence"] == 1  # The shorter one ends before token 1.
  found = invariance.differences([same, same])
  assert (found["distinct_tokens"], found["distinct_bits"]) == (1, 1)
  assert found["first_divergence"] is found["first_bit_divergence"] is None


def test_one_flipped_bit_of_a_log_probability_is_seen():
  same = completion((1, 2), [-1.0, -2.0])
  values = same.behaviour_logprobs.copy()
  values.view(np.uint32)[1] ^= 1
  found = invariance.differences([same, dataclasses.replace(same, behaviour_logprobs=values)])
  assert (found["distinct_tokens"], found["first_divergence"]) == (1, None)
  assert (found["distinct_bits"], found["first_bit_divergence"]) == (2, 1)


@pytest.mark.long
def test_one_prompt_in_random_company_and_its_price(tiny: str, tmp_path: pathlib.Path):
  config = invariance.InvarianceConfig(
    model=tiny,
    prompt="Tom has 3 apples and buys 4 more. How many apples does Tom have now?",
    completions=24,
    max_tokens=8,
    batch_sizes=(2,),
    decode_steps=2,
    repetitions=1,
  )
  lines: list[str] = []
  results = invariance.run(config, ("b", "d"), tmp_path, lines.append)
  tiled, untiled = results["b"]["tiled"], results["b"]["untiled"]
  assert tiled["completions"] == untiled["completions"] == 24
  assert (tiled["distinct_tokens"], tiled["distinct_bits"]) == (1, 1)
  assert untiled["distinct_bits"] > 1  # The twin: plain XLA follows the batch.
  assert set(results["d"]) == {"tiled", "tiled, 1 slab", "untiled", "native"}
  assert all(sizes[2]["median"] > 0 for sizes in results["d"].values())
  text = (tmp_path / "table.md").read_text()
  assert "| tiled | 24 | 1 | none | 1 | none |" in text
  assert text in "\n".join(lines)
  assert json.loads((tmp_path / "results.json").read_text())["config"]["completions"] == 24
  assert (tmp_path / "invariance.png").stat().st_size > 1000


@pytest.mark.long
def test_the_prompt_is_that_of_the_longest_answer_that_ends(tiny: str):
  config = invariance.InvarianceConfig(model=tiny, max_tokens=6)
  prompt, length = invariance.longest_answered(config, 0.0)
  policy, _ = generate.load(tiny)
  task = loading.load("word_problems")
  candidates = [
    groups.prompt_tokens(
      task.problem("heldout", groups.problem_index(place, task.num_problems("heldout"), 0)),
      policy.require_tokenizer(),
    )
    for place in range(invariance.CANDIDATES)
  ]
  # With random weights no completion ends early; of equal lengths the first is chosen.
  assert (prompt, length) == (candidates[0], 6)


@pytest.mark.long
def test_training_is_on_policy_to_the_bit(trained):
  _, results = trained
  assert results["tiled"] == {key: [0.0, 0.0] for key in results["tiled"]}
  assert max(results["untiled"]["max_abs_logprob_gap"]) > 0
  assert "| 2 | 0 | 0 |" in invariance.tables({"c": results})


def test_ratios_of_the_price_by_hand():
  def rate(median: float) -> dict[str, float]:
    return dict(median=median, lowest=median - 10, highest=median + 10)

  results = {
    "tiled": {1: rate(100.0), 2: rate(300.0)},
    "untiled": {1: rate(400.0), 2: rate(500.0)},
    "native": {1: rate(500.0), 2: rate(600.0)},
  }
  text = invariance.tables({"d": results})
  assert "| batch | tiled | untiled | native | tiled / untiled | native / untiled | nat" in text
  assert "| 500 (490 to 510) | 0.25 | 1.25 | 5.00 |" in text
  assert "| untiled | 1 | 1.5 | 1.25 | **no** |" in text
  assert "| untiled | 2 | 1 | 1.20 | yes |" in text
  assert "| tiled | 1 | 4 | 5.00 | yes |" in text
  assert "| tiled | 2 |" not in text  # No target there.


def test_a_part_that_is_none_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"--part: got e, expected some of a, b, c, d"):
    invariance.run(invariance.InvarianceConfig(), ("a", "e"), tmp_path, print)
  with pytest.raises(ValueError, match=r"--part: got none, expected some of a, b, c, d"):
    invariance.run(invariance.InvarianceConfig(), (), tmp_path, print)


def test_what_part_c_cannot_run_is_refused_before_the_parts_ahead_of_it(tiny, tmp_path):
  lines: list[str] = []
  config = invariance.InvarianceConfig(model=tiny)
  other = tmp_path / "other"
  (other / "rl_tiled").mkdir(parents=True)
  (other / "rl_tiled" / metrics.FILE_NAME).write_text("{}\n")
  with pytest.raises(ValueError, match=r"rl_tiled: got the directory of another run"):
    invariance.run(config, ("a", "c"), other, lines.append)
  config = invariance.InvarianceConfig(model=tiny, max_tokens=380)
  with pytest.raises(ValueError, match=r"max_tokens 380, expected a sum of at most 384 .Engine"):
    invariance.run(config, ("a", "c"), tmp_path, lines.append)
  assert not lines
