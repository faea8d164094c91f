"""Output of `experiments.serving`: cells, tables, targets, and a picture."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments.serving_peers import PEERS

CLIENTS = (1, 8, 64)
# (peer, peer to compare with, number of clients, minimum ratio).
AIMS = (
  ("ours", "engine", 64, 0.9),
  ("ours", "llama-cpp", 8, 1.0),
  ("ours", "llama-cpp", 64, 1.0),
)


class Timed(NamedTuple):
  """A cell of part (b)."""

  repetition: int
  peer: str
  clients: int
  is_streamed: bool


class Same(NamedTuple):
  """A cell of part (a)."""

  peer: str
  temperature: float


class Summary(NamedTuple):
  """Results of a peer with a number of clients, over all repetitions.

  Attributes:
    rate: median tokens/s.
    lowest: minimum over repetitions.
    highest: maximum over repetitions.
    by_cpu: median tokens per second of its own CPU time.
    first: seconds to the first token, median and 95th percentile; None if it is not observable.
    whole: seconds to the whole completion, median and 95th percentile.
  """

  rate: float
  lowest: float
  highest: float
  by_cpu: float
  first: tuple[float, float] | None
  whole: tuple[float, float]


def summary(
  found: dict[Same | Timed, dict[str, Any]], name: str, clients: int, is_streamed: bool
) -> Summary | None:
  """Returns the results of a peer; None if it was not measured."""
  records = [
    record
    for cell, record in found.items()
    if isinstance(cell, Timed) and cell[1:] == (name, clients, is_streamed)
  ]
  if not records:
    return None
  rates = [record["tokens"] / record["seconds"] for record in records]
  middle = lambda field: tuple(np.median([record[field] for record in records], axis=0).tolist())
  return Summary(
    rate=float(np.median(rates)),
    lowest=min(rates),
    highest=max(rates),
    by_cpu=float(np.median([one["tokens"] / one["cpu_seconds"] for one in records])),
    first=middle("first") if records[0]["first"] is not None else None,
    whole=middle("whole"),
  )


def same_table(found: dict[Same | Timed, dict[str, Any]], missing: dict[str, str]) -> str:
  """Returns part (a) as Markdown."""
  lines = [
    "| server | temperature | requests | among others | distinct responses | most common | distinct"
    " bit patterns of log-probabilities |",
    "|---|---|---|---|---|---|---|",
  ]
  for cell, record in found.items():
    if isinstance(cell, Same):
      patterns = "it has none" if record["patterns"] is None else f"{record['patterns']:,}"
      lines.append(
        f"| {PEERS[cell.peer].label} | {cell.temperature:g} | {record['asked']:,} |"
        f" {record['others']:,} | {record['answers']:,} | {record['commonest']:,} | {patterns} |"
      )
  for name, why in missing.items():
    lines.append(f"| {PEERS[name].label} | not installed here: {why} | | | | | |")
  return "\n".join(lines)


def timed_table(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns part (b) as Markdown."""
  lines = [
    "| clients | who | responses | tokens/s, median (range) | times the engine alone | tokens per"
    " CPU second | first token, ms, median (95 %) | whole response, ms, median (95 %) |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for clients in CLIENTS:
    alone = summary(found, "engine", clients, False)
    for name, peer in PEERS.items():
      for is_streamed in (False, True):
        one = summary(found, name, clients, is_streamed)
        if one is None:
          continue
        ratio = f"{one.rate / alone.rate:.2f}" if alone else "not measured"
        how = "no server" if peer.kind == "engine" else "streamed" if is_streamed else "whole"
        lines.append(
          f"| {clients} | {peer.label} | {how} | {one.rate:,.0f} ({one.lowest:,.0f} to"
          f" {one.highest:,.0f}) | {ratio} | {one.by_cpu:,.0f} | {_pair(one.first)} |"
          f" {_pair(one.whole)} |"
        )
  return "\n".join(lines)


def _pair(seconds: tuple[float, float] | None) -> str:
  if seconds is None:
    return ""
  return f"{seconds[0] * 1e3:,.0f} ({seconds[1] * 1e3:,.0f})"


def aims(found: dict[Same | Timed, dict[str, Any]]) -> str:
  """Returns the targets as Markdown, and which of them are met."""
  lines = [
    "| tokens/s of our server, whole responses, times those of | clients | aimed at | per wall"
    " second | per second of their CPU | holds (wall) |",
    "|---|---|---|---|---|---|",
  ]
  for name, other, clients, aim in AIMS:
    label = PEERS[other].label
    one, two = (summary(found, who, clients, False) for who in (name, other))
    if one is None or two is None:
      lines.append(f"| {label} | {clients} | {aim:g} | not measured | | |")
      continue
    ratio = one.rate / two.rate
    holds = "yes" if ratio >= aim else "**no**"
    by_cpu = one.by_cpu / two.by_cpu
    lines.append(f"| {label} | {clients} | {aim:g} | {ratio:.2f} | {by_cpu:.2f} | {holds} |")
  return "\n".join(lines)


def picture(found: dict[Same | Timed, dict[str, Any]], path: pathlib.Path) -> None:
  """Draws tokens/s by peer and number of clients."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  rows = [
    (clients, name, is_streamed, one)
    for clients in CLIENTS
    for name in PEERS
    for is_streamed in (False, True)
    if (one := summary(found, name, clients, is_streamed)) is not None
  ]
  figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.3 * len(rows)))
  colors = {"ours": "tab:blue", "engine": "tab:green"}
  labels = []
  for place, (clients, name, is_streamed, one) in enumerate(reversed(rows)):
    color = colors.get(PEERS[name].kind, "tab:gray")
    axes.barh(place, one.rate, color=color, alpha=0.5 if is_streamed else 1.0)
    axes.text(one.rate, place, f" {one.rate:,.0f}", va="center", fontsize=8)
    labels.append(f"{clients}: {PEERS[name].label}{', streamed' if is_streamed else ''}")
  axes.set_yticks(range(len(rows)), labels, fontsize=8)
  axes.set_xlabel("tokens/s by number of clients")
  axes.margins(x=0.15)
  figure.tight_layout()
  figure.savefig(path, dpi=90)
  pyplot.close(figure)
