"""A discovery's page shows results and baselines, runs no script, and loads nothing."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any
import xml.etree.ElementTree as xml

from matplotlib import figure
from page_tags import Tags
import pytest
import tiny_problem

from seerjax import metrics
from seerjax.discovery import environment as environment_lib
from seerjax.reports import discovery_report

EVIL = "</title></pre><script>alert('pwned')</script><img src=x onerror=alert(1)>\ud800 & 3 < 4"
NUM_STEPS = 45
OTHERS = (
  environment_lib.Published(2.9, "A Careful Proof", 2025, "https://example.org/proof"),
  environment_lib.Published(2.5, "An Old Table", 1996, "printed"),
)


@dataclasses.dataclass(frozen=True)
class Stairs(tiny_problem.Row):
  """A problem with a list of heights as artefact; it draws them as a picture."""

  name: str = "stairs_3"
  published: tuple[environment_lib.Published, ...] = OTHERS

  def picture(self, artefact: environment_lib.Artefact) -> Any:
    drawing = figure.Figure(figsize=(3, 2))
    axes = drawing.subplots()
    axes.stairs([float(height) for height in artefact], fill=True, url="https://example.org")
    axes.imshow([[0.0, 1.0]], extent=(0, 1, 0, 1))
    axes.set(title=EVIL.replace("\ud800", ""), gid='x" onload="alert(1)')
    return drawing


class Undrawn(Stairs):
  """Its picture cannot be drawn."""

  def picture(self, artefact: environment_lib.Artefact) -> Any:
    raise RuntimeError(f"no ink {EVIL}")


class Misdrawn(Stairs):
  """Its picture is something else."""

  def picture(self, artefact: environment_lib.Artefact) -> Any:
    return "a picture"


def make_best(directory: pathlib.Path, **changes: Any) -> None:
  record = dict(
    problem="stairs_3",
    value=2.75,
    certificate="11/4",
    step=30,
    artefact=[0.5, 1.0, 1.25],
    lineage=[
      dict(step=0, value=1.0, tokens=[]),
      dict(step=5, value=0.75, tokens=[7, 16, 52]),
      dict(step=30, value=2.75, tokens="return [0.5, 1.0, 1.25]"),
    ],
    tree=[
      dict(id=0, parent=None, step=0, value=1.0),
      dict(id=8, parent=0, step=5, value=0.75),
      dict(id=9, parent=0, step=5, value=0.5),
      dict(id=70, parent=8, step=30, value=2.75),
    ],
  )
  directory.mkdir(exist_ok=True)
  (directory / "best.json").write_text(json.dumps(record | changes))
  (directory / "config.json").write_text("{}")


def make_run(directory: pathlib.Path, *, train: bool = True, **changes: Any) -> None:
  """Writes the files of a run of `NUM_STEPS` steps."""
  make_best(directory, **changes)
  config = dict(
    problem="stairs:3",
    num_steps=50,
    prompts_per_step=8,
    group_size=64,
    train=train,
    fingerprint={"digest": "db13"},
  )
  metrics.write_summary(directory / "config.json", config)
  with metrics.Writer(directory, console="off", tensorboard=False) as writer:
    for step in range(1, NUM_STEPS + 1):
      numbers = {
        "search/best": 2.75 if step >= 30 else 1.0,
        "search/gain": 1.75 if step >= 30 else 0.0,
        "search/archive_size": 8.0 + step,
        "search/seed_trees_alive": 8.0,
        "search/valid_rate": 0.5 + step / 100,
        "search/reward_mean": float(step),
        **{f"search/reward_p{p}": step + p / 100 for p in (0, 10, 25, 50, 75, 90, 100)},
        "search/value_p10": 0.25,
        "search/value_median": 0.5,
        "search/value_p90": 0.75,
        "search/tokens": 1e5 * step,
        "search/cpu_seconds": 4.0 * step,
      }
      if train:
        numbers |= {
          "rollout_train/kl": 0.0,
          "rollout_train/max_abs_logprob_gap": 0.0,
          "objective/beta": 3.0 + step,
          "objective/divergence": 0.693,
          "objective/effective_samples": 21.0,
          "objective/kl_to_base": 0.001 * step,
          "objective/degenerate_groups": 0.0,
          "train/entropy": 2.9,
          "train/grad_norm": 4.0,
        }
      writer.write(step, numbers)


def make_summary(directory: pathlib.Path, **more: Any) -> None:
  numbers = dict(
    problem="stairs_3",
    best=2.75,
    start=1.0,
    cpu_seconds=180.25,
    judge_cpu_seconds=3.5,
    found_in_step=30,
    numerics={"digest": "db13"},
  )
  metrics.write_summary(directory / "summary.json", numbers | more)


def rendered(directory: pathlib.Path, environment: environment_lib.Environment) -> str:
  path = discovery_report.render(directory, environment)
  assert path == directory / "report.html"
  return path.read_text()


def rows_of(page: str, header: str) -> list[list[str]]:
  """Returns the cells of the table with this header in its first column."""
  (table,) = re.findall(f'<table class="ranks"><tr><th>{header}<.*?</table>', page)
  return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr.*?</tr>", table)[1:]]


@pytest.fixture
def page(tmp_path) -> str:
  make_run(tmp_path / "run")
  rivals = {"classical": 2.875, "random_edits": 1.5, "tool_from_random_starts": float("nan")}
  make_summary(tmp_path / "run", rivals=rivals)
  return rendered(tmp_path / "run", Stairs())


def test_every_section_is_there(page):
  text = Tags(page).text
  for expected in (
    "stairs_3",
    "best value, higher is better",
    "found in step 30",
    "+1.75",
    "+175 % of the start",
    "23\u202f040",
    "45 of 50 steps",
    "edits and verdicts: 3.5",
    "nats, engine to trainer, at most",
    "The value is certified: 11/4.",
    "Published values, higher is better",
    "This run is better than 1 of 2 published values.",
    "Baselines at equal CPU time",
    "Each had 180 CPU seconds",
    "tool from random starts",
    "Best so far",
    "Lineage of the best",
    "3 of 4 states",
    "Value of attempts",
    "Valid attempts",
    "Seed trees alive",
    "KL(rollout ‖ trainer) is exactly 0.0 at every one of 45 recorded steps.",
    "Effective samples",
    "KL to the base",
    "Entropy",
    "db13",
    "objective/degenerate_groups",
    "[0.5, 1.0, 1.25]",
  ):
    assert expected in text, expected


def test_steps_are_counted_from_one_wherever_they_stand(page):
  text = Tags(page).text
  assert "found in step 30" in text and "found_in_step" not in text
  assert rows_of(page, "step") == [
    ["0", "1", "", ""],
    ["5", "0.75", "−0.25", "7 16 52"],
    ["30", "2.75", "+2", "return [0.5, 1.0, 1.25]"],
  ]


def test_values_of_other_inputs_are_shown_and_not_beaten(tmp_path):
  make_best(tmp_path)
  others = (OTHERS[0]._replace(is_comparable=False),)
  page = rendered(tmp_path, Stairs(published=others))
  assert "not comparable" in page and "so this run is not compared with them" in page
  assert "published: " not in page


def test_this_run_stands_in_its_place_among_the_published(page):
  rows = rows_of(page, "value")
  date = rows[1][2]
  assert rows == [
    ["2.9", "A Careful Proof", "2025", "https://example.org/proof", "worse by 0.15"],
    ["2.75", "this run", date, "best.json", ""],
    ["2.5", "An Old Table", "1996", "printed", "better by 0.25"],
  ]
  assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_of_equals_the_first_stands_first_and_lower_may_be_better(tmp_path):
  make_best(tmp_path)
  others = (OTHERS[1], environment_lib.Published(2.75, "The Same", 2020, "x"), OTHERS[0])
  page = rendered(tmp_path, Stairs(is_maximised=False, published=others))
  assert [(row[1], row[4]) for row in rows_of(page, "value")] == [
    ("An Old Table", "worse by 0.25"),
    ("The Same", "equal"),
    ("this run", ""),
    ("A Careful Proof", "better by 0.15"),
  ]
  text = Tags(page).text
  assert "better than 1 of 3" in text and "lower is better" in text and "−1.75" in text


def test_rivals_are_compared_and_one_that_found_nothing_is_told(page):
  assert rows_of(page, "method") == [
    ["classical", "2.875", "worse by 0.125"],
    ["random edits", "1.5", "better by 1.25"],
    ["tool from random starts", "no valid result", "better: no valid result there"],
  ]


def test_every_ancestor_is_a_node_with_its_tokens(page):
  (drawing,) = re.findall(r'<svg [^>]*aria-label="Lineage of the best">.*?</svg>', page, re.DOTALL)
  nodes = re.findall(r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)" r="4"><title>(.*?)</title>',
                     drawing, re.DOTALL)  # fmt: skip
  assert [words for _, _, words in nodes] == [
    "step 0: 1",
    "step 5: 0.75\ntokens 7 16 52",
    "step 30: 2.75\ntokens return [0.5, 1.0, 1.25]",
  ]
  # Steps 0, 5, 30 of 45 on a width of 374 from 52; higher values stand higher up.
  assert [float(x) for x, _, _ in nodes] == pytest.approx([52, 93.6, 301.3], abs=0.06)
  heights = [float(y) for _, y, _ in nodes]
  assert heights[2] < heights[0] < heights[1]
  assert "published: 2.9" in drawing
  # The tree around them: each state but the start has a branch, even a dead end.
  (branches,) = re.findall(r'<path class="raw" d="(M[^"]+)"/>', drawing)
  assert branches.count("M") == branches.count("L") == 3
  for x, y, _ in nodes[1:]:
    assert f"L{x} {y}" in branches
  assert "<b>3</b> of 4 states" in page


def test_the_rewards_of_a_step_are_bands(page):
  (drawing,) = re.findall(r'<svg [^>]*aria-label="Rewards of attempts">.*?</svg>', page, re.DOTALL)
  bands = re.findall(r'<path class="bar" fill-opacity="0.18" d="M([^"]+)Z"/>', drawing)
  assert len(bands) == 3
  heights = []
  for band in bands:
    points = [tuple(map(float, point.split())) for point in band.split("L")]
    assert len(points) == 2 * NUM_STEPS and points[0][0] == points[-1][0]
    heights.append(points[-1][1] - points[0][1])
  # In the first step all are within 1, four fifths within 0.8, half within 0.5.
  assert heights == pytest.approx([heights[0] * part for part in (1, 0.8, 0.5)], abs=0.11)
  assert "median <b>1.5 → 45.5</b>" in page and "mean <b>1 → 45</b>" in page


def test_the_page_asks_for_nothing(page):
  images = 0
  for tag, attributes in Tags(page).tags:
    assert tag not in ("script", "link", "img", "iframe", "object", "embed", "a", "foreignobject")
    assert not any(name.startswith("on") or ":" in name for name in attributes)
    assert "src" not in attributes
    if "href" in attributes:
      href = attributes["href"] or ""
      images += tag == "image"
      assert href.startswith("data:image/png;base64," if tag == "image" else "#picture-")
  assert images == 1 and "img-src data:;" in page
  assert not re.search(r"url\((?!#picture-)", page)
  assert "@import" not in page and "http://" not in page and "*{" not in page
  assert page.count("<style>") == 1


def test_ids_are_the_pictures_own_and_are_all_there(page):
  ids = [attributes["id"] for _, attributes in Tags(page).tags if "id" in attributes]
  used = re.findall(r'(?:href="|url\()#(picture-\d+)', page)
  assert ids and len(ids) == len(set(ids)) and set(used) == set(ids)


def test_a_picture_is_the_same_each_time(tmp_path):
  make_best(tmp_path)
  found = discovery_report.load(tmp_path, Stairs())
  first = discovery_report.artefact_picture(found)
  assert first.startswith("<svg") and first == discovery_report.artefact_picture(found)


def test_of_an_svg_only_shapes_come_through():
  made = discovery_report.inline_svg(
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:l="http://www.w3.org/1999/xlink"'
    ' width="72pt" height="36pt" viewBox="0 0 72 36" onload="a()"><!-- a --><script>a()</script>'
    "<style>*{fill: red}</style><metadata>m</metadata><foreignObject><p/></foreignObject>"
    '<animate/><defs><path id="p" d="M0 0"/><path id="p" d="M1 1"/><path id="q"/></defs>'
    '<a l:href="https://x.org"><use l:href="#p" class="tile" onclick="a()"/></a>'
    '<use l:href="https://x.org/#p"/><image l:href="https://x.org/i.png"/>'
    '<image l:href="data:image/svg+xml;base64,AAAA"/><image l:href="data:image/png;base64,AAAA"/>'
    '<rect clip-path="url(#p)" style="fill: url(https://x.org)" fill="u\\72l(//x.org)"/>'
    "<text>a &lt; <tspan>b</tspan> c</text></svg>",
    "Two & three",
  )
  assert made == (
    '<svg viewBox="0 0 72 36" role="img" aria-label="Two &amp; three" class="picture"'
    ' style="stroke-linejoin: round; stroke-linecap: butt; max-width: 72pt"><defs>'
    '<path id="picture-0" d="M0 0" /><path d="M1 1" /><path /></defs>'
    '<g><use href="#picture-0" /></g><use /><image /><image />'
    '<image href="data:image/png;base64,AAAA" /><rect clip-path="url(#picture-0)" />'
    "<text>a &lt; <tspan>b</tspan> c</text></svg>"
  )


def test_what_is_no_svg_is_refused():
  with pytest.raises(ValueError, match=r"got <p>, expected an SVG file; save the figure as svg"):
    discovery_report.inline_svg("<p>a</p>", "a")
  with pytest.raises(xml.ParseError):
    discovery_report.inline_svg("no", "a")


@pytest.mark.parametrize(
  "environment, expected",
  [
    (Undrawn(), "No picture: the problem's picture(artefact) raised RuntimeError: no ink"),
    (Misdrawn(), "raised TypeError: got str, expected a matplotlib.figure.Figure"),
  ],
)
def test_without_a_picture_the_page_says_why(tmp_path, environment, expected):
  make_best(tmp_path)
  page = rendered(tmp_path, environment)
  assert expected in Tags(page).text and "<script" not in page and "img-src" not in page


def test_hostile_text_stays_text(tmp_path):
  lineage = [dict(step=0, value=1.0, tokens=[]), dict(step=1, value=2.75, tokens=EVIL)]
  make_run(tmp_path, problem=EVIL, artefact={EVIL: [EVIL]}, certificate=EVIL, lineage=lineage)
  make_summary(tmp_path, rivals={EVIL: 1.0}, note=EVIL)
  published = (environment_lib.Published(3.0, EVIL, 2026, EVIL),)
  page = rendered(tmp_path, Undrawn(name=EVIL, published=published))
  seen = Tags(page)
  assert not {"script", "img"} & {tag for tag, _ in seen.tags} and "<script" not in page
  # Title, tile line, certificate, who, where, rival, tokens twice, artefact twice, note, error.
  assert seen.text.count("<script>alert('pwned')</script>") >= 10
  assert "& 3 < 4" in seen.text


def test_a_picture_of_hostile_text_is_drawn_as_shapes(tmp_path):
  make_best(tmp_path, problem=EVIL)
  page = rendered(tmp_path, Stairs(name=EVIL))
  assert 'aria-label="Picture of the best artefact"' in page and "No picture" not in page
  assert "<script" not in page and "onload" not in page and "onerror=alert(1)&gt;" in page


def test_the_first_record_of_a_run_is_enough(tmp_path):
  start = dict(id=3, parent=None, step=0, value=2.75)
  make_best(tmp_path, lineage=[dict(step=0, value=2.75, tokens=[])], tree=[start], certificate="")
  text = Tags(rendered(tmp_path, Stairs(published=()))).text
  assert "the start itself" in text and "The problem lists no published values." in text
  assert "The value is computed by the problem, without a certificate." in text
  assert "1 of 1 states" in text
  assert "Baselines" not in text and "Search" not in text and "to the bit" not in text


def test_a_run_that_is_not_over_has_its_numbers_from_its_curves(tmp_path):
  make_run(tmp_path)
  text = Tags(rendered(tmp_path, Stairs())).text
  assert "+1.75" in text and "180CPU seconds" in text and "45 of 50 steps" in text


def test_without_training_the_page_says_so_and_claims_nothing(tmp_path):
  make_run(tmp_path, train=False)
  make_summary(tmp_path)
  text = Tags(rendered(tmp_path, Stairs())).text
  assert "Training was off: the initial weights sampled every attempt." in text
  assert "to the bit" not in text and "log-probability gap" not in text and "Entropy" not in text


def test_a_long_artefact_is_cut_with_a_word(tmp_path):
  make_best(tmp_path, artefact=[1.0] * 5000)
  text = Tags(rendered(tmp_path, Undrawn())).text
  assert "… 5000 more characters in best.json" in text


def test_directories_that_are_no_discovery_are_refused(tmp_path):
  with pytest.raises(
    ValueError, match="without best.json, expected the directory of `seerjax discover`"
  ):
    discovery_report.render(tmp_path, Stairs())
  (tmp_path / "best.json").write_text("{")
  with pytest.raises(ValueError, match=r"best.json, which is not JSON"):
    discovery_report.render(tmp_path, Stairs())
  make_best(tmp_path)
  with pytest.raises(ValueError, match="got the problem 'other' for a run of 'stairs_3'"):
    discovery_report.render(tmp_path, Stairs(name="other"))
  (tmp_path / "config.json").unlink()
  with pytest.raises(ValueError, match=r"has none of metrics.jsonl"):
    discovery_report.render(tmp_path, Stairs())


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({"value": "NaN"}, r"damaged .*best.json \(ValueError: a value is nan\)"),
    ({"value": None}, r"\(TypeError: .*expected the fields problem, value, certificate"),
    ({"lineage": []}, "its lineage is empty"),
    ({"lineage": [{"step": 1}]}, "KeyError: 'value'"),
    ({"tree": [{"id": 1, "parent": "x", "step": 1, "value": 1.0}]}, "ValueError: invalid literal"),
  ],
)
def test_a_damaged_record_is_refused(tmp_path, changes, expected):
  make_best(tmp_path, **changes)
  with pytest.raises(ValueError, match=expected):
    discovery_report.render(tmp_path, Stairs())


def test_a_record_without_a_field_is_refused(tmp_path):
  (tmp_path / "best.json").write_text('{"value": 1.0, "problem": "stairs_3"}')
  with pytest.raises(ValueError, match="it has no certificate, artefact, lineage, tree"):
    discovery_report.render(tmp_path, Stairs())
