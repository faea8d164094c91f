"""Reads the tags and texts of a page, as a browser would."""

from __future__ import annotations

import html.parser


class Tags(html.parser.HTMLParser):
  """Collects the tags of a page with their attributes, and its text."""

  def __init__(self, page: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.text = ""
    self.feed(page)

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data: str) -> None:
    self.text += data
