"""Layout of the report pages: formatting of numbers and text, style sheet, and page frame.

Pages have no scripts and no external resources, and follow the light or dark colour scheme. All
text from models, tasks and settings is passed through `escape`.
"""

from __future__ import annotations

from collections.abc import Sequence
import html
import math
from typing import Any

from seerjax import metrics

FILE_NAME = "report.html"


def escape(value: Any) -> str:
  """Returns a value as HTML-escaped text; lone surrogates become U+FFFD."""
  return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def number(value: Any, digits: int = 4) -> str:
  """Formats a number with this many significant digits, integers in full; other values as text.

  Each member of a list is formatted separately.
  """
  if isinstance(value, list):
    return ", ".join(number(item, digits) for item in value)
  value = metrics.decode_number(value)
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return str(value)
  if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) >= 10):
    return f"{int(value):,}".replace(",", "\u202f")
  if value == 0:
    return "0.0"
  if abs(value) < 10 ** (digits - 1):
    return f"{value:.{digits}g}"
  return f"{value:,.0f}".replace(",", "\u202f")


def axis_number(value: float) -> str:
  """Formats a number for an axis, in about eight characters: 2.5 M."""
  for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
    if abs(value) >= max(size, 1e5):
      return f"{value / size:.9g}{letter}"
  return number(float(value), 9)


def header(kind: str, title: str, tiles: Sequence[tuple[str, str, str]]) -> str:
  """Returns the head of a page: kind, title, and tiles of (value, label, unit)."""
  cells = "".join(
    f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span>'
    f"<i>{escape(unit)}</i></div>"
    for value, label, unit in tiles
  )
  return (
    f'<header><p class="brand">SeerJAX · {escape(kind)}</p><h1>{escape(title)}</h1>'
    f'<div class="tiles">{cells}</div></header>'
  )


def table(title: str, values: dict[str, Any], *, is_open: bool = False) -> str:
  if not values:
    return ""
  rows = "".join(
    f"<tr><th>{escape(name)}</th><td>{escape(number(value))}</td></tr>"
    for name, value in values.items()
  )
  return (
    f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
    f'<table class="pairs">{rows}</table></details>'
  )


STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #ffffff; --ink: #1b1d21; --soft: #686d76;
  --rule: #e4e4de; --c0: #2f5fd0; --c1: #d9772b; --c2: #7b5bb5; --good: #1f8a5b;
  --good-page: #e6f4ec; --bad: #c23b3b; --bad-page: #fbeaea; }
@media (prefers-color-scheme: dark) { :root { --page: #121417; --card: #1a1d22; --ink: #e7e8ea;
  --soft: #989ea8; --rule: #2b2f36; --c0: #7ea6ff; --c1: #f0a35e; --c2: #b79cf0;
  --good: #5cc796; --good-page: #16291f; --bad: #f08080; --bad-page: #321c1d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 32px; line-height: 1.2; letter-spacing: -0.02em; margin: 2px 0 22px; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
.brand { color: var(--soft); margin: 0; font-size: 13px; }
.lead { color: var(--soft); margin: -8px 0 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; }
.tile, figure, article, details { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.tile { padding: 14px 18px; display: flex; flex-direction: column; }
.tile b { font-size: 23px; letter-spacing: -0.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { font-size: 13px; }
.tile i { font-size: 13px; font-style: normal; color: var(--soft); }
.grid2, .grid3 { display: grid; gap: 14px; align-items: start; }
.grid2 { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.grid3 { grid-template-columns: repeat(auto-fill, minmax(min(370px, 100%), 1fr)); }
.grid2 > *, .grid3 > * { min-width: 0; }
.wide, .grid3 { align-items: stretch; }
figure { margin: 0; padding: 14px 16px 10px; container-type: inline-size; }
figure.center { display: flex; flex-direction: column; justify-content: center; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 12px;
  align-items: baseline; margin-bottom: 4px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 14px; }
.key { font-size: 13px; color: var(--soft); white-space: nowrap; }
.key b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 3px;
  margin-right: 6px; background: var(--c0); }
.k1::before { background: var(--c1); } .k2::before { background: var(--c2); }
.note { color: var(--soft); font-size: 12.5px; margin: 2px 0 2px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }  /* Content wider than a small screen scrolls in its own frame. */
.scroll > svg { min-width: 1080px; } .scroll > svg.bars { min-width: 510px; }
.scroll > .ranks { min-width: 460px; }
figcaption + svg { overflow: visible; }  /* The longest numbers of the axis. */
.picture { margin: 0 auto; border-radius: 6px; background: #ffffff; }
.grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
/* Pictures shrink with their card, and their numbers must not. */
@container (max-width: 400px) { .tick { font-size: 13px; } }
@container (max-width: 340px) { .tick { font-size: 15px; } }
.scroll .tick { font-size: 11px; }
.line, .raw { fill: none; stroke: var(--c0); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
.raw { stroke-width: 1; opacity: 0.32; }
.line.c1, .raw.c1 { stroke: var(--c1); } .line.c2, .raw.c2 { stroke: var(--c2); }
.dot, .bar { fill: var(--c0); } .dot.c1, .bar.c1 { fill: var(--c1); }
.dot.c2 { fill: var(--c2); }
.bar { opacity: 0.55; } .bar:hover { opacity: 0.85; }
.mean { stroke: var(--c0); stroke-width: 1.5; stroke-dasharray: 4 3; }
.mean.c1 { stroke: var(--c1); }
.hit { fill: var(--c0); opacity: 0; } .hit.c1 { fill: var(--c1); } .hit.c2 { fill: var(--c2); }
.hit:hover { opacity: 1; }
.tail { fill: var(--soft); opacity: 0.13; } .probe { fill: var(--ink); }
.banner { border-radius: 10px; padding: 13px 18px; margin-bottom: 14px; }
.banner.good { background: var(--good-page); } .banner.bad { background: var(--bad-page); }
.banner.good b { color: var(--good); } .banner.bad b { color: var(--bad); }
article { margin-top: 12px; padding: 12px 16px 14px; border-left: 4px solid var(--bad); }
article.good { border-left-color: var(--good); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 13px; align-items: baseline; }
.facts b { color: var(--bad); } article.good .facts b { color: var(--good); }
.facts span { color: var(--soft); font-variant-numeric: tabular-nums; }
.facts .answer { color: var(--ink); border: 1px solid var(--rule); border-radius: 5px;
  padding: 0 7px; max-width: 16em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
pre { margin: 10px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 17em;
  overflow-y: auto; font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
.drafts span { border-radius: 3px; padding: 0 1px; margin-right: 1px; }
.drafts .held { color: var(--good); background: var(--good-page); }
.drafts .missed { color: var(--bad); background: var(--bad-page); text-decoration: line-through; }
.drafts .own { color: var(--c0); font-weight: 600; } .drafts .shared { visibility: hidden; }
.step { display: grid; grid-template-columns: 3em 1fr; padding: 5px 0; overflow-x: auto;
  border-top: 1px solid var(--rule); } .step pre { margin: 0; white-space: pre; max-height: none; }
.step i { color: var(--soft); font-size: 12.5px; }
pre.prompt { color: var(--soft); border-bottom: 1px solid var(--rule); padding-bottom: 10px; }
details { padding: 12px 18px; } .grid2 + details { margin-top: 14px; }
summary { font-weight: 600; font-size: 14px; cursor: pointer; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 8px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 0; border-top: 1px solid var(--rule); text-align: left; font-weight: 400;
  vertical-align: top; }
tr:first-child > * { border-top: 0; }
.pairs th { color: var(--soft); padding-right: 18px; white-space: nowrap; }
.pairs td { text-align: right; overflow-wrap: anywhere; }
.numbers th { color: var(--soft); }
.numbers th, .numbers td { text-align: right; padding-left: 12px; white-space: nowrap; }
.numbers td:first-child { text-align: left; padding-left: 0; }
.ranks th { color: var(--soft); } .ranks th, .ranks td { padding-right: 14px; }
.ranks td { overflow-wrap: anywhere; }
.ranks td:nth-child(odd) { white-space: nowrap; }  /* Numbers, dates and verdicts stay whole. */
.ranks .ours td { font-weight: 650; color: var(--c0); }
@media (max-width: 620px) { main { padding: 24px 12px 48px; } .pairs th { white-space: normal;
  overflow-wrap: anywhere; } .tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
  .tile b { font-size: 17px; white-space: normal; }  /* Wraps between numbers, never in one. */ }
@media print { body { background: none; } pre { max-height: none; } }
"""


def html_page(title: str, sections: Sequence[str], *, has_images: bool = False) -> str:
  """Returns a complete HTML page.

  Args:
    title: title of the browser window.
    sections: HTML sections in order; empty ones are dropped.
    has_images: whether to allow images embedded as data URLs.
  """
  body = "\n".join(f"<section>{text}</section>" for text in sections if text)
  images = " img-src data:;" if has_images else ""
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # If unescaped text ever gets through, the browser still runs and loads nothing.
    f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\';{images}'
    " style-src 'unsafe-inline'\">"
    f"<title>{escape(title)} · SeerJAX</title><style>{STYLE}</style></head>\n"
    f"<body><main>\n{body}\n</main></body></html>\n"
  )
