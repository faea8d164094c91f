"""Beam search with drafts and without: steps of the engine and CPU seconds, search by search.

    taskset -c 1 python docs/results/speculation/beam_times.py [DRAFT [QUESTIONS]]

Each question is searched by all drafts in turn, so that what else the machine does hits them alike;
the first question compiles and does not count. Hypotheses and scores are compared as doubles. The
nano engine is the main job's, native where it runs.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from scipy import stats

import seerjax
from seerjax.engine import engine as engine_lib
from seerjax.models import loading as models
from seerjax.rollout import groups
from seerjax.run import presets
from seerjax.speculation import draft_loading, draft_model
from seerjax.tasks import loading as tasks
from seerjax.types import Request, SamplingParams

SHAPES = {"no drafts": None, "chain of 4": (4, 1), "comb of 4, 2 ids": (4, 2), "chain of 8": (8, 1)}


def main(draft: str, num_questions: int) -> None:
  model = models.load_model("nano", presets.main_job().numerics)
  config = engine_lib.EngineConfig(
    page_size=32, max_sequences=16, max_context=256, row_buckets=(64, 512)
  )
  engine = engine_lib.Engine(model, config=config)
  assert model.tokenizer is not None
  task = tasks.load("word_problems")
  sampling = SamplingParams(temperature=0.0, max_tokens=64, stop_token_ids=model.tokenizer.eos_ids)
  print(f"{'width':>5}  {'draft':<18}{'steps':>6}{'CPU s':>8}  time of no drafts / its own (95 %)")
  for width in (2, 4, 8):
    drafters = {}
    for name, shape in SHAPES.items():
      if shape:
        own = draft_model.DraftModelConfig(length=shape[0], width=shape[1], num_slots=16)
        drafters[name] = draft_loading.drafter_for(engine, draft, own)
      else:
        drafters[name] = None
    steps, seconds = ({name: [] for name in SHAPES} for _ in range(2))
    for index in range(num_questions + 1):
      problem = task.problem("heldout", index)
      prompt = groups.prompt_tokens(problem, model.tokenizer)
      request = Request(request_id=f"{index}", prompt=prompt, sampling=sampling, seed=0)
      found = []
      for name, drafter in drafters.items():
        before, begin = engine.counters.steps, time.process_time()
        found.append(seerjax.beam_search(engine, request, width, drafter=drafter))
        if index:
          seconds[name].append(time.process_time() - begin)
          steps[name].append(engine.counters.steps - before)
      assert all(one == found[0] for one in found), f"question {index}: hypotheses differ"
    plain = np.log(seconds["no drafts"])
    for name in SHAPES:
      ratio = plain - np.log(seconds[name])
      half = stats.t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / len(ratio) ** 0.5
      mean = ratio.mean()
      low, middle, high = np.exp([mean - half, mean, mean + half])
      print(
        f"{width:>5}  {name:<18}{sum(steps[name]):>6}{sum(seconds[name]):>8.2f}"
        f"  {middle:.2f} ({low:.2f} to {high:.2f})",
        flush=True,
      )


if __name__ == "__main__":
  main(sys.argv[1] if len(sys.argv) > 1 else "nano-draft", int((sys.argv[2:] or ["20"])[0]))
