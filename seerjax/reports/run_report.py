"""Report of a run as one self-contained HTML page.

The input is read by `reports.run_directory`. A section is a function from `Run` to HTML, "" if the
run has no data for it; `SECTIONS` is their order on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os
import pathlib
from typing import Any

import numpy as np

from seerjax import metrics
from seerjax.reports import gantt, page
from seerjax.reports.charts import Chart, histogram, line_chart
from seerjax.reports.page import escape, number
from seerjax.reports.run_directory import Points, Run, load
from seerjax.rollout import journal
from seerjax.speculation import statistics

SERIES = 2  # Curves per chart.
NUM_TRANSCRIPTS = 4  # From each of the first and the last step.

CONTRACT_CHARTS = (
  Chart(
    title="KL, rollout ‖ trainer",
    names=("rollout_train/kl",),
    note="nats, with the sampling weights, before the update",
    is_contract=True,
  ),
  Chart(
    title="Largest log-probability gap",
    names=("rollout_train/max_abs_logprob_gap",),
    note="nats, max |behaviour_logprob − logprob| over every sampled token",
    is_contract=True,
  ),
)
CHARTS = (
  Chart(
    title="Reward",
    names=("rollout/reward_mean", "heldout/reward"),
    note="mean over the step's rollouts, and over held-out answers",
    labels=("training problems", "held-out"),
  ),
  Chart(
    title="Accuracy",
    names=("rollout/accuracy", "heldout/accuracy"),
    note="share of correct answers",
    labels=("training problems", "held-out"),
    is_percent=True,
  ),
  Chart(
    title="Response length",
    names=("rollout/length_mean", "rollout/length_p99"),
    note="tokens",
    labels=("mean", "99th percentile"),
  ),
  Chart(title="Loss", names=("train/loss",), note="of the policy, at the step's first update"),
  Chart(title="Gradient norm", names=("train/grad_norm",), note="global, before clipping"),
  Chart(title="Entropy", names=("train/entropy",), note="nats per token"),
  Chart(title="Throughput", names=("rollout/tokens_per_second",), note="generated tokens/s"),
)


EXPERT_CHARTS = (
  Chart(
    title="Load-balancing loss",
    names=("train/load_balancing_loss",),
    note="mean over layers, 1 if all experts are used alike",
  ),
  Chart(title="Router entropy", names=("train/router_entropy",), note="nats per token, mean"),
  Chart(
    title="Busiest expert",
    names=("train/busiest_expert",),
    note="its share of a layer's choices",
    is_percent=True,
  ),
)
EXPERT_TOKENS = "train/expert_tokens."


def headline(run: Run) -> str:
  """Returns the head of the page: name of the run, and the most important numbers."""
  summary = run.summary
  tiles = []
  if {"accuracy_before", "accuracy_after"} <= summary.keys():
    before, after = float(summary["accuracy_before"]), float(summary["accuracy_after"])
    tiles.append(
      (
        f"{100 * before:.1f} → {100 * after:.1f} %",
        "held-out accuracy",
        f"{100 * (after - before):+.1f} points",
      )
    )
  if {"reward_before", "reward_after", "reward_gain_interval_95"} <= summary.keys():
    before, after = float(summary["reward_before"]), float(summary["reward_after"])
    low, high = map(float, summary["reward_gain_interval_95"])
    tiles.append(
      (
        f"{number(before)} → {number(after)}",
        "held-out mean reward",
        f"gain {number(low)} to {number(high)} (95 %)",
      )
    )
  if "rollout/reward_mean" in run.curves:
    values = run.curves["rollout/reward_mean"][1]
    tiles.append((number(float(values[-1])), "reward", f"from {number(float(values[0]))}"))
  for name, label, unit in (
    ("tokens_per_second", "throughput", "generated tokens/s"),
    ("optimizer_steps", "optimiser steps", ""),
  ):
    if name in summary:
      value = metrics.decode_number(summary[name])
      tiles.append((number(round(value) if value >= 100 else value), label, unit))
  if "seconds" in summary:
    seconds = float(summary["seconds"])
    tiles.append((f"{seconds / 60:.1f} min", "duration", f"{seconds:.0f} s"))
  return page.header("run report", run.name, tiles)


def gap_sentence(what: str, points: Points | None) -> tuple[bool, str]:
  """Returns whether a metric is zero at all recorded steps, and a sentence that says so."""
  if points is None or not len(points[1]):
    return False, f"{what} was not recorded, so no claim is made."
  steps, values = points
  wrong = np.flatnonzero(values != 0.0)  # Includes NaN.
  if not len(wrong):
    return True, f"{what} is exactly 0.0 at every one of {len(values)} recorded steps."
  finite = np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
  worst = int(np.argmax(finite))
  return False, (
    f"{what} is not zero at {len(wrong)} of {len(values)} recorded steps: at most"
    f" {number(values[worst])} nats, at step {steps[worst]:.0f}."
  )


def contract_section(run: Run) -> str:
  """Returns the section on bit equality of engine and trainer: a verdict and the curves."""
  kl = run.curves.get("rollout_train/kl")
  gap = run.curves.get("rollout_train/max_abs_logprob_gap")
  if kl is None and gap is None:
    return ""
  verdicts = [
    gap_sentence("KL(rollout ‖ trainer)", kl),
    gap_sentence("The largest |log-probability gap|", gap),
  ]
  held = all(ok for ok, _ in verdicts)
  title = (
    "The trainer computed the same bits as the engine"
    if held
    else "Bit equality is not shown for this run"
  )
  sentences = " ".join(sentence for _, sentence in verdicts)
  charts = "".join(line_chart(chart, run) for chart in CONTRACT_CHARTS)
  return (
    f'<h2>On-policy, to the bit</h2><div class="banner {"good" if held else "bad"}">'
    f"<b>{'✓' if held else '✗'} {title}.</b> {escape(sentences)}</div>"
    f'<div class="grid2">{charts}</div>'
  )


def curves_section(run: Run) -> str:
  """Returns the section with the curves of the run."""
  charts = "".join(line_chart(chart, run) for chart in (*CHARTS, *charts_of(run)))
  title = f"Learning{learning_sentence(run)}"
  return f'<h2>{escape(title)}</h2><div class="grid3">{charts}</div>' if charts else ""


def experts_section(run: Run) -> str:
  """Returns the section on how alike experts are used: curves, and the tokens of each layer."""
  layers = {
    int(name.removeprefix(EXPERT_TOKENS)): by_step
    for name, by_step in run.counts.items()
    if name.startswith(EXPERT_TOKENS)
  }
  if not layers:
    return ""
  steps = sorted({step for by_step in layers.values() for step in by_step})
  steps = list(dict.fromkeys((steps[0], steps[-1])))

  def cells(counts: list[int] | None) -> str:
    if not counts:
      return "<td></td>" * 4
    least, middle, most = np.quantile(counts, (0, 0.5, 1))
    return f"<td>{most:.0f}</td><td>{middle:.0f}</td><td>{least:.0f}</td><td>{counts.count(0)}</td>"

  rows = [
    f"<tr><td>{layer}</td>{''.join(cells(by_step.get(step)) for step in steps)}</tr>"
    for layer, by_step in sorted(layers.items())
  ]
  head = "".join(f'<th colspan="4">step {step}</th>' for step in steps)
  columns = "<th>most</th><th>median</th><th>least</th><th>unused</th>" * len(steps)
  unused = sum(by_step.get(steps[-1], []).count(0) for by_step in layers.values())
  count = sum(len(by_step.get(steps[-1], [])) for by_step in layers.values())
  charts = "".join(line_chart(chart, run) for chart in EXPERT_CHARTS)
  return (
    f"<h2>Experts: {unused} of {count} without a token at step {steps[-1]}</h2>"
    f'<div class="grid3">{charts}</div><figure class="center"><div class="scroll">'
    f'<table class="numbers"><tr><th></th>{head}</tr><tr><th>layer</th>{columns}</tr>'
    f'{"".join(rows)}</table></div><p class="note">tokens of the loss that an expert got, over the'
    " experts of a layer</p></figure>"
  )


def learning_sentence(run: Run) -> str:
  """Returns ": ... rose from a to b" for the first metric of two values; "" if there is none."""
  for name, words, scale, unit in (
    ("heldout/accuracy", "held-out accuracy", 100.0, "\u202f%"),
    ("heldout/reward", "held-out reward", 1.0, ""),
    ("rollout/reward_mean", "reward in training", 1.0, ""),
  ):
    values = run.curves[name][1] if name in run.curves else np.zeros(0)
    values = values[np.isfinite(values)] * scale
    if len(values) > 1:
      first, last = number(float(values[0]), 3), number(float(values[-1]), 3)
      if first == last:
        return f": {words} stayed at {first}{unit}"
      verb = "rose" if values[-1] > values[0] else "fell"
      return f": {words} {verb} from {first} to {last}{unit}"
  return ""


def charts_of(run: Run) -> tuple[Chart, ...]:
  """Returns charts for metrics that only some runs have: reward parts and evaluation sets."""
  charts = []
  parts = sorted(name for name in run.curves if name.startswith("rollout/part/"))
  for start in range(0, len(parts), SERIES):
    names = tuple(parts[start : start + SERIES])
    labels = tuple(name.removeprefix("rollout/part/") for name in names)
    charts.append(
      Chart(
        title=f"Parts of the reward: {', '.join(labels)}",
        names=names,
        note="means over the step's rollouts, unweighted",
        labels=labels,
      )
    )
  for name in sorted(run.curves):
    room, _, metric = name.partition("/")
    if room.startswith("heldout_") and metric == "reward":
      of_set = room.removeprefix("heldout_")
      names = (name, f"{room}/accuracy")
      charts.append(
        Chart(
          title=f"Held-out: {of_set}",
          names=names,
          note="mean reward, and share of correct answers",
          labels=("mean reward", "accuracy"),
        )
      )
  return tuple(charts)


def lengths_section(run: Run) -> str:
  """Returns the section on response lengths in the first and the last step."""
  # The journal counts steps from 0, reports count from 1.
  samples = [(entries[0].step + 1, entries) for entries in (run.first, run.last) if entries]
  if not samples:
    return ""
  counts = [
    (f"step {step}", np.array([len(e.rollout.completion.tokens) for e in entries]))
    for step, entries in samples
  ]
  rows = []
  for i, ((label, values), (_, entries)) in enumerate(zip(counts, samples, strict=True)):
    cut = sum(e.rollout.completion.finish_reason == "length" for e in entries)
    rows.append(
      f'<tr><td><span class="key k{i}">{label}</span></td><td>{len(values)}</td>'
      f"<td>{values.mean():.1f}</td><td>{np.median(values):.0f}</td>"
      f"<td>{np.percentile(values, 99):.0f}</td><td>{values.max()}</td><td>{cut}</td></tr>"
    )
  means = " → ".join(f"{values.mean():.0f}" for _, values in counts)
  return (
    f'<h2>Response lengths: {means} tokens on average</h2><div class="grid2 wide"><figure>'
    f'{histogram(counts)}<p class="note">share of the step\'s rollouts; dashed lines are means</p>'
    '</figure><figure class="center"><div class="scroll"><table class="numbers"><tr><th></th>'
    "<th>rollouts</th>"
    "<th>mean</th><th>median</th><th>p99</th><th>max</th><th>cut off</th></tr>"
    f'{"".join(rows)}</table></div><p class="note">tokens; "cut off" counts rollouts that ended at'
    " max_tokens</p></figure></div>"
  )


def rollout_section(run: Run) -> str:
  """Returns the section on the longest rollout: chunks by instance, and page occupancy."""
  longest = max(
    (
      (trace.num_steps, -step, trace)
      for step, done in run.traces.items()
      for trace in done.rollouts
    ),
    key=lambda entry: entry[:2],
    default=None,
  )
  if longest is None:
    return ""
  num_steps, step, trace = longest
  most = max((max(row) for row in trace.used_pages), default=1)
  num_pages = run.config.get("engine", {}).get("num_pages", 0) - 1
  # If the engine chose the number of pages, scale by the maximum in use.
  return gantt.section(1 - step, trace, max(num_pages, most)) if num_steps else ""


def drafts_section(run: Run) -> str:
  """Returns the section on draft acceptance over all steps."""
  drafts = statistics.Acceptance()
  for done in run.traces.values():
    drafts.include(done.drafts)
  return gantt.drafts_section(drafts)


def transcripts_section(run: Run) -> str:
  """Returns the section with sample responses from the first and the last step."""
  if not run.first:
    return ""
  columns = "".join(
    f"<div><h3>Step {entries[0].step + 1}</h3>{''.join(map(transcript, _sample(entries)))}</div>"
    for entries in (run.first, run.last)
    if entries
  )
  return (
    '<h2>Transcripts</h2><p class="lead">The first member of each of the step\'s first groups; none'
    f' was selected by hand.</p><div class="grid2">{columns}</div>'
  )


def _sample(entries: Sequence[journal.Entry]) -> list[journal.Entry]:
  first_members: dict[int, journal.Entry] = {}
  for entry in entries:
    first_members.setdefault(entry.group, entry)
  return list(first_members.values())[:NUM_TRANSCRIPTS]


def transcript(entry: journal.Entry) -> str:
  """Returns one rollout as a card, with all text escaped."""
  completion, verdict = entry.rollout.completion, entry.rollout.verdict
  mark, word = ("good", "✓ correct") if verdict.correct else ("bad", "✗ wrong")
  if not verdict.well_formed:
    word += ", no answer found"
  facts = [f"reward {number(float(verdict.reward))}", f"{len(completion.tokens)} tokens"]
  if verdict.parts:
    facts.insert(1, ", ".join(f"{name} {number(float(x))}" for name, x in verdict.parts.items()))
  if completion.finish_reason == "length":
    facts.append("cut off")
  if len(completion.behaviour_logprobs):
    facts.append(f"mean logprob {float(np.mean(completion.behaviour_logprobs)):.3f}")
  prompt = entry.prompt_text or f"{len(entry.rollout.request.prompt)} prompt tokens, text not kept"
  answer = f'<span class="answer">{escape(verdict.answer)}</span>' if verdict.answer else ""
  return (
    f'<article class="{mark}"><div class="facts"><b>{word}</b>{answer}'
    f"<span>{escape(' · '.join(facts))}</span></div>"
    f'<pre class="prompt">{escape(prompt)}</pre><pre>{escape(completion.text)}</pre></article>'
  )


def details_section(run: Run, charts: Sequence[Chart] = CHARTS) -> str:
  """Returns the section with summary, settings, numerics, and metrics that no chart shows."""
  shown = (*CONTRACT_CHARTS, *charts, *charts_of(run), *EXPERT_CHARTS)
  drawn = {name for chart in shown for name in chart.names}
  others = {
    name: f"{number(float(v[0]))} → {number(float(v[-1]))}  (min {number(float(np.nanmin(v)))},"
    f" max {number(float(np.nanmax(v)))})"
    if np.isfinite(v).any()
    else "never finite"
    for name, (_, v) in sorted(run.curves.items())
    if name not in drawn
  }
  # Numerics are in the fingerprint below.
  summary = {name: value for name, value in run.summary.items() if name != "numerics"}
  parts = [page.table("Summary", summary, is_open=True)]
  for i, fingerprint in enumerate(run.fingerprints):
    title = "Numerics fingerprint" + (f", epoch {i}" if len(run.fingerprints) > 1 else "")
    parts.append(page.table(title, fingerprint, is_open=True))
  parts += [page.table("Configuration", _flat(run.config)), page.table("Other metrics", others)]
  text = "".join(parts)
  return f'<h2>Record</h2><div class="grid2">{text}</div>' if text else ""


def _flat(value: dict[str, Any], start: str = "") -> dict[str, Any]:
  result: dict[str, Any] = {}
  for name, item in value.items():
    result |= _flat(item, f"{start}{name}.") if isinstance(item, dict) else {start + name: item}
  return result


SECTIONS: tuple[Callable[[Run], str], ...] = (
  headline,
  contract_section,
  curves_section,
  experts_section,
  lengths_section,
  rollout_section,
  drafts_section,
  transcripts_section,
  details_section,
)


def render(run_dir: str | os.PathLike) -> pathlib.Path:
  """Writes report.html into a run directory, and returns its path.

  Raises:
    ValueError: see `load`.
  """
  run = load(run_dir)
  path = pathlib.Path(run_dir) / page.FILE_NAME
  text = page.html_page(run.name, [section(run) for section in SECTIONS])
  path.write_text(text, encoding="utf-8")
  return path
