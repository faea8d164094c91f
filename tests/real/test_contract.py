"""No schedule changes a bit of a pretrained model's completions, nor do the trainer's differ.

`tests/contract/test_models.py` draws small models with random weights; these tests use real weights
and text prompts, in both dtypes: batches, chunks, few pages, spills to host memory and to a disk
with damaged bytes, drafts of known completions, of a group's suffixes and of trees of these, one
instance and two with migration, kills. Each request is compared by bit with itself alone, with the
trainer's forward under `value_and_grad`, and with a second process.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import subprocess
import sys

import drawn_models
import model_cases
import pytest

DTYPES = ("float32", "bfloat16")
OF_A_BLOCK = drawn_models.OF_A_MACHINE  # Schedules, which share an engine's programs.
BLOCKS = 12  # In both dtypes, on one instance and on two.
ANOTHER_PROCESS, TWIN, DAILY = ((BLOCKS + place) * OF_A_BLOCK for place in range(3))
GEMMA_BLOCKS = (BLOCKS + 3, BLOCKS + 4)  # On two instances and on one.
GEMMA_WINDOW = 20  # Of the cases' 48 positions; the published window of 512 would hide none.
SHORT_CHUNK = 2
EVENTS = (
  "chunks",
  "preempted",
  "spilled",
  "came from the host",
  "killed",
  "resumed in the middle",
  "drafted tokens",
  "accepted tokens",
  "comparisons",
  "micro-batches",
)


def run_block(model, block, seed, tell_events):
  """Runs a block's schedules, and further ones until each kind of event occurred."""
  events = collections.Counter()
  names = EVENTS + (("several instances", "pages migrated") if block % 2 else ())
  for place in range(4 * OF_A_BLOCK):
    # Draws go on while six had no kill, say.
    if place >= OF_A_BLOCK and all(events[name] for name in names):
      break
    further = place // OF_A_BLOCK * 2 * BLOCKS
    number = OF_A_BLOCK * (block + further) + place % OF_A_BLOCK
    model_cases.run_case(drawn_models.draw_of(model, seed, number), events)
  assert events["cases"] >= OF_A_BLOCK
  tell_events(f"block {block}", events, names)


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_changes_a_bit_of_a_pretrained_model(block, smollm2, seed, tell_events):
  model = drawn_models.pretrained(str(smollm2), DTYPES[block // 2 % 2])
  run_block(model, block, seed, tell_events)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "block"), zip(DTYPES, GEMMA_BLOCKS, strict=True))
def test_no_schedule_changes_a_bit_of_windowed_layers(dtype, block, gemma3, seed, tell_events):
  run_block(windowed(str(gemma3), dtype), block, seed, tell_events)


def windowed(directory: str, dtype: str) -> drawn_models.Model:
  """Returns Gemma 3 with shorter windows, which reach every case; its weights are the published."""
  model = drawn_models.pretrained(directory, dtype)
  layers = tuple(
    layer if layer.attention.window is None else layer.changed(window=GEMMA_WINDOW)
    for layer in model.config.layers
  )
  return dataclasses.replace(model, config=model.config.changed(layers=layers))


@pytest.mark.real
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_schedule_changes_no_bit_of_a_pretrained_model(dtype, smollm2, seed, tell_events):
  model = drawn_models.pretrained(str(smollm2), dtype)
  # Few requests, with drafts from their group's texts; pages leave for the host and the disk. The
  # first draw with responses longer than a chunk.
  case = next(
    case
    for number in itertools.count(DAILY)
    for drawn in (drawn_models.draw_of(model, seed, number),)
    for case in (
      dataclasses.replace(
        drawn, groups=1, group_size=2, right=0.8, suffix_paths=1, chunk_tokens=SHORT_CHUNK
      ),
    )
    if drawn_models.requests_of(case)[0].sampling.max_tokens > 3 * SHORT_CHUNK
  )
  events = collections.Counter()
  model_cases.run_case(case, events)
  tell_events("one schedule", events, ("chunks", "drafted tokens", "comparisons", "micro-batches"))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_process_says_the_same(dtype, smollm2, seed):
  case = drawn_models.draw_of(drawn_models.pretrained(str(smollm2), dtype), seed, ANOTHER_PROCESS)
  ours = model_cases.digest_of(case, collections.Counter())
  done = subprocess.run(
    [sys.executable, model_cases.__file__, str(smollm2), dtype, str(seed), str(ANOTHER_PROCESS)],
    env=os.environ,
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  assert done.stdout.split()[-2] == ours, case


@pytest.mark.long
def test_the_untiled_path_is_noticed_on_a_pretrained_model(smollm2, seed):
  model = drawn_models.pretrained(str(smollm2), "bfloat16", "untiled")
  numbers = range(TWIN, TWIN + OF_A_BLOCK)
  assert model_cases.is_noticed(drawn_models.draw_of(model, seed, number) for number in numbers)
