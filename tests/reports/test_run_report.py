"""The report shows a run correctly on one page, and never executes a model's text."""

from __future__ import annotations

import html
import json
import pathlib
import re
import shutil
import subprocess

import made_rollouts
import numpy as np
from page_tags import Tags
import pytest

from seerjax import metrics
from seerjax.reports import charts, run_report
from seerjax.rollout import journal, trace as trace_lib
from seerjax.rollout.trace import Span, Trace
from seerjax.speculation.statistics import Acceptance
from seerjax.types import Verdict

NUM_STEPS = 60
EVIL = "</pre><script>alert('pwned')</script><img src=x onerror=alert(1)>\ud800 & 3 < 4"


def make_run(directory: pathlib.Path, *, gap: float = 0.0, text: str = "", steps=NUM_STEPS) -> None:
  """Writes the files of a run of `steps` steps."""
  rng = np.random.default_rng(0)
  with metrics.Writer(directory, console="off", tensorboard=False) as writer:
    for step in range(steps):
      done = step / steps
      length = 70 + 55 * done + rng.normal(0, 4)
      writer.write(
        step,
        {
          "rollout/reward_mean": 0.42 + 0.3 * done**0.7 + rng.normal(0, 0.025),
          "rollout/accuracy": 0.4 + 0.3 * done**0.7 + rng.normal(0, 0.025),
          "rollout/length_mean": length,
          "rollout/length_p99": 2.6 * length + rng.normal(0, 12),
          "rollout/tokens_per_second": 4000 + rng.normal(0, 150),
          "rollout_train/kl": gap if step == 7 else 0.0,
          "rollout_train/max_abs_logprob_gap": gap if step == 7 else 0.0,
          "train/loss": rng.normal(0, 0.01),
          "train/grad_norm": float("nan") if step == 9 else 0.6 + rng.gamma(2, 0.1),
          "train/entropy": 0.55 - 0.2 * done + rng.normal(0, 0.01),
          "train/learning_rate": 1e-5,
        },
      )
  metrics.write_summary(
    directory / "summary.json",
    dict(
      accuracy_before=0.431,
      accuracy_after=0.697,
      max_abs_logprob_gap=gap,
      kl_max=gap,
      tokens_per_second=4012.7,
      length_mean=121.3,
      length_p99=334.0,
      seconds=388.4,
      optimizer_steps=steps,
      gain_interval_95=[0.09012696391943989, 0.3],
      numerics=dict(backend="tiled", digest="7d1c"),
    ),
  )
  config = {"model": "nano", "trainer": {"learning_rate": 1e-5, "group_size": 8}, "note": text}
  (directory / "config.json").write_text(json.dumps(config))
  for step in (0, steps - 1):
    trace = Trace(
      spans=[Span("0/0/0", "0/0", 0, 0, 5, 5, True, True)], used_pages=[[1]] * 5, rows=[1] * 5
    )
    drafts = Acceptance()
    drafts.add(4, 3, num_references=step)
    path = directory / trace_lib.FILE_NAME
    trace_lib.append(path, step, trace_lib.StepTrace([trace], drafts))
  fingerprint = {"backend": "tiled", "row_tile": "16", "kv_split": "256", "digest": "7d1c"}
  with journal.Journal(directory / "journal.jsonl", fingerprint=fingerprint, settings={}) as book:
    for step, mean in ((0, 60), (1, 61), (steps - 1, 110)):
      for group in range(6):
        for member in range(4):
          count = int(np.clip(rng.lognormal(np.log(mean), 0.5), 5, 400))
          verdict = Verdict(
            reward=float((group + step) % 3 > 0),
            correct=(group + step) % 3 > 0,
            well_formed=True,
            answer=text or "16",
          )
          response = text or "Start with 12 pencils.\n12 - 5 = 7\n7 + 9 = 16\nThe answer is 16."
          book.append(
            step,
            group,
            member,
            made_rollouts.rollout(
              (1, 2), range(count), verdict=verdict, text=response, policy_version=step
            ),
            prompt_text=text or "Mira has 12 pencils. She gives 5 away and buys 9. How many now?",
          )


@pytest.fixture
def page(tmp_path) -> str:
  make_run(tmp_path / "grpo-nano")
  path = run_report.render(tmp_path / "grpo-nano")
  assert path == tmp_path / "grpo-nano/report.html"
  return path.read_text()


def test_every_section_is_there(page):
  for text in (
    "grpo-nano",
    "43.1 → 69.7 %",
    "+26.6 points",
    "On-policy, to the bit",
    "<h2>Learning: reward in training rose from 0.",
    "Reward",
    "Accuracy",
    "<h2>Response lengths: ",
    "<h2>Drafts: 75% of tokens accepted</h2>",
    "5 engine visits, 1 requests in 1 chunks",
    "8 tokens drafted from sibling texts, 6 of them accepted (75%); 4.00 tokens per step",
    "Transcripts",
    "<h3>Step 1</h3>",
    f"<h3>Step {NUM_STEPS}</h3>",
    "Numerics fingerprint",
    "kv_split",
    "trainer.learning_rate",
    "train/learning_rate",
    "Mira has 12 pencils",
    "✓ correct",
    "✗ wrong",
    "not finite: 1",
    "0.09013, 0.3<",
  ):
    assert text in page, text
  assert page.count("7d1c") == 1  # The summary's numerics are not repeated.


def test_the_page_asks_for_nothing(page):
  for tag, attributes in Tags(page).tags:
    assert tag not in ("script", "link", "img", "iframe", "object", "embed")
    assert not {"src", "href"} & attributes.keys()
    assert not any(name.startswith("on") for name in attributes)
  assert "url(" not in page and "@import" not in page and "http://" not in page
  assert len(page) < 400_000


def test_exact_zeros_are_said_in_words(page):
  text = Tags(page).text
  assert "KL(rollout ‖ trainer) is exactly 0.0 at every one of 60 recorded steps." in text
  assert "gap| is exactly 0.0 at every one of 60 recorded steps." in text


def test_a_gap_is_said_with_its_step(tmp_path):
  make_run(tmp_path, gap=1e-7)
  text = Tags(run_report.render(tmp_path).read_text()).text
  assert "is not zero at 1 of 60 recorded steps: at most 1e-07 nats, at step 7." in text
  assert "Bit equality is not shown" in text and "is exactly 0.0" not in text


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ([0.0, -0.0], "is exactly 0.0 at every one of 2"),
    ([0.0, float("nan")], "at most nan nats, at step 1"),
    ([-2.0, 1.0], "at most -2 nats, at step 0"),
    ([], "was not recorded"),
  ],
)
def test_the_sentence_of_a_promised_zero(values, expected):
  points = (np.arange(len(values)), np.array(values))
  held, sentence = run_report.gap_sentence("It", points)
  assert expected in sentence and held == ("exactly" in sentence)


def test_text_of_models_stays_text(tmp_path):
  make_run(tmp_path, text=EVIL)
  page = run_report.render(tmp_path).read_text()
  seen = Tags(page)
  assert not {"script", "img"} & {tag for tag, _ in seen.tags}
  assert "<script>alert('pwned')</script>" in seen.text and "& 3 < 4" in seen.text
  assert "<script" not in page


def test_a_run_that_has_just_begun_is_rendered(tmp_path):
  (tmp_path / "summary.json").write_text("{}")
  assert "SeerJAX" in run_report.render(tmp_path).read_text()
  (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": "NaN", "a/b": "NaN"}\n')
  assert "not finite: 1" in run_report.render(tmp_path).read_text()
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 0, "train/loss": 2.0, "rollout_train/kl": 0.0}\n'
  )
  page = run_report.render(tmp_path).read_text()
  assert "was not recorded, so no claim is made" in page and "<b>2</b>" in page


def test_what_is_wider_than_a_small_screen_stands_in_a_frame_of_its_own(page):
  pattern = r'<svg[^>]*viewBox="0 0 (\d+) |<table class="(?:numbers|ranks)"'
  starts = list(re.finditer(pattern, page))
  assert len(starts) > 10
  for start in starts:
    is_narrow = start[1] is not None and float(start[1]) <= charts.WIDTH
    assert is_narrow or page[: start.start()].endswith('<div class="scroll">'), start[0]


# Measures the page in a frame of 390 pixels: what leaves its card, and how high axes' numbers are.
MEASURE = """<script>onload = () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, found = [];
  const out = (inner, outer) => { const a = inner.getBoundingClientRect();
    const b = outer.getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1; };
  for (const one of page.querySelectorAll("details")) one.open = true;
  for (const one of page.querySelectorAll("table, svg, svg text, .scroll")) {
    const frame = one.parentElement.closest(".scroll");
    if (!frame && out(one, one.closest("figure, details, article"))) found.push(one.outerHTML);
  }
  for (const one of page.querySelectorAll("svg text")) {
    const size = parseFloat(page.defaultView.getComputedStyle(one).fontSize);
    if (size * one.getScreenCTM().a < 9.99) found.push(one.outerHTML);
  }
  if (page.documentElement.scrollWidth > 390) found.push("the page itself");
  document.body.innerHTML = `<pre>${found.length} found</pre>`;
  document.querySelector("pre").append(...found.slice(0, 3));
}, 300);</script>"""


@pytest.mark.long
def test_on_a_small_screen_nothing_leaves_its_card(page, tmp_path):
  browser = shutil.which("chromium") or shutil.which("google-chrome")
  if browser is None:
    pytest.skip("no Chromium here")
  bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
  old = bare.replace('class="scroll"', "")  # The twin: without frames, it is found.
  for text, is_good in ((bare, True), (old, False)):
    framed = f'<iframe style="width:390px;height:4000px;border:0" srcdoc="{html.escape(text)}">'
    (tmp_path / "framed.html").write_text(f"<!doctype html><body>{framed}</iframe>{MEASURE}")
    done = subprocess.run(
      [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
       f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom",
       (tmp_path / "framed.html").as_uri()],
      capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ("<pre>0 found</pre>" in done.stdout) == is_good, done.stdout[-2000:]


def test_parts_of_the_reward_and_further_sets_are_drawn(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    for step in range(4):
      parts = {f"rollout/part/{name}": 0.1 * step for name in ("correct", "format", "length")}
      sets = {"heldout_hard/reward": 0.5, "heldout_hard/accuracy": 0.25, "heldout/reward": 0.3}
      writer.write(step, parts | sets | {"rollout/reward_mean": 0.2})
  summary = dict(reward_before=0.125, reward_after=0.25, reward_gain_interval_95=[0.05, 0.2])
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  text = run_report.render(tmp_path).read_text()
  for title in ("Parts of the reward: correct, format", "Parts of the reward: length"):
    assert f"{title}<" in text
  assert "Held-out: hard" in text
  assert "0.125 → 0.25" in text and "gain 0.05 to 0.2 (95 %)" in text
  others = text.partition("Other metrics")[2]
  assert "rollout/part/" not in others and "heldout_hard/" not in others


def test_tokens_of_experts_are_a_table_of_layers(tmp_path):
  with metrics.Writer(tmp_path, console="off", tensorboard=False) as writer:
    for step, counts in ((1, [3, 3, 2]), (2, [8, 0, 0]), (3, [0, 1, 7])):
      numbers = {"train/load_balancing_loss": 1.0, "train/expert_tokens.11": np.asarray(counts)}
      writer.write(step, numbers | {"train/expert_tokens.2": np.asarray([4, 4])})
  text = Tags(run_report.render(tmp_path).read_text()).text
  assert "Experts: 1 of 5 without a token at step 3" in text
  assert "Load-balancing loss" in text
  whole = (tmp_path / "report.html").read_text()
  row = lambda *cells: f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
  assert row(2, 4, 4, 4, 0, 4, 4, 4, 0) + row(11, 3, 3, 2, 0, 7, 1, 0, 1) in whole
