"""A griffe extension, for mkdocs.yml: gives each field and each constant its text.

    class's "Attributes:" section --> the fields themselves, with their types and defaults
    comment above a constant      --> the constant

A record's fields thus appear once on a page, each with an anchor.
"""

from __future__ import annotations

from typing import Any

import griffe


class FieldsAndConstants(griffe.Extension):
  """Hands texts that stand elsewhere to the attributes that they are about."""

  def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
    """Moves the items of an "Attributes:" section to the class's own fields of these names."""
    if cls.docstring is None:
      return
    sections = cls.docstring.parse("google")
    for section in sections:
      if not isinstance(section, griffe.DocstringSectionAttributes):
        continue
      left = []
      for item in section.value:
        field = cls.members.get(item.name)
        if isinstance(field, griffe.Attribute) and field.docstring is None:
          field.docstring = griffe.Docstring(item.description, parent=field)
        else:
          left.append(item)
      section.value = left
    kept = [section for section in sections if section.value]
    vars(cls.docstring)["parsed"] = kept  # The rendered tree: a cached property.

  def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
    """Gives constants the comment above them, or behind them; their value alone may suffice."""
    lines = mod.lines
    for constant in mod.members.values():
      if not isinstance(constant, griffe.Attribute) or constant.docstring or not constant.lineno:
        continue
      first = constant.lineno - 1
      above: list[str] = []
      while first and lines[first - 1].startswith("#"):
        first -= 1
        above.insert(0, lines[first].lstrip("# "))
      behind = lines[constant.lineno - 1].partition("  # ")[2]
      text = " ".join(above) or behind
      constant.docstring = griffe.Docstring(text, parent=constant)
