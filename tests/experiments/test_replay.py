"""Tokens of a run have equal bits when computed again; a changed weight is traced to its layer."""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments import replay


def test_every_token_of_a_request_replays(trained):
  finding = replay.replay(trained[0] / "rl_tiled", "0/0/3")
  assert finding.is_equal, finding.text
  assert finding.text.startswith("equal bits: request 0/0/3, 12 of 12 tokens, weights of")


def test_one_token_replays(trained):
  finding = replay.replay(trained[0] / "rl_tiled", "0/0/1", token=11)
  assert finding.is_equal, finding.text
  assert "1 of 12 tokens" in finding.text


@pytest.mark.parametrize("layer", [1, 2])
def test_a_flipped_bit_is_traced_to_its_layer(trained, layer: int):
  finding = replay.replay(trained[0] / "rl_tiled", "0/0/0", perturb=layer)
  assert not finding.is_equal
  assert finding.layer == layer
  assert f"come out of layer {layer} of 2" in finding.text


def test_a_changed_record_is_told_from_a_changed_computation(run_copy: pathlib.Path):
  # The journal's noise came from seed 0: under another, tokens differ and no layer does.
  path = run_copy / "config.json"
  values = json.loads(path.read_text())
  path.write_text(json.dumps(values | {"seed": 1}))
  finding = replay.replay(run_copy, "0/0/0")
  assert not finding.is_equal
  assert finding.layer is None
  assert "no layer differs between prefill in one piece and token by token" in finding.text


def test_weights_that_are_not_kept_are_named(trained):
  with pytest.raises(ValueError, match=r"version 1, whose checkpoint is not kept \(0, 2 are\)"):
    replay.replay(trained[0] / "rl_tiled", "1/0/0")


def test_the_first_weights_are_the_model_itself(run_copy: pathlib.Path):
  for path in (run_copy / "checkpoints" / "step_00000000").rglob("*"):
    if path.is_file():
      path.unlink()
  (run_copy / "checkpoints" / "step_00000000").rename(run_copy / "elsewhere")
  finding = replay.replay(run_copy, "0/0/2")
  assert finding.is_equal, finding.text
  assert "as it is now" in finding.text


def test_other_numerics_are_refused(run_copy: pathlib.Path):
  path = run_copy / "config.json"
  values = json.loads(path.read_text())
  values["numerics"]["row_tile"] = 64
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=r"another numerics fingerprint \(row_tile was '16' and is"):
    replay.replay(run_copy, "0/0/0")


def test_a_run_of_adapters_is_refused(run_copy: pathlib.Path):
  path = run_copy / "config.json"
  values = json.loads(path.read_text())
  values["lora_rank"] = 2
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=r"got a run of adapters \(lora_rank=2\), expected one that"):
    replay.replay(run_copy, "0/0/0")


def test_what_is_not_there_is_refused(trained, tmp_path: pathlib.Path):
  run = trained[0] / "rl_tiled"
  with pytest.raises(ValueError, match=r"--run: got .*, which has no config.json, expected"):
    replay.replay(tmp_path, "0/0/0")
  with pytest.raises(ValueError, match=r"--request: got '3', expected STEP/GROUP/MEMBER"):
    replay.replay(run, "3")
  with pytest.raises(ValueError, match=r"does not hold, expected one of its steps 0 \(8 roll"):
    replay.replay(run, "7/0/0")
  with pytest.raises(ValueError, match=r"--token: got 12, expected 0 to 11"):
    replay.replay(run, "0/0/0", token=12)
  with pytest.raises(ValueError, match=r"--perturb: got layer 3, expected 1 to 2"):
    replay.replay(run, "0/0/0", perturb=3)
