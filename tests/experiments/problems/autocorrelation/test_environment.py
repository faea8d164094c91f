"""The autocorrelation problems as a whole: contract, sizes and baselines."""

from __future__ import annotations

from autocorrelation_cases import ENVIRONMENTS, FIRST, SECOND
import pytest

from experiments.problems import autocorrelation
from seerjax.discovery import environment as environment_lib


@pytest.mark.parametrize(
  "environment", [*ENVIRONMENTS, autocorrelation.FirstAutocorrelation()], ids=lambda e: e.name
)
def test_the_contract_of_an_environment_holds(environment):
  assert isinstance(environment, environment_lib.Environment)
  assert isinstance(environment, environment_lib.Baselines)
  language = environment.language
  assert isinstance(language, environment_lib.EditLanguage)
  assert language.vocab_size % 8 == 0 and language.vocab_size <= 128
  assert language.stop_token == 0
  for low, high in language.allowed:
    assert 0 <= low < high <= language.vocab_size
  start = environment.start(3)
  assert start == environment.start(3) != environment.start(4)
  score = environment.verify(start)
  assert score.is_valid
  ids = language.prompt(start)
  assert len(ids) == 34 and all(0 <= id < language.vocab_size for id in ids)
  text = environment.describe(start, score)
  for part in ("improve(artefact, seconds, seed)", f"{score.value:.10f}", f"{start[0]:.6g}"):
    assert part in text
  axes = environment.picture(start).axes
  assert len(axes) == 2 and f"{score.value:.8f}" in axes[1].get_title()
  values = [published.value for published in environment.published]
  assert values == sorted(values, reverse=environment.is_maximised)


@pytest.mark.parametrize("kind", [type(FIRST), type(SECOND)])
def test_impossible_sizes_are_refused(kind):
  for num_steps in (1, 1_000_001):
    with pytest.raises(ValueError, match=f"num_steps: got {num_steps}, expected 2 to 1000000"):
      kind(num_steps=num_steps)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("baseline", ["classical", "polished_starts"])
def test_baselines_yield_valid_functions_that_beat_a_start(environment, baseline):
  def items():
    return environment.classical(1) if baseline == "classical" else environment.polished_starts(1)

  endless = items()
  first, second = next(endless), next(endless)
  assert first == next(items()) and first != second
  before = environment.verify(environment.start(0)).value
  for item in (first, second):
    assert environment_lib.is_better(environment, environment.verify(item).value, before)


@pytest.mark.long
def test_the_classical_method_passes_alphaevolve_of_2025_on_the_second():
  items = autocorrelation.SecondAutocorrelation().classical(0)
  environment = autocorrelation.SecondAutocorrelation()
  best = max(environment.verify(next(items)).value for _ in range(12))
  assert best > 0.8962
